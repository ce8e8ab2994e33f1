//! How links come to be: in threads of their own, which hand them over to the loop.

use crate::Error;
use crate::ends::Way;
use crate::link::Link;
use crate::meet::Host;
use rustix::event::EventfdFlags;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Limits of concurrent handshakes, for all addresses and for each: an unknown peer occupies only its own share.
const MEETINGS_MAX: usize = 256;
const MEETINGS_OF_ONE_MAX: usize = 8;
/// Limit of concurrent handshakes under a low limit of open files.
const MEETINGS_MIN: usize = 4;
/// Open files for each concurrent handshake.
const DESCRIPTORS_PER_MEETING: usize = 32;

/// Handshakes in progress, by the address of the other relay.
pub(crate) struct Meetings {
    most: usize,
    of: Mutex<HashMap<IpAddr, usize>>,
}

impl Meetings {
    /// `descriptors`: number of files that the process may open.
    pub(crate) fn new(descriptors: usize) -> Meetings {
        let most = (descriptors / DESCRIPTORS_PER_MEETING).clamp(MEETINGS_MIN, MEETINGS_MAX);
        Meetings { most, of: Mutex::default() }
    }

    /// Limit of concurrent handshakes.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Counts a handshake. `None` at the limit.
    fn begin(self: &Arc<Meetings>, from: IpAddr) -> Option<Meeting> {
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = of.values().sum();
        let of_one = of.get(&from).copied().unwrap_or(0);
        if all >= self.most || of_one >= MEETINGS_OF_ONE_MAX {
            return None;
        }
        of.insert(from, of_one + 1);
        Some(Meeting { meetings: Arc::clone(self), from })
    }
}

/// What threads that meet other relays have to say.
pub(crate) enum Event {
    /// A link; of the call for this way, if it was called for.
    Met(Box<Link>, Option<Way>),
    Failed(Way),
}

#[derive(Clone)]
pub(crate) struct Post {
    events: Sender<Event>,
    bell: Arc<OwnedFd>,
}

impl Post {
    /// One, and where what it is given comes out.
    pub(crate) fn new() -> Result<(Post, Receiver<Event>), Error> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(bell.map_err(|error| Error::io("no relay")(error.into()))?);
        let (events, out) = channel();
        Ok((Post { events, bell }, out))
    }

    /// Readable when there is something.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Silences the bell: what is posted from now on rings it again.
    pub(crate) fn quiet(&self) {
        let _ = rustix::io::read(&*self.bell, &mut [0; 8]);
    }

    fn send(&self, event: Event) {
        // The loop has ended, or gets it.
        let _ = self.events.send(event);
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }
}

/// Meets those who call.
pub(crate) fn answer_all(host: &Arc<Host>, listener: &TcpListener, post: &Post, meetings: &Arc<Meetings>) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // No descriptors left, most likely.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        let Ok(from) = stream.peer_addr().map(|peer| peer.ip()) else { continue };
        let Some(over) = meetings.begin(from) else { continue };
        let (host, post) = (Arc::clone(host), post.clone());
        // Without a thread for it, it is over.
        let _ = std::thread::Builder::new().spawn(move || {
            answer(&host, stream, &post);
            drop(over);
        });
    }
}

/// One that is in progress.
struct Meeting {
    meetings: Arc<Meetings>,
    from: IpAddr,
}

impl Drop for Meeting {
    fn drop(&mut self) {
        let mut meetings = self.meetings.of.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = meetings.get_mut(&self.from) {
            *count -= 1;
            if *count == 0 {
                meetings.remove(&self.from);
            }
        }
    }
}

fn answer(host: &Host, stream: TcpStream, post: &Post) {
    let peer = stream.peer_addr().map_or_else(|error| error.to_string(), |peer| peer.to_string());
    match host.answer(stream) {
        Ok(link) => post.send(Event::Met(Box::new(link), None)),
        Err(error) => tracing::warn!(%peer, %error, "a relay has called in vain"),
    }
}

/// Calls the relay of another host. False if there is no thread for that.
pub(crate) fn call(host: &Arc<Host>, way: Way, port: u16, post: &Post) -> bool {
    let (host, post) = (Arc::clone(host), post.clone());
    let spawned = std::thread::Builder::new().spawn(move || match host.call(way.0, SocketAddr::new(way.1, port)) {
        Ok(link) => post.send(Event::Met(Box::new(link), Some(way))),
        Err(error) => {
            tracing::warn!(peer = %way.1, %error, "connections stay with TCP");
            post.send(Event::Failed(way));
        }
    });
    spawned.is_ok()
}
