//! Files that are open, and their locks (RFC 8881, section 9).

use super::clients::Kind;
use super::delegations::Delegation;
use super::numbered::Role;
use super::opens::Opens;
use super::quotas::{HostCounts, weight_of};
use super::ranges::{Lock, Locks, Range};
use super::waiting::Waiting;
use super::{
    Denied, FILE_HELD_MAX, FileIdentity, GrantPermit, HELD_MAX, LOCKS_MAX, LOCKS_TOTAL_MAX, Refused, State, Stateid,
};
use crate::status::Status;
use std::collections::{HashMap, HashSet};
use thruway_tcp::Origin;
use thruway_vfs::OpenGuard;

/// Reads, as a bit of what is open or denied (`OPEN4_SHARE_ACCESS_READ`).
pub(crate) const READ: u32 = 1;
/// Writes.
pub(crate) const WRITE: u32 = 2;

/// What a client calls a process that opens or locks files.
pub(crate) type Owner = Box<[u8]>;

/// What is open, and what is denied to others.
pub(crate) type Modes = (u32, u32);

/// Something that has a stateid.
pub(super) enum Held {
    Open(Open),
    Locks(LockHolder),
    Delegation(Delegation),
}

/// A file that an owner has open.
pub(super) struct Open {
    pub client: u64,
    /// Host of the client.
    origin: Origin,
    owner: Owner,
    pub file: FileIdentity,
    seqid: u32,
    pub access: u32,
    deny: u32,
    /// Bit `4 * access + deny` for each combination of modes that was opened. OPEN_DOWNGRADE accepts only unions of these.
    opened: u16,
    /// User that passed the check for all of `access`; `None` if several users share this open.
    uid: Option<u32>,
    /// Its owner may be made up from an old message (RFC 7530, section 9.1.11).
    pub is_unconfirmed: bool,
    pub guard: OpenGuard,
    /// Owners of locks who came by this.
    pub holders: HashSet<u64>,
}

/// Bit of a combination of modes in [`Open::opened`].
fn combination((access, deny): Modes) -> u16 {
    1 << (4 * access + deny)
}

/// Bits of all combinations within these modes.
fn within(modes: Modes) -> u16 {
    let all = (0..4).flat_map(|access| (0..4).map(move |deny| (access, deny)));
    let inside = all.filter(|(access, deny)| access & !modes.0 == 0 && deny & !modes.1 == 0);
    inside.map(combination).fold(0, |bits, bit| bits | bit)
}

/// Union of the modes of these combinations.
fn union(combinations: u16) -> Modes {
    let all = (0..16_u32).filter(|bit| combinations >> bit & 1 == 1);
    all.fold((0, 0), |(access, deny), bit| (access | (bit / 4), deny | (bit % 4)))
}

/// An owner of locks in a file.
pub(super) struct LockHolder {
    pub client: u64,
    origin: Origin,
    pub owner: Owner,
    pub file: FileIdentity,
    seqid: u32,
    /// Version 3 locks files without having them open.
    pub open: Option<u64>,
}

impl Held {
    pub(super) fn client(&self) -> u64 {
        match self {
            Held::Open(open) => open.client,
            Held::Locks(holder) => holder.client,
            Held::Delegation(delegation) => delegation.client,
        }
    }

    pub(super) fn file(&self) -> &FileIdentity {
        match self {
            Held::Open(open) => &open.file,
            Held::Locks(holder) => &holder.file,
            Held::Delegation(delegation) => &delegation.file,
        }
    }

    /// What it takes of what there is for all.
    pub(super) fn weight(&self) -> usize {
        weight_of(self.owner().map_or(0, |(_, owner)| owner.len()))
    }

    /// Delegations are their client's.
    pub(super) fn owner(&self) -> Option<(Role, &Owner)> {
        match self {
            Held::Open(open) => Some((Role::Opens, &open.owner)),
            Held::Locks(holder) => Some((Role::Locks, &holder.owner)),
            Held::Delegation(_) => None,
        }
    }
}

