//! The tree of a file system in memory, and the rules of who may change it.

use super::{As, Attributes, Credentials, Kind, Make, Result, SetAttributes, SetTime, SetXattr, Time, Usage};
use crate::exclusive_times;
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::time::{SystemTime, UNIX_EPOCH};
use thruway_server::slices::{SLICE, UNIT_BYTES};

/// Number of a file; never used again.
pub(super) type Id = u64;

/// The number of the root directory.
pub(super) const ROOT: Id = 1;

/// Bytes that data is kept in.
pub(super) const PAGE: u64 = 64 << 10;
/// What a file takes beside its data, and an entry of a directory beside its name.
const NODE: u64 = 512;
const ENTRY: u64 = 64;
/// Extended attributes of a file, in bytes with their names.
const XATTRS_MAX: usize = 64 << 10;
/// What an extended attribute takes beside its name and value.
const XATTR: usize = 128;
/// Most bytes of data that are changed at a time, because others wait for it: as many as the slice of a host.
pub(super) const STEP_MAX: u64 = (SLICE * UNIT_BYTES) as u64;
/// Most levels above a directory that another one is moved to.
const LEVELS_MAX: usize = 4096;
/// Names of a file.
const LINKS_MAX: u32 = 32_000;

/// The data of a file: pages that are not there are holes.
#[derive(Default)]
pub(super) struct Data(BTreeMap<u64, Box<[u8]>>);

/// The entries of a directory, in the order in which they were made.
pub(super) struct Directory {
    entries: BTreeMap<u64, (Vec<u8>, Id)>,
    names: HashMap<Vec<u8>, u64>,
    next: u64,
    pub parent: Id,
}

pub(super) enum Content {
    Data(Data),
    Directory(Directory),
    Link(Vec<u8>),
    Special,
}

/// A file.
pub(super) struct Node {
    pub attributes: Attributes,
    pub content: Content,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// How often it is open.
    opens: usize,
}

/// All files.
pub(super) struct Tree {
    nodes: HashMap<Id, Node>,
    next: Id,
    bytes: u64,
    /// Includes `removed`.
    used: u64,
    /// Data of files that are gone or truncated, which [`Tree::free_step`] frees.
    removed: Vec<Data>,
    /// Number of times that data was added to `removed`.
    removals: u64,
}

fn now() -> Time {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time { seconds: now.as_secs() as i64, nanoseconds: now.subsec_nanos() }
}

/// A name that an entry can have.
pub(super) fn check_name(name: &[u8]) -> Result<()> {
    match name {
        b"." | b".." => Err(Errno::EXIST),
        [] => Err(Errno::INVAL),
        _ if name.len() > 255 => Err(Errno::NAMETOOLONG),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Errno::INVAL),
        _ => Ok(()),
    }
}

