//! What a client is answered, whose calls are built by hand.

use super::op;
use crate::fuzzing::Client;
use crate::status::Status;
use thruway_rpc::xdr::{Decoder, Encoder};

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn opaque(bytes: &[u8]) -> Vec<u8> {
    let mut out = Encoder::new();
    out.opaque(bytes);
    out.to_bytes()
}

/// To the share, which is what the operations then are about.
fn in_share() -> Vec<u8> {
    [words(&[op::PUTROOTFH, op::LOOKUP]), opaque(b"m")].concat()
}

/// Status of a compound, and of how many operations there are results.
fn status(results: &[u8]) -> (u32, u32) {
    let mut d = Decoder::new(results);
    let status = d.u32().unwrap();
    d.opaque(1024).unwrap();
    (status, d.u32().unwrap())
}

const OK: u32 = 0;
/// Attributes that are set when something is made: none.
const NOTHING_SET: [u32; 2] = [0, 0];

fn make_directory(name: &[u8]) -> Vec<u8> {
    [in_share(), words(&[op::CREATE, 2]), opaque(name), words(&NOTHING_SET)].concat()
}

/// OPEN for reading and writing of a file that is made exclusively, with this number.
fn open_exclusively(name: &[u8], number: [u32; 2]) -> Vec<u8> {
    let open = words(&[op::OPEN, 0, 3, 0, 0, 0]);
    let how = words(&[1, 3, number[0], number[1], 0, 0, 0]);
    [in_share(), open, opaque(b"owner"), how, opaque(name)].concat()
}

#[test]
fn a_request_that_is_repeated_is_done_once() {
    let mut client = Client::new();
    let first = client.in_session(3, &make_directory(b"d"));
    assert_eq!(status(&first), (OK, 4));
    client.sequence -= 1;
    assert_eq!(client.in_session(3, &make_directory(b"d")), first, "the same reply");
    client.sequence -= 1;
    let other = client.in_session(3, &make_directory(b"e"));
    assert_eq!(status(&other), (Status::SEQ_FALSE_RETRY.0, 1));
    client.sequence -= 1;
    client.user = Some(1000);
    let other = client.in_session(3, &make_directory(b"d"));
    assert_eq!(status(&other), (Status::SEQ_FALSE_RETRY.0, 1), "another user");
    client.user = None;
    let again = client.in_session(3, &make_directory(b"d"));
    assert_eq!(status(&again), (17, 4), "it is there");
}

#[test]
fn operations_are_where_they_may_be() {
    let mut client = Client::new();
    assert_eq!(status(&client.compound(1, &words(&[op::PUTROOTFH]))), (Status::OP_NOT_IN_SESSION.0, 1));
    assert_eq!(status(&client.in_session(1, &words(&[op::SEQUENCE]))), (Status::SEQUENCE_POS.0, 2));
    let bind = words(&[op::BIND_CONN_TO_SESSION]);
    assert_eq!(status(&client.in_session(1, &bind)), (Status::NOT_ONLY_OP.0, 2));
    let exchange = [words(&[op::EXCHANGE_ID, 7, 7]), opaque(b"another"), words(&[0, 0, 0])].concat();
    assert_eq!(status(&client.compound(2, &[exchange.clone(), bind].concat())), (Status::NOT_ONLY_OP.0, 1));
    assert_eq!(status(&client.in_session(1, &exchange)), (OK, 2));
    let many = words(&[op::PUTROOTFH; 64]);
    assert_eq!(status(&client.in_session(64, &many)), (Status::TOO_MANY_OPS.0, 0));
    client.sequence -= 1;
    assert_eq!(status(&client.in_session(1, &[])), (Status::OP_ILLEGAL.0, 2), "the call ends");
    client.minor = 3;
    assert_eq!(status(&client.compound(1, &words(&[op::PUTROOTFH]))), (Status::MINOR_VERS_MISMATCH.0, 0));
    // Of each minor version every operation is known.
    for (minor, last) in [(1, 58), (2, 75)] {
        client.minor = minor;
        for number in 1..90 {
            let results = client.in_session(1, &words(&[number]));
            let is_known = (3..=last).contains(&number);
            assert_eq!(status(&results).0 == Status::OP_ILLEGAL.0, !is_known, "{number} of 4.{minor}");
        }
        for unserved in [46, 50, 54, 22] {
            let expected = if unserved == 22 { Status::BADXDR } else { Status::NOTSUPP };
            assert_eq!(status(&client.in_session(1, &words(&[unserved]))).0, expected.0, "{unserved}");
        }
    }
}

/// Status of these operations on a share in memory, and their units of work.
fn units_of(count: u32, operations: Vec<u8>) -> (u32, u64) {
    let mut client = Client::new();
    thruway_server::slices::measured(move || async move {
        status(&client.in_session_on_reactor(count, &operations).await).0
    })
}

