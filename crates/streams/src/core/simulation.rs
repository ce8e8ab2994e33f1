//! Two ends and a model of the queue pairs between them, in seeded interleavings.
//!
//! The model does what a device may: sends and writes arrive in order, reads take their bytes at any time after they have started,
//! completions are reported late, in order, and only where they were asked for. It ends the test where a device would end the
//! connection: a message without a receive, a write or read of memory that is not lent.

use super::*;
use crate::settings::{Scheme, Settings};
use crate::wire::{HEADER_LEN, MESSAGE_MAX};
use std::collections::HashMap;

const RING_KEY: u32 = 1;
const LOCKS_KEY: u32 = 2;
const QUEUE_LEN: u32 = 16;
const LANDING_LEN: usize = 50;

/// A request in a send queue.
#[derive(Debug, Clone)]
enum Request {
    Send(u64, Vec<u8>, bool),
    Write(u64, Vec<u8>, RemoteAddr, bool),
    Read(u64, RemoteAddr, Span),
    Claim(u64, RemoteAddr, u64, u64),
}

struct Side {
    end: End,
    settings: Settings,
    stage: Vec<u8>,
    landing: Vec<u8>,
    ring: Vec<u8>,
    receives: Vec<Vec<u8>>,
    /// Receives that are posted, in order.
    posted: VecDeque<u16>,
    /// Messages that have come and that the end has not been told of.
    inbox: VecDeque<u16>,
    /// Memory of the program's, by its number; lent to the peer under the same number.
    user: HashMap<u64, Vec<u8>>,
    next_user: u64,
    queue: VecDeque<Request>,
    /// Started, not completed: whether it is done, whether that is to be reported, and whether it is a read or a claim.
    started: VecDeque<(u64, bool, bool, bool)>,
    reads: Vec<(u64, RemoteAddr, Span)>,
    /// What the program has written, as messages where streaming is off.
    written: Vec<u8>,
    boundaries: Vec<usize>,
    /// What it has read.
    read: Vec<u8>,
    read_boundaries: Vec<usize>,
    /// A source that has not been handed back: its place in `written`, to take back what has been withdrawn.
    sources: HashMap<u64, (usize, usize, bool)>,
    waits_for_source: Option<u64>,
    fetching: Option<u64>,
    sink: Option<u64>,
    locks: [u64; SOURCES_MAX],
    claim_result: u64,
    /// Sources whose lock has been asked for.
    claims: u32,
    /// Those that were free.
    granted: u32,
    /// Those that the peer did not know of yet.
    again: u32,
    has_shut_down: bool,
    has_seen_end: bool,
}

impl Side {
    fn hello(settings: &Settings) -> Hello {
        Hello {
            receives: settings.receives(),
            receive_len: settings.receive_len,
            ring_len: settings.ring_len,
            ring: RemoteAddr { addr: 1 << 40, rkey: RING_KEY },
            locks: RemoteAddr { addr: 1 << 41, rkey: LOCKS_KEY },
            messages: settings.messages,
        }
    }

    fn new(settings: Settings, peer: &Settings) -> Side {
        let end = End::new(settings, Side::hello(&settings), Side::hello(peer), QUEUE_LEN, LANDING_LEN);
        Side {
            end,
            settings,
            stage: vec![0; settings.stage_len as usize],
            landing: vec![0; LANDING_LEN],
            ring: vec![0; settings.ring_len as usize],
            receives: vec![Vec::new(); settings.receives().into()],
            posted: (0..settings.receives()).collect(),
            inbox: VecDeque::new(),
            user: HashMap::new(),
            next_user: 100,
            queue: VecDeque::new(),
            started: VecDeque::new(),
            reads: Vec::new(),
            written: Vec::new(),
            boundaries: Vec::new(),
            read: Vec::new(),
            read_boundaries: Vec::new(),
            sources: HashMap::new(),
            waits_for_source: None,
            fetching: None,
            sink: None,
            locks: [0; SOURCES_MAX],
            claim_result: 0,
            claims: 0,
            granted: 0,
            again: 0,
            has_shut_down: false,
            has_seen_end: false,
        }
    }

