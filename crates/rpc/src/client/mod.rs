//! Calling programs over TCP and RDMA: any number of calls at a time on one connection.

mod gss;
mod rdma;

pub use gss::GssSession;
pub use rdma::RdmaOptions;

use self::rdma::{Arrived, Rdma};

use crate::message::{CallHeader, Incoming, OpaqueAuth, Refusal, ReplyHeader, encode_success};
use crate::record::{MARKER_LEN, Marker, messages};
use crate::server::BULK_MAX;
use crate::xdr::{DecodeError, Decoder, Encoder};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use thruway_engine::Segment;
use thruway_gss::GssError;
use thruway_server::{Plain, Reader, SendQueue, Stream};
use tokio::net::TcpSocket;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Longest reply, in bytes.
const REPLY_MAX: usize = BULK_MAX + (64 << 10);
/// Bytes for which memory is allocated before they have arrived.
const STEP: usize = 256 << 10;
/// Memory of replies that is kept for those that come.
const SPARE_MAX: usize = 64;

/// Why a call has no results.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The connection is broken, or was closed by the server.
    #[error("the connection is lost: {0}")]
    Connection(#[from] io::Error),
    /// No reply came in time.
    #[error("no reply within {} s", .0.as_secs())]
    TimedOut(Duration),
    /// The server has answered that it does not do it.
    #[error("refused by the server: {0}")]
    Refused(Refusal),
    /// The user cannot prove who it is, or the server cannot.
    #[error("Kerberos: {0}")]
    Gss(#[from] GssError),
    /// The server cannot answer over RDMA.
    #[error("over RDMA: {0}")]
    Rdma(&'static str),
    /// The reply cannot be decoded.
    #[error("a reply that cannot be decoded: {0}")]
    Malformed(#[from] DecodeError),
}

/// A procedure of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Procedure {
    /// Number of the program.
    pub program: u32,
    /// Its version.
    pub version: u32,
    /// Number of the procedure.
    pub procedure: u32,
}

/// A connection to a server. It works in a [`tokio::task::LocalSet`], and ends with the last copy of it.
#[derive(Clone)]
pub struct Client(Rc<Running>);

struct Running {
    shared: Rc<Shared>,
    reader: JoinHandle<()>,
}

/// What calls go by.
enum Link {
    Stream(SendQueue),
    Rdma(Box<Rdma>),
}

/// Arguments of a call, and how long its results may be, which is to be known beforehand over RDMA.
pub struct Arguments {
    /// The arguments.
    pub bytes: Encoder,
    /// Longest item of the results that is data, in bytes; 0 if there is none.
    pub item_max: usize,
    /// Longest reply, data apart, if that may be longer than a message of one kilobyte; else 0.
    pub reply_max: usize,
}

impl From<Encoder> for Arguments {
    fn from(bytes: Encoder) -> Arguments {
        Arguments { bytes, item_max: 0, reply_max: 0 }
    }
}

/// Answers a call of the server: appends the results, or refuses.
pub type Answer = Rc<dyn Fn(CallHeader<'_>, &mut Decoder<'_>, &mut Encoder) -> Result<(), Refusal>>;

struct Shared {
    link: Link,
    /// Answers calls of the server.
    answer: RefCell<Option<Answer>>,
    waiting: RefCell<HashMap<u32, oneshot::Sender<Result<Arrived, CallError>>>>,
    /// Memory for replies.
    spare: RefCell<Vec<Vec<u8>>>,
    next: Cell<u32>,
    timeout: Duration,
    reply_max: Cell<usize>,
    /// Why no more replies come.
    failure: RefCell<Option<(io::ErrorKind, String)>>,
}

/// A reply with results.
pub struct Reply {
    message: Vec<u8>,
    results: Range<usize>,
    items: Cell<SmallVec<[Segment; 1]>>,
    shared: Rc<Shared>,
}

impl Reply {
    /// The results. Data that is not among their bytes is there the first time.
    pub fn results(&self) -> Decoder<'_> {
        Decoder::with_items(&self.message[self.results.clone()], self.items.take())
    }

    /// The results without data that is not among their bytes, any number of times.
    pub fn peek(&self) -> Decoder<'_> {
        Decoder::new(&self.message[self.results.clone()])
    }

    fn of(arrived: Arrived, client: &Client) -> Result<Reply, CallError> {
        let Arrived { message, items } = arrived;
        let results = results_of(&message)?..message.len();
        Ok(Reply { message, results, items: Cell::new(items), shared: Rc::clone(&client.0.shared) })
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        let mut spare = self.shared.spare.borrow_mut();
        if spare.len() < SPARE_MAX {
            spare.push(std::mem::take(&mut self.message));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        match &self.shared.link {
            Link::Stream(calls) => calls.close(),
            Link::Rdma(rdma) => rdma.fail(),
        }
        self.reader.abort();
    }
}

impl Client {
    /// Connects to a server. Calls wait for their replies at most for `timeout`.
    ///
    /// # Errors
    /// The system's.
    pub async fn connect(server: SocketAddr, timeout: Duration) -> io::Result<Client> {
        Client::connect_from(None, server, timeout).await
    }

    /// As [`Client::connect`], from this address, if it is given.
    ///
    /// # Errors
    /// The system's.
    pub async fn connect_from(local: Option<IpAddr>, server: SocketAddr, timeout: Duration) -> io::Result<Client> {
        let socket = if server.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        if let Some(local) = local {
            socket.bind(SocketAddr::new(local, 0))?;
        }
        let connecting = tokio::time::timeout(timeout, socket.connect(server)).await;
        let stream = connecting.map_err(|_| io::ErrorKind::TimedOut)??;
        stream.set_nodelay(true)?;
        Client::over(Plain::Tcp(stream), timeout)
    }

    /// Takes replies of at most so many bytes, over TCP: a longer one ends the connection.
    #[must_use]
    pub fn with_replies_of(self, most: usize) -> Client {
        self.0.shared.reply_max.set(most);
        self
    }

    /// Whether the connection has ended.
    pub fn has_ended(&self) -> bool {
        self.0.shared.failure.borrow().is_some()
    }

    /// Answers calls of the server over TCP. Without this, a call ends the connection.
    pub fn answer_calls(&self, answer: Answer) {
        *self.0.shared.answer.borrow_mut() = Some(answer);
    }

    /// As [`Client::connect`], by a connection that is there.
    ///
    /// # Errors
    /// The system's.
    pub fn over(stream: Plain, timeout: Duration) -> io::Result<Client> {
        let (mut reader, writer) = Stream::plain(stream).split()?;
        let shared = Shared::new(Link::Stream(SendQueue::default()), timeout);
        let sender = Rc::clone(&shared);
        tokio::task::spawn_local(async move {
            let Link::Stream(calls) = &sender.link else { return };
            calls.run(writer).await;
        });
        let receiver = Rc::clone(&shared);
        let reader = tokio::task::spawn_local(async move {
            let Err(error) = receiver.receive(&mut reader).await;
            receiver.end(&error);
        });
        Ok(Client(Rc::new(Running { shared, reader })))
    }

    /// As [`Client::connect`], over RDMA.
    ///
    /// # Errors
    /// The device's, or that the server does not answer or refuses.
    pub async fn connect_rdma(server: SocketAddr, timeout: Duration, options: &RdmaOptions) -> io::Result<Client> {
        let connecting = tokio::time::timeout(timeout, Rdma::connect(server, options)).await;
        let (rdma, mut messages) = connecting.map_err(|_| io::ErrorKind::TimedOut)??;
        let shared = Shared::new(Link::Rdma(Box::new(rdma)), timeout);
        let receiver = Rc::clone(&shared);
        let reader = tokio::task::spawn_local(async move {
            let error = loop {
                let Some(message) = messages.recv().await else {
                    break io::Error::new(io::ErrorKind::UnexpectedEof, "closed by the server");
                };
                let Link::Rdma(rdma) = &receiver.link else { return };
                match rdma.take(&message).await {
                    Ok(Some((xid, arrived))) => {
                        let waiting = receiver.waiting.borrow_mut().remove(&xid);
                        waiting.map(|waiting| waiting.send(arrived));
                    }
                    // To a call that is not waited for any more, or a call back.
                    Ok(None) => {}
                    Err(error) => break error,
                }
            };
            receiver.end(&error);
        });
        Ok(Client(Rc::new(Running { shared, reader })))
    }

    /// Calls a procedure as a user.
    ///
    /// # Errors
    /// [`CallError`]; whether the server has done it is then not known, unless it has refused.
    pub async fn call(
        &self,
        procedure: Procedure,
        credential: OpaqueAuth<'_>,
        arguments: impl Into<Arguments>,
    ) -> Result<Reply, CallError> {
        let mut arguments = arguments.into();
        let bytes = std::mem::take(&mut arguments.bytes);
        let Procedure { program, version, procedure } = procedure;
        let reply = self
            .send(
                |xid| {
                    let mut call = Encoder::new();
                    let verifier = OpaqueAuth::NONE;
                    CallHeader { xid, program, version, procedure, credential, verifier }.encode(&mut call);
                    call.append(bytes);
                    Ok(call)
                },
                &arguments,
            )
            .await?;
        Reply::of(reply, self)
    }

    /// Sends the call that this makes with its number, with room for results as these say; the reply.
    async fn send(
        &self,
        make: impl FnOnce(u32) -> Result<Encoder, CallError>,
        room: &Arguments,
    ) -> Result<Arrived, CallError> {
        let shared = &self.0.shared;
        shared.check()?;
        let xid = shared.next.get();
        shared.next.set(xid.wrapping_add(1));
        let call = make(xid)?;
        let (sender, reply) = oneshot::channel();
        shared.waiting.borrow_mut().insert(xid, sender);
        let waiting = Waiting { shared, xid };
        let exchange = async {
            let _in_progress = match &shared.link {
                Link::Stream(calls) => {
                    messages(call).into_iter().for_each(|message| calls.push(message));
                    None
                }
                Link::Rdma(rdma) => Some(rdma.send(xid, call, room).await?),
            };
            reply.await.unwrap_or_else(|_| {
                shared.check()?;
                Err(io::Error::from(io::ErrorKind::BrokenPipe).into())
            })
        };
        let reply = tokio::time::timeout(shared.timeout, exchange).await;
        drop(waiting);
        reply.map_err(|_| CallError::TimedOut(shared.timeout))?
    }
}

/// Where the results of a reply begin.
pub(crate) fn results_of(message: &[u8]) -> Result<usize, CallError> {
    let mut decoder = Decoder::new(message);
    match Incoming::decode(&mut decoder)? {
        Incoming::Reply(ReplyHeader { refusal: None, .. }) => Ok(decoder.position() as usize),
        Incoming::Reply(ReplyHeader { refusal: Some(refusal), .. }) => Err(CallError::Refused(refusal)),
        _ => unreachable!("only replies are given to those who wait"),
    }
}

/// Forgets a call whose reply is no longer waited for.
struct Waiting<'a> {
    shared: &'a Shared,
    xid: u32,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.shared.waiting.borrow_mut().remove(&self.xid);
    }
}

