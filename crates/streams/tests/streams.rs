//! Streams over real devices: user-space iWARP, and shared memory.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use thruway_fabric::{Access, Buffer, Provider, iwarp, shm, verbs};
use thruway_streams::{Connection, Context, Error, OnWrite, Received, RemoteRegion, Scheme, Settings};

const TOKEN: &[u8] = b"0123456789abcdef";
const LIMIT: Duration = Duration::from_secs(20);

/// What two ends run over.
struct Lab {
    client: Provider,
    server: Provider,
    at: IpAddr,
}

/// Those of this machine, or what the guest's tests ask for: `iwarp`, or the name of an RDMA device.
fn labs() -> Vec<Lab> {
    let Ok(server) = std::env::var("THRUWAY_STREAMS_SERVER") else {
        let at = [127, 0, 0, 1].into();
        let both = |provider: Provider| Lab { client: provider.clone(), server: provider, at };
        return vec![both(iwarp::Config::default().into()), both(shm::Config::default().into())];
    };
    let provider = |name: String| match name.as_str() {
        "iwarp" => iwarp::Config::default().into(),
        _ => Provider::Verbs(verbs::Config { device: Some(name) }),
    };
    let client = std::env::var("THRUWAY_STREAMS_CLIENT").expect("THRUWAY_STREAMS_CLIENT");
    let at = std::env::var("THRUWAY_VERBS_ADDRESS").expect("THRUWAY_VERBS_ADDRESS").parse().unwrap();
    vec![Lab { client: provider(client), server: provider(server), at }]
}

impl Lab {
    fn contexts(&self) -> (Context, Context) {
        (Context::open(&self.server).unwrap(), Context::open(&self.client).unwrap())
    }

    fn has_atomics(&self) -> bool {
        let (server, client) = self.contexts();
        // siw has none, which its user-space peer cannot know.
        server.device().attributes().atomics && client.device().attributes().atomics
    }
}

/// siw takes a port for each connection without asking whether a TCP socket has it: then another is tried.
fn connect(client: &Context, at: SocketAddr, settings: &Settings) -> Connection {
    loop {
        match client.connect(at, settings, TOKEN, LIMIT) {
            Err(error) if error.to_string().contains("Address already in use") => {}
            connected => return connected.unwrap(),
        }
    }
}

/// Two ends, in contexts of their own.
fn pair(lab: &Lab, one: &Settings, other: &Settings) -> (Connection, Connection) {
    let (server, client) = lab.contexts();
    let listener = server.listen((lab.at, 0).into()).unwrap();
    let at = listener.local_addr();
    let one = *one;
    let connecting = std::thread::spawn(move || connect(&client, at, &one));
    let accepted = server.accept(other, TOKEN, LIMIT).unwrap();
    (connecting.join().unwrap(), accepted)
}

fn deadline() -> Option<Instant> {
    Some(Instant::now() + LIMIT)
}

