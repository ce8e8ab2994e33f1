//! The end that works on memory lent by another.

use crate::{GREETING, greeting_of};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_fabric::{
    Access, Buffer, CompletionQueue, ConnectParams, ConnectionError, ConnectionEvent, Device, Error, MemoryRegion,
    Payload, ProtectionDomain, Provider, QueuePair, QueuePairCaps, RemoteAddr, Result, SendFlags, SendOp, SendRequest,
    Sge, Status, WorkCompletion,
};

/// Connected memory of another process.
pub struct Remote {
    device: Device,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
    /// Where a read lands that is only to prove that the writes before it are there.
    proof: MemoryRegion,
    /// What requests read into and write from.
    local: Option<MemoryRegion>,
    addr: u64,
    rkey: u32,
    len: u64,
    completions: Vec<WorkCompletion>,
}

/// A request that is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// As it was posted.
    pub id: u64,
    /// It did what it should.
    pub success: bool,
}

impl Remote {
    /// Connects to memory, for `depth` requests in progress.
    ///
    /// # Errors
    /// [`Error::Connection`] if no server lends memory there, and those of making a device and a queue pair.
    pub fn open(provider: &Provider, peer: SocketAddr, depth: u32) -> Result<Remote> {
        let device = provider.open()?;
        let pd = device.alloc_pd().unwrap();
        // One more for the proof.
        let depth = depth.saturating_add(1);
        let cq = device.create_cq(depth as usize + 1)?;
        let qp = pd.create_qp(&cq, &cq, QueuePairCaps { max_send_wr: depth, max_recv_wr: 1, max_sge: 1 })?;
        let proof = pd.register(&Arc::new(Buffer::new(8)?), Access::LOCAL_WRITE)?;
        let params = ConnectParams { private_data: GREETING.to_vec(), ..ConnectParams::default() };
        let deadline = Instant::now() + params.timeout + Duration::from_secs(1);
        qp.connect(peer, &params)?;
        let told = loop {
            match device.poll_event() {
                Some(ConnectionEvent::Established { private_data, .. }) => break private_data,
                Some(ConnectionEvent::Disconnected { cause, .. }) => return Err(Error::Connection { peer, cause }),
                _ if Instant::now() > deadline => {
                    return Err(Error::Connection { peer, cause: ConnectionError::TimedOut });
                }
                _ => device.wait(Some(Duration::from_millis(100)))?,
            }
        };
        let none = ConnectionError::Lost("it lends no memory (`thruway bench region` does)".into());
        let (addr, rkey, len) = greeting_of(&told).ok_or(Error::Connection { peer, cause: none })?;
        Ok(Remote { device, pd, cq, qp, proof, local: None, addr, rkey, len, completions: Vec::new() })
    }

    /// Bytes of the memory.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Registers the memory that requests read into and write from.
    ///
    /// # Safety
    /// As of [`ProtectionDomain::register_raw`], until the `Remote` is dropped.
    ///
    /// # Errors
    /// As of [`ProtectionDomain::register_raw`].
    pub unsafe fn register(&mut self, ptr: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise; the region goes with the `Remote`.
        self.local = Some(unsafe { self.pd.register_raw(ptr, len, Access::LOCAL_WRITE, Arc::new(())) }?);
        Ok(())
    }

    /// Starts a read into, or a write from, `len` bytes at `local`, which must be registered. False if the queue is full.
    ///
    /// # Errors
    /// [`Error::LocalProtection`] for memory that is not registered, [`Error::Limit`] past the end of what is lent,
    /// [`Error::State`] once the connection has ended.
    pub fn start(&self, id: u64, write: bool, local: u64, len: u32, offset: u64) -> Result<bool> {
        if offset.checked_add(len.into()).is_none_or(|end| end > self.len) {
            return Err(Error::Limit {
                what: "end of a request",
                got: offset.saturating_add(len.into()),
                limit: self.len,
            });
        }
        let remote = RemoteAddr { addr: self.addr + offset, rkey: self.rkey };
        let op = if write { SendOp::Write { remote, immediate: None } } else { SendOp::Read { remote } };
        let lkey = self.local.as_ref().map_or(0, MemoryRegion::lkey);
        self.post(id, op, Sge { addr: local, len, lkey })
    }

    /// Starts a request that is done when every write before it is in the other end's memory: a read, because a write is
    /// done when the network has taken it.
    ///
    /// # Errors
    /// As of [`Remote::start`].
    pub fn sync(&self, id: u64) -> Result<bool> {
        self.post(id, SendOp::Read { remote: RemoteAddr { addr: self.addr, rkey: self.rkey } }, self.proof.sge(0, 1))
    }

    fn post(&self, wr_id: u64, op: SendOp, sge: Sge) -> Result<bool> {
        let sges = [sge];
        let request = SendRequest { wr_id, op, payload: Payload::Sges(&sges), flags: SendFlags::SIGNALED };
        match self.qp.post_send(&request) {
            Ok(()) => Ok(true),
            Err(Error::QueueFull(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Appends what is done to `out`, at most `max`, once there are `min` or the time is up.
    ///
    /// # Errors
    /// [`Error::Io`] if the system cannot wait, or the device is gone.
    pub fn finished(&mut self, out: &mut Vec<Finished>, min: usize, max: usize, limit: Option<Duration>) -> Result<()> {
        let start = Instant::now();
        loop {
            self.cq.poll(&mut self.completions, max - out.len());
            out.extend(
                self.completions.drain(..).map(|wc| Finished { id: wc.wr_id, success: wc.status == Status::Success }),
            );
            let left = limit.map(|limit| limit.saturating_sub(start.elapsed()));
            if out.len() >= min || left == Some(Duration::ZERO) {
                return Ok(());
            }
            while self.device.poll_event().is_some() {}
            self.device.wait(left)?;
        }
    }

    /// Why the connection has ended, if it has.
    pub fn error(&self) -> Option<ConnectionError> {
        self.qp.error()
    }
}
