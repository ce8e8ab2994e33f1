use super::*;
use crate::segment::{CLOSED, End, OPEN, POSITION, RETURNS, RUNS, Segment, WakeBy};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Half a TCP connection, in which doorbells are bytes as any others.
pub(crate) struct Fake {
    state: Mutex<State>,
    changed: Condvar,
    /// Bytes that it takes before it is full.
    capacity: usize,
}

#[derive(Default)]
struct State {
    bytes: VecDeque<u8>,
    written: u64,
    /// How often the relay has woken this end since that was taken back.
    woken: u32,
}

impl Fake {
    pub(crate) fn new(capacity: usize) -> Fake {
        Fake { state: Mutex::default(), changed: Condvar::new(), capacity }
    }

    pub(crate) fn send(&self, bytes: &[u8]) -> usize {
        let mut state = self.state.lock().unwrap();
        let len = bytes.len().min(self.capacity - state.bytes.len().min(self.capacity));
        state.bytes.extend(&bytes[..len]);
        state.written += len as u64;
        self.changed.notify_all();
        len
    }

    /// A byte that reading steps over.
    fn send_urgent(&self) {
        self.state.lock().unwrap().written += 1;
    }

    /// As the relay does.
    pub(crate) fn wake(&self) {
        self.state.lock().unwrap().woken += 1;
        self.changed.notify_all();
    }

    /// As a thread that sleeps in the kernel. False if nothing comes for too long.
    pub(crate) fn sleep(&self, by: WakeBy) -> bool {
        let state = self.state.lock().unwrap();
        let limit = Duration::from_secs(20);
        let sleeps = |state: &mut State| state.bytes.is_empty() && !(by == WakeBy::Waker && state.woken > 0);
        let slept = self.changed.wait_timeout_while(state, limit, sleeps).unwrap();
        !slept.1.timed_out()
    }
}

impl Tcp for Fake {
    fn quiet_waker(&self) -> u32 {
        std::mem::take(&mut self.state.lock().unwrap().woken)
    }

    fn written(&self) -> io::Result<u64> {
        Ok(self.state.lock().unwrap().written)
    }

    fn available(&self) -> io::Result<usize> {
        Ok(self.state.lock().unwrap().bytes.len())
    }

    fn received(&self) -> io::Result<u64> {
        Ok(self.state.lock().unwrap().written)
    }

    fn read(&self, to: &Pieces<'_>, max: usize) -> io::Result<usize> {
        let len = self.peek(to, max, 0)?;
        self.skip(len)
    }

    fn peek(&self, to: &Pieces<'_>, max: usize, skipped: usize) -> io::Result<usize> {
        let state = self.state.lock().unwrap();
        assert!(max > 0 && max + skipped <= state.bytes.len() && skipped <= PEEK_MAX);
        let mut to = *to;
        for i in 0..max {
            let (base, _) = to.first().unwrap();
            // SAFETY: the test's own memory.
            unsafe { base.write(state.bytes[skipped + i]) };
            to.advance(1);
        }
        Ok(max)
    }

    fn skip(&self, max: usize) -> io::Result<usize> {
        let mut state = self.state.lock().unwrap();
        assert!(max > 0 && max <= state.bytes.len());
        state.bytes.drain(..max);
        Ok(max)
    }

    unsafe fn send(&self, from: *const u8, len: usize) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        let sent = Fake::send(self, unsafe { std::slice::from_raw_parts(from, len) });
        if sent == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }

    fn flush(&self) {}

    fn doorbell(&self) -> bool {
        let mut state = self.state.lock().unwrap();
        let has_room = state.bytes.len() < self.capacity;
        if has_room {
            state.bytes.push_back(0xdb);
            state.written += 1;
        }
        self.changed.notify_all();
        has_room
    }
}

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn iov(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

/// Sends as the hooks do: through the ring if that can be, else by TCP. The number of bytes that went.
fn send(writer: &mut Writer, segment: &Segment, tcp: &Fake, at: u64, len: usize, may_leave: bool) -> usize {
    let mut bytes: Vec<u8> = (at..at + len as u64).map(byte).collect();
    let (one, two) = bytes.split_at_mut(len / 3);
    let list = [iov(one), iov(two)];
    // SAFETY: of a vector of ours.
    let mut pieces = unsafe { Pieces::new(&list) }.unwrap();
    if !writer.send_again(segment, tcp).unwrap() {
        return 0;
    }
    if may_leave && writer.is_tcp() {
        writer.leave_tcp(segment, tcp).unwrap();
    }
    if !writer.is_tcp() {
        // SAFETY: of a vector of ours.
        unsafe { writer.write(segment, tcp, &mut pieces) }.unwrap();
        if pieces.left() == 0 {
            return len;
        }
        writer.enter_tcp(segment, tcp, false).unwrap();
        if !writer.send_again(segment, tcp).unwrap() {
            return len - pieces.left();
        }
    }
    let rest: Vec<u8> = (at + (len - pieces.left()) as u64..at + len as u64).map(byte).collect();
    len - pieces.left() + tcp.send(&rest)
}

fn receive(reader: &mut Reader, segment: &Segment, tcp: &Fake, len: usize, is_peek: bool) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let (one, two) = bytes.split_at_mut(len / 2);
    let list = [iov(one), iov(two)];
    // SAFETY: of a vector of ours.
    let mut pieces = unsafe { Pieces::new(&list) }.unwrap();
    // SAFETY: of a vector of ours.
    let n = if is_peek {
        // SAFETY: of a vector of ours.
        unsafe { reader.peek(segment, tcp, &mut pieces) }.unwrap()
    } else {
        // SAFETY: of a vector of ours.
        unsafe { reader.read(segment, tcp, &mut pieces) }.unwrap()
    };
    assert_eq!(pieces.left(), len - n);
    bytes.truncate(n);
    bytes
}

fn check(bytes: &[u8], at: &mut u64, why: &str) {
    for &got in bytes {
        assert_eq!(got, byte(*at), "{why}, at byte {at}");
        *at += 1;
    }
}

