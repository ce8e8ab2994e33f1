use super::*;
use crate::direction::tests::Fake;
use crate::direction::{Found, PEEK_MAX, Reader, Tcp, Writer};
use crate::iovecs::Pieces;
use crate::segment::{Over, RING_MIN};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicBool;

/// A TCP connection between two hosts: bytes are on their way for some time.
#[derive(Default)]
struct Path {
    on_the_way: RefCell<VecDeque<u8>>,
    arrived: RefCell<VecDeque<u8>>,
    written: Cell<u64>,
    capacity: usize,
    /// How often the reader's relay has woken it since that was taken back.
    woken: Cell<u32>,
}

impl Path {
    fn push(&self, bytes: &[u8]) -> usize {
        let used = self.on_the_way.borrow().len() + self.arrived.borrow().len();
        let len = bytes.len().min(self.capacity.saturating_sub(used));
        self.on_the_way.borrow_mut().extend(&bytes[..len]);
        self.written.set(self.written.get() + len as u64);
        len
    }

    fn deliver(&self, most: usize) -> bool {
        let mut from = self.on_the_way.borrow_mut();
        let len = from.len().min(most);
        self.arrived.borrow_mut().extend(from.drain(..len));
        len > 0
    }
}

impl Tcp for Path {
    fn quiet_waker(&self) -> u32 {
        self.woken.take()
    }

    fn written(&self) -> io::Result<u64> {
        Ok(self.written.get())
    }

    fn available(&self) -> io::Result<usize> {
        Ok(self.arrived.borrow().len())
    }

    fn received(&self) -> io::Result<u64> {
        unreachable!("bytes are returned within a host only")
    }

    fn read(&self, to: &Pieces<'_>, max: usize) -> io::Result<usize> {
        let len = self.peek(to, max, 0)?;
        self.skip(len)
    }

    fn peek(&self, to: &Pieces<'_>, max: usize, skipped: usize) -> io::Result<usize> {
        let arrived = self.arrived.borrow();
        assert!(max > 0 && max + skipped <= arrived.len() && skipped <= PEEK_MAX);
        let mut to = *to;
        for i in 0..max {
            let (base, _) = to.first().unwrap();
            // SAFETY: the test's own memory.
            unsafe { base.write(arrived[skipped + i]) };
            to.advance(1);
        }
        Ok(max)
    }

    fn skip(&self, max: usize) -> io::Result<usize> {
        let mut arrived = self.arrived.borrow_mut();
        assert!(max > 0 && max <= arrived.len());
        arrived.drain(..max);
        Ok(max)
    }

    unsafe fn send(&self, from: *const u8, len: usize) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        let sent = self.push(unsafe { std::slice::from_raw_parts(from, len) });
        if sent == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }

    fn flush(&self) {}

    fn doorbell(&self) -> bool {
        panic!("where there is a relay, it rings");
    }
}

