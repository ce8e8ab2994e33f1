//! iSER (RFC 7145): iSCSI over RDMA, on any provider of the fabric.
//!
//! Control PDUs travel as Sends behind a header of 28 bytes that advertises the initiator's buffers. What a
//! command reads goes there by RDMA Write, out of the block that the storage has put it in; what it writes comes by
//! RDMA Read into the block that it is written from. The response revokes the buffer's key. Connections are made
//! through the connection manager from the first, as Linux's initiator does on every kind of device.
//!
//! The connection is a [`thruway_server::rdma::Channel`].

use super::connection::{Advertised, Carrier, Connection, Input};
use super::login::{ISER_DATA_MAX, Transport};
use super::pdu::{BHS, Header};
use super::server::{LOGIN_TIMEOUT, LoggedIn, LoginExchange, Shared, Step};
use super::target::Targets;
use crate::big_endian::{be32, be64};
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_fabric::{ConnectionRequest, Provider, RemoteAddr};
use thruway_metrics::{RegisterError, Registered, Registry};
use thruway_server::rdma::{Channel, Messages, Options};
use thruway_server::{Acceptor, Address, Body, ConnectionKind, Permit};

/// Bytes of the header in front of a PDU (RFC 7145 9.2; Linux's form of it, with virtual addresses).
const HEADER: usize = 28;
/// Longest control message, in bytes.
const MESSAGE_MAX: usize = HEADER + BHS + ISER_DATA_MAX as usize;
/// Receives posted: the command window, and as much again for what is outside it.
const RECEIVES: usize = 256;
/// Control messages that may be in the send queue.
const SENDS: usize = 256;
/// Control messages beside them that wait for their turn; then nothing is begun that would add to them.
const BACKLOG_MAX: usize = 256;
/// Requests of the send queue.
const SEND_DEPTH: usize = 512;
/// RDMA Reads outstanding, each way.
const READ_DEPTH: u16 = 16;
/// How long what has been queued may still be sent when the session has ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// First byte of a header: an iSCSI control PDU.
const CONTROL: u8 = 0x10;
/// The buffer to read from is valid.
const WRITE_VALID: u8 = 0x08;
/// The buffer to write to is valid.
const READ_VALID: u8 = 0x04;
/// Connection data: no zero-based addresses.
const NO_ZERO_BASED: u8 = 0x80;
/// Connection data: no Send with Invalidate.
const NO_INVALIDATE: u8 = 0x40;

/// Takes a control message apart: advertised buffers, PDU header, data. `None` if it is none.
pub fn decode(message: &[u8]) -> Option<(AdvertisedBuffers, Header, &[u8])> {
    let (header, rest) = message.split_first_chunk::<HEADER>()?;
    let (bhs, data) = rest.split_first_chunk::<BHS>()?;
    if header[0] & 0xf0 != CONTROL {
        return None;
    }
    let buffer = |valid, at| (header[0] & valid != 0).then(|| (be32(header, at), be64(header, at + 4)));
    let bhs = Header(*bhs);
    // Additional header segments are not used with iSER; padding may be left out.
    let data = if bhs.ahs_len() == 0 { data.get(..bhs.data_len())? } else { return None };
    Some((AdvertisedBuffers { write: buffer(WRITE_VALID, 4), read: buffer(READ_VALID, 16) }, bhs, data))
}

/// Buffers of the initiator: key and address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdvertisedBuffers {
    /// What a write reads from.
    pub write: Option<(u32, u64)>,
    /// What a read writes to.
    pub read: Option<(u32, u64)>,
}

impl From<AdvertisedBuffers> for Advertised {
    fn from(buffers: AdvertisedBuffers) -> Advertised {
        let remote = |(rkey, addr)| RemoteAddr { addr, rkey };
        Advertised { write: buffers.write.map(remote), read: buffers.read.map(remote) }
    }
}

/// The sending side of a connection.
pub(super) struct Sender {
    /// What messages and data travel on.
    pub channel: Rc<Channel>,
    /// The initiator lets its keys be revoked.
    revocable: bool,
}

impl Sender {
    /// Sends a PDU and, with it, revokes a key of the initiator's.
    pub(super) fn send(&self, mut header: Header, body: &Body, invalidate: Option<u32>) {
        header.set_data_len(body.len());
        let mut message = vec![0; HEADER];
        message[0] = CONTROL;
        message.extend_from_slice(&header.0);
        body.bytes(|part| message.extend_from_slice(part));
        message.resize(message.len().next_multiple_of(4), 0);
        self.channel.send(message, invalidate.filter(|_| self.revocable));
    }
}

/// Configuration of a server.
pub struct Config {
    /// Addresses to listen on.
    pub listen: Vec<SocketAddr>,
    /// By what.
    pub provider: Provider,
    /// Targets to serve.
    pub targets: Arc<Targets>,
    /// Of those who come over the loopback interface, only the user that this process runs as, and root; of what an
    /// RDMA device brings, nobody knows the user.
    pub own_user_only: bool,
    /// Connections at a time; more are refused.
    pub connections_max: usize,
}

/// A running iSER server. It ends with its reactors.
pub struct Server {
    addresses: Vec<Address>,
    acceptor: Arc<Acceptor>,
}

struct Service {
    provider: Provider,
    shared: Shared,
}

