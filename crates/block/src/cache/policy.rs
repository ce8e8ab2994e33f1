//! Which block goes when room is needed.
//!
//! S3-FIFO (Yang et al., SOSP 2023): what is used only once passes through a short queue and does not
//! disturb the rest; what comes back soon after leaving it goes straight to the long one. On Zipf mixed with
//! scans it keeps more than LRU does: `cargo bench -p thruway-block --bench policy`.

use std::collections::{HashSet, VecDeque};

/// Uses that are counted.
const USES_MAX: u8 = 3;

/// An order of eviction over numbered slots.
pub struct Policy {
    slots: Vec<Slot>,
    small: VecDeque<Place>,
    main: VecDeque<Place>,
    small_live: usize,
    /// Keys that left the short queue lately.
    ghosts: VecDeque<u64>,
    ghost_set: HashSet<u64>,
    ghosts_max: usize,
    small_max: usize,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    key: u64,
    uses: u8,
    /// Tells places in the queues that are still meant from those of an earlier life of the slot.
    life: u32,
    live: bool,
    in_small: bool,
}

#[derive(Clone, Copy)]
struct Place {
    slot: u32,
    life: u32,
}

impl Policy {
    /// For so many slots.
    pub fn new(slots: usize) -> Policy {
        Policy {
            slots: vec![Slot::default(); slots],
            small: VecDeque::new(),
            main: VecDeque::new(),
            small_live: 0,
            ghosts: VecDeque::new(),
            ghost_set: HashSet::new(),
            ghosts_max: slots,
            small_max: (slots / 10).max(1),
        }
    }

    /// A slot holds a key from now on.
    pub fn insert(&mut self, slot: u32, key: u64) {
        let state = &mut self.slots[slot as usize];
        state.life = state.life.wrapping_add(1);
        (state.key, state.uses, state.live) = (key, 0, true);
        let place = Place { slot, life: state.life };
        // Places of what has been removed are passed over when their turn comes, which it may never.
        if self.small.len() + self.main.len() > 2 * self.slots.len() {
            self.forget_dead();
        }
        let state = &mut self.slots[slot as usize];
        state.in_small = !self.ghost_set.remove(&key);
        if !state.in_small {
            self.main.push_back(place);
        } else {
            self.small.push_back(place);
            self.small_live += 1;
        }
    }

    fn forget_dead(&mut self) {
        let slots = &self.slots;
        let is_live = |place: &Place| slots[place.slot as usize].live && slots[place.slot as usize].life == place.life;
        self.small.retain(is_live);
        self.main.retain(is_live);
    }

    /// A slot has been used.
    pub fn touch(&mut self, slot: u32) {
        let state = &mut self.slots[slot as usize];
        state.uses = (state.uses + 1).min(USES_MAX);
    }

    /// A slot holds nothing any more.
    pub fn remove(&mut self, slot: u32) {
        let state = &mut self.slots[slot as usize];
        state.live = false;
        // Its place in a queue is passed over later.
        if std::mem::take(&mut state.in_small) {
            self.small_live -= 1;
        }
    }

    fn is_live(&self, place: Place) -> bool {
        let slot = &self.slots[place.slot as usize];
        slot.live && slot.life == place.life
    }

    /// Takes out the slot to be used again; one that `pinned` says must stay is passed over. `None` if all must.
    pub fn evict(&mut self, pinned: impl Fn(u32) -> bool) -> Option<u32> {
        let first = if self.small_live >= self.small_max { self.evict_small(&pinned) } else { None };
        first.or_else(|| self.evict_main(&pinned)).or_else(|| self.evict_small(&pinned))
    }

    fn evict_small(&mut self, pinned: &impl Fn(u32) -> bool) -> Option<u32> {
        for _ in 0..self.small.len() {
            let place = self.small.pop_front()?;
            if !self.is_live(place) {
                continue;
            }
            let slot = &mut self.slots[place.slot as usize];
            if slot.uses > 0 {
                (slot.uses, slot.in_small) = (0, false);
                self.small_live -= 1;
                self.main.push_back(place);
            } else if pinned(place.slot) {
                self.small.push_back(place);
            } else {
                let key = slot.key;
                slot.live = false;
                self.small_live -= 1;
                self.remember(key);
                return Some(place.slot);
            }
        }
        None
    }

    fn evict_main(&mut self, pinned: &impl Fn(u32) -> bool) -> Option<u32> {
        for _ in 0..self.main.len() * (usize::from(USES_MAX) + 1) {
            let place = self.main.pop_front()?;
            if !self.is_live(place) {
                continue;
            }
            let slot = &mut self.slots[place.slot as usize];
            if slot.uses > 0 {
                slot.uses -= 1;
                self.main.push_back(place);
            } else if pinned(place.slot) {
                self.main.push_back(place);
            } else {
                slot.live = false;
                return Some(place.slot);
            }
        }
        None
    }

    fn remember(&mut self, key: u64) {
        if self.ghost_set.insert(key) {
            self.ghosts.push_back(key);
        }
        while self.ghosts.len() > self.ghosts_max {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.ghost_set.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_does_not_push_out_what_is_used_again() {
        let mut policy = Policy::new(100);
        (0..100).for_each(|slot| policy.insert(slot, slot.into()));
        (0..50).for_each(|slot| policy.touch(slot));
        for key in 1000..3000 {
            let slot = policy.evict(|_| false).unwrap();
            assert!(slot >= 50 || key > 1000 + 2000, "slot {slot} was used and went");
            policy.insert(slot, key);
        }
    }

    #[test]
    fn what_must_stay_stays_and_all_else_goes_once() {
        let mut policy = Policy::new(8);
        (0..8).for_each(|slot| policy.insert(slot, slot.into()));
        let mut gone: Vec<u32> = std::iter::from_fn(|| policy.evict(|slot| slot % 2 == 0)).collect();
        gone.sort_unstable();
        assert_eq!(gone, [1, 3, 5, 7]);
        policy.remove(2);
        let mut rest: Vec<u32> = std::iter::from_fn(|| policy.evict(|_| false)).collect();
        rest.sort_unstable();
        assert_eq!(rest, [0, 4, 6]);
    }
}
