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
/// Pages of one word of the bitmap.
const PAGES_OF_WORD: u64 = 64;
/// Most pages with data that are cleared in one step.
const CLEARED_MAX: u64 = 8192;
/// Most pages that are cleared in one step, or looked at for one answer.
const LOOKED_AT_MAX: u64 = 1 << 18;
/// Pages with data that are cleared as one unit of work.
const PAGES_OF_UNIT: u64 = 32;

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
        let words = (len as u64 / PAGE).div_ceil(PAGES_OF_WORD) as usize;
        let mut present = Vec::new();
        present.resize_with(words, || AtomicU64::new(0));
        Ok(MemoryBackend { mapping: Arc::new(Mapping { ptr: ptr.cast(), len }), size, present })
    }

    fn at(&self, at: u64, len: usize) -> *mut u8 {
        assert!(at.checked_add(len as u64).is_some_and(|end| end <= self.size), "requests have been checked");
        self.mapping.ptr.wrapping_add(at as usize)
    }

    fn mark(&self, at: u64, len: u64, present: bool) {
        let (mut page, end) = (at / PAGE, (at + len).div_ceil(PAGE));
        while page < end && len > 0 {
            let (word, first) = ((page / PAGES_OF_WORD) as usize, page % PAGES_OF_WORD);
            let pages = (PAGES_OF_WORD - first).min(end - page);
            let (word, bits) = (&self.present[word], u64::MAX >> (PAGES_OF_WORD - pages) << first);
            let known = word.load(Ordering::Relaxed);
            if present && known & bits != bits {
                word.fetch_or(bits, Ordering::Relaxed);
            } else if !present && known & bits != 0 {
                word.fetch_and(!bits, Ordering::Relaxed);
            }
            page += pages;
        }
    }

    /// State of a page (true for a hole), and the number of pages from it on in the same state, within one word of the bitmap.
    fn run_at(&self, page: u64) -> (bool, u64) {
        let first = page % PAGES_OF_WORD;
        let present = self.present[(page / PAGES_OF_WORD) as usize].load(Ordering::Relaxed) >> first;
        let hole = present & 1 == 0;
        let others = if hole { present } else { !present };
        (hole, u64::from(others.trailing_zeros()).min(PAGES_OF_WORD - first))
    }

    /// The end of the first part of a range that is cleared in one step, and the number of pages with data there. Pages beside the range
    /// count if they share a word of the bitmap with it.
    fn step_at(&self, at: u64, end: u64) -> (u64, u64) {
        let last = end.div_ceil(PAGE).min(at / PAGE + LOOKED_AT_MAX);
        let (mut page, mut data) = (at / PAGE, 0);
        while page < last && data < CLEARED_MAX {
            data += u64::from(self.present[(page / PAGES_OF_WORD) as usize].load(Ordering::Relaxed).count_ones());
            page = (page / PAGES_OF_WORD + 1) * PAGES_OF_WORD;
        }
        ((page.min(last) * PAGE).min(end), data)
    }

    /// Makes a range zero, in steps that count as work.
    async fn clear(&self, at: u64, len: u64) -> io::Result<()> {
        let (mut next, end) = (at, at + len);
        while next < end {
            let (step, data) = self.step_at(next, end);
            slices::spend(1 + (data / PAGES_OF_UNIT) as usize).await;
            self.clear_step(next, step - next);
            next = step;
        }
        Ok(())
    }

    fn clear_step(&self, at: u64, len: u64) {
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
        Box::pin(self.clear(at, len))
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        Box::pin(self.clear(at, len))
    }

    fn extents(&self, at: u64, len: u64, most: usize) -> Op<'_, Vec<Extent>> {
        /// Runs of pages that count as a unit of work: a run is looked up by one load.
        const RUNS_OF_UNIT: usize = 256;
        let most = most.clamp(1, EXTENTS_MAX);
        let (end, mut page) = (at + len, at / PAGE);
        let last = end.div_ceil(PAGE).min(page + LOOKED_AT_MAX);
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

    const MIB: u64 = 1 << 20;

    async fn write(disk: &MemoryBackend, at: u64, byte: u8, len: usize) {
        let mut segment = thruway_engine::Segments::new(1, len.next_multiple_of(PAGE as usize))
            .unwrap()
            .reserve(1)
            .await
            .segment(len);
        segment.as_mut_slice().fill(byte);
        disk.write(at, segment, false).await.unwrap();
    }

    #[test]
    fn zeroing_is_as_much_work_as_there_is_data() {
        slices::measured(|| async {
            let disk = MemoryBackend::new(2 << 40).unwrap();
            let units_of = async |at, len| {
                let before = slices::counted();
                disk.zero(at, len, Zero::empty()).await.unwrap();
                slices::counted() - before
            };
            // A hole is looked at in steps of 1 GiB.
            assert_eq!(units_of(0, 1 << 40).await, 1024);
            for n in 0..64 {
                write(&disk, (1 << 40) + 1000 + n * MIB, 7, MIB as usize).await;
            }
            let pages = 64 * MIB / PAGE + 1;
            let units = units_of(1 << 40, 128 * MIB).await;
            assert!((pages / PAGES_OF_UNIT..=pages / PAGES_OF_UNIT + 4).contains(&units), "{units}");
            let extents = disk.extents(1 << 40, 128 * MIB, 4).await.unwrap();
            assert_eq!((extents.len(), extents[0].hole), (1, true));
        });
    }

    proptest! {
        /// Compares the disk with a copy of what was written, and the states of its pages with those of the copy.
        #[test]
        fn ranges_are_written_and_zeroed_byte_by_byte(
            changes in prop::collection::vec((any::<bool>(), 0u64..130 * PAGE, 1u64..70 * PAGE), 1..8),
        ) {
            let size = 200 * PAGE;
            let disk = MemoryBackend::new(size).unwrap();
            let mut bytes = vec![0; size as usize];
            let mut pages = [false; 200];
            for (is_write, at, len) in changes {
                bytes[at as usize..(at + len) as usize].fill(u8::from(is_write));
                if is_write {
                    write(&disk, at, 1, len as usize).now_or_never().expect("nothing to wait for");
                    pages[(at / PAGE) as usize..(at + len).div_ceil(PAGE) as usize].fill(true);
                } else {
                    disk.discard(at, len).now_or_never().expect("nothing to wait for").unwrap();
                    let (first, behind) = (at.div_ceil(PAGE) as usize, ((at + len) / PAGE) as usize);
                    pages[first.min(behind)..behind].fill(false);
                }
            }
            for (number, present) in pages.iter().enumerate() {
                prop_assert_eq!(disk.run_at(number as u64).0, !present, "page {}", number);
            }
            let mut segment = thruway_engine::Segments::new(1, size as usize).unwrap().reserve(1).now_or_never().unwrap();
            let read = disk.read(0, segment.segment(size as usize)).now_or_never().unwrap().unwrap();
            prop_assert!(read.as_slice() == bytes);
        }
    }
}
