//! Clients of version 3, whose locks have no leases: a client has them until it gives them back or has restarted, which it says
//! itself (NSM) or which shows by the number of its start. After a restart, the server calls it so that it reclaims.

use super::clients::{Client, ClientName, Kind, Maker, Principal};
use super::files::{FileState, Holder, OpenAs, Owner};
use super::waiting::Waiting;
use super::{FileIdentity, GrantPermit, MONITORED_MAX, READ, Range, Refused, State, WRITE};
use crate::status::Status;
use std::net::IpAddr;
use std::sync::Arc;
use thruway_tcp::Origin;

/// A client of version 3: one name at one address, which knows the server by one address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// Its address.
    pub address: IpAddr,
    /// That of the server.
    pub local: IpAddr,
    /// As it calls itself (`caller_name`).
    pub name: Box<[u8]>,
}

impl Host {
    /// Its name among those of all clients.
    pub(crate) fn client_name(&self) -> ClientName {
        let addresses = format!("{} {} ", self.address, self.local);
        ClientName { kind: Kind::Monitored, name: [addresses.as_bytes(), &self.name].concat().into() }
    }

    /// The host that has this name.
    pub(crate) fn of(client: &ClientName) -> Option<Host> {
        if client.kind != Kind::Monitored {
            return None;
        }
        let mut parts = client.name.splitn(3, |byte| *byte == b' ');
        let mut address = || std::str::from_utf8(parts.next()?).ok()?.parse().ok();
        Some(Host { address: address()?, local: address()?, name: parts.next()?.into() })
    }
}

/// A lock that a client of version 3 waits for, and that may be free.
#[derive(Debug)]
pub(crate) struct PendingGrant {
    /// Unique number of the grant.
    pub number: u64,
    pub client: u64,
    pub host: Host,
    pub owner: Owner,
    pub file: FileIdentity,
    pub handle: Box<[u8]>,
    pub is_write: bool,
    pub range: Range,
    pub since: u64,
}

/// A wait of a client of version 3: client, owner, file, whether it is for writing, first and last byte.
pub(super) type WaitKey = (u64, Box<[u8]>, FileIdentity, bool, (u64, u64));

fn wait_key(client: u64, owner: &[u8], file: &FileIdentity, is_write: bool, range: Range) -> WaitKey {
    (client, owner.into(), file.clone(), is_write, (range.start, range.last))
}

impl State {
    /// Returns the client of a host. `start`: number of the host's start, or 0 if unknown. A newer number than before removes the locks of the
    /// previous start. An older number belongs to another host with this name and address, or to a late call.
    pub(crate) fn monitored(&mut self, now: u64, host: &Host, start: u32) -> Result<u64, Refused> {
        let name = host.client_name();
        if let Some(id) = self.ids_of(&name).0 {
            let client = self.clients.get_mut(&id).expect("a client that is confirmed");
            let is_newer = start.wrapping_sub(client.start).cast_signed() > 0;
            if start == 0 || client.start == 0 || !is_newer {
                if client.start == 0 {
                    client.start = start;
                }
                client.lease.renew(now);
                return Ok(id);
            }
            self.remove_client(id);
        }
        let origin = Origin::of_host(host.address);
        if let Some(of_host) = self.too_many_monitored(origin) {
            self.remove_idle(of_host)?;
        }
        let all: Vec<u64> = self.all_monitored().map(|(id, _)| id).collect();
        if all.len() >= MONITORED_MAX {
            self.remove_idle(all)?;
        }
        let principal = Principal::NONE;
        let id = self.add_client(now, name, [0; 8], Maker { principal, origin })?;
        self.clients.get_mut(&id).expect("it has just been added").start = start;
        self.confirm(now, id);
        Ok(id)
    }

    /// Makes room for a client of version 3: what others have stays.
    fn remove_idle(&mut self, among: Vec<u64>) -> Result<(), Status> {
        let idle = among.into_iter().find(|id| self.clients[id].held.is_empty());
        self.remove_client(idle.ok_or(Status::NOSPC)?);
        Ok(())
    }

