//! The sink's journal: what of a job is verified and on its way to be durable.
//!
//! Fixed-size records, each with a checksum, appended as blocks are written and files put in
//! place. A killed process loses nothing that was appended; after a power cut only what stands before
//! the last *synced* record is believed, because only that was on stable storage. The journal
//! knows by the kernel's boot number which of the two it was.

use crate::auth::to_hex;
use crate::sink::tree::{JOURNAL_PREFIX, JOURNAL_SUFFIX};
use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags};
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

const RECORD_LEN: usize = 48;
const MAGIC: [u8; 8] = *b"TWJOURN1";

const HEADER: u8 = 0;
const DONE: u8 = 1;
const RANGE: u8 = 2;
const SYNCED: u8 = 3;

/// Names a file within a job.
pub(crate) type Key = [u8; 16];

/// The key of a path.
pub(crate) fn key_of(path: &[u8]) -> Key {
    let mut key = [0; 16];
    key.copy_from_slice(&blake3::hash(path).as_bytes()[..16]);
    key
}

/// Which version of a source file a record speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) size: u64,
    pub(crate) mtime: (i64, u32),
}

impl Version {
    /// 64 bits that tell this version in this very file; 8 octets a file is what a million files
    /// can afford.
    fn fingerprint(&self, identity: Identity) -> u64 {
        let mut octets = [0; 36];
        octets[..8].copy_from_slice(&self.size.to_le_bytes());
        octets[8..16].copy_from_slice(&self.mtime.0.to_le_bytes());
        octets[16..20].copy_from_slice(&self.mtime.1.to_le_bytes());
        octets[20..28].copy_from_slice(&identity.inode.to_le_bytes());
        octets[28..].copy_from_slice(&identity.born.to_le_bytes());
        u64::from_le_bytes(blake3::hash(&octets).as_bytes()[..8].try_into().expect("8 octets"))
    }
}

/// Tells a file of ours from every other that had, has or will have its name: what is recorded of
/// a temporary file must not be believed of the next one. Inode numbers are used again; the time
/// of birth, where the file system keeps it, is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) inode: u64,
    /// Nanoseconds; 0 where it is not known.
    pub(crate) born: i64,
}

impl Identity {
    /// The identity of an open file, or of the one with this name in a directory.
    pub(crate) fn of(dir: impl AsFd, name: &CStr) -> io::Result<(Identity, Statx)> {
        let flags = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
        let stat = rustix::fs::statx(dir, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?;
        let known = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
        let born = stat.stx_btime.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(stat.stx_btime.tv_nsec.into());
        Ok((Identity { inode: stat.stx_ino, born: if known { born } else { 0 } }, stat))
    }
}

/// What an earlier attempt left.
#[derive(Debug, Default)]
pub(crate) struct Earlier {
    done: HashMap<u64, u64>,
    ranges: HashMap<Key, (u64, Vec<(u64, u64)>)>,
}

impl Earlier {
    pub(crate) fn is_empty(&self) -> bool {
        self.done.is_empty() && self.ranges.is_empty()
    }

    /// Whether this file is this version, whole.
    pub(crate) fn is_done(&self, key: &Key, version: &Version, identity: Identity) -> bool {
        self.done.get(&short(key)) == Some(&version.fingerprint(identity))
    }

    /// The ranges of this version that are verified in this temporary file, in order, joined.
    pub(crate) fn ranges(&self, key: &Key, version: &Version, identity: Identity) -> Vec<(u64, u64)> {
        match self.ranges.get(key) {
            Some((fingerprint, ranges)) if *fingerprint == version.fingerprint(identity) => join(ranges.clone()),
            _ => Vec::new(),
        }
    }
}

/// What is found under the name of an offered file, if it is a file of the same size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Present {
    pub(crate) identity: Identity,
    /// It was modified no earlier than the one offered.
    pub(crate) as_new: bool,
}

