//! The data of files: reading, writing, flushing, holes and copies.

use super::node::{Data, Node, close_later};
use super::{Inner, LocalFileSystem, errno};
use crate::{Allocate, As, Attributes, FileId, LentData, ReadData, Result, Seek, Stability};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use thruway_engine::Segment;
use thruway_engine::io::{OpenFile, Request, ring};
use thruway_engine::pipes::{self, Pipes};

/// What positions and lengths past the page cache are multiples of.
const DIRECT: u64 = 4096;

/// Most bytes that one call of the kernel copies, so that what waits for it gets an answer.
const COPY_MAX: usize = 16 << 20;

impl LocalFileSystem {
    async fn open_for_reading(&self, node: &Arc<Node>) -> Result<Arc<OpenFile>> {
        if let Some(file) = &node.data().read {
            return Ok(Arc::clone(file));
        }
        let node = Arc::clone(node);
        self.work(move |inner| {
            let file = inner.open_data(&node, OFlags::RDONLY)?;
            Ok(Arc::clone(node.data().read.get_or_insert(file)))
        })
        .await
    }

    async fn open_for_writing(&self, node: &Arc<Node>) -> Result<Arc<OpenFile>> {
        let begin = |data: &mut Data| {
            data.is_dirty |= data.write.is_some();
            data.written = Some(Instant::now());
            data.write.clone()
        };
        if let Some(file) = begin(&mut node.data()) {
            return Ok(file);
        }
        let node = Arc::clone(node);
        self.work(move |inner| {
            let file = inner.open_data(&node, OFlags::WRONLY)?;
            let mut data = node.data();
            data.write.get_or_insert(file);
            Ok(begin(&mut data).expect("it has just been put there"))
        })
        .await
    }

    /// A file past the page cache, for reading or for writing, if that is wanted and the segment can go so.
    async fn open_direct(&self, node: &Arc<Node>, at: u64, segment: &Segment, is_write: bool) -> Option<Arc<OpenFile>> {
        let place = segment.as_ptr() as u64 | segment.len() as u64 | at;
        if !self.inner.is_direct || segment.is_empty() || !place.is_multiple_of(DIRECT) || at > i64::MAX as u64 {
            return None;
        }
        if let Some(file) = &node.data().direct[usize::from(is_write)] {
            return Some(Arc::clone(file));
        }
        let node = Arc::clone(node);
        let flags = if is_write { OFlags::WRONLY } else { OFlags::RDONLY };
        let opened = self.work(move |inner| {
            let file = inner.open_data(&node, flags | OFlags::DIRECT)?;
            Ok(Arc::clone(node.data().direct[usize::from(is_write)].get_or_insert(file)))
        });
        // A file system that cannot: the page cache can.
        opened.await.ok()
    }

    /// Syncs what has been written to a file.
    pub(super) async fn sync(&self, node: &Arc<Node>) -> Result<()> {
        let (begun, failures) = (node.syncs.load(Ordering::SeqCst), node.failures.load(Ordering::SeqCst));
        let _syncing = node.syncing.lock().await;
        if node.failures.load(Ordering::SeqCst) != failures {
            return Err(Errno::IO);
        }
        if node.synced.load(Ordering::SeqCst) > begun {
            // It began after this was asked for, with what this is about.
            return Ok(());
        }
        let number = node.syncs.fetch_add(1, Ordering::SeqCst) + 1;
        let open = node.data().write.clone();
        let Some(file) = open else {
            // What was written has been flushed, or is being by the end of the node that it was written through.
            let node = Arc::clone(node);
            let synced = self.work(move |inner| {
                let file = inner.open_data(&node, OFlags::RDONLY)?;
                inner.sync(&node, &file)
            });
            synced.await?;
            return Ok(());
        };
        let (syncing, synced) = (Arc::clone(node), Arc::clone(&file));
        let sync = move |inner: &Arc<Inner>| {
            // Not earlier: a job that does not begin leaves the file dirty.
            syncing.data().is_dirty = false;
            inner.sync(&syncing, &synced)
        };
        self.work(sync).await?;
        node.synced.store(number, Ordering::SeqCst);
        close_later(node);
        Ok(())
    }

