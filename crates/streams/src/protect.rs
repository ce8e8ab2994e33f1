//! Memory that is being sent and must not change: write-protected by userfaultfd(2), in its user-mode form, which needs no privileges.
//!
//! A thread of the program that writes to such memory sleeps in the kernel until the protection is taken away. The thread of this module
//! learns of it, and has the connection that sends the memory decide: that is over soon, or the bytes are put elsewhere.
//!
//! System calls that write to protected memory fail with `EFAULT`; a forked child has memory of its own that is not protected.

use std::collections::BTreeMap;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use crate::connection::Inner;

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

// linux/userfaultfd.h
const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
const REGISTER_MODE_WP: u64 = 2;
const WRITEPROTECT_MODE_WP: u64 = 1;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
const IOC_API: libc::c_ulong = 0xc018_aa3f;
const IOC_REGISTER: libc::c_ulong = 0xc020_aa00;
const IOC_UNREGISTER: libc::c_ulong = 0x8010_aa01;
const IOC_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// A message of the descriptor's; of a page fault, where it was.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fault {
    event: u8,
    _reserved: [u8; 7],
    _flags: u64,
    address: u64,
    _thread: u64,
}

/// Who sends protected memory: a connection, and as what it does.
type Sender = (Weak<Inner>, u64);

/// What is protected.
struct Protected {
    len: usize,
    /// The same bytes may be sent several times.
    senders: Vec<Sender>,
}

struct Protector {
    descriptor: OwnedFd,
    ranges: Mutex<BTreeMap<usize, Protected>>,
}

fn protector() -> Option<&'static Protector> {
    static PROTECTOR: OnceLock<Option<Protector>> = OnceLock::new();
    PROTECTOR
        .get_or_init(|| Protector::open().inspect_err(|error| tracing::debug!(%error, "no userfaultfd")).ok())
        .as_ref()
}

/// Whether memory can be protected on this system: [`Connection::send_asynchronously`](crate::Connection::send_asynchronously) does not wait. It cannot without
/// userfaultfd in the kernel (`CONFIG_USERFAULTFD`, Linux 5.11 for the form that needs no privileges), or where a seccomp filter forbids that.
pub fn can_protect() -> bool {
    let Some(protector) = protector() else { return false };
    static WATCHED: OnceLock<bool> = OnceLock::new();
    *WATCHED
        .get_or_init(|| std::thread::Builder::new().name("thruway-faults".into()).spawn(|| protector.watch()).is_ok())
}

/// Write-protects whole pages of private anonymous memory for a sender. False if it is not of that kind, or other parts of it are
/// protected already.
pub(crate) fn protect(at: usize, len: usize, sender: Sender) -> bool {
    debug_assert!(at.is_multiple_of(PAGE) && len.is_multiple_of(PAGE) && len > 0, "whole pages");
    let Some(protector) = protector() else { return false };
    let mut ranges = protector.ranges();
    if let Some(same) = ranges.get_mut(&at).filter(|protected| protected.len == len) {
        same.senders.push(sender);
        return true;
    }
    if overlapping(&ranges, at, len).is_some() {
        return false;
    }
    // Pages that are not there cannot be protected before Linux 6.4.
    // SAFETY: advice that changes no contents; memory that is not mapped is refused.
    if unsafe { libc::madvise(at as *mut libc::c_void, len, libc::MADV_POPULATE_READ) } != 0 {
        return false;
    }
    let range = || Range { start: at as u64, len: len as u64 };
    let mut register = Register { range: range(), mode: REGISTER_MODE_WP, ioctls: 0 };
    if protector.call(IOC_REGISTER, &mut register).is_err() {
        return false;
    }
    let mut protect = WriteProtect { range: range(), mode: WRITEPROTECT_MODE_WP };
    if protector.call(IOC_WRITEPROTECT, &mut protect).is_err() {
        let _ = protector.call(IOC_UNREGISTER, &mut range());
        return false;
    }
    ranges.insert(at, Protected { len, senders: vec![sender] });
    true
}

