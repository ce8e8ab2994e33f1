//! One end of a stream as a state machine without I/O: it is given what the program wants and what the queue pair reports, and says
//! which requests to post. It never touches the bytes.
//!
//! | file | what |
//! |---|---|
//! | `sending` | from the program to the peer: staged bytes, sources, sinks, credits |
//! | `receiving` | from the peer to the program: what has come and where it is |
//!
//! # Flow control
//!
//! Every message takes a receive of the peer's, and is sent only if one is known to be posted. The last four are kept for messages that
//! carry no data, so that either direction can give back while the other is full. What is to be given back goes with
//! the next message, or alone when it is half of everything. Messages without data are given back, too, two at a time, which ends: they
//! are halved each time they go back and forth.

mod receiving;
mod sending;
#[cfg(test)]
mod simulation;

pub use receiving::Next;
pub use sending::{Claim, SOURCES_MAX, Withdrawal};

use crate::settings::{RESERVED_RECEIVES, Scheme, Settings};
use crate::wire::{Frame, Hello, Message, Violation};
use receiving::Receiving;
use sending::Sending;
use std::collections::VecDeque;
use thruway_fabric::RemoteAddr;

/// Where bytes are on this end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Local {
    /// In the stage, at this offset.
    Stage(usize),
    /// In the landing area, at this offset: for what is read of a source while the program takes it in small pieces.
    Landing(usize),
    /// In memory of the program, which the driver knows by this number, at this offset.
    User(u64, usize),
}

/// A part of local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Where it begins.
    pub at: Local,
    /// Bytes.
    pub len: usize,
}

/// What the driver is to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Post a Send of this message, with the bytes behind it.
    Send {
        /// The request's number.
        id: u64,
        /// The message.
        frame: Frame,
        /// Bytes of a [`Message::Data`]; two parts where the stage wraps around.
        payload: [Option<Span>; 2],
        /// The completion has to be reported.
        signaled: bool,
    },
    /// Post an RDMA Write.
    Write {
        /// The request's number.
        id: u64,
        /// What to write.
        from: [Option<Span>; 2],
        /// Where to.
        to: RemoteAddr,
        /// The completion has to be reported.
        signaled: bool,
    },
    /// Post an RDMA Read, with its completion reported.
    Read {
        /// The request's number.
        id: u64,
        /// What to read.
        from: RemoteAddr,
        /// Where to.
        to: Span,
    },
    /// Post a compare-and-swap of a lock of the peer's; what it was is asked for with the completion.
    Claim {
        /// The request's number.
        id: u64,
        /// The lock.
        lock: RemoteAddr,
        /// What it is if it is free.
        compare: u64,
        /// What it is to be then.
        swap: u64,
    },
    /// The lock of a source is held: [`End::replace`] it.
    Claimed(u64),
    /// The peer does not know of the source yet, or not any more: [`End::claim`] it again, if it is still wanted.
    ClaimAgain(u64),
    /// Set this lock of this end's to this value.
    SetLock(usize, u64),
    /// Post this receive again.
    Receive(u16),
    /// A source is the program's again: `sent` bytes of it are on their way or have arrived.
    SourceDone {
        /// Its number.
        source: u64,
        /// Bytes of it that are part of the stream; the rest has been withdrawn.
        sent: usize,
    },
    /// Memory that was read into has its bytes, which count as taken.
    Fetched {
        /// Its number.
        target: u64,
        /// Bytes.
        len: usize,
        /// The last of a message.
        end: bool,
    },
    /// The sink that was offered is the program's again, with nothing written to it.
    SinkFree(u64),
}

/// Messages that are shorter go in a receive, if they fit, whatever the scheme: what the ring holds is described by fewer parts.
const RING_MESSAGE_MIN: u32 = 64;

/// A lock of a source: which one, so that it is not taken for a later source's, and who holds it.
fn lock_of(source: u32, holder: Holder) -> u64 {
    u64::from(source) << 2 | holder as u64
}

/// Who holds a source's lock. A lock that is 0 is of no source.
#[derive(Debug, Clone, Copy)]
enum Holder {
    Free = 1,
    /// The receiver reads the source.
    Receiver = 2,
    /// The sender is about to say where the source is now.
    Sender = 3,
}

