//! `thruway bench nfs`: drives an NFS server from user space, so that servers can be compared without a kernel's client before them.

use super::client::cpu_seconds;
use super::report::Latency;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};
use thruway_cli::{Common, units};
use thruway_nfs::client::{Caller, Handle, Nfs3Client, Nfs4Client, Result as NfsResult};
use thruway_nfs::security::Security;
use thruway_rpc::client::{Client, RdmaOptions};
use thruway_server::Body;
use thruway_server::rdma::Registration;

/// Nothing takes this long unless the server is gone.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Measurements are kept up to this many.
const SAMPLES_MAX: usize = 4 << 20;
/// Bytes of one request at most.
const LARGEST: u32 = 1 << 20;
/// Bytes of one request while a file is filled: what every server takes.
const FILL: u32 = 64 << 10;
/// Every so many bytes of a file begin with their position.
const BLOCK: u64 = 4096;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Operation {
    /// Reads parts of a file
    Read,
    /// Writes parts of a file
    Write,
    /// Asks for attributes (GETATTR)
    Getattr,
    /// Looks a name up (LOOKUP)
    Lookup,
    /// Makes a file and removes it
    Create,
    /// Makes a directory and removes it
    Mkdir,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Getattr => "getattr",
            Operation::Lookup => "lookup",
            Operation::Create => "create",
            Operation::Mkdir => "mkdir",
        }
    }

    fn has_data(self) -> bool {
        matches!(self, Operation::Read | Operation::Write)
    }
}

/// Version of NFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Version {
    #[value(name = "3")]
    V3,
    #[value(name = "4.1")]
    V4,
}

impl Version {
    fn name(self) -> &'static str {
        match self {
            Version::V3 => "3",
            Version::V4 => "4.1",
        }
    }
}

/// How memory is registered for the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RegistrationArg {
    Dynamic,
    Windows,
    Cached,
    All,
}

impl RegistrationArg {
    fn registration(self) -> Registration {
        match self {
            RegistrationArg::Dynamic => Registration::Dynamic,
            RegistrationArg::Windows => Registration::Windows,
            RegistrationArg::Cached => Registration::Cached,
            RegistrationArg::All => Registration::All,
        }
    }

    fn name(self) -> &'static str {
        match self {
            RegistrationArg::Dynamic => "dynamic",
            RegistrationArg::Windows => "windows",
            RegistrationArg::Cached => "cached",
            RegistrationArg::All => "all",
        }
    }
}

/// Arguments of `thruway bench nfs`.
#[derive(Args, Clone)]
pub(super) struct NfsArgs {
    /// The server
    #[arg(long, value_name = "HOST:PORT")]
    connect: String,
    /// What it shares, as it calls it: a name, or a path from its root on
    #[arg(long, value_name = "NAME")]
    share: String,
    /// Where it answers for mounting, if not there (version 3)
    #[arg(long, value_name = "HOST:PORT")]
    mount: Option<String>,
    /// Over RDMA
    #[arg(long)]
    rdma: bool,
    /// What carries RDMA
    #[arg(long, value_enum, default_value_t = super::BenchProvider::Iwarp, requires = "rdma")]
    provider: super::BenchProvider,
    /// How memory is registered for the server: for each request, by a window for each request, or for good (each block, or all at
    /// once), which costs a copy of data that is read
    #[arg(long, value_enum, default_value_t = RegistrationArg::Windows, requires = "rdma")]
    registration: RegistrationArg,
    /// Version of NFS
    #[arg(long = "vers", id = "vers", value_enum, default_value_t = Version::V3)]
    version: Version,
    /// How to show who asks: sys, or krb5, krb5i or krb5p with the tickets of Kerberos that there are
    #[arg(long, value_name = "FLAVOR", default_value = "sys")]
    sec: Security,
    /// Operations to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Operation::Read, Operation::Write, Operation::Getattr, Operation::Lookup, Operation::Create])]
    op: Vec<Operation>,
    /// Bytes of one read or write, at most 1M
    #[arg(long, default_value = "4K", value_parser = units::parse_size)]
    size: u64,
    /// Requests at a time on each connection
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    depth: u32,
    /// Connections, each with a file of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    clients: u32,
    /// Size of each file; it is filled before anything is measured
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = units::parse_size)]
    file_size: u64,
    /// From the beginning to the end instead of anywhere
    #[arg(long)]
    sequential: bool,
    /// Writes are on the medium when they are answered, instead of at the end (COMMIT)
    #[arg(long)]
    stable: bool,
    /// Seconds for each row
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

