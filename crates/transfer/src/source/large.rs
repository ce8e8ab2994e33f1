//! Large files on their way: read, digested, sealed, piece by piece; and how each one ended.

use super::SessionEvent;
use super::walk::unreadable;
use crate::protocol::extents::subtract_extents;
use crate::session::{EventSender, FirstFailure, Pipeline, SessionParams};
use crate::wire::{BlockHeader, BlockKind, FileStatus, HEADER_LEN, Report, ReportKind};
use rustix::fs::Stat;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use thruway_engine::digest::{Algorithm, DIGEST_LEN};
use thruway_engine::quota::Unit;
use thruway_engine::{Block, OpenFile};
use thruway_fs::sparse;

/// A large file on its way.
pub(crate) struct LargeFile {
    pub(super) file: Arc<OpenFile>,
    pub(super) number: u64,
    /// Sequence number of the block that the file begins in.
    pub(super) begun_in: u32,
    pub(super) stat: Stat,
    pub(super) path: Vec<u8>,
    pub(super) endless: bool,
    pub(super) failure: FirstFailure,
    /// What has been read of it, to be read again if it has grown.
    pub(super) sent: Sent,
    /// Reads in progress, and one for the walker until it has issued them all.
    pub(super) open: AtomicU32,
    pub(super) blocks: AtomicU32,
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) events: EventSender<SessionEvent>,
    pub(super) open_files: Arc<OpenFiles>,
    /// Unit of the quota of open files.
    pub(super) _share: Option<Unit>,
}

/// What happens to a block between its loading and its sending.
pub(super) struct Finish {
    pipeline: Arc<Pipeline>,
    params: SessionParams,
    events: EventSender<SessionEvent>,
    /// Not to be sent before the block with this sequence number.
    after: Option<u32>,
}

impl Finish {
    pub(super) fn new(
        pipeline: &Arc<Pipeline>,
        params: &SessionParams,
        events: &EventSender<SessionEvent>,
        after: Option<u32>,
    ) -> Finish {
        Finish { pipeline: Arc::clone(pipeline), params: params.clone(), events: events.clone(), after }
    }

    /// Sends a loaded block on its way; `large` is the file that it is a piece of.
    pub(super) fn load(self, block: Block, mut header: BlockHeader, large: Option<Arc<LargeFile>>) {
        let pipeline = Arc::clone(&self.pipeline);
        if self.params.verify == Algorithm::None {
            self.seal(block, header);
            if let Some(large) = large {
                large.close();
            }
            return;
        }
        pipeline.submit(pipeline.integrity, move || {
            let verify = self.params.verify;
            let digest = verify.digest(&block.payload()[..header.len as usize]);
            header.digest = header.bind(verify, digest);
            self.seal(block, header);
            if let Some(large) = large {
                large.sent.note(header.offset, header.len, digest);
                large.close();
            }
        });
    }

    /// Digests a piece where it is and leaves it there; the block is a token that bounds how many
    /// are in progress.
    pub(super) fn load_from_file(self, block: Block, mut header: BlockHeader, large: Arc<LargeFile>) {
        let pipeline = Arc::clone(&self.pipeline);
        pipeline.submit(pipeline.integrity, move || {
            match crate::digest_file(&large.file, self.params.verify, header.offset, header.len) {
                Ok(digest) => {
                    header.digest = header.bind(self.params.verify, digest);
                    large.sent.note(header.offset, header.len, digest);
                }
                Err(e) => {
                    large.failure.set(match e.kind() {
                        io::ErrorKind::UnexpectedEof => "shrank while it was read".into(),
                        _ => unreadable(e),
                    });
                    header.len = 0;
                    header.kind = BlockKind::Void;
                    header.digest = header.bind(self.params.verify, self.params.verify.digest(&[]));
                }
            }
            if header.len == 0 {
                return self.seal_and_close(block, header, &large);
            }
            // Whether it changed is looked at when it has been sent, not before.
            self.events.send(SessionEvent::Loaded(block, header, self.after, Some(large)));
        });
    }

    fn seal_and_close(self, block: Block, header: BlockHeader, large: &Arc<LargeFile>) {
        self.seal(block, header);
        large.close();
    }

