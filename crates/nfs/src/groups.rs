//! Groups of users who are in more than a credential has room for: they are looked up in the user database of this host, as far
//! as that knows the user.

use crate::file_system::workers::Workers;
use nix::unistd::{Uid, User, getgrouplist};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// So many groups have room in a credential (`AUTH_SYS`, RFC 5531, appendix A): with as many, there may be more.
const IN_CREDENTIAL: usize = 16;

/// What was looked up is good for this long.
const AGE_MAX: Duration = Duration::from_secs(600);

/// Users that are remembered.
const USERS_MAX: usize = 4096;

/// When a user was looked up, and the groups; `None` if this host does not know the user.
type Known = (Instant, Option<Arc<[u32]>>);

/// The groups of users, as far as they have been looked up.
#[derive(Default)]
pub(crate) struct Groups {
    known: Mutex<HashMap<u32, Known>>,
    /// One lookup at a time: it may ask another host, and many calls ask for the same user.
    looking: tokio::sync::Mutex<()>,
    workers: Workers,
}

/// Asks the user database, which may take long.
fn look_up(uid: u32) -> Option<Arc<[u32]>> {
    let user = User::from_uid(Uid::from_raw(uid)).ok()??;
    let groups = getgrouplist(&CString::new(user.name).ok()?, user.gid).ok()?;
    Some(groups.into_iter().map(nix::unistd::Gid::as_raw).collect())
}

impl Groups {
    fn known(&self) -> MutexGuard<'_, HashMap<u32, Known>> {
        self.known.lock().expect("no panics under the lock")
    }

    /// The groups of a user whose credential has these; `None` if it has all, or more are not known of.
    pub(crate) async fn of(&self, uid: u32, in_credential: &[u32]) -> Option<Arc<[u32]>> {
        if in_credential.len() < IN_CREDENTIAL {
            return None;
        }
        self.of_user(uid, look_up).await
    }

    async fn of_user(
        &self,
        uid: u32,
        look_up: impl FnOnce(u32) -> Option<Arc<[u32]>> + Send + 'static,
    ) -> Option<Arc<[u32]>> {
        let fresh = |known: &HashMap<u32, Known>| {
            let (at, groups) = known.get(&uid)?;
            (at.elapsed() < AGE_MAX).then(|| groups.clone())
        };
        if let Some(groups) = fresh(&self.known()) {
            return groups;
        }
        let _looking = self.looking.lock().await;
        if let Some(groups) = fresh(&self.known()) {
            return groups;
        }
        let groups = self.workers.run(move || look_up(uid)).await;
        let mut known = self.known();
        if known.len() >= USERS_MAX {
            known.retain(|_, (at, _)| at.elapsed() < AGE_MAX);
        }
        // Numbers of users can be made up; those who are there stay.
        if known.len() >= USERS_MAX {
            known.retain(|_, (_, groups)| groups.is_some());
        }
        if known.len() >= USERS_MAX {
            known.clear();
        }
        known.insert(uid, (Instant::now(), groups.clone()));
        groups
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
            let groups = Groups::default();
            assert_eq!(groups.of(0, &[0; 15]).await, None);
            assert!(groups.known().is_empty());
            let of_root = groups.of(0, &[0; 16]).await.expect("every host knows root");
            assert!(of_root.contains(&0));
            assert_eq!(groups.of(u32::MAX - 7, &[0; 16]).await, None, "not known here");
        });
    }

    #[test]
    fn users_are_looked_up_once_and_forgotten_when_there_are_many() {
        static LOOKED_UP: AtomicUsize = AtomicUsize::new(0);
        let look_up = |uid| {
            LOOKED_UP.fetch_add(1, Ordering::Relaxed);
            Some([uid, 5].into())
        };
        run(async {
            let groups = Groups::default();
            let both = tokio::join!(groups.of_user(7, look_up), groups.of_user(7, look_up));
            assert_eq!(both.0.as_deref(), Some(&[7, 5][..]));
            assert_eq!((both.0, LOOKED_UP.load(Ordering::Relaxed)), (both.1, 1));
            for uid in 0..2 * USERS_MAX as u32 {
                groups.of_user(uid, |_| None).await;
            }
            assert!(groups.known().len() <= USERS_MAX);
        });
    }
}
