//! From the program to the peer.

use super::{Action, Completion, End, Holder, Local, RING_MESSAGE_MIN, Span, lock_of};
use crate::settings::Scheme;
use crate::wire::{Message, SPAN_MAX, Violation};
use std::collections::VecDeque;
use thruway_fabric::RemoteAddr;

/// Sources that may be announced at a time.
pub const SOURCES_MAX: usize = 16;

/// How often a lock is asked for that the peer does not know yet.
const CLAIMS_MAX: u16 = 1000;

/// What became of a wish to withdraw a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Withdrawal {
    /// [`Action::SourceDone`] follows.
    Requested,
    /// Something has been sent behind it: it cannot be withdrawn.
    TooLate,
    /// There is no such source: it is done.
    Done,
}

/// Whether a source may be put elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// Yes: [`End::replace`] it.
    Granted,
    /// The peer's lock has been asked for; [`Action::Claimed`] follows if it is free.
    Asked,
    /// Not now: another is being asked for.
    Busy,
    /// No: it will be done some time.
    Refused,
    /// There is no such source: it is done.
    Done,
}

/// The stream as the program has written it, in parts.
#[derive(Debug, Clone, Copy)]
enum Item {
    /// The next bytes of the stage.
    Staged {
        len: usize,
        /// The last of a message.
        end: bool,
    },
    /// Memory of the program's.
    Source(u32),
    /// Nothing more follows.
    Disconnect,
}

#[derive(Debug, Clone, Copy)]
struct Source {
    id: u32,
    user: u64,
    remote: RemoteAddr,
    len: usize,
    end: bool,
    /// Bytes that were written to a sink.
    written: usize,
    /// Writes to sinks that have not completed.
    writes: u32,
    /// What the peer was told to read, if it was.
    announced: Option<usize>,
    /// [`Sending::parts`] behind its announcement.
    parts: u64,
    /// Nothing is left to be announced or written.
    finished: bool,
    withdrawing: bool,
    /// It has been put elsewhere, or tried to be: that is done once.
    claimed: bool,
    /// How often the peer did not know of it when its lock was asked for.
    claims: u16,
    /// Bytes of it that are not part of the stream.
    withdrawn: usize,
}

pub(super) struct Sending {
    items: VecDeque<Item>,
    /// Sources that the peer may still read, or that are not announced yet.
    sources: VecDeque<Source>,
    next_source: u32,
    /// Messages of the stream that have been sent: those with bytes of it, those that announce some, and its end.
    parts: u64,
    /// Bytes that the program has put into the stage, that have been posted out of it, and whose memory is free again.
    staged: u64,
    posted: u64,
    freed: u64,
    /// What of the stage the last signalled request covers.
    reported: u64,
    /// The next request is to be reported, however little it covers.
    completion_wanted: bool,
    /// Bytes that have been written to the peer's ring, and that have been read from there.
    ring_written: u64,
    ring_read: u64,
    /// A lock of the peer's has been asked for.
    is_claiming: bool,
    /// Where the peer wants the next bytes.
    sink: Option<Sink>,
    shutdown: bool,
    disconnect_sent: bool,
    disconnected: bool,
}

#[derive(Debug, Clone, Copy)]
struct Sink {
    parts: u64,
    len: usize,
    remote: RemoteAddr,
}

impl Sending {
    pub(super) fn new() -> Sending {
        Sending {
            items: VecDeque::new(),
            sources: VecDeque::new(),
            next_source: 1,
            parts: 0,
            staged: 0,
            posted: 0,
            freed: 0,
            reported: 0,
            completion_wanted: false,
            ring_written: 0,
            ring_read: 0,
            is_claiming: false,
            sink: None,
            shutdown: false,
            disconnect_sent: false,
            disconnected: false,
        }
    }

    pub(super) fn news(&self) -> u64 {
        self.freed
    }

    pub(super) fn free_stage(&mut self, to: u64) {
        self.freed = to;
    }

