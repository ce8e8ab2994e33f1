//! The NBD server: connections from the handshake to the end.

use super::handshake::{Agreement, Handshake, Next, OPTION_LEN_MAX, Tls, greeting};
use super::transmission;
use crate::export::Export;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_metrics::{RegisterError, Registered, Registry};
use thruway_server::tls::TlsServer;
use thruway_server::{Acceptor, Address, ConnectionKind, ListenError, Permit, Plain, Socket, Stream};

/// Time for a client's handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of an option that are skipped; a client that sends a longer one is disconnected.
const SKIP_MAX: u32 = 16 << 20;

/// Configuration of a server.
pub struct Config {
    /// Addresses to listen on.
    pub listen: Vec<Address>,
    /// The disks.
    pub exports: Arc<[Arc<Export>]>,
    /// TLS; if given, it is required.
    pub tls: Option<Arc<TlsServer>>,
    /// Of clients over the loopback interface, serve only root and the user that this process runs as.
    pub own_user_only: bool,
    /// Connections at a time.
    pub connections_max: usize,
}

/// A running NBD server. It ends with its reactors.
pub struct Server {
    addresses: Vec<Address>,
    acceptor: Arc<Acceptor>,
}

struct Service {
    exports: Arc<[Arc<Export>]>,
    tls: Option<Arc<TlsServer>>,
    acceptor: Arc<Acceptor>,
}

impl Server {
    /// Starts to serve on these reactors.
    ///
    /// # Errors
    /// [`ListenError`] for the first address that cannot be listened on.
    pub fn start(config: Config, reactors: &Reactors) -> Result<Server, ListenError> {
        let kind = ConnectionKind::with_tls(config.tls.as_ref());
        let acceptor = Acceptor::new("NBD", kind, config.connections_max, config.own_user_only);
        let service = Arc::new(Service { exports: config.exports, tls: config.tls, acceptor: Arc::clone(&acceptor) });
        let serve = move |socket, permit: Arc<Permit>| {
            let service = Arc::clone(&service);
            async move { service.serve(socket, &permit).await }
        };
        let addresses = acceptor.listen(&config.listen, reactors, serve)?;
        Ok(Server { addresses, acceptor })
    }

    /// The addresses it listens on, with the ports that the kernel chose.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Registers its metrics.
    ///
    /// # Errors
    /// [`RegisterError`], if another server of the protocol is registered.
    pub fn register(&self, registry: &Registry) -> Result<Registered, RegisterError> {
        self.acceptor.register(registry)
    }

    /// Connections that are being served.
    pub fn connections(&self) -> usize {
        self.acceptor.connections()
    }

    /// Ends every connection when its requests in flight are done, and waits for that for at most `limit`. What is in
    /// flight after that is for the disk to finish.
    pub fn shut_down(&self, limit: Duration) {
        self.acceptor.shut_down(limit);
    }
}

impl Service {
    async fn serve(&self, socket: Socket, permit: &Permit) -> io::Result<()> {
        let peer = socket.peer();
        let stream = socket.open()?;
        let mut closing = self.acceptor.closing();
        let negotiated = tokio::select! {
            negotiated = permit.handshake(HANDSHAKE_TIMEOUT, self.negotiate(stream)) => negotiated?,
            _ = closing.wait_for(|closing| *closing) => return Ok(()),
        };
        let Some((stream, agreement)) = negotiated else { return Ok(()) };
        permit.set_authenticated()?;
        let name = &agreement.export.name;
        tracing::info!(peer, export = name, form = ?agreement.form, "NBD client connected");
        let (reader, writer) = stream.split()?;
        transmission::serve(agreement, reader, writer, self.acceptor.closing()).await
    }

    /// Negotiates; `None` if the client closes or aborts in an orderly way.
    async fn negotiate(&self, stream: Plain) -> io::Result<Option<(Stream, Agreement)>> {
        let mut stream = Stream::plain(stream);
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
                if len > SKIP_MAX {
                    return Err(invalid("option exceeds the limit"));
                }
                stream.skip(len as usize).await?;
                handshake.too_long(number)
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
                    let (Some(tls), Some(plain)) = (&self.tls, stream.into_plain()) else {
                        return Err(invalid("TLS within TLS"));
                    };
                    let encrypted = tls.accept(plain).await?;
                    handshake.encrypted(thruway_server::tls::names(&encrypted));
                    stream = Stream::tls(encrypted);
                }
            }
        }
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