/// A sender is done with memory. After the last, it is writable again, and threads go on that tried to write to it.
pub(crate) fn unprotect(at: usize, connection: &Weak<Inner>, source: u64) {
    let Some(protector) = protector() else { return };
    let mut ranges = protector.ranges();
    let Some(protected) = ranges.get_mut(&at) else { return };
    protected.senders.retain(|(other, number)| !(Weak::ptr_eq(other, connection) && *number == source));
    if !protected.senders.is_empty() {
        return;
    }
    let len = protected.len;
    ranges.remove(&at);
    // Of memory that has been unmapped meanwhile, nothing is left to be undone.
    let range = || Range { start: at as u64, len: len as u64 };
    let _ = protector.call(IOC_WRITEPROTECT, &mut WriteProtect { range: range(), mode: 0 });
    let _ = protector.call(IOC_UNREGISTER, &mut range());
}

/// Who sends some of this memory, and where the part begins that is being sent.
pub(crate) fn sender_of(at: usize, len: usize) -> Option<(usize, Sender)> {
    let ranges = protector()?.ranges();
    let (start, protected) = overlapping(&ranges, at, len)?;
    protected.senders.first().map(|sender| (start, sender.clone()))
}

fn overlapping(ranges: &BTreeMap<usize, Protected>, at: usize, len: usize) -> Option<(usize, &Protected)> {
    let (&start, protected) = ranges.range(..at.saturating_add(len)).next_back()?;
    (start + protected.len > at).then_some((start, protected))
}

impl Protector {
    fn open() -> io::Result<Protector> {
        let flags = libc::O_CLOEXEC | UFFD_USER_MODE_ONLY;
        // SAFETY: a system call without pointers.
        let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it is new and unshared.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor as i32) };
        let protector = Protector { descriptor, ranges: Mutex::default() };
        let mut api = Api { api: UFFD_API, features: FEATURE_PAGEFAULT_FLAG_WP, ioctls: 0 };
        protector.call(IOC_API, &mut api)?;
        Ok(protector)
    }

    fn ranges(&self) -> MutexGuard<'_, BTreeMap<usize, Protected>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request is called with the structure that the kernel's header has for it, which lives for the time of the call.
        match unsafe { libc::ioctl(self.descriptor.as_raw_fd(), request, std::ptr::from_mut(argument)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Takes note of threads that sleep because they have tried to write.
    fn watch(&self) {
        loop {
            let mut fault = Fault { event: 0, _reserved: [0; 7], _flags: 0, address: 0, _thread: 0 };
            let to = std::ptr::from_mut(&mut fault).cast();
            // SAFETY: room for exactly a message.
            let got = unsafe { libc::read(self.descriptor.as_raw_fd(), to, size_of::<Fault>()) };
            if got != size_of::<Fault>() as isize {
                if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                tracing::error!(error = %io::Error::last_os_error(), "userfaultfd");
                return;
            }
            if fault.event != UFFD_EVENT_PAGEFAULT {
                continue;
            }
            // Where it has been unprotected meanwhile, that has woken the thread.
            let senders = overlapping(&self.ranges(), fault.address as usize, 1)
                .map(|(at, protected)| (at, protected.senders.clone()));
            let Some((at, senders)) = senders else { continue };
            for (connection, source) in senders {
                match connection.upgrade() {
                    Some(connection) => connection.wanted(source),
                    None => unprotect(at, &connection, source),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!([size_of::<Api>(), size_of::<Register>(), size_of::<WriteProtect>()], [24, 32, 24]);
        assert_eq!([size_of::<Range>(), size_of::<Fault>()], [16, 32]);
    }

    #[test]
    fn a_thread_that_writes_waits_until_the_memory_is_writable_again() {
        assert!(can_protect(), "userfaultfd");
        let buffer = thruway_fabric::Buffer::sparse(4 * PAGE).unwrap();
        let at = buffer.as_ptr() as usize;
        assert!(protect(at, 2 * PAGE, (Weak::new(), 1)));
        assert!(!protect(at + PAGE, 2 * PAGE, (Weak::new(), 2)), "some of it is protected");
        assert!(protect(at, 2 * PAGE, (Weak::new(), 3)), "the same once more");
        assert!(sender_of(at + 2 * PAGE - 1, 1).is_some() && sender_of(at + 2 * PAGE, PAGE).is_none());
        // There is no such connection: the memory is writable at the first try.
        buffer.write(PAGE, &[7]);
        let mut seen = [0];
        buffer.read(PAGE, &mut seen);
        assert_eq!(seen, [7]);
        assert!(sender_of(at, 2 * PAGE).is_none());
        // Files are not of the kind that can be protected, and nothing is not, either.
        assert!(!protect(0x1000, PAGE, (Weak::new(), 3)));
    }
}