#[test]
fn bytes_come_once_and_in_order_whichever_way_they_go() {
    let (mut closed, mut returned) = (0, 0);
    for seed in 0..400u64 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (segment, fd) = Segment::create(RING).unwrap();
        let other = Segment::adopt(&fd).unwrap();
        let tcp = Fake::new(random.usize(100..9000));
        let mut writer = Writer::new(End::Maker);
        let (mut sent, mut got) = (0u64, 0u64);
        // Some bytes have gone before there was a segment, and some of them have been read.
        let early: Vec<u8> = (0..random.u64(0..90)).map(byte).collect();
        sent += tcp.send(&early) as u64;
        let taken = random.usize(0..=early.len());
        if taken > 0 {
            tcp.skip(taken).unwrap();
        }
        got += taken as u64;
        let mut reader = Reader::new(End::Taker, got);
        let mut is_armed = true;
        let mut is_closed = false;
        let mut closing = random.bool().then(|| random.u32(0..300));
        let why = &format!("seed {seed}");
        for step in 0..300 {
            match random.u32(0..11) {
                0 => reader.set_ready(&other, &tcp),
                1..=4 => {
                    let was_empty = got == sent;
                    let len = {
                        let limit = if random.bool() { 64 } else { 6000 };
                        random.usize(1..limit)
                    };
                    let n = send(&mut writer, &segment, &tcp, sent, len, random.u32(0..4) > 0);
                    sent += n as u64;
                    if was_empty && is_armed && n > 0 {
                        assert!(tcp.available().unwrap() > 0, "{why}: a reader that sleeps is woken");
                        is_armed = false;
                    }
                }
                5 => {
                    assert_eq!(reader.unread(&other, &tcp).unwrap() as u64, sent - got, "{why}: all is counted");
                    let len = random.usize(1..200);
                    let peeked = receive(&mut reader, &other, &tcp, len, true);
                    check(&peeked, &mut { got }, why);
                    assert_eq!(peeked.len() as u64, (len as u64).min(sent - got), "{why}: never short");
                }
                6..=8 => {
                    let len = {
                        let limit = if random.bool() { 64 } else { 9000 };
                        random.usize(1..limit)
                    };
                    let bytes = receive(&mut reader, &other, &tcp, len, false);
                    assert_eq!(bytes.len() as u64, (len as u64).min(sent - got), "{why}: never short");
                    check(&bytes, &mut got, why);
                    if got == sent {
                        assert_eq!(reader.find(&other, &tcp).unwrap(), Found::Nothing);
                        reader.discard_doorbells(&other, &tcp);
                        assert_eq!(tcp.available().unwrap(), 0, "{why}: a drained connection is not readable");
                        is_armed = random.bool();
                        if is_armed {
                            assert!(reader.arm(&other, WakeBy::Doorbell).unwrap());
                        } else {
                            reader.disarm(&other);
                        }
                    }
                }
                9 if random.bool() => {
                    // A thread that is about to sleep.
                    if reader.arm(&other, WakeBy::Doorbell).unwrap() {
                        is_armed = true;
                        let is_empty = got == sent || tcp.available().unwrap() > 0;
                        assert!(is_empty, "{why}: bytes {got} to {sent} are hidden");
                    } else {
                        assert!(got < sent, "{why}");
                    }
                }
                _ if closing.is_some_and(|at| step > at) => {
                    closing = None;
                    // Doorbells behind bytes of the stream, and those that a full connection has not taken, do not come.
                    let mut looks = 0;
                    let patience = || {
                        looks += 1;
                        looks < 10
                    };
                    if reader.close_ring(&other, &tcp, patience).unwrap() > 0 {
                        returned += 1;
                        let mut bytes = Return::default();
                        loop {
                            match bytes.step(&mut reader, &other, &tcp).unwrap() {
                                Step::Done => break,
                                Step::Returned if tcp.available().unwrap() == tcp.capacity => break,
                                _ => {}
                            }
                            let n = send(&mut writer, &segment, &tcp, sent, random.usize(1..300), true);
                            assert!(n == 0 || !writer.awaits_return(), "{why}: nothing is sent meanwhile");
                            sent += n as u64;
                        }
                        // A second return would take bytes that the writer has sent again and sends no more.
                        let left = reader.close_ring(&other, &tcp, || false).unwrap();
                        assert_eq!(left, 0, "{why}: it has been returned");
                    }
                    closed += 1;
                    while !writer.send_again(&segment, &tcp).unwrap() {
                        let bytes = receive(&mut reader, &other, &tcp, 50, false);
                        check(&bytes, &mut got, why);
                    }
                    is_closed = true;
                    // From here on TCP has the stream and nothing else.
                    is_armed = false;
                }
                _ => {
                    let mut bytes = vec![0u8; 0];
                    let list = [iov(&mut bytes)];
                    // SAFETY: empty.
                    let mut none = unsafe { Pieces::new(&list) }.unwrap();
                    // SAFETY: empty.
                    assert_eq!(unsafe { reader.read(&other, &tcp, &mut none) }.unwrap(), 0);
                }
            }
        }
        if is_closed {
            assert_eq!(tcp.available().unwrap() as u64, sent - got, "{why}: TCP has all of it, and nothing else");
        }
        while got < sent {
            let bytes = receive(&mut reader, &other, &tcp, 5000, false);
            assert!(!bytes.is_empty(), "{why}: {got} of {sent}");
            check(&bytes, &mut got, why);
        }
        // SAFETY: nothing uses them any more.
        unsafe { (segment.unmap(), other.unmap()) };
    }
    assert!(closed > 100 && returned > 50, "{closed}, {returned}");
}

const RING: usize = crate::RING_MIN;

