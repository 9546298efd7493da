//! Allocates places for the tokens of requests: ranges of one array.

use std::collections::BTreeMap;

/// The free ranges of an array.
#[derive(Debug)]
pub(super) struct Arena {
    /// Length of each free range, by its first place. No two ranges are adjacent.
    free: BTreeMap<u32, u32>,
}

impl Arena {
    /// All `places` are free.
    pub fn new(places: u32) -> Arena {
        Arena { free: (places > 0).then_some((0, places)).into_iter().collect() }
    }

    /// Allocates `count` places. Returns the first one, or `None` if there is no such range.
    pub fn take(&mut self, count: u32) -> Option<u32> {
        let (&first, &length) = self.free.iter().find(|&(_, &length)| length >= count)?;
        self.free.remove(&first);
        if length > count {
            self.free.insert(first + count, length - count);
        }
        Some(first)
    }

    /// Frees a range that `take` allocated.
    pub fn give_back(&mut self, first: u32, count: u32) {
        let (mut first, mut count) = (first, count);
        if let Some((&before, &length)) = self.free.range(..first).next_back()
            && before + length == first
        {
            self.free.remove(&before);
            (first, count) = (before, count + length);
        }
        if let Some(length) = self.free.remove(&(first + count)) {
            count += length;
        }
        self.free.insert(first, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_come_apart_and_together_again() {
        let mut arena = Arena::new(10);
        assert_eq!(
            [arena.take(4), arena.take(4), arena.take(4), arena.take(2)],
            [Some(0), Some(4), None, Some(8)]
        );
        arena.give_back(0, 4);
        arena.give_back(8, 2);
        assert_eq!(arena.take(5), None);
        arena.give_back(4, 4);
        assert_eq!((arena.free.len(), arena.take(10), arena.take(1)), (1, Some(0), None));
    }
}
