//! Asking an rpcbind.

use super::{Entry, Listening, Network, PORT, PROGRAM, parse_universal, procedure, text, universal};
use crate::client::{CallError, Client, Procedure, Reply};
use crate::message::{OpaqueAuth, Refusal};
use crate::xdr::Encoder;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;
use thruway_server::Plain;
use tokio::net::UnixStream;

/// Where the rpcbind of this host is asked: there it knows which user asks.
const SOCKETS: [&str; 2] = ["/run/rpcbind.sock", "/var/run/rpcbind.sock"];

/// Longest answer to where a program is, in bytes.
const REPLY_MAX: usize = 4 << 10;

/// How long the rpcbind of this host may take.
const TIMEOUT: Duration = Duration::from_secs(5);

const fn version(version: u32, procedure: u32) -> Procedure {
    Procedure { program: PROGRAM, version, procedure }
}

async fn call(client: &Client, procedure: Procedure, entry: &Entry) -> Result<Reply, CallError> {
    let mut arguments = Encoder::new();
    entry.encode(&mut arguments);
    client.call(procedure, OpaqueAuth::NONE, arguments).await
}

/// Where a program of a host listens on TCP; `None` if it does not, as far as the host's rpcbind knows. Asked from the address
/// `local`, if there is one. Of what the host says only the port counts.
///
/// # Errors
/// If it cannot be asked.
pub async fn find(
    host: IpAddr,
    local: Option<IpAddr>,
    (program, program_version): (u32, u32),
    timeout: Duration,
) -> Result<Option<SocketAddr>, CallError> {
    let client = Client::connect_from(local, SocketAddr::new(host, PORT), timeout).await?.with_replies_of(REPLY_MAX);
    let at = |port: u32| u16::try_from(port).ok().filter(|port| *port != 0).map(|port| SocketAddr::new(host, port));
    let entry = Entry {
        program,
        version: program_version,
        netid: Network::Tcp.id(host).into(),
        address: String::new(),
        owner: String::new(),
    };
    match call(&client, version(3, procedure::GETADDR), &entry).await {
        Ok(reply) => {
            let address = text(&mut reply.results())?;
            Ok(parse_universal(&address).and_then(|address| at(address.port().into())))
        }
        // One that knows only version 2.
        Err(CallError::Refused(Refusal::ProgramMismatch { .. } | Refusal::ProgramUnavailable)) => {
            let mut arguments = Encoder::new();
            [program, program_version, Network::Tcp.protocol(), 0].into_iter().for_each(|word| arguments.u32(word));
            let reply = client.call(version(2, procedure::GETADDR), OpaqueAuth::NONE, arguments).await?;
            Ok(at(reply.results().u32()?))
        }
        Err(error) => Err(error),
    }
}

/// The rpcbind of this host; `None` if there is none.
async fn of_this_host() -> io::Result<Option<Client>> {
    for path in SOCKETS {
        match UnixStream::connect(path).await {
            Ok(stream) => return Client::over(Plain::Unix(stream), TIMEOUT).map(Some),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Programs that the rpcbind of this host knows by us.
pub struct Registered {
    client: Client,
    entries: Vec<Entry>,
}

/// The outcome of a registration.
pub struct Registration {
    /// What has been registered; it stays so until it is withdrawn.
    pub registered: Registered,
    /// What others have registered, who still listen.
    pub taken: Vec<Listening>,
}

fn entry_of(listening: &Listening) -> Entry {
    Entry {
        program: listening.program,
        version: listening.version,
        netid: listening.network.id(listening.address.ip()).into(),
        address: universal(listening.address),
        owner: rustix::process::geteuid().as_raw().to_string(),
    }
}

/// Whether an rpcbind of this host can be asked.
pub fn is_running() -> bool {
    SOCKETS.iter().any(|path| std::os::unix::net::UnixStream::connect(path).is_ok())
}

/// Where something is registered to listen.
async fn address_of(client: &Client, listening: &Listening) -> Result<Option<SocketAddr>, CallError> {
    let reply = call(client, version(4, procedure::GETVERSADDR), &entry_of(listening)).await?;
    Ok(parse_universal(&text(&mut reply.results())?))
}

/// Whether something listens there.
async fn is_alive(network: Network, address: SocketAddr) -> bool {
    let host = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let address = SocketAddr::new(host, address.port());
    match network {
        Network::Tcp => {
            let connecting = tokio::time::timeout(TIMEOUT, tokio::net::TcpStream::connect(address)).await;
            !matches!(connecting, Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused)
        }
        Network::Udp => std::net::UdpSocket::bind(address).is_err(),
    }
}

/// Registers programs with the rpcbind of this host; `None` if there is none. What is registered of programs that do not listen any
/// more is replaced.
///
/// # Errors
/// If it cannot be asked, or does not accept one of them.
pub async fn register(listening: &[Listening]) -> Result<Option<Registration>, CallError> {
    let Some(client) = of_this_host().await? else { return Ok(None) };
    let mut registered = Registered { client: client.clone(), entries: Vec::new() };
    let mut taken = Vec::new();
    for one in listening {
        let entry = entry_of(one);
        if let Some(known) = address_of(&client, one).await? {
            if known != one.address && is_alive(one.network, known).await {
                taken.push(Listening { address: known, ..*one });
                continue;
            }
            call(&client, version(4, procedure::UNSET), &Entry { address: String::new(), ..entry.clone() }).await?;
        }
        if call(&client, version(4, procedure::SET), &entry).await?.results().bool()? {
            registered.entries.push(entry);
        } else {
            // Half of them would be found, and the rest not.
            registered.withdraw().await;
            return Err(CallError::Connection(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "it accepts no entry of this user",
            )));
        }
    }
    Ok(Some(Registration { registered, taken }))
}

impl Registered {
    /// Withdraws what has been registered.
    pub async fn withdraw(self) {
        for entry in &self.entries {
            if let Err(error) = call(&self.client, version(4, procedure::UNSET), entry).await {
                tracing::warn!(%error, "rpcbind keeps what it knows of this server");
                return;
            }
        }
    }
}
