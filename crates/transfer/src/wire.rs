//! What RFTP peers say to each other: control messages, block headers, packed records.
//!
//! Pure codec, specified byte by byte in the book's chapter "The RFTP protocol". A control
//! message is an 8-octet header (type, flags, length; network order) and a body in the postcard
//! encoding; a block is a 64-octet header and its payload.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thruway_engine::integrity::{Algorithm, DIGEST_LEN};
use thruway_engine::security::TAG_LEN;

/// Version of everything in this module. Peers of different versions refuse each other.
pub const VERSION: u16 = 1;
/// First octets of the private data of every RFTP connection.
pub const MAGIC: [u8; 4] = *b"TWFT";
/// Largest control message, header included, before encryption.
pub const CONTROL_MAX: usize = 8000;
/// Octets of a control message's header.
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
    },
    /// A data connection of a session.
    Data {
        /// Which.
        session: u32,
        /// Proof that the caller was told so over the control connection.
        token: [u8; 16],
    },
}

/// Which Noise pattern the control connection speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AuthKind {
    /// Static keys: `Noise_XX_25519_ChaChaPoly_BLAKE2s`.
    Keys,
    /// A secret shared beforehand: `Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s`.
    Secret,
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
        let rest = bytes.strip_prefix(&MAGIC).ok_or(Malformed("greeting: not RFTP"))?;
        let (version, body) = rest.split_first_chunk::<2>().ok_or(Malformed("greeting"))?;
        if u16::from_be_bytes(*version) != VERSION {
            return Err(Malformed("greeting: another version of RFTP"));
        }
        postcard::from_bytes(body).map_err(|_| Malformed("greeting"))
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
    /// Octets to take from endless sources such as `/dev/zero`.
    pub length: Option<u64>,
}

impl Default for TreeOptions {
    fn default() -> TreeOptions {
        TreeOptions {
            recursive: false,
            preserve: false,
            update: false,
            delete: false,
            dry_run: false,
            no_resume: false,
            include: Vec::new(),
            exclude: Vec::new(),
            direct: Direct::Auto,
            length: None,
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
    /// Pull: what. Push: empty.
    pub sources: Vec<SourceSpec>,
    /// Identifies the same job when it is tried again.
    pub job: [u8; 16],
    /// End-to-end verification, by [`Algorithm`] number.
    pub verify: u8,
    /// Key of the data plane's AEAD; `None` leaves it in clear.
    pub data_key: Option<[u8; 32]>,
    /// Octets per second the source keeps under.
    pub rate_limit: Option<u64>,
    /// Tree options.
    pub options: TreeOptions,
}

/// Answers [`SessionRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionReply {
    /// Number of the session, unique at the accepting end.
    pub session: u32,
    /// Proof for data connections.
    pub token: [u8; 16],
    /// Push: the name the single source gets instead of its own.
    pub rename: Option<Vec<u8>>,
    /// Push: files must be offered first, because some may be there already.
    pub offers: bool,
    /// Push to a place that swallows everything.
    pub discard: bool,
}

/// A free block of the sink, and the right to fill it once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credit {
    /// Number of the block at the sink.
    pub block: u32,
    /// Where its header begins.
    pub addr: u64,
    /// Key of exactly its memory.
    pub rkey: u32,
}

/// Why an entry was not copied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Which; relative to the sink's root.
    pub path: Vec<u8>,
    /// Why.
    pub message: String,
}

/// How reading a large file ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileStatus {
    /// As it was when it began.
    Unchanged,
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
}

