//! What RFTP peers say to each other: control messages, block headers, packed records.
//!
//! Pure codec, specified byte by byte in the book's chapter "The RFTP protocol". A control
//! message is an 8-byte header (type, flags, length; network order) and a body in the postcard
//! encoding; a block is a 64-byte header and its payload.

mod block;
mod record;

pub use block::{BlockHeader, BlockKind, COMPLETION_LEN, Completion, HEADER_LEN};
pub use record::{KeepEnd, Meta, RECORD_PREFIX_LEN, Record, XATTRS_MAX, check_path};

use crate::auth::Credentials;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thruway_engine::digest::Algorithm;

/// Version of everything in this module. Peers of different versions refuse each other.
pub const VERSION: u16 = 5;
/// First bytes of the private data of every RFTP connection.
pub const MAGIC: [u8; 4] = *b"TWFT";
/// Largest control message, header included, before encryption.
pub const CONTROL_MAX: usize = 8000;
/// Bytes of a control message's header.
pub const CONTROL_HEADER_LEN: usize = 8;
/// Smallest and largest block payload that can be negotiated.
pub const BLOCK_LEN: std::ops::RangeInclusive<u32> = 64 << 10..=64 << 20;
/// Most data channels of one session.
pub const CHANNELS_MAX: u32 = 64;
/// Longest path, relative to a root.
pub const PATH_MAX: usize = 4096;

/// What a peer said makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed {0}")]
pub struct Malformed(pub &'static str);

/// Who is calling, in a connection's private data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hello {
    /// The control connection of a new session.
    Control {
        /// How the caller will authenticate.
        auth: AuthKind,
        /// What data connections of the session will show: random, the caller's choice.
        token: Token,
    },
    /// A data connection of a session. It may come before the session has been agreed on.
    Data {
        /// Which.
        token: Token,
        /// The connecting end's number for it, from 1: what credits call it.
        channel: u32,
    },
}

/// Joins the connections of a session.
pub type Token = [u8; 16];

/// Which Noise pattern the control connection speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AuthKind {
    /// Static keys: `Noise_XX_25519_ChaChaPoly_BLAKE2s`.
    Keys,
    /// A secret shared beforehand: `Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s`.
    Secret,
}

impl AuthKind {
    /// The pattern that these credentials use.
    pub fn of(credentials: &Credentials) -> AuthKind {
        match credentials {
            Credentials::Keys(_) => AuthKind::Keys,
            Credentials::Secret(_) => AuthKind::Secret,
        }
    }
}

impl Hello {
    /// The private data.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend(postcard::to_allocvec(self).expect("plain data"));
        out
    }

    /// Reads private data.
    ///
    /// # Errors
    /// Where it is not RFTP's, or of another version.
    pub fn decode(bytes: &[u8]) -> Result<Hello, Malformed> {
        Hello::decode_prefix(bytes).map(|(hello, _)| hello)
    }

    /// Reads private data, and says what is behind the greeting: the first message of the handshake, or padding.
    ///
    /// # Errors
    /// As [`Hello::decode`].
    pub fn decode_prefix(bytes: &[u8]) -> Result<(Hello, &[u8]), Malformed> {
        let rest = bytes.strip_prefix(&MAGIC).ok_or(Malformed("greeting: not RFTP"))?;
        let (version, body) = rest.split_first_chunk::<2>().ok_or(Malformed("greeting"))?;
        if u16::from_be_bytes(*version) != VERSION {
            return Err(Malformed("greeting: another version of RFTP"));
        }
        postcard::take_from_bytes(body).map_err(|_| Malformed("greeting"))
    }
}

impl AuthKind {
    /// Bytes of the handshake's first message.
    pub fn first_message_len(self) -> usize {
        match self {
            // A public key; with a secret known beforehand, its proof as well.
            AuthKind::Keys => 32,
            AuthKind::Secret => 48,
        }
    }
}

/// Which way the data goes, seen from the connecting end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Direction {
    /// The connecting end is the source.
    Push,
    /// The connecting end is the sink.
    Pull,
    /// No data: a listing.
    List,
}

/// Something to copy: a path below the export, and the name it gets at the sink (empty: its
/// contents go straight into the sink's root).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceSpec {
    /// Path of the thing.
    pub path: Vec<u8>,
    /// Its name at the sink.
    pub name: Vec<u8>,
}