    pub(super) async fn read_data(
        &self,
        user: As<'_>,
        file: &FileId,
        at: u64,
        mut segment: Segment,
    ) -> Result<ReadData> {
        let node = self.node(file).await?;
        Inner::check_regular(&node)?;
        if user.is_open && !segment.is_empty() && !self.inner.is_direct {
            let data = self.open_for_reading(&node).await?;
            if data.try_read_before_end(at, &mut segment) {
                return Ok(ReadData { segment, is_end: false, attributes: None });
            }
        }
        // Before the data: a client that takes them for later than the data would keep data that is old.
        let stat = self.stat(&node).await?;
        if !user.is_open {
            self.inner.check_read(user.who, &node, &stat)?;
        }
        let attributes = self.inner.attributes(&node, &stat)?;
        let left = stat.stx_size.saturating_sub(at);
        if left > 0
            && let Some(file) = self.open_direct(&node, at, &segment, false).await
        {
            // Also behind the end, where the length would not be a multiple.
            let mut done = ring().perform(Request::read(file, at, segment)).await;
            let read = done.result.map_err(|e| errno(&e))?;
            segment = done.buffers.pop().expect("a request with a buffer");
            // One that has become longer meanwhile does not end where it did.
            let is_end = read as u64 == left || read < segment.len();
            drop(segment.split_off(read));
            return Ok(ReadData { segment, is_end, attributes: Some(attributes) });
        }
        let wanted = segment.len();
        let len = (wanted as u64).min(left) as usize;
        drop(segment.split_off(len));
        let mut is_end = at.saturating_add(len as u64) >= stat.stx_size;
        if len > 0 {
            let file = self.open_for_reading(&node).await?;
            if !file.try_read(at, &mut segment) {
                let mut done = ring().perform(Request::read(file, at, segment)).await;
                let read = done.result.map_err(|e| errno(&e))?;
                segment = done.buffers.pop().expect("a request with a buffer");
                // It has become shorter meanwhile.
                is_end |= read < len;
                drop(segment.split_off(read));
            }
        }
        Ok(ReadData { segment, is_end, attributes: Some(attributes) })
    }

    /// Takes pages that are cached.
    pub(super) async fn lend_data(
        &self,
        user: As<'_>,
        file: &FileId,
        at: u64,
        len: usize,
        pipes: &Arc<Pipes>,
    ) -> Result<Option<LentData>> {
        if len < pipes::LEN_MIN || !self.inner.is_local || self.inner.is_direct {
            return Ok(None);
        }
        let node = self.node(file).await?;
        Inner::check_regular(&node)?;
        // As for what is read.
        let stat = self.stat(&node).await?;
        if !user.is_open {
            self.inner.check_read(user.who, &node, &stat)?;
        }
        let len = usize::try_from(stat.stx_size.saturating_sub(at)).map_or(len, |left| left.min(len));
        let file = self.open_for_reading(&node).await?;
        let Some(pages) = pipes.take(&file, at, len).filter(|pages| pages.len() > 0) else { return Ok(None) };
        let read = pages.len();
        let is_end = read < len || at.saturating_add(read as u64) >= stat.stx_size;
        Ok(Some(LentData { pages, is_end, attributes: Some(self.inner.attributes(&node, &stat)?) }))
    }

    pub(super) async fn write_data(
        &self,
        user: As<'_>,
        file: &FileId,
        at: u64,
        segment: Segment,
        stability: Stability,
    ) -> Result<Attributes> {
        let node = self.node(file).await?;
        Inner::check_regular(&node)?;
        let stat = self.stat(&node).await?;
        if !user.is_open {
            self.inner.check_write(user.who, &node, &stat)?;
        }
        if stat.stx_mode & 0o6000 != 0 {
            let (node, who) = (Arc::clone(&node), user.who.clone());
            self.work(move |_| Inner::drop_privileges(&who, &node)).await?;
        }
        let file = self.open_for_writing(&node).await?;
        let failures = node.failures.load(Ordering::SeqCst);
        let mut written = Ok(());
        if let Some(direct) = self.open_direct(&node, at, &segment, true).await {
            written = ring().write(&direct, at, segment, false).await.0;
        } else if !file.try_write(at, &segment) {
            written = ring().write(&file, at, segment, false).await.0;
        }
        // Also if it has been done in part; and no flush that has begun before covers it.
        let changed = node.note_change();
        node.data().is_dirty = true;
        drop(file);
        written.map_err(|e| errno(&e))?;
        if stability > Stability::Unstable {
            self.sync(&node).await?;
            // Another's sync may have been told what was this one's error.
            if node.failures.load(Ordering::SeqCst) != failures {
                return Err(Errno::IO);
            }
        }
        let stat = match changed {
            Some(stat) => stat,
            None => self.stat(&node).await?,
        };
        self.inner.attributes(&node, &stat)
    }

