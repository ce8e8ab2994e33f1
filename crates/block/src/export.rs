//! Exports: disks under their names, and the words that describe them.
//!
//! `NAME=PATH[,OPTION…]`. The path is a file, a block device, `mem:SIZE`, or `stripe:CHUNK:PATH:PATH…`; options
//! are set on the disk or put a layer on what stands to the left of them.

use crate::backend::{Backend, Geometry, Mode};
use crate::fence::Fence;
use crate::identity::{self, Identity};
use crate::layer::{self, LayerSpec, LayerSyntaxError};
use crate::served::Served;
use crate::source::Source;
use std::sync::Arc;
use thruway_engine::units::{Invalid, parse_size};
use thruway_options::{OptionError, OptionKind, Required, Schema, Set};

/// A disk under a name.
pub struct Export {
    /// Name for clients.
    pub name: String,
    /// For people.
    pub description: String,
    /// Unique and constant: initiators identify the disk by it.
    pub identity: Identity,
    /// The disk and its identity outlive this process.
    pub is_lasting: bool,
    /// The disk, with its layers.
    pub backend: Arc<Served>,
    /// Kind of storage, for clients.
    pub kind: &'static str,
    /// Read-only for all clients.
    pub read_only: bool,
    /// Requests are cut into pieces of this length, which go to storage and network on their own.
    pub chunk: u32,
    /// The iSCSI target that it is a unit of; by default one of its own name.
    pub target: Option<String>,
    /// Bytes of a SCSI logical block.
    pub sector: u32,
    /// Names of the clients that may use it. If empty: all clients of the service.
    pub allow: Vec<String>,
    /// Effect of SCSI reservations on clients of other protocols.
    pub fence: Fence,
}

/// A parsed export, before anything is opened.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Name for clients.
    pub name: String,
    /// Storage of the data.
    pub source: Source,
    /// Read-only for all clients.
    pub read_only: bool,
    /// Way to the storage; if nothing is said, past the page cache under a cache of our own, else through it.
    pub mode: Option<Mode>,
    /// Length of pieces; if nothing is said, what the storage has on one of its members, or [`CHUNK`].
    pub chunk: Option<u32>,
    /// The iSCSI target.
    pub target: Option<String>,
    /// Bytes of a SCSI logical block.
    pub sector: u32,
    /// Identity of the disk. `None`: that of its storage.
    pub uuid: Option<Identity>,
    /// Initiators and NBD clients that may use it, by name; everybody who may use the service, if there are none.
    pub allow: Vec<String>,
    /// From the lowest to the highest.
    pub layers: Vec<LayerSpec>,
}

/// The options of a disk. Layers are words behind them, but no options.
pub const OPTIONS: Schema<Spec> = Schema {
    what: "disk",
    required: &[
        Required { key: "name", about: "Its name for clients" },
        Required { key: "path", about: "A file, a block device, `mem:SIZE` or `stripe:CHUNK:PATH:PATH...`" },
    ],
    hints: &[],
    options: &[
        OptionKind {
            name: "ro",
            key: "read-only",
            set: Set::Flag { set: |spec, value| spec.read_only = value, off: None },
            get: |spec| spec.read_only.to_string(),
            default: "false",
            about: "Read-only",
            is_reloaded: false,
        },
        OptionKind {
            name: "mode",
            key: "mode",
            set: Set::Choice(&[
                ("direct", |spec| spec.mode = Some(Mode::Direct)),
                ("cached", |spec| spec.mode = Some(Mode::Cached)),
                ("writeback", |spec| spec.mode = Some(Mode::Writeback)),
            ]),
            get: |spec| spec.mode.map_or("", mode_name).into(),
            default: "",
            about: "`direct`: past the page cache; `cached`: reads through it; `writeback`: both through it. Default: direct under a \
                    cache layer, else writeback",
            is_reloaded: false,
        },
        OptionKind {
            name: "chunk",
            key: "chunk",
            set: Set::Text {
                value: "SIZE",
                set: |spec, value| {
                    spec.chunk = Some(parse_chunk(value).map_err(OptionError::other)?);
                    Ok(())
                },
            },
            get: |spec| spec.chunk.map_or(String::new(), |chunk| chunk.to_string()),
            default: "",
            about: "Length of the pieces that requests are cut into, 16K to 4M. Default: what a stripe or an array has on one \
                    member, or 256K",
            is_reloaded: false,
        },
        OptionKind {
            name: "target",
            key: "target",
            set: Set::Text {
                value: "NAME",
                set: |spec, value| {
                    spec.target = Some(value).filter(|value| !value.is_empty()).map(String::from);
                    spec.target.as_ref().map(drop).ok_or_else(|| OptionError::invalid("target", value, "a name"))
                },
            },
            get: |spec| spec.target.clone().unwrap_or_default(),
            default: "",
            about: "Target for iSCSI; several disks may have the same. Default: one of the disk's name",
            is_reloaded: false,
        },
        OptionKind {
            name: "sector",
            key: "sector",
            set: Set::Choice(&[("512", |spec| spec.sector = 512), ("4096", |spec| spec.sector = 4096)]),
            get: |spec| spec.sector.to_string(),
            default: "512",
            about: "Bytes of a SCSI block",
            is_reloaded: false,
        },
        OptionKind {
            name: "uuid",
            key: "uuid",
            set: Set::Text {
                value: "UUID",
                set: |spec, value| {
                    spec.uuid = Some(identity::parse(value).map_err(OptionError::other)?);
                    Ok(())
                },
            },
            get: |spec| spec.uuid.map_or(String::new(), |uuid| uuid.iter().map(|byte| format!("{byte:02x}")).collect()),
            default: "",
            about: "Identity of the disk, as initiators see it. Default: the device's own identifier, or one kept with the file",
            is_reloaded: false,
        },
        OptionKind {
            name: "allow",
            key: "allow",
            set: Set::List { value: "NAME", separator: '|', set: |spec, names| spec.set_allow(names) },
            get: |spec| spec.allow.join("|"),
            default: "",
            about: "Clients that may use it: CHAP names, iSCSI names, DNS names of certificates. Default: all clients of the service",
            is_reloaded: false,
        },
    ],
};

