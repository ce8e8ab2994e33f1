//! Leases of files (`F_SETLEASE` of `fcntl(2)`): to hear of it before another program changes what is read here.
//!
//! The kernel lets a program that opens a leased file for writing, or truncates it, wait until the lease is given back, or until
//! `/proc/sys/fs/lease-break-time` has passed. It says so by a signal, which one thread takes for the whole process. Changes of
//! attributes and names, which no lease keeps back, are heard of afterwards (`inotify(7)`).

#![allow(unsafe_code, reason = "rustix has no leases and no signals")]

use rustix::event::{PollFd, PollFlags};
use rustix::fs::inotify;
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, mpsc};
use std::time::Duration;

/// What is called when a file is about to be changed, or its attributes have been; perhaps more than once, from a thread of its own.
pub type OnChange = Box<dyn Fn() + Send + Sync>;

/// A file that no other program changes without this being heard of.
pub struct Lease {
    file: OwnedFd,
    watch: i32,
}

/// What is known of leases, and the thread that hears of them.
struct Watcher {
    thread: i32,
    inotify: OwnedFd,
    table: Mutex<Table>,
    /// The thread has ended.
    is_deaf: AtomicBool,
}

#[derive(Default)]
struct Table {
    leases: HashMap<RawFd, Arc<OnChange>>,
    /// The leases of a file that is watched.
    watches: HashMap<i32, Vec<RawFd>>,
}

/// `struct f_owner_ex`
#[repr(C)]
struct Owner {
    kind: libc::c_int,
    pid: libc::pid_t,
}

const F_SETSIG: libc::c_int = 10;
const F_SETOWN_EX: libc::c_int = 15;
const F_OWNER_TID: libc::c_int = 0;

/// The signal: one that carries the descriptor. The kernel sends `SIGIO` instead, without it, when too many are waiting.
fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 5
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Lease {
    /// Leases a regular file that is open for reading, and by no program for writing; `on_change` is called when another is about to
    /// change it, and the lease is to be dropped then.
    ///
    /// # Errors
    /// `EAGAIN` if a program has it open for writing; `EACCES` if it belongs to another user and this process lacks `CAP_LEASE`;
    /// `EINVAL` where the file system has no leases; `ENOSPC` at the limit of `fs.inotify.max_user_watches`.
    pub fn take(file: OwnedFd, on_change: OnChange) -> io::Result<Lease> {
        let watcher = Watcher::get()?;
        if watcher.is_deaf.load(Ordering::SeqCst) {
            return Err(Errno::OPNOTSUPP.into());
        }
        let fd = file.as_raw_fd();
        let lease = {
            let mut table = watcher.table();
            let path = format!("/proc/self/fd/{fd}");
            // Data is not written behind a lease, but cut (`O_RDONLY | O_TRUNC`), and given another time.
            let flags = inotify::WatchFlags::ATTRIB
                | inotify::WatchFlags::MODIFY
                | inotify::WatchFlags::DELETE_SELF
                | inotify::WatchFlags::MOVE_SELF;
            let watch = inotify::add_watch(&watcher.inotify, path, flags)?;
            table.watches.entry(watch).or_default().push(fd);
            table.leases.insert(fd, Arc::new(on_change));
            Lease { file, watch }
        };
        let owner = Owner { kind: F_OWNER_TID, pid: watcher.thread };
        // SAFETY: the descriptor is open; these calls take a number, and a structure that outlives the call.
        unsafe {
            check(libc::fcntl(fd, F_SETSIG, signal()))?;
            check(libc::fcntl(fd, F_SETOWN_EX, &raw const owner))?;
            check(libc::fcntl(fd, libc::F_SETLEASE, libc::F_RDLCK))?;
        }
        Ok(lease)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Ok(watcher) = Watcher::get() else { return };
        let fd = self.file.as_raw_fd();
        let mut table = watcher.table();
        table.leases.remove(&fd);
        if let Some(leases) = table.watches.get_mut(&self.watch) {
            leases.retain(|lease| *lease != fd);
            if leases.is_empty() {
                table.watches.remove(&self.watch);
                // It may have gone with the file.
                let _ = inotify::remove_watch(&watcher.inotify, self.watch);
            }
        }
    }
}

