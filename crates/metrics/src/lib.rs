//! Counters, gauges and histograms, and a registry that reads them.
//!
//! A service updates its metrics without a lock, with relaxed atomic operations. It registers each metric with its name and labels. A reader, such
//! as the control socket of a daemon, asks the [`Registry`] for the values of all.
//!
//! Names and units follow OpenMetrics: letters, digits and `_`, with the base unit at the end (`_seconds`, `_bytes`). Counters have no suffix
//! `_total` here; an exposition adds it.

#![forbid(unsafe_code)]

mod histogram;
mod registry;

pub use histogram::{BUCKETS, Buckets, Histogram};
pub use registry::{Description, Labels, RegisterError, Registered, Registry, Sample, Value};

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// A number that only grows. On a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds a number. Wraps around at the end of the range.
    pub fn add(&self, number: u64) {
        self.0.fetch_add(number, Ordering::Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that grows and shrinks. On a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Gauge(AtomicI64);

impl Gauge {
    /// Adds a number, which may be negative.
    pub fn add(&self, number: i64) {
        self.0.fetch_add(number, Ordering::Relaxed);
    }

    /// Sets the value.
    pub fn set(&self, value: i64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value.
    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