impl Data {
    pub(super) fn read(&self, at: u64, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let (page, offset) = ((at + done as u64) / PAGE, ((at + done as u64) % PAGE) as usize);
            let len = (PAGE as usize - offset).min(into.len() - done);
            match self.0.get(&page) {
                Some(bytes) => into[done..done + len].copy_from_slice(&bytes[offset..offset + len]),
                None => into[done..done + len].fill(0),
            }
            done += len;
        }
    }

    /// Pages between two positions that are not there.
    fn missing(&self, at: u64, end: u64) -> u64 {
        if at >= end {
            return 0;
        }
        let (first, last) = (at / PAGE, (end - 1) / PAGE);
        last - first + 1 - self.0.range(first..=last).count() as u64
    }

    fn page(&mut self, page: u64) -> &mut [u8] {
        self.0.entry(page).or_insert_with(|| vec![0; PAGE as usize].into())
    }

    fn write(&mut self, at: u64, from: &[u8]) {
        let mut done = 0;
        while done < from.len() {
            let (page, offset) = ((at + done as u64) / PAGE, ((at + done as u64) % PAGE) as usize);
            let len = (PAGE as usize - offset).min(from.len() - done);
            self.page(page)[offset..offset + len].copy_from_slice(&from[done..done + len]);
            done += len;
        }
    }

    /// Makes a range read as zeros; whole pages go.
    fn clear(&mut self, at: u64, end: u64) {
        if at >= end {
            return;
        }
        let (first, last) = (at / PAGE, (end - 1) / PAGE);
        let pages: Vec<u64> = self.0.range(first..=last).map(|(page, _)| *page).collect();
        for page in pages {
            let (start, stop) = (at.max(page * PAGE), end.min((page + 1) * PAGE));
            if stop - start == PAGE {
                self.0.remove(&page);
            } else {
                self.page(page)[(start % PAGE) as usize..][..(stop - start) as usize].fill(0);
            }
        }
    }

    pub(super) fn next_data(&self, at: u64) -> Option<u64> {
        self.0.range(at / PAGE..).next().map(|(page, _)| at.max(page * PAGE))
    }

    /// The first hole from a position on. Looks at this many pages at most: if there is data in all of these, fails with the position
    /// behind them.
    pub(super) fn next_hole(&self, at: u64, looked_at_max: u64) -> std::result::Result<u64, u64> {
        let first = at / PAGE;
        let data = self.0.range(first..).zip(first..first + looked_at_max);
        match data.take_while(|((page, _), expected)| *page == expected).count() as u64 {
            0 => Ok(at),
            pages if pages == looked_at_max => Err((first + pages) * PAGE),
            pages => Ok((first + pages) * PAGE),
        }
    }

    /// End of the first part of a range that has pages for at most [`STEP_MAX`] bytes.
    fn end_of_step(&self, at: u64, end: u64) -> u64 {
        if at >= end {
            return end;
        }
        let mut pages = self.0.range(at / PAGE..=(end - 1) / PAGE);
        pages.nth((STEP_MAX / PAGE) as usize).map_or(end, |(page, _)| page * PAGE)
    }

    fn bytes(&self) -> u64 {
        self.0.len() as u64 * PAGE
    }
}

impl Directory {
    fn new(parent: Id) -> Directory {
        // Two cookies are those of the directory's own names.
        Directory { entries: BTreeMap::new(), names: HashMap::new(), next: 3, parent }
    }

    fn get(&self, name: &[u8]) -> Option<Id> {
        self.names.get(name).map(|cookie| self.entries[cookie].1)
    }

    fn insert(&mut self, name: &[u8], id: Id) {
        self.entries.insert(self.next, (name.to_vec(), id));
        self.names.insert(name.to_vec(), self.next);
        self.next += 1;
    }

    fn remove(&mut self, name: &[u8]) {
        if let Some(cookie) = self.names.remove(name) {
            self.entries.remove(&cookie);
        }
    }

    /// Entries behind a cookie, with their cookies.
    pub(super) fn from(&self, cookie: u64, own: Id) -> impl Iterator<Item = (u64, &[u8], Id)> {
        let special = [(1, &b"."[..], own), (2, &b".."[..], self.parent)];
        let entries = self.entries.range(cookie.saturating_add(1)..).map(|(at, (name, id))| (*at, &name[..], *id));
        special.into_iter().filter(move |(at, ..)| *at > cookie).chain(entries)
    }
}

impl Node {
    /// Whether a user has rights: 4 to read, 2 to write, 1 to execute or to look up.
    pub(super) fn may(&self, who: &Credentials, rights: u32) -> bool {
        let a = &self.attributes;
        if who.uid == 0 {
            // Root executes what anybody may.
            return rights & 1 == 0 || a.kind == Kind::Directory || a.mode & 0o111 != 0;
        }
        let shift = match () {
            () if a.uid == who.uid => 6,
            () if a.gid == who.gid || who.groups.contains(&a.gid) => 3,
            () => 0,
        };
        a.mode >> shift & rights == rights
    }

    fn is_owner(&self, who: &Credentials) -> bool {
        who.uid == 0 || who.uid == self.attributes.uid
    }

    pub(super) fn directory(&self) -> Result<&Directory> {
        if let Content::Directory(directory) = &self.content { Ok(directory) } else { Err(Errno::NOTDIR) }
    }

    fn directory_mut(&mut self) -> Result<&mut Directory> {
        if let Content::Directory(directory) = &mut self.content { Ok(directory) } else { Err(Errno::NOTDIR) }
    }

    pub(super) fn data(&self) -> Result<&Data> {
        match &self.content {
            Content::Data(data) => Ok(data),
            Content::Directory(_) => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        }
    }

    fn data_mut(&mut self) -> Result<&mut Data> {
        match &mut self.content {
            Content::Data(data) => Ok(data),
            Content::Directory(_) => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        }
    }

