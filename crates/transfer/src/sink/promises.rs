//! Records that the source may send, because an offer of the session was answered so.

use super::journal::Key;
use std::collections::HashMap;
use std::sync::Mutex;
use thruway_fs::Identity;

/// Leave for one record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Promise {
    /// Parts of its temporary file, which is this one, need not be sent.
    Resume(Identity),
    /// The attributes of this file, which last `changed` at this time, are to be sent; `ours` if this job has put it in place.
    Attributes { identity: Identity, ours: bool, changed: i64 },
}

/// The promises of a session, by path. A source that sends each record that it is asked for has some thousand at most. It sends no record
/// for files that it cannot read any more.
pub(super) struct Promises {
    all: Mutex<HashMap<Key, Promise>>,
    max: usize,
}

impl Default for Promises {
    fn default() -> Promises {
        Promises { all: Mutex::default(), max: 1 << 18 }
    }
}

impl Promises {
    /// Adds a promise. False if there are too many: the source is to send the file.
    pub(super) fn add(&self, key: Key, promise: Promise) -> bool {
        let mut all = self.all.lock().expect("no panics under the lock");
        let has_room = all.len() < self.max || all.contains_key(&key);
        if has_room {
            all.insert(key, promise);
        }
        has_room
    }

    /// Removes a promise, and returns it.
    pub(super) fn take(&self, key: &Key) -> Option<Promise> {
        self.all.lock().expect("no panics under the lock").remove(key)
    }
}

#[cfg(test)]
mod tests {
    use super::super::journal::key_of;
    use super::*;

    #[test]
    fn promises_are_limited_and_good_for_one_record() {
        let promises = Promises { max: 2, ..Promises::default() };
        let promise = Promise::Resume(Identity { inode: 1, born: 1 });
        let keys = [&b"a"[..], b"b", b"c"].map(key_of);
        assert_eq!(keys.map(|key| promises.add(key, promise)), [true, true, false]);
        assert!(promises.add(keys[0], promise));
        assert_eq!([0, 0, 2].map(|n| promises.take(&keys[n])), [Some(promise), None, None]);
        assert!(promises.add(keys[2], promise));
    }
}