#[test]
fn what_reads_plain_tcp_after_the_ring_is_closed_finds_the_stream() {
    let (segment, fd) = Segment::create(RING).unwrap();
    let other = Segment::adopt(&fd).unwrap();
    let tcp = Fake::new(1 << 20);
    let (mut writer, mut reader) = (Writer::new(End::Maker), Reader::new(End::Taker, 0));
    reader.set_ready(&other, &tcp);
    let mut got = 0;
    assert_eq!(send(&mut writer, &segment, &tcp, 0, 100, true), 100);
    assert!(!writer.is_tcp());
    assert_eq!(tcp.available().unwrap(), 1, "a doorbell");
    assert_eq!(reader.close_ring(&other, &tcp, || true).unwrap(), 0);
    assert_eq!(tcp.available().unwrap(), 0);
    assert_eq!(send(&mut writer, &segment, &tcp, 100, 50, true), 50);
    assert!(writer.is_tcp() && writer.is_pinned());
    // What was in the ring has come again.
    assert_eq!(tcp.available().unwrap(), 150);
    // What follows is read by something that knows nothing of rings.
    let mut rest = vec![0; 150];
    let list = [iov(&mut rest)];
    // SAFETY: of a vector of ours.
    assert_eq!(tcp.read(&unsafe { Pieces::new(&list) }.unwrap(), 150).unwrap(), 150);
    check(&rest, &mut got, "tcp");
    assert!(!writer.leave_tcp(&segment, &tcp).unwrap());
    assert!(writer.is_pinned());
}

/// Of 100 bytes that the ring has, the reader has read 40 when it closes the ring. The peer sends 60 of them again, in any pieces.
#[test]
fn a_reader_knows_which_bytes_come_again() {
    for room in [1, 25, 1 << 20] {
        let (segment, fd) = Segment::create(RING).unwrap();
        let other = Segment::adopt(&fd).unwrap();
        let tcp = Fake::new(room);
        let (mut writer, mut reader) = (Writer::new(End::Maker), Reader::new(End::Taker, 0));
        reader.set_ready(&other, &tcp);
        let mut got = 0;
        assert_eq!(send(&mut writer, &segment, &tcp, 0, 100, true), 100);
        check(&receive(&mut reader, &other, &tcp, 40, false), &mut got, "ring");
        assert_eq!(reader.awaits_again(&other, &tcp), Ok(false), "the ring is open");
        assert_eq!(reader.close_ring(&other, &tcp, || true), Ok(0));
        while got < 100 {
            assert_eq!(reader.awaits_again(&other, &tcp), Ok(true), "{got}");
            writer.send_again(&segment, &tcp).unwrap();
            assert_eq!(reader.awaits_again(&other, &tcp), Ok(false), "{got}: some have come");
            check(&receive(&mut reader, &other, &tcp, 100, false), &mut got, "tcp");
        }
        assert_eq!(reader.awaits_again(&other, &tcp), Ok(false), "all have come");
    }
}

/// A TCP connection on which something happens at a system call.
struct Interrupted<'a> {
    tcp: &'a Fake,
    /// Calls left until then.
    left: Cell<usize>,
    action: &'a dyn Fn(),
}

impl Interrupted<'_> {
    fn pass(&self) {
        self.left.set(self.left.get().wrapping_sub(1));
        if self.left.get() == 0 {
            (self.action)();
        }
    }
}

impl Tcp for Interrupted<'_> {
    fn written(&self) -> io::Result<u64> {
        self.tcp.written()
    }

    fn available(&self) -> io::Result<usize> {
        self.pass();
        let available = self.tcp.available();
        self.pass();
        available
    }

    fn received(&self) -> io::Result<u64> {
        self.tcp.received()
    }

    fn read(&self, to: &Pieces<'_>, max: usize) -> io::Result<usize> {
        self.tcp.read(to, max)
    }

    fn peek(&self, to: &Pieces<'_>, max: usize, skipped: usize) -> io::Result<usize> {
        self.tcp.peek(to, max, skipped)
    }

    fn skip(&self, max: usize) -> io::Result<usize> {
        self.pass();
        let skipped = self.tcp.skip(max);
        self.pass();
        skipped
    }

    unsafe fn send(&self, from: *const u8, len: usize) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        unsafe { Tcp::send(self.tcp, from, len) }
    }

    fn flush(&self) {}

    fn doorbell(&self) -> bool {
        self.tcp.doorbell()
    }
}

/// Both ends after messages of ten bytes that were read, each with a doorbell that is still on the TCP connection.
fn read_all(segment: &Segment, other: &Segment, tcp: &Fake, bells: usize) -> (Writer, Reader) {
    let (mut writer, mut reader) = (Writer::new(End::Maker), Reader::new(End::Taker, 0));
    reader.set_ready(other, tcp);
    for message in 0..bells as u64 {
        assert!(reader.arm(other, WakeBy::Doorbell).unwrap());
        assert_eq!(send(&mut writer, segment, tcp, 10 * message, 10, true), 10);
        assert_eq!(receive(&mut reader, other, tcp, 10, false).len(), 10);
    }
    (writer, reader)
}

/// The peer writes at any system call while this end discards doorbells. Another process waits for the kernel alone.
#[test]
fn bytes_that_arrive_while_doorbells_are_discarded_have_one() {
    for (at, bells, is_armed) in interruptions(0..8, 0..3) {
        let (segment, fd) = Segment::create(RING).unwrap();
        let other = Segment::adopt(&fd).unwrap();
        let tcp = Fake::new(1 << 20);
        let (writer, mut reader) = read_all(&segment, &other, &tcp, bells);
        let sent = 10 * bells as u64;
        if is_armed {
            assert!(reader.arm(&other, WakeBy::Doorbell).unwrap());
        }
        let (is_sent, writer) = (Cell::new(false), std::cell::RefCell::new(writer));
        let write = || {
            assert_eq!(send(&mut writer.borrow_mut(), &segment, &tcp, sent, 10, true), 10);
            is_sent.set(true);
        };
        let why = format!("system call {at}, {bells} doorbells, armed: {is_armed}");
        let is_empty = {
            let interrupted = Interrupted { tcp: &tcp, left: Cell::new(at), action: &write };
            reader.rearm(&other, &interrupted, WakeBy::Doorbell).unwrap()
        };
        if is_empty && !is_sent.get() {
            assert_eq!(tcp.available().unwrap(), 0, "{why}: an empty connection is not readable");
            write();
        }
        // Without a doorbell before, and where none was asked for, another reader is at work.
        let has_reader = bells == 0 && !is_armed && !is_empty;
        if is_sent.get() && !has_reader {
            assert!(tcp.available().unwrap() > 0, "{why}: the other process sleeps");
        }
    }
}