/// One result. Field names are an interface; units are in them or base units.
#[derive(Serialize)]
struct Row {
    op: &'static str,
    version: &'static str,
    /// `tcp`, or the provider of RDMA.
    transport: &'static str,
    /// How memory is registered; over RDMA only.
    registration: Option<&'static str>,
    size: u64,
    depth: u32,
    clients: u32,
    bytes_per_second: f64,
    ops_per_second: f64,
    #[serde(flatten)]
    latency: Latency,
    cpu_seconds: f64,
    seconds: f64,
    operations: u64,
    sequential: bool,
    stable: bool,
}

/// A client of either version.
enum Connection {
    V3(Nfs3Client),
    V4(Nfs4Client),
}

impl Connection {
    async fn size(&self, file: &[u8]) -> NfsResult<u64> {
        match self {
            Connection::V3(client) => client.size(file).await,
            Connection::V4(client) => client.size(file).await,
        }
    }

    async fn look_up(&self, dir: &[u8], name: &[u8]) -> NfsResult<Handle> {
        match self {
            Connection::V3(client) => client.look_up(dir, name).await,
            Connection::V4(client) => client.look_up(dir, name).await,
        }
    }

    async fn read<T>(&self, file: &[u8], at: u64, len: u32, each: impl FnOnce(&[u8]) -> T) -> NfsResult<T> {
        match self {
            Connection::V3(client) => client.read(file, at, len, each).await,
            Connection::V4(client) => client.read(file, at, len, each).await,
        }
    }

    async fn write(&self, file: &[u8], at: u64, data: Vec<u8>, is_stable: bool) -> NfsResult<u32> {
        let data = Body::Bytes(data);
        match self {
            Connection::V3(client) => client.write(file, at, data, is_stable).await,
            Connection::V4(client) => client.write(file, at, data, is_stable).await,
        }
    }

    async fn commit(&self, file: &[u8]) -> NfsResult<()> {
        match self {
            Connection::V3(client) => client.commit(file).await,
            Connection::V4(client) => client.commit(file).await,
        }
    }

    async fn create(&self, dir: &[u8], name: &[u8]) -> NfsResult<Handle> {
        match self {
            Connection::V3(client) => client.create(dir, name).await,
            Connection::V4(client) => client.create(dir, name).await,
        }
    }

    async fn make_directory(&self, dir: &[u8], name: &[u8]) -> NfsResult<Handle> {
        match self {
            Connection::V3(client) => client.make_directory(dir, name).await,
            Connection::V4(client) => client.make_directory(dir, name).await,
        }
    }

    async fn remove(&self, dir: &[u8], name: &[u8], is_directory: bool) -> NfsResult<()> {
        match self {
            Connection::V3(client) => client.remove(dir, name, is_directory).await,
            Connection::V4(client) => client.remove(dir, name).await,
        }
    }
}

/// A connection with its file.
struct Driver {
    connection: Connection,
    dir: Handle,
    file: Handle,
    name: Vec<u8>,
    number: u32,
}

/// A part of a file, as it is written: each block begins with its position.
fn content(at: u64, len: u64) -> Vec<u8> {
    let mut data = vec![0x5a; len as usize];
    let first = at.next_multiple_of(BLOCK);
    for position in (first..at + len).step_by(BLOCK as usize) {
        let start = (position - at) as usize;
        let end = data.len().min(start + 8);
        data[start..end].copy_from_slice(&position.to_le_bytes()[..end - start]);
    }
    data
}

/// Whether what was read is what [`content`] says, as far as its first block tells.
fn is_content(at: u64, data: &[u8]) -> bool {
    !at.is_multiple_of(BLOCK) || data.len() < 8 || data[..8] == at.to_le_bytes()
}

/// A connection as the arguments say.
async fn connect(args: &NfsArgs, server: SocketAddr) -> std::io::Result<Client> {
    if !args.rdma {
        return Client::connect(server, TIMEOUT).await;
    }
    let provider = args.provider.towards(server).map_err(std::io::Error::other)?;
    // What the depth asks for, and as many as a server usually grants.
    let credits = (args.depth as usize).clamp(2, 128);
    let options = RdmaOptions { provider, registration: args.registration.registration(), credits };
    Client::connect_rdma(server, TIMEOUT, &options).await
}

