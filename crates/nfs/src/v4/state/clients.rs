//! Clients and their sessions (RFC 8881, sections 2.4, 18.35 and 18.36), and what they may reclaim (section 8.4.2).

use super::files::FileState;
use super::numbered::Numbering;
use super::{CLIENTS_MAX, FileKey, Held, Refused, SESSIONS_MAX, SESSIONS_TOTAL_MAX, State};
use crate::v4::session::{Lease, Session};
use crate::v4::status::Status;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// Who has made a client: the user of its credential, if that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Principal(pub Option<u32>);

/// What a client calls itself. Those of version 4.0 are others than those of the later ones, also where the name is the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in super::super) struct ClientName {
    /// It knows sessions, as clients do from version 4.1 on.
    pub has_sessions: bool,
    pub name: Box<[u8]>,
}

impl ClientName {
    /// Of version 4.1 or 4.2.
    pub(in super::super) fn with_sessions(name: &[u8]) -> ClientName {
        ClientName { has_sessions: true, name: name.into() }
    }

    /// Of version 4.0.
    pub(in super::super) fn without_sessions(name: &[u8]) -> ClientName {
        ClientName { has_sessions: false, name: name.into() }
    }
}

/// A client.
pub(super) struct Client {
    name: ClientName,
    /// Another one after each restart of the client.
    pub verifier: [u8; 8],
    pub principal: Principal,
    pub is_confirmed: bool,
    /// Of the next CREATE_SESSION, and the reply to the last.
    sequence: u32,
    created: Option<Box<[u8]>>,
    pub lease: Arc<Lease>,
    sessions: usize,
    /// It has reclaimed what it had, and so it may have something new; it stands in stable storage.
    has_reclaimed: bool,
    /// What it has is being given up.
    is_given_up: bool,
    /// What it has open and locked, and what is delegated to it; of the latter how much.
    pub held: HashSet<u64>,
    pub delegations: usize,
    /// If it is one of version 4.0.
    pub numbering: Option<Numbering>,
}

/// The answer to EXCHANGE_ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Exchange {
    pub client: u64,
    pub sequence: u32,
    pub is_confirmed: bool,
}

/// What is due to a CREATE_SESSION.
pub(in super::super) enum NewSession {
    /// The reply that it had.
    Again(Box<[u8]>),
    /// One is to be made; its client's lease.
    Make(Arc<Lease>),
}

/// The time after a restart in which clients get back what they had, and nobody gets anything else.
pub(super) struct Grace {
    pub until: u64,
    /// Who had something.
    before: HashSet<ClientName>,
    /// Of these, who has not yet said that it has reclaimed all.
    waiting: HashSet<ClientName>,
}

impl Grace {
    pub(super) fn new(lease_ms: u64, before: impl IntoIterator<Item = ClientName>) -> Grace {
        let before: HashSet<_> = before.into_iter().collect();
        Grace { until: lease_ms, waiting: before.clone(), before }
    }
}

impl State {
    /// Clients of a name: the one that is confirmed, and the one that is not.
    pub(super) fn ids_of(&self, name: &ClientName) -> super::ClientIds {
        self.by_owner.get(name).copied().unwrap_or_default()
    }

    /// A client of version 4.1 or 4.2.
    fn with_sessions(&mut self, id: u64) -> Result<&mut Client, Status> {
        let client = self.clients.get_mut(&id).filter(|client| client.name.has_sessions);
        client.ok_or(Status::STALE_CLIENTID)
    }

    pub(super) fn add_client(
        &mut self,
        now: u64,
        name: ClientName,
        verifier: [u8; 8],
        principal: Principal,
    ) -> Result<u64, Refused> {
        if self.clients.len() >= CLIENTS_MAX {
            self.make_room(now)?;
        }
        // Not to be guessed: clients of version 4.0 are known by it alone.
        let id = loop {
            let id = u64::from_be_bytes(thruway_engine::random::random());
            if id != 0 && !self.clients.contains_key(&id) {
                break id;
            }
        };
        let numbering = (!name.has_sessions).then(Numbering::default);
        let client = Client {
            name: name.clone(),
            verifier,
            principal,
            is_confirmed: false,
            sequence: 1,
            created: None,
            lease: Arc::new(Lease::new(now)),
            sessions: 0,
            has_reclaimed: false,
            is_given_up: false,
            held: HashSet::new(),
            delegations: 0,
            numbering,
        };
        self.clients.insert(id, client);
        self.by_owner.entry(name).or_default().1 = Some(id);
        Ok(id)
    }

