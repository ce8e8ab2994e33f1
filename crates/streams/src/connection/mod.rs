//! A connection: a stream of bytes or messages, and one-sided operations beside it.

mod asynchronous;
mod receiving;
mod sending;
mod turns;

pub use asynchronous::AsynchronousSends;
pub use receiving::Received;

use crate::context::{Handle, lock};
use crate::core::{Action, Counters, End};
use crate::error::Error;
use crate::leadership::Awaited;
use crate::memory::{CLAIM_RESULT, LANDING_LEN, Memory, OPERATION, OPERATIONS_MAX, RECEIVE, Request, STREAM_QUEUE_LEN};
use crate::operations::Operations;
use crate::settings::Settings;
use crate::wire::{Hello, MESSAGE_MAX};
use rustix::event::EventfdFlags;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};
use thruway_fabric::{
    Access, ConnectParams, ConnectionError, ConnectionInfo, ConnectionRequest, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairCaps, Status, WorkCompletion,
};

/// How long a close waits for the device to have sent its last message.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Elements of a request: a header and two parts of the stage.
const SGES: u32 = 3;

/// A connection. It may be used by any number of threads; two that send, or two that receive, share the stream between them call by call.
pub struct Connection(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) context: Arc<Handle>,
    pub(crate) pd: ProtectionDomain,
    pub(crate) qp: QueuePair,
    state: Mutex<State>,
    /// Threads that wait for something of this connection.
    waiting: AtomicU32,
    pub(crate) awaited: Arc<Awaited>,
    /// Readable while there is something to take; made when it is asked for.
    bell: OnceLock<OwnedFd>,
    settings: Settings,
    #[cfg(test)]
    pub(crate) panics_once: std::sync::atomic::AtomicBool,
}

pub(crate) struct State {
    /// The connection that this is the state of.
    own: Weak<Inner>,
    end: Option<End>,
    pub(crate) memory: Memory,
    /// Completions from before the peer's greeting.
    early: Vec<WorkCompletion>,
    ended: Option<ConnectionError>,
    /// The peer broke the protocol, or the device refused a request.
    failed: Option<String>,
    has_shut_down: bool,
    /// A thread sends, and one receives.
    sends: bool,
    receives: bool,
    /// Threads that wait for one of those to end.
    waits_for_turn: u32,
    /// Some of a message has been sent, and not all; it never will be.
    in_message: bool,
    is_cut: bool,
    /// Some of a message has been received by a call that had to end.
    partial: receiving::Partial,
    /// The source that the sending thread waits for, and the bytes that were sent of it when it is done.
    awaited_source: Option<u64>,
    source_sent: Option<usize>,
    /// Targets that have been read into, with the bytes, and whether a message ends there.
    fetched: HashMap<u64, (usize, bool)>,
    free_sinks: HashSet<u64>,
    asynchronous: asynchronous::Asynchronous,
    pub(crate) operations: Operations,
    /// The bell has been rung and not been silenced.
    rung: bool,
    requests: Vec<Request>,
}

impl Connection {
    fn prepare(context: &Arc<Handle>, settings: &Settings) -> Result<Arc<Inner>, Error> {
        settings.check().map_err(|(what, value, least, most)| Error::Setting { what, value, least, most })?;
        let caps = QueuePairCaps {
            max_send_wr: STREAM_QUEUE_LEN + OPERATIONS_MAX,
            max_recv_wr: settings.receives().into(),
            max_sge: SGES,
        };
        // Of its own: what is lent to one peer is nothing to another.
        let pd = context.device.alloc_pd()?;
        let qp = context.with_queue(|queue| pd.create_qp(queue, queue, caps))?;
        let memory = Memory::new(&pd, settings)?;
        for slot in 0..settings.receives() {
            memory.post_receive(&qp, slot)?;
        }
        let inner = Arc::new_cyclic(|own| Inner {
            context: Arc::clone(context),
            pd,
            qp,
            state: Mutex::new(State {
                own: Weak::clone(own),
                end: None,
                memory,
                early: Vec::new(),
                ended: None,
                failed: None,
                has_shut_down: false,
                sends: false,
                receives: false,
                waits_for_turn: 0,
                in_message: false,
                is_cut: false,
                partial: receiving::Partial::default(),
                awaited_source: None,
                source_sent: None,
                fetched: HashMap::new(),
                free_sinks: HashSet::new(),
                asynchronous: asynchronous::Asynchronous::default(),
                operations: Operations::default(),
                rung: false,
                requests: Vec::new(),
            }),
            waiting: AtomicU32::new(0),
            awaited: Arc::default(),
            bell: OnceLock::new(),
            settings: *settings,
            #[cfg(test)]
            panics_once: false.into(),
        });
        context.add(inner.qp.number(), &inner);
        Ok(inner)
    }

