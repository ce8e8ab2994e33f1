//! Calls of the server to the client (RFC 8881, section 20), and the files that the server has delegated for reading.
//!
//! A delegation is requested when a file is opened for reading. While it is held, the server lets no other client change the file
//! without a recall. [`FileSystem::lease`](thruway_vfs::FileSystem::lease) hands it on to clients of this host. It is returned when the
//! file has been closed and the last lease has been dropped.

use super::events::{Event, Events, Stateid};
use crate::client::Handle;
use crate::status::Status;
use crate::v4::bitmap::Bitmap;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use thruway_rpc::message::{CallHeader, Refusal};
use thruway_rpc::xdr::{self, Decoder, Encoder};
use thruway_vfs::{Credentials, OnChange};

/// Program of the callbacks, and its version.
pub(super) const PROGRAM: u32 = 0x4000_0000;
const VERSION: u32 = 1;

const CB_COMPOUND: u32 = 1;
const CB_RECALL: u32 = 4;
const CB_RECALL_ANY: u32 = 8;
const CB_SEQUENCE: u32 = 11;
const CB_NOTIFY_LOCK: u32 = 13;

/// Most operations of a callback.
const OPERATIONS_MAX: u32 = 16;

/// Recalls of unknown delegations that are remembered: the reply that grants one may come after its recall.
const EARLY_MAX: usize = 64;

/// The part of a stateid that names the state, without the sequence number.
type Name = [u8; 12];

fn name(stateid: &Stateid) -> Name {
    *stateid.last_chunk().expect("a stateid is longer")
}

/// A file that the server has delegated.
pub(super) struct Delegation {
    handle: Handle,
    stateid: Stateid,
    who: Credentials,
    is_recalled: AtomicBool,
    /// Leases, by their numbers.
    leases: Mutex<HashMap<u64, Arc<OnChange>>>,
    of: Callbacks,
}

impl Delegation {
    fn leases(&self) -> MutexGuard<'_, HashMap<u64, Arc<OnChange>>> {
        self.leases.lock().expect("no panics under the lock")
    }

    /// The holders of leases are to drop them.
    fn recall(&self) {
        self.is_recalled.store(true, Ordering::SeqCst);
        let leases: Vec<Arc<OnChange>> = self.leases().values().cloned().collect();
        leases.iter().for_each(|on_change| on_change());
    }

    pub(super) fn is_recalled(&self) -> bool {
        self.is_recalled.load(Ordering::SeqCst)
    }

    /// A lease; `None` if the delegation has been recalled.
    pub(super) fn lease(self: &Arc<Delegation>, on_change: OnChange) -> Option<Lease> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        self.leases().insert(number, Arc::new(on_change));
        let lease = Lease { of: Arc::clone(self), number };
        // After the insertion: an earlier recall has not called it.
        (!self.is_recalled()).then_some(lease)
    }
}

impl Drop for Delegation {
    fn drop(&mut self) {
        self.of.forget(self);
        let (handle, who) = (self.handle.clone(), self.who.clone());
        self.of.events.tell(Event::Return { handle, stateid: self.stateid, who });
    }
}

/// Holds a delegation for a client of this host.
pub(super) struct Lease {
    of: Arc<Delegation>,
    number: u64,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.of.leases().remove(&self.number);
    }
}

/// The session whose back channel is used.
struct Back {
    session: [u8; 16],
    /// Sequence number and reply of the last callback, in the only slot.
    last: u32,
    reply: Vec<u8>,
}

/// How a callback begins.
enum Begun {
    New,
    /// It was executed before, with this reply.
    Repeated(Vec<u8>),
    Refused(Status),
}

/// Number and status of an operation.
fn result(operation: u32, status: u32) -> Encoder {
    let mut result = Encoder::new();
    [operation, status].into_iter().for_each(|word| result.u32(word));
    result
}

/// `CB_COMPOUND4res`
fn put_reply(out: &mut Encoder, status: u32, tag: &[u8], results: &[Encoder]) {
    out.u32(status);
    out.opaque(tag);
    out.array(results, |out, result| out.fixed(&result.to_bytes()));
}

#[derive(Default)]
struct State {
    held: HashMap<Name, Weak<Delegation>>,
    by_handle: HashMap<Handle, Weak<Delegation>>,
    /// Recalled before they were known.
    early: VecDeque<Name>,
    back: Option<Back>,
}

/// All delegations of a client, and its back channel.
#[derive(Clone)]
pub(super) struct Callbacks {
    state: Arc<Mutex<State>>,
    events: Events,
}

impl Callbacks {
    pub(super) fn new(events: Events) -> Callbacks {
        Callbacks { state: Arc::default(), events }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panics under the lock")
    }

    /// Callbacks come in this session; `None` if it has no back channel.
    pub(super) fn expect_in(&self, session: Option<[u8; 16]>) {
        self.state().back = session.map(|session| Back { session, last: 0, reply: Vec::new() });
    }

    /// True if the server can call the client: delegations may be requested.
    pub(super) fn can_be_called(&self) -> bool {
        self.state().back.is_some()
    }

