//! Who is at the other end of a connection from this very machine.

use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// `struct nlmsghdr`, `struct inet_diag_req_v2`, `struct inet_diag_msg`: linux/netlink.h, linux/inet_diag.h.
const HEADER: usize = 16;
const REQUEST: usize = 56;
const ANSWER: usize = 72;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
/// `NLM_F_ROOT | NLM_F_MATCH`: a list.
const NLM_F_DUMP: u16 = 0x300;
const IPPROTO_TCP: u8 = 6;
const TCP_ESTABLISHED: u8 = 1;
const TCP_CLOSE_WAIT: u8 = 8;
const TCP_LISTEN: u8 = 10;
/// Index of the loopback interface in every network namespace: `LOOPBACK_IFINDEX` of the kernel.
const LOOPBACK: u32 = 1;
/// include/uapi/asm-generic/socket.h.
const SO_BINDTOIFINDEX: i32 = 62;

/// Owner of the socket at the other end of a TCP connection over the loopback interface: the user that created or accepted it.
/// `None` if the peer is not on this host, has not accepted the connection or has closed it, or if the lookup fails. Then no rights
/// may be assumed.
///
/// A proxy on this host (an ssh tunnel, a container's port forwarder) counts as the user that runs it.
pub(crate) fn owner(peer: SocketAddr, local: SocketAddr) -> Option<u32> {
    if !peer.ip().to_canonical().is_loopback() {
        return None;
    }
    by_netlink(peer, local).unwrap_or_else(|error| {
        tracing::debug!(%error, "asking for the owner of a socket");
        by_proc(peer, local)
    })
}

/// Owner of the socket that listens at a loopback address. `None` if none is found.
pub(crate) fn listener_owner(addr: SocketAddr) -> Option<u32> {
    if !addr.ip().to_canonical().is_loopback() {
        return None;
    }
    // The kernel looks up the socket that would take a connection from port 0.
    let listener = local_socket(addr, SocketAddr::new(addr.ip(), 0));
    listener.map(|found| found.map(|socket| socket.uid)).unwrap_or_else(|error| {
        tracing::debug!(%error, "asking for the owner of a listening socket");
        listener_by_proc(addr)
    })
}

/// A TCP socket of this host, as the kernel's socket diagnostics describe it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalSocket {
    /// The user that created or accepted it. For a connection that waits to be accepted: 0 or the listener's, by kernel version.
    pub uid: u32,
    /// `SO_COOKIE`: no other socket of this kernel has the same.
    pub cookie: u64,
    /// It is connected, and its own end has not closed it.
    pub is_open: bool,
    /// A process can have a descriptor of it: it does not wait to be accepted, and has not been closed.
    pub is_held: bool,
}

/// The socket of this network namespace with `local` as its own address and `peer` as its peer's. `None` if there is none.
///
/// # Errors
/// Those of netlink sockets; `ENOENT` if the kernel has no diagnostics of TCP sockets; [`io::ErrorKind::InvalidData`] for an answer that is none.
pub fn local_socket(local: SocketAddr, peer: SocketAddr) -> io::Result<Option<LocalSocket>> {
    ask(&diagnostics()?, 0, local, peer)
}

/// The kernel's socket diagnostics, of this network namespace.
///
/// # Errors
/// Those of `socket(2)`.
pub fn diagnostics() -> io::Result<OwnedFd> {
    let (family, protocol) = (AddressFamily::NETLINK, Some(netlink::SOCK_DIAG));
    Ok(rustix::net::socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?)
}

/// As [`local_socket`], by a socket of [`diagnostics`] that nothing else uses just now. `sequence` is another number each time.
///
/// # Errors
/// As [`local_socket`].
pub fn ask(
    diagnostics: impl AsFd,
    sequence: u32,
    local: SocketAddr,
    peer: SocketAddr,
) -> io::Result<Option<LocalSocket>> {
    // Connections of this host with itself go through this interface. Without it, the kernel would not find sockets bound to it.
    ask_on(diagnostics, LOOPBACK, sequence, local, peer)
}

