//! Classes of which only rank 0's graph is kept, as the builder does.

use std::convert::Infallible;
use taskgraph::TaskGraph;
use taskgraph::verify::{Alike, Class, Comparing, Proven, may_follow, verify_succession};

/// The class; only rank 0's graph is kept if ranks are alike.
pub fn kept(graphs: &[TaskGraph]) -> Class {
    let Some(first) = graphs.first().filter(|first| first.world as usize == graphs.len()) else {
        return Class::All(graphs.to_vec());
    };
    // Without its operands, which come task by task, as from the builder.
    let graph = |rank: u32, comparing: &mut Comparing<'_>| {
        let mut graph = graphs[rank as usize].clone();
        std::mem::take(&mut graph.operands).chunks(3).for_each(|some| comparing.operands(some));
        Ok::<_, Infallible>(graph)
    };
    match Alike::find(first.clone(), graph, drop) {
        Ok(Ok(alike)) => Class::Alike(Box::new(alike)),
        _ => Class::All(graphs.to_vec()),
    }
}

/// Whether all classes are safe, judged from the graphs that are kept, and class by class as far as possible.
pub fn kept_are_safe(classes: &[Vec<TaskGraph>]) -> bool {
    let proven: Result<Vec<Proven>, _> =
        classes.iter().map(|graphs| Proven::new(kept(graphs), drop)).collect();
    proven.is_ok_and(|proven| may_follow(&proven) || verify_succession(classes).is_ok())
}