impl Driver {
    async fn new(args: &NfsArgs, server: SocketAddr, mount: SocketAddr, number: u32) -> Result<Driver, String> {
        let rpc = connect(args, server).await.map_err(|e| format!("{server}: {e}"))?;
        let host = args.connect.rsplit_once(':').map_or(args.connect.as_str(), |(host, _)| host);
        let user = Caller::own(args.sec, host).credential(&rpc).await.map_err(|e| format!("{server}: {e}"))?;
        let path: Vec<Vec<u8>> =
            args.share.split('/').filter(|name| !name.is_empty()).map(|name| name.as_bytes().to_vec()).collect();
        let name = format!("thruway-bench-{}-{number}", std::process::id()).into_bytes();
        let (connection, dir) = match args.version {
            Version::V3 => {
                // A share's place is not asked for by Kerberos.
                let by_host = Caller::own(Security::Sys, host).credential(&rpc).await.map_err(|e| e.to_string())?;
                let by = match args.mount {
                    Some(_) => Client::connect(mount, TIMEOUT).await,
                    None => connect(args, mount).await,
                };
                let by = by.map_err(|e| format!("{mount}: {e}"))?;
                let dir = Nfs3Client::mount(&by, &by_host, args.share.as_bytes()).await;
                (Connection::V3(Nfs3Client::new(rpc, user)), dir.map_err(|e| format!("{mount}: {}: {e}", args.share))?)
            }
            Version::V4 => {
                let client = Nfs4Client::new(rpc, user, &name, args.depth).await;
                let client = client.map_err(|e| format!("{server}: {e}"))?;
                let dir = client.find(&path).await.map_err(|e| format!("{server}: {}: {e}", args.share))?;
                (Connection::V4(client), dir)
            }
        };
        let file = connection.create(&dir, &name).await.map_err(|e| format!("{}: {e}", args.share))?;
        Ok(Driver { connection, dir, file, name, number })
    }

    async fn fill(&self, size: u64) -> Result<(), String> {
        let said = |e| format!("filling a file: {e}");
        let mut at = 0;
        while at < size {
            let len = (size - at).min(FILL.into());
            let written = self.connection.write(&self.file, at, content(at, len), false).await.map_err(said)?;
            if written == 0 || u64::from(written) > len {
                return Err(format!("filling a file: {written} bytes of {len} written"));
            }
            at += u64::from(written);
        }
        self.connection.commit(&self.file).await.map_err(said)
    }