/// Bytes that nothing announced are announced once, when they have been unread from one look to the next; the doorbell is no data.
#[test]
fn unread_bytes_have_one_more_doorbell() {
    let (segment, fd) = Segment::create(RING).unwrap();
    let other = Segment::adopt(&fd).unwrap();
    let tcp = Fake::new(1 << 20);
    let (mut writer, mut reader) = read_all(&segment, &other, &tcp, 2);
    reader.rearm(&other, &tcp, WakeBy::Doorbell).unwrap();
    reader.disarm(&other);
    assert!(!writer.ring_again(&segment, &tcp) && !writer.ring_again(&segment, &tcp), "all is read");
    assert_eq!(send(&mut writer, &segment, &tcp, 20, 10, true), 10);
    assert_eq!(tcp.available().unwrap(), 0);
    assert!(!writer.ring_again(&segment, &tcp), "they have just come");
    assert!(writer.ring_again(&segment, &tcp));
    assert_eq!(tcp.available().unwrap(), 1);
    assert!(!writer.ring_again(&segment, &tcp) && !writer.ring_again(&segment, &tcp), "once");
    assert_eq!(receive(&mut reader, &other, &tcp, 20, false).len(), 10);
    assert!(reader.rearm(&other, &tcp, WakeBy::Doorbell).unwrap());
    assert_eq!(reader.discarded(), 3);
    assert_eq!((tcp.available().unwrap(), reader.unread(&other, &tcp).unwrap()), (0, 0));
}

/// The peer goes to TCP and back without a byte, and writes, at any system call of a search for bytes. Another process waits for the kernel
/// alone.
#[test]
fn bytes_behind_an_empty_run_have_a_doorbell() {
    for (at, bells, begins_before) in interruptions(0..8, 0..3) {
        let (segment, fd) = Segment::create(RING).unwrap();
        let other = Segment::adopt(&fd).unwrap();
        let tcp = Fake::new(1 << 20);
        let (mut writer, mut reader) = read_all(&segment, &other, &tcp, bells);
        let sent = 10 * bells as u64;
        assert!(bells > 0 || reader.arm(&other, WakeBy::Doorbell).unwrap());
        if begins_before && !writer.is_tcp() {
            writer.enter_tcp(&segment, &tcp, false).unwrap();
        }
        let writer = std::cell::RefCell::new(writer);
        let write = || {
            let mut writer = writer.borrow_mut();
            if !begins_before && !writer.is_tcp() {
                writer.enter_tcp(&segment, &tcp, false).unwrap();
            }
            assert_eq!(send(&mut writer, &segment, &tcp, sent, 10, true), 10);
        };
        {
            let interrupted = Interrupted { tcp: &tcp, left: Cell::new(at), action: &write };
            reader.find(&other, &interrupted).unwrap();
            let is_written = at > 0 && (interrupted.left.get() == 0 || interrupted.left.get() > at);
            if !is_written {
                write();
            }
        }
        let why = format!("system call {at}, {bells} doorbells, in TCP before: {begins_before}");
        assert!(tcp.available().unwrap() > 0, "{why}: the other process sleeps");
        assert_eq!(reader.find(&other, &tcp).unwrap(), Found::Ring(10), "{why}");
        assert!(tcp.available().unwrap() > 0, "{why}: after another search, the other process sleeps");
        assert_eq!(reader.ring_len(&other).unwrap(), 10, "{why}");
        assert_eq!(receive(&mut reader, &other, &tcp, 100, false).len(), 10, "{why}");
        assert!(reader.rearm(&other, &tcp, WakeBy::Doorbell).unwrap());
        assert_eq!(tcp.available().unwrap(), 0, "{why}: a drained connection is not readable");
    }
}

/// All calls, numbers of doorbells, and states of [`bytes_that_arrive_while_doorbells_are_discarded_have_one`].
fn interruptions(
    calls: std::ops::Range<usize>,
    bells: std::ops::Range<usize>,
) -> impl Iterator<Item = (usize, usize, bool)> {
    calls.flat_map(move |at| bells.clone().flat_map(move |bells| [false, true].map(|is_armed| (at, bells, is_armed))))
}

/// Two threads, one of which sleeps whenever it has found nothing: a wake-up that is lost ends the test.
#[test]
fn no_wake_up_is_lost_between_threads() {
    for seed in 0..6u64 {
        let (segment, fd) = Segment::create(RING).unwrap();
        let other = Segment::adopt(&fd).unwrap();
        let tcp = Fake::new(if seed % 2 == 0 { 1 << 20 } else { 3000 });
        let total = 400_000u64;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = fastrand::Rng::with_seed(seed);
                let mut writer = Writer::new(End::Maker);
                let mut sent = 0;
                while sent < total {
                    let limit = if random.u32(0..20) == 0 { 9000 } else { 300 };
                    let len = random.u64(1..limit).min(total - sent);
                    let n = send(&mut writer, &segment, &tcp, sent, len as usize, true);
                    sent += n as u64;
                    if n == 0 {
                        std::thread::yield_now();
                    }
                }
            });
            let mut random = fastrand::Rng::with_seed(seed + 1000);
            let mut reader = Reader::new(End::Taker, 0);
            reader.set_ready(&other, &tcp);
            let mut got = 0;
            while got < total {
                let bytes = receive(&mut reader, &other, &tcp, random.usize(1..2000), false);
                check(&bytes, &mut got, "threads");
                if bytes.is_empty() && seed % 3 == 0 {
                    // As if another process waited: what comes from here on rings.
                    if reader.rearm(&other, &tcp, WakeBy::Doorbell).unwrap() {
                        assert!(tcp.sleep(WakeBy::Doorbell), "woken, at {got} of {total}");
                    }
                } else if bytes.is_empty() {
                    reader.discard_doorbells(&other, &tcp);
                    if random.bool() {
                        reader.disarm(&other);
                    } else if reader.arm(&other, WakeBy::Doorbell).unwrap() {
                        assert!(tcp.sleep(WakeBy::Doorbell), "woken, at {got} of {total}");
                    }
                }
            }
        });
    }
}

