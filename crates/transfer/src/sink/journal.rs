//! The sink's journal: what of a job has been written and verified, and how to check it.
//!
//! Fixed-size records, each with a checksum, appended as blocks are written and files put in place.
//! Nothing that the journal says of a file's content is believed: every range carries its digest, and a later
//! attempt reads it back from the medium (`readback.rs`) before it tells the source not to send it.
//! So a power cut, a file system that was shut down and mounted again, a write-back error that somebody else was told
//! of, or a file that was changed meanwhile cost work, never data. The one thing that is believed is that a file
//! which was synced and put in place still has its content while its inode, birth and change times are the
//! recorded ones.
//!
//! The checksums are keyed: the key depends on the job, on the file of the journal, and on a secret of the user. Otherwise another
//! user could have a file of this user's, or the journal of another job, take the name of a journal by renaming it.
//!
//! A failed sync voids everything that is not in place: [`Journal::void`].

use crate::auth::to_hex;
use crate::sink::made::{Made, MadeBefore};
use crate::sink::tree::{JOURNAL_PREFIX, JOURNAL_SUFFIX};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Timespec, Timestamps};
use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use thruway_engine::digest::DIGEST_LEN;
use thruway_fs::Identity;

/// Bytes of a record.
pub(crate) const RECORD_LEN: usize = 64;
/// What the checksum covers.
const COVERED: usize = RECORD_LEN - 8;
const MAGIC: [u8; 8] = *b"TWJOURN3";

/// An attempt begins.
const HEADER: u8 = 0;
/// A temporary file was made: what is recorded of an earlier one with this key is void.
const BEGUN: u8 = 1;
/// A range of a temporary file has been verified and written.
const RANGE: u8 = 2;
/// All of a large file's data is in the ranges recorded; the rest are holes.
const WHOLE: u8 = 3;
/// A file was synced and has its final name.
const PLACED: u8 = 4;
/// A sync failed: nothing recorded of temporary files is to be believed.
const VOID: u8 = 5;
/// The job has succeeded. Valid only as the last record of a journal: a later attempt appends a header after it.
const COMPLETE: u8 = 6;
/// A directory is about to be made, was made, or was not made, by the state in the record's length field. It has its attributes when
/// [`SETTLED`] follows.
const DIRECTORY: u8 = 7;
const DIRECTORY_BEGUN: u32 = 0;
const DIRECTORY_MADE: u32 = 1;
const DIRECTORY_NOT_MADE: u32 = 2;
/// All directories recorded so far have their attributes.
const SETTLED: u8 = 8;
/// The job has changed the inode of a file that it had put in place: its change time was the first number and is the second now.
const LINKED: u8 = 9;
/// A link or special file was made.
const ENTRY: u8 = 10;
/// Highest type of a record.
const LAST_TYPE: u8 = ENTRY;

/// Bytes of the secret of journals.
pub const SECRET_LEN: usize = 32;

static SECRET: OnceLock<[u8; SECRET_LEN]> = OnceLock::new();

/// Sets the secret of this user's journals. Only the first call, before the first journal is opened, counts. Without a call, the secret
/// is a random one, and jobs resume within this process only.
pub fn set_secret(secret: [u8; SECRET_LEN]) {
    let _ = SECRET.set(secret);
}

/// Key of the checksums of a journal.
type ChecksumKey = [u8; 32];

/// The key for the journal of a job in this file.
fn key_in(file: impl AsFd, job: &[u8; 16]) -> io::Result<ChecksumKey> {
    let (identity, _) = Identity::of(file, c"")?;
    let mut hasher = blake3::Hasher::new_keyed(SECRET.get_or_init(thruway_engine::random::random));
    hasher.update(job).update(&identity.inode.to_le_bytes()).update(&identity.born.to_le_bytes());
    Ok(*hasher.finalize().as_bytes())
}

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
    /// Time of the last change of the inode: a file whose modification time was put back is another version.
    pub(crate) ctime: (i64, u32),
}

impl Version {
    /// 64 bits that tell this version in this very file: 24 bytes a file is what a million files
    /// can afford in memory.
    fn fingerprint(&self, identity: Identity) -> u64 {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.size.to_le_bytes());
        for (seconds, nanoseconds) in [self.mtime, self.ctime] {
            hasher.update(&seconds.to_le_bytes()).update(&nanoseconds.to_le_bytes());
        }
        hasher.update(&identity.inode.to_le_bytes()).update(&identity.born.to_le_bytes());
        u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("8 bytes"))
    }
}

/// What an earlier attempt left.
#[derive(Debug, Default)]
pub(crate) struct Earlier {
    /// Files in place: fingerprint and change time by [`short`] key.
    placed: HashMap<u64, (u64, i64)>,
    /// Those of them, by [`short`] key, whose attributes could not all be kept.
    lacking: HashSet<u64>,
    /// Large files with recorded ranges.
    unfinished: HashMap<Key, Unfinished>,
    made: MadeBefore,
}

