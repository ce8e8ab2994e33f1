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