impl Earlier {
    /// What is wanted of an offered file: nothing if it was put in place by this job, or, with
    /// `update`, is as new; all but the verified ranges, at most `room` of them, if its temporary
    /// file, which `temp` looks for, is there in the right size.
    pub(crate) fn judge(
        &self,
        (key, version): (&Key, &Version),
        present: Option<Present>,
        update: bool,
        room: usize,
        temp: impl FnOnce() -> Option<Identity>,
    ) -> Judgement {
        match present {
            Some(Present { identity, .. }) if self.is_done(key, version, identity) => return Judgement::Done,
            Some(Present { as_new: true, .. }) if update => return Judgement::UpToDate,
            _ => {}
        }
        if self.is_empty() || room == 0 {
            return Judgement::Missing;
        }
        let Some(identity) = temp() else { return Judgement::Missing };
        let mut ranges = self.ranges(key, version, identity);
        if self.is_done(key, version, identity) {
            // Whole, but killed before it got its name.
            ranges = vec![(0, version.size)];
        }
        ranges.truncate(room);
        if ranges.is_empty() { Judgement::Missing } else { Judgement::Partly(ranges) }
    }
}

/// What is known of an offered file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    /// Put in place by an earlier attempt.
    Done,
    /// As new as the source's.
    UpToDate,
    /// These ranges are verified.
    Partly(Vec<(u64, u64)>),
    /// To be sent.
    Missing,
}

fn short(key: &Key) -> u64 {
    u64::from_le_bytes(key[..8].try_into().expect("8 octets"))
}

/// Sorts ranges and joins those that touch or overlap.
fn join(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (offset, len) in ranges {
        match out.last_mut() {
            Some((start, held)) if *start + *held >= offset => *held = (*held).max(offset + len - *start),
            _ => out.push((offset, len)),
        }
    }
    out
}

/// Where a journal is kept.
pub(crate) trait Medium: Read + Write + Send {
    /// Drops what stands behind the first `len` octets, and goes on writing there.
    fn keep(&mut self, len: u64) -> io::Result<()>;
    /// Makes what has been written durable.
    fn sync(&mut self) -> io::Result<()>;
    /// Removes the journal.
    fn remove(&mut self) -> io::Result<()>;
}

/// The journal of a job under way.
pub(crate) struct Journal {
    boot: Key,
    state: Mutex<State>,
}

struct State {
    medium: Box<dyn Medium>,
    /// Length of the journal.
    position: u64,
    /// It cannot be written any more, or is gone.
    failed: bool,
}