/// What the sink wants of an offered file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// All of it.
    Send,
    /// Nothing: it is there.
    Skip,
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
    /// Octets written.
    pub bytes: u64,
    /// Octets that an earlier attempt had verified.
    pub resumed_bytes: u64,
    /// Entries removed.
    pub deleted: u64,
    /// Entries that failed; each was reported.
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
    Abort(String),
    /// Only returns receive credits.
    Receives,
    /// The source has heard that everything is in place.
    Farewell,
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
            Control::Abort(_) => (12, false),
            Control::Receives => (13, false),
            Control::Farewell => (14, false),
        }
    }

    /// The message's octets; `receives` is how many receives the sender has posted anew.
    pub fn encode(&self, receives: u8) -> Vec<u8> {
        let body = match self {
            Control::Session(b) => postcard::to_allocvec(b),
            Control::SessionReply(b) => postcard::to_allocvec(b),
            Control::BlockSize(b) => postcard::to_allocvec(b),
            Control::BlockSizeReply { accepted, largest } => postcard::to_allocvec(&(accepted, largest)),
            Control::Channels(b) | Control::ChannelsReply(b) => postcard::to_allocvec(b),
            Control::RegionRequest | Control::Receives | Control::Farewell => Ok(Vec::new()),
            Control::RegionReply(b) => postcard::to_allocvec(b),
            Control::DataSetComplete(b) => postcard::to_allocvec(b),
            Control::DataSetReply(b) => postcard::to_allocvec(b),
            Control::Report(b) => postcard::to_allocvec(b),
            Control::Offer { batch, entries } => postcard::to_allocvec(&(batch, entries)),
            Control::Verdict { batch, answers } => postcard::to_allocvec(&(batch, answers)),
            Control::FileEnd { file, blocks, status } => postcard::to_allocvec(&(file, blocks, status)),
            Control::Listing { entries, last } => postcard::to_allocvec(&(entries, last)),
            Control::Abort(b) => postcard::to_allocvec(b),
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

    /// Reads one whole message; also returns how many receives its sender posted anew.
    ///
    /// # Errors
    /// [`Malformed`] unless the octets are exactly one valid message.
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
            (12, false) => Control::Abort(get(body, "abort")?),
            (13, false) => get::<()>(body, "receives").map(|()| Control::Receives)?,
            (14, false) => get::<()>(body, "farewell").map(|()| Control::Farewell)?,
            _ => return Err(Malformed("control message type")),
        };
        Ok((message, (flags >> 8) as u8))
    }
}

/// Octets of a block completion notification, the one control message on data channels: a Send
/// behind the write it announces, so that its arrival proves the write's placement.
pub const COMPLETION_LEN: usize = CONTROL_HEADER_LEN + 12;
const COMPLETION_TYPE: u16 = 6;

/// A block completion notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Session.
    pub session: u32,
    /// Sequence number of the block written.
    pub sequence: u32,
    /// Number of the block, from its credit.
    pub block: u32,
}

impl Completion {
    /// The notification's octets.
    pub fn encode(&self) -> [u8; COMPLETION_LEN] {
        let mut out = [0; COMPLETION_LEN];
        out[0..2].copy_from_slice(&COMPLETION_TYPE.to_be_bytes());
        out[4..8].copy_from_slice(&12u32.to_be_bytes());
        out[8..12].copy_from_slice(&self.session.to_be_bytes());
        out[12..16].copy_from_slice(&self.sequence.to_be_bytes());
        out[16..20].copy_from_slice(&self.block.to_be_bytes());
        out
    }

    /// Reads a notification.
    ///
    /// # Errors
    /// [`Malformed`] if it is anything else.
    pub fn decode(bytes: &[u8]) -> Result<Completion, Malformed> {
        let bytes: &[u8; COMPLETION_LEN] = bytes.try_into().map_err(|_| Malformed("block completion"))?;
        let expected = Completion { session: 0, sequence: 0, block: 0 }.encode();
        if bytes[..CONTROL_HEADER_LEN] != expected[..CONTROL_HEADER_LEN] {
            return Err(Malformed("block completion"));
        }
        let at = |i: usize| u32::from_be_bytes(bytes[i..i + 4].try_into().expect("4 octets"));
        Ok(Completion { session: at(8), sequence: at(12), block: at(16) })
    }
}

/// What a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockKind {
    /// Nothing: its reading failed, but its sequence number must be accounted for.
    Void = 0,
    /// A piece of a large file.
    Data = 1,
    /// [`Record`]s.
    Pack = 2,
}

/// Octets of a block's header. The last 16, the digest, are sealed together with the payload.
pub const HEADER_LEN: usize = 64;
const FIXED_LEN: usize = 32;

/// A block's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockHeader {
    /// Session.
    pub session: u32,
    /// Sequence number, from 0, each once.
    pub sequence: u32,
    /// Where the payload belongs in its file.
    pub offset: u64,
    /// Octets of payload.
    pub len: u32,
    /// What it is.
    pub kind: BlockKind,
    /// Digest and payload are sealed.
    pub sealed: bool,
    /// Number of the file within the session.
    pub file: u64,
    /// AEAD tag, if sealed.
    pub tag: [u8; TAG_LEN],
    /// Digest of the payload in clear; see [`BlockHeader::bind`].
    pub digest: [u8; DIGEST_LEN],
}