    fn local(&self, span: Span) -> &[u8] {
        match span.at {
            Local::Stage(at) => &self.stage[at..at + span.len],
            Local::Landing(at) => &self.landing[at..at + span.len],
            Local::User(user, at) => &self.user[&user][at..at + span.len],
        }
    }

    fn gather(&self, parts: [Option<Span>; 2]) -> Vec<u8> {
        parts.into_iter().flatten().flat_map(|span| self.local(span).to_vec()).collect()
    }

    /// What the peer may reach.
    fn remote(&mut self, at: RemoteAddr, len: usize) -> &mut [u8] {
        let (memory, base) = match at.rkey {
            RING_KEY => (&mut self.ring, 1 << 40),
            user => (self.user.get_mut(&user.into()).expect("memory that is lent"), 0),
        };
        let from = (at.addr - base) as usize;
        &mut memory[from..from + len]
    }

    fn act(&mut self) {
        while let Some(action) = self.end.action() {
            match action {
                Action::Send { id, frame, payload, signaled } => {
                    let mut head = [0; MESSAGE_MAX];
                    let len = frame.encode(&mut head);
                    // Later changes of the memory are none of the message's: copied as it is posted, which is the cruel case only
                    // for sources, whose bytes are looked at when they are read.
                    let bytes = [head[..len].to_vec(), self.gather(payload)].concat();
                    self.queue.push_back(Request::Send(id, bytes, signaled));
                }
                Action::Write { id, from, to, signaled } => {
                    let bytes = self.gather(from);
                    self.queue.push_back(Request::Write(id, bytes, to, signaled));
                }
                Action::Read { id, from, to } => self.queue.push_back(Request::Read(id, from, to)),
                Action::Claim { id, lock, compare, swap } => {
                    self.queue.push_back(Request::Claim(id, lock, compare, swap));
                }
                Action::ClaimAgain(source) => {
                    self.again += 1;
                    self.end.claim(source);
                }
                Action::Claimed(source) => {
                    self.granted += 1;
                    self.put_elsewhere(source);
                }
                Action::SetLock(lock, value) => self.locks[lock] = value,
                Action::Receive(slot) => self.posted.push_back(slot),
                Action::SourceDone { source, sent } => {
                    self.user.remove(&source);
                    let (at, len, end) = self.sources.remove(&source).expect("a source");
                    if sent < len {
                        assert_eq!(at + len, self.written.len(), "only the last can be withdrawn");
                        self.written.truncate(at + sent);
                        if end {
                            self.boundaries.pop();
                        }
                    }
                    if self.waits_for_source == Some(source) {
                        self.waits_for_source = None;
                    }
                }
                Action::Fetched { target, len, end } => {
                    let bytes = self.user.remove(&target).expect("the target");
                    self.read.extend(&bytes[..len]);
                    self.note_end(end);
                    assert_eq!(self.fetching.take(), Some(target));
                }
                Action::SinkFree(target) => {
                    self.user.remove(&target);
                    assert_eq!(self.sink.take(), Some(target));
                }
            }
        }
        assert!(self.queue.len() + self.started.len() <= QUEUE_LEN as usize, "more requests than the queue holds");
    }

    /// What copy-on-write does: the same bytes in other memory, and the program changes the old.
    fn put_elsewhere(&mut self, source: u64) {
        let bytes = self.user.remove(&source).expect("memory that is in use");
        let (new, remote) = self.lend(bytes);
        let place = self.sources.remove(&source).expect("a source");
        self.sources.insert(new, place);
        if self.waits_for_source == Some(source) {
            self.waits_for_source = Some(new);
        }
        self.end.replace(source, new, remote);
    }

    fn note_end(&mut self, end: bool) {
        if end {
            self.read_boundaries.push(self.read.len());
        }
    }

    fn lend(&mut self, bytes: Vec<u8>) -> (u64, RemoteAddr) {
        let user = self.next_user;
        self.next_user += 1;
        self.user.insert(user, bytes);
        (user, RemoteAddr { addr: 0, rkey: user as u32 })
    }

