//! What a peer asks for, checked against its rights and opened.

use super::{DEV_EXPORT, Shared};
use crate::access::{Allowed, Principal, Rights};
use crate::session::SessionError;
use crate::sink::{self, Prepared, RootNames, Target, Trust};
use crate::source::{Root, destination_in};
use crate::wire::{self, AbortCode, Destination, Direction, ListEntry, SessionRequest};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use thruway_fs::beneath::{self, Links};
use thruway_fs::listing::{self, Names};

/// What was asked for, opened.
pub(super) enum Work {
    Push(Box<Prepared>, Push),
    Pull(Vec<Root>),
    List(Listing),
}

/// Where a push goes.
pub(super) struct Push {
    /// The name a single source gets instead of its own.
    pub(super) rename: Option<Vec<u8>>,
    /// For a source on this very machine.
    pub(super) destination: Option<Destination>,
}

/// Why a request is refused.
pub(super) type Refusal = (AbortCode, String);

fn refuse<T>(why: impl Into<String>) -> Result<T, Refusal> {
    Err((AbortCode::Refused, why.into()))
}

/// An export that is being served.
pub(super) struct Served {
    pub(super) name: String,
    pub(super) root: Arc<OwnedFd>,
    pub(super) read_only: bool,
    /// Paths are the peer's own affair: links lead anywhere, as for a user of this machine.
    pub(super) unconfined: bool,
    /// The served directory is the root directory of this machine, so messages show its paths with a leading slash.
    pub(super) is_top: bool,
}

impl Served {
    /// Path below the served directory, for messages; the name of the export for the directory itself.
    fn shown(&self, path: &[u8]) -> String {
        if path.is_empty() && !self.is_top {
            return crate::escape(self.name.as_bytes());
        }
        format!("{}{}", if self.is_top { "/" } else { "" }, crate::escape(path))
    }

    fn open_dir(&self, base: &OwnedFd, path: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        if !self.unconfined {
            return beneath::open(base, path, flags, Links::Inside);
        }
        let path = if path.is_empty() { &b"."[..] } else { path };
        rustix::fs::openat(base, Path::new(std::ffi::OsStr::from_bytes(path)), flags, Mode::empty())
    }
}

fn sentence(e: Errno) -> String {
    match e {
        Errno::XDEV => "leads out of the export".into(),
        e => std::io::Error::from(e).to_string(),
    }
}

/// Opens what was asked for, as far as the principal may.
pub(super) fn open(shared: &Shared, asked: &SessionRequest, principal: &Principal) -> Result<Work, Refusal> {
    let refused = |e: wire::Malformed| (AbortCode::Refused, e.to_string());
    let verify = wire::algorithm(asked.verify).map_err(refused)?;
    crate::filter::Filter::new(&asked.options).or_else(|e| refuse(e.to_string()))?;
    let config = &shared.config;
    if config.require_encryption && asked.data_key.is_none() && asked.direction != Direction::List {
        return refuse("this daemon insists on encryption (--encrypt on)");
    }
    if config.require_verification
        && verify == thruway_engine::digest::Algorithm::None
        && asked.direction != Direction::List
    {
        return refuse("this daemon insists on verification (--verify xxh3 or blake3)");
    }
    if asked.export == DEV_EXPORT {
        return open_dev(asked);
    }
    if asked.export.is_empty() {
        return match asked.direction {
            Direction::List => Ok(Work::List(Listing::of(exports(shared, principal)))),
            _ => refuse("no export is named; write tw://host/export/path ('thruway ls tw://host' lists them)"),
        };
    }
    let export = shared.exports.get(&asked.export).filter(|_| principal.knows(&asked.export));
    let Some(export) = export else {
        let export = crate::escape(&asked.export);
        return refuse(format!("no export '{export}' on this daemon ('thruway ls tw://host' lists them)"));
    };
    let paths = asked.sources.iter().flat_map(|s| [&s.path, &s.name]).chain([&asked.path]);
    for path in paths.filter(|_| !export.unconfined) {
        wire::check_path(path).map_err(refused)?;
    }
    let allowed = |path: &[u8], needed: Rights, verb: &str| {
        let allowed = principal.allowed(&asked.export, path, needed);
        match allowed.is_empty() {
            true => refuse(format!("you have no right to {verb} here ('{}')", crate::escape(path))),
            false => Ok(allowed),
        }
    };
    // Reading needs no other right than the one that the outermost place gives.
    let readable = |path: &[u8]| -> Result<usize, Refusal> {
        Ok(allowed(path, Rights::READ, "read")?.last().map_or(0, |allowed| allowed.base))
    };
    match asked.direction {
        Direction::Push if export.read_only => refuse(format!("export '{}' is read-only", asked.export)),
        Direction::Push if asked.path.split(|byte| *byte == b'/').any(sink::is_own_name) => {
            refuse(format!("{}: a name of Thruway's journals and temporary files", export.shown(&asked.path)))
        }
        Direction::Push => {
            let (base, path, rights) = writable(export, &asked.path, &allowed(&asked.path, Rights::CREATE, "write")?)?;
            if asked.options.delete && !rights.contains(Rights::DELETE) {
                return refuse("you have no right to delete here (--delete)");
            }
            let options = &asked.options;
            let has_patterns = !(options.exclude.is_empty() && options.include.is_empty());
            if options.delete && has_patterns && !rights.contains(Rights::READ) {
                // Counts and failures would depend on whether names match.
                return refuse("--delete with patterns requires the right to read");
            }
            // What one principal leaves unfinished is no other's to go on with.
            let job = principal.job(&asked.job);
            open_push(export, asked, job, (&base, path, rights))
        }
        Direction::Pull => {
            // One descriptor for the sources in one place of the key.
            let mut bases: HashMap<&[u8], Arc<OwnedFd>> = HashMap::new();
            let mut roots = Vec::new();
            for s in &asked.sources {
                let base = readable(&s.path)?;
                let path = &s.path[..];
                let (base, rest) = match bases.get(&path[..base]) {
                    Some(known) => (Arc::clone(known), path[base..].strip_prefix(b"/").unwrap_or(&path[base..])),
                    None => {
                        let opened = base_of(export, path, base)?;
                        bases.insert(&path[..base], Arc::clone(&opened.0));
                        opened
                    }
                };
                let path = Path::new(std::ffi::OsStr::from_bytes(rest)).to_path_buf();
                let (confined, is_top) = (!export.unconfined, export.is_top && s.path.len() == rest.len());
                roots.push(Root { beneath: Some(base), confined, is_top, path, name: s.name.clone() });
            }
            Ok(Work::Pull(roots))
        }
        Direction::List => {
            let base = readable(&asked.path)?;
            let (base, rest) = base_of(export, &asked.path, base)?;
            list(export, &base, rest).map(Work::List)
        }
    }
}

