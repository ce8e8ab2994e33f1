//! A file system in this process's memory, of limited size; gone when the process ends.
//!
//! Nothing of it waits for I/O, so operations are done where they are asked for, under one lock. Long ones are done in steps, which count
//! for the slice of the caller's host (`slices.rs`).

mod tree;

use self::tree::{Content, Id, Node, Tree};
use super::{
    Allocate, As, Attributes, Credentials, Entry, FileId, FileSystem, Kind, Listing, Make, Op, OpenGuard, ReadData,
    Result, Rights, Room, Seek, SetAttributes, SetTime, SetXattr, Stability, Time, Usage,
};
use rustix::io::Errno;
use smallvec::SmallVec;
use std::sync::{Arc, Mutex, MutexGuard};
use thruway_engine::{Segment, reactor};
use thruway_server::caller;
use thruway_server::slices::{self, UNIT_BYTES};

/// A file system in memory.
#[derive(Clone)]
pub struct MemoryFileSystem {
    tree: Arc<Mutex<Tree>>,
    /// Tells its handles from those of an earlier one.
    instance: [u8; 8],
}

/// Most bytes that are reserved by one call.
const RESERVE_MAX: u64 = 64 << 20;
/// Most pages that SEEK looks at in one step.
const LOOKED_AT_MAX: u64 = 4096;
/// Pages that SEEK looks at as one unit of work.
const PAGES_OF_UNIT: u64 = 64;
/// Levels of directories that RENAME looks at as one unit of work.
const LEVELS_OF_UNIT: usize = 16;

/// Units of work of a step that changes up to `len` bytes of data.
fn units_of_step(len: u64) -> usize {
    len.min(tree::STEP_MAX) as usize / UNIT_BYTES
}

/// Keeps a file open.
struct Opened {
    tree: Arc<Mutex<Tree>>,
    id: Id,
}

impl Drop for Opened {
    fn drop(&mut self) {
        let has_removed = {
            let mut tree = self.tree.lock().expect("no panics under the lock");
            let before = tree.removals();
            tree.close(self.id);
            tree.removals() != before
        };
        if has_removed && reactor::node().is_some() {
            let tree = Arc::clone(&self.tree);
            reactor::start(caller::inherited(async move { free_removed(&tree).await }));
        }
    }
}

/// Frees the data of files that are gone or truncated, in steps that count for the caller's host.
async fn free_removed(tree: &Mutex<Tree>) {
    let lock = || tree.lock().expect("no panics under the lock");
    while lock().has_removed() {
        slices::spend(slices::SLICE).await;
        lock().free_step();
    }
}

fn ready<'a, T: 'a>(result: Result<T>) -> Op<'a, T> {
    Box::pin(std::future::ready(result))
}

impl MemoryFileSystem {
    /// An empty one that holds at most so many bytes of data, in an unnamed root directory that everybody may write to.
    pub fn new(bytes: u64) -> MemoryFileSystem {
        let instance = thruway_engine::random::random();
        MemoryFileSystem { tree: Arc::new(Mutex::new(Tree::new(bytes))), instance }
    }

    fn lock(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().expect("no panics under the lock")
    }

    fn file_id(&self, id: Id) -> FileId {
        let mut bytes = SmallVec::new();
        bytes.extend_from_slice(&id.to_be_bytes());
        bytes.extend_from_slice(&self.instance);
        FileId(bytes)
    }

    fn id(&self, file: &FileId) -> Result<Id> {
        let (id, instance) = file.0.split_first_chunk().ok_or(Errno::STALE)?;
        if *instance == self.instance { Ok(Id::from_be_bytes(*id)) } else { Err(Errno::STALE) }
    }

    fn attributes_of(&self, node: &Node) -> Attributes {
        Attributes { fsid: self.fsid(), ..node.attributes }
    }

