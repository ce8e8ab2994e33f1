//! The disk: files and directories, what becomes of them when something fails, and what is to fail.

use crate::{Content, Names};
use fastrand::Rng;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a disk is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Op {
    Lookup,
    Stat,
    SetAttributes,
    Create,
    MakeDir,
    Symlink,
    Link,
    Unlink,
    RemoveDir,
    Rename,
    Open,
    OpenDir,
    List,
    Read,
    Write,
    Sync,
    SyncDir,
    Seek,
    Allocate,
    ReadLink,
    GetAttribute,
    SetAttribute,
    StatFs,
    Close,
}

impl Op {
    /// All of them.
    pub const ALL: [Op; 24] = [
        Op::Lookup,
        Op::Stat,
        Op::SetAttributes,
        Op::Create,
        Op::MakeDir,
        Op::Symlink,
        Op::Link,
        Op::Unlink,
        Op::RemoveDir,
        Op::Rename,
        Op::Open,
        Op::OpenDir,
        Op::List,
        Op::Read,
        Op::Write,
        Op::Sync,
        Op::SyncDir,
        Op::Seek,
        Op::Allocate,
        Op::ReadLink,
        Op::GetAttribute,
        Op::SetAttribute,
        Op::StatFs,
        Op::Close,
    ];
}

/// Requests that fail.
#[derive(Debug, Clone)]
pub struct Fault {
    /// Requests of this kind,
    pub op: Op,
    /// of a file whose name contains this (for requests by name, and reads and writes of files that were created or
    /// looked up by it),
    pub of: String,
    /// after so many others,
    pub skip: u64,
    /// and so many of them,
    pub times: u64,
    /// fail with this error,
    pub error: Errno,
    /// although what they ask for is done.
    pub done_all_the_same: bool,
}

impl Fault {
    /// The first request of this kind fails with `EIO`.
    pub fn once(op: Op) -> Fault {
        let of = String::new();
        Fault { op, of, skip: 0, times: 1, error: Errno::IO, done_all_the_same: false }
    }

    /// All requests of this kind fail with `EIO`.
    pub fn always(op: Op) -> Fault {
        Fault { times: u64::MAX, ..Fault::once(op) }
    }
}

pub(crate) const ROOT: u64 = 1;

/// Permissions, owners, times, extended attributes.
#[derive(Debug, Clone)]
pub(crate) struct Attributes {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) accessed: SystemTime,
    pub(crate) modified: SystemTime,
    pub(crate) changed: SystemTime,
    pub(crate) extended: BTreeMap<OsString, Vec<u8>>,
}

#[derive(Debug)]
pub(crate) enum Kind {
    File(Content),
    Dir,
    Symlink(PathBuf),
    Special(u32),
}

#[derive(Debug)]
pub(crate) struct Node {
    /// What it is called by the kernel and in `stat`. Comes back when the file has gone.
    pub(crate) number: u64,
    pub(crate) kind: Kind,
    pub(crate) attributes: Attributes,
    durable: Attributes,
    pub(crate) links: u32,
    /// The last name it was given.
    name: String,
    /// How often the kernel has been told of it.
    lookups: u64,
}

/// A disk with a file system on it.
pub(crate) struct Tree {
    /// By a number that never comes back.
    nodes: BTreeMap<u64, Node>,
    /// Nodes by the numbers that are shown.
    numbers: BTreeMap<u64, u64>,
    names: Names<(u64, OsString)>,
    next: u64,
    pub(crate) random: Rng,
    pub(crate) page: usize,
    /// The clock shows multiples of this.
    pub(crate) tick: Duration,
    /// Bytes that files may have together.
    pub(crate) room: Option<u64>,
    /// Reads and writes are done in part.
    pub(crate) short: bool,
    /// No `fallocate`, no `SEEK_HOLE`, no extended attributes.
    pub(crate) plain: bool,
    pub(crate) faults: Vec<Fault>,
    /// Operations until write-back fails.
    pub(crate) lose_after: Option<u64>,
}

