//! The names of files: what lookups see, and what is in the file system's journal on the medium.

use fastrand::Rng;
use std::collections::{BTreeMap, VecDeque};

/// Names, each for the number of a file.
///
/// Changes reach the medium in their order, as in the journals of ext4, XFS and Btrfs: a loss of power keeps the beginning of
/// what was not synced.
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

    /// Makes all changes durable up to the last one of a name like this.
    pub fn sync(&mut self, which: impl Fn(&Name) -> bool) {
        let count = self.pending.iter().rposition(|change| change.is_about(&which)).map_or(0, |last| last + 1);
        self.pending.drain(..count).for_each(|change| change.apply(&mut self.durable));
    }

    /// The power goes and comes back.
    pub fn lose_power(&mut self, random: &mut Rng) {
        let kept = random.usize(..=self.pending.len());
        self.pending.drain(..).take(kept).for_each(|change| change.apply(&mut self.durable));
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
            early.lose_power(&mut Rng::with_seed(seed));
            let seen: Vec<_> = early.iter().map(|(name, number)| (*name, number)).collect();
            let possible =
                [vec![("old", 1)], vec![("new", 2), ("old", 1)], vec![("old", 2)], vec![("old", 2), ("other", 3)]];
            assert!(possible.contains(&seen), "{seen:?}");
            names.sync(|name| *name == "old");
            names.lose_power(&mut Rng::with_seed(seed));
            assert_eq!((names.get(&"old"), names.get(&"new")), (Some(2), None));
        }
    }
}