#[test]
fn a_peer_that_lies_breaks_its_own_connection() {
    let fresh = || {
        let (segment, _fd) = Segment::create(RING).unwrap();
        (segment, Writer::new(End::Maker), Reader::new(End::Taker, 0), Fake::new(1 << 20))
    };
    let mut memory = [0u8; 64];
    let list = [iov(&mut memory)];
    // SAFETY: an array of ours.
    let pieces = unsafe { Pieces::new(&list) }.unwrap();
    // The reader's position.
    for head in [101, RING as u64, u64::MAX, u64::MAX / 2] {
        let (segment, mut writer, reader, tcp) = fresh();
        reader.set_ready(&segment, &tcp);
        assert_eq!(send(&mut writer, &segment, &tcp, 0, 100, true), 100);
        segment.control(0).head.store(head, Ordering::SeqCst);
        assert_eq!(writer.room(&segment, RING), Err(Broken), "{head}");
    }
    // The writer's position.
    for tail in [RING as u64 + 1, u64::MAX >> 2, 1 << 40] {
        let (segment, _, mut reader, tcp) = fresh();
        let control = segment.control(0);
        control.runs[0].end.store(0, Ordering::SeqCst);
        control.tail.store(tail << POSITION, Ordering::SeqCst);
        reader.find(&segment, &tcp).unwrap_err();
        // SAFETY: an array of ours.
        unsafe { reader.read(&segment, &tcp, &mut pieces.clone()) }.unwrap_err();
    }
    // More runs than there can be, runs that end before they begin, that begin far away, and behind bytes that are not there.
    let (segment, _, mut reader, tcp) = fresh();
    segment.control(0).opened.store(RUNS as u32 + 1, Ordering::SeqCst);
    reader.find(&segment, &tcp).unwrap_err();
    let (segment, _, mut reader, tcp) = fresh();
    segment.control(0).runs[0].start.store(100, Ordering::SeqCst);
    assert_eq!(reader.find(&segment, &tcp).unwrap(), Found::Nothing);
    tcp.send(&[1; 100]);
    segment.control(0).runs[0].end.store(50, Ordering::SeqCst);
    reader.find(&segment, &tcp).unwrap_err();
    let (segment, _, mut reader, tcp) = fresh();
    segment.control(0).runs[0].ring.store(RING as u64 + 1, Ordering::SeqCst);
    reader.find(&segment, &tcp).unwrap_err();
    let (segment, mut writer, reader, tcp) = fresh();
    reader.set_ready(&segment, &tcp);
    segment.control(0).done.store(9, Ordering::SeqCst);
    writer.leave_tcp(&segment, &tcp).unwrap_err();
}

/// Bytes that a reader has found stay there, whatever the peer writes afterwards, or every call fails from then on.
#[test]
fn a_peer_does_not_take_back_what_a_reader_has_found() {
    let begin = || {
        let (segment, fd) = Segment::create(RING).unwrap();
        let control = segment.control(0);
        control.runs[0].end.store(0, Ordering::SeqCst);
        let mut reader = Reader::new(End::Taker, 0);
        assert_eq!(reader.ring_len(&segment), Ok(0));
        control.opened.store(1, Ordering::SeqCst);
        control.tail.store(100 << POSITION, Ordering::SeqCst);
        assert_eq!(reader.ring_len(&segment), Ok(100));
        (segment, fd, reader)
    };
    let tcp = Fake::new(4096);
    // Its position goes back.
    let (segment, _fd, mut reader) = begin();
    segment.control(0).tail.store(10 << POSITION, Ordering::SeqCst);
    assert_eq!(reader.ring_len(&segment), Err(Broken));
    segment.control(0).tail.store(100 << POSITION, Ordering::SeqCst);
    assert_eq!(reader.ring_len(&segment), Err(Broken));
    assert_eq!(reader.find(&segment, &tcp), Err(Broken));
    // A run that has begun had begun before them.
    let (segment, _fd, mut reader) = begin();
    segment.control(0).runs[1].ring.store(50, Ordering::SeqCst);
    segment.control(0).runs[1].end.store(OPEN, Ordering::SeqCst);
    segment.control(0).opened.store(2, Ordering::SeqCst);
    assert_eq!(reader.ring_len(&segment), Err(Broken));
    // A run changes after it has begun: the first look counts.
    let (segment, _fd, mut reader) = begin();
    let run = &segment.control(0).runs[1];
    run.ring.store(100, Ordering::SeqCst);
    run.end.store(OPEN, Ordering::SeqCst);
    segment.control(0).opened.store(2, Ordering::SeqCst);
    assert_eq!(reader.ring_len(&segment), Ok(100));
    run.ring.store(20, Ordering::SeqCst);
    run.start.store(77, Ordering::SeqCst);
    assert_eq!(reader.find(&segment, &tcp), Ok(Found::Ring(100)));
    // Runs are un-begun.
    segment.control(0).opened.store(1, Ordering::SeqCst);
    assert_eq!(reader.find(&segment, &tcp), Err(Broken));
}

