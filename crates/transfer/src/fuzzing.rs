//! Entry points for the fuzz targets; not part of the interface.

use crate::wire::{BlockHeader, Completion, Control, Hello, Record, check_path};

/// Decodes every kind of message; what decodes must encode to something that decodes alike.
pub fn messages(data: &[u8]) {
    let Some((&which, rest)) = data.split_first() else { return };
    match which % 4 {
        0 => {
            if let Ok((message, receives)) = Control::decode(rest) {
                assert_eq!(Control::decode(&message.encode(receives)), Ok((message, receives)));
            }
        }
        1 => {
            if let Ok(hello) = Hello::decode(rest) {
                assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
            }
        }
        2 => drop(Completion::decode(rest)),
        _ => {
            if let Ok(header) = BlockHeader::decode(rest, 1 << 20) {
                assert!(header.len <= 1 << 20 && header.offset.checked_add(header.len.into()).is_some());
            }
        }
    }
}

/// Splits a pack into records.
pub fn pack(data: &[u8]) {
    let mut rest = data;
    while let Ok((record, content, after)) = Record::split_first(rest) {
        assert!(content.len() + after.len() < rest.len());
        if let Record::File { path, .. } = &record {
            let _ = check_path(path);
        }
        let encoded = record.encode();
        let whole = [&Record::prefix(encoded.len(), 0)[..], &encoded].concat();
        assert_eq!(Record::split_first(&whole).map(|(r, _, _)| r), Ok(record));
        rest = after;
    }
}

/// Replays a journal that says anything at all.
pub fn journal(data: &[u8]) {
    crate::sink::replay_for_fuzzing(data);
}

#[cfg(test)]
#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[cfg(test)]
mod tests {
    use super::seeds::check;
    use super::*;
    use crate::wire::{AbortCode, AuthKind, Meta};

    /// What the fuzzer begins with (`fuzz/seeds`): each is a message that is understood.
    #[test]
    fn the_fuzzers_seeds_are_there() {
        let controls = [
            Control::BlockSize(1 << 20),
            Control::Channels(4),
            Control::DataSetComplete(7),
            Control::Abort(AbortCode::Busy, "later".into()),
            Control::Verdict { batch: 3, answers: Vec::new() },
        ];
        let hellos =
            [Hello::Control { auth: AuthKind::Keys, token: [3; 16] }, Hello::Data { token: [4; 16], channel: 2 }];
        let controls = controls.iter().map(|c| [&[0][..], &c.encode(5)].concat());
        let seeds: Vec<Vec<u8>> = controls.chain(hellos.iter().map(|h| [&[1][..], &h.encode()].concat())).collect();
        for (number, seed) in seeds.iter().enumerate() {
            match seed[0] {
                0 => assert!(Control::decode(&seed[1..]).is_ok(), "{number}"),
                _ => assert!(Hello::decode(&seed[1..]).is_ok(), "{number}"),
            }
            messages(seed);
            check("rftp_messages", number, seed);
        }
        let records = [
            (Record::Dir { path: b"d".to_vec(), meta: Meta::default() }, &b""[..]),
            (Record::File { path: b"d/f".to_vec(), meta: Meta::default() }, b"content"),
            (Record::Symlink { path: b"d/l".to_vec(), target: b"f".to_vec(), meta: Meta::default() }, b""),
        ];
        let mut all = Vec::new();
        for (record, content) in records {
            let encoded = record.encode();
            all.extend_from_slice(&Record::prefix(encoded.len(), content.len()));
            all.extend_from_slice(&encoded);
            all.extend_from_slice(content);
        }
        pack(&all);
        check("rftp_pack", 0, &all);
        // Records of every kind over few keys.
        let records: Vec<u8> =
            (0..40_u8).flat_map(|kind| [kind, 0, 0, 0, kind / 8].into_iter().chain([kind; 50])).collect();
        journal(&records);
        check("rftp_journal", 0, &records);
    }
}
