//! Devices that the connections of this process share, and where they listen.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use thruway_fabric::{Listener, Provider, iwarp, shm, verbs};
use thruway_streams::{Context, Error};

/// What carries a connection, as the two ends tell each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Carrier {
    /// User-space iWARP, or shared memory where the peer is a process of this host and user.
    User,
    /// An RDMA device.
    Verbs,
}

/// A device, opened once for all connections that use it.
pub(crate) struct Opened {
    pub(crate) context: Context,
    listeners: Mutex<HashMap<IpAddr, Listener>>,
}

/// The process is part of it: a forked child has its parent's devices without the threads that see to them.
type Key = (u32, Carrier, Option<String>, Choice);

/// Which of the ways in user space may be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Choice {
    Both,
    Iwarp,
    Shm,
}

static OPENED: Mutex<Option<HashMap<Key, Weak<Opened>>>> = Mutex::new(None);

impl Opened {
    /// The device in user space.
    pub(crate) fn user(choice: Choice) -> Result<Arc<Opened>, Error> {
        Opened::get((std::process::id(), Carrier::User, None, choice), || match choice {
            Choice::Both => Ok(iwarp::Config { shm: Some(shm::Config::default()), ..iwarp::Config::default() }.into()),
            Choice::Iwarp => Ok(iwarp::Config::default().into()),
            Choice::Shm => Ok(shm::Config::default().into()),
        })
    }

    /// The RDMA device that serves this address of ours.
    pub(crate) fn verbs(local: IpAddr) -> Result<Arc<Opened>, Error> {
        let config = verbs::Config::at(local)?;
        let name = config.device.clone();
        Opened::get((std::process::id(), Carrier::Verbs, name, Choice::Both), || Ok(config.into()))
    }

    fn get(key: Key, provider: impl FnOnce() -> Result<Provider, Error>) -> Result<Arc<Opened>, Error> {
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = opened.get_or_insert_default();
        if let Some(known) = opened.get(&key).and_then(Weak::upgrade) {
            return Ok(known);
        }
        opened.retain(|_, known| known.strong_count() > 0);
        let new = Arc::new(Opened { context: Context::open(&provider()?)?, listeners: Mutex::default() });
        opened.insert(key, Arc::downgrade(&new));
        Ok(new)
    }

    /// Where it listens on this address of ours, for as long as it is open.
    pub(crate) fn listen(&self, local: IpAddr) -> Result<SocketAddr, Error> {
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(listener) = listeners.get(&local) {
            return Ok(listener.local_addr());
        }
        let listener = self.context.listen((local, 0).into())?;
        let at = listener.local_addr();
        listeners.insert(local, listener);
        Ok(at)
    }
}
