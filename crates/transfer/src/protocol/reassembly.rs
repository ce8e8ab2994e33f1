//! Large files at the sink: beginning, pieces and end travel in different blocks and messages, and
//! come in any order.

use super::Violation;
use crate::wire::FileStatus;
use std::collections::HashMap;

/// Large files that may be unfinished at once.
const OPEN_MAX: usize = 4096;

/// Large files under way. `F` is an open file, `P` a piece that came too early.
pub(crate) struct Reassembly<F, P> {
    slots: HashMap<u64, Slot<F, P>>,
    parked: u64,
}

struct Slot<F, P> {
    file: Known<F>,
    /// Pieces that came before the file was open.
    early: Vec<P>,
    end: Option<(u32, FileStatus)>,
    /// Pieces dealt with, failed ones included.
    dealt: u32,
}

/// Where a file's pieces go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Known<F> {
    /// Not known yet.
    NotYet,
    /// Nowhere: it could not be opened, or nothing is to be written.
    Nowhere,
    /// Here.
    Open(F),
}

/// A file all of whose pieces have been dealt with.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ended<F> {
    /// The file, if it could be opened.
    pub(crate) file: Option<F>,
    /// It was whole at the source.
    pub(crate) whole: bool,
}

impl<F, P> Default for Reassembly<F, P> {
    fn default() -> Reassembly<F, P> {
        Reassembly { slots: HashMap::new(), parked: 0 }
    }
}

impl<F: Clone, P> Reassembly<F, P> {
    fn slot(&mut self, number: u64) -> Result<&mut Slot<F, P>, Violation> {
        if self.slots.len() >= OPEN_MAX && !self.slots.contains_key(&number) {
            return Err(Violation::Unexpected("number of unfinished files"));
        }
        let new = || Slot { file: Known::NotYet, early: Vec::new(), end: None, dealt: 0 };
        Ok(self.slots.entry(number).or_insert_with(new))
    }

    /// A file has begun; `None` if its pieces go nowhere. Returns the pieces that waited for it.
    pub(crate) fn begin(&mut self, number: u64, file: Option<F>) -> Result<Vec<P>, Violation> {
        let slot = self.slot(number)?;
        if !matches!(slot.file, Known::NotYet) {
            return Err(Violation::Unexpected("second beginning of a file"));
        }
        slot.file = file.map_or(Known::Nowhere, Known::Open);
        let early = std::mem::take(&mut slot.early);
        self.parked -= early.len() as u64;
        Ok(early)
    }

    /// Where a piece of this file goes.
    pub(crate) fn lookup(&mut self, number: u64) -> Result<Known<F>, Violation> {
        Ok(self.slot(number)?.file.clone())
    }

    /// Keeps a piece until its file begins.
    pub(crate) fn park(&mut self, number: u64, piece: P) -> Result<(), Violation> {
        self.slot(number)?.early.push(piece);
        self.parked += 1;
        Ok(())
    }

    /// Pieces kept for files that have not begun.
    pub(crate) fn parked(&self) -> u64 {
        self.parked
    }

    /// A piece has been dealt with, well or not.
    pub(crate) fn dealt(&mut self, number: u64) -> Result<(), Violation> {
        self.slot(number)?.dealt += 1;
        Ok(())
    }

    /// The source has read the file to its end, and sent it in so many pieces.
    pub(crate) fn end(&mut self, number: u64, blocks: u32, status: FileStatus) -> Result<(), Violation> {
        let slot = self.slot(number)?;
        if slot.end.is_some() {
            return Err(Violation::Unexpected("second end of a file"));
        }
        slot.end = Some((blocks, status));
        Ok(())
    }

    /// Takes the file out if it has begun, ended, and all its pieces have been dealt with.
    pub(crate) fn take_ended(&mut self, number: u64) -> Option<Ended<F>> {
        let slot = self.slots.get(&number)?;
        let (blocks, status) = slot.end.as_ref()?;
        if slot.dealt < *blocks || matches!(slot.file, Known::NotYet) {
            return None;
        }
        let whole = !matches!(status, FileStatus::Failed(_));
        let file = match self.slots.remove(&number)?.file {
            Known::Open(file) => Some(file),
            Known::NotYet | Known::Nowhere => None,
        };
        Some(Ended { file, whole })
    }

    /// Files that are not finished.
    pub(crate) fn unfinished(&self) -> usize {
        self.slots.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_file_come_in_any_order() {
        // Beginning, two pieces and the end, in all 24 orders.
        for order in 0..24u32 {
            let mut left = vec!['b', 'p', 'q', 'e'];
            let mut files: Reassembly<&str, char> = Reassembly::default();
            let (mut rest, mut written) = (order, Vec::new());
            let mut ended = None;
            for n in (1..=4).rev() {
                let event = left.remove((rest % n) as usize);
                rest /= n;
                match event {
                    'b' => written.extend(files.begin(1, Some("f")).unwrap()),
                    'e' => files.end(1, 2, FileStatus::Unchanged).unwrap(),
                    piece => match files.lookup(1).unwrap() {
                        Known::Open(_) => written.push(piece),
                        _ => files.park(1, piece).unwrap(),
                    },
                }
                while let Some(piece) = written.pop() {
                    assert!(piece == 'p' || piece == 'q');
                    files.dealt(1).unwrap();
                }
                assert_eq!(ended, None);
                ended = files.take_ended(1);
                assert_eq!(ended.is_some(), left.is_empty());
            }
            assert_eq!(ended, Some(Ended { file: Some("f"), whole: true }));
            assert_eq!((files.unfinished(), files.parked()), (0, 0));
        }
    }

    #[test]
    fn a_file_begins_and_ends_once_and_there_are_not_too_many() {
        let mut files: Reassembly<(), ()> = Reassembly::default();
        files.begin(1, None).unwrap();
        assert!(files.begin(1, None).is_err());
        files.end(1, 5, FileStatus::Unchanged).unwrap();
        assert!(files.end(1, 5, FileStatus::Unchanged).is_err());
        for number in 2..=OPEN_MAX as u64 {
            files.begin(number, None).unwrap();
        }
        assert!(files.begin(9999, None).is_err() && files.park(9999, ()).is_err());
        assert!(files.lookup(5).is_ok());
    }
}
