//! Replies to calls that must not be done twice: a client whose connection was lost repeats what it has called, by any connection.
//!
//! The key of a call is the address of its host (without the port), its number, its procedure, its caller, and a digest of its arguments.
//! Another call with the same number is done. The cache keeps the RPC message before any transport adds to it.

use super::{Call, Credential};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hash, RandomState};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_tcp::Origin;
use tokio::sync::Semaphore;

/// Replies that are kept for a host: to calls that change names and attributes, and to those that change data.
const REPLIES_MAX: [usize; 2] = [1024, 4096];
/// Hosts that replies are kept for.
const HOSTS_MAX: usize = 1024;
/// Longest reply that is kept, in bytes. Longer ones are of calls that may be repeated.
const REPLY_MAX: usize = 4 << 10;
/// Bytes of all replies that are kept: beyond that, hosts that have called nothing for longest lose theirs.
const BYTES_MAX: usize = 64 << 20;
/// After this long a number is another call's.
const AGE_MAX: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    xid: u32,
    procedure: (u32, u32, u32),
    digest: u64,
    /// It changes data.
    is_of_data: bool,
}

enum Entry {
    /// It is closed when the call has been done.
    InProgress(Arc<Semaphore>),
    Done(Box<[u8]>),
}

#[derive(Default)]
struct Host {
    entries: HashMap<Key, (Entry, Instant)>,
    /// Those that have been done, the one whose reply came first at the beginning; those that change data apart.
    orders: [VecDeque<Key>; 2],
    /// Bytes of its replies.
    bytes: usize,
    /// Calls that are being done.
    in_progress: usize,
    /// Its last call.
    last: Option<Instant>,
}

#[derive(Default)]
struct Hosts {
    by_origin: HashMap<Origin, Host>,
    /// Bytes of all replies.
    bytes: usize,
}

/// The address of a client, which is the same for every address of loopback.
fn address_of(address: IpAddr) -> IpAddr {
    let address = address.to_canonical();
    if address.is_loopback() { Ipv4Addr::LOCALHOST.into() } else { address }
}

/// The host, or the network of IPv6, that shares a quota of replies.
fn host_of(address: IpAddr) -> Origin {
    Origin::of_host(address_of(address))
}

/// The replies.
#[derive(Default)]
pub(super) struct ReplyCache {
    hosts: Mutex<Hosts>,
    hasher: RandomState,
}

/// What is to be done with a call.
pub(super) enum Lookup<'a> {
    /// It is done, and its reply kept by this.
    New(Keeper<'a>),
    /// It is a copy of one that is being done: this is closed when that has been.
    InProgress(Arc<Semaphore>),
    /// This is its reply.
    Done(Box<[u8]>),
}

/// Keeps the reply to a call; without one, the call is forgotten when this is dropped.
pub(super) struct Keeper<'a> {
    cache: &'a ReplyCache,
    host: Origin,
    key: Key,
    done: Arc<Semaphore>,
}

impl Host {
    /// Forgets what is too old or too much; bytes of that.
    fn trim(&mut self, now: Instant) -> usize {
        let before = self.bytes;
        self.trim_entries(now);
        before - self.bytes
    }

    fn trim_entries(&mut self, now: Instant) {
        for (order, most) in self.orders.iter_mut().zip(REPLIES_MAX) {
            while let Some(oldest) = order.front() {
                match self.entries.get(oldest) {
                    Some((_, at)) if order.len() < most && now.duration_since(*at) < AGE_MAX => break,
                    _ => {}
                }
                let Some(oldest) = order.pop_front() else { break };
                if let Some((Entry::Done(reply), _)) = self.entries.remove(&oldest) {
                    self.bytes -= reply.len();
                }
            }
        }
    }
}

impl Hosts {
    /// Forgets the host that has called nothing for longest, and of which nothing is being done; whether there was one.
    fn forget_idle(&mut self) -> bool {
        let idle = self.by_origin.iter().filter(|(_, host)| host.in_progress == 0);
        let longest = idle.min_by_key(|(_, host)| host.last).map(|(host, _)| *host);
        let forgotten = longest.and_then(|longest| self.by_origin.remove(&longest));
        self.bytes -= forgotten.as_ref().map_or(0, |host| host.bytes);
        forgotten.is_some()
    }
}