    /// The client that a host is, if it has or waits for anything.
    pub(crate) fn known_host(&self, host: &Host) -> Option<u64> {
        self.ids_of(&host.client_name()).0
    }

    /// What a host has is gone.
    pub(crate) fn forget_host(&mut self, host: &Host) {
        if let Some(id) = self.known_host(host) {
            self.remove_client(id);
        }
    }

    /// Those that had locks before the start.
    pub(crate) fn hosts_before(&self) -> Vec<Host> {
        self.earlier().filter_map(Host::of).collect()
    }

    fn at_address(&self, address: IpAddr) -> Vec<u64> {
        let beginning = format!("{address} ");
        let is_here = |client: &Client| client.name.name.starts_with(beginning.as_bytes());
        self.all_monitored().filter(|(_, client)| is_here(client)).map(|(id, _)| id).collect()
    }

    fn all_monitored(&self) -> impl Iterator<Item = (u64, &Client)> {
        let clients = self.clients.iter().map(|(id, client)| (*id, client));
        clients.filter(|(_, client)| client.name.kind == Kind::Monitored)
    }

    /// The clients that a host is which says that it has restarted: that of its name, at its address. Of another name only if there
    /// is no more than one at that address, because several hosts may have one; some say their names with a domain here and without
    /// one there.
    pub(crate) fn of_restarted(&self, address: IpAddr, name: &[u8]) -> Vec<u64> {
        let first = |name: &[u8]| name.split(|byte| *byte == b'.').next().unwrap_or_default().to_ascii_lowercase();
        let here = self.at_address(address);
        let is_named = |id: &u64| Host::of(&self.clients[id].name).is_some_and(|host| first(&host.name) == first(name));
        let named: Vec<u64> = here.iter().copied().filter(is_named).collect();
        if named.is_empty() && here.len() == 1 { here } else { named }
    }

    /// A client was started again, for the time that has this number, or 0 if that is not known: what it had before is gone. Whether it had
    /// anything.
    pub(crate) fn restarted(&mut self, id: u64, start: u32) -> bool {
        let is_before = self.clients.get(&id).is_some_and(|client| start == 0 || client.start != start);
        if is_before {
            self.remove_client(id);
        }
        is_before
    }

    /// Clients of version 3 that have nothing for as long as a lease need not stand in stable storage.
    pub(super) fn retire_monitored(&mut self, now: u64) {
        let lease_ms = self.lease_ms;
        let idle = self.clients.values_mut().filter(|client| {
            let is_idle = now.saturating_sub(client.lease.renewed()) > lease_ms;
            client.name.kind == Kind::Monitored && client.held.is_empty() && is_idle
        });
        idle.for_each(|client| client.has_reclaimed = false);
    }

    /// Whether a client may get something now: it has not been retired since it was found that it may.
    fn check_monitored(&mut self, now: u64, GrantPermit { client, is_reclaim }: GrantPermit) -> Result<(), Refused> {
        self.check_reclaim(now, is_reclaim)?;
        let known = self.clients.get(&client).ok_or(Status::DELAY)?;
        if is_reclaim || known.has_reclaimed { Ok(()) } else { Err(Status::DELAY.into()) }
    }

    /// NLM_LOCK. `DELAY`: it is to be asked again whether the client may.
    pub(crate) fn lock_monitored(
        &mut self,
        now: u64,
        may_have: GrantPermit,
        owner: &[u8],
        file: &FileIdentity,
        is_write: bool,
        range: Range,
    ) -> Result<(), Refused> {
        self.check_monitored(now, may_have)?;
        let client = may_have.client;
        self.recall_for_open(now, file, client, (if is_write { WRITE } else { READ }, 0))?;
        let holder = match self.holder_of(client, owner, file) {
            Some(number) => Holder::Known(number),
            None => Holder::New(owner.into(), None),
        };
        let taken = self.take_lock(now, client, holder, file, is_write, range);
        if taken.is_err() {
            self.forget_idle_holder(client, owner, file);
        }
        taken.map(drop)
    }

