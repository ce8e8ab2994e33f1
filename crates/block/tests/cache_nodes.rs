//! The cache over two memory nodes, which need not be there: reactors that say they are on one or the other, clients
//! on both, requests handed from one to the other.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use thruway_block::backend::{Backend, MemoryBackend};
use thruway_block::cache::{Cache, Config};
use thruway_engine::topology::{Node, usable_nodes};
use thruway_engine::{Reactors, Segments};

const RANGE: usize = 192 << 10;
const ROUNDS: u64 = 40;
const CLIENTS: u64 = 4;

/// Every client has ranges of its own, which lie between the others'.
async fn client(cache: Arc<Cache>, number: u64) -> std::io::Result<()> {
    let supply = Segments::new(1, RANGE).map_err(std::io::Error::other)?;
    let mark = |round: u64, i: usize| (number.wrapping_mul(59) ^ round.wrapping_mul(31) ^ (i as u64 / 8)) as u8;
    for round in 0..ROUNDS {
        for slot in 0..4u64 {
            // Not at the borders of blocks.
            let at = (slot * CLIENTS + number) * RANGE as u64 + 1000;
            if round > 0 {
                let segment = supply.reserve(1).await.segment(RANGE);
                let segment = cache.read(at, segment).await?;
                let right = segment.as_slice().iter().enumerate().all(|(i, byte)| *byte == mark(round - 1, i));
                assert!(right, "client {number} finds another's bytes, or old ones, at {at} in round {round}");
            }
            let mut segment = supply.reserve(1).await.segment(RANGE);
            segment.as_mut_slice().iter_mut().enumerate().for_each(|(i, byte)| *byte = mark(round, i));
            cache.write(at, segment, false).await?;
        }
    }
    cache.flush().await
}

fn run(write_back: bool) {
    let cores: Vec<u32> = usable_nodes().into_iter().flat_map(|node| node.cpus).collect();
    let core = |i: usize| vec![cores[i % cores.len()]];
    let nodes = [Node { number: 0, cpus: core(0) }, Node { number: 1, cpus: core(1) }];
    let reactors = Reactors::over(&nodes, Some(4)).unwrap();
    assert_eq!(reactors.nodes(), [0, 1]);
    let disk = Arc::new(MemoryBackend::new(8 << 20).unwrap());
    // Half of what is used, in blocks that are shorter than a request.
    let config = Config { block: 16 << 10, neighbours: 8, partitions: 2, write_back, ..Config::new(1536 << 10) };
    let cache = Arc::new(Cache::new(disk, config, &reactors.nodes(), Some(reactors.load_balancer())).unwrap());
    let (tell, told) = mpsc::channel();
    for number in 0..CLIENTS {
        let (cache, tell) = (Arc::clone(&cache), tell.clone());
        reactors.handles()[number as usize]
            .spawn(move || async move { tell.send(client(cache, number).await).unwrap() });
    }
    drop(tell);
    let results: Vec<_> = told.iter().collect();
    assert_eq!(results.len(), CLIENTS as usize, "a client has panicked");
    results.into_iter().for_each(|result| result.unwrap());
    let counters = cache.counters();
    let of = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    assert!(of(&counters.forwarded) > 0 && of(&counters.evictions) > 0, "{counters}");
    assert!(of(&counters.local) > of(&counters.remote), "most is copied by a core of the node: {counters}");
}

#[test]
fn requests_go_to_the_node_that_holds_most_of_them_and_come_back_right() {
    run(false);
}

#[test]
fn with_write_back_as_well() {
    run(true);
}