    /// As [`MemoryFileSystem::with`]. Frees the data that the action removes.
    fn with_removal<'a, T: 'a>(&'a self, file: &FileId, action: impl FnOnce(&mut Tree, Id) -> Result<T>) -> Op<'a, T> {
        let mut removes = false;
        let result = self.with(file, |tree, id| {
            let before = tree.removals();
            let result = action(tree, id);
            removes = tree.removals() != before;
            result
        });
        Box::pin(async move {
            if removes {
                free_removed(&self.tree).await;
            }
            result
        })
    }

    /// Does something with a file.
    fn with<T>(&self, file: &FileId, action: impl FnOnce(&mut Tree, Id) -> Result<T>) -> Result<T> {
        let id = self.id(file)?;
        let mut tree = self.lock();
        tree.node(id)?;
        action(&mut tree, id)
    }
}

fn check_read(node: &Node, user: As<'_>) -> Result<()> {
    let is_owner = node.attributes.uid == user.who.uid;
    if user.is_open || is_owner || node.may(user.who, 4) || node.may(user.who, 1) { Ok(()) } else { Err(Errno::ACCESS) }
}

fn check_write(node: &Node, user: As<'_>) -> Result<()> {
    let is_owner = node.attributes.uid == user.who.uid;
    if user.is_open || is_owner || node.may(user.who, 2) { Ok(()) } else { Err(Errno::ACCESS) }
}

impl FileSystem for MemoryFileSystem {
    fn root(&self) -> FileId {
        self.file_id(tree::ROOT)
    }

    fn fsid(&self) -> u64 {
        u64::from_be_bytes(self.instance)
    }

    fn attributes<'a>(&'a self, file: &'a FileId) -> Op<'a, Attributes> {
        ready(self.with(file, |tree, id| Ok(self.attributes_of(tree.node(id)?))))
    }