    /// A quarter of the stage waits for a completion.
    pub(super) fn wants_completion(&self, stage_len: u32) -> bool {
        self.completion_wanted || self.posted - self.reported >= u64::from(stage_len).div_ceil(4)
    }

    pub(super) fn want_completion(&mut self) {
        self.completion_wanted = true;
    }

    pub(super) fn completion_requested(&mut self) {
        self.completion_wanted = false;
        self.reported = self.posted;
    }

    pub(super) fn ring_returned(&mut self, told: u32) -> Result<(), Violation> {
        let read = told.wrapping_sub(self.ring_read as u32);
        if u64::from(read) > self.ring_written - self.ring_read {
            return Err(Violation("more of the ring given back than was written"));
        }
        self.ring_read += u64::from(read);
        Ok(())
    }

    pub(super) fn sink(&mut self, len: u32, parts: u64, remote: RemoteAddr) {
        // One for bytes that have been sent already has crossed them, and the peer finds that out.
        self.sink = (parts == self.parts).then_some(Sink { parts, len: len as usize, remote });
    }

    pub(super) fn forget_sink(&mut self) {
        self.sink = None;
    }

    pub(super) fn disconnected(&mut self) -> Result<(), Violation> {
        if !self.disconnect_sent {
            return Err(Violation("an answer to an end that was not sent"));
        }
        self.disconnected = true;
        Ok(())
    }

    /// The sink, if it is for the next bytes.
    fn usable_sink(&mut self) -> Option<Sink> {
        let parts = self.parts;
        self.sink.take_if(|sink| sink.parts != parts);
        self.sink
    }
}

impl End {
    /// Where the next bytes of the program's are to be copied to, in the stage: at most `len` of them, in one piece. Empty if the stage is full.
    pub fn stage(&self, len: usize) -> Span {
        let size = self.settings.stage_len as usize;
        let used = (self.sending.staged - self.sending.freed) as usize;
        let at = (self.sending.staged % size as u64) as usize;
        Span { at: Local::Stage(at), len: len.min(size - used).min(size - at) }
    }

    /// Bytes that can be copied now.
    pub fn stage_room(&self) -> usize {
        self.settings.stage_len as usize - (self.sending.staged - self.sending.freed) as usize
    }

    /// `len` bytes have been copied to where [`End::stage`] said; `end` is the last of a message.
    ///
    /// # Panics
    /// If there was no room for them, or after [`End::shutdown`].
    pub fn write(&mut self, len: usize, end: bool) {
        assert!(len <= self.stage_room() && !self.sending.shutdown, "bytes that there was no room for");
        let end = end && self.settings.messages;
        if len == 0 && !end {
            return;
        }
        self.sending.staged += len as u64;
        let coalesces = self.settings.scheme != Scheme::Credit;
        match self.sending.items.back_mut() {
            Some(Item::Staged { len: before, end: ended }) if coalesces && !*ended => {
                *before += len;
                *ended = end;
            }
            _ => self.sending.items.push_back(Item::Staged { len, end }),
        }
        self.pump();
    }

    /// The next bytes of the stream are `len` of the program's memory, which the driver knows as `user` and the peer may read at
    /// `remote`. They must stay as they are until [`Action::SourceDone`]. Returns false if there are too many sources.
    ///
    /// # Panics
    /// If they are none or more than a message can say, or after [`End::shutdown`].
    pub fn offer_source(&mut self, user: u64, len: usize, remote: RemoteAddr, end: bool) -> bool {
        assert!(len > 0 && len <= SPAN_MAX as usize && !self.sending.shutdown, "a source of no or too many bytes");
        if self.sending.sources.len() >= SOURCES_MAX {
            return false;
        }
        let id = self.sending.next_source;
        self.sending.next_source = id.wrapping_add(1);
        let end = end && self.settings.messages;
        self.sending.sources.push_back(Source {
            id,
            user,
            remote,
            len,
            end,
            written: 0,
            writes: 0,
            announced: None,
            parts: 0,
            finished: false,
            withdrawing: false,
            claimed: false,
            claims: 0,
            withdrawn: 0,
        });
        self.sending.items.push_back(Item::Source(id));
        self.pump();
        true
    }