    pub(crate) fn connect(
        context: &Arc<Handle>,
        peer: SocketAddr,
        settings: &Settings,
        token: &[u8],
        timeout: Duration,
    ) -> Result<Connection, Error> {
        let inner = Connection::prepare(context, settings)?;
        let connection = Connection(inner);
        let inner = &connection.0;
        let hello = lock(&inner.state).memory.hello(settings);
        let private_data = [&hello.encode()[..], token].concat();
        inner.qp.connect(peer, &ConnectParams { private_data, timeout, ..ConnectParams::default() })?;
        let up = inner.wait(Some(Instant::now() + timeout), |state| state.end.is_some().then_some(Ok(())));
        up.map(|()| connection)
    }

    pub(crate) fn accept(
        context: &Arc<Handle>,
        request: ConnectionRequest,
        settings: &Settings,
        deadline: Instant,
    ) -> Result<Connection, Error> {
        let peer = Hello::decode(request.private_data())?;
        if peer.messages != settings.messages {
            let why = mismatch(settings);
            request.reject(why.as_bytes());
            return Err(Error::Mismatch(why));
        }
        let connection = Connection(Connection::prepare(context, settings)?);
        let inner = &connection.0;
        let hello = lock(&inner.state).memory.hello(settings);
        inner.start(hello, peer, false);
        request
            .accept(&inner.qp, &ConnectParams { private_data: hello.encode().to_vec(), ..ConnectParams::default() })?;
        inner.wait(Some(deadline), |_| inner.qp.info().map(|_| Ok(())))?;
        Ok(connection)
    }

    /// With whom, and by what.
    pub fn info(&self) -> Option<ConnectionInfo> {
        self.0.qp.info()
    }

    /// What has been moved.
    pub fn counters(&self) -> Counters {
        lock(&self.0.state).end.as_ref().map(End::counters).unwrap_or_default()
    }

    /// Sends nothing more. The peer learns it behind the last byte.
    pub fn shutdown(&self) {
        let mut state = lock(&self.0.state);
        state.has_shut_down = true;
        if let Some(end) = &mut state.end {
            end.shutdown();
        }
        self.0.post_actions(&mut state);
        drop(state);
        // Another thread's call that sends is over.
        self.0.tell();
    }

    /// Ends the connection at once: calls of other threads that wait return [`Error::Reset`], and the peer's do. What it has not received is lost.
    pub fn abort(&self) {
        let mut state = lock(&self.0.state);
        if let Some(end) = &mut state.end {
            end.abort();
        }
        self.0.post_actions(&mut state);
        state.failed.get_or_insert_with(|| "aborted".to_owned());
        state.release_all();
        self.0.notify(&mut state);
        drop(state);
        self.0.qp.disconnect();
        self.0.tell();
    }

    /// Sends nothing more, and waits until the peer has everything, at most until the deadline.
    ///
    /// # Errors
    /// If that cannot be, or is not known by then: bytes may be lost.
    pub fn close(self, deadline: Option<Instant>) -> Result<(), Error> {
        self.shutdown();
        let arrived = |state: &mut State| {
            let end = state.end.as_ref()?;
            // A peer that has closed first does not answer any more.
            let is_over = state.ended == Some(ConnectionError::Closed) && end.has_delivered();
            // The peer may wait for an answer to its own end.
            ((end.has_arrived() && !end.has_replies()) || is_over).then_some(Ok(()))
        };
        let result = self.0.wait(deadline, arrived);
        self.0.qp.disconnect();
        // To drop a queue pair is to drop what it has not sent: an RDMA device's last message may be the answer that the peer waits for.
        let soon = Instant::now() + CLOSE_TIMEOUT;
        let soon = deadline.map_or(soon, |at| at.min(soon));
        let _ = self.0.wait(Some(soon), |state| state.ended.is_some().then_some(Ok(())));
        result
    }

