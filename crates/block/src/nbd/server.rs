//! NBD connections, from their acceptance to their end.

use super::handshake::{Agreement, Handshake, Next, OPTION_LEN_MAX, Tls, greeting};
use super::transmission;
use crate::export::Export;
use crate::gate::Gate;
use crate::net::{Address, Listener, Plain, Socket, Stream};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

/// A client that has not come to the point by then is sent away.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);

/// How to serve.
pub struct Config {
    /// Where to listen.
    pub listen: Vec<Address>,
    /// What to serve.
    pub exports: Arc<[Arc<Export>]>,
    /// TLS, which is then required.
    pub tls: Option<Arc<ServerConfig>>,
    /// Of those who come over the loopback interface, only the user that this process runs as, and root.
    pub own_user_only: bool,
    /// Connections at one time; more are closed at once.
    pub connections_max: usize,
}

/// A running NBD server. It ends with its reactors.
pub struct Server {
    addresses: Vec<Address>,
    shared: Arc<Shared>,
}

struct Shared {
    exports: Arc<[Arc<Export>]>,
    tls: Option<TlsAcceptor>,
    own_user_only: bool,
    gate: Arc<Gate>,
    closing: watch::Sender<bool>,
}

impl Server {
    /// Starts to serve on these reactors.
    ///
    /// # Errors
    /// A sentence that names the address that cannot be listened at.
    pub fn start(config: Config, reactors: &Reactors) -> Result<Server, String> {
        let shared = Arc::new(Shared {
            exports: config.exports,
            tls: config.tls.map(TlsAcceptor::from),
            own_user_only: config.own_user_only,
            gate: Gate::new("NBD", config.connections_max),
            closing: watch::Sender::new(false),
        });
        let mut addresses = Vec::new();
        for address in &config.listen {
            let listener = Listener::bind(address)?;
            addresses.push(listener.address());
            let (shared, spreader) = (Arc::clone(&shared), reactors.spreader());
            reactors.handles()[0].spawn(move || async move {
                let serve = |socket: Socket| {
                    if *shared.closing.borrow() || (shared.own_user_only && !socket.is_ours()) {
                        return;
                    }
                    let Some(place) = shared.gate.enter(socket.peer()) else { return };
                    let shared = Arc::clone(&shared);
                    place.serve(&spreader, move || async move { shared.serve(socket).await });
                };
                let accepted = listener.accept(serve).await;
                tracing::error!(?accepted, "no NBD connections are accepted any more");
            });
        }
        Ok(Server { addresses, shared })
    }

    /// Where it listens, with the ports that the system chose.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Ends every connection when what it has asked for is done, and waits for that, or for `limit`. What is
    /// still under way then is its disk's affair.
    pub fn shut_down(&self, limit: Duration) {
        self.shared.closing.send_replace(true);
        self.shared.gate.wait_until_empty(limit);
    }
}

impl Shared {
    async fn serve(&self, socket: Socket) -> io::Result<()> {
        let peer = socket.peer();
        let stream = socket.open()?;
        let mut closing = self.closing.subscribe();
        let negotiated = tokio::select! {
            negotiated = tokio::time::timeout(HANDSHAKE_LIMIT, self.negotiate(stream)) => negotiated,
            _ = closing.wait_for(|closing| *closing) => return Ok(()),
        };
        let Some((stream, agreement)) = negotiated.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?? else {
            return Ok(());
        };
        let name = &agreement.export.name;
        tracing::info!(peer, export = name, form = ?agreement.form, "an NBD client is served");
        let (reader, writer) = stream.split()?;
        transmission::serve(agreement, reader, writer, self.closing.subscribe()).await
    }

    /// Negotiates; `None` if the client leaves in order.
    async fn negotiate(&self, stream: Plain) -> io::Result<Option<(Stream, Agreement)>> {
        let mut stream = Stream::Plain(stream);
        stream.write_all(&greeting()).await?;
        let mut flags = [0; 4];
        if stream.read_exact(&mut flags).await.is_err() {
            return Ok(None);
        }
        let tls = if self.tls.is_some() { Tls::Required } else { Tls::Off };
        let mut handshake = Handshake::new(Arc::clone(&self.exports), tls, flags)
            .ok_or_else(|| invalid("client flags that are not known"))?;
        loop {
            let mut header = [0; 16];
            match stream.read_exact(&mut header).await {
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
                other => other?,
            }
            let (number, len) =
                Handshake::header(&header).ok_or_else(|| invalid("an option without its magic number"))?;
            let next = if len > OPTION_LEN_MAX {
                discard(&mut stream, len).await?;
                Handshake::too_long(number)
            } else {
                let mut data = vec![0; len as usize];
                stream.read_exact(&mut data).await?;
                handshake.option(number, &data)
            };
            match next {
                Next::Reply(reply) => stream.write_all(&reply).await?,
                Next::Serve(reply, agreement) => {
                    stream.write_all(&reply).await?;
                    return Ok(Some((stream, *agreement)));
                }
                Next::Close(reply) => {
                    stream.write_all(&reply).await?;
                    return Ok(None);
                }
                Next::StartTls(reply) => {
                    stream.write_all(&reply).await?;
                    let (Some(acceptor), Stream::Plain(plain)) = (&self.tls, stream) else {
                        return Err(invalid("TLS within TLS"));
                    };
                    let encrypted = acceptor.accept(plain).await?;
                    handshake.encrypted(crate::tls::names(&encrypted));
                    stream = Stream::Tls(Box::new(encrypted));
                }
            }
        }
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads over the data of an option that is too long, within reason.
async fn discard(stream: &mut Stream, len: u32) -> io::Result<()> {
    const REASON: u32 = 16 << 20;
    if len > REASON {
        return Err(invalid("an option longer than any"));
    }
    let mut left = len as usize;
    let mut buffer = [0; 4096];
    while left > 0 {
        let part = left.min(buffer.len());
        stream.read_exact(&mut buffer[..part]).await?;
        left -= part;
    }
    Ok(())
}
