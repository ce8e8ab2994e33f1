//! The cache under a seeded simulation: many clients, a disk that answers late and out of order and forgets what was
//! not flushed, evictions all the time, failures, crashes. Time is simulated; the same seed gives the same run.

use crate::support;
use fastrand::Rng;
use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use support::{Disk, SECTOR, SECTORS};
use thruway_block::backend::{Backend, Lent, Zero};
use thruway_block::cache::{Cache, Config};
use thruway_engine::Segments;

const CLIENTS: u64 = 6;
/// Up to here clients have every sixth sector each, so that they meet in every block; from here on a stretch each.
const MIXED: u64 = SECTORS / 2;
const STRETCH: u64 = (SECTORS - MIXED) / CLIENTS;
/// Sectors of the longest read.
const READ_MAX: u64 = 80;

thread_local! {
    /// Reads that were lent.
    static LENT: Cell<u64> = const { Cell::new(0) };
}

fn owner(sector: u64) -> u64 {
    if sector < MIXED { sector % CLIENTS } else { (sector - MIXED) / STRETCH }
}

fn fill(sector: &mut [u8], number: u64, version: u64) {
    let mark = if version == 0 { 0 } else { version << 16 | number };
    sector.chunks_mut(8).for_each(|word| word.copy_from_slice(&mark.to_le_bytes()));
}

/// The version in a sector; panics if it is torn or another sector's.
fn version(sector: &[u8], number: u64) -> u64 {
    let mark = u64::from_le_bytes(sector[..8].try_into().unwrap());
    assert!(sector.chunks(8).all(|word| word == mark.to_le_bytes()), "sector {number} is torn");
    assert!(mark == 0 || mark & 0xffff == number, "sector {number} holds another's bytes: {mark:x}");
    mark >> 16
}

/// What a client knows of a sector of its own.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// The latest write that may have happened.
    tried: u64,
    /// What a read must show. After a change that failed that is what the next one shows.
    shown: Option<u64>,
    /// What survives a crash, or what came after it.
    safe: u64,
}

impl Default for Known {
    fn default() -> Known {
        Known { tried: 0, shown: Some(0), safe: 0 }
    }
}

struct Client {
    id: u64,
    cache: Arc<Cache>,
    random: Rng,
    known: Rc<std::cell::RefCell<HashMap<u64, Known>>>,
    supply: Rc<Segments>,
    next: u64,
}

impl Client {
    fn own(&mut self) -> u64 {
        match self.random.u64(..2) {
            0 => self.random.u64(..MIXED / CLIENTS) * CLIENTS + self.id,
            _ => MIXED + self.id * STRETCH + self.random.u64(..STRETCH),
        }
    }

    /// How many sectors from this one on are changed together.
    fn together(&mut self, sector: u64) -> u64 {
        let own = (sector..SECTORS.min(sector + READ_MAX)).take_while(|s| owner(*s) == self.id).count() as u64;
        if self.random.u64(..3) == 0 { 1 + self.random.u64(..own) } else { 1 }
    }