/// How long the kernel lets a program wait for a lease (`/proc/sys/fs/lease-break-time`); `None` for as long as it takes.
pub fn break_time() -> Option<Duration> {
    const DEFAULT: u64 = 45;
    let said = std::fs::read_to_string("/proc/sys/fs/lease-break-time").ok();
    let seconds = said.and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT);
    (seconds > 0).then(|| Duration::from_secs(seconds))
}

/// Whether a program waits for a lease to be given back.
fn is_broken(fd: RawFd) -> bool {
    // SAFETY: the call takes a number; a descriptor that has been closed meanwhile is an error.
    unsafe { libc::fcntl(fd, libc::F_GETLEASE) != libc::F_RDLCK }
}

impl Watcher {
    fn get() -> io::Result<&'static Watcher> {
        static WATCHER: OnceLock<Watcher> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        if let Some(watcher) = WATCHER.get() {
            return Ok(watcher);
        }
        let _starting = STARTING.lock().expect("no panics under the lock");
        if WATCHER.get().is_none() {
            let started = Watcher::start()?;
            let _ = WATCHER.set(started);
        }
        Ok(WATCHER.get().expect("it has just been put there"))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no panics under the lock")
    }

    fn start() -> io::Result<Watcher> {
        let inotify = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        let events = inotify.try_clone()?;
        let (ready, started) = mpsc::channel();
        std::thread::Builder::new().name("leases".into()).spawn(move || {
            let signals = block_signals();
            // SAFETY: the call takes nothing and cannot fail.
            let thread = unsafe { libc::gettid() };
            let signals = match signals {
                Ok(signals) => signals,
                Err(error) => return drop(ready.send(Err(error))),
            };
            if ready.send(Ok(thread)).is_ok() {
                // The other end is kept for good, and this begins when it is there.
                let Ok(watcher) = Watcher::get() else { return };
                while let Ok(()) = wait(&signals, &events) {
                    watcher.hear(&signals, &events);
                }
                watcher.end();
            }
        })?;
        let thread = started.recv().map_err(io::Error::other)??;
        Ok(Watcher { thread, inotify, table: Mutex::default(), is_deaf: AtomicBool::new(false) })
    }

    /// Nothing will be heard any more: all are to give their leases back, and none is given.
    fn end(&self) {
        self.is_deaf.store(true, Ordering::SeqCst);
        let all: Vec<_> = self.table().leases.values().cloned().collect();
        all.into_iter().for_each(|on_change| on_change());
    }

    /// Calls those whose files are about to be changed, or have been.
    fn hear(&self, signals: &OwnedFd, events: &OwnedFd) {
        let mut changed: Vec<Arc<OnChange>> = Vec::new();
        {
            let table = self.table();
            let all = || table.leases.iter();
            let broken = |(fd, _): &(&RawFd, _)| is_broken(**fd);
            for fd in signalled(signals) {
                match fd {
                    // The number may be another file's by now.
                    Some(fd) => changed.extend(table.leases.get(&fd).filter(|_| is_broken(fd)).cloned()),
                    None => changed.extend(all().filter(broken).map(|(_, lease)| Arc::clone(lease))),
                }
            }
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut reader = inotify::Reader::new(events, &mut buffer);
            while let Ok(event) = reader.next() {
                if event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW) {
                    changed.extend(all().map(|(_, lease)| Arc::clone(lease)));
                }
                let leases = table.watches.get(&event.wd()).into_iter().flatten();
                changed.extend(leases.filter_map(|fd| table.leases.get(fd)).cloned());
            }
        }
        changed.into_iter().for_each(|on_change| on_change());
    }
}

