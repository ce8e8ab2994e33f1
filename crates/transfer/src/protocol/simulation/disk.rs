//! A disk that forgets: what is written is in the cache, and only what was synced is sure to be
//! there after a power cut. Of the rest an arbitrary part is, in whatever order.

use super::Rng;
use crate::sink::journal::Medium;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes that reach the medium or do not as one.
const PAGE: usize = 16;

#[derive(Clone, Default)]
struct Inode {
    data: Vec<u8>,
    durable: Vec<u8>,
    dirty: BTreeSet<usize>,
    /// Counts changes, as the time of the last change does.
    changes: i64,
    /// Something of it was not written out, and nobody has been told.
    error: bool,
}

impl Inode {
    /// Dirty pages reach the medium; what was lost stays lost.
    fn write_out(&mut self) {
        for page in std::mem::take(&mut self.dirty) {
            let (start, end) = (page * PAGE, ((page + 1) * PAGE).min(self.data.len()));
            if start >= end {
                continue;
            }
            if self.durable.len() < end {
                self.durable.resize(end, 0);
            }
            self.durable[start..end].copy_from_slice(&self.data[start..end]);
        }
        self.durable.resize(self.data.len(), 0);
    }
}

enum NameChange {
    Link(String, usize),
    Rename(String, String),
    Unlink(String),
}

#[derive(Default)]
pub(super) struct Disk {
    inodes: Vec<Inode>,
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    /// Changes of names that are not durable, in order. An arbitrary first part of them survives.
    pending: Vec<NameChange>,
    /// Operations until the process that uses the disk dies.
    fuse: Option<u64>,
    dead: bool,
    /// Bytes that can still be written.
    pub(super) room: Option<u64>,
    /// A write failed for want of room.
    pub(super) was_full: bool,
    /// Operations until write-back fails, and chance.
    writeback: Option<(u64, Rng)>,
    /// Something was not written out, and nobody has been told.
    error: bool,
}

fn dead() -> io::Error {
    io::Error::other("the process is dead")
}

impl Disk {
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
    pub(super) fn fail_writeback(&mut self, operations: u64, rng: Rng) {
        self.writeback = Some((operations, rng));
    }

    /// An error waits for somebody to be told of it.
    pub(super) fn has_error(&self) -> bool {
        self.error || self.inodes.iter().any(|inode| inode.error)
    }

    /// The errors have been told to somebody else.
    pub(super) fn forget_errors(&mut self) {
        self.error = false;
        self.inodes.iter_mut().for_each(|inode| inode.error = false);
    }

    /// The cache holds, clean, what the medium has not.
    fn lose_pages(&mut self) {
        match &mut self.writeback {
            Some((0, _)) => {}
            Some((left, _)) => {
                *left -= 1;
                return;
            }
            None => return,
        }
        let Some((_, mut rng)) = self.writeback.take() else { return };
        for (index, inode) in self.inodes.iter_mut().enumerate() {
            // The journal's own pages are lost as well, now and then.
            let pages: Vec<usize> = inode.dirty.iter().copied().filter(|_| rng.below(3) == 0).collect();
            if !pages.is_empty() && (index > 0 || rng.below(2) == 0) {
                (inode.error, self.error) = (true, true);
                inode.dirty.retain(|page| !pages.contains(page));
            }
        }
    }

    /// Drops an inode's clean pages from the cache.
    pub(super) fn drop_cache(&mut self, inode: usize) -> io::Result<()> {
        self.sync(inode)?;
        let inode = &mut self.inodes[inode];
        inode.data.clone_from(&inode.durable);
        Ok(())
    }

    pub(super) fn changes(&self, inode: usize) -> i64 {
        self.inodes[inode].changes
    }

    /// Makes names durable.
    pub(super) fn sync_names(&mut self) -> io::Result<()> {
        self.operate()?;
        self.durable_names.clone_from(&self.names);
        self.pending.clear();
        Ok(())
    }

    /// Counts an operation; the last one may be cut short.
    fn operate(&mut self) -> io::Result<()> {
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
        if let Some(&inode) = self.names.get(name) {
            return Ok(inode);
        }
        self.inodes.push(Inode::default());
        let inode = self.inodes.len() - 1;
        self.names.insert(name.into(), inode);
        self.pending.push(NameChange::Link(name.into(), inode));
        Ok(inode)
    }

