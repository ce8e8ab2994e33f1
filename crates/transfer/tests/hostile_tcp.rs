//! Sources that lie over plain TCP, where pieces of files go from the socket into the file.

mod support;

use std::io::Write;
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use support::{Served, TIMEOUT};
use thruway_engine::random::random;
use thruway_fabric::iwarp;
use thruway_transfer::access::AuthorizedKeys;
use thruway_transfer::auth::{Credentials, KeyPair};
use thruway_transfer::link::{Call, Link, LinkError, Transport};
use thruway_transfer::wire::*;

const BLOCK: u32 = 1 << 20;

fn keys(text: &str) -> AuthorizedKeys {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    AuthorizedKeys::load(file.path()).unwrap()
}

impl Served {
    fn new(authorized: &str, max_sessions: usize) -> Served {
        Served::with(|config| (config.authorized, config.max_sessions) = (keys(authorized), max_sessions))
    }

    fn call(&self, key: &KeyPair) -> (Link, Token) {
        let (device, token) = (iwarp::Config::default().open().unwrap(), random());
        let credentials = &Credentials::Keys(key.clone());
        let call = Call { addr: self.addr, credentials, token, early: None };
        (Link::connect(device, Transport::Tcp, &call).unwrap().0, token)
    }

    /// What the daemon answers to a request for a session.
    fn ask(&self, key: &KeyPair) -> (Link, Token, Result<Control, LinkError>) {
        let (mut link, token) = self.call(key);
        let request = SessionRequest {
            direction: Direction::Push,
            export: "e".into(),
            path: Vec::new(),
            into_directory: true,
            renamed: false,
            offers: false,
            destination: None,
            sources: Vec::new(),
            job: random(),
            verify: 0,
            data_key: None,
            rate_limit: None,
            revocable: true,
            options: TreeOptions { recursive: true, ..TreeOptions::default() },
        };
        link.send(&Control::Session(Box::new(request))).unwrap();
        let answer = link.next_control();
        (link, token, answer)
    }

    /// A session with two data channels.
    fn session(&self, key: &KeyPair) -> Liar {
        let (mut link, token, answer) = self.ask(key);
        let Control::SessionReply(reply) = answer.unwrap() else { panic!("no reply") };
        link.send(&Control::BlockSize(BLOCK)).unwrap();
        assert!(matches!(link.next_control().unwrap(), Control::BlockSizeReply { accepted: true, .. }));
        link.send(&Control::Channels(2)).unwrap();
        assert_eq!(link.next_control().unwrap(), Control::ChannelsReply(2));
        let data = [1, 2].map(|channel| {
            let mut stream = TcpStream::connect(self.addr).unwrap();
            let hello = Hello::Data { token, channel }.encode();
            stream.write_all(&[&MAGIC[..], &(hello.len() as u16).to_be_bytes(), &hello].concat()).unwrap();
            stream
        });
        Liar { link, data, session: reply.session, sequence: 0 }
    }

    /// Files in the export whose names begin like this.
    fn files(&self, prefix: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.dir.path()).unwrap().map(Result::unwrap);
        entries.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()).collect()
    }
}

struct Liar {
    link: Link,
    data: [TcpStream; 2],
    session: u32,
    sequence: u32,
}

impl Liar {
    /// The beginning of a block.
    fn header(&mut self, kind: BlockKind, file: u64, len: u32) -> [u8; HEADER_LEN] {
        let (tag, digest) = ([0; 16], [0; 16]);
        let (session, sequence) = (self.session, self.sequence);
        self.sequence += 1;
        let header = BlockHeader { session, sequence, offset: 0, len, kind, sealed: false, file, tag, digest };
        let mut bytes = [0; HEADER_LEN];
        header.encode(&mut bytes);
        bytes
    }

    fn pack(&mut self, records: &[(Record, &[u8])]) -> std::io::Result<()> {
        let mut body = Vec::new();
        for (record, content) in records {
            let encoded = record.encode();
            body.extend([&Record::prefix(encoded.len(), content.len())[..], &encoded, content].concat());
        }
        let header = self.header(BlockKind::Pack, 0, body.len() as u32);
        self.data[0].write_all(&[&header[..], &body].concat())
    }

    fn begin(&mut self, file: u64, size: u64) {
        self.begin_at(b"report", file, size);
    }

    fn begin_at(&mut self, path: &[u8], file: u64, size: u64) {
        let meta = Meta { mode: 0o644, size, ..Meta::default() };
        let begin = Record::Begin { file, path: path.to_vec(), meta, resume: false };
        self.pack(&[(begin, b"")]).unwrap();
    }

    fn end(&mut self, file: u64, blocks: u32) {
        self.link.send(&Control::FileEnd { file, blocks, status: FileStatus::Unchanged }).unwrap();
    }

    /// Waits until the daemon has ended the session, and returns what it said.
    fn ended(&mut self) -> String {
        support::ended(&mut self.link)
    }
}

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
    // All of its files are released at its end.
    until("the session does not end", || lab.stopper.sessions() == 2);
    let [_, second] = &mut liars;
    second.begin_at(b"again", 9, 10);
    until("it does not begin", || lab.files(".again").len() == 1);
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
