//! Connections: a Unix socket to make them by and to call each other over, and the rings.

use super::Config;
use super::ring::{End, Glance, Memory, Reader, Writer};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use thruway_tcp::Origin;

/// Calls that are taken at a time.
const CALLS: usize = 256;

/// The name of a listener. Its last part grows with every change of what is spoken over the socket and through the rings.
fn name(addr: SocketAddr) -> io::Result<SocketAddrUnix> {
    let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
    Ok(SocketAddrUnix::new_abstract_name(format!("thruway/shm/1/{addr}").as_bytes())?)
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// `SO_PASSRIGHTS` of Linux 6.16.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Has the kernel refuse what peers would send along: files whose release can take as long as they like (a socket that lingers, a file of
/// a server of theirs), and is done by the thread that reads them or closes the socket.
fn refuse_files(fd: &OwnedFd) -> io::Result<()> {
    let no: libc::c_int = 0;
    // SAFETY: the option's value is a number at this address, of this size.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const no).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if rc == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            Err(io::Error::new(io::ErrorKind::Unsupported, "it needs Linux 6.16 (SO_PASSRIGHTS)"))
        }
        error => Err(error),
    }
}

/// Whether the kernel has what listeners need.
pub(crate) fn check() -> io::Result<()> {
    refuse_files(&socket()?)
}

/// A listening socket.
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    pub(crate) addr: SocketAddr,
    ring: usize,
    /// Keeps the port, where the system has chosen it, from TCP listeners.
    _port: Option<OwnedFd>,
}

/// Listens at an address of this host.
pub(crate) fn listen(mut addr: SocketAddr, backlog: u32, config: &Config) -> io::Result<Listener> {
    // Otherwise each connection would fail.
    Memory::check_limit(config.ring)?;
    let mut port = None;
    if addr.port() == 0 {
        let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let fd = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&fd, &addr)?;
        addr.set_port(SocketAddr::try_from(rustix::net::getsockname(&fd)?)?.port());
        port = Some(fd);
    }
    let fd = socket()?;
    // Before anybody can connect; connections inherit it.
    refuse_files(&fd)?;
    rustix::net::bind(&fd, &name(addr)?)?;
    rustix::net::listen(&fd, backlog as i32)?;
    Ok(Listener { socket: fd, addr, ring: config.ring, _port: port })
}

impl Listener {
    /// The next connection, and the user who has made it.
    pub(crate) fn accept(&self) -> io::Result<(Socket, u32)> {
        let fd = rustix::net::accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?;
        let user = sockopt::socket_peercred(&fd)?.uid.as_raw();
        Ok((Socket { fd, local: self.addr, memory: SetUp::ToBeMade(self.ring) }, user))
    }
}

/// Connects to a listener at an address of this host. Not to one of another user, unless that is wanted.
pub(crate) fn start_connect(addr: SocketAddr, config: &Config) -> io::Result<Socket> {
    let wildcard = match addr.ip().to_canonical() {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let everywhere = [addr.ip(), wildcard, Ipv6Addr::UNSPECIFIED.into()].map(|ip| SocketAddr::new(ip, addr.port()));
    let mut refused = io::Error::from(Errno::CONNREFUSED);
    for at in everywhere {
        let fd = socket()?;
        match rustix::net::connect(&fd, &name(at)?) {
            Ok(()) => {}
            // Its queue is full, and not that it would be connected later.
            Err(Errno::CONNREFUSED | Errno::AGAIN) => continue,
            Err(error) => return Err(error.into()),
        }
        let user = sockopt::socket_peercred(&fd)?.uid;
        if config.any_user || Origin::user(user.as_raw()).is_own_user() {
            return Ok(Socket { fd, local: addr, memory: SetUp::Awaited });
        }
        let why = format!("another user (number {}) listens there for shared memory", user.as_raw());
        refused = io::Error::new(io::ErrorKind::PermissionDenied, why);
    }
    Err(refused)
}

/// A connection in set-up.
pub(crate) struct Socket {
    fd: OwnedFd,
    /// The address of the listener.
    local: SocketAddr,
    pub(super) memory: SetUp,
}

/// The memory, which the accepting end makes: it takes no files from peers.
pub(super) enum SetUp {
    /// Two rings of this size, by this end when it accepts.
    ToBeMade(usize),
    /// To come with the peer's answer.
    Awaited,
    Arrived(OwnedFd),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Socket {
    pub(crate) fn listener(&self) -> SocketAddr {
        self.local
    }

    /// What goes through the rings behind the peer's answer.
    pub(crate) fn into_channel(self) -> io::Result<Channel> {
        let SetUp::Arrived(file) = self.memory else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer sent no memory"));
        };
        Ok(Channel::new(self.fd, &Memory::adopt(file)?, End::Connecting))
    }

    /// Answers, and hands over the memory; what goes through the rings behind that.
    pub(crate) fn answer(self, reply: &[u8]) -> io::Result<Channel> {
        let SetUp::ToBeMade(ring) = self.memory else { return Err(io::ErrorKind::InvalidInput.into()) };
        let (memory, file) = Memory::create(ring)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)), "there is room for one");
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // A fresh socket has room for it.
        if rustix::net::sendmsg(&self.fd, &[IoSlice::new(reply)], &mut control, flags)? != reply.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        Ok(Channel::new(self.fd, &memory, End::Accepting))
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if let SetUp::ToBeMade(_) = self.memory {
            return Ok(rustix::net::recv(&self.fd, bytes, RecvFlags::DONTWAIT)?.0);
        }
        // Room for one: the kernel closes what a peer sends beyond that.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
        if got.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer sent more files than one"));
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                for file in files {
                    if matches!(self.memory, SetUp::Awaited) {
                        self.memory = SetUp::Arrived(file);
                    }
                }
            }
        }
        Ok(got.bytes)
    }
}

