//! Sends what the walker found: small files packed into blocks, large ones piece by piece.
//!
//! Small files are read straight into the block they travel in; large ones are read by the storage stage, holes
//! left out.

use super::large::{Finish, LargeFile, Sent, grew, has_grown, missing_extents, same_version};
use super::walk::{
    CANCEL_POLL_INTERVAL, CHANGED_TYPE, Cancelled, Candidate, From, REPLACED, Walk, Walker, meta_of, unreadable,
};
use crate::protocol::extents::split_extent;
use crate::session::{FirstFailure, Progress};
use crate::wire::{BlockHeader, BlockKind, Direct, Meta, RECORD_PREFIX_LEN, Record, ReportKind};
use rustix::fs::{FileType, Stat};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use thruway_engine::io::Request;
use thruway_engine::{Block, OpenFile, Segment, page_cache};

/// Auto direct I/O begins here, for files of which less than half is cached.
const DIRECT_FROM: u64 = 64 << 20;
const ALIGN: u64 = 4096;
/// Holes of files below this size are not worth a block of their own.
const HOLE_MIN: u64 = 16 << 10;

/// Bytes of access control lists for which each block has room, beside a path and a small file.
const LISTS_MAX: usize = 4 << 10;

/// The type in a mode.
const S_IFMT: u32 = 0o170_000;

/// Records and small files that travel together.
pub(super) struct Pack {
    block: Block,
    used: usize,
    /// Bytes of files in it.
    content: u64,
}

/// Bytes of files in packs that are not sent yet, by sequence number.
#[derive(Default)]
pub(super) struct PackContents(Mutex<HashMap<u32, u64>>);

impl PackContents {
    fn insert(&self, sequence: u32, content: u64) {
        self.0.lock().expect("no panics under the lock").insert(sequence, content);
    }

    /// Removes and returns the number of a block; 0 for a block of another kind.
    pub(super) fn take(&self, sequence: u32) -> u64 {
        self.0.lock().expect("no panics under the lock").remove(&sequence).unwrap_or(0)
    }
}

impl Walker {
    pub(super) fn send_file(&mut self, candidate: Candidate, have: &[(u64, u64)]) -> Walk {
        let size = candidate.stat.st_size as u64;
        Progress::add(&self.progress.files, 1);
        if self.params.options.dry_run {
            let data = data_len(&candidate.from, &candidate.stat).unwrap_or(size);
            let meta = Meta { data, ..meta_of(&candidate.stat) };
            return self.append(&Record::File { path: candidate.path, meta });
        }
        if size > self.pack_max || !have.is_empty() {
            self.send_large(candidate, have)
        } else {
            self.send_small(&candidate)
        }
    }

    /// Opens a file; `None` if that failed, or if it is no file any more, which has been told.
    fn open(&mut self, c: &Candidate) -> Option<(File, Stat)> {
        match c.from.open() {
            Ok((_, stat)) if self.forget_replaced(&c.stat, &stat) => self.report(&c.path, REPLACED),
            Ok((file, stat)) if stat.st_mode & S_IFMT == c.stat.st_mode & S_IFMT => return Some((file, stat)),
            Ok(_) => self.report(&c.path, CHANGED_TYPE),
            Err(e) => self.report(&c.path, unreadable(e)),
        }
        None
    }

    /// Encodes a record that travels with so many bytes of content. Attributes that no block has room for stay behind.
    fn encode(&self, record: &mut Record, content: usize) -> Vec<u8> {
        let encoded = record.encode();
        if RECORD_PREFIX_LEN + encoded.len() + content <= self.params.block_len as usize {
            return encoded;
        }
        if let Record::File { path, meta }
        | Record::Dir { path, meta }
        | Record::Begin { path, meta, .. }
        | Record::Symlink { path, meta, .. }
        | Record::Special { path, meta, .. }
        | Record::Attributes { path, meta } = record
        {
            // An access control list is mostly short.
            meta.drop_other_xattrs();
            let lists = meta.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
            if lists > LISTS_MAX {
                meta.mode = meta.mode_without_list();
                meta.xattrs.clear();
            }
            let why = format!(
                "its extended attributes take {} bytes, more than a block has room for, and are not kept; \
                 a larger --block-size helps",
                encoded.len()
            );
            self.tell(path, ReportKind::Incomplete, why);
        }
        record.encode()
    }