    async fn step(&mut self) {
        let sector = self.own();
        let at = sector * SECTOR as u64;
        match self.random.u64(..20) {
            0..=7 => {
                self.next += 1;
                let wanted = self.next;
                let count = self.together(sector);
                let mut segment = self.supply.reserve(1).await.segment(count as usize * SECTOR);
                for (bytes, sector) in segment.as_mut_slice().chunks_mut(SECTOR).zip(sector..) {
                    let mut known = self.known.borrow_mut();
                    let known = known.entry(sector).or_default();
                    (known.tried, known.shown) = (wanted, None);
                    fill(bytes, sector, wanted);
                }
                let durable = self.random.u64(..8) == 0;
                let result = self.cache.write(at, segment, durable).await;
                (sector..sector + count).for_each(|sector| self.settle(sector, wanted, durable, &result));
            }
            8 | 9 => {
                let sectors = sector..sector + self.together(sector);
                let len = (sectors.end - sectors.start) * SECTOR as u64;
                for sector in sectors.clone() {
                    // A zeroed sector is of version 0, and may be again after a crash.
                    let mut known = self.known.borrow_mut();
                    let known = known.entry(sector).or_default();
                    (known.shown, known.safe) = (None, 0);
                }
                if self.cache.zero(at, len, Zero::MAY_DISCARD).await.is_ok() {
                    sectors.for_each(|sector| self.known.borrow_mut().get_mut(&sector).unwrap().shown = Some(0));
                }
            }
            10 => {
                let before: Vec<(u64, Known)> = self.known.borrow().iter().map(|(s, k)| (*s, *k)).collect();
                if self.cache.flush().await.is_ok() {
                    let mut known = self.known.borrow_mut();
                    for (sector, then) in before.into_iter().filter(|(sector, _)| owner(*sector) == self.id) {
                        let known = known.get_mut(&sector).unwrap();
                        known.safe = then.shown.unwrap_or(known.safe);
                    }
                }
            }
            _ => {
                let longest = (SECTORS - sector).min(READ_MAX);
                let count = if self.random.u64(..3) == 0 { longest } else { 1 + self.random.u64(..longest) };
                let len = count as usize * SECTOR;
                self.cache.hint_sequential(at, len as u64);
                if let Some(Lent::Memory(pieces)) = self.cache.lend(at, len) {
                    // It is sent at leisure.
                    tokio::time::sleep(Duration::from_millis(self.random.u64(..20))).await;
                    LENT.with(|lent| lent.set(lent.get() + 1));
                    let mut bytes = Vec::new();
                    for piece in &pieces {
                        // SAFETY: the piece lives, and nobody else runs meanwhile.
                        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.as_ptr(), piece.len()) });
                    }
                    assert_eq!(bytes.len(), len);
                    return self.judge(sector, &bytes);
                }
                let segment = self.supply.reserve(1).await.segment(len);
                let reading = self.cache.read(at, segment);
                // One that nobody waits for any more is dropped where it stands.
                let patience = [1, 3, 10_000][self.random.u64(..3) as usize];
                let Ok(read) = tokio::time::timeout(Duration::from_millis(patience), reading).await else { return };
                let Ok(segment) = read else { return };
                self.judge(sector, segment.as_slice());
            }
        }
    }

    /// Of a long read only the own sectors are looked at.
    fn judge(&self, first: u64, bytes: &[u8]) {
        for (i, bytes) in bytes.chunks(SECTOR).enumerate() {
            let number = first + i as u64;
            let found = version(bytes, number);
            if owner(number) == self.id {
                let mut known = self.known.borrow_mut();
                let known = known.entry(number).or_default();
                assert!(*known.shown.get_or_insert(found) == found, "sector {number}: {found}, {known:?}");
            }
        }
    }

    fn settle(&self, sector: u64, wanted: u64, durable: bool, result: &std::io::Result<()>) {
        let mut known = self.known.borrow_mut();
        let known = known.entry(sector).or_default();
        if result.is_ok() {
            known.shown = Some(wanted);
            if durable {
                known.safe = wanted;
            }
        }
    }
}

fn simulate(seed: u64, write_back: bool, failing: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async move {
        let mut random = Rng::with_seed(seed);
        let disk = Arc::new(Disk::new(seed, failing));
        // Far fewer blocks than the disk has.
        // With blocks of one grain and of two.
        let (size, block) = [(128 << 10, 4096), (256 << 10, 4096), (256 << 10, 8192)][random.usize(..3)];
        let config = Config {
            volatile: false,
            size,
            block,
            neighbours: 1 + random.u64(..3),
            partitions: 1 + random.u64(..3) as usize,
            write_back,
            read_ahead: [0, 16 << 10][random.u64(..2) as usize],
        };
        let nodes = &[0, 1][..1 + random.u64(..2) as usize];
        let cache = Arc::new(Cache::new(Arc::clone(&disk) as _, config, nodes, None).unwrap());
        let known = Rc::default();
        let supply = Rc::new(Segments::new(CLIENTS as usize, READ_MAX as usize * SECTOR).unwrap());
        let steps = 150 + random.u64(..150);
        let clients: Vec<_> = (0..CLIENTS)
            .map(|id| {
                let mut client = Client {
                    id,
                    cache: Arc::clone(&cache),
                    random: Rng::with_seed(seed ^ (id + 1) << 32),
                    known: Rc::clone(&known),
                    supply: Rc::clone(&supply),
                    next: 0,
                };
                tokio::task::spawn_local(async move {
                    for _ in 0..steps {
                        client.step().await;
                    }
                })
            })
            .collect();
        // The power goes at some time, perhaps in the middle of everything.
        let end = Duration::from_millis(random.u64(..3000));
        let all = futures_util::future::join_all(clients);
        if let Ok(done) = tokio::time::timeout(end, all).await {
            done.into_iter().for_each(|client| client.unwrap());
        }
        let known: Rc<std::cell::RefCell<HashMap<u64, Known>>> = known;
        let left = disk.crash();
        for (sector, known) in &*known.borrow() {
            let at = *sector as usize * SECTOR;
            let found = version(&left[at..at + SECTOR], *sector);
            assert!(found >= known.safe, "sector {sector} lost: {found}, {known:?}, seed {seed}");
            assert!(found <= known.tried, "sector {sector} is from the future");
        }
    });
}

