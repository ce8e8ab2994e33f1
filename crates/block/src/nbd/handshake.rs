//! Negotiation: options and their answers, from the client's flags to the first request.

use super::wire::{
    Fields, Form, HandshakeFlags, IHAVEOPT, NBDMAGIC, PAYLOAD_MAX, TransmissionFlags, info, option, option_reply, reply,
};
use crate::backend::Geometry;
use crate::export::Export;
use std::sync::Arc;

/// Bytes of an option's data; longer ones are refused.
pub const OPTION_LEN_MAX: u32 = 64 << 10;
/// Bytes of a name, as the specification has it.
const NAME_MAX: usize = 4096;
/// Context queries in one option.
const QUERIES_MAX: u32 = 64;
/// Options before a client has to come to the point.
const OPTIONS_MAX: u32 = 1024;
/// The only metadata context there is.
const CONTEXT: &[u8] = b"base:allocation";
/// The number that stands for it in replies.
pub const CONTEXT_ID: u32 = 1;

/// How TLS is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tls {
    /// It is not offered.
    Off,
    /// Nothing is served without it.
    Required,
}

/// What was agreed on.
#[derive(Clone)]
pub struct Agreement {
    /// The export.
    pub export: Arc<Export>,
    /// The form of replies.
    pub form: Form,
    /// Block status was asked for.
    pub status: bool,
    /// What the client was told.
    pub geometry: Geometry,
}

/// What to do after an option.
pub enum Next {
    /// Send this and read on.
    Reply(Vec<u8>),
    /// Send this, then start TLS.
    StartTls(Vec<u8>),
    /// Send this, then serve requests.
    Serve(Vec<u8>, Box<Agreement>),
    /// Send this and close.
    Close(Vec<u8>),
}

/// A negotiation.
pub struct Handshake {
    exports: Arc<[Arc<Export>]>,
    /// What the client has proved to be called.
    names: Vec<String>,
    no_zeroes: bool,
    tls: Tls,
    encrypted: bool,
    form: Form,
    /// The export that contexts were chosen for.
    context_of: Option<String>,
    options: u32,
}

/// What a server says first.
pub fn greeting() -> [u8; 18] {
    let mut out = [0; 18];
    out[..8].copy_from_slice(&NBDMAGIC.to_be_bytes());
    out[8..16].copy_from_slice(&IHAVEOPT.to_be_bytes());
    let flags = HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES;
    out[16..].copy_from_slice(&(flags.bits() as u16).to_be_bytes());
    out
}

impl Handshake {
    /// A negotiation with a client that sent these flags; `None` if they are not understood.
    pub fn new(exports: Arc<[Arc<Export>]>, tls: Tls, client: [u8; 4]) -> Option<Handshake> {
        let flags = HandshakeFlags::from_bits(u32::from_be_bytes(client))?;
        Some(Handshake {
            exports,
            names: Vec::new(),
            no_zeroes: flags.contains(HandshakeFlags::NO_ZEROES),
            tls,
            encrypted: false,
            form: Form::Simple,
            context_of: None,
            options: 0,
        })
    }

    /// Reads the header of an option: its number and the length of its data. `None` if it is none.
    pub fn header(bytes: &[u8; 16]) -> Option<(u32, u32)> {
        let mut fields = Fields(bytes);
        let magic = fields.take(8)?;
        (magic == IHAVEOPT.to_be_bytes()).then(|| Some((fields.u32()?, fields.u32()?)))?
    }

    /// The answer to an option whose data is too long to be read.
    pub fn too_long(&mut self, number: u32) -> Next {
        if self.is_one_too_many() || number == option::EXPORT_NAME {
            return Next::Close(Vec::new());
        }
        Next::Reply(option_reply(number, reply::ERR_TOO_BIG, b"the option is too long"))
    }

    /// TLS is up, with a client of these names; what was agreed on before does not count.
    pub fn encrypted(&mut self, names: Vec<String>) {
        self.encrypted = true;
        self.names = names;
        self.form = Form::Simple;
        self.context_of = None;
    }