fn byte(at: u64) -> u8 {
    // Never a doorbell's.
    ((at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).max(1)
}

/// Two hosts: a writer's process and its relay, a reader's and its relay, and what is between them.
struct World {
    here: Segment,
    there: Segment,
    path: Path,
    /// What wakes the writer; it brings no bytes.
    back: Path,
    outlet: RefCell<Outlet>,
    inlet: RefCell<Inlet>,
    updates: RefCell<VecDeque<Vec<u8>>>,
    feedback: RefCell<VecDeque<[u8; FEEDBACK_LEN]>>,
    random: RefCell<fastrand::Rng>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut random = fastrand::Rng::with_seed(seed);
        let segment = || {
            let (segment, fd) = Segment::create(RING_MIN).unwrap();
            // The process's mapping and the relay's show the same.
            let other = Segment::adopt(&fd).unwrap().as_relayed();
            // SAFETY: nothing uses this one.
            unsafe { segment.unmap() };
            other
        };
        let path = Path { capacity: random.usize(100..20_000), ..Path::default() };
        World {
            here: segment(),
            there: segment(),
            path,
            back: Path::default(),
            outlet: RefCell::default(),
            inlet: RefCell::default(),
            updates: RefCell::default(),
            feedback: RefCell::default(),
            random: RefCell::new(random),
        }
    }

    fn random(&self, limit: u32) -> u32 {
        self.random.borrow_mut().u32(0..limit)
    }

    /// Something goes on somewhere between the two processes. False if nothing did.
    fn step(&self, which: u32, is_idle: bool) -> bool {
        match which {
            0 => self.path.deliver(1 + self.random(3000) as usize),
            1 => {
                let Some(update) = self.updates.borrow_mut().pop_front() else { return false };
                let (update, bytes) = Update::decode(&update).unwrap();
                self.inlet.borrow_mut().apply(&self.there, &update, bytes).unwrap();
                true
            }
            2 => {
                let Some(feedback) = self.feedback.borrow_mut().pop_front() else { return false };
                self.outlet.borrow_mut().receive(&self.here, &Feedback::decode(&feedback).unwrap()).unwrap();
                true
            }
            3 => {
                let feedback = self.inlet.borrow_mut().feedback(&self.there, is_idle).unwrap();
                self.feedback.borrow_mut().extend(feedback.map(|feedback| feedback.encode()));
                feedback.is_some()
            }
            4 => {
                // Now and then it cannot.
                let (wakes, did) = (self.random(4) > 0, Cell::new(false));
                let wake = |path: &Path| {
                    path.woken.set(path.woken.get() + u32::from(wakes));
                    did.set(true);
                    wakes
                };
                self.inlet.borrow_mut().wake(&self.there, || wake(&self.path));
                self.outlet.borrow_mut().wake(&self.here, false, || wake(&self.back));
                did.get()
            }
            _ => {
                let mut outlet = self.outlet.borrow_mut();
                let mut rang = false;
                outlet.serve(&self.here, || {
                    rang = self.path.push(&[0]) == 1;
                    rang
                });
                let mut out = Vec::new();
                let max = 1 + self.random(3000) as usize;
                let has_some = outlet.take(&self.here, max, &mut out).unwrap();
                if has_some {
                    self.updates.borrow_mut().push_back(out);
                }
                has_some || rang
            }
        }
    }

    /// Everything that is on its way arrives.
    fn settle(&self) {
        let mut idle = 0;
        while idle < 3 {
            let any = (0..6).fold(false, |any, which| self.step(which, true) | any);
            idle = if any { 0 } else { idle + 1 };
        }
    }

    /// Whether the kernel has something for a reader that waits for that.
    fn wakes(&self, by: WakeBy) -> bool {
        self.path.available().unwrap() > 0 || by == WakeBy::Waker && self.path.woken.get() > 0
    }

    fn send(&self, writer: &mut Writer, at: u64, len: usize, may_leave: bool) -> usize {
        let mut bytes: Vec<u8> = (at..at + len as u64).map(byte).collect();
        let list = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len }];
        // SAFETY: of a vector of ours.
        let mut pieces = unsafe { Pieces::new(&list) }.unwrap();
        if !writer.send_again(&self.here, &self.path).unwrap() {
            return 0;
        }
        if may_leave && writer.is_tcp() {
            writer.leave_tcp(&self.here, &self.path).unwrap();
        }
        if !writer.is_tcp() {
            // SAFETY: of a vector of ours.
            unsafe { writer.write(&self.here, &self.path, &mut pieces) }.unwrap();
            if pieces.left() == 0 || !writer.is_settled(&self.here) {
                return len - pieces.left();
            }
            writer.enter_tcp(&self.here, &self.path, false).unwrap();
            if !writer.send_again(&self.here, &self.path).unwrap() {
                return len - pieces.left();
            }
        }
        len - pieces.left() + self.path.push(&bytes[len - pieces.left()..])
    }

    fn receive(&self, reader: &mut Reader, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let list = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len }];
        // SAFETY: of a vector of ours.
        let mut pieces = unsafe { Pieces::new(&list) }.unwrap();
        // SAFETY: of a vector of ours.
        let n = unsafe { reader.read(&self.there, &self.path, &mut pieces) }.unwrap();
        bytes.truncate(n);
        bytes
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // SAFETY: nothing uses them any more.
        unsafe { (self.here.unmap(), self.there.unmap()) };
    }
}

