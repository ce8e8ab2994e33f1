//! Calling programs over TCP: any number of calls at a time on one connection.

mod gss;

pub use gss::GssSession;

use crate::message::{CallHeader, Incoming, OpaqueAuth, Refusal, ReplyHeader};
use crate::record::{MARKER_LEN, Marker, messages};
use crate::server::BULK_MAX;
use crate::xdr::{DecodeError, Decoder, Encoder};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use thruway_gss::GssError;
use thruway_server::{Plain, Reader, SendQueue, Stream};
use tokio::net::TcpSocket;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Longest reply, in bytes.
const REPLY_MAX: usize = BULK_MAX + (64 << 10);
/// What a server says that it sends costs no memory before it is there, but for so many bytes.
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
    #[error("refused by the server: {0:?}")]
    Refused(Refusal),
    /// The user cannot prove who it is, or the server cannot.
    #[error("Kerberos: {0}")]
    Gss(#[from] GssError),
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

struct Shared {
    calls: SendQueue,
    waiting: RefCell<HashMap<u32, oneshot::Sender<Vec<u8>>>>,
    /// Memory for replies.
    spare: RefCell<Vec<Vec<u8>>>,
    next: Cell<u32>,
    timeout: Duration,
    /// Why no more replies come.
    failure: RefCell<Option<(io::ErrorKind, String)>>,
}

/// A reply with results.
pub struct Reply {
    message: Vec<u8>,
    results: Range<usize>,
    shared: Rc<Shared>,
}

impl Reply {
    /// The results.
    pub fn results(&self) -> Decoder<'_> {
        Decoder::new(&self.message[self.results.clone()])
    }

    fn of(message: Vec<u8>, client: &Client) -> Result<Reply, CallError> {
        let results = results_of(&message)?..message.len();
        Ok(Reply { message, results, shared: Rc::clone(&client.0.shared) })
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
        self.shared.calls.close();
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

    /// As [`Client::connect`], by a connection that is there.
    ///
    /// # Errors
    /// The system's.
    pub fn over(stream: Plain, timeout: Duration) -> io::Result<Client> {
        let (mut reader, writer) = Stream::Plain(stream).split()?;
        let shared = Rc::new(Shared {
            calls: SendQueue::default(),
            waiting: RefCell::default(),
            spare: RefCell::default(),
            // Another one after each start: a server may remember what an earlier client has called.
            next: Cell::new(u32::from_be_bytes(thruway_engine::random::random())),
            timeout,
            failure: RefCell::new(None),
        });
        let sender = Rc::clone(&shared);
        tokio::task::spawn_local(async move { sender.calls.run(writer).await });
        let receiver = Rc::clone(&shared);
        let reader = tokio::task::spawn_local(async move {
            let Err(error) = receiver.receive(&mut reader).await;
            *receiver.failure.borrow_mut() = Some((error.kind(), error.to_string()));
            receiver.calls.fail();
            receiver.waiting.borrow_mut().clear();
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
        arguments: Encoder,
    ) -> Result<Reply, CallError> {
        let Procedure { program, version, procedure } = procedure;
        let reply = self
            .send(|xid| {
                let mut call = Encoder::new();
                let verifier = OpaqueAuth::NONE;
                CallHeader { xid, program, version, procedure, credential, verifier }.encode(&mut call);
                call.append(arguments);
                Ok(call)
            })
            .await?;
        Reply::of(reply, self)
    }

    /// Sends the call that this makes with its number; the reply.
    async fn send(&self, make: impl FnOnce(u32) -> Result<Encoder, CallError>) -> Result<Vec<u8>, CallError> {
        let shared = &self.0.shared;
        shared.check()?;
        let xid = shared.next.get();
        shared.next.set(xid.wrapping_add(1));
        let call = make(xid)?;
        let (sender, reply) = oneshot::channel();
        shared.waiting.borrow_mut().insert(xid, sender);
        let waiting = Waiting { shared, xid };
        messages(call).into_iter().for_each(|message| shared.calls.push(message));
        let reply = tokio::time::timeout(shared.timeout, reply).await.map_err(|_| CallError::TimedOut(shared.timeout));
        drop(waiting);
        let Ok(message) = reply? else {
            shared.check()?;
            return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        };
        Ok(message)
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
            match Incoming::decode(&mut Decoder::new(&message)) {
                Ok(Incoming::Reply(header)) => {
                    let waiting = self.waiting.borrow_mut().remove(&header.xid);
                    // Its call may have timed out.
                    waiting.map(|waiting| waiting.send(message));
                }
                // Nor has it been asked to call.
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
            if end > REPLY_MAX {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("a reply of more than {REPLY_MAX} bytes"),
                ));
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
