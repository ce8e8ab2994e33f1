//! Messages over a queue pair, for a thread that waits: what a program needs that only sends and receives.

use crate::slots::{Completed, MessageSlots, Received};
use crate::{
    CompletionQueue, ConnectParams, ConnectionError, ConnectionEvent, ConnectionRequest, Device, Error, Provider,
    QueuePair, QueuePairCaps, Result, Status,
};
use std::collections::VecDeque;
use std::net::SocketAddr;

/// Messages that the peer may send before the first of them is taken, and that may be in the send queue.
pub const DEPTH: usize = 16;

/// A connection that exchanges messages. Nothing tells the peer how far this end has got: a protocol on top sees to it that no more
/// than [`DEPTH`] messages are unanswered, or the connection ends.
pub struct Messages {
    qp: QueuePair,
    cq: CompletionQueue,
    slots: MessageSlots,
    received: VecDeque<Received>,
    peer: SocketAddr,
    closed: bool,
    device: Device,
}

impl Messages {
    /// Connects, for messages of at most `message_max` bytes; both ends must agree on that.
    ///
    /// # Errors
    /// [`Error::Connection`] if the peer refuses or does not answer.
    pub fn connect(provider: &Provider, peer: SocketAddr, message_max: usize) -> Result<Messages> {
        let mut messages = Messages::new(provider, peer, message_max)?;
        messages.qp.connect(peer, &ConnectParams::default())?;
        while messages.qp.info().is_none() {
            if let Some(cause) = messages.qp.error() {
                return Err(Error::Connection { peer, cause });
            }
            messages.progress()?;
        }
        Ok(messages)
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// As [`ConnectionRequest::accept`].
    pub fn accept(provider: &Provider, request: ConnectionRequest, message_max: usize) -> Result<Messages> {
        let messages = Messages::new(provider, request.peer(), message_max)?;
        request.accept(&messages.qp, &ConnectParams::default())?;
        Ok(messages)
    }

    fn new(provider: &Provider, peer: SocketAddr, message_max: usize) -> Result<Messages> {
        let device = provider.open()?;
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(2 * DEPTH)?;
        let caps = QueuePairCaps { max_send_wr: DEPTH as u32, max_recv_wr: DEPTH as u32, max_sge: 1 };
        let qp = pd.create_qp(&cq, &cq, caps)?;
        let slots = MessageSlots::new(&pd, DEPTH, DEPTH, message_max)?;
        slots.post_receives(&qp)?;
        Ok(Messages { qp, cq, slots, received: VecDeque::new(), peer, closed: false, device })
    }

    /// Sends a message, waiting until there is room for it.
    ///
    /// # Errors
    /// [`Error::Connection`] if the connection has ended.
    ///
    /// # Panics
    /// If the message is longer than was said.
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        loop {
            if let Some(cause) = self.qp.error() {
                return Err(Error::Connection { peer: self.peer, cause });
            }
            if let Some(stored) = self.slots.store(message) {
                return self.slots.send(&self.qp, stored);
            }
            self.progress()?;
        }
    }

    /// The next message, waiting for it; `None` when the peer has closed the connection.
    ///
    /// # Errors
    /// [`Error::Connection`] if the connection is lost.
    pub fn recv(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            if let Some(received) = self.received.pop_front() {
                let message = self.slots.read(received);
                match self.slots.post_receive(&self.qp, received) {
                    Err(error) if self.qp.error().is_none() => return Err(error),
                    _ => return Ok(Some(message)),
                }
            }
            match self.qp.error() {
                Some(ConnectionError::Closed) if self.closed => return Ok(None),
                Some(cause) if self.closed => return Err(Error::Connection { peer: self.peer, cause }),
                _ => self.progress()?,
            }
        }
    }

    /// Closes the connection when everything has been sent.
    ///
    /// # Errors
    /// If the device fails.
    pub fn close(mut self) -> Result<()> {
        while !self.slots.all_sent() && self.qp.error().is_none() {
            self.progress()?;
        }
        self.qp.disconnect();
        Ok(())
    }

    /// Takes what has come, or waits for something to.
    fn progress(&mut self) -> Result<()> {
        let mut completions = Vec::new();
        if self.cq.poll(&mut completions, DEPTH) == 0 {
            match self.device.poll_event() {
                // What came before the end is among the completions.
                Some(ConnectionEvent::Disconnected { .. }) => self.closed = true,
                Some(_) => {}
                None => self.device.wait(None)?,
            }
            // All of them: after the end there is no other poll.
            while self.cq.poll(&mut completions, DEPTH) > 0 {}
        }
        for wc in completions.iter().filter(|wc| wc.status == Status::Success) {
            if let Completed::Received(received) = self.slots.complete(wc) {
                self.received.push_back(received);
            }
        }
        Ok(())
    }
}

/// Accepts connections, for a thread that waits.
pub struct MessageListener {
    provider: Provider,
    device: Device,
    listener: crate::Listener,
    message_max: usize,
}

impl MessageListener {
    /// Listens for connections with messages of at most `message_max` bytes.
    ///
    /// # Errors
    /// As [`Device::listen`].
    pub fn bind(provider: &Provider, at: SocketAddr, message_max: usize) -> Result<MessageListener> {
        let device = provider.open()?;
        let listener = device.listen(at, &crate::ListenOptions::default())?;
        Ok(MessageListener { provider: provider.clone(), device, listener, message_max })
    }

    /// The address, with the port that the kernel chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Waits for a connection and accepts it.
    ///
    /// # Errors
    /// As [`Messages::accept`]; the next connection may succeed.
    pub fn accept(&self) -> Result<Messages> {
        loop {
            match self.device.poll_event() {
                Some(ConnectionEvent::Request(request)) => {
                    return Messages::accept(&self.provider, request, self.message_max);
                }
                Some(_) => {}
                None => self.device.wait(None)?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_go_both_ways_until_one_end_closes() {
        let provider = Provider::Iwarp(crate::iwarp::Config::default());
        let listener = MessageListener::bind(&provider, "127.0.0.1:0".parse().unwrap(), 64).unwrap();
        let at = listener.local_addr();
        let echo = std::thread::spawn(move || {
            let mut peer = listener.accept().unwrap();
            while let Some(message) = peer.recv().unwrap() {
                peer.send(&message).unwrap();
            }
        });
        let mut peer = Messages::connect(&provider, at, 64).unwrap();
        for round in 0..100u32 {
            for n in 0..DEPTH as u32 / 2 {
                peer.send(&(round * 100 + n).to_be_bytes()).unwrap();
            }
            for n in 0..DEPTH as u32 / 2 {
                assert_eq!(peer.recv().unwrap().unwrap(), (round * 100 + n).to_be_bytes());
            }
        }
        peer.close().unwrap();
        echo.join().unwrap();
        assert!(
            matches!(Messages::connect(&provider, at, 64), Err(Error::Connection { .. })),
            "the listener is closed"
        );
    }
}
