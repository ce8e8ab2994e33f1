//! Users and groups, as the user database of this host has them: who a principal of Kerberos is here, and the groups of users who
//! are in more than a credential has room for.

use nix::errno::Errno;
use nix::unistd::{Gid, Group, Uid, User as Entry, getgrouplist};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_rpc::server::User;
use thruway_server::turns::{Limits, Turns};
use thruway_tcp::Origin;
use thruway_vfs::workers::Workers;

/// So many groups have room in a credential (`AUTH_SYS`, RFC 5531, appendix A): with as many, there may be more.
const IN_CREDENTIAL: usize = 16;

/// What was looked up is good for this long.
const AGE_MAX: Duration = Duration::from_secs(600);

/// Users and groups that are remembered.
const KNOWN_MAX: usize = 4096;

/// Lookups at a time.
const LOOKING: Limits = Limits { all: 4, per_origin: 2, waiting: 4096, patience: Duration::from_secs(20) };

/// Longest name that is looked up, in bytes.
const NAME_MAX: usize = 256;

/// What is looked up.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    Number(u32),
    Name(Box<str>),
    GroupName(Box<str>),
}

/// What was found. Of a group, only its number means something.
type Found = Option<Arc<User>>;

/// Users and groups, as far as they have been looked up.
pub(crate) struct Users {
    known: Mutex<HashMap<Key, (Instant, Found)>>,
    /// A lookup may ask another host, and what is looked up can be made up by clients.
    looking: Turns,
    workers: Workers,
}

impl Default for Users {
    fn default() -> Users {
        Users { known: Mutex::default(), looking: Turns::new(LOOKING), workers: Workers::default() }
    }
}

/// The user database does not answer, or there are too many who ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unavailable;

fn user(entry: Entry) -> Result<User, Unavailable> {
    let name = CString::new(entry.name).map_err(|_| Unavailable)?;
    let groups = getgrouplist(&name, entry.gid).map_err(|_| Unavailable)?;
    let groups = groups.into_iter().map(Gid::as_raw).collect();
    Ok(User { uid: entry.uid.as_raw(), gid: entry.gid.as_raw(), groups })
}

/// What the user database has said. These errors mean that there is none (getpwnam(3)).
fn entry<T>(found: nix::Result<Option<T>>) -> Result<Option<T>, Unavailable> {
    match found {
        Ok(found) => Ok(found),
        // A name that cannot be one.
        Err(Errno::ENOENT | Errno::ESRCH | Errno::EBADF | Errno::EPERM | Errno::EINVAL) => Ok(None),
        Err(error) => {
            tracing::warn!(%error, "the user database does not answer");
            Err(Unavailable)
        }
    }
}

/// Asks the user database, which may take long.
fn look_up(key: &Key) -> Result<Option<User>, Unavailable> {
    match key {
        Key::Number(uid) => entry(Entry::from_uid(Uid::from_raw(*uid)))?.map(user).transpose(),
        Key::Name(name) => entry(Entry::from_name(name))?.map(user).transpose(),
        Key::GroupName(name) => {
            let group = entry(Group::from_name(name))?;
            Ok(group.map(|group| User { uid: u32::MAX, gid: group.gid.as_raw(), groups: Vec::new() }))
        }
    }
}