/// An export that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A name or a path that is not as expected.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// An invalid value of an option.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// There is no such option or layer.
    #[error("unknown option '{0}' of a disk (expected {options} or a layer: {layers})", options = OPTIONS.syntax(), layers = layer::syntax())]
    UnknownOption(String),
    /// An invalid value of a layer.
    #[error(transparent)]
    Layer(#[from] LayerSyntaxError),
}

/// The default chunk size.
pub const CHUNK: u32 = 256 << 10;
pub(crate) const CHUNK_MIN: u64 = 16 << 10;
pub(crate) const CHUNK_MAX: u64 = 4 << 20;

impl Spec {
    /// Reads `NAME=PATH[,OPTION…]`.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn parse(text: &str) -> Result<Spec, SpecError> {
        let (name, rest) = text.split_once('=').ok_or_else(|| Invalid::new("disk", text, "NAME=PATH[,OPTION...]"))?;
        let mut words = rest.split(',');
        let mut spec = Spec::new(name, words.next().unwrap_or(""))?;
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            if !OPTIONS.set_word(&mut spec, word)? && !spec.layer(key, value)? {
                return Err(SpecError::UnknownOption(word.into()));
            }
        }
        Ok(spec)
    }

    /// An export without options: a name, and what is after it in the text of an export.
    ///
    /// # Errors
    /// As [`Spec::parse`].
    pub fn new(name: &str, source: &str) -> Result<Spec, SpecError> {
        if name.is_empty() || name.len() > 200 {
            return Err(Invalid::new("name of a disk", name, "1 to 200 bytes").into());
        }
        Ok(Spec {
            name: name.into(),
            source: Source::parse(source)?,
            read_only: false,
            mode: None,
            chunk: None,
            target: None,
            sector: 512,
            uuid: None,
            allow: Vec::new(),
            layers: Vec::new(),
        })
    }

    /// Sets the names of the clients that may use the disk. None would let in everybody.
    fn set_allow(&mut self, names: &[&str]) -> Result<(), OptionError> {
        if names.is_empty() || names.iter().any(|name| name.is_empty()) {
            return Err(OptionError::invalid("list of clients", names.join("|"), "their names"));
        }
        self.allow = names.iter().map(ToString::to_string).collect();
        Ok(())
    }

    /// Pushes a layer onto the stack. Returns false for an unknown one.
    ///
    /// # Errors
    /// As [`Spec::parse`].
    pub fn layer(&mut self, key: &str, value: &str) -> Result<bool, SpecError> {
        let Some(layer) = LayerSpec::parse(key, value)? else { return Ok(false) };
        self.layers.push(layer);
        Ok(true)
    }
}