    fn set_attributes<'a>(
        &'a self,
        user: As<'a>,
        file: &'a FileId,
        set: SetAttributes,
        guard: Option<Time>,
    ) -> Op<'a, Attributes> {
        self.with_removal(file, |tree, id| {
            if guard.is_some_and(|guard| tree.node(id).is_ok_and(|node| node.attributes.changed != guard)) {
                return Err(Errno::AGAIN);
            }
            tree.set_attributes(user, id, &set)?;
            Ok(self.attributes_of(tree.node(id)?))
        })
    }

    fn look_up<'a>(&'a self, who: &'a Credentials, dir: &'a FileId, name: &'a [u8]) -> Op<'a, (FileId, Attributes)> {
        ready(self.with(dir, |tree, dir| {
            let found = tree.look_up(who, dir, name)?;
            Ok((self.file_id(found), self.attributes_of(tree.node(found)?)))
        }))
    }

    fn rights<'a>(&'a self, who: &'a Credentials, file: &'a FileId, wanted: Rights) -> Op<'a, (Rights, Attributes)> {
        ready(self.with(file, |tree, id| {
            let node = tree.node(id)?;
            let rights = Rights {
                read: wanted.read && node.may(who, 4),
                write: wanted.write && node.may(who, 2),
                execute: wanted.execute && node.may(who, 1),
            };
            Ok((rights, self.attributes_of(node)))
        }))
    }

    fn read_link<'a>(&'a self, file: &'a FileId) -> Op<'a, Vec<u8>> {
        ready(self.with(file, |tree, id| match &tree.node(id)?.content {
            Content::Link(to) => Ok(to.clone()),
            _ => Err(Errno::INVAL),
        }))
    }

    fn open<'a>(&'a self, who: &'a Credentials, file: &'a FileId, wanted: Rights) -> Op<'a, (OpenGuard, Attributes)> {
        ready(self.with(file, |tree, id| {
            let node = tree.node(id)?;
            match node.attributes.kind {
                Kind::Regular => {}
                Kind::Directory => return Err(Errno::ISDIR),
                Kind::SymbolicLink => return Err(Errno::LOOP),
                _ => return Err(Errno::NXIO),
            }
            let may_read = !wanted.read || node.may(who, 4) || node.may(who, 1);
            if !may_read || wanted.write && !node.may(who, 2) {
                return Err(Errno::ACCESS);
            }
            let attributes = self.attributes_of(node);
            tree.open(id);
            Ok((Arc::new(Opened { tree: Arc::clone(&self.tree), id }) as OpenGuard, attributes))
        }))
    }

    fn is_private(&self) -> bool {
        true
    }

    fn read<'a>(&'a self, user: As<'a>, file: &'a FileId, at: u64, mut segment: Segment) -> Op<'a, ReadData> {
        ready(self.with(file, |tree, id| {
            let node = tree.node(id)?;
            check_read(node, user)?;
            let (attributes, size) = (self.attributes_of(node), node.attributes.size);
            let len = size.saturating_sub(at).min(segment.len() as u64) as usize;
            drop(segment.split_off(len));
            node.data()?.read(at, segment.as_mut_slice());
            Ok(ReadData { segment, is_end: at.saturating_add(len as u64) >= size, attributes: Some(attributes) })
        }))
    }

    fn write<'a>(
        &'a self,
        user: As<'a>,
        file: &'a FileId,
        at: u64,
        segment: Segment,
        _stability: Stability,
    ) -> Op<'a, Attributes> {
        ready(self.with(file, |tree, id| {
            check_write(tree.node(id)?, user)?;
            tree.write(id, at, segment.as_slice())?;
            tree.drop_privileges(user.who, id);
            Ok(self.attributes_of(tree.node(id)?))
        }))
    }

    /// There is nothing that data could be brought to.
    fn flush<'a>(&'a self, file: &'a FileId) -> Op<'a, Attributes> {
        ready(self.with(file, |tree, id| {
            let attributes = self.attributes_of(tree.node(id)?);
            match attributes.kind {
                Kind::Regular => Ok(attributes),
                Kind::Directory => Err(Errno::ISDIR),
                _ => Err(Errno::INVAL),
            }
        }))
    }

    fn write_verifier(&self) -> u64 {
        self.fsid()
    }

    fn make<'a>(
        &'a self,
        who: &'a Credentials,
        dir: &'a FileId,
        name: &'a [u8],
        what: Make,
        set: SetAttributes,
    ) -> Op<'a, (FileId, Attributes)> {
        self.with_removal(dir, |tree, dir| {
            let made = tree.make(who, dir, name, what, set)?;
            Ok((self.file_id(made), self.attributes_of(tree.node(made)?)))
        })
    }

    fn remove<'a>(&'a self, who: &'a Credentials, dir: &'a FileId, name: &'a [u8], is_directory: bool) -> Op<'a, ()> {
        self.with_removal(dir, |tree, dir| tree.remove(who, dir, name, is_directory))
    }

    fn rename<'a>(
        &'a self,
        who: &'a Credentials,
        from: (&'a FileId, &'a [u8]),
        to: (&'a FileId, &'a [u8]),
    ) -> Op<'a, ()> {
        Box::pin(async move {
            let mut levels = 0;
            let moved = self.with_removal(from.0, |tree, from_dir| {
                let to_dir = self.id(to.0)?;
                tree.node(to_dir)?;
                tree.rename(who, (from_dir, from.1), (to_dir, to.1), &mut levels)
            });
            slices::spend(levels / LEVELS_OF_UNIT).await;
            moved.await
        })
    }

    fn link<'a>(&'a self, who: &'a Credentials, file: &'a FileId, dir: &'a FileId, name: &'a [u8]) -> Op<'a, ()> {
        ready(self.with(file, |tree, id| {
            let dir = self.id(dir)?;
            tree.link(who, id, dir, name)
        }))
    }

    fn list<'a>(
        &'a self,
        who: &'a Credentials,
        dir: &'a FileId,
        cookie: u64,
        room: Room,
        with_files: bool,
    ) -> Op<'a, Listing> {
        ready(self.with(dir, |tree, dir| {
            let node = tree.node(dir)?;
            let directory = node.directory()?;
            if !node.may(who, 4) {
                return Err(Errno::ACCESS);
            }
            let (mut listing, mut used) = (Listing { entries: Vec::new(), is_end: true }, 0);
            for (cookie, name, id) in directory.from(cookie, dir) {
                if used >= room.bytes && !listing.entries.is_empty() {
                    listing.is_end = false;
                    break;
                }
                used += name.len() + room.entry;
                let found = tree.node(id)?;
                let file = with_files.then(|| (self.file_id(id), self.attributes_of(found)));
                listing.entries.push(Entry { name: name.to_vec(), number: id, cookie, file });
            }
            Ok(listing)
        }))
    }

    fn usage(&self) -> Op<'_, Usage> {
        ready(Ok(self.lock().usage()))
    }

    fn seek<'a>(&'a self, user: As<'a>, file: &'a FileId, at: u64, what: Seek) -> Op<'a, u64> {
        Box::pin(async move {
            let mut next = at;
            loop {
                let found = self.with(file, |tree, id| {
                    let node = tree.node(id)?;
                    check_read(node, user)?;
                    let size = node.attributes.size;
                    if at >= size {
                        return Err(Errno::NXIO);
                    }
                    let data = node.data()?;
                    match what {
                        Seek::Data => data.next_data(at).filter(|found| *found < size).map(Ok).ok_or(Errno::NXIO),
                        Seek::Hole => Ok(data.next_hole(next, LOOKED_AT_MAX).map(|hole| hole.min(size))),
                    }
                })?;
                if what == Seek::Hole {
                    let (Ok(end) | Err(end)) = found;
                    slices::spend((end.saturating_sub(next) / tree::PAGE / PAGES_OF_UNIT) as usize).await;
                }
                match found {
                    Ok(found) => return Ok(found),
                    Err(rest) => next = rest,
                }
            }
        })
    }

    fn allocate<'a>(&'a self, user: As<'a>, file: &'a FileId, at: u64, len: u64, what: Allocate) -> Op<'a, ()> {
        Box::pin(async move {
            if what == Allocate::Reserve && len > RESERVE_MAX {
                return Err(Errno::OPNOTSUPP);
            }
            let end = at.checked_add(len).ok_or(Errno::FBIG)?;
            let mut next = at;
            loop {
                slices::spend(units_of_step(end - next)).await;
                next = self.with(file, |tree, id| {
                    check_write(tree.node(id)?, user)?;
                    tree.node(id)?.data()?;
                    match what {
                        Allocate::Reserve => tree.reserve(id, next, end),
                        Allocate::Punch => tree.punch(id, next, end),
                    }
                })?;
                if next >= end {
                    return Ok(());
                }
            }
        })
    }

    fn copy<'a>(
        &'a self,
        user: As<'a>,
        (from, from_at): (&'a FileId, u64),
        (to, to_at): (&'a FileId, u64),
        len: u64,
        shared: bool,
    ) -> Op<'a, u64> {
        Box::pin(async move {
            slices::spend(units_of_step(len)).await;
            self.with(from, |tree, from| {
                let to = self.id(to)?;
                let (source, target) = (tree.node(from)?, tree.node(to)?);
                check_read(source, user)?;
                check_write(target, user)?;
                if shared {
                    return Err(Errno::OPNOTSUPP);
                }
                let copied = tree.copy((from, from_at), (to, to_at), len)?;
                tree.drop_privileges(user.who, to);
                Ok(copied)
            })
        })
    }

    fn xattr<'a>(&'a self, who: &'a Credentials, file: &'a FileId, name: &'a [u8]) -> Op<'a, Vec<u8>> {
        ready(self.with(file, |tree, id| {
            let node = tree.node(id)?;
            if !node.may(who, 4) {
                return Err(Errno::ACCESS);
            }
            node.xattrs.get(name).cloned().ok_or(Errno::NODATA)
        }))
    }

    fn set_xattr<'a>(
        &'a self,
        who: &'a Credentials,
        file: &'a FileId,
        name: &'a [u8],
        value: Option<(&'a [u8], SetXattr)>,
    ) -> Op<'a, ()> {
        ready(self.with(file, |tree, id| tree.set_xattr(who, id, name, value)))
    }

    fn xattrs<'a>(&'a self, who: &'a Credentials, file: &'a FileId) -> Op<'a, Vec<Vec<u8>>> {
        ready(self.with(file, |tree, id| {
            let node = tree.node(id)?;
            if !node.may(who, 4) {
                return Err(Errno::ACCESS);
            }
            Ok(node.xattrs.keys().cloned().collect())
        }))
    }
}

#[cfg(test)]
mod tests;
