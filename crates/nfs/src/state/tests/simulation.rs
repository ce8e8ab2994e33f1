//! A seeded simulation of clients, the server, crashes, and programs that change files behind their backs.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// What a client believes that it has.
#[derive(Debug, Clone, Default)]
struct Believed {
    id: u64,
    verifier: u8,
    /// Files, how they are open, and their stateids.
    open: BTreeMap<u8, ((u32, u32), Stateid)>,
    /// Files that are delegated to it, whether for writing, and the stateids.
    delegated: BTreeMap<u8, (bool, Stateid)>,
}

/// What can happen to clients and server.
#[derive(Debug, Clone)]
enum Event {
    Open {
        client: usize,
        file: u8,
        modes: (u32, u32),
    },
    Close {
        client: usize,
        file: u8,
    },
    /// Time passes; these clients are heard of.
    Wait {
        ms: u64,
        heard: u8,
    },
    RestartClient {
        client: usize,
    },
    /// A client gives back what has been recalled.
    GiveBack {
        client: usize,
    },
    /// The server waits no longer for what has been recalled.
    Revoke,
    /// Another program changes a file.
    Change {
        file: u8,
    },
    /// The server crashes; what it has stored is as of its last word to any client. These clients come back.
    RestartServer {
        back: u8,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let modes = (1..4_u32, 0..4_u32);
    prop_oneof![
        6 => (0..4_usize, 0..2_u8, modes).prop_map(|(client, file, modes)| Event::Open { client, file, modes }),
        2 => (0..4_usize, 0..2_u8).prop_map(|(client, file)| Event::Close { client, file }),
        2 => (0..2 * LEASE, 0..16_u8).prop_map(|(ms, heard)| Event::Wait { ms, heard }),
        1 => (0..4_usize).prop_map(|client| Event::RestartClient { client }),
        2 => (0..4_usize).prop_map(|client| Event::GiveBack { client }),
        1 => Just(Event::Revoke),
        1 => (0..2_u8).prop_map(|file| Event::Change { file }),
        1 => (0..16_u8).prop_map(|back| Event::RestartServer { back }),
    ]
}

struct World {
    state: State,
    stored: Records,
    now: u64,
    epoch: u32,
    clients: [Believed; 4],
    /// Delegations that have been recalled.
    recalled: Vec<u64>,
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// The client that is one of version 4.0.
const WITHOUT_SESSIONS: usize = 2;

/// The one of version 3, for which having a file open is NLM_SHARE.
const MONITORED: usize = 3;

fn host() -> Host {
    let [address, local] = ["192.0.2.1", "192.0.2.2"].map(|ip| ip.parse().unwrap());
    Host { address, local, name: NAMES[MONITORED].as_bytes().into() }
}

impl World {
    fn new() -> World {
        let mut world = World {
            state: State::new(1, LEASE, Records::new()),
            stored: Records::new(),
            now: 0,
            epoch: 1,
            clients: Default::default(),
            recalled: Vec::new(),
        };
        (0..4).for_each(|client| world.connect(client, true));
        world
    }

    fn store(&mut self) {
        self.stored = self.state.records(self.now).1;
    }

    /// A client gets a new session; with `complete` it says that it has reclaimed everything.
    fn connect(&mut self, client: usize, complete: bool) {
        let verifier = [self.clients[client].verifier; 8];
        if client == WITHOUT_SESSIONS {
            let root = user(Some(0));
            let (id, confirmation) = self.state.set_client(self.now, NAMES[client].as_bytes(), verifier, root).unwrap();
            self.state.confirm_client(self.now, id, confirmation, root).unwrap();
            self.store();
            self.clients[client].id = id;
            return;
        }
        if client == MONITORED {
            self.clients[client].id = self.state.monitored(self.now, &host(), verifier[0].into()).unwrap();
            return;
        }
        let known = self.state.exchange_id(self.now, NAMES[client].as_bytes(), verifier, user(Some(0)), false);
        let known = known.unwrap();
        if !known.is_confirmed {
            add_session(&mut self.state, self.now, known.client, known.sequence);
        }
        self.clients[client].id = known.client;
        if complete {
            self.complete(client);
        }
    }

    fn complete(&mut self, client: usize) {
        if matches!(client, WITHOUT_SESSIONS | MONITORED) {
            return;
        }
        let _ = self.state.reclaim_complete(self.now, self.clients[client].id);
        self.store();
    }