fn check(bytes: &[u8], at: &mut u64, why: &str) {
    for &got in bytes {
        assert_eq!(got, byte(*at), "{why}, at byte {at}");
        *at += 1;
    }
}

fn seeds() -> u64 {
    std::env::var("THRUWAY_RELAY_SEEDS").map_or(3000, |seeds| seeds.parse().unwrap())
}

#[test]
fn bytes_come_once_and_in_order_between_hosts() {
    let (mut closed, mut missed, mut slept, mut by_ring) = (0, 0, 0, 0u64);
    for seed in 0..seeds() {
        let world = World::new(seed);
        let why = &format!("seed {seed}");
        let (mut writer, mut reader) = (Writer::new(End::Taker), Reader::new(End::Taker, 0));
        let (mut sent, mut got) = (0u64, 0u64);
        let (mut sleeps, mut is_closed, mut is_plain) = (false, false, false);
        let mut waits_for = WakeBy::Doorbell;
        let mut closing = (world.random(3) == 0).then(|| world.random(600));
        for step in 0..600 {
            match world.random(16) {
                0 => reader.set_ready(&world.there, &world.path),
                1..=3 => {
                    let len = 1 + world.random(if world.random(2) == 0 { 64 } else { 6000 }) as usize;
                    sent += world.send(&mut writer, sent, len, world.random(4) > 0) as u64;
                    by_ring += u64::from(!writer.is_tcp());
                }
                4..=6 if !is_plain => {
                    if sleeps && !world.wakes(waits_for) {
                        continue;
                    }
                    sleeps = false;
                    reader.disarm(&world.there);
                    let len = 1 + world.random(if world.random(2) == 0 { 64 } else { 9000 }) as usize;
                    let bytes = world.receive(&mut reader, len);
                    check(&bytes, &mut got, why);
                    if bytes.is_empty() && !reader.is_explained(&world.there, &world.path, false).unwrap() {
                        // What a call does then: it waits for the word that explains it.
                        world.settle();
                        assert!(reader.is_explained(&world.there, &world.path, false).unwrap(), "{why}, step {step}");
                    }
                }
                7 if !is_plain => {
                    // A thread that is about to sleep has found nothing, and knows why.
                    let is_quiet = reader.find(&world.there, &world.path).unwrap() == Found::Nothing
                        && reader.is_explained(&world.there, &world.path, false).unwrap()
                        && reader.find(&world.there, &world.path).unwrap() == Found::Nothing;
                    let by = if world.random(2) == 0 { WakeBy::Waker } else { WakeBy::Doorbell };
                    if is_quiet && reader.arm(&world.there, by).unwrap() {
                        (sleeps, waits_for) = (true, by);
                        slept += 1;
                    }
                }
                8 if world.random(20) == 0 => {
                    world.settle();
                    let is_woken = world.wakes(waits_for);
                    assert!(
                        got == sent || !sleeps || is_woken || is_closed,
                        "{why}, step {step}: sleeps through {got} to {sent}"
                    );
                }
                10 if world.random(4) == 0 && writer.is_settled(&world.here) => {
                    // Before a call that only the kernel can do, which may send nothing.
                    writer.enter_tcp(&world.here, &world.path, false).unwrap();
                }
                9 if closing.is_some_and(|at| step > at) => {
                    closing = None;
                    sleeps = false;
                    let patience = || {
                        let which = world.random(6);
                        world.step(which, true);
                        true
                    };
                    let left = reader.close_ring(&world.there, &world.path, patience).unwrap();
                    if left > 0 {
                        // The hooks reset the connection then.
                        missed += 1;
                        sent = got;
                        break;
                    }
                    closed += 1;
                    is_closed = true;
                    is_plain = world.random(2) == 0;
                    if is_plain {
                        // From here on TCP has the stream and nothing else.
                        let arrived: Vec<u8> = world.path.arrived.borrow_mut().drain(..).collect();
                        check(&arrived, &mut got, why);
                    }
                }
                which => {
                    world.step(u32::from(which as u8) % 6, world.random(2) == 0);
                }
            }
        }
        let mut rounds = 0;
        while got < sent {
            world.settle();
            let is_woken = world.wakes(waits_for);
            // What is in a closed ring comes when its writer, who is called by other means, sends it again.
            assert!(!sleeps || is_woken || is_closed, "{why}: sleeps through {got} to {sent}");
            sleeps = false;
            if is_plain {
                while !writer.send_again(&world.here, &world.path).unwrap() {
                    world.path.deliver(100_000);
                    let arrived: Vec<u8> = world.path.arrived.borrow_mut().drain(..).collect();
                    check(&arrived, &mut got, why);
                }
                world.path.deliver(100_000);
                let arrived: Vec<u8> = world.path.arrived.borrow_mut().drain(..).collect();
                check(&arrived, &mut got, why);
            } else {
                writer.send_again(&world.here, &world.path).unwrap();
                let bytes = world.receive(&mut reader, 5000);
                check(&bytes, &mut got, why);
            }
            rounds += 1;
            assert!(rounds < 1000, "{why}: {got} of {sent}, closed {is_closed}, plain {is_plain}");
        }
        if !is_plain && sent > got {
            continue;
        }
        // The end is believed when everything has come.
        writer.set_ended(&world.here, &world.path);
        world.settle();
        world.path.deliver(100_000);
        assert!(is_plain || reader.is_explained(&world.there, &world.path, true).unwrap(), "{why}: the end");
        assert_eq!(world.there.over(), Over::No);
    }
    let few = seeds() as i32 / 100;
    assert!(closed > few && missed > 0 && slept > few && by_ring > 0, "{closed}, {missed}, {slept}, {by_ring}");
}