#[test]
fn a_long_access_control_list_is_as_much_work_as_many_operations() {
    let set_acl = |entries: u32| {
        let named = (0..entries).map(|n| [words(&[0, 0, 1]), opaque((1000 + n).to_string().as_bytes())].concat());
        let list = [words(&[entries]), named.collect::<Vec<_>>().concat()].concat();
        let set = words(&[op::SETATTR, 0, 0, 0, 0, 1, 1 << 12]);
        [in_share(), set, opaque(&list)].concat()
    };
    let ((_, short), (_, long)) = (units_of(3, set_acl(1)), units_of(3, set_acl(1000)));
    assert_eq!(long, short + 1000 / 16);
}

#[test]
fn the_number_of_an_exclusive_creation_opens_nobody_elses_file() {
    let mut client = Client::new();
    client.user = Some(1000);
    let made = client.in_session(3, &open_exclusively(b"f", [5, 6]));
    assert_eq!(status(&made).0, OK);
    // Behind four results: the bits of the attributes that hold the number, which the client is to set.
    let times = (1_u32 << (47 - 32) | 1 << (53 - 32)).to_be_bytes();
    let has_times = made.chunks_exact(4).any(|word| (0..4).all(|i| word[i] & times[i] == times[i]));
    assert!(has_times, "where the number is");
    assert_eq!(status(&client.in_session(3, &open_exclusively(b"f", [5, 6]))).0, OK, "its own, repeated");
    assert_eq!(status(&client.in_session(3, &open_exclusively(b"f", [5, 7]))).0, 17);
    client.user = Some(2000);
    assert_eq!(status(&client.in_session(3, &open_exclusively(b"f", [5, 6]))).0, Status::ACCESS.0);
    assert_eq!(status(&client.in_session(3, &open_exclusively(b"f", [5, 7]))).0, 17, "it is still there");
}

#[test]
fn listings_have_room_or_say_that_they_have_not() {
    let mut client = Client::new();
    for name in [b"a", b"b"] {
        assert_eq!(status(&client.in_session(3, &make_directory(name))).0, OK);
    }
    let list = |bytes: u32, cookie: u32| [in_share(), words(&[op::READDIR, 0, cookie, 0, 0, bytes, bytes, 0])].concat();
    for bytes in [0, 16, 30] {
        assert_eq!(status(&client.in_session(3, &list(bytes, 0))).0, Status::TOOSMALL.0, "{bytes}");
    }
    for cookie in [1, 2] {
        assert_eq!(status(&client.in_session(3, &list(4096, cookie))).0, Status::BAD_COOKIE.0);
    }
    let all = client.in_session(3, &list(4096, 0));
    assert_eq!((status(&all).0, &all[all.len() - 8..]), (OK, &words(&[0, 1])[..]));
    // Room for one of them: there is more.
    let one = client.in_session(3, &list(16 + 32, 0));
    assert_eq!((status(&one).0, &one[one.len() - 8..]), (OK, &words(&[0, 0])[..]));
}

/// A client of version 4.0, whose id this is.
fn without_session(client: &mut Client) -> [u32; 2] {
    client.minor = 0;
    let set =
        [words(&[op::SETCLIENTID, 1, 2]), opaque(b"name"), words(&[0]), opaque(b"tcp"), opaque(b"1.2"), words(&[0])];
    let set = client.compound(1, &set.concat());
    assert_eq!(status(&set), (OK, 1));
    // Behind status, tag, number of results, operation and its status.
    let results = &set[20..];
    let id = [word(results, 0), word(results, 1)];
    assert_eq!(client.compound(1, &words(&[op::RENEW, id[0], id[1]]))[3], 10_022_u32 as u8, "not confirmed");
    let confirm = words(&[op::SETCLIENTID_CONFIRM, id[0], id[1], word(results, 2), word(results, 3)]);
    assert_eq!(status(&client.compound(1, &confirm)), (OK, 1));
    assert_eq!(status(&client.compound(1, &words(&[op::RENEW, id[0], id[1]]))), (OK, 1));
    id
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(*bytes[4 * at..].first_chunk().unwrap())
}

/// OPEN in version 4.0 of a file that is made if it is not there, and GETFH.
fn open_numbered(id: [u32; 2], number: u32, owner: &[u8], name: &[u8]) -> Vec<u8> {
    let open = words(&[op::OPEN, number, 3, 0, id[0], id[1]]);
    let how = words(&[1, 0, 0, 0, 0]);
    [in_share(), open, opaque(owner), how, opaque(name), words(&[op::GETFH])].concat()
}

