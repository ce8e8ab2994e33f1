//! One-sided operations: the program reads, writes and changes registered memory of its peer.

use crate::connection::{Connection, Inner, State};
use crate::error::Error;
use crate::memory::{OPERATION, OPERATIONS_MAX};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_fabric::{Access, MemoryRegion, Owner, Payload, RemoteAddr, SendFlags, SendOp, SendRequest, Sge, Status};

/// Bytes of a [`RemoteRegion`] for the peer.
pub const REMOTE_REGION_LEN: usize = 20;

/// Memory of this program that one-sided operations use. Dropping it does not wait for those that are on their way, for which the
/// memory's owner is kept: [`Region::close`] does.
pub struct Region {
    region: MemoryRegion,
    /// Shared with requests that are posted.
    in_use: Arc<dyn Any + Send + Sync>,
    connection: Arc<Inner>,
}

/// Memory of the peer's program, as the peer has described it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Its address, in the peer's terms.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The key that opens it.
    pub key: u32,
}

impl RemoteRegion {
    /// As bytes, to be sent to the peer: address, length and key, big-endian.
    pub fn encode(&self) -> [u8; REMOTE_REGION_LEN] {
        let mut bytes = [0; REMOTE_REGION_LEN];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_be_bytes());
        bytes[16..].copy_from_slice(&self.key.to_be_bytes());
        bytes
    }

    /// From bytes that the peer has encoded.
    pub fn decode(bytes: &[u8; REMOTE_REGION_LEN]) -> RemoteRegion {
        let full = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let key = u32::from_be_bytes(bytes[16..].try_into().expect("four bytes"));
        RemoteRegion { addr: full(0), len: full(8), key }
    }

    /// A word of an atomic operation.
    fn word(&self, offset: u64) -> Result<RemoteAddr, Error> {
        let at = self.at(offset, 8)?;
        if at.addr.is_multiple_of(8) { Ok(at) } else { Err(Error::Unaligned(at.addr)) }
    }

    fn at(&self, offset: u64, len: u64) -> Result<RemoteAddr, Error> {
        let outside = Error::OutsideRegion { offset, len, size: self.len };
        match (offset.checked_add(len), self.addr.checked_add(offset)) {
            (Some(end), Some(addr)) if end <= self.len => Ok(RemoteAddr { addr, rkey: self.key }),
            _ => Err(outside),
        }
    }
}

impl Region {
    /// What the peer has to know to use it.
    pub fn remote(&self) -> RemoteRegion {
        let at = self.region.remote(0);
        RemoteRegion { addr: at.addr, len: self.region.len() as u64, key: at.rkey }
    }

    /// Drops it, and waits until nothing uses the memory any more: operations that are on their way, of this end or the peer's.
    pub fn close(self) {
        let Region { region, in_use, connection } = self;
        drop(region);
        while Arc::strong_count(&in_use) > 1 {
            let epoch = connection.awaited.epoch();
            connection.context.poll();
            if Arc::strong_count(&in_use) > 1 {
                let soon = Instant::now() + Duration::from_millis(5);
                let _ = connection.context.wait(&connection.awaited, epoch, Some(soon));
            }
        }
    }

    fn at(&self, offset: u64, len: u64) -> Result<Sge, Error> {
        let size = self.region.len() as u64;
        match offset.checked_add(len) {
            Some(end) if end <= size && len <= u32::MAX.into() => Ok(self.region.sge(offset as usize, len as u32)),
            _ => Err(Error::OutsideRegion { offset, len, size }),
        }
    }
}

/// An operation that has been carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// What the program has given along.
    pub context: u64,
    /// How it ended.
    pub status: Status,
    /// What the word was before, of an atomic operation.
    pub value: u64,
}

/// Operations that are posted, and those that the program has not been told of.
#[derive(Default)]
pub(crate) struct Operations {
    /// By their number; `None` where there is none.
    posted: Vec<Option<Recipient>>,
    free: Vec<u32>,
    /// Completions that a call waits for by itself.
    awaited: Vec<(u64, Option<(Status, u64)>)>,
    done: VecDeque<Completion>,
    next_awaited: u64,
}