/// A writer that leaves nothing to TCP, and waits for room: it is woken when the reader has made some, has closed the ring, or reads no
/// more.
#[test]
fn a_writer_that_waits_for_room_is_woken() {
    let (mut waited, mut closed) = (0, 0);
    for seed in 0..seeds() {
        let world = World::new(seed);
        let why = &format!("seed {seed}");
        let (mut writer, mut reader) = (Writer::new(End::Taker), Reader::new(End::Taker, 0));
        let (mut sent, mut got, mut waits) = (0u64, 0u64, false);
        reader.set_ready(&world.there, &world.path);
        world.settle();
        writer.leave_tcp(&world.here, &world.path).unwrap();
        assert!(!writer.is_tcp(), "{why}");
        for step in 0..400 {
            match world.random(12) {
                0..=2 => {
                    if waits && world.back.woken.get() == 0 {
                        continue;
                    }
                    waits = false;
                    let len = 1 + world.random(3000) as usize;
                    let mut bytes: Vec<u8> = (sent..sent + len as u64).map(byte).collect();
                    let list = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len }];
                    // SAFETY: of a vector of ours.
                    let mut pieces = unsafe { Pieces::new(&list) }.unwrap();
                    // SAFETY: of a vector of ours.
                    sent += unsafe { writer.write(&world.here, &world.path, &mut pieces) }.unwrap() as u64;
                    if pieces.left() > 0 && writer.is_full(&world.here) {
                        world.back.woken.set(0);
                        writer.want_room(&world.here);
                        // Something may come between.
                        world.step(world.random(6), true);
                        waits = writer.is_full(&world.here);
                        waited += u32::from(waits);
                    }
                }
                3..=5 => {
                    let len = 1 + world.random(3000) as usize;
                    check(&world.receive(&mut reader, len), &mut got, why);
                }
                6 if world.random(10) == 0 => {
                    world.settle();
                    let is_woken = !waits || world.back.woken.get() > 0;
                    assert!(is_woken || writer.is_full(&world.here), "{why}, step {step}: waits in vain");
                }
                which => {
                    world.step(which % 6, world.random(2) == 0);
                }
            }
        }
        match world.random(3) {
            0 => reader.set_gone(&world.there, &world.path),
            1 => {
                closed += 1;
                let patience = || {
                    world.step(world.random(6), true);
                    true
                };
                reader.close_ring(&world.there, &world.path, patience).unwrap();
            }
            _ => {
                while got < sent {
                    world.settle();
                    check(&world.receive(&mut reader, 5000), &mut got, why);
                }
            }
        }
        world.settle();
        assert!(!waits || world.back.woken.get() > 0 && !writer.is_full(&world.here), "{why}: waits at the end");
    }
    assert!(waited > seeds() as u32 / 10 && closed > 0, "{waited}, {closed}");
}