    fn send_small(&mut self, c: &Candidate) -> Walk {
        let Some((file, stat)) = self.open(c) else { return Ok(()) };
        let size = stat.st_size as u64;
        if size > self.pack_max || has_holes(&file, &stat) {
            // It grew since it was listed, or has holes, which stay holes only in large files.
            let grown = Candidate::new(c.from.clone(), c.path.clone(), stat);
            return self.send_large(grown, &[]);
        }
        let meta = self.meta_of_open(&file, &c.path, &stat);
        let size = size as usize;
        let mut record = Record::File { path: c.path.clone(), meta };
        // Room for one more than there should be: files of /proc, and of some file systems in user space, have more than they
        // say.
        let record = self.encode(&mut record, size + 1);
        let room = self.room(RECORD_PREFIX_LEN + record.len() + size + 1)?;
        let content = RECORD_PREFIX_LEN + record.len();
        room[..RECORD_PREFIX_LEN].copy_from_slice(&Record::prefix(record.len(), size));
        room[RECORD_PREFIX_LEN..content].copy_from_slice(&record);
        let read = read_full(&file, &mut room[content..content + size + 1], size);
        let after = rustix::fs::fstat(&file);
        // One that has grown may have been written to at its beginning, too.
        let only_grown = |after: &Stat, room: &[u8]| {
            has_grown(&stat, after) && is_still(&file, &room[content..content + size]).unwrap_or(false)
        };
        match (read, after) {
            (Ok(n), Ok(after))
                if (n == size && same_version(&stat, &after)) || (n >= size && only_grown(&after, room)) =>
            {
                let pack = self.pack.as_mut().expect("room made it");
                pack.used += content + size;
                pack.content += size as u64;
                Progress::add(&self.progress.total_bytes, size as u64);
                if !same_version(&stat, &after) {
                    self.tell(&c.path, ReportKind::Incomplete, grew(size as u64));
                }
            }
            (Err(e), _) => self.report(&c.path, unreadable(e)),
            (_, Err(e)) => self.report(&c.path, unreadable(e)),
            (Ok(n), Ok(after)) if n > size && same_version(&stat, &after) => {
                self.report(&c.path, format!("has more in it than the {size} bytes that its file system says"));
            }
            _ => self.report(&c.path, "changed during the copy"),
        }
        Ok(())
    }

