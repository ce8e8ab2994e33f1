//! Layers: each is a disk on top of another, and they stack in any order.
//!
//! A layer is a file of this module with a type that implements [`Layer`], whose methods forward to the disk below unless they are
//! defined, and a [`LayerKind`], which says how it is written and made. To add one, write its file and name it in [`KINDS`]:
//! command line, configuration file, help and book come from there.

mod delay;
mod fault;
mod forward;
pub(crate) mod kind;
mod log;
mod overlay;
mod rate;
mod stripe;

pub use delay::Delay;
pub use fault::{Fault, Kind};
pub use forward::Layer;
pub use kind::{LayerConfig, LayerError, LayerFile, LayerKind, LayerSyntaxError, Opening, Role};
pub use log::Log;
pub use overlay::Overlay;
pub use rate::Rate;
pub use stripe::Stripe;

use crate::cache;
use std::fmt;
use std::sync::Arc;

/// All kinds of layers, in the order of the documentation.
pub const KINDS: &[LayerKind] = &[cache::layer::KIND, overlay::KIND, rate::KIND, delay::KIND, fault::KIND, log::KIND];

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
    /// [`LayerSyntaxError`] for an invalid value.
    pub fn parse(name: &str, value: &str) -> Result<Option<LayerSpec>, LayerSyntaxError> {
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
    use crate::backend::{Backend, MemoryBackend, Op};
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
