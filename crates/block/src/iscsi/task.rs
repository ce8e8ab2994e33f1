//! One command in progress: its data in both directions (RFC 7143 4.2.5 and 11.7).

use super::connection::{Advertised, Carrier, Connection};
use super::pdu::{Header, NO_TAG, op};
use crate::chunk_ranges::chunk_ranges;
use crate::scsi::{Nexus, Outcome, Status, Step, Transfer};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::rc::Rc;
use thruway_engine::Segment;
use thruway_fabric::RemoteAddr;
use thruway_server::rdma::Channel;
use thruway_server::{Body, Buffers};
use tokio::sync::Notify;

/// A command in progress.
pub(super) struct Task {
    connection: Rc<Connection>,
    pub tag: u32,
    lun: [u8; 8],
    expected: u64,
    writes: bool,
    outgoing: RefCell<Outgoing>,
    incoming: RefCell<Incoming>,
    arrived: Notify,
    aborted: Cell<bool>,
    /// Of that being so.
    abortion: Notify,
    pub lun_number: Option<u16>,
    advertised: Advertised,
    /// Bytes that came unasked: advertised buffers begin behind them.
    unasked_len: Cell<u64>,
    /// RDMA Reads in progress.
    fetching: Cell<usize>,
}

/// Data-In.
#[derive(Default)]
struct Outgoing {
    /// Bytes sent.
    next: u64,
    /// Pieces that came before their turn.
    waiting: BTreeMap<u64, Body>,
    data_sn: u32,
    /// The last PDU so far: if none follows, it ends the sequence and carries the status.
    held: Option<(Header, Body)>,
}

/// Data-Out.
#[derive(Default)]
struct Incoming {
    arrived: VecDeque<(u64, Segment)>,
    /// Everything before has been sent unasked or been asked for.
    asked: u64,
    /// More is coming unasked.
    unsolicited: bool,
    /// DataSN of the next PDU of it.
    unsolicited_sn: u32,
    bursts: HashMap<u32, Burst>,
    r2t_sn: u32,
    failed: bool,
}

/// A solicited range.
struct Burst {
    next: u64,
    end: u64,
    segments: VecDeque<Segment>,
    /// Bytes of the first segment that are there.
    filled: usize,
    /// DataSN of the next PDU.
    data_sn: u32,
}

impl Task {
    pub(super) fn new(connection: &Rc<Connection>, header: &Header, advertised: Advertised) -> Task {
        let mut lun = [0; 8];
        lun.copy_from_slice(&header.0[8..16]);
        let writes = header.0[1] & 0x20 != 0;
        let incoming = Incoming { unsolicited: writes && !header.is_final(), ..Incoming::default() };
        Task {
            connection: Rc::clone(connection),
            tag: header.tag(),
            lun,
            expected: header.get32(20).into(),
            writes,
            outgoing: RefCell::default(),
            incoming: RefCell::new(incoming),
            arrived: Notify::new(),
            aborted: Cell::new(false),
            abortion: Notify::new(),
            lun_number: header.lun(),
            advertised,
            unasked_len: Cell::new(0),
            fetching: Cell::new(0),
        }
    }

    /// Nothing more is sent for it, and nothing asked for.
    pub(super) fn abort(&self) {
        self.aborted.set(true);
        self.arrived.notify_one();
        self.abortion.notify_waiters();
    }

    /// Whose it is.
    pub(super) fn nexus(&self) -> &Nexus {
        self.connection.nexus()
    }

    /// Resolves when it has been aborted.
    async fn until_aborted(&self) {
        loop {
            let told = self.abortion.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if self.aborted.get() {
                return;
            }
            told.await;
        }
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.get()
    }

    /// Data that came unasked, with the command or behind it, in order. False if there was no right to it.
    pub(super) fn unasked(&self, segment: Segment) -> bool {
        let mut incoming = self.incoming.borrow_mut();
        let (at, end) = (incoming.asked, incoming.asked + segment.len() as u64);
        if !self.writes || end > self.expected || end > self.connection.params.first_burst.into() {
            return false;
        }
        incoming.asked = end;
        self.unasked_len.set(end);
        incoming.arrived.push_back((at, segment));
        self.arrived.notify_one();
        true
    }