/// Where bytes differ, and whether they are others of the same.
fn difference(got: &[u8], expected: &[u8]) -> String {
    if got.len() != expected.len() {
        return format!("{} of {} bytes", got.len(), expected.len());
    }
    let mut runs = Vec::new();
    let mut at = 0;
    while let Some(from) = (at..got.len()).find(|&n| got[n] != expected[n]) {
        // Bytes that happen to be the same do not end a run.
        let to = (from..got.len()).find(|&n| n + 8 > got.len() || got[n..n + 8] == expected[n..n + 8]);
        let to = to.unwrap_or(got.len());
        let word = &got[from..(from + 8).min(got.len())];
        let place = expected.windows(word.len()).position(|other| other == word);
        runs.push(format!("{from}..{to} (those of {place:?})"));
        at = to.max(from + 1);
        if runs.len() > 20 {
            break;
        }
    }
    format!("other bytes: {}", runs.join(", "))
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

/// What is not copied is not copied in the end, either, on a machine that has other things to do.
fn patient(settings: Settings) -> Settings {
    Settings { source_timeout: LIMIT, ..settings }
}

fn small(scheme: Scheme) -> Settings {
    let settings = Settings::of(scheme);
    let receive_len = settings.receive_len.min(4096);
    Settings { credits: 4, receive_len, zero_copy_min: 5000, ring_len: 8192, stage_len: 10_000, ..settings }
}

#[test]
fn bytes_arrive_by_every_scheme_in_both_directions() {
    for lab in labs() {
        for scheme in Scheme::ALL {
            for settings in [Settings::of(scheme), small(scheme)].map(patient) {
                let (a, b) = pair(&lab, &settings, &settings);
                let there = pattern(1, 3_000_000);
                let back = pattern(2, 2_000_000);
                std::thread::scope(|scope| {
                    let send = |from: &Connection, bytes: &[u8], seed| {
                        let mut rng = fastrand::Rng::with_seed(seed);
                        let mut rest = bytes;
                        while !rest.is_empty() {
                            let most = if rng.bool() { 300 } else { 400_000 };
                            let (part, after) = rest.split_at(rng.usize(1..most).min(rest.len()));
                            // Without a deadline, large ones are not copied.
                            from.send(part, None).unwrap_or_else(|e| panic!("{scheme:?}: {e}"));
                            rest = after;
                        }
                        from.shutdown();
                    };
                    let receive = |to: &Connection, bytes: &[u8], seed| {
                        let mut rng = fastrand::Rng::with_seed(seed);
                        let mut got: Vec<u8> = Vec::new();
                        loop {
                            let most = if rng.bool() { 100 } else { 500_000 };
                            let mut part = vec![0; rng.usize(1..most)];
                            match to
                                .recv(&mut part, if rng.bool() { None } else { deadline() })
                                .unwrap_or_else(|e| panic!("{scheme:?}, {:?}: {e}", to.info()))
                            {
                                0 => break,
                                len => got.extend(&part[..len]),
                            }
                        }
                        assert!(got == bytes, "{scheme:?}: {}", difference(&got, bytes));
                    };
                    let (a, b, there, back) = (&a, &b, &there, &back);
                    scope.spawn(move || send(a, there, 3));
                    scope.spawn(move || send(b, back, 4));
                    scope.spawn(move || receive(b, there, 5));
                    receive(a, back, 6);
                });
                let (first, second) = (a.counters(), b.counters());
                assert_eq!(first.bytes_copied + first.bytes_zero_copy, 3_000_000, "{scheme:?}: {first:?}");
                assert_eq!(second.bytes_copied + second.bytes_zero_copy, 2_000_000, "{scheme:?}: {second:?}");
                // Where both ends are sending, large buffers may be copied after all.
                let may = matches!(scheme, Scheme::Rendezvous | Scheme::ZeroCopy | Scheme::Adaptive);
                assert!(may || first.bytes_zero_copy == 0, "{scheme:?}: {first:?}");
                a.close(deadline()).unwrap();
                b.close(deadline()).unwrap();
            }
        }
    }
}

#[test]
fn messages_keep_their_boundaries() {
    for lab in labs() {
        for scheme in Scheme::ALL {
            let settings = Settings { messages: true, ..small(scheme) };
            let (a, b) = pair(&lab, &patient(settings), &settings);
            let lens = [0, 1, 0, 100, 4999, 5000, 20_000, 3, 0, 7000];
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for (n, &len) in lens.iter().enumerate() {
                        a.send(&pattern(n as u64, len), None).unwrap();
                    }
                    a.shutdown();
                });
                for (n, &len) in lens.iter().enumerate() {
                    let mut to = vec![0; 20_000];
                    let received = b.recv_message(&mut to, None).unwrap();
                    assert_eq!(received, Some(Received { len, truncated: false }), "{scheme:?}, message {n}");
                    assert!(to[..len] == pattern(n as u64, len)[..], "{scheme:?}, message {n}: other bytes");
                }
                assert_eq!(b.recv_message(&mut [0; 10], deadline()).unwrap(), None);
            });
            let zero_copy = matches!(scheme, Scheme::Rendezvous | Scheme::ZeroCopy | Scheme::Adaptive);
            assert_eq!(a.counters().bytes_zero_copy, if zero_copy { 32_000 } else { 0 }, "{scheme:?}");
            // One that is too long for its receiver is cut, and the next is whole.
            b.send(&pattern(1, 9000), deadline()).unwrap();
            b.send(b"next", deadline()).unwrap();
            let mut to = [0; 10];
            assert_eq!(a.recv_message(&mut to, deadline()).unwrap(), Some(Received { len: 10, truncated: true }));
            assert_eq!(to[..], pattern(1, 9000)[..10]);
            assert_eq!(a.recv_message(&mut to, deadline()).unwrap(), Some(Received { len: 4, truncated: false }));
        }
    }
}

/// As over TCP: neither end reads before it has sent.
#[test]
fn two_ends_that_send_before_they_receive_do_not_wait_for_ever() {
    for lab in labs() {
        for scheme in [Scheme::Rendezvous, Scheme::Adaptive] {
            let settings = Settings::of(scheme);
            let (a, b) = pair(&lab, &settings, &settings);
            let bytes = pattern(9, 600_000);
            std::thread::scope(|scope| {
                for end in [&a, &b] {
                    scope.spawn(|| {
                        end.send(&bytes, None).unwrap();
                        let mut got = vec![0; bytes.len()];
                        let mut len = 0;
                        while len < got.len() {
                            len += end.recv(&mut got[len..], None).unwrap();
                        }
                        assert!(got == bytes);
                    });
                }
            });
        }
    }
}

