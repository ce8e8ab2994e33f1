//! Message slots: the registered memory that a queue pair's messages are received into and sent from.

use crate::{
    Access, Buffer, MemoryRegion, Payload, ProtectionDomain, QueuePair, RecvRequest, Result, SendFlags, SendOp,
    SendRequest, Sge, WorkCompletion,
};
use std::sync::Arc;

/// Set in the work request ids of receives; the slot is in the low bits.
const RECEIVE: u64 = 1 << 63;
/// Set in the work request ids of sends; the slot is in the low bits.
const SEND: u64 = 1 << 62;

/// The message slots of one queue pair. Work request ids below 2^62 are left to the owner of the queue pair.
pub struct MessageSlots {
    region: MemoryRegion,
    buffer: Arc<Buffer>,
    receives: usize,
    sends: usize,
    slot_len: usize,
    /// Send slots that no message is in.
    free: Vec<usize>,
}

/// A message in a send slot.
#[derive(Debug, Clone, Copy)]
pub struct Stored {
    slot: usize,
    len: usize,
}

impl Stored {
    /// The work request id to send it with.
    pub fn wr_id(self) -> u64 {
        SEND | self.slot as u64
    }
}

/// A message in a receive slot, until [`MessageSlots::post_receive`].
#[derive(Debug, Clone, Copy)]
pub struct Received {
    slot: usize,
    len: usize,
}

/// What a successful completion means for the slots.
#[derive(Debug)]
pub enum Completed {
    /// A message has been received.
    Received(Received),
    /// A message has been sent; its slot is free again.
    Sent,
    /// Something else: the owner's.
    Other,
}

impl MessageSlots {
    /// Registers slots for `receives` and `sends` messages of at most `slot_len` bytes.
    ///
    /// # Errors
    /// No memory, or the device refuses the registration.
    pub fn new(pd: &ProtectionDomain, receives: usize, sends: usize, slot_len: usize) -> Result<MessageSlots> {
        let buffer = Arc::new(Buffer::new((receives + sends) * slot_len)?);
        let region = pd.register(&buffer, Access::LOCAL_WRITE)?;
        Ok(MessageSlots { region, buffer, receives, sends, slot_len, free: (receives..receives + sends).collect() })
    }

    /// Posts a receive for each slot: what a new queue pair begins with.
    ///
    /// # Errors
    /// As [`QueuePair::post_recv`].
    pub fn post_receives(&self, qp: &QueuePair) -> Result<()> {
        (0..self.receives).try_for_each(|slot| self.post(qp, slot))
    }

    /// Posts the receive of a message that has been read.
    ///
    /// # Errors
    /// As [`QueuePair::post_recv`].
    pub fn post_receive(&self, qp: &QueuePair, received: Received) -> Result<()> {
        self.post(qp, received.slot)
    }

    fn post(&self, qp: &QueuePair, slot: usize) -> Result<()> {
        let sge = self.region.sge(slot * self.slot_len, self.slot_len as u32);
        qp.post_recv(&RecvRequest { wr_id: RECEIVE | slot as u64, sges: &[sge] })
    }

    /// Copies a message out of its slot.
    pub fn read(&self, received: Received) -> Vec<u8> {
        let mut bytes = vec![0; received.len.min(self.slot_len)];
        self.buffer.read(received.slot * self.slot_len, &mut bytes);
        bytes
    }

    /// Longest message, in bytes.
    pub fn message_max(&self) -> usize {
        self.slot_len
    }

    /// Whether a message can be stored.
    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Whether every message that was stored has been sent.
    pub fn all_sent(&self) -> bool {
        self.free.len() == self.sends
    }

    /// Copies a message into a send slot; `None` if none is free.
    ///
    /// # Panics
    /// If the message is longer than [`MessageSlots::message_max`].
    pub fn store(&mut self, message: &[u8]) -> Option<Stored> {
        assert!(message.len() <= self.slot_len, "a message of {} bytes, longer than a slot", message.len());
        let slot = self.free.pop()?;
        self.buffer.write(slot * self.slot_len, message);
        Some(Stored { slot, len: message.len() })
    }

    /// Where a stored message is.
    pub fn sge(&self, stored: Stored) -> Sge {
        self.region.sge(stored.slot * self.slot_len, stored.len as u32)
    }

    /// Sends a stored message.
    ///
    /// # Errors
    /// As [`QueuePair::post_send`].
    pub fn send(&self, qp: &QueuePair, stored: Stored) -> Result<()> {
        qp.post_send(&SendRequest {
            wr_id: stored.wr_id(),
            op: SendOp::Send { invalidate: None },
            payload: Payload::Sges(&[self.sge(stored)]),
            flags: SendFlags::SIGNALED,
        })
    }

    /// Takes a completion of the queue pair that has succeeded.
    pub fn complete(&mut self, wc: &WorkCompletion) -> Completed {
        let slot = (wc.wr_id & !(RECEIVE | SEND)) as usize;
        if wc.wr_id & RECEIVE != 0 {
            Completed::Received(Received { slot, len: wc.len as usize })
        } else if wc.wr_id & SEND != 0 {
            self.free.push(slot);
            Completed::Sent
        } else {
            Completed::Other
        }
    }
}
