//! Numbers of tasks and events over all ranks, and lists by number.

use super::ranks::Ranks;

/// Successor lists in one allocation.
#[derive(Default)]
pub(super) struct Lists {
    offsets: Vec<u32>,
    items: Vec<u32>,
}

impl Lists {
    /// `pairs` are (from, to) with `from < count`.
    pub(super) fn new(count: usize, pairs: impl Iterator<Item = (u32, u32)> + Clone) -> Self {
        let mut offsets = vec![0u32; count + 1];
        for (from, _) in pairs.clone() {
            offsets[from as usize + 1] += 1;
        }
        for i in 0..count {
            offsets[i + 1] += offsets[i];
        }
        let mut items = vec![0u32; offsets[count] as usize];
        let mut next = offsets.clone();
        for (from, to) in pairs {
            let at = &mut next[from as usize];
            items[*at as usize] = to;
            *at += 1;
        }
        Lists { offsets, items }
    }

    /// There is at least one pair.
    pub(super) fn any(&self) -> bool {
        !self.items.is_empty()
    }

    pub(super) fn get(&self, from: u32) -> &[u32] {
        match self.offsets.get(from as usize..from as usize + 2) {
            Some(range) => &self.items[range[0] as usize..range[1] as usize],
            None => &[],
        }
    }
}

/// Numbering of tasks and events over all ranks.
pub(super) fn bases(graphs: Ranks<'_>) -> (Vec<u32>, Vec<u32>) {
    let (mut events, mut tasks) = (vec![0u32], vec![0u32]);
    let (mut e, mut t) = (0u32, 0u32);
    for graph in graphs.iter() {
        e += graph.events.len() as u32;
        t += graph.tasks.len() as u32;
        events.push(e);
        tasks.push(t);
    }
    (events, tasks)
}
