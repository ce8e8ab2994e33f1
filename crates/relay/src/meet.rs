//! How two relays come to have a link: a TCP connection on which they prove who they are, then an RDMA connection that the one invites the
//! other to.

use crate::Error;
use crate::link::Link;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use thruway_auth::{Credentials, Handshake, KeyPair, PublicKey, Secured};
use thruway_engine::aead::KEY_LEN;
use thruway_engine::random::random;
use thruway_fabric::{Listener, Provider};
use thruway_streams::{Context, Scheme, Settings, TOKEN_MAX};

/// What both send first, and prove to have sent.
const GREETING: &[u8] = b"thruway relay 4\n";
/// Longest time for all of it.
const MEET_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest message of it.
const MESSAGE_MAX: usize = 1024;

/// The public keys of relays that may carry connections here.
#[derive(Debug, Clone)]
pub struct Peers(PathBuf);

impl Peers {
    /// Those in a file, one a line, a comment behind it; read again each time.
    pub fn file(path: PathBuf) -> Peers {
        Peers(path)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether this key is there.
    ///
    /// # Errors
    /// If the file cannot be read, or a line is no key.
    pub fn contains(&self, key: &PublicKey) -> Result<bool, Error> {
        Ok(self.all()?.contains(key))
    }

    /// All keys.
    ///
    /// # Errors
    /// As [`Peers::contains`].
    pub fn all(&self) -> Result<Vec<PublicKey>, Error> {
        let name = self.0.display();
        let text = std::fs::read_to_string(&self.0)
            .map_err(Error::io(format!("cannot read {name}, the public keys of the relays to trust, one a line")))?;
        let lines = text.lines().enumerate();
        let lines = lines.map(|(n, line)| (n + 1, line.split('#').next().unwrap_or("").trim()));
        lines
            .filter(|(_, line)| !line.is_empty())
            .map(|(n, line)| {
                let word = line.split_whitespace().next().unwrap_or("");
                PublicKey::from_str(word).map_err(|error| Error::Peer(format!("{name}:{n}: {error}")))
            })
            .collect()
    }
}

/// What meeting others needs.
pub(crate) struct Host {
    pub(crate) context: Context,
    provider: Provider,
    keys: KeyPair,
    peers: Peers,
    encrypt: bool,
    /// Where links are called, if that is free.
    port: u16,
    listeners: Mutex<HashMap<IpAddr, Listener>>,
}

impl Host {
    pub(crate) fn new(
        provider: Provider,
        keys: KeyPair,
        peers: Peers,
        encrypt: bool,
        port: u16,
    ) -> Result<Host, Error> {
        let context = Context::open_attended(&provider)?;
        Ok(Host { context, provider, keys, peers, encrypt, port, listeners: Mutex::default() })
    }

    /// Calls the relay at an address, from an address of this host.
    pub(crate) fn call(&self, local: IpAddr, peer: SocketAddr) -> Result<Link, Error> {
        let deadline = Instant::now() + MEET_TIMEOUT;
        let stream = connect(local, peer).map_err(Error::io(format!("cannot reach the relay at {peer}")))?;
        let mut talk = Talk::begin(stream, &self.keys, true, deadline)?;
        self.check(&talk)?;
        talk.send(&[u8::from(self.encrypt)])?;
        let invitation = Invitation::decode(&talk.receive()?)?;
        if invitation.address != peer.ip().to_canonical() || self.encrypt && !invitation.encrypted {
            return Err(Error::Peer(format!("the relay at {peer} invites to another address, or without encryption")));
        }
        let at = SocketAddr::new(invitation.address, invitation.port);
        let timeout = deadline.saturating_duration_since(Instant::now());
        let connection = self.context.connect(at, &settings(), &invitation.token, timeout)?;
        let keys = invitation.encrypted.then_some((invitation.keys[0], invitation.keys[1]));
        Ok(Link::new(connection, local, peer.ip(), keys))
    }