    /// NLM_TEST; it takes no lock.
    pub(crate) fn test_monitored(
        &mut self,
        now: u64,
        client: Option<u64>,
        owner: &[u8],
        file: &FileIdentity,
        is_write: bool,
        range: Range,
    ) -> Result<(), Refused> {
        // Of what is delegated for writing, the client may have locked parts by itself; for reading, only what readers may.
        self.recall(now, file, |delegation| is_write || delegation.is_write)?;
        self.test_lock(now, client.unwrap_or_default(), owner, file, is_write, range)
    }

    /// NLM_UNLOCK
    pub(crate) fn unlock_monitored(
        &mut self,
        client: u64,
        owner: &[u8],
        file: &FileIdentity,
        range: Range,
    ) -> Result<(), Status> {
        let Some(number) = self.holder_of(client, owner, file) else { return Ok(()) };
        self.unlock_range(number, file, range)?;
        self.forget_idle_holder(client, owner, file);
        Ok(())
    }

    /// Owners of version 3 are known only by their locks.
    fn forget_idle_holder(&mut self, client: u64, owner: &[u8], file: &FileIdentity) {
        if let Some(number) = self.holder_of(client, owner, file)
            && !self.has_locks(number, file)
        {
            self.remove_held(number);
        }
    }

    /// Whether an owner has this locked, for writing if that is asked.
    pub(crate) fn has_locked(
        &self,
        client: u64,
        owner: &[u8],
        file: &FileIdentity,
        is_write: bool,
        range: Range,
    ) -> bool {
        let (holder, state) = (self.holder_of(client, owner, file), self.files.get(file));
        holder.zip(state).is_some_and(|(number, state)| state.locks.covers(number, is_write, range))
    }

    /// What an owner has locked of a range: whether for writing, and from where to where.
    pub(crate) fn locked_in(&self, client: u64, owner: &[u8], file: &FileIdentity, range: Range) -> Vec<(bool, Range)> {
        let (holder, state) = (self.holder_of(client, owner, file), self.files.get(file));
        holder.zip(state).map(|(number, state)| state.locks.within(number, range)).unwrap_or_default()
    }

    /// Takes back parts of a lock that the client has cancelled, and restores the owner's earlier locks there.
    pub(crate) fn take_back(
        &mut self,
        client: u64,
        owner: &[u8],
        file: &FileIdentity,
        parts: &[Range],
        before: &[(bool, Range)],
    ) -> Result<(), Status> {
        let Some(number) = self.holder_of(client, owner, file) else { return Ok(()) };
        for part in parts {
            let has = |state: &FileState| state.locks.covers(number, false, *part);
            if !self.files.get(file).is_some_and(has) {
                continue;
            }
            self.unlock_range(number, file, *part)?;
            self.change_locks(number, file, |locks| {
                for (is_write, range) in before.iter().filter(|(_, range)| range.overlaps(part)) {
                    let range = range.within(part);
                    // Others may have locked it for reading since.
                    let is_free = |is_write| locks.conflict(Some(number), is_write, range).is_none();
                    if let Some(is_write) = [*is_write, false].into_iter().find(|is_write| is_free(*is_write)) {
                        locks.lock(number, is_write, range);
                    }
                }
            });
        }
        self.forget_idle_holder(client, owner, file);
        Ok(())
    }

    /// A client waits for a lock that has just been refused; false if too many wait.
    pub(crate) fn wait_monitored(&mut self, freed: PendingGrant) -> bool {
        let PendingGrant { client, owner, file, handle, is_write, range, since, .. } = freed;
        let waiting = self.files.get(&file).into_iter().flat_map(|state| &state.waiting);
        let is_there = |known: &&Waiting| {
            (known.client, &known.owner, known.range, known.is_write) == (client, &owner, range, is_write)
        };
        let since = waiting.into_iter().find(is_there).map_or(since, |known| known.since);
        self.wait_for_lock(Waiting { client, owner, is_monitored: true, handle, is_write, range, since }, &file)
    }

