//! Leftovers of interrupted copies: journals and temporary files that no running job holds.
//!
//! A running job holds a lock on its journal, which is in the root directory of the job. The name of a temporary file
//! contains a digest of the job and of the file's path below that directory, so a journal identifies the temporary files
//! of its job. A temporary file without a journal counts as a leftover when it is a day old, and only if no job is
//! running in its directory or above.

use super::journal::{self, key_of};
use super::tree::{JOURNAL_PREFIX, JOURNAL_SUFFIX, OWN_AGE_MAX_S, temp_name, temporary_of};
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thruway_engine::Owner;
use thruway_fs::beneath::{self, Links, join, split};
use thruway_fs::listing;
use thruway_fs::walk::{Visit, Walk};

/// Most names in the destination that are examined for leftovers when a copy begins.
const SURVEY_MAX: usize = 10_000;
/// Most journals of other jobs that are examined when a copy begins.
const JOURNALS_MAX: usize = 16;
/// Most journals of a [`Search`]. Each temporary file is compared with all of them, and each takes a descriptor.
const SEARCHED_MAX: usize = 1000;
/// Longest time from the journal of a copy to the directory that it makes, nanoseconds.
const MAKER_AGE_MAX: i64 = 60_000_000_000;
/// Most leftovers in the report of [`survey`]; it counts the others.
const NAMED_MAX: usize = 4;

/// A journal or a temporary file of a copy.
#[derive(Debug)]
pub struct Leftover {
    /// Path below the directory that was searched.
    pub path: Vec<u8>,
    /// Bytes on disk.
    pub bytes: u64,
    /// Time of the last change, seconds since 1970.
    pub modified: i64,
    /// State at the time of the search.
    pub state: State,
    identity: (u64, u64),
}

/// State of a journal or a temporary file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Leftover of an interrupted job. The same command can resume the job; the leftover can be removed.
    Unfinished,
    /// Journal of a job that has succeeded.
    Complete,
    /// Used by a running job, or possibly used by one.
    InUse,
    /// A temporary file without a journal, younger than a day.
    Recent,
}

impl State {
    /// True if the entry can be removed without harm to a running job.
    pub fn is_removable(self) -> bool {
        matches!(self, State::Unfinished | State::Complete)
    }

    /// Name of the state in listings.
    pub fn word(self) -> &'static str {
        match self {
            State::Unfinished => "unfinished",
            State::Complete => "complete",
            State::InUse => "in use",
            State::Recent => "recent",
        }
    }
}

impl Leftover {
    fn new(path: Vec<u8>, stat: &Stat, state: State) -> Leftover {
        let (bytes, modified) = (stat.st_blocks as u64 * 512, stat.st_mtime.max(stat.st_ctime));
        Leftover { path, bytes, modified, state, identity: (stat.st_dev, stat.st_ino) }
    }
}

/// A journal that was found.
struct Found {
    job: [u8; 16],
    state: State,
    /// Holds the lock of the journal; `None` if a running job holds it.
    _file: Option<File>,
}

/// Leftovers below a directory. Locks their journals until it is dropped, so that no job begins to use one.
pub struct Search {
    root: Arc<OwnedFd>,
    /// Journals and temporary files, sorted by path.
    pub found: Vec<Leftover>,
    /// Directories that could not be searched.
    pub failures: Vec<(Vec<u8>, io::Error)>,
    /// A journal could not be opened, or there are too many. Temporary files without a journal may belong to it.
    is_incomplete: bool,
    journals: usize,
    _locks: Vec<Found>,
}

