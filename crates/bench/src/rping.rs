//! The protocol of `rping` from rdmacm-utils, in both roles: the client advertises a buffer, the
//! server reads it, the client advertises another, the server writes what it read there, and the
//! client compares. It proves interoperation with any RDMA implementation that has rping.

use super::{OnOff, Where, resolve};
use clap::Args;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_cli::Common;
use thruway_fabric::*;

/// Largest buffer, as in rping.
const SIZE_MAX: u32 = 64 << 10;
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of an advertisement: address (64), key (32), size (32), network order.
const INFO_LEN: usize = 16;

const WR_RECV: u64 = 1;
const WR_SEND: u64 = 2;
const WR_READ: u64 = 3;
const WR_WRITE: u64 = 4;

/// Arguments of `thruway bench rping`.
#[derive(Args)]
pub(super) struct RpingArgs {
    #[command(flatten)]
    place: Where,
    /// Pings
    #[arg(long, short = 'C', default_value_t = 100)]
    count: u32,
    /// Bytes of a ping
    #[arg(long, short = 'S', default_value_t = 64, value_parser = clap::value_parser!(u32).range(16..=SIZE_MAX as i64))]
    size: u32,
    /// Serve one client and exit (with --listen)
    #[arg(long)]
    once: bool,
    /// CRC32C on every FPDU
    #[arg(long, value_enum, default_value_t = OnOff::On)]
    crc: OnOff,
    /// Highest MPA revision
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    revision: u8,
}

pub(super) fn run(args: &RpingArgs, common: &Common) -> Result<(), String> {
    let config = iwarp::Config { crc: args.crc == OnOff::On, revision: args.revision, ..iwarp::Config::default() };
    if let Some(addr) = args.place.listen {
        let server = Server::start(addr, config)?;
        if !common.quiet {
            thruway_cli::say_error!("listening on {}", server.listener.local_addr());
        }
        return server.serve(args.once, common.verbose > 0);
    }
    let seconds = if let Some(host) = &args.place.connect {
        ping(resolve(host)?, config, args)?
    } else {
        let server = Server::start(SocketAddr::from(([127, 0, 0, 1], 0)), config.clone())?;
        let addr = server.listener.local_addr();
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| server.serve(true, false));
            let seconds = ping(addr, config, args)?;
            serving.join().map_err(|_| "the serving thread panicked".to_string())??;
            Ok::<f64, String>(seconds)
        })?
    };
    if common.json {
        let row = serde_json::json!([{
            "op": "rping", "provider": "iwarp", "size": args.size, "depth": 1, "qps": 1,
            "bytes_per_second": f64::from(args.size) * f64::from(args.count) / seconds,
            "ops_per_second": f64::from(args.count) / seconds,
            "lat_us_p50": seconds * 1e6 / f64::from(args.count),
            "lat_us_p99": seconds * 1e6 / f64::from(args.count),
            "cpu_seconds": super::client::cpu_seconds(),
        }]);
        thruway_cli::say!("{row:#}");
    } else if !common.quiet {
        thruway_cli::say!(
            "{} pings of {} bytes, every one verified, {:.2} us each",
            args.count,
            args.size,
            seconds * 1e6 / f64::from(args.count)
        );
    }
    Ok(())
}

/// A queue pair with the buffers rping uses.
struct Peer {
    device: Device,
    cq: CompletionQueue,
    qp: QueuePair,
    /// Advertisements: received at 0, sent from 16. Data: from `DATA` on, twice `SIZE_MAX`.
    buffer: Arc<Buffer>,
    mr: MemoryRegion,
    seen: Vec<WorkCompletion>,
}

const DATA: usize = 4096;
const SECOND: usize = DATA + SIZE_MAX as usize;

