//! From the peer to the program.

use super::sending::SOURCES_MAX;
use super::{Action, Completion, End, Holder, Local, Span, lock_of};
use crate::wire::{Message, Violation};
use std::collections::VecDeque;
use thruway_fabric::RemoteAddr;

/// Where the next bytes for the program are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// None have come.
    Nothing,
    /// In a receive, from this offset in it.
    Receive {
        /// The receive.
        slot: u16,
        /// Offset in it.
        offset: usize,
        /// Bytes.
        len: usize,
        /// A message ends with them.
        end: bool,
    },
    /// In the ring, in one piece.
    Ring {
        /// Offset in it.
        offset: usize,
        /// Bytes.
        len: usize,
        /// A message ends with them.
        end: bool,
    },
    /// In the landing area.
    Landing {
        /// Offset in it.
        offset: usize,
        /// Bytes.
        len: usize,
        /// A message ends with them.
        end: bool,
    },
    /// In the memory that [`End::offer_sink`] named, from its beginning.
    Sink {
        /// The memory.
        target: u64,
        /// Bytes.
        len: usize,
        /// A message ends with them.
        end: bool,
    },
    /// At the peer: [`End::fetch`] them.
    Source {
        /// Bytes.
        len: usize,
        /// A message ends with them.
        end: bool,
    },
    /// On their way: being read from the peer.
    Fetching,
    /// The peer sends nothing more.
    End,
}

#[derive(Debug)]
enum Piece {
    Receive { slot: u16, offset: usize, len: usize, end: bool },
    Ring { len: usize, end: bool },
    Source(Box<Incoming>),
    Sink { target: u64, len: usize, end: bool },
    End,
}

/// A source of the peer's.
#[derive(Debug, Clone, Copy)]
struct Incoming {
    id: u32,
    remote: RemoteAddr,
    len: usize,
    end: bool,
    /// Bytes that are here.
    fetched: usize,
    /// Bytes that are being read.
    fetching: Option<Target>,
    /// Bytes in the landing area that the program has not taken, from this offset.
    landed: usize,
    landed_at: usize,
    /// The peer has been told.
    told: bool,
    withdrawn: bool,
    /// This end has the source's lock.
    locked: bool,
    /// The peer has it, and says where the bytes are.
    held: bool,
}

#[derive(Debug, Clone, Copy)]
enum Target {
    Landing(usize),
    User(u64, usize),
}

/// Memory of the program's that the peer may write to.
#[derive(Debug, Clone, Copy)]
struct Offer {
    target: u64,
    len: usize,
    /// Parts of the stream that had come before.
    parts: u64,
    cancelling: bool,
}

pub(super) struct Receiving {
    pieces: VecDeque<Piece>,
    /// Sources that the peer has not been told to be read.
    sources: usize,
    /// Counts what is new to the program.
    news: u64,
    /// Messages of the stream that have come, as the peer counts them.
    parts: u64,
    /// Bytes in the ring that have not been read, and that have been read in all.
    ring_unread: usize,
    ring_read: u64,
    ring_told: u64,
    offer: Option<Offer>,
    /// Of an offer that the peer had not known of when it sent something else.
    overtaken: Option<u64>,
    /// Requests for sinks back that have not been answered.
    cancels: u32,
    landing_len: usize,
    disconnected: bool,
}

impl Receiving {
    pub(super) fn new(landing_len: usize) -> Receiving {
        Receiving {
            pieces: VecDeque::new(),
            sources: 0,
            news: 0,
            parts: 0,
            ring_unread: 0,
            ring_read: 0,
            ring_told: 0,
            offer: None,
            overtaken: None,
            cancels: 0,
            landing_len,
            disconnected: false,
        }
    }

    /// A part of the stream has come that is not in the sink.
    fn arrive(&mut self) -> Result<(), Violation> {
        self.news += 1;
        if self.disconnected {
            return Err(Violation("bytes behind the end of the stream"));
        }
        self.parts += 1;
        if let Some(offer) = self.offer.take() {
            self.overtaken = Some(offer.target);
        }
        Ok(())
    }

