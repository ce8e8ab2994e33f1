//! The network stage of a session: a control channel and data channels, over RDMA or plain TCP.
//!
//! The link moves messages and blocks and keeps queues from running dry; what they mean is
//! [`crate::source`]'s and [`crate::sink`]'s business.

mod channel_scaler;
mod deferred_close;
mod rdma;
mod tcp;

pub(crate) use channel_scaler::{BUSY_BLOCKS, BUSY_BYTES, ChannelScaler, blocks_for, first_channels};
pub use rdma::Window;
pub(crate) use tcp::{Receive, greet, splice};

use crate::auth::{AuthError, Credentials, Handshake, PublicKey, Secured};
use crate::protocol::Violation;
use crate::session::Cancel;
use crate::wire::{
    AbortCode, AuthKind, BlockHeader, CHANNELS_MAX, Completion, Control, Credit, Hello, Malformed, Token,
};
use rdma::RdmaLink;
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use tcp::TcpLink;
use thruway_engine::OpenFile;
use thruway_engine::pool::{Block, BlockPool, Exposed};
use thruway_fabric::{ConnectionError, ConnectionRequest, Device};
use thruway_tcp::{Origin, PathInfo};

/// Something is said at least this often, so that silence means trouble.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// How long the first data channels may take.
const JOIN_PATIENCE: Duration = Duration::from_secs(15);
/// How long a peer may take to prove who it is, and then to say what it wants.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence of this length ends the session.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Why a link failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The fabric refused.
    #[error(transparent)]
    Fabric(#[from] thruway_fabric::Error),
    /// The control connection ended.
    #[error("{0}")]
    Closed(ConnectionError),
    /// A data connection ended.
    #[error("a data channel was lost: {0}")]
    DataLost(ConnectionError),
    /// The peer talks nonsense.
    #[error("the peer broke the protocol: {0}")]
    Malformed(#[from] Malformed),
    /// The peer is not who it should be.
    #[error(transparent)]
    Auth(#[from] AuthError),
    /// Nothing heard for too long.
    #[error("the peer has been silent for {} s", SILENCE_MAX.as_secs())]
    Silent,
    /// Said something out of turn.
    #[error("the peer broke the protocol: unexpected {0}")]
    Unexpected(&'static str),
}

impl From<Violation> for LinkError {
    fn from(violation: Violation) -> LinkError {
        match violation {
            Violation::Malformed(malformed) => LinkError::Malformed(malformed),
            Violation::Unexpected(what) => LinkError::Unexpected(what),
        }
    }
}

/// A connection was lost because this process has reached a limit on memory or open files.
fn is_of_this_process(cause: &ConnectionError) -> bool {
    let ConnectionError::Lost(why) = cause else { return false };
    [libc::ENOMEM, libc::EMFILE, libc::ENFILE].iter().any(|code| why.contains(&format!("(os error {code})")))
}

impl LinkError {
    /// Whether trying again may help.
    pub fn is_transient(&self) -> bool {
        match self {
            // This process has reached a limit on memory, threads or open files. Another attempt would reach it again.
            LinkError::Fabric(thruway_fabric::Error::Io { source, .. }) => {
                !matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN | libc::EMFILE | libc::ENFILE))
            }
            LinkError::Closed(cause) | LinkError::DataLost(cause) => !is_of_this_process(cause),
            LinkError::Silent | LinkError::Fabric(_) => true,
            _ => false,
        }
    }
}

/// Something that came over the link.
pub enum LinkEvent {
    /// A control message.
    Control(Control),
    /// A write has left: its block may be used again. Over TCP with its sequence number.
    Written(Block, Option<u32>),
    /// A block of ours has been filled by the peer (RDMA).
    Arrived(Completion),
    /// A block has been received (TCP).
    Received(Block, BlockHeader),
    /// A piece has gone from the socket to its file (TCP).
    Placed {
        /// Its sequence number.
        sequence: u32,
        /// Its length.
        len: u32,
    },
}

/// Which way blocks go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// This end writes.
    Source,
    /// This end grants.
    Sink,
}

/// What a connection carries data with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// RDMA Write.
    Rdma,
    /// Plain TCP, with `sendfile` and `splice`.
    Tcp,
}

