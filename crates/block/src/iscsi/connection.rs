//! Full feature phase of one connection.
//!
//! One task reads PDUs and starts each command as a task of its own; they finish in any order. Data-Out goes from
//! the socket straight into the blocks it will be written from. Error recovery level 0: what cannot be made sense
//! of ends the connection, after a Reject that says why.

use super::iser;
use super::login::{Params, RECEIVE_MAX};
use super::pdu::{BHS, Header, NO_TAG, Sum, digest, op, padding, reject};
use super::target::{Session, Targets};
use super::task::Task;
use super::text::Keys;
use crate::big_endian::be32;
use crate::chunk_ranges::chunk_ranges;
use crate::generations::InFlight;
use crate::scsi::{Nexus, Outcome, Sense, TaskSet, Unit, absent, only_reads};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::{Segment, reactor};
use thruway_fabric::RemoteAddr;
use thruway_server::{Body, Buffers, Message, Peer, Permit, Reader, SendQueue, Writer, caller, panics};
use tokio::sync::{Notify, watch};

/// Commands of a session in progress at a time: what the command window is opened for.
pub(super) const DEPTH: u32 = 128;
/// Commands of a session in progress at a time, those beside the numbered ones with them; an initiator that sends
/// more is cut off.
const TASKS_MAX: usize = 2 * DEPTH as usize;
/// Task management functions of a session in progress at a time; more are refused.
const FUNCTIONS_MAX: usize = 64;
/// Task management response: function authorization failed (RFC 7143 section 11.6.1).
const AUTHORIZATION_FAILED: u8 = 6;
/// An initiator that has said nothing for so long is asked whether it is there, and must answer within as long.
const PING: Duration = Duration::from_secs(30);
/// What an initiator has to log out in, when it has been asked to.
const LOGOUT_LIMIT: Duration = Duration::from_secs(5);

/// A connection in full feature phase.
pub(super) struct Connection {
    session: Arc<Session>,
    targets: Arc<Targets>,
    pub params: Params,
    portal: String,
    pub chunk: u32,
    pub can_lend: bool,
    pub carrier: Carrier,
    /// Who is at the other end, over TCP.
    peer: Option<Peer>,
    tasks: RefCell<HashMap<u32, Rc<Task>>>,
    /// Told when a command is over.
    task_done: Notify,
    /// Numbered commands in progress.
    numbered: Cell<u32>,
    /// Task management functions in progress.
    functions: Cell<usize>,
    expected_cmd_sn: Cell<u32>,
    stat_sn: Cell<u32>,
    last_transfer_tag: Cell<u32>,
    /// The rest of a text response, and the tag to ask for it by.
    text: RefCell<(u32, Vec<u8>)>,
    /// Something has arrived since the last look.
    heard: Cell<bool>,
    permit: Arc<Permit>,
    pub reads: Buffers,
    pub writes: Buffers,
    unasked: Buffers,
}

/// What PDUs travel on.
pub(super) enum Carrier {
    Tcp(SendQueue),
    Iser(Rc<iser::Sender>),
}

/// Buffers of the initiator that a command advertises (RFC 7145 7.3.4), with their keys.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Advertised {
    /// What is to be written to the disk, from behind the immediate data on.
    pub write: Option<RemoteAddr>,
    /// Where what is read from the disk belongs.
    pub read: Option<RemoteAddr>,
}

