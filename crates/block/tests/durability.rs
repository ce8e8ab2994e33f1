//! What NBD promises to be durable, against a disk that forgets everything it was not told to keep.

use crate::client;
use crate::nbd_server;
use crate::support;
use client::{FLUSH, FUA, Nbd, READ, WRITE};
use std::sync::Arc;
use support::{Disk, SECTOR, SECTORS};
use thruway_block::Export;
use thruway_engine::Reactors;

/// Sectors of the longest write: several pieces of the export's.
const LONGEST: u64 = 160;
const CLIENTS: u64 = 2;

/// What a client knows of a sector: the last version it wrote, and the last that must survive.
#[derive(Clone, Copy, Default)]
struct Known {
    last: u64,
    safe: u64,
}

fn content(number: u64, version: u64) -> Vec<u8> {
    (version << 16 | number).to_le_bytes().repeat(SECTOR / 8)
}

/// Writes for a while, in half of the disk that is its own; what it knows at the end.
fn use_it(address: &str, id: u64, seed: u64) -> Vec<Known> {
    let half = SECTORS / CLIENTS;
    let mut nbd = Nbd::connect(address, "d").unwrap();
    let mut known = vec![Known::default(); half as usize];
    let mut rng = fastrand::Rng::with_seed(seed * 2 + id * 77 + 1);
    let mut draw = |n: u64| rng.u64(..n);
    for version in 1..60 {
        let first = draw(half);
        let count = 1 + draw((half - first).min(LONGEST));
        let at = (id * half + first) * SECTOR as u64;
        match draw(8) {
            0 => {
                nbd.ask((0, FLUSH), 0, 0, &[]).unwrap().unwrap();
                known.iter_mut().for_each(|known| known.safe = known.last);
            }
            1 => {
                let found = nbd.ask((0, READ), at, count as u32 * SECTOR as u32, &[]).unwrap().unwrap();
                for (i, sector) in found.chunks(SECTOR).enumerate() {
                    let last = known[first as usize + i].last;
                    let number = id * half + first + i as u64;
                    let wanted = if last == 0 { vec![0; SECTOR] } else { content(number, last) };
                    assert!(sector == wanted, "sector {number} is not as it was written");
                }
            }
            what => {
                let durable = if what < 4 { FUA } else { 0 };
                let data: Vec<u8> = (0..count).flat_map(|i| content(id * half + first + i, version)).collect();
                nbd.ask((durable, WRITE), at, data.len() as u32, &data).unwrap().unwrap();
                for known in &mut known[first as usize..(first + count) as usize] {
                    known.last = version;
                    if durable != 0 {
                        known.safe = version;
                    }
                }
            }
        }
    }
    known
}

#[test]
fn what_was_flushed_or_forced_survives_the_loss_of_the_disks_own_cache() {
    for seed in 1..25 {
        let disk = Arc::new(Disk::new(seed, 0));
        let export = Export {
            kind: "a test",
            name: "d".into(),
            description: "a forgetful disk".into(),
            identity: [1; 16],
            is_lasting: false,
            allow: Vec::new(),
            fence: thruway_block::fence::Fence::default(),
            backend: Arc::new(thruway_block::Served::new(Arc::clone(&disk) as _)),
            read_only: false,
            // Long writes are in pieces.
            chunk: 16 << 10,
            target: None,
            sector: 512,
        };
        let reactors = Reactors::start(Some(2)).unwrap();
        let (_server, address) = nbd_server::serve(Arc::new(export), &reactors);
        let clients: Vec<_> = (0..CLIENTS)
            .map(|id| {
                let address = address.clone();
                std::thread::spawn(move || use_it(&address, id, seed))
            })
            .collect();
        let known: Vec<Known> = clients.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        let left = disk.crash();
        for (number, (known, sector)) in known.iter().zip(left.chunks(SECTOR)).enumerate() {
            let mark = u64::from_le_bytes(sector[..8].try_into().unwrap());
            let version = mark >> 16;
            assert!(version >= known.safe, "seed {seed}: sector {number} lost: {version}, not {}", known.safe);
            assert!(version <= known.last, "seed {seed}: sector {number} is from the future");
        }
    }
}