    /// More will come unasked.
    pub(super) fn awaits_unasked(&self) -> bool {
        self.incoming.borrow().unsolicited
    }

    /// Whether a PDU with these is the next of those that come unasked.
    pub(super) fn unasked_turn(&self, data_sn: u32, offset: u64) -> bool {
        let mut incoming = self.incoming.borrow_mut();
        let right = incoming.unsolicited && incoming.asked == offset && incoming.unsolicited_sn == data_sn;
        incoming.unsolicited_sn += 1;
        right
    }

    /// The last of the unasked data has come.
    pub(super) fn unasked_end(&self) {
        self.incoming.borrow_mut().unsolicited = false;
        self.arrived.notify_one();
    }

    /// The place for solicited bytes: the part of the segment they go to first. `None` if nobody asked for
    /// them.
    pub(super) fn place(&self, transfer_tag: u32, data_sn: u32, offset: u64, len: usize) -> Option<Place<'_>> {
        let mut incoming = self.incoming.borrow_mut();
        let burst = incoming.bursts.get_mut(&transfer_tag)?;
        let next = burst.next == offset && burst.data_sn == data_sn && len as u64 <= burst.end - burst.next;
        burst.data_sn += 1;
        next.then_some(Place { task: self, transfer_tag })
    }

    /// What came is not what was to come: the command fails, with what it had asked for (RFC 7143 7.9).
    pub(super) fn fail(&self) {
        let mut incoming = self.incoming.borrow_mut();
        incoming.failed = true;
        incoming.bursts.clear();
        self.arrived.notify_one();
    }

    /// The initiator says that a burst has come to its end.
    pub(super) fn burst_end(&self, transfer_tag: u32) {
        let mut incoming = self.incoming.borrow_mut();
        if let Some(burst) = incoming.bursts.remove(&transfer_tag) {
            incoming.failed |= burst.next != burst.end;
        }
        self.arrived.notify_one();
    }

    /// Asks for the next burst.
    async fn solicit(&self) -> io::Result<()> {
        let at = self.incoming.borrow().asked;
        let params = &self.connection.params;
        let len = (self.expected - at).min(params.max_burst.into());
        let lens: Vec<usize> = chunk_ranges(at, len, self.connection.chunk).map(|(_, len)| len).collect();
        let segments = self.connection.writes.segments(&lens).await?;
        let transfer_tag = self.connection.transfer_tag();
        let mut header = Header::new(op::R2T);
        header.0[8..16].copy_from_slice(&self.lun);
        header.set_tag(self.tag);
        header.set32(20, transfer_tag);
        {
            let mut incoming = self.incoming.borrow_mut();
            header.set32(36, incoming.r2t_sn);
            incoming.r2t_sn += 1;
            incoming.asked = at + len;
            let burst = Burst { next: at, end: at + len, segments: segments.into(), filled: 0, data_sn: 0 };
            incoming.bursts.insert(transfer_tag, burst);
        }
        header.set32(40, at as u32);
        header.set32(44, len as u32);
        self.connection.send_unnumbered(header, Body::Empty);
        Ok(())
    }

    /// Sends a body in PDUs; the last is held until it is known what follows it.
    fn emit(&self, outgoing: &mut Outgoing, mut body: Body) {
        let params = &self.connection.params;
        while !body.is_empty() {
            let in_burst = outgoing.next % u64::from(params.max_burst);
            let room = u64::from(params.max_burst) - in_burst;
            let len = body.len().min(params.send_max as usize).min(room as usize);
            let rest = body.split_off(len);
            let now = std::mem::replace(&mut body, rest);
            let mut header = Header::new(op::DATA_IN);
            header.0[8..16].copy_from_slice(&self.lun);
            header.set_tag(self.tag);
            header.set32(20, NO_TAG);
            header.set32(36, outgoing.data_sn);
            header.set32(40, outgoing.next as u32);
            outgoing.data_sn += 1;
            outgoing.next += len as u64;
            let burst_ends = outgoing.next.is_multiple_of(params.max_burst.into());
            header.0[1] = if burst_ends { 0x80 } else { 0 };
            if let Some((header, body)) = outgoing.held.replace((header, now)) {
                self.connection.send_unnumbered(header, body);
            }
        }
    }

    /// Answers the command, with its last data if that is all there is to say.
    pub(super) async fn finish(&self, outcome: Outcome) {
        if !outcome.data.is_empty() {
            let mut data = outcome.data;
            data.truncate(self.expected as usize);
            match &self.connection.carrier {
                Carrier::Tcp(_) => self.emit(&mut self.outgoing.borrow_mut(), Body::Bytes(data)),
                Carrier::Iser(sender) => {
                    for (index, part) in data.chunks(self.connection.chunk as usize).enumerate() {
                        let Ok(mut segment) = self.connection.reads.segment(part.len()).await else { return };
                        segment.as_mut_slice().copy_from_slice(part);
                        let offset = index as u64 * u64::from(self.connection.chunk);
                        self.write_out(&sender.channel, offset, Body::Segments(SmallVec::from_iter([segment])));
                    }
                }
            }
        }
        let (flags, residual) = match outcome.moved {
            moved if moved > self.expected => (0x04, moved - self.expected),
            moved if moved < self.expected => (0x02, self.expected - moved),
            _ => (0, 0),
        };
        let held = self.outgoing.borrow_mut().held.take();
        if let Some((mut header, body)) = held {
            header.0[1] |= 0x80;
            if outcome.status == Status::Good {
                header.0[1] |= 0x01 | flags;
                header.0[3] = outcome.status as u8;
                header.set32(44, residual as u32);
                return self.connection.send_status(header, body);
            }
            self.connection.send_unnumbered(header, body);
        }
        let mut header = Header::new(op::RESPONSE);
        header.0[1] = 0x80 | flags;
        header.0[3] = outcome.status as u8;
        header.set_tag(self.tag);
        header.set32(36, self.outgoing.borrow().data_sn);
        header.set32(44, residual as u32);
        let body = match outcome.sense {
            None => Body::Empty,
            Some(sense) => {
                let sense = sense.encode();
                Body::Bytes([&(sense.len() as u16).to_be_bytes()[..], &sense].concat())
            }
        };
        let key = self.advertised.read.or(self.advertised.write).map(|remote| remote.rkey);
        self.connection.send_response(header, body, key);
    }

    /// Sends a piece by RDMA Write (RFC 7145 7.3.5): into the initiator's buffer, with no PDU around it.
    fn write_out(&self, channel: &Channel, offset: u64, body: Body) {
        let Body::Segments(segments) = body else { return };
        let Some(remote) = self.advertised.read else {
            // A response would say that the data is there.
            tracing::info!("iSER read command without an advertised buffer");
            return channel.fail();
        };
        let mut at = remote.addr.wrapping_add(offset);
        for segment in segments {
            let len = segment.len() as u64;
            channel.write(segment, RemoteAddr { addr: at, ..remote });
            at = at.wrapping_add(len);
        }
    }

    /// Fetches what the initiator has not sent by RDMA Reads (RFC 7145 7.3.6), several at a time.
    async fn fetch(self: &Rc<Self>) -> io::Result<()> {
        let Some(remote) = self.advertised.write else { return Err(io::ErrorKind::InvalidData.into()) };
        let at = self.incoming.borrow().asked;
        let chunk = u64::from(self.connection.chunk);
        let len = (self.expected - at).min(chunk - at % chunk);
        let segment = self.connection.writes.segment(len as usize).await?;
        self.incoming.borrow_mut().asked = at + len;
        self.fetching.set(self.fetching.get() + 1);
        let task = Rc::clone(self);
        let source = RemoteAddr { addr: remote.addr.wrapping_add(at - self.unasked_len.get()), ..remote };
        tokio::task::spawn_local(async move {
            let fetched = match &task.connection.carrier {
                Carrier::Iser(sender) => sender.channel.read(segment, source).await,
                Carrier::Tcp(_) => None,
            };
            let mut incoming = task.incoming.borrow_mut();
            match fetched {
                Some(segment) => incoming.arrived.push_back((at, segment)),
                None => incoming.failed = true,
            }
            task.fetching.set(task.fetching.get() - 1);
            task.arrived.notify_one();
        });
        Ok(())
    }
}

