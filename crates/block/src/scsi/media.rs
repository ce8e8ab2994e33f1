//! Commands that move, compare or unmap blocks (SBC-3 clause 5).

use super::cdb::{BlockCommand, Verb};
use super::inquiry::{COMPARE_MAX, TRANSFER_MAX, UNMAP_MAX, UNMAP_RANGES_MAX, WRITE_SAME_MAX};
use super::{Outcome, Sense, Transfer, Unit, be16, be32, be64};
use crate::backend::{Backend, Zero};
use crate::chunk_ranges::chunk_ranges;
use crate::served::Change;
use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use smallvec::SmallVec;
use std::io;
use thruway_engine::Segment;
use thruway_server::buffers::SMALL;
use thruway_server::{Body, slices};

/// The longest parameter list.
const PARAMETERS_MAX: usize = 64 << 10;

pub(super) async fn execute(unit: &Unit, command: BlockCommand, transfer: &dyn Transfer) -> Outcome {
    let result = match check(unit, &command) {
        Ok(()) => run(unit, &command, transfer).await,
        Err(sense) => Err(sense),
    };
    result.unwrap_or_else(Outcome::from)
}

fn check(unit: &Unit, command: &BlockCommand) -> Result<(), Sense> {
    let changes = !matches!(command.verb, Verb::Read | Verb::Verify | Verb::Prefetch | Verb::SynchronizeCache);
    if changes && unit.read_only() {
        return Err(Sense::WRITE_PROTECTED);
    }
    let inside = |blocks| command.lba.checked_add(command.blocks).is_some_and(|end| end <= blocks);
    if !(inside(unit.blocks_known()) || inside(unit.blocks())) {
        return Err(Sense::OUT_OF_RANGE);
    }
    let moves = matches!(command.verb, Verb::Read | Verb::Write | Verb::WriteVerify | Verb::OrWrite)
        || (command.verb == Verb::Verify && command.byte_check == 1);
    if moves && command.blocks * u64::from(unit.block_len) > TRANSFER_MAX {
        return Err(Sense::invalid_field(10));
    }
    Ok(())
}

async fn run(unit: &Unit, command: &BlockCommand, transfer: &dyn Transfer) -> Result<Outcome, Sense> {
    let block = u64::from(unit.block_len);
    let (at, len) = (command.lba * block, command.blocks * block);
    let backend = &*unit.export.backend;
    match command.verb {
        Verb::Prefetch => {
            backend.prefetch(at, len).await.map_err(read_error)?;
            Ok(Outcome::good())
        }
        Verb::SynchronizeCache => {
            backend.flush().await.map_err(write_error)?;
            Ok(Outcome::good())
        }
        Verb::WriteSame => write_same(unit, command, transfer).await,
        Verb::CompareAndWrite => compare_and_write(unit, command, transfer).await,
        Verb::Read => {
            if len > 0 {
                read(unit, at, len.min(transfer.expected()), transfer).await?;
            }
            Ok(Outcome::moved(len))
        }
        Verb::Verify if command.byte_check == 0 => Ok(Outcome::good()),
        Verb::Verify if command.byte_check == 3 => verify_same(unit, at, len, transfer).await,
        Verb::Verify => {
            let work = |segment, offset| compare(unit, at + offset, offset, segment, transfer);
            each_piece(len, transfer, work).await
        }
        Verb::Write => {
            let single = len.min(transfer.expected()) <= unit.export.chunk.into();
            let durable = command.fua && single;
            let work = async |segment, offset| write(unit, at + offset, segment, durable, transfer).await;
            let outcome = each_piece(len, transfer, work).await?;
            if command.fua && !single {
                backend.flush().await.map_err(write_error)?;
            }
            Ok(outcome)
        }
        Verb::WriteVerify => {
            let work = async |segment: Segment, offset| {
                let back = room(segment.len(), transfer).await?;
                let sent = segment.as_slice().to_vec();
                let begun = alone(unit, at + offset, segment.len() as u64, transfer).await?;
                begun.write(at + offset, segment, true).await.map_err(write_error)?;
                let back = backend.read(at + offset, back).await.map_err(read_error)?;
                same(&sent, back.as_slice(), offset)
            };
            each_piece(len, transfer, work).await
        }
        Verb::OrWrite => {
            let work = async |mut segment: Segment, offset| {
                let old = room(segment.len(), transfer).await?;
                let begun = alone(unit, at + offset, segment.len() as u64, transfer).await?;
                let old = backend.read(at + offset, old).await.map_err(read_error)?;
                segment.as_mut_slice().iter_mut().zip(old.as_slice()).for_each(|(new, old)| *new |= old);
                begun.write(at + offset, segment, command.fua).await.map_err(write_error)
            };
            each_piece(len, transfer, work).await
        }
    }
}

