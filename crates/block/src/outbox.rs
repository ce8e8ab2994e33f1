//! What a connection has to send: any task puts messages in, one task sends them, all there are at once.

use crate::net::{Message, Writer};
use std::cell::{Cell, RefCell};
use std::io;
use std::time::Duration;
use tokio::sync::Notify;

/// A peer that takes nothing for so long is gone.
const SEND_LIMIT: Duration = Duration::from_secs(120);

/// Messages of one connection.
#[derive(Default)]
pub(crate) struct Outbox {
    messages: RefCell<Vec<Message>>,
    ready: Notify,
    closing: Cell<bool>,
    broken: Cell<bool>,
    broke: Notify,
}

impl Outbox {
    /// Adds a message.
    pub(crate) fn push(&self, message: Message) {
        self.messages.borrow_mut().push(message);
        self.ready.notify_one();
    }

    /// Nothing will be added any more; what is there is still sent.
    pub(crate) fn close(&self) {
        self.closing.set(true);
        self.ready.notify_one();
    }

    /// Resolves when nothing can be sent any more.
    pub(crate) async fn broken(&self) {
        while !self.broken.get() {
            self.broke.notified().await;
        }
    }

    /// Sends until closed.
    pub(crate) async fn run(&self, mut writer: Writer) {
        if let Err(error) = self.send(&mut writer).await {
            tracing::debug!(%error, "sending to a block client");
            self.messages.borrow_mut().clear();
            self.broken.set(true);
            self.broke.notify_one();
        }
        writer.close().await;
    }

    async fn send(&self, writer: &mut Writer) -> io::Result<()> {
        let mut batch = Vec::new();
        loop {
            std::mem::swap(&mut batch, &mut *self.messages.borrow_mut());
            if batch.is_empty() {
                if self.closing.get() {
                    return Ok(());
                }
                self.ready.notified().await;
                continue;
            }
            tokio::time::timeout(SEND_LIMIT, writer.send(&mut batch)).await.map_err(|_| io::ErrorKind::TimedOut)??;
        }
    }
}
