//! Sets of attributes (`bitmap4`).

use smallvec::SmallVec;
use thruway_rpc::xdr::{self, Decoder, Encoder};

/// A set of small numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Bitmap(SmallVec<[u32; 3]>);

/// Most words that are kept, far more than the known attributes need. Later words are ignored, like other unknown attributes.
const WORDS_KEPT: usize = 16;

/// Most words that are decoded.
const WORDS_MAX: u32 = 4096;

impl Bitmap {
    pub(crate) fn of(numbers: &[u32]) -> Bitmap {
        let mut bitmap = Bitmap::default();
        numbers.iter().for_each(|number| bitmap.insert(*number));
        bitmap
    }

    pub(crate) fn insert(&mut self, number: u32) {
        let word = number as usize / 32;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (number % 32);
    }

    pub(crate) fn contains(&self, number: u32) -> bool {
        self.0.get(number as usize / 32).is_some_and(|word| word >> (number % 32) & 1 == 1)
    }

    /// Its numbers, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let bits = |(at, word): (usize, &u32)| {
            let word = *word;
            (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at as u32 * 32 + bit)
        };
        self.0.iter().enumerate().flat_map(bits)
    }

    pub(crate) fn decode(d: &mut Decoder<'_>) -> xdr::Result<Bitmap> {
        let count = d.len(WORDS_MAX)?;
        let mut words = SmallVec::new();
        for _ in 0..count {
            let word = d.u32()?;
            if words.len() < WORDS_KEPT {
                words.push(word);
            }
        }
        Ok(Bitmap(words))
    }

    pub(crate) fn encode(&self, out: &mut Encoder) {
        let end = self.0.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
        out.array(&self.0[..end], |out, word| out.u32(*word));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_set_comes_back(numbers in prop::collection::btree_set(0_u32..200, 0..20)) {
            let numbers: Vec<u32> = numbers.into_iter().collect();
            let bitmap = Bitmap::of(&numbers);
            prop_assert_eq!(bitmap.iter().collect::<Vec<_>>(), numbers.clone());
            let mut out = Encoder::new();
            bitmap.encode(&mut out);
            let bytes = out.into_parts().0;
            let mut d = Decoder::new(&bytes);
            let back = Bitmap::decode(&mut d).unwrap();
            prop_assert!((0..250).all(|n| back.contains(n) == numbers.contains(&n)));
            prop_assert!(d.finish().is_ok());
        }
    }
}