    /// Bytes that it takes, its names not counted.
    fn weight(&self) -> u64 {
        let content = match &self.content {
            Content::Data(data) => data.bytes(),
            Content::Link(to) => to.len() as u64,
            Content::Directory(_) | Content::Special => 0,
        };
        NODE + content + self.xattr_bytes() as u64
    }

    fn xattr_bytes(&self) -> usize {
        self.xattrs.iter().map(|(name, value)| XATTR + name.len() + value.len()).sum()
    }

    fn changed(&mut self, is_data: bool) {
        let a = &mut self.attributes;
        a.changed = now();
        if is_data {
            a.modified = a.changed;
        }
        a.change += 1;
    }
}

impl Tree {
    pub(super) fn new(bytes: u64) -> Tree {
        let mut tree = Tree { nodes: HashMap::new(), next: ROOT, bytes, used: 0, removed: Vec::new(), removals: 0 };
        let root = Credentials { uid: 0, gid: 0, groups: Vec::new() };
        tree.add(&root, Kind::Directory, 0o1777, Content::Directory(Directory::new(ROOT)));
        tree.nodes.get_mut(&ROOT).expect("the first").attributes.links = 2;
        tree
    }

    fn add(&mut self, who: &Credentials, kind: Kind, mode: u32, content: Content) -> Id {
        let (id, time) = (self.next, now());
        let attributes = Attributes {
            kind,
            mode,
            links: 0,
            uid: who.uid,
            gid: who.gid,
            size: 0,
            used: 0,
            device: (0, 0),
            fsid: 0,
            subvolume: 0,
            number: id,
            number_in_parent: id,
            accessed: time,
            modified: time,
            changed: time,
            change: 1,
        };
        let node = Node { attributes, content, xattrs: BTreeMap::new(), opens: 0 };
        self.used += node.weight();
        self.nodes.insert(id, node);
        self.next += 1;
        id
    }

    pub(super) fn node(&self, id: Id) -> Result<&Node> {
        self.nodes.get(&id).ok_or(Errno::STALE)
    }

    fn node_mut(&mut self, id: Id) -> Result<&mut Node> {
        self.nodes.get_mut(&id).ok_or(Errno::STALE)
    }

    pub(super) fn usage(&self) -> Usage {
        let removed: u64 = self.removed.iter().map(Data::bytes).sum();
        let free = self.bytes.saturating_sub(self.used - removed);
        let files = self.nodes.len() as u64;
        Usage {
            bytes: self.bytes,
            bytes_free: free,
            bytes_available: free,
            files: files + free / NODE,
            files_free: free / NODE,
        }
    }

    /// Number of times that data was removed that [`Tree::free_step`] frees.
    pub(super) fn removals(&self) -> u64 {
        self.removals
    }

    fn set_aside(&mut self, data: Data) {
        self.removed.push(data);
        self.removals += 1;
    }

    pub(super) fn has_removed(&self) -> bool {
        !self.removed.is_empty()
    }

    /// Frees one step of the data that was removed.
    pub(super) fn free_step(&mut self) {
        let Some(data) = self.removed.last_mut() else { return };
        let before = data.bytes();
        for _ in 0..STEP_MAX / PAGE {
            data.0.pop_last();
        }
        self.used -= before - data.bytes();
        if data.0.is_empty() {
            self.removed.pop();
        }
    }

    fn check_room(&mut self, bytes: u64) -> Result<()> {
        while self.used.saturating_add(bytes) > self.bytes && !self.removed.is_empty() {
            self.free_step();
        }
        if self.used.saturating_add(bytes) > self.bytes { Err(Errno::NOSPC) } else { Ok(()) }
    }

    pub(super) fn open(&mut self, id: Id) {
        if let Ok(node) = self.node_mut(id) {
            node.opens += 1;
        }
    }

    pub(super) fn close(&mut self, id: Id) {
        if let Ok(node) = self.node_mut(id) {
            node.opens -= 1;
            self.forget_unused(id);
        }
    }

    /// A file without a name that nobody has open is gone.
    fn forget_unused(&mut self, id: Id) {
        if self.nodes.get(&id).is_none_or(|node| node.attributes.links > 0 || node.opens > 0) {
            return;
        }
        let mut node = self.nodes.remove(&id).expect("it has just been there");
        if let Content::Data(data) = &mut node.content
            && data.bytes() > STEP_MAX
        {
            self.set_aside(std::mem::take(data));
        }
        self.used -= node.weight();
    }