/// A world in which the ring is in use, and its ends.
fn in_use() -> (World, Writer, Reader) {
    let world = World::new(1);
    let (mut writer, reader) = (Writer::new(End::Taker), Reader::new(End::Taker, 0));
    reader.set_ready(&world.there, &world.path);
    world.settle();
    assert!(writer.leave_tcp(&world.here, &world.path).unwrap());
    (world, writer, reader)
}

/// The reader closes the ring with unread bytes, and the writer sends them again and ends. The word of that does not arrive. The reader has
/// each byte once: from TCP, and what TCP does not bring from the ring.
#[test]
fn bytes_that_come_again_without_a_word_of_it_come_once() {
    // How many come again, how many the reader takes at a time, and whether it has looked at the last ones before it closed the ring.
    let cases = [0, 20, 60].into_iter().flat_map(|resent| [10, 200].map(|piece| (resent, piece)));
    for (resent, piece, has_looked) in
        cases.flat_map(|(resent, piece)| [true, false].map(|looked| (resent, piece, looked)))
    {
        let why = format!("{resent} bytes come again, read by {piece}, seen before: {has_looked}");
        let (mut world, mut writer, mut reader) = in_use();
        let mut got = 0;
        assert_eq!(
            world.send(&mut writer, 0, if has_looked { 100 } else { 40 }, false) as u64,
            if has_looked { 100 } else { 40 }
        );
        world.settle();
        check(&world.receive(&mut reader, 40), &mut got, &why);
        if !has_looked {
            assert_eq!(world.send(&mut writer, 40, 60, false), 60);
            world.settle();
        }
        let patience = || {
            world.settle();
            true
        };
        reader.close_ring(&world.there, &world.path, patience).unwrap();
        world.path.capacity = resent;
        let _ = writer.send_again(&world.here, &world.path).unwrap();
        world.path.deliver(usize::MAX);
        world.there.set_over(Over::Finished);
        let mut bytes = vec![0; piece];
        let list = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: piece }];
        // SAFETY: of a vector of ours.
        let mut pieces = unsafe { Pieces::new(&list) }.unwrap();
        // SAFETY: of a vector of ours.
        let len = unsafe { reader.read_unexpected(&world.there, &world.path, &mut pieces, false) }.unwrap();
        assert_eq!(len, resent.min(piece), "{why}");
        check(&bytes[..len], &mut got, &why);
        while world.path.available().unwrap() > 0 {
            check(&world.receive(&mut reader, piece), &mut got, &why);
        }
        assert_eq!(reader.reclaim(&world.there), resent < 60, "{why}");
        check(&world.receive(&mut reader, 200), &mut got, &why);
        assert_eq!(got, 100, "{why}");
    }
}

/// A doorbell could meet a reader that closes the connection, and reset it: only a reader that nothing else wakes is rung.
#[test]
fn a_call_rings_only_where_nothing_else_wakes() {
    for by in [None, Some(WakeBy::Waker), Some(WakeBy::Doorbell)] {
        let (world, mut writer, mut reader) = in_use();
        assert_eq!(world.send(&mut writer, 0, 100, false), 100);
        world.settle();
        world.path.deliver(usize::MAX);
        let _ = reader.discard_doorbells(&world.there, &world.path);
        check(&world.receive(&mut reader, 100), &mut 0, "before");
        let _ = reader.discard_doorbells(&world.there, &world.path);
        reader.disarm(&world.there);
        world.settle();
        if let Some(by) = by {
            assert!(reader.arm(&world.there, by).unwrap());
        }
        world.settle();
        assert_eq!(world.path.available().unwrap(), 0);
        world.path.woken.set(0);
        writer.call(&world.here, &world.path);
        assert!(!writer.is_settled(&world.here), "the call has not come");
        world.settle();
        let woken = (world.path.available().unwrap(), world.path.woken.get() > 0);
        match by {
            None => assert_eq!(woken, (0, false)),
            // Where the waker fails, a doorbell rings.
            Some(WakeBy::Waker) => assert!(woken.1 || woken.0 == 1, "{woken:?}"),
            Some(WakeBy::Doorbell) => assert_eq!(woken.0, 1),
        }
        assert!(writer.is_settled(&world.here));
    }
}

