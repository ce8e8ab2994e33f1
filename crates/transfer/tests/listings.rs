//! Listings of large directories, for peers that do not read them.

use crate::support;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use support::Served;
use thruway_engine::random::random;
use thruway_fabric::iwarp;
use thruway_transfer::auth::{Credentials, KeyPair};
use thruway_transfer::link::{Call, Link, Transport};
use thruway_transfer::wire::*;

const ENTRIES: usize = 40_000;

/// Asks for the listing, and takes the reply and one message of it.
fn ask(served: &Served, transport: Transport) -> (Link, usize) {
    let credentials = &Credentials::Keys(KeyPair::generate());
    let call = Call { addr: served.addr, credentials, token: random(), early: None };
    let mut link = Link::connect(iwarp::Config::default().open().unwrap(), transport, &call).unwrap().0;
    let request = SessionRequest {
        direction: Direction::List,
        export: "e".into(),
        path: Vec::new(),
        into_directory: false,
        renamed: false,
        offers: false,
        destination: None,
        sources: Vec::new(),
        job: [0; 16],
        verify: 0,
        data_key: None,
        rate_limit: None,
        revocable: false,
        options: TreeOptions::default(),
    };
    link.send(&Control::Session(Box::new(request))).unwrap();
    assert!(matches!(link.next_control().unwrap(), Control::SessionReply(_)));
    let Control::Listing { entries, last: false } = link.next_control().unwrap() else { panic!("no listing") };
    (link, entries.len())
}

/// Bytes that this process, which is client and daemon, has allocated.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: each function passes its arguments to `System`, and returns the result.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the rules of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the rules of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[test]
fn a_listing_that_is_not_read_takes_little_memory() {
    let served = Served::with(|config| config.anonymous = true);
    for n in 0..ENTRIES {
        std::fs::File::create(served.dir.path().join(format!("{n}-{}", "n".repeat(200)))).unwrap();
    }
    for transport in [Transport::Rdma, Transport::Tcp] {
        let before = ALLOCATED.load(Ordering::Relaxed);
        let sessions: Vec<_> = (0..12).map(|_| ask(&served, transport)).collect();
        // A complete listing takes 10 MiB.
        let each = ALLOCATED.load(Ordering::Relaxed).saturating_sub(before) / sessions.len();
        assert!(each < 1 << 20, "{each} bytes for each session");
        for (mut link, mut count) in sessions {
            loop {
                let Control::Listing { entries, last } = link.next_control().unwrap() else { panic!("no listing") };
                count += entries.len();
                if last {
                    break;
                }
            }
            assert_eq!(count, ENTRIES);
        }
    }
}