    /// The answer to an option.
    pub fn option(&mut self, number: u32, data: &[u8]) -> Next {
        if self.is_one_too_many() {
            return Next::Close(Vec::new());
        }
        let insecure = self.tls == Tls::Required && !self.encrypted;
        match number {
            option::EXPORT_NAME if insecure => Next::Close(Vec::new()),
            option::EXPORT_NAME => self.export_name(data),
            option::ABORT => Next::Close(option_reply(number, reply::ACK, b"")),
            option::STARTTLS => self.start_tls(data),
            _ if insecure => refuse(number, reply::ERR_TLS_REQD, "only served over TLS"),
            option::LIST => self.list(data),
            option::INFO | option::GO => self.go(number, data),
            option::STRUCTURED_REPLY => self.choose(number, data, Form::Structured),
            option::EXTENDED_HEADERS => self.choose(number, data, Form::Extended),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.contexts(number, data),
            _ => refuse(number, reply::ERR_UNSUP, "not an option of this server"),
        }
    }

    /// Counts an option.
    fn is_one_too_many(&mut self) -> bool {
        self.options += 1;
        self.options > OPTIONS_MAX
    }

    /// The exports that this client may use; of others it is not told.
    fn visible(&self) -> impl Iterator<Item = &Arc<Export>> {
        self.exports.iter().filter(|export| export.is_open_to(self.names.iter().map(String::as_str)))
    }

    /// The export of a name; the empty one means the first.
    fn find(&self, name: &[u8]) -> Option<&Arc<Export>> {
        if name.is_empty() {
            return self.visible().find(|e| e.name.is_empty()).or(self.visible().next());
        }
        self.visible().find(|e| e.name.as_bytes() == name)
    }

    fn agreement(&self, export: &Arc<Export>) -> Agreement {
        Agreement {
            export: Arc::clone(export),
            form: self.form,
            status: self.context_of.as_ref() == Some(&export.name),
            geometry: export.geometry(),
        }
    }

