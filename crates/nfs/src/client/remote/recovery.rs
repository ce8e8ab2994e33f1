//! The thread of a client: creates sessions, renews the lease, and opens files again after a restart of the server or the loss of the
//! client (RFC 8881, section 8.4).

use super::attributes::Described;
use super::callbacks;
use super::events::{Event, Stateid};
use super::opens::{Opens, get_handle};
use super::options::NfsOptions;
use super::session::{RETRY_INTERVAL, SLOTS, Session, Shared};
use crate::client::compound::{Compound, Results};
use crate::client::{ClientError, Handle, Result};
use crate::status::Status;
use crate::v4::attributes::number;
use crate::v4::op;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use thruway_rpc::client::CallError;
use thruway_rpc::server::{BULK_MAX, CALL_MAX};
use thruway_rpc::xdr::Encoder;
use thruway_vfs::Credentials;
use tokio::sync::{Notify, mpsc};

/// Longest reply that the server keeps for repeated requests, in bytes.
const CACHED_MAX: u32 = 4096;

/// Most operations of a request.
const OPERATIONS: u32 = 16;

/// Bytes of a request or a reply beside its data.
const OVERHEAD: usize = 2048;

/// Flag of CREATE_SESSION: the connection is also the back channel.
const BACK_CHANNEL: u32 = 2;

/// Flag of EXCHANGE_ID: the client does not use pNFS.
const USE_NON_PNFS: u32 = 0x1_0000;

/// Time for which a new file stays open for its creator.
const MADE_FOR: Duration = Duration::from_secs(1);

/// Shortest time between two checks of what is open.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Longest time for the end of a session.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Result of the start of a client.
pub(super) struct Begun {
    pub root: Handle,
    pub described: Described,
    /// Identity of the server, which does not change in restarts.
    pub server: Vec<u8>,
}

/// State of the thread.
pub(super) struct Keeper {
    pub shared: Arc<Shared>,
    pub opens: Arc<Opens>,
    /// Name of the client: the same after restarts of this host.
    pub owner: Vec<u8>,
    /// Random number of this run of the client.
    pub verifier: [u8; 8],
    /// Number of the client, and of its next CREATE_SESSION.
    client: Option<(u64, u32)>,
    /// Connection with the back channel.
    bound: Option<u64>,
    is_binding: bool,
    generation: u64,
    server: Vec<u8>,
    lease: Duration,
}

impl Keeper {
    pub(super) fn new(shared: Arc<Shared>, opens: Arc<Opens>, owner: Vec<u8>) -> Keeper {
        Keeper {
            shared,
            opens,
            owner,
            verifier: thruway_engine::random::random(),
            client: None,
            bound: None,
            is_binding: false,
            generation: 0,
            server: Vec::new(),
            lease: Duration::from_secs(30),
        }
    }

    /// Creates the first session and looks up the directory.
    pub(super) async fn begin(&mut self, options: &NfsOptions) -> Result<Begun> {
        let session = match self.make_session().await {
            Err(error) if error.status() == Some(Status::MINOR_VERS_MISMATCH) => {
                self.shared.minor.store(1, Ordering::Relaxed);
                self.make_session().await?
            }
            made => made?,
        };
        self.shared.publish(Some(Arc::clone(&session)));
        let mut wanted = super::attributes::of_files();
        [number::LEASE_TIME].into_iter().for_each(|number| wanted.insert(number));
        let mut find = Compound::new().then(op::PUTROOTFH, |_| {});
        for name in &options.path {
            find = find.then(op::LOOKUP, |out| out.opaque(name));
        }
        let find = find.then(op::GETFH, |_| {}).then(op::GETATTR, |out| wanted.encode(out));
        let answer = self.shared.call(&self.shared.machine, find).await?;
        let mut results = answer.results()?;
        results.next("PUTROOTFH")?;
        for _ in &options.path {
            results.next("LOOKUP")?;
        }
        let root = get_handle(results.next("GETFH")?)?;
        let described = Described::decode(results.next("GETATTR")?)?;
        self.lease = Duration::from_secs(described.lease_seconds.clamp(3, 3600).into());
        Ok(Begun { root, described, server: self.server.clone() })
    }