/// How to read and write trees; the same on both ends of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeOptions {
    /// Descend into directories.
    pub recursive: bool,
    /// Keep mode, times, owner, extended attributes and hard links.
    pub preserve: bool,
    /// Leave files alone that are as new at the sink and of the same size.
    pub update: bool,
    /// Remove from copied directories what the source does not have.
    pub delete: bool,
    /// Remove even though the source could not read everything.
    pub ignore_errors: bool,
    /// Change nothing, report what would be done.
    pub dry_run: bool,
    /// Do not continue an earlier attempt.
    pub no_resume: bool,
    /// Patterns of names or paths to take even if excluded.
    pub include: Vec<String>,
    /// Patterns of names or paths to leave out.
    pub exclude: Vec<String>,
    /// Direct I/O.
    pub direct: Direct,
    /// Bytes to take from endless sources such as `/dev/zero`.
    pub length: Option<u64>,
    /// Report each changed entry ([`ReportKind::Item`]).
    pub itemize: bool,
}

impl Default for TreeOptions {
    fn default() -> TreeOptions {
        TreeOptions {
            recursive: false,
            preserve: false,
            update: false,
            delete: false,
            ignore_errors: false,
            dry_run: false,
            no_resume: false,
            include: Vec::new(),
            exclude: Vec::new(),
            direct: Direct::Auto,
            length: None,
            itemize: false,
        }
    }
}

/// Whether to go past the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Direct {
    /// By rule: large files that are not cached, on file systems that have it.
    Auto,
    /// Wherever the file system allows.
    On,
    /// Never.
    Off,
}

/// Opens a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionRequest {
    /// Which way.
    pub direction: Direction,
    /// Name of the export.
    pub export: String,
    /// Push: where to. List: what. Relative to the export.
    pub path: Vec<u8>,
    /// Push: the path ended in a slash, or there are several sources.
    pub into_directory: bool,
    /// Push, again after a loss: the first attempt was told to rename its single source.
    pub renamed: bool,
    /// Pull: the sink wants files offered before they are sent.
    pub offers: bool,
    /// Pull: where to.
    pub destination: Option<Destination>,
    /// Pull: what. Push: names of the sources, without paths; empty if they are too many.
    pub sources: Vec<SourceSpec>,
    /// Identifies the same job when it is tried again.
    pub job: [u8; 16],
    /// End-to-end verification, by [`Algorithm`] number.
    pub verify: u8,
    /// Key of the data plane's AEAD; `None` leaves it in clear.
    pub data_key: Option<[u8; 32]>,
    /// Bytes per second the source keeps under.
    pub rate_limit: Option<u64>,
    /// Pull: keys of the caller's credits may be revoked by Send with Invalidate.
    pub revocable: bool,
    /// Tree options.
    pub options: TreeOptions,
}

/// Where a copy goes, so that a source on the same machine does not copy it into itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Destination {
    /// Tells the sink's machine from others.
    pub machine: [u8; 16],
    /// Device number of the root directory there.
    pub device: u64,
    /// Its inode number.
    pub inode: u64,
    /// Name of the only thing that is made in it; `None`: whatever the source has.
    pub name: Option<Vec<u8>>,
    /// Hashes of the root directory and of the directories above it, the nearest first, at most [`ABOVE_MAX`].
    pub above: Vec<u64>,
}

/// Most directories in [`Destination::above`].
pub const ABOVE_MAX: usize = 256;

/// Answers [`SessionRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionReply {
    /// Number of the session, unique at the accepting end.
    pub session: u32,
    /// Push: the name the single source gets instead of its own.
    pub rename: Option<Vec<u8>>,
    /// Push: files must be offered first, because some may be there already.
    pub offers: bool,
    /// Push: where to.
    pub destination: Option<Destination>,
    /// Push: a journal is kept, so that another attempt can resume.
    pub resumable: bool,
    /// Push to a destination that discards everything.
    pub discard: bool,
    /// Push: keys of the daemon's credits for any channel may be revoked by Send with Invalidate.
    pub revocable: bool,
}

/// A free block of the sink, and the right to fill it once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credit {
    /// Number of the block at the sink.
    pub block: u32,
    /// Number of the only data channel that may use it; its key is revoked with the notification. 0: any of them.
    pub channel: u32,
    /// Where its header begins.
    pub addr: u64,
    /// Key of exactly its memory.
    pub rkey: u32,
}