impl Users {
    fn known(&self) -> MutexGuard<'_, HashMap<Key, (Instant, Found)>> {
        self.known.lock().expect("no panics under the lock")
    }

    /// The user with a number, whose credential has these groups; `None` if it has all, or this host does not know the user.
    pub(crate) async fn with_many_groups(
        &self,
        origin: Origin,
        uid: u32,
        in_credential: &[u32],
    ) -> Result<Found, Unavailable> {
        if in_credential.len() < IN_CREDENTIAL {
            return Ok(None);
        }
        self.find(origin, Key::Number(uid), look_up).await
    }

    /// The user with a name.
    pub(crate) async fn named(&self, origin: Origin, name: &str) -> Result<Found, Unavailable> {
        if name.len() > NAME_MAX {
            return Ok(None);
        }
        self.find(origin, Key::Name(name.into()), look_up).await
    }

    /// The number of the group with a name.
    pub(crate) async fn group_named(&self, origin: Origin, name: &str) -> Result<Option<u32>, Unavailable> {
        if name.len() > NAME_MAX {
            return Ok(None);
        }
        Ok(self.find(origin, Key::GroupName(name.into()), look_up).await?.map(|found| found.gid))
    }

    /// Finds something for a client.
    async fn find(
        &self,
        origin: Origin,
        key: Key,
        look_up: impl FnOnce(&Key) -> Result<Option<User>, Unavailable> + Send + 'static,
    ) -> Result<Found, Unavailable> {
        let fresh = |known: &HashMap<Key, (Instant, Found)>| {
            let (at, found) = known.get(&key)?;
            (at.elapsed() < AGE_MAX).then(|| found.clone())
        };
        if let Some(found) = fresh(&self.known()) {
            return Ok(found);
        }
        let _turn = self.looking.take(origin).await.ok_or(Unavailable)?;
        if let Some(found) = fresh(&self.known()) {
            return Ok(found);
        }
        let asked = key.clone();
        // An error is not remembered.
        let found = self.workers.run(move || look_up(&asked)).await?.map(Arc::new);
        let mut known = self.known();
        if known.len() >= KNOWN_MAX {
            known.retain(|_, (at, _)| at.elapsed() < AGE_MAX);
        }
        // Numbers and names of users can be made up; those who are there stay.
        if known.len() >= KNOWN_MAX {
            known.retain(|_, (_, found)| found.is_some());
        }
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(key, (Instant::now(), found.clone()));
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const HERE: Origin = Origin::User(0);

    fn run<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    #[test]
    fn a_user_with_few_groups_is_not_looked_up() {
        run(async {
            let users = Users::default();
            assert_eq!(users.with_many_groups(HERE, 0, &[0; 15]).await, Ok(None));
            assert!(users.known().is_empty());
            let root = users.with_many_groups(HERE, 0, &[0; 16]).await.unwrap().expect("every host knows root");
            assert!(root.groups.contains(&0));
            assert_eq!(users.with_many_groups(HERE, u32::MAX - 7, &[0; 16]).await, Ok(None), "not known here");
        });
    }

    #[test]
    fn users_and_groups_have_names() {
        run(async {
            let users = Users::default();
            assert_eq!(users.named(HERE, "root").await.unwrap().map(|user| user.uid), Some(0));
            assert_eq!(users.group_named(HERE, "root").await, Ok(Some(0)));
            for nonsense in ["no such user", "", "a\0b", &"x".repeat(NAME_MAX + 1)] {
                let found = (users.named(HERE, nonsense).await, users.group_named(HERE, nonsense).await);
                assert_eq!(found, (Ok(None), Ok(None)), "{nonsense}");
            }
        });
    }

    #[test]
    fn users_are_looked_up_once_and_forgotten_when_there_are_many() {
        static LOOKED_UP: AtomicUsize = AtomicUsize::new(0);
        let look_up = |_: &Key| {
            LOOKED_UP.fetch_add(1, Ordering::Relaxed);
            Ok(Some(User { uid: 7, gid: 7, groups: vec![7, 5] }))
        };
        run(async {
            let users = Users::default();
            // An error is none of the user's.
            assert_eq!(users.find(HERE, Key::Number(7), |_| Err(Unavailable)).await, Err(Unavailable));
            for _ in 0..2 {
                let found = users.find(HERE, Key::Number(7), look_up).await.unwrap();
                assert_eq!(found.as_ref().map(|user| &user.groups[..]), Some(&[7, 5][..]));
            }
            assert_eq!(LOOKED_UP.load(Ordering::Relaxed), 1);
            for uid in 0..2 * KNOWN_MAX as u32 {
                users.find(HERE, Key::Number(uid), |_| Ok(None)).await.unwrap();
            }
            assert!(users.known().len() <= KNOWN_MAX);
        });
    }
}