impl Search {
    /// Searches a directory and all directories below it.
    ///
    /// # Errors
    /// If the directory itself cannot be opened.
    pub fn new(dir: &Path) -> io::Result<Search> {
        let real = std::fs::canonicalize(dir)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = Arc::new(rustix::fs::open(&real, flags, Mode::empty())?);
        let mut journals: HashMap<PathBuf, Vec<Found>> = HashMap::new();
        let mut search = Search {
            root,
            found: Vec::new(),
            failures: Vec::new(),
            is_incomplete: false,
            journals: 0,
            _locks: Vec::new(),
        };
        // A job with a root directory further up may have temporary files here.
        for above in real.ancestors().skip(1) {
            let Ok(above_fd) = rustix::fs::open(above, flags, Mode::empty()) else { continue };
            let names = listing::names(&above_fd).into_iter().flatten().flatten();
            let found = names.filter_map(|name| {
                let path = above.join(OsStr::from_bytes(name.to_bytes()));
                search.open_journal(&above_fd, &name, path.as_os_str().as_bytes())
            });
            let found: Vec<Found> = found.map(|(found, _)| found).collect();
            journals.insert(above.into(), found);
        }
        let mut temporaries = Vec::new();
        let mut tree = Walk::new(Arc::clone(&search.root), Owner::default());
        while let Some(Visit { below, dir }) = tree.visit() {
            if let Err(e) = search.directory(&mut tree, &below, dir, &real, &mut journals, &mut temporaries) {
                search.failures.push((below, e));
            }
        }
        for (path, stat) in temporaries {
            let (parent, name) = split(&path);
            let dir = real.join(OsStr::from_bytes(parent));
            let state = judge(&dir, name, &stat, (&journals, search.is_incomplete), None);
            search.found.extend(state.map(|state| Leftover::new(path, &stat, state)));
        }
        search.found.sort_by(|a, b| a.path.cmp(&b.path));
        search._locks = journals.into_values().flatten().collect();
        Ok(search)
    }

    /// Opens a journal. One that cannot be opened for want of descriptors is a failure.
    fn open_journal(&mut self, dir: impl AsFd, name: &CStr, path: &[u8]) -> Option<(Found, Stat)> {
        job_of(name.to_bytes())?;
        let opened = match self.journals < SEARCHED_MAX {
            true => open_journal(dir, name),
            // Reported once.
            false if self.is_incomplete => Ok(None),
            false => {
                Err(io::Error::other(format!("more than {SEARCHED_MAX} journals; remove those found, and repeat")))
            }
        };
        let found = opened.unwrap_or_else(|e| {
            self.is_incomplete = true;
            self.failures.push((path.to_vec(), e));
            None
        });
        self.journals += usize::from(found.is_some());
        found
    }

    fn directory(
        &mut self,
        tree: &mut Walk,
        below: &[u8],
        dir: io::Result<(Arc<OwnedFd>, Stat)>,
        real: &Path,
        journals: &mut HashMap<PathBuf, Vec<Found>>,
        temporaries: &mut Vec<(Vec<u8>, Stat)>,
    ) -> io::Result<()> {
        let (dir, _) = dir?;
        for name in listing::names(&*dir)? {
            let name = name?;
            let path = join(below, name.to_bytes());
            let Ok(stat) = rustix::fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if FileType::from_raw_mode(stat.st_mode).is_dir() {
                tree.descend(&name)?;
            } else if temporary_of(name.to_bytes()).is_some() {
                temporaries.push((path, stat));
            } else if let Some((found, stat)) = self.open_journal(&dir, &name, &path) {
                self.found.push(Leftover::new(path, &stat, found.state));
                journals.entry(real.join(OsStr::from_bytes(below))).or_default().push(found);
            }
        }
        Ok(())
    }

    /// Removes a leftover.
    ///
    /// # Errors
    /// If it cannot be removed, or another entry has its name now.
    pub fn remove(&self, leftover: &Leftover) -> io::Result<()> {
        let (parent, name) = split(&leftover.path);
        let dir = beneath::open(&self.root, parent, OFlags::PATH | OFlags::DIRECTORY, Links::Never)?;
        let name = CString::new(name)?;
        let stat = rustix::fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW)?;
        if (stat.st_dev, stat.st_ino) != leftover.identity {
            return Err(io::Error::other("another entry has its name now"));
        }
        Ok(rustix::fs::unlinkat(&dir, &name, AtFlags::empty())?)
    }
}