#[test]
fn nothing_is_lost_or_stale_in_a_write_back_cache() {
    (1..200).for_each(|seed| simulate(seed, true, 0));
    assert!(LENT.get() > 100, "{} reads were lent", LENT.get());
}

#[test]
fn nothing_is_lost_or_stale_in_a_write_through_cache() {
    (1..200).for_each(|seed| simulate(seed, false, 0));
    assert!(LENT.get() > 100, "{} reads were lent", LENT.get());
}

#[test]
fn failures_of_the_disk_are_told_and_lose_nothing_else() {
    (1..150).for_each(|seed| simulate(seed, seed % 2 == 0, 12));
}

#[test]
fn a_disk_that_takes_nothing_any_more_fails_writes_and_holds_nobody() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        // Every operation fails.
        let disk = Arc::new(Disk::new(1, 1));
        let config = Config { block: 4096, partitions: 1, write_back: true, ..Config::new(128 << 10) };
        let cache = Arc::new(Cache::new(Arc::clone(&disk) as _, config, &[0], None).unwrap());
        let supply = Segments::new(1, 4096).unwrap();
        let mut failed = 0;
        for block in 0..64 {
            let segment = supply.reserve(1).await.segment(4096);
            let written =
                tokio::time::timeout(Duration::from_secs(10), cache.write(block * 4096, segment, false)).await;
            failed += u64::from(written.expect("a write ends").is_err());
        }
        // What went in is what the cache may hold dirty; nothing of it is given up.
        assert!((48..=56).contains(&failed), "{failed} of 64 failed");
        assert!(cache.flush().await.is_err());
        // Well again, it takes everything.
        disk.fail_never();
        cache.flush().await.unwrap();
        let segment = supply.reserve(1).await.segment(4096);
        cache.write(63 * 4096, segment, true).await.unwrap();
    });
}

/// One who trims slowly holds up nobody who uses another part of the disk, cached or not.
#[test]
fn zeroing_holds_up_only_who_uses_what_is_zeroed() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        for write_back in [false, true] {
            let disk = Arc::new(Disk::new(1, 0));
            let config = Config { block: 4096, partitions: 2, write_back, ..Config::new(128 << 10) };
            let cache = Arc::new(Cache::new(Arc::clone(&disk) as _, config, &[0], None).unwrap());
            let supply = Segments::new(4, 4096).unwrap();
            let block = async || supply.reserve(1).await.segment(4096);
            cache.read(0, block().await).await.unwrap();
            let zeroes = disk.hold_zeroes();
            let zeroing = tokio::task::spawn_local({
                let cache = Arc::clone(&cache);
                async move { cache.zero(8 * 4096, 16 * 4096, Zero::empty()).await }
            });
            tokio::task::yield_now().await;
            cache.read(0, block().await).await.unwrap();
            cache.read(7 * 4096, block().await).await.unwrap();
            cache.write(24 * 4096, block().await, true).await.unwrap();
            cache.flush().await.unwrap();
            let within = cache.read(23 * 4096, block().await);
            let within = tokio::time::timeout(Duration::from_secs(60), within).await;
            assert!(within.is_err(), "what is being zeroed was shown");
            drop(zeroes);
            zeroing.await.unwrap().unwrap();
            cache.read(23 * 4096, block().await).await.unwrap();
        }
    });
}

/// A disk that ends within a block and grows: what it has behind its old end is shown, whether what the cache has of the block
/// is clean or dirty.
#[test]
fn what_a_disk_has_grown_by_is_shown() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        for (write_back, dirty) in [(false, false), (true, false), (true, true)] {
            let disk = Arc::new(Disk::new(1, 0));
            let supply = Segments::new(4, 4096).unwrap();
            let mut new = supply.reserve(1).await.segment(2048);
            new.as_mut_slice().fill(7);
            disk.write(6144, new, true).await.unwrap();
            disk.resize(6144);
            let config = Config { block: 4096, partitions: 1, write_back, ..Config::new(128 << 10) };
            let cache = Cache::new(Arc::clone(&disk) as _, config, &[0], None).unwrap();
            cache.read(4096, supply.reserve(1).await.segment(2048)).await.unwrap();
            if dirty {
                let mut changed = supply.reserve(1).await.segment(512);
                changed.as_mut_slice().fill(5);
                cache.write(4096, changed, false).await.unwrap();
            }
            disk.resize(16384);
            let read = cache.read(6144, supply.reserve(1).await.segment(2048)).await.unwrap();
            assert!(read.as_slice().iter().all(|byte| *byte == 7), "{write_back} {dirty}");
            let read = cache.read(4096, supply.reserve(1).await.segment(512)).await.unwrap();
            assert_eq!(read.as_slice()[0], if dirty { 5 } else { 0 });
        }
    });
}

