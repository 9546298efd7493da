//! Ranks of other nodes. Their state arrives in messages (`nodes/proxy.rs`), because the table does not show them.

use super::table::{Seen, Slot, State};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A rank without news for this long has missed several messages. It may only be slow, so this counts only if something has already
/// gone wrong.
const MISSED: Duration = Duration::from_millis(500);

/// A rank of another node.
#[derive(Debug)]
struct Far {
    rank: u32,
    node: String,
    slot: Slot,
    /// Time of its last message, in milliseconds since [`Elsewhere::since`].
    heard: AtomicU64,
}

/// All ranks of other nodes.
#[derive(Debug)]
pub(crate) struct Elsewhere {
    /// Number of ranks of the job.
    pub everybody: u32,
    since: Instant,
    ranks: Vec<Far>,
}

impl Elsewhere {
    /// For a job with `everybody` ranks: these ranks, on these nodes. Their silence counts from now on, and until their first message
    /// they are in this phase.
    pub fn new(everybody: u32, ranks: impl IntoIterator<Item = (u32, String)>, phase: &str) -> Elsewhere {
        let far = |(rank, node)| {
            let slot = Slot::default();
            slot.set_phase(phase);
            slot.take(rank, u32::MAX, 0);
            Far { rank, node, slot, heard: AtomicU64::new(0) }
        };
        Elsewhere { everybody, since: Instant::now(), ranks: ranks.into_iter().map(far).collect() }
    }

    fn far(&self, rank: u32) -> Option<&Far> {
        self.ranks.iter().find(|far| far.rank == rank)
    }

    /// Records what a rank reports about itself ([`Slot::words`]).
    pub fn hear(&self, rank: u32, words: &[u64]) {
        if let Some(far) = self.far(rank) {
            far.slot.set_words(words);
            // Its process number means nothing here, because it belongs to another machine.
            far.slot.take(rank, u32::MAX, 0);
            far.heard.store(self.since.elapsed().as_millis() as u64, Ordering::Relaxed);
        }
    }

    /// Records that a rank has finished and sends no more messages.
    pub fn hear_goodbye(&self, rank: u32) {
        if let Some(far) = self.far(rank) {
            far.slot.set_state(State::Left);
        }
    }

    /// A message about a rank without recent news. For callers that already know that something has gone wrong.
    pub fn missed(&self) -> Option<String> {
        let now = self.since.elapsed().as_millis() as u64;
        let silence =
            |far: &Far| Duration::from_millis(now.saturating_sub(far.heard.load(Ordering::Relaxed)));
        let far = self.ranks.iter().find(|far| far.slot.state() != State::Left && silence(far) > MISSED)?;
        Some(format!(
            "rank {} on node {} may be lost: no sign of life for {:.1} s; it was last in `{}`",
            far.rank,
            far.node,
            silence(far).as_secs_f64(),
            far.slot.phase()
        ))
    }

    /// All of these ranks.
    pub fn look(&self) -> impl Iterator<Item = Seen> {
        self.ranks
            .iter()
            .filter_map(|far| far.slot.look().map(|seen| Seen { node: Some(far.node.clone()), ..seen }))
    }
}

/// A message about ranks of other nodes that gave no sign of life for `seconds`. `all` are all visible ranks.
pub(crate) fn lost(silent: &[&Seen], all: &[Seen], seconds: u64, deadline: f64) -> String {
    let mut nodes: Vec<&str> = Vec::new();
    for node in silent.iter().filter_map(|seen| seen.node.as_deref()) {
        if !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    let mut parts = Vec::new();
    for node in nodes {
        let of_node: Vec<&&Seen> = silent.iter().filter(|seen| seen.node.as_deref() == Some(node)).collect();
        let numbers: Vec<String> = of_node.iter().map(|seen| seen.rank.to_string()).collect();
        let ranks = format!("rank{} {}", if numbers.len() == 1 { "" } else { "s" }, numbers.join(", "));
        let whole = all.iter().filter(|seen| seen.node.as_deref() == Some(node)).count() == of_node.len();
        parts.push(
            match whole {
                true => format!("node {node} is lost: it gave no sign of life ({ranks}"),
                false => format!("{ranks} on node {node} gave no sign of life ("),
            } + &format!("{}last in `{}`)", if whole { "; " } else { "" }, of_node[0].phase),
        );
    }
    format!(
        "{} for {seconds} s (RunConfig::deadline {deadline}); the link, the machine or its processes have stopped",
        parts.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ranks_state_is_visible_until_it_leaves() {
        let own = Slot::default();
        own.set_phase("the run");
        own.set_state(State::Runs);
        own.next_step();
        own.beat();
        let elsewhere = Elsewhere::new(3, [(1, "b".to_string()), (2, "b".to_string())], "the nodes");
        elsewhere.hear(2, &own.words());
        let seen: Vec<Seen> = elsewhere.look().collect();
        assert_eq!(seen.len(), 2);
        // One that has not sent anything is watched too.
        assert_eq!((seen[0].rank, seen[0].beats, seen[0].phase.as_str()), (1, 0, "the nodes"));
        assert_eq!((seen[1].rank, seen[1].state, seen[1].step, seen[1].beats), (2, State::Runs, 1, 1));
        assert_eq!((seen[1].phase.as_str(), seen[1].node.as_deref()), ("the run", Some("b")));
        elsewhere.hear(2, &[1]);
        elsewhere.hear_goodbye(2);
        assert_eq!(elsewhere.look().nth(1).map(|seen| seen.state), Some(State::Left));
    }

    #[test]
    fn a_whole_node_is_named_as_one() {
        let seen = |rank, node: &str| Seen {
            pid: 1,
            pid_namespace: 0,
            rank,
            state: State::Runs,
            step: 3,
            moves: 0,
            beats: 0,
            phase: "the run".into(),
            node: Some(node.into()),
        };
        let all = [seen(1, "b"), seen(2, "b"), seen(3, "c")];
        let text = lost(&[&all[0], &all[1]], &all, 5, 5.0);
        assert!(
            text.starts_with(
                "node b is lost: it gave no sign of life (ranks 1, 2; last in `the run`) for 5 s"
            ),
            "{text}"
        );
        let text = lost(&[&all[1]], &all, 5, 5.0);
        assert!(
            text.starts_with("rank 2 on node b gave no sign of life (last in `the run`) for 5 s"),
            "{text}"
        );
    }
}