#[test]
fn without_sessions_operations_are_done_once_in_the_order_of_their_numbers() {
    let mut client = Client::new();
    let id = without_session(&mut client);
    let opened = client.compound(4, &open_numbered(id, 7, b"o", b"f"));
    assert_eq!(status(&opened), (OK, 4));
    // Behind the results of PUTROOTFH and LOOKUP, and the beginning of its own.
    let result = &opened[12 + 8 + 8 + 8..];
    let stateid = |result: &[u8]| [0, 1, 2, 3].map(|at| word(result, at));
    let first = stateid(result);
    assert_eq!((first[0], word(result, 9) & 2), (1, 2), "to be confirmed");
    let in_file = [in_share(), words(&[op::LOOKUP]), opaque(b"f")].concat();
    let read = |id: [u32; 4]| [in_file.clone(), words(&[op::READ]), words(&id), words(&[0, 0, 16])].concat();
    assert_eq!(status(&client.compound(4, &read(first))), (Status::BAD_STATEID.0, 4), "not confirmed");
    let confirm =
        |id: [u32; 4], number| [in_file.clone(), words(&[op::OPEN_CONFIRM]), words(&id), words(&[number])].concat();
    assert_eq!(status(&client.compound(4, &confirm(first, 9))).0, Status::BAD_SEQID.0);
    let confirmed = client.compound(4, &confirm(first, 8));
    assert_eq!(status(&confirmed), (OK, 4));
    let second = stateid(&confirmed[confirmed.len() - 16..]);
    assert_eq!((second[0], &second[1..]), (2, &first[1..]));
    assert_eq!(client.compound(4, &confirm(first, 8)), confirmed, "the same reply");
    assert_eq!(status(&client.compound(4, &read(second))), (OK, 4));
    // One more, and once more: what follows it has the same file.
    let opened = client.compound(4, &open_numbered(id, 9, b"o", b"g"));
    assert_eq!(word(&opened[36..], 9) & 2, 0, "it is known");
    assert_eq!(client.compound(4, &open_numbered(id, 9, b"o", b"g")), opened);
    assert_eq!(status(&client.compound(4, &open_numbered(id, 11, b"o", b"h"))), (Status::BAD_SEQID.0, 3));
    // A lock of a new owner, then one of the same.
    let lock = [
        in_file.clone(),
        words(&[op::LOCK, 2, 0, 0, 0, 0, 10, 1, 10]),
        words(&second),
        words(&[1, id[0], id[1]]),
        opaque(b"l"),
    ]
    .concat();
    let locked = client.compound(4, &lock);
    assert_eq!(status(&locked), (OK, 4));
    assert_eq!(client.compound(4, &lock), locked);
    let held = stateid(&locked[locked.len() - 16..]);
    let more =
        |number| [in_file.clone(), words(&[op::LOCK, 2, 0, 0, 20, 0, 10, 0]), words(&held), words(&[number])].concat();
    assert_eq!(status(&client.compound(4, &more(3))).0, Status::BAD_SEQID.0);
    assert_eq!(status(&client.compound(4, &more(2))), (OK, 4));
    assert_eq!(status(&client.compound(4, &more(2))), (OK, 4), "the same reply");
    let release = [words(&[op::RELEASE_LOCKOWNER, id[0], id[1]]), opaque(b"l")].concat();
    assert_eq!(status(&client.compound(1, &release)).0, Status::LOCKS_HELD.0);
    let close = [in_file.clone(), words(&[op::CLOSE, 11]), words(&second)].concat();
    assert_eq!(status(&client.compound(4, &close)), (OK, 4));
    assert_eq!(status(&client.compound(4, &read(second))).0, Status::BAD_STATEID.0);
    assert_eq!(status(&client.compound(1, &release)), (OK, 1));
    // Ids of others.
    for wrong in [[id[0], id[1] ^ 1], [id[0] ^ 1, id[1]]] {
        assert_eq!(status(&client.compound(1, &words(&[op::RENEW, wrong[0], wrong[1]]))).0, Status::STALE_CLIENTID.0);
        assert_eq!(status(&client.compound(4, &open_numbered(wrong, 1, b"o", b"f"))).0, Status::STALE_CLIENTID.0);
    }
}

#[test]
fn what_version_4_0_has_is_not_what_the_others_have() {
    let mut client = Client::new();
    client.minor = 0;
    for number in 1..90 {
        let is_known = (3..=39).contains(&number);
        assert_eq!(status(&client.compound(1, &words(&[number]))).0 == Status::OP_ILLEGAL.0, !is_known, "{number}");
    }
    for minor in [1, 2] {
        client.minor = minor;
        for number in [op::SETCLIENTID, op::SETCLIENTID_CONFIRM, op::RENEW, op::OPEN_CONFIRM, op::RELEASE_LOCKOWNER] {
            assert_eq!(status(&client.in_session(1, &words(&[number]))).0, Status::NOTSUPP.0, "{number}");
        }
    }
}

