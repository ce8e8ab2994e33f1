//! Sources that lie over plain TCP, where pieces of files go from the socket into the file.

use crate::peer;
use crate::support;
use peer::{BLOCK, Liar, keys};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use support::{Served, TIMEOUT, request};
use thruway_transfer::access::AuthorizedKeys;
use thruway_transfer::auth::KeyPair;
use thruway_transfer::link::LinkError;
use thruway_transfer::wire::*;

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// The file that a piece is still coming for does not get its name; who may only create would else change it afterwards.
#[test]
fn a_piece_that_is_on_its_way_keeps_its_file_from_ending() {
    let key = KeyPair::generate();
    let lab = Served::new(&format!("create,export=e {}", key.public()), 10);
    let mut liar = lab.session(&key);
    let content = vec![b'G'; BLOCK as usize];
    liar.begin(1, BLOCK.into());
    let stalled = liar.header(BlockKind::Data, 1, BLOCK);
    liar.data[1].write_all(&[&stalled[..], b"E"].concat()).unwrap();
    // It has begun to come.
    let has_begun =
        || lab.files(".report.tw-").iter().any(|file| std::fs::read(file).is_ok_and(|c| c.first() == Some(&b'E')));
    until("the piece does not come", has_begun);
    let whole = liar.header(BlockKind::Data, 1, BLOCK);
    liar.data[0].write_all(&[&whole[..], &content].concat()).unwrap();
    liar.end(1, 1);
    // Which of the two is heard of first is nobody's choice.
    let why = liar.ended();
    assert!(why.contains("number of a file's pieces") || why.contains("piece of a file that has ended"), "{why}");
    assert_eq!(lab.files("report"), Vec::<PathBuf>::new());
}

#[test]
fn a_piece_of_a_file_that_never_begins_ends_the_session() {
    let key = KeyPair::generate();
    let lab = Served::new(&format!("rw {}", key.public()), 10);
    let mut liar = lab.session(&key);
    let piece = liar.header(BlockKind::Data, 99, 10);
    liar.data[0].write_all(&[&piece[..], b"0123456789"].concat()).unwrap();
    liar.link.send(&Control::DataSetComplete(1)).unwrap();
    assert!(liar.ended().contains("piece of a file that never began"));
}

#[test]
fn contradictions_end_the_session() {
    let key = KeyPair::generate();
    let lab = Served::new(&format!("rw {}", key.public()), 10);
    // A piece could not be read, and the file is whole.
    let mut liar = lab.session(&key);
    liar.begin(1, 10);
    let void = liar.header(BlockKind::Void, 1, 0);
    liar.data[0].write_all(&void).unwrap();
    liar.end(1, 1);
    assert!(liar.ended().contains("could not be read"));
    // A file has more in it than comes with it.
    let mut liar = lab.session(&key);
    let record =
        Record::File { path: b"report".to_vec(), meta: Meta { mode: 0o644, size: 1 << 40, ..Meta::default() } };
    liar.pack(&[(record, b"little")]).unwrap();
    assert!(liar.ended().contains("size"));
    assert_eq!(lab.files("report"), Vec::<PathBuf>::new());
}

/// A session for a source with a file that is up to date, after the daemon has asked for its attributes. Returns these.
fn session_with_offer(lab: &Served, key: &KeyPair) -> (Liar, Meta) {
    std::fs::write(lab.dir.path().join("report"), "x").unwrap();
    let options = TreeOptions { recursive: true, preserve: true, update: true, ..TreeOptions::default() };
    let mut liar = lab.session_for(key, SessionRequest { offers: true, options, ..request() });
    let meta = std::fs::metadata(lab.dir.path().join("report")).unwrap();
    let mtime = (meta.mtime(), meta.mtime_nsec() as u32);
    let offered = OfferEntry {
        path: b"report".to_vec(),
        size: 1,
        mtime,
        ctime: (1, 0),
        owner: meta.uid(),
        group: meta.gid(),
        mode: 0o100_600,
        capabilities: 0,
        linked: false,
    };
    liar.link.send(&Control::Offer { batch: 0, entries: vec![offered] }).unwrap();
    let answer = liar.link.next_control().unwrap();
    assert_eq!(answer, Control::Verdict { batch: 0, answers: vec![Answer::Attributes] });
    (liar, Meta { mode: 0o600, size: 1, mtime, ..Meta::default() })
}

/// Ends the copy after one block.
fn summary(liar: &mut Liar) -> Summary {
    liar.link.send(&Control::DataSetComplete(1)).unwrap();
    loop {
        // Behind reports of attributes that a peer cannot set.
        if let Control::DataSetReply(summary) = liar.link.next_control().unwrap() {
            return summary;
        }
    }
}

/// Another source of the command can have an entry of the same name, which is reported. Reports also overtake records.
#[test]
fn a_report_does_not_take_back_the_leave_to_send_attributes() {
    let key = KeyPair::generate();
    let lab = Served::new(&format!("rw {}", key.public()), 10);
    let (mut liar, meta) = session_with_offer(&lab, &key);
    let report = Report { path: b"report".to_vec(), kind: ReportKind::NotCopied, message: "no".into() };
    liar.link.send(&Control::Report(report)).unwrap();
    // The daemon takes messages in order, so it has the report when it answers another offer.
    liar.link.send(&Control::Offer { batch: 1, entries: Vec::new() }).unwrap();
    assert!(matches!(liar.link.next_control().unwrap(), Control::Verdict { batch: 1, .. }));
    liar.pack(&[(Record::Attributes { path: b"report".to_vec(), meta }, b"")]).unwrap();
    let summary = summary(&mut liar);
    assert_eq!((summary.files, summary.skipped), (1, 1));
}

