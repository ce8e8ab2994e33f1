//! Clients and their sessions (RFC 8881, sections 2.4, 18.35 and 18.36), and what they may reclaim (section 8.4.2).

use super::files::Removed;
use super::numbered::{Numbering, Role};
use super::session::{ChannelLimits, Lease, Session};
use super::{CLIENTS_MAX, FileIdentity, Held, Range, Refused, SESSIONS_MAX, State};
use crate::status::Status;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use thruway_tcp::Origin;

/// Identity of the creator of a client: the user of the credential or, with Kerberos, the principal. Includes the certificate of the
/// connection, if there was one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Principal {
    pub user: Option<u32>,
    /// A hash of the principal.
    pub kerberos: Option<[u8; 16]>,
    /// A hash of the certificate's names; none without a certificate.
    pub certificate: Option<[u8; 16]>,
}

/// Clients for stable storage, with their principals. They may reclaim after a restart.
pub(crate) type Records = BTreeMap<ClientName, Principal>;

impl Principal {
    /// Empty principal, for the locks of version 3 hosts.
    pub(super) const NONE: Principal = Principal { user: None, kerberos: None, certificate: None };

    pub(crate) fn new(user: Option<u32>, kerberos: Option<&str>, names: &[String]) -> Principal {
        let hash = |hasher: &mut blake3::Hasher, name: &String| {
            hasher.update(&(name.len() as u64).to_be_bytes()).update(name.to_ascii_lowercase().as_bytes());
        };
        let certificate = (!names.is_empty()).then(|| {
            let mut hasher = blake3::Hasher::new();
            names.iter().for_each(|name| hash(&mut hasher, name));
            *hasher.finalize().as_bytes().first_chunk().expect("a hash is longer")
        });
        let kerberos = kerberos.map(|principal| {
            let hash = blake3::hash(principal.as_bytes());
            *hash.as_bytes().first_chunk().expect("a hash is longer")
        });
        Principal { user, kerberos, certificate }
    }
}

/// Who makes a client, and from where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Maker {
    pub principal: Principal,
    pub origin: Origin,
}

/// By which version a client has what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Version 4.1 or 4.2.
    WithSessions,
    /// Version 4.0.
    WithoutSessions,
    /// Version 3, whose locks have no leases: that it has restarted is to be learnt (`monitored.rs`).
    Monitored,
}

/// What a client calls itself. Those of one kind are others than those of another, also where the name is the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ClientName {
    pub kind: Kind,
    pub name: Box<[u8]>,
}

impl ClientName {
    /// Of version 4.1 or 4.2.
    pub(crate) fn with_sessions(name: &[u8]) -> ClientName {
        ClientName { kind: Kind::WithSessions, name: name.into() }
    }

    /// Of version 4.0.
    pub(crate) fn without_sessions(name: &[u8]) -> ClientName {
        ClientName { kind: Kind::WithoutSessions, name: name.into() }
    }
}

/// A client.
pub(super) struct Client {
    pub name: ClientName,
    /// Another one after each restart of the client.
    pub verifier: [u8; 8],
    pub principal: Principal,
    /// Where it was made from. It may go on from elsewhere.
    pub origin: Origin,
    pub is_confirmed: bool,
    /// Of the next CREATE_SESSION, and the reply to the last.
    sequence: u32,
    created: Option<Box<[u8]>>,
    pub lease: Arc<Lease>,
    /// Ids of its sessions.
    pub sessions: Vec<[u8; 16]>,
    /// It has finished reclaiming, so it may get new state; it is in the list for stable storage.
    pub has_reclaimed: bool,
    /// Number of the first list ([`State::records`]) that has it.
    record: u64,
    /// What it has is being given up.
    is_given_up: bool,
    /// What it has open and locked, and what is delegated to it; of the latter how much.
    pub held: HashSet<u64>,
    pub weight: usize,
    pub delegations: usize,
    /// Time of its last WRITE or DELEGRETURN.
    pub progressed: u64,
    /// If it is one of version 4.0.
    pub numbering: Option<Numbering>,
    /// If it is one of version 3: the number of its start, if that is known.
    pub start: u32,
    /// And the files in which it waits for locks.
    pub waits: HashSet<FileIdentity>,
}