    fn seal(self, mut block: Block, mut header: BlockHeader) {
        let Some(sealer) = self.params.sealer.clone() else {
            header.encode(block.with_header_mut(HEADER_LEN).0);
            return self.events.send(SessionEvent::Loaded(block, header, self.after, None));
        };
        let pipeline = Arc::clone(&self.pipeline);
        pipeline.submit(pipeline.security, move || {
            header.encode(block.with_header_mut(HEADER_LEN).0);
            let len = header.len as usize;
            // Digest and payload are neighbours and are sealed as one.
            let sealed = block.joined_mut(DIGEST_LEN, len);
            header.tag = sealer.seal(header.sequence.into(), &header.fixed(), sealed);
            let (head, _) = block.with_header_mut(HEADER_LEN);
            head[32..48].copy_from_slice(&header.tag);
            self.events.send(SessionEvent::Loaded(block, header, self.after, None));
        });
    }
}

/// Large files that are read at once: descriptors are few.
fn open_files_max() -> u32 {
    (thruway_engine::limits::open_files() / 8).clamp(2, 256) as u32
}

/// Counts the large files that are being read.
#[derive(Default)]
pub(super) struct OpenFiles {
    count: Mutex<u32>,
    none: Condvar,
}

impl OpenFiles {
    fn lock(&self) -> MutexGuard<'_, u32> {
        self.count.lock().expect("no panics under the lock")
    }

    /// Waits until another file may be opened; false after `limit`.
    pub(super) fn enter(&self, limit: Duration) -> bool {
        let most = open_files_max();
        let waited = self.none.wait_timeout_while(self.lock(), limit, |count| *count >= most);
        let (mut count, _) = waited.expect("no panics under the lock");
        if *count >= most {
            return false;
        }
        *count += 1;
        true
    }

    pub(super) fn closed(&self) {
        let mut count = self.lock();
        *count -= 1;
        self.none.notify_all();
    }

    /// Waits until there are none; false after `limit`.
    pub(super) fn all_closed(&self, limit: Duration) -> bool {
        let waited = self.none.wait_timeout_while(self.lock(), limit, |count| *count > 0);
        *waited.expect("no panics under the lock").0 == 0
    }
}

/// The pieces of a file that have been read, with their digests.
pub(super) struct Sent {
    verify: Algorithm,
    /// The session is over; the result is not needed any more.
    cancel: Arc<AtomicBool>,
    /// `None`: not everything that the sink has of the file is known here.
    pieces: Mutex<Option<Vec<Piece>>>,
}

struct Piece {
    offset: u64,
    len: u32,
    digest: [u8; DIGEST_LEN],
}

/// Pieces of one file that are remembered: 32 MiB, and a file of a terabyte in pieces of 1 MiB.
const PIECES_MAX: usize = 1 << 20;

impl Sent {
    /// Of a file of which the sink has something already, or that has no version, too much is unknown.
    pub(super) fn new(verify: Algorithm, all: bool, cancel: Arc<AtomicBool>) -> Sent {
        Sent { verify, cancel, pieces: Mutex::new((all && verify != Algorithm::None).then(Vec::new)) }
    }

    fn note(&self, offset: u64, len: u32, digest: [u8; DIGEST_LEN]) {
        let mut pieces = self.pieces.lock().expect("no panics under the lock");
        if pieces.as_ref().is_some_and(|pieces| pieces.len() >= PIECES_MAX) {
            *pieces = None;
        }
        if let Some(pieces) = &mut *pieces {
            pieces.push(Piece { offset, len, digest });
        }
    }

