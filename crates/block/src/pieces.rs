//! How requests are cut.

/// A range cut at multiples of the chunk: offsets and lengths.
pub(crate) fn pieces(at: u64, len: u64, chunk: impl Into<u64>) -> impl Iterator<Item = (u64, usize)> {
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

    #[test]
    fn pieces_end_at_multiples_of_the_chunk() {
        let cut: Vec<_> = pieces(1000, 10_000, 4096u32).collect();
        assert_eq!(cut, [(1000, 3096), (4096, 4096), (8192, 2808)]);
        assert_eq!(pieces(0, 4096, 4096u32).collect::<Vec<_>>(), [(0, 4096)]);
        assert_eq!(pieces(7, 0, 4096u32).count(), 0);
    }
}
