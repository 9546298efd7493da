//! Hostile graphs: valid ones, changed in one place. What the verifier accepts must be harmless; the machine shows this by
//! executing a small instance on bytes in every order. Valid graphs are all accepted.
//!
//! `MPK_MUTATIONS=12000 MPK_VALID_GRAPHS=2000` is the long run (two minutes); CI has a shorter one. Both print their
//! counts. All orders are explored for each graph that is accepted.

#[allow(dead_code)]
#[path = "../builder_support/mod.rs"]
mod builder_support;
#[path = "../machine/mod.rs"]
mod machine;
#[path = "../../../tests/src/random.rs"]
mod random;
mod reduction;
mod small_sums;
mod valid;
#[path = "../verify_support/mod.rs"]
mod verify_support;

use builder_support::{owned_steps, registry, ways};
use machine::{Machine, Outcome};
use random::Random;
use std::collections::BTreeMap;
use taskgraph::task_graph::{Place, TaskGraph};
use taskgraph::verify::{ranks_are_alike, verify, verify_every_rank, verify_succession};
use taskgraph::*;
use valid::{by_hand, lowering, owned_shape, valid};
use verify_support::count_triggers;
use verify_support::kept::kept_are_safe;

/// By kind of change: refused, and accepted.
type Counts = BTreeMap<&'static str, [u64; 2]>;

/// More states than any accepted graph of these tests has.
const STATES: usize = 50_000;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

/// What the verifier says: all of its ways must agree.
fn checked(classes: &[Vec<TaskGraph>], seed: u64) -> Result<(), String> {
    // Ranks that are alike are proven once; a change on one rank must still be found.
    let found = verify_succession(classes).map(drop);
    assert_eq!(found, verify_every_rank(classes).map(drop), "seed {seed}");
    // It must be found also if only rank 0's graph is kept for ranks that are alike.
    assert_eq!(kept_are_safe(classes), found.is_ok(), "seed {seed}");
    found.map_err(|v| v[0].to_string())
}

/// Replaces one rank's graph by that of another build: for another lowering or another number of workers, and valid
/// with its own peers. `None` if there is no such build, or it is the same.
fn change_one_rank(
    graphs: &mut [TaskGraph],
    op_graph: &OpGraph,
    like: &BuildOptions,
    random: &mut Random,
) -> Option<&'static str> {
    let mut options = like.clone();
    options.allreduce = lowering(random);
    options.target = Target::cpu(1 + random.below(2) as u32);
    let mut others = build_all(op_graph, &registry(), &options).ok()?;
    let rank = random.below(graphs.len());
    let other = others.swap_remove(rank);
    (graphs.len() > 1 && other != graphs[rank]).then_some(())?;
    graphs[rank] = other;
    Some("change one rank")
}

/// Changes one thing on one rank. Returns the name of the kind, or `None` if there was nothing to change.
fn mutate(graphs: &mut [TaskGraph], random: &mut Random) -> Option<&'static str> {
    let rank = random.below(graphs.len());
    let kind = mutate_rank(graphs, rank, random)?;
    if kind != "another count of triggers" && random.chance(90) {
        count_triggers(graphs);
    }
    Some(kind)
}

