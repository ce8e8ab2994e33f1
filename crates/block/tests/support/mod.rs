//! A disk that answers late and out of order, fails, and forgets what was not flushed.
#![allow(dead_code)]

use fastrand::Rng;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thruway_block::backend::{Backend, Extent, Geometry, Op, Zero};
use thruway_engine::Segment;
use thruway_faultfs::Content;

pub(crate) const SECTOR: usize = 512;
pub(crate) const SECTORS: u64 = 1024;

/// A disk with a cache of its own, which it may lose.
///
/// What has been begun is done, whether or not anybody still waits for it, as by the kernel.
#[derive(Clone)]
pub(crate) struct Disk {
    state: Arc<Mutex<State>>,
    /// Taken by zeroing.
    zeroes: Arc<tokio::sync::Mutex<()>>,
}

struct State {
    content: Content,
    random: Rng,
    /// One operation of so many fails.
    failing: u64,
    /// Bytes that are shown.
    size: u64,
    /// A sector that cannot be read until it has been written.
    bad: Option<u64>,
    /// No write succeeds.
    full: bool,
    /// Zeroing fails when it has done some.
    fails_to_zero: bool,
}

impl State {
    fn put(&mut self, at: u64, data: &[u8]) {
        let end = at + data.len() as u64;
        self.bad = self.bad.filter(|bad| bad * (SECTOR as u64) < at || (bad + 1) * SECTOR as u64 > end);
        self.content.write(at as usize, data);
    }

    /// What fails has been done in part.
    fn put_some(&mut self, at: u64, data: &[u8]) {
        let sectors = self.random.usize(..=data.len() / SECTOR);
        self.put(at, &data[..sectors * SECTOR]);
    }
}

impl Disk {
    /// A disk of zeroes on which one operation of `failing` fails, none if that is 0.
    pub(crate) fn new(seed: u64, failing: u64) -> Disk {
        let mut content = Content::new(SECTOR);
        content.resize(SECTORS as usize * SECTOR);
        content.sync().expect("nothing has been lost");
        let random = Rng::with_seed(seed);
        let size = SECTORS * SECTOR as u64;
        let state = State { content, random, failing, size, bad: None, full: false, fails_to_zero: false };
        Disk { state: Arc::new(Mutex::new(state)), zeroes: Arc::default() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    async fn dawdle(&self) {
        let (turns, sleep) = {
            let mut state = self.lock();
            (state.random.u8(..4), state.random.u8(..3) == 0)
        };
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
        if sleep {
            let time = self.lock().random.u64(..5);
            tokio::time::sleep(Duration::from_millis(time)).await;
        }
    }

    /// From now on it is so long.
    pub(crate) fn resize(&self, size: u64) {
        self.lock().size = size;
    }

    /// From now on this sector cannot be read, until it is written.
    pub(crate) fn spoil(&self, sector: u64) {
        self.lock().bad = Some(sector);
    }

    /// From now on no write succeeds, or all do again.
    pub(crate) fn fail_writes(&self, fail: bool) {
        self.lock().full = fail;
    }

    /// From now on zeroing fails when it has done all but the last sector, or none does.
    pub(crate) fn fail_zeroes(&self, fail: bool) {
        self.lock().fails_to_zero = fail;
    }

    /// From now on nothing fails.
    pub(crate) fn fail_never(&self) {
        self.lock().failing = 0;
    }

    /// Until what is returned is dropped, zeroing does not end.
    pub(crate) fn hold_zeroes(&self) -> tokio::sync::OwnedMutexGuard<()> {
        Arc::clone(&self.zeroes).try_lock_owned().expect("nothing is being zeroed")
    }

    fn fails(&self) -> bool {
        let mut state = self.lock();
        let failing = state.failing;
        failing > 0 && state.random.u64(..failing) == 0
    }

    /// What is there after a loss of power: all that was flushed, and of the rest any version of each sector.
    pub(crate) fn crash(&self) -> Vec<u8> {
        let mut state = self.lock();
        let State { content, random, .. } = &mut *state;
        content.lose_power(random);
        content.bytes().to_vec()
    }
}

/// Something that is done to its end once it is first waited for.
fn begun(work: impl Future<Output = io::Result<()>> + 'static) -> Op<'static, ()> {
    Box::pin(async move { tokio::task::spawn_local(work).await.map_err(io::Error::other)? })
}

impl Backend for Disk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.lock().size,
            block: 1,
            preferred: 4096,
            physical: 512,
            read_only: false,
            discard: true,
            discard_zeroes: false,
            fast_zero: true,
            shared: true,
        }
    }

    fn read(&self, at: u64, mut segment: Segment) -> Op<'_, Segment> {
        Box::pin(async move {
            self.dawdle().await;
            if self.fails() {
                return Err(io::Error::from_raw_os_error(5));
            }
            let len = segment.len();
            let end = at + len as u64;
            if self.lock().bad.is_some_and(|bad| bad * (SECTOR as u64) < end && at < (bad + 1) * SECTOR as u64) {
                return Err(io::Error::from_raw_os_error(5));
            }
            segment.as_mut_slice().copy_from_slice(&self.lock().content.bytes()[at as usize..at as usize + len]);
            self.dawdle().await;
            Ok(segment)
        })
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        let disk = self.clone();
        begun(async move {
            disk.dawdle().await;
            if disk.lock().full {
                return Err(io::Error::from_raw_os_error(5));
            }
            if disk.fails() {
                disk.lock().put_some(at, segment.as_slice());
                return Err(io::Error::from_raw_os_error(5));
            }
            disk.lock().put(at, segment.as_slice());
            disk.dawdle().await;
            if durable { disk.flush().await } else { Ok(()) }
        })
    }

    fn flush(&self) -> Op<'_, ()> {
        Box::pin(async move {
            self.dawdle().await;
            self.lock().content.sync().map_err(|_| io::Error::from_raw_os_error(5))
        })
    }

    fn zero(&self, at: u64, len: u64, _how: Zero) -> Op<'_, ()> {
        let disk = self.clone();
        begun(async move {
            disk.dawdle().await;
            let _held = disk.zeroes.lock().await;
            let zeroes = vec![0; len as usize];
            if disk.lock().fails_to_zero {
                disk.lock().put(at, &zeroes[SECTOR..]);
                return Err(io::Error::from_raw_os_error(5));
            }
            if disk.fails() {
                disk.lock().put_some(at, &zeroes);
                return Err(io::Error::from_raw_os_error(5));
            }
            disk.lock().put(at, &zeroes);
            disk.dawdle().await;
            Ok(())
        })
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.zero(at, len, Zero::empty())
    }

    fn extents(&self, _at: u64, len: u64, _most: usize) -> Op<'_, Vec<Extent>> {
        Box::pin(std::future::ready(Ok(vec![Extent { len, hole: false, zero: false }])))
    }
}