    pub(super) fn data(&mut self, slot: u16, len: u32, end: bool) -> Result<(), Violation> {
        let len = len as usize;
        self.arrive()?;
        self.pieces.push_back(Piece::Receive { slot, offset: crate::wire::HEADER_LEN, len, end });
        Ok(())
    }

    pub(super) fn ring(&mut self, len: u32, end: bool, ring_len: u32, pieces_max: usize) -> Result<(), Violation> {
        let len = len as usize;
        if len > ring_len as usize - self.ring_unread {
            return Err(Violation("more bytes in the ring than it has"));
        }
        if self.pieces.len() >= pieces_max {
            return Err(Violation("more parts of messages than a ring can have"));
        }
        self.arrive()?;
        self.ring_unread += len;
        match self.pieces.back_mut() {
            Some(Piece::Ring { len: before, end: ended }) if !*ended => {
                *before += len;
                *ended = end;
            }
            _ => self.pieces.push_back(Piece::Ring { len, end }),
        }
        Ok(())
    }

    pub(super) fn source(&mut self, len: u32, end: bool, id: u32, remote: RemoteAddr) -> Result<(), Violation> {
        let len = len as usize;
        if self.sources >= SOURCES_MAX || remote.addr.checked_add(len as u64).is_none() {
            return Err(Violation("too many sources, or one that cannot be"));
        }
        self.arrive()?;
        self.sources += 1;
        self.pieces.push_back(Piece::Source(Box::new(Incoming {
            id,
            remote,
            len,
            end,
            fetched: 0,
            fetching: None,
            landed: 0,
            landed_at: 0,
            told: false,
            withdrawn: false,
            locked: false,
            held: false,
        })));
        Ok(())
    }

    pub(super) fn sunk(&mut self, len: u32, end: bool) -> Result<(), Violation> {
        let len = len as usize;
        let offer = self.offer.take_if(|offer| offer.parts == self.parts && len <= offer.len);
        let offer = offer.ok_or(Violation("bytes in a sink that was not offered"))?;
        self.arrive()?;
        self.pieces.push_back(Piece::Sink { target: offer.target, len, end });
        Ok(())
    }

    pub(super) fn sink_cancelled(&mut self) -> Result<Option<u64>, Violation> {
        self.cancels = self.cancels.checked_sub(1).ok_or(Violation("an answer to a request that was not made"))?;
        // What was written to it, or has crossed the offer, has come before this. The answer may be to an earlier request, whose sink
        // was used at the same time.
        let last = self.cancels == 0;
        Ok(self.offer.take_if(|offer| offer.cancelling && last).map(|offer| offer.target))
    }

    /// The peer had sent something before it knew of the offer, and will not use it.
    pub(super) fn sink_overtaken(&mut self) -> Option<u64> {
        self.overtaken.take()
    }

    pub(super) fn disconnect(&mut self) -> Result<(), Violation> {
        self.arrive()?;
        self.disconnected = true;
        self.pieces.push_back(Piece::End);
        Ok(())
    }

    pub(super) fn owes_ring(&self, ring_len: u32) -> bool {
        self.ring_read - self.ring_told >= u64::from(ring_len).div_ceil(2).max(1)
    }

    pub(super) fn tell(&mut self) {
        self.ring_told = self.ring_read;
    }

    pub(super) fn news(&self) -> u64 {
        self.news
    }

    pub(super) fn told(&self) -> u32 {
        self.ring_told as u32
    }
}

impl End {
    /// Where the next bytes for the program are.
    pub fn next(&self) -> Next {
        match self.receiving.pieces.front() {
            None => Next::Nothing,
            Some(&Piece::Receive { slot, offset, len, end }) => Next::Receive { slot, offset, len, end },
            Some(&Piece::Ring { len, end }) => {
                let size = self.own.ring_len as usize;
                let offset = (self.receiving.ring_read % size as u64) as usize;
                let part = len.min(size - offset);
                Next::Ring { offset, len: part, end: end && part == len }
            }
            Some(&Piece::Sink { target, len, end }) => Next::Sink { target, len, end },
            Some(Piece::Source(source)) if source.landed > 0 => {
                let end = source.end && source.fetched == source.len && source.fetching.is_none();
                Next::Landing { offset: source.landed_at, len: source.landed, end }
            }
            Some(Piece::Source(source)) if source.fetching.is_some() || source.held => Next::Fetching,
            Some(Piece::Source(source)) => Next::Source { len: source.len - source.fetched, end: source.end },
            Some(Piece::End) => Next::End,
        }
    }

