use super::session::ChannelLimits;
use super::*;
use smallvec::smallvec;
use thruway_vfs::FileId;

mod simulation;

const LEASE: u64 = 1000;

fn file(number: u8) -> FileIdentity {
    FileIdentity { file_system: 1, file: FileId(smallvec![number]) }
}

fn guard() -> OpenGuard {
    Arc::new(())
}

impl From<Principal> for Maker {
    fn from(principal: Principal) -> Maker {
        Maker { principal, origin: Origin::User(0) }
    }
}

fn user(user: Option<u32>) -> Principal {
    Principal::new(user, None, &[])
}

fn made_by_root<const N: usize>(names: [ClientName; N]) -> Records {
    names.map(|name| (name, user(Some(0)))).into()
}

fn limits() -> ChannelLimits {
    ChannelLimits { request: 4096, response: 4096, cached: 100, operations: 8, requests: 2 }
}

/// A client with a session that has reclaimed what it had.
fn client(state: &mut State, now: u64, name: &str) -> u64 {
    let id = begin(state, now, name, [1; 8]);
    state.reclaim_complete(now, id).unwrap();
    id
}

/// A client with a session.
fn begin(state: &mut State, now: u64, name: &str, verifier: [u8; 8]) -> u64 {
    let root = user(Some(0));
    let exchange = state.exchange_id(now, name.as_bytes(), verifier, root, false).unwrap();
    add_session(state, now, exchange.client, exchange.sequence);
    exchange.client
}

fn add_session(state: &mut State, now: u64, client: u64, sequence: u32) -> [u8; 16] {
    let NewSession::Make(lease) = state.create_session(now, client, sequence, user(Some(0))).unwrap() else {
        panic!("a new session")
    };
    let id: [u8; 16] = thruway_engine::random::random();
    state.session_created(Arc::new(Session::new(id, client, lease, limits())), Box::from(&b"reply"[..]));
    id
}

/// A host says that it has restarted, by the name of all of these tests; how many clients that was.
fn host_restarted(state: &mut State, address: std::net::IpAddr, start: u32) -> usize {
    state.of_restarted(address, b"host name.example").into_iter().filter(|id| state.restarted(*id, start)).count()
}

/// The user who opens files.
const USER: u32 = 1000;

fn open_as(owner: &str, modes: (u32, u32)) -> OpenAs<'_> {
    OpenAs { owner: owner.as_bytes(), uid: USER, modes, is_confirmed: true }
}

fn open(state: &mut State, now: u64, client: u64, owner: &str, of: u8, modes: (u32, u32)) -> Result<Stateid, Refused> {
    state
        .open(now, GrantPermit::stored(client, false), open_as(owner, modes), &file(of), guard())
        .map(|(stateid, _)| stateid)
}

fn range(start: u64, len: u64) -> Range {
    Range::new(start, len).unwrap()
}

fn lock(state: &mut State, now: u64, client: u64, open: Stateid, owner: &str, of: Range) -> Result<Stateid, Refused> {
    let request = LockRequest::New { open, owner: owner.as_bytes().into() };
    state.lock(now, GrantPermit::stored(client, false), request, &file(1), true, of)
}

#[test]
fn clients_are_told_apart_as_in_section_18_35_4() {
    let mut state = State::new(7, LEASE, Records::new());
    let (root, other) = (user(Some(0)), user(Some(1)));
    let exchange = |state: &mut State, verifier, who, update| state.exchange_id(0, b"c", [verifier; 8], who, update);
    assert_eq!(exchange(&mut state, 1, root, true), Err(Refused::Status(Status::NOENT)));
    let first = exchange(&mut state, 1, root, false).unwrap();
    assert!(!first.is_confirmed);
    // Not confirmed: replaced.
    let second = exchange(&mut state, 1, root, false).unwrap();
    assert_ne!(first.client, second.client);
    assert!(matches!(state.create_session(0, first.client, 1, root), Err(Refused::Status(Status::STALE_CLIENTID))));
    assert!(matches!(state.create_session(0, second.client, 1, other), Err(Refused::Status(Status::CLID_INUSE))));
    assert!(matches!(state.create_session(0, second.client, 2, root), Err(Refused::Status(Status::SEQ_MISORDERED))));
    add_session(&mut state, 0, second.client, 1);
    assert!(
        matches!(state.create_session(0, second.client, 1, root), Ok(NewSession::Again(reply)) if *reply == *b"reply")
    );
    // Confirmed: the same again, and what does not fit.
    let again = exchange(&mut state, 1, root, false).unwrap();
    assert_eq!((again.client, again.sequence, again.is_confirmed), (second.client, 2, true));
    assert_eq!(exchange(&mut state, 1, root, true), Ok(again));
    assert_eq!(exchange(&mut state, 2, root, true), Err(Refused::Status(Status::NOT_SAME)));
    assert_eq!(exchange(&mut state, 1, other, true), Err(Refused::Status(Status::PERM)));
    assert_eq!(exchange(&mut state, 1, other, false), Err(Refused::Status(Status::CLID_INUSE)));
    // A restart of the client counts when it is confirmed.
    state.reclaim_complete(0, second.client).unwrap();
    let held = open(&mut state, 0, second.client, "o", 1, (READ, 0)).unwrap();
    let restarted = exchange(&mut state, 2, root, false).unwrap();
    assert!(state.test_stateid(second.client, held).is_ok());
    add_session(&mut state, 0, restarted.client, 1);
    assert!(state.test_stateid(second.client, held).is_err());
    assert_eq!(state.sessions.len(), 1, "sessions of before are gone");
    assert_eq!(state.take_dropped().len(), 1);
    // Who is not heard of loses its name, when what it had is gone.
    let taken = state.exchange_id(2 * LEASE, b"c", [1; 8], other, false);
    assert_eq!(taken, Err(Refused::Expired(restarted.client)));
    assert!(state.expire(2 * LEASE, restarted.client));
    assert!(state.exchange_id(2 * LEASE, b"c", [1; 8], other, false).is_ok());
}

#[test]
fn what_is_in_use_is_not_removed() {
    let mut state = State::new(7, LEASE, Records::new());
    let id = begin(&mut state, 0, "c", [1; 8]);
    assert_eq!(state.destroy_client(id), Err(Status::CLIENTID_BUSY));
    let session = *state.sessions.keys().next().unwrap();
    state.destroy_session(&session).unwrap();
    assert_eq!(state.destroy_session(&session), Err(Status::BADSESSION));
    state.destroy_client(id).unwrap();
    assert_eq!(state.destroy_client(id), Err(Status::STALE_CLIENTID));
    let id = begin(&mut state, 0, "c", [1; 8]);
    for sequence in 2..=SESSIONS_MAX as u32 {
        add_session(&mut state, 0, id, sequence);
    }
    let next = SESSIONS_MAX as u32 + 1;
    assert!(matches!(state.create_session(0, id, next, user(Some(0))), Err(Refused::Status(Status::NOSPC))));
}

#[test]
fn files_are_shared_as_their_openers_allow() {
    let mut state = State::new(7, LEASE, Records::new());
    let (a, b) = (client(&mut state, 0, "a"), client(&mut state, 0, "b"));
    let first = open(&mut state, 0, a, "o", 1, (READ, 0)).unwrap();
    assert_eq!(first.seqid, 1);
    let denied = Err(Refused::Status(Status::SHARE_DENIED));
    assert_eq!(open(&mut state, 0, b, "o", 1, (READ, READ)), denied, "somebody reads");
    let second = open(&mut state, 0, b, "o", 1, (READ, WRITE)).unwrap();
    assert_eq!(open(&mut state, 0, a, "o", 1, (WRITE, 0)), denied);
    assert_eq!(open(&mut state, 0, b, "other", 1, (WRITE, 0)), denied, "also another owner of the same client");
    assert_eq!(open(&mut state, 0, b, "o", 1, (WRITE, 0)), denied, "the same owner's modes count, too");
    state.close(b, second, &file(1)).unwrap();
    // A second open of a file adds its modes to the first.
    let second = open(&mut state, 0, b, "o", 1, (READ, 0)).unwrap();
    let both = open(&mut state, 0, b, "o", 1, (READ | WRITE, WRITE)).unwrap();
    assert_eq!((both.other, both.seqid), (second.other, 2));
    assert_eq!(state.access(0, b, USER, second, &file(1), true), Err(Refused::Status(Status::OLD_STATEID)));
    assert_eq!(state.access(0, b, USER, both, &file(1), true), Ok(true));
    assert_eq!(state.access(0, b, USER + 1, both, &file(1), true), Ok(false), "a user whose rights were not checked");
    assert_eq!(
        state.access(0, b, USER, both, &file(2), true),
        Err(Refused::Status(Status::BAD_STATEID)),
        "another file"
    );
    assert_eq!(state.access(0, a, USER, both, &file(1), true), Err(Refused::Status(Status::BAD_STATEID)), "another's");
    assert_eq!(state.access(0, a, USER, first, &file(1), true), Err(Refused::Status(Status::OPENMODE)));
    let locked = Err(Refused::Status(Status::LOCKED));
    assert_eq!(state.access(0, a, USER, Stateid::ANONYMOUS, &file(1), true), locked);
    assert_eq!(state.access(0, a, USER, Stateid::BYPASS, &file(1), true), locked);
    assert_eq!(state.access(0, a, USER, Stateid::ANONYMOUS, &file(1), false), Ok(false));
    // Less, and nothing.
    assert_eq!(state.downgrade(a, first, &file(1), (READ | WRITE, 0)), Err(Status::INVAL));
    let less = state.downgrade(b, both, &file(1), (READ, 0)).unwrap();
    assert_eq!(state.access(0, a, USER, Stateid::ANONYMOUS, &file(1), true), Ok(false));
    assert_eq!(state.access(0, b, USER, less, &file(1), true), Err(Refused::Status(Status::OPENMODE)));
    state.close(b, less, &file(1)).unwrap();
    assert_eq!(state.close(b, less, &file(1)), Err(Status::BAD_STATEID));
    state.close(a, Stateid { seqid: 0, ..first }, &file(1)).unwrap();
    assert!(state.files.is_empty() && state.held.is_empty());
}

#[test]
fn what_has_failed_leaves_what_was_open_before() {
    let mut state = State::new(7, LEASE, Records::new());
    let a = client(&mut state, 0, "a");
    let first = open(&mut state, 0, a, "o", 1, (WRITE, 0)).unwrap();
    let held = lock(&mut state, 0, a, first, "p", range(0, 10)).unwrap();
    let (again, was) =
        state.open(0, GrantPermit::stored(a, false), open_as("o", (WRITE, READ)), &file(1), guard()).unwrap();
    state.undo_open(a, again, &file(1), was);
    assert!(state.test_stateid(a, first).is_ok() && state.test_stateid(a, held).is_ok());
    assert!(open(&mut state, 0, a, "other", 1, (READ, 0)).is_ok(), "nothing is denied");
    let (new, was) = state.open(0, GrantPermit::stored(a, false), open_as("o", (WRITE, 0)), &file(2), guard()).unwrap();
    state.undo_open(a, new, &file(2), was);
    assert_eq!(state.test_stateid(a, new), Err(Status::BAD_STATEID));
}

#[test]
fn there_is_always_room_for_clients_that_come() {
    let mut state = State::new(7, LEASE, Records::new());
    let root = user(Some(0));
    let come = |state: &mut State, now, n: usize| state.exchange_id(now, &n.to_be_bytes(), [1; 8], root, false);
    // Those who never confirm give way at once.
    for n in 0..2 * CLIENTS_MAX {
        come(&mut state, 0, n).unwrap();
    }
    assert!(state.clients.len() <= CLIENTS_MAX);
    // Those who have something, when they are not heard of.
    let mut state = State::new(7, LEASE, Records::new());
    for n in 0..CLIENTS_MAX {
        let id = client_from(&mut state, 0, n, &format!("10.0.{}.{}", n / 200, n % 200)).unwrap();
        open(&mut state, 0, id, "o", (n % 200) as u8, (READ, 0)).unwrap();
    }
    assert_eq!(come(&mut state, LEASE / 2, 1 << 20), Err(Refused::Status(Status::DELAY)));
    let Err(Refused::Expired(oldest)) = come(&mut state, 2 * LEASE, 1 << 20) else { panic!() };
    assert!(state.give_up(2 * LEASE, oldest));
    assert!(state.expire(2 * LEASE, oldest));
    assert!(come(&mut state, 2 * LEASE, 1 << 20).is_ok());
}