/// The directory that the peer must not leave upwards, and the path below it.
fn base_of<'a>(export: &Served, path: &'a [u8], base: usize) -> Result<(Arc<OwnedFd>, &'a [u8]), Refusal> {
    if base == 0 {
        return Ok((Arc::clone(&export.root), path));
    }
    let (below, rest) = path.split_at(base);
    let failed = |e| (AbortCode::Refused, format!("{}: {}", export.shown(below), sentence(e)));
    // A client with the right to create entries above the place could make it a link.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = match beneath::open(&export.root, below, flags, Links::Never) {
        Err(Errno::LOOP) => {
            let why = format!("{}: a symbolic link is on the way to the place of the key", export.shown(below));
            return refuse(why);
        }
        other => other.map_err(failed)?,
    };
    Ok((Arc::new(opened), rest.strip_prefix(b"/").unwrap_or(rest)))
}

/// The place with the most rights that is there, the path below it, and the rights.
fn writable<'a>(
    export: &Served,
    path: &'a [u8],
    places: &[Allowed],
) -> Result<(Arc<OwnedFd>, &'a [u8], Rights), Refusal> {
    let mut opened = refuse("you have no right to write here");
    for &Allowed { rights, base } in places {
        opened = base_of(export, path, base).map(|(base, rest)| (base, rest, rights));
        if opened.is_ok() {
            break;
        }
    }
    opened
}

fn open_dev(asked: &SessionRequest) -> Result<Work, Refusal> {
    match asked.direction {
        Direction::Push if asked.path == b"null" => {
            let target = Target {
                root: None,
                made: None,
                job: asked.job,
                named: RootNames::default(),
                trust: Trust::Peer,
                replace: true,
                confined: true,
                listed: false,
                note: None,
            };
            let prepared = Prepared::new(target, &asked.options).map_err(told)?;
            Ok(Work::Push(Box::new(prepared), Push { rename: None, destination: None }))
        }
        Direction::Pull if asked.sources.len() == 1 && asked.sources[0].path == b"zero" => {
            let name = asked.sources[0].name.clone();
            let path = "/dev/zero".into();
            Ok(Work::Pull(vec![Root { beneath: None, confined: false, is_top: false, path, name }]))
        }
        Direction::List => Ok(Work::List(Listing::of(Vec::new()))),
        _ => refuse(format!("export '{DEV_EXPORT}' has only 'null' to write to and 'zero' to read from")),
    }
}