/// What went wrong with an entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Which; relative to the sink's root.
    pub path: Vec<u8>,
    /// What it means.
    pub kind: ReportKind,
    /// Why, for people.
    pub message: String,
}

/// What a [`Report`] means for its entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ReportKind {
    /// It was not copied.
    NotCopied,
    /// It was copied, but not with everything that was asked for.
    Incomplete,
    /// A directory could not be listed to its end, or an entry looked at: what it holds is not known.
    NotListed,
    /// The entry or one of its attributes was not copied, and a repeated attempt will not copy it either.
    Unsupported,
    /// It was left out on purpose, as no part of the data: nothing has failed.
    LeftOut,
    /// The entry is changed, or in a dry run would be changed. The message is the reason. Not an error.
    Item,
    /// A source of the command was not copied, and a repeated attempt will not copy it either. What it holds is not known.
    Refused,
}

/// Why a session ends, for the peer's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AbortCode {
    /// The request is refused: rights, paths, options.
    Refused,
    /// Too much is going on; later it may work.
    Busy,
    /// Data did not arrive as it was sent; sending it again may help.
    Damaged,
    /// This end cannot go on.
    Failed,
    /// The peer broke the protocol.
    Protocol,
}

impl AbortCode {
    /// Whether trying again may help.
    pub fn is_transient(self) -> bool {
        matches!(self, AbortCode::Busy | AbortCode::Damaged)
    }
}

/// How reading a large file ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileStatus {
    /// As it was when it began.
    Unchanged,
    /// It is longer now; what was sent is as much of it as there was when it began.
    Grown,
    /// It changed, vanished or could not be read: it does not appear at the sink.
    Failed(String),
}

/// A file that may be at the sink already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferEntry {
    /// Where it would go.
    pub path: Vec<u8>,
    /// Its size.
    pub size: u64,
    /// Its modification time, seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Its change time, seconds and nanoseconds.
    pub ctime: (i64, u32),
    /// User number of its owner.
    pub owner: u32,
    /// Number of its group.
    pub group: u32,
    /// Its mode.
    pub mode: u32,
    /// [`capabilities_hash`] of its file capabilities.
    pub capabilities: u64,
    /// Another name of a file that was offered before. Nothing of it is sent: unless the entry there is newer, it becomes a hard link.
    pub linked: bool,
}

/// A hash of the value of a file's capabilities (`security.capability`); 0 for a file without.
pub fn capabilities_hash(value: &[u8]) -> u64 {
    if value.is_empty() {
        return 0;
    }
    u64::from_le_bytes(blake3::hash(value).as_bytes()[..8].try_into().expect("8 bytes"))
}

/// What the sink wants of an offered file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// All of it.
    Send,
    /// Nothing: it is there.
    Skip,
    /// Nothing: the file there is newer (`--update`), and its content may be another.
    Newer,
    /// Only its attributes: the content is there.
    Attributes,
    /// All but these verified ranges (offset, length), in order, apart.
    Except(Vec<(u64, u64)>),
}

/// What a session has done, as the sink knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Files that are whole and in place, resumed and skipped ones included.
    pub files: u64,
    /// Directories, links and the like.
    pub others: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Bytes that an earlier attempt had verified and written.
    pub resumed_bytes: u64,
    /// Files that were left alone because they were up to date; their content was not looked at.
    pub skipped: u64,
    /// Entries removed.
    pub deleted: u64,
    /// Reports, each of an entry that was not copied or not with everything.
    pub failed: u64,
}

/// One line of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListEntry {
    /// Name.
    pub name: Vec<u8>,
    /// Type and permissions, as `st_mode`.
    pub mode: u32,
    /// Size.
    pub size: u64,
    /// Modification time, seconds.
    pub mtime: i64,
}

