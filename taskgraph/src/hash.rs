//! Maps and sets with a fast hash, for short keys of our own such as boxes and indices. Nobody can choose them so that they collide.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map with the fast hash.
pub(crate) type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<Words>>;
/// A set with the fast hash.
pub(crate) type FastSet<K> = HashSet<K, BuildHasherDefault<Words>>;

/// Multiplies for each word of the key.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Words(u64);

impl Words {
    fn add(&mut self, word: u64) {
        // An odd number whose bits look random: the golden ratio times 2^64.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

impl Hasher for Words {
    fn finish(&self) -> u64 {
        // The product's high bits depend on all bits of the key. The map takes its bucket from the low ones.
        self.0.rotate_left(26)
    }

    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.add(u64::from_ne_bytes(*word)));
        rest.iter().for_each(|&byte| self.add(byte.into()));
    }

    fn write_u32(&mut self, word: u32) {
        self.add(word.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.add(word);
    }

    fn write_usize(&mut self, word: usize) {
        self.add(word as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::BuildHasher;

    #[test]
    fn neighbouring_keys_fall_into_different_buckets() {
        const BUCKETS: u64 = 1 << 12;
        let build = BuildHasherDefault::<Words>::default();
        let keys = (0..64u32).flat_map(|row| (0..64u32).map(move |column| [row * 64, column * 128, 1, 1]));
        let used: HashSet<u64> = keys.map(|key| build.hash_one(key) % BUCKETS).collect();
        // Random numbers would fall into 63 % of them.
        assert!(used.len() as u64 > BUCKETS / 2, "{} of {BUCKETS} buckets", used.len());
    }
}
