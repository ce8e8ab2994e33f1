//! The board of a user: memory that its processes share. See [`super::Board`] for what each function does.

use super::{ENTRIES, ENTRY_LEN, Key, Listing, Ticket, WAYS, WORDS};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use thruway_memory::sealed;

/// One entry. All words may change at any time.
#[repr(C, align(128))]
struct Entry {
    /// Odd while the entry is being written, and another one each time.
    version: AtomicU64,
    /// The version of the entry that was answered.
    answered: AtomicU64,
    /// The key, then the listing.
    words: [AtomicU64; WORDS],
    _apart: [u64; 6],
}

/// The board of one user. It stays mapped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mapped {
    entries: *const Entry,
}

// SAFETY: shared memory, used through atomics only.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

const _: () = assert!(size_of::<Entry>() == ENTRY_LEN);

impl Mapped {
    pub(super) fn open(path: &Path, uid: u32) -> io::Result<Mapped> {
        let len = ENTRIES * ENTRY_LEN;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        let stat = rustix::fs::fstat(&file)?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !is_file || stat.st_uid != uid || stat.st_mode & 0o077 != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if !sealed::may_be_long(len as u64) {
            return Err(rustix::io::Errno::FBIG.into());
        }
        // All of it, so that no page is missing when it is used. Those who open it at the same time make it as long.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len as u64)?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, of whose addresses nothing knows yet.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, rights, MapFlags::SHARED, &file, 0) }?;
        Ok(Mapped { entries: base.cast() })
    }

    fn entry(&self, at: usize) -> &Entry {
        assert!(at < ENTRIES);
        // SAFETY: inside the mapping, aligned, nothing but atomics.
        unsafe { &*self.entries.add(at) }
    }

    /// Reads an entry whole. `None` if it changes meanwhile.
    fn read(&self, at: usize) -> Option<(u64, [u64; WORDS])> {
        let entry = self.entry(at);
        let version = entry.version.load(Ordering::Acquire);
        let words = std::array::from_fn(|word| entry.words[word].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (version.is_multiple_of(2) && entry.version.load(Ordering::Relaxed) == version).then_some((version, words))
    }

    pub(super) fn list(&self, key: Key, listing: Listing) -> Option<Ticket> {
        let bucket = key.bucket();
        let is_ours = |at: &usize| self.read(*at).is_some_and(|(_, words)| words[..6] == key.words);
        let is_free = |at: &usize| self.read(*at).is_some_and(|(_, words)| words == [0; WORDS]);
        let places = bucket..bucket + WAYS;
        // If none is free, the one that has been written least often: neither new nor in a crowded place.
        let oldest = || places.clone().min_by_key(|at| self.entry(*at).version.load(Ordering::Relaxed));
        let at = places.clone().find(is_ours).or_else(|| places.clone().find(is_free)).or_else(oldest)?;
        let entry = self.entry(at);
        let version = entry.version.load(Ordering::Relaxed);
        // Odd also if a process has died while it wrote: then the place is taken from it.
        let writing = version + 1 + version % 2;
        entry.version.compare_exchange(version, writing, Ordering::SeqCst, Ordering::Relaxed).ok()?;
        fence(Ordering::Release);
        for (place, word) in entry.words.iter().zip(listing.words(key)) {
            place.store(word, Ordering::Relaxed);
        }
        entry.version.store(writing + 1, Ordering::Release);
        Some(Ticket { entry: at, version: writing + 1 })
    }

    pub(super) fn find(&self, key: Key) -> Option<(Ticket, Listing)> {
        let bucket = key.bucket();
        (bucket..bucket + WAYS).find_map(|at| {
            let (version, words) = self.read(at)?;
            (version != 0 && words[..6] == key.words).then_some((Ticket { entry: at, version }, Listing::of(words)))
        })
    }

    pub(super) fn answer(&self, ticket: Ticket) {
        self.entry(ticket.entry).answered.store(ticket.version, Ordering::Release);
    }

    pub(super) fn is_answered(&self, ticket: Ticket) -> Option<bool> {
        let entry = self.entry(ticket.entry);
        let is_there = entry.version.load(Ordering::Relaxed) == ticket.version;
        is_there.then(|| entry.answered.load(Ordering::Acquire) == ticket.version)
    }

    pub(super) fn withdraw(&self, ticket: Ticket) {
        let entry = self.entry(ticket.entry);
        let writing = ticket.version + 1;
        if entry.version.compare_exchange(ticket.version, writing, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            for word in &entry.words {
                word.store(0, Ordering::Relaxed);
            }
            entry.version.store(writing + 1, Ordering::Release);
        }
    }
}
