//! A disk that forgets: what is written is in the cache, and only what was synced is sure to be
//! there after a power cut. Of the rest an arbitrary part is, in whatever order.

use crate::sink::journal::Medium;
use fastrand::Rng;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard};
use thruway_faultfs::{Content, Names};
use thruway_fs::Identity;

/// Bytes that reach the medium or do not as one.
const PAGE: usize = 16;

struct Inode {
    content: Content,
    /// Files that have gone leave their numbers to others.
    number: u64,
    born: i64,
    changed: i64,
}

pub(super) struct Disk {
    inodes: Vec<Inode>,
    names: Names<String>,
    random: Rng,
    /// It does not move with every change.
    clock: i64,
    /// Files have times of birth.
    has_births: bool,
    /// Operations until the process that uses the disk dies.
    fuse: Option<u64>,
    dead: bool,
    /// Bytes that can still be written.
    pub(super) room: Option<u64>,
    /// A write failed for want of room.
    pub(super) was_full: bool,
    /// Operations until write-back fails.
    writeback: Option<u64>,
    /// Something was not written out, and nobody who syncs the whole file system has been told.
    error: bool,
}

fn dead() -> io::Error {
    io::Error::other("the process is dead")
}

fn lost() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

impl Disk {
    fn new(mut random: Rng) -> Disk {
        Disk {
            inodes: Vec::new(),
            names: Names::default(),
            has_births: random.bool(),
            random,
            clock: 1,
            fuse: None,
            dead: false,
            room: None,
            was_full: false,
            writeback: None,
            error: false,
        }
    }

    pub(super) fn light_fuse(&mut self, operations: u64) {
        self.fuse = Some(operations);
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead
    }

    /// The process is started again.
    pub(super) fn revive(&mut self) {
        (self.fuse, self.dead, self.writeback) = (None, false, None);
    }

    /// After so many operations, some of what is in the cache fails to be written out.
    pub(super) fn fail_writeback(&mut self, operations: u64) {
        self.writeback = Some(operations);
    }

    /// An error waits for somebody to be told of it.
    pub(super) fn has_error(&self) -> bool {
        self.error || self.inodes.iter().any(|inode| inode.content.has_lost())
    }

    /// The errors have been told to somebody else.
    pub(super) fn forget_errors(&mut self) {
        self.error = false;
        self.inodes.iter_mut().for_each(|inode| inode.content.forget_lost());
    }

    /// The cache holds, clean, what the medium has not.
    fn lose_pages(&mut self) {
        match &mut self.writeback {
            Some(0) => self.writeback = None,
            Some(left) => return *left -= 1,
            None => return,
        }
        for (index, inode) in self.inodes.iter_mut().enumerate() {
            // The journal's own pages are lost as well, now and then.
            if index > 0 || self.random.bool() {
                self.error |= inode.content.lose(&mut self.random);
            }
        }
    }

    /// Drops an inode's clean pages from the cache.
    pub(super) fn drop_cache(&mut self, inode: usize) -> io::Result<()> {
        self.sync(inode)?;
        self.inodes[inode].content.drop_clean();
        Ok(())
    }

    /// The time of an inode's last change.
    pub(super) fn changed(&self, inode: usize) -> i64 {
        self.inodes[inode].changed
    }

    /// What tells an inode from others that are there.
    pub(super) fn identity(&self, inode: usize) -> Identity {
        let Inode { number, born, .. } = self.inodes[inode];
        Identity { inode: number, born: if self.has_births { born } else { 0 } }
    }

    /// Somebody else changes a file, later.
    pub(super) fn change(&mut self, inode: usize, content: &[u8]) {
        self.clock += 1;
        self.write(inode, 0, content).expect("nothing fails meanwhile");
        self.sync(inode).expect("nothing fails meanwhile");
    }

    /// Makes names durable.
    pub(super) fn sync_names(&mut self) -> io::Result<()> {
        self.operate()?;
        self.names.sync(|_| true);
        Ok(())
    }

    /// Counts an operation; the last one may be cut short.
    fn operate(&mut self) -> io::Result<()> {
        self.clock += i64::from(self.random.bool());
        self.lose_pages();
        if self.dead {
            return Err(dead());
        }
        if let Some(fuse) = &mut self.fuse {
            if *fuse == 0 {
                self.dead = true;
                return Err(dead());
            }
            *fuse -= 1;
        }
        Ok(())
    }