    /// The file with a name, for a user.
    pub(super) fn look_up(&self, who: &Credentials, dir: Id, name: &[u8]) -> Result<Id> {
        let node = self.node(dir)?;
        let directory = node.directory()?;
        if !node.may(who, 1) {
            return Err(Errno::ACCESS);
        }
        match name {
            b"." => return Ok(dir),
            b".." => return Ok(directory.parent),
            _ => check_name(name)?,
        }
        directory.get(name).ok_or(Errno::NOENT)
    }

    fn check_change(&self, who: &Credentials, dir: Id) -> Result<()> {
        let node = self.node(dir)?;
        node.directory()?;
        match () {
            // It has been removed, and is in use.
            () if node.attributes.links == 0 => Err(Errno::STALE),
            () if !node.may(who, 3) => Err(Errno::ACCESS),
            () => Ok(()),
        }
    }

    /// Whether a user may take the name from a file in a directory that says that only owners may.
    fn check_sticky(&self, who: &Credentials, dir: Id, id: Id) -> Result<()> {
        let dir = self.node(dir)?;
        if dir.attributes.mode & 0o1000 == 0 || dir.is_owner(who) || self.node(id)?.is_owner(who) {
            Ok(())
        } else {
            Err(Errno::PERM)
        }
    }

    fn set_entry(&mut self, dir: Id, name: &[u8], id: Id) -> Result<()> {
        let is_directory = self.node(id)?.attributes.kind == Kind::Directory;
        let node = self.node_mut(dir)?;
        node.directory_mut()?.insert(name, id);
        node.attributes.links += u32::from(is_directory);
        node.changed(true);
        self.used += ENTRY + name.len() as u64;
        let entry = self.node_mut(id)?;
        match &mut entry.content {
            Content::Directory(directory) => {
                directory.parent = dir;
                entry.attributes.links = entry.attributes.links.max(1) + 1;
            }
            _ => entry.attributes.links += 1,
        }
        entry.changed(false);
        Ok(())
    }

    /// Takes a name from a file, which is gone if that was the last.
    fn take_entry(&mut self, dir: Id, name: &[u8]) -> Result<Id> {
        let id = self.node(dir)?.directory()?.get(name).ok_or(Errno::NOENT)?;
        let is_directory = self.node(id)?.attributes.kind == Kind::Directory;
        let node = self.node_mut(dir)?;
        node.directory_mut()?.remove(name);
        node.attributes.links -= u32::from(is_directory);
        node.changed(true);
        self.used -= ENTRY + name.len() as u64;
        let entry = self.node_mut(id)?;
        entry.attributes.links -= 1;
        entry.changed(false);
        Ok(id)
    }

    pub(super) fn make(
        &mut self,
        who: &Credentials,
        dir: Id,
        name: &[u8],
        what: Make,
        mut set: SetAttributes,
    ) -> Result<Id> {
        check_name(name)?;
        let there = self.look_up(who, dir, name);
        match (there, &what) {
            (Err(Errno::NOENT), _) => {}
            (Ok(id), Make::File) if self.node(id)?.attributes.kind == Kind::Regular => {
                if set.size.is_some() {
                    self.set_attributes(
                        As { who, is_open: false },
                        id,
                        &SetAttributes { size: set.size, ..SetAttributes::default() },
                    )?;
                }
                return Ok(id);
            }
            (Ok(id), Make::Exclusive(number)) if self.node(id)?.attributes.kind == Kind::Regular => {
                let times = |a: &Attributes| (a.accessed, a.modified);
                let same = times(&self.node(id)?.attributes) == exclusive_times(*number);
                return if same { Ok(id) } else { Err(Errno::EXIST) };
            }
            (Ok(_), _) => return Err(Errno::EXIST),
            (Err(error), _) => return Err(error),
        }
        self.check_change(who, dir)?;
        let text = if let Make::SymbolicLink(to) = &what { to.len() } else { 0 };
        self.check_room(NODE + ENTRY + (name.len() + text) as u64)?;
        let mut mode = set.mode.take().unwrap_or(0o600) & 0o7777;
        let (kind, content, device) = match &what {
            Make::File | Make::NewFile | Make::Exclusive(_) => (Kind::Regular, Content::Data(Data::default()), (0, 0)),
            Make::Directory => (Kind::Directory, Content::Directory(Directory::new(dir)), (0, 0)),
            Make::SymbolicLink(to) => {
                mode = 0o777;
                (Kind::SymbolicLink, Content::Link(to.clone()), (0, 0))
            }
            Make::Special(Kind::BlockDevice | Kind::CharacterDevice, ..) if who.uid != 0 => return Err(Errno::PERM),
            Make::Special(kind, major, minor) => (*kind, Content::Special, (*major, *minor)),
        };
        let parent = self.node(dir)?.attributes;
        let id = self.add(who, kind, mode, content);
        let node = self.node_mut(id)?;
        node.attributes.device = device;
        if let Content::Link(to) = &node.content {
            node.attributes.size = to.len() as u64;
        }
        // What is made in a directory of a group belongs to it.
        if parent.mode & 0o2000 != 0 {
            node.attributes.gid = parent.gid;
            node.attributes.mode |= if kind == Kind::Directory { 0o2000 } else { 0 };
        }
        if let Make::Exclusive(number) = what {
            (node.attributes.accessed, node.attributes.modified) = exclusive_times(number);
        }
        self.set_entry(dir, name, id)?;
        if set != SetAttributes::default()
            && let Err(error) = self.set_attributes(As { who, is_open: false }, id, &set)
        {
            self.take_entry(dir, name)?;
            self.forget_removed(id);
            return Err(error);
        }
        Ok(id)
    }