/// Removes the journals of succeeded jobs from the root directory of a new job. Returns a report of leftovers of jobs other than
/// `own`. Best effort: ignores errors, and examines a limited number of names.
pub(super) fn survey(root: &OwnedFd, own: &[u8; 16]) -> Option<String> {
    let (mut journals, mut temporaries, mut found) = (Vec::new(), Vec::new(), Vec::new());
    for name in listing::names(root).ok()?.take(SURVEY_MAX).flatten() {
        if temporary_of(name.to_bytes()).is_some() {
            let stat = rustix::fs::statat(root, &name, AtFlags::SYMLINK_NOFOLLOW);
            temporaries.extend(stat.ok().map(|stat| (name, stat)));
        } else if journals.len() >= JOURNALS_MAX {
            // With thousands of jobs in one directory, each job would examine the files of all others.
            break;
        } else if job_of(name.to_bytes()).is_some_and(|job| job != *own)
            && let Ok(Some((journal, stat))) = open_journal(root, &name)
        {
            if journal.state == State::Complete {
                let _ = rustix::fs::unlinkat(root, &name, AtFlags::empty());
            } else {
                if journal.state == State::Unfinished {
                    found.push((name, stat.st_blocks));
                }
                journals.push(journal);
            }
        }
    }
    let here = Path::new("");
    let journals = HashMap::from([(here.to_path_buf(), journals)]);
    for (name, stat) in temporaries {
        if judge(here, name.to_bytes(), &stat, (&journals, false), Some(own)) == Some(State::Unfinished) {
            found.push((name, stat.st_blocks));
        }
    }
    if found.is_empty() {
        return None;
    }
    found.sort();
    let names: Vec<_> = found.iter().take(NAMED_MAX).map(|(name, _)| crate::escape(name.to_bytes())).collect();
    let more = found.len() - names.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let bytes: u64 = found.iter().map(|(_, blocks)| *blocks as u64 * 512).sum();
    Some(format!(
        "the destination holds leftovers of other, interrupted copies ({bytes} bytes on disk): {}{more}; 'thruway clean' \
         lists and removes them",
        names.join(", ")
    ))
}