/// A control message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Control {
    /// Negotiate a session.
    Session(Box<SessionRequest>),
    /// Its answer.
    SessionReply(SessionReply),
    /// Negotiate the payload of a block.
    BlockSize(u32),
    /// Accepted as asked, or refused with the largest possible.
    BlockSizeReply {
        /// As asked.
        accepted: bool,
        /// Largest possible.
        largest: u32,
    },
    /// Negotiate the number of data channels.
    Channels(u32),
    /// How many there will be.
    ChannelsReply(u32),
    /// The source has blocks to send and no credit.
    RegionRequest,
    /// Credits, asked for or earned.
    RegionReply(Vec<Credit>),
    /// Everything has been sent, in this many blocks.
    DataSetComplete(u64),
    /// Everything is in place.
    DataSetReply(Summary),
    /// Something went wrong with one entry.
    Report(Report),
    /// Ask which files are wanted.
    Offer {
        /// Number of the batch.
        batch: u32,
        /// The files.
        entries: Vec<OfferEntry>,
    },
    /// The answers, in order.
    Verdict {
        /// Number of the batch.
        batch: u32,
        /// One for each entry.
        answers: Vec<Answer>,
    },
    /// A large file has been read to its end.
    FileEnd {
        /// Which.
        file: u64,
        /// Blocks it was sent in.
        blocks: u32,
        /// How it went.
        status: FileStatus,
    },
    /// Lines of a listing.
    Listing {
        /// The lines.
        entries: Vec<ListEntry>,
        /// No more to come.
        last: bool,
    },
    /// The session cannot go on.
    Abort(AbortCode, String),
    /// Only returns receive credits.
    Receives,
    /// The source has heard that everything is in place.
    Farewell,
    /// The source, which cannot open data channels itself, would use so many more.
    MoreChannels(u32),
}

const RESPONSE: u16 = 1;

impl Control {
    /// Type number and whether it is a response.
    fn kind(&self) -> (u16, bool) {
        match self {
            Control::Session(_) => (1, false),
            Control::SessionReply(_) => (1, true),
            Control::BlockSize(_) => (2, false),
            Control::BlockSizeReply { .. } => (2, true),
            Control::Channels(_) => (3, false),
            Control::ChannelsReply(_) => (3, true),
            Control::RegionRequest => (4, false),
            Control::RegionReply(_) => (5, true),
            Control::DataSetComplete(_) => (7, false),
            Control::DataSetReply(_) => (7, true),
            Control::Report(_) => (8, false),
            Control::Offer { .. } => (9, false),
            Control::Verdict { .. } => (9, true),
            Control::FileEnd { .. } => (10, false),
            Control::Listing { .. } => (11, true),
            Control::Abort(..) => (12, false),
            Control::Receives => (13, false),
            Control::Farewell => (14, false),
            Control::MoreChannels(_) => (15, false),
        }
    }

    /// The message's bytes; `receives` is how many receives the sender has posted again.
    pub fn encode(&self, receives: u8) -> Vec<u8> {
        let body = match self {
            Control::Session(b) => postcard::to_allocvec(b),
            Control::SessionReply(b) => postcard::to_allocvec(b),
            Control::BlockSize(b) => postcard::to_allocvec(b),
            Control::BlockSizeReply { accepted, largest } => postcard::to_allocvec(&(accepted, largest)),
            Control::Channels(b) | Control::ChannelsReply(b) | Control::MoreChannels(b) => postcard::to_allocvec(b),
            Control::RegionRequest | Control::Receives | Control::Farewell => Ok(Vec::new()),
            Control::RegionReply(b) => postcard::to_allocvec(b),
            Control::DataSetComplete(b) => postcard::to_allocvec(b),
            Control::DataSetReply(b) => postcard::to_allocvec(b),
            Control::Report(b) => postcard::to_allocvec(b),
            Control::Offer { batch, entries } => postcard::to_allocvec(&(batch, entries)),
            Control::Verdict { batch, answers } => postcard::to_allocvec(&(batch, answers)),
            Control::FileEnd { file, blocks, status } => postcard::to_allocvec(&(file, blocks, status)),
            Control::Listing { entries, last } => postcard::to_allocvec(&(entries, last)),
            Control::Abort(code, why) => postcard::to_allocvec(&(code, why)),
        }
        .expect("plain data");
        let (kind, response) = self.kind();
        let flags = u16::from(receives) << 8 | if response { RESPONSE } else { 0 };
        let mut out = Vec::with_capacity(CONTROL_HEADER_LEN + body.len());
        out.extend_from_slice(&kind.to_be_bytes());
        out.extend_from_slice(&flags.to_be_bytes());
        out.extend_from_slice(&(body.len() as u32).to_be_bytes());
        out.extend_from_slice(&body);
        out
    }

