//! Provider `verbs`: RDMA devices through rdma-core (InfiniBand, RoCE and iWARP cards; Linux's rxe
//! and siw).
//!
//! libibverbs and librdmacm are found at run time; where they are missing, [`devices`] and
//! [`Config::open`] say so. Connections are made by rdma_cm, so addresses are IP addresses.
//!
//! | file | what |
//! |---|---|
//! | `abi` | layouts and constants of rdma-core |
//! | `library` | its functions, loaded at run time |
//! | `device` | contexts, events, waiting |
//! | `memory` | registered memory, windows |
//! | `shared` | shared receive queues |
//! | `completion` | completion queues |
//! | `address` | socket addresses |
//! | `endpoint` | queue pairs; `endpoint::connection`: their connections |
//! | `listener` | listening, connection requests |
//!
//! What differs between devices: on InfiniBand and RoCE a consumer's private data arrives padded
//! with zeros, and a write's completion says that the peer's device has it; on iWARP cards read
//! results need remote write access to the memory they land in, which [`crate::Access::LOCAL_WRITE`]
//! therefore implies there. Windows ([`crate::QueuePair::bind_window`]) are the device's own of type 2 where it has
//! them, and registrations elsewhere (Linux's siw, whose registrations peers may revoke all the same).
//!
//! What Linux's software devices get wrong, as of 7.3: rxe checks the key, the rights and the queue pair of a window, but
//! holds addresses against the bounds of its region, not its own; its on-demand paging writes to wrong places, and is
//! not offered here.
//!
//! Asynchronous events end the connections they are about: a queue pair's, all of a completion queue's or a shared
//! receive queue's, all of a port that went down, all of a device that failed or is gone.

mod abi;
mod address;
mod completion;
mod device;
mod endpoint;
mod library;
mod listener;
mod memory;
mod shared;

use crate::{Device, Error, Result};
pub use library::LibraryError;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

/// How to open a device.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// Name of the device, such as `mlx5_0`; `None`: the first with an active port.
    pub device: Option<String>,
}

impl Config {
    /// The device by which this machine reaches `peer`: the one that serves the address the system
    /// would call it from.
    ///
    /// # Errors
    /// [`Error::Io`], naming the address that no RDMA device serves.
    pub fn towards(peer: SocketAddr) -> Result<Config> {
        let any: IpAddr = if peer.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let probe = std::net::UdpSocket::bind((any, 0)).and_then(|socket| {
            // Sends nothing: it only asks the system for a route.
            socket.connect(peer)?;
            socket.local_addr()
        });
        let local = probe.map_err(|source| Error::Io { op: "finding a way to", peer: Some(peer), source })?.ip();
        Config::at(local)
    }

    /// The device that serves this address of ours; the first active one for the unspecified address.
    ///
    /// # Errors
    /// [`Error::Io`], naming the address.
    pub fn at(local: IpAddr) -> Result<Config> {
        if local.is_unspecified() {
            return Ok(Config::default());
        }
        library::library().map_err(|why| Error::io("opening an RDMA device", std::io::Error::other(why)))?;
        let none = || {
            let why = format!("no RDMA device serves {local}; `thruway bench devices` lists what there is");
            Error::io("opening an RDMA device", std::io::Error::new(std::io::ErrorKind::NotFound, why))
        };
        Ok(Config { device: Some(device::serving(local).ok_or_else(none)?) })
    }

    /// Opens the device.
    ///
    /// # Errors
    /// [`Error::Io`], saying whether the libraries, a device, or an active port is missing.
    pub fn open(&self) -> Result<Device> {
        let wanted = match &self.device {
            Some(name) => name.clone(),
            None => {
                let found = devices().map_err(|why| Error::io("opening an RDMA device", std::io::Error::other(why)))?;
                let active = found.into_iter().find(|d| d.ports.iter().any(|p| p.active));
                let none = || {
                    std::io::Error::new(
                        std::io::ErrorKind::NotFound,
                        "no RDMA device has an active port (provider iwarp needs none)",
                    )
                };
                active.ok_or_else(|| Error::io("opening an RDMA device", none()))?.name
            }
        };
        device::open(&wanted)
    }
}

/// A device as the system describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceDescription {
    /// Its name.
    pub name: String,
    /// What it is: `CA` (InfiniBand or RoCE), `RNIC` (iWARP), ...
    pub kind: String,
    /// The network interface it works over, where there is one.
    pub interface: Option<String>,
    /// Its ports.
    pub ports: Vec<PortDescription>,
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortDescription {
    /// From 1.
    pub number: u32,
    /// As the kernel says it, such as `ACTIVE`.
    pub state: String,
    /// It can be used.
    pub active: bool,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: String,
}

/// The RDMA devices of this machine; empty if it has none.
///
/// # Errors
/// [`LibraryError`].
pub fn devices() -> Result<Vec<DeviceDescription>, LibraryError> {
    library::library()?;
    Ok(described(Path::new("/sys/class/infiniband")))
}

/// What to say of a port that cannot be used; none if it can, or if nothing is known of it.
fn port_that_is_down(device: &str, port: u32) -> Option<String> {
    let state = std::fs::read_to_string(format!("/sys/class/infiniband/{device}/ports/{port}/state")).ok()?;
    let state = state.trim();
    (!state.ends_with("ACTIVE")).then(|| format!("port {port} of {device} is down ({state})"))
}

fn described(class: &Path) -> Vec<DeviceDescription> {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default().trim().to_string();
    let Ok(entries) = std::fs::read_dir(class) else { return Vec::new() };
    let mut found: Vec<DeviceDescription> = entries
        .flatten()
        .map(|entry| {
            let path = entry.path();
            // `1: CA`, `4: ACTIVE`.
            let word = |text: String| text.split_once(": ").map_or(text.clone(), |(_, word)| word.to_string());
            let mut ports: Vec<PortDescription> = std::fs::read_dir(path.join("ports"))
                .into_iter()
                .flatten()
                .flatten()
                .filter_map(|port| {
                    let number = port.file_name().to_str()?.parse().ok()?;
                    let state = word(read(&port.path().join("state")));
                    let link_layer = read(&port.path().join("link_layer"));
                    Some(PortDescription { number, active: state == "ACTIVE", state, link_layer })
                })
                .collect();
            ports.sort_by_key(|p| p.number);
            let interface = read(&path.join("ports/1/gid_attrs/ndevs/0"));
            DeviceDescription {
                name: entry.file_name().to_string_lossy().into_owned(),
                kind: word(read(&path.join("node_type"))),
                interface: (!interface.is_empty()).then_some(interface),
                ports,
            }
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Sizes and offsets of every structure of rdma-core that is used, by the names of its headers.
#[doc(hidden)]
pub fn layouts() -> Vec<(&'static str, usize)> {
    abi::layouts()
}
