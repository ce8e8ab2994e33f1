//! `thruway bench`: what the fabric can do, between two processes or inside one.
//!
//! The two ends speak through connection private data only: the connecting end sends the test
//! with its buffer's address and key, the accepting end answers with its own. So a listening
//! bench serves any number of tests without options.

mod client;
mod clock;
mod devices;
mod link;
mod nfs;
mod nfs_server;
mod region;
mod report;
mod rping;
mod server;
mod sockets;
mod stream;
mod suite;

use clap::{Args, Subcommand, ValueEnum};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;
use thruway_cli::{Common, Failed};
use thruway_fabric::{Provider, iwarp, shm, verbs};

/// Arguments of `thruway bench`.
#[derive(Args)]
#[command(after_help = "Examples:
  thruway bench lat --loopback
  thruway bench bw --loopback --op write --size 64K,1M --crc off
  thruway bench bw --listen 0.0.0.0:7118          on one host, then on the other:
  thruway bench bw --connect host:7118 --op read --qps 4
  thruway bench stream --loopback --scheme packetized,adaptive --size 64,1M
  thruway bench sockets --loopback --test lat,in,web
  thruway bench devices
  thruway bench nfs --connect host:2049 --share data --op read,getattr --depth 32
  thruway bench suite --output report
  thruway bench region --listen 127.0.0.1:7119 --size 1G
  thruway bench rping --listen 0.0.0.0:7174       and, with RDMA: rping -c -a HOST -C 10")]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Half round trip of one operation at a time
    Lat(TestArgs),
    /// Rate with many operations in flight
    Bw(TestArgs),
    /// Streams over the fabric, by each of their schemes
    Stream(stream::StreamArgs),
    /// A program with TCP sockets, to be run as it is and by `thruway run`
    Sockets(sockets::SocketsArgs),
    /// Lend memory to fio, which reads and writes it with the engine that `cargo xtask fio` builds
    Region(region::RegionArgs),
    /// The ping of rdmacm-utils' rping, in either role
    Rping(rping::RpingArgs),
    /// The figures of the published works, measured again: an HTML page with plots, and JSON
    Suite(suite::SuiteArgs),
    /// Drive an NFS server from user space: Thruway's or another
    Nfs(nfs::NfsArgs),
    /// Serve memory by NFS, to be measured
    NfsServer(nfs_server::NfsServerArgs),
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
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

/// What carries a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BenchProvider {
    /// Shared memory where both ends are of this host, else iWARP in user space
    Auto,
    /// iWARP in user space
    Iwarp,
    /// Shared memory, between processes of this host
    Shm,
    /// An RDMA device, by rdma-core
    Verbs,
}