type Result<T> = std::result::Result<T, Errno>;

/// What is changed of a file's attributes.
#[derive(Default)]
pub(crate) struct Changes {
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) size: Option<u64>,
    pub(crate) accessed: Option<Option<SystemTime>>,
    pub(crate) modified: Option<Option<SystemTime>>,
}

impl Tree {
    pub(crate) fn new(seed: u64) -> Tree {
        let mut tree = Tree {
            nodes: BTreeMap::new(),
            numbers: BTreeMap::new(),
            names: Names::default(),
            next: ROOT,
            random: Rng::with_seed(seed),
            page: 4096,
            tick: Duration::from_nanos(1),
            room: None,
            short: false,
            plain: false,
            faults: Vec::new(),
            lose_after: None,
        };
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        tree.add(Kind::Dir, 0o755, uid, gid);
        tree.nodes.get_mut(&ROOT).expect("just made").lookups = 1;
        tree
    }

    fn now(&self) -> SystemTime {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let tick = self.tick.as_nanos().max(1);
        UNIX_EPOCH + Duration::from_nanos((now.as_nanos() / tick * tick) as u64)
    }

    fn add(&mut self, kind: Kind, mode: u32, uid: u32, gid: u32) -> u64 {
        let (id, now) = (self.next, self.now());
        self.next += 1;
        let number = (ROOT..).find(|n| !self.numbers.contains_key(n)).expect("there are more numbers than files");
        let attributes =
            Attributes { mode, uid, gid, accessed: now, modified: now, changed: now, extended: BTreeMap::new() };
        let durable = attributes.clone();
        let node = Node { number, kind, attributes, durable, links: 0, name: String::new(), lookups: 0 };
        self.nodes.insert(id, node);
        self.numbers.insert(number, id);
        id
    }

    fn id(&self, number: u64) -> Result<u64> {
        self.numbers.get(&number).copied().ok_or(Errno::STALE)
    }

    pub(crate) fn node(&self, number: u64) -> Result<&Node> {
        Ok(&self.nodes[&self.id(number)?])
    }

    fn node_mut(&mut self, number: u64) -> Result<&mut Node> {
        let id = self.id(number)?;
        Ok(self.nodes.get_mut(&id).expect("every number is a node's"))
    }

    pub(crate) fn name_of(&self, number: u64) -> &str {
        self.node(number).map_or("", |node| &node.name)
    }

    /// Something of a file has been changed.
    fn changed(&mut self, id: u64, content: bool) {
        let now = self.now();
        let attributes = &mut self.nodes.get_mut(&id).expect("it is being changed").attributes;
        attributes.changed = now;
        if content {
            attributes.modified = now;
        }
    }

    fn entry(&self, parent: u64, name: &OsStr) -> Result<(u64, Option<u64>)> {
        let dir = self.id(parent)?;
        if !matches!(self.nodes[&dir].kind, Kind::Dir) {
            return Err(Errno::NOTDIR);
        }
        Ok((dir, self.names.get(&(dir, name.into()))))
    }

    fn existing(&self, parent: u64, name: &OsStr) -> Result<(u64, u64)> {
        let (dir, id) = self.entry(parent, name)?;
        Ok((dir, id.ok_or(Errno::NOENT)?))
    }

    /// The file of a name, of which the kernel has then been told.
    pub(crate) fn lookup(&mut self, parent: u64, name: &OsStr) -> Result<u64> {
        let (_, id) = self.existing(parent, name)?;
        Ok(self.tell(id))
    }

    fn tell(&mut self, id: u64) -> u64 {
        let node = self.nodes.get_mut(&id).expect("every name is a node's");
        node.lookups += 1;
        node.number
    }

    pub(crate) fn forget(&mut self, number: u64, count: u64) {
        let Ok(id) = self.id(number) else { return };
        let node = self.nodes.get_mut(&id).expect("every number is a node's");
        node.lookups = node.lookups.saturating_sub(count);
        self.drop_if_gone(id);
    }

