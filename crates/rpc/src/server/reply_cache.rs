//! Replies to calls that must not be done twice: a client whose connection was lost repeats what it has called, by any connection.
//!
//! A call is known by its host (without the port), its number, what it calls, who calls, and a digest of the arguments: another
//! one that has only the number in common is done. What is kept is the RPC message, which no transport has touched.

use super::{Call, Credential};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hash, RandomState};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Replies that are kept for a host.
const REPLIES_MAX: usize = 1024;
/// Hosts that replies are kept for.
const HOSTS_MAX: usize = 1024;
/// Longest reply that is kept, in bytes. Longer ones are of calls that may be repeated.
const REPLY_MAX: usize = 4 << 10;
/// After this long a number is another call's.
const AGE_MAX: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    xid: u32,
    procedure: (u32, u32, u32),
    digest: u64,
}

enum Entry {
    InProgress,
    Done(Box<[u8]>),
}

#[derive(Default)]
struct Host {
    entries: HashMap<Key, (Entry, Instant)>,
    /// The oldest first.
    order: VecDeque<Key>,
}

/// The replies.
#[derive(Default)]
pub(super) struct ReplyCache {
    hosts: Mutex<HashMap<IpAddr, Host>>,
    hasher: RandomState,
}

/// What is to be done with a call.
pub(super) enum Lookup<'a> {
    /// It is done, and its reply kept by this.
    New(Keeper<'a>),
    /// It is a copy of one that is being done, whose reply will do.
    InProgress,
    /// This is its reply.
    Done(Box<[u8]>),
}

/// Keeps the reply to a call; without one, the call is forgotten when this is dropped.
pub(super) struct Keeper<'a> {
    cache: &'a ReplyCache,
    host: IpAddr,
    key: Key,
}

impl Host {
    /// Forgets what is too old or too much.
    fn trim(&mut self, now: Instant) {
        for _ in 0..self.order.len() {
            let Some(oldest) = self.order.pop_front() else { return };
            match self.entries.get(&oldest) {
                // Its call has failed.
                None => {}
                Some((Entry::InProgress, _)) => self.order.push_back(oldest),
                Some((Entry::Done(_), at)) if self.order.len() < REPLIES_MAX && now.duration_since(*at) < AGE_MAX => {
                    return self.order.push_front(oldest);
                }
                Some(_) => drop(self.entries.remove(&oldest)),
            }
        }
    }
}

impl ReplyCache {
    fn hosts(&self) -> MutexGuard<'_, HashMap<IpAddr, Host>> {
        self.hosts.lock().expect("no panics under the lock")
    }

    fn key(&self, call: &Call) -> Key {
        let who = match &call.credential {
            Credential::None => None,
            Credential::Sys(sys) => Some((sys.uid, sys.gid, &sys.gids)),
        };
        let digest = self.hasher.hash_one((who, call.argument_bytes()));
        Key { xid: call.xid, procedure: (call.program, call.version, call.procedure), digest }
    }

    /// Looks a call up, or begins it; nothing is kept for clients without an address.
    pub(super) fn begin(&self, call: &Call) -> Option<Lookup<'_>> {
        let host = call.connection.peer?.ip().to_canonical();
        Some(self.look_up(host, self.key(call), Instant::now()))
    }

    fn look_up(&self, host: IpAddr, key: Key, now: Instant) -> Lookup<'_> {
        let mut hosts = self.hosts();
        if hosts.len() >= HOSTS_MAX && !hosts.contains_key(&host) {
            let idle = |host: &Host| host.entries.values().map(|(_, at)| *at).max();
            let longest = hosts.iter().min_by_key(|(_, host)| idle(host)).map(|(host, _)| *host);
            longest.map(|longest| hosts.remove(&longest));
        }
        let kept = hosts.entry(host).or_default();
        kept.trim(now);
        match kept.entries.get(&key) {
            Some((Entry::InProgress, _)) => Lookup::InProgress,
            Some((Entry::Done(reply), _)) => Lookup::Done(reply.clone()),
            None => {
                kept.entries.insert(key, (Entry::InProgress, now));
                kept.order.push_back(key);
                Lookup::New(Keeper { cache: self, host, key })
            }
        }
    }
}