    /// The program has taken `len` bytes of what [`End::next`] said, in [`Next::Receive`], [`Next::Ring`], [`Next::Landing`] or
    /// [`Next::Sink`]; of the last, all of them.
    ///
    /// # Panics
    /// If they were not there.
    pub fn consume(&mut self, taken: usize) {
        let receiving = &mut self.receiving;
        match receiving.pieces.front_mut() {
            Some(Piece::Receive { slot, offset, len, .. }) => {
                *len = len.checked_sub(taken).expect("bytes that are there");
                *offset += taken;
                if *len == 0 {
                    let slot = *slot;
                    receiving.pieces.pop_front();
                    self.give_back(slot, true);
                }
            }
            Some(Piece::Ring { len, .. }) => {
                *len = len.checked_sub(taken).expect("bytes that are there");
                receiving.ring_unread -= taken;
                receiving.ring_read += taken as u64;
                if *len == 0 {
                    receiving.pieces.pop_front();
                }
            }
            Some(&mut Piece::Sink { len, .. }) => {
                assert_eq!(len, taken, "all bytes of the sink");
                receiving.pieces.pop_front();
            }
            Some(Piece::Source(source)) => {
                source.landed = source.landed.checked_sub(taken).expect("bytes that are there");
                source.landed_at += taken;
                self.finish_source();
            }
            Some(Piece::End) | None => assert_eq!(taken, 0, "bytes that are there"),
        }
        self.pump();
    }

    /// Reads the next bytes of the source at the head: to the program's memory `user` at `offset`, at most `len` of them
    /// ([`Action::Fetched`] follows), or to the landing area without one. Returns false if there is nothing to be read, or no room
    /// in the send queue. `lock` changes one of this end's locks, if it has the first
    /// value, to the second, and says whether it had; if not, the peer says soon where the bytes are.
    pub fn fetch(&mut self, user: Option<(u64, usize, usize)>, lock: impl FnOnce(usize, u64, u64) -> bool) -> bool {
        let landing_len = self.receiving.landing_len;
        if self.aborted || !self.has_queue_room(1) {
            return false;
        }
        let Some(Piece::Source(source)) = self.receiving.pieces.front_mut() else { return false };
        if source.fetching.is_some() || source.landed > 0 || source.fetched == source.len || source.held {
            return false;
        }
        let (free, own) = (lock_of(source.id, Holder::Free), lock_of(source.id, Holder::Receiver));
        if !source.locked && !lock(source.id as usize % SOURCES_MAX, free, own) {
            source.held = true;
            return false;
        }
        source.locked = true;
        let left = source.len - source.fetched;
        let (at, len, target) = match user {
            Some((user, offset, len)) => {
                let len = len.min(left);
                (Local::User(user, offset), len, Target::User(user, len))
            }
            None => (Local::Landing(0), left.min(landing_len), Target::Landing(left.min(landing_len))),
        };
        source.fetching = Some(target);
        let from = RemoteAddr { addr: source.remote.addr + source.fetched as u64, ..source.remote };
        let (id, _) = self.post(Completion::Fetched, true);
        self.counters.reads += 1;
        self.actions.push_back(Action::Read { id, from, to: Span { at, len } });
        true
    }

    pub(super) fn fetched(&mut self) {
        self.receiving.news += 1;
        let Some(Piece::Source(source)) = self.receiving.pieces.front_mut() else { return };
        match source.fetching.take() {
            Some(Target::Landing(len)) => {
                (source.landed, source.landed_at) = (len, 0);
                source.fetched += len;
            }
            Some(Target::User(target, len)) => {
                source.fetched += len;
                let end = source.end && source.fetched == source.len;
                self.actions.push_back(Action::Fetched { target, len, end });
            }
            None => {}
        }
        self.finish_source();
    }