/// Index of the interface that a socket is bound to (`SO_BINDTODEVICE`, a VRF, an IPv6 address of one link). `None` if it is bound to none.
///
/// # Errors
/// Those of `getsockopt(2)`.
pub fn bound_interface(socket: impl AsFd) -> io::Result<Option<u32>> {
    let (mut index, mut len) = (0i32, size_of::<i32>() as libc::socklen_t);
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the pointers describe an integer and its size.
    let done =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, SO_BINDTOIFINDEX, (&raw mut index).cast(), &raw mut len) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u32::try_from(index).ok().filter(|index| *index > 0))
}

/// As [`ask`], for a socket that may be bound to this interface. The kernel finds unbound sockets by any.
///
/// # Errors
/// As [`local_socket`].
pub fn ask_on(
    diagnostics: impl AsFd,
    interface: u32,
    sequence: u32,
    local: SocketAddr,
    peer: SocketAddr,
) -> io::Result<Option<LocalSocket>> {
    // What follows calls the socket looked for the peer's.
    let (peer, local) = (local, peer);
    let mut message = message(NLM_F_REQUEST, sequence, IPPROTO_TCP);
    let request = &mut message[HEADER..];
    let (peer_ip, local_ip) = (peer.ip().to_canonical(), local.ip().to_canonical());
    request[0] = if peer_ip.is_ipv4() { libc::AF_INET as u8 } else { libc::AF_INET6 as u8 };
    request[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
    // The socket that we look for has the peer's address as its own.
    request[8..10].copy_from_slice(&peer.port().to_be_bytes());
    request[10..12].copy_from_slice(&local.port().to_be_bytes());
    put(&mut request[12..28], peer_ip);
    put(&mut request[28..44], local_ip);
    request[44..48].copy_from_slice(&interface.to_ne_bytes());
    // No cookie: whatever socket there is.
    request[48..56].fill(0xff);
    rustix::net::send(&diagnostics, &message, SendFlags::empty())?;
    let mut answer = [0u8; 512];
    let len = loop {
        let (len, _) = rustix::net::recv(&diagnostics, &mut answer, RecvFlags::empty())?;
        // Else the answer to a question whose asker was interrupted.
        if len < HEADER || answer[8..12] == sequence.to_ne_bytes() {
            break len;
        }
    };
    let kind = u16::from_ne_bytes([answer[4], answer[5]]);
    if len >= HEADER + 4 && kind == libc::NLMSG_ERROR as u16 {
        let code = i32::from_ne_bytes(answer[HEADER..HEADER + 4].try_into().expect("4 bytes"));
        return match -code {
            libc::ENOENT if diagnoses_tcp() => Ok(None),
            code => Err(io::Error::from_raw_os_error(code)),
        };
    }
    if len < HEADER + ANSWER || kind != SOCK_DIAG_BY_FAMILY {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let message = &answer[HEADER..];
    Ok(Some(LocalSocket {
        uid: u32::from_ne_bytes(message[64..68].try_into().expect("4 bytes")),
        cookie: u64::from_ne_bytes(message[44..52].try_into().expect("8 bytes")),
        is_open: matches!(message[1], TCP_ESTABLISHED | TCP_CLOSE_WAIT),
        // The number of its file; sockets without one have 0.
        is_held: message[68..72] != [0; 4],
    }))
}

/// A request of these diagnostics. Its families, addresses and states are 0.
fn message(flags: u16, sequence: u32, protocol: u8) -> [u8; HEADER + REQUEST] {
    let mut message = [0u8; HEADER + REQUEST];
    message[0..4].copy_from_slice(&((HEADER + REQUEST) as u32).to_ne_bytes());
    message[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message[6..8].copy_from_slice(&flags.to_ne_bytes());
    message[8..12].copy_from_slice(&sequence.to_ne_bytes());
    message[HEADER + 1] = protocol;
    message
}

/// True if the kernel knows its TCP sockets. Without the module `tcp_diag`, it answers `ENOENT` for each, as for a socket that does not exist.
fn diagnoses_tcp() -> bool {
    // No lock: a process may fork during a call.
    static DIAGNOSES: AtomicBool = AtomicBool::new(false);
    if !DIAGNOSES.load(Ordering::Relaxed) {
        DIAGNOSES.store(diagnoses(IPPROTO_TCP).unwrap_or(false), Ordering::Relaxed);
    }
    DIAGNOSES.load(Ordering::Relaxed)
}

/// True if the kernel lists the sockets of a protocol. Asks for a list of those in no state.
fn diagnoses(protocol: u8) -> io::Result<bool> {
    let diagnostics = diagnostics()?;
    let mut message = message(NLM_F_REQUEST | NLM_F_DUMP, 0, protocol);
    message[HEADER] = libc::AF_INET as u8;
    rustix::net::send(&diagnostics, &message, SendFlags::empty())?;
    let mut answer = [0u8; 512];
    let (len, _) = rustix::net::recv(&diagnostics, &mut answer, RecvFlags::empty())?;
    let kind = u16::from_ne_bytes([answer[4], answer[5]]);
    // Either kind of end has the error, or 0.
    let code = i32::from_ne_bytes(answer[HEADER..HEADER + 4].try_into().expect("4 bytes"));
    let is_end = [libc::NLMSG_DONE, libc::NLMSG_ERROR].contains(&i32::from(kind));
    Ok(len >= HEADER + 4 && is_end && code == 0)
}

fn by_netlink(peer: SocketAddr, local: SocketAddr) -> io::Result<Option<u32>> {
    // Sockets that are half gone have no owner, and the kernel says 0.
    Ok(local_socket(peer, local)?.filter(|socket| socket.is_open && socket.is_held).map(|socket| socket.uid))
}

fn put(out: &mut [u8], ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => out[..4].copy_from_slice(&ip.octets()),
        IpAddr::V6(ip) => out.copy_from_slice(&ip.octets()),
    }
}

/// A line of `/proc/net/tcp`.
struct ProcSocket {
    own: SocketAddr,
    other: SocketAddr,
    state: u8,
    uid: u32,
    /// Number of its file; 0 without one.
    inode: u64,
}

impl ProcSocket {
    fn parse(line: &str) -> Option<ProcSocket> {
        let mut words = line.split_whitespace().skip(1);
        let (own, other) = (parse(words.next()?)?, parse(words.next()?)?);
        let state = u8::from_str_radix(words.next()?, 16).ok()?;
        let (uid, inode) = (words.nth(3)?.parse().ok()?, words.nth(1)?.parse().ok()?);
        Some(ProcSocket { own, other, state, uid, inode })
    }
}

/// The TCP sockets of this network namespace, where the kernel has no socket diagnostics.
fn proc_sockets() -> impl Iterator<Item = ProcSocket> {
    let texts = ["/proc/net/tcp", "/proc/net/tcp6"].into_iter().filter_map(|path| std::fs::read_to_string(path).ok());
    texts.flat_map(|text| text.lines().skip(1).filter_map(ProcSocket::parse).collect::<Vec<_>>())
}

fn is_same(a: SocketAddr, b: SocketAddr) -> bool {
    (a.ip().to_canonical(), a.port()) == (b.ip().to_canonical(), b.port())
}

fn by_proc(peer: SocketAddr, local: SocketAddr) -> Option<u32> {
    let is_open = |socket: &ProcSocket| matches!(socket.state, TCP_ESTABLISHED | TCP_CLOSE_WAIT) && socket.inode != 0;
    let found = proc_sockets().find(|s| is_open(s) && is_same(s.own, peer) && is_same(s.other, local));
    found.map(|socket| socket.uid)
}

fn listener_by_proc(addr: SocketAddr) -> Option<u32> {
    let is_there = |own: SocketAddr| own.port() == addr.port() && (is_same(own, addr) || own.ip().is_unspecified());
    let mut users = proc_sockets().filter(|s| s.state == TCP_LISTEN && is_there(s.own)).map(|socket| socket.uid);
    let first = users.next()?;
    // If there are several, this list does not say which of them takes a connection.
    users.all(|user| user == first).then_some(first)
}

/// An address as `/proc/net/tcp` writes it: words of the machine's byte order, in hexadecimal.
fn parse(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut bytes = Vec::new();
    for word in ip.as_bytes().chunks(8) {
        let word = u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok()?;
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    let ip: IpAddr = match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok()?.into(),
        16 => <[u8; 16]>::try_from(bytes).ok()?.into(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_protocol_without_diagnostics_is_noticed() {
        assert!(diagnoses_tcp());
        // No protocol has this number.
        assert!(!diagnoses(254).unwrap());
    }

    fn bind_to_loopback(socket: &impl AsRawFd) {
        let name = b"lo";
        let (level, option) = (libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
        // SAFETY: the pointer and the length describe `name`.
        let done = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, name.as_ptr().cast(), 2) };
        assert_eq!(done, 0);
    }

    #[test]
    fn the_owner_of_an_accepting_end_is_known_from_its_accept_on() {
        let us = rustix::process::geteuid().as_raw();
        for addr in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(addr) else { continue };
            // As a server that hides its listener from lookups without the interface.
            assert_eq!(bound_interface(&listener).unwrap(), None);
            bind_to_loopback(&listener);
            assert_eq!(bound_interface(&listener).unwrap(), Some(LOOPBACK));
            let at = listener.local_addr().unwrap();
            assert_eq!((listener_owner(at), listener_by_proc(at)), (Some(us), Some(us)), "{addr}");
            let near = TcpStream::connect(at).unwrap();
            let local = near.local_addr().unwrap();
            let waiting = local_socket(at, local).unwrap().unwrap();
            assert!(waiting.is_open && !waiting.is_held, "{waiting:?}");
            assert_eq!((owner(at, local), by_proc(at, local)), (None, None), "{addr}");
            let (far, _) = listener.accept().unwrap();
            assert_eq!((owner(at, local), by_proc(at, local)), (Some(us), Some(us)), "{addr}");
            drop(listener);
            assert_eq!((listener_owner(at), listener_by_proc(at)), (None, None), "{addr}");
            drop(far);
            assert_eq!((owner(at, local), by_proc(at, local)), (None, None), "{addr}");
        }
    }

    #[test]
    fn the_owner_of_a_local_peer_is_known_while_it_is_there() {
        let us = rustix::process::geteuid().as_raw();
        for addr in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(addr) else { continue };
            let port = listener.local_addr().unwrap().port();
            let ip = if addr.starts_with("[::1]") { "::1" } else { "127.0.0.1" };
            let near = TcpStream::connect((ip, port)).unwrap();
            let (far, peer) = listener.accept().unwrap();
            let local = far.local_addr().unwrap();
            assert_eq!(owner(peer, local), Some(us), "{addr}");
            assert_eq!(by_netlink(peer, local).ok().flatten().or(by_proc(peer, local)), Some(us));
            assert_eq!(by_proc(peer, local), Some(us));
            assert_eq!(owner(peer, SocketAddr::new(local.ip(), 1)), None, "another connection");
            drop(near);
            // The last to close first leaves a socket that nobody owns.
            let _ = std::io::Read::read(&mut &far, &mut [0]);
            drop(far);
            assert_eq!(owner(peer, local), None);
        }
        assert_eq!(owner("192.0.2.1:5".parse().unwrap(), "127.0.0.1:6".parse().unwrap()), None);
    }
}