impl Journal {
    /// The journal of `job` in the root directory `dir`, and what it says of earlier attempts. One
    /// attempt at a time holds it.
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] while another attempt at the same job is under way.
    pub(crate) fn open(dir: &Arc<OwnedFd>, job: &[u8; 16]) -> io::Result<(Journal, Earlier)> {
        let name = [JOURNAL_PREFIX, to_hex(&job[..8]).as_bytes(), JOURNAL_SUFFIX].concat();
        let name = CString::new(name)?;
        Journal::over(Box::new(OnDisk { file: lock(dir, &name)?, dir: Arc::clone(dir), name }), &boot_id())
    }

    /// A journal on any medium; `boot` is the number of this boot of the machine.
    pub(crate) fn over(mut medium: Box<dyn Medium>, boot: &Key) -> io::Result<(Journal, Earlier)> {
        let mut earlier = Earlier::default();
        let keep = replay(&mut medium, boot, &mut earlier)?;
        if keep == 0 {
            earlier = Earlier::default();
        }
        medium.keep(keep)?;
        // From here on it is this boot's journal again.
        medium.write_all(&header(boot))?;
        let position = keep + RECORD_LEN as u64;
        let state = Mutex::new(State { medium, position, failed: false });
        Ok((Journal { boot: *boot, state }, earlier))
    }

    /// These files are whole and will now get their names.
    pub(crate) fn done<'a>(&self, files: impl Iterator<Item = (&'a Key, &'a Version, Identity)>) {
        let records: Vec<u8> = files.flat_map(|(key, v, i)| record(DONE, key, v.fingerprint(i), 0, 0)).collect();
        if !records.is_empty() {
            self.append(&records);
        }
    }

    /// A range of a temporary file has been verified and written.
    pub(crate) fn range(&self, key: &Key, version: &Version, identity: Identity, offset: u64, len: u32) {
        self.append(&record(RANGE, key, version.fingerprint(identity), offset, len));
    }

    /// How much has been recorded: to be asked before a sync, for [`Journal::synced`] after it.
    pub(crate) fn position(&self) -> u64 {
        self.state.lock().expect("no panics under the lock").position
    }

    /// What was recorded up to `position` is on stable storage.
    pub(crate) fn synced(&self, position: u64) {
        let mut state = self.state.lock().expect("no panics under the lock");
        if state.failed {
            return;
        }
        let record = record(SYNCED, &[0; 16], 0, position, 0);
        let written = state.medium.write_all(&record).and_then(|()| state.medium.sync());
        state.position += RECORD_LEN as u64;
        state.note(written);
    }

    fn append(&self, records: &[u8]) {
        let mut state = self.state.lock().expect("no panics under the lock");
        if state.failed {
            return;
        }
        let written = state.medium.write_all(records);
        state.note(written);
        state.position += records.len() as u64;
    }

    /// Earlier attempts are to be forgotten.
    pub(crate) fn restart(&self) {
        let mut state = self.state.lock().expect("no panics under the lock");
        let header = header(&self.boot);
        let done = state.medium.keep(0).and_then(|()| state.medium.write_all(&header));
        state.position = RECORD_LEN as u64;
        state.note(done);
    }

    /// The job is done: nothing is left to resume.
    pub(crate) fn remove(&self) {
        self.state.lock().expect("no panics under the lock").remove();
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let state = self.state.get_mut().expect("no panics under the lock");
        if state.position <= RECORD_LEN as u64 {
            state.remove();
        }
    }
}

/// A journal in the root directory of the job.
struct OnDisk {
    file: File,
    dir: Arc<OwnedFd>,
    name: CString,
}

/// Opens and locks a journal, making it if there is none.
fn lock(dir: &OwnedFd, name: &CString) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    loop {
        let file = File::from(rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o600))?);
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(io::ErrorKind::ResourceBusy.into()),
            Err(e) => return Err(e.into()),
        }
        // Its last holder may have removed it between our opening and locking it.
        if rustix::fs::fstat(&file)?.st_nlink > 0 {
            return Ok(file);
        }
    }
}

impl Read for OnDisk {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.file.read(buffer)
    }
}

impl Write for OnDisk {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        self.file.write(octets)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Medium for OnDisk {
    fn keep(&mut self, len: u64) -> io::Result<()> {
        self.file.set_len(len)?;
        io::Seek::seek(&mut self.file, io::SeekFrom::Start(len)).map(drop)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn remove(&mut self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty())?)
    }
}

impl State {
    fn remove(&mut self) {
        if !self.failed
            && let Err(error) = self.medium.remove()
        {
            tracing::warn!(%error, "cannot remove the journal of a finished job");
        }
        self.failed = true;
    }

    /// A journal that cannot be written costs the next attempt some work, not this one its data.
    fn note(&mut self, result: io::Result<()>) {
        if let Err(error) = result
            && !std::mem::replace(&mut self.failed, true)
        {
            tracing::warn!(%error, "cannot write the journal: a later attempt will send data again");
        }
    }
}

fn record(kind: u8, key: &Key, fingerprint: u64, offset: u64, len: u32) -> [u8; RECORD_LEN] {
    let mut out = [0; RECORD_LEN];
    out[0] = kind;
    out[4..20].copy_from_slice(key);
    out[20..28].copy_from_slice(&fingerprint.to_le_bytes());
    out[28..36].copy_from_slice(&offset.to_le_bytes());
    out[36..40].copy_from_slice(&len.to_le_bytes());
    seal(&mut out);
    out
}

