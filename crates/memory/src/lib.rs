//! Page-aligned memory for blocks: mapped, of huge pages where it is large, and shared with devices and peers.

pub mod file;
pub mod sealed;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::ptr::NonNull;

const PAGE: usize = 4096;

/// Memory that cannot be mapped.
#[derive(Debug, thiserror::Error)]
#[error("cannot map memory: {0}")]
pub struct MapError(#[source] io::Error);

impl From<MapError> for io::Error {
    fn from(error: MapError) -> io::Error {
        io::Error::new(error.0.kind(), error.to_string())
    }
}

fn invalid(why: &'static str) -> MapError {
    MapError(io::Error::new(io::ErrorKind::InvalidInput, why))
}

/// Page-aligned memory that can be registered.
///
/// The contents are shared with the device, and through it with peers, so there are no safe
/// slices of it: [`Buffer::read`] and [`Buffer::write`] copy, and what they see while a peer or a
/// posted request changes the same bytes is unspecified.
pub struct Buffer {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer is plain memory without thread affinity; all access is by raw copies.
unsafe impl Send for Buffer {}
// SAFETY: as above; no method hands out a reference to the contents.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Zeroed memory of `len` bytes, rounded up to whole pages. From 2 MiB up it is made of huge
    /// pages: reserved ones where the administrator has set enough aside, transparent ones
    /// where the kernel finds them.
    ///
    /// # Errors
    /// If the system has no memory to map, or the length is zero.
    pub fn new(len: usize) -> Result<Buffer, MapError> {
        const HUGE: usize = 2 << 20;
        if len >= HUGE
            && let Ok(buffer) = Buffer::map(len.next_multiple_of(HUGE), MapFlags::PRIVATE | MapFlags::HUGETLB)
        {
            return Ok(buffer);
        }
        let buffer = Buffer::map(len.next_multiple_of(PAGE), MapFlags::PRIVATE)?;
        if len >= HUGE {
            buffer.advise(Advice::LinuxHugepage);
        }
        Ok(buffer)
    }

    /// As [`Buffer::new`], of small pages: for memory of which little may ever be touched.
    ///
    /// # Errors
    /// As [`Buffer::new`].
    pub fn sparse(len: usize) -> Result<Buffer, MapError> {
        let buffer = Buffer::map(len.next_multiple_of(PAGE), MapFlags::PRIVATE)?;
        buffer.advise(Advice::LinuxNoHugepage);
        Ok(buffer)
    }

    /// Memory that is a part of a file: changes are the file's, and of whoever else has it mapped. The file must keep its
    /// length for as long, and be one that has room for all of it: memory that turns out not to be there ends the
    /// process.
    ///
    /// # Errors
    /// If it cannot be mapped, the length is zero, or the offset is no multiple of a page.
    pub fn of_file(file: impl std::os::fd::AsFd, offset: u64, len: usize) -> Result<Buffer, MapError> {
        if len == 0 || !offset.is_multiple_of(PAGE as u64) {
            let why = "a part of a file to map is of no bytes, or begins inside a page";
            return Err(invalid(why));
        }
        let len = len.next_multiple_of(PAGE);
        let (all, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a fresh mapping at an address of the kernel's choice. Whoever else changes the file changes memory that
        // is shared with devices and peers anyway, and is only copied to and from.
        let ptr = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, all, flags, file, offset) }
            .map_err(|e| MapError(e.into()))?;
        Ok(Buffer { ptr: NonNull::new(ptr.cast()).expect("mmap never returns null"), len })
    }

    fn advise(&self, advice: Advice) {
        // SAFETY: advice on our own mapping that changes no contents; refusal is harmless.
        let _ = unsafe { rustix::mm::madvise(self.as_ptr().cast(), self.len, advice) };
    }

    fn map(len: usize, flags: MapFlags) -> Result<Buffer, MapError> {
        if len == 0 {
            return Err(invalid("a buffer of no bytes"));
        }
        // SAFETY: a fresh private anonymous mapping at an address of the kernel's choice aliases
        // nothing.
        let ptr =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags) }
                .map_err(|e| MapError(e.into()))?;
        Ok(Buffer { ptr: NonNull::new(ptr.cast()).expect("mmap never returns null"), len })
    }

    /// Bytes, a multiple of the page size.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Start of the memory. Valid while the buffer, or a region made of it, lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Copies `out.len()` bytes from `offset`.
    ///
    /// # Panics
    /// If the range is outside the buffer.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        assert!(offset <= self.len && out.len() <= self.len - offset, "read outside the buffer");
        // SAFETY: the range was checked; `out` is ours alone and cannot overlap the mapping
        // because no reference into the mapping is ever made.
        unsafe { shared::load(self.ptr.as_ptr().add(offset), out) }
    }

    /// Copies `data` to `offset`.
    ///
    /// # Panics
    /// If the range is outside the buffer.
    pub fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset <= self.len && data.len() <= self.len - offset, "write outside the buffer");
        // SAFETY: as in `read`.
        unsafe { shared::store(self.ptr.as_ptr().add(offset), data) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and regions hold the buffer alive, so nobody uses it now.
        unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) }.expect("unmapping our own mapping");
    }
}

