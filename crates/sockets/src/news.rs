//! Waits of a process for what its host's relay does, without looking at the clock.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// Two words of a segment: whether the process waits for the relay, and a number that the relay changes then.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Words {
    wanted: AtomicU32,
    count: AtomicU32,
}

impl Words {
    pub(crate) fn want(&self) -> News {
        // The number first: what the relay answers to an earlier wish changes it, and this wait looks again.
        let seen = self.count.load(Ordering::SeqCst);
        self.wanted.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        News { word: self.count.as_ptr(), seen }
    }

    pub(crate) fn tell(&self) {
        fence(Ordering::SeqCst);
        if self.wanted.load(Ordering::Relaxed) == 0 || self.wanted.swap(0, Ordering::SeqCst) == 0 {
            return;
        }
        self.count.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the kernel looks for threads that wait there, and reads nothing.
        unsafe { libc::syscall(libc::SYS_futex, self.count.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }
}

/// That the relay is to say when it has done something, from [`Segment::want_news`](crate::Segment::want_news): asked for before the
/// segment is looked at. What is done after that look ends the wait.
#[derive(Debug)]
pub struct News {
    word: *const u32,
    seen: u32,
}

impl News {
    /// Waits until the relay has done something since. The segment may have been unmapped meanwhile: then this ends at once, or after
    /// `limit`.
    ///
    /// # Errors
    /// `TimedOut` after `limit`, `Interrupted` if a signal handler has run.
    pub fn wait(self, limit: Duration) -> io::Result<()> {
        let limit = libc::timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // SAFETY: the kernel reads the word, and says so if it is not there.
        let waited = unsafe {
            let none = ptr::null::<u32>();
            libc::syscall(libc::SYS_futex, self.word, libc::FUTEX_WAIT, self.seen, &raw const limit, none, 0)
        };
        if waited == 0 {
            return Ok(());
        }
        match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::ETIMEDOUT | libc::EINTR)) => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Segment;
    use std::sync::atomic::AtomicBool;

    /// As long as it takes on a machine that does something else.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_done_after_a_look_ends_the_wait_and_what_was_done_before_does_not() {
        let (relay, fd) = Segment::create(4096).unwrap();
        let process = Segment::adopt(&fd).unwrap();
        relay.tell_news();
        let error = process.want_news().wait(Duration::from_millis(1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let news = process.want_news();
        relay.tell_news();
        news.wait(LONG).unwrap();
        // It was asked for once.
        let news = process.want_news();
        relay.tell_news();
        relay.tell_news();
        news.wait(LONG).unwrap();
    }

    #[test]
    fn many_that_wait_all_learn_each_of_many_things() {
        const ROUNDS: u32 = 2_000;
        let (relay, fd) = Segment::create(4096).unwrap();
        let process = Segment::adopt(&fd).unwrap();
        let (done, seen) = (AtomicU32::new(0), [const { AtomicU32::new(0) }; 3]);
        let is_late = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seen in &seen {
                let (process, done, is_late) = (&process, &done, &is_late);
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        loop {
                            let news = process.want_news();
                            if done.load(Ordering::Acquire) >= round {
                                break;
                            }
                            if news.wait(LONG).is_err() {
                                is_late.store(true, Ordering::Relaxed);
                            }
                        }
                        seen.store(round, Ordering::Release);
                    }
                });
            }
            for round in 1..=ROUNDS {
                done.store(round, Ordering::Release);
                relay.tell_news();
                while seen.iter().any(|seen| seen.load(Ordering::Acquire) < round) {
                    std::thread::yield_now();
                }
            }
        });
        assert!(!is_late.into_inner());
    }
}