fn mutate_rank(graphs: &mut [TaskGraph], rank: usize, random: &mut Random) -> Option<&'static str> {
    let world = graphs.len() as u16;
    let events: Vec<u32> = graphs.iter().map(|g| g.events.len() as u32).collect();
    let graph = &mut graphs[rank];
    if graph.tasks.len() < 3 {
        return None;
    }
    let task = 2 + random.below(graph.tasks.len() - 2);
    let kind = match random.below(15) {
        0 => {
            let deps = &mut graph.tasks[task].dependencies;
            deps.first()?;
            deps.remove(random.below(deps.len()));
            "drop a dependency"
        }
        1 => {
            let event = 3 + random.below(events[rank].saturating_sub(3) as usize) as u32;
            let deps = &mut graph.tasks[task].dependencies;
            let at = random.below(deps.len());
            *deps.get_mut(at)? = event.min(events[rank] - 1);
            "redirect a dependency"
        }
        2 => {
            let event = 1 + random.below(events[rank] as usize - 1) as u32;
            graph.tasks[task].dependencies.push(event);
            "add a dependency"
        }
        3 => {
            graph.tasks[task].trigger.take()?;
            "drop a trigger"
        }
        4 => {
            let old = graph.tasks[task].trigger?;
            let owner = if old.is_nvshmem() { random.below(world.into()) as u16 } else { rank as u16 };
            let index = 2 + random.below(events[usize::from(owner)] as usize - 2) as u32;
            graph.tasks[task].trigger = Some(if old.is_nvshmem() {
                EventId::nvshmem(owner, index)
            } else {
                EventId::local(owner, index)
            });
            "redirect a trigger"
        }
        5 => {
            let event = &mut graph.events[2 + random.below(events[rank] as usize - 2)];
            event.num_triggers =
                if random.chance(50) { event.num_triggers + 1 } else { event.num_triggers.saturating_sub(1) };
            return Some("another count of triggers");
        }
        6 => {
            let lists = graph.worker_lists.len();
            let at = random.below(lists);
            let list = graph.worker_lists.get_mut(at)?;
            (list.len() > 1).then_some(())?;
            let at = random.below(list.len() - 1);
            list.swap(at, at + 1);
            "reorder a list"
        }
        7 => {
            (!graph.worker_lists.is_empty()).then_some(())?;
            let to = random.below(graph.worker_lists.len());
            graph.worker_lists.iter_mut().for_each(|l| l.retain(|&t| t != task as u32));
            let at = random.below(graph.worker_lists[to].len() + 1);
            graph.worker_lists[to].insert(at, task as u32);
            graph.tasks[task].worker = Some(to as u32);
            "move a task to another list"
        }
        8 => {
            // Moves two tensors that took turns, or were apart, to one place.
            let placed: Vec<usize> =
                (0..graph.tensors.len()).filter(|&t| graph.tensors[t].overlay.is_some()).collect();
            (placed.len() > 1).then_some(())?;
            let (a, b) = (random.pick(&placed), random.pick(&placed));
            let (from, to) = (graph.tensors[a].overlay?, graph.tensors[b].overlay?);
            (from.area == to.area && from != to).then_some(())?;
            let name = graph.tensors[b].name.clone();
            // Symmetric memory is the same on every rank.
            for other in graphs.iter_mut() {
                for t in other.tensors.iter_mut().filter(|t| t.name == name) {
                    t.overlay = Some(from);
                }
            }
            "drop a double buffer"
        }
        9 => {
            let t = graph.tasks[task].clone();
            let count = usize::from(t.num_inputs + t.num_outputs);
            (count > 1).then_some(())?;
            let first = t.first_operand as usize;
            let (a, b) = (first + random.below(count), first + random.below(count));
            graph.operands.swap(a, b);
            "swap two views"
        }
        10 => {
            // A task triggers one event at most.
            let silent: Vec<usize> =
                (2..graph.tasks.len()).filter(|&t| graph.tasks[t].trigger.is_none()).collect();
            (!silent.is_empty()).then_some(())?;
            let index = 2 + random.below(events[rank] as usize - 2) as u32;
            graph.tasks[random.pick(&silent)].trigger = Some(EventId::local(rank as u16, index));
            "add a trigger"
        }
        kind => {
            let t = graph.tasks[task].clone();
            let count = usize::from(t.num_inputs + t.num_outputs);
            (count > 0).then_some(())?;
            let at = t.first_operand as usize + random.below(count);
            let mut operand = graph.operands[at];
            let tensor = graph.tensors[operand.tensor as usize].clone();
            let d = random.below(usize::from(operand.ndim));
            let name = match kind {
                11 => {
                    operand.dims[d] = operand.dims[d].saturating_sub(1);
                    "shrink a view"
                }
                12 => {
                    let step = u64::from(operand.strides[d]) * tensor.dtype.size();
                    operand.offset = if random.chance(50) {
                        operand.offset + step
                    } else {
                        operand.offset.checked_sub(step)?
                    };
                    "shift a view"
                }
                13 => {
                    operand.dims[d] += 1;
                    "grow a view"
                }
                _ => {
                    // The same view of another tensor of this shape.
                    let same = |t: &usize| {
                        let other = &graph.tensors[*t];
                        other.dims == tensor.dims
                            && other.dtype == tensor.dtype
                            && *t != operand.tensor as usize
                    };
                    let others: Vec<usize> = (0..graph.tensors.len()).filter(same).collect();
                    (!others.is_empty()).then_some(())?;
                    operand.tensor = random.pick(&others) as u32;
                    "alias a view"
                }
            };
            // The region states what the view covers, so it hides nothing.
            if operand.place == Place::Own || tensor.dims.len() == usize::from(operand.ndim) {
                operand.region = Region::whole(&tensor.region_dims);
            }
            graph.operands[at] = operand;
            name
        }
    };
    Some(kind)
}

/// All kinds, so that none is omitted by mistake.
const KINDS: [&str; 16] = [
    "add a dependency",
    "add a trigger",
    "alias a view",
    "another count of triggers",
    "change one rank",
    "drop a dependency",
    "drop a double buffer",
    "drop a trigger",
    "grow a view",
    "move a task to another list",
    "redirect a dependency",
    "redirect a trigger",
    "reorder a list",
    "shift a view",
    "shrink a view",
    "swap two views",
];