impl ReplyCache {
    fn hosts(&self) -> MutexGuard<'_, Hosts> {
        self.hosts.lock().expect("no panics under the lock")
    }

    fn key(&self, call: &Call, is_of_data: bool) -> Key {
        let who = match &call.credential {
            Credential::None => (None, None),
            Credential::Sys(sys) => (Some((sys.uid, sys.gid, &sys.gids)), None),
            Credential::Gss(caller) => (None, Some(caller.principal())),
        };
        // Hosts of one network of IPv6 share a quota, and no replies.
        let address = call.connection.peer.map(|peer| address_of(peer.ip()));
        let digest = self.hasher.hash_one((who, address, call.digest()));
        let procedure = (call.program, call.version, call.procedure);
        Key { xid: call.xid, procedure, digest, is_of_data }
    }

    /// Looks a call up, or begins it; nothing is kept for clients without an address.
    pub(super) fn begin(&self, call: &Call, is_of_data: bool) -> Option<Lookup<'_>> {
        let host = host_of(call.connection.peer?.ip());
        Some(self.look_up(host, self.key(call, is_of_data), Instant::now()))
    }

    fn look_up(&self, host: Origin, key: Key, now: Instant) -> Lookup<'_> {
        let mut hosts = self.hosts();
        if hosts.by_origin.len() >= HOSTS_MAX && !hosts.by_origin.contains_key(&host) {
            hosts.forget_idle();
        }
        let Hosts { by_origin, bytes } = &mut *hosts;
        let kept = by_origin.entry(host).or_default();
        *bytes -= kept.trim(now);
        kept.last = Some(now);
        match kept.entries.get(&key) {
            Some((Entry::InProgress(done), _)) => Lookup::InProgress(Arc::clone(done)),
            Some((Entry::Done(reply), _)) => Lookup::Done(reply.clone()),
            None => {
                let done = Arc::new(Semaphore::new(0));
                kept.entries.insert(key, (Entry::InProgress(Arc::clone(&done)), now));
                kept.in_progress += 1;
                Lookup::New(Keeper { cache: self, host, key, done })
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
        let mut hosts = self.cache.hosts();
        // Not this host, of which a call is in progress.
        while hosts.bytes + reply.len() > BYTES_MAX && hosts.forget_idle() {}
        if hosts.bytes + reply.len() > BYTES_MAX {
            return;
        }
        let Hosts { by_origin, bytes } = &mut *hosts;
        let Some(host) = by_origin.get_mut(&self.host) else { return };
        if let Some((entry, _)) = host.entries.get_mut(&self.key) {
            *entry = Entry::Done(reply.into());
            host.orders[usize::from(self.key.is_of_data)].push_back(self.key);
            host.bytes += reply.len();
            *bytes += reply.len();
        }
    }
}

