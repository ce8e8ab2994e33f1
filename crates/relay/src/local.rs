//! What processes of this host say to the relay, and what it gives them.

use crate::Error;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::time::Duration;
use thruway_sockets::meeting::{Offer, Offered, RELAY_FULL, REQUEST_LEN, Request, relay_name, service_name};

/// The Unix socket to which processes connect.
pub(crate) struct Door(pub(crate) OwnedFd);

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

impl Door {
    /// Takes the name. Nothing can connect before [`Door::listen`].
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
        Ok(Door(socket))
    }

    /// Lets processes connect.
    pub(crate) fn listen(&self) -> Result<(), Error> {
        rustix::net::listen(&self.0, 4096).map_err(|error| Error::io("no Unix socket")(error.into()))
    }

    /// A process that has connected, if one has; others' are turned away. It gets a description of this relay.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] if there is no such process, [`Errno::MFILE`] or [`Errno::NFILE`] at the limit of open files.
    pub(crate) fn accept(&self, about: &About) -> Result<OwnedFd, Errno> {
        for _ in 0..64 {
            let socket = rustix::net::accept_with(&self.0, FLAGS)?;
            if is_ours(&socket) {
                let _ =
                    rustix::net::send(&socket, about.encode().as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
                return Ok(socket);
            }
        }
        Err(Errno::AGAIN)
    }

    /// Refuses a new process. False if there is none.
    pub(crate) fn refuse(&self) -> bool {
        let socket = rustix::net::accept_with(&self.0, FLAGS);
        if let Ok(socket) = &socket {
            let _ = rustix::net::send(socket, RELAY_FULL.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
        socket.is_ok()
    }
}

/// What a relay says of itself to the processes that connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct About {
    /// The name of what carries links.
    pub provider: String,
    /// The RDMA device that it was started with; empty: the first one.
    pub device: String,
    /// Its own public key.
    pub key: String,
    /// The file of those that it trusts.
    pub peers: String,
    /// It seals what is sent.
    pub encrypts: bool,
}

/// With the number of what processes and their relay have in common, where that changes.
const ABOUT: &str = "thruway relay 4";

impl About {
    fn encode(&self) -> String {
        let how = if self.encrypts { "encrypts" } else { "plaintext" };
        [ABOUT, &self.provider, &self.device, &self.key, how, &self.peers].join("\n")
    }

    fn decode(text: &str) -> Option<About> {
        let mut parts = text.splitn(6, '\n');
        let (ABOUT, provider, device, key, how, peers) =
            (parts.next()?, parts.next()?, parts.next()?, parts.next()?, parts.next()?, parts.next()?)
        else {
            return None;
        };
        let encrypts = match how {
            "encrypts" => true,
            "plaintext" => false,
            _ => return None,
        };
        Some(About { provider: provider.into(), device: device.into(), key: key.into(), peers: peers.into(), encrypts })
    }
}

/// The relay of this process's user at a port, if there is one.
///
/// # Errors
/// It sends no valid description, or [`io::ErrorKind::QuotaExceeded`] if it has reached its limit of open files.
pub fn find(port: u16) -> io::Result<Option<About>> {
    let uid = rustix::process::geteuid();
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let name = SocketAddrUnix::new_abstract_name(&relay_name(uid.as_raw(), port))?;
    // Also where many wait to connect to a relay that does not accept.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(ABOUT_TIMEOUT))?;
    // Another user may have taken the name, whose relay serves that user only.
    if rustix::net::connect(&socket, &name).is_err() || !is_ours(&socket) {
        return Ok(None);
    }
    let silent = || io::Error::new(io::ErrorKind::TimedOut, "a relay of this user is there and does not answer");
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(ABOUT_TIMEOUT))?;
    let mut message = [0u8; 8192];
    let (len, _) = rustix::net::recv(&socket, &mut message, RecvFlags::empty()).map_err(|_| silent())?;
    match &message[..len] {
        // The relay has just ended.
        b"" => return Ok(None),
        full if full == RELAY_FULL.as_bytes() => {
            let why = "the relay has reached its limit of open files (ulimit -n)";
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
        }
        _ => {}
    }
    let about = std::str::from_utf8(&message[..len]).ok().and_then(About::decode);
    about.map(Some).ok_or_else(|| io::Error::other("what is there is no relay of this version"))
}

/// How long a relay may take to say what it is.
const ABOUT_TIMEOUT: Duration = Duration::from_secs(5);

fn is_ours(socket: &OwnedFd) -> bool {
    sockopt::socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// What a process has said.
pub(crate) enum Said {
    /// Something it has done wants a look.
    Wake,
    /// With its descriptors, if there are any.
    Request(Request, [Option<OwnedFd>; 3]),
    /// Its descriptors were lost, because this process has reached its limit of open files.
    Truncated(Request),
    /// It has gone.
    Gone,
}

/// The next thing that a process has said, if there is one.
pub(crate) fn hear(socket: &OwnedFd) -> Option<Said> {
    let mut message = [0u8; REQUEST_LEN + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut control, flags) {
        Ok(received) => {
            let files = control.drain().filter_map(|part| match part {
                RecvAncillaryMessage::ScmRights(files) => Some(files),
                _ => None,
            });
            let mut files = files.flatten();
            let files = [files.next(), files.next(), files.next()];
            if received.bytes == 0 {
                return Some(Said::Gone);
            }
            let is_truncated = received.flags.contains(ReturnFlags::CTRUNC) && files[0].is_none();
            Some(match Request::decode(&message[..received.bytes]) {
                Some(request) if is_truncated => Said::Truncated(request),
                Some(request) => Said::Request(request, files),
                None => Said::Wake,
            })
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
    let message = Offer { key, cookie: 0, by: Offered::Relayed }.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [segment.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&files));
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(&socket, &[IoSlice::new(&message)], &mut control, flags)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_relay_says_of_itself_is_understood_and_nothing_else_is() {
        for encrypts in [true, false] {
            let about = About {
                provider: "iwarp".into(),
                device: String::new(),
                key: "ab".into(),
                peers: "/with\nlines".into(),
                encrypts,
            };
            assert_eq!(About::decode(&about.encode()), Some(about));
        }
        for text in ["", ABOUT, "thruway relay 4\niwarp\n\nab\nmaybe\n/x", "thruway relay\niwarp\n\nab\nencrypts\n/x"] {
            assert_eq!(About::decode(text), None, "{text}");
        }
    }
}