impl Keeper<'_> {
    /// Keeps the reply.
    pub(super) fn keep(self, reply: &[u8]) {
        if reply.len() > REPLY_MAX {
            return;
        }
        if let Some((entry, _)) =
            self.cache.hosts().get_mut(&self.host).and_then(|host| host.entries.get_mut(&self.key))
        {
            *entry = Entry::Done(reply.into());
        }
    }
}

impl Drop for Keeper<'_> {
    fn drop(&mut self) {
        if let Some(host) = self.cache.hosts().get_mut(&self.host)
            && let Some((Entry::InProgress, _)) = host.entries.get(&self.key)
        {
            host.entries.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(xid: u32, digest: u64) -> Key {
        Key { xid, procedure: (1, 2, 3), digest }
    }

    fn host(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// Does a call; its reply, if it has been done before.
    fn call(cache: &ReplyCache, host: IpAddr, key: Key, now: Instant) -> Option<Box<[u8]>> {
        match cache.look_up(host, key, now) {
            Lookup::New(keeper) => {
                keeper.keep(&key.xid.to_be_bytes());
                None
            }
            Lookup::Done(reply) => Some(reply),
            Lookup::InProgress => panic!("nothing is in progress"),
        }
    }

    #[test]
    fn a_call_is_done_once() {
        let (cache, now) = (ReplyCache::default(), Instant::now());
        let Lookup::New(keeper) = cache.look_up(host(1), key(7, 0), now) else { panic!() };
        assert!(matches!(cache.look_up(host(1), key(7, 0), now), Lookup::InProgress));
        keeper.keep(b"done");
        assert_eq!(call(&cache, host(1), key(7, 0), now), Some(b"done"[..].into()));
        // The same number and something else, or somebody else.
        assert_eq!(call(&cache, host(1), key(7, 1), now), None);
        assert_eq!(call(&cache, host(2), key(7, 0), now), None);
        // Long ago.
        assert_eq!(call(&cache, host(1), key(7, 0), now + AGE_MAX), None);
    }

    #[test]
    fn what_has_failed_is_done_again() {
        let (cache, now) = (ReplyCache::default(), Instant::now());
        drop(cache.look_up(host(1), key(7, 0), now));
        let Lookup::New(keeper) = cache.look_up(host(1), key(7, 0), now) else { panic!() };
        keeper.keep(&[0; REPLY_MAX + 1]);
        assert!(matches!(cache.look_up(host(1), key(7, 0), now), Lookup::New(_)), "too long to be kept");
    }

    #[test]
    fn hosts_do_not_push_each_other_out() {
        let (cache, now) = (ReplyCache::default(), Instant::now());
        call(&cache, host(1), key(7, 0), now);
        let in_progress = cache.look_up(host(2), key(0, 9), now);
        for xid in 0..3 * REPLIES_MAX as u32 {
            call(&cache, host(2), key(xid, 0), now);
        }
        assert!(cache.hosts()[&host(2)].entries.len() <= REPLIES_MAX + 1);
        assert!(
            matches!(cache.look_up(host(2), key(0, 9), now), Lookup::InProgress),
            "what is being done is not forgotten"
        );
        drop(in_progress);
        assert!(call(&cache, host(1), key(7, 0), now).is_some());
        for n in 0..2 * HOSTS_MAX as u32 {
            call(&cache, IpAddr::from((0x0b00_0000 + n).to_be_bytes()), key(1, 0), now + Duration::from_secs(1));
        }
        assert!(cache.hosts().len() <= HOSTS_MAX);
    }
}
