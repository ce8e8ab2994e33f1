//! Bytes of the NBD protocol. Names and numbers are those of the specification; everything is big-endian.

use crate::big_endian::{be16, be32, be64};
use bitflags::bitflags;
use smallvec::SmallVec;

/// `NBDMAGIC`, the first bytes of a server.
pub const NBDMAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// `IHAVEOPT`, before every option and as the second word of a server.
pub const IHAVEOPT: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// Before every reply to an option.
pub const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Bytes of a compact request header.
pub const REQUEST_LEN: usize = 28;
/// Bytes of an extended request header.
pub const EXTENDED_REQUEST_LEN: usize = 32;

/// Most bytes of one request's payload: what clients take for granted.
pub const PAYLOAD_MAX: u32 = 32 << 20;

bitflags! {
    /// Flags of the handshake, the server's and the client's.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct HandshakeFlags: u32 {
        /// `NBD_FLAG_FIXED_NEWSTYLE`
        const FIXED_NEWSTYLE = 1;
        /// `NBD_FLAG_NO_ZEROES`
        const NO_ZEROES = 2;
    }

    /// What an export offers (`NBD_FLAG_…`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct TransmissionFlags: u16 {
        /// `NBD_FLAG_HAS_FLAGS`
        const HAS_FLAGS = 1;
        /// `NBD_FLAG_READ_ONLY`
        const READ_ONLY = 1 << 1;
        /// `NBD_FLAG_SEND_FLUSH`
        const SEND_FLUSH = 1 << 2;
        /// `NBD_FLAG_SEND_FUA`
        const SEND_FUA = 1 << 3;
        /// `NBD_FLAG_SEND_TRIM`
        const SEND_TRIM = 1 << 5;
        /// `NBD_FLAG_SEND_WRITE_ZEROES`
        const SEND_WRITE_ZEROES = 1 << 6;
        /// `NBD_FLAG_SEND_DF`
        const SEND_DF = 1 << 7;
        /// `NBD_FLAG_CAN_MULTI_CONN`
        const CAN_MULTI_CONN = 1 << 8;
        /// `NBD_FLAG_SEND_CACHE`
        const SEND_CACHE = 1 << 10;
        /// `NBD_FLAG_SEND_FAST_ZERO`
        const SEND_FAST_ZERO = 1 << 11;
    }

    /// Flags of a request (`NBD_CMD_FLAG_…`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct CommandFlags: u16 {
        /// `NBD_CMD_FLAG_FUA`
        const FUA = 1;
        /// `NBD_CMD_FLAG_NO_HOLE`
        const NO_HOLE = 1 << 1;
        /// `NBD_CMD_FLAG_DF`
        const DF = 1 << 2;
        /// `NBD_CMD_FLAG_REQ_ONE`
        const REQ_ONE = 1 << 3;
        /// `NBD_CMD_FLAG_FAST_ZERO`
        const FAST_ZERO = 1 << 4;
        /// `NBD_CMD_FLAG_PAYLOAD_LEN`
        const PAYLOAD_LEN = 1 << 5;
        /// Those that have no name.
        const _ = !0;
    }
}

/// Options (`NBD_OPT_…`).
pub mod option {
    #![allow(missing_docs)]
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options (`NBD_REP_…`).
pub mod reply {
    #![allow(missing_docs)]
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    pub const ERR_POLICY: u32 = (1 << 31) + 2;
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    pub const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    pub const ERR_BLOCK_SIZE_REQD: u32 = (1 << 31) + 8;
    pub const ERR_TOO_BIG: u32 = (1 << 31) + 9;
}

/// Kinds of information (`NBD_INFO_…`).
pub mod info {
    #![allow(missing_docs)]
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Error numbers of replies (`NBD_E…`).
pub mod error {
    #![allow(missing_docs)]
    pub const EPERM: u32 = 1;
    pub const EIO: u32 = 5;
    pub const ENOMEM: u32 = 12;
    pub const EINVAL: u32 = 22;
    pub const ENOSPC: u32 = 28;
    pub const EOVERFLOW: u32 = 75;
    pub const ENOTSUP: u32 = 95;
    pub const ESHUTDOWN: u32 = 108;

