//! The measuring end: so many threads, each with a connection.

use super::files::{Zipf, memory, pattern};
use super::{Head, Kind, Plan, Row};
use crate::report::Latency;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes at a time of what has no messages.
const PIECE: usize = 256 << 10;

/// What one client has done since it was warm.
struct Pace {
    time: Duration,
    compute: Duration,
    warm: bool,
    start: Instant,
    operations: u64,
    bytes: u64,
    samples: Vec<u64>,
}

impl Pace {
    fn new(plan: &Plan) -> Pace {
        let start = Instant::now();
        Pace {
            time: plan.time,
            compute: plan.compute,
            warm: false,
            start,
            operations: 0,
            bytes: 0,
            samples: Vec::new(),
        }
    }

    /// Whether there is time for another one.
    fn goes_on(&mut self) -> bool {
        let elapsed = self.start.elapsed();
        if !self.warm && elapsed >= self.time.min(Duration::from_millis(100)) {
            (self.warm, self.start, self.operations, self.bytes) = (true, Instant::now(), 0, 0);
            self.samples.clear();
            return true;
        }
        !self.warm || elapsed < self.time
    }

    /// One is done.
    fn done(&mut self, bytes: u64) {
        self.operations += 1;
        self.bytes += bytes;
        if !self.compute.is_zero() {
            let until = Instant::now() + self.compute;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        }
    }

    fn took(&mut self, began: Instant) {
        self.samples.push(began.elapsed().as_nanos() as u64);
    }

    fn end(self) -> Part {
        let seconds = self.start.elapsed().as_secs_f64();
        Part { operations: self.operations, bytes: self.bytes, seconds, samples: self.samples }
    }
}

struct Part {
    operations: u64,
    bytes: u64,
    seconds: f64,
    samples: Vec<u64>,
}

pub(super) fn measure(at: SocketAddr, plan: &Plan) -> Result<Row, String> {
    let start = Barrier::new(plan.clients as usize);
    let cpu = cpu_seconds();
    let parts = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..plan.clients)
            .map(|number| {
                let start = &start;
                scope.spawn(move || {
                    let stream = connect(at);
                    // Also without a connection: the others wait for it.
                    start.wait();
                    client(at, stream?, plan, number)
                })
            })
            .collect();
        let part = |client: std::thread::ScopedJoinHandle<'_, io::Result<Part>>| match client.join() {
            Ok(part) => part.map_err(|e| format!("{} with {at}: {e}", plan.kind.name())),
            Err(_) => Err("a client panicked".to_owned()),
        };
        clients.into_iter().map(part).collect::<Result<Vec<_>, _>>()
    })?;
    let mut samples: Vec<u64> = parts.iter().flat_map(|part| part.samples.iter().copied()).collect();
    let scale = if plan.kind == Kind::Lat { 2000.0 } else { 1000.0 };
    Ok(Row {
        test: plan.kind.name(),
        size: plan.size,
        clients: plan.clients,
        bytes_per_second: parts.iter().map(|part| part.bytes as f64 / part.seconds).sum(),
        operations_per_second: parts.iter().map(|part| part.operations as f64 / part.seconds).sum(),
        latency: (!samples.is_empty()).then(|| Latency::of(&mut samples, scale)),
        seconds: parts.iter().map(|part| part.seconds).fold(0.0, f64::max),
        cpu_seconds: cpu_seconds() - cpu,
    })
}

fn cpu_seconds() -> f64 {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 * 1e-9
}