/// Where the data of a PDU is.
pub(super) enum Input<'a> {
    /// Next on the connection.
    Stream(&'a mut Reader),
    /// Here.
    Message(&'a [u8]),
}

impl Input<'_> {
    async fn read_exact(&mut self, out: &mut [u8]) -> io::Result<()> {
        match self {
            Input::Stream(reader) => reader.read_exact(out).await,
            Input::Message(data) => {
                let (now, later) = data.split_at_checked(out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
                out.copy_from_slice(now);
                *data = later;
                Ok(())
            }
        }
    }
}

/// Serial numbers as the login left them.
pub(super) struct Serials {
    pub stat_sn: u32,
    pub expected_cmd_sn: u32,
}

/// Why a connection ends.
fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// What a connection is made of.
pub(super) struct ConnectionParams {
    pub permit: Arc<Permit>,
    pub session: Arc<Session>,
    pub targets: Arc<Targets>,
    pub params: Params,
    pub serials: Serials,
    /// Where the initiator connected to, as targets are told of.
    pub portal: String,
    pub closing: watch::Receiver<bool>,
}

/// Serves over TCP until the initiator logs out.
///
/// # Errors
/// If the connection is lost or the initiator breaks the protocol.
pub(super) async fn serve(parts: ConnectionParams, (mut reader, writer): (Reader, Writer)) -> io::Result<()> {
    let lend = writer.can_lend() && !parts.params.data_digest;
    let closing = parts.closing.clone();
    let connection = Connection::new(parts, Carrier::Tcp(SendQueue::default()), Some(reader.peer()), lend);
    let sending = Rc::clone(&connection);
    let sender = tokio::task::spawn_local(async move {
        if let Carrier::Tcp(queue) = &sending.carrier {
            queue.run(writer).await;
        }
    });
    let result = connection.until_over(connection.receive(&mut reader), closing).await;
    connection.end().await;
    if let Carrier::Tcp(queue) = &connection.carrier {
        queue.close();
    }
    let _ = sender.await;
    result
}

impl Connection {
    /// A connection in full feature phase.
    pub(super) fn new(parts: ConnectionParams, carrier: Carrier, peer: Option<Peer>, lend: bool) -> Rc<Connection> {
        let units = parts.session.target.as_ref().map_or(&[][..], |t| &t.units[..]);
        // A piece of any of them has room in one block.
        let chunk = units.iter().map(|u| u.export.chunk).max().unwrap_or(64 << 10);
        Rc::new(Connection {
            chunk,
            can_lend: lend,
            carrier,
            peer,
            tasks: RefCell::default(),
            task_done: Notify::new(),
            numbered: Cell::new(0),
            functions: Cell::new(0),
            expected_cmd_sn: Cell::new(parts.serials.expected_cmd_sn),
            stat_sn: Cell::new(parts.serials.stat_sn),
            last_transfer_tag: Cell::new(0),
            text: RefCell::new((NO_TAG, Vec::new())),
            heard: Cell::new(true),
            reads: Buffers::new(chunk as usize),
            writes: Buffers::new(chunk as usize),
            unasked: Buffers::new(chunk as usize),
            permit: parts.permit,
            session: parts.session,
            targets: parts.targets,
            params: parts.params,
            portal: parts.portal,
        })
    }

    /// Runs the receiving side until it ends, or something else ends the connection.
    pub(super) async fn until_over(
        &self,
        receiving: impl Future<Output = io::Result<()>>,
        mut closing: watch::Receiver<bool>,
    ) -> io::Result<()> {
        tokio::select! {
            result = panics::catch(receiving) => result,
            () = self.carrier_broken() => Err(io::ErrorKind::BrokenPipe.into()),
            () = self.permit.evicted() => Err(io::Error::other("discovery session evicted: others needed its place")),
            () = self.session.replaced.notified() => Err(io::Error::other("the initiator has logged in again")),
            () = self.ask_if_there() => Err(io::ErrorKind::TimedOut.into()),
            () = self.ask_to_leave(&mut closing) => Ok(()),
        }
    }

    async fn carrier_broken(&self) {
        match &self.carrier {
            Carrier::Tcp(queue) => queue.broken().await,
            Carrier::Iser(sender) => sender.channel.broken().await,
        }
    }

    /// Ends what is in progress.
    pub(super) async fn end(&self) {
        self.tasks.borrow().values().for_each(|task| task.abort());
        futures_util::future::join_all(self.session.units.iter().map(|attached| attached.clear())).await;
        self.until(|tasks| tasks.is_empty()).await;
    }

    /// Waits until the commands in progress are as wished for.
    async fn until(&self, done: impl Fn(&HashMap<u32, Rc<Task>>) -> bool) {
        loop {
            let told = self.task_done.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if done(&self.tasks.borrow()) {
                return;
            }
            told.await;
        }
    }

    /// The initiator has closed the connection, or lost it.
    pub(super) fn has_gone(&self) -> bool {
        match &self.carrier {
            Carrier::Tcp(_) => self.peer.as_ref().is_some_and(Peer::has_closed),
            Carrier::Iser(sender) => sender.channel.is_broken(),
        }
    }

    /// The session's use of a unit.
    pub(super) fn attached(&self, lun: u16) -> Option<&Arc<TaskSet>> {
        self.session.units.get(usize::from(lun))
    }

    /// The session, as its units know it.
    pub(super) fn nexus(&self) -> &Nexus {
        &self.session.nexus
    }

    /// A tag for something that the initiator will refer to.
    pub(super) fn transfer_tag(&self) -> u32 {
        let next = self.last_transfer_tag.get().wrapping_add(1) % NO_TAG;
        self.last_transfer_tag.set(next);
        next
    }

    /// Sends a PDU that carries the number of the next status, but none itself.
    pub(super) fn send_unnumbered(&self, mut header: Header, body: Body) {
        // Data-In without status leaves the field out.
        if header.op() != op::DATA_IN {
            header.set32(24, self.stat_sn.get());
        }
        self.push(header, body, None);
    }

    /// Sends a PDU with a status number of its own.
    pub(super) fn send_status(&self, header: Header, body: Body) {
        self.send_response(header, body, None);
    }

    /// As [`Connection::send_status`]; over iSER, it revokes a key that the command advertised.
    pub(super) fn send_response(&self, mut header: Header, body: Body, invalidate: Option<u32>) {
        let number = self.stat_sn.get();
        self.stat_sn.set(number.wrapping_add(1));
        header.set32(24, number);
        self.push(header, body, invalidate);
    }

    fn push(&self, mut header: Header, body: Body, invalidate: Option<u32>) {
        self.number(&mut header);
        match &self.carrier {
            Carrier::Tcp(queue) => queue.push(message(header, body, &self.params)),
            Carrier::Iser(sender) => sender.send(header, &body, invalidate),
        }
    }

    /// Waits until not too much waits to be sent: an initiator that does not take its answers gets no more.
    pub(super) async fn room(&self) {
        match &self.carrier {
            Carrier::Tcp(queue) => queue.room().await,
            Carrier::Iser(sender) => sender.channel.room().await,
        }
    }

    /// The command window.
    fn number(&self, header: &mut Header) {
        let expected = self.expected_cmd_sn.get();
        header.set32(28, expected);
        header.set32(32, expected.wrapping_add(DEPTH - 1 - self.numbered.get().min(DEPTH)));
    }

    fn reject(&self, reason: u8, header: &Header) {
        tracing::debug!(reason, ?header, "an iSCSI PDU is rejected");
        let mut answer = Header::new(op::REJECT);
        answer.0[2] = reason;
        answer.set_tag(NO_TAG);
        self.send_status(answer, Body::Bytes(header.0.to_vec()));
    }

    async fn receive(self: &Rc<Self>, reader: &mut Reader) -> io::Result<()> {
        loop {
            self.room().await;
            let Some(bytes) = reader.peek(BHS).await? else { return Ok(()) };
            let header = Header(bytes.try_into().expect("as long as asked for"));
            let ahs = header.ahs_len();
            let digest_len = if self.params.header_digest { 4 } else { 0 };
            let all = BHS + ahs + digest_len;
            let bytes = reader.peek(all).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
            if self.params.header_digest && digest(&bytes[..BHS + ahs]) != bytes[BHS + ahs..] {
                return Err(broken("a header whose digest is wrong"));
            }
            reader.consume(all);
            if header.data_len() > RECEIVE_MAX as usize {
                self.reject(reject::PROTOCOL_ERROR, &header);
                return Err(broken("a data segment longer than agreed on"));
            }
            match self.pdu(header, Advertised::default(), &mut Input::Stream(reader)).await? {
                ControlFlow::Continue(()) => {}
                ControlFlow::Break(()) => return Ok(()),
            }
        }
    }

    /// Whether a PDU is next in line; one that is not is as if it had not come.
    fn in_turn(&self, header: &Header) -> bool {
        let (number, expected) = (header.cmd_sn(), self.expected_cmd_sn.get());
        if header.immediate() {
            // Those beside the line have the number of the one that comes next in it.
            return true;
        }
        if number != expected || self.numbered.get() >= DEPTH {
            return false;
        }
        self.expected_cmd_sn.set(expected.wrapping_add(1));
        true
    }

    /// Deals with a PDU.
    pub(super) async fn pdu(
        self: &Rc<Self>,
        header: Header,
        advertised: Advertised,
        reader: &mut Input<'_>,
    ) -> io::Result<ControlFlow<()>> {
        self.heard.set(true);
        if header.op() == op::DATA_OUT {
            self.data_out(&header, reader).await?;
            return Ok(ControlFlow::Continue(()));
        }
        if !self.in_turn(&header) {
            tracing::debug!(?header, "an iSCSI PDU out of turn");
            self.skip(&header, reader).await?;
            return Ok(ControlFlow::Continue(()));
        }
        match header.op() {
            op::COMMAND => self.command(header, advertised, reader).await?,
            op::NOP_OUT => {
                let data = self.data(&header, reader).await?;
                self.nop(&header, data);
            }
            op::TASK_MANAGEMENT => {
                self.skip(&header, reader).await?;
                if self.functions.get() >= FUNCTIONS_MAX {
                    self.managed(&header, 255);
                    return Ok(ControlFlow::Continue(()));
                }
                self.functions.set(self.functions.get() + 1);
                let connection = Rc::clone(self);
                tokio::task::spawn_local(async move {
                    connection.manage(header).await;
                    connection.functions.set(connection.functions.get() - 1);
                });
            }
            op::TEXT => {
                let data = self.data(&header, reader).await?;
                self.text(&header, &data);
            }
            op::LOGOUT => {
                self.skip(&header, reader).await?;
                return self.logout(&header).await;
            }
            op::SNACK => {
                self.skip(&header, reader).await?;
                self.reject(reject::SNACK, &header);
            }
            _ => {
                self.skip(&header, reader).await?;
                self.reject(reject::NOT_SUPPORTED, &header);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn tail_len(&self, len: usize) -> usize {
        let digest = if self.params.data_digest && len > 0 { 4 } else { 0 };
        padding(len) + digest
    }

    async fn skip(&self, header: &Header, reader: &mut Input<'_>) -> io::Result<()> {
        let len = header.data_len();
        match reader {
            Input::Stream(reader) => reader.skip((len + self.tail_len(len)) as u64).await,
            Input::Message(_) => Ok(()),
        }
    }

    /// The digest of data that is about to come, if there will be one.
    fn data_sum(&self) -> Option<Sum> {
        self.params.data_digest.then(Sum::new)
    }

    /// Padding and digest behind data.
    async fn tail(&self, header: &Header, sum: Option<Sum>, reader: &mut Input<'_>) -> io::Result<()> {
        let len = header.data_len();
        let tail_len = self.tail_len(len);
        let Input::Stream(reader) = reader else { return Ok(()) };
        if tail_len == 0 {
            return Ok(());
        }
        let tail = reader.peek(tail_len).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let (pad, there) = tail.split_at(padding(len));
        let right = sum.is_none_or(|mut sum| {
            sum.update(pad);
            sum.finish() == there
        });
        reader.consume(tail_len);
        if right {
            return Ok(());
        }
        self.reject(reject::DATA_DIGEST, header);
        Err(broken("data whose digest is wrong"))
    }

    /// The data of a PDU that is none of the long ones.
    async fn data(&self, header: &Header, reader: &mut Input<'_>) -> io::Result<Vec<u8>> {
        let mut data = vec![0; header.data_len()];
        reader.read_exact(&mut data).await?;
        let mut sum = self.data_sum();
        sum.iter_mut().for_each(|sum| sum.update(&data));
        self.tail(header, sum, reader).await?;
        Ok(data)
    }

    async fn command(
        self: &Rc<Self>,
        header: Header,
        advertised: Advertised,
        reader: &mut Input<'_>,
    ) -> io::Result<()> {
        let Some(target) = self.session.target.clone() else {
            self.skip(&header, reader).await?;
            self.reject(reject::PROTOCOL_ERROR, &header);
            return Ok(());
        };
        if self.tasks.borrow().len() >= TASKS_MAX {
            return Err(broken("CmdSN outside the command window"));
        }
        let task = Rc::new(Task::new(self, &header, advertised));
        match self.tasks.borrow_mut().entry(header.tag()) {
            Entry::Occupied(_) => return Err(broken("a task tag that is in use")),
            Entry::Vacant(place) => place.insert(Rc::clone(&task)),
        };
        let numbered = !header.immediate();
        if numbered {
            self.numbered.set(self.numbered.get() + 1);
        }
        let over = Over { connection: Rc::clone(self), task: Rc::clone(&task), numbered };
        if header.data_len() > 0 {
            if !self.params.immediate_data {
                return Err(broken("immediate data, which was not agreed on"));
            }
            self.unasked_data(&task, &header, reader).await?;
        }
        // A command that is to send more unasked must have the right to.
        if task.awaits_unasked() && self.params.initial_r2t {
            return Err(broken("unsolicited data, which was not agreed on"));
        }
        let mut cdb = [0; 16];
        cdb.copy_from_slice(&header.0[32..48]);
        let unit = target.unit(task.lun_number).cloned();
        let attached = task.lun_number.and_then(|lun| self.attached(lun));
        let under_way = attached.map(|attached| attached.begin());
        let bug = Bug(Rc::clone(self));
        reactor::start(caller::inherited(async move {
            let _bug = bug;
            let outcome = match (&unit, &under_way) {
                _ if cdb[0] == 0xa0 => Some(report_luns(&cdb, target.report_luns())),
                (Some(unit), Some(under_way)) => execute(unit, &cdb, &task, under_way).await,
                _ => Some(no_unit(&cdb)),
            };
            // The window is open again before the answer says how far.
            over.end();
            let cleared = under_way.as_ref().is_some_and(InFlight::is_draining);
            if let Some(outcome) = outcome.filter(|_| !task.is_aborted() && !cleared) {
                task.finish(outcome).await;
            }
        }));
        Ok(())
    }

    /// Data that comes with a command or behind it, without being asked for.
    async fn unasked_data(&self, task: &Task, header: &Header, reader: &mut Input<'_>) -> io::Result<()> {
        let mut segments = Vec::new();
        let mut sum = self.data_sum();
        for (_, len) in chunk_ranges(0, header.data_len() as u64, self.chunk) {
            let mut segment = self.unasked.segment(len).await?;
            reader.read_exact(segment.as_mut_slice()).await?;
            sum.iter_mut().for_each(|sum| sum.update(segment.as_slice()));
            segments.push(segment);
        }
        self.tail(header, sum, reader).await?;
        for segment in segments {
            if !task.unasked(segment) {
                return Err(broken("more unsolicited data than agreed on"));
            }
        }
        Ok(())
    }

    async fn data_out(&self, header: &Header, reader: &mut Input<'_>) -> io::Result<()> {
        let task = self.tasks.borrow().get(&header.tag()).cloned();
        // Data of commands that have been aborted, or failed, is on its way still.
        let Some(task) = task else { return self.skip(header, reader).await };
        let (transfer_tag, offset, len) = (header.get32(20), u64::from(header.get32(40)), header.data_len());
        if transfer_tag == NO_TAG {
            if !task.unasked_turn(header.get32(36), offset) {
                task.fail();
                return self.skip(header, reader).await;
            }
            self.unasked_data(&task, header, reader).await?;
            if header.is_final() {
                task.unasked_end();
            }
            return Ok(());
        }
        let Some(place) = task.place(transfer_tag, header.get32(36), offset, len) else {
            task.fail();
            return self.skip(header, reader).await;
        };
        let mut sum = self.data_sum();
        let mut left = len;
        // With a digest nothing is handed on before it has been found right.
        let mut held = SmallVec::<[(Segment, usize); 2]>::new();
        while left > 0 {
            let Some((mut segment, mut filled)) = place.take() else {
                return Err(broken("Data-Out with no outstanding R2T"));
            };
            // Of those behind the first nothing is there.
            filled = if held.is_empty() { filled } else { 0 };
            let part = (segment.len() - filled).min(left);
            let target = &mut segment.as_mut_slice()[filled..filled + part];
            reader.read_exact(target).await?;
            sum.iter_mut().for_each(|sum| sum.update(target));
            left -= part;
            held.push((segment, part));
            if left == 0 {
                self.tail(header, sum.take(), reader).await?;
            }
            if sum.is_none() {
                held.drain(..).for_each(|(segment, part)| place.put(segment, part));
            }
        }
        if header.is_final() {
            task.burst_end(transfer_tag);
        }
        Ok(())
    }

    fn nop(&self, header: &Header, mut data: Vec<u8>) {
        if header.tag() == NO_TAG {
            return; // the answer to a question of ours
        }
        data.truncate(self.params.send_max as usize);
        let mut answer = Header::new(op::NOP_IN);
        answer.0[8..16].copy_from_slice(&header.0[8..16]);
        answer.set_tag(header.tag());
        answer.set32(20, NO_TAG);
        self.send_status(answer, Body::Bytes(data));
    }

    fn text(&self, header: &Header, data: &[u8]) {
        let mut kept = self.text.borrow_mut();
        if header.get32(20) == NO_TAG {
            let Some(keys) = Keys::decode(data).filter(|_| header.is_final()) else {
                return self.reject(reject::PROTOCOL_ERROR, header);
            };
            let (mut answer, mut is_listed) = (Vec::new(), false);
            for (key, value) in &keys.0 {
                match key.as_str() {
                    // Once: a list for each would multiply the answer.
                    "SendTargets" if std::mem::replace(&mut is_listed, true) => answer.extend(b"SendTargets=Reject\0"),
                    "SendTargets" => match self.targets.send_targets(value, &self.session, &self.portal) {
                        Some(list) => answer.extend(list.into_bytes()),
                        None => answer.extend(b"SendTargets=Reject\0"),
                    },
                    other => answer.extend(format!("{other}=NotUnderstood\0").into_bytes()),
                }
            }
            *kept = (NO_TAG, answer);
        } else if header.get32(20) != kept.0 {
            return self.reject(reject::INVALID_FIELD, header);
        }
        let part: Vec<u8> = {
            let len = kept.1.len().min(self.params.send_max as usize);
            kept.1.drain(..len).collect()
        };
        kept.0 = if kept.1.is_empty() { NO_TAG } else { self.transfer_tag() };
        let mut answer = Header::new(op::TEXT_RESPONSE);
        // F, or C: more is to be had.
        answer.0[1] = if kept.0 == NO_TAG { 0x80 } else { 0x40 };
        answer.0[8..16].copy_from_slice(&header.0[8..16]);
        answer.set_tag(header.tag());
        answer.set32(20, kept.0);
        self.send_status(answer, Body::Bytes(part));
    }

    async fn logout(&self, header: &Header) -> io::Result<ControlFlow<()>> {
        let reason = header.0[1] & 0x7f;
        let mut answer = Header::new(op::LOGOUT_RESPONSE);
        // Connections are not recovered; there is one only.
        answer.0[2] = match reason {
            0 => 0,
            1 if header.get16(20) == self.session.cid() => 0,
            1 => 1,
            _ => 2,
        };
        answer.set_tag(header.tag());
        answer.set16(40, 2);
        answer.set16(42, self.params.time2retain);
        let leaves = answer.0[2] == 0;
        if leaves {
            // What is in progress is finished before the goodbye.
            self.until(|tasks| tasks.is_empty()).await;
        }
        self.send_status(answer, Body::Empty);
        Ok(if leaves { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    /// Task management (RFC 7143 11.5 and 11.6).
    async fn manage(&self, header: Header) {
        let function = header.0[1] & 0x7f;
        let response = match &self.session.target {
            None => 255,
            Some(target) => {
                let unit = target.unit(header.lun());
                match (function, unit) {
                    (1, _) => self.abort_one(header.get32(20)).await,
                    (2..=5, None) => 2,
                    (2, Some(_)) => self.abort_all(header.lun()).await,
                    // There is no ACA to clear.
                    (3, Some(_)) => 5,
                    (4, Some(unit)) => {
                        unit.clear_all(&self.session.nexus).await;
                        0
                    }
                    (5, Some(unit)) => self.reset(&[Arc::clone(unit)]).await,
                    // TARGET COLD RESET ends the sessions of other initiators. The right to read does not suffice for that.
                    (7, _) if target.units.iter().any(|unit| unit.may_only_read()) => AUTHORIZATION_FAILED,
                    (6 | 7, _) => {
                        if function == 7 {
                            self.targets.close_others(&self.session);
                        }
                        self.reset(&target.units).await
                    }
                    (8, _) => 4,
                    _ => 5,
                }
            }
        };
        self.managed(&header, response);
        if function == 7 && response == 0 {
            self.session.replaced.notify_one();
        }
    }

    /// What has come of a task management function.
    fn managed(&self, header: &Header, response: u8) {
        let mut answer = Header::new(op::TASK_MANAGEMENT_RESPONSE);
        answer.0[2] = response;
        answer.set_tag(header.tag());
        self.send_status(answer, Body::Empty);
    }

    async fn abort_one(&self, tag: u32) -> u8 {
        let task = self.tasks.borrow().get(&tag).cloned();
        let Some(task) = task else { return 1 };
        task.abort();
        self.until(|tasks| !tasks.get(&tag).is_some_and(|t| Rc::ptr_eq(t, &task))).await;
        0
    }

    /// Aborts this session's commands of a unit.
    async fn abort_all(&self, lun: Option<u16>) -> u8 {
        if let Some(attached) = lun.and_then(|lun| self.attached(lun)) {
            attached.clear().await;
        }
        0
    }

    async fn reset(&self, units: &[Arc<Unit>]) -> u8 {
        futures_util::future::join_all(units.iter().map(|unit| unit.reset(&self.session.nexus))).await;
        0
    }

    /// Resolves when the initiator has gone without a word.
    async fn ask_if_there(&self) {
        let mut asked = false;
        loop {
            tokio::time::sleep(PING).await;
            if self.heard.replace(false) {
                asked = false;
            } else if asked {
                return;
            } else {
                asked = true;
                let mut ping = Header::new(op::NOP_IN);
                ping.set_tag(NO_TAG);
                ping.set32(20, self.transfer_tag());
                self.send_unnumbered(ping, Body::Empty);
            }
        }
    }

    /// Asks the initiator to log out when the daemon is about to stop, and gives it time to (RFC 7143 11.9).
    async fn ask_to_leave(&self, closing: &mut watch::Receiver<bool>) {
        if closing.wait_for(|closing| *closing).await.is_err() {
            return;
        }
        let mut ask = Header::new(op::ASYNC);
        ask.set_tag(NO_TAG);
        ask.0[36] = 1;
        ask.set16(42, LOGOUT_LIMIT.as_secs() as u16);
        self.send_status(ask, Body::Empty);
        tokio::time::sleep(LOGOUT_LIMIT).await;
    }
}

/// A command that panics is never answered, and its initiator would wait for that: the connection ends, and the initiator
/// goes on by the next.
struct Bug(Rc<Connection>);

impl Drop for Bug {
    fn drop(&mut self) {
        if std::thread::panicking() {
            match &self.0.carrier {
                Carrier::Tcp(queue) => queue.fail(),
                Carrier::Iser(sender) => sender.channel.fail(),
            }
        }
    }
}

/// A command's place among those in progress.
struct Over {
    connection: Rc<Connection>,
    task: Rc<Task>,
    numbered: bool,
}

impl Over {
    fn end(&self) {
        let mut tasks = self.connection.tasks.borrow_mut();
        // The tag may be another's by now.
        let is_there = tasks.get(&self.task.tag).is_some_and(|task| Rc::ptr_eq(task, &self.task));
        if is_there {
            tasks.remove(&self.task.tag);
            drop(tasks);
            if self.numbered {
                self.connection.numbered.set(self.connection.numbered.get() - 1);
            }
            self.connection.task_done.notify_waiters();
        }
    }
}

impl Drop for Over {
    fn drop(&mut self) {
        self.end();
    }
}

/// A PDU with its digests and padding.
pub(super) fn message(mut header: Header, body: Body, params: &Params) -> Message {
    let len = body.len();
    header.set_data_len(len);
    let mut bytes: SmallVec<[u8; 64]> = SmallVec::from_slice(&header.0);
    if params.header_digest {
        bytes.extend_from_slice(&digest(&header.0));
    }
    let pad = padding(len);
    let mut trailer: SmallVec<[u8; 8]> = SmallVec::from_elem(0, pad);
    if params.data_digest && len > 0 {
        let mut sum = Sum::new();
        body.bytes(|part| sum.update(part));
        sum.update(&trailer);
        trailer.extend_from_slice(&sum.finish());
    }
    Message { header: bytes, body, trailer }
}

/// Does a command to its end, or, if it is cleared meanwhile, until nothing of it can reach the disk any more.
async fn execute(unit: &Unit, cdb: &[u8; 16], task: &Rc<Task>, under_way: &InFlight) -> Option<Outcome> {
    let work = unit.execute(task.nexus(), cdb, task);
    tokio::pin!(work);
    tokio::select! {
        biased;
        outcome = &mut work => return Some(outcome),
        () = under_way.draining() => task.abort(),
    }
    // What only reads may be dropped where it stands. That there is no data to send says nothing: WRITE SAME needs none.
    if !only_reads(cdb) {
        work.await;
    }
    None
}

fn report_luns(cdb: &[u8; 16], data: Vec<u8>) -> Outcome {
    let allocated = be32(cdb, 6) as usize;
    if cdb[2] > 2 {
        return Sense::invalid_field(2).into();
    }
    if allocated < 16 {
        return Sense::invalid_field(6).into();
    }
    // The well-known units: there are none.
    let data = if cdb[2] == 1 { vec![0; 8] } else { data };
    Outcome::data(data, allocated)
}

/// Commands to a LUN that is not there (SPC-4 6.6.1, 6.39).
fn no_unit(cdb: &[u8; 16]) -> Outcome {
    match cdb[0] {
        0x12 if cdb[1] & 1 == 0 => absent(cdb),
        0x03 => Outcome::data(Sense::NO_UNIT.encode().to_vec(), cdb[4].into()),
        _ => Sense::NO_UNIT.into(),
    }
}