impl BenchProvider {
    fn name(self) -> &'static str {
        match self {
            BenchProvider::Auto => "auto",
            BenchProvider::Iwarp => "iwarp",
            BenchProvider::Shm => "shm",
            BenchProvider::Verbs => "verbs",
        }
    }

    /// To call `peer` by, with defaults.
    fn towards(self, peer: SocketAddr) -> Result<Provider, String> {
        match self {
            BenchProvider::Auto => {
                Ok(iwarp::Config { shm: Some(shm::Config::default()), ..iwarp::Config::default() }.into())
            }
            BenchProvider::Iwarp => Ok(iwarp::Config::default().into()),
            BenchProvider::Shm => Ok(shm::Config::default().into()),
            BenchProvider::Verbs => Ok(verbs::Config::towards(peer).map_err(|e| e.to_string())?.into()),
        }
    }

    /// To be called by at `local`, with defaults.
    fn at(self, local: SocketAddr) -> Result<Provider, String> {
        match self {
            BenchProvider::Auto => {
                Ok(iwarp::Config { shm: Some(shm::Config::default()), ..iwarp::Config::default() }.into())
            }
            BenchProvider::Iwarp => Ok(iwarp::Config::default().into()),
            BenchProvider::Shm => Ok(shm::Config::default().into()),
            BenchProvider::Verbs => Ok(verbs::Config::at(local.ip()).map_err(|e| e.to_string())?.into()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnOff {
    On,
    Off,
}

/// How to wait for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Wait {
    /// Busy-poll
    Poll,
    /// Wait for events
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
    /// Outstanding operations on each queue pair (bw)
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Memory at each end that operations go round: one message's, which the processor's caches keep, or more (bw)
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Queue pairs (bw)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    qps: u32,
    /// Seconds for each row
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// What carries the test; the two ends may differ where both speak iWARP
    #[arg(long, value_enum, default_value_t = BenchProvider::Iwarp)]
    provider: BenchProvider,
    /// CRC32C on every FPDU (iwarp)
    #[arg(long, value_enum, default_value_t = OnOff::On)]
    crc: OnOff,
    /// MPA markers in both directions
    #[arg(long, value_enum, default_value_t = OnOff::Off)]
    markers: OnOff,
    /// MPA revision to ask for, and the highest to accept (iwarp)
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    revision: u8,
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
    fn iwarp(&self) -> Provider {
        let config = iwarp::Config {
            crc: self.crc == OnOff::On,
            markers: self.markers == OnOff::On,
            revision: self.revision,
            congestion: self.congestion.clone(),
            shm: (self.provider == BenchProvider::Auto).then(shm::Config::default),
            ..iwarp::Config::default()
        };
        config.into()
    }

    /// The fabric to call `peer` by.
    fn towards(&self, peer: SocketAddr) -> Result<Provider, String> {
        match self.provider {
            BenchProvider::Auto | BenchProvider::Iwarp => Ok(self.iwarp()),
            BenchProvider::Shm | BenchProvider::Verbs => self.provider.towards(peer),
        }
    }

    /// The fabric to be called by at `local`.
    fn at(&self, local: SocketAddr) -> Result<Provider, String> {
        match self.provider {
            BenchProvider::Auto | BenchProvider::Iwarp => Ok(self.iwarp()),
            BenchProvider::Shm | BenchProvider::Verbs => self.provider.at(local),
        }
    }

    fn sizes(&self, default: u32) -> Result<Vec<u32>, String> {
        match self.size.as_deref() {
            None => Ok(vec![default]),
            Some("sweep") => Ok((1..=23).map(|shift| 1 << shift).collect()),
            Some(list) => list
                .split(',')
                .map(|text| match thruway_cli::units::parse_size(text).map_err(|e| e.to_string())? {
                    n @ 1..=0x4000_0000 => Ok(n as u32),
                    n => Err(format!("invalid message size {n} (expected 1 to 1G)")),
                })
                .collect(),
        }
    }

    /// Messages of `size` bytes that the memory at each end has room for.
    fn slots(&self, size: u32) -> Result<u32, String> {
        let Some(text) = &self.memory else { return Ok(1) };
        match thruway_cli::units::parse_size(text).map_err(|e| format!("--memory: {e}"))? {
            n @ 1..=0x4000_0000 => Ok((n as u32 / size.max(8).next_multiple_of(8)).max(1)),
            n => Err(format!("--memory {n}: expected 1 to 1G")),
        }
    }

    fn duration(&self) -> Result<Duration, String> {
        Duration::try_from_secs_f64(self.seconds).map_err(|e| format!("--seconds {}: {e}", self.seconds))
    }
}

/// A test, as the connecting end tells it to the accepting one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Test {
    /// One at a time rather than many.
    lat: bool,
    op: Op,
    size: u32,
    depth: u32,
    /// Messages that the memory at each end has room for: operations go round.
    slots: u32,
    wait: Wait,
    bidi: bool,
    /// The sender's buffer.
    addr: u64,
    rkey: u32,
}

/// How a test begins in private data; the digit is the version.
const MAGIC: [u8; 4] = *b"TWB3";
/// Bytes of a test: InfiniBand's connection request has room for 56.
const TEST_LEN: usize = 32;

impl Test {
    fn encode(&self) -> Vec<u8> {
        let flags = [u8::from(self.lat), self.op as u8, self.wait as u8, u8::from(self.bidi)];
        let mut out = [MAGIC, flags, self.size.to_be_bytes(), self.depth.to_be_bytes()].concat();
        out.extend(self.addr.to_be_bytes());
        out.extend(self.rkey.to_be_bytes());
        out.extend(self.slots.to_be_bytes());
        out
    }

    /// `None` for anything else; what follows is padding of the transport's.
    fn decode(bytes: &[u8]) -> Option<Test> {
        let rest = bytes.get(..TEST_LEN)?.strip_prefix(&MAGIC)?;
        let u32_at = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().expect("four bytes"));
        Some(Test {
            lat: rest[0] == 1,
            op: *[Op::Send, Op::Write, Op::Read, Op::Atomic].get(usize::from(rest[1]))?,
            wait: *[Wait::Poll, Wait::Event].get(usize::from(rest[2]))?,
            bidi: rest[3] == 1,
            size: u32_at(4),
            depth: u32_at(8),
            addr: u64::from(u32_at(12)) << 32 | u64::from(u32_at(16)),
            rkey: u32_at(20),
            slots: u32_at(24),
        })
    }

    /// Bytes of half a buffer.
    fn memory(&self) -> u64 {
        u64::from(self.size).max(8).next_multiple_of(8).saturating_mul(self.slots.into())
    }

    /// Whether both ends watch memory for what the other has written.
    fn watches_memory(&self) -> bool {
        self.lat && self.op == Op::Write
    }

    /// Whether the serving end polls. It does not if its device does everything by itself, and has to if nothing but the
    /// memory tells that something has come.
    fn is_polled_for(&self, auto_progress: bool) -> bool {
        match self.wait {
            Wait::Poll => !auto_progress || self.op == Op::Send || self.bidi || self.watches_memory(),
            Wait::Event => auto_progress && self.watches_memory(),
        }
    }
}

