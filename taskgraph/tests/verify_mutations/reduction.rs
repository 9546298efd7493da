//! The machine takes a transition alone if it races with nothing (`machine/races.rs`). This must not hide any final state.

use crate::builder_support::ways;
use crate::machine::Machine;
use crate::random::Random;
use crate::small_sums::{broken, for_all};
use crate::valid::{by_hand, valid};
use crate::{mutate, number};
use std::collections::BTreeMap;
use taskgraph::task_graph::TaskGraph;

/// Compares all final states, memory included, if not more than `most` states lead to them. Returns the numbers of states and of final
/// states.
fn compare(graphs: &[TaskGraph], program: &[usize], most: usize, what: &str) -> Option<[usize; 3]> {
    let machine = Machine::new(&[graphs], program);
    let (all, states) = machine.ends(false, most)?;
    let Some((reduced, fewer)) = machine.ends(true, states) else {
        panic!("{what}: more than {states} states after the reduction");
    };
    assert_eq!(reduced, all, "{what}");
    let most_ends = all.iter().map(|ends| ends.len()).max();
    Some([states, fewer, most_ends.unwrap_or(0)])
}

/// Valid graphs and changed ones, refused or not.
#[test]
fn reduced_exploration_has_the_same_final_states() {
    let wanted = number("MPK_REDUCTION", 300);
    // In the first one, the order of a write that becomes visible late matters.
    let mut seeds = std::iter::once(833 + (1 << 40)).chain(1 + (number("MPK_SEED", 1) << 40)..);
    let (mut compared, mut several, mut whole, mut states, mut fewer) = (0, 0, 0, 0, 0);
    let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
    while compared < wanted {
        let Some(seed) = seeds.next() else { break };
        let mut random = Random(seed);
        let mut graphs = match random.chance(50) {
            true => by_hand(&mut random),
            false => match valid(&mut random, "graph", None) {
                Some((graphs, _, _)) => graphs,
                None => continue,
            },
        };
        for _ in 0..random.below(5) {
            mutate(&mut graphs, &mut random);
        }
        let program: &[usize] = if random.chance(50) { &[0, 0] } else { &[0] };
        let Some([all, few, ends]) = compare(&graphs, program, 3000, &format!("seed {seed}")) else {
            continue;
        };
        compared += 1;
        several += u64::from(ends > 1);
        whole += u64::from(!Machine::new(&[&graphs], program).is_reduced());
        (states, fewer) = (states + all, fewer + few);
        let sums: Vec<_> = ways(&graphs[0]).into_keys().collect();
        *kinds.entry(format!("{:?} {sums:?}", graphs[0].placement)).or_default() += 1;
    }
    println!(
        "{compared} graphs, {several} of them with several final states, {whole} that cannot be reduced: \
         {fewer} states instead of {states}; {kinds:?}"
    );
    assert!(several > wanted / 20 && whole > wanted / 200, "{several} {whole}");
    assert!(fewer < states / 4, "{fewer} of {states}");
}

/// Sums that are small enough without reduction, and each without one of its waits.
#[test]
fn reduced_sums_have_the_same_final_states() {
    let (mut compared, mut several) = (0, 0);
    for_all(|what, _, placement, valid| {
        match compare(valid, &[0], 10_000, what) {
            None => println!("{what}: more than 10000 states without reduction"),
            Some([states, fewer, _]) => println!("{what}: {fewer} states instead of {states}"),
        }
        for (at, graphs) in broken(placement, valid) {
            let Some([.., ends]) = compare(&graphs, &[0], 3_000, &format!("{what}, {at}")) else { continue };
            compared += 1;
            several += u64::from(ends > 1);
        }
    });
    println!("{compared} sums without a wait, {several} of them with several final states");
    assert!(compared > 5 && several > 5);
}
