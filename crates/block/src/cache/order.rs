//! The order in which slots were put into a list: a slot goes in at the end and out anywhere, at constant cost.

const NONE: u32 = u32::MAX;

/// A doubly linked list of numbered slots.
pub(super) struct Order {
    /// Of each slot, the one before and the one behind it.
    links: Vec<(u32, u32)>,
    first: u32,
    last: u32,
    len: usize,
}

impl Order {
    /// Of so many slots, none of which is in the list.
    pub(super) fn new(slots: usize) -> Order {
        Order { links: vec![(NONE, NONE); slots], first: NONE, last: NONE, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Puts a slot that is not in the list at its end.
    pub(super) fn push(&mut self, slot: u32) {
        self.links[slot as usize] = (self.last, NONE);
        match self.last {
            NONE => self.first = slot,
            last => self.links[last as usize].1 = slot,
        }
        self.last = slot;
        self.len += 1;
    }

    /// Takes out a slot that is in the list.
    pub(super) fn remove(&mut self, slot: u32) {
        let (before, behind) = std::mem::replace(&mut self.links[slot as usize], (NONE, NONE));
        match before {
            NONE => self.first = behind,
            before => self.links[before as usize].1 = behind,
        }
        match behind {
            NONE => self.last = before,
            behind => self.links[behind as usize].0 = before,
        }
        self.len -= 1;
    }

    /// From the first to the last.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let some = |slot| (slot != NONE).then_some(slot);
        std::iter::successors(some(self.first), move |slot| some(self.links[*slot as usize].1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_list(steps in prop::collection::vec(0_u32..8, 0..100)) {
            let (mut order, mut model) = (Order::new(8), Vec::new());
            for slot in steps {
                match model.iter().position(|s| *s == slot) {
                    Some(place) => {
                        model.remove(place);
                        order.remove(slot);
                    }
                    None => {
                        model.push(slot);
                        order.push(slot);
                    }
                }
                prop_assert_eq!(order.iter().collect::<Vec<_>>(), model.clone());
                prop_assert_eq!(order.len(), model.len());
            }
        }
    }
}
