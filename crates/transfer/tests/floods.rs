//! A peer with a key that sends one kind of message or record again and again. The daemon's memory and descriptors stay within
//! bounds, whether the peer reads the answers or not, and whether the session goes on or ends.

use crate::peer;
use crate::support;
use peer::{BLOCK, Liar, keys};
use std::fs;
use std::time::Duration;
use support::{Served, request};
use thruway_engine::random::random;
use thruway_transfer::auth::KeyPair;
use thruway_transfer::wire::*;

/// Bytes of one flood.
const FLOOD: usize = 32 << 20;
/// Messages of one flood.
const MESSAGES: u64 = 20_000;
/// Records or pieces of one flood.
const RECORDS: u64 = 3_000;
/// Ends of files of one flood. With 1,024 of files that have not begun, the daemon reads no more, and sending waits for a minute.
const ENDS: u64 = 1_500;
/// Bytes by which the daemon may grow during a flood.
const GROWTH: u64 = 16 << 20;
/// Further bytes in a session whose source is the daemon: blocks of its pool.
const POOL: u64 = 12 << 20;
/// Descriptors that a session may add.
const DESCRIPTORS: usize = 64;

/// Makes the messages of a peer, each with a number.
enum Flood {
    Controls(fn(u64) -> Control),
    Records(fn(u64) -> Record),
    /// A piece of this file.
    Piece(fn(u64) -> (BlockKind, u64, u32)),
}

/// A long path below a directory of the export, which is one for each number.
fn path(below: &str, number: u64) -> Vec<u8> {
    format!("{below}{}/{number}", format!("/{}", "x".repeat(200)).repeat(15)).into_bytes()
}

fn meta() -> Meta {
    Meta { mode: 0o755, mtime: (1, 0), ..Meta::default() }
}

fn report(number: u64, kind: ReportKind) -> Control {
    Control::Report(Report { path: path("reported", number), kind, message: "m".repeat(4000) })
}

fn offer(number: u64, name: &str) -> OfferEntry {
    OfferEntry {
        path: path(name, number),
        size: 1,
        mtime: (1, 0),
        ctime: (1, 0),
        owner: 0,
        group: 0,
        mode: 0o644,
        capabilities: 0,
        linked: number.is_multiple_of(2),
    }
}

/// Every kind of message but the two that end a session by themselves.
const FLOODS: &[(&str, Flood)] = &[
    ("requests", Flood::Controls(|_| Control::Session(Box::new(request())))),
    ("lengths of blocks", Flood::Controls(|_| Control::BlockSize(BLOCK))),
    ("numbers of channels", Flood::Controls(|_| Control::Channels(2))),
    ("more channels", Flood::Controls(|number| Control::MoreChannels(number as u32))),
    ("requests for regions", Flood::Controls(|_| Control::RegionRequest)),
    (
        "credits",
        Flood::Controls(|number| {
            let credit = |block| Credit { block, channel: 0, addr: number << 20, rkey: block };
            Control::RegionReply((0..64).map(credit).collect())
        }),
    ),
    ("no credits", Flood::Controls(|_| Control::RegionReply(Vec::new()))),
    ("completions", Flood::Controls(|_| Control::DataSetComplete(1 << 30))),
    ("summaries", Flood::Controls(|_| Control::DataSetReply(Summary::default()))),
    ("reports of failures", Flood::Controls(|number| report(number, ReportKind::NotCopied))),
    ("reports of directories", Flood::Controls(|number| report(number, ReportKind::NotListed))),
    ("reports of entries", Flood::Controls(|number| report(number, ReportKind::LeftOut))),
    ("reports of items", Flood::Controls(|number| report(number, ReportKind::Item))),
    ("reports of refusals", Flood::Controls(|number| report(number, ReportKind::Refused))),
    (
        "offers",
        Flood::Controls(|number| Control::Offer { batch: number as u32, entries: vec![offer(number, "new"); 2] }),
    ),
    ("empty offers", Flood::Controls(|number| Control::Offer { batch: number as u32, entries: Vec::new() })),
    ("answers", Flood::Controls(|number| Control::Verdict { batch: number as u32, answers: vec![Answer::Send; 4000] })),
    (
        "answers with ranges",
        Flood::Controls(|number| Control::Verdict {
            batch: number as u32,
            answers: vec![Answer::Except((0..300).map(|n| (n << 20, 1)).collect()); 2],
        }),
    ),
    (
        "ends of files",
        Flood::Controls(|file| Control::FileEnd { file, blocks: 1, status: FileStatus::Failed("f".repeat(7000)) }),
    ),
    (
        "parts of a list",
        Flood::Controls(|number| {
            let entry = ListEntry { name: vec![b'n'; 250], mode: 0, size: number, mtime: 0 };
            Control::Listing { entries: vec![entry; 20], last: false }
        }),
    ),
    ("receives", Flood::Controls(|_| Control::Receives)),
    ("directories", Flood::Records(|number| Record::Dir { path: path("made", number), meta: meta() })),
    ("directories in a file", Flood::Records(|number| Record::Dir { path: path("file", number), meta: meta() })),
    ("one directory", Flood::Records(|_| Record::Dir { path: path("made", 0), meta: meta() })),
    ("files", Flood::Records(|number| Record::File { path: path("made", number), meta: meta() })),
    ("files in a file", Flood::Records(|number| Record::File { path: path("file", number), meta: meta() })),
    (
        "beginnings of files",
        Flood::Records(|number| Record::Begin {
            file: number,
            path: path("made", number),
            meta: Meta { size: 1 << 40, ..meta() },
            resume: false,
        }),
    ),
    (
        "links",
        Flood::Records(|number| Record::Symlink { path: path("made", number), target: vec![b't'; 4000], meta: meta() }),
    ),
    (
        "pipes",
        Flood::Records(|number| Record::Special {
            path: path("made", number),
            meta: Meta { mode: 0o10644, ..meta() },
            rdev: 0,
        }),
    ),
    ("further names", Flood::Records(|number| Record::Link { path: path("made", number), target: path("file", 0) })),
    (
        "names to keep",
        Flood::Records(|number| {
            let names = (0..20).map(|name| format!("{number}{name}{}", "k".repeat(200)).into_bytes()).collect();
            Record::Keep { path: path("made", number), below: 0, names, end: KeepEnd::Complete }
        }),
    ),
    ("attributes", Flood::Records(|number| Record::Attributes { path: path("made", number), meta: meta() })),
    (
        "attributes of directories",
        Flood::Records(|number| {
            let xattrs = (0..15).map(|n| (format!("user.{n}").into_bytes(), vec![b'v'; 1000])).collect();
            Record::Dir { path: path("made", number), meta: Meta { xattrs, ..meta() } }
        }),
    ),
    ("pieces of unknown files", Flood::Piece(|number| (BlockKind::Data, number, 4096))),
    ("pieces of one unknown file", Flood::Piece(|_| (BlockKind::Data, 1, 4096))),
    ("unreadable pieces", Flood::Piece(|number| (BlockKind::Void, number, 0))),
];