/// A connection handed to a session.
pub enum Arrival {
    /// RDMA.
    Rdma(ConnectionRequest),
    /// TCP, after its greeting.
    Tcp(TcpStream),
}

/// Where a session's data channels come from.
pub enum Channels {
    /// This end opens them.
    Open {
        /// At this address.
        addr: SocketAddr,
        /// For the session of the control connection that showed this.
        token: Token,
        /// More may be opened when those there are limit the rate.
        grow: bool,
    },
    /// The peer does.
    Take(Receiver<Arrival>),
}

/// Whom to call, and how.
pub struct Call<'a> {
    /// The peer.
    pub addr: SocketAddr,
    /// Credentials of this end.
    pub credentials: &'a Credentials,
    /// Joins the connections of the session.
    pub token: Token,
    /// On a long path, data channels are opened while the session is still being agreed on, for
    /// this role; so many, or as many as the path wants.
    pub early: Option<(Role, Option<u32>)>,
}

/// The error of a data connection over loopback that leads to another user than the control connection.
fn led_astray(found: Origin, expected: Origin) -> LinkError {
    LinkError::DataLost(ConnectionError::Lost(format!("it leads to {found}, and the session to {expected}")))
}

/// The handshake of the session with this token.
fn shake_hands(credentials: &Credentials, token: Token, initiator: bool) -> Handshake {
    let greeting = Hello::Control { auth: AuthKind::of(credentials), token }.encode();
    Handshake::new(credentials, &greeting, initiator)
}

impl Call<'_> {
    fn hello(&self) -> Hello {
        Hello::Control { auth: AuthKind::of(self.credentials), token: self.token }
    }

    /// The data channels to open now, given the path: what they show, their number and role.
    fn early_channels(&self, path: Option<PathInfo>) -> Option<(Token, u32, Role)> {
        let (role, count) = self.early?;
        // Over loopback, a session's data connections must lead where its control connection leads, which is known later.
        if self.addr.ip().to_canonical().is_loopback() {
            return None;
        }
        let round_trip = path.map(|p| p.round_trip).filter(|rtt| *rtt >= channel_scaler::ROUND_TRIP_MIN)?;
        let count = count.unwrap_or_else(|| first_channels(Some(round_trip)));
        Some((self.token, count.min(CHANNELS_MAX), role))
    }
}

/// One end of a session's connections.
pub struct Link(Inner);

enum Inner {
    Rdma(Box<RdmaLink>),
    Tcp(Box<TcpLink>),
}

/// What every kind of link does alike with its control connection.
trait ControlChannel {
    /// Messages that came before the handshake was over, the encryption, and what is ready for
    /// [`Link::poll`].
    fn state(&mut self) -> (&mut VecDeque<Vec<u8>>, &mut Option<Secured>, &mut VecDeque<LinkEvent>);

    /// Sends bytes as they are.
    fn say(&mut self, bytes: Vec<u8>) -> Result<(), LinkError>;

    /// Takes a message that was encrypted.
    fn hear(&mut self, bytes: &[u8]) -> Result<(), LinkError>;

    /// Waits up to `limit` for something to happen.
    fn turn(&mut self, limit: Duration) -> Result<(), LinkError>;

    /// Goes through what is left of the handshake; returns the peer's key, if it has one.
    fn shake(&mut self, mut handshake: Handshake) -> Result<Option<PublicKey>, LinkError> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        while !handshake.is_finished() {
            if handshake.is_my_turn() {
                let message = handshake.write();
                self.say(message)?;
                continue;
            }
            let message = loop {
                match self.state().0.pop_front() {
                    Some(message) => break message,
                    None if Instant::now() >= deadline => return Err(LinkError::Silent),
                    None => self.turn(Duration::from_secs(1))?,
                }
            };
            handshake.read(&message)?;
        }
        let peer = handshake.peer_key();
        *self.state().1 = Some(handshake.finish()?);
        // What came behind the handshake was encrypted already.
        for message in std::mem::take(self.state().0) {
            self.hear(&message)?;
        }
        Ok(peer)
    }

    /// Waits for the next control message that is not a heartbeat, at most until `deadline`.
    fn next_control(&mut self, deadline: Option<Instant>) -> Result<Control, LinkError> {
        loop {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(LinkError::Silent);
            }
            match self.state().2.pop_front() {
                Some(LinkEvent::Control(message)) => return Ok(message),
                Some(LinkEvent::Written(..)) => {}
                Some(_) => return Err(LinkError::Unexpected("block")),
                None => self.turn(Duration::from_secs(1))?,
            }
        }
    }
}