/// How a file is to be opened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenAs<'a> {
    pub owner: &'a [u8],
    /// The user, whose rights have been checked.
    pub uid: u32,
    pub modes: Modes,
    /// The owner is known already, or need not confirm that it is there.
    pub is_confirmed: bool,
}

/// What is known of a file.
#[derive(Default)]
pub(super) struct FileState {
    opens: Opens,
    /// Owners of locks, by client and name.
    pub holders: HashMap<(u64, Owner), u64>,
    /// Number of `holders` of version 3.
    monitored: usize,
    /// Number of opens and lock owners, by host of their clients.
    by_origin: HostCounts,
    /// Host of the client that opened the file first; `None` when the file is neither open nor delegated.
    opened_by: Option<Origin>,
    pub locks: Locks,
    /// Number of locks, by host.
    locks_of: HostCounts,
    /// Waits for locks.
    pub waiting: Vec<Waiting>,
    pub delegations: Vec<u64>,
    /// Changes in progress by those who do not have it open.
    pub changes: usize,
}

/// What is no longer there of a file.
#[derive(Default)]
pub(super) struct Removed {
    numbers: HashSet<u64>,
    opens: Vec<(u64, Owner, u64)>,
    holders: Vec<(u64, Owner)>,
    /// Host of each lock owner, by number.
    lockers: HashMap<u64, Origin>,
    monitored: usize,
    origins: Vec<Origin>,
}

impl Removed {
    pub(super) fn note(&mut self, number: u64, held: &Held) {
        self.numbers.insert(number);
        match held {
            Held::Open(open) => {
                self.opens.push((open.client, open.owner.clone(), number));
                self.origins.push(open.origin);
            }
            Held::Locks(holder) => {
                self.holders.push((holder.client, holder.owner.clone()));
                self.monitored += usize::from(holder.open.is_none());
                self.origins.push(holder.origin);
                self.lockers.insert(number, holder.origin);
            }
            Held::Delegation(_) => {}
        }
    }
}

impl FileState {
    /// True if a host may have another lock.
    pub(super) fn has_room_for_lock(&self, origin: Origin) -> bool {
        self.locks_of.has_room(origin, LOCKS_MAX)
    }

    /// Asserts that the counts of locks match a full scan.
    #[cfg(test)]
    pub(super) fn check_locks(&self, origin_of: impl Fn(u64) -> Origin) {
        let mut counted = HostCounts::default();
        self.locks.all().for_each(|lock| counted.add(origin_of(lock.holder), 1));
        assert_eq!(self.locks_of, counted);
    }

    #[cfg(test)]
    pub(super) fn all_locks(&self) -> impl Iterator<Item = super::ranges::Lock> {
        self.locks.all()
    }

    /// Forgets what is no longer there, and subtracts its locks from `all_locks`. Returns a range that contains the locks that were
    /// released.
    pub(super) fn forget(&mut self, removed: &Removed, all_locks: &mut HostCounts) -> Option<Range> {
        self.delegations.retain(|number| !removed.numbers.contains(number));
        for (client, owner, number) in &removed.opens {
            self.opens.remove(*client, owner, *number);
        }
        removed.origins.iter().for_each(|origin| self.by_origin.add(*origin, -1));
        self.monitored -= removed.monitored;
        for holder in &removed.holders {
            self.holders.remove(holder);
        }
        for (holder, origin) in &removed.lockers {
            let count = self.locks.count(*holder) as isize;
            self.locks_of.add(*origin, -count);
            all_locks.add(*origin, -count);
        }
        self.locks.release(&removed.lockers)
    }

    pub(super) fn opens(&self) -> &Opens {
        &self.opens
    }

