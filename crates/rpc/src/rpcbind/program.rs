//! Being the rpcbind of a host that has none: it knows the programs of this server.

use super::{Entry, Listening, PROGRAM, procedure, universal};
use crate::message::Refusal;
use crate::server::{Answer, Call, Outcome, Program, Transport};
use crate::xdr::{self, Encoder};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

/// The program. What others want to register with it is refused.
pub struct Rpcbind {
    listening: Vec<Listening>,
}

impl Rpcbind {
    /// Knows these programs.
    pub fn new(listening: Vec<Listening>) -> Rpcbind {
        Rpcbind { listening }
    }

    /// What listens under a number; in another version than is asked for, if there is none in that (as `rpcbind` does).
    fn find(&self, program: u32, version: u32, is_asked: impl Fn(&Listening) -> bool) -> Option<&Listening> {
        let of_number = || self.listening.iter().filter(|one| one.program == program && is_asked(one));
        of_number().find(|one| one.version == version).or_else(|| of_number().last())
    }

    fn answer(&self, call: &Call, out: &mut Encoder) -> xdr::Result<Result<(), Refusal>> {
        let mut d = call.arguments();
        let local = call.connection.local.map(|local| local.ip());
        match (call.version, call.procedure) {
            (_, 0) => {}
            (2, procedure::GETADDR) => {
                let (program, version, protocol, _port) = (d.u32()?, d.u32()?, d.u32()?, d.u32()?);
                let is_asked = |one: &Listening| one.address.is_ipv4() && one.network.protocol() == protocol;
                out.u32(self.find(program, version, is_asked).map_or(0, |one| one.address.port().into()));
            }
            (3, procedure::GETADDR) | (4, procedure::GETADDR | procedure::GETVERSADDR) => {
                let entry = Entry::decode(&mut d)?;
                let is_asked = |one: &Listening| one.network.id(one.address.ip()) == entry.netid;
                let found = self.find(entry.program, entry.version, is_asked);
                let is_exact = call.procedure == procedure::GETVERSADDR;
                let found = found.filter(|one| !is_exact || one.version == entry.version);
                out.opaque(found.map_or(String::new(), |one| universal(reached(one, local))).as_bytes());
            }
            (_, procedure::SET | procedure::UNSET) => {
                out.bool(false);
                return Ok(Ok(()));
            }
            // A long answer to a short datagram, whose sender may be made up.
            (_, procedure::DUMP) if call.connection.transport == Transport::Udp => {
                return Ok(Err(Refusal::ProcedureUnavailable));
            }
            (version, procedure::DUMP) => self.dump(version, local, out),
            _ => return Ok(Err(Refusal::ProcedureUnavailable)),
        }
        d.finish()?;
        Ok(Ok(()))
    }

    fn dump(&self, version: u32, local: Option<IpAddr>, out: &mut Encoder) {
        for one in &self.listening {
            if version > 2 {
                out.bool(true);
                let netid = one.network.id(one.address.ip()).into();
                let (address, owner) = (universal(reached(one, local)), "superuser".into());
                Entry { program: one.program, version: one.version, netid, address, owner }.encode(out);
            } else if one.address.is_ipv4() {
                out.bool(true);
                let words = [one.program, one.version, one.network.protocol(), one.address.port().into()];
                words.into_iter().for_each(|word| out.u32(word));
            }
        }
        out.bool(false);
    }
}

/// Where a client finds something that has reached us by this address.
fn reached(listening: &Listening, local: Option<IpAddr>) -> SocketAddr {
    match local {
        Some(local) if listening.address.ip().is_unspecified() && local.is_ipv4() == listening.address.is_ipv4() => {
            SocketAddr::new(local, listening.address.port())
        }
        _ => listening.address,
    }
}