#[test]
fn one_sided_operations_need_nothing_of_the_peer_program() {
    for lab in labs() {
        let settings = Settings::of(Scheme::Adaptive);
        let (a, b) = pair(&lab, &settings, &settings);
        let target = Arc::new(Buffer::new(1 << 20).unwrap());
        let mut all = Access::REMOTE_READ | Access::REMOTE_WRITE;
        all.set(Access::REMOTE_ATOMIC, lab.has_atomics());
        let lent = b.register_buffer(&target, all).unwrap();
        b.send(&lent.remote().encode(), deadline()).unwrap();
        let mut description = [0; thruway_streams::REMOTE_REGION_LEN];
        assert_eq!(a.recv(&mut description, deadline()).unwrap(), description.len());
        let remote = RemoteRegion::decode(&description);
        assert_eq!(remote, lent.remote());

        let own = Arc::new(Buffer::new(1 << 20).unwrap());
        let mine = a.register_buffer(&own, Access::empty()).unwrap();
        own.write(0, &pattern(1, 300_000));
        a.put_wait((&mine, 0), (&remote, 4096), 300_000).unwrap();
        a.flush_wait(&remote).unwrap();
        let mut seen = vec![0; 300_000];
        target.read(4096, &mut seen);
        assert!(seen == pattern(1, 300_000));
        a.get_wait((&mine, 500_000), (&remote, 4096), 300_000).unwrap();
        own.read(500_000, &mut seen);
        assert!(seen == pattern(1, 300_000));

        if lab.has_atomics() {
            assert_eq!(a.fetch_add_wait((&remote, 8), 5).unwrap(), 0);
            assert_eq!(a.fetch_add_wait((&remote, 8), 7).unwrap(), 5);
            assert_eq!(a.compare_swap_wait((&remote, 8), 12, 100).unwrap(), 12);
            assert_eq!(a.compare_swap_wait((&remote, 8), 12, 200).unwrap(), 100);
            // Many at a time, with contexts that tell them apart.
            for context in 0..40 {
                a.fetch_add((&remote, 16), 1, context).unwrap();
            }
            let mut done = Vec::new();
            while done.len() < 40 {
                done.extend(a.wait_completions(100, deadline()).unwrap());
            }
            assert!(done.iter().enumerate().all(|(n, done)| done.context == n as u64 && done.value == n as u64));
        }

        // Outside, here and there.
        let outside = a.put_wait((&mine, 1 << 20), (&remote, 0), 1).unwrap_err();
        assert!(matches!(outside, Error::OutsideRegion { .. }), "{outside}");
        let lie = RemoteRegion { len: 1 << 30, ..remote };
        let refused = a.get_wait((&mine, 0), (&lie, 1 << 20), 100).unwrap_err();
        // That ends the connection, which may be known first.
        assert!(matches!(refused, Error::Operation(_) | Error::Ended(_)), "{refused}");
    }
}

/// The peer has the bytes when a call that waits for a put returns, also without the right to read them back; or the call fails.
#[test]
fn a_put_that_is_waited_for_has_come_or_is_an_error() {
    for lab in labs() {
        for case in ["taken", "another key", "beyond the end", "read-only", "unregistered"] {
            let settings = Settings { messages: true, ..Settings::of(Scheme::Adaptive) };
            let (a, b) = pair(&lab, &settings, &settings);
            let target = Arc::new(Buffer::new(4096).unwrap());
            let access = if case == "read-only" { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
            let lent = b.register_buffer(&target, access).unwrap();
            let own = Arc::new(Buffer::new(4096).unwrap());
            own.write(0, b"here");
            let mine = a.register_buffer(&own, Access::empty()).unwrap();
            let mut remote = lent.remote();
            let mut offset = 0;
            match case {
                "another key" => remote.key ^= 1 << 20,
                "beyond the end" => (remote.len, offset) = (1 << 20, 4096),
                "unregistered" => lent.close(),
                _ => {}
            }
            let done = a.put_wait((&mine, 0), (&remote, offset), 4);
            let mut seen = [0; 4];
            target.read(0, &mut seen);
            match case {
                "taken" => assert!(done.is_ok() && &seen == b"here", "{done:?}"),
                _ => assert!(
                    matches!(done, Err(Error::Operation(_) | Error::Ended(_))) && seen == [0; 4],
                    "{case}: {done:?}"
                ),
            }
        }
    }
}

/// What follows a put is read behind it.
#[test]
fn a_message_behind_a_put_says_that_it_is_there() {
    for lab in labs() {
        let settings = Settings { messages: true, ..Settings::of(Scheme::Adaptive) };
        let (a, b) = pair(&lab, &settings, &settings);
        let target = Arc::new(Buffer::new(4096).unwrap());
        let lent = b.register_buffer(&target, Access::REMOTE_WRITE).unwrap();
        let own = Arc::new(Buffer::new(4096).unwrap());
        let mine = a.register_buffer(&own, Access::empty()).unwrap();
        for round in 0..500u32 {
            own.write(0, &round.to_ne_bytes());
            a.put((&mine, 0), (&lent.remote(), 0), 4, 0).unwrap();
            a.send(b"!", deadline()).unwrap();
            assert_eq!(a.wait_completions(1, deadline()).unwrap().len(), 1);
            b.recv_message(&mut [0; 1], deadline()).unwrap();
            let mut seen = [0; 4];
            target.read(0, &mut seen);
            assert_eq!(u32::from_ne_bytes(seen), round);
            b.send(b"?", deadline()).unwrap();
            a.recv_message(&mut [0; 1], deadline()).unwrap();
        }
    }
}

#[test]
fn calls_that_may_not_wait_say_so_and_the_descriptor_tells_when_to_try_again() {
    for lab in labs() {
        let settings = small(Scheme::Packetized);
        let (a, b) = pair(&lab, &settings, &settings);
        let any_readable = |ends: &[&Connection], seconds: i64| {
            let fds = ends.iter().map(|end| end.descriptor().unwrap());
            let mut fds: Vec<_> =
                fds.map(|fd| rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)).collect();
            let limit = rustix::time::Timespec { tv_sec: seconds, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&limit)).unwrap() > 0
        };
        let readable = |end: &Connection, seconds| any_readable(&[end], seconds);
        let mut to = vec![0; 100_000];
        b.silence();
        assert!(readable(&b, 0), "the first look is worth it");
        b.silence();
        assert!(matches!(b.try_recv(&mut to), Err(Error::WouldBlock)));
        assert!(!readable(&b, 0));
        let bytes = pattern(7, 60_000);
        let (mut sent, mut got) = (0, Vec::<u8>::new());
        assert!(readable(&a, 0));
        while got.len() < bytes.len() {
            a.silence();
            match a.try_send(&bytes[sent..]) {
                Ok(len) => sent += len,
                Err(Error::WouldBlock) if sent < bytes.len() => {}
                Err(error) => panic!("{error}"),
            }
            b.silence();
            loop {
                match b.try_recv(&mut to) {
                    Ok(len) => got.extend(&to[..len]),
                    Err(Error::WouldBlock) => break,
                    Err(error) => panic!("{error}"),
                }
            }
            // What has come since the last look may be what the sender waits for to be taken.
            let is_over = got.len() == bytes.len();
            assert!(is_over || any_readable(&[&a, &b], 20), "{sent} sent, {} received", got.len());
        }
        assert!(got == bytes);
    }
}