/// A large file of which ranges are recorded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unfinished {
    fingerprint: u64,
    /// Where in the journal its records are.
    span: (u64, u64),
    /// The ranges are all of its data.
    whole: bool,
}

impl Unfinished {
    /// Whether the recorded ranges are all of the file's data.
    pub(crate) fn is_whole(&self) -> bool {
        self.whole
    }
}

/// What is found under the name of an offered file, if it is a file of the same size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Present {
    pub(crate) identity: Identity,
    /// Time of its last change, nanoseconds.
    pub(crate) ctime: i64,
    /// Its time of modification compared with that of the one offered.
    pub(crate) age: std::cmp::Ordering,
}

impl Earlier {
    /// True if no file is recorded.
    pub(crate) fn is_empty(&self) -> bool {
        self.placed.is_empty() && self.unfinished.is_empty()
    }

    /// Directories, links and special files that earlier attempts made.
    pub(crate) fn take_made(&mut self) -> MadeBefore {
        std::mem::take(&mut self.made)
    }

    /// True if an earlier attempt made this directory, and it may lack its attributes.
    pub(crate) fn has_directory(&self, key: &Key) -> bool {
        self.made.directories.contains_key(key)
    }

    /// Adds a directory that the job has made.
    pub(crate) fn add_directory(&mut self, key: Key, made: Made) {
        self.made.directories.insert(key, made);
    }

    /// The unfinished file that this version, in this very file, is.
    fn unfinished(&self, key: &Key, version: &Version, identity: Identity) -> Option<Unfinished> {
        self.unfinished.get(key).filter(|u| u.fingerprint == version.fingerprint(identity)).copied()
    }

    /// What is known of an offered file. `temp` looks for its temporary file, in the right size.
    pub(crate) fn judge(
        &self,
        (key, version): (&Key, &Version),
        present: Option<Present>,
        update: bool,
        temp: impl FnOnce() -> Option<Identity>,
    ) -> ResumeDecision {
        if let Some(present) = present {
            let placed = (version.fingerprint(present.identity), present.ctime);
            if self.placed.get(&short(key)) == Some(&placed) {
                return ResumeDecision::Placed { lacking: self.lacking.contains(&short(key)) };
            }
            if update && present.age.is_ge() {
                return ResumeDecision::UpToDate { is_newer: present.age.is_gt() };
            }
            // Killed between its rename and the record of it. With the record, it was changed since.
            let recorded = |u: &Unfinished| self.placed.get(&short(key)).is_some_and(|(of, _)| *of == u.fingerprint);
            let renamed = self.unfinished(key, version, present.identity);
            if let Some(unfinished) = renamed.filter(|u| u.whole && !recorded(u)) {
                return ResumeDecision::CheckInPlace(unfinished);
            }
        }
        if self.unfinished.is_empty() {
            return ResumeDecision::Missing;
        }
        let found = temp().and_then(|identity| self.unfinished(key, version, identity));
        found.map_or(ResumeDecision::Missing, ResumeDecision::CheckTemporary)
    }
}

/// What is known of an offered file.
#[derive(Debug)]
pub(crate) enum ResumeDecision {
    /// Put in place by an earlier attempt, and not changed since; `lacking` some of its attributes.
    Placed { lacking: bool },
    /// As new as the source's, or newer.
    UpToDate { is_newer: bool },
    /// Perhaps in place: if all that is recorded can be read back, and the rest are holes.
    CheckInPlace(Unfinished),
    /// What is recorded of its temporary file need not be sent, if it can be read back.
    CheckTemporary(Unfinished),
    /// To be sent.
    Missing,
}

/// A range of a file, and the digest of its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) offset: u64,
    pub(crate) len: u32,
    pub(crate) digest: [u8; DIGEST_LEN],
}

fn short(key: &Key) -> u64 {
    u64::from_le_bytes(key[..8].try_into().expect("8 bytes"))
}

/// Sorts ranges and joins those that touch or overlap.
pub(crate) fn join(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
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
    /// Drops what stands behind the first `len` bytes, and goes on writing there.
    fn keep(&mut self, len: u64) -> io::Result<()>;
    /// Reads what stands at `offset`, without moving where the next write goes.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Removes the journal.
    fn remove(&mut self) -> io::Result<()>;
}

/// Trace of an earlier attempt at a job in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interruption {
    /// There is no journal.
    None,
    /// There is a journal.
    Known,
    /// There is a file with the name of the journal. It has another secret, is damaged, or belongs to another user.
    Unknown,
}

/// The journal of a job in progress.
pub(crate) struct Journal {
    state: Mutex<State>,
}

struct State {
    medium: Box<dyn Medium>,
    key: ChecksumKey,
    /// Length of the journal.
    position: u64,
    /// It cannot be written any more, or is gone.
    failed: bool,
    /// A sync has failed; nothing more is recorded.
    voided: bool,
    /// It stays even if nothing is recorded: something was made that a later attempt must find again.
    kept: bool,
}

