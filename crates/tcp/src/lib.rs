//! TCP connections: what the kernel knows of the path to a peer, sockets fitted to it, and where a connection
//! comes from.

mod by_origin;
mod origin;
mod owner;

pub use by_origin::ByOrigin;
pub use origin::Origin;
pub use owner::{LocalSocket, ask, ask_on, bound_interface, diagnostics, local_socket};

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use rustix::net::sockopt;

/// From this round trip on, a path is a long one: it may lose packets for other reasons than
/// congestion, and its rate is worth measuring.
const LONG_PATH_RTT: Duration = Duration::from_millis(2);

/// Bytes a socket on a long path takes beyond what is on its way.
const UNSENT_MAX: libc::c_int = 256 << 10;

/// Bytes a socket on a long path may be sent before anything is known of its rate.
const INITIAL_WINDOW: libc::c_int = 1 << 20;

/// What TCP knows of a path, now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathInfo {
    /// Smoothed round trip.
    pub round_trip: Duration,
    /// Bytes that the peer has acknowledged.
    pub acked: u64,
    /// How long the connection has had something in progress.
    pub busy: Duration,
    /// How long of that it could have sent more, had its send buffer or the peer's window been
    /// larger.
    pub window_limited: Duration,
}

/// The beginning of the kernel's `struct tcp_info` (linux/tcp.h), whose fields have kept their
/// places since Linux 4.10; the C library's copy ends before those wanted here.
#[repr(C)]
#[derive(Clone, Copy)]
struct TcpInfo {
    before_rtt: [u32; 17],
    rtt: u32,
    before_acked: [u64; 6],
    acked: u64,
    before_busy_time: [u64; 5],
    busy_time: u64,
    rwnd_limited: u64,
    sndbuf_limited: u64,
}

const _: () = assert!(
    std::mem::offset_of!(TcpInfo, rtt) == 68
        && std::mem::offset_of!(TcpInfo, acked) == 120
        && std::mem::offset_of!(TcpInfo, busy_time) == 168
);

impl PathInfo {
    /// What is known of a connection's path; `None` if nothing is.
    pub fn of(stream: &TcpStream) -> Option<PathInfo> {
        // SAFETY: an all-zero TcpInfo is valid, being integers throughout.
        let mut info: TcpInfo = unsafe { std::mem::zeroed() };
        let mut len = size_of::<TcpInfo>() as libc::socklen_t;
        // SAFETY: `info` and `len` are valid for writing and describe each other.
        let rc = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                (&raw mut info).cast(),
                &raw mut len,
            )
        };
        (rc == 0 && info.rtt > 0).then(|| PathInfo {
            round_trip: Duration::from_micros(info.rtt.into()),
            acked: info.acked,
            busy: Duration::from_micros(info.busy_time),
            window_limited: Duration::from_micros(info.rwnd_limited + info.sndbuf_limited),
        })
    }
}

/// Fits a new connection to its path.
///
/// On a long path the socket takes little beyond what is on its way, so that what it takes is soon
/// sent, and work can be distributed over several connections late; and its window opens wide
/// at once, instead of by what came in the last round trip. Sets the
/// congestion control: `wanted`; or, within one host, cubic, because
/// pacing by a measured rate halves the rate of the loopback device; or, on a long path, BBR,
/// which losses without congestion do not slow down; or the system's own.
///
/// A system that refuses keeps its own: this tunes, it does not decide correctness.
pub fn tune(stream: &TcpStream, peer: SocketAddr, wanted: Option<&str>) {
    let long = PathInfo::of(stream).is_some_and(|p| p.round_trip >= LONG_PATH_RTT);
    if long {
        // The option exists wherever the rest of this does.
        let _ = set(stream, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, UNSENT_MAX);
        widen(stream);
    }
    let name = match wanted {
        Some(name) => name,
        None if peer.ip().to_canonical().is_loopback() => "cubic",
        None if long => "bbr",
        None => return,
    };
    if let Err(error) = sockopt::set_tcp_congestion(stream, name) {
        tracing::debug!(name, error = %io::Error::from(error), "congestion control not available");
    }
}

/// Makes room for what may come. To ask for a buffer of a size would end its growing later; to wait for much at once, which is
/// taken back before anybody waits, makes the kernel provide for that much (`tcp_set_rcvlowat`).
fn widen(stream: &TcpStream) {
    for least in [INITIAL_WINDOW, 1] {
        let _ = set(stream, libc::SOL_SOCKET, libc::SO_RCVLOWAT, least);
    }
}

fn set(stream: &TcpStream, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: `value` is valid for reading and its length is told.
    let rc = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    #[test]
    fn a_connection_knows_its_path() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, peer) = listener.accept().unwrap();
        near.write_all(b"there").unwrap();
        far.read_exact(&mut [0; 5]).unwrap();
        far.write_all(b"back").unwrap();
        near.read_exact(&mut [0; 4]).unwrap();
        let path = PathInfo::of(&near).unwrap();
        assert!(path.round_trip > Duration::ZERO && path.window_limited <= path.busy);
        tune(&far, peer, None);
        assert_eq!(sockopt::tcp_congestion(&far).unwrap(), "cubic");
        tune(&far, peer, Some("no such thing"));
        assert_eq!(sockopt::tcp_congestion(&far).unwrap(), "cubic");
    }

    #[test]
    fn a_widened_socket_has_room_and_still_tells_of_every_byte() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        widen(&far);
        assert!(sockopt::socket_recv_buffer_size(&far).unwrap() >= INITIAL_WINDOW as usize);
        near.write_all(b"x").unwrap();
        let mut told = [rustix::event::PollFd::new(&far, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut told, None).unwrap(), 1);
        far.read_exact(&mut [0]).unwrap();
    }
}