#[test]
fn deadlines_are_kept_and_do_no_harm() {
    for lab in labs() {
        for scheme in Scheme::ALL {
            let settings = small(scheme);
            let (a, b) = pair(&lab, &settings, &settings);
            let soon = || Some(Instant::now() + Duration::from_millis(30));
            let mut to = vec![0; 200_000];
            assert!(matches!(b.recv(&mut to, soon()), Err(Error::TimedOut)), "{scheme:?}");
            a.send(b"later", deadline()).unwrap();
            assert_eq!(b.recv(&mut to, deadline()).unwrap(), 5, "{scheme:?}");
            // Without a reader, what cannot be stored is not sent, and what was is not lost.
            let bytes = pattern(3, 200_000);
            assert!(matches!(a.send(&bytes, soon()), Err(Error::TimedOut)), "{scheme:?}");
            a.shutdown();
            let mut got: Vec<u8> = Vec::new();
            loop {
                match b.recv(&mut to, deadline()).unwrap() {
                    0 => break,
                    len => got.extend(&to[..len]),
                }
            }
            assert!(got.len() < bytes.len() && got == bytes[..got.len()], "{scheme:?}: {} bytes", got.len());
        }
    }
}

#[test]
fn an_end_that_goes_without_a_word_is_seen() {
    for lab in labs() {
        let settings = Settings::of(Scheme::Adaptive);
        let (a, b) = pair(&lab, &settings, &settings);
        a.send(b"last words", deadline()).unwrap();
        let mut to = [0; 100];
        assert_eq!(b.recv(&mut to, deadline()).unwrap(), 10);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| b.recv(&mut [0; 100], deadline()));
            drop(a);
            assert!(matches!(waits.join().unwrap(), Err(Error::Ended(_) | Error::Reset)));
        });
        assert!(b.send(b"into the void", deadline()).is_err());
    }
}

#[test]
fn ends_that_want_different_things_are_told_apart() {
    let lab = labs().remove(0);
    let (server, client) = lab.contexts();
    let listener = server.listen((lab.at, 0).into()).unwrap();
    let at = listener.local_addr();
    let bytes = Settings::of(Scheme::Adaptive);
    let connecting = std::thread::spawn(move || client.connect(at, &bytes, TOKEN, LIMIT).err().expect("refused"));
    let messages = Settings { messages: true, ..bytes };
    assert!(matches!(server.accept(&messages, TOKEN, LIMIT), Err(Error::Mismatch(_))));
    let refused = connecting.join().unwrap().to_string();
    assert!(refused.contains("messages"), "{refused}");
    // A request with another token is another's.
    let nothing = server.accept(&messages, b"another token...", Duration::from_millis(20));
    assert!(matches!(nothing, Err(Error::TimedOut)));
}