impl Journal {
    /// The journal of `job` in the root directory `dir`, and what it says of earlier attempts. One
    /// attempt at a time holds it.
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] while another attempt at the same job is in progress.
    pub(crate) fn open(dir: &Arc<OwnedFd>, job: &[u8; 16]) -> io::Result<(Journal, Earlier)> {
        let name = name_of(job);
        let file = lock(dir, &name)?;
        let key = key_in(&file, job)?;
        Journal::over(Box::new(OnDisk { file, dir: Arc::clone(dir), name }), key)
    }

    /// Looks for the journal of an earlier attempt at the job in `dir`.
    pub(crate) fn look(dir: impl AsFd, job: &[u8; 16]) -> Interruption {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let own = rustix::process::geteuid().as_raw();
        match rustix::fs::statat(&dir, name_of(job), AtFlags::SYMLINK_NOFOLLOW) {
            // The name depends on the user, so an entry of another user with this name is not a journal.
            Ok(stat) if stat.st_uid != own => return Interruption::None,
            _ => {}
        }
        let file = match rustix::fs::openat(dir, name_of(job), flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::NOENT) => return Interruption::None,
            Err(_) => return Interruption::Unknown,
        };
        let mut first = [0; RECORD_LEN];
        let is_read = file.read_exact_at(&mut first, 0).is_ok();
        match is_read && key_in(&file, job).is_ok_and(|key| first == header(&key)) {
            true => Interruption::Known,
            // An empty one may have lost its records in a power cut.
            false => Interruption::Unknown,
        }
    }

    /// A journal on any medium, with this key of its checksums.
    pub(crate) fn over(mut medium: Box<dyn Medium>, key: ChecksumKey) -> io::Result<(Journal, Earlier)> {
        let mut earlier = Earlier::default();
        let keep = replay(&mut medium, &key, &mut earlier)?;
        medium.keep(keep)?;
        if let Err(e) = medium.write_all(&header(&key)) {
            // On a full disk it would stay as an empty file that says nothing.
            if keep == 0 {
                let _ = medium.remove();
            }
            return Err(e);
        }
        let state =
            State { medium, key, position: keep + RECORD_LEN as u64, failed: false, voided: false, kept: keep > 0 };
        Ok((Journal { state: Mutex::new(state) }, earlier))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panics under the lock")
    }

    /// A temporary file was made; nothing recorded of another one with this key is true of it.
    pub(crate) fn begun(&self, key: &Key, version: &Version, identity: Identity) {
        self.append(&record(BEGUN, key, version.fingerprint(identity), 0, 0, &[0; DIGEST_LEN]));
    }

    /// A range of a temporary file has been verified and written.
    pub(crate) fn range(&self, key: &Key, version: &Version, identity: Identity, range: &Range) {
        let Range { offset, len, digest } = range;
        self.append(&record(RANGE, key, version.fingerprint(identity), *offset, *len, digest));
    }

    /// All data of this large file has been recorded.
    pub(crate) fn whole(&self, key: &Key, version: &Version, identity: Identity) {
        self.append(&record(WHOLE, key, version.fingerprint(identity), 0, 0, &[0; DIGEST_LEN]));
    }

    /// These files were synced, have their names, and their inodes last changed at these times. `lacking`: not all
    /// of their attributes could be kept, which a later attempt has to try, or tell, again.
    pub(crate) fn placed<'a>(&self, files: impl Iterator<Item = (&'a Key, &'a Version, Identity, i64, bool)>) {
        let of = |(key, v, i, ctime, lacking): (&Key, &Version, Identity, i64, bool)| {
            record(PLACED, key, v.fingerprint(i), ctime as u64, lacking.into(), &[0; DIGEST_LEN])
        };
        let records: Vec<u8> = files.flat_map(of).collect();
        if !records.is_empty() {
            self.append(&records);
        }
    }

    /// This file, put in place by the job, has got another name. Its change time was `before` and is `after`, in nanoseconds.
    pub(crate) fn linked(&self, key: &Key, before: i64, after: i64) {
        self.append(&record(LINKED, key, before as u64, after as u64, 0, &[0; DIGEST_LEN]));
    }

    /// A sync failed: what is recorded of files that are not in place may be on no medium.
    pub(crate) fn void(&self) {
        self.append(&record(VOID, &[0; 16], 0, 0, 0, &[0; DIGEST_LEN]));
        // What completes behind it is of no use: the ranges before are not believed, and a file would look whole
        // without them.
        self.state().voided = true;
    }

    /// Records a directory: before it is made, and with its identity afterwards. A later attempt applies the attributes of the
    /// source to it.
    pub(crate) fn directory(&self, key: &Key, made: Made) {
        self.append(&directory_record(key, Some(made)));
    }

    /// Records that a directory was not made: there was one already, or it failed.
    pub(crate) fn no_directory(&self, key: &Key) {
        self.append(&directory_record(key, None));
    }

    /// Records a link or special file that was made, with the fingerprint of its identity.
    pub(crate) fn entry(&self, key: &Key, fingerprint: u64) {
        self.append(&entry_record(key, fingerprint));
    }

    /// Records that all directories of the job have their attributes. A later attempt does not change them again.
    pub(crate) fn settled(&self) {
        self.append(&record(SETTLED, &[0; 16], 0, 0, 0, &[0; DIGEST_LEN]));
    }

    /// Calls `each` for every recorded range of an unfinished file.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub(crate) fn ranges(&self, key: &Key, of: &Unfinished, mut each: impl FnMut(Range)) -> io::Result<()> {
        const RECORDS: usize = 1024;
        let mut buffer = vec![0; RECORDS * RECORD_LEN];
        let (mut at, end) = of.span;
        while at < end {
            let len = ((end - at) as usize).min(buffer.len());
            self.state().medium.read_exact_at(&mut buffer[..len], at)?;
            for record in buffer[..len].chunks_exact(RECORD_LEN) {
                if record[0] == RANGE && record[4..20] == *key && field(record, 20) == of.fingerprint {
                    each(range_of(record));
                }
            }
            at += len as u64;
        }
        Ok(())
    }

    fn append(&self, records: &[u8]) {
        let mut state = self.state();
        let records = &seal_all(records, &state.key);
        // These do not depend on a sync.
        if state.failed || (state.voided && !matches!(records[0], DIRECTORY | ENTRY)) {
            return;
        }
        let written = state.medium.write_all(records);
        state.note(written);
        state.position += records.len() as u64;
        state.kept = true;
    }

    /// Forgets the files of earlier attempts, and returns the rest of `earlier`: entries without content, which stay recorded.
    pub(crate) fn restart(&self, earlier: Earlier) -> Earlier {
        let mut state = self.state();
        let mut records = header(&state.key).to_vec();
        let MadeBefore { directories, entries } = &earlier.made;
        let directories = directories.iter().map(|(key, made)| directory_record(key, Some(*made)));
        let entries = entries.iter().map(|(key, fingerprint)| entry_record(key, *fingerprint));
        let made: Vec<u8> = directories.chain(entries).flatten().collect();
        records.extend(seal_all(&made, &state.key));
        let done = state.medium.keep(0).and_then(|()| state.medium.write_all(&records));
        state.position = records.len() as u64;
        state.kept = !made.is_empty();
        state.note(done);
        Earlier { made: earlier.made, ..Earlier::default() }
    }

    /// Records that the job has succeeded, before the success is reported to the source. If this process ends before it removes
    /// the journal, any later job in the directory may remove it.
    pub(crate) fn complete(&self) {
        self.append(&record(COMPLETE, &[0; 16], 0, 0, 0, &[0; DIGEST_LEN]));
    }

    /// True if a record could not be written.
    pub(crate) fn has_failed(&self) -> bool {
        self.state().failed
    }

    /// The job is done: nothing is left to resume.
    pub(crate) fn remove(&self) {
        self.state().remove();
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let state = self.state.get_mut().expect("no panics under the lock");
        if !state.kept {
            state.remove();
        }
    }
}

