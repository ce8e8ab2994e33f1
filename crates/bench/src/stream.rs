//! `thruway bench stream`: streams over the fabric, by each of their schemes.

use super::report::Latency;
use super::{BenchProvider, OnOff, Where};
use clap::{Args, ValueEnum};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use serde::Serialize;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use thruway_cli::{Common, units};
use thruway_streams::{Connection, Context, Scheme, Settings};

/// How long the other end may take to connect, or to answer.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How a test begins in the private data; the digit is the version.
const MAGIC: [u8; 4] = *b"TWT1";
/// Bytes of a test.
const TEST_LEN: usize = 15;

/// A scheme, as an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SchemeName {
    /// Each message to a buffer of fixed size at the peer
    Credit,
    /// The sender manages a ring at the peer, and coalesces
    Packetized,
    /// Large messages by SrcAvail and SinkAvail
    Rendezvous,
    /// Large messages without waiting, their buffers write-protected
    ZeroCopy,
    /// By size
    Adaptive,
}

impl SchemeName {
    fn scheme(self) -> Scheme {
        match self {
            SchemeName::Credit => Scheme::Credit,
            SchemeName::Packetized => Scheme::Packetized,
            SchemeName::Rendezvous => Scheme::Rendezvous,
            SchemeName::ZeroCopy => Scheme::ZeroCopy,
            SchemeName::Adaptive => Scheme::Adaptive,
        }
    }
}

/// What memory the buffers of the sending end are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Pages {
    /// 16 bytes behind the beginning of a page, as the allocator has them
    Heap,
    /// Whole pages of 4 KiB
    Small,
    /// Whole huge pages of 2 MiB, which the kernel must have for programs that ask (madvise)
    Huge,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Half round trip of one message at a time
    Lat,
    /// Rate of messages in one direction
    Bw,
}

/// Arguments of `thruway bench stream`.
#[derive(Args)]
pub(super) struct StreamArgs {
    #[command(flatten)]
    place: Where,
    /// What to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Kind::Lat, Kind::Bw])]
    test: Vec<Kind>,
    /// How bytes are moved
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [SchemeName::Credit, SchemeName::Packetized, SchemeName::Rendezvous, SchemeName::ZeroCopy, SchemeName::Adaptive])]
    scheme: Vec<SchemeName>,
    /// Bytes of each send
    #[arg(long, value_delimiter = ',', default_values_t = ["64".to_owned(), "4K".to_owned(), "64K".to_owned(), "1M".to_owned()])]
    size: Vec<String>,
    /// Seconds for each row
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// What carries the streams
    #[arg(long, value_enum, default_value_t = BenchProvider::Auto)]
    provider: BenchProvider,
    /// Messages that may be on their way, of the schemes with credits [default: the scheme's]
    #[arg(long, value_parser = clap::value_parser!(u16).range(4..=4096))]
    credits: Option<u16>,
    /// Acknowledge after half of the credits, and with data that goes the other way; off: after each message, alone
    #[arg(long, value_enum, default_value_t = OnOff::On)]
    delayed_acks: OnOff,
    /// Buffers that each send takes the next of
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    buffers: u16,
    /// Where the buffers are: as the allocator has them, or where pages of that size begin
    #[arg(long, value_enum, default_value_t = Pages::Heap)]
    pages: Pages,
    /// Write to every buffer right after it was sent
    #[arg(long)]
    touch: bool,
    /// Microseconds of computation between sends
    #[arg(long, default_value_t = 0)]
    compute: u64,
    /// From how many bytes on a send is not copied [default: the scheme's]
    #[arg(long, value_parser = units::parse_size)]
    zero_copy_min: Option<u64>,
}

/// Sends for so long, and returns bytes a second and the share of the peer's buffers that they used.
pub(super) fn rate(
    context: &Context,
    at: SocketAddr,
    settings: Settings,
    size: u32,
    program: Program,
    time: Duration,
) -> Result<(f64, f64), String> {
    let row = client(context, at, program, Test { kind: Kind::Bw, size, settings }, time)?;
    Ok((row.bytes_per_second, row.buffer_use))
}

/// One result. Field names are an interface.
#[derive(Serialize)]
struct Row {
    test: &'static str,
    provider: &'static str,
    scheme: &'static str,
    size: u32,
    bytes_per_second: f64,
    messages_per_second: f64,
    #[serde(flatten)]
    latency: Option<Latency>,
    /// Bytes sent, of those that the sends took up at the peer.
    buffer_use: f64,
    stream_messages: u64,
    acknowledgements: u64,
    writes: u64,
    zero_copy_share: f64,
    /// Of sends that did not wait, those whose buffer was written to too early.
    faults: u32,
}