    /// Number of opens and lock owners.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.by_origin.total()
    }

    /// Number of opens and lock owners of one host.
    pub(super) fn held_of(&self, origin: Origin) -> usize {
        self.by_origin.of(origin)
    }

    /// True if a host may have another open or lock owner.
    pub(super) fn has_room_for_holder(&self, origin: Origin) -> bool {
        self.by_origin.has_room(origin, FILE_HELD_MAX)
    }

    /// True if a client of version 3 has locked any of the file.
    pub(super) fn is_locked_by_monitored(&self) -> bool {
        self.monitored > 0
    }

    #[cfg(test)]
    pub(super) fn is_open(&self) -> bool {
        self.opened_by.is_some()
    }

    /// Takes the host that the file was counted for, if the file is no longer open or delegated.
    pub(super) fn note_closed(&mut self) -> Option<Origin> {
        if self.opens.is_empty() && self.delegations.is_empty() { self.opened_by.take() } else { None }
    }

    /// Host with the most opens and lock owners.
    fn most(&self) -> Option<Origin> {
        self.by_origin.most()
    }

    pub(super) fn is_unused(&self) -> bool {
        let has_state = !self.opens.is_empty() || !self.holders.is_empty() || !self.locks.is_empty();
        !has_state && self.delegations.is_empty() && self.changes == 0
    }
}

/// An owner who gets a lock.
pub(super) enum Holder {
    Known(u64),
    /// One who comes by something that is open, or by version 3.
    New(Owner, Option<u64>),
}

/// Who wants a lock.
pub(crate) enum LockRequest {
    /// An owner who may have had none in this file, which is open.
    New { open: Stateid, owner: Owner },
    /// An owner who has.
    Existing(Stateid),
}

impl State {
    /// Finds what a stateid of a client stands for.
    pub(super) fn find(&self, client: u64, stateid: Stateid) -> Result<(u64, &Held), Status> {
        if stateid.is_special() {
            return Err(Status::BAD_STATEID);
        }
        let number = self.number_of(stateid).ok_or(Status::BAD_STATEID)?;
        let held = self.held.get(&number).ok_or(Status::BAD_STATEID)?;
        let (of, seqid) = match held {
            Held::Open(open) => (open.client, open.seqid),
            Held::Locks(holder) => (holder.client, holder.seqid),
            Held::Delegation(delegation) => (delegation.client, 1),
        };
        if of != client || matches!(held, Held::Open(open) if open.is_unconfirmed) {
            return Err(Status::BAD_STATEID);
        }
        if matches!(held, Held::Delegation(delegation) if delegation.is_revoked) {
            return Err(Status::DELEG_REVOKED);
        }
        match stateid.seqid {
            // Without sessions there is no such thing as the latest one.
            0 if self.clients.get(&of).is_some_and(|client| client.numbering.is_none()) => Ok((number, held)),
            said if said == seqid => Ok((number, held)),
            said if said < seqid => Err(Status::OLD_STATEID),
            _ => Err(Status::BAD_STATEID),
        }
    }

    fn find_open(&self, client: u64, stateid: Stateid, file: &FileIdentity) -> Result<(u64, &Open), Status> {
        match self.find(client, stateid)? {
            (number, Held::Open(open)) if open.file == *file => Ok((number, open)),
            _ => Err(Status::BAD_STATEID),
        }
    }

    fn find_holder(&self, client: u64, stateid: Stateid, file: &FileIdentity) -> Result<(u64, &LockHolder), Status> {
        match self.find(client, stateid)? {
            (number, Held::Locks(holder)) if holder.file == *file => Ok((number, holder)),
            _ => Err(Status::BAD_STATEID),
        }
    }

    fn open_mut(&mut self, number: u64) -> &mut Open {
        match self.held.get_mut(&number) {
            Some(Held::Open(open)) => open,
            _ => unreachable!("an open file"),
        }
    }