    /// Does operations until the time is over.
    async fn drive(&self, args: &NfsArgs, op: Operation, lane: u32, run: &Run) -> Result<(), String> {
        let parts = args.file_size / args.size;
        let mut random =
            run.seed ^ (u64::from(self.number) << 32 | u64::from(lane)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let name = [&self.name[..], format!("-{lane}").as_bytes()].concat();
        let mut next = u64::from(lane);
        while run.begun.elapsed() < run.duration {
            // xorshift64: which part comes next need not be good randomness.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let part = if args.sequential { next % parts } else { random % parts };
            next += u64::from(args.depth);
            let (at, begun) = (part * args.size, Instant::now());
            let done = match op {
                Operation::Read => {
                    let read = self.connection.read(&self.file, at, args.size as u32, |data| {
                        (data.len() as u64 == args.size, is_content(at, data))
                    });
                    match read.await {
                        Ok((true, true)) => Ok(()),
                        Ok((false, _)) => return Err(format!("at {at}: less than was asked for")),
                        Ok((_, false)) => return Err(format!("at {at}: other data than was written")),
                        Err(error) => Err(error),
                    }
                }
                Operation::Write => {
                    let written = self.connection.write(&self.file, at, content(at, args.size), args.stable).await;
                    match written {
                        Ok(len) if u64::from(len) != args.size => return Err(format!("at {at}: {len} bytes written")),
                        other => other.map(drop),
                    }
                }
                Operation::Getattr => self.connection.size(&self.file).await.map(drop),
                Operation::Lookup => self.connection.look_up(&self.dir, &self.name).await.map(drop),
                Operation::Create => match self.connection.create(&self.dir, &name).await {
                    Ok(_) => self.connection.remove(&self.dir, &name, false).await,
                    Err(error) => Err(error),
                },
                Operation::Mkdir => match self.connection.make_directory(&self.dir, &name).await {
                    Ok(_) => self.connection.remove(&self.dir, &name, true).await,
                    Err(error) => Err(error),
                },
            };
            done.map_err(|e| e.to_string())?;
            let mut samples = run.samples.borrow_mut();
            if samples.len() < SAMPLES_MAX {
                samples.push(begun.elapsed().as_nanos() as u64);
            }
            run.operations.set(run.operations.get() + 1);
        }
        Ok(())
    }

    async fn end(self) -> Result<(), String> {
        self.connection.remove(&self.dir, &self.name, false).await.map_err(|e| e.to_string())?;
        match self.connection {
            Connection::V3(_) => Ok(()),
            Connection::V4(client) => client.end().await.map_err(|e| e.to_string()),
        }
    }
}

/// One row in progress.
struct Run {
    begun: Instant,
    duration: Duration,
    seed: u64,
    /// Nanoseconds.
    samples: RefCell<Vec<u64>>,
    operations: std::cell::Cell<u64>,
}

async fn measure(args: &Rc<NfsArgs>, drivers: &[Rc<Driver>], op: Operation) -> Result<Row, String> {
    let duration = Duration::try_from_secs_f64(args.seconds).map_err(|e| format!("--seconds {}: {e}", args.seconds))?;
    if duration.is_zero() {
        return Err("--seconds 0: nothing would be measured".into());
    }
    let (samples, operations) = (RefCell::default(), std::cell::Cell::new(0));
    let seed = std::process::id().into();
    let cpu = cpu_seconds();
    let run = Rc::new(Run { begun: Instant::now(), duration, seed, samples, operations });
    let mut lanes = tokio::task::JoinSet::new();
    for driver in drivers {
        for lane in 0..args.depth {
            let (args, driver, run) = (Rc::clone(args), Rc::clone(driver), Rc::clone(&run));
            lanes.spawn_local(async move { driver.drive(&args, op, lane, &run).await });
        }
    }
    while let Some(lane) = lanes.join_next().await {
        lane.map_err(|e| e.to_string())?.map_err(|e| format!("{}: {e}", op.name()))?;
    }
    if op == Operation::Write && !args.stable {
        for driver in drivers {
            driver.connection.commit(&driver.file).await.map_err(|e| e.to_string())?;
        }
    }
    let seconds = run.begun.elapsed().as_secs_f64();
    let cpu_seconds = cpu_seconds() - cpu;
    let operations = run.operations.get();
    let size = if op.has_data() { args.size } else { 0 };
    Ok(Row {
        op: op.name(),
        version: args.version.name(),
        transport: if args.rdma { args.provider.name() } else { "tcp" },
        registration: args.rdma.then(|| args.registration.name()),
        size,
        depth: args.depth,
        clients: args.clients,
        bytes_per_second: operations as f64 * size as f64 / seconds,
        ops_per_second: operations as f64 / seconds,
        latency: Latency::of(&mut run.samples.borrow_mut(), 1000.0),
        cpu_seconds,
        seconds,
        operations,
        sequential: args.sequential,
        stable: args.stable,
    })
}

async fn all(args: Rc<NfsArgs>, common: &Common) -> Result<(), String> {
    let server = super::resolve(&args.connect)?;
    let mount = args.mount.as_deref().map_or(Ok(server), super::resolve)?;
    let mut drivers = Vec::new();
    for number in 0..args.clients {
        let driver = Driver::new(&args, server, mount, number).await?;
        driver.fill(if args.op.iter().any(|op| op.has_data()) { args.file_size } else { 0 }).await?;
        drivers.push(Rc::new(driver));
    }
    if !common.json {
        thruway_cli::say!(
            "{:<8} {:>9} {:>6} {:>8} {:>12} {:>12} {:>9} {:>9} {:>9}",
            "op",
            "size",
            "depth",
            "clients",
            "rate",
            "op/s",
            "p50 us",
            "p99 us",
            "p99.9 us"
        );
    }
    let mut rows = Vec::new();
    let mut result = Ok(());
    for &op in &args.op {
        match measure(&args, &drivers, op).await {
            Ok(row) => {
                if !common.json {
                    let rate = if op.has_data() { units::rate(row.bytes_per_second) } else { "-".into() };
                    thruway_cli::say!(
                        "{:<8} {:>9} {:>6} {:>8} {rate:>12} {:>12.0} {:>9.1} {:>9.1} {:>9.1}",
                        row.op,
                        units::size(row.size),
                        row.depth,
                        row.clients,
                        row.ops_per_second,
                        row.latency.lat_us_p50,
                        row.latency.lat_us_p99,
                        row.latency.lat_us_p999,
                    );
                }
                rows.push(row);
            }
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    for driver in drivers {
        if let Ok(driver) = Rc::try_unwrap(driver) {
            let ended = driver.end().await;
            result = result.and(ended);
        }
    }
    result?;
    if common.json {
        thruway_cli::say!("{}", serde_json::to_string_pretty(&rows).expect("plain structures"));
    }
    Ok(())
}

/// Runs the command.
pub(super) fn run(args: NfsArgs, common: &Common) -> Result<(), String> {
    if args.size == 0 || args.size > LARGEST.into() {
        return Err(format!("--size {}: 1 to 1M is possible", args.size));
    }
    if args.mount.is_some() && args.version != Version::V3 {
        return Err("--mount is for version 3 only".into());
    }
    if args.file_size < args.size {
        return Err(format!("--file-size {}: less than --size", args.file_size));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    tokio::task::LocalSet::new().block_on(&runtime, all(Rc::new(args), common))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_elsewhere_is_noticed() {
        for (at, len) in [(0, 4096), (4096, 10_000), (100, 5000), (4090, 8), (8192, 3)] {
            let data = content(at, len);
            assert_eq!(data.len() as u64, len);
            assert!(is_content(at, &data));
        }
        assert_eq!(content(4090, 16)[6..14], 4096_u64.to_le_bytes());
        assert!(!is_content(4096, &content(8192, 4096)));
    }
}