/// What the sending program does beside.
#[derive(Clone, Copy)]
pub(super) struct Program {
    /// Buffers that each send takes the next of.
    pub(super) buffers: u16,
    pub(super) pages: Pages,
    /// Writes to every buffer right after it was sent.
    pub(super) touch: bool,
    /// Computes between sends.
    pub(super) compute: Duration,
}

/// A test, as the connecting end tells it.
#[derive(Clone, Copy)]
struct Test {
    kind: Kind,
    size: u32,
    settings: Settings,
}

impl Test {
    fn token(&self) -> Vec<u8> {
        let scheme = Scheme::ALL.iter().position(|&scheme| scheme == self.settings.scheme).expect("one of them") as u8;
        let immediate = u8::from(self.settings.acknowledge_after.is_some());
        let mut token = [MAGIC, self.size.to_be_bytes()].concat();
        token.push(self.kind as u8 | immediate << 1 | scheme << 2);
        token.extend(self.settings.credits.to_be_bytes());
        token.extend(self.settings.zero_copy_min.to_be_bytes());
        token
    }

    fn from_token(token: &[u8]) -> Option<Test> {
        let rest = token.get(..TEST_LEN)?.strip_prefix(&MAGIC)?;
        let word = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().expect("four bytes"));
        let credits = u16::from_be_bytes(rest[5..7].try_into().expect("two bytes"));
        let base = Settings::of(*Scheme::ALL.get(usize::from(rest[4] >> 2))?);
        let mut settings = Settings { credits, zero_copy_min: word(7), ..base };
        if rest[4] & 2 != 0 {
            (settings.acknowledge_after, settings.piggyback) = (Some(1), false);
        }
        settings.check().ok()?;
        Some(Test { kind: [Kind::Lat, Kind::Bw][usize::from(rest[4] & 1)], size: word(0).clamp(1, 1 << 30), settings })
    }
}

pub(super) fn run(args: &StreamArgs, common: &Common) -> Result<(), String> {
    if let Some(at) = args.place.listen {
        let context = Context::open(&args.provider.at(at)?).map_err(|e| e.to_string())?;
        let listener = context.listen(at).map_err(|e| e.to_string())?;
        if common.json {
            thruway_cli::say!("{}", serde_json::json!({ "listening": listener.local_addr().to_string() }));
        } else if !common.quiet {
            thruway_cli::say_error!("listening on {}", listener.local_addr());
        }
        return serve(&context, || false);
    }
    let seconds = Duration::try_from_secs_f64(args.seconds).map_err(|e| format!("--seconds {}: {e}", args.seconds))?;
    let sizes: Vec<u32> = args.size.iter().map(|text| size(text)).collect::<Result<_, _>>()?;
    if args.pages == Pages::Huge {
        let setting = "/sys/kernel/mm/transparent_hugepage/enabled";
        let chosen = std::fs::read_to_string(setting).unwrap_or_default();
        if chosen.is_empty() || chosen.contains("[never]") {
            return Err(format!("no huge pages: {setting} must be madvise or always"));
        }
    }
    let stop = std::sync::atomic::AtomicBool::new(false);
    let mut rows = Vec::new();
    if !common.json {
        thruway_cli::say!(
            "{:<5} {:<11} {:>6} {:>12} {:>12} {:>9} {:>9} {:>7} {:>10}",
            "test",
            "scheme",
            "size",
            "rate",
            "sends",
            "p50 us",
            "p99 us",
            "buffers",
            "zero copy"
        );
    }
    let compute = Duration::from_micros(args.compute);
    let program = Program { buffers: args.buffers, pages: args.pages, touch: args.touch, compute };
    std::thread::scope(|scope| {
        let mut measure = || -> Result<(), String> {
            let at = match &args.place.connect {
                Some(host) => super::resolve(host)?,
                None => {
                    let local = SocketAddr::from(([127, 0, 0, 1], 0));
                    let context = Context::open(&args.provider.at(local)?).map_err(|e| e.to_string())?;
                    let listener = context.listen(local).map_err(|e| e.to_string())?;
                    let at = listener.local_addr();
                    let stop = &stop;
                    scope.spawn(move || {
                        let _listener = listener;
                        let _ = serve(&context, || stop.load(std::sync::atomic::Ordering::Relaxed));
                    });
                    at
                }
            };
            let context = args.provider.towards(at).and_then(|p| Context::open(&p).map_err(|e| e.to_string()))?;
            for &kind in &args.test {
                for &size in &sizes {
                    for scheme in &args.scheme {
                        let test = Test { kind, size, settings: settings(args, *scheme)? };
                        let row = client(&context, at, program, test, seconds)?;
                        if !common.json {
                            print(&row);
                        }
                        rows.push(row);
                    }
                }
            }
            Ok(())
        };
        let result = measure();
        // In every case: the scope ends when the accepting end does.
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        result
    })?;
    if common.json {
        thruway_cli::say!("{}", serde_json::to_string_pretty(&rows).expect("plain structures"));
    }
    Ok(())
}