    /// A file without a name that nobody has open gives its number back. What it was may still be on the medium.
    fn drop_if_gone(&mut self, id: u64) {
        let node = &self.nodes[&id];
        if node.links == 0 && node.lookups == 0 {
            self.numbers.remove(&node.number);
        }
    }

    pub(crate) fn make(&mut self, parent: u64, name: &OsStr, kind: Kind, mode: u32, owner: (u32, u32)) -> Result<u64> {
        let (dir, there) = self.entry(parent, name)?;
        if there.is_some() {
            return Err(Errno::EXIST);
        }
        if self.room == Some(0) {
            return Err(Errno::NOSPC);
        }
        let id = self.add(kind, mode, owner.0, owner.1);
        self.give_name(dir, name, id);
        Ok(self.tell(id))
    }

    fn give_name(&mut self, dir: u64, name: &OsStr, id: u64) {
        self.names.link((dir, name.into()), id);
        let node = self.nodes.get_mut(&id).expect("it is being named");
        node.links += 1;
        node.name = name.to_string_lossy().into_owned();
        self.changed(id, false);
        self.changed(dir, true);
    }

    fn take_name(&mut self, dir: u64, name: &OsStr, id: u64) {
        self.names.unlink(&(dir, name.into()));
        self.lost_name(id);
        self.changed(dir, true);
    }

    fn lost_name(&mut self, id: u64) {
        self.nodes.get_mut(&id).expect("it has had a name").links -= 1;
        self.changed(id, false);
        self.drop_if_gone(id);
    }

    pub(crate) fn link(&mut self, number: u64, parent: u64, name: &OsStr) -> Result<u64> {
        let (id, (dir, there)) = (self.id(number)?, self.entry(parent, name)?);
        if there.is_some() {
            return Err(Errno::EXIST);
        }
        self.give_name(dir, name, id);
        Ok(self.tell(id))
    }

    pub(crate) fn remove(&mut self, parent: u64, name: &OsStr, is_dir: bool) -> Result<()> {
        let (dir, id) = self.existing(parent, name)?;
        match (&self.nodes[&id].kind, is_dir) {
            (Kind::Dir, false) => return Err(Errno::ISDIR),
            (Kind::Dir, true) if self.entries(id).next().is_some() => return Err(Errno::NOTEMPTY),
            (Kind::Dir, true) | (_, false) => {}
            (_, true) => return Err(Errno::NOTDIR),
        }
        self.take_name(dir, name, id);
        Ok(())
    }

    fn entries(&self, id: u64) -> impl Iterator<Item = (&OsStr, u64)> {
        self.names.range((id, OsString::new())..(id + 1, OsString::new())).map(|((_, name), id)| (name.as_os_str(), id))
    }

    pub(crate) fn rename(&mut self, from: (u64, &OsStr), to: (u64, &OsStr), exchange: bool, new: bool) -> Result<()> {
        let (from_dir, id) = self.existing(from.0, from.1)?;
        let (to_dir, there) = self.entry(to.0, to.1)?;
        if exchange {
            return Err(Errno::INVAL);
        }
        match there {
            Some(_) if new => return Err(Errno::EXIST),
            Some(there) if there == id => return Ok(()),
            Some(there) => match (&self.nodes[&id].kind, &self.nodes[&there].kind) {
                (Kind::Dir, Kind::Dir) if self.entries(there).next().is_some() => return Err(Errno::NOTEMPTY),
                (Kind::Dir, Kind::Dir) => {}
                (Kind::Dir, _) => return Err(Errno::NOTDIR),
                (_, Kind::Dir) => return Err(Errno::ISDIR),
                _ => {}
            },
            None => {}
        }
        self.names.rename(&(from_dir, from.1.into()), (to_dir, to.1.into()));
        self.nodes.get_mut(&id).expect("it has a name").name = to.1.to_string_lossy().into_owned();
        [from_dir, to_dir].into_iter().for_each(|dir| self.changed(dir, true));
        self.changed(id, false);
        if let Some(there) = there {
            self.lost_name(there);
        }
        Ok(())
    }

