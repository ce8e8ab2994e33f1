//! Who may be at the other end of a connection, and how that is proved.
//!
//! Without a group, a process of the same user; with one, a process of any member of it, or of root. Of the other end two things are
//! known: which socket it is and who has made that, from the kernel's socket diagnostics; and who the process is that one meets through a
//! Unix socket, and what groups it has. Both have to be the same user: another member can write on the board that a connection is to be
//! met at a Unix socket of its own, and who has made the connection cannot know.

use crate::report::Reason;
use crate::tcp::Connection;
use crate::{SETTINGS, real, slots};
use rustix::fd::OwnedFd;
use rustix::net::sockopt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use thruway_sockets::board::Key;
use thruway_tcp::LocalSocket;

/// include/uapi/asm-generic/socket.h.
const SO_PEERGROUPS: i32 = 59;
/// Since Linux 6.16.
const SO_PASSRIGHTS: i32 = 83;
/// Groups of a process that are looked through. The kernel's limit is 65536; what has more than these is no member of any.
const GROUPS: usize = 1024;

/// The user whom the kernel says in place of those that the process's user namespace does not know: that is many, and none of them.
static UNKNOWN_USER: AtomicU32 = AtomicU32::new(65534);

/// At the beginning: the host may have another number for that.
pub(crate) fn start() {
    if group().is_some()
        && let Ok(text) = std::fs::read_to_string("/proc/sys/kernel/overflowuid")
        && let Ok(user) = text.trim().parse()
    {
        UNKNOWN_USER.store(user, Ordering::Relaxed);
    }
}

/// The group whose members may be at the other end.
fn group() -> Option<u32> {
    SETTINGS.get().and_then(|settings| settings.group)
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether the process at the other end of a Unix socket is one of this user's.
pub(crate) fn is_own(socket: &OwnedFd) -> bool {
    sockopt::socket_peercred(socket).is_ok_and(|peer| peer.uid.as_raw() == own_user())
}

fn is_known(user: u32) -> bool {
    user != UNKNOWN_USER.load(Ordering::Relaxed)
}

/// Who is at the other end of a Unix socket.
pub(crate) struct Sender {
    /// The user, if that may be at the other end of a connection.
    pub(crate) user: Option<u32>,
    /// It is this process's.
    pub(crate) is_own: bool,
}

impl Sender {
    pub(crate) fn of(socket: &OwnedFd) -> Sender {
        let Ok(peer) = sockopt::socket_peercred(socket) else { return Sender { user: None, is_own: false } };
        let user = peer.uid.as_raw();
        let is_own = user == own_user();
        let may = match group() {
            None => is_own,
            Some(group) => {
                is_known(user) && (peer.uid.is_root() || peer.gid.as_raw() == group || has_group(socket, group))
            }
        };
        Sender { user: may.then_some(user), is_own }
    }

    /// Whether it may be a peer, or this user's relay.
    pub(crate) fn may_offer(&self) -> bool {
        self.user.is_some() || self.is_own
    }

    /// Closes a file that has come with an offer which is refused, if this user has sent it. Those of others stay open: the release of one
    /// may last as long as who has sent it wants.
    pub(crate) fn put_away(&self, file: OwnedFd) {
        if !self.is_own {
            ASIDE.fetch_add(1, Ordering::Relaxed);
            // As it is: its file system would hear of it if a copy were closed.
            std::mem::forget(file);
        }
    }

    /// Closes the socket that an offer was to come by which is refused, or puts it aside: to close it is to release what was sent with it.
    pub(crate) fn release(&self, socket: OwnedFd) {
        if !self.is_own {
            ASIDE.fetch_add(1, Ordering::Relaxed);
            let _ = slots::hide(socket);
        }
    }
}

fn has_group(socket: &OwnedFd, group: u32) -> bool {
    let mut groups = [0u32; GROUPS];
    let mut len = size_of_val(&groups) as libc::socklen_t;
    let to = (&raw mut groups).cast();
    // SAFETY: `to` and `len` describe memory for writing, of integers.
    let known = unsafe { real::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERGROUPS, to, &raw mut len) } == 0;
    known && groups.iter().take(len as usize / size_of::<u32>()).any(|one| *one == group)
}

/// Has a Unix socket take no files: the release of one may last as long as who has sent it wants. Where the kernel knows that.
pub(crate) fn take_no_files(socket: &OwnedFd) {
    Connection::new(socket.as_raw_fd()).set(libc::SOL_SOCKET, SO_PASSRIGHTS, 0);
}