#[test]
fn locks_keep_others_out_and_go_with_the_file() {
    let mut state = State::new(7, LEASE, Records::new());
    let (a, b) = (client(&mut state, 0, "a"), client(&mut state, 0, "b"));
    let open_a = open(&mut state, 0, a, "o", 1, (READ | WRITE, 0)).unwrap();
    let open_b = open(&mut state, 0, b, "o", 1, (READ, 0)).unwrap();
    let held = lock(&mut state, 0, a, open_a, "p", range(10, 10)).unwrap();
    let writing = lock(&mut state, 0, b, open_b, "p", range(0, 5));
    assert_eq!(writing, Err(Refused::Status(Status::OPENMODE)), "open for reading");
    let request = |open| LockRequest::New { open, owner: Box::from(&b"p"[..]) };
    let denied =
        Denied { range: range(10, 10), is_write: true, client: 0, owner: Box::from(&b"p"[..]), is_monitored: false };
    let reading = state.lock(0, GrantPermit::stored(b, false), request(open_b), &file(1), false, range(0, u64::MAX));
    assert_eq!(reading, Err(Refused::Denied(denied.clone())));
    assert_eq!(state.test_lock(0, b, b"p", &file(1), false, range(19, 1)), Err(Refused::Denied(denied)));
    assert_eq!(state.test_lock(0, a, b"p", &file(1), true, range(19, 1)), Ok(()), "its own");
    assert!(state.test_lock(0, a, b"q", &file(1), true, range(19, 1)).is_err(), "another process of the same client");
    assert_eq!(state.free_stateid(a, held), Err(Status::LOCKS_HELD));
    let rest = state.unlock(a, held, &file(1), range(10, 5)).unwrap();
    assert_eq!((rest.other, rest.seqid), (held.other, 2));
    assert!(state.lock(0, GrantPermit::stored(b, false), request(open_b), &file(1), false, range(0, 15)).is_ok());
    let emptied = state.unlock(a, rest, &file(1), range(0, u64::MAX)).unwrap();
    // Once more by the open file: the owner keeps its name.
    let again = lock(&mut state, 0, a, open_a, "p", range(100, 1)).unwrap();
    assert_eq!((again.other, again.seqid), (emptied.other, 4));
    state.close(a, open_a, &file(1)).unwrap();
    assert_eq!(state.test_stateid(a, again), Err(Status::BAD_STATEID));
    assert_eq!(state.test_lock(0, b, b"q", &file(1), true, range(100, 1)), Ok(()));
}

#[test]
fn who_is_not_heard_of_keeps_what_it_has_until_another_wants_it() {
    let mut state = State::new(7, LEASE, Records::new());
    let (a, b) = (client(&mut state, 0, "a"), client(&mut state, 0, "b"));
    let held = open(&mut state, 0, a, "o", 1, (READ, READ)).unwrap();
    let later = 10 * LEASE;
    assert!(state.test_stateid(a, held).is_ok());
    assert_eq!(open(&mut state, later, b, "o", 1, (READ, 0)), Err(Refused::Expired(a)));
    assert_eq!(open(&mut state, later, b, "o", 2, (READ, 0)).map(drop), Ok(()), "nothing is in the way");
    // Heard of again in time.
    state.clients[&a].lease.renew(later);
    assert!(!state.give_up(later, a));
    assert_eq!(open(&mut state, later, b, "o", 1, (READ, 0)), Err(Refused::Status(Status::SHARE_DENIED)));
    let later = 20 * LEASE;
    let (before, stored) = state.records(0);
    assert!(stored.contains_key(&ClientName::with_sessions(b"a")) && state.give_up(later, a));
    let (after, stored) = state.records(0);
    assert!(
        after != before && !stored.contains_key(&ClientName::with_sessions(b"a")),
        "first it cannot reclaim it any more"
    );
    assert!(state.expire(later, a));
    assert!(open(&mut state, later, b, "o", 1, (READ, 0)).is_ok());
    assert!(!state.sessions.values().any(|session| session.client == a));
}

#[test]
fn after_a_restart_what_was_open_comes_first() {
    let before = || made_by_root(["a", "b"].map(|name| ClientName::with_sessions(name.as_bytes())));
    let mut state = State::new(8, LEASE, before());
    let (a, c) = (begin(&mut state, 0, "a", [1; 8]), begin(&mut state, 0, "c", [1; 8]));
    assert!(state.may_reclaim(0, a).is_ok());
    assert_eq!(state.may_reclaim(0, c), Err(Status::RECLAIM_BAD), "it had nothing");
    assert_eq!(state.may_begin(0, a), Err(Status::GRACE));
    state.reclaim_complete(0, a).unwrap();
    state.reclaim_complete(0, c).unwrap();
    assert_eq!(state.reclaim_complete(0, c), Err(Status::COMPLETE_ALREADY));
    assert_eq!(state.may_reclaim(0, a), Err(Status::NO_GRACE), "it has said that this was all");
    assert_eq!(state.may_begin(0, a), Err(Status::GRACE), "b may still come");
    // A second crash: all of them are still known.
    let names = |state: &mut State| state.records(0).1.keys().map(|n| n.name.to_vec()).collect::<Vec<_>>();
    assert_eq!(names(&mut state), [b"a", b"b", b"c"]);
    let b = begin(&mut state, 10, "b", [1; 8]);
    assert_eq!(state.may_begin(10, b), Err(Status::GRACE));
    state.reclaim_complete(10, b).unwrap();
    assert!(state.may_begin(10, a).is_ok(), "all are here: nobody else has to wait");
    assert_eq!(state.may_reclaim(10, b), Err(Status::NO_GRACE));
    // Or nobody comes.
    let mut state = State::new(9, LEASE, before());
    let c = client(&mut state, 0, "c");
    assert_eq!(state.may_begin(LEASE - 1, c), Err(Status::GRACE));
    assert!(state.may_begin(LEASE, c).is_ok());
    assert_eq!(names(&mut state), [b"c"]);
}

#[test]
fn after_a_restart_nobody_else_takes_the_name_of_a_client() {
    let names = [&b"a"[..], b"c"].map(ClientName::with_sessions);
    let before = made_by_root([names[0].clone(), names[1].clone(), ClientName::without_sessions(b"b")]);
    let mut state = State::new(8, LEASE, before);
    let (root, other) = (user(Some(0)), Principal::new(Some(0), None, &["bob.example".into()]));
    let in_use = Refused::Status(Status::CLID_INUSE);
    assert_eq!(state.exchange_id(0, b"a", [2; 8], other, false).unwrap_err(), in_use);
    assert_eq!(state.set_client(0, b"b", [2; 8], other).unwrap_err(), in_use);
    assert!(state.exchange_id(0, b"b", [2; 8], other, false).is_ok(), "a client of another version");
    let a = begin(&mut state, 0, "a", [1; 8]);
    assert!(state.may_reclaim(0, a).is_ok());
    // When the earlier client can no longer reclaim, the name is free.
    assert_eq!(state.exchange_id(LEASE - 1, b"c", [2; 8], other, false).unwrap_err(), in_use);
    assert!(state.exchange_id(LEASE, b"c", [2; 8], other, false).is_ok());
    assert!(state.set_client(LEASE, b"b", [2; 8], root).is_ok());
}

#[test]
fn a_client_that_is_not_confirmed_in_time_is_forgotten() {
    let mut state = State::new(7, LEASE, Records::new());
    let root = user(Some(0));
    let [late, early] = [&b"late"[..], b"early"].map(|name| state.exchange_id(0, name, [1; 8], root, false).unwrap());
    assert!(state.create_session(LEASE, early.client, 1, root).is_ok());
    let refused = state.create_session(LEASE + 1, late.client, 1, root).map(drop);
    assert_eq!(refused, Err(Refused::Status(Status::STALE_CLIENTID)));
    let (id, confirmation) = state.set_client(0, b"late", [1; 8], root).unwrap();
    assert_eq!(state.confirm_client(LEASE + 1, id, confirmation, root), Err(Status::STALE_CLIENTID));
}

#[test]
fn stateids_of_a_client_whose_lease_has_expired_say_so() {
    let mut state = State::new(7, LEASE, Records::new());
    let (id, confirmation) = state.set_client(0, b"a", [1; 8], user(Some(0))).unwrap();
    state.confirm_client(0, id, confirmation, user(Some(0))).unwrap();
    state.may_begin(0, id).unwrap();
    let stateid = open(&mut state, 0, id, "o", 1, (READ, 0)).unwrap();
    assert_eq!(state.heard_of_by(0, stateid), Ok(id));
    assert!(state.give_up(LEASE + 1, id) && state.expire(LEASE + 1, id));
    assert_eq!(state.heard_of_by(LEASE + 1, stateid), Err(Status::EXPIRED));
    let foreign = Stateid { seqid: 1, other: [&7_u32.to_be_bytes()[..], &[9; 8]].concat().try_into().unwrap() };
    assert_eq!(state.heard_of_by(LEASE + 1, foreign), Err(Status::BAD_STATEID));
}

#[test]
fn a_client_that_cannot_be_stored_holds_up_no_other() {
    let mut state = State::new(7, LEASE, Records::new());
    let a = client(&mut state, 0, "a");
    let stored = state.records(0).0;
    let b = client(&mut state, 0, "b");
    assert!(state.may_begin(0, a).is_ok_and(|needed| needed <= stored));
    assert!(state.may_begin(0, b).is_ok_and(|needed| needed > stored));
    // At the end of a grace period all clients wait for a new list, without the clients that have not reclaimed.
    let mut state = State::new(8, LEASE, made_by_root([ClientName::with_sessions(b"gone")]));
    let a = client(&mut state, 0, "a");
    let stored = state.records(0).0;
    assert!(state.may_begin(LEASE, a).is_ok_and(|needed| needed > stored));
}

#[test]
fn clients_without_sessions_are_told_apart_as_in_section_16_33_5() {
    let mut state = State::new(7, LEASE, Records::new());
    let (root, other) = (user(Some(0)), user(Some(1)));
    let set = |state: &mut State, verifier, who| state.set_client(0, b"c", [verifier; 8], who);
    let (first, wrong) = set(&mut state, 1, root).unwrap();
    assert_eq!(state.heard_of(0, first), Err(Status::STALE_CLIENTID), "not confirmed");
    let (id, confirmation) = set(&mut state, 1, root).unwrap();
    assert_eq!(state.confirm_client(0, first, wrong, root), Err(Status::STALE_CLIENTID), "replaced");
    assert_eq!(state.confirm_client(0, id, wrong, root), Err(Status::STALE_CLIENTID));
    assert_eq!(state.confirm_client(0, id, confirmation, other), Err(Status::CLID_INUSE));
    for _ in 0..2 {
        state.confirm_client(0, id, confirmation, root).unwrap();
    }
    assert_eq!(state.heard_of(0, id), Ok(id));
    let (again, next) = set(&mut state, 1, root).unwrap();
    assert!(again == id && next != confirmation, "the same client, to be called elsewhere");
    state.confirm_client(0, id, confirmation, root).unwrap();
    state.confirm_client(0, id, next, root).unwrap();
    assert_eq!(state.confirm_client(0, id, confirmation, root), Err(Status::STALE_CLIENTID), "that of before");
    // One with sessions has the same name and nothing to do with it.
    let with_sessions = begin(&mut state, 0, "c", [1; 8]);
    assert_eq!(state.heard_of(0, with_sessions), Err(Status::STALE_CLIENTID));
    assert!(matches!(state.create_session(0, id, 1, root), Err(Refused::Status(Status::STALE_CLIENTID))));
    assert_eq!(state.destroy_client(id), Err(Status::STALE_CLIENTID));
    // It has something: another user cannot have its name; a restart of it counts when it is confirmed.
    assert!(state.may_begin(0, id).is_ok());
    let held = open(&mut state, 0, id, "o", 1, (READ, 0)).unwrap();
    assert_eq!(
        state.test_stateid(id, Stateid { seqid: 0, ..held }),
        Err(Status::OLD_STATEID),
        "there is no latest one"
    );
    assert_eq!(set(&mut state, 2, other), Err(Refused::Status(Status::CLID_INUSE)));
    let (next, confirmation) = set(&mut state, 2, root).unwrap();
    assert_eq!(state.heard_of_by(0, held), Ok(id));
    state.confirm_client(0, next, confirmation, root).unwrap();
    assert_eq!(state.heard_of_by(0, held), Err(Status::BAD_STATEID));
    assert_eq!(state.heard_of(0, id), Err(Status::STALE_CLIENTID));
    assert_eq!(
        State::new(8, LEASE, Records::new()).heard_of_by(0, held),
        Err(Status::STALE_STATEID),
        "after a restart"
    );
}