/// Where a push goes: an existing directory takes the sources by their names; otherwise a
/// single source gets the target's name, unless a slash asks for a directory. An attempt that
/// is repeated goes where the first one went, though the target is there by now.
fn open_push(
    export: &Served,
    asked: &SessionRequest,
    job: [u8; 16],
    (base, path, rights): (&OwnedFd, &[u8], Rights),
) -> Result<Work, Refusal> {
    let shown = |e: Errno| (AbortCode::Refused, format!("{}: {}", export.shown(&asked.path), sentence(e)));
    let by_name = || -> Result<(OwnedFd, Option<Vec<u8>>), Refusal> {
        let (parent, name) = beneath::split(path);
        Ok((export.open_dir(base, parent).map_err(shown)?, Some(name.to_vec())))
    };
    let (mut made, mut note) = (None, None);
    let (dir, rename) = match export.open_dir(base, path) {
        Ok(dir) if asked.into_directory || path.is_empty() => (dir, None),
        Ok(dir) => match by_name() {
            Ok((parent, Some(name))) => {
                let unknown = |e: std::io::Error| (AbortCode::Refused, format!("{}: {e}", export.shown(&asked.path)));
                if asked.renamed || Prepared::was_interrupted(&parent, &job, &name).map_err(unknown)? {
                    (parent, Some(name))
                } else {
                    note =
                        sink::leftovers::possible_maker(&parent, &dir, &name).filter(|_| rights.contains(Rights::READ));
                    (dir, None)
                }
            }
            _ => (dir, None),
        },
        Err(Errno::NOENT) if asked.into_directory && asked.options.dry_run => {
            // The copy itself would create it in the directory above.
            by_name()?;
            (sink::nowhere().map_err(|e| (AbortCode::Failed, e.to_string()))?, None)
        }
        Err(Errno::NOENT) if asked.into_directory => {
            let failed = |e: std::io::Error| (AbortCode::Refused, format!("{}: {e}", export.shown(&asked.path)));
            let (parent, name) = beneath::split(path);
            let above = export.open_dir(base, parent).map_err(shown)?;
            match sink::make_destination(&above, name).map_err(failed)? {
                Some((dir, after)) => {
                    made = Some(after);
                    (dir, None)
                }
                // Another copy has made it.
                None => (export.open_dir(base, path).map_err(shown)?, None),
            }
        }
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) if !asked.into_directory && !path.is_empty() => by_name()?,
        Err(e) => return Err(shown(e)),
    };
    let destination = destination_in(&dir, rename.clone()).map_err(shown)?;
    let target = Target {
        root: Some(Arc::new(dir)),
        made,
        job,
        named: match &rename {
            Some(name) => RootNames::destination(name.clone()),
            // Older clients do not send the names of their sources.
            None => {
                let names: Vec<_> = asked.sources.iter().map(|s| s.name.clone()).collect();
                RootNames { names: Some(names).filter(|names| !names.is_empty()), ..RootNames::default() }
            }
        },
        trust: rights.trust(),
        replace: rights.contains(Rights::REPLACE),
        confined: !export.unconfined,
        listed: rights.contains(Rights::READ),
        note,
    };
    let prepared = Prepared::new(target, &asked.options).map_err(told)?;
    Ok(Work::Push(Box::new(prepared), Push { rename, destination: Some(destination) }))
}

fn told(error: SessionError) -> Refusal {
    (error.code().unwrap_or(AbortCode::Failed), error.to_string())
}

/// The exports that a principal knows, as directories.
fn exports(shared: &Shared, principal: &Principal) -> Vec<ListEntry> {
    let known = shared.exports.iter().filter(|(name, _)| principal.knows(name));
    let mut entries: Vec<ListEntry> = known
        .filter_map(|(name, export)| rustix::fs::fstat(&export.root).ok().map(|stat| entry(name.as_bytes(), &stat)))
        .collect();
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    entries
}

fn entry(name: &[u8], stat: &rustix::fs::Stat) -> ListEntry {
    ListEntry { name: name.to_vec(), mode: stat.st_mode, size: stat.st_size as u64, mtime: stat.st_mtime }
}

/// The lines of a listing, in no order: a directory is read in pieces, so that a session keeps few entries in memory.
pub(super) struct Listing {
    /// The lines that need no directory.
    known: std::vec::IntoIter<ListEntry>,
    directory: Option<Directory>,
}

/// A directory that is being listed.
struct Directory {
    dir: OwnedFd,
    names: Names,
    /// Its path, for messages.
    shown: String,
}

impl Listing {
    fn of(entries: Vec<ListEntry>) -> Listing {
        Listing { known: entries.into_iter(), directory: None }
    }