/// Reports the journal of an interrupted copy that may have made the directory `dir`, an entry `name` of `above`: it is not much older
/// than the directory. Another user, or another spelling of a host, has another journal. Best effort: ignores errors, and examines a
/// limited number of names.
pub fn possible_maker(above: impl AsFd, dir: impl AsFd, name: &[u8]) -> Option<String> {
    let born = |dir: &dyn AsFd, name: &CStr| {
        let stat =
            rustix::fs::statx(dir, name, AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok()?;
        let has_birth = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
        has_birth.then(|| thruway_fs::identity::nanoseconds(stat.stx_btime))
    };
    let directory = born(&dir, c"")?;
    for journal in listing::names(&above).ok()?.take(SURVEY_MAX).flatten() {
        let Some(job) = job_of(journal.to_bytes()) else { continue };
        let Some(age) = born(&above, &journal).map(|born| directory.saturating_sub(born)) else { continue };
        let file =
            rustix::fs::openat(&above, &journal, OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
        let is_complete = file.is_ok_and(|file| journal::is_complete(&File::from(file), &job) == Some(true));
        if (0..=MAKER_AGE_MAX).contains(&age) && !is_complete {
            let name = crate::escape(name);
            return Some(format!(
                "{name} may be unfinished: an interrupted copy with the journal {} beside it may have made it; this copy goes into it",
                crate::escape(journal.to_bytes()),
            ));
        }
    }
    None
}

/// State of a temporary file; `None` if it is not a temporary file of a copy, or if it belongs to the job `own`.
fn judge(
    dir: &Path,
    name: &[u8],
    stat: &Stat,
    (journals, is_incomplete): (&HashMap<PathBuf, Vec<Found>>, bool),
    own: Option<&[u8; 16]>,
) -> Option<State> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    let plain = (kind.is_file() && stat.st_nlink == 1) || kind == FileType::Symlink;
    if !plain {
        return None;
    }
    let of = CString::new(temporary_of(name)?).ok()?;
    let is_of = |root: &Path, job: &[u8; 16]| {
        let below = dir.strip_prefix(root).map_or(&b""[..], |below| below.as_os_str().as_bytes());
        temp_name(&of, job, &key_of(&join(below, of.to_bytes()))).to_bytes() == name
    };
    if own.is_some_and(|own| is_of(dir, own)) {
        return None;
    }
    // A journal that is not known may be that of a running job.
    let mut running = is_incomplete;
    for root in dir.ancestors() {
        for journal in journals.get(root).into_iter().flatten() {
            if is_of(root, &journal.job) {
                return Some(if journal.state == State::InUse { State::InUse } else { State::Unfinished });
            }
            running |= journal.state == State::InUse;
        }
    }
    if !may_be_ours(stat) {
        return None;
    }
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
    Some(match now.saturating_sub(stat.st_mtime.max(stat.st_ctime)) < OWN_AGE_MAX_S {
        _ if running => State::InUse,
        true => State::Recent,
        false => State::Unfinished,
    })
}

/// True if the file belongs to the user of this process, or the process runs as root: daemons may have become another user.
fn may_be_ours(stat: &Stat) -> bool {
    let user = rustix::process::geteuid();
    user.is_root() || stat.st_uid == user.as_raw()
}

/// Job in the name of a journal; `None` for other names.
fn job_of(name: &[u8]) -> Option<[u8; 16]> {
    let digits = name.strip_prefix(JOURNAL_PREFIX)?.strip_suffix(JOURNAL_SUFFIX)?;
    let digits = std::str::from_utf8(digits).ok().filter(|d| d.len() == 32 && d.bytes().all(|b| b.is_ascii_hexdigit()));
    Some(u128::from_str_radix(digits?, 16).ok()?.to_be_bytes())
}

/// Opens a journal and tries to lock it; `None` if the name, the file type or the content is not that of a journal.
///
/// # Errors
/// If this process has too many open files.
fn open_journal(dir: impl AsFd, name: &CStr) -> io::Result<Option<(Found, Stat)>> {
    let Some(job) = job_of(name.to_bytes()) else { return Ok(None) };
    let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    // On NFS, an exclusive lock requires a file that is open for writing.
    let open = |access| rustix::fs::openat(&dir, name, flags | access, Mode::empty());
    let file = match open(OFlags::RDWR).or_else(|_| open(OFlags::RDONLY)) {
        Ok(file) => File::from(file),
        Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(e.into()),
        Err(_) => return Ok(None),
    };
    let stat = rustix::fs::fstat(&file)?;
    if !FileType::from_raw_mode(stat.st_mode).is_file() || stat.st_nlink != 1 || !may_be_ours(&stat) {
        return Ok(None);
    }
    let Some(complete) = journal::is_complete(&file, &job) else { return Ok(None) };
    let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    let state = match (locked, complete) {
        (false, _) => State::InUse,
        (true, true) => State::Complete,
        (true, false) => State::Unfinished,
    };
    Ok(Some((Found { job, state, _file: locked.then_some(file) }, stat)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::journal::{Journal, name_of};
    use crate::sink::made::Made;
    use std::fs;

    fn temporary(dir: &Path, root: &Path, name: &str, job: &[u8; 16]) -> PathBuf {
        let below = dir.strip_prefix(root).unwrap().join(name);
        let name = CString::new(name).unwrap();
        let temp = temp_name(&name, job, &key_of(below.as_os_str().as_bytes()));
        let path = dir.join(OsStr::from_bytes(temp.to_bytes()));
        fs::write(&path, "half").unwrap();
        path
    }

    fn journal(root: &Path, job: &[u8; 16]) -> Journal {
        let fd: Arc<OwnedFd> = Arc::new(File::open(root).unwrap().into());
        let (journal, _) = Journal::open(&fd, job).unwrap();
        journal.directory(&key_of(b"d"), Made::Begun(0));
        journal
    }

    fn states(dir: &Path) -> Vec<(String, State)> {
        let search = Search::new(dir).unwrap();
        assert!(search.failures.is_empty());
        let shown = |l: &Leftover| (String::from_utf8_lossy(&l.path).into_owned(), l.state);
        search.found.iter().map(shown).collect()
    }

    #[test]
    fn a_running_job_keeps_its_files_and_an_interrupted_one_does_not() {
        let lab = tempfile::tempdir().unwrap();
        let root = lab.path().join("root");
        fs::create_dir_all(root.join("sub")).unwrap();
        let (running, interrupted) = ([1; 16], [2; 16]);
        let held = journal(&root, &running);
        drop(journal(&root, &interrupted));
        let of_running = temporary(&root.join("sub"), &root, "a", &running);
        let of_interrupted = temporary(&root.join("sub"), &root, "b", &interrupted);
        let unknown = temporary(&root, &root, "c", &[3; 16]);
        for name in [".x.tw-0123", ".thruway-notes.journal", "plain"] {
            fs::write(root.join(name), "not ours").unwrap();
        }
        let name = |path: &Path| path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
        let at = |job: &[u8; 16]| name_of(job).into_string().unwrap();
        let mut expected = vec![
            (at(&running), State::InUse),
            (at(&interrupted), State::Unfinished),
            (name(&of_running), State::InUse),
            (name(&of_interrupted), State::Unfinished),
            (name(&unknown), State::InUse),
        ];
        expected.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(states(&root), expected);
        // A search of a directory below the root of the jobs finds the same states.
        let mut below = vec![
            (of_running.file_name().unwrap().to_string_lossy().into_owned(), State::InUse),
            (of_interrupted.file_name().unwrap().to_string_lossy().into_owned(), State::Unfinished),
        ];
        below.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(states(&root.join("sub")), below);
        // Without a running job, a temporary file without a journal is a leftover when it is a day old.
        drop(held);
        let state = || states(&root).into_iter().find(|(path, _)| *path == name(&unknown)).unwrap().1;
        assert_eq!(state(), State::Recent);
        let search = Search::new(&root).unwrap();
        for leftover in search.found.iter().filter(|l| l.state.is_removable()) {
            search.remove(leftover).unwrap();
        }
        drop(search);
        assert_eq!(states(&root), [(name(&unknown), State::Recent)]);
        assert_eq!(fs::read_dir(&root).unwrap().count(), 5, "other names are left alone");
    }

    #[test]
    fn a_search_with_too_many_journals_removes_no_temporary_files() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("sub")).unwrap();
        (0..SEARCHED_MAX + 5).for_each(|i| {
            let job = (i as u128 + 100).to_be_bytes();
            fs::write(root.path().join("sub").join(name_of(&job).to_str().unwrap()), "").unwrap();
        });
        let temp = temporary(root.path(), root.path(), "f", &[1; 16]);
        let week_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(7 * 86_400);
        fs::File::options().write(true).open(&temp).unwrap().set_modified(week_ago).unwrap();
        let search = Search::new(root.path()).unwrap();
        let error = search.failures.iter().map(|(_, e)| e.to_string()).collect::<Vec<_>>();
        assert!(matches!(&error[..], [one] if one.contains("more than 1000 journals")), "{error:?}");
        let states: Vec<State> = search.found.iter().filter(|l| l.path.starts_with(b".f")).map(|l| l.state).collect();
        assert_eq!((states, search.found.len()), (vec![State::InUse], SEARCHED_MAX + 1));
    }

    #[test]
    fn another_file_of_the_name_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        drop(journal(root.path(), &[1; 16]));
        let temp = temporary(root.path(), root.path(), "f", &[1; 16]);
        let search = Search::new(root.path()).unwrap();
        fs::rename(&temp, root.path().join("kept")).unwrap();
        fs::write(&temp, "another").unwrap();
        let leftover = search.found.iter().find(|l| l.path.starts_with(b".f")).unwrap();
        assert!(search.remove(leftover).is_err() && temp.exists());
        // A file with the name, but not the content of a journal is ignored.
        let name = name_of(&[9; 16]).into_string().unwrap();
        fs::write(root.path().join(&name), "not a journal, but as long as a record of one would have to be.").unwrap();
        assert!(states(root.path()).iter().all(|(path, _)| *path != name));
    }

    #[test]
    fn a_later_job_removes_complete_journals_and_names_the_rest() {
        let root = tempfile::tempdir().unwrap();
        let fd: OwnedFd = File::open(root.path()).unwrap().into();
        let own = [7; 16];
        let done = journal(root.path(), &[1; 16]);
        done.complete();
        assert_eq!(survey(&fd, &own), None, "it is held");
        drop(done);
        assert_eq!(states(root.path())[0].1, State::Complete);
        temporary(root.path(), root.path(), "mine", &own);
        assert_eq!(survey(&fd, &own), None);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "the complete journal is removed");
        drop(journal(root.path(), &[2; 16]));
        let temp = temporary(root.path(), root.path(), "f", &[2; 16]);
        let said = survey(&fd, &own).unwrap();
        assert!(said.contains(&*temp.file_name().unwrap().to_string_lossy()) && said.contains(".journal"), "{said}");
        // After a later attempt at the job, the journal is no longer complete.
        let continued = journal(root.path(), &[2; 16]);
        continued.complete();
        drop(continued);
        drop(journal(root.path(), &[2; 16]));
        assert!(states(root.path()).iter().all(|(_, state)| *state != State::Complete));
    }
}