    /// Readable when there is something to receive, or room after there was none, or a completion, or an end: whenever a call that would
    /// have waited is worth another try. It is silenced by [`Connection::silence`].
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>, Error> {
        if self.0.bell.get().is_none() {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let bell = rustix::event::eventfd(1, flags).map_err(|error| Error::Memory(error.into()))?;
            // The first look is always worth it.
            lock(&self.0.state).rung = true;
            let _ = self.0.bell.set(bell);
        }
        Ok(self.0.bell.get().expect("it is there now").as_fd())
    }

    /// Makes the descriptor unreadable until something new happens: before a last look that says there is nothing.
    pub fn silence(&self) {
        if let Some(bell) = self.0.bell.get() {
            let mut state = lock(&self.0.state);
            let _ = rustix::io::read(bell, &mut [0; 8]);
            state.rung = false;
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        lock(&self.0.state).release_all();
        self.0.qp.disconnect();
        self.0.context.remove(self.0.qp.number());
        // Threads may wait for memory that it was sending, and hear of it no other way any more.
        self.0.tell();
    }
}

fn mismatch(settings: &Settings) -> &'static str {
    match settings.messages {
        true => "wants a stream of bytes, and this end messages",
        false => "wants messages, and this end a stream of bytes",
    }
}

impl State {
    pub(crate) fn check(&self) -> Result<(), Error> {
        match (&self.failed, &self.ended) {
            (Some(_), _) => Err(Error::Reset),
            (None, Some(cause)) => Err(Error::Ended(cause.clone())),
            (None, None) => Ok(()),
        }
    }
}

impl Inner {
    fn start(&self, own: Hello, peer: Hello, connects: bool) {
        let mut state = lock(&self.state);
        state.end = Some(End::new(self.settings, own, peer, STREAM_QUEUE_LEN, LANDING_LEN));
        let end = state.end.as_mut().expect("it has just been made");
        if connects {
            end.greet();
        }
        if state.has_shut_down {
            state.end.as_mut().expect("as before").shutdown();
        }
        let early = std::mem::take(&mut state.early);
        self.handle(&mut state, &early);
    }

    /// The peer has accepted.
    pub(crate) fn established(&self, private_data: &[u8]) {
        let hello = {
            let state = lock(&self.state);
            // The accepting end has known its peer since the request.
            if state.end.is_some() {
                return self.tell();
            }
            state.memory.hello(&self.settings)
        };
        match Hello::decode(private_data) {
            Ok(peer) if peer.messages == self.settings.messages => self.start(hello, peer, true),
            Ok(_) => self.fail(&mut lock(&self.state), mismatch(&self.settings)),
            Err(violation) => self.fail(&mut lock(&self.state), &violation.to_string()),
        }
        self.tell();
    }

    /// The connection has ended.
    pub(crate) fn disconnected(&self, cause: ConnectionError) {
        let mut state = lock(&self.state);
        state.ended.get_or_insert(cause);
        state.release_all();
        self.notify(&mut state);
        drop(state);
        self.tell();
    }

    /// Requests have completed.
    pub(crate) fn complete(&self, completions: &[WorkCompletion]) {
        #[cfg(test)]
        assert!(!self.panics_once.swap(false, Ordering::SeqCst), "as a test has asked");
        let mut state = lock(&self.state);
        if state.end.is_none() {
            state.early.extend(completions);
        } else {
            self.handle(&mut state, completions);
        }
        drop(state);
        self.tell();
    }

    fn handle(&self, state: &mut State, completions: &[WorkCompletion]) {
        let news = |state: &State| (state.end.as_ref().map(End::news), state.operations.news());
        let before = news(state);
        for wc in completions {
            if wc.wr_id & OPERATION != 0 {
                let value = state.memory.read_result((wc.wr_id & !OPERATION) as u32);
                state.operations.complete((wc.wr_id & !OPERATION) as u32, wc.status, value);
                continue;
            }
            if wc.status != Status::Success || state.failed.is_some() {
                continue;
            }
            let end = state.end.as_mut().expect("an end by now");
            if wc.wr_id & RECEIVE == 0 {
                end.completed(wc.wr_id, state.memory.read_result(CLAIM_RESULT));
                continue;
            }
            let slot = (wc.wr_id & !RECEIVE) as u16;
            let mut head = [0; MESSAGE_MAX];
            let len = (wc.len as usize).min(MESSAGE_MAX);
            state.memory.received(slot, len, &mut head);
            if let Err(violation) = end.received(slot, &head[..len], wc.len as usize) {
                self.fail(state, &violation.to_string());
            }
        }
        self.post_actions(state);
        if news(state) != before {
            self.notify(state);
        }
    }