    pub(super) fn open_ref(&self, number: u64) -> &Open {
        match self.held.get(&number) {
            Some(Held::Open(open)) => open,
            _ => unreachable!("an open file"),
        }
    }

    /// Checks the share reservations of all opens, including those of the same owner (RFC 8881, section 9.7).
    fn check_share(&self, now: u64, file: &FileIdentity, modes: Modes) -> Result<(), Refused> {
        let conflict = self.files.get(file).and_then(|state| state.opens.conflict(modes));
        let Some(other) = conflict.map(|number| self.open_ref(number)) else { return Ok(()) };
        Err(self.in_the_way(now, other.client, Status::SHARE_DENIED.into()))
    }

    /// Checks the limits that hold for OPEN of any file, before a file is created.
    pub(crate) fn check_opener(&self, now: u64, client: u64, owner: &[u8], file_system: u64) -> Result<(), Refused> {
        let known = self.clients.get(&client).ok_or_else(|| self.gone(client))?;
        if known.held.len() >= HELD_MAX {
            return Err(Status::NOSPC.into());
        }
        self.check_room(now, known, weight_of(owner.len()))?;
        self.check_open_files(now, known.origin, file_system)
    }

    /// Checks the limits for OPEN of an existing file.
    pub(crate) fn check_open(&self, now: u64, client: u64, owner: &[u8], file: &FileIdentity) -> Result<(), Refused> {
        let state = self.files.get(file);
        if state.is_some_and(|state| state.opens.find(client, owner).is_some()) {
            return Ok(());
        }
        let known = self.clients.get(&client).ok_or_else(|| self.gone(client))?;
        if state.is_some_and(|state| state.opened_by.is_some()) {
            self.check_room_in_file(now, known.origin, file)?;
        }
        // A file that another host has open counts for this host as soon as the other host closes it.
        match state.is_some_and(|state| state.held_of(known.origin) > 0) {
            true => Ok(()),
            false => self.check_open_files(now, known.origin, file.file_system),
        }
    }

    /// True if a file is open or delegated.
    pub(crate) fn is_in_use(&self, file: &FileIdentity) -> bool {
        self.files.get(file).is_some_and(|state| state.opened_by.is_some())
    }

    /// OPEN: what an owner already has open it has open in both ways then; how it was, if it was.
    pub(crate) fn open(
        &mut self,
        now: u64,
        GrantPermit { client, is_reclaim }: GrantPermit,
        how: OpenAs<'_>,
        file: &FileIdentity,
        guard: OpenGuard,
    ) -> Result<(Stateid, Option<Modes>), Refused> {
        let OpenAs { owner, uid, modes: (access, deny), is_confirmed } = how;
        self.check_reclaim(now, is_reclaim)?;
        let own = self.files.get(file).and_then(|state| state.opens.find(client, owner));
        self.check_share(now, file, (access, deny))?;
        self.recall_for_open(now, file, client, (access, deny))?;
        let Some(number) = own else {
            let known = self.clients.get(&client).ok_or_else(|| self.gone(client))?;
            if known.held.len() >= HELD_MAX {
                return Err(Status::NOSPC.into());
            }
            let (weight, origin) = (weight_of(owner.len()), known.origin);
            self.check_room(now, known, weight)?;
            self.check_room_in_file(now, origin, file)?;
            let number = self.number();
            let (owner, holders) = (owner.into(), HashSet::new());
            let open = Open {
                client,
                origin,
                owner,
                file: file.clone(),
                seqid: 1,
                access,
                deny,
                opened: combination((access, deny)),
                uid: Some(uid),
                is_unconfirmed: !is_confirmed,
                guard,
                holders,
            };
            let state = self.files.entry(file.clone()).or_default();
            state.opens.insert(client, open.owner.clone(), number, (access, deny));
            state.by_origin.add(origin, 1);
            let is_first = state.opened_by.is_none();
            state.opened_by.get_or_insert(origin);
            self.held.insert(number, Held::Open(open));
            if is_first {
                self.count_open_file(file.file_system, origin, true);
            }
            self.clients.get_mut(&client).expect("it has just been there").held.insert(number);
            self.add_weight(client, weight);
            self.note_held(client, Role::Opens, how.owner, number);
            return Ok((self.stateid_of(number, 1), None));
        };
        // It was open before.
        self.dropped.push(guard);
        let open = self.open_mut(number);
        let was = (open.access, open.deny);
        open.access |= access;
        open.deny |= deny;
        open.opened |= combination((access, deny));
        open.uid = open.uid.filter(|first| *first == uid);
        open.seqid += 1;
        let (seqid, modes) = (open.seqid, (open.access, open.deny));
        self.note_modes(file, number, modes);
        Ok((self.stateid_of(number, seqid), Some(was)))
    }