    fn forget_removed(&mut self, id: Id) {
        if let Ok(node) = self.node_mut(id)
            && node.attributes.kind == Kind::Directory
        {
            node.attributes.links = 0;
        }
        self.forget_unused(id);
    }

    pub(super) fn remove(&mut self, who: &Credentials, dir: Id, name: &[u8], is_directory: bool) -> Result<()> {
        if name == b"." || name == b".." {
            return Err(Errno::INVAL);
        }
        let id = self.look_up(who, dir, name)?;
        self.check_change(who, dir)?;
        self.check_sticky(who, dir, id)?;
        match (&self.node(id)?.content, is_directory) {
            (Content::Directory(_), false) => return Err(Errno::ISDIR),
            (Content::Directory(directory), true) if !directory.entries.is_empty() => return Err(Errno::NOTEMPTY),
            (Content::Directory(_), true) | (_, false) => {}
            (_, true) => return Err(Errno::NOTDIR),
        }
        self.take_entry(dir, name)?;
        self.forget_removed(id);
        Ok(())
    }

    /// Moves an entry. Adds the levels of directories that it looks at to `levels`.
    pub(super) fn rename(
        &mut self,
        who: &Credentials,
        from: (Id, &[u8]),
        to: (Id, &[u8]),
        levels: &mut usize,
    ) -> Result<()> {
        check_name(from.1)?;
        check_name(to.1)?;
        let id = self.look_up(who, from.0, from.1)?;
        self.check_change(who, from.0)?;
        self.check_change(who, to.0)?;
        self.check_sticky(who, from.0, id)?;
        let is_directory = self.node(id)?.attributes.kind == Kind::Directory;
        // A directory cannot be moved into itself.
        let mut above = to.0;
        while is_directory && from.0 != to.0 && above != ROOT {
            if above == id {
                return Err(Errno::INVAL);
            }
            if *levels >= LEVELS_MAX {
                return Err(Errno::NAMETOOLONG);
            }
            *levels += 1;
            above = self.node(above)?.directory()?.parent;
        }
        match self.look_up(who, to.0, to.1) {
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
            Ok(there) if there == id => return Ok(()),
            Ok(there) => {
                self.check_sticky(who, to.0, there)?;
                if is_directory && self.node(there)?.attributes.kind != Kind::Directory {
                    return Err(Errno::NOTDIR);
                }
                self.remove(who, to.0, to.1, is_directory)?;
            }
        }
        self.take_entry(from.0, from.1)?;
        self.set_entry(to.0, to.1, id)
    }

    pub(super) fn link(&mut self, who: &Credentials, id: Id, dir: Id, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let attributes = self.node(id)?.attributes;
        match self.look_up(who, dir, name) {
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
            Ok(_) => return Err(Errno::EXIST),
        }
        self.check_change(who, dir)?;
        match () {
            () if attributes.kind == Kind::Directory => Err(Errno::PERM),
            // Its last name is gone, and it will be.
            () if attributes.links == 0 => Err(Errno::NOENT),
            () if attributes.links >= LINKS_MAX => Err(Errno::MLINK),
            () => {
                self.check_room(ENTRY + name.len() as u64)?;
                self.set_entry(dir, name, id)
            }
        }
    }

