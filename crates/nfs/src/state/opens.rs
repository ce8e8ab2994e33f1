//! Opens of one file, indexed by owner and by mode, so that no operation on the file scans all of them.

use super::files::{Modes, Owner, READ, WRITE};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Opens of one file, by their numbers.
#[derive(Default)]
pub(super) struct Opens {
    /// Numbers of opens, by client and by the client's name of the owner.
    by_owner: BTreeMap<u64, HashMap<Owner, u64>>,
    /// Opens that read, write (index [`WRITES`]), deny reading and deny writing, in this order.
    with_mode: [BTreeSet<u64>; 4],
    count: usize,
}

const WRITES: usize = 1;

/// Indices of these modes in [`Opens::with_mode`].
fn indices((access, deny): Modes) -> impl Iterator<Item = usize> {
    [access & READ, access & WRITE, deny & READ, deny & WRITE]
        .into_iter()
        .enumerate()
        .filter_map(|(index, mode)| (mode != 0).then_some(index))
}

impl Opens {
    pub(super) fn find(&self, client: u64, owner: &[u8]) -> Option<u64> {
        self.by_owner.get(&client)?.get(owner).copied()
    }

    pub(super) fn insert(&mut self, client: u64, owner: Owner, number: u64, modes: Modes) {
        let before = self.by_owner.entry(client).or_default().insert(owner, number);
        debug_assert!(before.is_none(), "an owner has a file open once");
        self.count += 1;
        self.set_modes(number, modes);
    }

    /// Updates the index after the modes of an open have changed.
    pub(super) fn set_modes(&mut self, number: u64, modes: Modes) {
        for numbers in &mut self.with_mode {
            numbers.remove(&number);
        }
        for index in indices(modes) {
            self.with_mode[index].insert(number);
        }
    }

    pub(super) fn remove(&mut self, client: u64, owner: &[u8], number: u64) {
        let Some(owners) = self.by_owner.get_mut(&client) else { return };
        if owners.remove(owner).is_none() {
            return;
        }
        if owners.is_empty() {
            self.by_owner.remove(&client);
        }
        self.count -= 1;
        self.set_modes(number, (0, 0));
    }

    /// Finds an open with a share reservation that conflicts with these modes.
    pub(super) fn conflict(&self, (access, deny): Modes) -> Option<u64> {
        // Denied modes conflict with access, and access conflicts with denied modes.
        indices((deny, access)).find_map(|index| self.with_mode[index].first().copied())
    }

    /// True if the file is open for writing.
    pub(super) fn has_writer(&self) -> bool {
        !self.with_mode[WRITES].is_empty()
    }

    /// True if another client has the file open.
    pub(super) fn has_other_client(&self, client: u64) -> bool {
        let mut clients = [self.by_owner.first_key_value(), self.by_owner.last_key_value()].into_iter().flatten();
        clients.any(|(other, _)| *other != client)
    }

    /// True if a client has the file open.
    #[cfg(test)]
    pub(super) fn has_client(&self, client: u64) -> bool {
        self.by_owner.contains_key(&client)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.by_owner.values().flat_map(HashMap::values).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn indices_are_those_of_the_modes() {
        assert_eq!(indices((READ, 0)).collect::<Vec<_>>(), [0]);
        assert_eq!(indices((WRITE, READ | WRITE)).collect::<Vec<_>>(), [WRITES, 2, 3]);
    }

    proptest! {
        /// The index gives the same results as a scan of all opens.
        #[test]
        fn conflicts_are_those_of_some_open(changes in prop::collection::vec((0..6u64, 0..3u8, 0..4u32, 0..4u32, any::<bool>()), 0..60)) {
            let (mut opens, mut model) = (Opens::default(), BTreeMap::new());
            for (client, owner, access, deny, removes) in changes {
                let (name, number): (Owner, _) = ([owner].into(), client * 10 + u64::from(owner));
                if removes {
                    opens.remove(client, &name, number);
                    model.remove(&number);
                } else if model.insert(number, (access, deny)).is_some() {
                    opens.set_modes(number, (access, deny));
                } else {
                    opens.insert(client, name, number, (access, deny));
                }
                prop_assert_eq!(opens.len(), model.len());
                let of_others = |client: u64| model.keys().any(|number| number / 10 != client);
                prop_assert_eq!(opens.has_other_client(client), of_others(client));
                prop_assert_eq!(opens.has_writer(), model.values().any(|(access, _)| access & WRITE != 0));
                for modes in [(READ, 0), (WRITE, 0), (READ | WRITE, READ), (READ, WRITE), (WRITE, READ | WRITE)] {
                    let excludes = |of: &Modes| modes.0 & of.1 != 0 || modes.1 & of.0 != 0;
                    let found = opens.conflict(modes);
                    prop_assert_eq!(found.is_some(), model.values().any(excludes));
                    prop_assert!(found.is_none_or(|number| excludes(&model[&number])));
                }
            }
        }
    }
}
