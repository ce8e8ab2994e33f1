//! Connections over plain TCP during their greeting.
//!
//! Each has a thread, and any peer can connect. If there are many, a new connection evicts the oldest one of the origin with the
//! most, as for iWARP, so peers that never complete their greeting cannot keep others out. During a burst, recent connections
//! are spared at first, because most peers complete their greeting within milliseconds.

use super::lock;
use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thruway_tcp::{ByOrigin, Origin};

/// Connections of a daemon with a greeting in progress.
pub(super) struct Greetings {
    /// From this number of connections on, a new one evicts one older than `grace`; from twice this number on, one of any age.
    max: usize,
    grace: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    streams: HashMap<u64, (Instant, Arc<TcpStream>)>,
    by_origin: ByOrigin<u64>,
    /// Threads of greetings, including those of evicted connections that have not ended.
    threads: usize,
    closed: bool,
}

/// A greeting in progress. Drop ends it.
pub(super) struct Turn {
    greetings: Arc<Greetings>,
    origin: Origin,
    number: u64,
    stream: Option<Arc<TcpStream>>,
}

impl Greetings {
    pub(super) fn new(max: usize, grace: Duration) -> Arc<Greetings> {
        Arc::new(Greetings { max, grace, state: Mutex::default() })
    }

    /// Begins a greeting, and may evict another connection. `None` after [`Greetings::close`], and while too many threads of
    /// evicted connections have not ended.
    pub(super) fn begin(self: &Arc<Self>, origin: Origin, stream: TcpStream) -> Option<Turn> {
        let mut state = lock(&self.state);
        if state.closed || state.threads >= 3 * self.max {
            return None;
        }
        let count = state.streams.len();
        if count >= self.max
            && let Some((from, number)) = state.by_origin.give_way(origin)
            && (count >= 2 * self.max || state.streams[&number].0.elapsed() >= self.grace)
            && let Some(evicted) = state.remove(from, number)
        {
            // The thread of its greeting reads the end of the stream, and ends.
            let _ = evicted.shutdown(Shutdown::Both);
        }
        let (number, stream) = (state.next, Arc::new(stream));
        state.next += 1;
        state.threads += 1;
        state.streams.insert(number, (Instant::now(), Arc::clone(&stream)));
        state.by_origin.insert(origin, number);
        drop(state);
        Some(Turn { greetings: Arc::clone(self), origin, number, stream: Some(stream) })
    }

    /// Ends all greetings. [`Greetings::begin`] fails from now on.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        for (_, stream) in state.streams.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl State {
    fn remove(&mut self, origin: Origin, number: u64) -> Option<Arc<TcpStream>> {
        self.by_origin.remove(origin, number);
        self.streams.remove(&number).map(|(_, stream)| stream)
    }
}

impl Turn {
    pub(super) fn stream(&self) -> &TcpStream {
        self.stream.as_ref().expect("taken only at the end")
    }

    /// Ends the greeting and returns its connection; `None` if it was evicted.
    pub(super) fn end(mut self) -> Option<TcpStream> {
        lock(&self.greetings.state).remove(self.origin, self.number)?;
        Arc::into_inner(self.stream.take()?)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = lock(&self.greetings.state);
        state.remove(self.origin, self.number);
        state.threads -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;

    /// Both ends of a new connection.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    fn host(number: u8) -> Origin {
        Origin::of_host([192, 0, 2, number].into())
    }

    #[test]
    fn the_oldest_greeting_of_the_busiest_origin_gives_way() {
        let greetings = Greetings::new(4, Duration::ZERO);
        let mut clients = Vec::new();
        let mut begin = |from| {
            let (client, server) = pair();
            clients.push(client);
            greetings.begin(host(from), server)
        };
        let other = begin(2).unwrap();
        let mut silent: Vec<Turn> = (0..6).map(|_| begin(1).unwrap()).collect();
        // The evicted connections have ended. The others, and the one of another origin, have not.
        let ended = |turn: &Turn| turn.stream().read(&mut [0]).is_ok_and(|n| n == 0);
        assert!(silent[..3].iter().all(ended));
        let new = begin(3).expect("a new origin");
        silent.extend((8..12).map(|_| begin(1).unwrap()));
        assert!(begin(1).is_none(), "threads of evicted ones have not ended");
        drop(silent.drain(..3));
        let last = begin(1).unwrap();
        assert!(last.end().is_some() && other.end().is_some() && new.end().is_some());
        let left = silent.into_iter().filter(|turn| lock(&greetings.state).streams.contains_key(&turn.number));
        assert!({ left }.all(|turn| turn.end().is_some()));
        let state = lock(&greetings.state);
        assert_eq!((state.threads, state.streams.len()), (0, 0));
    }

    #[test]
    fn a_burst_of_connections_is_not_evicted_at_once() {
        let greetings = Greetings::new(4, Duration::from_secs(86_400));
        let pairs: Vec<_> = (0..9).map(|_| pair()).collect();
        let begin =
            |(_, server): &(TcpStream, TcpStream)| greetings.begin(host(1), server.try_clone().unwrap()).unwrap();
        let turns: Vec<Turn> = pairs.iter().map(begin).collect();
        let went_on: Vec<bool> = turns.into_iter().map(|turn| turn.end().is_some()).collect();
        assert_eq!(went_on.iter().filter(|went_on| !**went_on).count(), 1, "the first, from twice as many on");
    }

    #[test]
    fn no_greeting_begins_after_the_end() {
        let greetings = Greetings::new(4, Duration::ZERO);
        let (_client, server) = pair();
        let turn = greetings.begin(host(1), server).unwrap();
        greetings.close();
        assert_eq!(turn.stream().read(&mut [0]).unwrap(), 0);
        assert!(greetings.begin(host(1), pair().1).is_none());
    }
}
