//! Layers: each is a disk on top of another, and they stack in any order.
//!
//! A layer is a file of this module with a type that implements [`Layer`], whose methods forward to the disk below unless they are
//! defined, and a [`LayerKind`], which says how it is written and made. To add one, write its file and name it in [`KINDS`]:
//! command line, configuration file, help and book come from there.

mod delay;
mod fault;
mod log;
mod overlay;
mod rate;
mod stripe;

pub use delay::Delay;
pub use fault::{Fault, Kind};
pub use log::Log;
pub use overlay::Overlay;
pub use rate::Rate;
pub use stripe::Stripe;

use crate::backend::{Backend, Extent, Geometry, Lent, Op, Zero};
use crate::cache;
use crate::cache::persist::CacheFile;
use crate::export::SpecError;
use crate::open::OpenError;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use thruway_engine::{Reactors, Segment};

/// All kinds of layers, in the order of the documentation.
pub const KINDS: &[LayerKind] = &[cache::layer::KIND, overlay::KIND, rate::KIND, delay::KIND, fault::KIND, log::KIND];

macro_rules! forwarded {
    ($(fn $name:ident(&self $(, $arg:ident: $ty:ty)*) -> $ret:ty;)*) => {
        /// A disk that stands on another one. What it does not define, the disk below does. Only [`Layer::lend`] and
        /// [`Layer::prefetch`] are not forwarded: they read, and would pass by what a layer does to reads.
        pub trait Layer: Send + Sync {
            /// The disk below.
            fn inner(&self) -> &dyn Backend;

            $(
                #[doc = concat!("[`Backend::", stringify!($name), "`]; unless defined, that of the disk below.")]
                fn $name(&self $(, $arg: $ty)*) -> $ret {
                    self.inner().$name($($arg),*)
                }
            )*

            /// [`Backend::lend`]; unless defined, nothing is lent.
            fn lend(&self, _at: u64, _len: usize) -> Option<Lent> {
                None
            }

            /// [`Backend::prefetch`]; unless defined, nothing is fetched.
            fn prefetch(&self, _at: u64, _len: u64) -> Op<'_, ()> {
                Box::pin(std::future::ready(Ok(())))
            }
        }

        impl<L: Layer> Backend for L {
            $(
                fn $name(&self $(, $arg: $ty)*) -> $ret {
                    Layer::$name(self $(, $arg)*)
                }
            )*

            fn lend(&self, at: u64, len: usize) -> Option<Lent> {
                Layer::lend(self, at, len)
            }

            fn prefetch(&self, at: u64, len: u64) -> Op<'_, ()> {
                Layer::prefetch(self, at, len)
            }
        }
    };
}

forwarded! {
    fn geometry(&self) -> Geometry;
    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment>;
    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()>;
    fn flush(&self) -> Op<'_, ()>;
    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()>;
    fn discard(&self, at: u64, len: u64) -> Op<'_, ()>;
    fn extents(&self, at: u64, len: u64, most: usize) -> Op<'_, Vec<Extent>>;
    fn hint_sequential(&self, at: u64, len: u64) -> ();
    fn summary(&self) -> Option<String>;
}

/// A kind of layer: how it is written, and what it is good for.
pub struct LayerKind {
    /// What stands before the `=`.
    pub name: &'static str,
    /// `NAME=VALUE` with its parts, as users are shown it.
    pub syntax: &'static str,
    /// What it does, in a sentence.
    pub about: &'static str,
    /// Reads the value.
    pub parse: fn(&str) -> Result<Arc<dyn LayerConfig>, SpecError>,
}

/// What the text of a layer says, before anything is opened.
pub trait LayerConfig: fmt::Debug + Send + Sync {
    /// Puts the layer on a disk.
    ///
    /// # Errors
    /// [`OpenError`].
    fn put_on(&self, below: Arc<dyn Backend>, opening: &mut Opening<'_>) -> Result<Arc<dyn Backend>, OpenError>;

    /// Whether it could be put on a disk that reactors on so many memory nodes serve; makes nothing that stays.
    ///
    /// # Errors
    /// [`OpenError`].
    fn check(&self, _nodes: usize) -> Result<(), OpenError> {
        Ok(())
    }

    /// What the layer means for the disk as a whole.
    fn role(&self) -> Role {
        Role::default()
    }

    /// What it writes to beside the disk.
    fn files(&self) -> Option<LayerFile> {
        None
    }
}

/// What is there when layers are put on a disk.
pub struct Opening<'a> {
    /// Where the disk is served; a cache is spread over their nodes.
    pub reactors: Option<&'a Reactors>,
    /// The file for a cache that outlives the daemon.
    pub(crate) cache_file: Option<CacheFile>,
}

