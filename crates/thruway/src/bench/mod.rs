//! `thruway bench`: what the fabric can do, between two processes or inside one.
//!
//! The two ends speak through connection private data only: the connecting end sends the test as
//! JSON with its buffer's address and key, the accepting end answers with its own. So a listening
//! bench serves any number of tests without options.

mod client;
mod devices;
mod link;
mod report;
mod rping;
mod server;

use crate::{Common, Failed};
use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;
use thruway_fabric::iwarp;

/// Arguments of `thruway bench`.
#[derive(Args)]
#[command(after_help = "Examples:
  thruway bench lat --loopback
  thruway bench bw --loopback --op write --size 64K,1M --crc off
  thruway bench bw --listen 0.0.0.0:7118          on one host, then on the other:
  thruway bench bw --connect host:7118 --op read --qps 4
  thruway bench devices
  thruway bench rping --listen 0.0.0.0:7174       and, with RDMA: rping -c -a HOST -C 10")]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Half round trip of one operation at a time
    Lat(TestArgs),
    /// Rate with many operations under way
    Bw(TestArgs),
    /// The ping of rdmacm-utils' rping, in either role
    Rping(rping::RpingArgs),
    /// Every provider, device and port, what it can do, and why something is unavailable
    Devices,
}

/// Where the other end is.
#[derive(Args, Clone)]
#[group(required = true, multiple = false)]
struct Where {
    /// Serve tests at this address until interrupted (port 0: any; the address is printed)
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// Test against a listening bench
    #[arg(long, value_name = "HOST:PORT")]
    connect: Option<String>,
    /// Both ends in this process
    #[arg(long)]
    loopback: bool,
}

/// Operation under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Op {
    Send,
    Write,
    Read,
    Atomic,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Op::Send => "send",
            Op::Write => "write",
            Op::Read => "read",
            Op::Atomic => "atomic",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnOff {
    On,
    Off,
}

/// How to wait for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Wait {
    /// Ask without pause
    Poll,
    /// Sleep until told
    Event,
}

/// Arguments of one measurement.
#[derive(Args, Clone)]
struct TestArgs {
    #[command(flatten)]
    place: Where,
    /// Operations to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Op::Send, Op::Write, Op::Read])]
    op: Vec<Op>,
    /// Message sizes, or `sweep` for powers of two from 2 B to 8 MiB [default: 64 for lat, 1M for bw]
    #[arg(long, value_name = "SIZES")]
    size: Option<String>,
    /// Operations under way at once on each queue pair (bw)
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Queue pairs (bw)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    qps: u32,
    /// Seconds for each row
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// CRC32C on every FPDU
    #[arg(long, value_enum, default_value_t = OnOff::On)]
    crc: OnOff,
    /// MPA markers in both directions
    #[arg(long, value_enum, default_value_t = OnOff::Off)]
    markers: OnOff,
    /// How this end (and the other, if it is a bench) waits
    #[arg(long, value_enum, default_value_t = Wait::Poll)]
    wait: Wait,
    /// Both ends send (bw)
    #[arg(long)]
    bidirectional: bool,
    /// TCP congestion control [default: cubic on loopback, else the system's]
    #[arg(long)]
    congestion: Option<String>,
}

impl TestArgs {
    fn config(&self) -> iwarp::Config {
        iwarp::Config {
            crc: self.crc == OnOff::On,
            markers: self.markers == OnOff::On,
            congestion: self.congestion.clone(),
            ..iwarp::Config::default()
        }
    }

    fn sizes(&self, default: u32) -> Result<Vec<u32>, String> {
        match self.size.as_deref() {
            None => Ok(vec![default]),
            Some("sweep") => Ok((1..=23).map(|shift| 1 << shift).collect()),
            Some(list) => list
                .split(',')
                .map(|text| match crate::units::parse_size(text)? {
                    n @ 1..=0x4000_0000 => Ok(n as u32),
                    n => Err(format!("a message of {n} octets; 1 to 1G are possible")),
                })
                .collect(),
        }
    }

    fn duration(&self) -> Result<Duration, String> {
        Duration::try_from_secs_f64(self.seconds).map_err(|e| format!("--seconds {}: {e}", self.seconds))
    }
}

/// A test, as the connecting end tells it to the accepting one.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Test {
    /// Version of this structure.
    v: u32,
    /// One at a time rather than many.
    lat: bool,
    op: Op,
    size: u32,
    depth: u32,
    wait: Wait,
    bidi: bool,
    /// The sender's buffer.
    addr: u64,
    rkey: u32,
}

const TEST_VERSION: u32 = 1;

/// Runs the command.
pub fn run(args: &BenchArgs, common: &Common) -> Result<(), Failed> {
    let result = match &args.what {
        What::Lat(test) => measure(test, true, common),
        What::Bw(test) => measure(test, false, common),
        What::Rping(args) => rping::run(args, common),
        What::Devices => {
            devices::run(common);
            Ok(())
        }
    };
    result.map_err(|message| {
        eprintln!("thruway bench: {message}");
        Failed
    })
}

fn measure(args: &TestArgs, lat: bool, common: &Common) -> Result<(), String> {
    if let Some(addr) = args.place.listen {
        return server::Server::start(addr, args.config())?.announce(common).serve(|| false);
    }
    let sizes = args.sizes(if lat { 64 } else { 1 << 20 })?;
    let mut rows = report::Report::new(lat, common);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let addr = match &args.place.connect {
            Some(host) => resolve(host)?,
            None => {
                let server = server::Server::start(SocketAddr::from(([127, 0, 0, 1], 0)), args.config())?;
                let addr = server.addr();
                let stop = &stop;
                scope.spawn(move || {
                    if let Err(message) = server.serve(|| stop.load(std::sync::atomic::Ordering::Relaxed)) {
                        eprintln!("thruway bench: accepting end: {message}");
                    }
                });
                addr
            }
        };
        let mut run = || {
            for &op in &args.op {
                for &size in &sizes {
                    // An atomic has one size, so one row.
                    if op == Op::Atomic && size != sizes[0] {
                        continue;
                    }
                    rows.add(client::measure(args, addr, lat, op, size)?);
                }
            }
            Ok(())
        };
        let result: Result<(), String> = run();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        result
    })?;
    rows.finish();
    Ok(())
}

/// The address of `host:port`.
fn resolve(host: &str) -> Result<SocketAddr, String> {
    let mut found = host.to_socket_addrs().map_err(|e| format!("{host}: {e}"))?;
    found.next().ok_or_else(|| format!("{host}: no address"))
}