    /// OPEN_CONFIRM
    pub(crate) fn confirm_open(
        &mut self,
        client: u64,
        stateid: Stateid,
        file: &FileIdentity,
    ) -> Result<Stateid, Status> {
        let number = self.number_of(stateid).ok_or(Status::STALE_STATEID)?;
        match self.held.get_mut(&number) {
            Some(Held::Open(open))
                if open.is_unconfirmed
                    && open.client == client
                    && open.file == *file
                    && open.seqid == stateid.seqid =>
            {
                open.is_unconfirmed = false;
                open.seqid += 1;
                let seqid = open.seqid;
                Ok(self.stateid_of(number, seqid))
            }
            _ => Err(Status::BAD_STATEID),
        }
    }

    /// The time to have back what one had may have ended since that was found out.
    pub(super) fn check_reclaim(&mut self, now: u64, is_reclaim: bool) -> Result<(), Status> {
        if is_reclaim && !self.is_grace(now) { Err(Status::NO_GRACE) } else { Ok(()) }
    }

    /// A client has gone in the middle of its call.
    fn gone(&self, client: u64) -> Status {
        if self.expired.contains(&client) { Status::EXPIRED } else { Status::BADSESSION }
    }

    /// Takes back an OPEN of which the client is told that it has failed.
    pub(crate) fn undo_open(&mut self, client: u64, stateid: Stateid, file: &FileIdentity, was: Option<Modes>) {
        let Some(was) = was else {
            // Also one that has not been confirmed.
            self.number_of(stateid).inspect(|number| self.remove_held(*number));
            return;
        };
        // Unless it has been changed meanwhile.
        if let Ok((number, _)) = self.find_open(client, stateid, file) {
            let open = self.open_mut(number);
            (open.access, open.deny) = was;
            open.opened &= within(was);
            open.seqid -= 1;
            self.note_modes(file, number, was);
        }
    }

    /// OPEN_DOWNGRADE
    pub(crate) fn downgrade(
        &mut self,
        client: u64,
        stateid: Stateid,
        file: &FileIdentity,
        (access, deny): (u32, u32),
    ) -> Result<Stateid, Status> {
        let (number, open) = self.find_open(client, stateid, file)?;
        let kept = open.opened & within((access, deny));
        if union(kept) != (access, deny) {
            return Err(Status::INVAL);
        }
        let open = self.open_mut(number);
        open.opened = kept;
        (open.access, open.deny) = (access, deny);
        open.seqid += 1;
        let seqid = open.seqid;
        self.note_modes(file, number, (access, deny));
        Ok(self.stateid_of(number, seqid))
    }

    fn note_modes(&mut self, file: &FileIdentity, open: u64, modes: Modes) {
        if let Some(state) = self.files.get_mut(file) {
            state.opens.set_modes(open, modes);
        }
    }

    /// CLOSE; locks go with it.
    pub(crate) fn close(&mut self, client: u64, stateid: Stateid, file: &FileIdentity) -> Result<(), Status> {
        let (number, open) = self.find_open(client, stateid, file)?;
        let owner = open.owner.clone();
        self.remove_held(number);
        self.note_closed(client, owner, number);
        Ok(())
    }