/// What a layer means for the disk as a whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Role {
    /// Keeps changes from the disk below, which is another one then.
    pub hides_changes: bool,
    /// Keeps data in memory.
    pub caches: bool,
    /// Acknowledges writes before the disk below has them.
    pub writes_back: bool,
    /// What it has acknowledged outlives the daemon.
    pub is_lasting: bool,
}

/// What a layer writes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerFile {
    /// New files in this directory.
    Directory(PathBuf),
    /// The end of this file.
    Append(PathBuf),
}

/// A layer of an export.
#[derive(Clone)]
pub struct LayerSpec {
    /// The kind.
    pub kind: &'static LayerKind,
    /// What stood behind the `=`.
    pub value: String,
    /// What that means.
    pub config: Arc<dyn LayerConfig>,
}

impl LayerSpec {
    /// Reads a layer; `None` if there is none of this name.
    ///
    /// # Errors
    /// [`SpecError`], if its value cannot be used.
    pub fn parse(name: &str, value: &str) -> Result<Option<LayerSpec>, SpecError> {
        let Some(kind) = KINDS.iter().find(|kind| kind.name == name) else { return Ok(None) };
        Ok(Some(LayerSpec { kind, value: value.into(), config: (kind.parse)(value)? }))
    }
}

impl PartialEq for LayerSpec {
    fn eq(&self, other: &LayerSpec) -> bool {
        (self.kind.name, &self.value) == (other.kind.name, &other.value)
    }
}

impl fmt::Debug for LayerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind.name, self.value)
    }
}

/// The kinds of layers as they are written, for messages.
pub fn syntax() -> String {
    KINDS.iter().map(|kind| kind.syntax).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryBackend;
    use futures_util::FutureExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A disk that counts what reaches it beside reads and writes, and what is to be fetched.
    struct Counted(MemoryBackend, AtomicU32, AtomicU32);

    impl Layer for Counted {
        fn inner(&self) -> &dyn Backend {
            &self.0
        }

        fn hint_sequential(&self, _at: u64, _len: u64) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }

        fn summary(&self) -> Option<String> {
            Some("counted".into())
        }

        fn prefetch(&self, _at: u64, _len: u64) -> Op<'_, ()> {
            self.2.fetch_add(1, Ordering::Relaxed);
            Box::pin(std::future::ready(Ok(())))
        }
    }

    #[test]
    fn what_a_layer_does_not_define_the_disk_below_does() {
        let counted = Arc::new(Counted(MemoryBackend::new(1 << 20).unwrap(), AtomicU32::new(0), AtomicU32::new(0)));
        let disk: Arc<dyn Backend> = Arc::clone(&counted) as _;
        for kind in KINDS.iter().filter(|kind| !matches!(kind.name, "cache" | "overlay")) {
            let value = match kind.name {
                "rate" => "1G",
                "delay" => "1us",
                "fault" => "0",
                "log" => "/dev/null",
                other => panic!("say what a '{other}' is"),
            };
            let spec = LayerSpec::parse(kind.name, value).unwrap().unwrap();
            let before = counted.1.load(Ordering::Relaxed);
            let mut opening = Opening { reactors: None, cache_file: None };
            let layered = spec.config.put_on(Arc::clone(&disk), &mut opening).unwrap();
            layered.hint_sequential(0, 1);
            assert_eq!(counted.1.load(Ordering::Relaxed), before + 1, "{}", kind.name);
            assert_eq!((layered.geometry().size, layered.summary().as_deref()), (1 << 20, Some("counted")));
            assert!(layered.lend(0, 512).is_none(), "what is lent would pass by the layer");
            let before = counted.2.load(Ordering::Relaxed);
            layered.prefetch(0, 4096).now_or_never().expect("nothing to wait for").unwrap();
            let is_fetched = counted.2.load(Ordering::Relaxed) > before;
            assert_eq!(is_fetched, kind.name != "rate", "{}: a limited disk is not read beyond the limit", kind.name);
        }
    }

    #[test]
    fn kinds_are_written_as_they_are_read() {
        for kind in KINDS {
            assert!(kind.syntax.starts_with(kind.name), "{}", kind.syntax);
            assert!(kind.about.ends_with('.') && !kind.about.contains('\n'), "{}", kind.about);
        }
        assert!(LayerSpec::parse("magic", "").unwrap().is_none());
    }
}