    fn resize(&mut self, inode: usize, len: usize) {
        let inode = &mut self.inodes[inode];
        let pages = len.min(inode.data.len()) / PAGE..len.max(inode.data.len()).div_ceil(PAGE);
        inode.dirty.extend(pages);
        inode.data.resize(len, 0);
    }

    pub(super) fn set_len(&mut self, inode: usize, len: usize) -> io::Result<()> {
        self.operate()?;
        self.resize(inode, len);
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
        inode.changes += 1;
        let end = at + bytes.len();
        if inode.data.len() < end {
            inode.data.resize(end, 0);
        }
        inode.data[at..end].copy_from_slice(bytes);
        inode.dirty.extend(at / PAGE..end.div_ceil(PAGE));
        self.fuse = self.fuse.filter(|_| whole.is_ok());
        whole
    }

    pub(super) fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.operate()?;
        let inode = self.names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        self.inodes[inode].changes += 1;
        self.names.insert(to.into(), inode);
        self.pending.push(NameChange::Rename(from.into(), to.into()));
        Ok(())
    }

    pub(super) fn unlink(&mut self, name: &str) -> io::Result<()> {
        self.operate()?;
        self.names.remove(name).ok_or(io::ErrorKind::NotFound)?;
        self.pending.push(NameChange::Unlink(name.into()));
        Ok(())
    }

    pub(super) fn sync(&mut self, inode: usize) -> io::Result<()> {
        self.operate()?;
        let inode = &mut self.inodes[inode];
        inode.write_out();
        if std::mem::take(&mut inode.error) { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    pub(super) fn sync_all(&mut self) -> io::Result<()> {
        self.operate()?;
        self.inodes.iter_mut().for_each(Inode::write_out);
        self.durable_names.clone_from(&self.names);
        self.pending.clear();
        // Told once, to whoever asks first.
        if std::mem::take(&mut self.error) { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    /// The machine loses power and comes back.
    pub(super) fn lose_power(&mut self, rng: &mut Rng) {
        let kept = rng.below(self.pending.len() as u64 + 1) as usize;
        for change in self.pending.drain(..).take(kept) {
            match change {
                NameChange::Link(name, inode) => drop(self.durable_names.insert(name, inode)),
                NameChange::Rename(from, to) => {
                    if let Some(inode) = self.durable_names.remove(&from) {
                        self.durable_names.insert(to, inode);
                    }
                }
                NameChange::Unlink(name) => drop(self.durable_names.remove(&name)),
            }
        }
        self.names.clone_from(&self.durable_names);
        for inode in &mut self.inodes {
            for page in std::mem::take(&mut inode.dirty) {
                let (start, end) = (page * PAGE, ((page + 1) * PAGE).min(inode.data.len()));
                if start < end && rng.below(2) == 0 {
                    if inode.durable.len() < end {
                        inode.durable.resize(end, 0);
                    }
                    inode.durable[start..end].copy_from_slice(&inode.data[start..end]);
                } else if start >= inode.data.len() && inode.durable.len() > inode.data.len() && rng.below(2) == 0 {
                    // It was cut shorter.
                    inode.durable.truncate(inode.data.len());
                }
            }
            inode.data.clone_from(&inode.durable);
            inode.error = false;
        }
        self.error = false;
    }

    pub(super) fn content(&self, name: &str) -> Option<&[u8]> {
        self.names.get(name).map(|i| &self.inodes[*i].data[..])
    }

    pub(super) fn inode(&self, name: &str) -> Option<usize> {
        self.names.get(name).copied()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.names.keys()
    }
}

#[derive(Clone, Default)]
pub(super) struct Shared(Arc<Mutex<Disk>>);

impl Shared {
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
        let data = &disk.inodes[self.inode].data;
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
        let data = disk.inodes[self.inode].data.get(offset as usize..).unwrap_or_default();
        buffer.copy_from_slice(data.get(..buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn remove(&mut self) -> io::Result<()> {
        self.disk.lock().unlink(JOURNAL)
    }
}
