//! Entry points for the fuzzer.

use super::{Nexus, Outcome, Step, Transfer, Unit};
use crate::export::Spec;
use crate::net::Body;
use crate::supply::Supply;
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use thruway_engine::Segment;

/// A command's data, all there from the first; what is sent to the initiator is forgotten.
pub(super) struct Given<'a> {
    data: &'a [u8],
    expected: u64,
    supply: Supply,
    taken: Cell<bool>,
}

impl Given<'_> {
    pub(super) fn new(data: &[u8], expected: u64) -> Given<'_> {
        Given { data, expected, supply: Supply::new(64 << 10), taken: Cell::new(false) }
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
            let mut segment = self.supply.piece(self.data.len().min(4096)).await.expect("memory");
            let len = segment.len();
            segment.as_mut_slice().copy_from_slice(&self.data[..len]);
            Some(Ok((0, segment)))
        })
    }

    fn supply(&self) -> &Supply {
        &self.supply
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
    let export = Spec::parse("fuzz=mem:64K").and_then(|spec| spec.open(None)).expect("memory");
    let unit = Unit::new(Arc::new(export), 512);
    let nexus = Nexus { id: 1, port: "iqn.2026-11.org.example:a,i,0x0".into() };
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
