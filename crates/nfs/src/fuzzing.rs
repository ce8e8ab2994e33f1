//! Entry points for the fuzzer.

use crate::delegations::Delegate;
use crate::mount::Mount;
use crate::nfsacl::NfsAcl;
use crate::nlm::Nlm;
use crate::nsm::Nsm;
use crate::share::{Policy, Share, Shares, Squash};
use crate::v3::Nfs3;
use crate::v4::{self, Nfs4};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use thruway_rpc::rpcbind::Rpcbind;
use thruway_rpc::server::{Program, Programs};
use thruway_rpc::xdr::{Decoder, Encoder};
use thruway_vfs::MemoryFileSystem;

fn programs(shares: Vec<Share>) -> Programs {
    let shares = Arc::new(Shares::new(shares, [7; 32]).expect("one share at most"));
    let config = v4::Config { lease: Duration::from_secs(90), state_file: None, had_clients: false };
    let v4 = Nfs4::new(Arc::clone(&shares), config).expect("there is no file to be read");
    Programs::new([
        Arc::new(Nfs3::new(Arc::clone(&shares))) as Arc<dyn Program>,
        Arc::new(Nlm::new(&v4)),
        Arc::new(Nsm::new(&v4)),
        Arc::new(Rpcbind::new(Vec::new())),
        Arc::new(v4),
        Arc::new(NfsAcl::new(Arc::clone(&shares))),
        Arc::new(Mount::new(shares)),
    ])
}

/// A call of a hostile client: what it asks for is not there.
pub fn call(data: &[u8]) {
    static PROGRAMS: LazyLock<Programs> = LazyLock::new(|| programs(Vec::new()));
    thruway_rpc::fuzzing::message(&PROGRAMS, data);
}

/// Results of operations of version 4 from a hostile server, one behind the other. The first byte says which is the first.
pub fn results(data: &[u8]) {
    if let Some((first, data)) = data.split_first() {
        crate::client::decode_results(*first, data);
    }
}

/// Calls of the programs of version 3, about a share in memory with a directory and a file. Of each, the data says which program and
/// procedure, whose handle, and where in the arguments that stands.
pub fn operations_of_version_3(data: &[u8]) {
    const CREATE: u32 = 8;
    const MKDIR: u32 = 9;
    const PROGRAMS: [(u32, u32); 5] = [
        (crate::v3::PROGRAM, 3),
        (crate::mount::PROGRAM, 3),
        (crate::nlm::PROGRAM, crate::nlm::VERSION),
        (crate::nsm::PROGRAM, crate::nsm::VERSION),
        (crate::nfsacl::PROGRAM, 3),
    ];
    let policy = Policy { squash: Squash::None, ..Policy::default() };
    let share = Share::new("m", Box::new(MemoryFileSystem::new(1 << 20)), policy, Delegate::Writing);
    let programs = programs(vec![share]);
    let call = |(program, version), procedure, arguments: &[u8]| {
        let mut call = Encoder::new();
        [9, 0, 2, program, version, procedure, 1, 20, 0, 0, 0, 0, 0, 0, 0].into_iter().for_each(|word| call.u32(word));
        let call = [&call.to_bytes(), arguments].concat();
        let reply = thruway_rpc::fuzzing::call(&programs, &call);
        reply.map_or_else(Vec::new, |reply| reply.get(24..).unwrap_or_default().to_vec())
    };
    let opaque = |bytes: &[u8]| {
        let mut out = Encoder::new();
        out.opaque(bytes);
        out.to_bytes()
    };
    let handle_at = |results: &[u8], at: usize| {
        let mut d = Decoder::new(results.get(at..).unwrap_or_default());
        d.opaque(64).expect("a handle").to_vec()
    };
    let root = handle_at(&call(PROGRAMS[1], 1, &opaque(b"m")), 4);
    let made = |procedure, name: &[u8], words: &[u8]| {
        handle_at(&call(PROGRAMS[0], procedure, &[opaque(&root), opaque(name), words.to_vec()].concat()), 8)
    };
    let handles = [made(CREATE, b"f", &[0; 28]), made(MKDIR, b"d", &[0; 24]), root.clone()];
    for data in data.chunks(512) {
        let Some((&[program, procedure, handle, at], rest)) = data.split_first_chunk() else { return };
        let (before, behind) = rest.split_at((usize::from(at) * 4).min(rest.len()));
        let handle = opaque(&handles[usize::from(handle) % handles.len()]);
        let program = PROGRAMS[usize::from(program) % PROGRAMS.len()];
        call(program, procedure.into(), &[before, &handle, behind].concat());
    }
    // Whatever they were: a handle still leads somewhere, or the file is gone.
    let found = call(PROGRAMS[0], 1, &opaque(&root));
    assert_eq!(found.get(..4), Some(&[0; 4][..]), "the root is there");
}

