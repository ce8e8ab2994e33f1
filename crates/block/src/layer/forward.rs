//! [`Layer`]: a disk that forwards operations to the disk below.

use crate::backend::{Backend, Extent, Geometry, Lent, Op, Zero};
use thruway_engine::Segment;
use thruway_metrics::{RegisterError, Registered, Registry};

macro_rules! forwarded {
    ($(fn $name:ident(&self $(, $arg:ident: $ty:ty)*) -> $ret:ty;)*) => {
        /// A disk on top of another one, to which it forwards the operations that it does not define. [`Layer::lend`] and
        /// [`Layer::prefetch`] are not forwarded: the layer would not see these reads.
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
    fn register(&self, registry: &Registry, export: &str) -> Result<Vec<Registered>, RegisterError>;
}