fn read_error(error: io::Error) -> Sense {
    tracing::warn!(%error, "SCSI read failed");
    Sense::READ_ERROR
}

fn write_error(error: io::Error) -> Sense {
    tracing::warn!(%error, "writing for SCSI");
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Sense::NO_SPACE,
        Some(libc::ESHUTDOWN) => Sense::NOT_READY,
        _ => Sense::WRITE_ERROR,
    }
}

/// A range that no other command changes until what is returned is dropped. An initiator that owes us data blocks no other: it is for what is
/// here.
///
/// An initiator that has lost a connection sends what was not answered again by another path. What the lost one had begun is
/// over before anything that overlaps it is begun; what it had not begun must not be begun any more.
async fn alone<'a>(unit: &'a Unit, at: u64, len: u64, transfer: &dyn Transfer) -> Result<Change<'a>, Sense> {
    // First it has its place, and then it is looked whether it should: what comes in between comes behind it.
    let mut begun = unit.export.backend.begin(at, len).map_err(write_error)?;
    if transfer.has_gone() {
        return Err(Sense::DATA_PHASE);
    }
    begun.turn().await.map_err(write_error)?;
    Ok(begun)
}

async fn write(unit: &Unit, at: u64, segment: Segment, durable: bool, transfer: &dyn Transfer) -> Result<(), Sense> {
    let begun = alone(unit, at, segment.len() as u64, transfer).await?;
    begun.write(at, segment, durable).await.map_err(write_error)
}

/// Reads into a block of the transfer's.
async fn load(unit: &Unit, at: u64, len: usize, transfer: &dyn Transfer) -> Result<Segment, Sense> {
    let segment = transfer.buffers().segment(len).await.map_err(read_error)?;
    unit.export.backend.read(at, segment).await.map_err(read_error)
}

/// A block of the transfer's, for a command that will hold others up: taken before it does, because what is being sent
/// to an initiator that does not read may have them all.
async fn room(len: usize, transfer: &dyn Transfer) -> Result<Segment, Sense> {
    Ok(rooms(&[len], transfer).await?.remove(0))
}

/// Several of them at once.
async fn rooms(lens: &[usize], transfer: &dyn Transfer) -> Result<Vec<Segment>, Sense> {
    tokio::select! {
        biased;
        segments = transfer.buffers().segments(lens) => segments.map_err(write_error),
        () = transfer.aborted() => Err(Sense::DATA_PHASE),
    }
}

fn same(a: &[u8], b: &[u8], offset: u64) -> Result<(), Sense> {
    match a.iter().zip(b).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(first) => Err(Sense::MISCOMPARE.about(offset + first as u64)),
    }
}

async fn compare(unit: &Unit, at: u64, offset: u64, sent: Segment, transfer: &dyn Transfer) -> Result<(), Sense> {
    let there = load(unit, at, sent.len(), transfer).await?;
    same(sent.as_slice(), there.as_slice(), offset)
}

/// Sends a range, each piece as soon as the storage has delivered it.
async fn read(unit: &Unit, at: u64, len: u64, transfer: &dyn Transfer) -> Result<(), Sense> {
    let backend = &*unit.export.backend;
    if len > SMALL as u64 {
        backend.hint_sequential(at, len);
    }
    if transfer.can_lend()
        && let Some(lent) = backend.lend(at, len as usize)
    {
        return transfer.send(0, Body::Lent(lent)).await.map_err(|_| Sense::DATA_PHASE);
    }
    let parts = chunk_ranges(at, len, unit.export.chunk).map(|(piece_at, piece)| async move {
        let segment = load(unit, piece_at, piece, transfer).await?;
        let body = Body::Segments(SmallVec::from_iter([segment]));
        transfer.send(piece_at - at, body).await.map_err(|_| Sense::DATA_PHASE)
    });
    futures_util::future::try_join_all(parts).await.map(drop)
}

