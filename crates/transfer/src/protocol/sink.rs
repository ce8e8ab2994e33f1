//! The sink's end of a session: credits, sequence numbers, the end.

use super::{CREDITS_PER_REPLY, Seen, Violation, WINDOW_MAX};
use crate::wire::{AbortCode, BlockHeader, Completion, Control, Credit, FileStatus, Malformed, OfferEntry, Report};
use std::collections::HashMap;

/// Credits that one notification earns, so that the window doubles every round trip.
const EARNED: usize = 2;

/// What a message from the source means to those around.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Nothing but what [`Sink::credits_to_grant`] and [`Sink::expected`] say now.
    Nothing,
    /// A large file has been read to its end.
    FileEnd { file: u64, blocks: u32, status: FileStatus },
    /// Files that may be here already.
    Offer { batch: u32, entries: Vec<OfferEntry> },
    /// An entry failed at the source.
    Report(Report),
    /// The source would use so many more data channels.
    MoreChannels(u32),
    /// The source has given up.
    Aborted(AbortCode, String),
}

/// Grants credits, takes notifications. `W` is what stands for a block that is out.
pub(crate) struct Sink<W> {
    session: u32,
    sealed: bool,
    /// Blocks whose credit the source holds, by number.
    out: HashMap<u32, W>,
    /// Blocks that may be in use at once.
    window: usize,
    /// What the window may grow to.
    window_max: usize,
    /// Blocks need credits; streams do not.
    by_credit: bool,
    /// The source has asked and not been answered.
    owed: bool,
    seen: Seen,
    expected: Option<u64>,
}

impl<W> Sink<W> {
    /// The window begins with what every one of `channels` can carry at once, and grows to
    /// `window_max`. The beginning of a session counts as the source's first request. Without
    /// channels blocks come down streams, and there are no credits.
    pub(crate) fn new(session: u32, sealed: bool, channels: usize, window_max: usize) -> Sink<W> {
        let window_max = window_max.clamp(EARNED, WINDOW_MAX);
        Sink {
            session,
            sealed,
            out: HashMap::new(),
            window: (EARNED * channels).clamp(EARNED, window_max),
            window_max,
            by_credit: channels > 0,
            owed: channels > 0,
            seen: Seen::default(),
            expected: None,
        }
    }

    /// Sets what the window may grow to; it shrinks only as credits come back.
    pub(crate) fn set_window_max(&mut self, window_max: usize) {
        self.window_max = window_max.clamp(EARNED, WINDOW_MAX);
        self.window = self.window.min(self.window_max);
    }

    /// Blocks there will be in all, once that is known.
    pub(crate) fn expected(&self) -> Option<u64> {
        self.expected
    }

    /// Whether the source waits for an answer to its request.
    pub(crate) fn is_owed(&self) -> bool {
        self.owed
    }

    /// Takes a message from the source.
    pub(crate) fn take(&mut self, message: Control) -> Result<Heard, Violation> {
        match message {
            Control::Abort(code, why) => Ok(Heard::Aborted(code, why)),
            // Asked for before the source knew that it was at the end.
            Control::MoreChannels(_) if self.expected.is_some() => Ok(Heard::Nothing),
            _ if self.expected.is_some() => Err(Violation::Unexpected("message after the end")),
            Control::RegionRequest if self.by_credit => {
                self.owed = true;
                Ok(Heard::Nothing)
            }
            Control::FileEnd { file, blocks, status } => Ok(Heard::FileEnd { file, blocks, status }),
            Control::Offer { batch, entries } => Ok(Heard::Offer { batch, entries }),
            Control::Report(report) => Ok(Heard::Report(report)),
            Control::MoreChannels(count) => Ok(Heard::MoreChannels(count)),
            Control::DataSetComplete(blocks) => {
                if blocks > u64::from(u32::MAX) || self.seen.count() > blocks {
                    return Err(Violation::Unexpected("number of blocks"));
                }
                self.expected = Some(blocks);
                Ok(Heard::Nothing)
            }
            _ => Err(Violation::Unexpected("control message")),
        }
    }

    /// How many credits to grant now, if there are blocks: as many as were earned, or as many as
    /// the window holds, if the source is owed an answer. `in_use` blocks count: those that are out, and perhaps those that
    /// have come and are being dealt with.
    pub(crate) fn credits_to_grant(&self, in_use: usize) -> usize {
        let most = if self.owed { CREDITS_PER_REPLY } else { EARNED };
        most.min(self.window.saturating_sub(in_use))
    }

    /// Blocks that are out.
    pub(crate) fn out(&self) -> usize {
        self.out.len()
    }

    /// The window has room while fewer blocks are in use.
    pub(crate) fn window(&self) -> usize {
        self.window
    }

    /// Blocks have been exposed; says what to tell the source.
    pub(crate) fn grant(&mut self, blocks: impl IntoIterator<Item = (Credit, W)>) -> Option<Control> {
        let mut credits = Vec::new();
        for (credit, block) in blocks {
            credits.push(credit);
            self.out.insert(credit.block, block);
        }
        if credits.is_empty() {
            return None;
        }
        self.owed = false;
        Some(Control::RegionReply(credits))
    }