/// Bytes of the TCP connection that a reader has called data stay data, whatever the peer says of them later.
#[test]
fn a_peer_does_not_make_doorbells_of_data() {
    let begin = || {
        let (segment, fd) = Segment::create(RING).unwrap();
        let control = segment.control(0);
        control.runs[0].end.store(OPEN, Ordering::SeqCst);
        control.opened.store(1, Ordering::SeqCst);
        (segment, fd, Reader::new(End::Taker, 0), Fake::new(4096))
    };
    let has = |reader: &mut Reader, segment: &Segment, tcp: &Fake| {
        assert_eq!(reader.find(segment, tcp), Ok(Found::Tcp(3)));
        assert_eq!(receive(reader, segment, tcp, 100, true), [1, 2, 3]);
        assert_eq!(reader.unread(segment, tcp), Ok(3));
        assert_eq!(receive(reader, segment, tcp, 100, false), [1, 2, 3]);
        assert_eq!(reader.find(segment, tcp), Ok(Found::Nothing));
    };
    // The number of doorbells changes.
    let (segment, _fd, mut reader, tcp) = begin();
    let control = segment.control(0);
    control.runs[0].end.store(0, Ordering::SeqCst);
    assert_eq!(reader.find(&segment, &tcp), Ok(Found::Nothing));
    tcp.send(&[1, 2, 3]);
    assert_eq!(reader.unexpected(&segment, &tcp), Ok(3));
    control.ringing.store(1 << 20, Ordering::SeqCst);
    has(&mut reader, &segment, &tcp);
    // A run begins behind them.
    let (segment, _fd, mut reader, tcp) = begin();
    let control = segment.control(0);
    control.runs[0].end.store(0, Ordering::SeqCst);
    tcp.send(&[1, 2, 3]);
    assert_eq!(reader.unexpected(&segment, &tcp), Ok(3));
    control.runs[1].start.store(3, Ordering::SeqCst);
    control.runs[1].end.store(OPEN, Ordering::SeqCst);
    control.opened.store(2, Ordering::SeqCst);
    has(&mut reader, &segment, &tcp);
    // The run that they are of has ended before them.
    let (segment, _fd, mut reader, tcp) = begin();
    tcp.send(&[1, 2, 3]);
    assert_eq!(reader.find(&segment, &tcp), Ok(Found::Tcp(3)));
    segment.control(0).runs[0].end.store(0, Ordering::SeqCst);
    segment.control(0).ringing.store(1 << 20, Ordering::SeqCst);
    has(&mut reader, &segment, &tcp);
    // A byte that comes between two looks, before a run that begins behind it, is a doorbell from the first.
    let (segment, _fd, mut reader, _) = begin();
    segment.control(0).runs[0].start.store(1 << 40, Ordering::SeqCst);
    assert_eq!(reader.unexpected(&segment, &Bells::one_after_a_look()), Ok(0));
    // Two bytes of the ring and three of a run are shown or counted. The two are read. Then the run ends before the three, and these
    // become doorbells, or come before a later run.
    for (is_counted, is_before_run) in [(false, false), (true, false), (false, true), (true, true)] {
        let (segment, _fd, mut reader, tcp) = begin();
        let control = segment.control(0);
        control.runs[0].end.store(0, Ordering::SeqCst);
        control.tail.store(2 << POSITION, Ordering::SeqCst);
        let open = |run: usize, start| {
            control.runs[run].ring.store(2, Ordering::SeqCst);
            control.runs[run].start.store(start, Ordering::SeqCst);
            control.runs[run].end.store(OPEN, Ordering::SeqCst);
            control.opened.store(run as u32 + 1, Ordering::SeqCst);
        };
        open(1, 0);
        tcp.send(&[1, 2, 3]);
        match is_counted {
            true => assert_eq!(reader.unread(&segment, &tcp), Ok(5)),
            false => assert_eq!(receive(&mut reader, &segment, &tcp, 100, true).len(), 5),
        }
        assert_eq!(receive(&mut reader, &segment, &tcp, 2, false).len(), 2);
        control.runs[1].end.store(0, Ordering::SeqCst);
        match is_before_run {
            true => open(2, 100),
            false => control.ringing.store(3, Ordering::SeqCst),
        }
        assert_eq!(reader.find(&segment, &tcp), Err(Broken));
    }
    // They came before the ring was used.
    let (segment, _fd, mut reader, tcp) = begin();
    tcp.send(&[1, 2, 3]);
    reader.set_data_until(3);
    segment.control(0).opened.store(0, Ordering::SeqCst);
    segment.control(0).ringing.store(1 << 20, Ordering::SeqCst);
    has(&mut reader, &segment, &tcp);
    // Something else takes them: what comes then is a doorbell again.
    let (segment, _fd, mut reader, tcp) = begin();
    segment.control(0).runs[0].end.store(0, Ordering::SeqCst);
    tcp.send(&[1, 2, 3]);
    assert_eq!(reader.unexpected(&segment, &tcp), Ok(3));
    tcp.skip(3).unwrap();
    assert_eq!(reader.find(&segment, &tcp), Ok(Found::Nothing));
    segment.control(0).ringing.store(1, Ordering::SeqCst);
    tcp.doorbell();
    assert_eq!(reader.find(&segment, &tcp), Ok(Found::Nothing));
    assert!(reader.discard_doorbells(&segment, &tcp));
}

/// A connection goes back to TCP by itself only while no bytes are in the ring, which the peer would have to send again.
#[test]
fn a_ring_with_unread_bytes_is_not_given_up() {
    let (segment, fd) = Segment::create(RING).unwrap();
    let other = Segment::adopt(&fd).unwrap();
    let tcp = Fake::new(1 << 20);
    let (mut writer, mut reader) = (Writer::new(End::Maker), Reader::new(End::Taker, 0));
    reader.set_ready(&other, &tcp);
    assert_eq!(send(&mut writer, &segment, &tcp, 0, 100, true), 100);
    assert_eq!(reader.close_empty_ring(&other, &tcp, || true), Ok(None));
    assert_eq!(receive(&mut reader, &other, &tcp, 100, true).len(), 100);
    assert_eq!(receive(&mut reader, &other, &tcp, 60, false).len(), 60);
    assert_eq!(reader.close_empty_ring(&other, &tcp, || true), Ok(None));
    assert!(!reader.is_closed());
    assert_eq!(receive(&mut reader, &other, &tcp, 60, false).len(), 40);
    assert_eq!(reader.close_empty_ring(&other, &tcp, || true), Ok(Some(0)));
    assert!(reader.is_closed());
    assert_eq!(send(&mut writer, &segment, &tcp, 100, 50, true), 50);
    let mut got = 100;
    check(&receive(&mut reader, &other, &tcp, 100, false), &mut got, "by TCP");
    assert_eq!(got, 150);
    // SAFETY: nothing uses them any more.
    unsafe { (segment.unmap(), other.unmap()) };
}

