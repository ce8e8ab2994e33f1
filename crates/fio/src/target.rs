//! The end that lends memory.

use crate::GREETING;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use thruway_fabric::{
    Access, Buffer, CompletionQueue, ConnectParams, ConnectionEvent, ConnectionRequest, Device, Error, ListenOptions,
    Listener, MemoryRegion, ProtectionDomain, Provider, QueuePair, QueuePairCaps, Result,
};

/// Connections served at a time; more are refused.
const CONNECTIONS_MAX: usize = 1024;

/// Memory that anybody who connects may read and write, like a disk that several hosts share.
pub struct Target {
    device: Device,
    listener: Listener,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    memory: MemoryRegion,
    len: u64,
    connections: HashMap<u32, QueuePair>,
}

/// What a caller is answered: where the memory is, by which key, and how much.
pub(crate) fn answer(addr: u64, rkey: u32, len: u64) -> Vec<u8> {
    [&GREETING[..], &addr.to_be_bytes(), &rkey.to_be_bytes(), &len.to_be_bytes()].concat()
}

/// Address, key and length out of an answer; `None` for anything else. What follows is padding of the transport's.
pub fn greeting_of(answer: &[u8]) -> Option<(u64, u32, u64)> {
    let rest = answer.strip_prefix(&GREETING)?;
    let (addr, rest) = rest.split_first_chunk::<8>()?;
    let (rkey, rest) = rest.split_first_chunk::<4>()?;
    let (len, _) = rest.split_first_chunk::<8>()?;
    let (addr, len) = (u64::from_be_bytes(*addr), u64::from_be_bytes(*len));
    addr.checked_add(len)?;
    Some((addr, u32::from_be_bytes(*rkey), len))
}

impl Target {
    /// Lends `len` bytes, zero at first, at this address.
    ///
    /// # Errors
    /// As those of opening a device, of [`Buffer::new`], and of listening.
    pub fn open(provider: &Provider, addr: SocketAddr, len: usize) -> Result<Target> {
        let device = provider.open()?;
        let pd = device.alloc_pd().unwrap();
        let buffer = Arc::new(Buffer::new(len)?);
        let memory = pd.register(&buffer, Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        let cq = device.create_cq((2 * CONNECTIONS_MAX).min(device.attributes().max_cqe))?;
        let listener = device.listen(addr, &ListenOptions::default())?;
        Ok(Target { device, listener, cq, pd, memory, len: len as u64, connections: HashMap::new() })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Serves until `stop` says so; it is asked every tenth of a second.
    ///
    /// # Errors
    /// [`Error::Io`] if the system cannot wait, or the device is gone.
    pub fn serve(mut self, stop: impl Fn() -> bool) -> Result<()> {
        let mut ignored = Vec::new();
        while !stop() {
            while let Some(event) = self.device.poll_event() {
                match event {
                    ConnectionEvent::Request(request) => {
                        let peer = request.peer();
                        if let Err(error) = self.accept(request) {
                            tracing::warn!(%peer, %error, "cannot serve client");
                        }
                    }
                    ConnectionEvent::Disconnected { qp_num, cause } => {
                        tracing::info!(qp_num, %cause, "connection closed");
                        self.connections.remove(&qp_num);
                    }
                    _ => {}
                }
            }
            // Nothing is posted here but what connections that end give back.
            while self.cq.poll(&mut ignored, 64) > 0 {
                ignored.clear();
            }
            self.device.wait(Some(Duration::from_millis(100)))?;
        }
        Ok(())
    }

    fn accept(&mut self, request: ConnectionRequest) -> Result<()> {
        if !request.private_data().starts_with(&GREETING) {
            request.reject(b"this is memory for the fio engine");
            return Ok(());
        }
        if self.connections.len() >= CONNECTIONS_MAX {
            request.reject(b"too many connections");
            return Err(Error::Limit {
                what: "connections",
                got: CONNECTIONS_MAX as u64 + 1,
                limit: CONNECTIONS_MAX as u64,
            });
        }
        let caps = QueuePairCaps { max_send_wr: 1, max_recv_wr: 1, max_sge: 1 };
        let qp = self.pd.create_qp(&self.cq, &self.cq, caps)?;
        let private_data = answer(self.memory.addr(), self.memory.rkey(), self.len);
        request.accept(&qp, &ConnectParams { private_data, ..ConnectParams::default() })?;
        self.connections.insert(qp.number(), qp);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_whole_or_not_at_all() {
        let told = answer(0x1234_5678_9abc, 77, 1 << 30);
        assert_eq!(greeting_of(&told), Some((0x1234_5678_9abc, 77, 1 << 30)));
        assert_eq!(greeting_of(&[told.as_slice(), &[0; 30]].concat()), Some((0x1234_5678_9abc, 77, 1 << 30)));
        assert!((0..told.len()).all(|n| greeting_of(&told[..n]).is_none()));
        assert_eq!(greeting_of(&answer(u64::MAX, 1, 2)), None, "an end that is nowhere");
    }
}