    /// Names, numbers and nodes of a directory, in an order of its own.
    pub(crate) fn list(&mut self, number: u64) -> Result<Vec<(OsString, u64)>> {
        let id = self.id(number)?;
        let mut all: Vec<_> =
            self.entries(id).map(|(name, child)| (name.to_owned(), self.nodes[&child].number)).collect();
        self.random.shuffle(&mut all);
        Ok(all)
    }

    fn content(&mut self, number: u64) -> Result<&mut Content> {
        match &mut self.node_mut(number)?.kind {
            Kind::File(content) => Ok(content),
            Kind::Dir => Err(Errno::ISDIR),
            Kind::Symlink(_) | Kind::Special(_) => Err(Errno::INVAL),
        }
    }

    pub(crate) fn read(&mut self, number: u64, at: u64, len: usize) -> Result<Vec<u8>> {
        let short = self.short && self.random.u8(..3) == 0;
        let len = if short { self.random.usize(1..=len.max(1)) } else { len };
        let bytes = self.content(number)?.bytes();
        let from = bytes.len().min(at as usize);
        Ok(bytes[from..bytes.len().min(from + len)].to_vec())
    }

    pub(crate) fn write(&mut self, number: u64, at: u64, data: &[u8]) -> Result<usize> {
        let short = self.short && self.random.u8(..3) == 0;
        let data = if short { &data[..self.random.usize(1..=data.len().max(1)).min(data.len())] } else { data };
        self.grow(number, at + data.len() as u64)?;
        self.content(number)?.write(at as usize, data);
        self.changed(self.id(number)?, true);
        Ok(data.len())
    }

    /// Whether there is room for a file to be so long.
    fn grow(&mut self, number: u64, len: u64) -> Result<()> {
        let Some(room) = self.room else { return Ok(()) };
        let now = self.content(number)?.bytes().len() as u64;
        if len > now && self.used() + (len - now) > room { Err(Errno::NOSPC) } else { Ok(()) }
    }

    /// Bytes that files have.
    pub(crate) fn used(&self) -> u64 {
        let len = |id: &u64| match &self.nodes[id].kind {
            Kind::File(content) => content.bytes().len() as u64,
            _ => 0,
        };
        self.numbers.values().map(len).sum()
    }

    pub(crate) fn allocate(&mut self, number: u64, at: u64, len: u64, mode: i32) -> Result<()> {
        if self.plain {
            return Err(Errno::OPNOTSUPP);
        }
        let (at, len) = (at as usize, len as usize);
        let now = self.content(number)?.bytes().len();
        let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        if !keeps_size && at + len > now {
            self.grow(number, (at + len) as u64)?;
            self.content(number)?.resize(at + len);
        }
        if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0 {
            let content = self.content(number)?;
            let end = content.bytes().len().min(at + len);
            if at < end {
                content.write(at, &vec![0; end - at]);
            }
        }
        self.changed(self.id(number)?, true);
        Ok(())
    }

    /// The next data or hole. A page of zeroes is a hole.
    pub(crate) fn seek(&mut self, number: u64, at: u64, hole: bool) -> Result<u64> {
        let (page, plain) = (self.page, self.plain);
        let bytes = self.content(number)?.bytes();
        if plain {
            return Err(Errno::INVAL);
        }
        if at >= bytes.len() as u64 {
            return Err(Errno::NXIO);
        }
        let is_hole = |index: usize| bytes[index * page..bytes.len().min((index + 1) * page)].iter().all(|b| *b == 0);
        let found = (at as usize / page..bytes.len().div_ceil(page)).find(|index| is_hole(*index) == hole);
        match found {
            Some(index) => Ok(at.max((index * page) as u64)),
            None if hole => Ok(bytes.len() as u64),
            None => Err(Errno::NXIO),
        }
    }

