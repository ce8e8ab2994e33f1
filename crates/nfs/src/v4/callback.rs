//! Calls to clients (RFC 8881, section 20), one after the other for each session, by any of its connections.

use super::offload::put_written;
use crate::state::session::Session;
use crate::state::{Callback, Notice};
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use thruway_rpc::client::{CallError, Procedure};
use thruway_rpc::message::OpaqueAuth;
use thruway_rpc::server::BackChannel;
use thruway_rpc::xdr::{DecodeError, Decoder, Encoder};

/// Connections by which a session is called back.
const CHANNELS_MAX: usize = 4;

/// Most bytes of a call: two operations, with a credential, a handle and an owner of the longest.
pub(crate) const CALL_MAX: u32 = 2048;

/// Notices of a session that are on their way: of more, clients find out when they ask again.
const NOTICES_MAX: usize = 64;

/// A client that does not answer for this long is not called any more by this connection, until it binds it again.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Numbers of operations and statuses, by the names of the RFC.
const CB_SEQUENCE: u32 = 11;
const CB_RECALL: u32 = 4;
const CB_OFFLOAD: u32 = 15;
const CB_NOTIFY_LOCK: u32 = 13;
const SEQ_MISORDERED: u32 = 10_063;
const RETRY_UNCACHED_REP: u32 = 10_068;
const SEQ_FALSE_RETRY: u32 = 10_076;

/// So many calls may be lost, one behind the other, before the numbers begin again at the first of them.
const TRIED_MAX: u32 = 8;

/// Calls to find out which number the client expects: each that may have been lost, and one that it says it has had.
const ATTEMPTS_MAX: u32 = TRIED_MAX + 3;

/// How a client wants to be called (`callback_sec_parms4`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Credential {
    pub flavor: u32,
    pub body: Vec<u8>,
}

/// Calls to the client of a session.
pub(crate) struct Back {
    /// Program of the client, and the credential for calls to it.
    caller: Mutex<(u32, Credential)>,
    channels: Mutex<Vec<BackChannel>>,
    /// Of the client's; one call is made at a time.
    slot: tokio::sync::Mutex<Slot>,
    /// Which number the client expects cannot be found out.
    is_out_of_step: AtomicBool,
    /// Notices on their way.
    notices: AtomicUsize,
}

/// Sequence numbers of calls.
#[derive(Default)]
struct Slot {
    /// Number of the last call that the client has confirmed.
    taken: u32,
    /// The highest that was tried since then; it may have been lost on its way, or its answer.
    tried: u32,
}

/// Counts a notice, also if who sends it does not wait for the answer.
struct OnItsWay<'a>(&'a AtomicUsize);

impl Drop for OnItsWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Callback for Back {
    fn is_open(&self) -> bool {
        !self.is_out_of_step() && self.channels().iter().any(BackChannel::is_open)
    }
}

impl Back {
    /// Calls to the client of this session; `None` if it accepts none.
    pub(crate) fn of(session: &Session) -> Option<&Back> {
        let callback: &dyn Any = session.callback.as_deref()?;
        callback.downcast_ref()
    }

    pub(crate) fn new(program: u32, credential: Credential, channel: BackChannel) -> Back {
        Back {
            caller: Mutex::new((program, credential)),
            channels: Mutex::new(vec![channel]),
            slot: tokio::sync::Mutex::default(),
            is_out_of_step: AtomicBool::new(false),
            notices: AtomicUsize::new(0),
        }
    }