/// Makes this thread take the signals by a descriptor.
fn block_signals() -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` makes the set, which outlives the calls; only this thread is changed; the descriptor is new.
    unsafe {
        check(libc::sigemptyset(set.as_mut_ptr()))?;
        check(libc::sigaddset(set.as_mut_ptr(), signal()))?;
        check(libc::sigaddset(set.as_mut_ptr(), libc::SIGIO))?;
        let error = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        let fd = check(libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn wait(signals: &OwnedFd, events: &OwnedFd) -> rustix::io::Result<()> {
    loop {
        let mut fds = [signals, events].map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN));
        match rustix::event::poll(&mut fds, None) {
            Err(Errno::INTR) => {}
            polled => return polled.map(drop),
        }
    }
}

/// The descriptors of the signals that have come; `None` stands for one that does not say.
fn signalled(signals: &OwnedFd) -> Vec<Option<RawFd>> {
    const LEN: usize = size_of::<libc::signalfd_siginfo>();
    let (mut found, mut buffer) = (Vec::new(), [0; 16 * LEN]);
    while let Ok(len @ 1..) = rustix::io::read(signals, &mut buffer) {
        for info in buffer[..len].chunks_exact(LEN) {
            let word = |at: usize| u32::from_ne_bytes(*info[at..].first_chunk().expect("it is longer"));
            let number = word(std::mem::offset_of!(libc::signalfd_siginfo, ssi_signo));
            let fd = word(std::mem::offset_of!(libc::signalfd_siginfo, ssi_fd));
            found.push((number != libc::SIGIO as u32).then_some(fd as RawFd));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};

    fn open(path: &std::path::Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        rustix::fs::open(path, flags, Mode::empty())
    }

    #[test]
    fn a_program_that_writes_waits_until_the_lease_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, b"one").unwrap();
        let (told, heard) = mpsc::channel();
        let on_change = |told: &mpsc::Sender<u8>, number| -> OnChange {
            let told = told.clone();
            Box::new(move || {
                let _ = told.send(number);
            })
        };
        let writing = open(&path, OFlags::WRONLY).unwrap();
        let refused = Lease::take(open(&path, OFlags::RDONLY).unwrap(), on_change(&told, 0));
        assert_eq!(refused.err().and_then(|e| e.raw_os_error()), Some(libc::EAGAIN), "it is open for writing");
        drop(writing);
        let leases = [1, 2].map(|n| Lease::take(open(&path, OFlags::RDONLY).unwrap(), on_change(&told, n)).unwrap());
        assert!(open(&path, OFlags::RDONLY).is_ok(), "reading is no change");
        // One who does not wait is refused, and both hear of it all the same.
        assert_eq!(open(&path, OFlags::WRONLY | OFlags::NONBLOCK).err(), Some(Errno::AGAIN));
        let mut both = [heard.recv().unwrap(), heard.recv().unwrap()];
        both.sort_unstable();
        assert_eq!(both, [1, 2]);
        let writer = std::thread::spawn({
            let path = path.clone();
            move || open(&path, OFlags::WRONLY).map(drop)
        });
        drop(leases);
        writer.join().unwrap().unwrap();
        // Attributes and names.
        let lease = Lease::take(open(&path, OFlags::RDONLY).unwrap(), on_change(&told, 3)).unwrap();
        while heard.try_recv().is_ok() {}
        rustix::fs::chmod(&path, Mode::RUSR).unwrap();
        assert_eq!(heard.recv().unwrap(), 3);
        while heard.try_recv().is_ok() {}
        let (omit, time) = (rustix::fs::UTIME_OMIT, rustix::fs::Timespec { tv_sec: 7, tv_nsec: 0 });
        let last_access = rustix::fs::Timespec { tv_sec: 0, tv_nsec: omit };
        let times = rustix::fs::Timestamps { last_access, last_modification: time };
        rustix::fs::utimensat(rustix::fs::CWD, &path, &times, rustix::fs::AtFlags::empty()).unwrap();
        assert_eq!(heard.recv().unwrap(), 3, "a time alone");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(heard.recv().unwrap(), 3);
        drop(lease);
    }
}
