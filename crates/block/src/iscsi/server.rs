//! The iSCSI server: connections over TCP, up to the end of the login phase.

use super::connection::{self, ConnectionParams, DEPTH, Serials};
use super::login::{Login, Next, Params, Transport, refusal, status};
use super::pdu::{BHS, Header, padding};
use super::target::{Session, Targets};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_metrics::{RegisterError, Registered, Registry};
use thruway_server::{Acceptor, Address, ConnectionKind, ListenError, Permit, Socket, Stream};

/// Time for an initiator's login.
pub(super) const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of text in one login PDU (RFC 7143 13.12: before anything is declared).
const LOGIN_DATA_MAX: usize = 8192;

/// Configuration of a server.
pub struct Config {
    /// Addresses to listen on.
    pub listen: Vec<SocketAddr>,
    /// Targets to serve.
    pub targets: Arc<Targets>,
    /// Of initiators over the loopback interface, serve only root and the user that this process runs as.
    pub own_user_only: bool,
    /// Connections at a time.
    pub connections_max: usize,
}

/// A running iSCSI server. It ends with its reactors.
pub struct Server {
    addresses: Vec<Address>,
    acceptor: Arc<Acceptor>,
}

/// What all connections of a server share, over TCP and over RDMA.
pub(super) struct Shared {
    pub targets: Arc<Targets>,
    pub acceptor: Arc<Acceptor>,
}

impl Shared {
    /// What the connection of a session is made of.
    pub(super) fn parts(
        &self,
        peer: &str,
        portal: String,
        logged_in: LoggedIn,
        permit: &Arc<Permit>,
    ) -> ConnectionParams {
        let LoggedIn { session, params, serials } = logged_in;
        let target = session.target.as_ref().map_or("discovery", |t| &t.name);
        tracing::info!(peer, initiator = session.initiator(), target, ?params, "iSCSI initiator logged in");
        ConnectionParams {
            permit: Arc::clone(permit),
            session,
            targets: Arc::clone(&self.targets),
            params,
            serials,
            portal,
            closing: self.acceptor.closing(),
        }
    }

    /// Waits until the connection of a session that this one replaces has ended, and takes its place among those that
    /// stay.
    pub(super) async fn begin(&self, session: &Session, permit: &Permit) -> io::Result<()> {
        session.settled().await?;
        // Discovery sessions need no authentication.
        if session.target.is_some() { permit.set_authenticated() } else { Ok(()) }
    }
}

impl Server {
    /// Starts to serve on these reactors.
    ///
    /// # Errors
    /// [`ListenError`] for the first address that cannot be listened on.
    pub fn start(config: Config, reactors: &Reactors) -> Result<Server, ListenError> {
        let acceptor = Acceptor::new("iSCSI", ConnectionKind::Plain, config.connections_max, config.own_user_only);
        let shared = Arc::new(Shared { targets: config.targets, acceptor: Arc::clone(&acceptor) });
        let serve = move |socket, permit: Arc<Permit>| {
            let shared = Arc::clone(&shared);
            async move { shared.serve(socket, &permit).await }
        };
        let listen: Vec<Address> = config.listen.into_iter().map(Address::Tcp).collect();
        let addresses = acceptor.listen(&listen, reactors, serve)?;
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

impl Shared {
    async fn serve(&self, socket: Socket, permit: &Arc<Permit>) -> io::Result<()> {
        let (peer, portal) = (socket.peer(), socket.local());
        let mut stream = Stream::plain(socket.open()?);
        let Some(logged_in) = permit.handshake(LOGIN_TIMEOUT, self.log_in(&mut stream)).await? else { return Ok(()) };
        let session = Arc::clone(&logged_in.session);
        let parts = self.parts(&peer, portal, logged_in, permit);
        let result = match self.begin(&session, permit).await {
            Ok(()) => connection::serve(parts, stream.split()?).await,
            Err(e) => Err(e),
        };
        self.targets.close(&session);
        result
    }

    /// Logs in; `None` if the initiator leaves, or is refused.
    async fn log_in(&self, stream: &mut Stream) -> io::Result<Option<LoggedIn>> {
        let mut exchange = LoginExchange::new(Transport::Tcp);
        loop {
            let mut header = [0; BHS];
            match stream.read_exact(&mut header).await {
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
                other => other?,
            }
            let header = Header(header);
            if header.data_len() > LOGIN_DATA_MAX {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "login text exceeds the limit"));
            }
            let mut rest = vec![0; header.ahs_len() + header.data_len() + padding(header.data_len())];
            stream.read_exact(&mut rest).await?;
            let data = &rest[header.ahs_len()..][..header.data_len()];
            let (answer, text, next) = exchange.request(&header, data, &self.targets);
            let pad = [0; 3];
            // Closed again if the answer does not get through.
            let opened = Opened::of(&next, &self.targets);
            stream.write_all(&[&answer.0[..], &text, &pad[..padding(text.len())]].concat()).await?;
            opened.keep();
            match next {
                Step::More => {}
                Step::Refused => return Ok(None),
                Step::Done(logged_in) => return Ok(Some(logged_in)),
            }
        }
    }
}

