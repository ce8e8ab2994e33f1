//! A disk in memory. Bytes that were never written take none.

use super::{Backend, EXTENTS_MAX, Extent, Geometry, Lent, Memory, Op, Zero, append};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use smallvec::smallvec;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thruway_engine::Segment;
use thruway_server::slices;

const PAGE: u64 = 4096;

/// A disk in memory.
pub struct MemoryBackend {
    mapping: Arc<Mapping>,
    size: u64,
    /// One bit for each page that holds data.
    present: Vec<AtomicU64>,
}

struct Mapping {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: the mapping is plain memory; it is only read and written through raw pointers, as memory shared
// with devices is, and the order of overlapping requests is the clients' to see to.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and, with the last reference gone, nobody's any more.
        let _ = unsafe { rustix::mm::munmap(self.ptr.cast(), self.len) };
    }
}

impl MemoryBackend {
    /// A disk of `size` bytes, all zeroes.
    ///
    /// # Errors
    /// If there is no address space for it, or the size is zero.
    pub fn new(size: u64) -> io::Result<MemoryBackend> {
        if size == 0 || size > 1 << 46 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "size out of range (1 byte to 64 TiB)"));
        }
        let len = size.next_multiple_of(PAGE) as usize;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let ptr = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)?
        };
        let words = (len as u64 / PAGE).div_ceil(64) as usize;
        let mut present = Vec::new();
        present.resize_with(words, || AtomicU64::new(0));
        Ok(MemoryBackend { mapping: Arc::new(Mapping { ptr: ptr.cast(), len }), size, present })
    }

    fn at(&self, at: u64, len: usize) -> *mut u8 {
        assert!(at.checked_add(len as u64).is_some_and(|end| end <= self.size), "requests have been checked");
        self.mapping.ptr.wrapping_add(at as usize)
    }

    fn mark(&self, at: u64, len: u64, present: bool) {
        if len == 0 {
            return;
        }
        for page in at / PAGE..=(at + len - 1) / PAGE {
            let (word, bit) = (&self.present[page as usize / 64], 1 << (page % 64));
            if present && word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
            } else if !present {
                word.fetch_and(!bit, Ordering::Relaxed);
            }
        }
    }

    /// State of a page (true for a hole), and the number of pages from it on in the same state, within one word of the bitmap.
    fn run_at(&self, page: u64) -> (bool, u64) {
        let present = self.present[page as usize / 64].load(Ordering::Relaxed) >> (page % 64);
        let hole = present & 1 == 0;
        let others = if hole { present } else { !present };
        (hole, u64::from(others.trailing_zeros()).min(64 - page % 64))
    }

    fn clear(&self, at: u64, len: u64) {
        let start = self.at(at, len as usize);
        let (first, last) = (at.next_multiple_of(PAGE), (at + len) / PAGE * PAGE);
        if first >= last {
            // SAFETY: the range was checked; see `Mapping`.
            unsafe { start.write_bytes(0, len as usize) };
            return;
        }
        let whole = self.at(first, (last - first) as usize);
        // SAFETY: whole pages of our own mapping, which read as zeroes afterwards.
        let gone = unsafe { rustix::mm::madvise(whole.cast(), (last - first) as usize, Advice::LinuxDontNeed) }.is_ok();
        if gone {
            self.mark(first, last - first, false);
        } else {
            // SAFETY: the range was checked.
            unsafe { whole.write_bytes(0, (last - first) as usize) };
        }
        // SAFETY: the rests before and behind are inside the range that was checked.
        unsafe {
            start.write_bytes(0, (first - at) as usize);
            self.at(last, (at + len - last) as usize).write_bytes(0, (at + len - last) as usize);
        }
    }
}

fn done<T: 'static>(value: T) -> Op<'static, T> {
    Box::pin(std::future::ready(Ok(value)))
}

impl Backend for MemoryBackend {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size,
            block: 1,
            preferred: PAGE as u32,
            physical: 1,
            read_only: false,
            discard: true,
            discard_zeroes: true,
            fast_zero: true,
            shared: true,
        }
    }

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        let from = self.at(at, segment.len());
        // SAFETY: the range was checked, and a segment never lies in the mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, segment.as_ptr(), segment.len()) };
        done(segment)
    }

    fn write(&self, at: u64, segment: Segment, _durable: bool) -> Op<'_, ()> {
        let to = self.at(at, segment.len());
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(segment.as_ptr(), to, segment.len()) };
        self.mark(at, segment.len() as u64, true);
        done(())
    }

    fn flush(&self) -> Op<'_, ()> {
        done(())
    }

    fn zero(&self, at: u64, len: u64, _how: Zero) -> Op<'_, ()> {
        self.clear(at, len);
        done(())
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.clear(at, len);
        done(())
    }

    fn extents(&self, at: u64, len: u64, most: usize) -> Op<'_, Vec<Extent>> {
        /// Pages looked at for one answer.
        const PAGES_MAX: u64 = 1 << 18;
        /// Runs of pages that count as a unit of work: a run is looked up by one load.
        const RUNS_OF_UNIT: usize = 256;
        let most = most.clamp(1, EXTENTS_MAX);
        let (end, mut page) = (at + len, at / PAGE);
        let last = end.div_ceil(PAGE).min(page + PAGES_MAX);
        let (mut extents, mut runs) = (Vec::new(), 0);
        // One more: then the last of them is complete.
        while page < last && extents.len() <= most {
            let (hole, pages) = self.run_at(page);
            let next = (page + pages).min(last);
            append(&mut extents, Extent { len: (next * PAGE).min(end) - (page * PAGE).max(at), hole, zero: hole });
            (page, runs) = (next, runs + 1);
        }
        Box::pin(async move {
            slices::spend(1 + runs / RUNS_OF_UNIT).await;
            Ok(extents)
        })
    }

    fn lend(&self, at: u64, len: usize) -> Option<Lent> {
        // SAFETY: the range is within the mapping (`at` checks that), which lives as long as its last owner.
        let memory = unsafe { Memory::new(self.at(at, len), len, Arc::clone(&self.mapping) as _) };
        Some(Lent::Memory(smallvec![memory]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use proptest::prelude::*;

    proptest! {
        /// Compares extents with the states of all pages, and their number with the bound.
        #[test]
        fn extents_are_those_of_the_pages(
            written in prop::collection::vec((0u64..300, 1u64..80), 0..12),
            (at, len) in (0u64..300 * PAGE, 1u64..=100 * PAGE),
            most in 0usize..8,
        ) {
            let disk = MemoryBackend::new(400 * PAGE).unwrap();
            let mut there = [false; 400];
            for (page, pages) in written {
                disk.mark(page * PAGE, pages * PAGE, true);
                there[page as usize..(page + pages) as usize].fill(true);
            }
            let extents = |most| disk.extents(at, len, most).now_or_never().expect("nothing to wait for").unwrap();
            let mut at_page = at;
            let all = extents(EXTENTS_MAX);
            prop_assert_eq!(all.iter().map(|extent| extent.len).sum::<u64>(), len);
            for extent in &all {
                for page in at_page / PAGE..(at_page + extent.len).div_ceil(PAGE) {
                    prop_assert_eq!(extent.hole, !there[page as usize], "page {}", page);
                }
                at_page += extent.len;
            }
            prop_assert!(all.is_sorted_by(|one, next| one.hole != next.hole));
            let few = extents(most);
            let complete = most.max(1).min(all.len());
            prop_assert!(few.len() <= most.max(1) + 1);
            prop_assert_eq!(&few[..complete], &all[..complete]);
        }
    }
}