#[test]
fn many_connections_share_a_device_and_threads_wait_for_each() {
    for lab in labs() {
        let settings = Settings { ring_len: 4096, stage_len: 4096, credits: 8, ..Settings::of(Scheme::Adaptive) };
        let pairs = pairs(&lab, &[settings; 120]);
        std::thread::scope(|scope| {
            for (n, (a, b)) in pairs.iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..50 {
                        let mut to = [0; 64];
                        let len = b.recv(&mut to, deadline()).unwrap();
                        assert_eq!(to[..len], [n as u8, round], "connection {n}");
                        b.send(&to[..len], deadline()).unwrap();
                    }
                });
                scope.spawn(move || {
                    for round in 0..50 {
                        a.send(&[n as u8, round], deadline()).unwrap();
                        let mut to = [0; 64];
                        let len = a.recv(&mut to, deadline()).unwrap();
                        assert_eq!(to[..len], [n as u8, round], "connection {n}");
                    }
                });
            }
        });
    }
}

/// Times that this thread has gone to sleep.
fn sleeps_of_this_thread() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

/// Connections between two contexts.
fn pairs(lab: &Lab, settings: &[Settings]) -> Vec<(Connection, Connection)> {
    let (server, client) = lab.contexts();
    let listener = server.listen((lab.at, 0).into()).unwrap();
    let at = listener.local_addr();
    let one = |settings: &Settings| {
        let (client, own) = (client.clone(), *settings);
        let connecting = std::thread::spawn(move || connect(&client, at, &own));
        let accepted = server.accept(settings, TOKEN, LIMIT).unwrap();
        (connecting.join().unwrap(), accepted)
    };
    settings.iter().map(one).collect()
}

/// Returns when this thread of the process sleeps, as far as that can be seen.
fn until_asleep(thread: &AtomicU32) {
    let is_asleep = || {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{}/stat", thread.load(Ordering::SeqCst)));
        stat.is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" S")))
    };
    while !(0..100).all(|_| is_asleep()) {
        std::thread::yield_now();
    }
}

fn note_thread(at: &AtomicU32) {
    let link = std::fs::read_link("/proc/thread-self").unwrap();
    at.store(link.file_name().unwrap().to_str().unwrap().parse().unwrap(), Ordering::SeqCst);
}

/// Where many threads wait on a device, and so most of them only for what concerns their connection: calls of other threads end waits, too.
#[test]
fn a_shutdown_and_a_drop_end_waits_of_other_threads() {
    for lab in labs() {
        let settings = Settings { source_timeout: LIMIT, on_write: OnWrite::Block, ..small(Scheme::ZeroCopy) };
        let settings = Settings { zero_copy_min: 16 << 10, ..settings };
        let mut pairs = pairs(&lab, &[&[small(Scheme::Packetized); 7][..], &[settings]].concat());
        let (dropped, _peer) = pairs.pop().unwrap();
        let mut bytes = vec![7u8; 400_000];
        // What is not protected would be copied, as far as the peer has room.
        let is_protected = thruway_streams::can_protect();
        if is_protected {
            // SAFETY: the buffer outlives the connection.
            unsafe { dropped.send_asynchronously(&bytes, deadline()) }.unwrap();
            assert_eq!(dropped.asynchronous_sends().sends, 1);
        }
        let part = bytes[200_000..].as_mut_ptr() as usize;
        pairs[1].1.send(&[1; 100], None).unwrap();
        let threads: Vec<AtomicU32> = (0..pairs.len()).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            let (pairs, threads) = (&pairs, &threads);
            let mut quiet = Vec::new();
            let mut wait_for_nothing = |which: usize| {
                quiet.push(scope.spawn(move || {
                    note_thread(&threads[which]);
                    pairs[which].0.recv(&mut [0], None)
                }));
                while threads[which].load(Ordering::SeqCst) == 0 {
                    std::thread::yield_now();
                }
                until_asleep(&threads[which]);
            };
            wait_for_nothing(0);
            let receiving = is_protected.then(|| {
                scope.spawn(move || {
                    note_thread(&threads[1]);
                    // SAFETY: nothing else uses this part of the buffer but the send, which this call waits for.
                    pairs[1].0.recv(unsafe { std::slice::from_raw_parts_mut(part as *mut u8, 100) }, None)
                })
            });
            let sending = scope.spawn(move || {
                note_thread(&threads[2]);
                pairs[2].0.send(&[1; 100_000], None)
            });
            (3..pairs.len()).for_each(&mut wait_for_nothing);
            if receiving.is_some() {
                until_asleep(&threads[1]);
            }
            until_asleep(&threads[2]);
            drop(dropped);
            if let Some(receiving) = receiving {
                assert_eq!(receiving.join().unwrap().unwrap(), 100);
            }
            pairs[2].0.shutdown();
            assert!(matches!(sending.join().unwrap(), Err(Error::Shutdown)));
            for (which, waiting) in [0, 3, 4, 5, 6].into_iter().zip(quiet) {
                pairs[which].1.send(&[1], None).unwrap();
                assert_eq!(waiting.join().unwrap().unwrap(), 1);
            }
        });
        drop(bytes);
    }
}

