//! Connections: a Unix socket to make them by and to call each other over, and the rings.

use super::Config;
use super::ring::{End, Memory, Reader, Writer};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Calls that have been sent and not read, at a time, are read at once up to this many.
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

/// A listening socket.
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    pub(crate) addr: SocketAddr,
    /// Keeps the port, where the system has chosen it, from TCP listeners.
    _port: Option<OwnedFd>,
}

/// Listens at an address of this host.
pub(crate) fn listen(mut addr: SocketAddr, backlog: u32) -> io::Result<Listener> {
    let mut port = None;
    if addr.port() == 0 {
        let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let fd = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&fd, &addr)?;
        addr.set_port(SocketAddr::try_from(rustix::net::getsockname(&fd)?)?.port());
        port = Some(fd);
    }
    let fd = socket()?;
    rustix::net::bind(&fd, &name(addr)?)?;
    rustix::net::listen(&fd, backlog as i32)?;
    Ok(Listener { socket: fd, addr, _port: port })
}

impl Listener {
    /// The next connection, and the user who has made it.
    pub(crate) fn accept(&self) -> io::Result<(Socket, u32)> {
        let fd = rustix::net::accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?;
        let user = sockopt::socket_peercred(&fd)?.uid.as_raw();
        Ok((Socket { fd, local: self.addr, memory: SetUp::Awaited }, user))
    }
}

/// Connects to a listener at an address of this host. Not to one of another user, unless that is wanted.
pub(crate) fn start_connect(addr: SocketAddr, config: &Config) -> io::Result<Socket> {
    let wildcard = match addr.ip().to_canonical() {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let everywhere = [addr.ip(), wildcard, Ipv6Addr::UNSPECIFIED.into()].map(|ip| SocketAddr::new(ip, addr.port()));
    let fd = socket()?;
    let mut connected = Err(Errno::CONNREFUSED);
    for addr in everywhere {
        connected = rustix::net::connect(&fd, &name(addr)?);
        if connected != Err(Errno::CONNREFUSED) {
            break;
        }
    }
    // Where its queue is full, and not that it would be connected later.
    connected.map_err(|error| if error == Errno::AGAIN { Errno::CONNREFUSED } else { error })?;
    let (user, own) = (sockopt::socket_peercred(&fd)?.uid, rustix::process::geteuid());
    if !config.any_user && !user.is_root() && user != own {
        let why = format!("another user (number {}) listens there for shared memory", user.as_raw());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    let (memory, file) = Memory::create(config.ring)?;
    Ok(Socket { fd, local: addr, memory: SetUp::Made { memory, file: Some(file) } })
}

/// A connection in set-up.
pub(crate) struct Socket {
    fd: OwnedFd,
    /// The address of the listener.
    local: SocketAddr,
    pub(super) memory: SetUp,
}

pub(super) enum SetUp {
    /// Of this end, to be sent with the first bytes.
    Made {
        memory: Arc<Memory>,
        file: Option<OwnedFd>,
    },
    /// Of the peer, to come with its first bytes.
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

    /// What goes through the rings from here on.
    pub(crate) fn into_channel(self) -> io::Result<Channel> {
        let (memory, end) = match self.memory {
            SetUp::Made { memory, .. } => (memory, End::Connecting),
            SetUp::Arrived(file) => (Memory::adopt(file)?, End::Accepting),
            SetUp::Awaited => return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer sent no memory")),
        };
        let (writer, reader) = memory.ends(end);
        Ok(Channel { fd: self.fd, writer, reader, is_called: true, peer_is_gone: false })
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let SetUp::Made { file, .. } = &mut self.memory else {
            return Ok(rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL)?);
        };
        let sent = match file {
            None => rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL)?,
            Some(with) => {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                let files = [with.as_fd()];
                assert!(control.push(SendAncillaryMessage::ScmRights(&files)), "there is room for one");
                rustix::net::sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?
            }
        };
        *file = None;
        Ok(sent)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
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
    /// As [`crate::iwarp`]'s of TCP: `Ok(None)` if nothing can be received now, `Ok(Some(0))` at the end.
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

    /// Whether this end is to be called, or looks by itself. Whoever changes that tries to receive and to send afterwards.
    pub(crate) fn set_called(&mut self, is_called: bool) {
        self.is_called = is_called;
        if !is_called {
            self.reader.do_not_wait();
        }
    }

    /// Sends what is left of the set-up.
    pub(crate) fn answer(&self, bytes: &[u8]) -> io::Result<()> {
        // A fresh socket has room for it.
        match rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn call(&self) {
        // Where so many calls wait to be read that there is no room, this one is not needed; an end shows elsewhere.
        let _ = rustix::net::send(&self.fd, &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }

    fn take_calls(&mut self) {
        loop {
            match rustix::net::recv(&self.fd, &mut [0; CALLS], RecvFlags::DONTWAIT) {
                Ok((CALLS, _)) => {}
                Ok((1.., _)) | Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Ok((0, _)) | Err(_) => return self.peer_is_gone = true,
            }
        }
    }
}