    /// Something that a program might do.
    fn program(&mut self, rng: &mut fastrand::Rng, may_write: bool) {
        match rng.u8(..10) {
            0..4 if may_write && self.waits_for_source.is_none() && !self.has_shut_down => self.write(rng),
            4 => {
                // A program that waits for its source may lose patience; others go on.
                if let Some(source) = self.waits_for_source
                    && rng.u8(..4) == 0
                {
                    self.end.withdraw(source);
                } else if rng.bool()
                    && let Some(&source) = self.sources.keys().max()
                {
                    match self.end.claim(source) {
                        Claim::Granted => self.put_elsewhere(source),
                        Claim::Asked => self.claims += 1,
                        Claim::Busy | Claim::Refused | Claim::Done => {}
                    }
                } else if self.waits_for_source.is_none()
                    && let Some(&source) = self.sources.keys().min()
                    && self.end.withdraw(source) == Withdrawal::Requested
                {
                    self.waits_for_source = Some(source);
                }
            }
            5 if self.sink.is_some() => {
                if rng.u8(..3) == 0 {
                    self.end.cancel_sink();
                }
            }
            5 if self.settings.scheme.has_rendezvous() && self.fetching.is_none() => {
                let (target, remote) = self.lend(vec![0; rng.usize(1..200)]);
                let len = self.user[&target].len();
                match self.end.offer_sink(target, len, remote) {
                    true => self.sink = Some(target),
                    false => drop(self.user.remove(&target)),
                }
            }
            _ => self.read(rng),
        }
        self.act();
    }

    fn write(&mut self, rng: &mut fastrand::Rng) {
        let end = self.settings.messages && rng.bool();
        let bytes: Vec<u8> = (0..rng.usize(0..120)).map(|_| rng.u8(..)).collect();
        if self.settings.scheme.has_rendezvous() && bytes.len() > 60 {
            let (source, remote) = self.lend(bytes.clone());
            if !self.end.offer_source(source, bytes.len(), remote, end) {
                self.user.remove(&source);
                return;
            }
            self.sources.insert(source, (self.written.len(), bytes.len(), end));
            self.written.extend(&bytes);
            if end {
                self.boundaries.push(self.written.len());
            }
            if self.settings.scheme != Scheme::ZeroCopy {
                self.waits_for_source = Some(source);
            }
            return;
        }
        let span = self.end.stage(bytes.len());
        let Local::Stage(at) = span.at else { unreachable!() };
        self.stage[at..at + span.len].copy_from_slice(&bytes[..span.len]);
        let end = end && span.len == bytes.len();
        self.end.write(span.len, end);
        self.written.extend(&bytes[..span.len]);
        if end {
            self.boundaries.push(self.written.len());
        }
    }

    fn read(&mut self, rng: &mut fastrand::Rng) {
        if self.fetching.is_some() {
            return;
        }
        let most = rng.usize(1..150);
        let (bytes, ends) = match self.end.next() {
            Next::Receive { slot, offset, len, end } => {
                let taken = len.min(most);
                (self.receives[usize::from(slot)][offset..offset + taken].to_vec(), end && taken == len)
            }
            Next::Ring { offset, len, end } => {
                let taken = len.min(most);
                (self.ring[offset..offset + taken].to_vec(), end && taken == len)
            }
            Next::Landing { offset, len, end } => {
                let taken = len.min(most);
                (self.landing[offset..offset + taken].to_vec(), end && taken == len)
            }
            Next::Sink { target, len, end } => {
                assert_eq!(self.sink.take(), Some(target));
                let bytes = self.user.remove(&target).expect("the sink")[..len].to_vec();
                (bytes, end)
            }
            Next::Source { .. } => {
                if rng.bool() {
                    let (target, _) = self.lend(vec![0; most]);
                    let locks = &mut self.locks;
                    let lock = |at: usize, from, to| {
                        locks[at] == from && {
                            locks[at] = to;
                            true
                        }
                    };
                    match self.end.fetch(Some((target, 0, most)), lock) {
                        true => self.fetching = Some(target),
                        false => drop(self.user.remove(&target)),
                    }
                } else {
                    let locks = &mut self.locks;
                    self.end.fetch(None, |at, from, to| {
                        locks[at] == from && {
                            locks[at] = to;
                            true
                        }
                    });
                }
                return;
            }
            Next::End => return self.has_seen_end = true,
            Next::Nothing | Next::Fetching => return,
        };
        self.read.extend(&bytes);
        self.note_end(ends);
        self.end.consume(bytes.len());
    }