#[test]
fn clients_without_sessions_reclaim_what_they_had() {
    let before = made_by_root(["a", "b"].map(|name| ClientName::without_sessions(name.as_bytes())));
    let mut state = State::new(8, LEASE, before.clone());
    let join = |state: &mut State, now, name: &str| {
        let (id, confirmation) = state.set_client(now, name.as_bytes(), [1; 8], user(Some(0))).unwrap();
        state.confirm_client(now, id, confirmation, user(Some(0))).unwrap();
        id
    };
    let (a, c) = (join(&mut state, 0, "a"), join(&mut state, 0, "c"));
    assert_eq!(state.may_begin(0, a), Err(Status::GRACE));
    assert!(state.may_reclaim(0, a).is_ok());
    open(&mut state, 0, a, "o", 1, (READ | WRITE, WRITE)).unwrap();
    assert_eq!(state.may_reclaim(0, c), Err(Status::RECLAIM_BAD));
    assert!(state.records(0).1 == before, "in another crash both may still come");
    assert_eq!(state.may_begin(LEASE - 1, a), Err(Status::GRACE), "it may have more to reclaim");
    // What has reclaimed is known, and what has not is not.
    assert!(state.may_begin(LEASE, c).is_ok());
    let names =
        |state: &mut State| state.records(0).1.into_keys().map(|client| client.name.to_vec()).collect::<Vec<_>>();
    assert_eq!(names(&mut state), [b"a", b"c"]);
    assert_eq!(state.may_reclaim(LEASE, a), Err(Status::NO_GRACE));
    assert_eq!(open(&mut state, 2 * LEASE, c, "o", 1, (READ, 0)).map(drop), Ok(()));
    let late = 2 * LEASE + 1;
    assert_eq!(open(&mut state, late, c, "o", 1, (WRITE, 0)), Err(Refused::Expired(a)));
    // Heard of while it is taken out of stable storage, it stays, and gets nothing new until that is settled.
    assert!(state.give_up(late, a));
    assert_eq!(state.may_begin(late, a), Err(Status::DELAY));
    state.heard_of(late, a).unwrap();
    assert!(!state.expire(late, a) && state.may_begin(late, a).is_ok());
    let later = late + LEASE + 1;
    assert!(state.give_up(later, a) && state.expire(later, a));
    assert_eq!(
        (state.heard_of(later, a), state.heard_of(later, 77)),
        (Err(Status::EXPIRED), Err(Status::STALE_CLIENTID))
    );
    let b = join(&mut state, LEASE, "b");
    assert_eq!(state.may_reclaim(LEASE, b), Err(Status::NO_GRACE));
}

#[test]
fn owners_whose_operations_are_numbered() {
    let mut state = State::new(7, LEASE, Records::new());
    let (id, confirmation) = state.set_client(0, b"c", [1; 8], user(None)).unwrap();
    assert!(state.numbered(0, id, Role::Opens, b"o").is_err(), "the client has not been confirmed");
    state.confirm_client(0, id, confirmation, user(None)).unwrap();
    let owner = state.numbered(0, id, Role::Opens, b"o").unwrap();
    let mut numbers = owner.try_lock().unwrap();
    assert_eq!(numbers.turn(5, 1), Ok(Turn::New), "any begins");
    let reply = |status| Reply { operation: 1, status, body: Box::from(&b"body"[..]), handle: None };
    numbers.done(5, reply(0));
    assert_eq!(numbers.turn(5, 1), Ok(Turn::Again(reply(0))));
    assert_eq!(
        (numbers.turn(6, 1), numbers.turn(4, 1), numbers.turn(7, 1)),
        (Ok(Turn::New), Err(Status::BAD_SEQID), Err(Status::BAD_SEQID))
    );
    numbers.done(6, reply(Status::BAD_STATEID.0));
    assert_eq!(numbers.turn(6, 1), Ok(Turn::New), "it did not count");
    numbers.done(6, reply(Status::GRACE.0));
    assert_eq!(numbers.turn(6, 1), Ok(Turn::Again(reply(Status::GRACE.0))));
    assert_eq!(numbers.turn(6, 2), Err(Status::BAD_SEQID), "another operation has no reply");
    drop(numbers);
    // One that is not confirmed can do nothing but that, and goes when its owner begins again.
    state.may_begin(0, id).unwrap();
    let how = OpenAs { is_confirmed: false, ..open_as("o", (READ, 0)) };
    let (stateid, _) = state.open(0, GrantPermit::stored(id, false), how, &file(1), guard()).unwrap();
    assert_eq!(state.access(0, id, USER, stateid, &file(1), false), Err(Refused::Status(Status::BAD_STATEID)));
    assert_eq!(state.confirm_open(id, stateid, &file(2)), Err(Status::BAD_STATEID));
    let confirmed = state.confirm_open(id, stateid, &file(1)).unwrap();
    assert_eq!(state.access(0, id, USER, confirmed, &file(1), false), Ok(true));
    state.close_unconfirmed(id, stateid);
    assert!(state.test_stateid(id, confirmed).is_ok(), "it is confirmed");
    let other =
        state.open(0, GrantPermit::stored(id, false), OpenAs { owner: b"p", ..how }, &file(1), guard()).unwrap();
    state.close_unconfirmed(id, other.0);
    assert_eq!(state.held.len(), 1);
    // Owners who have nothing give way to those who come.
    for n in 0..2 * OWNERS_MAX {
        state.numbered(0, id, Role::Opens, &n.to_be_bytes()).unwrap();
    }
    assert!(state.numbered <= OWNERS_MAX);
    assert!(Arc::ptr_eq(&owner, &state.numbered(0, id, Role::Opens, b"o").unwrap()), "one who has something stays");
    let held = lock_as(&mut state, id, confirmed, "l");
    assert_eq!(state.release_locks_of(id, b"l"), Err(Status::LOCKS_HELD));
    state.unlock(id, held, &file(1), range(0, 10)).unwrap();
    assert_eq!(state.release_locks_of(id, b"l"), Ok(()));
    // What was closed is known for as long as it is the last.
    for of in [2, 3] {
        let open = open(&mut state, 0, id, "o", of, (READ, 0)).unwrap();
        state.close(id, open, &file(of)).unwrap();
        let known = state.numbered_by(0, open, Role::Opens).unwrap();
        assert!(Arc::ptr_eq(&owner, &known) && state.closed.len() == 1);
    }
    // One whose owners are all idle does not keep others out.
    for n in 0..OWNERS_TOTAL_MAX / OWNERS_MAX + 2 {
        let (other, confirmation) = state.set_client(0, &n.to_be_bytes(), [1; 8], user(None)).unwrap();
        state.confirm_client(0, other, confirmation, user(None)).unwrap();
        for owner in 0..OWNERS_MAX {
            state.numbered(0, other, Role::Opens, &owner.to_be_bytes()).unwrap();
        }
    }
    assert!(state.numbered <= OWNERS_TOTAL_MAX);
    state.check_owners();
    state.clients.keys().copied().collect::<Vec<_>>().into_iter().for_each(|id| state.remove_client(id));
    assert_eq!((state.numbered, state.held.len(), state.files.len(), state.closed.len()), (0, 0, 0, 0));
}

/// A confirmed client of version 4.0.
fn client40(state: &mut State, name: &str, maker: Maker) -> u64 {
    let (id, confirmation) = state.set_client(0, name.as_bytes(), [1; 8], maker).unwrap();
    state.confirm_client(0, id, confirmation, maker.principal).unwrap();
    state.may_begin(0, id).unwrap();
    id
}

/// An owner of version 4.0 opens a file.
fn open40(state: &mut State, client: u64, owner: &str, of: u8) -> Result<Stateid, Refused> {
    drop(state.numbered(0, client, Role::Opens, owner.as_bytes())?);
    Ok(open(state, 0, client, owner, of, (READ | WRITE, 0)).unwrap())
}

#[test]
fn a_client_whose_owners_are_all_busy_makes_no_work() {
    let mut state = State::new(7, LEASE, Records::new());
    let id = client40(&mut state, "c", user(None).into());
    for n in 0..OWNERS_MAX {
        open40(&mut state, id, &n.to_string(), 1).unwrap();
    }
    for n in 0..1000_u32 {
        assert_eq!(state.numbered(0, id, Role::Opens, &n.to_be_bytes()).err(), Some(Refused::Status(Status::RESOURCE)));
    }
    assert_eq!(state.idle_owners.looked_at, 0);
    // One that closes its file makes room for one other.
    let first = state.files[&file(1)].opens().find(id, b"7").unwrap();
    state.close(id, state.stateid_of(first, 1), &file(1)).unwrap();
    let in_use = state.numbered(0, id, Role::Locks, b"new").unwrap();
    assert_eq!((state.idle_owners.looked_at, state.closed.len()), (1, 0));
    // Not while it has an operation in progress.
    assert_eq!(state.numbered(0, id, Role::Opens, b"newer").err(), Some(Refused::Status(Status::RESOURCE)));
    drop(in_use);
    state.check_owners();
    assert!(state.numbered(0, id, Role::Opens, b"newer").is_ok());
    assert_eq!(state.numbered, OWNERS_MAX);
    state.check_owners();
}

#[test]
fn a_host_with_many_owners_keeps_no_other_out() {
    let mut state = State::new(7, LEASE, Records::new());
    let mut clients = 0;
    // As many owners as the host may have, of as many clients as it takes.
    let mut fill = |state: &mut State, address: &str, is_busy: bool| {
        let mut all = Vec::new();
        for number in (0..).map(|n| n / OWNERS_MAX) {
            if number == all.len() {
                clients += 1;
                all.push(client40(state, &clients.to_string(), from(address)));
            }
            let (id, owner) = (all[number], state.owners_of(from(address).origin).to_string());
            let added = if is_busy {
                open40(state, id, &owner, clients as u8).map(drop)
            } else if state.has_room_for_owner(from(address).origin) {
                state.numbered(0, id, Role::Opens, owner.as_bytes()).map(drop)
            } else {
                break;
            };
            if added.is_err() {
                assert_eq!(added, Err(Refused::Status(Status::RESOURCE)));
                break;
            }
        }
        (all, state.owners_of(from(address).origin))
    };
    let (first, second, third) = ("192.0.2.1", "198.51.100.7", "203.0.113.5");
    let (of_first, count) = fill(&mut state, first, true);
    assert_eq!(count, (OWNERS_TOTAL_MAX * 8).div_ceil(9));
    let (_, idle) = fill(&mut state, second, false);
    assert_eq!(idle, ((OWNERS_TOTAL_MAX - count) * 8).div_ceil(9));
    // Idle owners of a host give way to those of another that has fewer, and to its own.
    let (_, busy) = fill(&mut state, third, true);
    let left = state.owners_of(from(second).origin);
    assert!(busy > idle / 3 && left > idle / 3 && left < idle, "{busy} of {idle}, {left} left");
    assert_eq!(state.owners_of(from(first).origin), count, "busy owners stay");
    state.check_owners();
    // Once the lease of a client of the host has expired, its owners give way.
    let (expired, others) = of_first.split_at(3);
    let is_other = |id: &&u64| !expired.contains(id);
    state.clients.iter().filter(|(id, _)| is_other(id)).for_each(|(_, client)| client.lease.renew(LEASE + 1));
    let mut given_up = 0;
    while let Err(refused) = state.numbered(LEASE + 1, *others.last().unwrap(), Role::Locks, b"new") {
        let Refused::Expired(id) = refused else { panic!("{refused:?}") };
        assert!(expired.contains(&id) && state.expire(LEASE + 1, id));
        given_up += 1;
    }
    assert_eq!(given_up, 2, "until it has less than eight times the room again");
    state.check_owners();
}

