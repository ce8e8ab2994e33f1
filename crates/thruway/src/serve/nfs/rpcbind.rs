//! How clients of NFS version 3 find what they need beside NFS: by the rpcbind of this host, or by this daemon in its place.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_nfs::{mount, nlm, nsm, v3};
use thruway_rpc::rpcbind::{self, Listening, Network, Rpcbind};
use thruway_rpc::server::{Config, Program, Programs, Server, UdpServer};
use thruway_server::Address;
use tokio::sync::oneshot;

/// How clients of version 3 find the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum RpcbindMode {
    /// By the rpcbind of this host, if one runs.
    Auto,
    /// By this daemon, which is the rpcbind of this host (port 111).
    Own,
    /// Not at all: they are given the ports, and keep their locks for themselves.
    None,
}

/// How long rpcbind may take, at the start and at the end.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What is to be registered over TCP: programs, versions, and what they are.
const OVER_TCP: [(u32, u32); 5] = [
    (v3::PROGRAM, 3),
    (v3::PROGRAM, 4),
    (mount::PROGRAM, 3),
    (nlm::PROGRAM, nlm::VERSION),
    (nsm::PROGRAM, nsm::VERSION),
];

/// Keeps the programs to be found.
pub(super) struct Found {
    /// As the announcement has it.
    pub how: &'static str,
    _datagrams: Vec<UdpServer>,
    own: Option<Server>,
    withdraw: Option<(oneshot::Sender<()>, Receiver<()>)>,
}

/// Addresses by which something that listens on this one is reached: a wildcard of IP version 6 is one of version 4, too.
fn reached(address: SocketAddr) -> Vec<SocketAddr> {
    let also = matches!(address.ip(), IpAddr::V6(ip) if ip.is_unspecified());
    let also = also.then(|| SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port()));
    [address].into_iter().chain(also).collect()
}

fn name_of(program: u32) -> &'static str {
    match program {
        mount::PROGRAM => "mounting (MOUNT)",
        nlm::PROGRAM => "locks (NLM)",
        nsm::PROGRAM => "restarts (NSM)",
        _ => "files (NFS)",
    }
}

/// Sockets for datagrams: with the ports of these addresses, or with others if those are taken.
fn datagrams(tcp: &[SocketAddr]) -> Result<Vec<UdpSocket>, String> {
    let bind = |address: &SocketAddr| {
        UdpSocket::bind(address)
            .or_else(|_| UdpSocket::bind(SocketAddr::new(address.ip(), 0)))
            .map_err(|e| format!("cannot listen for datagrams on {}: {e}", address.ip()))
    };
    tcp.iter().map(bind).collect()
}

impl Found {
    /// Makes the programs found that are served over TCP at these addresses.
    pub(super) fn start(
        mode: RpcbindMode,
        tcp: &[Address],
        nsm: Arc<dyn Program>,
        reactors: &Reactors,
        own_user_only: bool,
    ) -> Result<Found, String> {
        let nothing = Found { how: "none", _datagrams: Vec::new(), own: None, withdraw: None };
        let tcp =
            tcp.iter().filter_map(|address| if let Address::Tcp(address) = address { Some(*address) } else { None });
        // What only this host reaches concerns no rpcbind that others ask.
        let is_wanted = |address: &SocketAddr| mode == RpcbindMode::Own || !address.ip().to_canonical().is_loopback();
        let tcp: Vec<SocketAddr> = tcp.filter(is_wanted).collect();
        if mode == RpcbindMode::None || tcp.is_empty() || mode == RpcbindMode::Auto && !rpcbind::is_running() {
            return Ok(nothing);
        }
        // Which user of this host sends a datagram is not looked at: where that counts, hosts say by TCP that they have restarted.
        let sockets = if own_user_only { Vec::new() } else { datagrams(&tcp)? };
        let datagrams = UdpServer::start(sockets, &Programs::new([nsm]), reactors).map_err(|e| e.to_string())?;
        let mut listening = Vec::new();
        for address in tcp.iter().flat_map(|address| reached(*address)) {
            let over_tcp =
                OVER_TCP.map(|(program, version)| Listening { program, version, network: Network::Tcp, address });
            listening.extend(over_tcp);
        }
        for address in datagrams.addresses().iter().flat_map(|address| reached(*address)) {
            let (program, version) = (nsm::PROGRAM, nsm::VERSION);
            listening.push(Listening { program, version, network: Network::Udp, address });
        }
        let mut seen = std::collections::HashSet::new();
        listening.retain(|one| seen.insert((one.program, one.version, one.network, one.address.is_ipv4())));
        if mode == RpcbindMode::Own {
            return Found::be_rpcbind(&tcp, listening, datagrams, reactors, own_user_only);
        }
        // Clients of version 4 need none of it.
        match register(listening, reactors) {
            Ok(withdraw) => {
                Ok(Found { how: "registered", _datagrams: vec![datagrams], own: None, withdraw: Some(withdraw) })
            }
            Err(error) => {
                tracing::warn!("rpcbind: {error}: clients of NFS version 3 need port=, mountport= and nolock");
                Ok(nothing)
            }
        }
    }

