//! The families of NFS over RDMA.

use super::charts::{KIB, MIB, SIZE, chart, steps};
use super::delay::relay;
use super::lab::{Lab, Peer};
use super::{Axis, Findings, Series};
use crate::nfs_server::SHARE;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

/// What a client is to do.
struct Asked<'a> {
    version: &'a str,
    op: &'a str,
    size: u32,
    depth: u32,
    /// Of registration; none over TCP.
    registration: Option<&'a str>,
}

impl Default for Asked<'_> {
    fn default() -> Self {
        Asked { version: "3", op: "read", size: 128 * KIB, depth: 1, registration: Some("windows") }
    }
}

/// What it has found.
struct Found {
    /// 10^6 bytes a second.
    rate: f64,
    /// Nanoseconds of the client's processor time for each byte.
    cost: f64,
}

/// Runs a client of NFS in a process of its own.
fn drive(lab: &Lab, server: SocketAddr, asked: &Asked<'_>) -> Result<Found, String> {
    let program = std::env::current_exe().map_err(|e| format!("this program's own path: {e}"))?;
    let mut command = Command::new(program);
    command.args(["bench", "nfs", "--json", "--share", SHARE, "--file-size", "16M", "--vers", asked.version]);
    command.args(["--connect", &server.to_string(), "--op", asked.op, "--seconds", &lab.seconds.to_string()]);
    command.args(["--size", &asked.size.to_string(), "--depth", &asked.depth.to_string()]);
    if let Some(registration) = asked.registration {
        command.args(["--rdma", "--registration", registration]);
    }
    let done = command.output().map_err(|e| e.to_string())?;
    if !done.status.success() {
        return Err(String::from_utf8_lossy(&done.stderr).trim().to_owned());
    }
    let rows: serde_json::Value =
        serde_json::from_slice(&done.stdout).map_err(|e| format!("the report of bench nfs: {e}"))?;
    let get = |key: &str| rows[0][key].as_f64().unwrap_or(f64::NAN);
    let bytes = get("bytes_per_second") * get("seconds");
    Ok(Found { rate: get("bytes_per_second") / 1e6, cost: get("cpu_seconds") * 1e9 / bytes })
}

const READS: Axis = Axis { label: "reads in flight", sizes: false };

pub(super) fn designs(lab: &Lab) -> Result<Findings, String> {
    let (mut rate, mut cost, mut small) = (Vec::new(), Vec::new(), Vec::new());
    for (design, name) in [("read-write", "Read-Write"), ("read-read", "Read-Read")] {
        let server = Peer::nfs(&["--rdma", "--design", design])?;
        let lines = [&mut rate, &mut cost, &mut small];
        lines.into_iter().for_each(|lines| lines.push(Series::new(name)));
        for depth in steps(1, 8, 2) {
            let found = drive(lab, server.addr, &Asked { depth, ..Asked::default() })?;
            for (lines, value) in [(&mut rate, found.rate), (&mut cost, found.cost)] {
                lines.last_mut().expect("pushed above").points.push((depth.into(), value));
            }
            let found = drive(lab, server.addr, &Asked { depth, size: 8 * KIB, ..Asked::default() })?;
            small.last_mut().expect("pushed above").points.push((depth.into(), found.cost));
        }
    }
    let gain = |depth: f64| rate[0].at(depth) / rate[1].at(depth);
    let because = format!(
        "128 KiB: {:.2} x at one read at a time, {:.2} x at eight; 8 KiB, one at a time: {:.2} and {:.2} ns of the client's processor for each byte",
        gain(1.0),
        gain(8.0),
        small[0].at(1.0),
        small[1].at(1.0)
    );
    let agrees = Some(gain(1.0) > 1.0 && small[0].at(1.0) < small[1].at(1.0));
    let charts = vec![
        chart("Reads of 128 KiB", READS, "MB/s", rate),
        chart("The client's processor time, 128 KiB", READS, "ns per byte", cost),
        chart("The client's processor time, 8 KiB", READS, "ns per byte", small),
    ];
    Ok(Findings { charts, agrees, because })
}

