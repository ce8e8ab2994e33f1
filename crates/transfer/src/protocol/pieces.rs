//! What of a large file must travel.

/// `from` without `less`; both in order and disjoint. `from` has starts and ends, `less` offsets
/// and lengths.
pub(crate) fn subtract(from: Vec<(u64, u64)>, less: &[(u64, u64)]) -> Vec<(u64, u64)> {
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

/// Cuts an extent into pieces (offset and length) that end at multiples of `block_len`, so that
/// resumed extents fall in step.
pub(crate) fn cut((from, to): (u64, u64), block_len: u32) -> impl Iterator<Item = (u64, u32)> {
    let block_len = u64::from(block_len);
    let mut at = from;
    std::iter::from_fn(move || {
        (at < to).then(|| {
            let end = to.min((at / block_len + 1) * block_len);
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
        assert_eq!(subtract(whole.clone(), &[]), whole);
        assert_eq!(subtract(whole.clone(), &[(0, 100)]), vec![]);
        assert_eq!(subtract(whole.clone(), &[(0, 10), (20, 30)]), vec![(10, 20), (50, 100)]);
        assert_eq!(subtract(vec![(0, 10), (50, 60)], &[(5, 50)]), vec![(0, 5), (55, 60)]);
        assert_eq!(subtract(vec![(10, 20)], &[(0, u64::MAX)]), vec![]);
    }

    #[test]
    fn pieces_end_at_multiples_of_the_block() {
        assert_eq!(cut((5, 25), 10).collect::<Vec<_>>(), [(5, 5), (10, 10), (20, 5)]);
        assert_eq!(cut((10, 20), 10).collect::<Vec<_>>(), [(10, 10)]);
        assert_eq!(cut((7, 7), 10).count(), 0);
    }
}