    /// Records a delegation.
    pub(super) fn add(&self, handle: &Handle, stateid: Stateid, who: &Credentials) -> Arc<Delegation> {
        let delegation = Arc::new(Delegation {
            handle: handle.clone(),
            stateid,
            who: who.clone(),
            is_recalled: AtomicBool::new(false),
            leases: Mutex::default(),
            of: self.clone(),
        });
        let mut state = self.state();
        state.held.insert(name(&stateid), Arc::downgrade(&delegation));
        state.by_handle.insert(handle.clone(), Arc::downgrade(&delegation));
        if let Some(at) = state.early.iter().position(|early| *early == name(&stateid)) {
            state.early.remove(at);
            delegation.is_recalled.store(true, Ordering::SeqCst);
        }
        delegation
    }

    /// A delegation is not held any more.
    fn forget(&self, delegation: &Delegation) {
        let is_gone = |held: Option<&Weak<Delegation>>| held.is_some_and(|held| held.strong_count() == 0);
        let mut state = self.state();
        let name = name(&delegation.stateid);
        if is_gone(state.held.get(&name)) {
            state.held.remove(&name);
        }
        if is_gone(state.by_handle.get(&delegation.handle)) {
            state.by_handle.remove(&delegation.handle);
        }
    }

    /// The delegation of a file that is not recalled.
    pub(super) fn of(&self, handle: &Handle) -> Option<Arc<Delegation>> {
        let found = self.state().by_handle.get(handle).and_then(Weak::upgrade);
        found.filter(|delegation| !delegation.is_recalled())
    }

    fn recall(&self, stateid: &Stateid) {
        let found = {
            let mut state = self.state();
            let found = state.held.get(&name(stateid)).and_then(Weak::upgrade);
            if found.is_none() {
                if state.early.len() == EARLY_MAX {
                    state.early.pop_front();
                }
                state.early.push_back(name(stateid));
            }
            found
        };
        if let Some(delegation) = found {
            delegation.recall();
            self.events.tell(Event::Recalled);
        }
    }

    /// Whether any file is delegated.
    pub(super) fn any(&self) -> bool {
        self.state().held.values().any(|held| held.strong_count() > 0)
    }