/// Only a call that receives takes bytes of the TCP connection, and so a doorbell behind them stays.
#[test]
fn closing_a_ring_does_not_wait_for_a_doorbell_behind_bytes() {
    for is_relayed in [false, true] {
        let (segment, _fd) = Segment::create(RING).unwrap();
        let (segment, tcp) = (if is_relayed { segment.as_relayed() } else { segment }, Fake::new(4096));
        let (control, mut reader) = (segment.control(0), Reader::new(End::Taker, 0));
        control.runs[0].end.store(OPEN, Ordering::SeqCst);
        control.opened.store(1, Ordering::SeqCst);
        tcp.send(&[1, 2, 3]);
        control.ringing.store(1, Ordering::SeqCst);
        control.rung.store(1, Ordering::SeqCst);
        if is_relayed {
            // The relay has done that.
            control.tail.store(CLOSED, Ordering::SeqCst);
        }
        assert!(reader.close_ring(&segment, &tcp, || panic!("{is_relayed}: a wait")).is_ok());
    }
}

#[test]
fn a_doorbell_for_which_tcp_has_no_room_is_not_counted() {
    let (segment, fd) = Segment::create(RING).unwrap();
    let other = Segment::adopt(&fd).unwrap();
    let tcp = Fake::new(1);
    let (mut writer, mut reader) = (Writer::new(End::Maker), Reader::new(End::Taker, 0));
    reader.set_ready(&other, &tcp);
    assert!(reader.arm(&other, WakeBy::Doorbell).unwrap());
    for (sent, bells) in [(0, 1), (10, 1)] {
        // The second finds the first.
        assert_eq!(send(&mut writer, &segment, &tcp, sent, 10, true), 10);
        reader.ask(&other);
        writer.answer(&segment, &tcp);
        let control = segment.control(0);
        let counts = [&control.ringing, &control.rung].map(|count| count.load(Ordering::SeqCst));
        assert_eq!((counts, tcp.available().unwrap()), ([bells; 2], 1));
    }
    // SAFETY: nothing uses them any more.
    unsafe { (segment.unmap(), other.unmap()) };
}

/// An urgent byte that nobody has read, which reading steps over, holds up no return.
#[test]
fn bytes_before_and_behind_an_urgent_one_are_returned() {
    let (segment, fd) = Segment::create(RING).unwrap();
    let other = Segment::adopt(&fd).unwrap();
    let tcp = Fake::new(1 << 20);
    let (mut writer, mut reader) = (Writer::new(End::Maker), Reader::new(End::Taker, 0));
    reader.set_ready(&other, &tcp);
    assert_eq!(send(&mut writer, &segment, &tcp, 0, 100, true), 100);
    writer.enter_tcp(&segment, &tcp, true).unwrap();
    tcp.send_urgent();
    assert_eq!(send(&mut writer, &segment, &tcp, 100, 50, false), 50);
    assert!(reader.close_ring(&other, &tcp, || true).unwrap() > 0);
    let mut returning = Return::default();
    let mut steps = 0;
    while returning.step(&mut reader, &other, &tcp).unwrap() != Step::Done {
        _ = writer.send_again(&segment, &tcp).unwrap();
        steps += 1;
        assert!(steps < 100);
    }
    let mut got = 0;
    check(tcp.state.lock().unwrap().bytes.make_contiguous(), &mut got, "returned");
    assert_eq!(got, 150);
    // SAFETY: nothing uses them any more.
    unsafe { (segment.unmap(), other.unmap()) };
}

