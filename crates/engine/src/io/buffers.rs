//! Memory registered with a ring, so that direct I/O need not pin its pages for each request.
//!
//! Registering pins all of a buffer, so only buffers that do direct I/O are, when they first do. Where it is refused
//! (`RLIMIT_MEMLOCK`), requests go without.

use io_uring::IoUring;
use std::sync::{Arc, Weak};
use thruway_memory::Buffer;

/// Buffers that can be registered with a ring at once; the others do without.
const SLOTS: u32 = 64;

/// What is registered with one ring.
pub(super) struct RegisteredBuffers {
    slots: Vec<Slot>,
    /// Slots that are not empty.
    in_use: usize,
}

enum Slot {
    Empty,
    Registered(Weak<Buffer>),
    /// The kernel refused this one.
    Refused(Weak<Buffer>),
}

impl RegisteredBuffers {
    pub(super) fn new(ring: &IoUring) -> RegisteredBuffers {
        let available = ring.submitter().register_buffers_sparse(SLOTS).is_ok();
        let slots = (0..if available { SLOTS } else { 0 }).map(|_| Slot::Empty).collect();
        RegisteredBuffers { slots, in_use: 0 }
    }

    /// The number under which a buffer is registered.
    pub(super) fn index_of(&mut self, ring: &IoUring, buffer: &Arc<Buffer>) -> Option<u16> {
        let is = |weak: &Weak<Buffer>| std::ptr::eq(weak.as_ptr(), Arc::as_ptr(buffer));
        for (index, slot) in self.slots.iter().enumerate() {
            match slot {
                Slot::Registered(known) if is(known) => return Some(index as u16),
                Slot::Refused(known) if is(known) => return None,
                _ => {}
            }
        }
        self.sweep(ring);
        let index = self.slots.iter().position(|slot| matches!(slot, Slot::Empty))?;
        let registered = update(ring, index, libc::iovec { iov_base: buffer.as_ptr().cast(), iov_len: buffer.len() });
        let known = Arc::downgrade(buffer);
        self.slots[index] = if registered { Slot::Registered(known) } else { Slot::Refused(known) };
        self.in_use += 1;
        registered.then_some(index as u16)
    }

    /// Whether there is anything to sweep one day.
    pub(super) fn is_in_use(&self) -> bool {
        self.in_use > 0
    }

    /// Unregisters buffers that are gone.
    pub(super) fn sweep(&mut self, ring: &IoUring) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let (Slot::Registered(known) | Slot::Refused(known)) = &slot else { continue };
            if known.strong_count() > 0 {
                continue;
            }
            if matches!(slot, Slot::Registered(_)) {
                update(ring, index, libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 });
            }
            *slot = Slot::Empty;
            self.in_use -= 1;
        }
    }
}

fn update(ring: &IoUring, index: usize, iov: libc::iovec) -> bool {
    // SAFETY: the kernel pins the pages for itself, so the mapping may go at any time; only requests that hold a part of
    // the buffer use the slot.
    unsafe { ring.submitter().register_buffers_update(index as u32, &[iov], None) }.is_ok()
}
