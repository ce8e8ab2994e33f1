//! The kinds of services that a daemon can have.

use super::block::BlockFactory;
use super::nfs::NfsFactory;
use super::transfer::TransferFactory;
use super::{Mistake, ServeArgs};
use thruway_server::ConnectionKind;
use thruway_server::service::Service;

/// A kind of service.
pub(super) trait ServiceFactory: Sync {
    /// Mistakes that the options alone show: without effect, contradictory, or open to everybody unasked.
    fn check(&self, args: &ServeArgs) -> Vec<Mistake>;

    /// Other errors that would keep it from starting, as far as they can be found without serving.
    fn errors(&self, args: &ServeArgs) -> Vec<Mistake>;

    /// The protocols that it serves, and the kinds of their connections.
    fn listeners(&self, args: &ServeArgs) -> Vec<(&'static str, ConnectionKind)>;

    /// Does what must precede the confinement of the daemon and its threads. `None` if the options do not ask for this service.
    ///
    /// # Errors
    /// A sentence.
    fn prepare<'a>(&self, args: &'a ServeArgs) -> Result<Option<Start<'a>>, String>;
}

/// Starts a service: it listens when this returns.
pub(super) type Start<'a> = Box<dyn FnOnce() -> Result<Box<dyn Service>, String> + 'a>;

/// All kinds, in the order in which the daemon starts, announces and ends them.
pub(super) const FACTORIES: [&dyn ServiceFactory; 3] = [&TransferFactory, &BlockFactory, &NfsFactory];

/// The listeners of all services.
pub(super) fn listeners(args: &ServeArgs) -> Vec<(&'static str, ConnectionKind)> {
    FACTORIES.iter().flat_map(|factory| factory.listeners(args)).collect()
}