    /// Answers a relay that has called.
    pub(crate) fn answer(&self, stream: TcpStream) -> Result<Link, Error> {
        let deadline = Instant::now() + MEET_TIMEOUT;
        let names = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?)));
        let (local, peer) = names.map_err(Error::io("a relay that called has gone"))?;
        let mut talk = Talk::begin(stream, &self.keys, false, deadline)?;
        self.check(&talk)?;
        let wants_encryption = talk.receive()?.first() != Some(&0);
        let encrypted = self.encrypt || wants_encryption;
        let address = local.ip().to_canonical();
        let port = self.listen(address)?;
        let invitation = Invitation { address, port, token: random(), keys: [random(), random()], encrypted };
        let _expected = self.context.expect(&invitation.token);
        talk.send(&invitation.encode())?;
        let timeout = deadline.saturating_duration_since(Instant::now());
        let connection = self.context.accept(&settings(), &invitation.token, timeout)?;
        let keys = encrypted.then_some((invitation.keys[1], invitation.keys[0]));
        Ok(Link::new(connection, address, peer.ip().to_canonical(), keys))
    }

    fn check(&self, talk: &Talk) -> Result<(), Error> {
        if self.peers.contains(&talk.peer)? {
            return Ok(());
        }
        let why = format!(
            "the relay at {} has the key {}, which is not in {}: add it there if it is to be trusted",
            talk.address,
            talk.peer,
            self.peers.0.display()
        );
        Err(Error::Peer(why))
    }

    /// The port of the RDMA listener at an address.
    fn listen(&self, at: IpAddr) -> Result<u16, Error> {
        let mut listeners = self.listeners.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(listener) = listeners.get(&at) {
            return Ok(listener.local_addr().port());
        }
        // One that firewalls can be told of. If something else has it, any.
        let listener = self.context.listen(SocketAddr::new(at, self.port));
        let listener = listener.or_else(|_| self.context.listen(SocketAddr::new(at, 0)))?;
        let port = listener.local_addr().port();
        listeners.insert(at, listener);
        Ok(port)
    }

    /// The name of what carries links.
    pub(crate) fn provider(&self) -> &'static str {
        match self.provider {
            Provider::Iwarp(_) => "iwarp",
            Provider::Shm(_) => "shm",
            Provider::Verbs(_) => "verbs",
        }
    }
}

/// Messages keep their boundaries; bulk goes by RDMA Write to a ring.
fn settings() -> Settings {
    Settings { messages: true, ring_len: 4 << 20, stage_len: 2 << 20, ..Settings::of(Scheme::Adaptive) }
}

/// From the very address that the accelerated connection has here: the other relay believes this one for no other.
fn connect(local: IpAddr, peer: SocketAddr) -> std::io::Result<TcpStream> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, &SocketAddr::new(local, 0))?;
    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
    let timeout = Some(Duration::from_secs(5));
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Send, timeout)?;
    rustix::net::connect(&socket, &peer)?;
    Ok(TcpStream::from(socket))
}

/// What the answering relay tells the calling one.
struct Invitation {
    address: IpAddr,
    port: u16,
    token: [u8; TOKEN_MAX],
    /// Of what the calling relay sends, and of what it receives.
    keys: [[u8; KEY_LEN]; 2],
    encrypted: bool,
}

/// Whether an invitation is understood.
pub(crate) fn invitation(bytes: &[u8]) -> bool {
    Invitation::decode(bytes).is_ok()
}

const INVITATION_LEN: usize = 16 + 2 + TOKEN_MAX + 2 * KEY_LEN + 1;

impl Invitation {
    fn encode(&self) -> Vec<u8> {
        let address = match self.address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        let mut out = address.octets().to_vec();
        out.extend(self.port.to_be_bytes());
        out.extend(self.token);
        out.extend(self.keys.as_flattened());
        out.push(u8::from(self.encrypted));
        out
    }

    fn decode(bytes: &[u8]) -> Result<Invitation, Error> {
        let bytes: &[u8; INVITATION_LEN] =
            bytes.try_into().map_err(|_| Error::Peer("the relay's invitation has another length".into()))?;
        let (address, rest) = bytes.split_first_chunk::<16>().expect("as long");
        let (port, rest) = rest.split_first_chunk::<2>().expect("as long");
        let (token, rest) = rest.split_first_chunk::<TOKEN_MAX>().expect("as long");
        let (one, rest) = rest.split_first_chunk::<KEY_LEN>().expect("as long");
        let (other, rest) = rest.split_first_chunk::<KEY_LEN>().expect("as long");
        Ok(Invitation {
            address: IpAddr::V6(Ipv6Addr::from(*address)).to_canonical(),
            port: u16::from_be_bytes(*port),
            token: *token,
            keys: [*one, *other],
            encrypted: rest[0] != 0,
        })
    }
}

/// The TCP connection on which two relays meet.
struct Talk {
    stream: TcpStream,
    secured: Secured,
    peer: PublicKey,
    address: SocketAddr,
    deadline: Instant,
}