macro_rules! each {
    ($link:expr, $inner:ident => $body:expr) => {
        match &mut $link.0 {
            Inner::Rdma($inner) => $body,
            Inner::Tcp($inner) => $body,
        }
    };
}

impl Link {
    /// Connects to a peer and proves who we are.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn connect(
        device: Device,
        transport: Transport,
        call: &Call<'_>,
    ) -> Result<(Link, Option<PublicKey>), LinkError> {
        Ok(match transport {
            Transport::Rdma => {
                let (link, key) = RdmaLink::connect(device, call)?;
                (Link(Inner::Rdma(Box::new(link))), key)
            }
            Transport::Tcp => {
                let (link, key) = TcpLink::connect(device, call)?;
                (Link(Inner::Tcp(Box::new(link))), key)
            }
        })
    }

    /// Accepts a peer and has it prove who it is.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn accept(
        device: Device,
        arrival: Arrival,
        credentials: &Credentials,
        token: Token,
    ) -> Result<(Link, Option<PublicKey>), LinkError> {
        Ok(match arrival {
            Arrival::Rdma(request) => {
                let (link, key) = RdmaLink::accept(device, request, credentials, token)?;
                (Link(Inner::Rdma(Box::new(link))), key)
            }
            Arrival::Tcp(stream) => {
                let (link, key) = TcpLink::accept(device, stream, credentials, token)?;
                (Link(Inner::Tcp(Box::new(link))), key)
            }
        })
    }

    /// What carries the data.
    pub fn transport(&self) -> Transport {
        match self.0 {
            Inner::Rdma(_) => Transport::Rdma,
            Inner::Tcp(_) => Transport::Tcp,
        }
    }

    /// Gives the link the blocks it moves.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn attach(&mut self, pool: &Arc<BlockPool>) -> Result<(), LinkError> {
        match &mut self.0 {
            Inner::Rdma(link) => link.attach(pool),
            Inner::Tcp(link) => {
                link.attach(pool);
                Ok(())
            }
        }
    }

    /// Waits for the first `count` data channels of a session, opening them if that is this end's
    /// task. Later ones join with [`Link::more`] and [`Link::take_arrivals`].
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn join(&mut self, channels: &Channels, count: u32, role: Role) -> Result<(), LinkError> {
        self.join_first(channels, count, role)?;
        match &self.0 {
            // The number of receives limits the messages that wait.
            Inner::Rdma(_) => {}
            Inner::Tcp(link) => link.begin(),
        }
        Ok(())
    }

    fn join_first(&mut self, channels: &Channels, count: u32, role: Role) -> Result<(), LinkError> {
        match channels {
            Channels::Open { .. } => {
                self.more(channels, count.saturating_sub(self.count() as u32), role)?;
                each!(self, link => link.until_joined(count as usize))
            }
            Channels::Take(_) => {
                let deadline = Instant::now() + JOIN_PATIENCE;
                while self.count() < count as usize {
                    if !self.take_arrivals(channels, role)? {
                        let left = deadline.checked_duration_since(Instant::now()).ok_or(LinkError::Silent)?;
                        // Ends at once if the caller has gone.
                        self.wait(left)?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Starts to open `count` data channels more, as far as there may be so many.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn more(&mut self, channels: &Channels, count: u32, role: Role) -> Result<(), LinkError> {
        let Channels::Open { addr, token, .. } = channels else { return Ok(()) };
        let count = count.min(CHANNELS_MAX.saturating_sub(self.count() as u32));
        each!(self, link => link.open_data(*addr, *token, count, role))
    }

    /// Takes the data channels that have come since; whether there were any.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn take_arrivals(&mut self, channels: &Channels, role: Role) -> Result<bool, LinkError> {
        let Channels::Take(arrivals) = channels else { return Ok(false) };
        let mut any = false;
        while let Ok(arrival) = arrivals.try_recv() {
            any = true;
            if self.count() >= CHANNELS_MAX as usize {
                continue;
            }
            match (&mut self.0, arrival) {
                (Inner::Rdma(link), Arrival::Rdma(request)) => link.accept_data(request, role)?,
                (Inner::Tcp(link), Arrival::Tcp(stream)) => link.accept_data(stream, role)?,
                _ => return Err(LinkError::Unexpected("kind of data channel")),
            }
        }
        Ok(any)
    }

    /// How many data channels there are, or will be when those in progress are open.
    pub fn count(&self) -> usize {
        match &self.0 {
            Inner::Rdma(link) => link.count(),
            Inner::Tcp(link) => link.count(),
        }
    }

    /// Starts to receive on TCP data channels; `receive` takes pieces off the socket. Over RDMA
    /// the peer's writes need no receiver.
    pub(crate) fn start_receiving(&mut self, receive: &Arc<dyn Receive>) -> Result<(), LinkError> {
        match &mut self.0 {
            Inner::Rdma(_) => Ok(()),
            Inner::Tcp(link) => link.start_receiving(receive),
        }
    }

    /// The link's connections end with the session that is ended by this, whatever its thread waits for.
    pub(crate) fn end_with(&mut self, cancel: &Cancel) {
        match &mut self.0 {
            // Its thread waits for nobody but in [`Link::poll`], and nothing comes but by what it has exposed.
            Inner::Rdma(_) => {}
            Inner::Tcp(link) => link.end_with(cancel),
        }
    }

    /// Leaves what the peer says on the control connection where it is, or takes it again, where it may be far ahead of
    /// what it sends.
    pub(crate) fn hold_control(&self, hold: bool) {
        match &self.0 {
            // It is no more ahead than the credits that it has.
            Inner::Rdma(_) => {}
            Inner::Tcp(link) => link.hold_control(hold),
        }
    }

    /// Messages that wait for the peer to take earlier ones.
    pub(crate) fn backlog(&self) -> usize {
        match &self.0 {
            Inner::Rdma(link) => link.backlog(),
            // What is sent is in the socket.
            Inner::Tcp(_) => 0,
        }
    }

    /// Waits until no message waits for the peer to take earlier ones, or until `stop`.
    ///
    /// # Errors
    /// [`LinkError::Silent`] if the peer takes none for too long; [`LinkError`] once the session cannot go on.
    pub(crate) fn until_sent(&mut self, stop: impl Fn() -> bool) -> Result<(), LinkError> {
        self.wait(Duration::ZERO)?;
        let (mut waiting, mut since) = (self.backlog(), Instant::now());
        while self.backlog() > 0 && !stop() {
            if self.backlog() < waiting {
                (waiting, since) = (self.backlog(), Instant::now());
            }
            if since.elapsed() > SILENCE_MAX {
                return Err(LinkError::Silent);
            }
            self.wait(Duration::from_secs(1))?;
        }
        Ok(())
    }

    /// The device, to wake a thread waiting in [`Link::poll`].
    pub fn device(&self) -> &Device {
        match &self.0 {
            Inner::Rdma(link) => link.device(),
            Inner::Tcp(link) => link.device(),
        }
    }

    /// Whether peers may revoke the keys of credits that this end grants for any channel.
    pub fn revocable(&self) -> bool {
        match &self.0 {
            Inner::Rdma(link) => link.revocable(),
            Inner::Tcp(_) => false,
        }
    }

    /// Whether the peer's credits for any channel are to be revoked with their notification.
    pub fn set_peer_revocable(&mut self, revocable: bool) {
        if let Inner::Rdma(link) = &mut self.0 {
            link.set_peer_revocable(revocable);
        }
    }

    /// Round trip to the peer, where it is known.
    pub fn round_trip(&self) -> Option<Duration> {
        let control = match &self.0 {
            Inner::Rdma(link) => link.control_path(),
            Inner::Tcp(link) => link.control_path(),
        };
        control.map(|path| path.round_trip)
    }

    /// Whether the path is known to be a long one.
    pub fn is_long(&self) -> bool {
        self.round_trip().is_some_and(|rtt| rtt >= channel_scaler::ROUND_TRIP_MIN)
    }

    /// What is known of the data channels' paths.
    pub fn paths(&self) -> Vec<PathInfo> {
        match &self.0 {
            Inner::Rdma(link) => link.paths(),
            Inner::Tcp(link) => link.paths(),
        }
    }

    /// What carries it: `tcp`, or a provider of the fabric.
    pub fn provider(&self) -> &'static str {
        match &self.0 {
            Inner::Rdma(link) => link.provider(),
            Inner::Tcp(_) => "tcp",
        }
    }

    /// What was agreed on the control connection, for people.
    pub fn describe(&self) -> String {
        match &self.0 {
            Inner::Rdma(link) => link.describe(),
            Inner::Tcp(_) => "plain TCP".into(),
        }
    }

    /// The peer of an outgoing link: over loopback and shared memory its user, as long as it has not closed.
    pub fn acceptor(&self) -> Option<Origin> {
        match &self.0 {
            Inner::Rdma(link) => link.acceptor(),
            Inner::Tcp(link) => link.acceptor(),
        }
    }

    /// Sends a control message, or queues it until the peer has room.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn send(&mut self, message: &Control) -> Result<(), LinkError> {
        each!(self, link => link.send(message))
    }

    /// Says why the session ends, ahead of whatever waits to be said. Best effort.
    pub fn abort(&mut self, code: AbortCode, why: String) {
        each!(self, link => link.abort(code, why));
    }

    /// Exposes a free block to the peer for one write (RDMA).
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn expose(&mut self, block: Block) -> Result<(Exposed, Window), LinkError> {
        match &mut self.0 {
            Inner::Rdma(link) => link.expose(block),
            Inner::Tcp(_) => Err(LinkError::Unexpected("credit")),
        }
    }

    /// Whether a block that is handed in now would leave soon.
    pub fn has_room(&self) -> bool {
        match &self.0 {
            Inner::Rdma(link) => link.has_room(),
            Inner::Tcp(_) => true,
        }
    }

    /// Writes a block's header and `len` bytes of payload where the credit says, and the
    /// notification behind it, which also revokes the credit's key where that is possible (RDMA).
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn write(&mut self, block: Block, len: u32, credit: &Credit, notice: &Completion) -> Result<(), LinkError> {
        match &mut self.0 {
            Inner::Rdma(link) => link.write(block, len, credit, notice),
            Inner::Tcp(_) => Err(LinkError::Unexpected("credit")),
        }
    }

    /// Sends a block, whose header is in place, or, with `file`, that piece of the file in its
    /// stead (TCP).
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn stream(&mut self, block: Block, header: BlockHeader, file: Option<Arc<OpenFile>>) -> Result<(), LinkError> {
        match &mut self.0 {
            Inner::Rdma(_) => Err(LinkError::Unexpected("streamed block")),
            Inner::Tcp(link) => link.stream(block, header, file),
        }
    }

    /// What has come, waiting up to `limit` for the first of it. An empty list is no error: the
    /// wait may also have ended because somebody woke the device.
    ///
    /// # Errors
    /// [`LinkError`] once the session cannot go on.
    pub fn poll(&mut self, limit: Duration) -> Result<VecDeque<LinkEvent>, LinkError> {
        each!(self, link => link.poll(limit))
    }

    /// Waits for the next control message that is not a heartbeat.
    ///
    /// # Errors
    /// [`LinkError`], also for blocks out of turn.
    pub fn next_control(&mut self) -> Result<Control, LinkError> {
        each!(self, link => link.next_control(None))
    }

    /// As [`Link::next_control`], of a peer that has no reason to wait with it.
    ///
    /// # Errors
    /// [`LinkError::Silent`] if it does.
    pub fn prompt_control(&mut self) -> Result<Control, LinkError> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        each!(self, link => link.next_control(Some(deadline)))
    }

    /// Waits up to `limit` for something to happen, and leaves it for [`Link::poll`].
    ///
    /// # Errors
    /// [`LinkError`] once the session cannot go on.
    pub fn wait(&mut self, limit: Duration) -> Result<(), LinkError> {
        each!(self, link => link.turn(limit))
    }

    /// Closes in order, and waits a moment for the peer to do the same, so that the last message
    /// is not lost to a reset.
    pub fn close(self) {
        self.end(true);
    }

    /// Closes in order after a session of which both ends know how it went: on a long path without a round trip more.
    pub fn leave(self) {
        self.end(false);
    }

    fn end(self, expected: bool) {
        match self.0 {
            Inner::Rdma(link) => link.close(expected),
            Inner::Tcp(link) => link.close(expected),
        }
    }
}