fn header(boot: &Key) -> [u8; RECORD_LEN] {
    let mut out = [0; RECORD_LEN];
    out[0] = HEADER;
    out[4..20].copy_from_slice(boot);
    out[20..28].copy_from_slice(&MAGIC);
    seal(&mut out);
    out
}

fn seal(record: &mut [u8; RECORD_LEN]) {
    let sum = checksum(record);
    record[40..48].copy_from_slice(&sum.to_le_bytes());
}

fn checksum(record: &[u8; RECORD_LEN]) -> u64 {
    u64::from_le_bytes(blake3::hash(&record[..40]).as_bytes()[..8].try_into().expect("8 octets"))
}

/// Identifies this boot of the machine.
fn boot_id() -> Key {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    key_of(text.trim().as_bytes())
}

/// Reads what can be believed; returns how many octets that is.
fn replay(file: &mut impl Read, boot: &Key, earlier: &mut Earlier) -> io::Result<u64> {
    let mut reader = io::BufReader::new(file);
    let mut record = [0; RECORD_LEN];
    let mut believed = 0;
    let mut position = 0;
    let mut this_boot = false;
    let mut pending: Vec<(u64, [u8; RECORD_LEN])> = Vec::new();
    loop {
        match reader.read_exact(&mut record) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => break,
            Err(e) => return Err(e),
        }
        if record[40..48] != checksum(&record).to_le_bytes() || (position == 0 && record[0] != HEADER) {
            break;
        }
        position += RECORD_LEN as u64;
        match record[0] {
            HEADER => {
                if record[20..28] != MAGIC {
                    break;
                }
                // What an earlier boot did not sync is void.
                pending.clear();
                this_boot = record[4..20] == *boot;
                believed = position;
            }
            SYNCED => {
                let upto = u64::from_le_bytes(record[28..36].try_into().expect("8 octets"));
                for (_, record) in pending.extract_if(.., |(at, _)| *at <= upto) {
                    believe(&record, earlier);
                }
                believed = position;
            }
            DONE | RANGE if this_boot => {
                believe(&record, earlier);
                believed = position;
            }
            DONE | RANGE => pending.push((position, record)),
            _ => break,
        }
    }
    Ok(believed)
}

/// Replays any octets, with checksums made right so that the records are looked at.
pub(crate) fn replay_for_fuzzing(data: &[u8]) {
    let mut octets = Vec::new();
    for chunk in data.chunks_exact(40) {
        let mut record = [0; RECORD_LEN];
        record[..40].copy_from_slice(chunk);
        record[0] %= 5;
        seal(&mut record);
        octets.extend_from_slice(&record);
    }
    let mut earlier = Earlier::default();
    let believed = replay(&mut octets.as_slice(), &[0; 16], &mut earlier).expect("memory can be read");
    assert!(believed <= octets.len() as u64);
    for (key, (_, ranges)) in &earlier.ranges {
        let joined = join(ranges.clone());
        assert!(joined.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0), "{key:?}");
    }
}

