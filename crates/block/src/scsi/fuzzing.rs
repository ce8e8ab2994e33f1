//! Entry points for the fuzzer.

use super::{Nexus, Outcome, Step, Transfer, Unit};
use crate::export::Spec;
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use thruway_engine::Segment;
use thruway_server::Body;
use thruway_server::Buffers;

/// A command's data, all there from the first; what is sent to the initiator is forgotten.
pub(super) struct Given<'a> {
    data: &'a [u8],
    expected: u64,
    buffers: Buffers,
    taken: Cell<bool>,
}

impl Given<'_> {
    pub(super) fn new(data: &[u8], expected: u64) -> Given<'_> {
        Given { data, expected, buffers: Buffers::new(64 << 10), taken: Cell::new(false) }
    }
}

impl Transfer for Given<'_> {
    fn expected(&self) -> u64 {
        self.expected
    }

    fn send(&self, _offset: u64, _body: Body) -> Step<'_, io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn receive(&self) -> Step<'_, Option<io::Result<(u64, Segment)>>> {
        Box::pin(async move {
            if self.taken.replace(true) || self.data.is_empty() {
                return None;
            }
            let mut segment = self.buffers.segment(self.data.len().min(4096)).await.expect("memory");
            let len = segment.len();
            segment.as_mut_slice().copy_from_slice(&self.data[..len]);
            Some(Ok((0, segment)))
        })
    }

    fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    fn can_lend(&self) -> bool {
        self.expected.is_multiple_of(2)
    }

    fn aborted(&self) -> Step<'_, ()> {
        Box::pin(std::future::pending())
    }
}

/// Commands of a hostile initiator with their data, one after the other, on a disk in memory.
pub fn initiator(mut input: &[u8]) {
    let export = Spec::parse("fuzz=mem:64K").expect("a disk of memory").open(None).expect("memory");
    let unit = Unit::new(Arc::new(export), 512);
    let nexus = Nexus { id: 1, port: "iqn.2026-11.org.example:a,i,0x0".into(), owner: "a".into() };
    let _attached = unit.attach(&nexus);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    while let Some((cdb, rest)) = input.split_first_chunk::<16>() {
        let (expected, rest) = rest.split_first().map_or((0, rest), |(n, rest)| (u64::from(*n) * 16, rest));
        let (data, rest) = rest.split_at((expected as usize).min(rest.len()));
        input = rest;
        let given = Given::new(data, expected);
        let _: Outcome = runtime.block_on(unit.execute(&nexus, cdb, &given));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the fuzzer begins with (`fuzz/seeds`): every command that there is once, with a little data.
    #[test]
    fn the_fuzzers_seeds_are_there() {
        let codes = [
            0x00, 0x03, 0x08, 0x0a, 0x12, 0x15, 0x16, 0x17, 0x1a, 0x1b, 0x1e, 0x25, 0x28, 0x2a, 0x2e, 0x2f, 0x35, 0x37,
            0x41, 0x42, 0x55, 0x5a, 0x5e, 0x5f, 0x88, 0x89, 0x8a, 0x8b, 0x8e, 0x8f, 0x91, 0x93, 0x9e, 0xa0, 0xa3,
        ];
        for (number, group) in codes.chunks(5).enumerate() {
            let commands = group.iter().map(|code| {
                let mut cdb = [0; 16];
                cdb[0] = *code;
                // One block, however long the command; a list or an allocation of 64.
                (cdb[4], cdb[8], cdb[13]) = (1, if *code < 0x80 { 1 } else { 0 }, 1);
                [&cdb[..], &[64], &[0; 1024]].concat()
            });
            let seed = commands.collect::<Vec<_>>().concat();
            initiator(&seed);
            crate::seeds::check("scsi_initiator", number, &seed);
        }
    }
}