    /// Asks for a source back of which the peer has not begun to read, because the program waits for it.
    pub fn withdraw(&mut self, user: u64) -> Withdrawal {
        let Some(at) = self.sending.sources.iter().position(|source| source.user == user) else {
            return Withdrawal::Done;
        };
        let source = self.sending.sources[at];
        if source.withdrawing {
            return Withdrawal::Requested;
        }
        let is_last = at + 1 == self.sending.sources.len();
        let waits_for_it = match self.sending.items.back() {
            None => source.parts == self.sending.parts,
            Some(&Item::Source(id)) => id == source.id,
            Some(_) => false,
        };
        if source.finished && source.announced.is_none() {
            return Withdrawal::Requested;
        }
        if !is_last || !waits_for_it {
            return Withdrawal::TooLate;
        }
        self.sending.sources[at].withdrawing = true;
        if self.sending.items.pop_back().is_some() {
            // It has not been announced: only what was written to sinks is sent.
            let source = &mut self.sending.sources[at];
            source.withdrawn = source.len - source.written;
            source.finished = true;
            self.reap();
        } else {
            self.replies.push_back(Message::CancelSource { id: source.id });
        }
        self.pump();
        Withdrawal::Requested
    }

    /// Asks whether a source may be put elsewhere, because the program wants to write to its memory. At most one lock is asked for at a time.
    pub fn claim(&mut self, user: u64) -> Claim {
        let has_queue_room = self.has_queue_room(1);
        let locks = self.peer.locks;
        let is_claiming = self.sending.is_claiming;
        let Some(source) = self.sending.sources.iter_mut().find(|source| source.user == user) else {
            return Claim::Done;
        };
        if source.claimed || source.withdrawing || source.finished || source.written > 0 {
            return Claim::Refused;
        }
        if source.announced.is_none() {
            source.claimed = true;
            return Claim::Granted;
        }
        if locks.addr == 0 {
            return Claim::Refused;
        }
        if is_claiming || !has_queue_room {
            return Claim::Busy;
        }
        source.claimed = true;
        let source_id = source.id;
        let lock = RemoteAddr { addr: locks.addr + 8 * u64::from(source_id % SOURCES_MAX as u32), ..locks };
        self.sending.is_claiming = true;
        let (id, _) = self.post(Completion::Claim(source_id), true);
        let (compare, swap) = (lock_of(source_id, Holder::Free), lock_of(source_id, Holder::Sender));
        self.actions.push_back(Action::Claim { id, lock, compare, swap });
        Claim::Asked
    }

    pub(super) fn claim_answered(&mut self, id: u32, lock: u64) {
        self.sending.is_claiming = false;
        // Without one, the peer has read it meanwhile.
        let Some(source) = self.sending.sources.iter_mut().find(|source| source.id == id) else { return };
        if lock == lock_of(id, Holder::Free) {
            self.actions.push_back(Action::Claimed(source.user));
        } else if lock != lock_of(id, Holder::Receiver) && source.claims < CLAIMS_MAX {
            source.claims += 1;
            source.claimed = false;
            self.actions.push_back(Action::ClaimAgain(source.user));
        }
    }

    /// A source that was claimed has the same bytes elsewhere now: in memory that the driver knows as `new`.
    pub fn replace(&mut self, user: u64, new: u64, remote: RemoteAddr) {
        let Some(source) = self.sending.sources.iter_mut().find(|source| source.user == user) else { return };
        (source.user, source.remote) = (new, remote);
        // The peer reads nothing of one that is being withdrawn, and forgets its lock.
        if source.announced.is_some() && !source.withdrawing {
            let message = Message::UpdateSource { id: source.id, source: remote };
            self.replies.push_back(message);
            self.pump();
        }
    }

    /// The program sends nothing more.
    pub fn shutdown(&mut self) {
        if !std::mem::replace(&mut self.sending.shutdown, true) {
            self.sending.items.push_back(Item::Disconnect);
            self.pump();
        }
    }

