//! Who reads on: sequential readers are known again, so that what they will ask for can be fetched before they do.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;

/// Readers that are remembered.
const READERS: usize = 8;

/// The sequential readers of a disk.
pub(crate) struct Streams {
    /// How far ahead of a reader is fetched.
    window: u64,
    readers: Mutex<VecDeque<Reader>>,
}

struct Reader {
    /// Where its next request begins.
    next: u64,
    /// Everything before has been asked for, or fetched ahead.
    fetched: u64,
}

impl Streams {
    /// Fetches `window` bytes ahead; none at all if that is 0.
    pub(crate) fn new(window: u64) -> Streams {
        Streams { window, readers: Mutex::default() }
    }

    /// There is a read of `at..at + len` on a disk of `size` bytes: what to fetch now because more will follow. It
    /// is half a window at least, so that there are few fetches, except at the end of the disk.
    pub(crate) fn read(&self, at: u64, len: u64, size: u64) -> Option<Range<u64>> {
        if self.window == 0 {
            return None;
        }
        let end = at + len;
        let mut readers = self.readers.lock().expect("no panics under the lock");
        let known = readers.iter().position(|reader| reader.next == at).and_then(|index| readers.remove(index));
        readers.truncate(READERS - 1);
        let follows = known.is_some();
        let mut reader = known.unwrap_or(Reader { next: at, fetched: at });
        reader.next = end;
        reader.fetched = reader.fetched.max(end);
        let wanted = (end + self.window).min(size);
        let fetch = reader.fetched..wanted;
        let due = follows && wanted > fetch.start && (wanted == size || wanted - fetch.start >= self.window / 2);
        if due {
            reader.fetched = wanted;
        }
        readers.push_front(reader);
        due.then_some(fetch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_who_read_on_are_fetched_for_and_others_are_not() {
        let streams = Streams::new(1000);
        assert_eq!(streams.read(0, 100, 10_000), None, "nobody knows yet");
        assert_eq!(streams.read(5000, 100, 10_000), None, "another");
        assert_eq!(streams.read(100, 100, 10_000), Some(200..1200));
        assert_eq!(streams.read(200, 100, 10_000), None, "enough is on its way");
        assert_eq!(streams.read(300, 400, 10_000), Some(1200..1700));
        assert_eq!(streams.read(5100, 5, 10_000), Some(5105..6105));
        assert_eq!(streams.read(9000, 100, 10_000), None);
        assert_eq!(streams.read(9100, 100, 10_000), Some(9200..10_000), "no farther than the end");
        assert_eq!(streams.read(9200, 800, 10_000), None);
        assert_eq!(Streams::new(0).read(0, 100, 10_000), None);
    }

    #[test]
    fn readers_who_have_left_make_room() {
        let streams = Streams::new(1000);
        streams.read(0, 10, 1 << 20);
        for other in 1..=READERS as u64 {
            streams.read(other * 10_000, 10, 1 << 20);
        }
        assert_eq!(streams.read(10, 10, 1 << 20), None);
    }
}
