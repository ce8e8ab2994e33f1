//! Removal of a directory with contents that gives way to an entry of another type.
//!
//! All of it or nothing: first comes a look at all of it, which fails for a file in use as a disk and for a mounted file system. Both
//! the look and the removal can be done in parts, so one of them does not occupy a worker.

use super::Place;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use thruway_fs::remove::{Removal, Remover};

/// A directory that gives way.
pub(crate) struct Clearing {
    place: Place,
    look: Removal,
    /// The look has ended without a failure.
    looked: bool,
    removal: Option<Removal>,
    manner: ClearingManner,
}

/// How a directory gives way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClearingManner {
    /// Failures name the entry: the source may learn names.
    pub(crate) shows_names: bool,
    /// Directories of this user are made readable for the look; not in a dry run, which changes nothing.
    pub(crate) may_unlock: bool,
}

impl Clearing {
    /// Nothing is looked at yet.
    ///
    /// # Errors
    /// If the directory of the entry cannot be examined.
    pub(crate) fn new(place: Place, manner: ClearingManner) -> io::Result<Clearing> {
        let look = Removal::new(&*place.dir, &place.name, b"")?;
        Ok(Clearing { place, look, looked: false, removal: None, manner })
    }

    /// Looks at what is left, until this time. `found` is called with the path of each entry, which begins with the name of the
    /// directory. False if there is more.
    ///
    /// # Errors
    /// If something cannot be removed, with its path; after `is_over` is set.
    pub(crate) fn look(
        &mut self,
        is_over: &AtomicBool,
        until: Option<Instant>,
        found: &dyn Fn(&[u8]),
    ) -> io::Result<bool> {
        if !self.looked {
            self.looked = run(&mut self.look, is_over, until, self.manner, Some(found))?;
        }
        Ok(self.looked)
    }

    /// Entries in the directory that the look has found.
    pub(crate) fn contents(&self) -> u64 {
        // The directory itself comes last.
        self.look.removed().count.saturating_sub(self.looked.into())
    }

    /// Looks at what is left, and then removes it, until this time. False if there is more.
    ///
    /// # Errors
    /// As [`Clearing::look`].
    pub(crate) fn remove(&mut self, is_over: &AtomicBool, until: Option<Instant>) -> io::Result<bool> {
        if !self.look(is_over, until, &|_| ())? {
            return Ok(false);
        }
        let removal = match &mut self.removal {
            Some(removal) => removal,
            new => new.insert(Removal::new(&*self.place.dir, &self.place.name, b"")?),
        };
        run(removal, is_over, until, self.manner, None)
    }

    /// Entries in the directory that were removed.
    pub(crate) fn removed(&self) -> u64 {
        let Some(removed) = self.removal.as_ref().map(Removal::removed) else { return 0 };
        // Somebody else may have removed the directory itself in the same moment.
        removed.count.saturating_sub(u64::from(removed.failure.is_none()))
    }
}

/// Hears of entries, by their paths.
type OnFound<'a> = dyn Fn(&[u8]) + 'a;

/// Continues a removal; with `found`, a look.
fn run(
    removal: &mut Removal,
    is_over: &AtomicBool,
    until: Option<Instant>,
    manner: ClearingManner,
    found: Option<&OnFound<'_>>,
) -> io::Result<bool> {
    let (dry_run, on_removed) = (found.is_some(), found.unwrap_or(&|_| ()));
    let ClearingManner { shows_names, may_unlock } = manner;
    let remover = Remover { spares: &|_, _| false, dry_run, may_unlock, is_over, on_removed, on_failed: &|_, _| () };
    let done = removal.run(&remover, until);
    match &removal.removed().failure {
        None => Ok(done),
        Some((_, e)) if !shows_names => Err(io::Error::new(e.kind(), format!("cannot remove an entry in it: {e}"))),
        Some((path, e)) => Err(io::Error::new(e.kind(), format!("cannot remove {}: {e}", crate::escape(path)))),
    }
}

/// The directories of a session that give way, one at a time: each holds descriptors between its tasks.
#[derive(Default)]
pub(crate) struct Clearings(Mutex<ClearingState>);

#[derive(Default)]
struct ClearingState {
    taken: bool,
    waiting: Vec<Box<dyn FnOnce() + Send>>,
}

/// Leave to clear a directory. Drop lets others begin.
pub(crate) struct ClearingTurn(Arc<Clearings>);

impl Clearings {
    fn state(&self) -> MutexGuard<'_, ClearingState> {
        self.0.lock().expect("no panics under the lock")
    }

    /// `None` while a directory is being cleared.
    pub(crate) fn take(self: &Arc<Self>) -> Option<ClearingTurn> {
        let was_taken = std::mem::replace(&mut self.state().taken, true);
        (!was_taken).then(|| ClearingTurn(Arc::clone(self)))
    }

    /// Runs a task when no directory is being cleared.
    pub(crate) fn when_free(&self, task: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        if state.taken {
            return state.waiting.push(Box::new(task));
        }
        drop(state);
        task();
    }
}

impl Drop for ClearingTurn {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.taken = false;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(|task| task());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn one_directory_is_cleared_at_a_time() {
        let (clearings, run) = (Arc::<Clearings>::default(), Arc::new(AtomicUsize::new(0)));
        let task = || {
            let run = Arc::clone(&run);
            clearings.when_free(move || _ = run.fetch_add(1, Ordering::SeqCst));
        };
        let turn = clearings.take().unwrap();
        assert!(clearings.take().is_none());
        task();
        task();
        assert_eq!(run.load(Ordering::SeqCst), 0);
        drop(turn);
        assert_eq!(run.load(Ordering::SeqCst), 2);
        task();
        assert!(run.load(Ordering::SeqCst) == 3 && clearings.take().is_some());
    }
}