/// What can be read and written of a disk with a bad sector, or of one that takes nothing any more, can be through a cache too.
#[test]
fn what_cannot_be_cached_is_read_and_written_past_the_cache() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let supply = Segments::new(4, 4096).unwrap();
        let sectors = async |count: usize, with: u8| {
            let mut segment = supply.reserve(1).await.segment(count * SECTOR);
            segment.as_mut_slice().fill(with);
            segment
        };
        for write_back in [false, true] {
            let disk = Arc::new(Disk::new(1, 0));
            disk.write(0, sectors(8, 7).await, true).await.unwrap();
            disk.spoil(3);
            let config = Config { block: 4096, partitions: 1, write_back, ..Config::new(128 << 10) };
            let cache = Cache::new(Arc::clone(&disk) as _, config, &[0], None).unwrap();
            let at = |sector: u64| sector * SECTOR as u64;
            let read = cache.read(at(4), sectors(2, 0).await).await.unwrap();
            assert!(read.as_slice().iter().all(|byte| *byte == 7));
            assert!(cache.read(at(2), sectors(3, 0).await).await.is_err(), "sector 3 is bad");
            cache.write(at(4), sectors(1, 8).await, false).await.unwrap();
            cache.write(at(3), sectors(1, 9).await, false).await.unwrap();
            let read = cache.read(at(2), sectors(3, 0).await).await.unwrap();
            let firsts: Vec<u8> = read.as_slice().chunks(SECTOR).map(|sector| sector[0]).collect();
            assert_eq!(firsts, [7, 9, 8]);
            cache.flush().await.unwrap();
            assert_eq!(disk.crash()[3 * SECTOR..][..2], [9, 9]);
        }
        // One partition of two is full of what cannot be written out.
        let disk = Arc::new(Disk::new(1, 0));
        disk.write(100 * 4096, sectors(8, 7).await, true).await.unwrap();
        let config = Config { block: 4096, partitions: 8, neighbours: 4, write_back: true, ..Config::new(128 << 10) };
        let cache = Cache::new(Arc::clone(&disk) as _, config, &[0], None).unwrap();
        disk.fail_writes(true);
        for block in 0..64 {
            let _ = cache.write(block * 4096, sectors(8, 1).await, false).await;
        }
        for block in 64..SECTORS / 8 {
            let read = cache.read(block * 4096, sectors(8, 0).await).await.unwrap();
            assert_eq!(read.as_slice()[0], if block == 100 { 7 } else { 0 });
        }
        assert!(cache.flush().await.is_err());
        disk.fail_writes(false);
        cache.flush().await.unwrap();
    });
}

/// Zeroing that fails has zeroed some of the disk, or none. What is shown of it then, stays: of a block that is dirty in part as
/// well, when it has been written out and loaded again.
#[test]
fn what_zeroing_that_failed_has_left_does_not_change_by_itself() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let disk = Arc::new(Disk::new(1, 0));
        let supply = Segments::new(4, 16384).unwrap();
        let bytes = async |len: usize, with: u8| {
            let mut segment = supply.reserve(1).await.segment(len);
            segment.as_mut_slice().fill(with);
            segment
        };
        disk.write(0, bytes(16384, 7).await, true).await.unwrap();
        let config = Config { block: 8192, partitions: 1, write_back: true, ..Config::new(128 << 10) };
        let cache = Cache::new(Arc::clone(&disk) as _, config, &[0], None).unwrap();
        // The first half of the first block is dirty, and the second is zeroed, as is the second block.
        cache.write(0, bytes(512, 9).await, false).await.unwrap();
        disk.fail_zeroes(true);
        assert!(cache.zero(4096, 12288, Zero::empty()).await.is_err());
        disk.fail_zeroes(false);
        let shown = cache.read(0, bytes(16384, 0).await).await.unwrap();
        assert_eq!((shown.as_slice()[0], shown.as_slice()[600]), (9, 7));
        cache.flush().await.unwrap();
        for block in 2..40 {
            cache.read(block * 8192, bytes(8192, 0).await).await.unwrap();
        }
        let again = cache.read(0, bytes(16384, 0).await).await.unwrap();
        assert!(shown.as_slice() == again.as_slice());
        assert!(disk.crash()[..16384] == *shown.as_slice());
    });
}