    /// Creates a session of the known client; if the server has lost the client, of a new one.
    async fn make_session(&mut self) -> Result<Arc<Session>> {
        if let Some((client, sequence)) = self.client {
            match self.create_session(client, sequence).await {
                Ok(session) => {
                    self.client = Some((client, sequence.wrapping_add(1)));
                    return Ok(session);
                }
                Err(error) if error.status().is_some() => {
                    tracing::debug!(%error, "the NFS server does not know the client any more");
                }
                Err(error) => return Err(error),
            }
        }
        let exchange = Compound::new().then(op::EXCHANGE_ID, |out| {
            out.fixed(&self.verifier);
            out.opaque(&self.owner);
            // No protection of state, no name of an implementation.
            [USE_NON_PNFS, 0, 0].into_iter().for_each(|word| out.u32(word));
        });
        let reply = self.shared.call_alone(exchange).await?;
        let mut results = Results::of(&reply)?;
        let d = results.next("EXCHANGE_ID")?;
        let (client, sequence, _flags, protection) = (d.u64()?, d.u32()?, d.u32()?, d.u32()?);
        if protection != 0 {
            return Err(ClientError::Status { operation: "EXCHANGE_ID", status: Status::SERVERFAULT.0 });
        }
        let (_minor, major, scope) = (d.u64()?, d.opaque(1024)?, d.opaque(1024)?);
        self.server = [major, b"/", scope].concat();
        let is_new = self.client.is_none_or(|(known, _)| known != client);
        let session = self.create_session(client, sequence).await?;
        self.client = Some((client, sequence.wrapping_add(1)));
        self.shared.client.store(client, Ordering::Relaxed);
        if is_new {
            // Delegations are not reclaimed.
            self.shared.callbacks.recall_all();
            self.opens.give_up_delegations();
            self.opens.reclaim(&self.shared, &session).await?;
        }
        self.complete(&session).await?;
        Ok(session)
    }

    async fn create_session(&mut self, client: u64, sequence: u32) -> Result<Arc<Session>> {
        let limits = |out: &mut Encoder, most: u32, requests: u32| {
            [0, most, most, CACHED_MAX, OPERATIONS, requests, 0].into_iter().for_each(|word| out.u32(word));
        };
        let flags = if self.shared.wants_delegations { BACK_CHANNEL } else { 0 };
        let connection = self.shared.connection().await.map_err(CallError::from)?;
        let create = Compound::new().then(op::CREATE_SESSION, |out| {
            out.u64(client);
            out.u32(sequence);
            out.u32(flags);
            limits(out, CALL_MAX as u32, SLOTS);
            limits(out, 4096, 1);
            // Callbacks by AUTH_NONE.
            [callbacks::PROGRAM, 1, 0].into_iter().for_each(|word| out.u32(word));
        });
        let reply = self.shared.call_alone(create).await?;
        let mut results = Results::of(&reply)?;
        let d = results.next("CREATE_SESSION")?;
        let id = *d.fixed::<16>()?;
        let (_sequence, flags, _padding) = (d.u32()?, d.u32()?, d.u32()?);
        let (request, response, _cached, _operations, slots) = (d.u32()?, d.u32()?, d.u32()?, d.u32()?, d.u32()?);
        let data = |most: u32| {
            let most = (most as usize).saturating_sub(OVERHEAD).min(BULK_MAX);
            // A multiple of 4 KiB, if possible.
            if most >= 4096 { most / 4096 * 4096 } else { most.max(512) }
        };
        let is_called = self.shared.wants_delegations && flags & BACK_CHANNEL != 0;
        self.shared.callbacks.expect_in(is_called.then_some(id));
        self.bound = is_called.then_some(connection);
        self.generation += 1;
        Ok(Session::new(id, self.generation, slots, data(response), data(request)))
    }

