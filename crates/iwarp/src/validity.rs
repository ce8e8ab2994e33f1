//! Revocation: when it returns, no use of what was revoked is in progress, and none begins.

use thruway_rdma_types::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use thruway_rdma_types::sync::{in_order, wait_a_little};

/// Whether something may still be used, and the number of uses in progress.
pub(crate) struct Validity {
    holds: AtomicBool,
    users: AtomicU32,
}

impl Validity {
    pub(crate) fn new() -> Validity {
        Validity { holds: AtomicBool::new(true), users: AtomicU32::new(0) }
    }

    /// Holds off revocation until [`Validity::leave`]. Who enters asks only then whether it still holds, and uses nothing if
    /// it does not.
    pub(crate) fn enter(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
        in_order();
    }

    pub(crate) fn leave(&self) {
        self.users.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn holds(&self) -> bool {
        self.holds.load(Ordering::SeqCst)
    }

    /// After this returns no use is in progress. False if it had been revoked before.
    pub(crate) fn revoke(&self) -> bool {
        let held = self.holds.swap(false, Ordering::SeqCst);
        in_order();
        while self.users.load(Ordering::SeqCst) != 0 {
            wait_a_little();
        }
        held
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    struct Memory {
        region: Validity,
        window: Validity,
        bytes: UnsafeCell<u32>,
    }

    /// Places bytes through a window, as a peer's Write does. loom fails if another looks at them meanwhile.
    fn place(memory: &Memory) {
        memory.region.enter();
        memory.window.enter();
        if memory.window.holds() && memory.region.holds() {
            memory.bytes.with_mut(|bytes| {
                // SAFETY: loom finds whoever else has it.
                unsafe { *bytes += 1 }
            });
        }
        memory.region.leave();
        memory.window.leave();
    }

    #[test]
    fn loom_nothing_lands_after_a_revocation() {
        for revoke_region in [false, true] {
            loom::model(move || {
                let memory = Memory { region: Validity::new(), window: Validity::new(), bytes: UnsafeCell::new(0) };
                let memory = Arc::new(memory);
                let placing = Arc::clone(&memory);
                let placer = thread::spawn(move || place(&placing));
                let revoked = if revoke_region { &memory.region } else { &memory.window };
                assert!(revoked.revoke());
                // SAFETY: as above: it is the owner's alone now.
                let seen = memory.bytes.with_mut(|bytes| unsafe { *bytes });
                placer.join().unwrap();
                // SAFETY: as above.
                assert_eq!(memory.bytes.with(|bytes| unsafe { *bytes }), seen);
                assert!(!revoked.revoke());
            });
        }
    }

    /// Two peers revoke a window (Send with Invalidate): one of them is told that it was gone.
    #[test]
    fn loom_of_two_revocations_one_is_the_first() {
        loom::model(|| {
            let window = Arc::new(Validity::new());
            let revoking = Arc::clone(&window);
            let other = thread::spawn(move || revoking.revoke());
            let own = window.revoke();
            assert!(own != other.join().unwrap() && !window.holds());
        });
    }
}