/// Does something with every piece that the initiator sends of `len` bytes, while more arrive. Fails if it sends less than it
/// said: a command that reads, by the flags around it, brings no data.
async fn each_piece<F>(len: u64, transfer: &dyn Transfer, work: impl Fn(Segment, u64) -> F) -> Result<Outcome, Sense>
where
    F: Future<Output = Result<(), Sense>>,
{
    let mut under_way = FuturesUnordered::new();
    let mut failed = None;
    let (mut more, mut seen) = (len > 0, 0);
    while more || !under_way.is_empty() {
        tokio::select! {
            biased;
            Some(done) = under_way.next(), if !under_way.is_empty() => {
                if let Err(sense) = done {
                    failed.get_or_insert(sense);
                }
            }
            arrived = transfer.receive(), if more => match arrived {
                None => more = false,
                // What has been begun is finished first: it must not reach the disk after the answer.
                Some(Err(_)) => {
                    failed = Some(Sense::DATA_PHASE);
                    more = false;
                }
                Some(Ok((offset, mut segment))) => {
                    // What was sent without being asked for may be more than the command takes.
                    let room = len.saturating_sub(offset).min(segment.len() as u64) as usize;
                    drop(segment.split_off(room));
                    seen += room as u64;
                    if room > 0 {
                        under_way.push(work(segment, offset));
                    }
                }
            },
        }
    }
    match failed {
        None if seen < len.min(transfer.expected()) => Err(Sense::INVALID_FIELD),
        None => Ok(Outcome::moved(len)),
        Some(sense) => Err(sense),
    }
}

/// All that the initiator sends, which is short.
async fn gather(len: usize, transfer: &dyn Transfer) -> Result<Vec<u8>, Sense> {
    let mut data = vec![0; len];
    let mut seen = 0;
    while let Some(arrived) = transfer.receive().await {
        let (offset, segment) = arrived.map_err(|_| Sense::DATA_PHASE)?;
        let start = (offset as usize).min(len);
        let part = segment.len().min(len - start);
        data[start..start + part].copy_from_slice(&segment.as_slice()[..part]);
        seen += part;
    }
    if seen < len { Err(Sense::PARAMETER_LENGTH) } else { Ok(data) }
}

/// Where half of the data would mean something else than all of it, the initiator must mean what it says.
fn exactly(len: u64, transfer: &dyn Transfer) -> Result<(), Sense> {
    if transfer.expected() == len { Ok(()) } else { Err(Sense::INVALID_FIELD) }
}

/// A parameter list of `len` bytes.
pub(super) async fn parameters(transfer: &dyn Transfer, len: usize) -> Result<Vec<u8>, Sense> {
    if len > PARAMETERS_MAX {
        return Err(Sense::PARAMETER_LENGTH);
    }
    if len == 0 {
        return Ok(Vec::new());
    }
    gather(len, transfer).await
}

async fn verify_same(unit: &Unit, at: u64, len: u64, transfer: &dyn Transfer) -> Result<Outcome, Sense> {
    exactly(unit.block_len.into(), transfer)?;
    let block = gather(unit.block_len as usize, transfer).await?;
    for (piece_at, piece) in chunk_ranges(at, len, unit.export.chunk) {
        if transfer.aborted().now_or_never().is_some() {
            return Err(Sense::DATA_PHASE);
        }
        // The initiator sends one block, however many are compared with it.
        slices::spend(piece / slices::UNIT_BYTES).await;
        let there = load(unit, piece_at, piece, transfer).await?;
        for (i, found) in there.as_slice().chunks(block.len()).enumerate() {
            same(&block, found, piece_at - at + (i * block.len()) as u64)?;
        }
    }
    Ok(Outcome::moved(block.len() as u64))
}

