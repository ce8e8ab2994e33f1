//! What processes of this host say to the relay, and what it gives them.

use crate::Error;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use thruway_sockets::meeting::{Offer, Offered, REQUEST_LEN, Request, relay_name, service_name};

/// The Unix socket to which processes connect.
pub(crate) struct Door(pub(crate) OwnedFd);

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

impl Door {
    pub(crate) fn open(port: u16) -> Result<Door, Error> {
        let uid = rustix::process::geteuid().as_raw();
        let failed = |error: Errno| match error {
            Errno::ADDRINUSE => Error::Taken(port),
            error => Error::io("no Unix socket")(error.into()),
        };
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None).map_err(failed)?;
        let name = SocketAddrUnix::new_abstract_name(&relay_name(uid, port)).map_err(failed)?;
        rustix::net::bind(&socket, &name).map_err(failed)?;
        rustix::net::listen(&socket, 4096).map_err(failed)?;
        Ok(Door(socket))
    }

    /// A process that has connected, if one has; others' are turned away.
    pub(crate) fn accept(&self) -> Option<OwnedFd> {
        for _ in 0..64 {
            let socket = rustix::net::accept_with(&self.0, FLAGS).ok()?;
            if is_ours(&socket) {
                return Some(socket);
            }
        }
        None
    }
}

fn is_ours(socket: &OwnedFd) -> bool {
    sockopt::socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// What a process has said.
pub(crate) enum Said {
    /// Something it has done wants a look.
    Wake,
    Request(Request, Option<OwnedFd>),
    /// It has gone.
    Gone,
}

/// The next thing that a process has said, if there is one.
pub(crate) fn hear(socket: &OwnedFd) -> Option<Said> {
    let mut message = [0u8; REQUEST_LEN + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut control, flags) {
        Ok(received) => {
            let files = control.drain().filter_map(|part| match part {
                RecvAncillaryMessage::ScmRights(files) => Some(files),
                _ => None,
            });
            let file = files.flatten().next();
            if received.bytes == 0 {
                return Some(Said::Gone);
            }
            Some(Request::decode(&message[..received.bytes]).map_or(Said::Wake, |request| Said::Request(request, file)))
        }
        Err(Errno::AGAIN | Errno::INTR) => None,
        Err(_) => Some(Said::Gone),
    }
}

/// Hands a process a segment for a connection.
pub(crate) fn offer(service: u64, key: [u8; 48], segment: &OwnedFd) -> io::Result<()> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(&service_name(service))?)?;
    if !is_ours(&socket) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let message = Offer { key, cookie: 0, what: Offered::Relayed }.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [segment.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&files));
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(&socket, &[IoSlice::new(&message)], &mut control, flags)?;
    Ok(())
}