    /// Whether a file may be read or written under this stateid, and whether the rights of this user to do so were checked when it
    /// was opened.
    pub(crate) fn access(
        &mut self,
        now: u64,
        client: u64,
        uid: u32,
        stateid: Stateid,
        file: &FileIdentity,
        is_write: bool,
    ) -> Result<bool, Refused> {
        let wanted = if is_write { WRITE } else { READ };
        if stateid == Stateid::ANONYMOUS || stateid == Stateid::BYPASS {
            // What keeps others out may not be there yet.
            if self.is_grace(now) {
                return Err(Status::GRACE.into());
            }
            if !is_write && stateid == Stateid::BYPASS {
                return Ok(false);
            }
            return match self.check_share(now, file, (wanted, 0)) {
                Ok(()) => Ok(false),
                Err(Refused::Status(_)) => Err(Status::LOCKED.into()),
                Err(other) => Err(other),
            };
        }
        if is_write {
            self.note_progress(client);
        }
        let (_, held) = self.find(client, stateid)?;
        let open = match held {
            Held::Open(open) => open,
            Held::Locks(holder) => self.open_ref(holder.open.ok_or(Status::BAD_STATEID)?),
            Held::Delegation(delegation) if delegation.file == *file => {
                return Ok(State::access_delegated(delegation, uid, is_write)?);
            }
            Held::Delegation(_) => return Err(Status::BAD_STATEID.into()),
        };
        if open.file != *file {
            return Err(Status::BAD_STATEID.into());
        }
        match open.access & wanted != 0 {
            true => Ok(open.uid == Some(uid)),
            // Clients read what is around the bytes that they write.
            false if !is_write => Ok(false),
            false => Err(Status::OPENMODE.into()),
        }
    }

    /// Refuses a lock to a client because of another. The number of another client is its secret.
    fn denied(&self, now: u64, to: u64, lock: Lock) -> Refused {
        let Some(Held::Locks(holder)) = self.held.get(&lock.holder) else { unreachable!("locks have holders") };
        let Lock { range, is_write, .. } = lock;
        let is_monitored = self.clients.get(&holder.client).is_some_and(|c| c.name.kind == Kind::Monitored);
        let client = if holder.client == to { to } else { 0 };
        let denied = Denied { range, is_write, client, owner: holder.owner.clone(), is_monitored };
        self.in_the_way(now, holder.client, Refused::Denied(denied))
    }

    /// Host of a lock owner.
    pub(super) fn origin_of(&self, holder: u64) -> Origin {
        match self.held.get(&holder) {
            Some(Held::Locks(holder)) => holder.origin,
            _ => unreachable!("an owner of locks"),
        }
    }

    pub(super) fn holder_of(&self, client: u64, owner: &[u8], file: &FileIdentity) -> Option<u64> {
        self.files.get(file)?.holders.get(&(client, owner.into())).copied()
    }

    /// LOCK
    pub(crate) fn lock(
        &mut self,
        now: u64,
        GrantPermit { client, is_reclaim }: GrantPermit,
        request: LockRequest,
        file: &FileIdentity,
        is_write: bool,
        range: Range,
    ) -> Result<Stateid, Refused> {
        self.check_reclaim(now, is_reclaim)?;
        let (holder, open, new) = match request {
            LockRequest::Existing(stateid) => {
                let (number, holder) = self.find_holder(client, stateid, file)?;
                (Some(number), holder.open.ok_or(Status::BAD_STATEID)?, None)
            }
            LockRequest::New { open, owner } => {
                let (open, _) = self.find_open(client, open, file)?;
                (self.holder_of(client, &owner, file), open, Some(owner))
            }
        };
        if self.open_ref(open).access & if is_write { WRITE } else { READ } == 0 {
            return Err(Status::OPENMODE.into());
        }
        let holder = match (holder, new) {
            (Some(number), _) => Holder::Known(number),
            (None, Some(owner)) => Holder::New(owner, Some(open)),
            (None, None) => unreachable!("an owner who has locks"),
        };
        let number = self.take_lock(now, client, holder, file, is_write, range)?;
        Ok(self.next_stateid(number))
    }