#[test]
fn an_owner_of_locks_is_released_with_all_that_it_has() {
    let mut state = State::new(7, LEASE, Records::new());
    let id = client40(&mut state, "c", user(None).into());
    let lock_in = |state: &mut State, owner: &str, of: u8, at: u64| {
        let open = open40(state, id, "o", of).unwrap();
        drop(state.numbered(0, id, Role::Locks, owner.as_bytes()).unwrap());
        let request = LockRequest::New { open, owner: owner.as_bytes().into() };
        state.lock(0, GrantPermit::stored(id, false), request, &file(of), true, range(at, 1)).unwrap()
    };
    let of_l: Vec<Stateid> = (0..100).map(|of| lock_in(&mut state, "l", of, 0)).collect();
    let of_m = lock_in(&mut state, "m", 0, 5);
    state.check_counts();
    // Only what an owner has is looked at, and nothing if it has locks.
    assert!(state.locks_of(id, b"nobody").is_none() && state.clients[&id].held.len() == 201);
    assert_eq!(state.locks_of(id, b"m").map(|(has_locks, numbers)| (has_locks, numbers.len())), Some((true, 1)));
    for (of, held) in of_l.iter().enumerate().rev() {
        assert_eq!(state.release_locks_of(id, b"l"), Err(Status::LOCKS_HELD));
        state.unlock(id, *held, &file(of as u8), Range::ALL).unwrap();
        state.check_counts();
    }
    let owners = state.numbered;
    assert_eq!(state.release_locks_of(id, b"l"), Ok(()));
    assert!(of_l.iter().all(|held| state.test_stateid(id, *held).is_err()));
    assert!(state.test_stateid(id, of_m).is_ok());
    assert_eq!(state.numbered, owners - 1);
    assert_eq!((state.release_locks_of(id, b"l"), state.release_locks_of(id, b"nobody")), (Ok(()), Ok(())));
    // One whose operation is in progress is new afterwards.
    let in_use = state.numbered(0, id, Role::Locks, b"n").unwrap();
    assert_eq!(state.release_locks_of(id, b"n"), Ok(()));
    assert!(!Arc::ptr_eq(&in_use, &state.numbered(0, id, Role::Locks, b"n").unwrap()));
    // Locks go with the open by which they came.
    let open = state.files[&file(0)].opens().find(id, b"o").unwrap();
    state.close(id, state.stateid_of(open, 2), &file(0)).unwrap();
    state.check_counts();
    assert_eq!(state.release_locks_of(id, b"m"), Ok(()));
    state.check_counts();
}

#[test]
fn the_longest_idle_owner_goes_first() {
    let mut state = State::new(7, LEASE, Records::new());
    let id = client40(&mut state, "c", user(None).into());
    let first: Vec<_> = (0..4_u32).map(|n| state.numbered(0, id, Role::Opens, &n.to_be_bytes()).unwrap()).collect();
    let in_use = Arc::clone(&first[1]);
    let first: Vec<_> = first.into_iter().map(|numbers| Arc::downgrade(&numbers)).collect();
    (4..OWNERS_MAX as u32).for_each(|n| drop(state.numbered(0, id, Role::Opens, &n.to_be_bytes()).unwrap()));
    // The first one comes again, and the second one still does something.
    drop(state.numbered(0, id, Role::Opens, &0_u32.to_be_bytes()).unwrap());
    state.numbered(0, id, Role::Opens, b"a").unwrap();
    state.numbered(0, id, Role::Opens, b"b").unwrap();
    let is_known: Vec<bool> = first.iter().map(|numbers| numbers.strong_count() > 0).collect();
    assert_eq!(is_known, [true, true, false, false]);
    assert_eq!(state.idle_owners.looked_at, 3);
    drop(in_use);
    state.check_owners();
}

#[test]
fn a_host_with_locks_in_many_files_keeps_no_other_out() {
    let mut state = State::new(7, LEASE, Records::new());
    // As if the host had all these in other files.
    let (first, second) =
        (client40(&mut state, "a", from("192.0.2.1")), client40(&mut state, "b", from("198.51.100.7")));
    state.locks.add(from("192.0.2.1").origin, (LOCKS_TOTAL_MAX * 8).div_ceil(9) as isize);
    let mut lock = |client, owner: &str| {
        let open = open40(&mut state, client, owner, 1).unwrap();
        let request = LockRequest::New { open, owner: owner.as_bytes().into() };
        let permit = GrantPermit::stored(client, false);
        state.lock(0, permit, request, &file(1), false, range(0, 10)).err()
    };
    assert_eq!(lock(first, "o"), Some(Refused::Status(Status::NOSPC)));
    assert_eq!(lock(second, "p"), None);
    // What a client leaves is free again.
    let others = state.locks.total();
    state.remove_client(second);
    assert_eq!(state.locks.total(), others - 1);
}

#[test]
fn an_open_that_two_users_share_proves_the_rights_of_neither() {
    let mut state = State::new(7, LEASE, Records::new());
    let a = client(&mut state, 0, "a");
    open(&mut state, 0, a, "o", 1, (READ, 0)).unwrap();
    let other = OpenAs { uid: USER + 1, ..open_as("o", (WRITE, 0)) };
    let (both, _) = state.open(0, GrantPermit::stored(a, false), other, &file(1), guard()).unwrap();
    for (uid, is_write) in [(USER, false), (USER, true), (USER + 1, false), (USER + 1, true)] {
        assert_eq!(state.access(0, a, uid, both, &file(1), is_write), Ok(false), "{uid}, write: {is_write}");
    }
}

/// A file is delegated to a client that has it open.
fn delegate(state: &mut State, now: u64, client: u64, of: u8, is_write: bool) -> Option<Stateid> {
    let delegated = Delegated { is_write, uid: USER, handle: Box::from(&b"handle"[..]), lease: guard() };
    state.delegate(now, GrantPermit::stored(client, false), &file(of), delegated)
}

#[test]
fn what_is_delegated_is_had_back_before_others_see_or_do_what_it_excludes() {
    let mut state = State::new(7, LEASE, Records::new());
    let (a, b) = (client(&mut state, 0, "a"), client(&mut state, 0, "b"));
    assert_eq!(delegate(&mut state, 0, a, 1, false), None, "it is not open");
    let first = open(&mut state, 0, a, "o", 1, (READ, 0)).unwrap();
    let of_a = delegate(&mut state, 0, a, 1, false).unwrap();
    assert_eq!(delegate(&mut state, 0, a, 1, false), None, "it has it already");
    assert_eq!(state.access(0, a, USER, of_a, &file(1), false), Ok(true));
    assert_eq!(state.access(0, a, USER + 1, of_a, &file(1), false), Ok(false), "a user whose rights were not checked");
    assert_eq!(state.access(0, a, USER, of_a, &file(1), true), Err(Refused::Status(Status::OPENMODE)));
    assert_eq!(state.access(0, b, USER, of_a, &file(1), false), Err(Refused::Status(Status::BAD_STATEID)));
    assert_eq!(state.check_delegated(a, USER, of_a, &file(1), READ), Ok(true));
    assert_eq!(state.check_delegated(a, USER + 1, of_a, &file(1), READ), Ok(false));
    assert_eq!(state.check_delegated(a, USER, of_a, &file(1), WRITE), Err(Status::OPENMODE));
    assert_eq!(state.check_delegated(a, USER, first, &file(1), READ), Err(Status::BAD_STATEID));
    // Reading is not excluded, and can be delegated to several.
    open(&mut state, 0, b, "o", 1, (READ, 0)).unwrap();
    let of_b = delegate(&mut state, 0, b, 1, false).unwrap();
    assert!(state.take_recalls().is_empty());
    // Writing is, and so is keeping readers out; a change through no open file, too.
    state.close(a, first, &file(1)).unwrap();
    let excluded = Err(Refused::Delegated);
    assert_eq!(state.recall_others(0, &file(1), Some(b), true), excluded);
    let numbers = state.take_recalls();
    assert_eq!(numbers.len(), 1, "a's");
    assert_eq!(open(&mut state, 0, b, "o", 1, (WRITE, 0)).map(drop), excluded);
    assert_eq!(state.begin_change(0, &file(1), None), excluded);
    assert_eq!(state.take_recalls().len(), 1, "b's; that of a has been recalled");
    assert_eq!(state.recalled(numbers[0]).map(|recalled| recalled.stateid), Some(of_a));
    assert_eq!(state.give_back(b, of_a, &file(1)), Err(Status::BAD_STATEID), "another's");
    assert_eq!(state.give_back(a, of_a, &file(2)), Err(Status::BAD_STATEID), "another file");
    state.give_back(a, of_a, &file(1)).unwrap();
    assert!(state.recalled(numbers[0]).is_none());
    assert_eq!(state.begin_change(0, &file(1), None), excluded, "b still has it");
    assert_eq!(state.begin_change(0, &file(1), Some(b)), Ok(()), "to b itself it is no obstacle");
    state.end_change(&file(1));
    state.give_back(b, of_b, &file(1)).unwrap();
    // Not again at once, and not during a change.
    assert_eq!(delegate(&mut state, RECENT_MS - 1, b, 1, false), None);
    state.begin_change(0, &file(1), None).unwrap();
    assert_eq!(delegate(&mut state, RECENT_MS, b, 1, false), None);
    state.end_change(&file(1));
    assert!(delegate(&mut state, RECENT_MS, b, 1, false).is_some());
    // For writing only to the one who has it open, who then is asked even by those who look.
    open(&mut state, 0, a, "o", 2, (READ | WRITE, 0)).unwrap();
    assert_eq!(delegate(&mut state, 0, a, 2, false), None, "it is open for writing");
    let writing = delegate(&mut state, 0, a, 2, true).unwrap();
    assert_eq!(state.access(0, a, USER, writing, &file(2), true), Ok(true));
    assert_eq!(state.access(0, a, USER + 1, writing, &file(2), true), Ok(false));
    assert_eq!(state.recall_others(0, &file(2), Some(a), false), Ok(()), "the client itself");
    assert_eq!(state.recall_others(0, &file(2), None, false), excluded);
    assert_eq!(open(&mut state, 0, b, "o", 2, (READ, 0)).map(drop), excluded);
    // A client that has a file for reading gives that back before it writes.
    open(&mut state, 0, b, "o", 3, (READ, 0)).unwrap();
    delegate(&mut state, 0, b, 3, false).unwrap();
    assert_eq!(open(&mut state, 0, b, "o", 3, (WRITE, 0)).map(drop), excluded);
    assert_eq!(state.delegations, 3);
    state.take_dropped();
    [a, b].into_iter().for_each(|id| state.remove_client(id));
    assert_eq!((state.delegations, state.held.len(), state.files.len()), (0, 0, 0));
}

#[test]
fn limits_are_not_held_by_those_who_are_gone() {
    let mut state = State::new(7, LEASE, Records::new());
    let (gone, here) = (client(&mut state, 0, "gone"), client(&mut state, 0, "here"));
    let opened = (0..).take_while(|n: &u32| open(&mut state, 0, gone, &n.to_string(), 1, (READ, 0)).is_ok()).count();
    assert_eq!(opened, (FILE_HELD_MAX * 8).div_ceil(9), "the clients of one host");
    let one_more = |state: &mut State, now| open(state, now, here, "o", 1, (READ, 0)).map(drop);
    assert_eq!(one_more(&mut state, 0), Err(Refused::Status(Status::NOSPC)));
    state.clients[&here].lease.renew(3 * LEASE);
    assert_eq!(one_more(&mut state, 3 * LEASE), Err(Refused::Expired(gone)));
    assert_eq!(state.longest_expired_of_all(3 * LEASE), Some(gone));
    assert!(state.expire(3 * LEASE, gone));
    assert_eq!(one_more(&mut state, 3 * LEASE), Ok(()));
    // Locks, and sessions.
    let gone = client(&mut state, 3 * LEASE, "gone");
    let opened = open(&mut state, 3 * LEASE, gone, "o", 1, (READ | WRITE, 0)).unwrap();
    let locked = (0..).take_while(|n| lock(&mut state, 3 * LEASE, gone, opened, "l", range(2 * n, 1)).is_ok()).count();
    assert_eq!(locked, (LOCKS_MAX * 8).div_ceil(9), "the clients of one host");
    state.clients[&here].lease.renew(6 * LEASE);
    let of_here = open(&mut state, 6 * LEASE, here, "o", 1, (WRITE, 0)).unwrap();
    assert_eq!(lock(&mut state, 6 * LEASE, here, of_here, "l", range(1 << 40, 1)), Err(Refused::Expired(gone)));
    assert!(state.expire(6 * LEASE, gone));
    for n in 0.. {
        let id = client_from(&mut state, 6 * LEASE, n, &format!("10.0.{}.{}", n / 200, n % 200)).unwrap();
        for sequence in 2..=4 {
            if state.sessions.len() < SESSIONS_TOTAL_MAX {
                add_session(&mut state, 6 * LEASE, id, sequence);
            }
        }
        if state.sessions.len() >= SESSIONS_TOTAL_MAX {
            break;
        }
    }
    state.clients[&here].lease.renew(9 * LEASE);
    let session = state.create_session(9 * LEASE, here, 2, user(Some(0)));
    assert!(matches!(session, Err(Refused::Expired(_))));
}