impl Client {
    /// Locks of version 3 are kept until their client has restarted.
    pub(super) fn has_lease(&self) -> bool {
        self.name.kind != Kind::Monitored || self.held.is_empty()
    }
}

/// Clients that leave no room for another request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Among {
    /// All clients with state.
    Clients,
    /// Clients with state, of one host.
    ClientsOf(Origin),
    /// All clients with sessions.
    Sessions,
    /// Clients with sessions, of one host.
    SessionsOf(Origin),
    /// Clients with opens or locks of a file.
    File(FileIdentity),
}

/// Most sets of clients with a known time before which none expires.
const SCANS_MAX: usize = 4096;

/// The answer to EXCHANGE_ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub client: u64,
    pub sequence: u32,
    pub is_confirmed: bool,
}

/// What is due to a CREATE_SESSION.
pub(crate) enum NewSession {
    /// The reply that it had.
    Again(Box<[u8]>),
    /// One is to be made; its client's lease.
    Make(Arc<Lease>),
}

/// The time after a restart in which clients get back what they had, and nobody gets anything else.
pub(super) struct Grace {
    pub until: u64,
    /// Who had something.
    before: Records,
    /// Of these, who has not yet said that it has reclaimed all.
    waiting: HashSet<ClientName>,
}

impl Grace {
    pub(super) fn new(lease_ms: u64, before: Records) -> Grace {
        Grace { until: lease_ms, waiting: before.keys().cloned().collect(), before }
    }
}

impl State {
    /// Clients of a name: the one that is confirmed, and the one that is not.
    pub(super) fn ids_of(&self, name: &ClientName) -> super::ClientIds {
        self.by_owner.get(name).copied().unwrap_or_default()
    }

    /// A client of version 4.1 or 4.2.
    fn with_sessions(&mut self, id: u64) -> Result<&mut Client, Status> {
        let client = self.clients.get_mut(&id).filter(|client| client.name.kind == Kind::WithSessions);
        client.ok_or(Status::STALE_CLIENTID)
    }

    pub(super) fn add_client(
        &mut self,
        now: u64,
        name: ClientName,
        verifier: [u8; 8],
        Maker { principal, origin }: Maker,
    ) -> Result<u64, Refused> {
        self.check_clients(now, origin)?;
        if self.clients.len() >= CLIENTS_MAX {
            self.make_room(now, origin)?;
        }
        // Not to be guessed: clients of version 4.0 are known by it alone.
        let id = loop {
            let id = u64::from_be_bytes(thruway_engine::random::random());
            if id != 0 && !self.clients.contains_key(&id) {
                break id;
            }
        };
        let numbering = (name.kind == Kind::WithoutSessions).then(Numbering::default);
        let client = Client {
            name: name.clone(),
            verifier,
            principal,
            origin,
            is_confirmed: false,
            sequence: 1,
            created: None,
            lease: Arc::new(Lease::new(now)),
            sessions: Vec::new(),
            progressed: 0,
            has_reclaimed: false,
            record: 0,
            is_given_up: false,
            held: HashSet::new(),
            weight: 0,
            delegations: 0,
            numbering,
            start: 0,
            waits: HashSet::new(),
        };
        self.clients.insert(id, client);
        self.origin_has_client(origin);
        self.by_owner.entry(name).or_default().1 = Some(id);
        Ok(id)
    }