    fn channels(&self) -> MutexGuard<'_, Vec<BackChannel>> {
        self.channels.lock().expect("no panics under the lock")
    }

    /// Changes the program and the credential of later calls.
    pub(crate) fn set_caller(&self, program: u32, credential: Credential) {
        *self.caller.lock().expect("no panics under the lock") = (program, credential);
    }

    /// One more connection.
    pub(crate) fn add(&self, channel: BackChannel) {
        let mut channels = self.channels();
        channels.retain(|known| known.is_open() && !known.is_same(&channel));
        if channels.len() >= CHANNELS_MAX {
            channels.remove(0);
        }
        channels.push(channel);
    }

    /// Whether another session is needed to call the client.
    pub(crate) fn is_out_of_step(&self) -> bool {
        self.is_out_of_step.load(Ordering::Relaxed)
    }

    /// Sends a notice to the client, once; the status of its operation. `None` if there are too many on their way.
    pub(crate) async fn send(&self, session: &Session, notice: &Notice) -> Result<Option<u32>, CallError> {
        let _on_its_way = OnItsWay(&self.notices);
        if self.notices.fetch_add(1, Ordering::Relaxed) >= NOTICES_MAX {
            return Ok(None);
        }
        self.send_in_turn(session, notice).await.map(|answer| Some(answer.status))
    }

    /// As [`Back::send`], whatever is on its way.
    pub(crate) async fn send_in_turn(&self, session: &Session, notice: &Notice) -> Result<Answer, CallError> {
        let mut slot = self.slot.lock().await;
        // If the client has not got the last ones, the number of one of them is still the next.
        let ahead = slot.tried.wrapping_sub(slot.taken).min(TRIED_MAX);
        let mut sequence = slot.taken.wrapping_add(ahead).wrapping_add(1);
        for _ in 0..ATTEMPTS_MAX {
            let Some(channel) = self.channels().iter().find(|channel| channel.is_open()).cloned() else {
                return Err(CallError::Connection(std::io::ErrorKind::NotConnected.into()));
            };
            let (program, credential) = self.caller.lock().expect("no panics under the lock").clone();
            let procedure = Procedure { program, version: 1, procedure: 1 };
            let credential = OpaqueAuth { flavor: credential.flavor, body: &credential.body };
            let tried = slot.tried;
            if sequence.wrapping_sub(slot.taken) > tried.wrapping_sub(slot.taken) {
                slot.tried = sequence;
            }
            let reply = channel.call(procedure, credential, &compound(session, sequence, notice), TIMEOUT).await;
            if let Err(CallError::TimedOut(_)) = reply {
                self.channels().retain(|known| !known.is_same(&channel));
            }
            let (of_sequence, of_notice) = statuses(&reply?, &session.id, sequence)?;
            match of_sequence {
                0 => {
                    *slot = Slot { taken: sequence, tried: sequence };
                    return Ok(Answer { status: of_notice, is_of_notice: true });
                }
                // Nothing that it could be is right.
                SEQ_MISORDERED if sequence == slot.taken.wrapping_add(1) => break,
                SEQ_MISORDERED => sequence = sequence.wrapping_sub(1),
                // The client has had a call of this number.
                RETRY_UNCACHED_REP | SEQ_FALSE_RETRY => {
                    slot.taken = sequence;
                    sequence = sequence.wrapping_add(1);
                }
                // Whatever it was, the number has not been taken (RFC 8881, section 20.9.3).
                _ => {
                    slot.tried = tried;
                    return Ok(Answer { status: of_sequence, is_of_notice: false });
                }
            }
        }
        self.is_out_of_step.store(true, Ordering::Relaxed);
        Ok(Answer { status: SEQ_MISORDERED, is_of_notice: false })
    }
}