    /// Tells the peer what was read of the source at the head, when that is all that will be; and goes on behind it.
    fn finish_source(&mut self) {
        let Some(Piece::Source(source)) = self.receiving.pieces.front_mut() else { return };
        if source.fetching.is_some() {
            return;
        }
        if source.withdrawn && !source.told {
            source.end &= source.fetched == source.len;
            source.len = source.fetched;
        }
        if source.fetched == source.len {
            if !std::mem::replace(&mut source.told, true) {
                let (id, len, withdrawn) = (source.id, source.fetched as u32, source.withdrawn);
                let is_empty = source.landed == 0;
                self.actions.push_back(Action::SetLock(id as usize % SOURCES_MAX, 0));
                self.replies.push_back(Message::ReadComplete { id, len, withdrawn });
                self.receiving.sources -= 1;
                if is_empty {
                    self.receiving.pieces.pop_front();
                }
            } else if source.landed == 0 {
                self.receiving.pieces.pop_front();
            }
        }
    }

    /// Lets the peer write the next bytes straight to `len` bytes of the program's memory, if none have come. The memory is the peer's until
    /// [`Next::Sink`], [`Action::SinkFree`], or the answer to [`End::cancel_sink`].
    pub fn offer_sink(&mut self, target: u64, len: usize, remote: RemoteAddr) -> bool {
        let receiving = &mut self.receiving;
        if self.aborted || receiving.disconnected || receiving.offer.is_some() || !receiving.pieces.is_empty() {
            return false;
        }
        let parts = receiving.parts;
        let len = len.min(crate::wire::SPAN_MAX as usize);
        receiving.offer = Some(Offer { target, len, parts, cancelling: false });
        self.replies.push_back(Message::SinkAvailable { len: len as u32, parts, sink: remote });
        self.pump();
        true
    }

    /// Asks for the sink back: [`Action::SinkFree`] follows unless bytes have been written to it. False if there is none.
    pub fn cancel_sink(&mut self) -> bool {
        let Some(offer) = &mut self.receiving.offer else { return false };
        if !std::mem::replace(&mut offer.cancelling, true) {
            self.receiving.cancels += 1;
            self.replies.push_back(Message::CancelSink);
            self.pump();
        }
        true
    }

    pub(super) fn source_updated(&mut self, id: u32, remote: RemoteAddr) -> Result<(), Violation> {
        let sources = self.receiving.pieces.iter_mut().filter_map(|piece| match piece {
            Piece::Source(source) => Some(source),
            _ => None,
        });
        let source = sources.into_iter().find(|source| source.id == id && !source.told);
        let source = source.ok_or(Violation("an unknown source is elsewhere"))?;
        if source.locked || remote.addr.checked_add(source.len as u64).is_none() {
            return Err(Violation("a source is elsewhere that is being read, or where it cannot be"));
        }
        (source.remote, source.held) = (remote, false);
        self.receiving.news += 1;
        self.actions.push_back(Action::SetLock(id as usize % SOURCES_MAX, lock_of(id, Holder::Free)));
        Ok(())
    }

    pub(super) fn cancel_requested(&mut self, id: u32) {
        // Where it has been read already, the peer is about to learn.
        let Some(Piece::Source(source)) = self.receiving.pieces.back_mut() else { return };
        if source.id != id || source.told {
            return;
        }
        source.withdrawn = true;
        if self.receiving.pieces.len() == 1 {
            return self.finish_source();
        }
        // Nothing has been read of one that is not at the head.
        self.actions.push_back(Action::SetLock(id as usize % SOURCES_MAX, 0));
        self.receiving.pieces.pop_back();
        self.receiving.sources -= 1;
        self.replies.push_back(Message::ReadComplete { id, len: 0, withdrawn: true });
    }
}