    /// Makes room for a client. In this order go: expired clients without state; a client without state, of the host that has most
    /// clients, if the new one's has fewer; the oldest unconfirmed client; the client with the lease that has expired first.
    fn make_room(&mut self, now: u64, origin: Origin) -> Result<(), Refused> {
        let gone = |(_, client): &(&u64, &Client)| client.held.is_empty() && self.is_expired(now, client);
        let gone: Vec<u64> = self.clients.iter().filter(gone).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| self.remove_client(id));
        if self.clients.len() < CLIENTS_MAX {
            return Ok(());
        }
        if let Some(id) = self.gives_way_to(origin) {
            self.remove_client(id);
            return Ok(());
        }
        let with_leases = self.clients.iter().filter(|(_, client)| client.has_lease());
        let oldest = with_leases.min_by_key(|(_, client)| (client.is_confirmed, client.lease.renewed()));
        match oldest {
            Some((id, client)) if !client.is_confirmed => {
                let id = *id;
                self.remove_client(id);
                Ok(())
            }
            Some((id, client)) if self.is_expired(now, client) => Err(Refused::Expired(*id)),
            _ => Err(Status::DELAY.into()),
        }
    }

    /// The client with state whose lease has expired first.
    pub(crate) fn longest_expired_of_all(&self, now: u64) -> Option<u64> {
        self.first_to_expire(self.with_something()).filter(|id| self.is_expired(now, &self.clients[id]))
    }

    fn with_something(&self) -> impl Iterator<Item = u64> {
        self.clients.iter().filter(|(_, client)| !client.held.is_empty()).map(|(id, _)| *id)
    }

    /// Refusal because these clients leave no room. If a lease has expired, names the client of the oldest one.
    ///
    /// No client of the set can expire before the first lease ends, so the set is not scanned again until then.
    pub(super) fn full(&self, now: u64, among: Among) -> Refused {
        let mut none_before = self.none_expired_before.borrow_mut();
        if none_before.get(&among).is_some_and(|time| now <= *time) {
            return Status::NOSPC.into();
        }
        let first = match &among {
            Among::Clients => self.first_to_expire(self.with_something()),
            Among::ClientsOf(origin) => self.first_to_expire(self.with_something_of(*origin)),
            Among::Sessions => self.first_to_expire(self.with_sessions_of(|_| true)),
            Among::SessionsOf(origin) => self.first_to_expire(self.with_sessions_of(|of| of == *origin)),
            Among::File(file) => self.first_to_expire(self.with_something_in(file)),
        };
        let renewed = match first {
            Some(id) if self.is_expired(now, &self.clients[&id]) => return Refused::Expired(id),
            Some(id) => self.clients[&id].lease.renewed(),
            // The lease of a client that comes later ends later.
            None => now,
        };
        if none_before.len() >= SCANS_MAX {
            none_before.clear();
        }
        none_before.insert(among, renewed + self.lease_ms);
        Status::NOSPC.into()
    }

    fn first_to_expire(&self, among: impl Iterator<Item = u64>) -> Option<u64> {
        let known = among.filter_map(|id| Some((id, self.clients.get(&id)?)));
        let with_leases = known.filter(|(_, client)| client.has_lease());
        with_leases.min_by_key(|(_, client)| client.lease.renewed()).map(|(id, _)| id)
    }

    fn with_sessions_of(&self, is_wanted: impl Fn(Origin) -> bool) -> impl Iterator<Item = u64> {
        let theirs =
            self.clients.iter().filter(move |(_, client)| !client.sessions.is_empty() && is_wanted(client.origin));
        theirs.map(|(id, _)| *id)
    }

    /// Removes a client, its sessions, and what it has.
    pub(super) fn remove_client(&mut self, id: u64) {
        let Some(client) = self.clients.remove(&id) else { return };
        for session in client.sessions.iter().filter_map(|session| self.sessions.remove(session)).collect::<Vec<_>>() {
            self.count_session(client.origin, session.limits.kept(), false);
        }
        self.origin_has_lost(&client);
        self.remove_all(client.held.into_iter().collect());
        if let Some(numbering) = &client.numbering {
            self.forget_owners(client.origin, &numbering.owners);
        }
        self.forget_waits(id, client.origin, client.waits);
        self.end_offloads_of(id);
        if let Some(ids) = self.by_owner.get_mut(&client.name) {
            for known in [&mut ids.0, &mut ids.1] {
                *known = known.filter(|known| *known != id);
            }
            if *ids == (None, None) {
                self.by_owner.remove(&client.name);
            }
        }
        if client.has_reclaimed {
            self.records += 1;
        }
    }

    /// EXCHANGE_ID, the cases of its section 18.35.4.
    pub(crate) fn exchange_id(
        &mut self,
        now: u64,
        owner: &[u8],
        verifier: [u8; 8],
        maker: impl Into<Maker>,
        is_update: bool,
    ) -> Result<Exchange, Refused> {
        let maker = maker.into();
        let name = ClientName::with_sessions(owner);
        let (confirmed, unconfirmed) = self.ids_of(&name);
        if let Some(id) = confirmed {
            let client = &self.clients[&id];
            let (same_verifier, same_principal) = (client.verifier == verifier, client.principal == maker.principal);
            let known = Exchange { client: id, sequence: client.sequence, is_confirmed: true };
            let has_nothing = client.held.is_empty() && client.sessions.is_empty();
            match (is_update, same_principal, same_verifier) {
                (_, true, true) => {
                    client.lease.renew(now);
                    return Ok(known);
                }
                (true, false, _) => return Err(Status::PERM.into()),
                (true, true, false) => return Err(Status::NOT_SAME.into()),
                // Another user has taken the same name.
                (false, false, _) if has_nothing => self.remove_client(id),
                (false, false, _) => return Err(self.in_the_way(now, id, Status::CLID_INUSE.into())),
                // It has restarted: what it had goes when it confirms that.
                (false, true, false) => {}
            }
        } else if is_update {
            return Err(Status::NOENT.into());
        }
        self.check_maker(now, &name, maker.principal)?;
        if let Some(id) = unconfirmed {
            self.remove_client(id);
        }
        let client = self.add_client(now, name, verifier, maker)?;
        Ok(Exchange { client, sequence: 1, is_confirmed: false })
    }

    /// Refuses a client with the name of an earlier client of another principal, which may still reclaim after the restart.
    pub(super) fn check_maker(&mut self, now: u64, name: &ClientName, maker: Principal) -> Result<(), Status> {
        let is_free = !self.is_grace(now) || self.grace.before.get(name).is_none_or(|before| *before == maker);
        if is_free { Ok(()) } else { Err(Status::CLID_INUSE) }
    }

    /// CREATE_SESSION, up to the session itself.
    pub(crate) fn create_session(
        &mut self,
        now: u64,
        id: u64,
        sequence: u32,
        principal: Principal,
    ) -> Result<NewSession, Refused> {
        self.forget_unconfirmed(now, id);
        let client = self.with_sessions(id)?;
        if sequence.wrapping_add(1) == client.sequence
            && let Some(reply) = &client.created
        {
            return Ok(NewSession::Again(reply.clone()));
        }
        if sequence != client.sequence {
            return Err(Status::SEQ_MISORDERED.into());
        }
        if client.principal != principal {
            return Err(Status::CLID_INUSE.into());
        }
        if client.sessions.len() >= SESSIONS_MAX {
            return Err(Status::NOSPC.into());
        }
        let origin = client.origin;
        self.check_sessions(now, origin)?;
        Ok(NewSession::Make(self.confirm(now, id)))
    }

    /// Removes a client that was not confirmed within a lease time (RFC 8881, section 18.35.4).
    pub(super) fn forget_unconfirmed(&mut self, now: u64, id: u64) {
        if self.clients.get(&id).is_some_and(|client| !client.is_confirmed && self.is_expired(now, client)) {
            self.remove_client(id);
        }
    }

    /// Confirms that a client is there; what one with its name had that was there before is gone. Its lease.
    pub(super) fn confirm(&mut self, now: u64, id: u64) -> Arc<Lease> {
        let client = self.clients.get_mut(&id).expect("a client that is there");
        client.lease.renew(now);
        let lease = Arc::clone(&client.lease);
        if !std::mem::replace(&mut client.is_confirmed, true) {
            let ids = self.by_owner.get_mut(&client.name).expect("its client is there");
            let before = std::mem::replace(ids, (Some(id), None)).0;
            if let Some(before) = before {
                self.remove_client(before);
            }
        }
        lease
    }

    /// The limits of a session, for whose replies there is room beside those of the others.
    pub(crate) fn with_room_for_replies(&self, client: u64, limits: ChannelLimits) -> ChannelLimits {
        let has_room = self.clients.get(&client).is_some_and(|c| self.has_room_for_replies(c.origin, limits.kept()));
        if has_room { limits } else { ChannelLimits { requests: limits.requests.min(2), ..limits } }
    }

    /// The session is there, and this is the reply that says so.
    pub(crate) fn session_created(&mut self, session: Arc<Session>, reply: Box<[u8]>) {
        let Some(client) = self.clients.get_mut(&session.client) else { return };
        client.sequence = client.sequence.wrapping_add(1);
        client.created = Some(reply);
        client.sessions.push(session.id);
        let origin = client.origin;
        self.count_session(origin, session.limits.kept(), true);
        self.sessions.insert(session.id, session);
    }

    /// DESTROY_SESSION
    pub(crate) fn destroy_session(&mut self, id: &[u8; 16]) -> Result<(), Status> {
        let session = self.sessions.remove(id).ok_or(Status::BADSESSION)?;
        if let Some(client) = self.clients.get_mut(&session.client) {
            client.sessions.retain(|known| known != id);
            let origin = client.origin;
            self.count_session(origin, session.limits.kept(), false);
        }
        Ok(())
    }

    /// DESTROY_CLIENTID
    pub(crate) fn destroy_client(&mut self, id: u64) -> Result<(), Status> {
        let client = self.with_sessions(id)?;
        if !client.sessions.is_empty() || !client.held.is_empty() {
            return Err(Status::CLIENTID_BUSY);
        }
        self.remove_client(id);
        Ok(())
    }

    /// Whether clients that had something before the restart still get it back.
    pub(crate) fn is_grace(&mut self, now: u64) -> bool {
        let is_over = self.grace.waiting.is_empty() || now >= self.grace.until;
        if is_over && !self.grace.before.is_empty() {
            // Clients without sessions send no RECLAIM_COMPLETE.
            let reclaimed = |client: &&mut Client| client.name.kind != Kind::WithSessions && !client.held.is_empty();
            self.records += 1;
            // From now on others may get conflicting state, so clients that have not reclaimed must not do so after another restart.
            self.records_for_all = self.records;
            for client in self.clients.values_mut().filter(reclaimed) {
                (client.has_reclaimed, client.record) = (true, self.records);
            }
            self.grace.before.clear();
            self.grace.waiting.clear();
        }
        !is_over
    }

    /// Checks that a client may get new state. Returns the number of the list ([`State::records`]) that must be stored before. That
    /// list has the client, and no client that has not reclaimed in time.
    pub(crate) fn may_begin(&mut self, now: u64, client: u64) -> Result<u64, Status> {
        let is_grace = self.is_grace(now);
        let Some(client) = self.clients.get_mut(&client) else { return Ok(self.records_for_all) };
        if client.is_given_up {
            return Err(Status::DELAY);
        }
        if !is_grace && client.name.kind != Kind::WithSessions && !client.has_reclaimed {
            self.records += 1;
            (client.has_reclaimed, client.record) = (true, self.records);
        }
        let needed = client.record.max(self.records_for_all);
        if is_grace || !client.has_reclaimed { Err(Status::GRACE) } else { Ok(needed) }
    }

    /// Checks that a client may reclaim: the stored list has it, with the same principal. Returns the number of the list that must be
    /// stored before.
    pub(crate) fn may_reclaim(&mut self, now: u64, client: u64) -> Result<u64, Status> {
        let is_grace = self.is_grace(now);
        let Some(client) = self.clients.get(&client) else { return Err(Status::NO_GRACE) };
        match () {
            () if !is_grace || client.has_reclaimed => Err(Status::NO_GRACE),
            () if self.grace.before.get(&client.name) != Some(&client.principal) => Err(Status::RECLAIM_BAD),
            () => Ok(self.records_for_all),
        }
    }

    /// RECLAIM_COMPLETE for all file systems. The client must be in stable storage before the reply is sent.
    pub(crate) fn reclaim_complete(&mut self, now: u64, id: u64) -> Result<(), Status> {
        let next = self.records + 1;
        let client = self.with_sessions(id)?;
        if std::mem::replace(&mut client.has_reclaimed, true) {
            return Err(Status::COMPLETE_ALREADY);
        }
        client.record = next;
        let name = client.name.clone();
        self.records = next;
        self.grace.waiting.remove(&name);
        self.is_grace(now);
        Ok(())
    }

    /// Number of the current list of clients for stable storage, and the list.
    pub(crate) fn records(&mut self, now: u64) -> (u64, Records) {
        self.retire_monitored(now);
        let mut records = self.grace.before.clone();
        let now = self.clients.values().filter(|client| client.has_reclaimed);
        records.extend(now.map(|client| (client.name.clone(), client.principal)));
        (self.records, records)
    }

    /// Clients of before the start that may still come back.
    pub(super) fn earlier(&self) -> impl Iterator<Item = &ClientName> {
        self.grace.before.keys()
    }

    /// Whether clients from before the start may still come back.
    pub(crate) fn has_earlier(&self) -> bool {
        !self.grace.before.is_empty()
    }

    /// Takes a client whose lease has expired out of what is to stand in stable storage: it will not get back what it has.
    pub(crate) fn give_up(&mut self, now: u64, id: u64) -> bool {
        if self.clients.get(&id).is_none_or(|client| !self.is_expired(now, client)) {
            return false;
        }
        let Some(client) = self.clients.get_mut(&id) else { return false };
        client.has_reclaimed = false;
        client.is_given_up = true;
        self.grace.before.remove(&client.name);
        self.grace.waiting.remove(&client.name);
        self.records += 1;
        true
    }

    /// Such a client stays after all: it could not be taken out of stable storage.
    pub(crate) fn keep(&mut self, id: u64) {
        if let Some(client) = self.clients.get_mut(&id) {
            self.records += 1;
            (client.has_reclaimed, client.record) = (true, self.records);
            client.is_given_up = false;
        }
    }

    /// Removes what such a client has; not before it is out of stable storage. False if it has been heard of meanwhile: then it keeps
    /// what it has, and is to be stored again.
    pub(crate) fn expire(&mut self, now: u64, id: u64) -> bool {
        let Some(client) = self.clients.get(&id) else { return true };
        if !self.is_expired(now, client) {
            self.keep(id);
            return false;
        }
        if client.numbering.is_some() {
            self.remember_expired(id);
        }
        self.remove_client(id);
        true
    }

    /// Forgets something that is open, locked or delegated, and what goes with it.
    pub(super) fn remove_held(&mut self, number: u64) {
        self.remove_all(vec![number]);
    }

    /// Forgets all of these, going through what is known of each file once.
    fn remove_all(&mut self, mut numbers: Vec<u64>) {
        let mut of_files: HashMap<FileIdentity, Removed> = HashMap::new();
        while let Some(number) = numbers.pop() {
            let Some(held) = self.held.remove(&number) else { continue };
            if let Some(client) = self.clients.get_mut(&held.client()) {
                client.held.remove(&number);
            }
            self.remove_weight(held.client(), held.weight());
            if let Some((role, owner)) = held.owner() {
                if role == Role::Locks && self.has_locks(number, held.file()) {
                    self.note_locked(held.client(), owner, false);
                }
                self.note_removed(held.client(), role, owner, number);
            }
            of_files.entry(held.file().clone()).or_default().note(number, &held);
            match held {
                Held::Open(open) => {
                    numbers.extend(open.holders);
                    self.dropped.push(open.guard);
                }
                Held::Locks(holder) => {
                    if let Some(Held::Open(open)) = holder.open.and_then(|open| self.held.get_mut(&open)) {
                        open.holders.remove(&number);
                    }
                }
                Held::Delegation(delegation) => self.end_delegation(delegation),
            }
        }
        for (file, removed) in of_files {
            self.forget_in_file(&removed, file);
        }
    }

    /// These are no longer in the way of others in a file.
    pub(super) fn forget_in_file(&mut self, removed: &Removed, file: FileIdentity) {
        let Some(state) = self.files.get_mut(&file) else { return };
        let freed = state.forget(removed, &mut self.locks);
        let closed_by = state.note_closed();
        if let Some(origin) = closed_by {
            self.count_open_file(file.file_system, origin, false);
        }
        self.charge_open_file(&file);
        if let Some(freed) = freed {
            self.note_freed(&file, freed);
        }
        let Some(state) = self.files.get(&file) else { return };
        if state.is_unused() {
            // Without locks, no wait has a reason.
            if state.waiting.is_empty() {
                self.files.remove(&file);
            } else {
                self.note_freed(&file, Range::ALL);
            }
        }
    }
}
