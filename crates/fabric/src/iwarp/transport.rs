//! What carries the bytes of a connection: TCP, or rings in shared memory.

use super::socket;
use crate::shm;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use thruway_iwarp::mpa::Preferences;
use thruway_tcp::{Origin, PathInfo};

/// A connection in set-up.
pub(super) enum Socket {
    Tcp(TcpStream),
    Shm(shm::Socket),
}

/// A connection in use.
pub(super) enum Transport {
    Tcp(TcpStream),
    Shm(shm::Channel),
}

/// What a transfer says of the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moved {
    /// Nothing, until an event says otherwise.
    Nothing,
    /// So many bytes; what is behind them is announced by an event, or seen at the next poll.
    Last(usize),
    /// So many bytes, and there may be more. None at the end of the stream.
    Some(usize),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Shm(socket) => socket.as_fd(),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.read(bytes),
            Socket::Shm(socket) => socket.read(bytes),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.write(bytes),
            Socket::Shm(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Socket {
    /// What is wanted of the connection: what is in shared memory is right, and nothing is added to find that out.
    pub(super) fn preferences(&self, wanted: Preferences) -> Preferences {
        match self {
            Socket::Tcp(_) => wanted,
            Socket::Shm(_) => Preferences { crc: false, markers: false, ..wanted },
        }
    }

    pub(super) fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Socket::Tcp(stream) => stream.local_addr(),
            Socket::Shm(socket) => Ok(socket.listener()),
        }
    }

    /// The outcome of a connect that was in progress: `Ok(false)` while it still is.
    pub(super) fn connect_result(&self) -> io::Result<bool> {
        match self {
            Socket::Tcp(stream) => socket::connect_result(stream),
            Socket::Shm(_) => Ok(true),
        }
    }

    pub(super) fn tune(&self, peer: SocketAddr, congestion: Option<&str>) {
        if let Socket::Tcp(stream) = self {
            thruway_tcp::tune(stream, peer, congestion);
        }
    }

    pub(super) fn path(&self) -> Option<PathInfo> {
        match self {
            Socket::Tcp(stream) => PathInfo::of(stream),
            Socket::Shm(_) => None,
        }
    }

    /// For what is behind the peer's answer.
    pub(super) fn into_transport(self) -> io::Result<Transport> {
        Ok(match self {
            Socket::Tcp(stream) => Transport::Tcp(stream),
            Socket::Shm(socket) => Transport::Shm(socket.into_channel()?),
        })
    }

    /// For what is behind this end's answer, and what of that is still to be sent: over TCP it goes with the first data.
    pub(super) fn answer(self, reply: Vec<u8>) -> io::Result<(Transport, Vec<u8>)> {
        Ok(match self {
            Socket::Tcp(stream) => (Transport::Tcp(stream), reply),
            Socket::Shm(socket) => (Transport::Shm(socket.answer(&reply)?), Vec::new()),
        })
    }
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Transport::Tcp(stream) => stream.as_fd(),
            Transport::Shm(channel) => channel.as_fd(),
        }
    }
}

impl Transport {
    /// Receives into memory described by `iov`.
    ///
    /// # Safety
    /// Every element must describe writable memory that nothing borrows.
    pub(super) unsafe fn receive(&mut self, iov: &[libc::iovec]) -> io::Result<Moved> {
        match self {
            Transport::Tcp(stream) => {
                // SAFETY: the caller's promise.
                let n = unsafe { socket::receive(stream, iov) }?;
                Ok(Moved::of_socket(n, iov))
            }
            Transport::Shm(channel) => {
                // SAFETY: the caller's promise.
                let n = unsafe { channel.receive(iov) }?;
                Ok(match n {
                    None => Moved::Nothing,
                    Some(n) if n > 0 && !channel.may_have_more() => Moved::Last(n),
                    Some(n) => Moved::Some(n),
                })
            }
        }
    }

    /// Sends from memory described by `iov`.
    ///
    /// # Safety
    /// Every element must describe readable memory.
    pub(super) unsafe fn send(&mut self, iov: &[libc::iovec]) -> io::Result<Moved> {
        match self {
            Transport::Tcp(stream) => {
                // SAFETY: the caller's promise.
                let n = unsafe { socket::send(stream, iov) }?;
                Ok(Moved::of_socket(n, iov))
            }
            Transport::Shm(channel) => {
                // SAFETY: the caller's promise.
                let n = unsafe { channel.send(iov) }?;
                Ok(n.map_or(Moved::Nothing, Moved::Some))
            }
        }
    }

    /// Nothing more is sent.
    pub(super) fn end(&mut self) {
        match self {
            Transport::Tcp(stream) => drop(stream.shutdown(Shutdown::Write)),
            Transport::Shm(channel) => channel.end(),
        }
    }

    /// The peer's half is shut, or the connection is broken.
    pub(super) fn note_hang_up(&mut self) {
        if let Transport::Shm(channel) = self {
            channel.note_hang_up();
        }
    }

    /// For those who poll, where bytes can be looked for without the connection's lock.
    pub(super) fn glance(&self) -> Option<Arc<shm::Glance>> {
        match self {
            Transport::Tcp(_) => None,
            Transport::Shm(channel) => Some(channel.glance()),
        }
    }

    /// Largest segment that is sent in one piece.
    pub(super) fn max_segment(&self) -> usize {
        match self {
            Transport::Tcp(stream) => socket::max_segment(stream),
            Transport::Shm(_) => usize::from(u16::MAX),
        }
    }

    pub(super) fn path(&self) -> Option<PathInfo> {
        match self {
            Transport::Tcp(stream) => PathInfo::of(stream),
            Transport::Shm(_) => None,
        }
    }

    /// The accepting end of a connection to `peer`.
    pub(super) fn acceptor(&self, peer: SocketAddr) -> Origin {
        match self {
            Transport::Tcp(stream) => {
                stream.local_addr().map_or(Origin::UnknownUser, |own| Origin::of_acceptor(peer, own))
            }
            Transport::Shm(channel) => channel.peer_user().map_or(Origin::UnknownUser, Origin::user),
        }
    }

    /// What it is, for people.
    pub(super) fn detail(&self) -> String {
        match self {
            Transport::Tcp(stream) => socket::congestion(stream),
            Transport::Shm(_) => "shared memory".into(),
        }
    }
}

impl Moved {
    /// A short transfer emptied (or filled) the socket: an event tells of the next.
    fn of_socket(n: Option<usize>, iov: &[libc::iovec]) -> Moved {
        let offered: usize = iov.iter().map(|piece| piece.iov_len).sum();
        match n {
            None => Moved::Nothing,
            Some(n) if n == offered || n == 0 => Moved::Some(n),
            Some(n) => Moved::Last(n),
        }
    }
}