    /// Ends a connection whose state cannot be trusted any more.
    pub(crate) fn contain(&self) {
        tracing::error!("the state machine of a connection panicked; please report this");
        self.fail(&mut lock(&self.state), "an internal error");
    }

    fn fail(&self, state: &mut State, why: &str) {
        tracing::warn!(peer = ?self.qp.info().map(|info| info.peer), "ending the connection: {why}");
        state.failed.get_or_insert_with(|| why.to_owned());
        self.qp.disconnect();
        state.release_all();
        self.notify(state);
        self.tell();
    }

    /// Posts what the end wants posted.
    pub(crate) fn post_actions(&self, state: &mut State) {
        let mut error = None;
        // What can be put elsewhere makes more to do.
        while let Some(action) = self.next_action(state) {
            match action {
                Action::Receive(slot) => error = error.or(state.memory.post_receive(&self.qp, slot).err()),
                Action::SourceDone { source, sent } => {
                    state.memory.take_back(source);
                    // One that a thread waits for is reported to it.
                    match state.awaited_source == Some(source) {
                        true => state.source_sent = Some(sent),
                        false => state.released(source),
                    }
                }
                Action::Fetched { target, len, end } => {
                    state.memory.take_back(target);
                    state.fetched.insert(target, (len, end));
                }
                Action::SinkFree(target) => {
                    state.memory.take_back(target);
                    state.free_sinks.insert(target);
                }
                Action::SetLock(at, value) => state.memory.set_lock(at, value),
                Action::Claimed(source) => self.claimed(state, source),
                Action::ClaimAgain(source) => state.claim_later(source),
                request => state.requests.extend(state.memory.request(&request)),
            }
        }
        if !state.requests.is_empty() {
            error = error.or(Request::post(&state.requests, &self.qp).err());
            state.requests.clear();
        }
        // Where the connection has ended, its event says why.
        if let Some(error) = error
            && self.qp.error().is_none()
        {
            self.fail(state, &error.to_string());
        }
    }

    fn next_action(&self, state: &mut State) -> Option<Action> {
        let next = |state: &mut State| state.end.as_mut().and_then(End::action);
        next(state).or_else(|| {
            self.claim_again(state);
            next(state)
        })
    }

    fn notify(&self, state: &mut State) {
        if let Some(bell) = self.bell.get()
            && !std::mem::replace(&mut state.rung, true)
        {
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
    }

    /// Something that other threads may wait for has changed.
    pub(crate) fn tell(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.context.tell(&self.awaited);
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// What `look` finds, if anything; an error if the connection has ended and it does not.
    pub(crate) fn look<T>(
        &self,
        mut look: impl FnMut(&mut State) -> Option<Result<T, Error>>,
    ) -> Option<Result<T, Error>> {
        let mut state = lock(&self.state);
        let found = look(&mut state);
        self.post_actions(&mut state);
        // What has come before the end counts.
        found.or_else(|| state.check().err().map(Err))
    }

    /// Waits until `look` finds what it looks for; an error if the connection ends before.
    pub(crate) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut look: impl FnMut(&mut State) -> Option<Result<T, Error>>,
    ) -> Result<T, Error> {
        let mut look = || self.look(&mut look);
        if let Some(found) = look() {
            return found;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let result = loop {
            let epoch = self.awaited.epoch();
            self.context.poll();
            if let Some(found) = look() {
                break found;
            }
            if deadline.is_some_and(|at| Instant::now() >= at) {
                break Err(Error::TimedOut);
            }
            if let Err(error) = self.context.wait(&self.awaited, epoch, deadline) {
                break Err(error);
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Registers memory for the time of a call, which does not return before the stream is done with it.
    fn register(&self, at: *mut u8, len: usize, access: Access) -> Result<MemoryRegion, Error> {
        // SAFETY: the memory is borrowed by the caller for as long as the call takes, and the stream gives the region back
        // before that, or the connection has ended and nothing uses it any more.
        Ok(unsafe { self.pd.register_raw(at, len, access, Arc::new(())) }?)
    }
}