#[test]
fn a_file_that_is_sent_in_place_of_its_attributes_was_not_skipped() {
    let key = KeyPair::generate();
    let lab = Served::new(&format!("rw {}", key.public()), 10);
    let (mut liar, meta) = session_with_offer(&lab, &key);
    liar.pack(&[(Record::File { path: b"report".to_vec(), meta }, b"y")]).unwrap();
    let summary = summary(&mut liar);
    assert_eq!((summary.files, summary.skipped), (1, 0));
}

/// A peer that makes the daemon tell it much and does not listen cannot put off the end of its session.
#[test]
fn a_key_that_is_revoked_writes_no_more_though_its_holder_does_not_listen() {
    let key = KeyPair::generate();
    let lab = Served::new(&format!("rw {}", key.public()), 10);
    let mut liar = lab.session(&key);
    // Each of these fails, and is told: far more than the sockets between us take.
    std::fs::write(lab.dir.path().join("file"), "").unwrap();
    let path = format!("file{}", format!("/{}", "x".repeat(200)).repeat(15)).into_bytes();
    let wrong = Record::Symlink { path, target: b"x".to_vec(), meta: Meta::default() };
    let records: Vec<(Record, &[u8])> = (0..320).map(|_| (wrong.clone(), &b""[..])).collect();
    liar.begin(1, 1 << 40);
    // Until it takes no more, because nobody listens to it.
    liar.data[0].set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    while liar.pack(&records).is_ok() {}
    lab.stopper.set_authorized(AuthorizedKeys::default());
    // Neither connection takes anything any more, long before a peer that is silent is given up.
    liar.data[1].set_write_timeout(Some(TIMEOUT)).unwrap();
    let start = Instant::now();
    let piece = vec![0; BLOCK as usize];
    loop {
        assert!(start.elapsed() < TIMEOUT, "it goes on");
        let header = liar.header(BlockKind::Data, 1, BLOCK);
        if liar.data[1].write_all(&[&header[..], &piece].concat()).is_err() {
            break;
        }
    }
    assert!(start.elapsed() < TIMEOUT, "it went on");
    until("the control connection stays", || {
        matches!(liar.link.poll(Duration::from_millis(10)), Err(LinkError::Closed(_)))
    });
}

/// One key that takes all sessions it can get leaves some to others.
#[test]
fn one_key_does_not_take_all_sessions() {
    let (greedy, other) = (KeyPair::generate(), KeyPair::generate());
    let lab = Served::new(&format!("rw {}\nrw {}", greedy.public(), other.public()), 20);
    let mut taken = Vec::new();
    let refusal = loop {
        assert!(taken.len() < 20, "it has all of them");
        match lab.ask(&greedy) {
            (link, _, Ok(Control::SessionReply(_))) => taken.push(link),
            (_, _, refusal) => break refusal,
        }
    };
    assert!(format!("{refusal:?}").contains("too many sessions"), "{refusal:?}");
    assert!(taken.len() >= 15, "{} sessions", taken.len());
    assert!(matches!(lab.ask(&other).2, Ok(Control::SessionReply(_))));
}

/// One key that begins as many files as it can leaves descriptors to others.
#[test]
fn one_key_does_not_take_all_open_files() {
    let (greedy, other) = (KeyPair::generate(), KeyPair::generate());
    let lab = Served::with(|config| {
        config.authorized = keys(&format!("create {}\nrw {}", greedy.public(), other.public()));
        config.large_files = Some(18);
    });
    let mut liars = [lab.session(&greedy), lab.session(&greedy)];
    for number in 1..=8 {
        for (index, liar) in liars.iter_mut().enumerate() {
            liar.begin_at(format!("greedy{index}{number}").as_bytes(), number, 10);
        }
    }
    until("they do not begin", || lab.files(".greedy").len() == 16);
    liars[0].begin_at(b"more", 9, 10);
    let mut honest = lab.session(&other);
    honest.begin_at(b"other", 1, 10);
    until("the other does not begin", || lab.files(".other").len() == 1);
    assert!(liars[0].ended().contains("Too many open files"));
    // All of its files are released at its end, or soon after it.
    until("the session does not end", || lab.stopper.sessions() == 2);
    until("it does not begin", || {
        let mut third = lab.session(&greedy);
        third.begin_at(b"again", 1, 10);
        let has_begun = || lab.files(".again").len() == 1;
        until("it neither begins nor ends", || has_begun() || lab.stopper.sessions() == 2);
        has_begun()
    });
}

/// Each offer causes an answer, which the daemon would keep for a source that does not take it.
#[test]
fn offers_that_nobody_asked_for_end_the_session() {
    let key = KeyPair::generate();
    let lab = Served::new(&format!("create {}", key.public()), 10);
    let mut liar = lab.session(&key);
    liar.link.send(&Control::Offer { batch: 0, entries: Vec::new() }).unwrap();
    assert!(liar.ended().contains("unexpected offer"));
}