    fn of_directory(dir: OwnedFd, shown: String) -> Result<Listing, Refusal> {
        let names = listing::names(&dir).map_err(|e| (AbortCode::Refused, format!("{shown}: {}", sentence(e))))?;
        Ok(Listing { known: Vec::new().into_iter(), directory: Some(Directory { dir, names, shown }) })
    }

    /// The next `most` lines at most, and whether the listing ends with them.
    ///
    /// # Errors
    /// If the directory cannot be read any further.
    pub(super) fn piece(&mut self, most: usize) -> Result<(Vec<ListEntry>, bool), Refusal> {
        let mut lines: Vec<ListEntry> = self.known.by_ref().take(most).collect();
        if let Some(directory) = &mut self.directory {
            while lines.len() < most {
                match directory.next() {
                    Some(line) => lines.push(line?),
                    None => return Ok((lines, true)),
                }
            }
            return Ok((lines, false));
        }
        Ok((lines, self.known.len() == 0))
    }
}

impl Directory {
    fn next(&mut self) -> Option<Result<ListEntry, Refusal>> {
        let failed = |e: Errno| (AbortCode::Refused, format!("{}: {}", self.shown, sentence(e)));
        loop {
            let name = match self.names.next()? {
                Ok(name) => name,
                Err(e) => return Some(Err(failed(e))),
            };
            match rustix::fs::statat(&self.dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => return Some(Ok(entry(name.to_bytes(), &stat))),
                // Removed since its name was read.
                Err(Errno::NOENT) => {}
                Err(e) => {
                    let (code, why) = failed(e);
                    return Some(Err((code, format!("{why} ('{}')", crate::escape(name.to_bytes())))));
                }
            }
        }
    }
}

fn list(export: &Served, root: &OwnedFd, path: &[u8]) -> Result<Listing, Refusal> {
    let failed = |e: Errno| (AbortCode::Refused, format!("{}: {}", export.shown(path), sentence(e)));
    match export.open_dir(root, path) {
        Ok(dir) => Listing::of_directory(dir, export.shown(path)),
        Err(Errno::NOTDIR) => {
            let (parent, name) = beneath::split(path);
            let dir = export.open_dir(root, parent).map_err(failed)?;
            let os_name = Path::new(std::ffi::OsStr::from_bytes(name));
            let stat = rustix::fs::statat(&dir, os_name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
            Ok(Listing::of(vec![entry(name, &stat)]))
        }
        Err(e) => Err(failed(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs;

    fn listing_of(dir: &Path) -> Listing {
        Listing::of_directory(fs::File::open(dir).unwrap().into(), "shown".into()).ok().unwrap()
    }

    #[test]
    fn a_listing_comes_in_pieces_with_each_entry_once() {
        let dir = tempfile::tempdir().unwrap();
        let expected: BTreeSet<_> = (0..2400).map(|n| format!("{n}").into_bytes()).collect();
        for name in &expected {
            fs::write(dir.path().join(std::str::from_utf8(name).unwrap()), "x").unwrap();
        }
        let (mut listing, mut found, mut pieces) = (listing_of(dir.path()), BTreeSet::new(), 0);
        loop {
            let (lines, last) = listing.piece(24).ok().unwrap();
            pieces += 1;
            assert!(lines.len() == 24 || last, "{} lines", lines.len());
            for line in lines {
                assert_eq!((line.size, line.mode & 0o170_000), (1, 0o100_000));
                assert!(found.insert(line.name));
            }
            if last {
                break;
            }
        }
        assert_eq!((found, pieces), (expected, 101));
        let mut few = Listing::of(vec![entry(b"a", &rustix::fs::stat(dir.path()).unwrap()); 3]);
        let mut next = || few.piece(2).map(|(lines, last)| (lines.len(), last)).ok().unwrap();
        assert_eq!((next(), next()), ((2, false), (1, true)));
    }

    #[test]
    fn a_directory_that_changes_is_listed_without_what_is_gone_and_one_that_vanishes_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d");
        fs::create_dir(&path).unwrap();
        for n in 0..10_000 {
            fs::write(path.join(format!("{n}-{}", "n".repeat(100))), "").unwrap();
        }
        let mut listing = listing_of(&path);
        assert_eq!(listing.piece(24).ok().unwrap().0.len(), 24);
        fs::remove_dir_all(&path).unwrap();
        let refused = loop {
            match listing.piece(24) {
                Ok((lines, last)) => assert!(lines.is_empty() && !last, "the list is not complete"),
                Err(refused) => break refused,
            }
        };
        assert_eq!(refused, (AbortCode::Refused, "shown: No such file or directory (os error 2)".into()));
    }
}