    fn take_message(&mut self) {
        if let Some(slot) = self.inbox.pop_front() {
            let bytes = self.receives[usize::from(slot)].clone();
            self.end.received(slot, &bytes, bytes.len()).expect("an honest peer");
            self.act();
        }
    }

    /// Reports the next completion that was asked for: of sends and writes, or of reads and claims, whose completions may be later or
    /// earlier than those of sends behind or before them.
    fn complete(&mut self, of_reads: bool) {
        while let Some(at) = self.started.iter().position(|started| started.3 == of_reads) {
            let (id, done, signaled, _) = self.started[at];
            if !done {
                return;
            }
            self.started.remove(at);
            if signaled {
                self.end.completed(id, self.claim_result);
                return self.act();
            }
        }
    }
}

/// Starts the next request of `a`, whose peer is `b`.
fn start(a: &mut Side, b: &mut Side) {
    let Some(request) = a.queue.pop_front() else { return };
    match request {
        Request::Send(id, bytes, signaled) => {
            let slot = b.posted.pop_front().expect("a receive for each message");
            assert!(bytes.len() <= b.settings.receive_len as usize, "a message that fits");
            b.receives[usize::from(slot)] = bytes;
            b.inbox.push_back(slot);
            a.started.push_back((id, true, signaled, false));
        }
        Request::Write(id, bytes, to, signaled) => {
            b.remote(to, bytes.len()).copy_from_slice(&bytes);
            a.started.push_back((id, true, signaled, false));
        }
        Request::Claim(id, lock, compare, swap) => {
            assert_eq!(lock.rkey, LOCKS_KEY);
            let word = &mut b.locks[(lock.addr - (1 << 41)) as usize / 8];
            a.claim_result = *word;
            if *word == compare {
                *word = swap;
            }
            a.started.push_back((id, true, true, true));
        }
        Request::Read(id, from, to) => {
            a.reads.push((id, from, to));
            a.started.push_back((id, false, true, true));
        }
    }
}

fn answer_read(a: &mut Side, b: &mut Side, rng: &mut fastrand::Rng) {
    if a.reads.is_empty() {
        return;
    }
    let (id, from, to) = a.reads.remove(rng.usize(..a.reads.len()));
    let bytes = b.remote(from, to.len).to_vec();
    match to.at {
        Local::Landing(at) => a.landing[at..at + to.len].copy_from_slice(&bytes),
        Local::User(user, at) => {
            a.user.get_mut(&user).expect("the target")[at..at + to.len].copy_from_slice(&bytes);
        }
        Local::Stage(_) => panic!("a read into the stage"),
    }
    a.started.iter_mut().find(|started| started.0 == id).expect("a read that has started").1 = true;
}

fn step(sides: &mut [Side; 2], rng: &mut fastrand::Rng, may_write: bool) {
    let [a, b] = sides;
    let (a, b) = if rng.bool() { (a, b) } else { (b, a) };
    match rng.u8(..6) {
        0 => start(a, b),
        1 => answer_read(a, b, rng),
        2 => a.complete(rng.bool()),
        3 => a.take_message(),
        _ => a.program(rng, may_write),
    }
}

fn settings(rng: &mut fastrand::Rng, messages: bool) -> Settings {
    let scheme = Scheme::ALL[rng.usize(..Scheme::ALL.len())];
    Settings {
        credits: rng.u16(4..12),
        receive_len: rng.u32(2 * MESSAGE_MAX as u32..120),
        ring_len: if rng.u8(..5) == 0 { 0 } else { rng.u32(1..300) },
        stage_len: rng.u32(1..300),
        acknowledge_after: if rng.bool() { None } else { Some(rng.u16(1..8)) },
        piggyback: rng.bool(),
        messages,
        ..Settings::of(scheme)
    }
}