    /// Whether the first `size` bytes of the file are still what was read of them, holes included.
    fn still_holds(&self, file: &File, size: u64) -> io::Result<bool> {
        let Some(mut pieces) = self.pieces.lock().expect("no panics under the lock").take() else { return Ok(false) };
        pieces.sort_unstable_by_key(|piece| piece.offset);
        let read: Vec<(u64, u64)> = pieces.iter().map(|piece| (piece.offset, u64::from(piece.len))).collect();
        for (from, to) in missing_extents(file, size, false, &read)? {
            // What was a hole may only have become zeroes.
            if !is_zero(file, from, to)? {
                return Ok(false);
            }
        }
        for Piece { offset, len, digest } in pieces {
            if self.cancel.load(Ordering::Relaxed) {
                return Ok(false);
            }
            if crate::digest_file(file, self.verify, offset, len)? != digest {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn is_zero(file: &File, from: u64, to: u64) -> io::Result<bool> {
    use std::os::unix::fs::FileExt;
    let mut buffer = vec![0; 64 << 10];
    let mut at = from;
    while at < to {
        let len = ((to - at) as usize).min(buffer.len());
        file.read_exact_at(&mut buffer[..len], at)?;
        if buffer[..len].iter().any(|b| *b != 0) {
            return Ok(false);
        }
        at += len as u64;
    }
    Ok(true)
}

impl LargeFile {
    /// One user less; the last one tells how the file ended.
    pub(super) fn close(self: &Arc<LargeFile>) {
        if self.open.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        if self.endless {
            return self.end(false);
        }
        match rustix::fs::fstat(&self.file) {
            Ok(after) if same_version(&self.stat, &after) => {}
            Ok(after) if has_grown(&self.stat, &after) => {
                // Whether it only grew is known when it has been read once more, which takes its time.
                let file = Arc::clone(self);
                return self.pipeline.submit(self.pipeline.files, move || file.end_grown());
            }
            Ok(_) => self.failure.set("changed during the copy"),
            Err(e) => self.failure.set(unreadable(e)),
        }
        self.end(false);
    }

    fn end_grown(&self) {
        // No read of the storage stage is in progress any more; what is read now need not be aligned.
        self.file.set_direct(false);
        match self.sent.still_holds(&self.file, self.stat.st_size as u64) {
            Ok(true) => {}
            Ok(false) if self.sent.verify == Algorithm::None => {
                self.failure.set("grew during the copy; use --verify to detect whether earlier data changed");
            }
            Ok(false) => self.failure.set("changed during the copy"),
            Err(e) => self.failure.set(unreadable(format_args!("again, after it grew: {e}"))),
        }
        self.end(true);
    }

    fn end(&self, grown: bool) {
        let status = match self.failure.get() {
            None if grown => {
                self.tell(ReportKind::Incomplete, grew(self.stat.st_size as u64));
                FileStatus::Grown
            }
            None => FileStatus::Unchanged,
            Some(message) => {
                self.tell(ReportKind::NotCopied, message.clone());
                FileStatus::Failed(message)
            }
        };
        let blocks = self.blocks.load(Ordering::SeqCst);
        self.events.send(SessionEvent::FileEnd { file: self.number, blocks, status });
        self.open_files.closed();
    }

    fn tell(&self, kind: ReportKind, message: String) {
        self.events.send(SessionEvent::Report(Report { path: self.path.clone(), kind, message }));
    }
}

/// Whether a file is as it was. The change time tells what a modification time that was put back hides.
pub(super) fn same_version(a: &Stat, b: &Stat) -> bool {
    let of = |s: &Stat| (s.st_size, s.st_mtime, s.st_mtime_nsec, s.st_ctime, s.st_ctime_nsec, s.st_ino, s.st_dev);
    of(a) == of(b)
}

/// Whether a file has become longer, as a log does: what it was before is copied, and that is told.
pub(super) fn has_grown(before: &Stat, after: &Stat) -> bool {
    (before.st_ino, before.st_dev) == (after.st_ino, after.st_dev) && after.st_size > before.st_size
}

/// What is said of a file that has grown.
pub(super) fn grew(len: u64) -> String {
    format!("grew during the copy: only its first {len} bytes were copied")
}

/// The parts of a file that hold data and are not among `have`: holes are left out unless the
/// file is `dense`.
///
/// # Errors
/// If the file cannot be asked: "no data behind here" is told apart from every other answer.
pub(super) fn missing_extents(file: &File, size: u64, dense: bool, have: &[(u64, u64)]) -> io::Result<Vec<(u64, u64)>> {
    let mut data = Vec::new();
    if dense && size > 0 {
        data.push((0, size));
    }
    let mut at = if dense { size } else { 0 };
    while let Some(range) = sparse::next_data(file, at, size)? {
        data.push((range.start, range.end));
        at = range.end;
    }
    Ok(subtract_extents(data, have))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_left_out() {
        use std::os::unix::fs::FileExt;
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"x", 0).unwrap();
        file.write_all_at(b"y", 10 << 20).unwrap();
        let size = (10 << 20) + 1;
        let extents = missing_extents(&file, size, false, &[]).unwrap();
        assert!(extents.iter().map(|(a, b)| b - a).sum::<u64>() < 1 << 20, "{extents:?}");
        assert_eq!(extents.last().unwrap().1, size);
        assert_eq!(missing_extents(&file, size, true, &[]).unwrap(), vec![(0, size)]);
    }
}