impl Talk {
    fn begin(mut stream: TcpStream, keys: &KeyPair, calls: bool, deadline: Instant) -> Result<Talk, Error> {
        let address = stream.peer_addr().map_err(Error::io("a relay has gone"))?;
        let failed = || Error::io(format!("meeting the relay at {address}"));
        stream.set_write_timeout(Some(MEET_TIMEOUT)).map_err(failed())?;
        stream.write_all(GREETING).map_err(failed())?;
        let mut greeting = [0; GREETING.len()];
        read_exact(&mut stream, &mut greeting, deadline).map_err(failed())?;
        if greeting != GREETING {
            return Err(Error::Peer(format!("what answers at {address} is no relay, or of another version")));
        }
        let mut handshake = Handshake::new(&Credentials::Keys(keys.clone()), GREETING, calls);
        while !handshake.is_finished() {
            if handshake.is_my_turn() {
                write_message(&mut stream, &handshake.write()).map_err(failed())?;
            } else {
                let message = read_message(&mut stream, deadline).map_err(failed())?;
                handshake.read(&message)?;
            }
        }
        let peer = handshake.peer_key().ok_or(thruway_auth::AuthError::Handshake)?;
        Ok(Talk { stream, secured: handshake.finish()?, peer, address, deadline })
    }

    fn send(&mut self, message: &[u8]) -> Result<(), Error> {
        let sealed = self.secured.seal(message);
        write_message(&mut self.stream, &sealed).map_err(Error::io(format!("meeting the relay at {}", self.address)))
    }

    fn receive(&mut self) -> Result<Vec<u8>, Error> {
        let address = self.address;
        let sealed = read_message(&mut self.stream, self.deadline).map_err(|source| match source.kind() {
            // A relay that does not trust this one says so to its own user alone.
            std::io::ErrorKind::UnexpectedEof => Error::Peer(format!(
                "the relay at {address} has hung up: its messages say why; it may not know this relay's key"
            )),
            _ => Error::io(format!("meeting the relay at {address}"))(source),
        })?;
        Ok(self.secured.open(&sealed)?)
    }
}

fn write_message(stream: &mut TcpStream, message: &[u8]) -> std::io::Result<()> {
    let len = u16::try_from(message.len()).expect("messages are short");
    stream.write_all(&[&len.to_be_bytes()[..], message].concat())
}

fn read_message(stream: &mut TcpStream, deadline: Instant) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 2];
    read_exact(stream, &mut len, deadline)?;
    let len = usize::from(u16::from_be_bytes(len));
    if len > MESSAGE_MAX {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "a message that is too long"));
    }
    let mut message = vec![0; len];
    read_exact(stream, &mut message, deadline)?;
    Ok(message)
}

/// A peer that sends a byte now and then does not get more time for it.
fn read_exact(stream: &mut TcpStream, mut to: &mut [u8], deadline: Instant) -> std::io::Result<()> {
    while !to.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(to) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => to = &mut to[len..],
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                return Err(std::io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_is_understood_whole_and_refused_otherwise() {
        let invitation = Invitation {
            address: IpAddr::from([10, 0, 0, 1]),
            port: 7118,
            token: [1; TOKEN_MAX],
            keys: [[2; KEY_LEN], [3; KEY_LEN]],
            encrypted: true,
        };
        let bytes = invitation.encode();
        let again = Invitation::decode(&bytes).unwrap();
        assert_eq!((again.address, again.port, again.token), (invitation.address, 7118, [1; TOKEN_MAX]));
        assert_eq!((again.keys, again.encrypted), (invitation.keys, true));
        for len in 0..bytes.len() {
            assert!(Invitation::decode(&bytes[..len]).is_err());
        }
    }

    #[test]
    fn a_file_of_peers_is_read_with_comments_and_a_mistake_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("peers");
        let peers = Peers::file(path.clone());
        assert!(matches!(peers.all(), Err(Error::Io { .. })));
        let key = KeyPair::generate().public();
        std::fs::write(&path, format!("# those of the lab\n\n{key} a host # and a remark\n")).unwrap();
        assert!(peers.contains(&key).unwrap() && !peers.contains(&KeyPair::generate().public()).unwrap());
        std::fs::write(&path, format!("{key}\nnonsense\n")).unwrap();
        let error = peers.all().unwrap_err().to_string();
        assert!(error.contains("peers:2"), "{error}");
    }
}
