//! Sequential read-ahead: detects up to 8 concurrent streams and says what to prefetch for them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;

/// Streams that are remembered.
const STREAMS: usize = 8;

/// The sequential streams that read a disk.
pub(crate) struct ReadAhead {
    /// Bytes to prefetch beyond a stream's last read.
    window: u64,
    streams: Mutex<VecDeque<Stream>>,
}

struct Stream {
    /// Where its next request begins.
    next: u64,
    /// Everything before has been read or prefetched.
    fetched: u64,
}

impl ReadAhead {
    /// Prefetches `window` bytes ahead; 0 turns it off.
    pub(crate) fn new(window: u64) -> ReadAhead {
        ReadAhead { window, streams: Mutex::default() }
    }

    /// There is a read of `at..at + len` on a disk of `size` bytes: what to fetch now because more will follow. It
    /// is half a window at least, so that there are few fetches, except at the end of the disk.
    pub(crate) fn read(&self, at: u64, len: u64, size: u64) -> Option<Range<u64>> {
        if self.window == 0 {
            return None;
        }
        let end = at + len;
        let mut streams = self.streams.lock().expect("no panics under the lock");
        let known = streams.iter().position(|stream| stream.next == at).and_then(|index| streams.remove(index));
        streams.truncate(STREAMS - 1);
        let follows = known.is_some();
        let mut stream = known.unwrap_or(Stream { next: at, fetched: at });
        stream.next = end;
        stream.fetched = stream.fetched.max(end);
        let wanted = (end + self.window).min(size);
        let fetch = stream.fetched..wanted;
        let due = follows && wanted > fetch.start && (wanted == size || wanted - fetch.start >= self.window / 2);
        if due {
            stream.fetched = wanted;
        }
        streams.push_front(stream);
        due.then_some(fetch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_streams_are_prefetched_for_and_other_reads_are_not() {
        let readahead = ReadAhead::new(1000);
        assert_eq!(readahead.read(0, 100, 10_000), None, "not sequential yet");
        assert_eq!(readahead.read(5000, 100, 10_000), None, "another stream");
        assert_eq!(readahead.read(100, 100, 10_000), Some(200..1200));
        assert_eq!(readahead.read(200, 100, 10_000), None, "enough has been prefetched");
        assert_eq!(readahead.read(300, 400, 10_000), Some(1200..1700));
        assert_eq!(readahead.read(5100, 5, 10_000), Some(5105..6105));
        assert_eq!(readahead.read(9000, 100, 10_000), None);
        assert_eq!(readahead.read(9100, 100, 10_000), Some(9200..10_000), "no farther than the end");
        assert_eq!(readahead.read(9200, 800, 10_000), None);
        assert_eq!(ReadAhead::new(0).read(0, 100, 10_000), None);
    }

    #[test]
    fn old_streams_are_forgotten() {
        let readahead = ReadAhead::new(1000);
        readahead.read(0, 10, 1 << 20);
        for other in 1..=STREAMS as u64 {
            readahead.read(other * 10_000, 10, 1 << 20);
        }
        assert_eq!(readahead.read(10, 10, 1 << 20), None);
    }
}
