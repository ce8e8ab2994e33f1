//! What a daemon asks of each of its services, whatever they serve.

use crate::Address;
use std::error::Error;
use thruway_metrics::{RegisterError, Registered, Registry};

/// A service, from the moment that it listens.
///
/// A daemon starts its services as root, if it has to, and calls [`Service::run`] when it has given that up. It announces what
/// they listen on, tells them to reload on SIGHUP, and at the end closes all of them before it shuts down each.
pub trait Service {
    /// Its addresses and more, for the users.
    fn announcement(&self) -> Announcement;

    /// Begins to serve, if it does not already. `ended` is called if it ends by itself.
    fn run(&mut self, ended: Ended) {
        let _ = ended;
    }

    /// Reads again what may change while it serves, such as keys.
    ///
    /// # Errors
    /// What could not be read; then everything stays as it was.
    fn reload(&self) -> Result<(), Box<dyn Error>> {
        Ok(())
    }

    /// Registers its metrics.
    ///
    /// # Errors
    /// [`RegisterError`].
    fn register(&self, registry: &Registry) -> Result<Vec<Registered>, RegisterError> {
        let _ = registry;
        Ok(Vec::new())
    }

    /// What it is doing and has done, a line each.
    fn statistics(&self) -> Vec<String> {
        Vec::new()
    }

    /// Refuses new clients and asks those it has to leave.
    fn close(&self);

    /// Closes, waits until clients have left or their time is over, and brings data to the medium.
    ///
    /// # Errors
    /// What may not be on the medium.
    fn shut_down(&mut self) -> Result<(), Box<dyn Error>>;
}

/// Called by a service that ends by itself.
pub type Ended = Box<dyn FnOnce(Result<(), Box<dyn Error + Send + Sync>>) + Send>;

/// The announcement of a service.
#[derive(Debug, Default)]
pub struct Announcement {
    /// Addresses with the ports that the kernel chose, by a key for programs and a name for people.
    pub addresses: Vec<(&'static str, &'static str, Vec<Address>)>,
    /// More for programs: keys and values.
    pub facts: Vec<(&'static str, String)>,
    /// More for people, a line each.
    pub lines: Vec<String>,
}
