//! Peers with keys, over plain TCP.

#![allow(dead_code, reason = "not every test makes every call")]

use crate::support::{self, Served, request};
use std::io::Write;
use std::net::TcpStream;
use std::path::PathBuf;
use thruway_engine::random::random;
use thruway_fabric::iwarp;
use thruway_transfer::access::AuthorizedKeys;
use thruway_transfer::auth::{Credentials, KeyPair};
use thruway_transfer::link::{Call, Link, LinkError, Transport};
use thruway_transfer::wire::*;

pub(crate) const BLOCK: u32 = 1 << 20;

pub(crate) fn keys(text: &str) -> AuthorizedKeys {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    AuthorizedKeys::load(file.path()).unwrap()
}

impl Served {
    pub(crate) fn new(authorized: &str, max_sessions: usize) -> Served {
        Served::with(|config| (config.authorized, config.max_sessions) = (keys(authorized), max_sessions))
    }

    pub(crate) fn call(&self, key: &KeyPair) -> (Link, Token) {
        let (device, token) = (iwarp::Config::default().open().unwrap(), random());
        let credentials = &Credentials::Keys(key.clone());
        let call = Call { addr: self.addr, credentials, token, early: None };
        (Link::connect(device, Transport::Tcp, &call).unwrap().0, token)
    }

    /// The daemon's answer to a request for a session.
    pub(crate) fn ask(&self, key: &KeyPair) -> (Link, Token, Result<Control, LinkError>) {
        self.ask_for(key, request())
    }

    fn ask_for(&self, key: &KeyPair, request: SessionRequest) -> (Link, Token, Result<Control, LinkError>) {
        let (mut link, token) = self.call(key);
        link.send(&Control::Session(Box::new(request))).unwrap();
        let answer = link.next_control();
        (link, token, answer)
    }

    /// A session with two data channels.
    pub(crate) fn session(&self, key: &KeyPair) -> Liar {
        self.session_for(key, request())
    }

    pub(crate) fn session_for(&self, key: &KeyPair, request: SessionRequest) -> Liar {
        let (mut link, token, answer) = self.ask_for(key, request);
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
    pub(crate) fn files(&self, prefix: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.dir.path()).unwrap().map(Result::unwrap);
        entries.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()).collect()
    }
}

pub(crate) struct Liar {
    pub link: Link,
    pub data: [TcpStream; 2],
    session: u32,
    sequence: u32,
}

impl Liar {
    /// The beginning of a block.
    pub(crate) fn header(&mut self, kind: BlockKind, file: u64, len: u32) -> [u8; HEADER_LEN] {
        let (tag, digest) = ([0; 16], [0; 16]);
        let (session, sequence) = (self.session, self.sequence);
        self.sequence += 1;
        let header = BlockHeader { session, sequence, offset: 0, len, kind, sealed: false, file, tag, digest };
        let mut bytes = [0; HEADER_LEN];
        header.encode(&mut bytes);
        bytes
    }

    pub(crate) fn pack(&mut self, records: &[(Record, &[u8])]) -> std::io::Result<()> {
        let mut body = Vec::new();
        for (record, content) in records {
            let encoded = record.encode();
            body.extend([&Record::prefix(encoded.len(), content.len())[..], &encoded, content].concat());
        }
        let header = self.header(BlockKind::Pack, 0, body.len() as u32);
        self.data[0].write_all(&[&header[..], &body].concat())
    }

    /// A piece of a file, of zeros.
    pub(crate) fn piece(&mut self, kind: BlockKind, file: u64, len: u32) -> std::io::Result<()> {
        let header = self.header(kind, file, len);
        self.data[0].write_all(&[&header[..], &vec![0; len as usize]].concat())
    }

    pub(crate) fn begin(&mut self, file: u64, size: u64) {
        self.begin_at(b"report", file, size);
    }

    pub(crate) fn begin_at(&mut self, path: &[u8], file: u64, size: u64) {
        let meta = Meta { mode: 0o644, size, ..Meta::default() };
        let begin = Record::Begin { file, path: path.to_vec(), meta, resume: false };
        self.pack(&[(begin, b"")]).unwrap();
    }

    pub(crate) fn end(&mut self, file: u64, blocks: u32) {
        self.link.send(&Control::FileEnd { file, blocks, status: FileStatus::Unchanged }).unwrap();
    }

    /// Waits until the daemon has ended the session, and returns its reason.
    pub(crate) fn ended(&mut self) -> String {
        support::ended(&mut self.link)
    }
}