/// What a login leads to.
pub(super) struct LoggedIn {
    pub session: Arc<Session>,
    pub params: Params,
    pub serials: Serials,
}

/// What follows an answer.
pub(super) enum Step {
    More,
    Refused,
    Done(LoggedIn),
}

/// A session of which the initiator does not know yet; closed when dropped.
struct Opened<'a>(Option<(Arc<Session>, &'a Targets)>);

impl<'a> Opened<'a> {
    fn of(step: &Step, targets: &'a Targets) -> Opened<'a> {
        let Step::Done(logged_in) = step else { return Opened(None) };
        Opened(Some((Arc::clone(&logged_in.session), targets)))
    }

    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        if let Some((session, targets)) = self.0.take() {
            targets.close(&session);
        }
    }
}

/// A login, with its serial numbers and the session that it leads to.
pub(super) struct LoginExchange {
    login: Login,
    stat_sn: u32,
}

impl LoginExchange {
    pub(super) fn new(transport: Transport) -> LoginExchange {
        LoginExchange { login: Login::new(transport), stat_sn: 0 }
    }

    /// A request; the answer, its text, and what follows.
    pub(super) fn request(&mut self, header: &Header, data: &[u8], targets: &Targets) -> (Header, Vec<u8>, Step) {
        let cmd_sn = header.cmd_sn();
        let (mut answer, text, opened) = match self.login.request(header, data, targets) {
            // Longer than what any initiator takes during a login, and than a slot of iSER.
            Next::Continue(text, _) | Next::Done(text, ..) if text.len() > LOGIN_DATA_MAX => {
                (refusal(header, status::INITIATOR_ERROR), Vec::new(), None)
            }
            Next::Continue(text, answer) => (answer, text, None),
            Next::Refuse(answer) => (answer, Vec::new(), None),
            Next::Done(text, answer, agreed) => match targets.open(agreed.0) {
                Ok(session) => (answer, text, Some((session, agreed.1))),
                Err(status) => (refusal(header, status), Vec::new(), None),
            },
        };
        answer.set32(24, self.stat_sn);
        self.stat_sn = self.stat_sn.wrapping_add(1);
        answer.set32(28, cmd_sn);
        answer.set32(32, cmd_sn.wrapping_add(if opened.is_some() { DEPTH - 1 } else { 0 }));
        answer.set_data_len(text.len());
        let status = answer.get16(36);
        let step = match opened {
            Some((session, params)) => {
                answer.set16(14, session.handle);
                Step::Done(LoggedIn {
                    session,
                    params,
                    serials: Serials { stat_sn: self.stat_sn, expected_cmd_sn: cmd_sn },
                })
            }
            None if status != 0 => {
                tracing::info!(status = format!("{status:#06x}"), "an iSCSI login is refused");
                Step::Refused
            }
            None => Step::More,
        };
        (answer, text, step)
    }
}
