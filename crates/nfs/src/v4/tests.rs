//! What a client is answered, whose calls are built by hand.

use super::{op, status::Status};
use crate::fuzzing::Client;
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
    assert_eq!(status(&client.in_session(1, &words(&[op::EXCHANGE_ID]))), (Status::NOT_ONLY_OP.0, 2));
    let many = words(&[op::PUTROOTFH; 64]);
    assert_eq!(status(&client.in_session(64, &many)), (Status::TOO_MANY_OPS.0, 0));
    client.sequence -= 1;
    assert_eq!(status(&client.in_session(1, &[])), (Status::OP_ILLEGAL.0, 2), "the call ends");
    for minor in [0, 3] {
        client.minor = minor;
        assert_eq!(status(&client.compound(1, &words(&[op::PUTROOTFH]))), (Status::MINOR_VERS_MISMATCH.0, 0));
    }
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