/// `CB_COMPOUND4args`
fn compound(session: &Session, sequence: u32, notice: &Notice) -> Encoder {
    let mut out = Encoder::new();
    out.opaque(b"");
    // Minor version, no identifier of the callback, two operations.
    [session.minor, 0, 2].into_iter().for_each(|word| out.u32(word));
    out.u32(CB_SEQUENCE);
    out.fixed(&session.id);
    // In slot 0, which is the highest; not to be kept; no calls of the client's that this refers to.
    [sequence, 0, 0, 0, 0].into_iter().for_each(|word| out.u32(word));
    match notice {
        Notice::Lock { handle, owner } => {
            out.u32(CB_NOTIFY_LOCK);
            out.opaque(handle);
            out.u64(session.client);
            out.opaque(owner);
        }
        Notice::Recall { handle, stateid } => {
            out.u32(CB_RECALL);
            stateid.encode(&mut out);
            // Not because the file is to be cut to nothing.
            out.bool(false);
            out.opaque(handle);
        }
        Notice::Copied { handle, stateid, result, copied, verifier } => {
            out.u32(CB_OFFLOAD);
            out.opaque(handle);
            stateid.encode(&mut out);
            match result {
                Ok(()) => {
                    out.u32(0);
                    put_written(&mut out, None, *copied, *verifier);
                }
                Err(status) => {
                    out.u32(status.0);
                    out.u64(*copied);
                }
            }
        }
    }
    out
}

/// The reply of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u32,
    /// It is the status of the notice. Otherwise that of CB_SEQUENCE, and the client has not looked at the notice.
    pub(crate) is_of_notice: bool,
}

/// Statuses of CB_SEQUENCE and, if that succeeded, of the operation after it; otherwise 0.
///
/// # Errors
/// [`CallError::Malformed`] if the reply ends early, or answers another operation, session, number or slot.
fn statuses(reply: &[u8], session: &[u8; 16], sequence: u32) -> Result<(u32, u32), CallError> {
    let is = |value: u32, expected: u32| if value == expected { Ok(()) } else { Err(DecodeError::Invalid { value }) };
    let mut d = Decoder::new(reply);
    let (status, _tag, count) = (d.u32()?, d.opaque(1024)?, d.u32()?);
    if count == 0 && status != 0 {
        return Ok((status, 0));
    }
    is(d.u32()?, CB_SEQUENCE)?;
    let of_sequence = d.u32()?;
    if of_sequence != 0 {
        return Ok((of_sequence, 0));
    }
    let (of_session, number, slot) = (d.fixed::<16>()?, d.u32()?, d.u32()?);
    for (word, expected) in of_session.chunks_exact(4).zip(session.chunks_exact(4)) {
        let value = |word: &[u8]| u32::from_be_bytes(word.try_into().expect("4 bytes"));
        is(value(word), value(expected))?;
    }
    is(number, sequence)?;
    is(slot, 0)?;
    let (_highest, _target, _operation, of_notice) = (d.u32()?, d.u32()?, d.u32()?, d.u32()?);
    Ok((0, of_notice))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn answers_are_taken_apart_and_belong_to_the_call() {
        const SEQUENCE: u32 = 5;
        let session: [u8; 16] = words(&[1, 2, 3, 4]).try_into().unwrap();
        let statuses = |reply: &[u8]| statuses(reply, &session, SEQUENCE);
        let all = words(&[0, 0, 2, CB_SEQUENCE, 0, 1, 2, 3, 4, SEQUENCE, 0, 0, 0, CB_NOTIFY_LOCK, 10_004]);
        assert!(matches!(statuses(&all), Ok((0, 10_004))));
        let misordered = words(&[SEQ_MISORDERED, 0, 1, CB_SEQUENCE, SEQ_MISORDERED]);
        assert!(matches!(statuses(&misordered), Ok((SEQ_MISORDERED, 0))));
        assert!(matches!(statuses(&words(&[10_021, 0, 0])), Ok((10_021, 0))));
        for len in 0..all.len() {
            assert!(statuses(&all[..len]).is_err(), "{len}");
        }
        for (word, what) in [(3, "operation"), (5, "session"), (8, "session"), (9, "number"), (10, "slot")] {
            let mut other = all.clone();
            other[4 * word + 3] += 1;
            assert!(matches!(statuses(&other), Err(CallError::Malformed(_))), "another {what}");
        }
        let unanswered = words(&[0, 0, 1, CB_SEQUENCE, 0, 1, 2, 3, 4, SEQUENCE, 0, 0, 0]);
        assert!(statuses(&unanswered).is_err(), "success of everything, without the second operation");
    }
}
