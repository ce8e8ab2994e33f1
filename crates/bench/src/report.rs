//! Rows of results, for people and for programs.

use super::{OnOff, Test, TestArgs};
use serde::Serialize;
use thruway_cli::Common;
use thruway_cli::units;

/// Latencies in microseconds. Field names are an interface.
#[derive(Serialize)]
pub(super) struct Latency {
    pub lat_us_p50: f64,
    pub lat_us_p99: f64,
    pub lat_us_p999: f64,
    pub lat_us_mean: f64,
}

impl Latency {
    /// Of samples in nanoseconds, so many of which are a microsecond.
    pub(super) fn of(samples: &mut [u64], scale: f64) -> Latency {
        samples.sort_unstable();
        let at = |share: f64| match samples.len() {
            0 => 0.0,
            n => samples[((n as f64 * share) as usize).min(n - 1)] as f64 / scale,
        };
        let mean = samples.iter().sum::<u64>() as f64 / samples.len().max(1) as f64 / scale;
        Latency { lat_us_p50: at(0.5), lat_us_p99: at(0.99), lat_us_p999: at(0.999), lat_us_mean: mean }
    }
}

/// One result. Field names are an interface; units are in them or base units.
#[derive(Serialize)]
pub(super) struct Row {
    op: &'static str,
    provider: &'static str,
    size: u32,
    depth: u32,
    qps: u32,
    bytes_per_second: f64,
    ops_per_second: f64,
    #[serde(flatten)]
    latency: Latency,
    cpu_seconds: f64,
    cpu_ns_per_byte: f64,
    seconds: f64,
    operations: u64,
    bidirectional: bool,
    crc: bool,
    markers: bool,
    wait: &'static str,
}

impl Row {
    pub(super) fn bytes_per_second(&self) -> f64 {
        self.bytes_per_second
    }

    pub(super) fn p50_us(&self) -> f64 {
        self.latency.lat_us_p50
    }

    pub(super) fn cpu_seconds(&self) -> f64 {
        self.cpu_seconds
    }

    pub(super) fn seconds(&self) -> f64 {
        self.seconds
    }

    /// `samples` are nanoseconds from posting to completion, or a whole round trip if
    /// `ping_pong`, in which case half of it is the latency.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        test: &Test,
        qps: u32,
        args: &TestArgs,
        samples: &mut [u64],
        operations: u64,
        seconds: f64,
        cpu_seconds: f64,
        ping_pong: bool,
    ) -> Row {
        let latency = Latency::of(samples, if ping_pong { 2000.0 } else { 1000.0 });
        let bytes = operations as f64 * f64::from(test.size);
        Row {
            op: test.op.name(),
            provider: args.provider.name(),
            size: test.size,
            depth: test.depth,
            qps,
            bytes_per_second: bytes / seconds,
            ops_per_second: operations as f64 / seconds,
            latency,
            cpu_seconds,
            cpu_ns_per_byte: cpu_seconds * 1e9 / bytes.max(1.0),
            seconds,
            operations,
            bidirectional: test.bidi,
            crc: args.crc == OnOff::On,
            markers: args.markers == OnOff::On,
            wait: test.wait.name(),
        }
    }
}

pub(super) struct Report {
    rows: Vec<Row>,
    lat: bool,
    json: bool,
}

impl Report {
    pub(super) fn new(lat: bool, common: &Common) -> Report {
        if !common.json {
            thruway_cli::say!("{}", Report::header(lat));
        }
        Report { rows: Vec::new(), lat, json: common.json }
    }

    fn header(lat: bool) -> String {
        let what =
            if lat { "half round trip (send, write) or completion (read, atomic)" } else { "posting to completion" };
        format!(
            "latency: {what}\n{:<7} {:>9} {:>6} {:>4} {:>12} {:>9} {:>9} {:>9} {:>9} {:>10}",
            "op", "size", "depth", "qps", "rate", "Gbit/s", "p50 us", "p99 us", "p99.9 us", "CPU ns/B"
        )
    }

    pub(super) fn add(&mut self, row: Row) {
        if !self.json {
            let rate =
                if self.lat { format!("{:.0}/s", row.ops_per_second) } else { units::rate(row.bytes_per_second) };
            thruway_cli::say!(
                "{:<7} {:>9} {:>6} {:>4} {:>12} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>10.3}",
                row.op,
                units::size(row.size.into()),
                row.depth,
                row.qps,
                rate,
                row.bytes_per_second * 8e-9,
                row.latency.lat_us_p50,
                row.latency.lat_us_p99,
                row.latency.lat_us_p999,
                row.cpu_ns_per_byte,
            );
        }
        self.rows.push(row);
    }

    pub(super) fn finish(self) {
        if self.json {
            thruway_cli::say!("{}", serde_json::to_string_pretty(&self.rows).expect("plain structures"));
        }
    }
}
