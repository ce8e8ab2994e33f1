//! `thruway bench sockets`: a program with ordinary TCP sockets, which knows nothing of RDMA and shared memory. As it is, it measures TCP;
//! by `thruway run`, or with any other library that stands before the C library's sockets, it measures that.
//!
//! The calls are the C library's, one thread for each connection, and none is made for a library's sake.

mod client;
mod files;
mod server;

use super::Where;
use super::report::Latency;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;
use thruway_cli::{Common, units};

/// What is measured. Each connection begins with one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Half round trip of one message at a time
    Lat,
    /// Clients send
    In,
    /// The server sends
    Out,
    /// Both send at once
    Both,
    /// Files, one at a time, by sendfile from memory to memory
    File,
    /// Documents by HTTP
    Web,
}

impl Kind {
    const ALL: [Kind; 6] = [Kind::Lat, Kind::In, Kind::Out, Kind::Both, Kind::File, Kind::Web];

    fn name(self) -> &'static str {
        match self {
            Kind::Lat => "lat",
            Kind::In => "in",
            Kind::Out => "out",
            Kind::Both => "both",
            Kind::File => "file",
            Kind::Web => "web",
        }
    }
}

/// What a connection that is not for documents begins with: the test, and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    kind: Kind,
    size: u32,
}

/// The digit is the version.
const MAGIC: [u8; 4] = *b"TWK1";
const HEAD_LEN: usize = 9;
/// Bytes of a message at most: each connection has a buffer of them.
const MESSAGE_MAX: u32 = 64 << 20;

impl Head {
    fn encode(self) -> [u8; HEAD_LEN] {
        let mut out = [0; HEAD_LEN];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = self.kind as u8;
        out[5..].copy_from_slice(&self.size.to_be_bytes());
        out
    }

    fn decode(bytes: &[u8; HEAD_LEN]) -> Option<Head> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let kind = *Kind::ALL.get(usize::from(rest[0]))?;
        let size = u32::from_be_bytes(rest[1..].try_into().expect("four bytes"));
        (1..=MESSAGE_MAX).contains(&size).then_some(Head { kind, size })
    }
}

/// Arguments of `thruway bench sockets`.
#[derive(Args)]
#[command(after_help = "Two programs of this host, over TCP and over shared memory:
  thruway bench sockets --listen 127.0.0.1:7121         then: thruway bench sockets --connect 127.0.0.1:7121
  thruway run -- thruway bench sockets --listen …       and:  thruway run -- thruway bench sockets --connect …")]
pub(super) struct SocketsArgs {
    #[command(flatten)]
    place: Where,
    /// What to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Kind::Lat, Kind::In, Kind::Both])]
    test: Vec<Kind>,
    /// Bytes of each message, file or document
    #[arg(long, value_delimiter = ',', default_values_t = ["64".to_owned(), "4K".to_owned(), "64K".to_owned(), "1M".to_owned()])]
    size: Vec<String>,
    /// Connections at a time, each in a thread
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    clients: u32,
    /// Seconds for each row
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Microseconds of computation between messages
    #[arg(long, default_value_t = 0)]
    compute: u64,
    /// Documents on one connection (web): 1 is HTTP/1.0
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,
    /// Instead of one size, 20 documents of 200 bytes to 1 MiB, the nth asked for in proportion to 1/n to this power (web)
    #[arg(long, value_name = "EXPONENT")]
    zipf: Option<f64>,
}

/// One measurement.
#[derive(Clone, Copy)]
struct Plan {
    kind: Kind,
    /// `None`: documents by Zipf.
    size: Option<u32>,
    clients: u32,
    time: Duration,
    compute: Duration,
    requests: u32,
    zipf: f64,
}

/// One result. Field names are an interface; units are in them or base units.
#[derive(Serialize)]
struct Row {
    test: &'static str,
    /// Of one message, file or document; none if they differ.
    size: Option<u32>,
    clients: u32,
    /// Of all clients together, both directions.
    bytes_per_second: f64,
    operations_per_second: f64,
    /// Half a round trip (lat), a file or a document.
    #[serde(flatten)]
    latency: Option<Latency>,
    seconds: f64,
    /// Processor time of this process.
    cpu_seconds: f64,
}