#[test]
fn what_a_peer_must_not_say_is_refused_and_does_nothing() {
    let world = World::new(1);
    let mut inlet = Inlet::default();
    let good =
        Update { tail: 0, end: 10, run: None, closed: None, ended: false, for_good: false, call: false, ringing: 0 };
    inlet.apply(&world.there, &good, &[]).unwrap();
    let some = [7; 100];
    let size = RING_MIN as u64;
    for (update, bytes) in [
        // More than the ring has room for; other than it says; back.
        (Update { tail: size + 1, ..good }, &vec![0; RING_MIN + 1][..]),
        (Update { tail: 99, ..good }, &some[..]),
        (Update { tail: u64::MAX, ..good }, &some[..]),
        // A run that ends elsewhere, or begins before the last has ended.
        (Update { end: 11, ..good }, &[]),
        (Update { run: Some((1, 20)), ..good }, &[]),
        (Update { run: Some((0, 9)), ..good }, &[]),
        (Update { run: Some((0, u64::MAX)), ..good }, &[]),
    ] {
        assert_eq!(inlet.apply(&world.there, &update, bytes), Err(Broken), "{update:?}");
    }
    inlet.apply(&world.there, &Update { tail: 100, ringing: 1, ..good }, &some).unwrap();
    assert_eq!(inlet.apply(&world.there, &Update { tail: 100, ..good }, &[]), Err(Broken), "fewer doorbells");
    // More runs than there is room for.
    let mut end = 10;
    for n in 1.. {
        let update = Update { tail: 100, end, run: Some((100, 20 * n)), ringing: 1, ..good };
        let applied = inlet.apply(&world.there, &update, &[]);
        if n as usize >= RUNS {
            assert_eq!(applied, Err(Broken));
            break;
        }
        applied.unwrap();
        end = 20 * n + 5;
    }
    // A reader's end that has read what was not sent.
    let mut outlet = Outlet::default();
    let nothing = Feedback { opened: 1, ..Feedback::default() };
    outlet.receive(&world.here, &nothing).unwrap();
    for lie in [
        Feedback { head: 1, ..nothing },
        Feedback { tail: 1, ..nothing },
        Feedback { opened: 2, ..nothing },
        Feedback { done: 2, ..nothing },
    ] {
        assert_eq!(outlet.receive(&world.here, &lie), Err(Broken), "{lie:?}");
    }
    assert_eq!(Update::decode(&[0; UPDATE_HEAD - 1]).unwrap_err(), Broken);
    assert_eq!(Feedback::decode(&[0; FEEDBACK_LEN + 1]).unwrap_err(), Broken);
}

#[test]
fn a_process_or_a_peer_that_scribbles_over_everything_does_no_harm() {
    for seed in 0..200u64 {
        let mut random = fastrand::Rng::with_seed(seed);
        let world = World::new(seed);
        let (mut outlet, mut inlet) = (Outlet::default(), Inlet::default());
        for _ in 0..300 {
            let control = if random.bool() { world.here.control(1) } else { world.there.control(0) };
            let word = if random.bool() { random.u64(..) } else { random.u64(0..40_000) };
            match random.u32(0..10) {
                0 => control.tail.store(word, Ordering::Relaxed),
                1 => control.head.store(word, Ordering::Relaxed),
                2 => control.opened.store(word as u32, Ordering::Relaxed),
                3 => control.done.store(word as u32, Ordering::Relaxed),
                4 => control.runs[random.usize(0..RUNS)].ring.store(word, Ordering::Relaxed),
                5 => control.runs[random.usize(0..RUNS)].end.store(word, Ordering::Relaxed),
                6 => control.bell.store(word as u32 % 4, Ordering::Relaxed),
                7 => control.room_wanted.store(word as u32, Ordering::Relaxed),
                _ => control.close_wanted.store(word as u32, Ordering::Relaxed),
            }
            outlet.serve(&world.here, || random.bool());
            let mut out = Vec::new();
            let _ = outlet.take(&world.here, 5000, &mut out);
            if random.bool() {
                let len = random.usize(0..200);
                out = std::iter::repeat_with(|| random.u8(..)).take(len).collect();
            }
            if let Ok((update, bytes)) = Update::decode(&out) {
                let _ = inlet.apply(&world.there, &update, bytes);
                inlet.wake(&world.there, || random.bool());
                outlet.wake(&world.here, random.bool(), || true);
            }
            if let Ok(Some(feedback)) = inlet.feedback(&world.there, random.bool()) {
                let _ = outlet.receive(&world.here, &feedback);
            }
        }
    }
}

