//! Owners of version 4.0 whose operations are counted. Owners that hold nothing are idle: the longest idle ones are forgotten when
//! there are too many, without a search.

use super::clients::Among;
use super::numbered::{NumberedOwner, Role};
use super::{OWNERS_MAX, Refused, State};
use crate::status::Status;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use thruway_tcp::Origin;

/// Most idle owners that are tried for one that is to be forgotten. Those with an operation in progress stay.
const TRIES_MAX: usize = 8;

/// An owner of a client.
#[derive(Default)]
struct Known {
    numbers: Arc<NumberedOwner>,
    /// Numbers of its opens, or of its lock owners by file.
    held: HashSet<u64>,
    /// Those of `held` that have locks.
    locked: usize,
    /// Number of the last file that it has closed ([`State::closed`]).
    last_closed: Option<u64>,
    /// Key in [`Owners::idle`] and [`IdleOwners`], while `held` is empty.
    idle: Option<u64>,
}

impl Known {
    /// True if an operation of this owner is in progress.
    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.numbers) > 1
    }
}

/// Owners of one client, by role and name.
#[derive(Default)]
pub(super) struct Owners {
    opens: HashMap<Arc<[u8]>, Known>,
    locks: HashMap<Arc<[u8]>, Known>,
    /// Idle owners, the longest idle one first.
    idle: BTreeMap<u64, (Role, Arc<[u8]>)>,
}

impl Owners {
    pub(super) fn len(&self) -> usize {
        self.opens.len() + self.locks.len()
    }

    fn with_role(&self, role: Role) -> &HashMap<Arc<[u8]>, Known> {
        match role {
            Role::Opens => &self.opens,
            Role::Locks => &self.locks,
        }
    }

    fn with_role_mut(&mut self, role: Role) -> &mut HashMap<Arc<[u8]>, Known> {
        match role {
            Role::Opens => &mut self.opens,
            Role::Locks => &mut self.locks,
        }
    }

    /// Numbers of the last files that owners have closed.
    pub(super) fn last_closed(&self) -> impl Iterator<Item = u64> {
        self.opens.values().filter_map(|known| known.last_closed)
    }
}

/// Idle owners of all clients.
#[derive(Default)]
pub(super) struct IdleOwners {
    /// Key of the next owner that becomes idle.
    next: u64,
    /// Clients of idle owners, by host of the client and by key.
    of_host: HashMap<Origin, BTreeMap<u64, u64>>,
    /// Hosts by number of idle owners.
    by_count: BTreeSet<(usize, Origin)>,
    /// Idle owners that were looked at so far.
    #[cfg(test)]
    pub looked_at: usize,
}

impl IdleOwners {
    /// Adds an idle owner of a client. Returns its key.
    fn add(&mut self, origin: Origin, client: u64) -> u64 {
        let key = self.next;
        self.next += 1;
        self.change(origin, |clients| clients.insert(key, client));
        key
    }

    fn remove(&mut self, origin: Origin, key: u64) {
        self.change(origin, |clients| clients.remove(&key));
    }

    fn change(&mut self, origin: Origin, change: impl FnOnce(&mut BTreeMap<u64, u64>) -> Option<u64>) {
        let clients = self.of_host.entry(origin).or_default();
        let before = clients.len();
        change(clients);
        let after = clients.len();
        if after == before {
            return;
        }
        self.by_count.remove(&(before, origin));
        if after == 0 {
            self.of_host.remove(&origin);
        } else {
            self.by_count.insert((after, origin));
        }
    }

    /// Key and client of the longest idle owner of a host.
    fn first_of(&self, origin: Origin) -> Option<(u64, u64)> {
        self.of_host.get(&origin)?.first_key_value().map(|(key, client)| (*key, *client))
    }

    /// Host with the most idle owners, and their number.
    fn most(&self) -> Option<(usize, Origin)> {
        self.by_count.last().copied()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.of_host.values().map(BTreeMap::len).sum()
    }
}

impl State {
    fn owners(&mut self, client: u64) -> Option<(Origin, &mut Owners, &mut IdleOwners)> {
        let client = self.clients.get_mut(&client)?;
        Some((client.origin, &mut client.numbering.as_mut()?.owners, &mut self.idle_owners))
    }