/// Who gets the completion of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recipient {
    /// The program, by what it has given along.
    Program(u64),
    /// A call that waits for it.
    Call(u64),
}

impl Operations {
    pub(crate) fn complete(&mut self, number: u32, status: Status, value: u64) {
        let Some(recipient) = self.posted.get_mut(number as usize).and_then(Option::take) else { return };
        self.free.push(number);
        match recipient {
            Recipient::Program(context) => self.done.push_back(Completion { context, status, value }),
            Recipient::Call(call) => {
                // Without one, the call has given up.
                if let Some((_, done)) = self.awaited.iter_mut().find(|(awaited, _)| *awaited == call) {
                    *done = Some((status, value));
                }
            }
        }
    }

    pub(crate) fn news(&self) -> usize {
        self.done.len()
    }

    fn begin(&mut self, recipient: Recipient) -> Result<u32, Error> {
        if self.posted.len() - self.free.len() + self.done.len() >= OPERATIONS_MAX as usize {
            return Err(Error::QueueFull(OPERATIONS_MAX));
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.posted.push(None);
            self.posted.len() as u32 - 1
        });
        self.posted[number as usize] = Some(recipient);
        Ok(number)
    }

    fn cancel(&mut self, number: u32) {
        self.posted[number as usize] = None;
        self.free.push(number);
    }
}

/// What is to be done.
enum Kind {
    Put(Sge, RemoteAddr),
    Get(Sge, RemoteAddr),
    FetchAdd(RemoteAddr, u64),
    CompareSwap(RemoteAddr, u64, u64),
    Flush(RemoteAddr),
    /// A zero-length read behind the puts before it. The peer checks no access for it (RFC 5040 section 5.2).
    Confirm(RemoteAddr),
}

impl Connection {
    /// Registers `len` bytes of memory at `at`, for one-sided operations in both directions. The peer may do what `access` says, once it knows
    /// of the region ([`Region::remote`]). Dropping the region ends that.
    ///
    /// # Safety
    /// The memory must stay mapped while `owner` lives, writable where the peer or an operation may write, and must not be
    /// borrowed in a way that Rust's rules for references would forbid.
    ///
    /// # Errors
    /// If the device has no more keys, or cannot hold the memory in place.
    pub unsafe fn register(&self, at: *mut u8, len: usize, access: Access, owner: Owner) -> Result<Region, Error> {
        let in_use: Owner = Arc::new(owner);
        // SAFETY: the caller's promise.
        let region = unsafe { self.0.pd.register_raw(at, len, access | Access::LOCAL_WRITE, Arc::clone(&in_use)) }?;
        Ok(Region { region, in_use, connection: Arc::clone(&self.0) })
    }

    /// Registers a buffer.
    ///
    /// # Errors
    /// As [`Connection::register`].
    pub fn register_buffer(&self, buffer: &Arc<thruway_fabric::Buffer>, access: Access) -> Result<Region, Error> {
        let owner: Owner = Arc::clone(buffer) as Owner;
        // SAFETY: the buffer owns the memory, and is kept.
        unsafe { self.register(buffer.as_ptr(), buffer.len(), access, owner) }
    }

    /// Writes `len` bytes of `from` to the peer's memory. The completion says that `from` may be changed again; the peer has the bytes
    /// when it receives something that was sent later, or after [`Connection::flush`].
    ///
    /// # Errors
    /// [`Error::OutsideRegion`], [`Error::QueueFull`], or why the connection has ended.
    pub fn put(
        &self,
        (from, offset): (&Region, u64),
        (to, remote_offset): (&RemoteRegion, u64),
        len: u64,
        context: u64,
    ) -> Result<(), Error> {
        self.begin(Kind::Put(from.at(offset, len)?, to.at(remote_offset, len)?), context)
    }

