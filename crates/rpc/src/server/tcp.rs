//! Connections over TCP: calls are received, with their bulk items in memory of their own, and replies sent, whichever is ready.

use super::back::{BackCall, BackCalls, BackChannel};
use super::{
    BULK_MAX, CALL_MAX, Connection, FIRST_CALL_TIMEOUT, Programs, Received, STARTTLS, Server, Transport, refused,
};
use crate::message::{AuthError, Refusal, encode_success};
use crate::record::{MARKER_LEN, Marker, messages};
use crate::xdr::{BulkItem, Encoder, padded};
use smallvec::SmallVec;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::{Reactors, reactor};
use thruway_server::tls::TlsServer;
use thruway_server::{
    Acceptor, Address, Buffers, ConnectionKind, ListenError, Permit, Plain, Reader, SendQueue, Socket, Stream, Writer,
    panics,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

/// A connection whose client stops in the middle of a call for this long is closed.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Time to send replies after the client has closed its direction of the connection.
const CLOSED_TIMEOUT: Duration = Duration::from_secs(5);
/// Calls of a connection in progress at a time; then it is not read from.
const CALLS_MAX: usize = 256;
/// Calls of more than [`SMALL_CALL`] bytes beside their bulk items, in progress at a time.
const LONG_CALLS_MAX: usize = 4;
/// Bytes of a call that is received whole, whatever its items.
const SMALL_CALL: usize = 16 << 10;
/// Bytes of a longer call in which its bulk item is looked for.
const BEGINNING: usize = 2 << 10;
/// Most empty fragments of a call, not counting the last fragment. Clients have no reason to send any.
const EMPTY_FRAGMENTS_MAX: usize = 8;
/// Fragments of the first call of a connection, which is read without a buffer. Clients send one.
const FIRST_FRAGMENTS_MAX: usize = 16;
/// Bytes for which memory is allocated before they have arrived.
const STEP: usize = 64 << 10;

/// Configuration of a server.
pub struct Config {
    /// Name of the protocol, for logs and limits.
    pub protocol: &'static str,
    /// Addresses to listen on.
    pub listen: Vec<Address>,
    /// What is served.
    pub programs: Programs,
    /// TLS, for clients that ask for it (RFC 9289).
    pub tls: Option<Arc<TlsServer>>,
    /// Refuse calls without TLS, of programs that need it.
    pub tls_required: bool,
    /// Of clients over the loopback interface, serve only root and the user that this process runs as.
    pub own_user_only: bool,
    /// Connections at a time.
    pub connections_max: usize,
}

struct Service {
    programs: Programs,
    tls: Option<Arc<TlsServer>>,
    tls_required: bool,
    acceptor: Arc<Acceptor>,
}

impl Server {
    /// Starts to serve on these reactors.
    ///
    /// # Errors
    /// [`ListenError`] for the first address that cannot be listened on.
    pub fn start(config: Config, reactors: &Reactors) -> Result<Server, ListenError> {
        let kind = ConnectionKind::with_tls(config.tls.as_ref());
        let acceptor = Acceptor::new(config.protocol, kind, config.connections_max, config.own_user_only);
        let service = Arc::new(Service {
            programs: config.programs,
            tls: config.tls,
            tls_required: config.tls_required,
            acceptor: Arc::clone(&acceptor),
        });
        let serve = move |socket, permit: Arc<Permit>| {
            let service = Arc::clone(&service);
            async move { service.serve(socket, &permit).await }
        };
        let addresses = acceptor.listen(&config.listen, reactors, serve)?;
        Ok(Server { addresses, acceptor })
    }
}

/// True for an error after which nothing can be sent.
fn is_lost(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut)
}