    /// Binds the back channel to a new connection, if the earlier one is lost. [`Event::Bound`] reports the end.
    fn bind(&mut self) {
        const FORE_OR_BOTH: u32 = 3;
        let Some(session) = self.shared.session().filter(|_| self.bound.is_some() && !self.is_binding) else { return };
        let known = self.shared.connection_if_any();
        if known == self.bound {
            return;
        }
        self.is_binding = true;
        let shared = Arc::clone(&self.shared);
        tokio::task::spawn_local(async move {
            let bind = Compound::new().then(op::BIND_CONN_TO_SESSION, |out| {
                out.fixed(&session.id);
                [FORE_OR_BOTH, 0].into_iter().for_each(|word| out.u32(word));
            });
            let connection = shared.connection().await.ok();
            let bound = match shared.call_alone(bind).await {
                Ok(reply) => Results::of(&reply).and_then(|mut results| results.next("BIND_CONN_TO_SESSION").map(drop)),
                Err(error) => Err(error),
            };
            if let Err(error) = &bound {
                tracing::debug!(%error, "the NFS server cannot call this client");
            }
            shared.tell(Event::Bound(connection.filter(|_| bound.is_ok())));
        });
    }

    /// Ends the reclaims of the client.
    async fn complete(&self, session: &Arc<Session>) -> Result<()> {
        let complete = Compound::new().then(op::RECLAIM_COMPLETE, |out| out.bool(false));
        let Some(answer) = self.shared.exchange_in(session, &self.shared.machine, complete).await? else {
            return Err(ClientError::Status { operation: "SEQUENCE", status: Status::BADSESSION.0 });
        };
        match answer.results()?.next("RECLAIM_COMPLETE") {
            Err(error) if error.status() == Some(Status::COMPLETE_ALREADY) => Ok(()),
            completed => completed.map(drop),
        }
    }

    /// Creates a session. Tries until it succeeds; `None` if the client ends before.
    async fn recover(&mut self, is_over: &Notify) -> Option<()> {
        let lost = self.shared.session();
        if let Some(session) = &lost {
            session.end();
        }
        self.shared.publish(None);
        let mut is_said = false;
        loop {
            let made = tokio::select! {
                made = self.make_session() => made,
                () = is_over.notified() => return None,
            };
            match made {
                Ok(session) => {
                    tracing::info!(server = %String::from_utf8_lossy(&self.server), "session with the NFS server recovered");
                    self.shared.publish(Some(session));
                    if let Some(lost) = lost {
                        // The server may have it still, and count it.
                        drop(self.destroy_session(&lost).await);
                    }
                    return Some(());
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_said, true) {
                        tracing::warn!(%error, "the session with the NFS server is lost; trying again until it answers");
                    }
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
            }
        }
    }