/// Warns if other programs keep the processors busy. A polling end then waits for a processor, which increases the measured latency.
fn warn_of_load() {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0.0);
    let processors = thruway_engine::topology::cores();
    if load > processors as f64 / 2.0 {
        thruway_cli::say_error!(
            "thruway bench: this machine is busy (load average {load}, {processors} processors): figures will be worse than \
             it can do, above all polled latency (--wait event does not poll)"
        );
    }
}

/// Runs the command.
pub fn run(args: &BenchArgs, common: &Common) -> Result<(), Failed> {
    let measures =
        matches!(args.what, What::Lat(_) | What::Bw(_) | What::Stream(_) | What::Sockets(_) | What::Suite(_));
    if measures && !common.quiet {
        warn_of_load();
    }
    let result = match &args.what {
        What::Lat(test) => measure(test, true, common),
        What::Bw(test) => measure(test, false, common),
        What::Stream(args) => stream::run(args, common),
        What::Sockets(args) => sockets::run(args, common),
        What::Region(args) => region::run(args, common),
        What::Rping(args) => rping::run(args, common),
        What::Suite(args) => suite::run(args, common),
        What::Nfs(args) => nfs::run(args.clone(), common),
        What::NfsServer(args) => nfs_server::run(args),
        What::Devices => {
            devices::run(common);
            Ok(())
        }
    };
    result.map_err(|message| Failed::operation("bench", message))
}

fn measure(args: &TestArgs, lat: bool, common: &Common) -> Result<(), String> {
    if let Some(addr) = args.place.listen {
        return server::Server::start(addr, &args.at(addr)?)?.announce(common).serve(|| false);
    }
    let sizes = args.sizes(if lat { 64 } else { 1 << 20 })?;
    let mut rows = report::Report::new(lat, common);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let addr = match &args.place.connect {
            Some(host) => resolve(host)?,
            None => {
                let local = SocketAddr::from(([127, 0, 0, 1], 0));
                let server = server::Server::start(local, &args.at(local)?)?;
                let addr = server.addr();
                let stop = &stop;
                scope.spawn(move || {
                    if let Err(message) = server.serve(|| stop.load(std::sync::atomic::Ordering::Relaxed)) {
                        thruway_cli::say_error!("thruway bench: accepting end: {message}");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_is_told_in_private_data_of_any_device() {
        let test = Test {
            lat: true,
            op: Op::Atomic,
            size: 8,
            depth: 4096,
            slots: 7,
            wait: Wait::Event,
            bidi: true,
            addr: 0x0123_4567_89ab_cdef,
            rkey: 0xfedc_ba98,
        };
        let mut told = test.encode();
        assert_eq!(told.len(), TEST_LEN);
        assert_eq!(Test::decode(&told[..TEST_LEN - 1]), None);
        told.extend([0; 56 - TEST_LEN]);
        assert_eq!(Test::decode(&told), Some(test));
        told[8..12].fill(0xff);
        told[28..32].fill(0xff);
        assert_eq!(
            Test::decode(&told).unwrap().memory(),
            (1 << 32) * u64::from(u32::MAX),
            "no peer's sizes wrap round"
        );
        told[5] = 9;
        assert_eq!(Test::decode(&told), None);
    }
}