/// What has been moved, and in what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages sent, of all kinds.
    pub messages_sent: u64,
    /// Of these, messages that only give back.
    pub acknowledgements_sent: u64,
    /// RDMA Writes.
    pub writes: u64,
    /// RDMA Reads.
    pub reads: u64,
    /// Bytes sent that were copied first.
    pub bytes_copied: u64,
    /// Bytes sent out of the program's own memory.
    pub bytes_zero_copy: u64,
    /// Bytes of the peer's buffers that were used up by data sent: what buffer use is measured by.
    pub peer_bytes_reserved: u64,
}

/// One end of a stream.
pub struct End {
    settings: Settings,
    own: Hello,
    peer: Hello,
    /// Requests that the send queue may hold.
    queue_len: u64,
    /// The number of the last request.
    last_id: u64,
    /// The last that was signalled.
    signaled: u64,
    /// Requests that may not be over, in order.
    posted: VecDeque<Posted>,
    actions: VecDeque<Action>,
    replies: VecDeque<Message>,
    /// Messages sent, modulo 2^32.
    messages_sent: u32,
    /// Of these, messages whose receives the peer has posted again.
    messages_returned: u32,
    /// [`End::messages_sent`] behind the last that carried bytes.
    last_data: u32,
    /// Messages received, modulo 2^32.
    messages_received: u32,
    /// Receives posted again.
    receives_returned: u32,
    /// What the peer has been told of that.
    receives_told: u32,
    /// Receives of data that the peer has not been told of.
    owed_for_data: u32,
    sending: Sending,
    receiving: Receiving,
    counters: Counters,
    /// The peer, or this end, has aborted.
    aborted: bool,
}

/// What the completion of a request means.
#[derive(Debug, Clone, Copy)]
struct Posted {
    id: u64,
    what: Completion,
}

#[derive(Debug, Clone, Copy)]
enum Completion {
    Nothing,
    /// The stage is free up to this byte.
    Stage(u64),
    /// A part of the source has been written to the peer's sink.
    Source(u32),
    /// The source at the head of what has come has been read.
    Fetched,
    /// A lock of the peer's has been asked for.
    Claim(u32),
}

impl Completion {
    /// Of a send or a write, rather than a read or a claim.
    fn is_of_send(self) -> bool {
        !matches!(self, Completion::Fetched | Completion::Claim(_))
    }
}

impl End {
    /// An end with these resources, whose peer has those. `queue_len` requests may be posted at a time, at least 8.
    ///
    /// # Panics
    /// If the settings or the greetings are outside their bounds.
    pub fn new(settings: Settings, own: Hello, peer: Hello, queue_len: u32, landing_len: usize) -> End {
        assert!(settings.check().is_ok(), "settings outside their bounds");
        assert!(queue_len >= 8 && landing_len > 0, "no room for requests");
        End {
            settings,
            own,
            peer,
            queue_len: queue_len.into(),
            last_id: 0,
            signaled: 0,
            posted: VecDeque::new(),
            actions: VecDeque::new(),
            replies: VecDeque::new(),
            messages_sent: 0,
            messages_returned: 0,
            last_data: 0,
            messages_received: 0,
            receives_returned: 0,
            receives_told: 0,
            owed_for_data: 0,
            sending: Sending::new(),
            receiving: Receiving::new(landing_len),
            counters: Counters::default(),
            aborted: false,
        }
    }

    /// Sends something, so that the peer may: over iWARP, the end that accepts has to wait for the first message of the other
    /// (RFC 5044, section 7), which has nothing to say if its program does not.
    pub fn greet(&mut self) {
        self.send(Message::Acknowledge, [None; 2], Completion::Nothing);
    }

    /// Changes whenever there is something new to receive, or room where there was less.
    pub fn news(&self) -> u64 {
        self.receiving.news() + self.sending.news() + u64::from(self.aborted)
    }

    /// What has been moved.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What to do next.
    pub fn action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// A request has completed, and with it all sends and writes before it, if it is one. Reads and claims are over by their own
    /// completions only. `lock` is what the last lock that was asked for was before.
    pub fn completed(&mut self, id: u64, lock: u64) {
        let Some(is_send) = self.posted.iter().find(|posted| posted.id == id).map(|posted| posted.what.is_of_send())
        else {
            return;
        };
        let mut over = Vec::new();
        self.posted.retain(|posted| {
            let is_over = posted.id == id || (posted.id < id && is_send && posted.what.is_of_send());
            if is_over {
                over.push(posted.what);
            }
            !is_over
        });
        for what in over {
            match what {
                Completion::Nothing => {}
                Completion::Stage(to) => self.sending.free_stage(to),
                Completion::Source(source) => self.source_written(source),
                Completion::Fetched => self.fetched(),
                Completion::Claim(source) => self.claim_answered(source, lock),
            }
        }
        self.pump();
    }