    /// Whether the peer has everything that was sent, and knows that nothing follows.
    pub fn has_arrived(&self) -> bool {
        self.sending.disconnected && self.sending.sources.is_empty()
    }

    /// Whether the peer may still read the program's memory.
    pub fn has_sources(&self) -> bool {
        !self.sending.sources.is_empty()
    }

    /// Whether everything that was written has been handed to the device.
    pub fn is_drained(&self) -> bool {
        self.sending.items.is_empty()
    }

    pub(super) fn source_written(&mut self, id: u32) {
        if let Some(source) = self.sending.sources.iter_mut().find(|source| source.id == id) {
            source.writes -= 1;
        }
        self.reap();
    }

    pub(super) fn source_read(&mut self, id: u32, len: u32, withdrawn: bool) -> Result<(), Violation> {
        let sources = &mut self.sending.sources;
        let source =
            sources.iter_mut().find(|source| source.id == id).ok_or(Violation("an unknown source was read"))?;
        let announced = source.announced.ok_or(Violation("a source was read that was not announced"))?;
        let len = len as usize;
        if len > announced || (len != announced && !(withdrawn && source.withdrawing)) {
            return Err(Violation("another part of a source was read than was announced"));
        }
        source.withdrawn = announced - len;
        source.finished = true;
        source.announced = None;
        self.counters.bytes_zero_copy += len as u64;
        self.reap();
        Ok(())
    }

    /// Hands back the sources that are done with.
    fn reap(&mut self) {
        let (actions, sources) = (&mut self.actions, &mut self.sending.sources);
        sources.retain(|source| {
            let done = source.finished && source.announced.is_none() && source.writes == 0;
            if done {
                actions.push_back(Action::SourceDone { source: source.user, sent: source.len - source.withdrawn });
            }
            !done
        });
    }

    pub(super) fn pump_data(&mut self) {
        while let Some(&item) = self.sending.items.front() {
            // What is left of a source that is being withdrawn comes before anything else.
            if self.sending.sources.back().is_some_and(|source| source.withdrawing && source.announced.is_some()) {
                return;
            }
            let has_gone = match item {
                Item::Staged { len, end } => self.send_staged(len, end),
                Item::Source(id) => self.send_source(id),
                Item::Disconnect => {
                    let can = self.credits() > 0 && self.has_queue_room(1);
                    if can {
                        self.sending.items.pop_front();
                        self.sending.disconnect_sent = true;
                        self.sending.parts += 1;
                        self.send(Message::Disconnect, [None; 2], Completion::Nothing);
                    }
                    can
                }
            };
            if !has_gone {
                return;
            }
        }
    }

    /// Sends some of the staged bytes that are next; false if nothing can be sent.
    fn send_staged(&mut self, len: usize, end: bool) -> bool {
        if !self.has_credit_for_data() {
            return false;
        }
        if let Some(sink) = self.sending.usable_sink()
            && len > 0
        {
            let part = len.min(sink.len);
            self.write_to_sink(self.staged(part), sink, part, None);
            self.took(part, len, end);
            let message = Message::WriteComplete { len: part as u32, end: end && part == len };
            let stage = Completion::Stage(self.sending.posted);
            self.send(message, [None; 2], stage);
            self.counters.bytes_copied += part as u64;
            return true;
        }
        let data_max = self.settings.data_max(self.peer.receive_len) as usize;
        let is_short = self.settings.messages && end && len < RING_MESSAGE_MIN as usize;
        let is_small = (self.settings.scheme == Scheme::Adaptive || is_short) && len <= data_max;
        if !self.uses_ring() || is_small || len == 0 {
            let part = len.min(data_max);
            let payload = self.staged(part);
            self.took(part, len, end);
            let stage = Completion::Stage(self.sending.posted);
            self.send(Message::Data { len: part as u32, end: end && part == len }, payload, stage);
            self.counters.bytes_copied += part as u64;
            self.counters.peer_bytes_reserved += u64::from(self.peer.receive_len);
            return true;
        }
        let size = u64::from(self.peer.ring_len);
        let room = (size - (self.sending.ring_written - self.sending.ring_read)) as usize;
        let part = len.min(room);
        if part == 0 {
            return false;
        }
        // Up to the end of the ring, and from its beginning.
        let at = self.sending.ring_written % size;
        let first = part.min((size - at) as usize);
        for (skipped, len, at) in [(0, first, at), (first, part - first, 0)] {
            if len > 0 {
                let to = RemoteAddr { addr: self.peer.ring.addr + at, rkey: self.peer.ring.rkey };
                let from = self.staged_from(skipped, len);
                let (id, signaled) = self.post(Completion::Nothing, false);
                self.counters.writes += 1;
                self.actions.push_back(Action::Write { id, from, to, signaled });
            }
        }
        self.sending.ring_written += part as u64;
        self.took(part, len, end);
        let stage = Completion::Stage(self.sending.posted);
        self.send(Message::RingWritten { len: part as u32, end: end && part == len }, [None; 2], stage);
        self.counters.bytes_copied += part as u64;
        self.counters.peer_bytes_reserved += part as u64;
        true
    }