pub(super) fn registration(lab: &Lab) -> Result<Findings, String> {
    let server = Peer::nfs(&["--rdma"])?;
    let (mut read, mut write) = (Vec::new(), Vec::new());
    for (registration, name) in [
        ("dynamic", "registered for each request"),
        ("windows", "a window for each request"),
        ("cached", "each block registered once, and copied"),
        ("all", "one key for all, and copied"),
    ] {
        for (op, lines) in [("read", &mut read), ("write", &mut write)] {
            let mut line = Series::new(name);
            for size in steps(2 * KIB, MIB, 8).chain([MIB]) {
                let asked = Asked { op, size, depth: 4, registration: Some(registration), ..Asked::default() };
                line.points.push((size.into(), drive(lab, server.addr, &asked)?.rate));
            }
            lines.push(line);
        }
    }
    let mib = f64::from(MIB);
    let rates: Vec<f64> = read.iter().map(|line| line.at(mib)).collect();
    let because = format!(
        "reads of 1 MiB: registered each time {:.0}, windows {:.0}, cached {:.0}, one key {:.0} MB/s",
        rates[0], rates[1], rates[2], rates[3]
    );
    let agrees = Some(rates[0].min(rates[1]) > 0.9 * rates[2].max(rates[3]));
    let charts =
        vec![chart("Reads, 4 in flight", SIZE, "MB/s", read), chart("Writes, 4 in flight", SIZE, "MB/s", write)];
    Ok(Findings { charts, agrees, because })
}

pub(super) fn versions(lab: &Lab) -> Result<Findings, String> {
    let (over_rdma, over_tcp) = (Peer::nfs(&["--rdma"])?, Peer::nfs(&[])?);
    let (mut read, mut write) = (Vec::new(), Vec::new());
    for (server, transport, registration) in [(&over_rdma, "RDMA", Some("windows")), (&over_tcp, "TCP", None)] {
        for version in ["3", "4.1"] {
            for (op, lines) in [("read", &mut read), ("write", &mut write)] {
                let mut line = Series::new(format!("version {version}, {transport}"));
                for depth in steps(1, 8, 2) {
                    let asked = Asked { version, op, depth, registration, ..Asked::default() };
                    line.points.push((depth.into(), drive(lab, server.addr, &asked)?.rate));
                }
                lines.push(line);
            }
        }
    }
    let parts = [read[1].most() / read[0].most(), read[3].most() / read[2].most()];
    let because = format!(
        "reads of 128 KiB, version 4.1 against 3: {:.2} over RDMA, {:.2} over TCP; RDMA against TCP: {:.2} by version 3",
        parts[0],
        parts[1],
        read[0].most() / read[2].most()
    );
    let agrees = Some(parts.iter().all(|part| *part > 0.8));
    let x = Axis { label: "requests in flight", sizes: false };
    let charts = vec![chart("Reads of 128 KiB", x, "MB/s", read), chart("Writes of 128 KiB", x, "MB/s", write)];
    Ok(Findings { charts, agrees, because })
}

pub(super) fn delay(lab: &Lab) -> Result<Findings, String> {
    const DEPTH: u32 = 16;
    let (over_rdma, over_tcp) = (Peer::nfs(&["--rdma"])?, Peer::nfs(&[])?);
    let mut series = Vec::new();
    for (server, name, registration) in [(&over_rdma, "RDMA", Some("windows")), (&over_tcp, "TCP", None)] {
        let mut line = Series::new(name);
        for micros in [0_u32, 10, 100, 1000] {
            let server = relay(server.addr, Duration::from_micros(micros.into()))?;
            let asked = Asked { depth: DEPTH, registration, ..Asked::default() };
            line.points.push((micros.into(), drive(lab, server, &asked)?.rate));
        }
        series.push(line);
    }
    // So many bytes for each round trip, in 10^6 bytes a second.
    let bound = f64::from(DEPTH * 128 * KIB) / 2000.0;
    let far: Vec<f64> = series.iter().map(|line| line.at(1000.0)).collect();
    let because = format!(
        "RDMA {:.0}, {:.0}, {:.0} and {:.0} MB/s at 0, 10, 100 and 1,000 µs each way; TCP {:.0} and {:.0} at 0 and 1,000; sixteen reads for each round trip of 2,000 µs are {bound:.0}",
        series[0].at(0.0),
        series[0].at(10.0),
        series[0].at(100.0),
        far[0],
        series[1].at(0.0),
        far[1]
    );
    let agrees = Some(
        series.iter().zip(&far).all(|(line, far)| *far < line.at(0.0) && *far > bound / 3.0 && *far < bound * 1.2),
    );
    let x = Axis { label: "delay each way, µs", sizes: false };
    Ok(Findings {
        charts: vec![chart("Reads of 128 KiB, 16 in flight, by a relay", x, "MB/s", series)],
        agrees,
        because,
    })
}
