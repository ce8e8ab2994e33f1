//! The iWARP device as its consumer holds it.

use super::completions::CompletionRing;
use super::config::Config;
use super::context::{Context, MAX_QUEUE, Queued};
use super::endpoint::Endpoint;
use super::listener::{ListeningSocket, begin_listening, begin_request};
use super::region::RegionHandle;
use super::shared::{CompletionQueueHandle, SharedHandle, SharedQueue};
use super::transport::Socket;
use super::wakeups::Sleeper;
use crate::provider::{CompletionQueueOps, DeviceOps, Event, ListenerOps, QueuePairOps, RegionOps, SharedReceiveOps};
use crate::reservation::Reservation;
use crate::{Device, ListenOptions, shm};
use rustix::time::Timespec;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use thruway_iwarp::connection::MAX_SGE;
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_rdma_types::{Access, DeviceAttributes, Error, Owner, QueuePairCaps, Result};
use thruway_tcp::Origin;

/// Longest spin before sleeping.
const SPIN_MAX: Duration = Duration::from_micros(50);

impl Config {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Error::Io`] if the system has no descriptors left.
    pub fn open(self) -> Result<Device> {
        Ok(Device::new(Arc::new(Handle(Context::open(self, true)?))))
    }
}

/// Opens a device all of whose connections go through shared memory.
pub(crate) fn open_shm(shm: shm::Config) -> Result<Device> {
    let config = Config { shm: Some(shm), ..Config::default() };
    Ok(Device::new(Arc::new(Handle(Context::open(config, false)?))))
}

/// The device as the consumer holds it.
struct Handle(Arc<Context>);

impl std::ops::Deref for Handle {
    type Target = Arc<Context>;

    fn deref(&self) -> &Arc<Context> {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Unanswered requests hold the context, and are refused when they are dropped.
        let mut events = self.events.lock_unpoisoned();
        self.abandoned.store(true, Ordering::SeqCst);
        let unheard = std::mem::take(&mut *events);
        drop(events);
        drop(unheard);
    }
}

impl DeviceOps for Handle {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn alloc_pd(&self) -> Result<u32> {
        // Never used again: one number for each of four thousand million.
        let number = self.next_pd.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_add(1));
        number.map_err(|_| Error::Limit { what: "protection domains", got: 1 << 32, limit: u32::MAX.into() })
    }

    fn free_pd(&self, _pd: u32) {}

    unsafe fn register(
        &self,
        pd: u32,
        ptr: *mut u8,
        len: usize,
        base: u64,
        access: Access,
        owner: Owner,
    ) -> Result<Arc<dyn RegionOps>> {
        // SAFETY: the caller's promise.
        let region = unsafe { self.table.register(pd, ptr, len, base, access, owner) }?;
        Ok(Arc::new(RegionHandle { table: Arc::clone(&self.table), region }))
    }

    fn create_cq(&self, capacity: usize) -> Result<Arc<dyn CompletionQueueOps>> {
        let limit = self.attributes.max_cqe;
        if capacity > limit {
            return Err(Error::Limit { what: "completion queue", got: capacity as u64, limit: limit as u64 });
        }
        let ring = Arc::new(CompletionRing::new(Arc::clone(&self.wakeups), capacity));
        Ok(Arc::new(CompletionQueueHandle { ring, ctx: Arc::clone(&self.0) }))
    }

    fn create_srq(&self, pd: u32, max_recv_wr: u32, max_sge: u32) -> Result<Arc<dyn SharedReceiveOps>> {
        Ok(Arc::new(SharedHandle(Arc::new(SharedQueue::new(Arc::clone(&self.0), pd, max_recv_wr, max_sge)))))
    }

    fn create_qp(
        &self,
        pd: u32,
        send_cq: &Arc<dyn CompletionQueueOps>,
        recv_cq: &Arc<dyn CompletionQueueOps>,
        caps: QueuePairCaps,
        shared: Option<&Arc<dyn SharedReceiveOps>>,
    ) -> Result<Arc<dyn QueuePairOps>> {
        for (what, got, limit) in [
            ("send queue", caps.max_send_wr, MAX_QUEUE),
            ("receive queue", caps.max_recv_wr, MAX_QUEUE),
            ("elements of a request", caps.max_sge, MAX_SGE as u32),
        ] {
            if got > limit {
                return Err(Error::Limit { what, got: got.into(), limit: limit.into() });
            }
        }
        let ring = |cq: &Arc<dyn CompletionQueueOps>| {
            let handle = cq.as_any().downcast_ref::<CompletionQueueHandle>();
            let ring = handle.filter(|h| Arc::ptr_eq(&h.ctx, &self.0)).map(|h| Arc::clone(&h.ring));
            ring.ok_or(Error::Unsupported("a completion queue of another device"))
        };
        let (send_cq, recv_cq) = (ring(send_cq)?, ring(recv_cq)?);
        let shared = shared.map(|srq| {
            let found = srq.as_any().downcast_ref::<SharedHandle>().map(|h| Arc::clone(&h.0));
            let found = found.filter(|s| Arc::ptr_eq(&s.ctx, &self.0) && s.receives.pd() == pd);
            found.ok_or(Error::Unsupported("a shared receive queue of another protection domain"))
        });
        let shared = shared.transpose()?;
        Reservation::take_both(&send_cq.room, caps.max_send_wr, &recv_cq.room, caps.max_recv_wr)?;
        if let Some(shared) = &shared {
            shared.room.join(&recv_cq).inspect_err(|_| send_cq.room.give_back(caps.max_send_wr))?;
        }
        let id = self.new_id();
        let number = self.new_qp_num();
        let qp = Arc::new(Endpoint::new(id, number, pd, Arc::clone(&self.0), send_cq, recv_cq, caps, shared));
        self.insert_pair(Arc::clone(&qp) as _);
        Ok(qp)
    }

    fn listen(&self, addr: SocketAddr, options: &ListenOptions) -> Result<Box<dyn ListenerOps>> {
        let by_shm = |addr, config| {
            let socket = ListeningSocket::of_shm(self.new_id(), addr, options, config);
            socket.and_then(|socket| begin_listening(self, socket))
        };
        if let Some(config) = self.config().shm.as_ref().filter(|_| !self.has_tcp) {
            return Ok(Box::new(by_shm(addr, config)?));
        }
        let mut listener = begin_listening(self, ListeningSocket::bind(self.new_id(), addr, options)?)?;
        if let Some(config) = &self.config().shm {
            match by_shm(listener.addr, config) {
                Ok(beside) => listener.beside = Some(Box::new(beside)),
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::Unsupported => {
                    tracing::debug!(%source, "processes of this host connect by TCP only");
                }
                Err(error) => tracing::warn!(%error, "processes of this host connect by TCP only"),
            }
        }
        Ok(Box::new(listener))
    }

    fn adopt(&self, stream: TcpStream) -> Result<()> {
        if !self.has_tcp {
            return Err(Error::Unsupported("TCP connections on a device for shared memory"));
        }
        let peer = stream.peer_addr().map_err(|e| Error::io("getting the peer's address", e))?;
        let origin = Origin::of_stream(&stream, peer);
        begin_request(self, Socket::Tcp(stream), (peer, origin), false)
    }

    fn progress(&self) {
        self.drive();
    }

    fn poll_event(&self) -> Option<Event> {
        let next = || self.events.lock_unpoisoned().pop_front();
        let event = next().or_else(|| {
            self.drive();
            next()
        });
        if event.is_some() {
            self.wakeups.discount_unpolled(1);
        }
        event.map(|event| match event {
            Queued::Request(request) => request.into_event(),
            Queued::Other(event) => event,
        })
    }

    fn arm(&self) -> bool {
        self.wakeups.doorbell.arm(|| self.leave_nothing_behind())
    }

    fn wake(&self) {
        self.wakeups.rouse(self.wakeups.doorbell.wake());
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn wait(&self, timeout: Option<Duration>, ready: &dyn Fn() -> bool) -> Result<()> {
        let is_due = || self.wakeups.doorbell.has_rung() || ready();
        if is_due() {
            return Ok(());
        }
        let spin = Duration::from_nanos(self.spin.load(Ordering::Relaxed));
        let start = Instant::now();
        loop {
            self.drive();
            if is_due() {
                let longer = (spin * 2).clamp(Duration::from_micros(2), SPIN_MAX);
                self.spin.store(longer.as_nanos() as u64, Ordering::Relaxed);
                return Ok(());
            }
            let spun = start.elapsed();
            if spun >= spin || timeout.is_some_and(|t| spun >= t) {
                break;
            }
            std::hint::spin_loop();
        }
        self.spin.store(spin.as_nanos() as u64 / 2, Ordering::Relaxed);
        let Some(sleeper) = Sleeper::enter(&self.wakeups, || self.leave_nothing_behind())? else { return Ok(()) };
        // The last poll of the connections may have placed the awaited data. Data that arrives later ends the sleep.
        if ready() {
            return Ok(());
        }
        let limit = timeout.map(|t| t.saturating_sub(start.elapsed()));
        let limit = limit.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
        use rustix::event::{PollFd, PollFlags};
        let mut fds = [PollFd::new(&self.epoll, PollFlags::IN), PollFd::new(&sleeper.fd, PollFlags::IN)];
        let slept = Instant::now();
        match rustix::event::poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("waiting", e)),
        }
        drop(sleeper);
        // The caller learns it from the return value.
        self.wakeups.doorbell.has_rung();
        // Woken so soon that a little spinning would have caught it: spin next time.
        if slept.elapsed() < SPIN_MAX {
            let longer = (spin + Duration::from_micros(5)).min(SPIN_MAX);
            self.spin.store(longer.as_nanos() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ConnectParams, ConnectionEvent, ListenOptions};
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;

    /// A peer always has more to be received than one turn takes.
    #[test]
    fn a_flooding_connection_is_in_the_queue_of_ready_ones_once() {
        let ctx = Context::open(Config { crc: false, ..Config::default() }, true).unwrap();
        let device = Device::new(Arc::new(Handle(Arc::clone(&ctx))));
        let listener = device.listen("127.0.0.1:0".parse().unwrap(), &ListenOptions::default()).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(512).unwrap());
        let mut peer = TcpStream::connect(listener.local_addr()).unwrap();
        peer.write_all(b"MPA ID Req Frame\0\x01\0\0").unwrap();
        let qp = pd.create_qp(&cq, &cq, QueuePairCaps::default()).unwrap();
        let request = loop {
            if let Some(ConnectionEvent::Request(request)) = device.poll_event() {
                break request;
            }
            std::thread::yield_now();
        };
        request.accept(&qp, &ConnectParams::default()).unwrap();
        device.progress();
        peer.read_exact(&mut [0; 20]).unwrap();
        peer.set_nonblocking(true).unwrap();
        // RDMA Writes of no bytes (RFC 5040, 5.2): length field, header, CRC field.
        let frame = [&[0, 14, 0xc1, 0x40][..], &[0; 12], &[0; 4]].concat();
        let flood = frame.repeat(100_000);
        let (mut sent, mut turns) = (0, 0);
        let start = Instant::now();
        while turns < 20 {
            assert!(start.elapsed() < Duration::from_secs(60), "only {turns} turns were not enough for what had come");
            // Until the buffers of both sockets are full.
            loop {
                match peer.write(&flood[sent % frame.len()..]) {
                    Ok(n) => sent += n,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) => panic!("{e}"),
                }
            }
            cq.poll(&mut Vec::new(), 64);
            let ready = ctx.ready.lock().unwrap().len();
            assert!(ready <= 1, "{ready} turns in the next pass");
            turns += ready;
            assert_eq!(qp.error(), None);
        }
    }
}