#[test]
fn many_locks_go_at_once_and_those_who_wait_are_looked_at_once() {
    let mut state = State::new(7, LEASE, Records::new());
    let (a, b) = (client(&mut state, 0, "a"), client(&mut state, 0, "b"));
    let open_a = open(&mut state, 0, a, "o", 1, (READ | WRITE, 0)).unwrap();
    open(&mut state, 0, b, "o", 1, (READ | WRITE, 0)).unwrap();
    for n in 0..4000 {
        lock(&mut state, 0, a, open_a, &n.to_string(), range(n, 1)).unwrap();
    }
    for n in 0..2 * WAITING_MAX as u64 {
        let owner = n.to_string().into_bytes().into();
        let waiting = Waiting {
            client: b,
            owner,
            is_monitored: false,
            handle: [].into(),
            is_write: true,
            range: range(0, 4000),
            since: 0,
        };
        state.wait_for_lock(waiting, &file(1));
    }
    assert_eq!(state.files[&file(1)].waiting.len(), (WAITING_MAX * 8).div_ceil(9), "as many as one host may have");
    state.close(a, open_a, &file(1)).unwrap();
    assert_eq!(state.to_wake.len(), 1, "all locks together");
    state.take_notices();
    assert!(state.to_wake.is_empty() && state.files[&file(1)].waiting.is_empty() && state.held.len() == 1);
    assert!(state.files[&file(1)].locks.is_empty());
}

#[test]
fn only_those_who_wait_for_what_was_released_are_looked_at() {
    let mut state = State::new(7, LEASE, Records::new());
    let (a, b) = (client(&mut state, 0, "a"), client(&mut state, 0, "b"));
    let open_a = open(&mut state, 0, a, "o", 1, (READ | WRITE, 0)).unwrap();
    open(&mut state, 0, b, "o", 1, (READ | WRITE, 0)).unwrap();
    let owner = lock(&mut state, 0, a, open_a, "l", range(0, 100)).unwrap().latest();
    lock(&mut state, 0, a, open_a, "l", range(200, 100)).unwrap();
    let wait = |state: &mut State, owner: &[u8], is_write, range| {
        let (owner, handle) = (owner.into(), [].into());
        let waiting = Waiting { client: b, owner, is_monitored: false, handle, is_write, range, since: 0 };
        state.wait_for_lock(waiting, &file(1));
    };
    wait(&mut state, b"w", true, range(50, 10));
    wait(&mut state, b"x", true, range(90, 120));
    wait(&mut state, b"r", false, range(60, 10));
    let waits = |state: &mut State| {
        state.take_notices();
        let state = state.files.get(&file(1));
        state.map(|state| state.waiting.iter().map(|known| known.owner[0]).collect::<Vec<u8>>()).unwrap_or_default()
    };
    // Nothing was locked there, or nobody waits for it.
    for free in [range(100, 100), range(1 << 40, 1), range(0, 1), range(250, 10)] {
        state.unlock(a, owner, &file(1), free).unwrap();
        assert!(state.to_wake.is_empty(), "{free:?}");
    }
    // Of what is released at once, all of it counts.
    state.unlock(a, owner, &file(1), range(95, 1)).unwrap();
    state.unlock(a, owner, &file(1), range(97, 1)).unwrap();
    assert_eq!(state.to_wake[&file(1)], range(95, 3));
    assert_eq!(waits(&mut state), *b"wxr");
    // A lock for reading instead of one for writing lets readers in.
    let request = LockRequest::Existing(owner);
    state.lock(0, GrantPermit::stored(a, false), request, &file(1), false, range(0, 90)).unwrap();
    assert_eq!(state.to_wake[&file(1)], range(1, 89));
    assert_eq!(waits(&mut state), *b"wx");
    state.unlock(a, owner, &file(1), range(40, 30)).unwrap();
    assert_eq!(waits(&mut state), *b"x");
    state.close(a, open_a, &file(1)).unwrap();
    assert_eq!(waits(&mut state), *b"");
    state.check_counts();
}

#[test]
fn what_is_not_given_back_is_revoked_and_its_client_hears_of_it() {
    let mut state = State::new(7, LEASE, Records::new());
    let (a, b) = (client(&mut state, 0, "a"), client(&mut state, 0, "b"));
    let first = open(&mut state, 0, a, "o", 1, (READ, 0)).unwrap();
    let of_a = delegate(&mut state, 0, a, 1, false).unwrap();
    assert_eq!(open(&mut state, 0, b, "o", 1, (WRITE, 0)), Err(Refused::Delegated));
    let number = state.take_recalls()[0];
    assert!(!state.clients[&a].lease.has_revoked());
    state.take_dropped();
    assert_eq!(state.revoke(number), Some(a));
    assert_eq!(state.revoke(number), None, "once");
    assert_eq!(state.take_dropped().len(), 1, "other programs go on");
    assert!(state.clients[&a].lease.has_revoked() && state.delegations == 0, "others may have one");
    assert!(open(&mut state, 0, b, "o", 1, (WRITE, 0)).is_ok(), "what is open is not in the way");
    assert_eq!(state.test_stateid(a, of_a), Err(Status::DELEG_REVOKED));
    assert_eq!(state.access(0, a, USER, of_a, &file(1), false), Err(Refused::Status(Status::DELEG_REVOKED)));
    assert_eq!(state.give_back(a, of_a, &file(1)), Err(Status::DELEG_REVOKED));
    assert_eq!(state.free_stateid(b, of_a), Err(Status::BAD_STATEID), "another's");
    state.free_stateid(a, of_a).unwrap();
    assert!(!state.clients[&a].lease.has_revoked());
    assert_eq!(state.test_stateid(a, of_a), Err(Status::BAD_STATEID));
    assert_eq!(state.delegations, 0);
    // One that its client does not know of ends without a word.
    open(&mut state, 0, b, "o", 3, (READ, 0)).unwrap();
    delegate(&mut state, 0, b, 3, false).unwrap();
    state.recall_all(0, &file(3));
    let number = state.take_recalls()[0];
    state.forget_delegation(number);
    assert!(!state.clients[&b].lease.has_revoked() && state.delegations == 0 && state.recalled(number).is_none());
    // A client that is not heard of loses all that it has.
    state.close(a, first, &file(1)).unwrap();
    open(&mut state, 0, a, "o", 2, (READ, 0)).unwrap();
    delegate(&mut state, 0, a, 2, false).unwrap();
    state.clients[&b].lease.renew(3 * LEASE);
    assert_eq!(open(&mut state, 3 * LEASE, b, "o", 2, (WRITE, 0)), Err(Refused::Expired(a)));
}

fn lock_as(state: &mut State, client: u64, open: Stateid, owner: &str) -> Stateid {
    let request = LockRequest::New { open, owner: owner.as_bytes().into() };
    state.lock(0, GrantPermit::stored(client, false), request, &file(1), false, range(0, 10)).unwrap()
}

fn host(address: &str) -> Host {
    Host {
        address: address.parse().unwrap(),
        local: "192.0.2.200".parse().unwrap(),
        name: b"host name".as_slice().into(),
    }
}

/// NLM_LOCK by a client that may have something.
fn lock3(state: &mut State, now: u64, client: u64, owner: &str, is_write: bool, of: Range) -> Result<(), Refused> {
    state.may_begin(now, client).unwrap();
    state.lock_monitored(now, GrantPermit::stored(client, false), owner.as_bytes(), &file(1), is_write, of)
}

/// A wait of a client of version 3 to lock a range for writing.
fn pending(client: u64, at: &str, owner: &str, of: Range, since: u64) -> PendingGrant {
    let (number, host, owner, handle) = (0, host(at), owner.as_bytes().into(), [].into());
    PendingGrant { number, client, host, owner, file: file(1), handle, is_write: true, range: of, since }
}

fn wait3(state: &mut State, client: u64, at: &str, owner: &str, of: Range, since: u64) -> bool {
    state.wait_monitored(pending(client, at, owner, of, since))
}

#[test]
fn names_of_hosts_come_back() {
    for name in [&b"host"[..], b"", b"with spaces", b"\xff\0"] {
        for address in ["192.0.2.1", "2001:db8::1"] {
            let host = Host { name: name.into(), ..host(address) };
            assert_eq!(Host::of(&host.client_name()), Some(host));
        }
    }
    assert_eq!(Host::of(&ClientName::with_sessions(b"192.0.2.1 192.0.2.2 x")), None);
    for wrong in ["", "192.0.2.1", "192.0.2.1 192.0.2.2", "x 192.0.2.2 y"] {
        assert_eq!(Host::of(&ClientName { kind: Kind::Monitored, name: wrong.as_bytes().into() }), None, "{wrong}");
    }
}

#[test]
fn locks_of_version_3_stay_until_their_client_has_restarted() {
    let mut state = State::new(7, LEASE, Records::new());
    let a = state.monitored(0, &host("192.0.2.1"), 5).unwrap();
    let other = client(&mut state, 0, "v4");
    lock3(&mut state, 0, a, "p", true, range(10, 10)).unwrap();
    let late = 100 * LEASE;
    assert_eq!(state.longest_expired_of_all(late), None);
    let of_other = open(&mut state, late, other, "o", 1, (READ | WRITE, 0)).unwrap();
    let denied = |is_monitored, owner: &str| {
        Err(Refused::Denied(Denied {
            range: range(10, 10),
            is_write: true,
            client: 0,
            owner: owner.as_bytes().into(),
            is_monitored,
        }))
    };
    assert_eq!(
        lock(&mut state, late, other, of_other, "q", range(0, 100)).map(drop),
        denied(true, "p"),
        "it has no lease"
    );
    state.clients[&other].lease.renew(late);
    // It is known by its number; one that says none is as before.
    assert_eq!(state.monitored(late, &host("192.0.2.1"), 0), Ok(a));
    assert_eq!(host_restarted(&mut state, "192.0.2.1".parse().unwrap(), 5), 0, "an old notice");
    assert_eq!(
        state.monitored(0, &host("192.0.2.1"), 4).unwrap(),
        a,
        "a late call, or another host with the same name and address"
    );
    assert_eq!(host_restarted(&mut state, "192.0.2.9".parse().unwrap(), 7), 0, "another host");
    let again = state.monitored(late, &host("192.0.2.1"), 7).unwrap();
    assert_ne!(again, a);
    lock(&mut state, late, other, of_other, "q", range(10, 10)).unwrap();
    assert_eq!(lock3(&mut state, late, again, "p", false, range(0, 100)), denied(false, "q"));
    // A lock is given back in parts; when none is left, nothing is.
    lock3(&mut state, late, again, "p", true, range(100, 10)).unwrap();
    state.unlock_monitored(again, b"p", &file(1), range(100, 5)).unwrap();
    assert!(
        state.has_locked(again, b"p", &file(1), true, range(105, 5))
            && !state.has_locked(again, b"p", &file(1), true, range(104, 6))
    );
    let held = state.held.len();
    state.unlock_monitored(again, b"p", &file(1), range(0, 1000)).unwrap();
    assert_eq!(state.held.len(), held - 1);
    // A notice takes all that it has and waits for.
    assert!(wait3(&mut state, again, "192.0.2.1", "p", range(10, 1), 0));
    lock3(&mut state, late, again, "p", true, range(100, 10)).unwrap();
    assert_eq!(host_restarted(&mut state, "192.0.2.1".parse().unwrap(), 9), 1);
    assert!(state.known_host(&host("192.0.2.1")).is_none() && state.files[&file(1)].waiting.is_empty());
}

