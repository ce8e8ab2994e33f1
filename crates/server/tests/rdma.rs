//! A service that echoes, over iWARP in user space.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_fabric::iwarp::Config;
use thruway_fabric::slots::{Completed, MessageSlots};
use thruway_fabric::{
    Access, Buffer, CompletionQueue, ConnectParams, ConnectionEvent, Device, ProtectionDomain, Provider, QueuePair,
    QueuePairCaps, RemoteAddr, Status,
};
use thruway_server::Buffers;
use thruway_server::rdma::{Channel, Options};
use thruway_server::{Acceptor, Address, ConnectionKind};

const MESSAGE_MAX: usize = 512;
/// Only reached if something hangs.
const HUNG: Duration = Duration::from_secs(60);

fn options() -> Options {
    Options {
        message_max: MESSAGE_MAX,
        receives: 8,
        sends: 4,
        backlog_max: 4,
        send_depth: 16,
        read_depth: 4,
        private_data: Vec::new(),
    }
}

struct Client {
    qp: QueuePair,
    cq: CompletionQueue,
    slots: MessageSlots,
    pd: ProtectionDomain,
    device: Device,
    received: RefCell<Vec<Vec<u8>>>,
}

impl Client {
    fn connect(to: SocketAddr) -> Client {
        let device = Provider::Iwarp(Config::default()).open().unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(64).unwrap();
        let qp = pd.create_qp(&cq, &cq, QueuePairCaps { max_send_wr: 32, max_recv_wr: 32, max_sge: 1 }).unwrap();
        let slots = MessageSlots::new(&pd, 32, 32, MESSAGE_MAX).unwrap();
        slots.post_receives(&qp).unwrap();
        qp.connect(to, &ConnectParams { ird: 4, ord: 4, ..ConnectParams::default() }).unwrap();
        let client = Client { qp, cq, slots, pd, device, received: RefCell::default() };
        while client.qp.info().is_none() {
            if let Some(ConnectionEvent::Disconnected { cause, .. }) = client.device.poll_event() {
                panic!("{cause}");
            }
            client.device.wait(Some(HUNG)).unwrap();
        }
        client
    }

    fn send(&mut self, message: &[u8]) {
        let stored = self.slots.store(message).expect("a free slot");
        self.slots.send(&self.qp, stored).unwrap();
    }

    /// Takes what has come, waiting for something.
    fn progress(&mut self) {
        let mut completions = Vec::new();
        while self.cq.poll(&mut completions, 16) == 0 {
            self.device.wait(Some(HUNG)).unwrap();
        }
        for wc in completions {
            assert_eq!(wc.status, Status::Success);
            if let Completed::Received(received) = self.slots.complete(&wc) {
                self.received.borrow_mut().push(self.slots.read(received));
                self.slots.post_receive(&self.qp, received).unwrap();
            }
        }
    }

    fn next(&mut self) -> Vec<u8> {
        while self.received.borrow().is_empty() {
            self.progress();
        }
        self.received.borrow_mut().remove(0)
    }
}

/// Serves connections by this function.
fn serve<F>(
    reactors: &Reactors,
    service: impl Fn(std::rc::Rc<Channel>, thruway_server::rdma::Messages) -> F + Clone + Send + 'static,
) -> (SocketAddr, Arc<Acceptor>)
where
    F: Future<Output = ()> + 'static,
{
    let acceptor = Acceptor::new("echo", ConnectionKind::Rdma, 4, false);
    let provider = Provider::Iwarp(Config::default());
    let at = "127.0.0.1:0".parse().unwrap();
    let addresses = acceptor
        .listen_rdma(&[at], &provider.clone(), reactors, move |request, _permit| {
            let accepted = Channel::accept(&provider, request, options());
            let service = service.clone();
            async move {
                let (channel, messages, driver) = accepted.map_err(std::io::Error::other)?;
                service(channel, messages).await;
                driver.close(HUNG).await;
                Ok(())
            }
        })
        .unwrap();
    let Address::Tcp(address) = addresses[0] else { panic!("{addresses:?}") };
    (address, acceptor)
}

#[test]
fn messages_come_back_in_order() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (address, acceptor) = serve(&reactors, |channel, mut messages| async move {
        while let Some(message) = messages.recv().await {
            channel.room().await;
            channel.send(message, None);
        }
    });
    let mut client = Client::connect(address);
    for round in 0..200u32 {
        for n in 0..4u32 {
            client.send(&[round.to_be_bytes(), n.to_be_bytes()].concat());
        }
        for n in 0..4u32 {
            assert_eq!(client.next(), [round.to_be_bytes(), n.to_be_bytes()].concat());
        }
    }
    drop(client);
    acceptor.shut_down(HUNG);
}

#[test]
fn memory_of_the_peer_is_read_and_written() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (address, acceptor) = serve(&reactors, |channel, mut messages| async move {
        let buffers = Buffers::new(64 << 10);
        while let Some(message) = messages.recv().await {
            let remote = RemoteAddr {
                addr: u64::from_be_bytes(message[..8].try_into().unwrap()),
                rkey: u32::from_be_bytes(message[8..12].try_into().unwrap()),
            };
            let segment = buffers.segment(4096).await.unwrap();
            let Some(mut segment) = channel.read(segment, remote).await else { return };
            segment.as_mut_slice().reverse();
            channel.write(segment, RemoteAddr { addr: remote.addr + 4096, ..remote });
            channel.send(b"done".to_vec(), None);
        }
    });
    let mut client = Client::connect(address);
    let buffer = Arc::new(Buffer::new(8192).unwrap());
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let region = client.pd.register(&buffer, access).unwrap();
    let bytes: Vec<u8> = (0..4096u32).map(|i| (i / 16) as u8).collect();
    buffer.write(0, &bytes);
    client.send(&[&region.addr().to_be_bytes()[..], &region.rkey().to_be_bytes()].concat());
    assert_eq!(client.next(), b"done");
    let mut back = vec![0; 4096];
    buffer.read(4096, &mut back);
    back.reverse();
    assert!(back == bytes);
    drop(client);
    acceptor.shut_down(HUNG);
}

#[test]
fn a_full_backlog_waits_and_a_failed_channel_does_not() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (tell, told) = mpsc::channel();
    let (address, acceptor) = serve(&reactors, move |channel, mut messages| {
        let tell = tell.clone();
        async move {
            let Some(_) = messages.recv().await else { return };
            // As many as are in slots or may wait, and no more without the reactor's turn.
            let mut sent = 0;
            while futures_util::FutureExt::now_or_never(channel.room()).is_some() {
                channel.send(vec![0; 8], None);
                sent += 1;
            }
            tell.send(sent).unwrap();
            channel.room().await;
            channel.send(vec![1; 8], None);
            channel.send(vec![0; MESSAGE_MAX + 1], None);
            assert!(channel.is_broken(), "a message too long for the peer ends the channel");
            channel.broken().await;
            channel.room().await;
            tell.send(0).unwrap();
        }
    });
    let mut client = Client::connect(address);
    client.send(b"go");
    let options = options();
    assert_eq!(told.recv_timeout(HUNG), Ok(options.sends + options.backlog_max));
    assert_eq!(client.next(), [0; 8]);
    assert_eq!(told.recv_timeout(HUNG), Ok(0));
    drop(client);
    acceptor.shut_down(HUNG);
}
