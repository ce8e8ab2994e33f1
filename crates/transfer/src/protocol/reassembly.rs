//! Large files at the sink: beginning, pieces and end travel in different blocks and messages, and
//! come in any order.

use super::Violation;
use crate::wire::FileStatus;
use std::collections::HashMap;

/// Large files that may be unfinished at once. A sink leaves ends of files unread long before there are so many.
const OPEN_MAX: usize = 4096;

/// Large files in progress. `F` is an open file, `P` a piece that came too early.
pub(crate) struct Reassembly<F, P> {
    slots: HashMap<u64, Slot<F, P>>,
    parked: u64,
    /// Files of which the end has come and not the beginning.
    early_ends: usize,
}

struct Slot<F, P> {
    file: Known<F>,
    /// Pieces that came before the file was open.
    early: Vec<P>,
    /// Pieces that wait for that elsewhere.
    waiting: u64,
    end: Option<(u32, FileStatus)>,
    /// Pieces that have come, and of these the ones dealt with, failed ones included.
    come: u32,
    dealt: u32,
    /// The source could not read a piece.
    void: bool,
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
        Reassembly { slots: HashMap::new(), parked: 0, early_ends: 0 }
    }
}

impl<F: Clone, P> Reassembly<F, P> {
    fn slot(&mut self, number: u64) -> Result<&mut Slot<F, P>, Violation> {
        if self.slots.len() >= OPEN_MAX && !self.slots.contains_key(&number) {
            return Err(Violation::Unexpected("number of unfinished files"));
        }
        let new =
            || Slot { file: Known::NotYet, early: Vec::new(), waiting: 0, end: None, come: 0, dealt: 0, void: false };
        Ok(self.slots.entry(number).or_insert_with(new))
    }

    /// A file has begun; `None` if its pieces go nowhere. Returns the pieces that waited for it.
    pub(crate) fn begin(&mut self, number: u64, file: Option<F>) -> Result<Vec<P>, Violation> {
        let slot = self.slot(number)?;
        if !matches!(slot.file, Known::NotYet) {
            return Err(Violation::Unexpected("second beginning of a file"));
        }
        slot.file = file.map_or(Known::Nowhere, Known::Open);
        let has_ended = slot.end.is_some();
        let early = std::mem::take(&mut slot.early);
        self.parked -= early.len() as u64 + std::mem::take(&mut slot.waiting);
        self.early_ends -= usize::from(has_ended);
        Ok(early)
    }

    /// A piece has come, or begun to come: until it has been dealt with, its file does not end.
    pub(crate) fn come(&mut self, number: u64) -> Result<(), Violation> {
        let slot = self.slot(number)?;
        slot.come += 1;
        if slot.end.as_ref().is_some_and(|(blocks, _)| slot.come > *blocks) {
            return Err(Violation::Unexpected("piece of a file that has ended"));
        }
        Ok(())
    }

    /// Where a piece of this file that has come goes.
    pub(crate) fn lookup(&mut self, number: u64) -> Result<Known<F>, Violation> {
        Ok(self.slot(number)?.file.clone())
    }

    /// Keeps a piece that has come until its file begins.
    pub(crate) fn park(&mut self, number: u64, piece: P) -> Result<(), Violation> {
        self.slot(number)?.early.push(piece);
        self.parked += 1;
        Ok(())
    }

    /// A piece that has come waits elsewhere for its file to begin.
    pub(crate) fn wait(&mut self, number: u64) -> Result<(), Violation> {
        self.slot(number)?.waiting += 1;
        self.parked += 1;
        Ok(())
    }

    /// Pieces that wait for files that have not begun.
    pub(crate) fn parked(&self) -> u64 {
        self.parked
    }

    /// A piece that had come has been dealt with, well or not.
    pub(crate) fn dealt(&mut self, number: u64) -> Result<(), Violation> {
        self.slot(number)?.dealt += 1;
        Ok(())
    }