    pub(crate) fn set(&mut self, number: u64, changes: &Changes) -> Result<()> {
        if let Some(size) = changes.size {
            self.grow(number, size)?;
            self.content(number)?.resize(size as usize);
        }
        let (id, now) = (self.id(number)?, self.now());
        self.changed(id, changes.size.is_some());
        let attributes = &mut self.node_mut(number)?.attributes;
        let time = |given: Option<Option<SystemTime>>, old| given.map_or(old, |time| time.unwrap_or(now));
        attributes.mode = changes.mode.unwrap_or(attributes.mode) & 0o7777;
        attributes.uid = changes.uid.unwrap_or(attributes.uid);
        attributes.gid = changes.gid.unwrap_or(attributes.gid);
        attributes.accessed = time(changes.accessed, attributes.accessed);
        attributes.modified = time(changes.modified, attributes.modified);
        Ok(())
    }

    pub(crate) fn set_extended(&mut self, number: u64, name: &OsStr, value: Option<&[u8]>) -> Result<()> {
        if self.plain {
            return Err(Errno::OPNOTSUPP);
        }
        let extended = &mut self.node_mut(number)?.attributes.extended;
        match value {
            Some(value) => drop(extended.insert(name.into(), value.into())),
            None => drop(extended.remove(name).ok_or(Errno::NODATA)?),
        }
        Ok(())
    }

    /// Content and attributes of a file are written out, not its name.
    pub(crate) fn sync(&mut self, number: u64) -> Result<()> {
        let node = self.node_mut(number)?;
        node.durable = node.attributes.clone();
        match &mut node.kind {
            Kind::File(content) => content.sync().map_err(|_| Errno::IO),
            _ => Ok(()),
        }
    }

    /// The names in a directory are written out.
    pub(crate) fn sync_dir(&mut self, number: u64) -> Result<()> {
        let id = self.id(number)?;
        self.names.sync(|(dir, _)| *dir == id);
        self.sync(number)
    }

    /// Write-back of what is dirty fails in part, if it is time for that.
    pub(crate) fn write_back(&mut self) {
        match &mut self.lose_after {
            None => {}
            Some(0) => {
                let mut lost = false;
                for node in self.nodes.values_mut() {
                    if let Kind::File(content) = &mut node.kind {
                        lost |= content.lose(&mut self.random);
                        // The kernel's cache has what was written, this one need not.
                        content.drop_clean();
                    }
                }
                if lost {
                    self.lose_after = None;
                }
            }
            Some(left) => *left -= 1,
        }
    }

    /// Errors have been told to somebody.
    pub(crate) fn forget_lost(&mut self) {
        for node in self.nodes.values_mut() {
            if let Kind::File(content) = &mut node.kind {
                content.forget_lost();
            }
        }
    }

    /// The power goes and comes back. Nobody has anything open any more.
    pub(crate) fn lose_power(&mut self) {
        self.names.lose_power(&mut self.random, |(dir, _)| *dir);
        // What is in a directory that is lost is lost.
        let mut found = vec![ROOT];
        let mut at = 0;
        while let Some(dir) = found.get(at).copied() {
            found.extend(self.entries(dir).map(|(_, id)| id));
            at += 1;
        }
        let lost: Vec<_> =
            self.names.iter().filter(|((dir, _), _)| !found.contains(dir)).map(|(name, _)| name.clone()).collect();
        for name in &lost {
            self.names.unlink(name);
        }
        self.names.sync(|_| true);
        self.nodes.retain(|id, _| found.contains(id));
        self.nodes.values_mut().for_each(|node| (node.links, node.lookups) = (0, 0));
        for (_, id) in self.names.iter() {
            self.nodes.get_mut(&id).expect("every name is a node's").links += 1;
        }
        self.nodes.get_mut(&ROOT).expect("there is always a root").lookups = 1;
        self.numbers.clear();
        for (id, node) in &mut self.nodes {
            while self.numbers.contains_key(&node.number) {
                node.number += 1;
            }
            self.numbers.insert(node.number, *id);
            if let Kind::File(content) = &mut node.kind {
                content.lose_power(&mut self.random);
            }
            if self.random.bool() {
                node.attributes = node.durable.clone();
            }
            node.durable = node.attributes.clone();
        }
    }
}