async fn write_same(unit: &Unit, command: &BlockCommand, transfer: &dyn Transfer) -> Result<Outcome, Sense> {
    let block_len = u64::from(unit.block_len);
    // No blocks at all means all that follow.
    let rest = unit.blocks().checked_sub(command.lba).ok_or(Sense::OUT_OF_RANGE)?;
    let blocks = if command.blocks == 0 { rest } else { command.blocks };
    if blocks > WRITE_SAME_MAX {
        return Err(Sense::invalid_field(10));
    }
    let moved = if command.no_data { 0 } else { block_len };
    exactly(moved, transfer)?;
    let block = gather(moved as usize, transfer).await?;
    let (at, len) = (command.lba * block_len, blocks * block_len);
    if block.iter().all(|byte| *byte == 0) {
        let how = if command.unmap { Zero::MAY_DISCARD } else { Zero::empty() };
        alone(unit, at, len, transfer).await?.zero(at, len, how).await.map_err(write_error)?;
        return Ok(Outcome::moved(moved));
    }
    for (piece_at, piece) in chunk_ranges(at, len, unit.export.chunk) {
        let mut segment = room(piece, transfer).await?;
        if transfer.aborted().now_or_never().is_some() {
            return Err(Sense::DATA_PHASE);
        }
        slices::spend(piece / slices::UNIT_BYTES).await;
        segment.as_mut_slice().chunks_mut(block.len()).for_each(|part| part.copy_from_slice(&block[..part.len()]));
        write(unit, piece_at, segment, false, transfer).await?;
    }
    Ok(Outcome::moved(moved))
}

async fn compare_and_write(unit: &Unit, command: &BlockCommand, transfer: &dyn Transfer) -> Result<Outcome, Sense> {
    if command.blocks > COMPARE_MAX.into() {
        return Err(Sense::invalid_field(13));
    }
    let len = command.blocks as usize * unit.block_len as usize;
    exactly(2 * len as u64, transfer)?;
    if len == 0 {
        return Ok(Outcome::good());
    }
    let at = command.lba * u64::from(unit.block_len);
    let data = gather(2 * len, transfer).await?;
    let (expected, new) = data.split_at(len);
    let lens: Vec<usize> = chunk_ranges(at, len as u64, unit.export.chunk).map(|(_, piece)| piece).collect();
    let mut rooms = rooms(&[&lens[..], &lens].concat(), transfer).await?.into_iter();
    let begun = alone(unit, at, len as u64, transfer).await?;
    for ((piece_at, piece), room) in chunk_ranges(at, len as u64, unit.export.chunk).zip(rooms.by_ref()) {
        let there = unit.export.backend.read(piece_at, room).await.map_err(read_error)?;
        let offset = (piece_at - at) as usize;
        same(&expected[offset..offset + piece], there.as_slice(), offset as u64)?;
    }
    for ((piece_at, piece), mut segment) in chunk_ranges(at, len as u64, unit.export.chunk).zip(rooms) {
        let offset = (piece_at - at) as usize;
        segment.as_mut_slice().copy_from_slice(&new[offset..offset + piece]);
        begun.write(piece_at, segment, command.fua).await.map_err(write_error)?;
    }
    Ok(Outcome::moved(2 * len as u64))
}

/// UNMAP.
pub(super) async fn unmap(unit: &Unit, cdb: &[u8; 16], transfer: &dyn Transfer) -> Outcome {
    let wanted = usize::from(be16(cdb, 7));
    if cdb[1] & 1 != 0 {
        return Sense::invalid_field(1).into(); // ANCHOR
    }
    if unit.read_only() {
        return Sense::WRITE_PROTECTED.into();
    }
    let list = match parameters(transfer, wanted).await {
        Ok(list) if list.is_empty() => return Outcome::good(),
        Ok(list) => list,
        Err(sense) => return sense.into(),
    };
    let ranges = match unmap_ranges(&list, unit.blocks()) {
        Ok(ranges) => ranges,
        Err(sense) => return sense.into(),
    };
    let block = u64::from(unit.block_len);
    // As the provisioning page says: zeroes, or whatever the device likes. Never by writing.
    let zeroes = unit.export.backend.geometry().discard_zeroes;
    for (lba, blocks) in ranges {
        // No one waits for an aborted command.
        if transfer.aborted().now_or_never().is_some() {
            return Sense::DATA_PHASE.into();
        }
        let (at, len) = (lba * block, blocks * block);
        let begun = match alone(unit, at, len, transfer).await {
            Ok(begun) => begun,
            Err(sense) => return sense.into(),
        };
        let done = match zeroes {
            true => begun.zero(at, len, Zero::MAY_DISCARD | Zero::FAST_ONLY).await,
            false => begun.discard(at, len).await,
        };
        match done {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => return Sense::INVALID_FIELD.into(),
            Err(e) => return write_error(e).into(),
            Ok(()) => {}
        }
    }
    Outcome::moved(list.len() as u64)
}

