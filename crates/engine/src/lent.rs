//! Data that its owner lends to be sent from where it is.

use crate::io::OpenFile;
use crate::pipes::Piped;
use smallvec::SmallVec;
use std::any::Any;
use std::sync::Arc;

/// Memory or a file of its owner's, from which data can be sent without a copy.
pub enum Lent {
    /// Bytes in memory that others may be writing to, in pieces.
    Memory(SmallVec<[Memory; 1]>),
    /// A range of a file whose pages are cached.
    File {
        /// The file.
        file: Arc<OpenFile>,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: usize,
    },
    /// Pages of a file that have been taken.
    Piped(Piped),
}

impl Lent {
    /// Bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        match self {
            Lent::Memory(pieces) => pieces.iter().map(Memory::len).sum(),
            Lent::File { len, .. } => *len,
            Lent::Piped(piped) => piped.len(),
        }
    }

    /// Cuts it: what is returned begins at byte `at`.
    ///
    /// # Panics
    /// If `at` is outside, or it is [`Lent::Piped`], which cannot be cut.
    pub fn split_off(&mut self, at: usize) -> Lent {
        let rest = self.len().checked_sub(at).expect("what is lent is cut inside");
        match self {
            Lent::Memory(pieces) => {
                let (mut kept, mut later, mut left) = (SmallVec::new(), SmallVec::new(), at);
                for mut piece in pieces.drain(..) {
                    if left < piece.len {
                        later.push(piece.split_off(left));
                    }
                    left -= piece.len.min(left);
                    if piece.len > 0 {
                        kept.push(piece);
                    }
                }
                *pieces = kept;
                Lent::Memory(later)
            }
            Lent::Piped(_) => panic!("what is in a pipe is not cut"),
            Lent::File { file, offset, len } => {
                *len = at;
                Lent::File { file: Arc::clone(file), offset: *offset + at as u64, len: rest }
            }
        }
    }
}

/// Bytes in their owner's memory.
pub struct Memory {
    ptr: *const u8,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

impl Memory {
    /// Bytes that others may be writing to.
    ///
    /// # Safety
    /// They stay allocated, and readable, for as long as `owner` lives.
    pub unsafe fn new(ptr: *const u8, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Memory {
        Memory { ptr, len, owner }
    }

    /// Cuts it: what is returned begins at byte `at`, which is inside.
    fn split_off(&mut self, at: usize) -> Memory {
        let rest = Memory { ptr: self.ptr.wrapping_add(at), len: self.len - at, owner: Arc::clone(&self.owner) };
        self.len = at;
        rest
    }

    /// The first byte. Valid while this lives; there is no slice because others may be writing.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}