impl Server {
    /// Starts to serve on these reactors.
    ///
    /// # Errors
    /// For the first address that cannot be listened on: there may be no RDMA device for it.
    pub fn start(config: Config, reactors: &Reactors) -> thruway_fabric::Result<Server> {
        // The user behind a connection through an RDMA device is not known.
        let own_user_only = config.own_user_only && config.provider.is_in_user_space();
        let acceptor = Acceptor::new("iSER", ConnectionKind::Rdma, config.connections_max, own_user_only);
        let shared = Shared { targets: config.targets, acceptor: Arc::clone(&acceptor) };
        let service = Arc::new(Service { provider: config.provider.clone(), shared });
        let addresses = acceptor.listen_rdma(&config.listen, &config.provider, reactors, move |request, permit| {
            let service = Arc::clone(&service);
            async move { service.serve(request, &permit).await }
        })?;
        Ok(Server { addresses, acceptor })
    }

    /// The addresses it listens on, with the ports that the kernel chose.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Refuses new connections and asks every initiator to log out.
    pub fn close(&self) {
        self.acceptor.close();
    }

    /// Registers its metrics.
    ///
    /// # Errors
    /// [`RegisterError`], if another server of the protocol is registered.
    pub fn register(&self, registry: &Registry) -> Result<Registered, RegisterError> {
        self.acceptor.register(registry)
    }

    /// Connections that are being served.
    pub fn connections(&self) -> usize {
        self.acceptor.connections()
    }

    /// Closes, and waits until every initiator has logged out, for at most `limit`.
    pub fn shut_down(&self, limit: Duration) {
        self.acceptor.shut_down(limit);
    }
}

impl Service {
    async fn serve(&self, request: ConnectionRequest, permit: &Arc<Permit>) -> io::Result<()> {
        let (peer, portal) = (request.peer(), request.local().to_string());
        // The initiator's first byte says what it can do; ours answers.
        let flags = request.private_data().first().copied().unwrap_or(0);
        let options = Options {
            message_max: MESSAGE_MAX,
            receives: RECEIVES,
            sends: SENDS,
            backlog_max: BACKLOG_MAX,
            send_depth: SEND_DEPTH,
            read_depth: READ_DEPTH,
            private_data: vec![NO_ZERO_BASED, 0, 0, 0],
        };
        let (channel, mut messages, driver) =
            Channel::accept(&self.provider, request, options).map_err(io::Error::other)?;
        let sender = Rc::new(Sender { channel, revocable: flags & NO_INVALIDATE == 0 });
        let result = self.session(&sender, &mut messages, (peer, portal, permit)).await;
        driver.close(CLOSE_TIMEOUT).await;
        result
    }

    async fn session(
        &self,
        sender: &Rc<Sender>,
        messages: &mut Messages,
        (peer, portal, permit): (SocketAddr, String, &Arc<Permit>),
    ) -> io::Result<()> {
        let shared = &self.shared;
        let Some(logged_in) = permit.handshake(LOGIN_TIMEOUT, self.log_in(sender, messages)).await? else {
            return Ok(());
        };
        let session = Arc::clone(&logged_in.session);
        let parts = shared.parts(&peer.to_string(), portal, logged_in, permit);
        let closing = parts.closing.clone();
        let result = match shared.begin(&session, permit).await {
            Ok(()) => {
                let connection = Connection::new(parts, Carrier::Iser(Rc::clone(sender)), None, false);
                let result = connection.until_over(receive(&connection, messages), closing).await;
                connection.end().await;
                result
            }
            Err(e) => Err(e),
        };
        shared.targets.close(&session);
        result
    }

    async fn log_in(&self, sender: &Sender, messages: &mut Messages) -> io::Result<Option<LoggedIn>> {
        let mut exchange = LoginExchange::new(Transport::Iser);
        while let Some(message) = messages.recv().await {
            let (_, header, data) = decode(&message).ok_or_else(malformed)?;
            let (answer, text, next) = exchange.request(&header, data, &self.shared.targets);
            sender.send(answer, &Body::Bytes(text), None);
            match next {
                Step::More => {}
                Step::Refused => return Ok(None),
                Step::Done(logged_in) => return Ok(Some(logged_in)),
            }
        }
        Ok(None)
    }
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "malformed iSER control message")
}

async fn receive(connection: &Rc<Connection>, messages: &mut Messages) -> io::Result<()> {
    loop {
        // What has arrived keeps its slot meanwhile, so that no more of it than that arrives.
        connection.room().await;
        let Some(message) = messages.recv().await else { return Ok(()) };
        let (buffers, header, data) = decode(&message).ok_or_else(malformed)?;
        if let ControlFlow::Break(()) = connection.pdu(header, buffers.into(), &mut Input::Message(data)).await? {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_are_taken_apart() {
        let mut bytes = vec![CONTROL | WRITE_VALID];
        bytes.resize(HEADER + BHS, 0);
        bytes[4..8].copy_from_slice(&7u32.to_be_bytes());
        bytes[8..16].copy_from_slice(&0x1000u64.to_be_bytes());
        bytes[HEADER + 7] = 3;
        bytes.extend_from_slice(b"abc\0");
        let (buffers, header, data) = decode(&bytes).unwrap();
        assert_eq!(buffers, AdvertisedBuffers { write: Some((7, 0x1000)), read: None });
        assert_eq!((header.data_len(), data), (3, &b"abc"[..]));
        assert!(decode(&bytes[..HEADER + BHS + 2]).is_none(), "data that is not all there");
        assert!(decode(&bytes[..40]).is_none());
        bytes[0] = 0x20;
        assert!(decode(&bytes).is_none(), "a hello");
    }
}
