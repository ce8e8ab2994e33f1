//! The bytes of a file: what reads see, in a cache, and what the medium has.

use fastrand::Rng;
use std::collections::BTreeMap;

/// Versions of a page that may be the one that reached the medium.
const VERSIONS_MAX: usize = 4;

/// Something that was written did not reach the medium. Told once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost;

/// The bytes of one file, or of one disk.
///
/// A loss of power keeps of each page what was synced or any version since, and of the length the same. Write-back
/// that fails leaves the cache as it is, clean, and the medium as it was: as on Linux, where only a sync tells.
#[derive(Debug, Clone)]
pub struct Content {
    page: usize,
    current: Vec<u8>,
    durable: Vec<u8>,
    /// Versions of the pages that were written since the last sync, latest last.
    dirty: BTreeMap<usize, Vec<Vec<u8>>>,
    /// The shortest it has been since the last sync.
    shortest: usize,
    /// Something was lost, and nobody has been told.
    lost: bool,
}

impl Content {
    /// Nothing yet. A page reaches the medium as one.
    ///
    /// # Panics
    /// If pages are empty.
    pub fn new(page: usize) -> Content {
        assert!(page > 0, "pages of no bytes");
        let (current, durable) = (Vec::new(), Vec::new());
        Content { page, current, durable, dirty: BTreeMap::new(), shortest: 0, lost: false }
    }

    /// What reads see.
    pub fn bytes(&self) -> &[u8] {
        &self.current
    }

    /// Writes into the cache.
    pub fn write(&mut self, at: usize, data: &[u8]) {
        let end = at + data.len();
        if self.current.len() < end {
            self.current.resize(end, 0);
        }
        self.current[at..end].copy_from_slice(data);
        for page in at / self.page..end.div_ceil(self.page) {
            self.touch(page);
        }
    }

    /// Makes it longer, by zeroes, or shorter.
    pub fn resize(&mut self, len: usize) {
        let old = self.current.len();
        self.current.resize(len, 0);
        if len < old {
            self.shortest = self.shortest.min(len);
            self.dirty.split_off(&len.div_ceil(self.page));
        }
        // The page in which it ends or ended: zeroes follow the end.
        let end = len.min(old);
        if !end.is_multiple_of(self.page) && len != old {
            self.touch(end / self.page);
        }
    }

    fn touch(&mut self, page: usize) {
        let start = page * self.page;
        let version = self.current[start..self.current.len().min(start + self.page)].to_vec();
        let versions = self.dirty.entry(page).or_default();
        if versions.len() == VERSIONS_MAX {
            versions.remove(0);
        }
        versions.push(version);
    }

    /// Writes it out, and tells nobody whether that works.
    pub fn write_out(&mut self) {
        self.durable.truncate(self.shortest);
        for (page, mut versions) in std::mem::take(&mut self.dirty) {
            put(&mut self.durable, page * self.page, &versions.pop().expect("a page is dirty in some version"));
        }
        self.durable.resize(self.current.len(), 0);
        self.shortest = self.current.len();
    }

    /// Writes it out.
    ///
    /// # Errors
    /// If something has been lost since somebody last asked.
    pub fn sync(&mut self) -> Result<(), Lost> {
        self.write_out();
        if std::mem::take(&mut self.lost) { Err(Lost) } else { Ok(()) }
    }

    /// Something has been lost, and nobody has been told.
    pub fn has_lost(&self) -> bool {
        self.lost
    }

    /// Writing out fails for some of what is dirty. False if nothing is lost by that.
    pub fn lose(&mut self, random: &mut Rng) -> bool {
        let before = self.dirty.len();
        self.dirty.retain(|_, _| random.u8(..3) > 0);
        let lost = self.dirty.len() < before;
        self.lost |= lost;
        lost
    }

    /// Somebody else has been told what was lost.
    pub fn forget_lost(&mut self) {
        self.lost = false;
    }

    /// The cache lets go of what is not dirty: reads see the medium.
    pub fn drop_clean(&mut self) {
        let mut seen = self.durable.clone();
        seen.truncate(self.shortest);
        seen.resize(self.current.len(), 0);
        for (page, versions) in &self.dirty {
            put(&mut seen, page * self.page, versions.last().expect("a page is dirty in some version"));
        }
        seen.resize(self.current.len(), 0);
        self.current = seen;
    }

    /// The power goes and comes back.
    pub fn lose_power(&mut self, random: &mut Rng) {
        let dirty = std::mem::take(&mut self.dirty);
        // Whether it has become shorter in between comes before all that was written since.
        let cut = self.shortest >= self.durable.len() || random.bool();
        let reaches = if cut { usize::MAX } else { self.shortest };
        let old = self.durable.len();
        if cut {
            self.durable.truncate(self.shortest);
        }
        for (page, versions) in dirty {
            let start = page * self.page;
            // The medium's own version is one of them.
            let which = random.usize(..=versions.len());
            if which > 0 && start < reaches {
                put(&mut self.durable, start, &versions[which - 1]);
            }
        }
        let len = match random.u8(..3) {
            0 => old,
            1 => self.current.len(),
            _ => self.durable.len(),
        };
        self.durable.resize(len, 0);
        self.current.clone_from(&self.durable);
        self.shortest = len;
        self.lost = false;
    }
}

fn put(to: &mut Vec<u8>, at: usize, data: &[u8]) {
    if to.len() < at + data.len() {
        to.resize(at + data.len(), 0);
    }
    to[at..at + data.len()].copy_from_slice(data);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_synced_is_there_and_of_the_rest_any_version_of_each_page() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let mut content = Content::new(4);
            content.write(0, b"aaaabbbb");
            content.sync().unwrap();
            content.write(4, b"cccc");
            content.write(4, b"dddd");
            assert_eq!(content.bytes(), b"aaaadddd");
            content.lose_power(&mut Rng::with_seed(seed));
            assert_eq!(&content.bytes()[..4], b"aaaa");
            seen.insert(content.bytes()[4..].to_vec());
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [b"bbbb", b"cccc", b"dddd"]);
    }

    #[test]
    fn what_was_lost_is_told_once_and_shows_when_the_cache_is_dropped() {
        let mut content = Content::new(4);
        content.write(0, b"aaaabbbb");
        let mut random = Rng::with_seed(0);
        while !content.lose(&mut random) {}
        assert_eq!(content.bytes(), b"aaaabbbb");
        assert_eq!(content.sync(), Err(Lost));
        assert_eq!(content.sync(), Ok(()));
        assert_eq!(content.bytes(), b"aaaabbbb");
        content.drop_clean();
        assert_ne!(content.bytes(), b"aaaabbbb");
    }

    #[test]
    fn what_was_cut_off_does_not_come_back_once_that_is_synced() {
        for seed in 0..100 {
            let mut content = Content::new(4);
            content.write(0, b"aaaabbbbcccc");
            content.sync().unwrap();
            content.resize(5);
            content.resize(12);
            content.drop_clean();
            assert_eq!(content.bytes(), b"aaaab\0\0\0\0\0\0\0");
            let mut early = content.clone();
            early.lose_power(&mut Rng::with_seed(seed));
            let whole = early.bytes();
            assert!(whole.len() >= 5 && b"aaaabbbbcccc".iter().zip(whole).all(|(a, b)| a == b || *b == 0));
            content.sync().unwrap();
            content.lose_power(&mut Rng::with_seed(seed));
            assert_eq!(content.bytes(), b"aaaab\0\0\0\0\0\0\0");
        }
    }
}