pub(super) fn run(args: &SocketsArgs, common: &Common) -> Result<(), String> {
    if let Some(at) = args.place.listen {
        let listener = TcpListener::bind(at).map_err(|e| format!("cannot listen at {at}: {e}"))?;
        let at = listener.local_addr().map_err(|e| e.to_string())?;
        if common.json {
            thruway_cli::say!("{}", serde_json::json!({ "listening": at.to_string() }));
        } else if !common.quiet {
            thruway_cli::say_error!("listening on {at}");
        }
        return server::serve(&listener);
    }
    let at = match &args.place.connect {
        Some(host) => super::resolve(host)?,
        None => {
            let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).map_err(|e| e.to_string())?;
            let at = listener.local_addr().map_err(|e| e.to_string())?;
            // It ends with the process.
            std::thread::spawn(move || server::serve(&listener));
            at
        }
    };
    let rows = measure(args, at, common)?;
    if common.json {
        thruway_cli::say!("{}", serde_json::to_string_pretty(&rows).expect("plain structures"));
    }
    Ok(())
}

fn measure(args: &SocketsArgs, at: SocketAddr, common: &Common) -> Result<Vec<Row>, String> {
    let time = Duration::try_from_secs_f64(args.seconds).map_err(|e| format!("--seconds {}: {e}", args.seconds))?;
    let zipf = args.zipf.unwrap_or(0.0);
    if !(0.0..=10.0).contains(&zipf) {
        return Err(format!("invalid --zipf {zipf} (expected 0 to 10)"));
    }
    let sizes: Vec<u32> = args.size.iter().map(|text| size(text)).collect::<Result<_, _>>()?;
    if !common.json {
        let (rate, each) = ("rate", "operations");
        thruway_cli::say!(
            "{:<5} {:>7} {:>7} {rate:>12} {each:>12} {:>9} {:>9}",
            "test",
            "size",
            "clients",
            "p50 us",
            "p99 us"
        );
    }
    let mut rows = Vec::new();
    for &kind in &args.test {
        let is_mixed = kind == Kind::Web && args.zipf.is_some();
        let sizes: Vec<Option<u32>> = if is_mixed { vec![None] } else { sizes.iter().copied().map(Some).collect() };
        for size in sizes {
            let compute = Duration::from_micros(args.compute);
            let (clients, requests) = (args.clients, args.requests);
            let row = client::measure(at, &Plan { kind, size, clients, time, compute, requests, zipf })?;
            if !common.json {
                print(&row);
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

fn size(text: &str) -> Result<u32, String> {
    match units::parse_size(text).map_err(|e| e.to_string())? {
        n if (1..=u64::from(MESSAGE_MAX)).contains(&n) => Ok(n as u32),
        n => Err(format!("invalid message size {n} (expected 1 to 64M)")),
    }
}

fn print(row: &Row) {
    let time = |us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{us:.2}"));
    thruway_cli::say!(
        "{:<5} {:>7} {:>7} {:>12} {:>10.0}/s {:>9} {:>9}",
        row.test,
        row.size.map_or("zipf".to_owned(), |size| units::size(size.into())),
        row.clients,
        units::rate(row.bytes_per_second),
        row.operations_per_second,
        time(row.latency.as_ref().map(|latency| latency.lat_us_p50)),
        time(row.latency.as_ref().map(|latency| latency.lat_us_p99)),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_say_what_was_meant_and_nothing_else_is_taken() {
        for kind in Kind::ALL {
            let head = Head { kind, size: 7 };
            assert_eq!(Head::decode(&head.encode()), Some(head));
        }
        let good = Head { kind: Kind::Lat, size: 7 }.encode();
        let changed = |at: usize, to: u8| {
            let mut head = good;
            head[at] = to;
            Head::decode(&head)
        };
        assert_eq!([changed(0, b'X'), changed(4, 6), changed(8, 0), changed(5, 255)], [None; 4]);
    }

    #[test]
    fn every_test_can_be_run_within_one_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        std::thread::spawn(move || server::serve(&listener));
        for kind in Kind::ALL {
            for (size, requests) in [(Some(1), 1), (Some(100_000), 3), (None, 2)] {
                if size.is_none() && kind != Kind::Web {
                    continue;
                }
                let time = Duration::from_millis(20);
                let plan = Plan { kind, size, clients: 2, time, compute: Duration::ZERO, requests, zipf: 0.9 };
                let row = client::measure(at, &plan).unwrap_or_else(|why| panic!("{}, {size:?}: {why}", kind.name()));
                assert!(row.bytes_per_second > 0.0, "{}, {size:?}", kind.name());
            }
        }
    }
}