/// Copies to and from memory that other threads, the kernel and peers change at the same time.
///
/// By relaxed atomics, of words where the memory is aligned: whoever races gets some mixture of old and new
/// bytes, as on every RDMA device, and never undefined behaviour.
pub mod shared {
    use std::mem::MaybeUninit;
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

    const WORD: usize = 8;

    /// Copies to ordinary memory.
    ///
    /// # Safety
    /// `from..from + to.len()` must be mapped, and apart from `to`.
    pub unsafe fn load(from: *const u8, to: &mut [u8]) {
        // SAFETY: what is initialised may be overwritten, with what is as well.
        let to = unsafe { &mut *(std::ptr::from_mut(to) as *mut [MaybeUninit<u8>]) };
        // SAFETY: the caller's promise.
        unsafe { fill(from, to) };
    }

    /// Initialises all of `to`.
    ///
    /// # Safety
    /// As for [`load`].
    unsafe fn fill(from: *const u8, to: &mut [MaybeUninit<u8>]) {
        let (first, rest) = to.split_at_mut(until_aligned(from).min(to.len()));
        let (words, last) = rest.as_chunks_mut::<WORD>();
        let mut from = from.cast_mut();
        // SAFETY: mapped, by the caller's promise.
        let byte = |ptr: *mut u8| MaybeUninit::new(unsafe { AtomicU8::from_ptr(ptr) }.load(Relaxed));
        for to in first {
            *to = byte(from);
            from = from.wrapping_add(1);
        }
        for to in words {
            // SAFETY: mapped, by the caller's promise, and aligned.
            let word = unsafe { AtomicU64::from_ptr(from.cast()) }.load(Relaxed);
            *to = word.to_ne_bytes().map(MaybeUninit::new);
            from = from.wrapping_add(WORD);
        }
        for to in last {
            *to = byte(from);
            from = from.wrapping_add(1);
        }
    }

    /// Copies from ordinary memory.
    ///
    /// # Safety
    /// `to..to + from.len()` must be mapped writable, and apart from `from`.
    pub unsafe fn store(to: *mut u8, from: &[u8]) {
        let (first, rest) = from.split_at(until_aligned(to).min(from.len()));
        let (words, last) = rest.as_chunks::<WORD>();
        let mut to = to;
        // SAFETY: mapped, by the caller's promise.
        let set = |ptr: *mut u8, byte| unsafe { AtomicU8::from_ptr(ptr) }.store(byte, Relaxed);
        for &byte in first {
            set(to, byte);
            to = to.wrapping_add(1);
        }
        for &word in words {
            // SAFETY: mapped, by the caller's promise, and aligned.
            unsafe { AtomicU64::from_ptr(to.cast()) }.store(u64::from_ne_bytes(word), Relaxed);
            to = to.wrapping_add(WORD);
        }
        for &byte in last {
            set(to, byte);
            to = to.wrapping_add(1);
        }
    }

    /// Bytes from here to the next address of a word.
    fn until_aligned(ptr: *const u8) -> usize {
        ptr.addr().wrapping_neg() % WORD
    }

    /// Copies memory that another process may change meanwhile, or to where it may, at the speed of the C library's `memcpy`. What
    /// arrives then is some mixture of old and new bytes.
    ///
    /// # Safety
    /// `from..from + len` must be mapped, `to..to + len` mapped writable, and the two apart. No reference in this program may cover
    /// either while it is called.
    pub unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
        type Copy = unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, usize) -> *mut libc::c_void;
        // Through a pointer that the compiler has to read: it makes nothing of a call that it does not know, neither a second
        // look at the source nor an assumption that it keeps its value.
        static COPY: std::sync::atomic::AtomicPtr<()> = std::sync::atomic::AtomicPtr::new(libc::memcpy as *mut ());
        // SAFETY: it is `memcpy`, which has this type.
        let copy: Copy = unsafe { std::mem::transmute(COPY.load(Relaxed)) };
        // SAFETY: the caller's promise.
        unsafe { copy(to.cast(), from.cast(), len) };
    }

    /// Appends a copy.
    ///
    /// # Safety
    /// `from..from + len` must be mapped.
    pub unsafe fn append(to: &mut Vec<u8>, from: *const u8, len: usize) {
        to.reserve(len);
        // SAFETY: the caller's promise; a vector of ours is no registered memory. It is as long afterwards as has been filled.
        unsafe {
            fill(from, &mut to.spare_capacity_mut()[..len]);
            to.set_len(to.len() + len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_shared_memory_are_exact_at_every_alignment() {
        let mut memory = [0u64; 8];
        let base = memory.as_mut_ptr().cast::<u8>();
        for (start, len) in (0..20).flat_map(|s| (0..40).map(move |l| (s, l))) {
            let data: Vec<u8> = (0..len).map(|i| (start * 41 + i) as u8).collect();
            let mut back = vec![0; len];
            // SAFETY: inside `memory`, which nothing else uses.
            unsafe {
                shared::store(base.add(start), &data);
                shared::load(base.add(start), &mut back);
            }
            assert_eq!(data, back);
        }
    }
}