    /// Reads `len` bytes of the peer's memory into `to`. They are there when the operation has completed.
    ///
    /// # Errors
    /// As [`Connection::put`].
    pub fn get(
        &self,
        (to, offset): (&Region, u64),
        (from, remote_offset): (&RemoteRegion, u64),
        len: u64,
        context: u64,
    ) -> Result<(), Error> {
        self.begin(Kind::Get(to.at(offset, len)?, from.at(remote_offset, len)?), context)
    }

    /// Adds to a 64-bit word of the peer's memory, in its byte order, at a multiple of 8. The completion has what it was before.
    ///
    /// # Errors
    /// As [`Connection::put`].
    pub fn fetch_add(&self, (to, offset): (&RemoteRegion, u64), add: u64, context: u64) -> Result<(), Error> {
        self.begin(Kind::FetchAdd(to.word(offset)?, add), context)
    }

    /// Replaces a 64-bit word of the peer's memory by `swap` if it is `compare`. The completion has what it was before.
    ///
    /// # Errors
    /// As [`Connection::put`].
    pub fn compare_swap(
        &self,
        (to, offset): (&RemoteRegion, u64),
        compare: u64,
        swap: u64,
        context: u64,
    ) -> Result<(), Error> {
        self.begin(Kind::CompareSwap(to.word(offset)?, compare, swap), context)
    }

    /// Completes when everything that was put before is in the peer's memory: reads a few bytes of `to`, which must be readable.
    ///
    /// # Errors
    /// As [`Connection::put`].
    pub fn flush(&self, to: &RemoteRegion, context: u64) -> Result<(), Error> {
        self.begin(Kind::Flush(to.at(0, to.len.min(8))?), context)
    }

    /// Completions that have not been taken, in the order in which the operations were begun; none if there are none.
    ///
    /// # Errors
    /// Without any, why the connection has ended.
    pub fn completions(&self, max: usize) -> Result<Vec<Completion>, Error> {
        self.0.context.poll();
        let mut state = self.0.state();
        let done = &mut state.operations.done;
        let count = done.len().min(max);
        let taken: Vec<Completion> = done.drain(..count).collect();
        if taken.is_empty() {
            state.check()?;
        }
        Ok(taken)
    }

    /// Waits for at least one completion.
    ///
    /// # Errors
    /// [`Error::TimedOut`], or why the connection has ended.
    pub fn wait_completions(&self, max: usize, deadline: Option<Instant>) -> Result<Vec<Completion>, Error> {
        self.0.wait(deadline, |state| {
            let done = &mut state.operations.done;
            let count = done.len().min(max);
            (count > 0).then(|| Ok(done.drain(..count).collect()))
        })
    }

    /// As [`Connection::put`], and waits until the peer has the bytes.
    ///
    /// # Errors
    /// As [`Connection::put`], and [`Error::Operation`]; either, if the peer refuses the bytes, which ends the connection.
    pub fn put_wait(
        &self,
        (from, offset): (&Region, u64),
        (to, remote_offset): (&RemoteRegion, u64),
        len: u64,
    ) -> Result<(), Error> {
        let (from, to) = (from.at(offset, len)?, to.at(remote_offset, len)?);
        // The put alone is done when its bytes are on their way.
        self.call_each([Kind::Put(from, to), Kind::Confirm(to)]).map(drop)
    }

    /// As [`Connection::get`], and waits until it is done.
    ///
    /// # Errors
    /// As [`Connection::put_wait`].
    pub fn get_wait(
        &self,
        (to, offset): (&Region, u64),
        (from, remote_offset): (&RemoteRegion, u64),
        len: u64,
    ) -> Result<(), Error> {
        self.call(Kind::Get(to.at(offset, len)?, from.at(remote_offset, len)?)).map(drop)
    }