#[test]
fn accepted_hostile_graphs_are_harmless() {
    let wanted = number("MPK_MUTATIONS", 400);
    let mut states_of_all = 0;
    let mut counts: Counts = BTreeMap::new();
    // The same for graphs with sums of one sort.
    let mut by_sums: BTreeMap<&str, Counts> = BTreeMap::new();
    let mut seed = number("MPK_SEED", 1);
    let mut done = 0;
    while done < wanted {
        seed += 1;
        let mut random = Random(seed);
        // Two graphs that follow each other, or one that follows itself.
        let two = random.chance(20);
        let mut classes = Vec::new();
        let mut built = Vec::new();
        if random.chance(20) {
            classes.push(by_hand(&mut random));
        } else {
            let Some((graphs, op_graph, options)) = valid(&mut random, "first", None) else { continue };
            classes.push(graphs);
            if two {
                let Some((graphs, second, options)) = valid(&mut random, "second", Some(&options)) else {
                    continue;
                };
                classes.push(graphs);
                built.push((second, options));
            }
            built.insert(0, (op_graph, options));
        }
        if let Err(why) = checked(&classes, seed) {
            panic!("seed {seed}: a valid graph is refused: {why}");
        }
        let which = random.below(classes.len());
        let owned = owned_steps(&classes[which][0]) > 0;
        let sums: Vec<&str> = match owned {
            true => vec!["rows that stay with their owners"],
            false => ways(&classes[which][0]).into_keys().collect(),
        };
        let kind = match built.get(which).filter(|_| random.chance(5)) {
            Some((op_graph, options)) => change_one_rank(&mut classes[which], op_graph, options, &mut random),
            None => mutate(&mut classes[which], &mut random),
        };
        let Some(kind) = kind else { continue };
        done += 1;
        let mut count = |result: usize| {
            counts.entry(kind).or_default()[result] += 1;
            for sort in &sums {
                by_sums.entry(sort).or_default().entry(kind).or_default()[result] += 1;
            }
        };
        if checked(&classes, seed).is_err() {
            count(0);
            continue;
        }
        count(1);
        let all: Vec<&[TaskGraph]> = classes.iter().map(Vec::as_slice).collect();
        let program: &[usize] = if all.len() == 2 { &[0, 1, 0] } else { &[0, 0] };
        match Machine::new(&all, program).explore(STATES) {
            Outcome::Same { states, all: true } => states_of_all += states,
            outcome => panic!("seed {seed}, {kind}: accepted, but an execution ends as {outcome:?}"),
        }
    }
    let report = |title: &str, counts: &Counts| {
        let [refused, accepted] = [0, 1].map(|i| counts.values().map(|c| c[i]).sum::<u64>());
        println!("{title}: {refused} refused, {accepted} accepted and harmless in all orders");
        for (kind, [refused, accepted]) in counts {
            println!("  {kind}: {refused} refused, {accepted} harmless");
        }
        (refused, accepted)
    };
    let (refused, accepted) = report(&format!("{done} mutations"), &counts);
    println!("{states_of_all} states");
    let missing: Vec<_> = KINDS.iter().filter(|kind| !counts.contains_key(*kind)).collect();
    assert!(missing.is_empty() && counts.len() == KINDS.len(), "not tried: {missing:?}");
    assert!(refused > wanted / 4 && accepted > wanted / 50, "{counts:?}");
    assert_eq!(by_sums.len(), 5, "{:?}", by_sums.keys());
    for (sort, counts) in &by_sums {
        let (refused, accepted) = report(&format!("of these, with {sort}"), counts);
        assert!(refused > wanted / 100 && accepted > wanted / 200, "{sort}: {counts:?}");
    }
}