fn connect(at: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(at)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn client(at: SocketAddr, stream: TcpStream, plan: &Plan, number: u32) -> io::Result<Part> {
    if plan.kind == Kind::Web {
        return web(at, stream, plan, number);
    }
    let size = plan.size.expect("only documents differ in size");
    let mut pace = Pace::new(plan);
    let mut stream = &stream;
    stream.write_all(&Head { kind: plan.kind, size }.encode())?;
    let mut buffer = vec![0x5a; size as usize];
    match plan.kind {
        Kind::Lat => {
            while pace.goes_on() {
                let began = Instant::now();
                stream.write_all(&buffer)?;
                stream.read_exact(&mut buffer)?;
                pace.took(began);
                pace.done(size.into());
            }
        }
        Kind::In => {
            while pace.goes_on() {
                stream.write_all(&buffer)?;
                pace.done(size.into());
            }
            stream.shutdown(Shutdown::Write)?;
            // All of it has come there.
            stream.read_exact(&mut [0])?;
        }
        Kind::Out => {
            let mut buffer = vec![0; (size as usize).max(64 << 10)];
            while pace.goes_on() {
                match stream.read(&mut buffer)? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    // In parts of messages.
                    len => pace.done(len as u64),
                }
            }
            pace.operations = pace.bytes / u64::from(size);
        }
        Kind::Both => {
            let received = AtomicU64::new(0);
            let before = std::thread::scope(|scope| {
                let (mut incoming, received) = (stream, &received);
                let reader = scope.spawn(move || {
                    let mut buffer = vec![0; (size as usize).max(64 << 10)];
                    loop {
                        match incoming.read(&mut buffer) {
                            Ok(0) => return Ok(()),
                            Ok(len) => received.fetch_add(len as u64, Ordering::Relaxed),
                            Err(error) => return Err(error),
                        };
                    }
                });
                let mut before = 0;
                while pace.goes_on() {
                    if pace.operations == 0 {
                        before = received.load(Ordering::Relaxed);
                    }
                    stream.write_all(&buffer)?;
                    pace.done(size.into());
                }
                stream.shutdown(Shutdown::Write)?;
                reader.join().unwrap_or(Ok(()))?;
                Ok::<u64, io::Error>(before)
            })?;
            pace.bytes += received.into_inner() - before;
        }
        Kind::File => {
            // As a client that saves what it gets, in memory.
            let target = memory()?;
            let mut piece = vec![0; PIECE];
            while pace.goes_on() {
                let began = Instant::now();
                stream.write_all(&u64::from(size).to_be_bytes())?;
                receive(stream, size.into(), &mut piece, |at, bytes| target.write_all_at(bytes, at))?;
                pace.took(began);
                pace.done(size.into());
            }
        }
        Kind::Web => unreachable!("handled above"),
    }
    Ok(pace.end())
}

/// Receives so many bytes of a file, and looks at the first and the last.
fn receive(
    mut stream: &TcpStream,
    len: u64,
    piece: &mut [u8],
    mut take: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut at = 0;
    while at < len {
        let most = (len - at).min(piece.len() as u64) as usize;
        let got = stream.read(&mut piece[..most])?;
        let bytes = &piece[..got];
        let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        if *first != pattern(at) || *last != pattern(at + got as u64 - 1) {
            return Err(io::Error::other(format!("wrong bytes at {at} of {len}")));
        }
        take(at, bytes)?;
        at += got as u64;
    }
    Ok(())
}

fn web(at: SocketAddr, first: TcpStream, plan: &Plan, number: u32) -> io::Result<Part> {
    let mut zipf = Zipf::new(plan.zipf, 0x9e37_79b9_7f4a_7c15 ^ u64::from(number) << 7);
    let version = if plan.requests == 1 { "1.0" } else { "1.1" };
    let mut pace = Pace::new(plan);
    let mut piece = vec![0; PIECE];
    let mut connection = Some((first, plan.requests));
    while pace.goes_on() {
        let began = Instant::now();
        let (stream, left) = match connection.take() {
            Some((stream, left)) if left > 0 => (stream, left),
            _ => (connect(at)?, plan.requests),
        };
        let len = plan.size.unwrap_or_else(|| zipf.next());
        let request = format!("GET /{len} HTTP/{version}\r\nHost: {at}\r\n\r\n");
        (&stream).write_all(request.as_bytes())?;
        document(&stream, len.into(), &mut piece)?;
        pace.took(began);
        pace.done(len.into());
        connection = Some((stream, left - 1));
    }
    Ok(pace.end())
}

/// Receives one document.
fn document(mut stream: &TcpStream, len: u64, piece: &mut [u8]) -> io::Result<()> {
    let wrong = |what: &str| io::Error::other(format!("the answer to a request {what}"));
    let mut has = 0;
    let end = loop {
        match stream.read(&mut piece[has..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => has += got,
        }
        if let Some(end) = piece[..has].windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
        if has == piece.len() {
            return Err(wrong("has no end of its head"));
        }
    };
    let head = std::str::from_utf8(&piece[..end]).map_err(|_| wrong("is no text"))?;
    if !head.starts_with("HTTP/1.1 200 ") || !head.contains(&format!("Content-Length: {len}\r\n")) {
        return Err(wrong("is another one"));
    }
    let body = (has - end) as u64;
    if body > len || (body > 0 && piece[end] != pattern(0)) {
        return Err(wrong("has other bytes"));
    }
    let mut at = body;
    while at < len {
        let most = (len - at).min(piece.len() as u64) as usize;
        match stream.read(&mut piece[..most])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got if piece[0] == pattern(at) => at += got as u64,
            _ => return Err(wrong("has other bytes")),
        }
    }
    Ok(())
}
