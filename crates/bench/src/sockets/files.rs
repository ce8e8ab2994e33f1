//! What is served: files in memory, all of them the beginning of one pattern, and which documents are asked for how often.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

/// Bytes of a file at most.
pub(super) const FILE_MAX: u64 = 1 << 30;

/// The byte of every file at this offset.
pub(super) fn pattern(at: u64) -> u8 {
    (at ^ (at / 251)) as u8
}

/// A file in memory with at least as much of the pattern as anything has been asked for.
pub(super) struct Files(Mutex<u64>, File);

impl Files {
    pub(super) fn new() -> io::Result<Files> {
        Ok(Files(Mutex::new(0), memory()?))
    }

    /// The file, of which the first `len` bytes are there.
    pub(super) fn at_least(&self, len: u64) -> io::Result<&File> {
        let mut has = self.0.lock().expect("no holder panics");
        while *has < len {
            let more: Vec<u8> = (*has..*has + (1 << 20)).map(pattern).collect();
            self.1.write_all_at(&more, *has)?;
            *has += more.len() as u64;
        }
        Ok(&self.1)
    }
}

/// An empty file in memory.
pub(super) fn memory() -> io::Result<File> {
    Ok(rustix::fs::memfd_create("thruway-bench", rustix::fs::MemfdFlags::CLOEXEC)?.into())
}

/// How many documents there are.
const DOCUMENTS: u32 = 20;
const SMALLEST: f64 = 200.0;
const LARGEST: f64 = (1 << 20) as f64;

/// Documents that are asked for as Zipf's law has it: the nth in proportion to 1/n^exponent, the smallest most often.
pub(super) struct Zipf {
    /// Sums of the weights, and sizes.
    sums: Vec<(f64, u32)>,
    state: u64,
}

impl Zipf {
    pub(super) fn new(exponent: f64, seed: u64) -> Zipf {
        let ratio = (LARGEST / SMALLEST).powf(1.0 / f64::from(DOCUMENTS - 1));
        let mut sum = 0.0;
        let sums = (0..DOCUMENTS).map(|n| {
            sum += f64::from(n + 1).powf(-exponent);
            (sum, (SMALLEST * ratio.powi(n.cast_signed())).round() as u32)
        });
        Zipf { sums: sums.collect(), state: seed | 1 }
    }

    /// Bytes of the next document.
    pub(super) fn next(&mut self) -> u32 {
        // xorshift64
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let all = self.sums.last().expect("there are some").0;
        let at = (self.state >> 11) as f64 / (1u64 << 53) as f64 * all;
        self.sums.iter().find(|(sum, _)| at < *sum).or(self.sums.last()).expect("there are some").1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_documents_are_asked_for_more_often_the_larger_the_exponent() {
        let share = |exponent| {
            let mut zipf = Zipf::new(exponent, 7);
            let sizes: Vec<u32> = (0..10_000).map(|_| zipf.next()).collect();
            assert!(sizes.iter().all(|size| (200..=1 << 20).contains(size)));
            assert!(sizes.contains(&200));
            sizes.iter().filter(|size| **size == 200).count() as f64 / 1e4
        };
        assert!((share(0.0) - 0.05).abs() < 0.02);
        // 1 of the 20th harmonic number.
        assert!((share(1.0) - 1.0 / 3.598).abs() < 0.03);
        assert!(share(2.0) > 0.5);
    }

    #[test]
    fn files_have_the_pattern() {
        let files = Files::new().unwrap();
        let mut byte = [0];
        for at in [0, 251, (3 << 20) + 17] {
            files.at_least(at + 1).unwrap().read_exact_at(&mut byte, at).unwrap();
            assert_eq!(byte[0], pattern(at));
        }
    }
}