    /// Runs until the client ends.
    pub(super) async fn keep(mut self, mut events: mpsc::UnboundedReceiver<Event>) {
        let is_over = Rc::new(Notify::new());
        let (sender, mut rest) = mpsc::unbounded_channel();
        // The end is noticed also during a recovery.
        let over = Rc::clone(&is_over);
        tokio::task::spawn_local(async move {
            while let Some(event) = events.recv().await {
                if matches!(event, Event::End) {
                    over.notify_one();
                }
                if sender.send(event).is_err() {
                    break;
                }
            }
        });
        let mut made: VecDeque<(Instant, Handle, u32)> = VecDeque::new();
        let (mut renewed, mut checked) = (Instant::now(), Instant::now() - CHECK_INTERVAL);
        let mut tick = tokio::time::interval(MADE_FOR);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let event = tokio::select! {
                event = rest.recv() => event.unwrap_or(Event::End),
                _ = tick.tick() => {
                    while made.front().is_some_and(|(at, ..)| at.elapsed() >= MADE_FOR) {
                        let (_, handle, uid) = made.pop_front().expect("it was looked at");
                        self.close(handle, uid);
                    }
                    if self.shared.callbacks.any() && self.shared.silence() >= self.lease / 2 {
                        // The server may soon take the client for dead, and let others change the files.
                        self.shared.callbacks.recall_all();
                        self.opens.give_up_delegations();
                    }
                    self.bind();
                    if renewed.elapsed() >= self.lease / 3 {
                        renewed = Instant::now();
                        let shared = Arc::clone(&self.shared);
                        tokio::task::spawn_local(async move { shared.call(&shared.machine, Compound::new()).await.map(drop) });
                    }
                    continue;
                }
            };
            match event {
                Event::SessionLost(generation) if generation == self.generation => {
                    if self.recover(&is_over).await.is_none() {
                        break;
                    }
                }
                Event::StateLost(generation)
                    if generation == self.generation && checked.elapsed() >= CHECK_INTERVAL =>
                {
                    checked = Instant::now();
                    let (shared, opens) = (Arc::clone(&self.shared), Arc::clone(&self.opens));
                    tokio::task::spawn_local(async move {
                        for file in opens.all() {
                            opens.renew(&shared, &file).await;
                        }
                    });
                }
                Event::SessionLost(_) | Event::StateLost(_) => {}
                Event::Close(handle, uid) => self.close(handle, uid),
                Event::Made(handle, uid) => made.push_back((Instant::now(), handle, uid)),
                Event::Bound(connection) => {
                    self.is_binding = false;
                    self.bound = connection.or(self.bound);
                }
                Event::Recalled => self.opens.give_up_delegations(),
                Event::Return { handle, stateid, who } => {
                    let shared = Arc::clone(&self.shared);
                    tokio::task::spawn_local(async move { return_delegation(&shared, &handle, stateid, &who).await });
                }
                Event::End => break,
            }
        }
        drop(tokio::time::timeout(END_TIMEOUT, self.end()).await);
        self.shared.end();
    }

    fn close(&self, handle: Handle, uid: u32) {
        let (shared, opens) = (Arc::clone(&self.shared), Arc::clone(&self.opens));
        tokio::task::spawn_local(async move { opens.close_of(&shared, &handle, uid).await });
    }

    async fn destroy_session(&self, session: &Session) -> Result<()> {
        let destroy = Compound::new().then(op::DESTROY_SESSION, |out| out.fixed(&session.id));
        let reply = self.shared.call_alone(destroy).await?;
        Results::of(&reply)?.next("DESTROY_SESSION").map(drop)
    }

    /// Closes all files, and ends the client on the server.
    async fn end(&self) {
        let Some(session) = self.shared.session() else { return };
        for file in self.opens.all() {
            self.opens.close(&self.shared, &file).await;
        }
        session.end();
        drop(self.destroy_session(&session).await);
        if let Some((client, _)) = self.client {
            let destroy = Compound::new().then(op::DESTROY_CLIENTID, |out| out.u64(client));
            drop(self.shared.call_alone(destroy).await);
        }
    }
}

/// Returns a delegation; frees its stateid if the server has revoked it.
async fn return_delegation(shared: &Arc<Shared>, handle: &Handle, stateid: Stateid, who: &Credentials) {
    let back =
        Compound::new().then(op::PUTFH, |out| out.opaque(handle)).then(op::DELEGRETURN, |out| out.fixed(&stateid));
    let status = shared.call(who, back.that_changes()).await.and_then(|answer| answer.status());
    if matches!(status, Ok(Status::DELEG_REVOKED | Status::EXPIRED | Status::ADMIN_REVOKED)) {
        let free = Compound::new().then(op::FREE_STATEID, |out| out.fixed(&stateid));
        drop(shared.call(who, free.that_changes()).await);
    }
}