impl Program for Rpcbind {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        2..=4
    }

    fn needs_tls(&self) -> bool {
        false
    }

    fn call<'a>(&'a self, call: &'a Call, mut results: Encoder) -> Answer<'a> {
        Box::pin(async move {
            let done = self.answer(call, &mut results);
            Outcome::of(done, results)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{CallError, Client, Procedure};
    use crate::message::{CallHeader, Incoming, OpaqueAuth, ReplyHeader};
    use crate::rpcbind::Network;
    use crate::server::{Config, Programs, Server, UdpServer};
    use crate::xdr::Decoder;
    use std::net::UdpSocket;
    use std::sync::Arc;
    use std::time::Duration;
    use thruway_engine::Reactors;
    use thruway_server::Address;

    fn listening() -> Vec<Listening> {
        let one = |program, version, network, address: &str| {
            let address = address.parse().unwrap();
            Listening { program, version, network, address }
        };
        vec![
            one(100_003, 3, Network::Tcp, "0.0.0.0:2049"),
            one(100_003, 4, Network::Tcp, "0.0.0.0:2049"),
            one(100_024, 1, Network::Udp, "192.0.2.1:5000"),
            one(100_003, 4, Network::Tcp, "[::]:2049"),
        ]
    }

    fn programs() -> Programs {
        Programs::new([Arc::new(Rpcbind::new(listening())) as Arc<dyn Program>])
    }

    fn asked(program: u32, version: u32, netid: &str) -> Encoder {
        let mut out = Encoder::new();
        let (netid, address, owner) = (netid.into(), String::new(), String::new());
        Entry { program, version, netid, address, owner }.encode(&mut out);
        out
    }

    const fn of(version: u32, procedure: u32) -> Procedure {
        Procedure { program: PROGRAM, version, procedure }
    }

    #[test]
    fn programs_are_found_over_a_byte_stream() {
        let reactors = Reactors::start(Some(1)).unwrap();
        let config = Config {
            protocol: "rpcbind",
            listen: vec![Address::Tcp("127.0.0.1:0".parse().unwrap())],
            programs: programs(),
            tls: None,
            tls_required: false,
            own_user_only: true,
            connections_max: 2,
        };
        let server = Server::start(config, &reactors).unwrap();
        let Address::Tcp(at) = server.addresses()[0] else { panic!("it is one of TCP") };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let client = Client::connect(at, Duration::from_secs(30)).await.unwrap();
            let call = async |procedure, arguments| client.call(procedure, OpaqueAuth::NONE, arguments).await;
            for (version, procedure, program, of_version, netid, found) in [
                (3, 3, 100_003, 3, "tcp", "127.0.0.1.8.1"),
                (4, 3, 100_003, 4, "tcp6", "::.8.1"),
                (4, 3, 100_024, 1, "udp", "192.0.2.1.19.136"),
                (4, 3, 100_024, 1, "tcp", ""),
                (4, 3, 100_003, 2, "tcp", "127.0.0.1.8.1"),
                (4, 9, 100_003, 2, "tcp", ""),
                (4, 9, 100_003, 4, "tcp", "127.0.0.1.8.1"),
            ] {
                let reply = call(of(version, procedure), asked(program, of_version, netid)).await.unwrap();
                let address = reply.results().opaque(100).unwrap().to_vec();
                assert_eq!(String::from_utf8(address).unwrap(), found, "{version} {procedure} {program} {netid}");
            }
            for (program, protocol, port) in [(100_003, 6, 2049), (100_024, 17, 5000), (100_024, 6, 0)] {
                let mut arguments = Encoder::new();
                [program, 1, protocol, 0].into_iter().for_each(|word| arguments.u32(word));
                assert_eq!(call(of(2, 3), arguments).await.unwrap().results().u32(), Ok(port));
            }
            for procedure in [procedure::SET, procedure::UNSET] {
                let reply = call(of(4, procedure), asked(100_003, 3, "tcp")).await.unwrap();
                assert_eq!(reply.results().bool(), Ok(false), "what is known is ours alone");
            }
            let dump = call(of(2, procedure::DUMP), Encoder::new()).await.unwrap();
            assert_eq!(dump.results().rest().len(), 3 * 20 + 4);
            let dump = call(of(4, procedure::DUMP), Encoder::new()).await.unwrap();
            let mut d = dump.results();
            let mut count = 0;
            while d.bool().unwrap() {
                Entry::decode(&mut d).unwrap();
                count += 1;
            }
            assert_eq!(count, 4);
            let unknown = call(of(4, 8), Encoder::new()).await;
            assert!(matches!(unknown, Err(CallError::Refused(Refusal::ProcedureUnavailable))));
            let garbage = call(of(4, 3), Encoder::new()).await;
            assert!(matches!(garbage, Err(CallError::Refused(Refusal::GarbageArguments))));
        });
    }

    #[test]
    fn datagrams_are_answered_and_lists_are_not_sent_by_them() {
        let reactors = Reactors::start(Some(1)).unwrap();
        let server = UdpServer::start(vec![UdpSocket::bind("127.0.0.1:0").unwrap()], &programs(), &reactors).unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(server.addresses()[0]).unwrap();
        let call = |xid, procedure, arguments: Encoder| {
            let mut call = Encoder::new();
            let (credential, verifier) = (OpaqueAuth::NONE, OpaqueAuth::NONE);
            CallHeader { xid, program: PROGRAM, version: 4, procedure, credential, verifier }.encode(&mut call);
            call.append(arguments);
            call.to_bytes()
        };
        // What is no call, or too long, is passed over.
        client.send(&[0; 3]).unwrap();
        client.send(&[0; 4000]).unwrap();
        client.send(&call(1, procedure::DUMP, Encoder::new())).unwrap();
        client.send(&call(2, procedure::GETADDR, asked(100_024, 1, "udp"))).unwrap();
        let mut reply = [0; 200];
        for (xid, refusal) in [(1, Some(Refusal::ProcedureUnavailable)), (2, None)] {
            let len = client.recv(&mut reply).unwrap();
            let mut d = Decoder::new(&reply[..len]);
            let verifier = OpaqueAuth::NONE;
            assert_eq!(Incoming::decode(&mut d), Ok(Incoming::Reply(ReplyHeader { xid, verifier, refusal })));
            if refusal.is_none() {
                assert_eq!(d.opaque(100).unwrap(), b"192.0.2.1.19.136");
            }
        }
        // When the server is dropped, nothing answers.
        let address = server.addresses()[0];
        drop(server);
        while UdpSocket::bind(address).is_err() {
            std::thread::yield_now();
        }
    }
}