    /// Gives a lock to an owner of this client, if it is not in the way of another; the number of the owner.
    pub(super) fn take_lock(
        &mut self,
        now: u64,
        client: u64,
        holder: Holder,
        file: &FileIdentity,
        is_write: bool,
        range: Range,
    ) -> Result<u64, Refused> {
        let known = if let Holder::Known(number) = holder { Some(number) } else { None };
        if let Some(lock) = self.files.get(file).and_then(|state| state.locks.conflict(known, is_write, range)) {
            return Err(self.denied(now, client, lock));
        }
        let number = match holder {
            Holder::Known(number) => number,
            Holder::New(owner, open) => self.add_holder(now, client, owner, file, open)?,
        };
        let origin = self.origin_of(number);
        self.check_locks_in_file(now, origin, file)?;
        if let Some(freed) = self.change_locks(number, file, |locks| locks.lock(number, is_write, range)) {
            self.note_freed(file, freed);
        }
        Ok(number)
    }

    /// Changes the locks of an owner in a file.
    pub(super) fn change_locks<T>(
        &mut self,
        number: u64,
        file: &FileIdentity,
        change: impl FnOnce(&mut Locks) -> T,
    ) -> T {
        let Some(Held::Locks(holder)) = self.held.get(&number) else { unreachable!("an owner of locks") };
        let state = self.files.get_mut(file).expect("a file with owners of locks");
        let before = state.locks.count(number);
        let result = change(&mut state.locks);
        let after = state.locks.count(number);
        let more = after as isize - before as isize;
        state.locks_of.add(holder.origin, more);
        self.locks.add(holder.origin, more);
        if (before > 0) != (after > 0) {
            let (client, owner) = (holder.client, holder.owner.clone());
            self.note_locked(client, &owner, after > 0);
        }
        result
    }

    /// Counts an open file for another host, after the host that it was counted for has closed it.
    pub(super) fn charge_open_file(&mut self, file: &FileIdentity) {
        let Some(state) = self.files.get(file) else { return };
        let Some(old) = state.opened_by.filter(|old| state.held_of(*old) == 0) else { return };
        let delegated = state.delegations.iter().filter_map(|number| match self.held.get(number) {
            Some(Held::Delegation(delegation)) => Some(delegation.origin),
            _ => None,
        });
        let mut delegated = delegated.peekable();
        let to = state.most().or(delegated.peek().copied());
        if delegated.any(|origin| origin == old) {
            return;
        }
        if let Some(new) = to {
            self.files.get_mut(file).expect("it has just been there").opened_by = Some(new);
            self.count_open_file(file.file_system, old, false);
            self.count_open_file(file.file_system, new, true);
        }
    }

    /// Clients with opens or locks of a file; a client may come more than once.
    pub(super) fn with_something_in(&self, file: &FileIdentity) -> impl Iterator<Item = u64> {
        let state = self.files.get(file).into_iter();
        let numbers = state.flat_map(|state| state.opens.numbers().chain(state.holders.values().copied()));
        numbers.filter_map(|number| self.held.get(&number)).map(Held::client)
    }

