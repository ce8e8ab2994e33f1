//! Splits requests at chunk boundaries.

/// The parts of a range, none of which crosses a multiple of `chunk`: offsets and lengths.
pub(crate) fn chunk_ranges(at: u64, len: u64, chunk: impl Into<u64>) -> impl Iterator<Item = (u64, usize)> {
    let (mut position, end, chunk) = (at, at + len, chunk.into());
    std::iter::from_fn(move || {
        let start = position;
        position = ((start / chunk + 1) * chunk).min(end);
        (start < end).then(|| (start, (position - start) as usize))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_the_range_and_none_crosses_a_chunk(at in 0u64..1 << 40, len in 0u64..1 << 20, exponent in 9u32..22) {
            let chunk = 1u64 << exponent;
            let mut next = at;
            for (start, piece) in chunk_ranges(at, len, chunk) {
                prop_assert_eq!(start, next);
                prop_assert!(piece > 0 && start / chunk == (start + piece as u64 - 1) / chunk);
                next += piece as u64;
            }
            prop_assert_eq!(next, at + len);
        }
    }

    #[test]
    fn pieces_end_at_multiples_of_the_chunk() {
        let cut: Vec<_> = chunk_ranges(1000, 10_000, 4096u32).collect();
        assert_eq!(cut, [(1000, 3096), (4096, 4096), (8192, 2808)]);
        assert_eq!(chunk_ranges(0, 4096, 4096u32).collect::<Vec<_>>(), [(0, 4096)]);
        assert_eq!(chunk_ranges(7, 0, 4096u32).count(), 0);
    }
}