    fn staged(&self, len: usize) -> [Option<Span>; 2] {
        self.staged_from(0, len)
    }

    /// The next bytes of the stage that have not been posted, without the first `skipped`.
    fn staged_from(&self, skipped: usize, len: usize) -> [Option<Span>; 2] {
        let size = self.settings.stage_len as usize;
        let at = ((self.sending.posted + skipped as u64) % size as u64) as usize;
        let first = len.min(size - at);
        let span = |at, len| (len > 0).then_some(Span { at: Local::Stage(at), len });
        [span(at, first), span(0, len - first)]
    }

    /// `part` of the `len` bytes of the first item are posted.
    fn took(&mut self, part: usize, len: usize, end: bool) {
        self.sending.posted += part as u64;
        self.sending.parts += 1;
        if part == len {
            self.sending.items.pop_front();
        } else {
            self.sending.items[0] = Item::Staged { len: len - part, end };
        }
    }

    fn write_to_sink(&mut self, from: [Option<Span>; 2], sink: Sink, len: usize, source: Option<u32>) {
        self.sending.sink = None;
        let what = source.map_or(Completion::Nothing, Completion::Source);
        let (id, signaled) = self.post(what, source.is_some());
        self.counters.writes += 1;
        self.counters.peer_bytes_reserved += len as u64;
        self.actions.push_back(Action::Write { id, from, to: sink.remote, signaled });
    }

    /// Announces a source, or writes some of it to the peer's sink; false if nothing can be sent.
    fn send_source(&mut self, id: u32) -> bool {
        if !self.has_credit_for_data() {
            return false;
        }
        let Some(at) = self.sending.sources.iter().position(|source| source.id == id) else {
            self.sending.items.pop_front();
            return true;
        };
        let source = self.sending.sources[at];
        let left = source.len - source.written;
        let message = match self.sending.usable_sink() {
            Some(sink) => {
                let part = left.min(sink.len);
                let span = Span { at: Local::User(source.user, source.written), len: part };
                self.write_to_sink([Some(span), None], sink, part, Some(id));
                let source = &mut self.sending.sources[at];
                source.written += part;
                source.writes += 1;
                source.finished = part == left;
                self.counters.bytes_zero_copy += part as u64;
                Message::WriteComplete { len: part as u32, end: source.end && part == left }
            }
            None => {
                self.sending.sources[at].announced = Some(left);
                self.sending.sources[at].parts = self.sending.parts + 1;
                let from = RemoteAddr { addr: source.remote.addr + source.written as u64, ..source.remote };
                Message::SourceAvailable { len: left as u32, end: source.end, id, source: from }
            }
        };
        let source = &self.sending.sources[at];
        if source.finished || source.announced.is_some() {
            self.sending.items.pop_front();
        }
        self.sending.parts += 1;
        self.send(message, [None; 2], Completion::Nothing);
        true
    }
}