#[test]
fn who_waits_for_a_lock_of_version_3_is_woken_in_order_and_keeps_its_place() {
    let mut state = State::new(7, LEASE, Records::new());
    let addresses = ["192.0.2.1", "192.0.2.2", "192.0.2.3"];
    let [a, b, c] = addresses.map(|at| state.monitored(0, &host(at), 1).unwrap());
    lock3(&mut state, 0, a, "p", true, range(0, 10)).unwrap();
    for (n, (client, at)) in [(b, addresses[1]), (c, addresses[2]), (b, addresses[1])].into_iter().enumerate() {
        assert!(wait3(&mut state, client, at, "p", range(0, 5), n as u64));
    }
    assert!(wait3(&mut state, c, addresses[2], "q", range(9, 1), 5));
    // Long waits do not end by themselves.
    lock3(&mut state, 9 * LEASE, b, "r", true, range(20, 1)).unwrap();
    state.unlock_monitored(a, b"p", &file(1), range(0, 5)).unwrap();
    let notices = state.take_notices();
    let freed: Vec<(u64, Range)> = state.take_freed().iter().map(|freed| (freed.client, freed.range)).collect();
    assert!(notices.is_empty());
    assert_eq!(freed, [(b, range(0, 5)), (c, range(0, 5))], "the first of them will have it");
    // Another thread waits to read the same bytes.
    lock3(&mut state, 0, a, "r", true, range(30, 5)).unwrap();
    let of_kind = |is_write| PendingGrant { is_write, ..pending(c, addresses[2], "q", range(30, 5), 6) };
    assert!(
        state.wait_monitored(of_kind(false))
            && state.wait_monitored(of_kind(true))
            && state.wait_monitored(of_kind(true))
    );
    state.unlock_monitored(a, b"r", &file(1), range(30, 5)).unwrap();
    drop(state.take_notices());
    assert_eq!(state.take_freed().iter().map(|freed| freed.is_write).collect::<Vec<_>>(), [false, true]);
    let mut cancel = |is_write| state.cancel_wait(c, b"q", &file(1), is_write, range(9, 1));
    assert_eq!([cancel(false), cancel(true), cancel(true)], [false, true, false], "it waited for one lock for writing");
    state.unlock_monitored(a, b"p", &file(1), range(5, 5)).unwrap();
    drop(state.take_notices());
    assert!(state.take_freed().is_empty());
    // There is room for so many.
    let waited = (0..).take_while(|n| wait3(&mut state, c, addresses[2], &format!("w{n}"), range(20, 1), 0)).count();
    assert_eq!(waited, (WAITING_MAX * 8).div_ceil(9));
    assert!(wait3(&mut state, c, addresses[2], "w7", range(20, 1), 0), "one that waits may ask again");
}

#[test]
fn clients_of_version_3_reclaim_what_they_had() {
    let before = host("192.0.2.1").client_name();
    let mut state = State::new(8, LEASE, [(before.clone(), Principal::NONE)].into());
    assert_eq!(state.hosts_before(), [host("192.0.2.1")]);
    let (a, b) =
        (state.monitored(0, &host("192.0.2.1"), 1).unwrap(), state.monitored(0, &host("192.0.2.2"), 1).unwrap());
    assert_eq!(state.may_begin(0, a), Err(Status::GRACE));
    assert_eq!((state.may_reclaim(0, a).is_ok(), state.may_reclaim(0, b)), (true, Err(Status::RECLAIM_BAD)));
    let reclaim = |state: &mut State, now| {
        state.lock_monitored(now, GrantPermit::stored(a, true), b"p", &file(1), true, range(0, 10))
    };
    reclaim(&mut state, 0).unwrap();
    assert_eq!(reclaim(&mut state, LEASE), Err(Refused::Status(Status::NO_GRACE)));
    assert!(state.may_begin(LEASE, b).is_ok());
    assert!(matches!(lock3(&mut state, LEASE, b, "p", true, range(0, 1)), Err(Refused::Denied(_))));
    let names = |state: &mut State, now| state.records(now).1.into_keys().collect::<Vec<_>>();
    assert_eq!(names(&mut state, LEASE), [before.clone(), host("192.0.2.2").client_name()]);
    // One that has nothing for a while need not be stored; to get something, it must be again.
    assert_eq!(names(&mut state, 3 * LEASE), [before]);
    let retired = state.lock_monitored(3 * LEASE, GrantPermit::stored(b, false), b"p", &file(1), true, range(50, 1));
    assert_eq!(retired, Err(Refused::Status(Status::DELAY)));
    let was = state.records(3 * LEASE).0;
    assert!(state.may_begin(3 * LEASE, b).unwrap() > was);
}

#[test]
fn a_file_with_locks_of_version_3_is_not_delegated() {
    let mut state = State::new(7, LEASE, Records::new());
    let (a, v4) = (state.monitored(0, &host("192.0.2.1"), 1).unwrap(), client(&mut state, 0, "v4"));
    open(&mut state, 0, v4, "o", 1, (READ, 0)).unwrap();
    assert!(state.may_delegate(0, v4, &file(1), false));
    lock3(&mut state, 0, a, "p", false, range(0, 1)).unwrap();
    assert!(!state.may_delegate(0, v4, &file(1), false));
    state.unlock_monitored(a, b"p", &file(1), range(0, 1)).unwrap();
    assert!(delegate(&mut state, 0, v4, 1, false).is_some());
    assert_eq!(lock3(&mut state, 0, a, "p", false, range(0, 1)), Ok(()), "who reads may lock for reading");
    assert_eq!(lock3(&mut state, 0, a, "p", true, range(0, 1)), Err(Refused::Delegated));
    let test = state.test_monitored(0, Some(a), b"p", &file(1), true, range(0, 1));
    assert_eq!(test, Err(Refused::Delegated));
}

#[test]
fn one_host_cannot_be_too_many_clients() {
    let mut state = State::new(7, LEASE, Records::new());
    let named = |n: usize| Host { name: n.to_string().into_bytes().into(), ..host("192.0.2.1") };
    for n in 0..CLIENTS_OF_HOST_MAX {
        let id = state.monitored(0, &named(n), 1).unwrap();
        lock3(&mut state, 0, id, "p", false, range(0, 1)).unwrap();
    }
    assert_eq!(state.monitored(0, &named(CLIENTS_OF_HOST_MAX), 1), Err(Refused::Status(Status::NOSPC)));
    assert!(state.monitored(0, &host("192.0.2.2"), 1).is_ok());
    let idle = state.known_host(&named(7)).unwrap();
    state.unlock_monitored(idle, b"p", &file(1), range(0, 1)).unwrap();
    assert!(state.monitored(0, &named(CLIENTS_OF_HOST_MAX), 1).is_ok() && state.known_host(&named(7)).is_none());
}

#[test]
fn clients_of_version_3_leave_room_for_others() {
    let mut state = State::new(7, LEASE, Records::new());
    let at = |n: usize| host(&format!("192.0.{}.{}", n / 250, n % 250));
    for n in 0..MONITORED_MAX {
        let id = state.monitored(0, &at(n), 1).unwrap();
        lock3(&mut state, 0, id, "p", false, range(0, 1)).unwrap();
    }
    assert_eq!(state.monitored(0, &host("198.51.100.1"), 1), Err(Refused::Status(Status::NOSPC)));
    client(&mut state, 0, "v4");
    host_restarted(&mut state, at(7).address, 2);
    assert!(state.monitored(0, &host("198.51.100.1"), 1).is_ok());
}

#[test]
fn who_polls_does_not_take_the_place_of_who_may_not() {
    let mut state = State::new(7, LEASE, Records::new());
    let (a, b) = (state.monitored(0, &host("192.0.2.1"), 1).unwrap(), client(&mut state, 0, "v4"));
    lock3(&mut state, 0, a, "p", true, range(0, 10)).unwrap();
    let poll = |state: &mut State, owner: &str| {
        let (owner, handle) = (owner.as_bytes().into(), [].into());
        let wait =
            Waiting { client: b, owner, is_monitored: false, handle, is_write: true, range: range(0, 1), since: 9 };
        state.wait_for_lock(wait, &file(1));
    };
    poll(&mut state, "first");
    let address = |n: usize| format!("192.0.2.{}", 1 + n % 9);
    for n in 1..WAITING_MAX {
        let client = state.monitored(0, &host(&address(n)), 1).unwrap();
        assert!(wait3(&mut state, client, &address(n), &n.to_string(), range(0, 1), 0));
    }
    poll(&mut state, "second");
    let owners = |state: &State| state.files[&file(1)].waiting.iter().map(|w| w.owner.clone()).collect::<Vec<_>>();
    let are_there = [&b"first"[..], b"second", b"1"].map(|owner| owners(&state).iter().any(|o| **o == *owner));
    assert_eq!(are_there, [false, true, true]);
    // One that is gone waits in no file.
    assert_eq!(state.clients[&a].waits.len(), 1);
    (0..9).for_each(|n| assert_eq!(host_restarted(&mut state, address(n).parse().unwrap(), 2), 1));
    assert_eq!(owners(&state), [b"second".as_slice().into()]);
    state.check_counts();
    // Also with version 4.
    state.remove_client(b);
    assert_eq!((owners(&state).len(), state.waits.total()), (0, 0));
}

#[test]
fn copies_are_cancelled_and_end_with_their_clients() {
    let mut state = State::new(7, LEASE, Records::new());
    let (a, b) = (client(&mut state, 0, "a"), client(&mut state, 0, "b"));
    let (number, stateid, _) = state.begin_offload(a).unwrap();
    assert!(state.offload_copied(number, 5));
    assert_eq!(state.offload_progress(a, stateid).map(|progress| (progress.copied, progress.ended)), Ok((5, None)));
    assert_eq!(state.offload_progress(b, stateid).err(), Some(Status::BAD_STATEID));
    assert_eq!(state.cancel_offload(b, stateid).err(), Some(Status::BAD_STATEID));
    assert!(state.cancel_offload(a, stateid).is_ok());
    assert!(!state.offload_copied(number, 6), "it is not to go on");
    assert!(state.offload_session(number).is_err());

    let (ended, stateid, _) = state.begin_offload(a).unwrap();
    state.end_offload(ended, Err(Status::NOSPC));
    assert_eq!(state.cancel_offload(a, stateid).err(), Some(Status::COMPLETE_ALREADY));
    assert_eq!(state.offload_progress(a, stateid).unwrap().ended, Some(Err(Status::NOSPC)));
    for _ in 1..OFFLOADS_OF_CLIENT_MAX {
        assert!(state.begin_offload(a).is_some());
    }
    assert!(state.begin_offload(a).is_none());
    let (of_b, _, _) = state.begin_offload(b).unwrap();
    assert!(state.give_up(LEASE + 1, a) && state.expire(LEASE + 1, a));
    assert!(!state.offload_copied(ended, 0) && state.offload_copied(of_b, 0));
}

fn from(address: &str) -> Maker {
    Maker { principal: user(Some(0)), origin: Origin::of_host(address.parse().unwrap()) }
}

/// A client of this host, with a session, after RECLAIM_COMPLETE.
fn client_from(state: &mut State, now: u64, name: usize, address: &str) -> Result<u64, Refused> {
    let exchange = state.exchange_id(now, &name.to_be_bytes(), [1; 8], from(address), false)?;
    add_session(state, now, exchange.client, exchange.sequence);
    state.reclaim_complete(now, exchange.client)?;
    Ok(exchange.client)
}

#[test]
fn a_host_with_many_clients_keeps_no_other_out() {
    for has_something in [false, true] {
        let mut state = State::new(7, LEASE, Records::new());
        let add = |state: &mut State, name, address| {
            let id = client_from(state, 0, name, address)?;
            if has_something {
                open(state, 0, id, "o", (name % 200) as u8, (READ, 0))?;
            }
            Ok::<_, Refused>(id)
        };
        let many = (0..).take_while(|n| add(&mut state, *n, "192.0.2.1").is_ok()).count();
        assert_eq!(many, (CLIENTS_MAX * 8).div_ceil(9));
        for n in 0..10 {
            add(&mut state, CLIENTS_MAX + n, "198.51.100.7").unwrap();
        }
        assert_eq!(add(&mut state, 2 * CLIENTS_MAX, "192.0.2.1"), Err(Refused::Status(Status::DELAY)));
        let of = |address: &str| state.origins[&Origin::of_host(address.parse().unwrap())].clients;
        assert_eq!((of("192.0.2.1"), of("198.51.100.7")), (many, 10));
    }
}

