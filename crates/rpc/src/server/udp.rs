//! Calls that are datagrams: small ones, whose answers are there at once. Their senders may be made up.

use super::{Connection, Programs, Received, Transport};
use smallvec::SmallVec;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::rc::Rc;
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_server::Budget;
use tokio::sync::watch;

/// Longest call and longest reply, in bytes.
const CALL_MAX: usize = 1472;

/// A pause after an error.
const PAUSE: Duration = Duration::from_millis(50);

/// Sockets that calls come by as datagrams. They are closed when this is dropped.
pub struct UdpServer {
    addresses: Vec<SocketAddr>,
    _open: watch::Sender<()>,
}

impl UdpServer {
    /// Starts to serve on these sockets.
    ///
    /// # Errors
    /// The system's.
    pub fn start(sockets: Vec<UdpSocket>, programs: &Programs, reactors: &Reactors) -> io::Result<UdpServer> {
        let (open, is_open) = watch::channel(());
        let mut addresses = Vec::new();
        for (socket, reactor) in sockets.into_iter().zip(reactors.handles().iter().cycle()) {
            socket.set_nonblocking(true)?;
            addresses.push(socket.local_addr()?);
            let (programs, mut is_open) = (programs.clone(), is_open.clone());
            reactor.spawn(move || async move {
                tokio::select! {
                    result = serve(socket, &programs) => {
                        if let Err(error) = result {
                            tracing::error!(%error, "datagrams are not received any more");
                        }
                    }
                    // An error says that the server is gone.
                    _ = is_open.changed() => {}
                }
            });
        }
        Ok(UdpServer { addresses, _open: open })
    }

    /// The addresses, with the ports that the kernel chose.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }
}

async fn serve(socket: UdpSocket, programs: &Programs) -> io::Result<()> {
    let local = socket.local_addr()?;
    let socket = tokio::net::UdpSocket::from_std(socket)?;
    let mut call = vec![0; CALL_MAX + 1];
    let mut budget = Budget::default();
    loop {
        budget.begin_message().await;
        let (len, peer) = match socket.recv_from(&mut call).await {
            Ok(received) => received,
            // That of an earlier reply, which has not arrived.
            Err(error) => {
                tracing::debug!(%error, "receiving a datagram");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        if len > CALL_MAX {
            continue;
        }
        let connection = Connection::new(Some(peer), Transport::Udp, false, Vec::new());
        let connection = Rc::new(Connection { local: Some(local), ..connection });
        let reply = match programs.receive(call[..len].to_vec(), SmallVec::new(), &connection) {
            Ok(Some(Received::Call(mut call, program))) => programs.answer(&mut call, &*program).await,
            Ok(Some(Received::Reply { reply, .. })) => Some(reply),
            Ok(Some(Received::StartTls { .. }) | None) | Err(_) => None,
        };
        let Some(reply) = reply.map(|reply| reply.to_bytes()).filter(|reply| reply.len() <= CALL_MAX) else { continue };
        if let Err(error) = socket.send_to(&reply, peer).await {
            tracing::debug!(%peer, %error, "sending a datagram");
        }
    }
}
