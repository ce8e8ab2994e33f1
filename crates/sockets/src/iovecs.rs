//! A position in a list of pieces of memory, as `readv(2)` and `writev(2)` take it.

/// Pieces of memory, and how far one has come.
#[derive(Clone, Copy)]
pub struct Pieces<'a> {
    pieces: &'a [libc::iovec],
    /// Bytes of the first piece that are done with.
    skipped: usize,
    left: usize,
}

impl<'a> Pieces<'a> {
    /// All of `pieces`. `None` if they have more bytes than a system call moves (`SSIZE_MAX`).
    ///
    /// # Safety
    /// Each piece must describe memory that may be used, until this is done with, in the way of the methods that take it.
    pub unsafe fn new(pieces: &'a [libc::iovec]) -> Option<Pieces<'a>> {
        let left = pieces.iter().try_fold(0usize, |sum, piece| sum.checked_add(piece.iov_len))?;
        (left <= isize::MAX as usize).then_some(Pieces { pieces, skipped: 0, left })
    }

    /// Bytes that are left.
    pub fn left(&self) -> usize {
        self.left
    }

    /// What is left of the first piece that has something left.
    pub fn first(&mut self) -> Option<(*mut u8, usize)> {
        loop {
            let piece = self.pieces.first()?;
            if self.skipped < piece.iov_len {
                return Some((piece.iov_base.cast::<u8>().wrapping_add(self.skipped), piece.iov_len - self.skipped));
            }
            self.pieces = &self.pieces[1..];
            self.skipped = 0;
        }
    }

    /// Goes on by `len` bytes, of which there must be as many.
    pub fn advance(&mut self, mut len: usize) {
        self.left -= len;
        while len > 0 {
            let Some((_, first)) = self.first() else { return };
            let step = first.min(len);
            self.skipped += step;
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