#[test]
fn a_host_with_many_sessions_keeps_no_other_out() {
    let mut state = State::new(7, LEASE, Records::new());
    let (one, other) = ("192.0.2.1", "198.51.100.7");
    let mut name = 0;
    'all: loop {
        name += 1;
        let exchange = state.exchange_id(0, &usize::to_be_bytes(name), [1; 8], from(one), false).unwrap();
        for sequence in 1..=SESSIONS_MAX as u32 {
            match state.create_session(0, exchange.client, sequence, user(Some(0))) {
                Ok(_) => drop(add_session(&mut state, 0, exchange.client, sequence)),
                Err(refused) => break 'all assert_eq!(refused, Refused::Status(Status::NOSPC)),
            }
        }
    }
    assert_eq!(state.sessions.len(), (SESSIONS_TOTAL_MAX * 8).div_ceil(9));
    let of_other = client_from(&mut state, 0, 0, other).unwrap();
    let asked = ChannelLimits { cached: 4096, requests: 64, ..limits() };
    assert_eq!(state.with_room_for_replies(of_other, asked), asked);
    state
        .destroy_session(&state.sessions.values().find(|session| session.client != of_other).unwrap().id.clone())
        .unwrap();
    state.check_counts();
}

#[test]
fn a_host_that_keeps_replies_leaves_room_for_those_of_others() {
    let mut state = State::new(7, LEASE, Records::new());
    let asked = ChannelLimits { cached: 4096, requests: 64, ..limits() };
    let mut slots = |address: &str, name| {
        let exchange = state.exchange_id(0, &usize::to_be_bytes(name), [1; 8], from(address), false).unwrap();
        let given = state.with_room_for_replies(exchange.client, asked);
        let NewSession::Make(lease) = state.create_session(0, exchange.client, 1, user(Some(0))).unwrap() else {
            panic!()
        };
        let session = Session::new(thruway_engine::random::random(), exchange.client, lease, given);
        state.session_created(Arc::new(session), Box::from(&b"reply"[..]));
        given.requests
    };
    let many = (0..2000).filter(|n| slots("192.0.2.1", *n) == 64).count();
    assert!((800..1000).contains(&many), "{many} of 1,024");
    assert_eq!(slots("198.51.100.7", 5000), 64);
}

#[test]
fn a_host_that_opens_many_files_keeps_no_other_out() {
    const MAX: usize = 90;
    let mut state = State::new(7, LEASE, Records::new()).with_open_files([(1, MAX)]);
    let [a, b] =
        ["192.0.2.1", "198.51.100.7"].map(|address| client_from(&mut state, 0, address.len(), address).unwrap());
    let open_new = |state: &mut State, now, client, of: u8| {
        state.check_opener(now, client, b"o", 1)?;
        state.check_open(now, client, b"o", &file(of))?;
        open(state, now, client, "o", of, (READ, 0))
    };
    let opened = (0..).take_while(|of| open_new(&mut state, 0, a, *of).is_ok()).count();
    assert_eq!(opened, (MAX * 8).div_ceil(9));
    let theirs: Vec<Stateid> = (100..109).map(|of| open_new(&mut state, 0, b, of).unwrap()).collect();
    assert!(state.check_open(0, a, b"p", &file(0)).is_ok(), "it is open");
    assert_eq!(open_new(&mut state, 0, b, 110), Err(Refused::Status(Status::NOSPC)));
    state.close(b, theirs[0], &file(100)).unwrap();
    assert!(open_new(&mut state, 0, b, 110).is_ok());
    state.clients[&b].lease.renew(LEASE + 1);
    assert_eq!(open_new(&mut state, LEASE + 1, b, 111), Err(Refused::Expired(a)));
    assert!(state.expire(LEASE + 1, a) && open_new(&mut state, LEASE + 1, b, 111).is_ok());
    state.check_counts();
}

#[test]
fn a_host_with_many_locks_of_a_file_leaves_room_for_others() {
    let mut state = State::new(7, LEASE, Records::new());
    let [a, b] =
        ["192.0.2.1", "198.51.100.7"].map(|address| client_from(&mut state, 0, address.len(), address).unwrap());
    let of_a = open(&mut state, 0, a, "o", 1, (READ | WRITE, 0)).unwrap();
    let of_b = open(&mut state, 0, b, "o", 1, (READ | WRITE, 0)).unwrap();
    let owner = lock(&mut state, 0, a, of_a, "l", range(0, 1)).unwrap().latest();
    let locked = 1 + (1..).take_while(|n| lock(&mut state, 0, a, of_a, "l", range(2 * n, 1)).is_ok()).count();
    assert_eq!(locked, (LOCKS_MAX * 8).div_ceil(9));
    for n in 0..10 {
        lock(&mut state, 0, b, of_b, "l", range((1 << 40) + 2 * n, 1)).unwrap();
    }
    state.check_counts();
    // Locks that are released make room, and locks next to one another count as one.
    state.unlock(a, owner, &file(1), range(0, 100)).unwrap();
    state.check_counts();
    for n in 0..4 {
        lock(&mut state, 0, a, of_a, "l", range(2 * n + 1, 1)).unwrap();
        state.check_counts();
    }
    state.close(a, of_a, &file(1)).unwrap();
    state.check_counts();
    assert_eq!(state.files[&file(1)].locks.len(), 10);
    // Nor by splitting one lock.
    let of_a = open(&mut state, 0, a, "o", 1, (READ | WRITE, 0)).unwrap();
    let owner = lock(&mut state, 0, a, of_a, "l", range(0, 1 << 20)).unwrap().latest();
    let split = |n: &u64| state.unlock(a, owner, &file(1), range(2 * n + 1, 1)).is_ok();
    assert!((0..).take_while(split).count() < LOCKS_MAX * 8 / 9);
    lock(&mut state, 0, b, of_b, "l", range(1 << 41, 1)).unwrap();
    state.check_counts();
}

/// Locks of version 3 have no lease. Clients with expired leases still give way while there is such a lock.
#[test]
fn a_lock_of_version_3_keeps_no_new_client_out() {
    let mut state = State::new(7, LEASE, Records::new());
    let locker = state.monitored(0, &host("192.0.2.1"), 5).unwrap();
    lock3(&mut state, 0, locker, "o", false, range(0, 1)).unwrap();
    for n in 0.. {
        let Ok(id) = client_from(&mut state, 1, n, &format!("10.0.{}.{}", n / 200, n % 200)) else { break };
        open(&mut state, 1, id, "o", (n % 200) as u8, (READ, 0)).unwrap();
    }
    let late = 3 * LEASE;
    let refused = client_from(&mut state, late, CLIENTS_MAX + 1, "192.0.2.1").unwrap_err();
    let Refused::Expired(id) = refused else { panic!("{refused:?}") };
    assert!(state.expire(late, id));
    assert!(client_from(&mut state, late, CLIENTS_MAX + 1, "192.0.2.1").is_ok());
}

/// A refusal finds the same expired client as a scan of all clients, at any time.
#[test]
fn a_refusal_sees_every_client_whose_lease_has_expired() {
    let mut state = State::new(7, LEASE, Records::new()).with_open_files([(1, 40)]);
    let mut random = 1_u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % below
    };
    let address = |n: u64| format!("10.0.0.{}", n % 4);
    let (mut now, mut clients, mut expired) = (0, Vec::new(), 0);
    for round in 0..4000_usize {
        now += next(LEASE / 50);
        let n = round as u64;
        if clients.len() < 20
            && let Ok(id) = client_from(&mut state, now, round, &address(n))
        {
            clients.push(id);
        }
        let client = clients[next(clients.len() as u64) as usize];
        if next(4) > 0 {
            state.clients[&client].lease.renew(now);
        }
        let live = |state: &State| !state.is_expired(now, &state.clients[&client]);
        let scanned = state.longest_expired_of_all(now);
        let result = state.check_opener(now, client, b"o", 1);
        match result {
            Err(Refused::Expired(id)) => {
                assert_eq!(state.clients[&id].lease.renewed(), state.clients[&scanned.unwrap()].lease.renewed());
                assert!(state.expire(now, id));
                clients.retain(|known| *known != id);
                expired += 1;
            }
            Err(refused) => assert!(scanned.is_none(), "{refused:?}, but {scanned:?} has expired"),
            Ok(()) if live(&state) => drop(open(&mut state, now, client, "o", next(60) as u8, (READ, 0))),
            Ok(()) => {}
        }
    }
    assert!(expired > 10, "{expired}");
    state.check_counts();
}

#[test]
fn an_open_file_counts_for_a_host_that_has_it_open() {
    const MAX: usize = 9;
    let mut state = State::new(7, LEASE, Records::new()).with_open_files([(1, MAX)]);
    let [a, b] =
        ["192.0.2.1", "198.51.100.7"].map(|address| client_from(&mut state, 0, address.len(), address).unwrap());
    for of in 0..6 {
        let first = open(&mut state, 0, a, "o", of, (READ, 0)).unwrap();
        open(&mut state, 0, b, "o", of, (READ, 0)).unwrap();
        state.close(a, first, &file(of)).unwrap();
        state.check_counts();
    }
    assert!(state.check_open(0, a, b"o", &file(10)).is_ok(), "it has nothing open");
    // A host cannot exceed its quota by opening files that other hosts have open.
    let theirs = [6, 7].map(|of| (of, open(&mut state, 0, a, "o", of, (READ, 0)).unwrap()));
    assert_eq!(state.check_open(0, b, b"o", &file(6)), Ok(()));
    open(&mut state, 0, b, "o", 8, (READ, 0)).unwrap();
    assert_eq!(state.check_open(0, b, b"o", &file(6)), Err(Refused::Status(Status::NOSPC)));
    assert_eq!(state.check_open(0, b, b"p", &file(1)), Ok(()), "it has it open");
    theirs.into_iter().for_each(|(of, stateid)| state.close(a, stateid, &file(of)).unwrap());
    // A delegation keeps the file counted for its host.
    let opened = open(&mut state, 0, a, "o", 10, (READ, 0)).unwrap();
    delegate(&mut state, 0, a, 10, false).unwrap();
    let other = open(&mut state, 0, b, "o", 10, (READ, 0)).unwrap();
    state.close(a, opened, &file(10)).unwrap();
    state.close(b, other, &file(10)).unwrap();
    state.check_counts();
}

#[test]
fn a_client_that_writes_its_data_back_is_not_idle() {
    let mut state = State::new(7, LEASE, Records::new());
    let a = client(&mut state, 0, "a");
    for of in 0..2 {
        open(&mut state, 0, a, "o", of, (READ | WRITE, 0)).unwrap();
    }
    let stateids = [0, 1].map(|of| delegate(&mut state, 0, a, of, true).unwrap());
    [0, 1].into_iter().for_each(|of| state.recall_all(0, &file(of)));
    let number = state.take_recalls()[1];
    let idle = |state: &mut State, now| {
        state.tick(now);
        state.recalled(number).unwrap().idle_ms
    };
    assert_eq!(idle(&mut state, 100), 100);
    assert_eq!(state.access(100, a, USER, stateids[0], &file(0), false), Ok(true));
    assert_eq!(idle(&mut state, 100), 100, "it reads");
    assert_eq!(state.access(100, a, USER, stateids[0], &file(0), true), Ok(true));
    assert_eq!(idle(&mut state, 110), 10);
    state.give_back(a, stateids[0], &file(0)).unwrap();
    assert_eq!(idle(&mut state, 115), 5);
}

