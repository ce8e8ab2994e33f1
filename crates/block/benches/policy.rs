//! Hit rates of eviction orders on one trace each: ours (S3-FIFO), LRU, and the crate quick_cache.

use quick_cache::unsync::Cache;
use std::collections::{BTreeMap, HashMap};
use thruway_block::cache::policy::Policy;

const KEYS: u64 = 100_000;
const SLOTS: usize = 10_000;
const LEN: usize = 2_000_000;

struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Keys whose popularity falls as their rank to the power of `skew`, with scans of `scan` keys in between.
fn trace(skew: f64, scan: usize) -> Vec<u64> {
    let weights: Vec<f64> = (1..=KEYS).map(|rank| (rank as f64).powf(-skew)).collect();
    let sum: f64 = weights.iter().sum();
    let mut below = 0.0;
    let cumulative: Vec<f64> = weights
        .iter()
        .map(|w| {
            below += w / sum;
            below
        })
        .collect();
    let mut random = Random(42);
    let (mut keys, mut next_scan) = (Vec::with_capacity(LEN), KEYS);
    while keys.len() < LEN {
        if scan > 0 && random.next() < 1.0 / (4.0 * scan as f64) {
            keys.extend(next_scan..next_scan + scan as u64);
            next_scan += scan as u64;
        }
        let drawn = random.next();
        keys.push(cumulative.partition_point(|c| *c < drawn) as u64);
    }
    keys
}

fn ours(trace: &[u64]) -> usize {
    let (mut policy, mut slots, mut keys) = (Policy::new(SLOTS), HashMap::new(), vec![0; SLOTS]);
    let mut hits = 0;
    for key in trace {
        if let Some(slot) = slots.get(key) {
            policy.touch(*slot);
            hits += 1;
            continue;
        }
        let slot = if slots.len() < SLOTS {
            slots.len() as u32
        } else {
            let slot = policy.evict(|_| false).expect("nothing is pinned");
            slots.remove(&keys[slot as usize]);
            slot
        };
        policy.insert(slot, *key);
        keys[slot as usize] = *key;
        slots.insert(*key, slot);
    }
    hits
}

fn lru(trace: &[u64]) -> usize {
    let (mut used, mut order, mut hits) = (HashMap::new(), BTreeMap::new(), 0);
    for (now, key) in trace.iter().enumerate() {
        if let Some(before) = used.insert(*key, now) {
            order.remove(&before);
            hits += 1;
        } else if used.len() > SLOTS {
            let (_, oldest) = order.pop_first().expect("it is full");
            used.remove(&oldest);
        }
        order.insert(now, *key);
    }
    hits
}

fn quick(trace: &[u64]) -> usize {
    let (mut cache, mut hits) = (Cache::new(SLOTS), 0);
    for key in trace {
        if cache.get(key).is_some() {
            hits += 1;
        } else {
            cache.insert(*key, ());
        }
    }
    hits
}

fn main() {
    println!("| trace | S3-FIFO | LRU | quick_cache |\n|---|---|---|---|");
    for (name, skew, scan) in [
        ("Zipf 0.8", 0.8, 0),
        ("Zipf 0.8, a fifth of it scans of 5,000", 0.8, 5000),
        ("Zipf 1.0", 1.0, 0),
        ("Zipf 1.0, a fifth of it scans of 5,000", 1.0, 5000),
    ] {
        let trace = trace(skew, scan);
        let share = |hits: usize| format!("{:.1} %", 100.0 * hits as f64 / trace.len() as f64);
        println!("| {name} | {} | {} | {} |", share(ours(&trace)), share(lru(&trace)), share(quick(&trace)));
    }
}