#[test]
fn a_message_wakes_only_threads_that_wait_for_it() {
    for lab in labs() {
        let settings = Settings { ring_len: 4096, stage_len: 4096, credits: 8, ..Settings::of(Scheme::Adaptive) };
        let idle = 20;
        let pairs = pairs(&lab, &vec![settings; idle + 1]);
        let (busy, quiet) = pairs.split_first().unwrap();
        let rounds = 1000;
        let mut sleeps: Vec<u64> = std::thread::scope(|scope| {
            let waiting: Vec<_> = quiet
                .iter()
                .map(|(_, b)| {
                    scope.spawn(|| {
                        let before = sleeps_of_this_thread();
                        assert_eq!(b.recv(&mut [0], deadline()).unwrap(), 1);
                        sleeps_of_this_thread() - before
                    })
                })
                .collect();
            scope.spawn(|| {
                for _ in 0..rounds {
                    let len = busy.1.recv(&mut [0; 8], deadline()).unwrap();
                    busy.1.send(&[1; 8][..len], deadline()).unwrap();
                }
            });
            for _ in 0..rounds {
                busy.0.send(&[1], deadline()).unwrap();
                assert_eq!(busy.0.recv(&mut [0], deadline()).unwrap(), 1);
            }
            quiet.iter().for_each(|(a, _)| a.send(&[1], deadline()).unwrap());
            waiting.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        sleeps.sort_unstable();
        // The leader sleeps for all; for the others, other connections' messages are none of their business.
        assert!(sleeps[idle / 2] < rounds / 4, "sleeps of the threads of quiet connections: {sleeps:?}");
    }
}

/// Memory that a program writes to while it is being sent: the peer has what was there when it was sent.
#[test]
fn buffers_that_are_sent_without_waiting_may_be_written_to_at_once() {
    for lab in labs() {
        for on_write in [OnWrite::Block, OnWrite::Copy] {
            for messages in [false, true] {
                let settings = Settings {
                    zero_copy_min: 16 << 10,
                    on_write,
                    faults_max_percent: 100,
                    messages,
                    ..Settings::of(Scheme::ZeroCopy)
                };
                let (a, b) = pair(&lab, &settings, &settings);
                let lens = [300_000, 100_000, 40_000, 300_000, 10, 70_001];
                let rounds = 6;
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        let mut buffer = vec![0u8; 300_000];
                        for round in 0..rounds {
                            for len in lens {
                                // The last send of this buffer may not be over.
                                buffer[..len].copy_from_slice(&pattern(round * 1000 + len as u64, len));
                                // SAFETY: the buffer lives until everything has been sent.
                                unsafe { a.send_asynchronously(&buffer[..len], deadline()) }.unwrap();
                                // Nor is this one, which the next byte is none of.
                                buffer[len / 2] ^= 0xff;
                            }
                        }
                        a.wait_sent(deadline()).unwrap();
                        a.shutdown();
                    });
                    let mut rng = fastrand::Rng::with_seed(1);
                    for round in 0..rounds {
                        for len in lens {
                            let mut got = vec![0; len];
                            if messages {
                                let received = b.recv_message(&mut got, deadline()).unwrap();
                                assert_eq!(received, Some(Received { len, truncated: false }));
                            } else {
                                let mut filled = 0;
                                while filled < len {
                                    let most = rng.usize(1..=len - filled);
                                    filled += b.recv(&mut got[filled..filled + most], deadline()).unwrap();
                                }
                            }
                            assert!(
                                got == pattern(round * 1000 + len as u64, len),
                                "{on_write:?}, {round}, {len}: other bytes"
                            );
                        }
                    }
                });
                let counted = a.asynchronous_sends();
                let some = thruway_streams::can_protect();
                assert_eq!((counted.sends > 0, counted.faults > 0), (some, some), "{on_write:?}: {counted:?}");
            }
        }
    }
}

/// The same buffer again and again, which is not written to: all of it on its way at once.
#[test]
fn a_buffer_may_be_sent_again_while_it_is_being_sent() {
    // Else it is copied, and waits for the reader. Where memory has to be protected, the unit tests see to it that it is.
    if !thruway_streams::can_protect() {
        return;
    }
    for lab in labs() {
        let settings = Settings { zero_copy_min: 16 << 10, ..Settings::of(Scheme::ZeroCopy) };
        let (a, b) = pair(&lab, &settings, &settings);
        let mut bytes = pattern(5, 200_000);
        for _ in 0..8 {
            // SAFETY: the buffer lives until everything has been sent.
            unsafe { a.send_asynchronously(&bytes, deadline()) }.unwrap();
        }
        assert_eq!(a.asynchronous_sends().sends, 8);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let expected = pattern(5, 200_000);
                let mut got = vec![0; 200_000];
                for _ in 0..8 {
                    let mut filled = 0;
                    while filled < got.len() {
                        filled += b.recv(&mut got[filled..], deadline()).unwrap();
                    }
                    assert!(got == expected);
                }
            });
            // Once all of them are over, it is writable; until then, this waits, or all of them are put elsewhere.
            bytes[100_000] ^= 1;
        });
        a.wait_sent(deadline()).unwrap();
        assert_eq!(a.counters().bytes_copied + a.counters().bytes_zero_copy, 1_600_000);
    }
}