/// A client of version 4 with a session, whose calls this builds from their operations.
pub(crate) struct Client {
    programs: Programs,
    pub session: Vec<u8>,
    /// Of the next request.
    pub sequence: u32,
    /// As whom it calls; nobody, if there is none.
    pub user: Option<u32>,
    pub minor: u32,
}

const EXCHANGE_ID: u32 = 42;
const CREATE_SESSION: u32 = 43;
const LOOKUP: u32 = 15;
const PUTROOTFH: u32 = 24;
const SEQUENCE: u32 = 53;
const RECLAIM_COMPLETE: u32 = 58;

impl Client {
    /// On a share `m` in memory.
    pub(crate) fn new() -> Client {
        Client::with_replies_of(1 << 20)
    }

    /// As [`Client::new`], with replies of at most so many bytes.
    pub(crate) fn with_replies_of(bytes: u32) -> Client {
        let files = Box::new(MemoryFileSystem::new(1 << 20));
        let policy = Policy { squash: Squash::None, ..Policy::default() };
        let share = Share::new("m", files, policy, Delegate::Writing);
        let mut client =
            Client { programs: programs(vec![share]), session: Vec::new(), sequence: 1, user: None, minor: 2 };
        let mut exchange = Encoder::new();
        exchange.u32(EXCHANGE_ID);
        exchange.fixed(&[1; 8]);
        exchange.opaque(b"fuzzer");
        [0, 0, 0].into_iter().for_each(|word| exchange.u32(word));
        // Status, tag, number of results; the operation and its status; then the client.
        let reply = client.compound(1, &exchange.to_bytes());
        let id = reply[20..28].to_vec();
        let mut create = Encoder::new();
        create.u32(CREATE_SESSION);
        create.fixed(&id);
        [1, 0].into_iter().for_each(|word| create.u32(word));
        for _ in 0..2 {
            [0, 1 << 20, bytes, 4096, 64, 4, 0].into_iter().for_each(|word| create.u32(word));
        }
        [0, 0].into_iter().for_each(|word| create.u32(word));
        client.session = client.compound(1, &create.to_bytes())[20..36].to_vec();
        let mut complete = Encoder::new();
        complete.u32(RECLAIM_COMPLETE);
        complete.bool(false);
        client.in_session(1, &complete.to_bytes());
        client
    }

    /// The results of a compound: what is behind the header of the reply.
    pub(crate) fn compound(&self, count: u32, operations: &[u8]) -> Vec<u8> {
        let call = self.call(count, operations);
        thruway_rpc::fuzzing::call(&self.programs, &call).map_or_else(Vec::new, |reply| reply[24..].to_vec())
    }

    /// The message of a compound.
    fn call(&self, count: u32, operations: &[u8]) -> Vec<u8> {
        let mut call = Encoder::new();
        for word in [9, 0, 2, v4::PROGRAM, 4, 1] {
            call.u32(word);
        }
        // Credential: none, or a stamp, no name of a host, user, group, no more groups.
        match self.user {
            None => [0, 0].into_iter().for_each(|word| call.u32(word)),
            Some(user) => [1, 20, 0, 0, user, user, 0].into_iter().for_each(|word| call.u32(word)),
        }
        for word in [0, 0, 0, self.minor, count] {
            call.u32(word);
        }
        [call.to_bytes(), operations.to_vec()].concat()
    }

    /// As [`Client::compound`], behind a SEQUENCE.
    pub(crate) fn in_session(&mut self, count: u32, operations: &[u8]) -> Vec<u8> {
        let operations = self.behind_sequence(operations);
        self.compound(count + 1, &operations)
    }

    /// As [`Client::in_session`], on a reactor, where the server may have the call wait for its share of the time.
    #[cfg(test)]
    pub(crate) async fn in_session_on_reactor(&mut self, count: u32, operations: &[u8]) -> Vec<u8> {
        let operations = self.behind_sequence(operations);
        let call = self.call(count + 1, &operations);
        let reply = thruway_rpc::fuzzing::answer(&self.programs, &call).await;
        reply.map_or_else(Vec::new, |reply| reply[24..].to_vec())
    }

    fn behind_sequence(&mut self, operations: &[u8]) -> Vec<u8> {
        let mut sequence = Encoder::new();
        sequence.u32(SEQUENCE);
        sequence.fixed(&self.session);
        [self.sequence, 0, 0, 1].into_iter().for_each(|word| sequence.u32(word));
        self.sequence += 1;
        [sequence.to_bytes(), operations.to_vec()].concat()
    }
}

/// Where these stand in the data, the id of a client of version 4.0 and the stateid of a file that it has open are put instead.
const CLIENT_ID: &[u8; 8] = b"CLIENTID";
const STATEID: &[u8; 12] = b"STATEID-OPEN";

