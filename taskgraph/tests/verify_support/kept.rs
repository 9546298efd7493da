//! Classes of which rank 0's graph is kept alone, as the builder keeps them.

use taskgraph::TaskGraph;
use taskgraph::verify::{Alike, Class, verify_classes};

/// The class with rank 0's graph alone if ranks are alike.
pub fn kept(graphs: &[TaskGraph]) -> Class {
    if graphs.first().is_none_or(|first| !Alike::can_be_first(first)) {
        return Class::All(graphs.to_vec());
    }
    let compared = graphs[1..].iter().map(|g| Alike::compare(&graphs[0], &mut g.clone())).collect();
    match Alike::new(graphs[0].clone(), compared) {
        Ok(alike) => Class::Alike(alike),
        Err(_) => Class::All(graphs.to_vec()),
    }
}

/// Whether all classes are safe, as seen with the graphs that are kept.
pub fn kept_are_safe(classes: &[Vec<TaskGraph>]) -> bool {
    verify_classes(&classes.iter().map(|graphs| kept(graphs)).collect::<Vec<_>>()).is_ok()
}