fn run(seed: u64) -> (u32, u32) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let messages = rng.bool();
    let (one, other) = (settings(&mut rng, messages), settings(&mut rng, messages));
    let mut sides = [Side::new(one, &other), Side::new(other, &one)];
    for _ in 0..rng.u32(100..4000) {
        step(&mut sides, &mut rng, true);
    }
    for side in &mut sides {
        // As close does: what the program waits for comes first.
        side.has_shut_down = side.waits_for_source.is_none();
        if side.has_shut_down {
            side.end.shutdown();
            side.act();
        }
    }
    for _ in 0..400_000 {
        step(&mut sides, &mut rng, false);
        for side in &mut sides {
            if !side.has_shut_down && side.waits_for_source.is_none() {
                side.has_shut_down = true;
                side.end.shutdown();
                side.act();
            }
        }
        if sides.iter().all(|side| side.has_seen_end && side.end.has_arrived()) {
            break;
        }
    }
    for (from, to) in [(0, 1), (1, 0)] {
        let (from, to) = (&sides[from], &sides[to]);
        assert!(to.has_seen_end && from.end.has_arrived(), "seed {seed}: it stands still");
        assert!(to.read == from.written, "seed {seed}: other bytes were read than written");
        assert_eq!(to.read_boundaries, from.boundaries, "seed {seed}: messages end elsewhere");
        assert!(from.sources.is_empty() && from.user.is_empty(), "seed {seed}: memory was not handed back");
    }
    (sides[0].claims + sides[1].claims, sides[0].granted + sides[1].granted)
}