#[test]
fn a_thread_that_waits_to_write_goes_on_when_the_connection_ends() {
    for lab in labs() {
        let settings = Settings { zero_copy_min: 16 << 10, on_write: OnWrite::Block, ..Settings::of(Scheme::ZeroCopy) };
        let (a, b) = pair(&lab, &settings, &settings);
        let mut bytes = pattern(5, 200_000);
        // SAFETY: the buffer lives longer than the connection.
        unsafe { a.send_asynchronously(&bytes, deadline()) }.unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| bytes[100_000] ^= 1);
            drop(b);
        });
        // The peer has read nothing, which must not look as if it had.
        let sent = a.wait_sent(deadline());
        assert!(sent.is_err() || !thruway_streams::can_protect(), "{sent:?}");
    }
}

#[test]
fn programs_that_write_too_early_too_often_wait_instead() {
    let lab = labs().remove(0);
    let settings = Settings { zero_copy_min: 16 << 10, ..Settings::of(Scheme::ZeroCopy) };
    let (a, b) = pair(&lab, &settings, &settings);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut to = vec![0; 100_000];
            while b.recv(&mut to, deadline()).unwrap() > 0 {}
        });
        let mut bytes = pattern(5, 100_000);
        for _ in 0..100 {
            // SAFETY: the buffer lives until everything has been sent.
            unsafe { a.send_asynchronously(&bytes, deadline()) }.unwrap();
            bytes[50_000] ^= 1;
        }
        a.wait_sent(deadline()).unwrap();
        a.shutdown();
    });
    let counted = a.asynchronous_sends();
    assert!(counted.sends < 100 && (counted.faults > 0) == thruway_streams::can_protect(), "{counted:?}");
}

/// A context that knows who is to come refuses others at once.
#[test]
fn requests_that_are_not_expected_are_refused() {
    let lab = labs().remove(0);
    let settings = Settings::of(Scheme::Adaptive);
    let (server, client) = lab.contexts();
    let listener = server.listen((lab.at, 0).into()).unwrap();
    let at = listener.local_addr();
    let expected = server.expect(TOKEN);
    let stranger = client.connect(at, &settings, b"another token...", LIMIT).err().expect("refused");
    assert!(stranger.to_string().contains("refused"), "{stranger}");
    let connecting = std::thread::spawn({
        let client = client.clone();
        move || connect(&client, at, &settings)
    });
    // To drop it is to abort it, which the connecting end may meet before it is connected.
    let accepted = server.accept(&settings, TOKEN, LIMIT).unwrap();
    connecting.join().unwrap();
    drop((accepted, expected));
    assert!(client.connect(at, &settings, TOKEN, LIMIT).is_err(), "it has been used");
}

/// One buffer sent several times, and several buffers: all are put elsewhere, one after the other, while the peer reads nothing.
#[test]
fn buffers_are_put_elsewhere_while_the_peer_reads_nothing() {
    if !thruway_streams::can_protect() {
        return;
    }
    for lab in labs() {
        let settings = Settings { zero_copy_min: 16 << 10, ..Settings::of(Scheme::ZeroCopy) };
        let (a, b) = pair(&lab, &settings, &settings);
        let mut buffers: Vec<Vec<u8>> = (0..4).map(|n| pattern(n, 100_000)).collect();
        for buffer in &buffers {
            for _ in 0..2 {
                // SAFETY: the buffers live until everything has been sent.
                unsafe { a.send_asynchronously(buffer, deadline()) }.unwrap();
            }
        }
        std::thread::scope(|scope| {
            for buffer in &mut buffers {
                scope.spawn(|| buffer[50_000] ^= 0xff);
            }
        });
        let mut got = vec![0; 100_000];
        for n in 0..8 {
            let mut filled = 0;
            while filled < got.len() {
                filled += b.recv(&mut got[filled..], deadline()).unwrap();
            }
            assert!(got == pattern(n / 2, 100_000), "{n}");
        }
        a.wait_sent(deadline()).unwrap();
        assert_eq!(a.asynchronous_sends().faults, 8);
    }
}

/// Deadlines and calls that do not wait are kept beside threads that do, and while the peer is in the middle of something.
#[test]
fn nothing_waits_longer_than_it_may() {
    for lab in labs() {
        let settings = Settings { messages: true, ..small(Scheme::Rendezvous) };
        let (a, b) = pair(&lab, &settings, &settings);
        let soon = || Some(Instant::now() + Duration::from_millis(30));
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| a.recv_message(&mut [0; 100], deadline()));
            // It has its turn when the other has none.
            while !matches!(a.try_recv_message(&mut [0; 100]), Err(Error::WouldBlock)) {}
            assert!(matches!(a.recv_message(&mut [0; 100], soon()), Err(Error::TimedOut)));
            b.send(b"x", deadline()).unwrap();
            receiving.join().unwrap().unwrap();
            // A large message, which is read a part at a time by calls that may not wait for all of it.
            let large = pattern(1, 100_000);
            let sending = scope.spawn(move || b.send(&large, None).map(|()| b));
            let mut to = vec![0; 100_000];
            while matches!(a.recv_message(&mut to, soon()), Err(Error::TimedOut)) {}
            let b = sending.join().unwrap().unwrap();
            assert!(to == pattern(1, 100_000));
            // A message of which only a part fits, without a reader.
            let cut = pattern(2, 200_000);
            assert!(matches!(b.send(&cut, soon()), Err(Error::TimedOut)));
            assert!(matches!(b.send(b"behind it", deadline()), Err(Error::MessageCut)), "one message, or two");
            b.shutdown();
            let end = a.recv_message(&mut to, deadline());
            assert!(matches!(end, Err(Error::Reset)), "half a message: {end:?}");
        });
    }
}