pub(crate) fn name_of(job: &[u8; 16]) -> CString {
    let name = [JOURNAL_PREFIX, to_hex(job).as_bytes(), JOURNAL_SUFFIX].concat();
    CString::new(name).expect("letters and digits")
}

/// A journal in the root directory of the job.
struct OnDisk {
    file: File,
    dir: Arc<OwnedFd>,
    name: CString,
}

/// Opens and locks a journal, making it if there is none. Refuses what another user may have put there.
fn lock(dir: &OwnedFd, name: &CString) -> io::Result<File> {
    // Without O_NONBLOCK the open of a FIFO would wait for a reader.
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    loop {
        let file = match rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o600)) {
            // A link, directory or socket.
            Err(rustix::io::Errno::LOOP | rustix::io::Errno::ISDIR | rustix::io::Errno::NXIO) => {
                let why = format!("{} exists and is not a Thruway journal; remove it", name.to_string_lossy());
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
            other => File::from(other?),
        };
        let stat = rustix::fs::fstat(&file)?;
        let ours = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file()
            && stat.st_uid == rustix::process::geteuid().as_raw()
            && stat.st_mode & 0o022 == 0
            && stat.st_nlink <= 1;
        if !ours {
            let why = format!("{} exists and is not a Thruway journal; remove it", name.to_string_lossy());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
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
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
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

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(&self.file, buffer, offset)
    }

    fn remove(&mut self) -> io::Result<()> {
        let stat = rustix::fs::fstat(&self.dir)?;
        let itself = format!("/proc/self/fd/{}", self.dir.as_fd().as_raw_fd());
        let remove = || rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty());
        let removed = match remove() {
            // The directory has got its permissions by now, and is not to be written to: once more.
            Err(rustix::io::Errno::ACCESS) => {
                let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
                rustix::fs::chmod(&itself, mode | Mode::RWXU)?;
                let removed = remove();
                rustix::fs::chmod(&itself, mode)?;
                removed
            }
            other => other,
        };
        // And its times.
        let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
        let times = Timestamps {
            last_access: time(stat.st_atime, stat.st_atime_nsec as _),
            last_modification: time(stat.st_mtime, stat.st_mtime_nsec as _),
        };
        let _ = rustix::fs::utimensat(CWD, &itself, &times, AtFlags::empty());
        Ok(removed?)
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

/// A record without its checksum.
fn record(kind: u8, key: &Key, fingerprint: u64, number: u64, len: u32, digest: &[u8; DIGEST_LEN]) -> [u8; RECORD_LEN] {
    let mut out = [0; RECORD_LEN];
    out[0] = kind;
    out[4..20].copy_from_slice(key);
    out[20..28].copy_from_slice(&fingerprint.to_le_bytes());
    out[28..36].copy_from_slice(&number.to_le_bytes());
    out[36..40].copy_from_slice(&len.to_le_bytes());
    out[40..56].copy_from_slice(digest);
    out
}

fn directory_record(key: &Key, made: Option<Made>) -> [u8; RECORD_LEN] {
    let (fingerprint, number, state) = match made {
        Some(Made::Begun(at)) => (0, at as u64, DIRECTORY_BEGUN),
        Some(Made::Done(fingerprint)) => (fingerprint, 0, DIRECTORY_MADE),
        None => (0, 0, DIRECTORY_NOT_MADE),
    };
    record(DIRECTORY, key, fingerprint, number, state, &[0; DIGEST_LEN])
}

fn entry_record(key: &Key, fingerprint: u64) -> [u8; RECORD_LEN] {
    record(ENTRY, key, fingerprint, 0, 0, &[0; DIGEST_LEN])
}

/// The first record, with its checksum.
fn header(key: &ChecksumKey) -> [u8; RECORD_LEN] {
    let mut out = record(HEADER, &[0; 16], u64::from_le_bytes(MAGIC), 0, 0, &[0; DIGEST_LEN]);
    seal(&mut out, key);
    out
}

fn field(record: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(record[at..at + 8].try_into().expect("8 bytes"))
}

fn range_of(record: &[u8]) -> Range {
    Range {
        offset: field(record, 28),
        len: u32::from_le_bytes(record[36..40].try_into().expect("4 bytes")),
        digest: record[40..56].try_into().expect("16 bytes"),
    }
}

fn seal(record: &mut [u8], key: &ChecksumKey) {
    let sum = checksum(record, key);
    record[COVERED..].copy_from_slice(&sum);
}

/// These records with their checksums.
fn seal_all(records: &[u8], key: &ChecksumKey) -> Vec<u8> {
    let mut sealed = records.to_vec();
    sealed.chunks_exact_mut(RECORD_LEN).for_each(|record| seal(record, key));
    sealed
}

fn checksum(record: &[u8], key: &ChecksumKey) -> [u8; RECORD_LEN - COVERED] {
    let hash = blake3::keyed_hash(key, &record[..COVERED]);
    hash.as_bytes()[..RECORD_LEN - COVERED].try_into().expect("shorter than the hash")
}

/// Reads the records up to the first that is torn, damaged, or has a checksum with another key; returns how many bytes they are.
fn replay(file: &mut impl Read, key: &ChecksumKey, earlier: &mut Earlier) -> io::Result<u64> {
    let mut reader = io::BufReader::new(file);
    let mut record = [0; RECORD_LEN];
    let mut position = 0;
    loop {
        match reader.read_exact(&mut record) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(position),
            Err(e) => return Err(e),
        }
        let is_header = record == header(key);
        let first = position == 0;
        if record[COVERED..] != checksum(&record, key)
            || record[0] > LAST_TYPE
            || (record[0] == HEADER) != is_header
            || (first && !is_header)
        {
            return Ok(position);
        }
        earlier.take(&record, position);
        position += RECORD_LEN as u64;
    }
}