impl Shared {
    fn new(link: Link, timeout: Duration) -> Rc<Shared> {
        Rc::new(Shared {
            link,
            waiting: RefCell::default(),
            spare: RefCell::default(),
            answer: RefCell::default(),
            // Another one after each start: a server may remember what an earlier client has called.
            next: Cell::new(u32::from_be_bytes(thruway_engine::random::random())),
            timeout,
            reply_max: Cell::new(REPLY_MAX),
            failure: RefCell::new(None),
        })
    }

    /// Nothing comes any more.
    fn end(&self, error: &io::Error) {
        *self.failure.borrow_mut() = Some((error.kind(), error.to_string()));
        match &self.link {
            Link::Stream(calls) => calls.fail(),
            Link::Rdma(rdma) => rdma.fail(),
        }
        self.waiting.borrow_mut().clear();
    }

    fn check(&self) -> io::Result<()> {
        match &*self.failure.borrow() {
            None => Ok(()),
            Some((kind, text)) => Err(io::Error::new(*kind, text.clone())),
        }
    }

    /// Gives replies to those who wait for them, until the connection ends.
    async fn receive(&self, reader: &mut Reader) -> io::Result<std::convert::Infallible> {
        loop {
            let message = self.record(reader).await?;
            let mut decoder = Decoder::new(&message);
            match Incoming::decode(&mut decoder) {
                Ok(Incoming::Reply(header)) => {
                    let waiting = self.waiting.borrow_mut().remove(&header.xid);
                    // Its call may have timed out.
                    waiting.map(|waiting| waiting.send(Ok(message.into())));
                }
                Ok(Incoming::Call(call)) if self.answer.borrow().is_some() => {
                    let answer = self.answer.borrow().clone().expect("it was there");
                    let (mut reply, mut results) = (Encoder::new(), Encoder::new());
                    match answer(call, &mut decoder, &mut results) {
                        Ok(()) => {
                            encode_success(call.xid, OpaqueAuth::NONE, &mut reply);
                            reply.append(results);
                        }
                        Err(refusal) => refusal.encode(call.xid, OpaqueAuth::NONE, &mut reply),
                    }
                    let Link::Stream(replies) = &self.link else { continue };
                    // A server that does not take its answers gets no more.
                    replies.room().await;
                    messages(reply).into_iter().for_each(|message| replies.push(message));
                }
                // The server does not call unless the client has said that it answers.
                Ok(Incoming::Call(_) | Incoming::OtherVersion { .. }) | Err(_) => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "what the server sends is no reply"));
                }
            }
        }
    }

    async fn record(&self, reader: &mut Reader) -> io::Result<Vec<u8>> {
        let mut message = self.spare.borrow_mut().pop().unwrap_or_default();
        let mut filled = 0;
        loop {
            let Some(marker) = reader.peek(MARKER_LEN).await?.and_then(<[u8]>::first_chunk).copied() else {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed by the server"));
            };
            reader.consume(MARKER_LEN);
            let marker = Marker::decode(marker);
            let end = filled + marker.len as usize;
            let most = self.reply_max.get();
            if end > most {
                return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a reply of more than {most} bytes")));
            }
            while filled < end {
                let step = end.min(filled + STEP);
                if message.len() < step {
                    message.resize(step, 0);
                }
                reader.read_exact(&mut message[filled..step]).await?;
                filled = step;
            }
            if marker.last {
                message.truncate(filled);
                return Ok(message);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    const TIMEOUT: Duration = Duration::from_secs(30);
    const PROCEDURE: Procedure = Procedure { program: 1, version: 2, procedure: 3 };

    fn run<T>(test: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, test)
    }

    /// A client, and the server's end of its connection.
    async fn pair(timeout: Duration) -> (Client, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = Client::connect(listener.local_addr().unwrap(), timeout).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    /// Takes a call without arguments or credential; its number.
    async fn take(server: &mut TcpStream) -> u32 {
        let mut call = [0; 4 + 40];
        server.read_exact(&mut call).await.unwrap();
        u32::from_be_bytes(*call[4..].first_chunk().unwrap())
    }

    fn reply(xid: u32, result: u32) -> Vec<u8> {
        [xid, 1, 0, 0, 0, 0, result].iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    fn fragment(bytes: &[u8], last: bool) -> Vec<u8> {
        [&Marker { last, len: bytes.len() as u32 }.encode()[..], bytes].concat()
    }

    #[test]
    fn replies_go_to_their_calls_in_any_order_and_in_fragments() {
        run(async {
            let (client, mut server) = pair(TIMEOUT).await;
            let call = || client.call(PROCEDURE, OpaqueAuth::NONE, Encoder::new());
            let serve = async {
                let (first, second) = (take(&mut server).await, take(&mut server).await);
                // One without a call is passed over.
                let stray = fragment(&reply(second.wrapping_add(9), 0), true);
                let (two, one) = (reply(second, 2), reply(first, 1));
                let all = [stray, fragment(&two[..5], false), fragment(&two[5..], true), fragment(&one, true)].concat();
                server.write_all(&all).await.unwrap();
            };
            let (one, two, ()) = tokio::join!(call(), call(), serve);
            let result = |reply: Reply| reply.results().u32().unwrap();
            assert_eq!((result(one.unwrap()), result(two.unwrap())), (1, 2));
        });
    }

    #[test]
    fn refusals_are_errors() {
        run(async {
            let (client, mut server) = pair(TIMEOUT).await;
            let serve = async {
                let xid = take(&mut server).await;
                let mut refused = Encoder::new();
                Refusal::ProgramMismatch { low: 3, high: 4 }.encode(xid, OpaqueAuth::NONE, &mut refused);
                server.write_all(&fragment(&refused.to_bytes(), true)).await.unwrap();
            };
            let (refused, ()) = tokio::join!(client.call(PROCEDURE, OpaqueAuth::NONE, Encoder::new()), serve);
            assert!(matches!(refused, Err(CallError::Refused(Refusal::ProgramMismatch { low: 3, high: 4 }))));
        });
    }

    #[test]
    fn a_server_that_closes_talks_nonsense_or_says_nothing_ends_the_call() {
        for sent in [Vec::new(), vec![0xff; 100], fragment(&[0; 3], true), fragment(&[0, 0, 0, 1, 0, 0, 0, 7], true)] {
            run(async {
                let (client, mut server) = pair(TIMEOUT).await;
                let serve = async {
                    take(&mut server).await;
                    server.write_all(&sent).await.unwrap();
                    drop(server);
                };
                let (lost, ()) = tokio::join!(client.call(PROCEDURE, OpaqueAuth::NONE, Encoder::new()), serve);
                assert!(matches!(lost, Err(CallError::Connection(_))), "{sent:?}");
                let next = client.call(PROCEDURE, OpaqueAuth::NONE, Encoder::new()).await;
                assert!(matches!(next, Err(CallError::Connection(_))), "and those behind it");
            });
        }
        run(async {
            let (client, _server) = pair(Duration::from_millis(20)).await;
            let late = client.call(PROCEDURE, OpaqueAuth::NONE, Encoder::new()).await;
            assert!(matches!(late, Err(CallError::TimedOut(_))));
            assert!(client.0.shared.waiting.borrow().is_empty());
        });
    }
}