/// A message that comes in parts is whole for calls that may not wait for all of it.
#[test]
fn a_message_in_parts_is_one_message() {
    for lab in labs() {
        let settings = Settings { messages: true, ..small(Scheme::Packetized) };
        let (a, b) = pair(&lab, &settings, &settings);
        let message = pattern(3, 100_000);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                a.send(&message, deadline()).unwrap();
                a.send(&message[..50_000], deadline()).unwrap();
            });
            let mut to = vec![0; 100_000];
            let receive = |to: &mut [u8]| {
                loop {
                    match b.try_recv_message(to) {
                        Err(Error::WouldBlock) => std::thread::yield_now(),
                        other => return other.unwrap().expect("a message"),
                    }
                }
            };
            assert_eq!(receive(&mut to), Received { len: 100_000, truncated: false });
            assert!(to == message);
            assert_eq!(receive(&mut to[..10]), Received { len: 10, truncated: true });
            assert_eq!(to[..10], message[..10]);
        });
    }
}

/// Shutting down beside a send that waits for the peer to read.
#[test]
fn a_shutdown_beside_a_send_ends_neither() {
    for lab in labs() {
        let settings = Settings { source_timeout: Duration::from_millis(1), ..small(Scheme::Rendezvous) };
        let (a, b) = pair(&lab, &settings, &settings);
        let bytes = pattern(4, 100_000);
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| a.send(&bytes, None));
            scope.spawn(|| a.shutdown());
            let mut got: Vec<u8> = Vec::new();
            loop {
                let mut part = vec![0; 1000];
                match b.recv(&mut part, deadline()).unwrap() {
                    0 => break,
                    len => got.extend(&part[..len]),
                }
            }
            // All of it, or what was sent before.
            assert!(bytes.starts_with(&got));
            assert_eq!(sending.join().unwrap().is_ok(), got.len() == bytes.len());
        });
    }
}

/// A sender whose patience ends just as the receiver begins.
#[test]
fn sources_that_are_withdrawn_while_they_are_asked_for() {
    for lab in labs() {
        let settings = Settings { source_timeout: Duration::from_micros(100), ..small(Scheme::Rendezvous) };
        let (a, b) = pair(&lab, &settings, &settings);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..300 {
                    a.send(&pattern(round, 20_000), None).unwrap();
                }
            });
            let mut rng = fastrand::Rng::with_seed(1);
            let mut to = vec![0; 20_000];
            for round in 0..300 {
                let mut filled = 0;
                while filled < to.len() {
                    for _ in 0..rng.u32(..3000) {
                        std::hint::spin_loop();
                    }
                    filled += b.recv(&mut to[filled..], None).unwrap();
                }
                assert!(to == pattern(round, 20_000), "{round}");
            }
        });
    }
}

/// Large messages, by calls that never wait, between ends of one context and of two.
#[test]
fn large_messages_come_whole_without_waiting_for_them() {
    for lab in labs() {
        for apart in [true, false] {
            let settings =
                Settings { messages: true, ring_len: 4 << 20, stage_len: 2 << 20, ..Settings::of(Scheme::Adaptive) };
            let (server, mut client) = lab.contexts();
            if !apart {
                client = server.clone();
            }
            let listener = server.listen((lab.at, 0).into()).unwrap();
            let at = listener.local_addr();
            let connecting = std::thread::spawn(move || connect(&client, at, &settings));
            let b = server.accept(&settings, TOKEN, LIMIT).unwrap();
            let a = connecting.join().unwrap();
            let mut buffer = vec![0; 70_000];
            for round in 0..50 {
                let lens = [65_598, 4_526, 26, 66_000];
                for (n, len) in lens.into_iter().enumerate() {
                    let bytes = pattern((round * 4 + n) as u64, len);
                    while let Err(error) = a.try_send(&bytes) {
                        assert!(matches!(error, Error::WouldBlock), "{error}");
                    }
                }
                for (n, len) in lens.into_iter().enumerate() {
                    let until = Instant::now() + LIMIT;
                    let received = loop {
                        match b.try_recv_message(&mut buffer) {
                            Err(Error::WouldBlock) if Instant::now() < until => std::thread::yield_now(),
                            received => break received.unwrap().unwrap(),
                        }
                    };
                    assert_eq!((received.len, received.truncated), (len, false), "round {round}, message {n}");
                    assert!(buffer[..len] == pattern((round * 4 + n) as u64, len), "round {round}, message {n}");
                }
            }
        }
    }
}
