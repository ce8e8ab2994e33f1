//! The other ends of measurements: processes of their own, so that each end's processor time is
//! known apart.

use super::super::{BenchProvider, OnOff, Op, TestArgs, Wait, Where, client};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::ops::Range;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use thruway_fabric::Buffer;

/// What all measurements share.
pub(super) struct Lab {
    pub(super) seconds: f64,
    pub(super) dir: tempfile::TempDir,
}

/// What one point of a bandwidth or latency test found.
pub(super) struct Point {
    pub(super) gbit: f64,
    pub(super) p50_us: f64,
    /// Share of one processor that the measuring end used, in percent.
    near_cpu: f64,
    /// The same of the other end.
    far_cpu: f64,
}

impl Point {
    /// Processor time of the measuring end, in nanoseconds per byte.
    pub(super) fn near_cost(&self) -> f64 {
        self.near_cpu / 100.0 / (self.gbit / 8.0)
    }

    /// The same of the other end.
    pub(super) fn far_cost(&self) -> f64 {
        self.far_cpu / 100.0 / (self.gbit / 8.0)
    }
}

/// A test; the rest is as `bench bw` has it.
#[derive(Clone)]
pub(super) struct Shape {
    pub(super) lat: bool,
    pub(super) op: Op,
    pub(super) size: u32,
    pub(super) depth: u32,
    pub(super) qps: u32,
    pub(super) wait: Wait,
    pub(super) bidirectional: bool,
    pub(super) crc: bool,
    pub(super) markers: bool,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            lat: false,
            op: Op::Write,
            size: 64 << 10,
            depth: 16,
            qps: 1,
            wait: Wait::Event,
            bidirectional: false,
            crc: false,
            markers: false,
        }
    }
}

impl Lab {
    pub(super) fn new(seconds: f64) -> Result<Lab, String> {
        let dir = tempfile::tempdir().map_err(|e| format!("a temporary directory: {e}"))?;
        Ok(Lab { seconds, dir })
    }

    fn args(&self, shape: &Shape) -> TestArgs {
        let on = |yes| if yes { OnOff::On } else { OnOff::Off };
        TestArgs {
            place: Where { listen: None, connect: None, loopback: true },
            op: vec![shape.op],
            size: None,
            memory: None,
            depth: shape.depth,
            qps: shape.qps,
            seconds: self.seconds,
            provider: BenchProvider::Iwarp,
            crc: on(shape.crc),
            markers: on(shape.markers),
            revision: 2,
            wait: shape.wait,
            bidirectional: shape.bidirectional,
            congestion: None,
        }
    }

    /// Measures one point against a peer.
    pub(super) fn point(&self, peer: &Peer, shape: &Shape) -> Result<Point, String> {
        let before = peer.cpu_seconds();
        let row = client::measure(&self.args(shape), peer.addr, shape.lat, shape.op, shape.size)?;
        let both = if shape.bidirectional { 2.0 } else { 1.0 };
        Ok(Point {
            gbit: row.bytes_per_second() * 8e-9 * both,
            p50_us: row.p50_us(),
            near_cpu: row.cpu_seconds() / row.seconds() * 100.0,
            far_cpu: (peer.cpu_seconds() - before) / row.seconds() * 100.0,
        })
    }

    /// Gbit/s of reads of `size` bytes with `compute` of computation between them.
    pub(super) fn computing(&self, peer: &Peer, size: u32, depth: u32, compute: Duration) -> Result<f64, String> {
        let args = self.args(&Shape { op: Op::Read, size, depth, ..Shape::default() });
        Ok(client::measure_computing(&args, peer.addr, size, compute)? * 8e-9)
    }

    /// Bytes for a buffer of a registration test.
    pub(super) fn buffer(len: usize) -> Result<std::sync::Arc<Buffer>, String> {
        Ok(std::sync::Arc::new(Buffer::new(len).map_err(|e| e.to_string())?))
    }
}

/// A process at the other end.
pub(super) struct Peer {
    child: Child,
    pub(super) addr: SocketAddr,
}

impl Peer {
    /// A bench that listens, with the CRC and markers of `shape`.
    pub(super) fn bench(shape: &Shape) -> Result<Peer, String> {
        let on = |yes: bool| if yes { "on" } else { "off" };
        let (crc, markers) = (on(shape.crc), on(shape.markers));
        Peer::start(&["bench", "bw", "--listen", "127.0.0.1:0", "--crc", crc, "--markers", markers])
    }

    /// A listening bench for streams, over iWARP.
    pub(super) fn streams() -> Result<Peer, String> {
        Peer::start(&["bench", "stream", "--listen", "127.0.0.1:0", "--provider", "iwarp"])
    }

    /// A listening bench with ordinary sockets; `before` comes before it on the command line, and before the program's name.
    pub(super) fn sockets(before: &[&str]) -> Result<Peer, String> {
        let program = std::env::current_exe().map_err(|e| format!("this program's own path: {e}"))?;
        let program = program.to_str().ok_or("this program's own path is not UTF-8")?;
        let bench = ["bench", "sockets", "--listen", "127.0.0.1:0"];
        let itself: &[&str] = if before.is_empty() { &[] } else { &[program] };
        Peer::start(&[before, itself, &bench].concat())
    }

    /// A server of memory by NFS.
    pub(super) fn nfs(options: &[&str]) -> Result<Peer, String> {
        Peer::start(&[&["bench", "nfs-server", "--listen", "127.0.0.1:0", "--size", "256M"], options].concat())
    }

    /// A daemon with no exports but `dev` and, if there is one, `e`.
    pub(super) fn daemon(export: Option<&std::path::Path>) -> Result<Peer, String> {
        let export = export.map(|dir| format!("e={}", dir.display()));
        let mut args = vec!["serve", "--listen", "127.0.0.1:0"];
        if let Some(export) = &export {
            args.extend(["--export", export]);
        }
        Peer::start(&args)
    }

    /// Starts this very program and waits until it says where it listens.
    fn start(args: &[&str]) -> Result<Peer, String> {
        let program = std::env::current_exe().map_err(|e| format!("this program's own path: {e}"))?;
        let mut command = Command::new(program);
        let command = command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("starting {}: {e}", args.join(" ")))?;
        let said = child.stderr.take().expect("asked for above");
        let mut lines = BufReader::new(said).lines();
        let mut addr = None;
        for line in lines.by_ref().map_while(Result::ok) {
            addr = line.strip_prefix("listening on ").and_then(|a| a.trim().parse().ok());
            if addr.is_some() {
                break;
            }
        }
        // Its later output is not read; it must not block on a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        let peer = Peer { child, addr: addr.unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0))) };
        if addr.is_none() { Err(format!("'thruway {}' did not come up", args.join(" "))) } else { Ok(peer) }
    }

    /// Processor time so far.
    pub(super) fn cpu_seconds(&self) -> f64 {
        processor_seconds(self.child.id(), OWN)
    }
}

/// A process's own processor time among the numbers of its stat file: user's and kernel's.
pub(super) const OWN: Range<usize> = 11..13;
/// That of the children it has waited for.
pub(super) const CHILDREN: Range<usize> = 13..15;

/// Processor time of a process, by number or `self`: the sum of these numbers behind the name in
/// its stat file (proc(5)), which are ticks of a hundredth of a second on every Linux.
pub(super) fn processor_seconds(process: impl std::fmt::Display, numbers: Range<usize>) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let behind = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = behind.split_whitespace().skip(numbers.start).take(numbers.len());
    ticks.filter_map(|t| t.parse::<f64>().ok()).sum::<f64>() / 100.0
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
