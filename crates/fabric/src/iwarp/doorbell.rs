//! Who sleeps until a device has something to poll, and who has to be woken.
//!
//! Who publishes something counts it first and then looks who sleeps; who goes to sleep says so first and then looks whether
//! something has been counted. So one of the two sees the other. What is written here is swapped and not stored, because loom
//! lets a store come before an exchange that has not seen it; for the processor it is one instruction.

use thruway_rdma_types::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use thruway_rdma_types::sync::in_order;

/// What there is to poll, and who sleeps until there is.
#[derive(Default)]
pub(super) struct Doorbell {
    /// Published and not taken. A taker may discount an event before it is counted; the number wraps, and it looks as
    /// if there were something for as long.
    published: AtomicUsize,
    /// Somebody sleeps on the device's descriptor.
    armed: AtomicBool,
    /// Threads that sleep, each on a descriptor of its own.
    asleep: AtomicUsize,
    /// Somebody asked for sleepers to be woken.
    woken: AtomicBool,
}

/// Whom to wake.
#[must_use]
pub(super) struct Whom {
    /// Threads that sleep on the device's descriptor.
    pub(super) armed: bool,
    /// All threads that sleep on descriptors of their own.
    pub(super) sleepers: bool,
}

impl Doorbell {
    /// There is one thing more to poll.
    pub(super) fn publish(&self) -> Whom {
        self.published.fetch_add(1, Ordering::SeqCst);
        in_order();
        self.ring()
    }

    /// So many have been taken.
    pub(super) fn take(&self, count: usize) {
        self.published.fetch_sub(count, Ordering::SeqCst);
    }

    /// Sleeping threads, and the next one that would sleep, are to wake.
    pub(super) fn wake(&self) -> Whom {
        self.woken.swap(true, Ordering::SeqCst);
        in_order();
        self.ring()
    }

    fn ring(&self) -> Whom {
        // A load first: mostly there is no sleeper.
        let armed = self.armed.load(Ordering::SeqCst) && self.armed.swap(false, Ordering::SeqCst);
        Whom { armed, sleepers: self.asleep.load(Ordering::SeqCst) > 0 }
    }

    /// There is a reason not to sleep: something to poll, or somebody has asked, which counts once.
    pub(super) fn has_rung(&self) -> bool {
        // A load first: who spins here should not take the line away from who publishes.
        let woken = self.woken.load(Ordering::SeqCst) && self.woken.swap(false, Ordering::SeqCst);
        woken || self.published.load(Ordering::SeqCst) > 0
    }

    /// Somebody is going to sleep on the device's descriptor; false if there is a reason not to. `look` takes in what has
    /// come without being told.
    pub(super) fn arm(&self, look: impl FnOnce()) -> bool {
        self.armed.swap(true, Ordering::SeqCst);
        in_order();
        look();
        if self.has_rung() {
            self.armed.swap(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// A thread is going to sleep, and says so when it gets up ([`Doorbell::get_up`]), whether it has slept or not. False
    /// if there is a reason not to.
    pub(super) fn lie_down(&self, look: impl FnOnce()) -> bool {
        self.asleep.fetch_add(1, Ordering::SeqCst);
        in_order();
        look();
        !self.has_rung()
    }

    pub(super) fn get_up(&self) {
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn nobody_sleeps(&self) -> bool {
        !self.armed.load(Ordering::SeqCst) && self.asleep.load(Ordering::SeqCst) == 0
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    /// An eventfd.
    #[derive(Default)]
    struct Bell {
        count: Mutex<u32>,
        rung: Condvar,
    }

    impl Bell {
        fn ring(&self) {
            *self.count.lock().unwrap() += 1;
            self.rung.notify_all();
        }

        /// Waits until it rings. loom fails if it never does.
        fn wait(&self) {
            let mut count = self.count.lock().unwrap();
            while *count == 0 {
                count = self.rung.wait(count).unwrap();
            }
            *count = 0;
        }
    }

    #[derive(Default)]
    struct Device {
        doorbell: Doorbell,
        queue: Mutex<u32>,
        descriptor: Bell,
        thread: Bell,
    }

    impl Device {
        fn rouse(&self, whom: Whom) {
            if whom.armed {
                self.descriptor.ring();
            }
            if whom.sleepers {
                self.thread.ring();
            }
        }

        fn publish(&self) {
            *self.queue.lock().unwrap() += 1;
            self.rouse(self.doorbell.publish());
        }

        fn take(&self) -> u32 {
            let taken = std::mem::take(&mut *self.queue.lock().unwrap());
            self.doorbell.take(taken as usize);
            taken
        }
    }

    /// Sleeps, if there is no reason not to.
    fn sleep(device: &Device, by_descriptor: bool) {
        if by_descriptor {
            if device.doorbell.arm(|| {}) {
                device.descriptor.wait();
            }
        } else {
            if device.doorbell.lie_down(|| {}) {
                device.thread.wait();
            }
            device.doorbell.get_up();
            device.doorbell.has_rung();
        }
    }

    /// Takes `wanted`, sleeping in between.
    fn consume(device: &Device, wanted: u32, by_descriptor: bool) {
        let mut taken = 0;
        while taken < wanted {
            let some = device.take();
            taken += some;
            if some > 0 || taken == wanted {
                continue;
            }
            sleep(device, by_descriptor);
            // It may have been woken for what another has taken: loom has to let that one go on.
            thread::yield_now();
        }
    }

    #[test]
    fn loom_nobody_sleeps_through_what_is_published() {
        for by_descriptor in [false, true] {
            loom::model(move || {
                let device = Arc::new(Device::default());
                let publishing = Arc::clone(&device);
                let publisher = thread::spawn(move || (0..2).for_each(|_| publishing.publish()));
                consume(&device, 2, by_descriptor);
                publisher.join().unwrap();
            });
        }
    }

    #[test]
    fn loom_nobody_sleeps_through_a_wake() {
        for by_descriptor in [false, true] {
            loom::model(move || {
                let device = Arc::new(Device::default());
                let waking = Arc::clone(&device);
                let waker = thread::spawn(move || waking.rouse(waking.doorbell.wake()));
                sleep(&device, by_descriptor);
                waker.join().unwrap();
            });
        }
    }
}
