//! Lets one word stand for all that change and are read together.
//!
//! Two words are together if the same steps read and write them, and copies take them from, and to, words that are together. Each step
//! reads or writes all of its words at once. So in every execution the values of such words tell the same steps apart, and one of them
//! is enough. Without this, a graph with many rows would have too many words to explore.

use super::execution::hash;
use super::model::{Class, Machine, Step, Word};
use std::collections::{HashMap, HashSet};

/// Merges the words of all steps.
pub fn merge(machine: &mut Machine) {
    let groups = groups(&machine.classes, machine.words);
    for step in machine.classes.iter_mut().flat_map(|c| &mut c.steps).flatten() {
        shorten(step, &groups);
    }
    machine.words = groups.iter().max().map_or(0, |&last| last as usize + 1);
}

/// The group of each word: split until words of a group are together.
fn groups(classes: &[Class], words: usize) -> Vec<Word> {
    let mut groups: Vec<Word> = vec![0; words];
    let mut count = 1;
    loop {
        let mut marks: Vec<u64> = groups.iter().map(|&g| u64::from(g)).collect();
        for (id, step) in classes.iter().flat_map(|c| &c.steps).flatten().enumerate() {
            let repeats = step.copy && (repeats(&step.reads) || repeats(&step.writes));
            for (list, other, write) in
                [(&step.reads, &step.writes, false), (&step.writes, &step.reads, true)]
            {
                for (i, &(word, flagged)) in list.iter().enumerate() {
                    let beside = other.get(i).filter(|_| step.copy).map(|&(w, _)| groups[w as usize]);
                    // The order of such a copy matters, so its words stay apart.
                    let apart = repeats.then_some(word);
                    let mark = &mut marks[word as usize];
                    *mark = hash((*mark, id, write, flagged, beside, apart));
                }
            }
        }
        let mut numbers = HashMap::new();
        for (group, mark) in groups.iter_mut().zip(marks) {
            let next = numbers.len() as Word;
            *group = *numbers.entry(mark).or_insert(next);
        }
        if numbers.len() == count {
            return groups;
        }
        count = numbers.len();
    }
}

fn repeats(list: &[(Word, u64)]) -> bool {
    let mut seen = HashSet::new();
    !list.iter().all(|(word, _)| seen.insert(word))
}

/// Keeps one word of each group. The words of a copy stay in pairs.
fn shorten(step: &mut Step, groups: &[Word]) {
    let of_group = |&(word, flagged): &(Word, u64)| (groups[word as usize], flagged);
    let reads: Vec<_> = step.reads.iter().map(of_group).collect();
    let writes: Vec<_> = step.writes.iter().map(of_group).collect();
    (step.reads, step.writes) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    if !step.copy {
        step.reads.extend(reads.into_iter().filter(|word| seen.insert(*word)));
        seen.clear();
        step.writes.extend(writes.into_iter().filter(|word| seen.insert(*word)));
        return;
    }
    let mut pairs = HashSet::new();
    for i in 0..reads.len().max(writes.len()) {
        let pair = (reads.get(i).copied(), writes.get(i).copied());
        if pairs.insert(pair) {
            step.reads.extend(pair.0);
            step.writes.extend(pair.1);
        }
    }
}