    pub(super) async fn seek_data(&self, user: As<'_>, file: &FileId, at: u64, what: Seek) -> Result<u64> {
        let node = self.node(file).await?;
        Inner::check_regular(&node)?;
        let stat = self.stat(&node).await?;
        if !user.is_open {
            self.inner.check_read(user.who, &node, &stat)?;
        }
        // A description of its own: positions are shared.
        self.work(move |inner| {
            let file = inner.open_data(&node, OFlags::RDONLY)?;
            let from = match what {
                Seek::Data => SeekFrom::Data(at),
                Seek::Hole => SeekFrom::Hole(at),
            };
            rustix::fs::seek(&*file, from)
        })
        .await
    }

    pub(super) async fn allocate_data(
        &self,
        user: As<'_>,
        file: &FileId,
        at: u64,
        len: u64,
        what: Allocate,
    ) -> Result<()> {
        let node = self.node(file).await?;
        Inner::check_regular(&node)?;
        if !user.is_open {
            self.inner.check_write(user.who, &node, &self.stat(&node).await?)?;
        }
        let file = self.open_for_writing(&node).await?;
        let (who, changed) = (user.who.clone(), Arc::clone(&node));
        let turn = self.turn(&self.inner.copies).await?;
        let done = self.work(move |_| {
            let _turn = turn;
            Inner::drop_privileges(&who, &node)?;
            let keep = FallocateFlags::KEEP_SIZE;
            let allocate = |flags| rustix::fs::fallocate(&*file, flags, at, len);
            let done = match what {
                // Some file systems make a file longer for which there is no room. Its end is moved when there is.
                Allocate::Reserve => allocate(keep).and_then(|()| allocate(FallocateFlags::empty())),
                Allocate::Punch => allocate(FallocateFlags::PUNCH_HOLE | keep),
            };
            node.note_change();
            node.data().is_dirty = true;
            done
        });
        let done = done.await;
        // Clients send no COMMIT after an ALLOCATE. Also if it has been done in part.
        self.sync(&changed).await?;
        done
    }

    pub(super) async fn copy_data(
        &self,
        user: As<'_>,
        (from, from_at): (&FileId, u64),
        (to, to_at): (&FileId, u64),
        len: u64,
        shared: bool,
    ) -> Result<u64> {
        let (source, target) = (self.node(from).await?, self.node(to).await?);
        Inner::check_regular(&source)?;
        Inner::check_regular(&target)?;
        if !user.is_open {
            self.inner.check_read(user.who, &source, &self.stat(&source).await?)?;
            self.inner.check_write(user.who, &target, &self.stat(&target).await?)?;
        }
        let (source, file) = (self.open_for_reading(&source).await?, self.open_for_writing(&target).await?);
        let (who, changed) = (user.who.clone(), Arc::clone(&target));
        let turn = self.turn(&self.inner.copies).await?;
        let copied = self.work(move |_| {
            let _turn = turn;
            Inner::drop_privileges(&who, &target)?;
            let copied = if shared {
                thruway_fs::share_storage::share_range(&source, from_at, &file, to_at, len).map(|()| len)
            } else {
                let (mut from_at, mut to_at) = (from_at, to_at);
                let len = usize::try_from(len).unwrap_or(COPY_MAX).min(COPY_MAX);
                rustix::fs::copy_file_range(&*source, Some(&mut from_at), &*file, Some(&mut to_at), len)
                    .map(|copied| copied as u64)
            };
            target.note_change();
            target.data().is_dirty = true;
            copied
        });
        let copied = copied.await;
        if shared || copied.is_err() {
            // Clients send no COMMIT after a CLONE, as they do after a COPY.
            self.sync(&changed).await?;
        }
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Credentials, FileSystem, LocalOptions};
    use futures_util::{FutureExt, TryFutureExt};
    use std::sync::{Mutex, mpsc};
    use thruway_engine::Reactors;
    use thruway_server::caller;
    use thruway_tcp::Origin;