    fn add_holder(
        &mut self,
        now: u64,
        client: u64,
        owner: Owner,
        file: &FileIdentity,
        open: Option<u64>,
    ) -> Result<u64, Refused> {
        let number = self.number();
        let weight = weight_of(owner.len());
        let known = self.clients.get(&client).ok_or_else(|| self.gone(client))?;
        let origin = known.origin;
        self.check_room(now, known, weight)?;
        self.check_room_in_file(now, origin, file)?;
        let Some(known) = self.clients.get_mut(&client) else { return Err(self.gone(client).into()) };
        if known.held.len() >= HELD_MAX {
            return Err(Status::NOSPC.into());
        }
        known.held.insert(number);
        self.add_weight(client, weight);
        self.note_held(client, Role::Locks, &owner, number);
        let state = self.files.entry(file.clone()).or_default();
        state.holders.insert((client, owner.clone()), number);
        state.monitored += usize::from(open.is_none());
        state.by_origin.add(origin, 1);
        let holder = LockHolder { client, origin, owner, file: file.clone(), seqid: 0, open };
        self.held.insert(number, Held::Locks(holder));
        if let Some(open) = open {
            self.open_mut(open).holders.insert(number);
        }
        Ok(number)
    }

    pub(super) fn has_locks(&self, holder: u64, file: &FileIdentity) -> bool {
        self.files.get(file).is_some_and(|state| state.locks.count(holder) > 0)
    }

    fn next_stateid(&mut self, holder: u64) -> Stateid {
        let Some(Held::Locks(held)) = self.held.get_mut(&holder) else { unreachable!("an owner of locks") };
        held.seqid += 1;
        let seqid = held.seqid;
        self.stateid_of(holder, seqid)
    }

    /// LOCKT
    pub(crate) fn test_lock(
        &self,
        now: u64,
        client: u64,
        owner: &[u8],
        file: &FileIdentity,
        is_write: bool,
        range: Range,
    ) -> Result<(), Refused> {
        let holder = self.holder_of(client, owner, file);
        match self.files.get(file).and_then(|state| state.locks.conflict(holder, is_write, range)) {
            Some(lock) => Err(self.denied(now, client, lock)),
            None => Ok(()),
        }
    }

    /// LOCKU
    pub(crate) fn unlock(
        &mut self,
        client: u64,
        stateid: Stateid,
        file: &FileIdentity,
        range: Range,
    ) -> Result<Stateid, Status> {
        let (number, _) = self.find_holder(client, stateid, file)?;
        self.unlock_range(number, file, range)?;
        Ok(self.next_stateid(number))
    }

    /// Takes a lock from an owner.
    pub(super) fn unlock_range(&mut self, number: u64, file: &FileIdentity, range: Range) -> Result<(), Status> {
        let origin = self.origin_of(number);
        let state = self.files.get(file).expect("a file with owners of locks");
        // Both halves of a lock count.
        let has_room = || state.has_room_for_lock(origin) && self.locks.has_room(origin, LOCKS_TOTAL_MAX);
        if state.locks.is_inside(number, range) && !has_room() {
            return Err(Status::NOSPC);
        }
        if let Some(freed) = self.change_locks(number, file, |locks| locks.unlock(number, range)) {
            self.note_freed(file, freed);
        }
        Ok(())
    }

    /// TEST_STATEID, for one of them.
    pub(crate) fn test_stateid(&self, client: u64, stateid: Stateid) -> Result<(), Status> {
        self.find(client, stateid).map(drop)
    }

    /// FREE_STATEID
    pub(crate) fn free_stateid(&mut self, client: u64, stateid: Stateid) -> Result<(), Status> {
        // One that has been revoked is given up by this.
        if let Some(number) = self.number_of(stateid)
            && matches!(self.held.get(&number), Some(Held::Delegation(d)) if d.client == client && d.is_revoked)
        {
            self.remove_held(number);
            return Ok(());
        }
        match self.find(client, stateid)? {
            (_, Held::Open(_) | Held::Delegation(_)) => Err(Status::LOCKS_HELD),
            (number, Held::Locks(holder)) => {
                if self.has_locks(number, &holder.file) {
                    return Err(Status::LOCKS_HELD);
                }
                self.remove_held(number);
                Ok(())
            }
        }
    }
}