/// Where solicited bytes go.
pub(super) struct Place<'a> {
    task: &'a Task,
    transfer_tag: u32,
}

impl Place<'_> {
    /// Takes the first segment out, to be filled from byte `.1` on.
    pub(super) fn take(&self) -> Option<(Segment, usize)> {
        let mut incoming = self.task.incoming.borrow_mut();
        let burst = incoming.bursts.get_mut(&self.transfer_tag)?;
        Some((burst.segments.pop_front()?, burst.filled))
    }

    /// Puts it back with `filled` bytes more.
    pub(super) fn put(&self, segment: Segment, filled: usize) {
        let mut incoming = self.task.incoming.borrow_mut();
        let Some(burst) = incoming.bursts.get_mut(&self.transfer_tag) else { return };
        burst.filled += filled;
        burst.next += filled as u64;
        if burst.filled < segment.len() {
            burst.segments.push_front(segment);
            return;
        }
        let at = burst.next - segment.len() as u64;
        burst.filled = 0;
        incoming.arrived.push_back((at, segment));
        self.task.arrived.notify_one();
    }
}

/// RDMA Reads of one command in progress.
const FETCHES_MAX: usize = 4;

impl Transfer for Rc<Task> {
    fn has_gone(&self) -> bool {
        let attached = self.lun_number.and_then(|lun| self.connection.attached(lun));
        attached.is_some_and(|attached| attached.has_others()) && self.connection.has_gone()
    }