    pub(super) fn send_large(&mut self, c: Candidate, have: &[(u64, u64)]) -> Walk {
        let Some((file, mut stat)) = self.open(&c) else { return Ok(()) };
        let endless = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
        if endless {
            stat.st_size = self.params.options.length.unwrap_or(0) as i64;
            stat.st_mode = 0o100_644;
        } else if !same_version(&c.stat, &stat) && !have.is_empty() {
            // What the sink has is of another version.
            return self.send_large(Candidate { stat, ..c }, &[]);
        }
        let size = stat.st_size as u64;
        let file = OpenFile::new(file);
        let direct = !endless && !self.from_files && self.wants_direct(&file, size) && file.set_direct(true);
        let meta = if endless { meta_of(&stat) } else { self.meta_of_open(&file, &c.path, &stat) };
        let number = self.next_file;
        self.next_file += 1;
        while !self.open_files.enter(CANCEL_POLL_INTERVAL) {
            self.flush();
            self.check_cancel()?;
        }
        let share = loop {
            match self.params.open_file(CANCEL_POLL_INTERVAL) {
                Ok(share) => break share,
                Err(_) => self.flush(),
            }
            self.check_cancel()?;
        };
        self.append(&Record::Begin { file: number, path: c.path.clone(), meta, resume: !have.is_empty() })?;
        self.flush();
        let begun_in = self.next_sequence - 1;
        let large = Arc::new(LargeFile {
            file: Arc::new(file),
            number,
            begun_in,
            stat,
            path: c.path,
            endless,
            failure: FirstFailure::default(),
            sent: Sent::new(self.params.verify, have.is_empty() && !endless, Arc::clone(&self.cancel)),
            open: AtomicU32::new(1),
            blocks: AtomicU32::new(0),
            pipeline: Arc::clone(&self.pipeline),
            events: self.events.clone(),
            open_files: Arc::clone(&self.open_files),
            _share: share,
        });
        let missing = missing_extents(&large.file, size, endless || stat.st_blocks as u64 * 512 >= size, have);
        let result = match missing {
            Ok(missing) => missing.into_iter().try_for_each(|(from, to)| self.read_extent(&large, from, to, direct)),
            Err(e) => {
                large.failure.set(unreadable(format_args!("looking for holes: {e}")));
                Ok(())
            }
        };
        large.close();
        result
    }

    fn wants_direct(&self, file: &File, size: u64) -> bool {
        match self.params.options.direct {
            Direct::Off => false,
            Direct::On => true,
            // Where the kernel cannot say how much is cached, the page cache is the safe choice.
            Direct::Auto => {
                size >= DIRECT_FROM && page_cache::cached(file, 0, size).is_some_and(|cached| cached * 2 < size)
            }
        }
    }

    fn read_extent(&mut self, large: &Arc<LargeFile>, from: u64, to: u64, direct: bool) -> Walk {
        Progress::add(&self.progress.total_bytes, to - from);
        let payload_size = Arc::clone(&self.payload_size);
        for (at, len) in split_extent((from, to), self.params.block_len, || payload_size.get(), self.params.long_path) {
            let aligned = if direct && at.is_multiple_of(ALIGN) { len.next_multiple_of(ALIGN as u32) } else { len };
            let block = self.take_block()?;
            let sequence = self.sequence()?;
            large.open.fetch_add(1, Ordering::SeqCst);
            large.blocks.fetch_add(1, Ordering::SeqCst);
            let header = self.header(sequence, BlockKind::Data, large.number, at, len);
            let finish = Finish::new(&self.pipeline, &self.params, &self.events, Some(large.begun_in));
            let large = Arc::clone(large);
            let file = Arc::clone(&large.file);
            if self.from_files && !large.endless {
                finish.load_from_file(block, header, large);
                continue;
            }
            let request = Request::read(file, at, Segment::new(block, aligned as usize));
            self.pipeline.storage.submit(request, move |outcome| {
                let mut header = header;
                match &outcome.result {
                    Ok(n) if *n >= len as usize => {}
                    Ok(n) => {
                        large.failure.set("shrank while it was read");
                        header.len = *n as u32;
                    }
                    Err(e) => {
                        large.failure.set(unreadable(e));
                        header.len = 0;
                    }
                }
                if header.len == 0 {
                    header.kind = BlockKind::Void;
                }
                finish.load(outcome.into_block(), header, Some(large));
            });
        }
        Ok(())
    }

    fn header(&self, sequence: u32, kind: BlockKind, file: u64, offset: u64, len: u32) -> BlockHeader {
        BlockHeader {
            session: self.params.session,
            sequence,
            offset,
            len,
            kind,
            sealed: self.params.sealer.is_some(),
            file,
            tag: [0; 16],
            digest: [0; 16],
        }
    }

    fn sequence(&mut self) -> Walk<u32> {
        let sequence = self.next_sequence;
        self.next_sequence = sequence.checked_add(1).ok_or(Cancelled)?;
        Ok(sequence)
    }