#[test]
fn others_wait_for_the_delegations_of_a_host_one_lease_time_in_ten() {
    let mut state = State::new(7, LEASE, Records::new());
    let a = client(&mut state, 0, "a");
    let (mut now, mut waited, mut of) = (0, 0, 0);
    let mut waits = Vec::new();
    // The client returns no delegation, and takes the next one that it can get.
    while now < 40 * LEASE {
        now += 10;
        state.tick(now);
        state.clients[&a].lease.renew(now);
        of = (of + 1) % 250;
        if open(&mut state, now, a, "o", of, (READ, 0)).is_err() || delegate(&mut state, now, a, of, false).is_none() {
            continue;
        }
        state.recall_all(now, &file(of));
        for number in state.take_recalls() {
            let left = state.recalled(number).map_or(0, |recalled| recalled.time_left_ms);
            let wait = left.min(LEASE * 4 / 9);
            (now, waited) = (now + wait, waited + wait);
            waits.push((now, wait));
            state.tick(now);
            assert_eq!(state.revoke(number), Some(a));
        }
    }
    assert!(waited > LEASE, "{waited} ms: it goes on for as long as it may");
    for (end, _) in &waits {
        let within = waits.iter().filter(|(other, wait)| other <= end && other - wait + 10 * LEASE > *end);
        let sum: u64 = within.map(|(_, wait)| wait).sum();
        assert!(sum <= LEASE, "{sum} ms in the ten lease times before {end}");
    }
    // A client that returns delegations at once gets new ones.
    let b = client_from(&mut state, now, 7, "198.51.100.7").unwrap();
    for n in 0..100_u8 {
        state.clients[&b].lease.renew(now);
        now += 1;
        open(&mut state, now, b, "o", n, (READ, 0)).unwrap();
        let stateid = delegate(&mut state, now + RECENT_MS * u64::from(n), b, n, false);
        if let Some(stateid) = stateid {
            state.recall_all(now, &file(n));
            state.give_back(b, stateid, &file(n)).unwrap();
        }
    }
    assert!(state.recall_time_left(now, Origin::of_host("198.51.100.7".parse().unwrap())) > LEASE / 2);
    state.check_counts();
}

#[test]
fn recalls_of_one_host_do_not_keep_others_from_delegations() {
    let mut state = State::new(7, LEASE, Records::new());
    let [a, b] =
        ["192.0.2.1", "198.51.100.7"].map(|address| client_from(&mut state, 0, address.len(), address).unwrap());
    let of = |n: usize| FileIdentity { file_system: 1, file: FileId(n.to_be_bytes().into_iter().collect()) };
    let mut recall_one = |n: usize| {
        let (permit, how) = (GrantPermit::stored(a, false), open_as("o", (READ, 0)));
        let (opened, _) = state.open(0, permit, how, &of(n), guard()).unwrap();
        let delegated = Delegated { is_write: false, uid: 0, handle: Box::default(), lease: guard() };
        let stateid = state.delegate(0, permit, &of(n), delegated)?;
        state.recall_all(0, &of(n));
        state.give_back(a, stateid, &of(n)).unwrap();
        state.close(a, opened, &of(n)).unwrap();
        Some(())
    };
    let recalled = (0..).take_while(|n| recall_one(*n).is_some()).count();
    assert_eq!(recalled, (RECENT_MAX * 8).div_ceil(9));
    open(&mut state, 0, b, "o", 1, (READ, 0)).unwrap();
    assert!(delegate(&mut state, 0, b, 1, false).is_some());
    // Old recalls do not count.
    open(&mut state, RECENT_MS, a, "o", 2, (READ, 0)).unwrap();
    assert!(delegate(&mut state, RECENT_MS, a, 2, false).is_some());
}

#[test]
fn what_a_host_holds_leaves_room_for_others() {
    let mut state = State::new(7, LEASE, Records::new());
    let [a, b] = ["192.0.2.1", "192.0.2.2"].map(|address| {
        let exchange = state.exchange_id(0, address.as_bytes(), [1; 8], from(address), false).unwrap();
        add_session(&mut state, 0, exchange.client, exchange.sequence);
        state.reclaim_complete(0, exchange.client).unwrap();
        exchange.client
    });
    let longest = "x".repeat(1024);
    let stateid = open(&mut state, 0, a, &longest, 1, (READ | WRITE, 0)).unwrap();
    assert_eq!((state.weight, state.clients[&a].weight), (5, 5));
    lock(&mut state, 0, a, stateid, "short", range(0, 1)).unwrap();
    assert_eq!(state.weight, 6);
    state.close(a, stateid.latest(), &file(1)).unwrap();
    assert_eq!((state.weight, state.clients[&a].weight), (0, 0));
    // As if it had very many.
    open(&mut state, 0, a, "o", 1, (READ, 0)).unwrap();
    state.add_weight(a, HELD_TOTAL_MAX / 9 * 8 + 100);
    assert_eq!(open(&mut state, 0, a, "p", 1, (READ, 0)), Err(Refused::Status(Status::NOSPC)));
    assert!(open(&mut state, 0, b, "p", 1, (READ, 0)).is_ok());
    assert_eq!(open(&mut state, LEASE + 1, a, "p", 1, (READ, 0)), Err(Refused::Expired(a)));
    assert!(state.give_up(LEASE + 1, a) && state.expire(LEASE + 1, a));
    assert_eq!((state.weight, state.origins.len()), (1, 1));
}

#[test]
fn one_of_several_hosts_with_an_address_restarts() {
    let mut state = State::new(7, LEASE, Records::new());
    let named = |name: &str| Host { name: name.as_bytes().into(), ..host("192.0.2.1") };
    let [one, two] = ["vm1", "vm2.example"].map(|name| {
        let id = state.monitored(0, &named(name), 5).unwrap();
        lock3(&mut state, 0, id, name, false, range(0, 1)).unwrap();
        id
    });
    let address = "192.0.2.1".parse().unwrap();
    assert_eq!(state.of_restarted(address, b"vm3"), [0_u64; 0], "another one, which has no locks");
    assert_eq!(state.of_restarted(address, b"VM2"), [two]);
    assert_eq!(state.of_restarted(address, b"vm1.example"), [one]);
    assert!(!state.restarted(two, 5), "an old notice");
    assert!(state.restarted(two, 6));
    assert_eq!(state.of_restarted(address, b"whatever it is called now"), [one], "it is the only one");
    // A network of 64 bits is one host's.
    for n in 0..CLIENTS_OF_HOST_MAX {
        let id = state.monitored(0, &host(&format!("2001:db8::{n:x}")), 1).unwrap();
        lock3(&mut state, 0, id, "p", false, range(0, 1)).unwrap();
    }
    assert_eq!(state.monitored(0, &host("2001:db8::ffff"), 1), Err(Refused::Status(Status::NOSPC)));
    assert!(state.monitored(0, &host("2001:db8:0:1::1"), 1).is_ok());
}

#[test]
fn a_lock_that_is_not_wanted_leaves_what_was_there_before() {
    let mut state = State::new(7, LEASE, Records::new());
    let a = state.monitored(0, &host("192.0.2.1"), 1).unwrap();
    lock3(&mut state, 0, a, "p", false, range(2, 4)).unwrap();
    lock3(&mut state, 0, a, "p", false, range(8, 10)).unwrap();
    let before = state.locked_in(a, b"p", &file(1), range(0, 10));
    lock3(&mut state, 0, a, "p", true, range(0, 10)).unwrap();
    state.take_back(a, b"p", &file(1), &[range(0, 10)], &before).unwrap();
    let has = |state: &State, is_write, of| state.has_locked(a, b"p", &file(1), is_write, of);
    assert!(has(&state, false, range(2, 4)) && has(&state, false, range(8, 2)) && has(&state, false, range(10, 8)));
    assert!(!has(&state, false, range(0, 1)) && !has(&state, false, range(6, 1)) && !has(&state, true, range(2, 1)));
    let before = state.locked_in(a, b"q", &file(1), range(0, 10));
    assert_eq!(before, []);
    state.take_back(a, b"q", &file(1), &[range(0, 10)], &before).unwrap();
}

#[test]
fn what_was_there_before_is_not_given_against_others() {
    let mut state = State::new(7, LEASE, Records::new());
    let [a, b] = ["192.0.2.1", "192.0.2.2"].map(|at| state.monitored(0, &host(at), 1).unwrap());
    let has = |state: &State, client, owner: &str, is_write, of| {
        state.has_locked(client, owner.as_bytes(), &file(1), is_write, of)
    };
    // What is given is for reading; another reads, too.
    lock3(&mut state, 0, a, "p", true, range(0, 5)).unwrap();
    let before = state.locked_in(a, b"p", &file(1), range(0, 10));
    lock3(&mut state, 0, a, "p", false, range(0, 10)).unwrap();
    lock3(&mut state, 0, b, "q", false, range(0, 2)).unwrap();
    state.take_back(a, b"p", &file(1), &[range(0, 10)], &before).unwrap();
    assert!(has(&state, a, "p", false, range(0, 5)) && !has(&state, a, "p", true, range(0, 2)));
    assert!(!has(&state, a, "p", false, range(5, 1)));
    // The owner has unlocked it, and another has locked it since.
    state.unlock_monitored(a, b"p", &file(1), Range::ALL).unwrap();
    lock3(&mut state, 0, b, "q", true, range(0, 5)).unwrap();
    state.take_back(a, b"p", &file(1), &[range(0, 10)], &before).unwrap();
    assert!(!has(&state, a, "p", false, range(0, 1)) && has(&state, b, "q", true, range(0, 5)));
    state.check_counts();
}

#[test]
fn a_wait_can_be_cancelled_while_the_lock_is_being_given() {
    let mut state = State::new(7, LEASE, Records::new());
    let [a, b] = ["192.0.2.1", "192.0.2.2"].map(|at| state.monitored(0, &host(at), 1).unwrap());
    let freed = |state: &mut State| {
        lock3(state, 0, a, "p", true, range(0, 5)).unwrap();
        assert!(wait3(state, b, "192.0.2.2", "q", range(0, 5), 0));
        state.unlock_monitored(a, b"p", &file(1), range(0, 5)).unwrap();
        assert!(state.take_notices().is_empty());
        let mut freed = state.take_freed();
        assert_eq!(freed.len(), 1);
        freed.remove(0)
    };
    let first = freed(&mut state);
    assert!(state.is_wanted(&first));
    state.cancel_wait(b, b"q", &file(1), false, range(0, 5));
    assert!(state.is_wanted(&first), "a wait of the other kind");
    state.cancel_wait(b, b"q", &file(1), true, range(0, 5));
    assert!(!state.is_wanted(&first));
    // It waits again: the earlier wait has still ended.
    let second = freed(&mut state);
    assert!(state.is_wanted(&second) && !state.is_wanted(&first));
    state.end_wait(&first);
    // A call of its own for reading leaves the wait for writing.
    state.has_been_locked(b, b"q", &file(1), false, range(0, 5));
    assert!(state.is_wanted(&second));
    state.has_been_locked(b, b"q", &file(1), true, range(0, 5));
    assert!(!state.is_wanted(&second));
    assert!(state.giving.is_empty());
}

#[test]
fn a_host_that_waits_for_many_locks_keeps_no_other_out() {
    let mut state = State::new(7, LEASE, Records::new());
    let addresses = ["192.0.2.1", "192.0.2.2", "192.0.2.3"];
    let [a, b, c] = addresses.map(|at| state.monitored(0, &host(at), 1).unwrap());
    lock3(&mut state, 0, c, "p", true, range(0, 10)).unwrap();
    let poll = |state: &mut State, client, owner: &str, since| {
        let (owner, handle) = (owner.as_bytes().into(), [].into());
        let wait = Waiting { client, owner, is_monitored: false, handle, is_write: true, range: range(0, 1), since };
        state.wait_for_lock(wait, &file(1))
    };
    let places = (WAITING_MAX * 8).div_ceil(9);
    let waited = (0..).take_while(|n| wait3(&mut state, a, addresses[0], &format!("w{n}"), range(0, 1), *n)).count();
    assert_eq!(waited, places);
    assert!(wait3(&mut state, a, addresses[0], "w0", range(0, 1), 9), "one that waits stays");
    assert!(wait3(&mut state, b, addresses[1], "w", range(0, 1), 9));
    // The polls of one host give way to each other, and to others when there is no place left.
    let d = client(&mut state, 0, "d");
    for n in 0..2 * WAITING_MAX {
        assert!(poll(&mut state, d, &n.to_string(), n as u64) || n < 8);
    }
    let of = |state: &State, client| state.files[&file(1)].waiting.iter().filter(|wait| wait.client == client).count();
    assert_eq!((of(&state, a), of(&state, b)), (places, 1));
    assert!(of(&state, d) > 0);
    for n in 0..8 {
        wait3(&mut state, b, addresses[1], &format!("v{n}"), range(0, 1), 9);
    }
    assert!(of(&state, b) > 1);
    state.check_counts();
    // In all files.
    state.waits.add(state.clients[&b].origin, (WAITS_TOTAL_MAX * 8 / 9) as isize);
    assert!(!wait3(&mut state, b, addresses[1], "u", range(5, 1), 9));
    assert!(wait3(&mut state, c, addresses[2], "u", range(0, 1), 9) || of(&state, c) == 0);
}