#[test]
fn every_byte_arrives_in_every_interleaving() {
    let seeds = std::env::var("THRUWAY_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(2000);
    let (claims, replaced) = (0..seeds).map(run).fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
    // Some locks were free, and others were not.
    assert!(claims > 0 && replaced > 0 && replaced < claims, "{claims} locks asked for, {replaced} sources elsewhere");
}

/// Both directions full, and neither program reads for a while: what gives back must still get through.
#[test]
fn full_in_both_directions_is_not_the_end() {
    for scheme in Scheme::ALL {
        let settings = Settings { credits: 4, receive_len: 72, ring_len: 64, stage_len: 256, ..Settings::of(scheme) };
        let mut sides = [Side::new(settings, &settings), Side::new(settings, &settings)];
        let mut rng = fastrand::Rng::with_seed(1);
        let turn = |sides: &mut [Side; 2]| {
            for (a, b) in [(0, 1), (1, 0)] {
                let [first, second] = sides.get_disjoint_mut([a, b]).expect("two sides");
                (0..20).for_each(|_| start(first, second));
                (0..20).for_each(|n| first.complete(n % 2 == 0));
                (0..20).for_each(|_| second.take_message());
            }
        };
        for _ in 0..100 {
            for side in &mut sides {
                let span = side.end.stage(50);
                side.end.write(span.len, false);
                side.written.resize(side.written.len() + span.len, 0);
                side.act();
            }
            turn(&mut sides);
        }
        let before = sides[0].written.len();
        assert!(sides[0].end.stage_room() == 0, "{scheme:?}: the stage is full");
        for _ in 0..100 {
            for side in &mut sides {
                side.read(&mut rng);
                side.act();
            }
            turn(&mut sides);
        }
        assert_eq!(sides[0].read.len(), before, "{scheme:?}");
        // Nothing goes back and forth for ever.
        assert!(sides.iter().all(|side| side.queue.is_empty()), "{scheme:?}: messages without end");
    }
}

/// One direction is full and not read, while the other goes on: its receives have to be given back through what is left.
#[test]
fn one_direction_goes_on_while_the_other_is_full() {
    for (scheme, piggyback) in Scheme::ALL.into_iter().flat_map(|scheme| [(scheme, false), (scheme, true)]) {
        let settings =
            Settings { credits: 40, receive_len: 72, ring_len: 64, stage_len: 4096, piggyback, ..Settings::of(scheme) };
        let mut sides = [Side::new(settings, &settings), Side::new(settings, &settings)];
        let mut rng = fastrand::Rng::with_seed(2);
        for _ in 0..1000 {
            for (n, side) in sides.iter_mut().enumerate() {
                let span = side.end.stage(30);
                side.end.write(span.len, false);
                side.written.resize(side.written.len() + span.len, 0);
                if n == 0 {
                    side.read(&mut rng);
                }
                side.act();
            }
            for (a, b) in [(0, 1), (1, 0)] {
                let [first, second] = sides.get_disjoint_mut([a, b]).expect("two sides");
                (0..20).for_each(|_| start(first, second));
                (0..20).for_each(|n| first.complete(n % 2 == 0));
                (0..20).for_each(|_| second.take_message());
            }
        }
        assert!(sides[0].read.len() > 20_000, "{scheme:?}, {piggyback}: {} bytes", sides[0].read.len());
        assert!(sides[0].end.stage_room() < 30, "{scheme:?}: the other direction is full");
    }
}

/// A peer that says anything: an error, or bytes that are where they may be.
#[test]
fn a_peer_that_lies_reaches_nothing_else() {
    for seed in 0..3000 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let messages = rng.bool();
        let settings = settings(&mut rng, messages);
        let mut end = End::new(settings, Side::hello(&settings), Side::hello(&settings), QUEUE_LEN, LANDING_LEN);
        let mut posted: VecDeque<u16> = (0..settings.receives()).collect();
        let mut requests = VecDeque::new();
        for _ in 0..400 {
            match rng.u8(..5) {
                0 => {
                    let span = end.stage(rng.usize(0..50));
                    end.write(span.len, rng.bool());
                }
                1 => {
                    if let Next::Receive { len, .. } | Next::Ring { len, .. } | Next::Landing { len, .. } = end.next() {
                        end.consume(rng.usize(0..=len));
                    } else if let Next::Sink { len, .. } = end.next() {
                        end.consume(len);
                    }
                    end.fetch(None, |_, _, _| rng.bool());
                    end.offer_sink(7, 100, RemoteAddr { addr: 0, rkey: 7 });
                    end.offer_source(rng.u64(..), 100, RemoteAddr { addr: 0, rkey: 7 }, false);
                }
                2 => {
                    if let Some(id) = requests.pop_front() {
                        end.completed(id, rng.u64(0..4));
                    }
                }
                _ => {
                    let Some(slot) = posted.pop_front() else { break };
                    let small = |rng: &mut fastrand::Rng| if rng.bool() { rng.u32(..) } else { rng.u32(0..60) };
                    let remote = RemoteAddr { addr: rng.u64(..), rkey: rng.u32(..) };
                    let len = small(&mut rng);
                    let message = match rng.u8(..12) {
                        11 => Message::UpdateSource { id: small(&mut rng), source: remote },
                        0 => Message::Data { len: len % 50, end: rng.bool() },
                        1 => Message::RingWritten { len, end: rng.bool() },
                        2 => Message::SourceAvailable { len, end: rng.bool(), id: len, source: remote },
                        3 => Message::SinkAvailable { len, parts: rng.u64(0..4), sink: remote },
                        4 => Message::WriteComplete { len, end: rng.bool() },
                        5 => Message::ReadComplete { id: rng.u32(0..3), len, withdrawn: rng.bool() },
                        6 => Message::CancelSource { id: small(&mut rng) },
                        7 => Message::CancelSink,
                        8 => Message::SinkCancelled,
                        9 => Message::Acknowledge,
                        _ => Message::Disconnect,
                    };
                    let frame = Frame { receives: rng.u32(0..4), ring: rng.u32(0..4), message };
                    let mut bytes = [0; MESSAGE_MAX];
                    let head = frame.encode(&mut bytes);
                    let mut bytes = bytes[..head].to_vec();
                    if let Message::Data { len, .. } = message {
                        bytes.resize(HEADER_LEN + len as usize, 0);
                    }
                    if end.received(slot, &bytes, bytes.len()).is_err() {
                        break;
                    }
                }
            }
            while let Some(action) = end.action() {
                match action {
                    Action::Receive(slot) => {
                        assert!(!posted.contains(&slot), "a receive that is posted already");
                        posted.push_back(slot);
                    }
                    Action::Send { id, .. } | Action::Write { id, .. } | Action::Claim { id, .. } => {
                        requests.push_back(id)
                    }
                    Action::Read { id, to, .. } => {
                        assert!(matches!(to.at, Local::Landing(0)) && to.len <= LANDING_LEN);
                        requests.push_back(id);
                    }
                    _ => {}
                }
            }
            match end.next() {
                Next::Ring { offset, len, .. } => assert!(offset + len <= settings.ring_len as usize),
                Next::Landing { offset, len, .. } => assert!(offset + len <= LANDING_LEN),
                Next::Receive { offset, len, .. } => assert!(offset + len <= settings.receive_len as usize),
                Next::Sink { len, .. } => assert!(len <= 100),
                _ => {}
            }
        }
    }
}