/// Memory of this process in use, in bytes.
fn memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    anonymous.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() << 10
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Sends part of a flood: the number of bytes, or `None` when the daemon has ended the session or takes no more.
fn send(liar: &mut Liar, flood: &Flood, number: &mut u64) -> Option<usize> {
    match flood {
        Flood::Controls(make) => {
            let message = make(*number);
            *number += 1;
            liar.link.send(&message).ok()?;
            Some(message.encode(0).len())
        }
        Flood::Records(make) => {
            let records: Vec<(Record, &[u8])> = (0..50).map(|n| (make(*number + n), &b""[..])).collect();
            *number += 50;
            liar.pack(&records).ok()?;
            Some(records.iter().map(|(record, _)| record.encode().len()).sum())
        }
        Flood::Piece(make) => {
            let (kind, file, len) = make(*number);
            *number += 1;
            liar.piece(kind, file, len).ok()?;
            Some(HEADER_LEN + len as usize)
        }
    }
}

fn flood(key: &KeyPair, direction: Direction, listens: bool, &(name, ref flood): &(&str, Flood)) {
    let lab = Served::with(|config| {
        config.authorized = keys(&format!("rw {}", key.public()));
        config.large_files = Some(16);
    });
    fs::write(lab.dir.path().join("file"), "").unwrap();
    let options = TreeOptions {
        recursive: true,
        preserve: true,
        update: true,
        delete: true,
        itemize: true,
        ..TreeOptions::default()
    };
    let sources = match direction {
        Direction::Pull => vec![SourceSpec { path: Vec::new(), name: Vec::new() }],
        _ => Vec::new(),
    };
    let offers = direction == Direction::Push;
    let mut liar =
        lab.session_for(key, SessionRequest { direction, sources, offers, options, job: random(), ..request() });
    for stream in &liar.data {
        // The daemon stops reading where it waits for something else.
        stream.set_write_timeout(Some(Duration::from_millis(if listens { 1000 } else { 100 }))).unwrap();
    }
    let what = format!("{name}, {direction:?}, {}", if listens { "listening" } else { "deaf" });
    let (before, descriptors_before) = (memory(), descriptors());
    let (mut number, mut sent, mut grown) = (0, 0, 0);
    let factor = std::env::var("THRUWAY_FLOODS").map_or(1, |factor| factor.parse().unwrap());
    let most = match flood {
        Flood::Controls(_) if name == "ends of files" => ENDS,
        Flood::Controls(_) => factor as u64 * MESSAGES,
        _ => factor as u64 * RECORDS,
    };
    while sent < factor * FLOOD && number < most {
        let Some(bytes) = send(&mut liar, flood, &mut number) else { break };
        sent += bytes;
        if listens && number.is_multiple_of(50) && liar.link.poll(Duration::ZERO).is_err() {
            break;
        }
        if number.is_multiple_of(500) {
            grown = grown.max(memory().saturating_sub(before));
            assert!(descriptors() <= descriptors_before + DESCRIPTORS, "{what}: {} descriptors", descriptors());
        }
    }
    grown = grown.max(memory().saturating_sub(before));
    eprintln!("{what}: {} MiB sent, {} MiB grown", sent >> 20, grown >> 20);
    // AddressSanitizer does not reuse freed memory at once.
    let most_grown = if matches!(direction, Direction::Pull) { GROWTH + POOL } else { GROWTH };
    assert!(grown <= most_grown || std::env::var_os("THRUWAY_SANITIZED").is_some(), "{what}: {} MiB", grown >> 20);
}

#[test]
fn floods_leave_memory_and_descriptors_bounded() {
    let key = KeyPair::generate();
    for listens in [true, false] {
        FLOODS.iter().for_each(|one| flood(&key, Direction::Push, listens, one));
        // A source reads no data.
        let are_read = |one: &&(&str, Flood)| matches!(one.1, Flood::Controls(_)) || one.0 == "directories";
        FLOODS.iter().filter(are_read).for_each(|one| flood(&key, Direction::Pull, listens, one));
    }
}