impl Earlier {
    fn take(&mut self, record: &[u8; RECORD_LEN], position: u64) {
        let key: Key = record[4..20].try_into().expect("16 bytes");
        let fingerprint = field(record, 20);
        let span = (position, position + RECORD_LEN as u64);
        match record[0] {
            BEGUN => drop(self.unfinished.insert(key, Unfinished { fingerprint, span, whole: false })),
            RANGE => {
                let entry = self.unfinished.entry(key).or_insert(Unfinished { fingerprint, span, whole: false });
                if entry.fingerprint == fingerprint {
                    entry.span.1 = span.1;
                } else {
                    *entry = Unfinished { fingerprint, span, whole: false };
                }
            }
            WHOLE => {
                if let Some(entry) = self.unfinished.get_mut(&key).filter(|u| u.fingerprint == fingerprint) {
                    entry.whole = true;
                }
            }
            PLACED => {
                self.placed.insert(short(&key), (fingerprint, field(record, 28) as i64));
                if range_of(record).len == 0 {
                    self.lacking.remove(&short(&key));
                } else {
                    self.lacking.insert(short(&key));
                }
            }
            LINKED => {
                if let Some((_, ctime)) = self.placed.get_mut(&short(&key)).filter(|(_, c)| *c as u64 == fingerprint) {
                    *ctime = field(record, 28) as i64;
                }
            }
            VOID => self.unfinished.clear(),
            DIRECTORY => {
                let known = &mut self.made.directories;
                match range_of(record).len {
                    DIRECTORY_BEGUN => drop(known.insert(key, Made::Begun(field(record, 28) as i64))),
                    DIRECTORY_MADE => drop(known.insert(key, Made::Done(fingerprint))),
                    _ => drop(known.remove(&key)),
                }
            }
            ENTRY => drop(self.made.entries.insert(key, fingerprint)),
            SETTLED => self.made.directories.clear(),
            _ => {}
        }
    }
}