    fn expected(&self) -> u64 {
        self.expected
    }

    fn send(&self, offset: u64, mut body: Body) -> Step<'_, io::Result<()>> {
        if offset >= self.expected || self.aborted.get() {
            return Box::pin(std::future::ready(Ok(())));
        }
        let room = (self.expected - offset).min(body.len() as u64) as usize;
        drop(body.split_off(room));
        if let Carrier::Iser(sender) = &self.connection.carrier {
            self.write_out(&sender.channel, offset, body);
            return Box::pin(std::future::ready(Ok(())));
        }
        Box::pin(async move {
            self.connection.room().await;
            let mut outgoing = self.outgoing.borrow_mut();
            outgoing.waiting.insert(offset, body);
            let mut turn = outgoing.next;
            while let Some(body) = outgoing.waiting.remove(&turn) {
                turn += body.len() as u64;
                self.emit(&mut outgoing, body);
            }
            Ok(())
        })
    }

    fn receive(&self) -> Step<'_, Option<io::Result<(u64, Segment)>>> {
        Box::pin(async move {
            loop {
                let ask = {
                    let mut incoming = self.incoming.borrow_mut();
                    if self.aborted.get() || incoming.failed {
                        return Some(Err(io::ErrorKind::ConnectionAborted.into()));
                    }
                    if let Some(arrived) = incoming.arrived.pop_front() {
                        return Some(Ok(arrived));
                    }
                    let wanted = if self.writes { self.expected } else { 0 };
                    let all_asked = incoming.asked >= wanted;
                    if !incoming.unsolicited && all_asked && incoming.bursts.is_empty() && self.fetching.get() == 0 {
                        return None;
                    }
                    let room = match self.connection.carrier {
                        Carrier::Tcp(_) => incoming.bursts.len() < self.connection.params.max_r2t as usize,
                        Carrier::Iser(_) => self.fetching.get() < FETCHES_MAX,
                    };
                    !incoming.unsolicited && !all_asked && room
                };
                if ask {
                    let ask = async {
                        match self.connection.carrier {
                            Carrier::Tcp(_) => self.solicit().await,
                            Carrier::Iser(_) => self.fetch().await,
                        }
                    };
                    // The memory for it may be long in coming.
                    tokio::select! {
                        biased;
                        asked = ask => if let Err(e) = asked {
                            return Some(Err(e));
                        },
                        () = self.until_aborted() => {}
                    }
                } else {
                    self.arrived.notified().await;
                }
            }
        })
    }

    fn buffers(&self) -> &Buffers {
        &self.connection.reads
    }

    fn can_lend(&self) -> bool {
        self.connection.can_lend
    }

    fn aborted(&self) -> Step<'_, ()> {
        Box::pin(self.until_aborted())
    }
}
