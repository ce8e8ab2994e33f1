//! A position in a list of pieces of memory, as `readv(2)` and `writev(2)` take it.

/// Bytes of one call of `read`, `write` and their like: Linux's `MAX_RW_COUNT`.
pub const CALL_MAX: usize = 0x7fff_f000;

/// Pieces of memory, and how far one has come.
#[derive(Clone, Copy)]
pub struct Pieces<'a> {
    pieces: &'a [libc::iovec],
    /// Bytes of the first piece that are done with.
    skipped: usize,
    left: usize,
}

impl<'a> Pieces<'a> {
    /// All of `pieces`, up to as many bytes as a system call moves (`MAX_RW_COUNT`, 2 GiB less a page). `None` if they have more
    /// than it takes (`SSIZE_MAX`).
    ///
    /// # Safety
    /// Each piece must describe memory that may be used, until this is done with, in the way of the methods that take it.
    pub unsafe fn new(pieces: &'a [libc::iovec]) -> Option<Pieces<'a>> {
        let left = pieces.iter().try_fold(0usize, |sum, piece| sum.checked_add(piece.iov_len))?;
        (left <= isize::MAX as usize).then_some(Pieces { pieces, skipped: 0, left: left.min(CALL_MAX) })
    }

    /// Bytes that are left.
    pub fn left(&self) -> usize {
        self.left
    }

    /// What is left of the first piece that has something left.
    pub fn first(&mut self) -> Option<(*mut u8, usize)> {
        while self.left > 0 {
            let piece = self.pieces.first()?;
            if self.skipped < piece.iov_len {
                let len = (piece.iov_len - self.skipped).min(self.left);
                return Some((piece.iov_base.cast::<u8>().wrapping_add(self.skipped), len));
            }
            self.pieces = &self.pieces[1..];
            self.skipped = 0;
        }
        None
    }

    /// The first `max` bytes of what is left.
    pub fn limited(&self, max: usize) -> Pieces<'a> {
        Pieces { left: self.left.min(max), ..*self }
    }

    /// Goes on by `len` bytes, of which there must be as many.
    pub fn advance(&mut self, mut len: usize) {
        while len > 0 {
            let Some((_, first)) = self.first() else { return };
            let step = first.min(len);
            self.skipped += step;
            self.left -= step;
            len -= step;
        }
    }

    /// Writes what is left, up to `max` bytes, to `out` as pieces, as many as there is room for; the number of them.
    pub fn fill(&self, max: usize, out: &mut [libc::iovec]) -> usize {
        let (mut rest, mut max, mut count) = (*self, max.min(self.left), 0);
        while count < out.len() && max > 0 {
            let Some((base, len)) = rest.first() else { break };
            let len = len.min(max);
            out[count] = libc::iovec { iov_base: base.cast(), iov_len: len };
            count += 1;
            max -= len;
            rest.advance(len);
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iov(bytes: &mut [u8]) -> libc::iovec {
        libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
    }

    #[test]
    fn a_call_moves_no_more_than_the_kernels() {
        let piece = |iov_len| libc::iovec { iov_base: std::ptr::null_mut(), iov_len };
        // SAFETY: nothing of it is used.
        let left = |list: &[libc::iovec]| unsafe { Pieces::new(list) }.map(|pieces| pieces.left());
        assert_eq!(left(&[piece(1 << 30), piece(3 << 30)]), Some(CALL_MAX));
        assert_eq!(left(&[piece(CALL_MAX)]), Some(CALL_MAX));
        assert_eq!(left(&[piece(isize::MAX as usize), piece(1)]), None);
    }

    #[test]
    fn pieces_are_gone_through_once_however_they_are_cut() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..300 {
            let mut memory: Vec<Vec<u8>> = (0..random.usize(0..6)).map(|_| vec![0; random.usize(0..9)]).collect();
            let list: Vec<libc::iovec> = memory.iter_mut().map(|piece| iov(piece)).collect();
            let all: usize = list.iter().map(|piece| piece.iov_len).sum();
            // SAFETY: vectors of ours.
            let mut pieces = unsafe { Pieces::new(&list) }.unwrap();
            let limit = random.usize(0..30);
            let limited = pieces.limited(limit);
            assert_eq!(limited.left(), all.min(limit));
            let mut out = [iov(&mut []); 8];
            let count = limited.fill(usize::MAX, &mut out);
            assert_eq!(out[..count].iter().map(|piece| piece.iov_len).sum::<usize>(), all.min(limit));
            let mut gone = 0;
            while let Some((base, len)) = pieces.first() {
                assert!(len > 0);
                let step = random.usize(1..=len);
                // SAFETY: inside one of the vectors.
                unsafe { (0..step).for_each(|i| *base.add(i) += 1) };
                pieces.advance(step);
                gone += step;
            }
            assert_eq!((gone, pieces.left()), (all, 0));
            assert!(memory.iter().flatten().all(|byte| *byte == 1));
        }
    }

    #[test]
    fn more_than_can_be_is_refused() {
        let huge = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: usize::MAX / 2 };
        let two = [huge, huge];
        // SAFETY: never used.
        assert!(unsafe { Pieces::new(&two[..1]) }.is_some());
        // SAFETY: never used.
        assert!(unsafe { Pieces::new(&two) }.is_none());
    }
}
