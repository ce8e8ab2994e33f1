//! iSCSI connections over TCP, from their acceptance to the end of their login.

use super::connection::{self, DEPTH, Parts, Serials};
use super::login::{Login, Next, Params, Transport, refusal, status};
use super::pdu::{BHS, Header, padding};
use super::target::{Session, Targets};
use crate::gate::Gate;
use crate::net::{Address, Listener, Socket, Stream};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use tokio::sync::watch;

/// An initiator that has not logged in by then is sent away.
const LOGIN_LIMIT: Duration = Duration::from_secs(30);
/// Bytes of text in one login PDU (RFC 7143 13.12: before anything is declared).
const LOGIN_DATA_MAX: usize = 8192;

/// How to serve.
pub struct Config {
    /// Where to listen.
    pub listen: Vec<SocketAddr>,
    /// What to serve.
    pub targets: Arc<Targets>,
    /// Of those who come over the loopback interface, only the user that this process runs as, and root.
    pub own_user_only: bool,
    /// Connections at one time; more are closed at once.
    pub connections_max: usize,
}

/// A running iSCSI server. It ends with its reactors.
pub struct Server {
    addresses: Vec<Address>,
    shared: Arc<Shared>,
}

/// What the connections of a server have in common, on whatever they travel.
pub(super) struct Shared {
    pub targets: Arc<Targets>,
    pub gate: Arc<Gate>,
    pub closing: watch::Sender<bool>,
}

impl Shared {
    pub(super) fn new(protocol: &'static str, targets: Arc<Targets>, connections_max: usize) -> Shared {
        Shared { targets, gate: Gate::new(protocol, connections_max), closing: watch::Sender::new(false) }
    }

    /// From now on nobody is let in, and who is in is asked to log out.
    pub(super) fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Asks every initiator to log out and waits for that, or for `limit`.
    pub(super) fn shut_down(&self, limit: Duration) {
        self.close();
        self.gate.wait_until_empty(limit);
    }

    /// The time that a login may take.
    pub(super) async fn in_time<T>(&self, login: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        tokio::time::timeout(LOGIN_LIMIT, login).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// What the connection of a session is made of.
    pub(super) fn parts(&self, peer: &str, portal: String, logged_in: LoggedIn) -> Parts {
        let LoggedIn { session, params, serials } = logged_in;
        let target = session.target.as_ref().map_or("discovery", |t| &t.name);
        tracing::info!(peer, initiator = session.initiator(), target, ?params, "an initiator is served");
        Parts {
            session,
            targets: Arc::clone(&self.targets),
            params,
            serials,
            portal,
            closing: self.closing.subscribe(),
        }
    }
}

impl Server {
    /// Starts to serve on these reactors.
    ///
    /// # Errors
    /// A sentence that names the address that cannot be listened at.
    pub fn start(config: Config, reactors: &Reactors) -> Result<Server, String> {
        let shared = Arc::new(Shared::new("iSCSI", config.targets, config.connections_max));
        let mut addresses = Vec::new();
        let own_user_only = config.own_user_only;
        for address in config.listen {
            let listener = Listener::bind(&Address::Tcp(address))?;
            addresses.push(listener.address());
            let (shared, spreader) = (Arc::clone(&shared), reactors.spreader());
            reactors.handles()[0].spawn(move || async move {
                let serve = |socket: Socket| {
                    if *shared.closing.borrow() || (own_user_only && !socket.is_ours()) {
                        return;
                    }
                    let Some(place) = shared.gate.enter(socket.peer()) else { return };
                    let shared = Arc::clone(&shared);
                    place.serve(&spreader, move || async move { shared.serve(socket).await });
                };
                let accepted = listener.accept(serve).await;
                tracing::error!(?accepted, "no iSCSI connections are accepted any more");
            });
        }
        Ok(Server { addresses, shared })
    }

    /// Where it listens, with the ports that the system chose.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// From now on nobody is let in, and who is in is asked to log out.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Asks every initiator to log out and waits for that, or for `limit`.
    pub fn shut_down(&self, limit: Duration) {
        self.shared.shut_down(limit);
    }
}

impl Shared {
    async fn serve(&self, socket: Socket) -> io::Result<()> {
        let (peer, portal) = (socket.peer(), socket.local());
        let mut stream = Stream::Plain(socket.open()?);
        let Some(logged_in) = self.in_time(self.log_in(&mut stream)).await? else { return Ok(()) };
        let session = Arc::clone(&logged_in.session);
        let parts = self.parts(&peer, portal, logged_in);
        let result = match session.settled().await {
            Ok(()) => connection::serve(parts, stream.split()?).await,
            Err(e) => Err(e),
        };
        self.targets.close(&session);
        result
    }

    /// Logs in; `None` if the initiator leaves, or is refused.
    async fn log_in(&self, stream: &mut Stream) -> io::Result<Option<LoggedIn>> {
        let mut dialogue = Dialogue::new(Transport::Tcp);
        loop {
            let mut header = [0; BHS];
            match stream.read_exact(&mut header).await {
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
                other => other?,
            }
            let header = Header(header);
            if header.data_len() > LOGIN_DATA_MAX {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a login longer than any"));
            }
            let mut rest = vec![0; header.ahs_len() + header.data_len() + padding(header.data_len())];
            stream.read_exact(&mut rest).await?;
            let data = &rest[header.ahs_len()..][..header.data_len()];
            let (answer, text, next) = dialogue.request(&header, data, &self.targets);
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
pub(super) struct Dialogue {
    login: Login,
    stat_sn: u32,
}

impl Dialogue {
    pub(super) fn new(transport: Transport) -> Dialogue {
        Dialogue { login: Login::new(transport), stat_sn: 0 }
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