impl Peer {
    fn new(device: &Device) -> Result<Peer> {
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(32)?;
        let qp = pd.create_qp(&cq, &cq, QueuePairCaps { max_send_wr: 8, max_recv_wr: 8, max_sge: 1 })?;
        let buffer = Arc::new(Buffer::new(SECOND + SIZE_MAX as usize)?);
        let mr = pd.register(&buffer, Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        let peer = Peer { device: device.clone(), cq, qp, buffer, mr, seen: Vec::new() };
        peer.expect()?;
        Ok(peer)
    }

    fn params() -> ConnectParams {
        ConnectParams { ird: 1, ord: 1, timeout: REPLY_TIMEOUT, ..ConnectParams::default() }
    }

    fn expect(&self) -> Result<()> {
        self.qp.post_recv(&RecvRequest { wr_id: WR_RECV, sges: &[self.mr.sge(0, INFO_LEN as u32)] })
    }

    fn post(&self, wr_id: u64, op: SendOp, sge: Sge) -> Result<()> {
        let sges = [sge];
        self.qp.post_send(&SendRequest { wr_id, op, payload: Payload::Sges(&sges), flags: SendFlags::SIGNALED })
    }

    fn advertise(&self, offset: usize, size: u32) -> Result<()> {
        let RemoteAddr { addr, rkey } = self.mr.remote(offset);
        let mut info = [0; INFO_LEN];
        info[..8].copy_from_slice(&addr.to_be_bytes());
        info[8..12].copy_from_slice(&rkey.to_be_bytes());
        info[12..].copy_from_slice(&size.to_be_bytes());
        self.buffer.write(INFO_LEN, &info);
        self.post(WR_SEND, SendOp::Send { invalidate: None }, self.mr.sge(INFO_LEN, INFO_LEN as u32))
    }

    /// The advertisement just received.
    fn advertised(&self) -> (RemoteAddr, u32) {
        let mut info = [0; INFO_LEN];
        self.buffer.read(0, &mut info);
        let u32_at = |at: usize| u32::from_be_bytes(info[at..at + 4].try_into().expect("4 bytes"));
        let addr = u64::from_be_bytes(info[..8].try_into().expect("8 bytes"));
        (RemoteAddr { addr, rkey: u32_at(8) }, u32_at(12))
    }

    /// Waits for a completion; `None` if the peer closed in order.
    fn wait(&mut self, wr_id: u64) -> Result<Option<WorkCompletion>, String> {
        let start = Instant::now();
        loop {
            if let Some(at) = self.seen.iter().position(|wc| wc.wr_id == wr_id) {
                let wc = self.seen.remove(at);
                return match (wc.status, self.qp.error()) {
                    (Status::Success, _) => Ok(Some(wc)),
                    (_, Some(ConnectionError::Closed)) => Ok(None),
                    (_, Some(cause)) => Err(cause.to_string()),
                    (status, None) => Err(format!("{:?} failed: {status:?}", wc.op)),
                };
            }
            if self.cq.poll(&mut self.seen, 8) == 0 {
                if start.elapsed() > REPLY_TIMEOUT {
                    return Err("the peer is silent".into());
                }
                self.device.wait(Some(REPLY_TIMEOUT)).map_err(|e| e.to_string())?;
            }
        }
    }

    /// As [`Peer::wait`], where the peer must not close.
    fn need(&mut self, wr_id: u64) -> Result<WorkCompletion, String> {
        self.wait(wr_id)?.ok_or_else(|| "the peer closed in mid-ping".into())
    }
}

fn ping(addr: SocketAddr, config: iwarp::Config, args: &RpingArgs) -> Result<f64, String> {
    let fail = |e: Error| e.to_string();
    let device = config.open().map_err(fail)?;
    let mut peer = Peer::new(&device).map_err(fail)?;
    peer.qp.connect(addr, &Peer::params()).map_err(fail)?;
    loop {
        match device.poll_event() {
            Some(ConnectionEvent::Established { .. }) => break,
            Some(ConnectionEvent::Disconnected { cause, .. }) => return Err(format!("{addr}: {cause}")),
            _ => device.wait(Some(REPLY_TIMEOUT)).map_err(fail)?,
        }
    }
    tracing::info!("connected: {}", peer.qp.info().map(|i| i.detail).unwrap_or_default());
    let start = Instant::now();
    for n in 0..args.count {
        let text = pattern(n, args.size as usize);
        peer.buffer.write(DATA, &text);
        for offset in [DATA, SECOND] {
            peer.advertise(offset, args.size).map_err(fail)?;
            peer.need(WR_SEND)?;
            peer.need(WR_RECV)?;
            peer.expect().map_err(fail)?;
        }
        let mut back = vec![0; args.size as usize];
        peer.buffer.read(SECOND, &mut back);
        if back != text {
            return Err(format!("ping {n} came back changed"));
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    peer.qp.disconnect();
    Ok(seconds)
}

/// What rping sends: `rdma-ping-N: ` and the printable characters from a start that moves on.
fn pattern(n: u32, size: usize) -> Vec<u8> {
    let mut text = format!("rdma-ping-{n}: ").into_bytes();
    let mut c = b'A' + (n % 58) as u8;
    while text.len() < size - 1 {
        text.push(c);
        c = if c >= b'z' { b'A' } else { c + 1 };
    }
    text.truncate(size - 1);
    text.push(0);
    text
}

struct Server {
    device: Device,
    listener: Listener,
}

impl Server {
    fn start(addr: SocketAddr, config: iwarp::Config) -> Result<Server, String> {
        let device = config.open().map_err(|e| e.to_string())?;
        let listener = device.listen(addr, &ListenOptions::default()).map_err(|e| e.to_string())?;
        Ok(Server { device, listener })
    }

    /// Serves one client after another, as rping's server does.
    fn serve(self, once: bool, verbose: bool) -> Result<(), String> {
        loop {
            let Some(ConnectionEvent::Request(request)) = self.device.poll_event() else {
                self.device.wait(Some(REPLY_TIMEOUT)).map_err(|e| e.to_string())?;
                continue;
            };
            let from = request.peer();
            let mut peer = Peer::new(&self.device).map_err(|e| e.to_string())?;
            request.accept(&peer.qp, &Peer::params()).map_err(|e| e.to_string())?;
            let result = serve_client(&mut peer, verbose);
            match (result, once) {
                (result, true) => return result.map_err(|e| format!("{from}: {e}")),
                (Ok(()), false) => {}
                (Err(message), false) => thruway_cli::say_error!("thruway bench rping: {from}: {message}"),
            }
        }
    }
}

fn serve_client(peer: &mut Peer, verbose: bool) -> Result<(), String> {
    let fail = |e: Error| e.to_string();
    loop {
        // Source advertisement.
        if peer.wait(WR_RECV)?.is_none() {
            return Ok(());
        }
        let (source, size) = peer.advertised();
        if size > SIZE_MAX {
            return Err(format!("the client advertises {size} bytes, more than rping's {SIZE_MAX}"));
        }
        peer.expect().map_err(fail)?;
        peer.post(WR_READ, SendOp::Read { remote: source }, peer.mr.sge(DATA, size)).map_err(fail)?;
        peer.need(WR_READ)?;
        if verbose {
            let mut text = vec![0; size.saturating_sub(1) as usize];
            peer.buffer.read(DATA, &mut text);
            thruway_cli::say!("server ping data: {}", String::from_utf8_lossy(&text));
        }
        peer.advertise(DATA, size).map_err(fail)?;
        peer.need(WR_SEND)?;
        // Sink advertisement.
        peer.need(WR_RECV)?;
        let (sink, size) = peer.advertised();
        if size > SIZE_MAX {
            return Err(format!("the client advertises {size} bytes, more than rping's {SIZE_MAX}"));
        }
        peer.expect().map_err(fail)?;
        let op = SendOp::Write { remote: sink, immediate: None };
        peer.post(WR_WRITE, op, peer.mr.sge(DATA, size)).map_err(fail)?;
        peer.need(WR_WRITE)?;
        peer.advertise(DATA, size).map_err(fail)?;
        peer.need(WR_SEND)?;
    }
}
