//! Users and groups, as the user database of this host has them: who a principal of Kerberos is here, and the groups of users who
//! are in more than a credential has room for.

use crate::file_system::workers::Workers;
use nix::unistd::{Gid, Group, Uid, User as Entry, getgrouplist};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_rpc::server::User;

/// So many groups have room in a credential (`AUTH_SYS`, RFC 5531, appendix A): with as many, there may be more.
const IN_CREDENTIAL: usize = 16;

/// What was looked up is good for this long.
const AGE_MAX: Duration = Duration::from_secs(600);

/// Users and groups that are remembered.
const KNOWN_MAX: usize = 4096;

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
#[derive(Default)]
pub(crate) struct Users {
    known: Mutex<HashMap<Key, (Instant, Found)>>,
    /// One lookup at a time: it may ask another host, and many calls ask for the same user.
    looking: tokio::sync::Mutex<()>,
    workers: Workers,
}

fn user(entry: Entry) -> Option<User> {
    let groups = getgrouplist(&CString::new(entry.name).ok()?, entry.gid).ok()?;
    let groups = groups.into_iter().map(Gid::as_raw).collect();
    Some(User { uid: entry.uid.as_raw(), gid: entry.gid.as_raw(), groups })
}

/// Asks the user database, which may take long.
fn look_up(key: &Key) -> Option<User> {
    match key {
        Key::Number(uid) => user(Entry::from_uid(Uid::from_raw(*uid)).ok()??),
        Key::Name(name) => user(Entry::from_name(name).ok()??),
        Key::GroupName(name) => {
            let gid = Group::from_name(name).ok()??.gid.as_raw();
            Some(User { uid: u32::MAX, gid, groups: Vec::new() })
        }
    }
}

impl Users {
    fn known(&self) -> MutexGuard<'_, HashMap<Key, (Instant, Found)>> {
        self.known.lock().expect("no panics under the lock")
    }

    /// The user with a number, whose credential has these groups; `None` if it has all, or this host does not know the user.
    pub(crate) async fn with_many_groups(&self, uid: u32, in_credential: &[u32]) -> Found {
        if in_credential.len() < IN_CREDENTIAL {
            return None;
        }
        self.find(Key::Number(uid), look_up).await
    }

    /// The user with a name.
    pub(crate) async fn named(&self, name: &str) -> Found {
        if name.len() > NAME_MAX {
            return None;
        }
        self.find(Key::Name(name.into()), look_up).await
    }

    /// The number of the group with a name.
    pub(crate) async fn group_named(&self, name: &str) -> Option<u32> {
        if name.len() > NAME_MAX {
            return None;
        }
        self.find(Key::GroupName(name.into()), look_up).await.map(|found| found.gid)
    }

    async fn find(&self, key: Key, look_up: impl FnOnce(&Key) -> Option<User> + Send + 'static) -> Found {
        let fresh = |known: &HashMap<Key, (Instant, Found)>| {
            let (at, found) = known.get(&key)?;
            (at.elapsed() < AGE_MAX).then(|| found.clone())
        };
        if let Some(found) = fresh(&self.known()) {
            return found;
        }
        let _looking = self.looking.lock().await;
        if let Some(found) = fresh(&self.known()) {
            return found;
        }
        let asked = key.clone();
        let found = self.workers.run(move || look_up(&asked)).await.map(Arc::new);
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
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn run<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    #[test]
    fn a_user_with_few_groups_is_not_looked_up() {
        run(async {
            let users = Users::default();
            assert_eq!(users.with_many_groups(0, &[0; 15]).await, None);
            assert!(users.known().is_empty());
            let root = users.with_many_groups(0, &[0; 16]).await.expect("every host knows root");
            assert!(root.groups.contains(&0));
            assert_eq!(users.with_many_groups(u32::MAX - 7, &[0; 16]).await, None, "not known here");
        });
    }

    #[test]
    fn users_and_groups_have_names() {
        run(async {
            let users = Users::default();
            assert_eq!(users.named("root").await.map(|user| user.uid), Some(0));
            assert_eq!(users.group_named("root").await, Some(0));
            for nonsense in ["no such user", "", "a\0b", &"x".repeat(NAME_MAX + 1)] {
                assert_eq!((users.named(nonsense).await, users.group_named(nonsense).await), (None, None));
            }
        });
    }

    #[test]
    fn users_are_looked_up_once_and_forgotten_when_there_are_many() {
        static LOOKED_UP: AtomicUsize = AtomicUsize::new(0);
        let look_up = |_: &Key| {
            LOOKED_UP.fetch_add(1, Ordering::Relaxed);
            Some(User { uid: 7, gid: 7, groups: vec![7, 5] })
        };
        run(async {
            let users = Users::default();
            let both = tokio::join!(users.find(Key::Number(7), look_up), users.find(Key::Number(7), look_up));
            assert_eq!(both.0.as_ref().map(|user| &user.groups[..]), Some(&[7, 5][..]));
            assert_eq!((both.0, LOOKED_UP.load(Ordering::Relaxed)), (both.1, 1));
            for uid in 0..2 * KNOWN_MAX as u32 {
                users.find(Key::Number(uid), |_| None).await;
            }
            assert!(users.known().len() <= KNOWN_MAX);
        });
    }
}