    pub(super) fn set_attributes(&mut self, user: As<'_>, id: Id, set: &SetAttributes) -> Result<()> {
        set.check()?;
        let who = user.who;
        let node = self.node(id)?;
        let (is_owner, can_write) = (node.is_owner(who), node.may(who, 2));
        let in_group = |gid| gid == who.gid || who.groups.contains(&gid);
        let set_times = [set.accessed, set.modified];
        let only_now = set_times.iter().flatten().all(|time| *time == SetTime::Now);
        let may_own = set.uid.is_none_or(|uid| uid == node.attributes.uid) && set.gid.is_none_or(in_group);
        match () {
            () if set.mode.is_some() && !is_owner => return Err(Errno::PERM),
            () if (set.uid.is_some() || set.gid.is_some()) && who.uid != 0 && !(is_owner && may_own) => {
                return Err(Errno::PERM);
            }
            () if set_times.iter().any(Option::is_some) && !is_owner && !only_now => return Err(Errno::PERM),
            () if set_times.iter().any(Option::is_some) && !is_owner && !can_write => return Err(Errno::ACCESS),
            () => {}
        }
        if let Some(size) = set.size {
            node.data()?;
            if !is_owner && !can_write && !user.is_open {
                return Err(Errno::ACCESS);
            }
            self.resize(id, size)?;
            self.drop_privileges(who, id);
        }
        let node = self.node_mut(id)?;
        let a = &mut node.attributes;
        if set.uid.is_some() || set.gid.is_some() {
            (a.uid, a.gid) = (set.uid.unwrap_or(a.uid), set.gid.unwrap_or(a.gid));
            if who.uid != 0 {
                a.mode &= !0o6000;
            }
        }
        if let Some(mode) = set.mode
            && a.kind != Kind::SymbolicLink
        {
            // Only who is in the group may give its rights to others.
            let keeps_group = who.uid == 0 || in_group(a.gid) || a.kind == Kind::Directory;
            a.mode = mode & if keeps_group { 0o7777 } else { 0o5777 };
        }
        node.changed(false);
        let now = node.attributes.changed;
        let time = |set: SetTime| if let SetTime::To(time) = set { time } else { now };
        let a = &mut node.attributes;
        a.accessed = set.accessed.map_or(a.accessed, time);
        a.modified = set.modified.map_or(a.modified, time);
        Ok(())
    }

    /// A file that is changed by somebody but root loses its set-user-ID bits.
    pub(super) fn drop_privileges(&mut self, who: &Credentials, id: Id) {
        if let Ok(node) = self.node_mut(id)
            && who.uid != 0
        {
            let mode = &mut node.attributes.mode;
            *mode &= if *mode & 0o010 != 0 { !0o6000 } else { !0o4000 };
        }
    }

    /// Changes the data of a file, and what is known of how much it is.
    fn change_data(&mut self, id: Id, size: Option<u64>, action: impl FnOnce(&mut Data)) -> Result<()> {
        let node = self.node_mut(id)?;
        let data = node.data_mut()?;
        let before = data.bytes();
        action(data);
        let after = data.bytes();
        node.attributes.used = after;
        node.attributes.size = size.unwrap_or(node.attributes.size);
        node.changed(true);
        self.used = self.used - before + after;
        Ok(())
    }

    fn resize(&mut self, id: Id, size: u64) -> Result<()> {
        if size > i64::MAX as u64 {
            return Err(Errno::FBIG);
        }
        let data = self.node_mut(id)?.data_mut()?;
        let behind = size.div_ceil(PAGE);
        if data.end_of_step(size, u64::MAX) < u64::MAX {
            // No file has these pages any more, but they are still counted.
            let removed = Data(data.0.split_off(&behind));
            self.set_aside(removed);
        }
        self.change_data(id, Some(size), |data| data.clear(size, u64::MAX))
    }