    /// A free block; while there is none, the sink's pace is ours.
    fn take_block(&self) -> Walk<Block> {
        while !self.ahead.enter(CANCEL_POLL_INTERVAL) {
            self.check_cancel()?;
        }
        loop {
            self.check_cancel()?;
            if let Some(block) = self.pipeline.pool.take(CANCEL_POLL_INTERVAL) {
                return Ok(block);
            }
        }
    }

    /// At least `len` bytes of the current pack, or of a new one.
    fn room(&mut self, len: usize) -> Walk<&mut [u8]> {
        let capacity = self.params.block_len as usize;
        debug_assert!(len <= capacity);
        let most = self.payload_size.get() as usize;
        if self.pack.as_ref().is_some_and(|p| p.used > 0 && p.used + len > most) {
            self.flush();
        }
        if self.pack.is_none() {
            self.pack = Some(Pack { block: self.take_block()?, used: 0, content: 0 });
        }
        let pack = self.pack.as_mut().expect("just made");
        Ok(&mut pack.block.payload_mut()[pack.used..capacity])
    }

    pub(super) fn append(&mut self, record: &Record) -> Walk {
        let encoded = self.encode(&mut record.clone(), 0);
        let len = RECORD_PREFIX_LEN + encoded.len();
        let room = self.room(len)?;
        room[..RECORD_PREFIX_LEN].copy_from_slice(&Record::prefix(encoded.len(), 0));
        room[RECORD_PREFIX_LEN..len].copy_from_slice(&encoded);
        self.pack.as_mut().expect("room made it").used += len;
        Ok(())
    }

    /// Sends the current pack on its way.
    pub(super) fn flush(&mut self) {
        let Some(Pack { block, used, content }) = self.pack.take() else { return };
        if used == 0 {
            return;
        }
        let Ok(sequence) = self.sequence() else { return };
        self.pack_contents.insert(sequence, content);
        let header = self.header(sequence, BlockKind::Pack, 0, 0, used as u32);
        Finish::new(&self.pipeline, &self.params, &self.events, None).load(block, header, None);
    }
}

/// Bytes of a file that a copy sends: all but holes. `None` if it cannot be read.
fn data_len(from: &From, stat: &Stat) -> Option<u64> {
    let size = stat.st_size as u64;
    // Others have no holes, or too small ones; they need not be opened.
    if size < HOLE_MIN || stat.st_blocks as u64 * 512 >= size {
        return Some(size);
    }
    let (file, _) = from.open().ok()?;
    let extents = missing_extents(&file, size, false, &[]).ok()?;
    Some(extents.iter().map(|(start, end)| end - start).sum())
}

/// Whether a file has holes that are worth keeping. Fewer blocks than bytes may also mean compression.
fn has_holes(file: &File, stat: &Stat) -> bool {
    let size = stat.st_size as u64;
    size >= HOLE_MIN
        && stat.st_blocks as u64 * 512 < size
        && rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(0)).is_ok_and(|hole| hole < size)
        && rustix::fs::seek(file, rustix::fs::SeekFrom::Start(0)).is_ok()
}

/// Whether a file still begins with this.
fn is_still(file: &File, content: &[u8]) -> io::Result<bool> {
    use std::os::unix::fs::FileExt;
    let mut now = vec![0; content.len()];
    file.read_exact_at(&mut now, 0)?;
    Ok(now == content)
}

/// Reads as much as there is room for, or as the file has, of which `enough` may well be all.
fn read_full(file: &File, mut buffer: &mut [u8], enough: usize) -> io::Result<usize> {
    use std::io::Read;
    let mut file = file;
    let mut total = 0;
    while !buffer.is_empty() {
        match file.read(buffer) {
            Ok(0) => break,
            Ok(n) => {
                total += n;
                buffer = &mut buffer[n..];
                if total == enough {
                    break;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(total)
}