    /// A message of `total` bytes is in receive `slot`; `bytes` are the first [`MESSAGE_MAX`](crate::wire::MESSAGE_MAX) of it, or all.
    ///
    /// # Errors
    /// If the peer breaks the protocol. The connection is to be ended then.
    pub fn received(&mut self, slot: u16, bytes: &[u8], total: usize) -> Result<(), Violation> {
        let frame = Frame::decode(bytes, total)?;
        self.messages_received = self.messages_received.wrapping_add(1);
        self.take_back(&frame)?;
        // Data stays where it is until it has been read.
        let keeps = matches!(frame.message, Message::Data { .. });
        match frame.message {
            Message::Data { len, end } => self.receiving.data(slot, len, end)?,
            Message::RingWritten { len, end } => {
                let pieces_max = self.pieces_max();
                self.receiving.ring(len, end && self.settings.messages, self.own.ring_len, pieces_max)?;
            }
            Message::SourceAvailable { len, end, id, source } => {
                self.receiving.source(len, end, id, source)?;
                self.actions.push_back(Action::SetLock(id as usize % SOURCES_MAX, lock_of(id, Holder::Free)));
            }
            Message::WriteComplete { len, end } => self.receiving.sunk(len, end)?,
            Message::SinkAvailable { len, parts, sink } => self.sending.sink(len, parts, sink),
            Message::ReadComplete { id, len, withdrawn } => self.source_read(id, len, withdrawn)?,
            Message::UpdateSource { id, source } => self.source_updated(id, source)?,
            Message::CancelSource { id } => self.cancel_requested(id),
            Message::CancelSink => {
                self.sending.forget_sink();
                self.replies.push_back(Message::SinkCancelled);
            }
            Message::SinkCancelled => {
                if let Some(target) = self.receiving.sink_cancelled()? {
                    self.actions.push_back(Action::SinkFree(target));
                }
            }
            Message::Acknowledge => {}
            Message::Disconnect => {
                self.receiving.disconnect()?;
                self.replies.push_back(Message::Disconnected);
            }
            Message::Disconnected => self.sending.disconnected()?,
            Message::Abort => self.aborted = true,
        }
        if !keeps {
            self.give_back(slot, matches!(frame.message, Message::RingWritten { .. }));
        }
        if let Some(target) = self.receiving.sink_overtaken() {
            self.actions.push_back(Action::SinkFree(target));
        }
        self.pump();
        // Each answers a request of the peer's, which may have one of a kind at a time.
        if self.replies.len() > 4 * usize::from(self.own.receives) {
            return Err(Violation("more requests than a peer may have"));
        }
        Ok(())
    }

    /// Whether all bytes that were written are known to have reached the peer.
    pub fn has_delivered(&self) -> bool {
        let returned = self.messages_sent.wrapping_sub(self.messages_returned);
        let since_data = self.messages_sent.wrapping_sub(self.last_data);
        returned <= since_data && self.is_drained() && !self.has_sources()
    }

    /// Whether the peer waits for an answer that has not been posted.
    pub fn has_replies(&self) -> bool {
        !self.replies.is_empty()
    }

    /// Either end has aborted.
    pub fn is_aborted(&self) -> bool {
        self.aborted
    }

    /// Tells the peer that nothing more is taken or sent.
    pub fn abort(&mut self) {
        if !std::mem::replace(&mut self.aborted, true) {
            self.replies.push_back(Message::Abort);
            self.pump();
        }
    }

    fn take_back(&mut self, frame: &Frame) -> Result<(), Violation> {
        let returned = frame.receives.wrapping_sub(self.messages_returned);
        if returned > self.messages_sent.wrapping_sub(self.messages_returned) {
            return Err(Violation("more receives given back than were used"));
        }
        self.messages_returned = frame.receives;
        self.sending.ring_returned(frame.ring)
    }

    fn give_back(&mut self, slot: u16, had_data: bool) {
        self.owed_for_data += u32::from(had_data);
        self.actions.push_back(Action::Receive(slot));
        self.receives_returned = self.receives_returned.wrapping_add(1);
    }