    /// Finds an owner, which becomes the last of the idle ones if it is idle.
    pub(super) fn find_owner(&mut self, client: u64, role: Role, owner: &[u8]) -> Option<Arc<NumberedOwner>> {
        let numbers = Arc::clone(&self.owners(client)?.1.with_role(role).get(owner)?.numbers);
        self.note_idle(client, role, owner);
        Some(numbers)
    }

    /// Adds an owner. The limits are checked by [`State::make_room_for_owner`].
    pub(super) fn add_owner(&mut self, client: u64, role: Role, owner: &[u8]) -> Arc<NumberedOwner> {
        let Some((origin, owners, _)) = self.owners(client) else { return Arc::default() };
        let numbers = Arc::default();
        let known = Known { numbers: Arc::clone(&numbers), ..Known::default() };
        if owners.with_role_mut(role).insert(owner.into(), known).is_none() {
            self.count_owner(origin, true);
        }
        self.note_idle(client, role, owner);
        numbers
    }

    /// Updates the indexes of idle owners after an owner was used or what it holds has changed.
    fn note_idle(&mut self, client: u64, role: Role, owner: &[u8]) {
        let Some((origin, owners, idle_owners)) = self.owners(client) else { return };
        let all = match role {
            Role::Opens => &mut owners.opens,
            Role::Locks => &mut owners.locks,
        };
        let Some((name, _)) = all.get_key_value(owner) else { return };
        let name = Arc::clone(name);
        let Some(known) = all.get_mut(owner) else { return };
        if let Some(key) = known.idle.take() {
            owners.idle.remove(&key);
            idle_owners.remove(origin, key);
        }
        if known.held.is_empty() {
            let key = idle_owners.add(origin, client);
            known.idle = Some(key);
            owners.idle.insert(key, (role, name));
        }
    }

    /// An owner of a client has an open, or locks in a file, from now on. Other clients than those of version 4.0 are not counted.
    pub(super) fn note_held(&mut self, client: u64, role: Role, owner: &[u8], number: u64) {
        let Some((_, owners, _)) = self.owners(client) else { return };
        if !owners.with_role(role).contains_key(owner) {
            self.add_owner(client, role, owner);
        }
        self.change_owner(client, role, owner, |known| known.held.insert(number));
    }

    /// An owner of a client has this no longer.
    pub(super) fn note_removed(&mut self, client: u64, role: Role, owner: &[u8], number: u64) {
        self.change_owner(client, role, owner, |known| known.held.remove(&number));
    }

    fn change_owner(&mut self, client: u64, role: Role, owner: &[u8], change: impl FnOnce(&mut Known) -> bool) {
        let Some((_, owners, _)) = self.owners(client) else { return };
        let Some(known) = owners.with_role_mut(role).get_mut(owner) else { return };
        let was_idle = known.held.is_empty();
        change(known);
        if known.held.is_empty() != was_idle {
            self.note_idle(client, role, owner);
        }
    }

    /// An owner of locks has its first lock in a file (`has_locks`), or none any more.
    pub(super) fn note_locked(&mut self, client: u64, owner: &[u8], has_locks: bool) {
        let Some((_, owners, _)) = self.owners(client) else { return };
        let Some(known) = owners.locks.get_mut(owner) else { return };
        known.locked = known.locked.saturating_add_signed(if has_locks { 1 } else { -1 });
    }

    /// An owner of locks: true if it has locks, and its numbers by file. `None` if it is not known.
    pub(super) fn locks_of(&mut self, client: u64, owner: &[u8]) -> Option<(bool, &HashSet<u64>)> {
        let known = self.owners(client)?.1.locks.get(owner)?;
        Some((known.locked > 0, &known.held))
    }

    /// An owner has closed a file. Returns the number of the file that it had closed before; `None` if the owner is not known.
    pub(super) fn set_last_closed(&mut self, client: u64, owner: &[u8], number: u64) -> Option<Option<u64>> {
        let known = self.owners(client)?.1.opens.get_mut(owner)?;
        Some(known.last_closed.replace(number))
    }

    /// Forgets an owner: it is new when it comes again.
    pub(super) fn forget_owner(&mut self, client: u64, role: Role, owner: &[u8]) {
        let Some((origin, owners, idle_owners)) = self.owners(client) else { return };
        let Some(known) = owners.with_role_mut(role).remove(owner) else { return };
        if let Some(key) = known.idle {
            owners.idle.remove(&key);
            idle_owners.remove(origin, key);
        }
        self.count_owner(origin, false);
        known.last_closed.map(|number| self.closed.remove(&number));
    }

