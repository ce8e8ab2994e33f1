//! A disk that answers late and out of order, fails, and forgets what was not flushed.
#![allow(dead_code)]

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thruway_block::backend::{Backend, Extent, Geometry, Op, Zero};
use thruway_engine::Segment;

pub const SECTOR: usize = 512;
pub const SECTORS: u64 = 1024;

/// A disk with a cache of its own, which it may lose.
///
/// What has been begun is done, whether or not anybody still waits for it, as by the kernel.
#[derive(Clone)]
pub struct Disk {
    state: Arc<Mutex<State>>,
    /// Taken by zeroing.
    zeroes: Arc<tokio::sync::Mutex<()>>,
}

struct State {
    durable: Vec<u8>,
    /// What reads see.
    current: Vec<u8>,
    /// Writes that were done but not flushed, in order.
    pending: Vec<(usize, Vec<u8>)>,
    random: u64,
    /// One write of so many fails.
    failing: u64,
    /// Bytes that are shown.
    size: u64,
    /// A sector that cannot be read until it has been written.
    bad: Option<u64>,
    /// No write succeeds.
    full: bool,
}

impl State {
    fn draw(&mut self, n: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % n
    }

    fn put(&mut self, at: u64, data: Vec<u8>) {
        let end = at + data.len() as u64;
        self.bad = self.bad.filter(|bad| bad * (SECTOR as u64) < at || (bad + 1) * SECTOR as u64 > end);
        let at = at as usize;
        self.current[at..at + data.len()].copy_from_slice(&data);
        self.pending.push((at, data));
    }
}

impl Disk {
    /// A disk of zeroes on which one operation of `failing` fails, none if that is 0.
    pub fn new(seed: u64, failing: u64) -> Disk {
        let durable = vec![0; SECTORS as usize * SECTOR];
        let current = durable.clone();
        let state = State {
            durable,
            current,
            pending: Vec::new(),
            random: seed | 1,
            failing,
            size: SECTORS * SECTOR as u64,
            bad: None,
            full: false,
        };
        Disk { state: Arc::new(Mutex::new(state)), zeroes: Arc::default() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    async fn dawdle(&self) {
        let (turns, sleep) = {
            let mut state = self.lock();
            (state.draw(4), state.draw(3) == 0)
        };
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
        if sleep {
            let time = self.lock().draw(5);
            tokio::time::sleep(Duration::from_millis(time)).await;
        }
    }

    /// From now on it is so long.
    pub fn resize(&self, size: u64) {
        self.lock().size = size;
    }

    /// From now on this sector cannot be read, until it is written.
    pub fn spoil(&self, sector: u64) {
        self.lock().bad = Some(sector);
    }

    /// From now on no write succeeds, or all do again.
    pub fn fail_writes(&self, fail: bool) {
        self.lock().full = fail;
    }

    /// From now on nothing fails.
    pub fn fail_never(&self) {
        self.lock().failing = 0;
    }

    /// Until what is returned is dropped, zeroing does not end.
    pub fn hold_zeroes(&self) -> tokio::sync::OwnedMutexGuard<()> {
        Arc::clone(&self.zeroes).try_lock_owned().expect("nothing is being zeroed")
    }

    fn fails(&self) -> bool {
        let mut state = self.lock();
        let failing = state.failing;
        failing > 0 && state.draw(failing) == 0
    }

    /// What is there after a loss of power: all that was flushed, and any part of the rest.
    pub fn crash(&self) -> Vec<u8> {
        let mut state = self.lock();
        let mut all = state.durable.clone();
        let pending = std::mem::take(&mut state.pending);
        for (at, data) in pending {
            for (i, sector) in data.chunks(SECTOR).enumerate() {
                if state.draw(2) == 0 {
                    let start = at + i * SECTOR;
                    all[start..start + sector.len()].copy_from_slice(sector);
                }
            }
        }
        all
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
            segment.as_mut_slice().copy_from_slice(&self.lock().current[at as usize..at as usize + len]);
            self.dawdle().await;
            Ok(segment)
        })
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        let disk = self.clone();
        begun(async move {
            disk.dawdle().await;
            if disk.fails() || disk.lock().full {
                return Err(io::Error::from_raw_os_error(5));
            }
            disk.lock().put(at, segment.as_slice().to_vec());
            disk.dawdle().await;
            if durable { disk.flush().await } else { Ok(()) }
        })
    }

    fn flush(&self) -> Op<'_, ()> {
        Box::pin(async move {
            self.dawdle().await;
            let mut state = self.lock();
            let state = &mut *state;
            for (at, data) in state.pending.drain(..) {
                state.durable[at..at + data.len()].copy_from_slice(&data);
            }
            Ok(())
        })
    }

    fn zero(&self, at: u64, len: u64, _how: Zero) -> Op<'_, ()> {
        let disk = self.clone();
        begun(async move {
            disk.dawdle().await;
            let _held = disk.zeroes.lock().await;
            disk.lock().put(at, vec![0; len as usize]);
            disk.dawdle().await;
            Ok(())
        })
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.zero(at, len, Zero::empty())
    }

    fn extents(&self, _at: u64, len: u64) -> Op<'_, Vec<Extent>> {
        Box::pin(std::future::ready(Ok(vec![Extent { len, hole: false, zero: false }])))
    }
}
