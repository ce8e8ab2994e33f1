//! What of a large file must travel.

/// `from` without `less`; both in order and disjoint. `from` has starts and ends, `less` offsets
/// and lengths.
pub(crate) fn subtract_extents(from: Vec<(u64, u64)>, less: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut out = Vec::new();
    for (mut start, end) in from {
        for &(offset, len) in less {
            let stop = offset.saturating_add(len);
            if stop <= start || offset >= end {
                continue;
            }
            if offset > start {
                out.push((start, offset));
            }
            start = stop;
        }
        if start < end {
            out.push((start, end));
        }
    }
    out
}

/// Smallest piece that tapering makes, and what longer ones are multiples of.
const TAPERED_MIN: u64 = 64 << 10;
/// Tapering makes no piece longer than this part of what is left.
const TAPER_DIVISOR: u64 = 16;

/// Cuts an extent into pieces (offset and length) none of which crosses a multiple of `block_len`,
/// so that resumed extents fall in step, or is longer than `most` says when its turn comes.
///
/// With `taper` the pieces become smaller towards the end, so that channels of unequal speed are
/// done at nearly the same time.
pub(crate) fn split_extent(
    (from, to): (u64, u64),
    block_len: u32,
    most: impl Fn() -> u32,
    taper: bool,
) -> impl Iterator<Item = (u64, u32)> {
    let block_len = u64::from(block_len);
    let mut at = from;
    std::iter::from_fn(move || {
        (at < to).then(|| {
            let mut end = to.min((at / block_len + 1) * block_len);
            let mut most = u64::from(most());
            if taper {
                most = most.min((to - at) / TAPER_DIVISOR).next_multiple_of(TAPERED_MIN).max(TAPERED_MIN);
            }
            if most < block_len {
                end = end.min(at / TAPERED_MIN * TAPERED_MIN + most);
            }
            let piece = (at, (end - at) as u32);
            at = end;
            piece
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_already_does_not_travel() {
        let whole = vec![(0, 100)];
        assert_eq!(subtract_extents(whole.clone(), &[]), whole);
        assert_eq!(subtract_extents(whole.clone(), &[(0, 100)]), vec![]);
        assert_eq!(subtract_extents(whole.clone(), &[(0, 10), (20, 30)]), vec![(10, 20), (50, 100)]);
        assert_eq!(subtract_extents(vec![(0, 10), (50, 60)], &[(5, 50)]), vec![(0, 5), (55, 60)]);
        assert_eq!(subtract_extents(vec![(10, 20)], &[(0, u64::MAX)]), vec![]);
    }

    #[test]
    fn pieces_end_at_multiples_of_the_block() {
        assert_eq!(split_extent((5, 25), 10, || 10, false).collect::<Vec<_>>(), [(5, 5), (10, 10), (20, 5)]);
        assert_eq!(split_extent((10, 20), 10, || 10, false).collect::<Vec<_>>(), [(10, 10)]);
        assert_eq!(split_extent((7, 7), 10, || 10, false).count(), 0);
    }

    #[test]
    fn tapered_pieces_cover_all_and_end_small() {
        const MIB: u64 = 1 << 20;
        let extents = [(0, 64 * MIB), (5, 40 * MIB + 7), (MIB - 1, MIB + 1), (3, 4)];
        for ((from, to), most) in extents.into_iter().flat_map(|e| [(e, 1 << 20), (e, 256 << 10)]) {
            let pieces: Vec<_> = split_extent((from, to), 1 << 20, || most, true).collect();
            let mut at = from;
            for &(offset, len) in &pieces {
                assert!(
                    offset == at && (1..=most).contains(&len) && offset / MIB == (offset + u64::from(len) - 1) / MIB
                );
                assert!(offset == from || offset.is_multiple_of(TAPERED_MIN), "direct I/O wants whole pages");
                at += u64::from(len);
            }
            assert_eq!(at, to);
            assert!(u64::from(pieces.last().unwrap().1) <= TAPERED_MIN);
        }
        assert_eq!(split_extent((0, 64 * MIB), 1 << 20, || 1 << 20, true).next(), Some((0, 1 << 20)));
    }
}