    /// Recalls everything, because the server may have revoked it.
    pub(super) fn recall_all(&self) {
        let all: Vec<Arc<Delegation>> = self.state().held.values().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|delegation| delegation.recall());
    }

    /// Answers a call of the server: appends the results.
    pub(super) fn answer(&self, call: CallHeader<'_>, d: &mut Decoder<'_>, out: &mut Encoder) -> Result<(), Refusal> {
        match (call.program, call.version, call.procedure) {
            (PROGRAM, VERSION, 0) => Ok(()),
            (PROGRAM, VERSION, CB_COMPOUND) => self.compound(d, out).map_err(|_| Refusal::GarbageArguments),
            (PROGRAM, VERSION, _) => Err(Refusal::ProcedureUnavailable),
            (PROGRAM, ..) => Err(Refusal::ProgramMismatch { low: VERSION, high: VERSION }),
            _ => Err(Refusal::ProgramUnavailable),
        }
    }

    fn compound(&self, d: &mut Decoder<'_>, out: &mut Encoder) -> xdr::Result<()> {
        let (tag, minor, _identifier, count) = (d.opaque(1024)?, d.u32()?, d.u32()?, d.len(OPERATIONS_MAX)?);
        if !(1..=2).contains(&minor) {
            put_reply(out, Status::MINOR_VERS_MISMATCH.0, tag, &[]);
            return Ok(());
        }
        if count == 0 || d.u32()? != CB_SEQUENCE {
            let status = Status::OP_NOT_IN_SESSION.0;
            put_reply(out, status, tag, &[result(CB_SEQUENCE, status)]);
            return Ok(());
        }
        let session = *d.fixed::<16>()?;
        let (sequence, slot, _highest, _keep) = (d.u32()?, d.u32()?, d.u32()?, d.bool()?);
        // Requests that this one refers to. A recall of a delegation whose grant is still on its way is remembered instead.
        d.array(64, |d| Ok((*d.fixed::<16>()?, d.array(64, |d| Ok((d.u32()?, d.u32()?)))?)))?;
        match self.begin(&session, sequence, slot) {
            Begun::New => {}
            Begun::Repeated(reply) => {
                out.fixed(&reply);
                return Ok(());
            }
            Begun::Refused(Status(status)) => {
                put_reply(out, status, tag, &[result(CB_SEQUENCE, status)]);
                return Ok(());
            }
        }
        let mut first = result(CB_SEQUENCE, 0);
        first.fixed(&session);
        [sequence, 0, 0, 0].into_iter().for_each(|word| first.u32(word));
        let (mut results, mut last) = (vec![first], 0);
        for _ in 1..count {
            let operation = d.u32()?;
            last = self.operation(operation, d)?;
            results.push(result(operation, last));
            if last != 0 {
                break;
            }
        }
        put_reply(out, last, tag, &results);
        if let Some(back) = self.state().back.as_mut().filter(|back| back.session == session) {
            back.reply = out.to_bytes();
        }
        Ok(())
    }

    /// Checks CB_SEQUENCE. There is one slot.
    fn begin(&self, session: &[u8; 16], sequence: u32, slot: u32) -> Begun {
        let mut state = self.state();
        let Some(back) = state.back.as_mut().filter(|back| back.session == *session) else {
            return Begun::Refused(Status::BADSESSION);
        };
        match sequence.wrapping_sub(back.last) {
            _ if slot != 0 => Begun::Refused(Status::BADSLOT),
            1 => {
                back.last = sequence;
                back.reply.clear();
                Begun::New
            }
            0 if !back.reply.is_empty() => Begun::Repeated(back.reply.clone()),
            _ => Begun::Refused(Status::SEQ_MISORDERED),
        }
    }

    /// Executes an operation behind CB_SEQUENCE; its status.
    fn operation(&self, operation: u32, d: &mut Decoder<'_>) -> xdr::Result<u32> {
        match operation {
            CB_RECALL => {
                let (stateid, _truncates, _handle) =
                    (*d.fixed::<16>()?, d.bool()?, d.opaque(super::attributes::HANDLE_MAX)?);
                self.recall(&stateid);
                Ok(0)
            }
            CB_RECALL_ANY => {
                let (_keep, _types) = (d.u32()?, Bitmap::decode(d)?);
                self.recall_all();
                Ok(0)
            }
            // Nobody here waits for a lock of the server.
            CB_NOTIFY_LOCK => {
                let _ = (d.opaque(super::attributes::HANDLE_MAX)?, d.u64()?, d.opaque(1024)?);
                Ok(0)
            }
            // What follows is not decoded.
            _ => Ok(Status::NOTSUPP.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use thruway_rpc::message::OpaqueAuth;

    const SESSION: [u8; 16] = [5; 16];

    fn header(procedure: u32) -> CallHeader<'static> {
        let (credential, verifier) = (OpaqueAuth::NONE, OpaqueAuth::NONE);
        CallHeader { xid: 1, program: PROGRAM, version: VERSION, procedure, credential, verifier }
    }

    fn recall(session: [u8; 16], sequence: u32, stateid: Stateid) -> Vec<u8> {
        let mut out = Encoder::new();
        out.opaque(b"tag");
        [1, 0, 2, CB_SEQUENCE].into_iter().for_each(|word| out.u32(word));
        out.fixed(&session);
        [sequence, 0, 0, 0, 0, CB_RECALL].into_iter().for_each(|word| out.u32(word));
        out.fixed(&stateid);
        out.bool(false);
        out.opaque(b"handle");
        out.to_bytes()
    }

    fn status(callbacks: &Callbacks, call: &[u8]) -> u32 {
        let mut out = Encoder::new();
        callbacks.answer(header(CB_COMPOUND), &mut Decoder::new(call), &mut out).unwrap();
        Decoder::new(&out.to_bytes()).u32().unwrap()
    }

    fn callbacks() -> Callbacks {
        Callbacks::new(Events::new().0)
    }

    #[test]
    fn a_recall_reaches_the_leases_once() {
        let callbacks = callbacks();
        let who = Credentials { uid: 0, gid: 0, groups: Vec::new() };
        let recalled = Arc::new(AtomicU64::new(0));
        assert_eq!(status(&callbacks, &recall(SESSION, 1, [1; 16])), Status::BADSESSION.0);
        callbacks.expect_in(Some(SESSION));
        let delegation = callbacks.add(&b"handle"[..].into(), [1; 16], &who);
        let count = Arc::clone(&recalled);
        let lease = delegation.lease(Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        assert!(lease.is_some() && callbacks.any());
        assert_eq!(status(&callbacks, &recall(SESSION, 2, [1; 16])), Status::SEQ_MISORDERED.0);
        for _ in 0..2 {
            assert_eq!(status(&callbacks, &recall(SESSION, 1, [1; 16])), 0, "the second is a repetition");
        }
        assert_eq!(recalled.load(Ordering::Relaxed), 1);
        assert!(delegation.lease(Box::new(|| ())).is_none(), "it has been recalled");
        // A recall before the reply that grants the delegation.
        assert_eq!(status(&callbacks, &recall(SESSION, 2, [2; 16])), 0);
        assert!(callbacks.add(&b"other"[..].into(), [2; 16], &who).is_recalled());
        drop((lease, delegation));
        assert!(!callbacks.any());
    }

    proptest! {
        #[test]
        fn nonsense_is_refused(data in prop::collection::vec(any::<u8>(), 0..200), at in 0..60_usize, byte in any::<u8>()) {
            let callbacks = callbacks();
            callbacks.expect_in(Some(SESSION));
            let mut damaged = recall(SESSION, 1, [1; 16]);
            damaged[at] = byte;
            for call in [data, damaged] {
                let mut out = Encoder::new();
                let _ = callbacks.answer(header(CB_COMPOUND), &mut Decoder::new(&call), &mut out);
            }
        }
    }
}
