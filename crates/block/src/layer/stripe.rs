//! One disk of several: chunks go round the members, and the parts of a request go to all of them at once.

use crate::backend::{Backend, EXTENTS_MAX, Extent, Geometry, Op, Zero, all, append, merge};
use crate::chunk_ranges::chunk_ranges;
use futures_util::future::try_join_all;
use std::io;
use std::sync::Arc;
use thruway_engine::Segment;

/// A stripe over several disks.
pub struct Stripe {
    members: Vec<Arc<dyn Backend>>,
    chunk: u64,
}

/// A part of a request that lies in one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    member: usize,
    at: u64,
    len: u64,
}

impl Stripe {
    /// Chunks of `chunk` bytes, a power of two of at least 4096, over the members.
    ///
    /// # Errors
    /// If the chunk is none, or there are fewer than two members.
    pub fn new(members: Vec<Arc<dyn Backend>>, chunk: u64) -> io::Result<Stripe> {
        Stripe::check(members.len(), chunk)?;
        Ok(Stripe { members, chunk })
    }

    /// Whether there can be such a stripe.
    pub(crate) fn check(members: usize, chunk: u64) -> io::Result<()> {
        let wrong = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        if !chunk.is_power_of_two() || chunk < 4096 {
            return wrong("a stripe's chunk is a power of two of at least 4096");
        }
        if members < 2 {
            return wrong("a stripe has at least two members");
        }
        Ok(())
    }

    fn parts(&self, at: u64, len: u64) -> impl Iterator<Item = Part> + '_ {
        let (size, count) = (self.chunk, self.members.len() as u64);
        chunk_ranges(at, len, self.chunk).map(move |(at, len)| {
            let (chunk, within) = (at / size, at % size);
            Part { member: (chunk % count) as usize, at: chunk / count * size + within, len: len as u64 }
        })
    }

    /// Bytes of a member that belong to what is before an offset.
    fn before(&self, member: usize, at: u64) -> u64 {
        let row = self.chunk * self.members.len() as u64;
        let within = (at % row).saturating_sub(member as u64 * self.chunk).min(self.chunk);
        at / row * self.chunk + within
    }

    /// Does something with the part of each member in a range, which is one range of the member.
    fn each<'a>(&'a self, at: u64, len: u64, op: impl Fn(&'a dyn Backend, u64, u64) -> Op<'a, ()> + 'a) -> Op<'a, ()> {
        Box::pin(async move {
            let ranges = self.members.iter().enumerate().map(|(number, member)| {
                let (from, to) = (self.before(number, at), self.before(number, at + len));
                (member, from, to - from)
            });
            all(ranges.filter(|(_, _, len)| *len > 0).map(|(member, at, len)| op(&**member, at, len))).await
        })
    }
}

impl Backend for Stripe {
    fn geometry(&self) -> Geometry {
        let all: Vec<Geometry> = self.members.iter().map(|m| m.geometry()).collect();
        let smallest = all.iter().map(|g| g.size / self.chunk).min().unwrap_or(0);
        Geometry {
            size: smallest * self.chunk * all.len() as u64,
            block: all.iter().map(|g| g.block).max().unwrap_or(1),
            preferred: u32::try_from(self.chunk).unwrap_or(4096),
            physical: all.iter().map(|g| g.physical).max().unwrap_or(1),
            read_only: all.iter().any(|g| g.read_only),
            discard: all.iter().all(|g| g.discard),
            discard_zeroes: all.iter().all(|g| g.discard_zeroes),
            fast_zero: all.iter().all(|g| g.fast_zero),
            shared: all.iter().all(|g| g.shared),
        }
    }

    fn read(&self, at: u64, mut segment: Segment) -> Op<'_, Segment> {
        Box::pin(async move {
            let mut reads = Vec::new();
            for part in self.parts(at, segment.len() as u64) {
                let rest = segment.split_off(part.len as usize);
                reads.push(self.members[part.member].read(part.at, std::mem::replace(&mut segment, rest)));
            }
            let joined = try_join_all(reads).await?.into_iter().reduce(|mut all, next| {
                all.join(next);
                all
            });
            Ok(joined.unwrap_or(segment))
        })
    }

    fn write(&self, at: u64, mut segment: Segment, durable: bool) -> Op<'_, ()> {
        Box::pin(async move {
            let mut writes = Vec::new();
            for part in self.parts(at, segment.len() as u64) {
                let rest = segment.split_off(part.len as usize);
                writes.push(self.members[part.member].write(part.at, std::mem::replace(&mut segment, rest), durable));
            }
            all(writes).await
        })
    }

    fn flush(&self) -> Op<'_, ()> {
        Box::pin(all(self.members.iter().map(|m| m.flush())))
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        self.each(at, len, move |member, at, len| member.zero(at, len, how))
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.each(at, len, |member, at, len| member.discard(at, len))
    }

    fn extents(&self, at: u64, len: u64, most: usize) -> Op<'_, Vec<Extent>> {
        /// Chunks looked at for one answer.
        const PARTS_MAX: usize = 256;
        Box::pin(async move {
            let mut extents = Vec::new();
            for part in self.parts(at, len).take(PARTS_MAX) {
                let found = self.members[part.member].extents(part.at, part.len, most).await?;
                let covered: u64 = found.iter().map(|e| e.len).sum();
                found.into_iter().for_each(|extent| append(&mut extents, extent));
                // One more: then the last of them is complete.
                if covered < part.len || extents.len() > most.min(EXTENTS_MAX) {
                    break;
                }
            }
            Ok(merge(extents, len))
        })
    }

    fn hint_sequential(&self, at: u64, len: u64) {
        for (number, member) in self.members.iter().enumerate() {
            let (from, to) = (self.before(number, at), self.before(number, at + len));
            if to > from {
                member.hint_sequential(from, to - from);
            }
        }
    }

    fn prefetch(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.each(at, len, |member, at, len| member.prefetch(at, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryBackend;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_members_part_of_a_range_is_one_range(
            count in 2usize..6,
            exponent in 12u32..18,
            at in 0u64..1 << 20,
            len in 0u64..1 << 20,
        ) {
            let members = (0..count).map(|_| Arc::new(MemoryBackend::new(1 << 20).unwrap()) as _).collect();
            let stripe = Stripe::new(members, 1 << exponent).unwrap();
            for member in 0..count {
                let parts: Vec<Part> = stripe.parts(at, len).filter(|part| part.member == member).collect();
                let (from, to) = (stripe.before(member, at), stripe.before(member, at + len));
                prop_assert_eq!(to - from, parts.iter().map(|part| part.len).sum::<u64>());
                let mut next = from;
                for part in parts {
                    prop_assert_eq!(part.at, next);
                    next += part.len;
                }
            }
        }
    }
}