/// Sockets and files that were refused, and have to stay open.
static ASIDE: AtomicU32 = AtomicU32::new(0);
const ASIDE_MAX: u32 = 32;

/// Whether no more can be refused.
pub(crate) fn is_full() -> bool {
    ASIDE.load(Ordering::Relaxed) >= ASIDE_MAX
}

/// The socket at the other end of a connection.
fn other_end(fd: i32, key: Key) -> io::Result<Option<LocalSocket>> {
    let socket = slots::borrow(fd);
    let names = (rustix::net::getsockname(socket), rustix::net::getpeername(socket));
    let (Ok(local), Ok(Some(peer))) = names else { return Err(io::ErrorKind::NotConnected.into()) };
    let (Ok(local), Ok(peer)) = (SocketAddr::try_from(local), SocketAddr::try_from(peer)) else {
        return Err(io::ErrorKind::NotConnected.into());
    };
    local_socket(key.namespace(), peer, local)
}

/// That the socket at the other end of a connection is the one with this cookie, in this network namespace; and the user who has made it.
pub(crate) fn prove(fd: i32, key: Key, cookie: u64) -> Result<u32, (Reason, io::Error)> {
    match other_end(fd, key) {
        Ok(Some(found))
            if found.is_open
                && found.cookie == cookie
                && if group().is_some() { is_known(found.uid) } else { found.uid == own_user() } =>
        {
            Ok(found.uid)
        }
        Ok(_) => Err((Reason::NotFound, io::Error::other("what is at the other end is not what was found"))),
        Err(error) => Err((Reason::Failed, error)),
    }
}

/// The user who has made the socket at the other end of a connection, of which this user's or group's board says that it can be
/// accelerated.
pub(crate) fn user_at(fd: i32, key: Key) -> Option<u32> {
    match group() {
        // No other user can open the board.
        None => Some(own_user()),
        Some(_) => {
            let found = other_end(fd, key).ok().flatten();
            found.filter(|found| found.is_open && is_known(found.uid)).map(|found| found.uid)
        }
    }
}

/// The kernel's socket diagnostics, of the network namespace with this number.
static DIAGNOSTICS: AtomicI32 = AtomicI32::new(-1);
static DIAGNOSTICS_OF: AtomicU64 = AtomicU64::new(0);
static ASKED: AtomicU32 = AtomicU32::new(0);
static ASKING: crate::lock::Lock = crate::lock::Lock::new();

/// Whether a socket that this process has just made is in a network namespace: its thread may be in another than a connection.
pub(crate) fn is_in(socket: i32, namespace: u64) -> bool {
    Connection::new(socket).cookie(libc::SO_NETNS_COOKIE).is_ok_and(|cookie| cookie == namespace)
}

/// What is said if it is not.
pub(crate) fn in_another_namespace() -> io::Error {
    io::Error::other("the connection is in another network namespace than this thread")
}

/// As [`thruway_tcp::local_socket`], by a socket that this process keeps.
fn local_socket(namespace: u64, local: SocketAddr, peer: SocketAddr) -> io::Result<Option<LocalSocket>> {
    let Ok(_guard) = ASKING.lock() else { return Err(io::ErrorKind::Interrupted.into()) };
    let mut fd = DIAGNOSTICS.load(Ordering::Relaxed);
    if fd >= 0 && DIAGNOSTICS_OF.load(Ordering::Relaxed) != namespace {
        DIAGNOSTICS.store(-1, Ordering::Relaxed);
        slots::close_hidden(std::mem::replace(&mut fd, -1));
    }
    if fd < 0 {
        let diagnostics = thruway_tcp::diagnostics()?;
        if !is_in(diagnostics.as_raw_fd(), namespace) {
            return Err(in_another_namespace());
        }
        fd = slots::hide(diagnostics).ok_or(io::ErrorKind::OutOfMemory)?;
        DIAGNOSTICS_OF.store(namespace, Ordering::Relaxed);
        DIAGNOSTICS.store(fd, Ordering::Relaxed);
    }
    thruway_tcp::ask(slots::borrow(fd), ASKED.fetch_add(1, Ordering::Relaxed), local, peer)
}

/// In a child that has just been forked: it and its parent would read each other's answers.
pub(crate) fn after_fork() {
    ASKING.reset();
    let diagnostics = DIAGNOSTICS.swap(-1, Ordering::Relaxed);
    if diagnostics >= 0 {
        slots::close_hidden(diagnostics);
    }
}