/// A call that sends returned bytes again ends, however fast the reader returns more.
#[test]
fn a_peer_that_returns_without_end_keeps_no_caller() {
    let (segment, _fd) = Segment::create(RING).unwrap();
    let (mut writer, tcp) = (Writer::new(End::Maker), Endless { segment: &segment });
    let control = segment.control(0);
    control.tail.store(CLOSED, Ordering::SeqCst);
    control.returned.store((RING as u64) << POSITION | RETURNS, Ordering::SeqCst);
    let mut calls = 0;
    let error = loop {
        calls += 1;
        match writer.send_again(&segment, &tcp) {
            Ok(is_over) => assert!(!is_over && writer.awaits_return()),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert!(calls >= returning::RETURNED_MAX / RING, "{calls}");
}

/// A TCP connection whose reader returns a ring of bytes whenever it gets one.
struct Endless<'a> {
    segment: &'a Segment,
}

impl Tcp for Endless<'_> {
    fn written(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn available(&self) -> io::Result<usize> {
        Ok(0)
    }

    fn received(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn read(&self, _: &Pieces<'_>, _: usize) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn peek(&self, _: &Pieces<'_>, _: usize, _: usize) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn skip(&self, _: usize) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    unsafe fn send(&self, _: *const u8, len: usize) -> io::Result<usize> {
        self.segment.control(0).returned.fetch_add((len as u64) << POSITION, Ordering::SeqCst);
        Ok(len)
    }

    fn flush(&self) {}

    fn doorbell(&self) -> bool {
        true
    }
}

/// Words that only a relay uses mean nothing within a host.
#[test]
fn a_peer_on_this_host_does_not_cut_a_way_to_another_one() {
    let (segment, fd) = Segment::create(RING).unwrap();
    segment.set_over(crate::Over::Lost);
    let other = Segment::adopt(&fd).unwrap();
    assert_eq!(other.over(), crate::Over::No);
    assert_eq!(other.as_relayed().over(), crate::Over::Lost);
}

/// A reader finds nothing or that the peer has broken the ring, soon, and no call goes on for as long as the peer wants.
#[test]
fn a_peer_does_not_hold_a_reader_up() {
    // A run that ends where the reader is and begins behind that: bytes of the ring follow it, and cannot be read.
    let (segment, _fd) = Segment::create(RING).unwrap();
    let (mut reader, tcp) = (Reader::new(End::Taker, 7), Fake::new(1 << 20));
    let control = segment.control(0);
    for (word, value) in [(&control.runs[0].ring, 0), (&control.runs[0].start, 1007), (&control.runs[0].end, 7)] {
        word.store(value, Ordering::SeqCst);
    }
    control.tail.store(10 << POSITION, Ordering::SeqCst);
    control.opened.store(1, Ordering::SeqCst);
    assert_eq!(reader.ring_len(&segment), Err(Broken));
    assert_eq!(reader.find(&segment, &tcp), Err(Broken));

    // Doorbells without end, on the way to a run that never comes.
    let (segment, _fd) = Segment::create(RING).unwrap();
    segment.control(0).runs[0].start.store(u64::MAX, Ordering::SeqCst);
    assert_eq!(Reader::new(End::Taker, 0).find(&segment, &Bells::default()), Err(Broken));

    // Runs without bytes, as fast as the reader passes them: each is the first of as many as there can be.
    let (segment, _fd) = Segment::create(RING).unwrap();
    let control = segment.control(0);
    for run in &control.runs {
        run.end.store(0, Ordering::SeqCst);
    }
    let mut reader = Reader::new(End::Taker, 0);
    let mut passed = 0;
    for _ in 0..100 {
        control.opened.store(control.done.load(Ordering::SeqCst) + RUNS as u32, Ordering::SeqCst);
        assert_eq!(reader.find(&segment, &Bells::default()), Ok(Found::Nothing));
        passed += RUNS as u32;
        assert_eq!(control.done.load(Ordering::SeqCst), passed);
    }
}

/// A TCP connection that always has another doorbell, or one alone after the first look.
#[derive(Default)]
struct Bells {
    is_one: bool,
    /// Looks that find nothing.
    without: Cell<usize>,
}

impl Bells {
    fn one_after_a_look() -> Bells {
        Bells { is_one: true, without: Cell::new(1) }
    }
}

impl Tcp for Bells {
    fn written(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn available(&self) -> io::Result<usize> {
        let without = self.without.get();
        self.without.set(without.saturating_sub(1));
        Ok(usize::from(without == 0))
    }

    fn received(&self) -> io::Result<u64> {
        Ok(1)
    }

    fn read(&self, _: &Pieces<'_>, _: usize) -> io::Result<usize> {
        unreachable!("nothing of it is for the program")
    }

    fn peek(&self, _: &Pieces<'_>, _: usize, _: usize) -> io::Result<usize> {
        unreachable!("nothing of it is for the program")
    }

    fn skip(&self, max: usize) -> io::Result<usize> {
        self.without.set(if self.is_one { usize::MAX } else { 0 });
        Ok(max)
    }

    unsafe fn send(&self, _: *const u8, _: usize) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn flush(&self) {}

    fn doorbell(&self) -> bool {
        true
    }
}

/// Whatever is written over the control words, by a peer that never tires: the ends may say anything, and end.
#[test]
fn scribbled_words_end_nothing_but_the_connection() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..3000 {
        let (segment, fd) = Segment::create(RING).unwrap();
        let other = Segment::adopt(&fd).unwrap();
        let tcp = Fake::new(4096);
        let (mut writer, mut reader) = (Writer::new(End::Maker), Reader::new(End::Taker, 0));
        reader.set_ready(&other, &tcp);
        let mut memory = [0u8; 700];
        let list = [iov(&mut memory)];
        let mut returning = Return::default();
        for _ in 0..30 {
            // SAFETY: an array of ours.
            let mut pieces = unsafe { Pieces::new(&list) }.unwrap();
            if random.bool() {
                let word = random.usize(0..size_of::<crate::segment::Control>() / 8);
                let control: *const crate::segment::Control = segment.control(0);
                let value = match random.u32(0..3) {
                    0 => random.u64(..),
                    1 => random.u64(0..20),
                    _ => random.u64(0..20_000),
                };
                // SAFETY: inside the mapping, and aligned; words of 32 bits are written in pairs.
                unsafe { &*control.cast::<AtomicU64>().add(word) }.store(value, Ordering::SeqCst);
            }
            // Else a call that waits would look again and again for what it finds that there is.
            if reader.find(&other, &tcp) == Ok(Found::Nothing) {
                assert!(matches!(reader.ring_len(&other), Ok(0) | Err(Broken)));
            }
            let calls = Cell::new(0);
            match random.u32(0..4) {
                0 => _ = writer.leave_tcp(&segment, &tcp),
                1 if !writer.is_tcp() => {
                    // SAFETY: an array of ours.
                    if unsafe { writer.write(&segment, &tcp, &mut pieces) } == Ok(0) {
                        _ = writer.enter_tcp(&segment, &tcp, random.bool());
                    }
                }
                1 => _ = tcp.send(&[3; 70]),
                // SAFETY: an array of ours.
                2 if random.bool() => _ = unsafe { reader.read(&other, &tcp, &mut pieces) },
                // SAFETY: an array of ours.
                2 => _ = unsafe { reader.peek(&other, &tcp, &mut pieces) },
                _ => {
                    let patience = || calls.replace(calls.get() + 1) < 10;
                    if random.u32(0..9) == 0 {
                        _ = reader.close_ring(&other, &tcp, patience);
                    }
                    if reader.is_closed() {
                        _ = returning.step(&mut reader, &other, &tcp);
                        _ = writer.send_again(&segment, &tcp);
                    }
                    reader.discard_doorbells(&other, &tcp);
                    _ = reader.arm(&other, WakeBy::Doorbell);
                }
            }
        }
        // SAFETY: nothing uses them any more.
        unsafe { (segment.unmap(), other.unmap()) };
    }
}