/// True if the journal of this job ends with a [`COMPLETE`] record, and its checksums have the key of this user; `None` if the file is
/// not a journal.
pub(crate) fn is_complete(file: &File, job: &[u8; 16]) -> Option<bool> {
    let len = file.metadata().ok()?.len();
    if len == 0 {
        return Some(false);
    }
    let read = |at| {
        let mut record = [0; RECORD_LEN];
        file.read_exact_at(&mut record, at).ok().map(|()| record)
    };
    let first = read(0)?;
    if first[0] != HEADER || field(&first, 20) != u64::from_le_bytes(MAGIC) {
        return None;
    }
    let key = key_in(file, job).ok()?;
    let last = len.is_multiple_of(RECORD_LEN as u64).then(|| read(len - RECORD_LEN as u64)).flatten();
    Some(last.is_some_and(|last| last[0] == COMPLETE && last[COVERED..] == checksum(&last, &key)))
}

/// Replays any bytes, with checksums made right so that the records are looked at.
pub(crate) fn replay_for_fuzzing(data: &[u8]) {
    struct Memory(io::Cursor<Vec<u8>>);
    impl Read for Memory {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.read(buffer)
        }
    }
    impl Write for Memory {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    impl Medium for Memory {
        fn keep(&mut self, len: u64) -> io::Result<()> {
            self.0.get_mut().truncate(len as usize);
            self.0.set_position(len);
            Ok(())
        }
        fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            buffer.copy_from_slice(&self.0.get_ref()[offset as usize..][..buffer.len()]);
            Ok(())
        }
        fn remove(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let checksum_key = [0; 32];
    let mut bytes = header(&checksum_key).to_vec();
    for chunk in data.chunks_exact(COVERED) {
        let mut record = [0; RECORD_LEN];
        record[..COVERED].copy_from_slice(chunk);
        record[0] = 1 + record[0] % LAST_TYPE;
        // Few keys, so that records meet.
        let (key, fingerprint) = (record[4] % 4, record[20] % 2);
        record[4..20].fill(key);
        record[20..28].fill(fingerprint);
        seal(&mut record, &checksum_key);
        bytes.extend_from_slice(&record);
    }
    let len = bytes.len();
    let (journal, earlier) =
        Journal::over(Box::new(Memory(io::Cursor::new(bytes))), checksum_key).expect("memory can be read");
    assert_eq!(journal.state().position, (len + RECORD_LEN) as u64);
    for (key, unfinished) in &earlier.unfinished {
        let mut ranges = Vec::new();
        journal.ranges(key, unfinished, |r| ranges.push((r.offset % (1 << 60), u64::from(r.len)))).expect("in memory");
        let joined = join(ranges);
        assert!(joined.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0), "{key:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: Version = Version { size: 100, mtime: (5, 6), ctime: (7, 8) };
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

    fn range(offset: u64, len: u32) -> Range {
        Range { offset, len, digest: [offset as u8; 16] }
    }

    /// What is known of a temporary file.
    fn temporary(journal: &Journal, earlier: &Earlier, key: &Key, v: &Version, i: Identity) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        if let ResumeDecision::CheckTemporary(unfinished) = earlier.judge((key, v), None, false, || Some(i)) {
            let each = |r: Range| {
                assert_eq!(r, range(r.offset, r.len), "the digest is the range's own");
                found.push((r.offset, r.len.into()));
            };
            journal.ranges(key, &unfinished, each).unwrap();
        }
        join(found)
    }

    fn placed(earlier: &Earlier, key: &Key, v: &Version, i: Identity, ctime: i64) -> bool {
        let present = Some(Present { identity: i, ctime, age: std::cmp::Ordering::Less });
        matches!(earlier.judge((key, v), present, false, || None), ResumeDecision::Placed { .. })
    }

    #[test]
    fn a_file_of_another_user_with_the_name_of_a_journal_is_none() {
        let (dir, fd) = dir();
        let path = dir.path().join(name_of(&[1; 16]).to_str().unwrap());
        std::fs::write(&path, "not a journal").unwrap();
        assert_eq!(Journal::look(&fd, &[1; 16]), Interruption::Unknown);
        std::os::unix::fs::chown(&path, Some(12_345), None).unwrap();
        assert_eq!(Journal::look(&fd, &[1; 16]), Interruption::None);
    }

    #[test]
    fn a_journal_of_another_job_or_user_is_not_believed() {
        let (dir, fd) = dir();
        let (journal, _) = Journal::open(&fd, &[1; 16]).unwrap();
        journal.directory(&key_of(b"d"), Made::Done(7));
        drop(journal);
        assert!(
            Journal::look(&fd, &[1; 16]) == Interruption::Known && Journal::look(&fd, &[2; 16]) != Interruption::Known
        );
        // Somebody with access to the directory renames it.
        let names = [1, 2].map(|job| dir.path().join(name_of(&[job; 16]).to_str().unwrap()));
        std::fs::rename(&names[0], &names[1]).unwrap();
        assert!(Journal::look(&fd, &[2; 16]) != Interruption::Known);
        let (journal, mut earlier) = Journal::open(&fd, &[2; 16]).unwrap();
        assert!(earlier.take_made().directories.is_empty());
        drop(journal);
        // A copy of a journal is another file, and a journal with another key.
        let (journal, _) = Journal::open(&fd, &[1; 16]).unwrap();
        journal.directory(&key_of(b"d"), Made::Done(7));
        drop(journal);
        let copied = std::fs::read(&names[0]).unwrap();
        std::fs::write(&names[1], &copied).unwrap();
        std::fs::rename(&names[1], &names[0]).unwrap();
        assert!(Journal::look(&fd, &[1; 16]) != Interruption::Known);
        assert!(Journal::open(&fd, &[1; 16]).unwrap().1.take_made().directories.is_empty());
    }

    #[test]
    fn what_was_recorded_is_known_to_the_next_attempt() {
        let (keep, fd) = dir();
        let (journal, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
        assert!(earlier.is_empty());
        let (a, b) = (key_of(b"a"), key_of(b"b"));
        journal.placed([(&a, &V, I, 77, false)].into_iter());
        journal.begun(&b, &V, I);
        for (offset, len) in [(50, 10), (0, 20), (20, 5)] {
            journal.range(&b, &V, I, &range(offset, len));
        }
        drop(journal);
        for _ in 0..2 {
            let (journal, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
            assert!(placed(&earlier, &a, &V, I, 77) && !placed(&earlier, &b, &V, I, 77));
            assert!(!placed(&earlier, &a, &V, I, 78), "changed since");
            assert!(!placed(&earlier, &a, &Version { size: 101, ..V }, I, 77) && !placed(&earlier, &a, &V, J, 77));
            let ranges = |v: &Version, i| temporary(&journal, &earlier, &b, v, i);
            assert_eq!(ranges(&V, I), vec![(0, 25), (50, 10)]);
            assert_eq!(ranges(&V, J), vec![], "another file of the same name");
            assert_eq!(ranges(&Version { mtime: (5, 7), ..V }, I), vec![]);
            assert_eq!(ranges(&Version { ctime: (5, 7), ..V }, I), vec![], "the modification time was put back");
        }
        let (other_job, other) = Journal::open(&fd, &[2; 16]).unwrap();
        assert!(other.is_empty());
        drop(other_job);
        let present = Some(Present { identity: I, ctime: 77, age: std::cmp::Ordering::Less });
        for lacking in [true, false, true] {
            let (journal, _) = Journal::open(&fd, &[2; 16]).unwrap();
            journal.placed([(&a, &V, I, 77, lacking)].into_iter());
            drop(journal);
            let (_, earlier) = Journal::open(&fd, &[2; 16]).unwrap();
            let judged = earlier.judge((&a, &V), present, false, || None);
            assert!(matches!(judged, ResumeDecision::Placed { lacking: l } if l == lacking), "{judged:?}");
        }
        let (journal, _) = Journal::open(&fd, &[1; 16]).unwrap();
        let busy = Journal::open(&fd, &[1; 16]).map(drop).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy, "one attempt at a time");
        journal.restart(Earlier::default());
        drop(journal);
        assert!(Journal::open(&fd, &[1; 16]).unwrap().1.is_empty());
        assert_eq!(std::fs::read_dir(keep.path()).unwrap().count(), 1, "nothing recorded, nothing left");
    }

    #[test]
    fn directories_stay_recorded_until_all_have_their_attributes() {
        let (_keep, fd) = dir();
        let open = || {
            let (journal, mut earlier) = Journal::open(&fd, &[1; 16]).unwrap();
            assert!(earlier.is_empty(), "no file is recorded");
            (journal, earlier.take_made().directories)
        };
        let (a, b, c) = (key_of(b"a"), key_of(b"b"), key_of(b"c"));
        let expected = HashMap::from([(a, Made::Begun(5)), (b, Made::Done(7))]);
        let (journal, ..) = open();
        journal.directory(&a, Made::Begun(5));
        journal.void();
        journal.directory(&b, Made::Begun(6));
        journal.directory(&b, Made::Done(7));
        journal.directory(&c, Made::Begun(8));
        journal.no_directory(&c);
        drop(journal);
        let (journal, found) = open();
        assert_eq!(found, expected, "a failed sync changes nothing");
        drop(journal);
        // An attempt that forgets the files of earlier ones.
        let (journal, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
        assert_eq!(journal.restart(earlier).take_made().directories, expected);
        drop(journal);
        let (journal, found) = open();
        assert_eq!(found, expected);
        journal.settled();
        drop(journal);
        assert!(open().1.is_empty());
    }

    #[test]
    fn a_new_temporary_file_and_a_failed_sync_void_what_was_recorded() {
        let (_keep, fd) = dir();
        let key = key_of(b"f");
        let known = |journal: Journal| {
            drop(journal);
            let (journal, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
            let ranges = temporary(&journal, &earlier, &key, &V, I);
            (journal, ranges, placed(&earlier, &key_of(b"p"), &V, I, 3))
        };
        let (journal, _) = Journal::open(&fd, &[1; 16]).unwrap();
        journal.placed([(&key_of(b"p"), &V, I, 3, false)].into_iter());
        journal.begun(&key, &V, I);
        journal.range(&key, &V, I, &range(0, 10));
        let (journal, ranges, _) = known(journal);
        assert_eq!(ranges, vec![(0, 10)]);
        // The same inode number and no time of birth, as on file systems that keep none.
        journal.begun(&key, &V, I);
        journal.range(&key, &V, I, &range(40, 5));
        let (journal, ranges, _) = known(journal);
        assert_eq!(ranges, vec![(40, 5)]);
        journal.void();
        let (journal, ranges, in_place) = known(journal);
        assert_eq!((ranges, in_place), (vec![], true), "what was in place had been synced before");
        journal.range(&key, &V, I, &range(60, 5));
        assert_eq!(known(journal).1, vec![(60, 5)]);
    }

    #[test]
    fn a_whole_file_that_was_renamed_but_not_recorded_is_to_be_checked_in_place() {
        let (_keep, fd) = dir();
        let key = key_of(b"f");
        let present = Some(Present { identity: I, ctime: 9, age: std::cmp::Ordering::Less });
        let (journal, _) = Journal::open(&fd, &[1; 16]).unwrap();
        journal.begun(&key, &V, I);
        journal.range(&key, &V, I, &range(0, 100));
        drop(journal);
        let (journal, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
        assert!(
            matches!(earlier.judge((&key, &V), present, false, || None), ResumeDecision::Missing),
            "not known to be whole"
        );
        journal.whole(&key, &V, I);
        drop(journal);
        let (journal, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
        assert!(
            matches!(earlier.judge((&key, &V), present, false, || None), ResumeDecision::CheckInPlace(u) if u.is_whole())
        );
        journal.placed([(&key, &V, I, 8, false)].into_iter());
        drop(journal);
        let (_, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
        let changed = earlier.judge((&key, &V), present, false, || None);
        assert!(matches!(changed, ResumeDecision::Missing), "it was changed after it had been put in place");
    }

    #[test]
    fn a_torn_tail_is_cut_off_wherever_it_tears() {
        let (keep, fd) = dir();
        let (journal, _) = Journal::open(&fd, &[1; 16]).unwrap();
        journal.begun(&key_of(b"f"), &V, I);
        for i in 0..5u64 {
            journal.range(&key_of(b"f"), &V, I, &range(i * 10, 10));
        }
        drop(journal);
        let path = path(&keep);
        let whole = std::fs::read(&path).unwrap();
        let have = || {
            let (journal, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
            temporary(&journal, &earlier, &key_of(b"f"), &V, I).iter().map(|r| r.1).sum::<u64>()
        };
        // Written into the same file. Without a whole header, it would be removed and made again.
        for cut in RECORD_LEN..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            set_mode(&path);
            assert_eq!(have(), (cut / RECORD_LEN).saturating_sub(2) as u64 * 10);
        }
        for at in RECORD_LEN..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            set_mode(&path);
            assert_eq!(have(), (at / RECORD_LEN).saturating_sub(2) as u64 * 10, "nothing at or behind byte {at}");
        }
        for cut in 0..RECORD_LEN {
            std::fs::write(&path, &whole[..cut]).unwrap();
            set_mode(&path);
            assert_eq!(have(), 0);
        }
    }

    fn set_mode(path: &std::path::Path) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }

    #[test]
    fn what_others_put_in_the_journals_place_is_refused_without_waiting() {
        let (keep, fd) = dir();
        let name = name_of(&[1; 16]);
        let path = keep.path().join(name.to_str().unwrap());
        rustix::fs::mknodat(&fd, &name, rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let refused = || Journal::open(&fd, &[1; 16]).map(drop).unwrap_err().kind();
        assert_eq!(refused(), io::ErrorKind::PermissionDenied);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(refused(), io::ErrorKind::PermissionDenied, "others may write to it");
        set_mode(&path);
        std::fs::hard_link(&path, keep.path().join("other")).unwrap();
        assert_eq!(refused(), io::ErrorKind::PermissionDenied, "somebody else's file by another name");
    }
}