impl Drop for Keeper<'_> {
    fn drop(&mut self) {
        if let Some(host) = self.cache.hosts().by_origin.get_mut(&self.host) {
            host.in_progress -= 1;
            if let Some((Entry::InProgress(_), _)) = host.entries.get(&self.key) {
                host.entries.remove(&self.key);
            }
        }
        self.done.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(xid: u32, digest: u64) -> Key {
        Key { xid, procedure: (1, 2, 3), digest, is_of_data: false }
    }

    fn host(last: u8) -> Origin {
        host_of([10, 0, 0, last].into())
    }

    #[test]
    fn addresses_of_one_host_are_one() {
        let of = |address: &str| host_of(address.parse().unwrap());
        assert_eq!(of("127.0.0.1"), of("127.9.9.9"));
        assert_eq!(of("::1"), of("::ffff:127.0.0.1"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:0:0:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }

    /// Does a call; its reply, if it has been done before.
    fn call(cache: &ReplyCache, host: Origin, key: Key, now: Instant) -> Option<Box<[u8]>> {
        match cache.look_up(host, key, now) {
            Lookup::New(keeper) => {
                keeper.keep(&key.xid.to_be_bytes());
                None
            }
            Lookup::Done(reply) => Some(reply),
            Lookup::InProgress(_) => panic!("nothing is in progress"),
        }
    }

    #[test]
    fn a_call_is_done_once() {
        let (cache, now) = (ReplyCache::default(), Instant::now());
        let Lookup::New(keeper) = cache.look_up(host(1), key(7, 0), now) else { panic!() };
        let Lookup::InProgress(done) = cache.look_up(host(1), key(7, 0), now) else { panic!() };
        assert!(!done.is_closed());
        keeper.keep(b"done");
        assert!(done.is_closed(), "those who wait for it go on");
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
        for xid in 0..3 * REPLIES_MAX[0] as u32 {
            call(&cache, host(2), key(xid, 0), now);
        }
        assert!(cache.hosts().by_origin[&host(2)].entries.len() <= REPLIES_MAX[0] + 1);
        assert!(
            matches!(cache.look_up(host(2), key(0, 9), now), Lookup::InProgress(_)),
            "what is being done is not forgotten"
        );
        drop(in_progress);
        assert!(call(&cache, host(1), key(7, 0), now).is_some());
        for n in 0..2 * HOSTS_MAX as u32 {
            call(&cache, host_of((0x0b00_0000 + n).to_be_bytes().into()), key(1, 0), now + Duration::from_secs(1));
        }
        assert!(cache.hosts().by_origin.len() <= HOSTS_MAX);
    }

    #[test]
    fn calls_in_progress_push_no_replies_out() {
        let (cache, now) = (ReplyCache::default(), Instant::now());
        call(&cache, host(1), key(7, 0), now);
        let in_progress: Vec<_> =
            (0..100 * REPLIES_MAX[0] as u32).map(|n| cache.look_up(host(1), key(n, 9), now)).collect();
        assert!(call(&cache, host(1), key(7, 0), now).is_some());
        assert_eq!(cache.hosts().by_origin[&host(1)].orders[0].len(), 1, "they are not gone through by each call");
        drop(in_progress);
        assert_eq!(cache.hosts().by_origin[&host(1)].entries.len(), 1);
    }

    #[test]
    fn all_replies_together_have_a_limit() {
        let (cache, now) = (ReplyCache::default(), Instant::now());
        for n in 0..(BYTES_MAX / REPLY_MAX + 50) as u32 {
            let host = host_of((0x0b00_0000 + n / 1000).to_be_bytes().into());
            let later = now + Duration::from_millis(n.into());
            let Lookup::New(keeper) = cache.look_up(host, key(n, 0), later) else { panic!() };
            keeper.keep(&[0; REPLY_MAX]);
            let hosts = cache.hosts();
            assert!(hosts.bytes <= BYTES_MAX);
            assert_eq!(hosts.bytes, hosts.by_origin.values().map(|host| host.bytes).sum::<usize>());
        }
        let last = host_of((0x0b00_0000 + BYTES_MAX as u32 / REPLY_MAX as u32 / 1000).to_be_bytes().into());
        assert!(cache.hosts().by_origin.contains_key(&last), "who has called last keeps its own");
        // What is being done is not forgotten, however idle its host.
        let idle = cache.look_up(host(9), key(0, 0), now);
        for n in 0..2 * HOSTS_MAX as u32 {
            call(&cache, host_of((0x0c00_0000 + n).to_be_bytes().into()), key(1, 0), now + Duration::from_secs(60));
        }
        assert!(matches!(cache.look_up(host(9), key(0, 0), now), Lookup::InProgress(_)));
        drop(idle);
    }

    #[test]
    fn replies_about_data_do_not_take_the_place_of_others() {
        let (cache, now) = (ReplyCache::default(), Instant::now());
        let write = |xid| Key { is_of_data: true, ..key(xid, 7) };
        assert_eq!(call(&cache, host(1), key(0, 1), now), None);
        for xid in 1..3 * REPLIES_MAX[1] as u32 {
            assert_eq!(call(&cache, host(1), write(xid), now), None);
        }
        assert!(call(&cache, host(1), key(0, 1), now).is_some());
        assert!(call(&cache, host(1), write(3 * REPLIES_MAX[1] as u32 - 1), now).is_some(), "one of the last");
        assert!(cache.hosts().by_origin[&host(1)].entries.len() <= REPLIES_MAX[1] + 2);
    }
}