    /// Reads one whole message; also returns how many receives its sender posted again.
    ///
    /// # Errors
    /// [`Malformed`] unless the bytes are exactly one valid message.
    pub fn decode(bytes: &[u8]) -> Result<(Control, u8), Malformed> {
        let (header, body) =
            bytes.split_first_chunk::<CONTROL_HEADER_LEN>().ok_or(Malformed("control message header"))?;
        let kind = u16::from_be_bytes([header[0], header[1]]);
        let flags = u16::from_be_bytes([header[2], header[3]]);
        let len = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        if len as usize != body.len() || bytes.len() > CONTROL_MAX {
            return Err(Malformed("control message length"));
        }
        fn get<T: DeserializeOwned>(body: &[u8], what: &'static str) -> Result<T, Malformed> {
            match postcard::take_from_bytes(body) {
                Ok((value, [])) => Ok(value),
                _ => Err(Malformed(what)),
            }
        }
        let message = match (kind, flags & RESPONSE != 0) {
            (1, false) => Control::Session(get(body, "session request")?),
            (1, true) => Control::SessionReply(get(body, "session reply")?),
            (2, false) => Control::BlockSize(get(body, "block size")?),
            (2, true) => {
                let (accepted, largest) = get(body, "block size reply")?;
                Control::BlockSizeReply { accepted, largest }
            }
            (3, false) => Control::Channels(get(body, "channels request")?),
            (3, true) => Control::ChannelsReply(get(body, "channels reply")?),
            (4, false) => get::<()>(body, "region request").map(|()| Control::RegionRequest)?,
            (5, true) => Control::RegionReply(get(body, "region reply")?),
            (7, false) => Control::DataSetComplete(get(body, "data set completion")?),
            (7, true) => Control::DataSetReply(get(body, "data set reply")?),
            (8, false) => Control::Report(get(body, "report")?),
            (9, false) => {
                let (batch, entries) = get(body, "offer")?;
                Control::Offer { batch, entries }
            }
            (9, true) => {
                let (batch, answers) = get(body, "verdict")?;
                Control::Verdict { batch, answers }
            }
            (10, false) => {
                let (file, blocks, status) = get(body, "end of file")?;
                Control::FileEnd { file, blocks, status }
            }
            (11, true) => {
                let (entries, last) = get(body, "listing")?;
                Control::Listing { entries, last }
            }
            (12, false) => {
                let (code, why) = get(body, "abort")?;
                Control::Abort(code, why)
            }
            (13, false) => get::<()>(body, "receives").map(|()| Control::Receives)?,
            (14, false) => get::<()>(body, "farewell").map(|()| Control::Farewell)?,
            (15, false) => Control::MoreChannels(get(body, "number of channels")?),
            _ => return Err(Malformed("control message type")),
        };
        Ok((message, (flags >> 8) as u8))
    }
}