impl BlockHeader {
    /// Writes the header.
    pub fn encode(&self, out: &mut [u8]) {
        out[..FIXED_LEN].copy_from_slice(&self.fixed());
        out[FIXED_LEN..FIXED_LEN + TAG_LEN].copy_from_slice(&self.tag);
        out[FIXED_LEN + TAG_LEN..HEADER_LEN].copy_from_slice(&self.digest);
    }

    /// The part that is authenticated but not sealed.
    pub fn fixed(&self) -> [u8; FIXED_LEN] {
        let mut out = [0; FIXED_LEN];
        out[0..4].copy_from_slice(&self.session.to_be_bytes());
        out[4..8].copy_from_slice(&self.sequence.to_be_bytes());
        out[8..16].copy_from_slice(&self.offset.to_be_bytes());
        out[16..20].copy_from_slice(&self.len.to_be_bytes());
        out[20] = self.kind as u8;
        out[21] = u8::from(self.sealed);
        out[24..32].copy_from_slice(&self.file.to_be_bytes());
        out
    }

    /// The digest of a payload, bound to the header that says where it belongs, so that neither can
    /// change or be swapped unnoticed.
    pub fn bind(&self, verify: Algorithm, payload: [u8; DIGEST_LEN]) -> [u8; DIGEST_LEN] {
        let header = verify.digest(&self.fixed());
        std::array::from_fn(|i| payload[i] ^ header[i])
    }

    /// Reads a header for a block that holds up to `capacity` octets.
    ///
    /// # Errors
    /// [`Malformed`] for unknown kinds and lengths beyond the block.
    pub fn decode(bytes: &[u8], capacity: usize) -> Result<BlockHeader, Malformed> {
        let bytes: &[u8; HEADER_LEN] = bytes.try_into().map_err(|_| Malformed("block header"))?;
        let u32_at = |i: usize| u32::from_be_bytes(bytes[i..i + 4].try_into().expect("4 octets"));
        let u64_at = |i: usize| u64::from_be_bytes(bytes[i..i + 8].try_into().expect("8 octets"));
        let kind = match bytes[20] {
            0 => BlockKind::Void,
            1 => BlockKind::Data,
            2 => BlockKind::Pack,
            _ => return Err(Malformed("block kind")),
        };
        let len = u32_at(16);
        if len as usize > capacity || bytes[21] > 1 || (kind == BlockKind::Void && len != 0) {
            return Err(Malformed("block length"));
        }
        if u64_at(8).checked_add(len.into()).is_none_or(|end| end > i64::MAX as u64) {
            return Err(Malformed("block offset"));
        }
        Ok(BlockHeader {
            session: u32_at(0),
            sequence: u32_at(4),
            offset: u64_at(8),
            len,
            kind,
            sealed: bytes[21] == 1,
            file: u64_at(24),
            tag: bytes[FIXED_LEN..FIXED_LEN + TAG_LEN].try_into().expect("tag"),
            digest: bytes[FIXED_LEN + TAG_LEN..].try_into().expect("digest"),
        })
    }
}

/// What a file system says of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Meta {
    /// Permissions (and type, which the record's kind repeats), as `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time, seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Size of a file.
    pub size: u64,
    /// Extended attributes, if they are to be kept.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A packed record. Paths are relative to the sink's root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// Make a directory.
    Dir {
        /// Where.
        path: Vec<u8>,
        /// Its attributes; applied at the end, when nothing more is put into it.
        meta: Meta,
    },
    /// A whole small file; its content follows the record.
    File {
        /// Where.
        path: Vec<u8>,
        /// Its attributes.
        meta: Meta,
    },
    /// A large file begins; its blocks follow under this number.
    Begin {
        /// Number within the session.
        file: u64,
        /// Where.
        path: Vec<u8>,
        /// Its attributes.
        meta: Meta,
        /// Verified ranges of an earlier attempt are kept.
        resume: bool,
    },
    /// A symbolic link.
    Symlink {
        /// Where.
        path: Vec<u8>,
        /// What it says.
        target: Vec<u8>,
        /// Its attributes.
        meta: Meta,
    },
    /// Another name of a file of this session.
    Link {
        /// Where.
        path: Vec<u8>,
        /// The first name, relative to the sink's root.
        target: Vec<u8>,
    },
    /// A named pipe, socket or device.
    Special {
        /// Where.
        path: Vec<u8>,
        /// Its attributes.
        meta: Meta,
        /// Device number.
        rdev: u64,
    },
    /// Names that stay in a directory when the rest is deleted.
    Keep {
        /// Which directory.
        path: Vec<u8>,
        /// Names of entries.
        names: Vec<Vec<u8>>,
        /// No more names of this directory will come.
        last: bool,
    },
}