    /// Whether the server still knows the client, which learns of it by its next call.
    fn is_known(&self, client: usize) -> bool {
        self.state.clients.contains_key(&self.clients[client].id)
    }

    fn heard(&mut self, client: usize) {
        if self.is_known(client) {
            self.state.clients[&self.clients[client].id].lease.renew(self.now);
            return;
        }
        // Its session is gone, and what it had with it: it comes back and may not reclaim.
        self.connect(client, false);
        self.clients[client].delegated.clear();
        let held = std::mem::take(&mut self.clients[client].open);
        for _ in held {
            assert!(self.state.may_reclaim(self.now, self.clients[client].id).is_err(), "others may have had it");
        }
        self.complete(client);
    }

    fn open(&mut self, client: usize, of: u8, modes: (u32, u32)) {
        self.heard(client);
        let id = self.clients[client].id;
        if self.state.may_begin(self.now, id).is_err() {
            return;
        }
        self.store();
        loop {
            match self.open_as(client, false, of, modes) {
                Ok(stateid) => {
                    let entry = self.clients[client].open.entry(of).or_insert(((0, 0), stateid));
                    *entry = ((entry.0.0 | modes.0, entry.0.1 | modes.1), stateid);
                    let is_write = entry.0.0 & WRITE != 0;
                    if !matches!(client, WITHOUT_SESSIONS | MONITORED)
                        && let Some(stateid) = delegate(&mut self.state, self.now, id, of, is_write)
                    {
                        self.clients[client].delegated.insert(of, (is_write, stateid));
                    }
                    return;
                }
                // It is to come again.
                Err(Refused::Delegated) => {
                    let recalled = self.state.take_recalls();
                    self.recalled.extend(recalled);
                    return;
                }
                Err(Refused::Expired(other)) => {
                    assert!(self.state.give_up(self.now, other));
                    self.store();
                    assert!(self.state.expire(self.now, other));
                }
                Err(Refused::Status(Status::SHARE_DENIED)) => return,
                Err(other) => panic!("{other:?}"),
            }
        }
    }

    fn open_as(&mut self, client: usize, is_reclaim: bool, of: u8, modes: (u32, u32)) -> Result<Stateid, Refused> {
        let id = self.clients[client].id;
        if client == MONITORED {
            let may_have = GrantPermit::stored(id, is_reclaim);
            return self.state.share_monitored(self.now, may_have, b"o", &file(of), modes).map(|()| Stateid::ANONYMOUS);
        }
        open(&mut self.state, self.now, id, "o", of, modes)
    }

    /// Whether the server knows that a client has a file open, as the client believes.
    fn has_open(&self, client: usize, of: u8, stateid: Stateid) -> bool {
        let id = self.clients[client].id;
        if client != MONITORED {
            return self.state.test_stateid(id, stateid).is_ok();
        }
        self.state.files.get(&file(of)).is_some_and(|state| state.opens().has_client(id))
    }

    /// What a client has been called to give back, if it is heard of.
    fn give_back(&mut self, client: usize) {
        self.heard(client);
        let recalled = self.recalled.iter().filter_map(|number| self.state.recalled(*number));
        let recalled: Vec<Stateid> = recalled.map(|recalled| recalled.stateid).collect();
        let Believed { id, delegated, .. } = &mut self.clients[client];
        delegated.retain(|of, (_, stateid)| {
            let is_recalled = recalled.contains(stateid);
            if is_recalled {
                self.state.give_back(*id, *stateid, &file(*of)).expect("what it has");
            }
            !is_recalled
        });
    }

    /// Those from whom something has been taken learn of it by their next call, before they believe anything.
    fn revoke(&mut self) {
        for number in std::mem::take(&mut self.recalled) {
            self.state.revoke(number);
        }
        for client in 0..4 {
            let Believed { id, delegated, .. } = &mut self.clients[client];
            let Some(known) = self.state.clients.get(id) else { continue };
            if !known.lease.has_revoked() {
                continue;
            }
            delegated.retain(|_, (_, stateid)| {
                let is_revoked = self.state.test_stateid(*id, *stateid) == Err(Status::DELEG_REVOKED);
                if is_revoked {
                    self.state.free_stateid(*id, *stateid).expect("what has been revoked");
                }
                !is_revoked
            });
        }
    }