    /// A flush that is cancelled while it waits for a thread leaves the file dirty: the next one flushes it.
    #[test]
    fn a_cancelled_flush_has_flushed_nothing() {
        let reactors = Reactors::start(Some(1)).unwrap();
        let (done, is_done) = mpsc::channel();
        reactors.handles()[0].spawn(move || async move {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("file"), "data").unwrap();
            let files = LocalFileSystem::open_by(dir.path(), &LocalOptions::default(), true).unwrap();
            let (id, _) = files.look_up(&Credentials::own(), &files.root(), b"file").await.unwrap();
            let node = files.node(&id).await.unwrap();
            files.open_for_writing(&node).await.unwrap();
            node.data().is_dirty = true;
            caller::on_behalf_of(Origin::of_host([10, 0, 0, 1].into()), async {
                let (go_on, wait) = mpsc::channel::<()>();
                let wait = Arc::new(Mutex::new(wait));
                let busy = (0..100).map(|_| {
                    let wait = Arc::clone(&wait);
                    files.work(move |_| {
                        let _ = wait.lock().map(|wait| wait.recv());
                        Ok(())
                    })
                });
                let mut busy = std::pin::pin!(futures_util::future::join_all(busy));
                assert!(busy.as_mut().now_or_never().is_none());
                let mut flush = Box::pin(files.sync(&node));
                assert!((&mut flush).now_or_never().is_none());
                drop(flush);
                drop(go_on);
                busy.await;
                // Behind the cancelled flush.
                files.work(|_| Ok(())).await.unwrap();
            })
            .await;
            assert!(node.data().is_dirty);
            files.sync(&node).await.unwrap();
            assert!(!node.data().is_dirty);
            done.send(()).unwrap();
        });
        is_done.recv().expect("a check has failed: its message is above");
    }

    /// A file whose mode changes while an operation waits for a thread keeps the new mode, but for the set-user-ID bit.
    #[test]
    fn a_mode_that_changes_during_a_wait_stays() {
        use std::os::unix::fs::PermissionsExt;
        let reactors = Reactors::start(Some(1)).unwrap();
        let (done, is_done) = mpsc::channel();
        reactors.handles()[0].spawn(move || async move {
            let dir = tempfile::tempdir().unwrap();
            let set_mode = |mode| {
                std::fs::set_permissions(dir.path().join("file"), std::fs::Permissions::from_mode(mode)).unwrap();
            };
            ["file", "source"].iter().for_each(|name| std::fs::write(dir.path().join(name), "data").unwrap());
            let files = LocalFileSystem::open_by(dir.path(), &LocalOptions::default(), true).unwrap();
            let (own, root) = (Credentials::own(), files.root());
            let (file, _) = files.look_up(&own, &root, b"file").await.unwrap();
            let (source, _) = files.look_up(&own, &root, b"source").await.unwrap();
            let who = Credentials { uid: 1000, gid: 1000, groups: [].into() };
            let user = As { who: &who, is_open: true };
            caller::on_behalf_of(Origin::of_host([10, 0, 0, 1].into()), async {
                for copies in [false, true] {
                    set_mode(0o4755);
                    for file in [&file, &source] {
                        files.open_for_writing(&files.node(file).await.unwrap()).await.unwrap();
                    }
                    let (go_on, wait) = mpsc::channel::<()>();
                    let wait = Arc::new(Mutex::new(wait));
                    let busy = (0..100).map(|_| {
                        let wait = Arc::clone(&wait);
                        files.work(move |_| {
                            let _ = wait.lock().map(|wait| wait.recv());
                            Ok(())
                        })
                    });
                    let mut busy = std::pin::pin!(futures_util::future::join_all(busy));
                    assert!(busy.as_mut().now_or_never().is_none());
                    let mut operation = if copies {
                        files.copy_data(user, (&source, 0), (&file, 0), 4, false).boxed_local()
                    } else {
                        files.allocate_data(user, &file, 0, 4, Allocate::Reserve).map_ok(|()| 4).boxed_local()
                    };
                    assert!((&mut operation).now_or_never().is_none());
                    set_mode(0o4700);
                    drop(go_on);
                    busy.await;
                    operation.await.unwrap();
                    let mode = std::fs::metadata(dir.path().join("file")).unwrap().permissions().mode();
                    assert_eq!(mode & 0o7777, 0o700, "{copies}");
                }
            })
            .await;
            done.send(()).unwrap();
        });
        is_done.recv().expect("a check has failed: its message is above");
    }
}