/// Changes all ranks in the same way, so that they stay alike, and proves them once and rank by rank.
#[test]
fn alike_ranks_are_proven_once_with_the_same_result() {
    let wanted = number("MPK_ALIKE", 400);
    let mut seed = number("MPK_SEED", 1) << 16;
    // Graphs of alike ranks: valid before the change; refused and accepted after it.
    let (mut valid_ones, mut refused, mut accepted) = (0, 0, 0);
    while refused + accepted < wanted {
        seed += 1;
        let mut random = Random(seed);
        let mut classes = Vec::new();
        if random.chance(20) {
            classes.push(by_hand(&mut random));
        } else {
            let mut like =
                BuildOptions::new(2 + random.below(3) as u32, Target::cpu(1 + random.below(2) as u32));
            like.placement = random.pick(&[Placement::Static, Placement::Dynamic]);
            like.target.max_tiles = 4;
            like.allreduce = random.pick(&[Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot]);
            if random.chance(15) {
                like = owned_shape(&mut random).options(like);
            }
            for name in ["first", "second"].into_iter().take(1 + random.below(2)) {
                classes.extend(valid(&mut random, name, Some(&like)).map(|(graphs, _, _)| graphs));
            }
        }
        let Some(graphs) = classes.first_mut() else { continue };
        if !ranks_are_alike(graphs) {
            continue;
        }
        valid_ones += 1;
        let same = random.next();
        let changed = (0..graphs.len()).all(|rank| mutate_rank(graphs, rank, &mut Random(same)).is_some());
        if !changed {
            continue;
        }
        if random.chance(90) {
            count_triggers(graphs);
        }
        let alike = ranks_are_alike(graphs);
        let found = verify_succession(&classes).map(drop);
        assert_eq!(found, verify_every_rank(&classes).map(drop), "seed {seed}");
        assert_eq!(kept_are_safe(&classes), found.is_ok(), "seed {seed}");
        match found {
            _ if !alike => {}
            Err(_) => refused += 1,
            Ok(()) => accepted += 1,
        }
    }
    println!(
        "{valid_ones} sets of alike ranks, all changed alike: {refused} refused, {accepted} accepted, as rank by rank"
    );
    assert!(refused > wanted / 10 && accepted > wanted / 10);
}

/// Three iterations, so each buffer is used again.
#[test]
fn valid_graphs_are_accepted_and_the_same_in_all_orders() {
    let wanted = number("MPK_VALID_GRAPHS", 100);
    let mut seed = number("MPK_SEED", 1) << 32;
    let (mut done, mut states_of_all) = (0, 0);
    while done < wanted {
        seed += 1;
        let mut random = Random(seed);
        let Some((graphs, _, _)) = valid(&mut random, "graph", None) else { continue };
        if let Err(found) = verify(&graphs) {
            panic!("seed {seed}: a valid graph is refused: {}", found[0]);
        }
        done += 1;
        match Machine::new(&[&graphs], &[0, 0, 0]).explore(STATES) {
            Outcome::Same { states, all: true } => states_of_all += states,
            outcome => panic!("seed {seed}: {outcome:?}"),
        }
    }
    println!("{done} valid graphs: all accepted, each the same in all orders ({states_of_all} states)");
}

/// Tags of flagged words tell the iterations of one graph apart. If two graphs had the same words, a reader would accept what the
/// other graph has written.
#[test]
fn flagged_words_belong_to_one_graph() {
    let with_role = |role: &Role| {
        let mut graphs = verify_support::chain(2, 1, 1, 2, verify_support::Lowering::Flagged);
        let tensors = graphs.iter_mut().flat_map(|g| &mut g.tensors);
        tensors.filter(|t| t.dtype == DType::F32Flagged).for_each(|t| t.role = role.clone());
        graphs
    };
    for (role, safe) in [(Role::Activation, true), (Role::Persistent { region_dims: None }, false)] {
        let classes = [with_role(&role), with_role(&role)];
        let machine = Machine::new(&[&classes[0], &classes[1]], &[0, 1]);
        let outcome = machine.explore_unreduced(20_000);
        assert_eq!(matches!(outcome, Outcome::Same { all: true, .. }), safe, "{role:?}: {outcome:?}");
        assert_eq!(checked(&classes, 0).is_ok(), safe, "{role:?}");
    }
}

/// The machine lets one word stand for those that change together. It then has as many states as with all words, and the same result,
/// also for graphs that are refused.
#[test]
fn words_that_change_together_may_be_one() {
    let (mut compared, mut bad, mut fewer) = (0, 0, 0);
    for seed in 0..400 {
        let mut random = Random(0x5eed_0000 + seed);
        let mut graphs = match random.chance(50) {
            true => by_hand(&mut random),
            false => match valid(&mut random, "graph", None) {
                Some((graphs, _, _)) => graphs,
                None => continue,
            },
        };
        mutate(&mut graphs, &mut random);
        let all = Machine::of_all_words(&[&graphs], &[0, 0]);
        let machine = Machine::new(&[&graphs], &[0, 0]);
        let [wanted, found] = [&all, &machine].map(|m| m.explore_unreduced(500));
        let complete = |outcome: &Outcome| !matches!(outcome, Outcome::Same { all: false, .. });
        if complete(&wanted) && complete(&found) {
            assert_eq!(found, wanted, "seed {seed}");
            compared += 1;
            bad += u64::from(!matches!(wanted, Outcome::Same { .. }));
            fewer += u64::from(machine.words() < all.words());
        }
    }
    println!(
        "{compared} graphs compared, {bad} of them stuck or with several results, {fewer} with fewer words"
    );
    assert!(compared > 80 && bad > 20 && fewer > 80);
}