fn unmap_ranges(list: &[u8], blocks: u64) -> Result<Vec<(u64, u64)>, Sense> {
    if list.len() < 8 {
        return Err(Sense::PARAMETER_LENGTH);
    }
    let len = usize::from(be16(list, 2)).min(list.len() - 8) / 16 * 16;
    let mut ranges = Vec::new();
    let mut total = 0;
    for descriptor in list[8..8 + len].chunks_exact(16) {
        let (lba, count) = (be64(descriptor, 0), u64::from(be32(descriptor, 8)));
        if lba.checked_add(count).is_none_or(|end| end > blocks) {
            return Err(Sense::OUT_OF_RANGE);
        }
        total += count;
        if count > 0 {
            ranges.push((lba, count));
        }
    }
    if ranges.len() > UNMAP_RANGES_MAX as usize || total > UNMAP_MAX.into() {
        return Err(Sense::invalid_parameter(8));
    }
    Ok(ranges)
}

/// GET LBA STATUS.
pub(super) async fn lba_status(unit: &Unit, cdb: &[u8; 16], transfer: &dyn Transfer) -> Outcome {
    const DESCRIPTOR_LEN: usize = 16;
    let (lba, allocated) = (be64(cdb, 2), be32(cdb, 10) as usize);
    let (block, blocks) = (u64::from(unit.block_len), unit.blocks());
    if lba >= blocks {
        return Sense::OUT_OF_RANGE.into();
    }
    // As many as the initiator has room for, and one for a hole that is shorter than a block.
    let most = allocated / DESCRIPTOR_LEN + 1;
    let extents = tokio::select! {
        biased;
        found = unit.export.backend.extents(lba * block, (blocks - lba) * block, most) => match found {
            Ok(extents) => extents,
            Err(e) => return read_error(e).into(),
        },
        () = transfer.aborted() => return Sense::DATA_PHASE.into(),
    };
    let mut list = Vec::new();
    let mut tell = |from: u64, to: u64, hole: bool| {
        if from < to && list.len() < allocated.max(24) {
            list.extend_from_slice(&from.to_be_bytes());
            list.extend_from_slice(&((to - from).min(u32::MAX.into()) as u32).to_be_bytes());
            list.extend_from_slice(&[u8::from(hole), 0, 0, 0]);
        }
    };
    // A block that is not in a hole as a whole is mapped.
    let (mut position, mut told) = (lba * block, lba);
    for extent in extents {
        let end = position + extent.len;
        if extent.hole {
            let (from, to) = (position.div_ceil(block).max(told), end / block);
            if from < to {
                tell(told, from, false);
                tell(from, to, true);
                told = to;
            }
        }
        position = end;
    }
    tell(told, position.div_ceil(block).min(blocks), false);
    let mut data = (list.len() as u32 + 4).to_be_bytes().to_vec();
    data.extend_from_slice(&[0; 4]);
    data.extend(list);
    Outcome::data(data, allocated)
}

#[cfg(test)]
mod tests {
    use super::super::fuzzing::Given;
    use super::super::{Nexus, Status};
    use super::*;
    use crate::export::Spec;
    use std::sync::Arc;

    /// One block of data is compared with a whole disk, or written to all of it.
    #[test]
    fn commands_that_repeat_a_block_are_as_much_work_as_their_range() {
        slices::measured(|| async {
            let export = Spec::parse("disk=mem:32M,chunk=64K").unwrap().open(None).unwrap();
            let unit = Unit::new(Arc::new(export), 512);
            let nexus = Nexus { id: 1, port: "iqn.2026-11.org.example:a,i,0x0".into(), owner: "a".into() };
            let _attached = unit.attach(&nexus);
            // TEST UNIT READY, which gets the unit attention.
            unit.execute(&nexus, &[0; 16], &Given::new(&[], 0)).await;
            // WRITE SAME(16), and VERIFY(16) with BYTCHK 11b, of 65,536 blocks.
            for (code, flags) in [(0x93, 0), (0x8f, 6)] {
                let mut cdb = [0; 16];
                (cdb[0], cdb[1], cdb[11]) = (code, flags, 1);
                let before = slices::counted();
                let outcome = unit.execute(&nexus, &cdb, &Given::new(&[7; 512], 512)).await;
                assert_eq!(outcome.status, Status::Good, "{:?}", outcome.sense);
                assert_eq!(slices::counted() - before, (32 << 20) / slices::UNIT_BYTES as u64);
            }
        });
    }
}