    /// As [`Connection::fetch_add`], and waits for what the word was.
    ///
    /// # Errors
    /// As [`Connection::put_wait`].
    pub fn fetch_add_wait(&self, (to, offset): (&RemoteRegion, u64), add: u64) -> Result<u64, Error> {
        self.call(Kind::FetchAdd(to.word(offset)?, add))
    }

    /// As [`Connection::compare_swap`], and waits for what the word was.
    ///
    /// # Errors
    /// As [`Connection::put_wait`].
    pub fn compare_swap_wait(&self, (to, offset): (&RemoteRegion, u64), compare: u64, swap: u64) -> Result<u64, Error> {
        self.call(Kind::CompareSwap(to.word(offset)?, compare, swap))
    }

    /// As [`Connection::flush`], and waits until it is done.
    ///
    /// # Errors
    /// As [`Connection::put_wait`].
    pub fn flush_wait(&self, to: &RemoteRegion) -> Result<(), Error> {
        self.call(Kind::Flush(to.at(0, to.len.min(8))?)).map(drop)
    }

    fn begin(&self, kind: Kind, context: u64) -> Result<(), Error> {
        let mut state = self.0.state();
        self.post(&mut state, kind, Recipient::Program(context))
    }

    /// Begins an operation and waits for it alone.
    fn call(&self, kind: Kind) -> Result<u64, Error> {
        self.call_each([kind])
    }

    /// Begins operations, one behind the other, and waits for them. Returns the last result or the first error.
    fn call_each<const N: usize>(&self, kinds: [Kind; N]) -> Result<u64, Error> {
        let (mut calls, mut result) = (Vec::with_capacity(N), Ok(0));
        let mut state = self.0.state();
        for kind in kinds {
            let call = state.operations.next_awaited;
            state.operations.next_awaited += 1;
            if let Err(error) = self.post(&mut state, kind, Recipient::Call(call)) {
                result = Err(error);
                break;
            }
            state.operations.awaited.push((call, None));
            calls.push(call);
        }
        drop(state);
        for call in calls {
            result = self.wait_for_call(call).and_then(|value| result.and(Ok(value)));
        }
        result
    }

    fn wait_for_call(&self, call: u64) -> Result<u64, Error> {
        let done = self.0.wait(None, |state| {
            let awaited = &mut state.operations.awaited;
            let at = awaited.iter().position(|(awaited, done)| *awaited == call && done.is_some())?;
            awaited.swap_remove(at).1.map(Ok)
        });
        if done.is_err() {
            self.0.state().operations.awaited.retain(|(awaited, _)| *awaited != call);
        }
        match done? {
            (Status::Success, value) => Ok(value),
            (status, _) => Err(Error::Operation(status)),
        }
    }

    fn post(&self, state: &mut State, kind: Kind, recipient: Recipient) -> Result<(), Error> {
        state.check()?;
        let number = state.operations.begin(recipient)?;
        let result = state.memory.result(number);
        let (op, sge) = match kind {
            Kind::Put(from, to) => (SendOp::Write { remote: to, immediate: None }, from),
            Kind::Get(to, from) => (SendOp::Read { remote: from }, to),
            Kind::FetchAdd(to, add) => (SendOp::FetchAdd { remote: to, add }, result),
            Kind::CompareSwap(to, compare, swap) => (SendOp::CompareSwap { remote: to, compare, swap }, result),
            Kind::Flush(to) => (SendOp::Read { remote: to }, Sge { len: 1, ..result }),
            Kind::Confirm(to) => (SendOp::Read { remote: to }, Sge { len: 0, ..result }),
        };
        let sges = [sge];
        let request = SendRequest {
            wr_id: OPERATION | u64::from(number),
            op,
            payload: Payload::Sges(&sges),
            flags: SendFlags::SIGNALED,
        };
        self.0.qp.post_send(&request).map_err(|error| {
            state.operations.cancel(number);
            // The queue pair may have ended since the check above, before its event is handled.
            self.0.qp.error().map_or(Error::Fabric(error), Error::Ended)
        })
    }
}
