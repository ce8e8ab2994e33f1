//! Layers: each is a disk on top of another, and they stack in any order.

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

/// The operations that a layer hands on unchanged to the disk below.
macro_rules! pass {
    ($($what:ident),*) => { $(crate::layer::pass!(@ $what);)* };
    (@ geometry) => {
        fn geometry(&self) -> crate::Geometry {
            self.below.geometry()
        }
    };
    (@ report) => {
        fn report(&self) -> Option<String> {
            self.below.report()
        }
    };
    (@ flush) => {
        fn flush(&self) -> crate::backend::Op<'_, ()> {
            self.below.flush()
        }
    };
    (@ extents) => {
        fn extents(&self, at: u64, len: u64) -> crate::backend::Op<'_, Vec<crate::backend::Extent>> {
            self.below.extents(at, len)
        }
    };
    (@ lend) => {
        fn lend(&self, at: u64, len: usize) -> Option<crate::backend::Lent> {
            self.below.lend(at, len)
        }
    };
    (@ announce) => {
        fn announce(&self, at: u64, len: u64) {
            self.below.announce(at, len);
        }
    };
    (@ prefetch) => {
        fn prefetch(&self, at: u64, len: u64) -> crate::backend::Op<'_, ()> {
            self.below.prefetch(at, len)
        }
    };
}
pub(crate) use pass;
