//! The source's end of a session.

use super::{Seen, Violation, WINDOW_MAX};
use crate::wire::{AbortCode, Answer, BlockHeader, Completion, Control, Credit, Report, Summary};
use std::collections::{BTreeMap, VecDeque};

/// What a source does next; `B` is its block.
pub(crate) enum Step<B> {
    /// Say this.
    Say(Control),
    /// Write the block where the credit says, and this notification behind it.
    Write(B, BlockHeader, Credit, Completion),
    /// Send the block down a stream.
    Stream(B, BlockHeader),
}

/// What a message from the sink means to those around.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Nothing.
    Nothing,
    /// What is wanted of offered files.
    Verdict(Vec<Answer>),
    /// An entry failed at the sink.
    Report(Report),
    /// Everything is in place; to be answered by a farewell.
    Done(Summary),
    /// The sink has given up.
    Aborted(AbortCode, String),
}

/// Blocks go out as credits come in.
pub(crate) struct Source<B> {
    session: u32,
    /// Blocks need credits; streams do not.
    by_credit: bool,
    loaded: VecDeque<(B, BlockHeader)>,
    /// Pieces loaded before the block that their file begins in was sent, by its number. Sent at
    /// once, they could take all of the sink's blocks, and leave none to begin the file in.
    early: BTreeMap<u32, Vec<(B, BlockHeader)>>,
    credits: VecDeque<Credit>,
    /// A region request is on its way and not answered; the beginning of a session is the first.
    asked: bool,
    /// Blocks of the data set, once the walk is over.
    blocks: Option<u32>,
    announced: bool,
    sent: Seen,
    /// Offers made.
    offered: u32,
    /// Number of the next verdict.
    verdict: u32,
}

impl<B> Source<B> {
    pub(crate) fn new(session: u32, by_credit: bool) -> Source<B> {
        Source {
            session,
            by_credit,
            loaded: VecDeque::new(),
            early: BTreeMap::new(),
            credits: VecDeque::new(),
            asked: true,
            blocks: None,
            announced: false,
            sent: Seen::default(),
            offered: 0,
            verdict: 0,
        }
    }

    /// A block is ready to go, but not before the block with the sequence number `after`.
    pub(crate) fn loaded(&mut self, block: B, header: BlockHeader, after: Option<u32>) {
        match after {
            Some(after) if !self.sent.contains(after) => self.early.entry(after).or_default().push((block, header)),
            _ => self.loaded.push_back((block, header)),
        }
    }

    fn take_loaded(&mut self) -> Option<(B, BlockHeader)> {
        let (block, header) = self.loaded.pop_front()?;
        self.sent.insert(header.sequence);
        self.loaded.extend(self.early.remove(&header.sequence).unwrap_or_default());
        Some((block, header))
    }

    /// Another batch of files is offered.
    pub(crate) fn offered(&mut self) {
        self.offered = self.offered.wrapping_add(1);
    }

    /// There will be this many blocks in all.
    pub(crate) fn walked(&mut self, blocks: u32) {
        self.blocks = Some(blocks);
    }

    /// Whether the sink has been told that everything has been sent.
    pub(crate) fn is_announced(&self) -> bool {
        self.announced
    }

    /// Whether the walk is over.
    pub(crate) fn is_walked(&self) -> bool {
        self.blocks.is_some()
    }

    /// Blocks that are ready and not sent.
    pub(crate) fn waiting(&self) -> usize {
        self.loaded.len()
    }

    /// What to do now, if anything; blocks only if `may_send`.
    pub(crate) fn next(&mut self, may_send: bool) -> Option<Step<B>> {
        if may_send && !self.loaded.is_empty() {
            if !self.by_credit {
                let (block, header) = self.take_loaded()?;
                return Some(Step::Stream(block, header));
            }
            if let Some(credit) = self.credits.pop_front() {
                let (block, header) = self.take_loaded()?;
                let notice = Completion { session: self.session, sequence: header.sequence, block: credit.block };
                return Some(Step::Write(block, header, credit, notice));
            }
            if !std::mem::replace(&mut self.asked, true) {
                return Some(Step::Say(Control::RegionRequest));
            }
        }
        let sent = self.sent.count();
        if self.blocks.is_some_and(|n| u64::from(n) == sent) && !std::mem::replace(&mut self.announced, true) {
            return Some(Step::Say(Control::DataSetComplete(sent)));
        }
        None
    }

    /// Takes a message from the sink.
    pub(crate) fn take(&mut self, message: Control) -> Result<Heard, Violation> {
        match message {
            Control::RegionReply(credits) if self.by_credit => {
                if self.credits.len() + credits.len() > WINDOW_MAX {
                    return Err(Violation::Unexpected("number of credits"));
                }
                self.asked = false;
                self.credits.extend(credits);
                Ok(Heard::Nothing)
            }
            Control::Verdict { batch, answers } => {
                if batch != self.verdict || self.verdict == self.offered {
                    return Err(Violation::Unexpected("verdict"));
                }
                self.verdict = self.verdict.wrapping_add(1);
                Ok(Heard::Verdict(answers))
            }
            Control::Report(report) => Ok(Heard::Report(report)),
            Control::Abort(code, why) => Ok(Heard::Aborted(code, why)),
            Control::DataSetReply(summary) if self.announced => Ok(Heard::Done(summary)),
            _ => Err(Violation::Unexpected("control message")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_answers_an_offer() {
        let verdict = |batch| Control::Verdict { batch, answers: Vec::new() };
        let mut source: Source<()> = Source::new(1, true);
        assert!(source.take(verdict(0)).is_err(), "nothing was offered");
        source.offered();
        source.offered();
        for batch in [1, u32::MAX] {
            assert!(source.take(verdict(batch)).is_err(), "answers come in the order of the offers");
        }
        assert!(matches!(source.take(verdict(0)), Ok(Heard::Verdict(_))));
        assert!(source.take(verdict(1)).is_ok());
        assert!(source.take(verdict(2)).is_err(), "all have been answered");
    }
}
