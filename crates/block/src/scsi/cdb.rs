//! Commands that name blocks, decoded (SBC-3 clause 5).

use super::{Sense, be16, be32, be64};

/// What a command does with the blocks it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Read,
    Write,
    /// Writes, then compares what is on the medium.
    WriteVerify,
    /// Reads and, if there is data, compares.
    Verify,
    WriteSame,
    CompareAndWrite,
    OrWrite,
    Prefetch,
    SynchronizeCache,
}

/// A command that names blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockCommand {
    pub verb: Verb,
    pub lba: u64,
    pub blocks: u64,
    /// The data is on stable storage when the command is done.
    pub fua: bool,
    /// BYTCHK of the verifying commands.
    pub byte_check: u8,
    /// WRITE SAME: the blocks may be unmapped.
    pub unmap: bool,
    /// WRITE SAME: there is no data; zeroes are meant.
    pub no_data: bool,
}

/// Decodes the commands that name blocks; `None` for others.
pub(super) fn decode(cdb: &[u8]) -> Option<Result<BlockCommand, Sense>> {
    let (verb, len) = match cdb[0] {
        0x08 => (Verb::Read, 6),
        0x28 => (Verb::Read, 10),
        0xa8 => (Verb::Read, 12),
        0x88 => (Verb::Read, 16),
        0x0a => (Verb::Write, 6),
        0x2a => (Verb::Write, 10),
        0xaa => (Verb::Write, 12),
        0x8a => (Verb::Write, 16),
        0x2e => (Verb::WriteVerify, 10),
        0xae => (Verb::WriteVerify, 12),
        0x8e => (Verb::WriteVerify, 16),
        0x2f => (Verb::Verify, 10),
        0xaf => (Verb::Verify, 12),
        0x8f => (Verb::Verify, 16),
        0x41 => (Verb::WriteSame, 10),
        0x93 => (Verb::WriteSame, 16),
        0x89 => (Verb::CompareAndWrite, 16),
        0x8b => (Verb::OrWrite, 16),
        0x34 => (Verb::Prefetch, 10),
        0x90 => (Verb::Prefetch, 16),
        0x35 => (Verb::SynchronizeCache, 10),
        0x91 => (Verb::SynchronizeCache, 16),
        _ => return None,
    };
    Some(fields(verb, len, cdb))
}

fn fields(verb: Verb, len: usize, cdb: &[u8]) -> Result<BlockCommand, Sense> {
    let (lba, blocks) = match (len, verb) {
        (6, _) => {
            let lba = be32(cdb, 0) & 0x1f_ffff;
            (lba.into(), if cdb[4] == 0 { 256 } else { cdb[4].into() })
        }
        (10, _) => (be32(cdb, 2).into(), be16(cdb, 7).into()),
        (12, _) => (be32(cdb, 2).into(), be32(cdb, 6).into()),
        (_, Verb::CompareAndWrite) => (be64(cdb, 2), cdb[13].into()),
        _ => (be64(cdb, 2), u64::from(be32(cdb, 10))),
    };
    let flags = if len == 6 { 0 } else { cdb[1] };
    let mut command = BlockCommand {
        verb,
        lba,
        blocks,
        fua: flags & 0x08 != 0,
        byte_check: flags >> 1 & 3,
        unmap: false,
        no_data: false,
    };
    // The medium has no protection information.
    let protect = flags >> 5;
    let protected = !matches!(verb, Verb::Prefetch | Verb::SynchronizeCache) && len > 6;
    if protected && protect != 0 {
        return Err(Sense::invalid_field(1));
    }
    match verb {
        Verb::WriteSame => {
            command.fua = false;
            command.unmap = flags & 0x08 != 0;
            command.no_data = len == 16 && flags & 0x01 != 0;
            // ANCHOR is not offered, nor are the obsolete PBDATA and LBDATA.
            if flags & 0x10 != 0 || flags & 0x06 != 0 {
                return Err(Sense::invalid_field(1));
            }
        }
        Verb::Verify | Verb::WriteVerify if command.byte_check == 2 => return Err(Sense::invalid_field(1)),
        Verb::WriteVerify if command.byte_check == 3 => return Err(Sense::invalid_field(1)),
        _ => {}
    }
    Ok(command)
}

/// Whether a command is one of those that may take long and change nothing: READ, VERIFY, PRE-FETCH.
pub fn only_reads(cdb: &[u8; 16]) -> bool {
    matches!(cdb[0], 0x08 | 0x28 | 0x88 | 0xa8 | 0x2f | 0x8f | 0xaf | 0x34 | 0x90)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_of_read_is_read_alike() {
        let cdbs: [&[u8]; 4] = [
            &[0x08, 0x01, 0x02, 0x03, 9, 0],
            &[0x28, 0x08, 0, 1, 2, 3, 0, 0, 9, 0],
            &[0xa8, 0x08, 0, 1, 2, 3, 0, 0, 0, 9, 0, 0],
            &[0x88, 0x08, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 9, 0, 0],
        ];
        for cdb in cdbs {
            let mut padded = [0; 16];
            padded[..cdb.len()].copy_from_slice(cdb);
            let command = decode(&padded).unwrap().unwrap();
            assert_eq!((command.verb, command.lba, command.blocks), (Verb::Read, 0x01_0203, 9), "{cdb:x?}");
            assert_eq!(command.fua, cdb[0] != 0x08);
        }
        assert_eq!(decode(&[0x08, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap().unwrap().blocks, 256);
    }

    #[test]
    fn only_reads_are_taken_for_such() {
        for operation in 0..=255 {
            let mut cdb = [0; 16];
            cdb[0] = operation;
            let verb = decode(&cdb).and_then(Result::ok).map(|command| command.verb);
            let reads = matches!(verb, Some(Verb::Read | Verb::Verify | Verb::Prefetch));
            assert_eq!(only_reads(&cdb), reads, "{operation:#x}");
        }
    }

    #[test]
    fn protection_information_is_refused() {
        let mut cdb = [0; 16];
        (cdb[0], cdb[1]) = (0x28, 0x20);
        assert_eq!(decode(&cdb).unwrap(), Err(Sense::invalid_field(1)));
    }
}