    fn restart_server(&mut self, back: u8) {
        let were_known = [0, 1, 2, 3].map(|client| self.is_known(client));
        self.epoch += 1;
        self.now = 0;
        // None is reclaimed.
        self.recalled.clear();
        self.clients.iter_mut().for_each(|client| client.delegated.clear());
        self.state = State::new(self.epoch, LEASE, self.stored.clone());
        for client in (0..4).filter(|client| back >> client & 1 == 1) {
            self.connect(client, false);
            let id = self.clients[client].id;
            let mut kept = BTreeMap::new();
            for (of, (modes, _)) in std::mem::take(&mut self.clients[client].open) {
                let may_reclaim = self.state.may_reclaim(self.now, id).is_ok();
                assert!(may_reclaim || !were_known[client], "what it had until the crash");
                if may_reclaim {
                    let stateid = self.open_as(client, true, of, modes);
                    kept.insert(of, (modes, stateid.expect("nobody else could have had it")));
                }
            }
            self.clients[client].open = kept;
            self.complete(client);
        }
        // The others learn of it when they come back, and too late.
        self.now = LEASE + 1;
        for client in 0..4 {
            if back >> client & 1 == 1 && self.is_known(client) {
                self.state.clients[&self.clients[client].id].lease.renew(self.now);
            }
        }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Open { client, file, modes } => self.open(client, file, modes),
            Event::Close { client, file: of } => {
                self.heard(client);
                if let Some((_, stateid)) = self.clients[client].open.remove(&of) {
                    let id = self.clients[client].id;
                    match client {
                        MONITORED => self.state.unshare_monitored(id, b"o", &file(of)),
                        _ => self.state.close(id, stateid, &file(of)).expect("what it has"),
                    }
                }
            }
            Event::Wait { ms, heard } => {
                self.now += ms;
                (0..4).filter(|client| heard >> client & 1 == 1).for_each(|client| self.heard(client));
            }
            Event::RestartClient { client } => {
                self.clients[client].verifier += 1;
                self.clients[client].open.clear();
                self.clients[client].delegated.clear();
                if client == MONITORED {
                    super::host_restarted(&mut self.state, host().address, self.clients[client].verifier.into());
                }
                self.connect(client, true);
            }
            Event::GiveBack { client } => self.give_back(client),
            Event::Revoke => self.revoke(),
            Event::Change { file: of } => {
                self.state.recall_all(self.now, &file(of));
                let recalled = self.state.take_recalls();
                self.recalled.extend(recalled);
            }
            Event::RestartServer { back } => self.restart_server(back),
        }
    }

    /// No two clients of whom the server has heard have what excludes the other.
    fn check(&self) {
        let held: usize = self.state.held.values().map(super::super::files::Held::weight).sum();
        let of_clients: usize = self.state.clients.values().map(|client| client.weight).sum();
        let of_origins: usize = self.state.origins.values().map(|origin| origin.weight).sum();
        let counted = (self.state.weight, of_clients, of_origins);
        assert_eq!(counted, (held, held, held), "what is held is counted");
        let sessions: usize = self.state.origins.values().map(|origin| origin.sessions).sum();
        assert_eq!(sessions, self.state.sessions.len());
        self.state.check_counts();
        let clients: usize = self.state.origins.values().map(|origin| origin.clients).sum();
        assert_eq!(clients, self.state.clients.len());
        let live = |client: &usize| self.is_known(*client);
        for one in (0..4).filter(live) {
            for (of, (is_write, stateid)) in &self.clients[one].delegated {
                assert!(self.state.test_stateid(self.clients[one].id, *stateid).is_ok(), "what it believes is so");
                for other in (0..4).filter(|other| *other != one).filter(live) {
                    let open = self.clients[other].open.get(of).map_or((0, 0), |(modes, _)| *modes);
                    assert!(open.0 & WRITE == 0 && open.1 & READ == 0, "{one} keeps {of}, {other} has it open");
                    let theirs = self.clients[other].delegated.get(of);
                    assert!(!is_write || open == (0, 0) && theirs.is_none(), "{one} writes {of}, {other} reads it");
                }
            }
            for (of, (modes, stateid)) in &self.clients[one].open {
                assert!(self.has_open(one, *of, *stateid), "what it believes is so");
                for other in (0..4).filter(|other| *other != one).filter(live) {
                    if let Some((theirs, _)) = self.clients[other].open.get(of) {
                        assert!(modes.0 & theirs.1 == 0 && modes.1 & theirs.0 == 0, "{one} and {other} at {of}");
                    }
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn no_two_clients_have_what_excludes_the_other(events in prop::collection::vec(event(), 1..80)) {
        let mut world = World::new();
        for event in events {
            world.step(event);
            world.check();
        }
    }
}
