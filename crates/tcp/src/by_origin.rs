use crate::Origin;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Connections by where they come from, to find which of them is to give way to a new one: the oldest of the origin that has
/// the most. So one origin keeps no other out.
///
/// Connections are keys that grow in the order in which they came. Every operation takes logarithmic time.
#[derive(Debug, Clone)]
pub struct ByOrigin<K> {
    connections: BTreeMap<Origin, BTreeSet<K>>,
    /// How many each has, and its oldest: of several with as many, the one whose oldest is older comes last.
    ranks: BTreeSet<(usize, Reverse<K>, Origin)>,
}

impl<K> Default for ByOrigin<K> {
    fn default() -> ByOrigin<K> {
        ByOrigin { connections: BTreeMap::new(), ranks: BTreeSet::new() }
    }
}

impl<K: Ord + Copy> ByOrigin<K> {
    /// Adds a connection.
    pub fn insert(&mut self, origin: Origin, key: K) {
        let before = self.rank(origin);
        self.connections.entry(origin).or_default().insert(key);
        self.changed(origin, before);
    }

    /// Removes a connection. False if it was not there.
    pub fn remove(&mut self, origin: Origin, key: K) -> bool {
        let before = self.rank(origin);
        let removed = self.connections.get_mut(&origin).is_some_and(|theirs| theirs.remove(&key));
        self.changed(origin, before);
        removed
    }

    fn rank(&self, origin: Origin) -> Option<(usize, Reverse<K>, Origin)> {
        let theirs = self.connections.get(&origin)?;
        theirs.first().map(|oldest| (theirs.len(), Reverse(*oldest), origin))
    }

    fn changed(&mut self, origin: Origin, before: Option<(usize, Reverse<K>, Origin)>) {
        if let Some(before) = before {
            self.ranks.remove(&before);
        }
        match self.rank(origin) {
            Some(now) => drop(self.ranks.insert(now)),
            None => drop(self.connections.remove(&origin)),
        }
    }

    /// The connections of one origin.
    pub fn count(&self, origin: Origin) -> usize {
        self.connections.get(&origin).map_or(0, BTreeSet::len)
    }

    /// The connection that is to give way to a new one of `new`: the oldest of the origin with the most of them, the new one
    /// counted in. `None` if there are no connections.
    pub fn give_way(&self, new: Origin) -> Option<(Origin, K)> {
        let &(most, _, busiest) = self.ranks.last()?;
        let own = self.count(new);
        let from = if own > 0 && own + 1 >= most { new } else { busiest };
        self.connections.get(&from)?.first().map(|oldest| (from, *oldest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_connection_of_the_busiest_origin_gives_way() {
        let [a, b, c] = [1, 2, 3].map(Origin::User);
        let mut connections = ByOrigin::default();
        assert_eq!(connections.give_way(a), None);
        for (number, origin) in [a, b, b, c, c, c].into_iter().enumerate() {
            connections.insert(origin, number);
        }
        assert_eq!(connections.give_way(a), Some((c, 3)));
        assert_eq!(connections.give_way(b), Some((b, 1)), "with the new one it has as many");
        assert_eq!(connections.give_way(Origin::UnknownUser), Some((c, 3)));
        assert!(connections.remove(c, 3) && connections.remove(c, 4) && !connections.remove(c, 4));
        assert_eq!(connections.give_way(Origin::UnknownUser), Some((b, 1)));
        for (origin, number) in [(b, 1), (b, 2), (c, 5), (a, 0)] {
            assert!(connections.remove(origin, number));
        }
        assert!(connections.connections.is_empty() && connections.ranks.is_empty());
    }

    #[test]
    fn a_new_origin_takes_the_place_of_another_where_each_has_one() {
        let mut connections = ByOrigin::default();
        connections.insert(Origin::User(1), 1);
        connections.insert(Origin::User(2), 2);
        assert_eq!(connections.give_way(Origin::User(3)), Some((Origin::User(1), 1)), "the oldest");
        assert_eq!(connections.give_way(Origin::User(1)), Some((Origin::User(1), 1)));
    }
}