    /// Receives that the peer has posted.
    fn credits(&self) -> u32 {
        u32::from(self.peer.receives).saturating_sub(self.messages_sent.wrapping_sub(self.messages_returned))
    }

    fn has_credit_for_data(&self) -> bool {
        self.credits() > RESERVED_RECEIVES.into() && self.has_queue_room(3)
    }

    /// Parts of the stream that an honest peer may have told of and this end has not taken: short messages do not go through the ring, but
    /// for their last part.
    fn pieces_max(&self) -> usize {
        let in_ring = self.own.ring_len as usize / (self.own.receive_len.min(RING_MESSAGE_MIN) as usize / 2);
        in_ring + usize::from(self.own.receives) + SOURCES_MAX + 8
    }

    /// Room in the stage is wanted: has a completion reported, if none is on its way that says which of it is free.
    pub fn request_room(&mut self) {
        let is_reported = self.posted.iter().all(|posted| posted.id <= self.signaled || !posted.what.is_of_send());
        if !is_reported && self.is_drained() && self.credits() > 0 && self.has_queue_room(1) {
            self.sending.want_completion();
            self.send(Message::Acknowledge, [None; 2], Completion::Nothing);
        }
    }

    /// Room for so many requests. Numbers of requests that are posted differ by less than the queue's length, too.
    fn has_queue_room(&self, requests: u64) -> bool {
        let oldest = self.posted.front().map_or(self.last_id + 1, |posted| posted.id);
        self.last_id + 1 - oldest + requests <= self.queue_len
    }

    fn owes(&self) -> bool {
        let owed = self.receives_returned.wrapping_sub(self.receives_told);
        let half = self.settings.credits / 2;
        let after = self.settings.acknowledge_after.unwrap_or(half).clamp(1, half);
        // What the peer believes to have left.
        let left = u32::from(self.own.receives).saturating_sub(self.messages_received.wrapping_sub(self.receives_told));
        self.owed_for_data >= after.into()
            || owed >= half.into()
            || (owed >= 2 && left <= u32::from(RESERVED_RECEIVES) / 2)
            || self.receiving.owes_ring(self.own.ring_len)
    }

    /// Posts what can be posted.
    fn pump(&mut self) {
        while !self.replies.is_empty() && self.credits() > 0 && self.has_queue_room(1) {
            let message = self.replies.pop_front().expect("there is one");
            self.send(message, [None; 2], Completion::Nothing);
        }
        if !self.aborted {
            self.pump_data();
        }
        if self.owes() && self.credits() > 0 && self.has_queue_room(1) {
            self.counters.acknowledgements_sent += 1;
            self.tell();
            self.send(Message::Acknowledge, [None; 2], Completion::Nothing);
        }
    }

    fn tell(&mut self) {
        self.owed_for_data = 0;
        self.receives_told = self.receives_returned;
        self.receiving.tell();
    }

    fn send(&mut self, message: Message, payload: [Option<Span>; 2], what: Completion) {
        if self.settings.piggyback || matches!(message, Message::Disconnect | Message::Disconnected) {
            self.tell();
        }
        let frame = Frame { receives: self.receives_told, ring: self.receiving.told(), message };
        let (id, signaled) = self.post(what, false);
        self.messages_sent = self.messages_sent.wrapping_add(1);
        if matches!(message, Message::Data { .. } | Message::RingWritten { .. } | Message::WriteComplete { .. }) {
            self.last_data = self.messages_sent;
        }
        self.counters.messages_sent += 1;
        self.actions.push_back(Action::Send { id, frame, payload, signaled });
    }

    /// Counts a request, and says whether its completion has to be reported.
    fn post(&mut self, what: Completion, must_report: bool) -> (u64, bool) {
        self.last_id += 1;
        let id = self.last_id;
        self.posted.push_back(Posted { id, what });
        if !what.is_of_send() {
            return (id, true);
        }
        let due = id - self.signaled >= self.queue_len / 4 || self.sending.wants_completion(self.settings.stage_len);
        let signaled = must_report || due;
        if signaled {
            self.signaled = id;
            self.sending.completion_requested();
        }
        (id, signaled)
    }

    fn uses_ring(&self) -> bool {
        self.settings.scheme != Scheme::Credit && self.peer.ring_len > 0
    }
}
