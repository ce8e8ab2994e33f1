//! The names of files: what lookups see, and what is in the file system's journal on the medium.

use fastrand::Rng;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Names, each for the number of a file, in directories.
///
/// Of each directory the changes reach the medium in their order, and those of one say nothing of those of another: a loss of
/// power keeps, of what was not synced, the beginning of each. What changes two of them does so in both or in neither.
#[derive(Debug, Clone)]
pub struct Names<Name> {
    current: BTreeMap<Name, u64>,
    durable: BTreeMap<Name, u64>,
    pending: VecDeque<Change<Name>>,
}

#[derive(Debug, Clone)]
struct Change<Name> {
    from: Option<Name>,
    to: Option<(Name, u64)>,
}

impl<Name> Default for Names<Name> {
    fn default() -> Names<Name> {
        Names { current: BTreeMap::new(), durable: BTreeMap::new(), pending: VecDeque::new() }
    }
}

impl<Name: Ord + Clone> Change<Name> {
    fn apply(self, names: &mut BTreeMap<Name, u64>) {
        if let Some(name) = self.from {
            names.remove(&name);
        }
        if let Some((name, number)) = self.to {
            names.insert(name, number);
        }
    }

    fn is_about(&self, which: impl Fn(&Name) -> bool) -> bool {
        self.from.iter().chain(self.to.iter().map(|(name, _)| name)).any(which)
    }
}

impl<Name: Ord + Clone> Names<Name> {
    /// The file of this name.
    pub fn get(&self, name: &Name) -> Option<u64> {
        self.current.get(name).copied()
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&Name, u64)> {
        self.current.iter().map(|(name, number)| (name, *number))
    }

    /// Those in a range, in order.
    pub fn range(&self, range: impl std::ops::RangeBounds<Name>) -> impl Iterator<Item = (&Name, u64)> {
        self.current.range(range).map(|(name, number)| (name, *number))
    }

    /// Gives a file a name, which another loses.
    pub fn link(&mut self, name: Name, number: u64) {
        self.change(Change { from: None, to: Some((name, number)) });
    }

    /// Takes a name away. False if there is none.
    pub fn unlink(&mut self, name: &Name) -> bool {
        let there = self.current.contains_key(name);
        if there {
            self.change(Change { from: Some(name.clone()), to: None });
        }
        there
    }

    /// Gives a file another name, which another loses. False if there is no such file.
    pub fn rename(&mut self, from: &Name, to: Name) -> bool {
        let Some(number) = self.get(from) else { return false };
        self.change(Change { from: Some(from.clone()), to: Some((to, number)) });
        true
    }

    fn change(&mut self, change: Change<Name>) {
        change.clone().apply(&mut self.current);
        self.pending.push_back(change);
    }

    /// Makes the changes of names like this durable.
    pub fn sync(&mut self, which: impl Fn(&Name) -> bool) {
        let (synced, left): (VecDeque<_>, VecDeque<_>) =
            self.pending.drain(..).partition(|change| change.is_about(&which));
        self.pending = left;
        for change in synced {
            // What it takes away elsewhere is never made there any more.
            let gone = change.from.clone();
            self.pending.retain(|other| gone.is_none() || other.to.as_ref().map(|(name, _)| name) != gone.as_ref());
            change.apply(&mut self.durable);
        }
    }

    /// The power goes and comes back. `dir` says in which directory a name is.
    pub fn lose_power<Dir: Ord>(&mut self, random: &mut Rng, dir: impl Fn(&Name) -> Dir) {
        let mut ended = BTreeSet::new();
        let mut lost = BTreeSet::new();
        for change in std::mem::take(&mut self.pending) {
            let dirs: Vec<Dir> = change.from.iter().chain(change.to.iter().map(|(name, _)| name)).map(&dir).collect();
            // What was moved from where it never came to be is not moved either.
            let is_lost = dirs.iter().any(|dir| ended.contains(dir))
                || change.from.as_ref().is_some_and(|name| lost.contains(name))
                || random.u8(..3) == 0;
            if is_lost {
                lost.extend(change.to.map(|(name, _)| name));
                ended.extend(dirs);
            } else {
                change.apply(&mut self.durable);
            }
        }
        self.current.clone_from(&self.durable);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_survive_in_order_and_those_that_were_synced_for_sure() {
        for seed in 0..50 {
            let mut names = Names::default();
            names.link("old", 1);
            names.sync(|_| true);
            names.link("new", 2);
            assert!(names.rename(&"new", "old"));
            assert!(!names.unlink(&"new"));
            names.link("other", 3);
            let mut early = names.clone();
            early.lose_power(&mut Rng::with_seed(seed), |_| ());
            let seen: Vec<_> = early.iter().map(|(name, number)| (*name, number)).collect();
            let possible =
                [vec![("old", 1)], vec![("new", 2), ("old", 1)], vec![("old", 2)], vec![("old", 2), ("other", 3)]];
            assert!(possible.contains(&seen), "{seen:?}");
            names.sync(|name| *name == "old");
            names.lose_power(&mut Rng::with_seed(seed), |_| ());
            assert_eq!((names.get(&"old"), names.get(&"new")), (Some(2), None));
        }
    }

    #[test]
    fn one_directory_s_sync_says_nothing_of_another() {
        let mut fates = BTreeSet::new();
        for seed in 0..200 {
            let mut names = Names::default();
            names.link((1, "dir"), 2);
            names.link((2, "file"), 3);
            names.sync(|(dir, _)| *dir == 2);
            names.lose_power(&mut Rng::with_seed(seed), |(dir, _)| *dir);
            assert_eq!(names.get(&(2, "file")), Some(3));
            fates.insert(names.get(&(1, "dir")));
        }
        assert_eq!(fates.len(), 2);
    }
}