fn believe(record: &[u8; RECORD_LEN], earlier: &mut Earlier) {
    let key: Key = record[4..20].try_into().expect("16 octets");
    let fingerprint = u64::from_le_bytes(record[20..28].try_into().expect("8 octets"));
    if record[0] == DONE {
        earlier.ranges.remove(&key);
        earlier.done.insert(short(&key), fingerprint);
        return;
    }
    let offset = u64::from_le_bytes(record[28..36].try_into().expect("8 octets"));
    let len = u32::from_le_bytes(record[36..40].try_into().expect("4 octets"));
    if offset > i64::MAX as u64 {
        return;
    }
    let entry = earlier.ranges.entry(key).or_insert((fingerprint, Vec::new()));
    if entry.0 != fingerprint {
        *entry = (fingerprint, Vec::new());
    }
    entry.1.push((offset, len.into()));
    // A long file's ranges are joined now and then, so that memory follows the gaps, not the size.
    if entry.1.len().is_power_of_two() && entry.1.len() >= 1024 {
        entry.1 = join(std::mem::take(&mut entry.1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: Version = Version { size: 100, mtime: (5, 6) };
    const I: Identity = Identity { inode: 9, born: 1 };
    const J: Identity = Identity { inode: 9, born: 2 };

    fn dir() -> (tempfile::TempDir, Arc<OwnedFd>) {
        let dir = tempfile::tempdir().unwrap();
        let fd = Arc::new(File::open(dir.path()).unwrap().into());
        (dir, fd)
    }

    fn path(dir: &tempfile::TempDir) -> std::path::PathBuf {
        std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path()
    }

    #[test]
    fn what_was_recorded_is_known_to_the_next_attempt() {
        let (keep, fd) = dir();
        let (journal, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
        assert!(earlier.is_empty());
        let (a, b) = (key_of(b"a"), key_of(b"b"));
        journal.done([(&a, &V, I)].into_iter());
        for (offset, len) in [(50, 10), (0, 20), (20, 5)] {
            journal.range(&b, &V, I, offset, len);
        }
        drop(journal);
        for _ in 0..2 {
            let (_, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
            assert!(earlier.is_done(&a, &V, I) && !earlier.is_done(&b, &V, I));
            assert!(!earlier.is_done(&a, &Version { size: 101, ..V }, I) && !earlier.is_done(&a, &V, J));
            assert_eq!(earlier.ranges(&b, &V, I), vec![(0, 25), (50, 10)]);
            assert_eq!(earlier.ranges(&b, &V, J), vec![], "another file of the same name");
            assert_eq!(earlier.ranges(&b, &Version { mtime: (5, 7), ..V }, I), vec![]);
        }
        let (_, other) = Journal::open(&fd, &[2; 16]).unwrap();
        assert!(other.is_empty());
        let (journal, _) = Journal::open(&fd, &[1; 16]).unwrap();
        let busy = Journal::open(&fd, &[1; 16]).map(drop).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy, "one attempt at a time");
        journal.restart();
        drop(journal);
        assert!(Journal::open(&fd, &[1; 16]).unwrap().1.is_empty());
        assert_eq!(std::fs::read_dir(keep.path()).unwrap().count(), 0, "nothing recorded, nothing left");
    }

    #[test]
    fn a_torn_tail_is_cut_off_wherever_it_tears() {
        let (keep, fd) = dir();
        let (journal, _) = Journal::open(&fd, &[1; 16]).unwrap();
        for i in 0..5u64 {
            journal.range(&key_of(b"f"), &V, I, i * 10, 10);
        }
        drop(journal);
        let path = path(&keep);
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (_, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
            let have: u64 = earlier.ranges(&key_of(b"f"), &V, I).iter().map(|r| r.1).sum();
            assert_eq!(have, (cut / RECORD_LEN).saturating_sub(1) as u64 * 10);
        }
        for at in RECORD_LEN..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            let (_, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
            let have: u64 = earlier.ranges(&key_of(b"f"), &V, I).iter().map(|r| r.1).sum();
            assert_eq!(have, (at / RECORD_LEN - 1) as u64 * 10, "nothing at or behind octet {at}");
        }
    }

    #[test]
    fn after_a_power_cut_only_what_was_synced_is_believed() {
        let (keep, fd) = dir();
        let (journal, _) = Journal::open(&fd, &[1; 16]).unwrap();
        journal.range(&key_of(b"f"), &V, I, 0, 10);
        journal.synced(journal.position());
        journal.range(&key_of(b"f"), &V, I, 10, 10);
        let path = path(&keep);
        drop(journal);
        // Another boot.
        let mut octets = std::fs::read(&path).unwrap();
        octets[..RECORD_LEN].copy_from_slice(&header(&[9; 16]));
        std::fs::write(&path, &octets).unwrap();
        for _ in 0..2 {
            let (_, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
            assert_eq!(earlier.ranges(&key_of(b"f"), &V, I), vec![(0, 10)]);
        }
    }
}