    /// Takes the owners of a removed client out of the indexes.
    pub(super) fn forget_owners(&mut self, origin: Origin, owners: &Owners) {
        owners.last_closed().for_each(|number| drop(self.closed.remove(&number)));
        owners.idle.keys().for_each(|key| self.idle_owners.remove(origin, *key));
    }

    /// Makes room for another owner of a client: checks the limit of the client and the quota of its host. In this order go: an idle
    /// owner of the client or of its host; an idle owner of the host with most of them, if these are more than all of the client's
    /// host.
    pub(super) fn make_room_for_owner(&mut self, now: u64, client: u64) -> Result<(), Refused> {
        let Some((origin, owners, _)) = self.owners(client) else { return Err(Status::STALE_CLIENTID.into()) };
        if owners.len() >= OWNERS_MAX {
            let has_gone = self.forget_idle(|state| {
                let key = *state.owners(client)?.1.idle.first_key_value()?.0;
                Some((key, client))
            });
            return if has_gone { Ok(()) } else { Err(Status::RESOURCE.into()) };
        }
        if self.has_room_for_owner(origin) || self.forget_idle(|state| state.idle_owners.first_of(origin)) {
            return Ok(());
        }
        let theirs = self.owners_of(origin);
        let other = self.idle_owners.most().filter(|(count, _)| *count > theirs);
        if other.is_some_and(|(_, other)| self.forget_idle(|state| state.idle_owners.first_of(other))) {
            return Ok(());
        }
        let among = if theirs > 0 { Among::ClientsOf(origin) } else { Among::Clients };
        match self.full(now, among) {
            Refused::Status(_) => Err(Status::RESOURCE.into()),
            expired => Err(expired),
        }
    }

    /// Forgets the first of these idle owners that has no operation in progress. False if none of the first [`TRIES_MAX`] is so.
    fn forget_idle(&mut self, first: impl Fn(&mut State) -> Option<(u64, u64)>) -> bool {
        for _ in 0..TRIES_MAX {
            let Some((key, client)) = first(self) else { return false };
            #[cfg(test)]
            {
                self.idle_owners.looked_at += 1;
            }
            let Some((_, owners, _)) = self.owners(client) else { return false };
            let Some((role, name)) = owners.idle.get(&key).cloned() else { return false };
            if owners.with_role(role).get(&name).is_some_and(Known::is_in_use) {
                self.note_idle(client, role, &name);
            } else {
                self.forget_owner(client, role, &name);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
impl State {
    /// Asserts that the indexes of owners match a full scan.
    pub(super) fn check_owners(&self) {
        let (mut all, mut idle) = (0, 0);
        for (id, client) in &self.clients {
            let Some(numbering) = &client.numbering else { continue };
            let owners = &numbering.owners;
            all += owners.len();
            idle += owners.idle.len();
            let mut scanned: HashMap<(Role, &[u8]), HashSet<u64>> = HashMap::new();
            for number in &client.held {
                let owner = self.held.get(number).and_then(super::files::Held::owner);
                let (role, name) = owner.expect("version 4.0 has no delegations");
                scanned.entry((role, name)).or_default().insert(*number);
            }
            for role in [Role::Opens, Role::Locks] {
                for (name, known) in owners.with_role(role) {
                    assert_eq!(known.held, scanned.remove(&(role, &**name)).unwrap_or_default(), "{id} {role:?}");
                    let has_locks = |number: &&u64| match self.held.get(number) {
                        Some(super::files::Held::Locks(holder)) => self.has_locks(**number, &holder.file),
                        _ => false,
                    };
                    assert_eq!(known.locked, known.held.iter().filter(has_locks).count(), "{id} {role:?}");
                    assert_eq!(known.idle.is_some(), known.held.is_empty());
                    let by_key = known.idle.and_then(|key| owners.idle.get(&key));
                    assert_eq!(by_key.is_some(), known.idle.is_some());
                    assert!(by_key.is_none_or(|(is, owner)| *is == role && owner == name));
                }
            }
            assert!(scanned.is_empty(), "owners of all that is held");
        }
        assert_eq!((self.numbered, self.idle_owners.len()), (all, idle));
        assert_eq!(self.origins.values().map(|usage| usage.owners).sum::<usize>(), all);
        assert_eq!(self.idle_owners.by_count.iter().map(|(count, _)| count).sum::<usize>(), idle);
    }
}