    /// Makes room for a client: those whose leases have expired and that have nothing go; else the one that has not been confirmed
    /// for longest; else what the one has that has not been heard of for longest.
    fn make_room(&mut self, now: u64) -> Result<(), Refused> {
        let gone = |(_, client): &(&u64, &Client)| client.held.is_empty() && self.is_expired(now, &client.lease);
        let gone: Vec<u64> = self.clients.iter().filter(gone).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| self.remove_client(id));
        if self.clients.len() < CLIENTS_MAX {
            return Ok(());
        }
        let oldest = self.clients.iter().min_by_key(|(_, client)| (client.is_confirmed, client.lease.renewed()));
        match oldest {
            Some((id, client)) if !client.is_confirmed => {
                let id = *id;
                self.remove_client(id);
                Ok(())
            }
            Some((id, client)) if self.is_expired(now, &client.lease) => Err(Refused::Expired(*id)),
            _ => Err(Status::DELAY.into()),
        }
    }

    /// Removes a client, its sessions, and what it has.
    pub(super) fn remove_client(&mut self, id: u64) {
        let Some(client) = self.clients.remove(&id) else { return };
        for number in client.held {
            self.remove_held(number);
        }
        if client.sessions > 0 {
            self.sessions.retain(|_, session| session.client != id);
        }
        if let Some(numbering) = &client.numbering {
            self.forget_numbering(numbering);
        }
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
    pub(in super::super) fn exchange_id(
        &mut self,
        now: u64,
        owner: &[u8],
        verifier: [u8; 8],
        principal: Principal,
        is_update: bool,
    ) -> Result<Exchange, Refused> {
        let name = ClientName::with_sessions(owner);
        let (confirmed, unconfirmed) = self.ids_of(&name);
        if let Some(id) = confirmed {
            let client = &self.clients[&id];
            let (same_verifier, same_principal) = (client.verifier == verifier, client.principal == principal);
            let known = Exchange { client: id, sequence: client.sequence, is_confirmed: true };
            let has_nothing = client.held.is_empty() && client.sessions == 0;
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
        if let Some(id) = unconfirmed {
            self.remove_client(id);
        }
        let client = self.add_client(now, name, verifier, principal)?;
        Ok(Exchange { client, sequence: 1, is_confirmed: false })
    }

    /// CREATE_SESSION, up to the session itself.
    pub(in super::super) fn create_session(
        &mut self,
        now: u64,
        id: u64,
        sequence: u32,
        principal: Principal,
    ) -> Result<NewSession, Status> {
        let client = self.with_sessions(id)?;
        if sequence.wrapping_add(1) == client.sequence
            && let Some(reply) = &client.created
        {
            return Ok(NewSession::Again(reply.clone()));
        }
        if sequence != client.sequence {
            return Err(Status::SEQ_MISORDERED);
        }
        if client.principal != principal {
            return Err(Status::CLID_INUSE);
        }
        let is_full = client.sessions >= SESSIONS_MAX;
        if is_full || self.sessions.len() >= SESSIONS_TOTAL_MAX {
            return Err(Status::NOSPC);
        }
        Ok(NewSession::Make(self.confirm(now, id)))
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

    /// The session is there, and this is the reply that says so.
    pub(in super::super) fn session_created(&mut self, session: Arc<Session>, reply: Box<[u8]>) {
        let Some(client) = self.clients.get_mut(&session.client) else { return };
        client.sequence = client.sequence.wrapping_add(1);
        client.created = Some(reply);
        client.sessions += 1;
        self.sessions.insert(session.id, session);
    }

    /// DESTROY_SESSION
    pub(in super::super) fn destroy_session(&mut self, id: &[u8; 16]) -> Result<(), Status> {
        let session = self.sessions.remove(id).ok_or(Status::BADSESSION)?;
        if let Some(client) = self.clients.get_mut(&session.client) {
            client.sessions -= 1;
        }
        Ok(())
    }

    /// DESTROY_CLIENTID
    pub(in super::super) fn destroy_client(&mut self, id: u64) -> Result<(), Status> {
        let client = self.with_sessions(id)?;
        if client.sessions > 0 || !client.held.is_empty() {
            return Err(Status::CLIENTID_BUSY);
        }
        self.remove_client(id);
        Ok(())
    }

    /// Whether clients that had something before the restart still get it back.
    pub(in super::super) fn is_grace(&mut self, now: u64) -> bool {
        let is_over = self.grace.waiting.is_empty() || now >= self.grace.until;
        if is_over && !self.grace.before.is_empty() {
            // Clients of version 4.0 do not say that this was all.
            let reclaimed = |client: &&mut Client| client.numbering.is_some() && !client.held.is_empty();
            self.clients.values_mut().filter(reclaimed).for_each(|client| client.has_reclaimed = true);
            self.grace.before.clear();
            self.grace.waiting.clear();
            self.records += 1;
        }
        !is_over
    }

    /// Whether a client may have something new; not before [`State::records`] of this number are stored: those who have not come
    /// back in time must not reclaim, after another restart, what it gets.
    pub(in super::super) fn may_begin(&mut self, now: u64, client: u64) -> Result<u64, Status> {
        let is_grace = self.is_grace(now);
        let Some(client) = self.clients.get_mut(&client) else { return Ok(self.records) };
        if client.is_given_up {
            return Err(Status::DELAY);
        }
        if !is_grace && client.numbering.is_some() && !client.has_reclaimed {
            client.has_reclaimed = true;
            self.records += 1;
        }
        if is_grace || !client.has_reclaimed { Err(Status::GRACE) } else { Ok(self.records) }
    }

    /// Whether a client may have back what it had.
    pub(in super::super) fn may_reclaim(&mut self, now: u64, client: u64) -> Result<u64, Status> {
        let is_grace = self.is_grace(now);
        let Some(client) = self.clients.get(&client) else { return Err(Status::NO_GRACE) };
        match () {
            () if !is_grace || client.has_reclaimed => Err(Status::NO_GRACE),
            () if !self.grace.before.contains(&client.name) => Err(Status::RECLAIM_BAD),
            () => Ok(self.records),
        }
    }

    /// RECLAIM_COMPLETE for all file systems. The client must stand in stable storage before it is answered.
    pub(in super::super) fn reclaim_complete(&mut self, now: u64, id: u64) -> Result<(), Status> {
        let client = self.with_sessions(id)?;
        if std::mem::replace(&mut client.has_reclaimed, true) {
            return Err(Status::COMPLETE_ALREADY);
        }
        let name = client.name.clone();
        self.grace.waiting.remove(&name);
        self.records += 1;
        self.is_grace(now);
        Ok(())
    }

    /// Which clients are to stand in stable storage, and the number of this state of affairs.
    pub(in super::super) fn records(&self) -> (u64, BTreeSet<ClientName>) {
        let now = self.clients.values().filter(|client| client.has_reclaimed).map(|client| &client.name);
        (self.records, now.chain(&self.grace.before).cloned().collect())
    }

    /// Whether clients from before the start may still come back.
    pub(in super::super) fn has_earlier(&self) -> bool {
        !self.grace.before.is_empty()
    }

    /// Takes a client whose lease has expired out of what is to stand in stable storage: it will not get back what it has.
    pub(in super::super) fn give_up(&mut self, now: u64, id: u64) -> bool {
        let Some(client) = self.clients.get_mut(&id) else { return false };
        if now.saturating_sub(client.lease.renewed()) <= self.lease_ms {
            return false;
        }
        client.has_reclaimed = false;
        client.is_given_up = true;
        self.grace.before.remove(&client.name);
        self.grace.waiting.remove(&client.name);
        self.records += 1;
        true
    }

    /// Such a client stays after all: it could not be taken out of stable storage.
    pub(in super::super) fn keep(&mut self, id: u64) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.has_reclaimed = true;
            client.is_given_up = false;
            self.records += 1;
        }
    }

    /// Removes what such a client has; not before it is out of stable storage. False if it has been heard of meanwhile: then it keeps
    /// what it has, and is to be stored again.
    pub(in super::super) fn expire(&mut self, now: u64, id: u64) -> bool {
        let Some(client) = self.clients.get(&id) else { return true };
        if !self.is_expired(now, &client.lease) {
            self.keep(id);
            return false;
        }
        if client.numbering.is_some() {
            self.remember_expired(id);
        }
        self.remove_client(id);
        true
    }

    /// Forgets something that is open or locked, and what goes with it.
    pub(super) fn remove_held(&mut self, number: u64) {
        let Some(held) = self.held.remove(&number) else { return };
        let (client, file) = match &held {
            Held::Open(open) => (open.client, open.file.clone()),
            Held::Locks(holder) => {
                if let Some(Held::Open(open)) = self.held.get_mut(&holder.open) {
                    open.holders.retain(|known| *known != number);
                }
                (holder.client, holder.file.clone())
            }
            Held::Delegation(delegation) => (delegation.client, delegation.file.clone()),
        };
        if let Some(client) = self.clients.get_mut(&client) {
            client.held.remove(&number);
        }
        self.forget_in_file(number, &file);
        match held {
            Held::Open(open) => {
                for holder in open.holders {
                    self.remove_held(holder);
                }
                self.dropped.push(open.guard);
            }
            Held::Locks(_) => {}
            Held::Delegation(delegation) => self.end_delegation(delegation),
        }
    }

    /// Something is no longer in the way of others in this file.
    pub(super) fn forget_in_file(&mut self, number: u64, file: &FileKey) {
        if let Some(state) = self.files.get_mut(file) {
            state.forget(number);
        }
        self.wake(file);
        if self.files.get(file).is_some_and(FileState::is_unused) {
            self.files.remove(file);
        }
    }
}