fn replace(data: &mut [u8], from: &[u8], to: &[u8]) {
    for at in 0..(data.len() + 1).saturating_sub(from.len()) {
        if data[at..].starts_with(from) {
            data[at..at + to.len()].copy_from_slice(to);
        }
    }
}

impl Client {
    /// Becomes one of version 4.0 that has opened a file; its id and the stateid without the number.
    fn without_session(&mut self) -> ([u8; 8], [u8; 12]) {
        const SETCLIENTID: u32 = 35;
        const SETCLIENTID_CONFIRM: u32 = 36;
        const OPEN: u32 = 18;
        self.minor = 0;
        let words = |out: &mut Encoder, words: &[u32]| words.iter().for_each(|word| out.u32(*word));
        let mut set = Encoder::new();
        words(&mut set, &[SETCLIENTID, 1, 2]);
        set.opaque(b"fuzzer");
        words(&mut set, &[0, 0, 0, 0]);
        let set = self.compound(1, &set.to_bytes());
        let mut confirm = Encoder::new();
        confirm.u32(SETCLIENTID_CONFIRM);
        confirm.fixed(&set[20..36]);
        self.compound(1, &confirm.to_bytes());
        let id: [u8; 8] = *set[20..].first_chunk().expect("a client's id");
        let mut open = Encoder::new();
        words(&mut open, &[PUTROOTFH, LOOKUP]);
        open.opaque(b"m");
        words(&mut open, &[OPEN, 1, 3, 0]);
        open.fixed(&id);
        open.opaque(b"o");
        words(&mut open, &[1, 0, 0, 0, 0]);
        open.opaque(b"zero");
        let opened = self.compound(3, &open.to_bytes());
        (id, *opened[12 + 16 + 8 + 4..].first_chunk().expect("a stateid"))
    }
}

/// Operations of version 4 in a session, on a share in memory; whatever they are, the session works afterwards.
pub fn operations(data: &[u8]) {
    let mut client = Client::new();
    // Before anything can be in its way.
    let (id, stateid) = client.without_session();
    client.minor = 2;
    let mut begin = Encoder::new();
    for word in [PUTROOTFH, LOOKUP] {
        begin.u32(word);
    }
    begin.opaque(b"m");
    for data in data.chunks(2048) {
        let results = client.in_session(60, &[&begin.to_bytes(), data].concat());
        assert!(results.is_empty() || results.len() >= 12, "a status, a tag and a number of results");
    }
    // The same as version 4.0 has them, of which some take the others' place.
    client.minor = 0;
    let mut data = data.to_vec();
    replace(&mut data, CLIENT_ID, &id);
    replace(&mut data, STATEID, &stateid);
    for data in data.chunks(2048) {
        let results = client.compound(60, &[&begin.to_bytes(), data].concat());
        assert!(results.is_empty() || results.len() >= 12, "a status, a tag and a number of results");
    }
    client.minor = 2;
    let results = client.in_session(2, &begin.to_bytes());
    // Unless it has taken its session apart.
    let bad_session = 10_052_u32.to_be_bytes();
    assert!(results[..4] == [0; 4] || results[..4] == bad_session, "{results:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fuzzer has no runtime; a user with many groups is looked up on a thread all the same.
    #[test]
    fn a_user_with_many_groups_needs_no_runtime() {
        use thruway_rpc::message::{AuthSys, CallHeader, OpaqueAuth, flavor};
        let body = AuthSys { machine: Vec::new(), uid: 4_000_000_000, gid: 0, gids: vec![7; 16] }.encode();
        let credential = OpaqueAuth { flavor: flavor::AUTH_SYS, body: &body };
        let program = crate::v3::PROGRAM;
        let mut message = Encoder::new();
        CallHeader { xid: 1, program, version: 3, procedure: 1, credential, verifier: OpaqueAuth::NONE }
            .encode(&mut message);
        call(&message.to_bytes());
    }

    #[test]
    fn calls_of_version_3_have_handles() {
        operations_of_version_3(&[]);
        // A name is looked up in the directory, and all of the file is read.
        operations_of_version_3(&[0, 3, 2, 0, 0, 0, 0, 1, b'f', 0, 0, 0]);
        let read = [&[0, 6, 0, 0][..], &[0; 8], &[0, 0, 1, 0]].concat();
        operations_of_version_3(&[&read[..], &[0; 512 - 16], &[4, 1, 0, 0, 0, 0, 0, 15]].concat());
        operations_of_version_3(&(0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn the_client_has_a_session() {
        let mut client = Client::new();
        let mut begin = Encoder::new();
        begin.u32(PUTROOTFH);
        let results = client.in_session(1, &begin.to_bytes());
        assert_eq!(results[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        operations(&[]);
        operations(&[0; 5000]);
        let (id, stateid) = client.without_session();
        assert!(id != [0; 8] && stateid != [0; 12]);
        operations(&(0..=255).collect::<Vec<u8>>());
    }
}
