//! Streams over real devices: user-space iWARP, and shared memory.

use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_fabric::{Access, Buffer, Provider, iwarp, shm};
use thruway_streams::{Connection, Context, Error, Received, RemoteRegion, Scheme, Settings};

const TOKEN: &[u8] = b"0123456789abcdef";
const LIMIT: Duration = Duration::from_secs(20);

fn providers() -> [Provider; 2] {
    [iwarp::Config::default().into(), shm::Config::default().into()]
}

/// Two ends, in contexts of their own.
fn pair(provider: &Provider, one: &Settings, other: &Settings) -> (Connection, Connection) {
    let (server, client) = (Context::open(provider).unwrap(), Context::open(provider).unwrap());
    let listener = server.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let at = listener.local_addr();
    let one = *one;
    let connecting = std::thread::spawn(move || client.connect(at, &one, TOKEN, LIMIT).unwrap());
    let accepted = server.accept(other, TOKEN, LIMIT).unwrap();
    (connecting.join().unwrap(), accepted)
}

fn deadline() -> Option<Instant> {
    Some(Instant::now() + LIMIT)
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
    for provider in providers() {
        for scheme in Scheme::ALL {
            for settings in [Settings::of(scheme), small(scheme)].map(patient) {
                let (a, b) = pair(&provider, &settings, &settings);
                let there = pattern(1, 3_000_000);
                let back = pattern(2, 2_000_000);
                std::thread::scope(|scope| {
                    let send = |from: &Connection, bytes: &[u8], seed| {
                        let mut rng = fastrand::Rng::with_seed(seed);
                        let mut rest = bytes;
                        while !rest.is_empty() {
                            let most = if rng.bool() { 300 } else { 400_000 };
                            let (part, after) = rest.split_at(rng.usize(1..most).min(rest.len()));
                            from.send(part, deadline()).unwrap_or_else(|e| panic!("{scheme:?}: {e}"));
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
                                .recv(&mut part, deadline())
                                .unwrap_or_else(|e| panic!("{scheme:?}, {:?}: {e}", to.info()))
                            {
                                0 => break,
                                len => got.extend(&part[..len]),
                            }
                        }
                        assert!(got == bytes, "{scheme:?}: other bytes, {} of {}", got.len(), bytes.len());
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
    for provider in providers() {
        for scheme in Scheme::ALL {
            let settings = Settings { messages: true, ..small(scheme) };
            let (a, b) = pair(&provider, &patient(settings), &settings);
            let lens = [0, 1, 0, 100, 4999, 5000, 20_000, 3, 0, 7000];
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for (n, &len) in lens.iter().enumerate() {
                        a.send(&pattern(n as u64, len), deadline()).unwrap();
                    }
                    a.shutdown();
                });
                for (n, &len) in lens.iter().enumerate() {
                    let mut to = vec![0; 20_000];
                    let received = b.recv_message(&mut to, deadline()).unwrap();
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
    for provider in providers() {
        for scheme in [Scheme::Rendezvous, Scheme::Adaptive] {
            let settings = Settings::of(scheme);
            let (a, b) = pair(&provider, &settings, &settings);
            let bytes = pattern(9, 600_000);
            std::thread::scope(|scope| {
                for end in [&a, &b] {
                    scope.spawn(|| {
                        end.send(&bytes, deadline()).unwrap();
                        let mut got = vec![0; bytes.len()];
                        let mut len = 0;
                        while len < got.len() {
                            len += end.recv(&mut got[len..], deadline()).unwrap();
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
    for provider in providers() {
        let settings = Settings::of(Scheme::Adaptive);
        let (a, b) = pair(&provider, &settings, &settings);
        let target = Arc::new(Buffer::new(1 << 20).unwrap());
        let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
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

        assert_eq!(a.fetch_add_wait((&remote, 8), 5).unwrap(), 0);
        assert_eq!(a.fetch_add_wait((&remote, 8), 7).unwrap(), 5);
        assert_eq!(a.compare_swap_wait((&remote, 8), 12, 100).unwrap(), 12);
        assert_eq!(a.compare_swap_wait((&remote, 8), 12, 200).unwrap(), 100);
        // Many at a time, with what they are told apart by.
        for context in 0..40 {
            a.fetch_add((&remote, 16), 1, context).unwrap();
        }
        let mut done = Vec::new();
        while done.len() < 40 {
            done.extend(a.wait_completions(100, deadline()).unwrap());
        }
        assert!(done.iter().enumerate().all(|(n, done)| done.context == n as u64 && done.value == n as u64));

        // Outside, here and there.
        let outside = a.put_wait((&mine, 1 << 20), (&remote, 0), 1).unwrap_err();
        assert!(matches!(outside, Error::OutsideRegion { .. }), "{outside}");
        let lie = RemoteRegion { len: 1 << 30, ..remote };
        let refused = a.get_wait((&mine, 0), (&lie, 1 << 20), 100).unwrap_err();
        assert!(matches!(refused, Error::Operation(_)), "{refused}");
    }
}

/// What follows a put is read behind it.
#[test]
fn a_message_behind_a_put_says_that_it_is_there() {
    for provider in providers() {
        let settings = Settings { messages: true, ..Settings::of(Scheme::Adaptive) };
        let (a, b) = pair(&provider, &settings, &settings);
        let target = Arc::new(Buffer::new(4096).unwrap());
        let lent = b.register_buffer(&target, Access::REMOTE_WRITE).unwrap();
        let own = Arc::new(Buffer::new(4096).unwrap());
        let mine = a.register_buffer(&own, Access::empty()).unwrap();
        for round in 0..500u32 {
            own.write(0, &round.to_ne_bytes());
            a.put_wait((&mine, 0), (&lent.remote(), 0), 4).unwrap();
            a.send(b"!", deadline()).unwrap();
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
    for provider in providers() {
        let settings = small(Scheme::Packetized);
        let (a, b) = pair(&provider, &settings, &settings);
        let readable = |end: &Connection, limit_ms: i64| {
            let fd = end.descriptor().unwrap();
            let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
            let limit = rustix::time::Timespec { tv_sec: limit_ms / 1000, tv_nsec: limit_ms % 1000 * 1_000_000 };
            rustix::event::poll(&mut fds, Some(&limit)).unwrap() == 1
        };
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
            assert!(readable(&b, 20_000), "{sent} sent, {} received", got.len());
            b.silence();
            loop {
                match b.try_recv(&mut to) {
                    Ok(len) => got.extend(&to[..len]),
                    Err(Error::WouldBlock) => break,
                    Err(error) => panic!("{error}"),
                }
            }
            if sent < bytes.len() {
                assert!(readable(&a, 20_000), "{sent} sent, {} received", got.len());
            }
        }
        assert!(got == bytes);
    }
}

#[test]
fn deadlines_are_kept_and_do_no_harm() {
    for provider in providers() {
        for scheme in Scheme::ALL {
            let settings = small(scheme);
            let (a, b) = pair(&provider, &settings, &settings);
            let soon = || Some(Instant::now() + Duration::from_millis(30));
            let mut to = vec![0; 200_000];
            assert!(matches!(b.recv(&mut to, soon()), Err(Error::TimedOut)), "{scheme:?}");
            a.send(b"later", deadline()).unwrap();
            assert_eq!(b.recv(&mut to, deadline()).unwrap(), 5, "{scheme:?}");
            // Nobody reads: what cannot be stored is not sent, and what was is not lost.
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
    for provider in providers() {
        let settings = Settings::of(Scheme::Adaptive);
        let (a, b) = pair(&provider, &settings, &settings);
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
    let provider: Provider = iwarp::Config::default().into();
    let (server, client) = (Context::open(&provider).unwrap(), Context::open(&provider).unwrap());
    let listener = server.listen("127.0.0.1:0".parse().unwrap()).unwrap();
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
    for provider in providers() {
        let settings = Settings { ring_len: 4096, stage_len: 4096, credits: 8, ..Settings::of(Scheme::Adaptive) };
        let (server, client) = (Context::open(&provider).unwrap(), Context::open(&provider).unwrap());
        let listener = server.listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = listener.local_addr();
        let mut pairs = Vec::new();
        for _ in 0..120 {
            let connecting = std::thread::spawn({
                let client = client.clone();
                move || client.connect(at, &settings, TOKEN, LIMIT).unwrap()
            });
            let accepted = server.accept(&settings, TOKEN, LIMIT).unwrap();
            pairs.push((connecting.join().unwrap(), accepted));
        }
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