/// A writer, a reader that sleeps whenever it has found nothing, and the relays between them, each a thread of its own: a wake-up that
/// is lost ends the test.
#[test]
fn no_wake_up_is_lost_between_hosts() {
    for seed in 0..8u64 {
        let world = World::new(seed);
        let (here, there) = (world.here, world.there);
        let tcp = Fake::new(if seed % 2 == 0 { 1 << 20 } else { 3000 });
        let total = 60_000u64;
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = fastrand::Rng::with_seed(seed);
                let mut writer = Writer::new(End::Taker);
                let mut sent = 0u64;
                while sent < total {
                    let limit = if random.u32(0..20) == 0 { 5000 } else { 100 };
                    let len = random.u64(1..limit).min(total - sent);
                    let mut bytes: Vec<u8> = (sent..sent + len).map(byte).collect();
                    let list = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
                    // SAFETY: of a vector of ours.
                    let mut pieces = unsafe { Pieces::new(&list) }.unwrap();
                    if writer.is_tcp() {
                        writer.leave_tcp(&here, &tcp).unwrap();
                    }
                    if !writer.is_tcp() {
                        // SAFETY: of a vector of ours.
                        unsafe { writer.write(&here, &tcp, &mut pieces) }.unwrap();
                    }
                    let mut done = len as usize - pieces.left();
                    if pieces.left() > 0 && writer.is_settled(&here) {
                        writer.enter_tcp(&here, &tcp, false).unwrap();
                        done += tcp.send(&bytes[done..]);
                    }
                    sent += done as u64;
                    // Mostly the reader has caught up, and sleeps.
                    for _ in 0..random.u32(0..30) {
                        std::thread::yield_now();
                    }
                }
            });
            scope.spawn(|| {
                let (mut outlet, mut inlet) = (Outlet::default(), Inlet::default());
                while !is_over.load(Ordering::Relaxed) {
                    outlet.serve(&here, || tcp.send(&[0]) == 1);
                    let mut out = Vec::new();
                    if outlet.take(&here, 3000, &mut out).unwrap() {
                        let (update, bytes) = Update::decode(&out).unwrap();
                        inlet.apply(&there, &update, bytes).unwrap();
                    }
                    inlet.wake(&there, || {
                        tcp.wake();
                        true
                    });
                    if let Some(feedback) = inlet.feedback(&there, true).unwrap() {
                        outlet.receive(&here, &feedback).unwrap();
                    }
                    std::thread::yield_now();
                }
            });
            let mut reader = Reader::new(End::Taker, 0);
            reader.set_ready(&there, &tcp);
            let mut got = 0;
            while got < total {
                let mut bytes = vec![0; 700];
                let list = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
                // SAFETY: of a vector of ours.
                let mut pieces = unsafe { Pieces::new(&list) }.unwrap();
                // SAFETY: of a vector of ours.
                let len = unsafe { reader.read(&there, &tcp, &mut pieces) }.unwrap();
                check(&bytes[..len], &mut got, "threads");
                let by = if fastrand::bool() { WakeBy::Waker } else { WakeBy::Doorbell };
                if len == 0 && reader.is_explained(&there, &tcp, false).unwrap() && reader.arm(&there, by).unwrap() {
                    let is_woken = tcp.sleep(by);
                    is_over.fetch_or(!is_woken, Ordering::Relaxed);
                    assert!(is_woken, "seed {seed}: sleeps through what comes after {got}");
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
}