    pub(super) fn open(&mut self, name: &str) -> io::Result<usize> {
        self.operate()?;
        if let Some(inode) = self.inode(name) {
            return Ok(inode);
        }
        let taken: Vec<u64> = self.names.iter().map(|(_, inode)| self.inodes[inode as usize].number).collect();
        let number = (1..).find(|number| !taken.contains(number)).expect("there are numbers enough");
        self.inodes.push(Inode { content: Content::new(PAGE), number, born: self.clock, changed: self.clock });
        let inode = self.inodes.len() - 1;
        self.names.link(name.into(), inode as u64);
        Ok(inode)
    }

    pub(super) fn set_len(&mut self, inode: usize, len: usize) -> io::Result<()> {
        self.operate()?;
        self.inodes[inode].content.resize(len);
        Ok(())
    }

    pub(super) fn write(&mut self, inode: usize, at: usize, bytes: &[u8]) -> io::Result<()> {
        let whole = self.operate();
        // The last write of a dying process may come through in part.
        let bytes = if whole.is_ok() { bytes } else { &bytes[..bytes.len() / 2] };
        if self.fuse.is_none() && whole.is_err() {
            return whole;
        }
        if let Some(room) = &mut self.room {
            match room.checked_sub(bytes.len() as u64) {
                Some(left) => *room = left,
                None => {
                    self.was_full = true;
                    return Err(io::ErrorKind::StorageFull.into());
                }
            }
        }
        let inode = &mut self.inodes[inode];
        inode.changed = self.clock;
        inode.content.write(at, bytes);
        self.fuse = self.fuse.filter(|_| whole.is_ok());
        whole
    }

    pub(super) fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.operate()?;
        let inode = self.inode(from).ok_or(io::ErrorKind::NotFound)?;
        self.inodes[inode].changed = self.clock;
        self.names.rename(&from.into(), to.into());
        Ok(())
    }

    pub(super) fn unlink(&mut self, name: &str) -> io::Result<()> {
        self.operate()?;
        if self.names.unlink(&name.into()) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    pub(super) fn sync(&mut self, inode: usize) -> io::Result<()> {
        self.operate()?;
        self.inodes[inode].content.sync().map_err(|_| lost())
    }

    pub(super) fn sync_all(&mut self) -> io::Result<()> {
        self.operate()?;
        self.inodes.iter_mut().for_each(|inode| inode.content.write_out());
        self.names.sync(|_| true);
        // Told once, to whoever asks first; who syncs a file is told of it once more.
        if std::mem::take(&mut self.error) { Err(lost()) } else { Ok(()) }
    }

    /// The machine loses power and comes back.
    pub(super) fn lose_power(&mut self) {
        self.names.lose_power(&mut self.random, |_| ());
        self.inodes.iter_mut().for_each(|inode| inode.content.lose_power(&mut self.random));
        self.error = false;
    }

    pub(super) fn content(&self, name: &str) -> Option<&[u8]> {
        self.inode(name).map(|inode| self.inodes[inode].content.bytes())
    }

    pub(super) fn inode(&self, name: &str) -> Option<usize> {
        self.names.get(&name.into()).map(|inode| inode as usize)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.names.iter().map(|(name, _)| name)
    }
}

#[derive(Clone)]
pub(super) struct Shared(Arc<Mutex<Disk>>);

impl Shared {
    /// A disk with nothing on it.
    pub(super) fn new(random: Rng) -> Shared {
        Shared(Arc::new(Mutex::new(Disk::new(random))))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().unwrap()
    }
}

/// A journal on the simulated disk.
pub(super) struct SimulatedJournal {
    disk: Shared,
    inode: usize,
    at: usize,
}

pub(super) const JOURNAL: &str = "journal";

impl SimulatedJournal {
    pub(super) fn open(disk: &Shared) -> io::Result<SimulatedJournal> {
        let inode = disk.lock().open(JOURNAL)?;
        Ok(SimulatedJournal { disk: disk.clone(), inode, at: 0 })
    }
}

impl Read for SimulatedJournal {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let disk = self.disk.lock();
        let data = disk.inodes[self.inode].content.bytes();
        let n = buffer.len().min(data.len().saturating_sub(self.at));
        buffer[..n].copy_from_slice(&data[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

impl Write for SimulatedJournal {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.disk.lock().write(self.inode, self.at, bytes)?;
        self.at += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Medium for SimulatedJournal {
    fn keep(&mut self, len: u64) -> io::Result<()> {
        self.at = len as usize;
        self.disk.lock().set_len(self.inode, len as usize)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let disk = self.disk.lock();
        let data = disk.inodes[self.inode].content.bytes().get(offset as usize..).unwrap_or_default();
        buffer.copy_from_slice(data.get(..buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn remove(&mut self) -> io::Result<()> {
        self.disk.lock().unlink(JOURNAL)
    }
}