    pub(super) fn write(&mut self, id: Id, at: u64, bytes: &[u8]) -> Result<()> {
        let end = at.checked_add(bytes.len() as u64).filter(|end| *end <= i64::MAX as u64).ok_or(Errno::FBIG)?;
        self.check_room(self.node(id)?.data()?.missing(at, end) * PAGE)?;
        let node = self.node(id)?;
        let size = if bytes.is_empty() { node.attributes.size } else { node.attributes.size.max(end) };
        self.change_data(id, Some(size), |data| data.write(at, bytes))
    }

    /// Copies the first bytes of a range, up to the next hole or the end of the hole that it begins with; how many, which are 0 only at
    /// the end of the source.
    pub(super) fn copy(&mut self, (from, from_at): (Id, u64), (to, to_at): (Id, u64), len: u64) -> Result<u64> {
        let source = self.node(from)?;
        let (data, size) = (source.data()?, source.attributes.size);
        let len = len.min(size.saturating_sub(from_at));
        let end = to_at.checked_add(len).filter(|end| *end <= i64::MAX as u64).ok_or(Errno::FBIG)?;
        if from == to && from_at < end && to_at < from_at + len {
            return Err(Errno::INVAL);
        }
        let hole = data.next_data(from_at).unwrap_or(u64::MAX) - from_at;
        if hole >= len || hole > 0 {
            let (target, size) = (self.node(to)?.data()?, self.node(to)?.attributes.size);
            let len = target.end_of_step(to_at, to_at + len.min(hole)) - to_at;
            let size = if len == 0 { size } else { size.max(to_at + len) };
            self.change_data(to, Some(size), |data| data.clear(to_at, to_at + len))?;
            return Ok(len);
        }
        let (Ok(hole) | Err(hole)) = data.next_hole(from_at, STEP_MAX / PAGE);
        let len = len.min(hole - from_at).min(STEP_MAX);
        let mut bytes = vec![0; len as usize];
        data.read(from_at, &mut bytes);
        self.write(to, to_at, &bytes)?;
        Ok(len)
    }

    /// Makes pages for the first part of a range, if there is room for all of it. Returns the end of that part.
    pub(super) fn reserve(&mut self, id: Id, at: u64, end: u64) -> Result<u64> {
        if end > i64::MAX as u64 {
            return Err(Errno::FBIG);
        }
        self.check_room(self.node(id)?.data()?.missing(at, end).saturating_mul(PAGE))?;
        let node = self.node(id)?;
        let next = end.min((at / PAGE).saturating_mul(PAGE).saturating_add(STEP_MAX));
        // The size changes when all is reserved.
        let size = if next == end { node.attributes.size.max(end) } else { node.attributes.size };
        self.change_data(id, Some(size), |data| {
            (at / PAGE..next.div_ceil(PAGE)).for_each(|page| {
                data.page(page);
            })
        })?;
        Ok(next)
    }

    /// Makes the first part of a range a hole. Returns the end of that part.
    pub(super) fn punch(&mut self, id: Id, at: u64, end: u64) -> Result<u64> {
        let next = self.node(id)?.data()?.end_of_step(at, end);
        self.change_data(id, None, |data| data.clear(at, next))?;
        Ok(next)
    }

    pub(super) fn set_xattr(
        &mut self,
        who: &Credentials,
        id: Id,
        name: &[u8],
        value: Option<(&[u8], SetXattr)>,
    ) -> Result<()> {
        let room = self.usage().bytes_free;
        let node = self.node_mut(id)?;
        let before = node.weight();
        match node.attributes.kind {
            Kind::Regular | Kind::Directory => {}
            _ => return Err(Errno::PERM),
        }
        if !node.may(who, 2) {
            return Err(Errno::ACCESS);
        }
        let is_there = node.xattrs.contains_key(name);
        match value {
            None if !is_there => return Err(Errno::NODATA),
            None => drop(node.xattrs.remove(name)),
            Some((_, SetXattr::Create)) if is_there => return Err(Errno::EXIST),
            Some((_, SetXattr::Replace)) if !is_there => return Err(Errno::NODATA),
            Some((value, _)) => {
                let new = XATTR + name.len() + value.len();
                let old = node.xattrs.get(name).map_or(0, |old| XATTR + name.len() + old.len());
                if node.xattr_bytes() - old + new > XATTRS_MAX || new as u64 > room {
                    return Err(Errno::NOSPC);
                }
                node.xattrs.insert(name.to_vec(), value.to_vec());
            }
        }
        node.changed(false);
        let after = node.weight();
        self.used = self.used - before + after;
        Ok(())
    }
}