/// Octets in front of a packed record: lengths of the record and of the content behind it.
pub const RECORD_PREFIX_LEN: usize = 8;

impl Record {
    /// The record, encoded.
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("plain data")
    }

    /// The prefix for a record and a content of these lengths.
    pub fn prefix(record_len: usize, content_len: usize) -> [u8; RECORD_PREFIX_LEN] {
        let mut out = [0; RECORD_PREFIX_LEN];
        out[..4].copy_from_slice(&(record_len as u32).to_be_bytes());
        out[4..].copy_from_slice(&(content_len as u32).to_be_bytes());
        out
    }

    /// Takes the first record and its content off a pack.
    ///
    /// # Errors
    /// [`Malformed`] if the pack is cut short or holds something else.
    pub fn split_first(pack: &[u8]) -> Result<(Record, &[u8], &[u8]), Malformed> {
        let (prefix, rest) = pack.split_first_chunk::<RECORD_PREFIX_LEN>().ok_or(Malformed("pack"))?;
        let record_len = u32::from_be_bytes(prefix[..4].try_into().expect("4 octets")) as usize;
        let content_len = u32::from_be_bytes(prefix[4..].try_into().expect("4 octets")) as usize;
        let (record, rest) = rest.split_at_checked(record_len).ok_or(Malformed("pack"))?;
        let (content, rest) = rest.split_at_checked(content_len).ok_or(Malformed("pack"))?;
        match postcard::take_from_bytes(record) {
            Ok((record, [])) => Ok((record, content, rest)),
            _ => Err(Malformed("record")),
        }
    }
}

/// Checks that a path from a peer stays below a root: relative, without empty, `.` or `..`
/// components, without NUL, of bounded length. The empty path is the root itself.
///
/// # Errors
/// [`Malformed`] otherwise.
pub fn check_path(path: &[u8]) -> Result<(), Malformed> {
    if path.is_empty() {
        return Ok(());
    }
    let bad = |c: &[u8]| c.is_empty() || c == b"." || c == b".." || c.len() > 255;
    if path.len() > PATH_MAX || path.contains(&0) || path.split(|b| *b == b'/').any(bad) {
        return Err(Malformed("path"));
    }
    Ok(())
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
                sources: vec![SourceSpec { path: b"x".to_vec(), name: vec![0xff, b'\n'] }],
                job: [3; 16],
                verify: 1,
                data_key: Some([7; 32]),
                rate_limit: Some(9),
                options: TreeOptions { length: Some(5), ..TreeOptions::default() },
            })),
            Control::SessionReply(SessionReply {
                session: 9,
                token: [1; 16],
                rename: Some(b"n".to_vec()),
                offers: true,
                discard: false,
            }),
            Control::BlockSize(1 << 20),
            Control::BlockSizeReply { accepted: false, largest: 1 << 16 },
            Control::Channels(4),
            Control::ChannelsReply(2),
            Control::RegionRequest,
            Control::RegionReply(vec![Credit { block: 1, addr: u64::MAX, rkey: 5 }]),
            Control::DataSetComplete(77),
            Control::DataSetReply(Summary { files: 1, ..Summary::default() }),
            Control::Report(Report { path: b"p".to_vec(), message: "m".into() }),
            Control::Offer { batch: 1, entries: vec![OfferEntry { path: b"p".to_vec(), size: 1, mtime: (-1, 5) }] },
            Control::Verdict { batch: 1, answers: vec![Answer::Send, Answer::Skip, Answer::Except(vec![(0, 5)])] },
            Control::FileEnd { file: 1, blocks: 2, status: FileStatus::Failed("gone".into()) },
            Control::Listing { entries: vec![], last: true },
            Control::Abort("why".into()),
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
        fn arbitrary_octets_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), kind in 0u16..20, flags in 0u16..2) {
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