    /// A piece has come of which the source could not read anything.
    pub(crate) fn void(&mut self, number: u64) -> Result<(), Violation> {
        self.come(number)?;
        self.slot(number)?.void = true;
        self.dealt(number)
    }

    /// The source has read the file to its end, and sent it in so many pieces.
    pub(crate) fn end(&mut self, number: u64, blocks: u32, status: FileStatus) -> Result<(), Violation> {
        let slot = self.slot(number)?;
        if slot.end.is_some() {
            return Err(Violation::Unexpected("second end of a file"));
        }
        if slot.come > blocks {
            return Err(Violation::Unexpected("number of a file's pieces"));
        }
        slot.end = Some((blocks, status));
        let has_begun = !matches!(slot.file, Known::NotYet);
        self.early_ends += usize::from(!has_begun);
        Ok(())
    }

    /// Takes the file out if it has begun, ended, and all its pieces have been dealt with.
    pub(crate) fn take_ended(&mut self, number: u64) -> Result<Option<Ended<F>>, Violation> {
        let Some(slot) = self.slots.get(&number) else { return Ok(None) };
        let Some((blocks, status)) = slot.end.as_ref() else { return Ok(None) };
        if slot.dealt < *blocks || matches!(slot.file, Known::NotYet) {
            return Ok(None);
        }
        let whole = !matches!(status, FileStatus::Failed(_));
        if whole && slot.void {
            return Err(Violation::Unexpected("end of a file of which a piece could not be read"));
        }
        let file = match self.slots.remove(&number).map(|slot| slot.file) {
            Some(Known::Open(file)) => Some(file),
            _ => None,
        };
        Ok(Some(Ended { file, whole }))
    }

    /// Files of which the end has come and not the beginning.
    pub(crate) fn early_ends(&self) -> usize {
        self.early_ends
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
                    piece => match files.come(1).and_then(|()| files.lookup(1)).unwrap() {
                        Known::Open(_) => written.push(piece),
                        _ => files.park(1, piece).unwrap(),
                    },
                }
                while let Some(piece) = written.pop() {
                    assert!(piece == 'p' || piece == 'q');
                    files.dealt(1).unwrap();
                }
                assert_eq!(ended, None);
                assert_eq!(files.early_ends() == 1, left.contains(&'b') && !left.contains(&'e'));
                ended = files.take_ended(1).unwrap();
                assert_eq!(ended.is_some(), left.is_empty());
            }
            assert_eq!(ended, Some(Ended { file: Some("f"), whole: true }));
            assert_eq!((files.unfinished(), files.parked(), files.early_ends()), (0, 0, 0));
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

    #[test]
    fn a_file_does_not_end_while_a_piece_of_it_is_on_its_way() {
        let mut files: Reassembly<&str, ()> = Reassembly::default();
        files.begin(1, Some("f")).unwrap();
        // One that is on its way, and one that is there.
        files.come(1).unwrap();
        files.come(1).unwrap();
        files.dealt(1).unwrap();
        assert!(files.end(1, 1, FileStatus::Unchanged).is_err(), "there are two");
        files.end(1, 2, FileStatus::Unchanged).unwrap();
        assert_eq!(files.take_ended(1), Ok(None));
        assert!(files.come(1).is_err(), "a third");
        files.dealt(1).unwrap();
        assert_eq!(files.take_ended(1), Ok(Some(Ended { file: Some("f"), whole: true })));
    }

    #[test]
    fn what_could_not_be_read_is_not_whole() {
        for (status, ends) in [(FileStatus::Unchanged, false), (FileStatus::Failed("it is gone".into()), true)] {
            let mut files: Reassembly<&str, ()> = Reassembly::default();
            files.begin(1, Some("f")).unwrap();
            files.void(1).unwrap();
            files.end(1, 1, status).unwrap();
            assert_eq!(files.take_ended(1).is_ok(), ends);
        }
    }
}