fn size(text: &str) -> Result<u32, String> {
    match units::parse_size(text).map_err(|e| e.to_string())? {
        n @ 1..=0x4000_0000 => Ok(n as u32),
        n => Err(format!("invalid message size {n} (expected 1 to 1G)")),
    }
}

fn settings(args: &StreamArgs, scheme: SchemeName) -> Result<Settings, String> {
    let mut settings = Settings::of(scheme.scheme());
    settings.credits = args.credits.unwrap_or(settings.credits);
    if let Some(min) = args.zero_copy_min {
        settings.zero_copy_min = u32::try_from(min).map_err(|_| "--zero-copy-min is more than 4 GiB".to_owned())?;
    }
    if args.delayed_acks == OnOff::Off {
        (settings.acknowledge_after, settings.piggyback) = (Some(1), false);
    }
    Ok(settings)
}

fn print(row: &Row) {
    let time = |us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{us:.2}"));
    thruway_cli::say!(
        "{:<5} {:<11} {:>6} {:>12} {:>10}/s {:>9} {:>9} {:>6.1}% {:>9.1}%",
        row.test,
        row.scheme,
        units::size(row.size.into()),
        units::rate(row.bytes_per_second),
        row.messages_per_second as u64,
        time(row.latency.as_ref().map(|latency| latency.lat_us_p50)),
        time(row.latency.as_ref().map(|latency| latency.lat_us_p99)),
        row.buffer_use * 100.0,
        row.zero_copy_share * 100.0,
    );
}

/// The accepting end: sends back what it has received, or takes everything and says that it has.
fn serve(context: &Context, stop: impl Fn() -> bool) -> Result<(), String> {
    std::thread::scope(|scope| {
        while !stop() {
            let soon = Instant::now() + Duration::from_millis(200);
            let Ok(request) = context.request(|_| true, Some(soon)) else { continue };
            let Some(test) = Test::from_token(request.token()) else { continue };
            let context = context.clone();
            scope.spawn(move || {
                let served = request
                    .accept(&context, &test.settings, Instant::now() + TIMEOUT)
                    .and_then(|connection| answer(connection, &test));
                if let Err(error) = served {
                    thruway_cli::say_error!("thruway bench: accepting end: {error}");
                }
            });
        }
    });
    Ok(())
}

fn answer(connection: Connection, test: &Test) -> Result<(), thruway_streams::Error> {
    let mut buffer = vec![0; (test.size as usize).max(64 << 10)];
    match test.kind {
        Kind::Lat => loop {
            let whole = &mut buffer[..test.size as usize];
            if !fill(&connection, whole)? {
                break;
            }
            connection.send(whole, None)?;
        },
        Kind::Bw => while connection.recv(&mut buffer, None)? > 0 {},
    }
    // Waits until the other end has all of it: to drop a connection is to drop what is on its way.
    connection.close(Some(Instant::now() + TIMEOUT))
}

/// Receives all of it; false at the end of the stream.
fn fill(connection: &Connection, to: &mut [u8]) -> Result<bool, thruway_streams::Error> {
    let mut len = 0;
    while len < to.len() {
        match connection.recv(&mut to[len..], None)? {
            0 => return Ok(false),
            more => len += more,
        }
    }
    Ok(true)
}

const HUGE_PAGE: usize = 2 << 20;

/// What is sent from, a buffer at a time.
struct Buffers {
    memory: *mut u8,
    mapped: usize,
    first: usize,
    /// From one to the next.
    stride: usize,
    len: usize,
    count: usize,
}

impl Buffers {
    fn new(count: usize, len: usize, pages: Pages) -> Result<Buffers, String> {
        let stride = match pages {
            Pages::Heap => (len + 16).next_multiple_of(4096),
            Pages::Small => len.next_multiple_of(4096),
            Pages::Huge => len.next_multiple_of(HUGE_PAGE),
        };
        let mapped = stride * count + HUGE_PAGE;
        let failed = |e: rustix::io::Errno| format!("no memory for {count} buffers: {e}");
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: new memory, at no address in particular.
        let memory = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), mapped, rights, flags) }.map_err(failed)?;
        let first = (memory as usize).next_multiple_of(HUGE_PAGE) - memory as usize;
        let first = if pages == Pages::Heap { first + 16 } else { first };
        let mut buffers = Buffers { memory: memory.cast(), mapped, first, stride, len, count };
        // SAFETY: the memory above.
        let advise = |advice| unsafe { mm::madvise(memory, mapped, advice) };
        match pages {
            Pages::Heap => {}
            // A kernel that refuses has no others.
            Pages::Small => drop(advise(Advice::LinuxNoHugepage)),
            Pages::Huge => advise(Advice::LinuxHugepage).map_err(|e| format!("no huge pages: {e}"))?,
        }
        (0..count).for_each(|number| buffers.get(number).fill(0x5a));
        Ok(buffers)
    }

    fn get(&mut self, number: usize) -> &mut [u8] {
        assert!(number < self.count);
        // SAFETY: inside the mapping, which this is the only owner of.
        unsafe { std::slice::from_raw_parts_mut(self.memory.add(self.first + number * self.stride), self.len) }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: what was mapped, and no slice of it is left.
        let _ = unsafe { mm::munmap(self.memory.cast(), self.mapped) };
    }
}