fn invalid(what: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

/// Sends a reply before the connection has been split.
async fn send(stream: &mut Stream, reply: Encoder) -> io::Result<()> {
    for message in messages(reply) {
        stream.write_all(&[&message.header[..], &message.trailer].concat()).await?;
    }
    Ok(())
}

impl Service {
    async fn serve(&self, socket: Socket, permit: &Permit) -> io::Result<()> {
        let (peer, local) = match &socket {
            Socket::Tcp(stream, peer) => (Some(*peer), stream.local_addr().ok()),
            Socket::Unix(_) => (None, None),
        };
        let stream = socket.open()?;
        let mut closing = self.acceptor.closing();
        let begun = tokio::select! {
            begun = permit.handshake(FIRST_CALL_TIMEOUT, self.begin(stream)) => begun?,
            _ = closing.wait_for(|closing| *closing) => return Ok(()),
        };
        let Some((stream, first)) = begun else { return Ok(()) };
        let (transport, names) = match stream.as_tls() {
            None => (Transport::Tcp, Vec::new()),
            Some(stream) => (Transport::Tls, thruway_server::tls::names(stream)),
        };
        let (reader, writer) = stream.split()?;
        let lacks_tls = self.tls_required && transport == Transport::Tcp;
        let (back, back_calls) = BackChannel::new();
        let connection = Connection::new(peer, transport, writer.can_lend(), names);
        let replies = SendQueue::default();
        let (other_end, lost) = (Some(reader.peer()), Some(replies.failure()));
        let connection = Rc::new(Connection { local, lacks_tls, back: Some(back), other_end, lost, ..connection });
        let served = Served {
            programs: self.programs.clone(),
            connection,
            replies,
            bulk: Buffers::new(BULK_MAX),
            calls: Arc::new(Semaphore::new(CALLS_MAX)),
            long_calls: Arc::new(Semaphore::new(LONG_CALLS_MAX)),
            back_calls: BackCalls::default(),
        };
        if !lacks_tls {
            permit.set_authenticated()?;
        }
        let served = Rc::new(served);
        let mut serving = std::pin::pin!(Rc::clone(&served).serve(reader, writer, first, back_calls, closing));
        tokio::select! {
            ended = &mut serving => ended,
            () = permit.evicted(), if lacks_tls => {
                served.replies.fail();
                serving.await
            }
        }
    }

    /// Takes the first call, which decides whether there is TLS. `None` if the client closes or is sent away.
    async fn begin(&self, stream: Plain) -> io::Result<Option<(Stream, Vec<u8>)>> {
        let mut stream = Stream::plain(stream);
        let Some(first) = first_call(&mut stream).await? else { return Ok(None) };
        let refused_with = |refusal| refused(xid_of(&first), refusal);
        if !is_start_tls(&first) {
            return Ok(Some((stream, first)));
        }
        let Some(tls) = &self.tls else {
            // The client goes on without, or not, as it has been told to.
            send(&mut stream, refused_with(Refusal::Auth(AuthError::RejectedCredential))).await?;
            return Ok(first_call(&mut stream).await?.map(|call| (stream, call)));
        };
        let mut reply = Encoder::new();
        encode_success(xid_of(&first), STARTTLS, &mut reply);
        send(&mut stream, reply).await?;
        let plain = stream.into_plain().expect("TLS has not begun");
        let mut stream = Stream::tls(tls.accept(plain).await?);
        Ok(first_call(&mut stream).await?.map(|call| (stream, call)))
    }
}

fn xid_of(message: &[u8]) -> u32 {
    message.first_chunk().map_or(0, |xid| u32::from_be_bytes(*xid))
}

fn is_start_tls(message: &[u8]) -> bool {
    use crate::message::{Incoming, flavor::AUTH_TLS};
    let header = Incoming::decode(&mut crate::xdr::Decoder::new(message));
    matches!(header, Ok(Incoming::Call(call)) if call.credential.flavor == AUTH_TLS && call.procedure == 0)
}

/// Checks the fragments of one record. A fragment may have any length, even 0 (RFC 5531, section 11).
#[derive(Default)]
struct Fragments {
    empty: usize,
}

impl Fragments {
    /// Length of the record with its next fragment; an error if that exceeds [`CALL_MAX`] or the limit of empty fragments.
    fn end_of_next(&mut self, record: &[u8], marker: Marker) -> io::Result<usize> {
        if marker.len == 0 && !marker.last {
            self.empty += 1;
            if self.empty > EMPTY_FRAGMENTS_MAX {
                return Err(invalid(format!("a call with more than {EMPTY_FRAGMENTS_MAX} empty fragments")));
            }
        }
        let end = record.len() + marker.len as usize;
        if end > CALL_MAX { Err(invalid(format!("a call of more than {CALL_MAX} bytes"))) } else { Ok(end) }
    }
}

/// The first record of a connection, which must be short; nothing behind it is read. `None` if the client closes before.
async fn first_call(stream: &mut Stream) -> io::Result<Option<Vec<u8>>> {
    let (mut record, mut fragments) = (Vec::new(), Fragments::default());
    for _ in 0..FIRST_FRAGMENTS_MAX {
        let mut marker = [0; MARKER_LEN];
        match stream.read_exact(&mut marker).await {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof && record.is_empty() => return Ok(None),
            other => other?,
        }
        let marker = Marker::decode(marker);
        let end = fragments.end_of_next(&record, marker)?;
        while record.len() < end {
            let start = record.len();
            record.resize(end.min(start + STEP), 0);
            stream.read_exact(&mut record[start..]).await?;
        }
        if marker.last {
            return Ok(Some(record));
        }
    }
    Err(invalid(format!("a first call of more than {FIRST_FRAGMENTS_MAX} fragments")))
}

/// A connection after its first call.
struct Served {
    programs: Programs,
    connection: Rc<Connection>,
    replies: SendQueue,
    /// For bulk items of calls.
    bulk: Buffers,
    calls: Arc<Semaphore>,
    long_calls: Arc<Semaphore>,
    back_calls: BackCalls,
}

/// A message that has been received.
struct Record {
    message: Vec<u8>,
    bulk: SmallVec<[BulkItem; 1]>,
    long: Option<OwnedSemaphorePermit>,
}

impl From<Vec<u8>> for Record {
    fn from(message: Vec<u8>) -> Record {
        Record { message, bulk: SmallVec::new(), long: None }
    }
}

impl Served {
    async fn serve(
        self: Rc<Self>,
        mut reader: Reader,
        writer: Writer,
        first: Vec<u8>,
        back_calls: mpsc::UnboundedReceiver<BackCall>,
        closing: watch::Receiver<bool>,
    ) -> io::Result<()> {
        let (sender, is_closing) = (Rc::clone(&self), closing.clone());
        let sender = tokio::task::spawn_local(async move { sender.replies.run(writer).await });
        let result = tokio::select! {
            result = panics::catch(self.receive(&mut reader, first, closing)) => result,
            () = self.replies.broken() => Err(io::ErrorKind::BrokenPipe.into()),
            () = self.back_calls.run(back_calls, |_, call| self.push(call)) => Err(io::ErrorKind::NotConnected.into()),
        };
        if result.as_ref().is_err_and(is_lost) {
            self.replies.fail();
        }
        // Calls in progress are still answered. If the connection is lost, calls that have changed nothing end early.
        let all = CALLS_MAX as u32;
        let answered = tokio::time::timeout(CLOSED_TIMEOUT, self.calls.acquire_many(all)).await.is_ok();
        if !answered {
            // The client may have closed only its own direction or both: TCP does not tell before data are sent.
            if !*is_closing.borrow() {
                self.replies.fail();
            }
            let _ = self.calls.acquire_many(all).await;
        }
        self.replies.close();
        let _ = sender.await;
        result
    }

    async fn receive(
        self: &Rc<Self>,
        reader: &mut Reader,
        first: Vec<u8>,
        mut closing: watch::Receiver<bool>,
    ) -> io::Result<()> {
        self.start(first.into()).await?;
        loop {
            self.replies.room().await;
            let marker = tokio::select! {
                biased;
                marker = reader.peek(MARKER_LEN) => marker?.and_then(<[u8]>::first_chunk).copied(),
                _ = closing.wait_for(|closing| *closing) => None,
            };
            let Some(marker) = marker else { return Ok(()) };
            reader.consume(MARKER_LEN);
            let record = self.record(reader, Marker::decode(marker));
            let record = tokio::time::timeout(CALL_TIMEOUT, record).await;
            self.start(record.map_err(|_| io::ErrorKind::TimedOut)??).await?;
        }
    }

    /// Receives a record whose first marker has been taken.
    async fn record(&self, reader: &mut Reader, marker: Marker) -> io::Result<Record> {
        let len = marker.len as usize;
        if marker.last && len <= SMALL_CALL {
            let bytes = reader.peek(len).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
            let message = bytes.to_vec();
            reader.consume(len);
            return Ok(message.into());
        }
        if marker.last {
            let beginning = reader.peek(BEGINNING).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
            if let Some((position, bulk_len)) = self.programs.find_bulk(beginning)
                && bulk_len > 0
                && position + padded(bulk_len) <= len
            {
                return self.record_with_bulk(reader, len, position, bulk_len).await;
            }
        }
        self.long_record(reader, marker).await
    }

    async fn record_with_bulk(
        &self,
        reader: &mut Reader,
        len: usize,
        position: usize,
        bulk_len: usize,
    ) -> io::Result<Record> {
        let rest = len - position - padded(bulk_len);
        if rest > SMALL_CALL {
            return Err(invalid(format!("{rest} bytes behind the data of a call")));
        }
        let mut message = vec![0; position + rest];
        reader.read_exact(&mut message[..position]).await?;
        let mut segment = self.bulk.segment(bulk_len).await?;
        reader.read_exact(segment.as_mut_slice()).await?;
        reader.skip((padded(bulk_len) - bulk_len) as u64).await?;
        reader.read_exact(&mut message[position..]).await?;
        let bulk = SmallVec::from_iter([BulkItem { position: position as u32, segment }]);
        Ok(Record { message, bulk, long: None })
    }

    async fn long_record(&self, reader: &mut Reader, mut marker: Marker) -> io::Result<Record> {
        let long = Arc::clone(&self.long_calls).acquire_owned().await.expect("the semaphore is never closed");
        let (mut message, mut fragments) = (Vec::new(), Fragments::default());
        loop {
            let end = fragments.end_of_next(&message, marker)?;
            while message.len() < end {
                let start = message.len();
                message.resize(end.min(start + STEP), 0);
                reader.read_exact(&mut message[start..]).await?;
            }
            if marker.last {
                return Ok(Record { message, bulk: SmallVec::new(), long: Some(long) });
            }
            let next = reader.peek(MARKER_LEN).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
            marker = Marker::decode(*next.first_chunk().expect("as many as were asked for"));
            reader.consume(MARKER_LEN);
        }
    }

    /// Starts the call that a record is.
    async fn start(self: &Rc<Self>, record: Record) -> io::Result<()> {
        let Some(message) = self.back_calls.take_reply(record.message) else { return Ok(()) };
        let received = self.programs.receive(message, record.bulk, &self.connection).map_err(invalid)?;
        let (mut call, program) = match received {
            Some(Received::Call(call, program)) => (call, program),
            Some(Received::StartTls { xid }) => {
                // Only the first call may ask.
                self.push(refused(xid, Refusal::Auth(AuthError::TooWeak)));
                return Ok(());
            }
            Some(Received::Reply { reply, .. }) => {
                self.push(reply);
                return Ok(());
            }
            None => return Ok(()),
        };
        let turn = Arc::clone(&self.calls).acquire_owned().await.expect("the semaphore is never closed");
        let (this, long) = (Rc::clone(self), record.long);
        reactor::start(async move {
            if let Some(reply) = this.programs.answer(&mut call, &*program).await {
                this.push(reply);
            }
            if let Some(long_reply) = call.into_long_reply() {
                // No other is made before the client has taken this one.
                this.replies.room().await;
                drop(long_reply);
            }
            drop((long, turn));
        });
        Ok(())
    }

    fn push(&self, reply: Encoder) {
        messages(reply).into_iter().for_each(|message| self.replies.push(message));
    }
}