    fn be_rpcbind(
        tcp: &[SocketAddr],
        mut listening: Vec<Listening>,
        datagrams: UdpServer,
        reactors: &Reactors,
        own_user_only: bool,
    ) -> Result<Found, String> {
        let mut addresses: Vec<SocketAddr> =
            tcp.iter().map(|address| SocketAddr::new(address.ip(), rpcbind::PORT)).collect();
        addresses.sort_unstable();
        addresses.dedup();
        // Its own clients ask for it, too.
        for address in addresses.iter().flat_map(|address| reached(*address)) {
            for (version, network) in [2, 3, 4].into_iter().flat_map(|v| [(v, Network::Tcp), (v, Network::Udp)]) {
                listening.push(Listening { program: rpcbind::PROGRAM, version, network, address });
            }
        }
        let hint = "if the rpcbind of this host runs, use --nfs-rpcbind auto";
        let programs = Programs::new([Arc::new(Rpcbind::new(listening)) as Arc<dyn Program>]);
        let sockets = addresses.iter().map(UdpSocket::bind).collect::<std::io::Result<Vec<_>>>();
        let sockets = sockets.map_err(|e| format!("cannot listen on port {}: {e}; {hint}", rpcbind::PORT))?;
        let udp = UdpServer::start(sockets, &programs, reactors).map_err(|e| e.to_string())?;
        let config = Config {
            protocol: "rpcbind",
            listen: addresses.into_iter().map(Address::Tcp).collect(),
            programs,
            tls: None,
            tls_required: false,
            own_user_only,
            connections_max: CONNECTIONS_MAX,
        };
        let own = Server::start(config, reactors).map_err(|e| format!("{e}; {hint}"))?;
        Ok(Found { how: "own", _datagrams: vec![datagrams, udp], own: Some(own), withdraw: None })
    }

    /// Ends that.
    pub(super) fn end(&mut self) {
        if let Some(own) = &self.own {
            own.close();
        }
        if let Some((withdraw, done)) = self.withdraw.take() {
            let _ = withdraw.send(());
            let _ = done.recv_timeout(TIMEOUT);
        }
    }
}

/// Clients ask one question.
const CONNECTIONS_MAX: usize = 256;

/// Registers with the rpcbind of this host; to be withdrawn by what is returned.
fn register(listening: Vec<Listening>, reactors: &Reactors) -> Result<(oneshot::Sender<()>, Receiver<()>), String> {
    let ((registered, outcome), (done, is_done)) = (channel(), channel());
    let (withdraw, is_withdrawn) = oneshot::channel();
    let reactor = reactors.handles().first().ok_or("no reactors")?;
    reactor.spawn(move || async move {
        let registration = match rpcbind::register(&listening).await {
            Ok(registration) => registration,
            Err(error) => return drop(registered.send(Err(error.to_string()))),
        };
        let Some(registration) = registration else { return drop(registered.send(Err("it has ended".into()))) };
        let _ = registered.send(Ok(registration.taken));
        // Also if the service is gone without having said so.
        let _ = is_withdrawn.await;
        registration.registered.withdraw().await;
        let _ = done.send(());
    });
    let taken = outcome.recv_timeout(TIMEOUT).map_err(|_| "it does not answer")??;
    for other in taken {
        tracing::warn!(
            "rpcbind knows another program for {}, which listens at {}: clients of NFS version 3 find that one",
            name_of(other.program),
            other.address
        );
    }
    Ok((withdraw, is_done))
}
