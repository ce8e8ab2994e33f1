//! What a connection has to send: any task puts messages in, one task sends them, all there are at once.

use crate::net::{Message, Writer};
use std::cell::{Cell, RefCell};
use std::io;
use tokio::sync::Notify;

/// Bytes of messages' own memory that wait to be sent; then nothing is begun that would add to them.
const WAITING_MAX: usize = 1 << 20;

/// Messages of one connection.
#[derive(Default)]
pub(crate) struct Outbox {
    messages: RefCell<Vec<Message>>,
    /// Bytes of memory of messages that have not been sent.
    waiting: Cell<usize>,
    ready: Notify,
    sent: Notify,
    closing: Cell<bool>,
    broken: Cell<bool>,
    broke: Notify,
}

impl Outbox {
    /// Adds a message. If nothing can be sent any more it goes, with the blocks that others of the connection wait for.
    pub(crate) fn push(&self, message: Message) {
        if self.broken.get() {
            return;
        }
        self.waiting.set(self.waiting.get() + message.memory());
        self.messages.borrow_mut().push(message);
        self.ready.notify_one();
    }

    /// Waits until not too much waits to be sent. A peer that does not take its answers is to be asked this before
    /// anything more is done for it.
    pub(crate) async fn room(&self) {
        loop {
            let told = self.sent.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if self.waiting.get() < WAITING_MAX || self.broken.get() {
                return;
            }
            told.await;
        }
    }

    /// Nothing will be added any more; what is there is still sent.
    pub(crate) fn close(&self) {
        self.closing.set(true);
        self.ready.notify_one();
    }

    /// Resolves when nothing can be sent any more.
    pub(crate) async fn broken(&self) {
        loop {
            let told = self.broke.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if self.broken.get() {
                return;
            }
            told.await;
        }
    }

    /// Sends until closed.
    pub(crate) async fn run(&self, mut writer: Writer) {
        tokio::select! {
            biased;
            // A peer that does not read is not waited for.
            () = self.broken() => {}
            sent = self.send(&mut writer) => {
                if let Err(error) = sent {
                    tracing::debug!(%error, "sending to a block client");
                    self.fail();
                }
            }
        }
        writer.close().await;
    }

    /// Nothing is sent any more, and the connection ends.
    pub(crate) fn fail(&self) {
        self.broken.set(true);
        let unsent = std::mem::take(&mut *self.messages.borrow_mut());
        drop(unsent);
        self.broke.notify_waiters();
        self.sent.notify_waiters();
        self.ready.notify_one();
    }

    async fn send(&self, writer: &mut Writer) -> io::Result<()> {
        let mut batch = Vec::new();
        loop {
            std::mem::swap(&mut batch, &mut *self.messages.borrow_mut());
            if batch.is_empty() {
                if self.closing.get() || self.broken.get() {
                    return Ok(());
                }
                self.ready.notified().await;
                continue;
            }
            let memory: usize = batch.iter().map(Message::memory).sum();
            writer.send(&mut batch).await?;
            self.waiting.set(self.waiting.get() - memory);
            self.sent.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{Body, Plain, Stream};
    use futures_util::FutureExt;
    use smallvec::SmallVec;
    use thruway_engine::Segments;

    #[test]
    fn who_is_given_up_is_not_sent_the_rest() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, _theirs) = tokio::net::UnixStream::pair().unwrap();
            let (_reader, writer) = Stream::Plain(Plain::Unix(ours)).split().unwrap();
            let outbox = Outbox::default();
            let body = Body::Bytes(vec![0; 16 << 20]);
            outbox.push(Message { header: SmallVec::new(), body, trailer: SmallVec::new() });
            let mut running = Box::pin(outbox.run(writer));
            assert!((&mut running).now_or_never().is_none(), "nobody reads");
            outbox.fail();
            assert!(running.now_or_never().is_some());
        });
    }

    #[test]
    fn what_cannot_be_sent_keeps_no_memory() {
        let (outbox, supply) = (Outbox::default(), Segments::new(1, 4096).unwrap());
        outbox.broken.set(true);
        let segment = supply.reserve(1).now_or_never().unwrap().segment(4096);
        let body = Body::Segments(SmallVec::from_iter([segment]));
        outbox.push(Message { header: SmallVec::new(), body, trailer: SmallVec::new() });
        assert!(supply.reserve(1).now_or_never().is_some(), "another read can go on");
    }
}