#[test]
fn what_changes_something_is_not_repeated() {
    use super::numbered_ops::is_repeatable;
    let compound = |minor: u32, operations: &[u8]| [words(&[0, minor, 4]), operations.to_vec()].concat();
    let put = [words(&[op::PUTFH]), opaque(b"handle")].concat();
    let remove = [put.clone(), words(&[op::GETATTR, 1, 7, op::SAVEFH, op::REMOVE]), opaque(b"name")].concat();
    assert!(!is_repeatable(&compound(0, &remove)));
    assert!(is_repeatable(&compound(1, &remove)), "sessions see to that");
    for number in [op::READ, op::READDIR, op::COMMIT, op::RENEW] {
        assert!(is_repeatable(&compound(0, &[put.clone(), words(&[number])].concat())), "{number}");
    }
    for number in [op::WRITE, op::OPEN, op::CLOSE, op::LOCK, op::CREATE, op::RENAME, op::LINK, op::SETATTR] {
        assert!(!is_repeatable(&compound(0, &[put.clone(), words(&[number])].concat())), "{number}");
    }
    assert!(is_repeatable(&[]) && is_repeatable(&compound(0, &[])));
}

#[test]
fn what_could_not_be_said_is_not_done() {
    let mut client = Client::with_replies_of(600);
    let make = [words(&[op::CREATE, 2]), opaque(b"d"), words(&NOTHING_SET)].concat();
    let many = [in_share(), words(&[op::GETFH; 9]), make].concat();
    assert_eq!(status(&client.in_session(12, &many)), (Status::REP_TOO_BIG.0, 13));
    let look_up = [in_share(), words(&[op::LOOKUP]), opaque(b"d")].concat();
    assert_eq!(status(&client.in_session(3, &look_up)).0, Status::NOENT.0, "it has not been made");
    assert_eq!(status(&client.in_session(3, &make_directory(b"d"))), (OK, 4));
    assert_eq!(status(&client.in_session(3, &look_up)).0, OK);
    let long = [in_share(), words(&[op::GETFH; 20])].concat();
    assert_eq!(status(&client.in_session(22, &long)).0, Status::REP_TOO_BIG.0);
}

#[test]
fn a_file_that_is_open_is_cut_whatever_its_permissions_are_now() {
    let mut client = Client::new();
    client.user = Some(1000);
    let opened = client.in_session(3, &open_exclusively(b"f", [1, 2]));
    assert_eq!(status(&opened).0, OK);
    // Behind the beginning, SEQUENCE, PUTROOTFH and LOOKUP, and its own beginning.
    let stateid: [u32; 4] = [0, 1, 2, 3].map(|at| word(&opened[12 + 44 + 16 + 8..], at));
    let in_file = [in_share(), words(&[op::LOOKUP]), opaque(b"f"), words(&[op::SETATTR])].concat();
    let cut = |stateid: [u32; 4]| [in_file.clone(), words(&stateid), words(&[1, 1 << 4]), opaque(&[0; 8])].concat();
    client.user = Some(0);
    // Owner and permissions.
    let own = [words(&[0, 0, 0, 0, 2, 0, 1 << 1 | 1 << 4]), opaque(&[words(&[0o600]), opaque(b"0")].concat())].concat();
    assert_eq!(status(&client.in_session(4, &[in_file.clone(), own].concat())).0, OK);
    client.user = Some(1000);
    assert_eq!(status(&client.in_session(4, &cut(stateid))).0, OK, "it has it open");
    assert_eq!(status(&client.in_session(4, &cut([0; 4]))).0, Status::ACCESS.0);
    client.user = Some(2000);
    assert_eq!(status(&client.in_session(4, &cut(stateid))).0, Status::ACCESS.0, "another user");
    client.user = Some(0);
    let no_owner = [words(&[0, 0, 0, 0, 2, 0, 1 << 4]), opaque(&opaque(b"4294967295"))].concat();
    assert_eq!(status(&client.in_session(4, &[in_file, no_owner].concat())).0, Status::BADOWNER.0);
}

#[test]
fn every_attribute_that_is_said_to_be_there_is() {
    for minor in 0..=2 {
        let mut client = Client::new();
        let supported = crate::v4::attributes::supported(minor);
        for number in supported.iter() {
            let mut wanted = Encoder::new();
            crate::v4::bitmap::Bitmap::of(&[number]).encode(&mut wanted);
            client.minor = minor;
            let get = [in_share(), words(&[op::GETATTR]), wanted.to_bytes()].concat();
            let results = if minor == 0 { client.compound(3, &get) } else { client.in_session(3, &get) };
            // TIME_ACCESS_SET and TIME_MODIFY_SET can only be set.
            let expected = if [48, 54].contains(&number) { Status::INVAL.0 } else { OK };
            assert_eq!(status(&results).0, expected, "attribute {number} of version 4.{minor}");
        }
    }
}