fn client(context: &Context, at: SocketAddr, program: Program, test: Test, time: Duration) -> Result<Row, String> {
    let what = |e: thruway_streams::Error| format!("{}, {} bytes: {e}", test.settings.scheme.name(), test.size);
    let mut buffers = Buffers::new(program.buffers.into(), test.size as usize, program.pages)?;
    // Behind the buffers, so that it is dropped before them.
    let connection = context.connect(at, &test.settings, &test.token(), TIMEOUT).map_err(what)?;
    let mut next = 0;
    let mut samples = Vec::new();
    let mut sends = 0u64;
    let mut start = Instant::now();
    let warm_up = time.min(Duration::from_millis(100));
    let mut is_warm = false;
    while start.elapsed() < if is_warm { time } else { warm_up } || !is_warm {
        if !is_warm && start.elapsed() >= warm_up {
            (is_warm, start, sends) = (true, Instant::now(), 0);
            samples.clear();
        }
        let began = Instant::now();
        next = (next + 1) % usize::from(program.buffers);
        let bytes = buffers.get(next);
        match test.settings.scheme {
            // SAFETY: the buffers live longer than the connection, which is closed below or dropped at an error.
            Scheme::ZeroCopy => unsafe { connection.send_asynchronously(bytes, None) },
            _ => connection.send(bytes, None),
        }
        .map_err(what)?;
        sends += 1;
        if program.touch {
            bytes[test.size as usize / 2] ^= 1;
        }
        if !program.compute.is_zero() {
            let until = Instant::now() + program.compute;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        }
        if test.kind == Kind::Lat {
            if !fill(&connection, bytes).map_err(what)? {
                return Err(what(thruway_streams::Error::Reset));
            }
            samples.push(began.elapsed().as_nanos() as u64);
        }
    }
    connection.shutdown();
    // Everything has been received when the other end's stream ends.
    let mut last = [0];
    while connection.recv(&mut last, Some(Instant::now() + TIMEOUT)).map_err(what)? > 0 {}
    let seconds = start.elapsed().as_secs_f64();
    let counters = connection.counters();
    let faults = connection.asynchronous_sends().faults;
    let (copied, direct) = (counters.bytes_copied as f64, counters.bytes_zero_copy as f64);
    let provider = connection.info().map_or("none", |info| info.provider);
    let _ = connection.close(Some(Instant::now() + TIMEOUT));
    Ok(Row {
        test: if test.kind == Kind::Lat { "lat" } else { "bw" },
        provider,
        scheme: test.settings.scheme.name(),
        size: test.size,
        bytes_per_second: sends as f64 * f64::from(test.size) / seconds,
        messages_per_second: sends as f64 / seconds,
        latency: (test.kind == Kind::Lat).then(|| Latency::of(&mut samples, 2000.0)),
        buffer_use: copied / (counters.peer_bytes_reserved as f64).max(1.0),
        stream_messages: counters.messages_sent,
        acknowledgements: counters.acknowledgements_sent,
        writes: counters.writes,
        faults,
        zero_copy_share: direct / (copied + direct).max(1.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_apart_and_where_pages_begin() {
        for (pages, begin) in [(Pages::Heap, 16), (Pages::Small, 0), (Pages::Huge, 0)] {
            for len in [1, 4096, 5000] {
                // Some kernels have no huge pages.
                let Ok(mut buffers) = Buffers::new(3, len, pages) else {
                    assert_eq!(pages, Pages::Huge);
                    continue;
                };
                let mut end = 0;
                for number in 0..3 {
                    let buffer = buffers.get(number);
                    assert!(buffer.len() == len && buffer.iter().all(|byte| *byte == 0x5a), "{pages:?} {len}");
                    let at = buffer.as_ptr() as usize;
                    let page = if pages == Pages::Huge { HUGE_PAGE } else { 4096 };
                    assert!(at >= end && at % page == begin, "{pages:?} {len}: {at:#x}");
                    buffer.fill(number as u8);
                    end = at + len;
                }
                assert!((0..3).all(|number| buffers.get(number).iter().all(|byte| *byte == number as u8)));
            }
        }
    }
}