impl Export {
    /// A disk of the caller's own, under a name, to everybody who may use the service. Clients know it as a new disk each time;
    /// who keeps one for longer sets [`Export::identity`] and [`Export::is_lasting`].
    pub fn new(name: &str, backend: Arc<dyn Backend>) -> Export {
        Export {
            name: name.into(),
            description: "another program's".into(),
            identity: thruway_engine::random::random(),
            is_lasting: false,
            read_only: backend.geometry().read_only,
            backend: Arc::new(Served::new(backend)),
            kind: "a disk of another program",
            chunk: CHUNK,
            target: None,
            sector: 512,
            allow: Vec::new(),
            fence: Fence::default(),
        }
    }

    /// Whether somebody of one of these names may use it. In iSCSI names the case of letters means nothing (RFC 3722).
    pub fn is_open_to<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> bool {
        self.allow.is_empty() || names.into_iter().any(|name| self.allow.iter().any(|allowed| is_same(allowed, name)))
    }

    /// What clients are told.
    pub fn geometry(&self) -> Geometry {
        let geometry = self.backend.geometry();
        Geometry { read_only: geometry.read_only || self.read_only, ..geometry }
    }
}

fn is_same(allowed: &str, name: &str) -> bool {
    let folds = ["iqn.", "eui.", "naa."].iter().any(|kind| allowed.starts_with(kind));
    allowed == name || (folds && allowed.eq_ignore_ascii_case(name))
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Direct => "direct",
        Mode::Cached => "cached",
        Mode::Writeback => "writeback",
    }
}

fn parse_chunk(text: &str) -> Result<u32, Invalid> {
    let size = parse_size(text)?;
    if (CHUNK_MIN..=CHUNK_MAX).contains(&size) && size.is_power_of_two() {
        return Ok(size as u32);
    }
    Err(Invalid::new("chunk", text, "a power of two from 16K to 4M"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_an_export_are_read() {
        let spec =
            Spec::parse("disk=/srv/a.img,ro,mode=direct,rate=10M,delay=1ms/2ms,fault=read:0.5,log=/tmp/l").unwrap();
        assert_eq!((spec.name.as_str(), spec.read_only, spec.mode), ("disk", true, Some(Mode::Direct)));
        assert_eq!(spec.source, Source::Path("/srv/a.img".into()));
        let layers: Vec<String> = spec.layers.iter().map(|layer| format!("{layer:?}")).collect();
        assert_eq!(layers, ["rate=10M", "delay=1ms/2ms", "fault=read:0.5", "log=/tmp/l"]);
        assert_eq!(Spec::parse("m=mem:1G").unwrap().source, Source::Memory(1 << 30));
        let Source::Stripe { chunk, members } = Spec::parse("s=stripe:64K:mem:1M:/b").unwrap().source else {
            panic!("a stripe")
        };
        assert_eq!((chunk, members), (65536, vec![Source::Memory(1 << 20), Source::Path("/b".into())]));
    }

    #[test]
    fn pieces_lie_on_one_member_unless_something_else_is_said() {
        let chunk = |text: &str| Spec::parse(text).unwrap().open(None).unwrap().chunk;
        assert_eq!(chunk("m=mem:1M"), CHUNK);
        assert_eq!(chunk("s=stripe:32K:mem:1M:mem:1M"), 32 << 10);
        assert_eq!(chunk("s=stripe:32K:mem:1M:mem:1M,rate=1G"), 32 << 10);
        assert_eq!(chunk("s=stripe:4K:mem:1M:mem:1M"), CHUNK, "too little for a piece");
        assert_eq!(chunk("s=stripe:32K:mem:1M:mem:1M,chunk=64K"), 64 << 10);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, named) in [
            ("disk", "NAME=PATH"),
            ("=x", "name"),
            ("a=", "a path"),
            ("a=mem:12Q", "'12Q'"),
            ("a=x,mode=fast", "'fast'"),
            ("a=x,turbo", "'turbo'"),
            ("a=x,ro=yes", "'yes'"),
            ("a=x,fault=2", "'2'"),
            ("a=x,fault=trim:1", "'trim'"),
            ("a=x,delay=5", "'5'"),
            ("a=x,cache=much", "'much'"),
            ("a=x,chunk=3K", "chunk '3K'"),
            ("a=x,allow=", "clients"),
            ("a=x,allow=one||two", "clients"),
            ("a=x,cache=1M:volatile", ":writeback"),
            ("a=stripe:64K:/one", "stripe:"),
            ("a=mem:99999999999T", "size"),
        ] {
            let message = Spec::parse(text).unwrap_err().to_string();
            assert!(message.contains(named), "{text}: {message}");
        }
    }
}