    /// A block that was out has been filled; it is ours again.
    pub(crate) fn arrived(&mut self, completion: &Completion) -> Result<W, Violation> {
        if completion.session != self.session {
            return Err(Violation::Unexpected("session number"));
        }
        let block = self.out.remove(&completion.block).ok_or(Violation::Unexpected("block number"))?;
        self.window = (self.window + EARNED).min(self.window_max);
        Ok(block)
    }

    /// Checks the header of a block that has come, and that `announced` is its number if a
    /// notification said one.
    pub(crate) fn accept(&mut self, header: &BlockHeader, announced: Option<u32>) -> Result<(), Violation> {
        if announced.is_some_and(|n| n != header.sequence) {
            return Err(Malformed("block header: not the block announced").into());
        }
        if header.session != self.session || header.sealed != self.sealed {
            return Err(Malformed("block header: not of this session").into());
        }
        self.note(header.sequence)
    }

    /// Each sequence number comes once.
    pub(crate) fn note(&mut self, sequence: u32) -> Result<(), Violation> {
        let late = self.expected.is_some_and(|n| u64::from(sequence) >= n);
        if late || !self.seen.insert(sequence) {
            return Err(Violation::Unexpected("sequence number"));
        }
        Ok(())
    }

    /// Whether all blocks have been dealt with. `parked` pieces wait for the beginning of their
    /// file, and if nothing else is left to come, it never will; nor will what `unfinished` large
    /// files lack. To be read in this order: `dealt`, `parked`, `unfinished`.
    pub(crate) fn is_complete(&self, dealt: u64, parked: u64, unfinished: usize) -> Result<bool, Violation> {
        let Some(expected) = self.expected else { return Ok(false) };
        if parked > 0 && dealt + parked >= expected {
            return Err(Violation::Unexpected("piece of a file that never began"));
        }
        if dealt >= expected && unfinished > 0 {
            return Err(Violation::Unexpected("end of the data set before the end of a file"));
        }
        Ok(dealt >= expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn credit(block: u32) -> (Credit, ()) {
        (Credit { block, channel: 0, addr: 0, rkey: 0 }, ())
    }

    #[test]
    fn the_window_doubles_with_every_round_of_notifications() {
        let mut sink: Sink<()> = Sink::new(1, false, 1, 64);
        assert_eq!(sink.credits_to_grant(0), 2);
        let mut next = 0;
        let mut out = VecDeque::new();
        let mut grant = |sink: &mut Sink<()>, out: &mut VecDeque<u32>| {
            let n = sink.credits_to_grant(out.len()) as u32;
            sink.grant((next..next + n).map(credit));
            out.extend(next..next + n);
            next += n;
        };
        grant(&mut sink, &mut out);
        for round in 1..8 {
            for _ in 0..out.len() {
                let block = out.pop_front().unwrap();
                sink.arrived(&Completion { session: 1, sequence: 0, block }).unwrap();
                grant(&mut sink, &mut out);
            }
            assert_eq!(out.len(), (2 << round).min(64));
        }
    }

    #[test]
    fn who_asks_is_answered_as_soon_as_the_window_has_room() {
        let mut sink: Sink<()> = Sink::new(1, false, 8, 2);
        assert_eq!(sink.credits_to_grant(0), 2, "the beginning is a request");
        sink.grant((0..2).map(credit));
        assert_eq!(sink.credits_to_grant(2), 0);
        sink.take(Control::RegionRequest).unwrap();
        assert_eq!(sink.credits_to_grant(2), 0, "never beyond the window");
        sink.arrived(&Completion { session: 1, sequence: 0, block: 1 }).unwrap();
        assert_eq!(sink.credits_to_grant(2), 0, "it is being dealt with");
        assert_eq!((sink.credits_to_grant(1), sink.window()), (1, 2));
        assert!(sink.grant([]).is_none() && sink.is_owed());
        assert!(sink.grant([credit(7)]).is_some() && !sink.is_owed());
    }

    #[test]
    fn lies_about_numbers_are_violations() {
        let mut sink: Sink<()> = Sink::new(1, false, 1, 8);
        sink.grant([credit(0)]);
        assert!(sink.arrived(&Completion { session: 2, sequence: 0, block: 0 }).is_err());
        assert!(sink.arrived(&Completion { session: 1, sequence: 0, block: 1 }).is_err());
        assert!(sink.arrived(&Completion { session: 1, sequence: 0, block: 0 }).is_ok());
        assert!(sink.arrived(&Completion { session: 1, sequence: 0, block: 0 }).is_err(), "once");
        for good in [0, 2, 1] {
            sink.note(good).unwrap();
        }
        for bad in [0, 2, 3 + (1 << 20) + 1, u32::MAX] {
            assert!(sink.note(bad).is_err());
        }
        assert!(sink.take(Control::DataSetComplete(2)).is_err(), "more were seen");
        sink.take(Control::DataSetComplete(4)).unwrap();
        assert!(sink.take(Control::DataSetComplete(4)).is_err() && sink.take(Control::RegionRequest).is_err());
        assert!(sink.note(4).is_err(), "beyond the end");
        sink.note(3).unwrap();
        assert_eq!(sink.is_complete(3, 0, 1), Ok(false));
        assert_eq!(sink.is_complete(4, 0, 0), Ok(true));
        assert!(sink.is_complete(3, 1, 1).is_err(), "a piece without a beginning");
        assert!(sink.is_complete(4, 0, 1).is_err(), "a beginning without an end");
    }
}