    /// The number for a failure of the storage.
    pub fn of(error: &std::io::Error) -> u32 {
        match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES | libc::EROFS) => EPERM,
            Some(libc::ENOMEM) => ENOMEM,
            Some(libc::EINVAL) => EINVAL,
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => ENOSPC,
            Some(libc::EOPNOTSUPP) => ENOTSUP,
            Some(libc::ESHUTDOWN) => ESHUTDOWN,
            _ => EIO,
        }
    }
}

/// What a request asks for (`NBD_CMD_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
    /// None that is known.
    Unknown(u16),
}

impl Command {
    fn of(number: u16) -> Command {
        match number {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            other => Command::Unknown(other),
        }
    }
}

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// How.
    pub flags: CommandFlags,
    /// What.
    pub command: Command,
    /// The client's name for it.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes, of the disk or of the payload.
    pub len: u64,
}

impl Request {
    /// Bytes of a header.
    pub fn header_len(extended: bool) -> usize {
        if extended { EXTENDED_REQUEST_LEN } else { REQUEST_LEN }
    }

    /// Reads a header of [`Request::header_len`] bytes; `None` if its magic is wrong.
    ///
    /// # Panics
    /// If the header is shorter.
    pub fn decode(header: &[u8], extended: bool) -> Option<Request> {
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        if be32(header, 0) != magic {
            return None;
        }
        Some(Request {
            flags: CommandFlags::from_bits_retain(be16(header, 4)),
            command: Command::of(be16(header, 6)),
            cookie: be64(header, 8),
            offset: be64(header, 16),
            len: if extended { be64(header, 24) } else { be32(header, 24).into() },
        })
    }

    /// Bytes of payload that follow the header.
    pub fn payload_len(&self, extended: bool) -> u64 {
        let has =
            if extended { self.flags.contains(CommandFlags::PAYLOAD_LEN) } else { self.command == Command::Write };
        if has { self.len } else { 0 }
    }
}

/// Which form replies have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One reply for each request.
    Simple,
    /// Chunks with lengths of 32 bits.
    Structured,
    /// Chunks with lengths of 64 bits.
    Extended,
}

/// Types of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum ChunkType {
    /// Nothing.
    None = 0,
    /// Offset, data.
    OffsetData = 1,
    /// Offset, length of zeroes.
    OffsetHole = 2,
    /// Context, descriptors of 32 bits.
    BlockStatus = 5,
    /// Context, count, descriptors of 64 bits.
    BlockStatusExt = 6,
    /// Number, message.
    Error = (1 << 15) + 1,
}

/// The bytes in front of data.
pub type Header = SmallVec<[u8; 64]>;

/// A simple reply.
pub fn simple_reply(error: u32, cookie: u64) -> Header {
    let mut out = Header::new();
    out.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&error.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
    out
}

/// A chunk's header, for `len` bytes to follow. `request` is what it answers; the last of its chunks says
/// so by `done`.
///
/// # Panics
/// For simple replies, which have none.
pub fn chunk(form: Form, kind: ChunkType, done: bool, request: &Request, len: u64) -> Header {
    let mut out = Header::new();
    let magic = match form {
        Form::Structured => STRUCTURED_REPLY_MAGIC,
        Form::Extended => EXTENDED_REPLY_MAGIC,
        Form::Simple => panic!("simple replies have no chunks"),
    };
    out.extend_from_slice(&magic.to_be_bytes());
    out.extend_from_slice(&u16::from(done).to_be_bytes());
    out.extend_from_slice(&(kind as u16).to_be_bytes());
    out.extend_from_slice(&request.cookie.to_be_bytes());
    if form == Form::Extended {
        out.extend_from_slice(&request.offset.to_be_bytes());
        out.extend_from_slice(&len.to_be_bytes());
    } else {
        out.extend_from_slice(&u32::try_from(len).expect("chunks are short").to_be_bytes());
    }
    out
}

/// The reply to an option.
pub fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(20 + data.len());
    out.extend_from_slice(&REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
    out
}

/// Takes apart the data of an option.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// The next bytes.
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(first)
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> Option<u16> {
        self.take(2).map(|bytes| be16(bytes, 0))
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.take(4).map(|bytes| be32(bytes, 0))
    }

    /// A string with its length before it.
    pub fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.take(len as usize)
    }
}