/// The verification with this number.
///
/// # Errors
/// [`Malformed`] if there is none.
pub fn algorithm(number: u8) -> Result<Algorithm, Malformed> {
    Algorithm::from_wire(number).ok_or(Malformed("verification algorithm"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn samples() -> Vec<Control> {
        vec![
            Control::Session(Box::new(SessionRequest {
                direction: Direction::Push,
                export: "data".into(),
                path: b"a/b".to_vec(),
                into_directory: true,
                renamed: false,
                offers: true,
                destination: None,
                sources: vec![SourceSpec { path: b"x".to_vec(), name: vec![0xff, b'\n'] }],
                job: [3; 16],
                verify: 1,
                data_key: Some([7; 32]),
                rate_limit: Some(9),
                revocable: true,
                options: TreeOptions { length: Some(5), ..TreeOptions::default() },
            })),
            Control::SessionReply(SessionReply {
                session: 9,
                rename: Some(b"n".to_vec()),
                offers: true,
                resumable: true,
                destination: Some(Destination {
                    machine: [1; 16],
                    device: 2,
                    inode: 3,
                    name: Some(b"n".to_vec()),
                    above: vec![4],
                }),
                discard: false,
                revocable: false,
            }),
            Control::BlockSize(1 << 20),
            Control::BlockSizeReply { accepted: false, largest: 1 << 16 },
            Control::Channels(4),
            Control::ChannelsReply(2),
            Control::MoreChannels(3),
            Control::RegionRequest,
            Control::RegionReply(vec![Credit { block: 1, channel: 64, addr: u64::MAX, rkey: 5 }]),
            Control::DataSetComplete(77),
            Control::DataSetReply(Summary { files: 1, ..Summary::default() }),
            Control::Report(Report { path: b"p".to_vec(), kind: ReportKind::NotListed, message: "m".into() }),
            Control::Offer {
                batch: 1,
                entries: vec![OfferEntry {
                    path: b"p".to_vec(),
                    size: 1,
                    mtime: (-1, 5),
                    ctime: (7, 8),
                    owner: 9,
                    group: 10,
                    mode: 0o100_644,
                    capabilities: 11,
                    linked: true,
                }],
            },
            Control::Verdict {
                batch: 1,
                answers: vec![Answer::Send, Answer::Skip, Answer::Newer, Answer::Except(vec![(0, 5)])],
            },
            Control::FileEnd { file: 1, blocks: 2, status: FileStatus::Failed("gone".into()) },
            Control::Listing { entries: vec![], last: true },
            Control::Abort(AbortCode::Busy, "why".into()),
            Control::Receives,
            Control::Farewell,
        ]
    }

    #[test]
    fn every_control_message_round_trips() {
        for message in samples() {
            assert_eq!(Control::decode(&message.encode(9)), Ok((message, 9)));
        }
    }

    #[test]
    fn a_message_cut_short_or_lengthened_is_refused() {
        for message in samples() {
            let whole = message.encode(0);
            for cut in 0..whole.len() {
                assert!(Control::decode(&whole[..cut]).is_err());
            }
            let mut longer = whole.clone();
            longer.push(0);
            assert!(Control::decode(&longer).is_err());
        }
    }

    #[test]
    fn records_follow_one_another_in_a_pack() {
        let a = Record::File { path: b"a".to_vec(), meta: Meta::default() };
        let b = Record::Symlink { path: b"b".to_vec(), target: b"a".to_vec(), meta: Meta::default() };
        let mut pack = Vec::new();
        for (record, content) in [(&a, &b"hello"[..]), (&b, b"")] {
            let encoded = record.encode();
            pack.extend_from_slice(&Record::prefix(encoded.len(), content.len()));
            pack.extend_from_slice(&encoded);
            pack.extend_from_slice(content);
        }
        let (first, content, rest) = Record::split_first(&pack).unwrap();
        assert_eq!((first, content), (a, &b"hello"[..]));
        let (second, content, rest) = Record::split_first(rest).unwrap();
        assert_eq!((second, content, rest), (b, &b""[..], &b""[..]));
        for cut in 0..pack.len() {
            let mut left = &pack[..cut];
            while let Ok((_, _, rest)) = Record::split_first(left) {
                left = rest;
            }
        }
    }

    #[test]
    fn paths_that_could_leave_the_root_are_refused() {
        for good in [&b""[..], b"a", b"a/b", b"...", b"a\nb", &[0xff, 0xfe]] {
            assert_eq!(check_path(good), Ok(()));
        }
        for bad in [&b"/"[..], b"/a", b"a/", b"a//b", b"..", b"a/..", b"../a", b"a/./b", b".", b"a\0b"] {
            assert!(check_path(bad).is_err(), "{bad:?}");
        }
        assert!(check_path(&[b'a'; 256]).is_err() && check_path(&b"a/".repeat(3000)).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), kind in 0u16..20, flags in 0u16..2) {
            let _ = Control::decode(&bytes);
            let mut framed = kind.to_be_bytes().to_vec();
            framed.extend_from_slice(&flags.to_be_bytes());
            framed.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
            framed.extend_from_slice(&bytes);
            let _ = Control::decode(&framed);
            let _ = Hello::decode(&bytes);
            let _ = Completion::decode(&bytes);
            let _ = Record::split_first(&bytes);
            let _ = check_path(&bytes);
        }

        #[test]
        fn block_headers_round_trip(session: u32, sequence: u32, offset in 0u64..1 << 60, len in 0u32..4096, file: u64, sealed: bool, tag: [u8; 16], digest: [u8; 16]) {
            let header = BlockHeader { session, sequence, offset, len, kind: BlockKind::Data, sealed, file, tag, digest };
            let mut out = [0; HEADER_LEN];
            header.encode(&mut out);
            prop_assert_eq!(BlockHeader::decode(&out, 4096), Ok(header));
            if len > 0 {
                prop_assert!(BlockHeader::decode(&out, len as usize - 1).is_err());
            }
        }

        #[test]
        fn arbitrary_block_headers_never_panic(bytes: [u8; 64]) {
            let _ = BlockHeader::decode(&bytes, 1 << 20);
        }
    }
}