/// A connection in use.
pub(crate) struct Channel {
    fd: OwnedFd,
    writer: Writer,
    reader: Reader,
    /// This end is called when there is something for it; otherwise it looks by itself.
    is_called: bool,
    /// What is in the ring is the last there will be.
    peer_is_gone: bool,
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Channel {
    fn new(fd: OwnedFd, memory: &Arc<Memory>, end: End) -> Channel {
        let (writer, reader) = memory.ends(end);
        Channel { fd, writer, reader, is_called: true, peer_is_gone: false }
    }

    /// User of the peer: of the listener, or at the accepting end of the connecting process.
    pub(crate) fn peer_user(&self) -> io::Result<u32> {
        Ok(sockopt::socket_peercred(&self.fd)?.uid.as_raw())
    }

    /// For those who poll.
    pub(crate) fn glance(&self) -> Arc<Glance> {
        self.reader.glance()
    }

    /// As [`crate::iwarp`]'s of TCP: `Ok(None)` if nothing can be received now, `Ok(Some(0))` at the end.
    /// [`Channel::may_have_more`] says whether to try again.
    ///
    /// # Safety
    /// Every element must describe writable memory that nothing borrows.
    pub(crate) unsafe fn receive(&mut self, pieces: &[libc::iovec]) -> io::Result<Option<usize>> {
        loop {
            let was_last = self.peer_is_gone;
            // SAFETY: the caller's promise.
            let n = unsafe { self.reader.read(pieces) }?;
            if n > 0 {
                if self.reader.release() {
                    self.call();
                }
                return Ok(Some(n));
            }
            if was_last || self.reader.is_at_end()? {
                return Ok(Some(0));
            }
            if !self.is_called {
                return Ok(None);
            }
            self.take_calls();
            if !self.peer_is_gone && self.reader.wait_for_bytes()? {
                return Ok(None);
            }
        }
    }

    /// Whether there may be something behind what has just been received. An end that looks by itself sees at its next look what has
    /// come meanwhile; one that is called has to ask for that.
    pub(crate) fn may_have_more(&self) -> bool {
        self.is_called || !self.reader.is_drained()
    }

    /// As [`crate::iwarp`]'s of TCP: `Ok(None)` if nothing can be sent now.
    ///
    /// # Safety
    /// Every element must describe readable memory.
    pub(crate) unsafe fn send(&mut self, pieces: &[libc::iovec]) -> io::Result<Option<usize>> {
        loop {
            if self.peer_is_gone {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            // SAFETY: the caller's promise.
            let n = unsafe { self.writer.write(pieces) }?;
            if n > 0 {
                if self.writer.publish() {
                    self.call();
                }
                return Ok(Some(n));
            }
            if !self.is_called || self.writer.wait_for_room(pieces)? {
                return Ok(None);
            }
        }
    }

    /// Nothing more is sent.
    pub(crate) fn end(&mut self) {
        if self.writer.end() {
            self.call();
        }
    }

    /// The socket has said that the peer has closed it, or is no more.
    pub(crate) fn note_hang_up(&mut self) {
        self.peer_is_gone = true;
    }

    /// Whether this end is to be called, or looks by itself. After a change, the caller tries to receive and to send.
    pub(crate) fn set_called(&mut self, is_called: bool) {
        self.is_called = is_called;
        if !is_called {
            self.reader.do_not_wait();
        }
    }

    fn call(&self) {
        // Where so many calls wait to be read that there is no room, this one is not needed; an end shows elsewhere.
        let _ = rustix::net::send(&self.fd, &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }

    /// Not more at a time than any peer has sent that keeps the rules: each later one is an event of its own.
    fn take_calls(&mut self) {
        match rustix::net::recv(&self.fd, &mut [0; CALLS], RecvFlags::DONTWAIT) {
            Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR) => {}
            Ok((0, _)) | Err(_) => self.peer_is_gone = true,
        }
    }
}