    fn export_name(&self, name: &[u8]) -> Next {
        let Some(export) = self.find(name) else { return Next::Close(Vec::new()) };
        let agreement = self.agreement(export);
        let mut out = Vec::new();
        out.extend_from_slice(&agreement.geometry.size.to_be_bytes());
        out.extend_from_slice(&flags(&agreement.geometry, self.form).bits().to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        Next::Serve(out, Box::new(agreement))
    }

    fn start_tls(&self, data: &[u8]) -> Next {
        match (self.tls, self.encrypted) {
            _ if !data.is_empty() => refuse(option::STARTTLS, reply::ERR_INVALID, "STARTTLS has no data"),
            (Tls::Off, _) => refuse(option::STARTTLS, reply::ERR_POLICY, "TLS is not set up here"),
            (_, true) => refuse(option::STARTTLS, reply::ERR_INVALID, "TLS is already in use"),
            (Tls::Required, false) => Next::StartTls(option_reply(option::STARTTLS, reply::ACK, b"")),
        }
    }

    fn list(&self, data: &[u8]) -> Next {
        if !data.is_empty() {
            return refuse(option::LIST, reply::ERR_INVALID, "LIST has no data");
        }
        let mut out = Vec::new();
        for export in self.visible() {
            let mut data = (export.name.len() as u32).to_be_bytes().to_vec();
            data.extend_from_slice(export.name.as_bytes());
            data.extend_from_slice(export.kind.as_bytes());
            out.extend(option_reply(option::LIST, reply::SERVER, &data));
        }
        out.extend(option_reply(option::LIST, reply::ACK, b""));
        Next::Reply(out)
    }

    fn go(&self, number: u32, data: &[u8]) -> Next {
        let Some((name, wanted)) = parse_go(data) else {
            return refuse(number, reply::ERR_INVALID, "the option's data is not as it should be");
        };
        let Some(export) = self.find(name) else {
            return refuse(number, reply::ERR_UNKNOWN, "no such export");
        };
        let agreement = self.agreement(export);
        let geometry = &agreement.geometry;
        let mut out = Vec::new();
        let mut tell = |kind: u16, data: &[u8]| {
            out.extend(option_reply(number, reply::INFO, &[&kind.to_be_bytes()[..], data].concat()));
        };
        let flags = flags(geometry, self.form).bits().to_be_bytes();
        tell(info::EXPORT, &[&geometry.size.to_be_bytes()[..], &flags].concat());
        if wanted.contains(&info::NAME) {
            tell(info::NAME, export.name.as_bytes());
        }
        if wanted.contains(&info::DESCRIPTION) {
            tell(info::DESCRIPTION, export.kind.as_bytes());
        }
        let sizes = [geometry.block, geometry.preferred.clamp(4096, PAYLOAD_MAX), PAYLOAD_MAX];
        tell(info::BLOCK_SIZE, &sizes.map(u32::to_be_bytes).concat());
        out.extend(option_reply(number, reply::ACK, b""));
        if number == option::GO { Next::Serve(out, Box::new(agreement)) } else { Next::Reply(out) }
    }

    fn choose(&mut self, number: u32, data: &[u8], form: Form) -> Next {
        if !data.is_empty() {
            return refuse(number, reply::ERR_INVALID, "the option has no data");
        }
        if self.form == form || (self.form == Form::Extended && form == Form::Structured) {
            return refuse(number, reply::ERR_INVALID, "already agreed on");
        }
        self.form = form;
        Next::Reply(option_reply(number, reply::ACK, b""))
    }

    fn contexts(&mut self, number: u32, data: &[u8]) -> Next {
        if self.form == Form::Simple {
            return refuse(number, reply::ERR_INVALID, "contexts need structured replies");
        }
        let setting = number == option::SET_META_CONTEXT;
        if setting {
            self.context_of = None;
        }
        let Some((name, queries)) = parse_contexts(data) else {
            return refuse(number, reply::ERR_INVALID, "the option's data is not as it should be");
        };
        let Some(export) = self.find(name) else {
            return refuse(number, reply::ERR_UNKNOWN, "no such export");
        };
        let all = !setting && queries.is_empty();
        let chosen = queries.iter().any(|q| *q == CONTEXT || (!setting && *q == b"base:"));
        let mut out = Vec::new();
        if all || chosen {
            let id = if setting { CONTEXT_ID } else { 0 };
            out.extend(option_reply(number, reply::META_CONTEXT, &[&id.to_be_bytes()[..], CONTEXT].concat()));
        }
        if setting && chosen {
            self.context_of = Some(export.name.clone());
        }
        out.extend(option_reply(number, reply::ACK, b""));
        Next::Reply(out)
    }
}

fn refuse(option: u32, error: u32, why: &str) -> Next {
    Next::Reply(option_reply(option, error, why.as_bytes()))
}

fn parse_go(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let mut fields = Fields(data);
    let name = fields.string().filter(|n| n.len() <= NAME_MAX)?;
    let count = fields.u16()?;
    let wanted = (0..count).map(|_| fields.u16()).collect::<Option<_>>()?;
    fields.0.is_empty().then_some((name, wanted))
}

fn parse_contexts(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut fields = Fields(data);
    let name = fields.string().filter(|n| n.len() <= NAME_MAX)?;
    let count = fields.u32().filter(|n| *n <= QUERIES_MAX)?;
    let queries = (0..count).map(|_| fields.string()).collect::<Option<_>>()?;
    fields.0.is_empty().then_some((name, queries))
}

/// What an export offers.
fn flags(geometry: &Geometry, form: Form) -> TransmissionFlags {
    use TransmissionFlags as F;
    let mut flags = F::HAS_FLAGS | F::SEND_FLUSH | F::SEND_FUA | F::SEND_CACHE;
    if geometry.read_only {
        flags |= F::READ_ONLY;
    } else {
        flags |= F::SEND_TRIM | F::SEND_WRITE_ZEROES | F::SEND_FAST_ZERO;
    }
    flags.set(F::CAN_MULTI_CONN, geometry.shared);
    flags.set(F::SEND_DF, form != Form::Simple);
    flags
}