    /// Ends the wait of an owner for a lock of this kind, which it does not get if it has become free. True if it waited.
    pub(crate) fn cancel_wait(
        &mut self,
        client: u64,
        owner: &[u8],
        file: &FileIdentity,
        is_write: bool,
        range: Range,
    ) -> bool {
        self.end_waits(client, owner, file, range, |kind| kind == is_write)
    }

    /// An owner has locked a range by a call: it does not wait for that lock any more.
    pub(crate) fn has_been_locked(&mut self, client: u64, owner: &[u8], file: &FileIdentity, of: bool, range: Range) {
        self.end_waits(client, owner, file, range, |is_write| of || !is_write);
    }

    /// Ends the waits of an owner for locks of exactly this range and of the kinds that `ends` selects (true: for writing). True if there
    /// was one.
    pub(crate) fn end_waits(
        &mut self,
        client: u64,
        owner: &[u8],
        file: &FileIdentity,
        range: Range,
        ends: impl Fn(bool) -> bool,
    ) -> bool {
        for is_write in [false, true] {
            if !self.giving.is_empty() && ends(is_write) {
                self.giving.remove(&wait_key(client, owner, file, is_write, range));
            }
        }
        let is_it = |known: &Waiting| {
            (known.client, &*known.owner, known.range) == (client, owner, range) && ends(known.is_write)
        };
        !self.end_waits_in(file, is_it).is_empty()
    }

    /// What is to be done for a client that has waited.
    pub(super) fn freed(&mut self, waiting: Waiting, file: &FileIdentity) -> Option<PendingGrant> {
        let Waiting { client, owner, handle, is_write, range, since, .. } = waiting;
        let host = Host::of(&self.clients.get(&client)?.name)?;
        self.given += 1;
        let number = self.given;
        self.giving.insert(wait_key(client, &owner, file, is_write, range), number);
        Some(PendingGrant { number, client, host, owner, file: file.clone(), handle, is_write, range, since })
    }

    /// True while a client waits for a lock that has become free.
    pub(crate) fn is_wanted(&self, freed: &PendingGrant) -> bool {
        let PendingGrant { number, client, owner, file, is_write, range, .. } = freed;
        self.giving.get(&wait_key(*client, owner, file, *is_write, *range)) == Some(number)
    }

    /// A lock that has become free has been given, or will not be.
    pub(crate) fn end_wait(&mut self, freed: &PendingGrant) {
        if self.is_wanted(freed) {
            let PendingGrant { client, owner, file, is_write, range, .. } = freed;
            self.giving.remove(&wait_key(*client, owner, file, *is_write, *range));
        }
    }

    /// Locks that clients of version 3 wait for and that have become free.
    pub(crate) fn take_freed(&mut self) -> Vec<PendingGrant> {
        std::mem::take(&mut self.freed)
    }

    /// NLM_SHARE: the file is open so, until NLM_UNSHARE.
    pub(crate) fn share_monitored(
        &mut self,
        now: u64,
        may_have: GrantPermit,
        owner: &[u8],
        file: &FileIdentity,
        modes: (u32, u32),
    ) -> Result<(), Refused> {
        self.check_monitored(now, may_have)?;
        let how = OpenAs { owner, uid: u32::MAX, modes, is_confirmed: true };
        self.open(now, may_have, how, file, Arc::new(())).map(drop)
    }

    /// NLM_UNSHARE
    pub(crate) fn unshare_monitored(&mut self, client: u64, owner: &[u8], file: &FileIdentity) {
        if let Some(number) = self.files.get(file).and_then(|state| state.opens().find(client, owner)) {
            self.remove_held(number);
        }
    }
}
