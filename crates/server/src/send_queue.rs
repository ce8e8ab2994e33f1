//! Send queue of a connection: any task adds messages, one task sends them, as many as possible at once.

use crate::flag::Flag;
use crate::{Message, Writer};
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use tokio::sync::Notify;

/// Bytes of the messages' own memory that may be unsent before [`SendQueue::room`] waits.
const UNSENT_MAX: usize = 1 << 20;

/// The unsent messages of one connection.
#[derive(Default)]
pub struct SendQueue {
    messages: RefCell<Vec<Message>>,
    /// Bytes of memory that unsent messages own.
    unsent: Cell<usize>,
    ready: Notify,
    sent: Notify,
    closing: Cell<bool>,
    broken: Rc<Flag>,
}

impl SendQueue {
    /// Adds a message. Once the queue has failed it is dropped at once, with the blocks that it holds.
    pub fn push(&self, message: Message) {
        if self.broken.is_set() {
            return;
        }
        self.unsent.set(self.unsent.get() + message.memory());
        self.messages.borrow_mut().push(message);
        self.ready.notify_one();
    }

    /// Waits until the unsent messages are below the limit, or the queue has failed. To be called before anything is
    /// done for a peer that may not read its replies.
    pub async fn room(&self) {
        loop {
            let notified = self.sent.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.unsent.get() < UNSENT_MAX || self.broken.is_set() {
                return;
            }
            notified.await;
        }
    }

    /// Ends [`SendQueue::run`] when the messages added so far have been sent.
    pub fn close(&self) {
        self.closing.set(true);
        self.ready.notify_one();
    }

    /// Flag that is set when the queue has failed.
    pub fn failure(&self) -> Rc<Flag> {
        Rc::clone(&self.broken)
    }

    /// Resolves when the queue has failed.
    pub async fn broken(&self) {
        self.broken.wait().await;
    }

    /// Sends messages until the queue is closed or has failed.
    pub async fn run(&self, mut writer: Writer) {
        tokio::select! {
            biased;
            // Does not wait for a peer that does not read.
            () = self.broken() => {}
            sent = self.send(&mut writer) => {
                if let Err(error) = sent {
                    tracing::debug!(%error, "cannot send to the client");
                    self.fail();
                }
            }
        }
        writer.close().await;
    }

    /// Drops the unsent messages and ends [`SendQueue::run`].
    pub fn fail(&self) {
        self.broken.set();
        let unsent = std::mem::take(&mut *self.messages.borrow_mut());
        drop(unsent);
        self.sent.notify_waiters();
        self.ready.notify_one();
    }

    async fn send(&self, writer: &mut Writer) -> io::Result<()> {
        let mut batch = Vec::new();
        loop {
            std::mem::swap(&mut batch, &mut *self.messages.borrow_mut());
            if batch.is_empty() {
                if self.closing.get() || self.broken.is_set() {
                    return Ok(());
                }
                self.ready.notified().await;
                continue;
            }
            let memory: usize = batch.iter().map(Message::memory).sum();
            writer.send(&mut batch).await?;
            self.unsent.set(self.unsent.get() - memory);
            self.sent.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Body, Plain, Stream};
    use futures_util::FutureExt;
    use smallvec::SmallVec;
    use thruway_engine::Segments;

    #[test]
    fn a_failed_queue_does_not_wait_for_the_peer() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, _theirs) = tokio::net::UnixStream::pair().unwrap();
            let (_reader, writer) = Stream::plain(Plain::Unix(ours)).split().unwrap();
            let queue = SendQueue::default();
            let body = Body::Bytes(vec![0; 16 << 20]);
            queue.push(Message { header: SmallVec::new(), body, trailer: SmallVec::new() });
            let mut running = Box::pin(queue.run(writer));
            assert!((&mut running).now_or_never().is_none(), "the peer does not read");
            queue.fail();
            assert!(running.now_or_never().is_some());
        });
    }

    #[test]
    fn a_failed_queue_keeps_no_blocks() {
        let (queue, segments) = (SendQueue::default(), Segments::new(1, 4096).unwrap());
        queue.broken.set();
        let segment = segments.reserve(1).now_or_never().unwrap().segment(4096);
        let body = Body::Segments(SmallVec::from_iter([segment]));
        queue.push(Message { header: SmallVec::new(), body, trailer: SmallVec::new() });
        assert!(segments.reserve(1).now_or_never().is_some(), "the block is free again");
    }
}
