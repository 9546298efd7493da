//! Decides when a wait for other ranks cannot end any more, from their states over time.

use super::elsewhere;
use super::process::Fate;
use super::table::{Seen, State};
use std::collections::BTreeMap;
use std::time::Duration;

/// Minimum deadline here. Shorter ones apply only to the kernel: processes that share cores may not run for longer than that.
const LEAST_DEADLINE: Duration = Duration::from_secs(1);
/// Additional time beyond the deadline for ranks that all wait for each other's messages.
const DELIVERY: Duration = Duration::from_secs(2);
/// Minimum time for a call that all ranks are in, if all of them are alive.
const LEAST_CALL: Duration = Duration::from_secs(60);
/// Minimum time for ranks without a shared table, such as those of other nodes. Their only sign of life is their messages, and
/// they may compile for minutes.
const LEAST_ELSEWHERE: Duration = Duration::from_secs(900);
/// Minimum time for MPI's start-up on several nodes, whose ranks are not visible before it.
const LEAST_START: Duration = Duration::from_secs(120);
/// After this long without a sign of life the system is asked.
const DOUBTFUL: Duration = Duration::from_millis(150);
/// The time between two checks counts as at most this long, so that a job that was stopped as a whole can continue.
const LONGEST_MOMENT: Duration = Duration::from_millis(250);

/// Why the job has to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A rank's process has ended without the others.
    Lost { rank: u32, text: String },
    /// A rank has given up. It, or another rank, reports why.
    GivenUp { rank: u32, node: Option<String> },
    /// A wait has lasted too long.
    Overdue { text: String },
}

/// What is known about one rank.
#[derive(Debug, Default)]
struct Life {
    beats: u64,
    /// Time since its last sign of life.
    silent: Duration,
}

/// Watches the other ranks on behalf of one rank.
#[derive(Debug)]
pub(crate) struct Observer {
    deadline: Duration,
    /// Number of all ranks, if all of them can be watched.
    everybody: Option<u32>,
    /// This node's name, if there are others.
    node: Option<String>,
    lives: BTreeMap<u32, Life>,
    /// Step and state of this rank, and how long they have not changed.
    place: (u64, Option<State>),
    waited: Duration,
    /// The states of all ranks at the last check, and how long they have not changed.
    standing: Vec<(u32, State, u64, u64)>,
    still: Duration,
    /// Time since the beginning.
    age: Duration,
}

impl Observer {
    /// For a rank whose waits have this deadline. `everybody` is the number of ranks, if all are on this node.
    pub(crate) fn new(deadline: Duration, everybody: Option<u32>) -> Observer {
        Observer {
            deadline: deadline.max(LEAST_DEADLINE),
            everybody,
            node: None,
            lives: BTreeMap::new(),
            place: (0, None),
            waited: Duration::ZERO,
            standing: Vec::new(),
            still: Duration::ZERO,
            age: Duration::ZERO,
        }
    }

    /// There are ranks on other nodes. All `everybody` ranks can be watched from now on; this node has this name.
    pub(crate) fn set_elsewhere(&mut self, everybody: u32, node: String) {
        self.everybody = Some(everybody);
        self.node = Some(node);
    }

    /// One check, `moment` after the last one: of this rank (`own`) and of the others of its node, if their table was found.
    /// `limit` is the maximum duration of this wait, even if all other ranks are alive. `idle` means that the kernel
    /// that the rank runs has nothing to do.
    pub(crate) fn look(
        &mut self,
        moment: Duration,
        own: &Seen,
        others: Option<&[Seen]>,
        (limit, idle): (Option<Duration>, bool),
        fate: impl Fn(&Seen) -> Fate,
    ) -> Option<Verdict> {
        let known = others.is_some();
        let others = others.unwrap_or_default();
        let moment = moment.min(LONGEST_MOMENT);
        self.age += moment;
        let place = (own.step, Some(own.state));
        self.waited = if place == self.place { self.waited + moment } else { Duration::ZERO };
        self.place = place;
        let standing: Vec<_> =
            others.iter().chain([own]).map(|seen| (seen.rank, seen.state, seen.step, seen.moves)).collect();
        self.still = if standing == self.standing { self.still + moment } else { Duration::ZERO };
        self.standing = standing;
        let (mut silent, mut far) = (Vec::new(), Vec::new());
        for seen in others {
            let life = self.lives.entry(seen.rank).or_default();
            life.silent = if life.beats == seen.beats { life.silent + moment } else { Duration::ZERO };
            life.beats = seen.beats;
            match seen.state {
                State::Left => continue,
                State::Ended => return Some(Verdict::GivenUp { rank: seen.rank, node: seen.node.clone() }),
                _ => {}
            }
            if seen.node.is_some() {
                // There is no other way to learn about this rank.
                if life.silent >= self.deadline {
                    far.push(seen);
                }
                continue;
            }
            if life.silent < DOUBTFUL {
                continue;
            }
            let fate = fate(seen);
            if fate == Fate::Gone {
                return Some(Verdict::Lost { rank: seen.rank, text: lost(seen, self.node.as_deref()) });
            }
            if life.silent >= self.deadline {
                silent.push((seen, fate));
            }
        }
        if let Some(first) = far.first() {
            // A lost node falls silent as a whole, but the last messages of its ranks differ by a moment. The first rank to reach
            // the deadline must not be named alone.
            let of_its_node = |seen: &&Seen| far.iter().any(|lost| lost.node == seen.node);
            let silence = |seen: &Seen| self.lives.get(&seen.rank).map_or(Duration::ZERO, |life| life.silent);
            let far: Vec<&Seen> = others
                .iter()
                .filter(|seen| seen.node.is_some() && seen.state != State::Left)
                .filter(of_its_node)
                .filter(|seen| silence(seen) >= self.deadline / 2)
                .collect();
            let text = elsewhere::lost(&far, others, whole(self.deadline), seconds(self.deadline));
            return Some(Verdict::Lost { rank: first.rank, text });
        }
        if !own.state.awaits() {
            // A busy kernel notices this itself, and its report says more.
            let (first, fate) = silent.first().filter(|_| idle && own.state == State::Runs)?;
            return Some(Verdict::Lost {
                rank: first.rank,
                text: silent_while_idle(first, *fate, self.deadline),
            });
        }
        let overdue = |missing: String, limit: Duration| {
            let text = format!(
                "{missing} within {} s (RunConfig::deadline {})",
                whole(limit),
                seconds(self.deadline)
            );
            Some(Verdict::Overdue { text })
        };
        if let Some(limit) = limit {
            // A rank can be stopped in the step itself, before the others have its message.
            let late = |(seen, fate): &(&Seen, Fate)| seen.step < own.step || *fate == Fate::Stopped;
            let with_fate = others.iter().map(|seen| (seen, fate(seen)));
            let late: Vec<_> = with_fate.filter(|(seen, _)| seen.state != State::Left).filter(late).collect();
            return if self.waited < limit { None } else { overdue(missing(own, &late), limit) };
        }
        if !silent.is_empty() {
            return overdue(missing(own, &silent), self.deadline);
        }
        let absent: Vec<u32> = match self.everybody {
            Some(all) if known => {
                (0..all).filter(|r| *r != own.rank && !self.lives.contains_key(r)).collect()
            }
            // The first rank creates the table before it starts MPI.
            Some(_) if own.step <= 1 => vec![0],
            _ => Vec::new(),
        };
        if !absent.is_empty() && self.age >= self.deadline && self.waited >= self.deadline {
            let none = format!("{} did not start, or did not get as far as MPI's start-up,", ranks(&absent));
            return overdue(none, self.deadline);
        }
        if self.everybody.is_none() || !known {
            let least = if own.step <= 1 { LEAST_START } else { LEAST_ELSEWHERE };
            let limit = self.deadline.max(least);
            let text =
                format!("`{}` did not end: no message from ranks that can't be seen from here", own.phase);
            return if self.waited < limit { None } else { overdue(text, limit) };
        }
        // All of them are alive. A rank that is still working will arrive.
        if others.iter().any(|seen| !seen.state.awaits() && seen.state != State::Left) {
            return None;
        }
        let calls = others.iter().chain([own]).any(|seen| seen.state == State::Calls);
        let limit = if calls { self.deadline.max(LEAST_CALL) } else { self.deadline + DELIVERY };
        if self.still.min(self.waited) < limit {
            return None;
        }
        let elsewhere: Vec<_> =
            others.iter().filter(|seen| seen.step != own.step).map(|seen| (seen, Fate::Alive)).collect();
        match elsewhere.is_empty() {
            true => overdue(
                format!("`{}` did not end, although all ranks are in it and alive,", own.phase),
                limit,
            ),
            false => overdue(missing(own, &elsewhere), limit),
        }
    }
}

/// A message about a rank of this node whose process has ended. `node` is the node's name, if there are others.
pub(crate) fn lost(seen: &Seen, node: Option<&str>) -> String {
    let place = node.map_or_else(String::new, |node| format!(" on node {node}"));
    format!("rank {}{place} is lost: its process has ended; it was last in `{}`", seen.rank, seen.phase)
}

/// A message about a rank of an idle job that gives no sign of life.
fn silent_while_idle(seen: &Seen, fate: Fate, deadline: Duration) -> String {
    let why = if fate == Fate::Stopped { ": its process is stopped" } else { "" };
    let (rank, time) = (seen.rank, seconds(deadline));
    format!(
        "rank {rank} is lost: it gave no sign of life for {time} s (RunConfig::deadline) while there was nothing to do{why}"
    )
}

/// A message about the ranks that did not arrive where this rank waits.
fn missing(own: &Seen, late: &[(&Seen, Fate)]) -> String {
    let mut text = String::new();
    for (seen, fate) in late {
        let why = match fate {
            Fate::Stopped => "its process is stopped",
            Fate::Gone => "its process has ended",
            Fate::Alive | Fate::Unknown if seen.state.awaits() => "it waits there",
            Fate::Alive | Fate::Unknown => "its process gives no sign of life",
        };
        if !text.is_empty() {
            text.push_str(", ");
        }
        let rank = seen.rank;
        text.push_str(&match seen.step < own.step {
            true if seen.phase != own.phase => {
                format!("rank {rank} did not reach `{}` ({why}; last in `{}`)", own.phase, seen.phase)
            }
            _ if seen.phase == own.phase => {
                format!("rank {rank} did not continue in `{}` ({why})", own.phase)
            }
            _ => format!("rank {rank} did not finish `{}` ({why}; last in `{}`)", own.phase, seen.phase),
        });
    }
    if text.is_empty() { format!("`{}` did not end", own.phase) } else { text }
}

fn ranks(numbers: &[u32]) -> String {
    let list: Vec<String> = numbers.iter().map(u32::to_string).collect();
    format!("rank{} {}", if list.len() == 1 { "" } else { "s" }, list.join(", "))
}

fn whole(time: Duration) -> u64 {
    time.as_secs_f64().round() as u64
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(50);

    fn rank(rank: u32, state: State, step: u64, phase: &str) -> Seen {
        Seen {
            pid: 100 + rank,
            pid_namespace: 1,
            rank,
            state,
            step,
            moves: 0,
            beats: 0,
            phase: phase.into(),
            node: None,
        }
    }

    /// Checks until there is a verdict. Returns it and its time. `alive` are the ranks whose beats continue.
    fn verdict(
        deadline: u64,
        own: &Seen,
        mut others: Vec<Seen>,
        alive: &[u32],
        limit: Option<Duration>,
        fate: Fate,
    ) -> Option<(Duration, Verdict)> {
        let mut observer = Observer::new(Duration::from_secs(deadline), Some(others.len() as u32 + 1));
        (1..=4000).find_map(|tick| {
            for other in &mut others {
                other.beats += u64::from(alive.contains(&other.rank));
            }
            observer
                .look(TICK, own, Some(&others), (limit, false), |_| fate)
                .map(|verdict| (TICK * tick, verdict))
        })
    }

    fn text(verdict: Verdict) -> String {
        match verdict {
            Verdict::Overdue { text } => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_stopped_rank_is_named_after_the_deadline() {
        let own = rank(0, State::Waits, 7, "graphs");
        let others = vec![rank(1, State::Works, 6, "backend"), rank(2, State::Waits, 7, "graphs")];
        let (when, verdict) = verdict(3, &own, others, &[2], None, Fate::Stopped).expect("a verdict");
        assert!(when >= Duration::from_secs(3) && when < Duration::from_secs(4), "{when:?}");
        assert_eq!(
            text(verdict),
            "rank 1 did not reach `graphs` (its process is stopped; last in `backend`) within 3 s (RunConfig::deadline 3)"
        );
    }

    #[test]
    fn a_rank_that_works_is_waited_for() {
        let own = rank(0, State::Waits, 7, "graphs");
        let others = vec![rank(1, State::Works, 6, "compilation"), rank(2, State::Waits, 7, "graphs")];
        assert_eq!(verdict(1, &own, others, &[1, 2], None, Fate::Alive), None);
    }

    #[test]
    fn a_silent_node_is_lost_even_while_this_rank_works() {
        for state in [State::Works, State::Waits, State::Calls, State::Runs] {
            let own = rank(0, state, 7, "the run");
            let far = |r| Seen { node: Some("b".into()), ..rank(r, State::Runs, 7, "the run") };
            let others = vec![rank(1, State::Runs, 7, "the run"), far(2), far(3)];
            let found = verdict(5, &own, others.clone(), &[1], None, Fate::Unknown).expect("a verdict");
            assert!(found.0 >= Duration::from_secs(5) && found.0 < Duration::from_secs(6), "{:?}", found.0);
            let Verdict::Lost { text, .. } = found.1 else { panic!("{:?}", found.1) };
            assert!(text.contains("node b is lost") && text.contains("ranks 2, 3"), "{text}");
            if state == State::Works || state == State::Runs {
                assert_eq!(verdict(5, &own, others, &[1, 2, 3], None, Fate::Unknown), None);
            }
        }
    }

    #[test]
    fn a_node_whose_ranks_fall_silent_one_after_the_other_is_named_as_one() {
        let own = rank(0, State::Runs, 7, "the run");
        let far = |r, node: &str| Seen { node: Some(node.into()), ..rank(r, State::Runs, 7, "the run") };
        // Rank 3 sends messages until `last`. Rank 2 never does, and rank 4 of another node always does.
        let named = |last: Duration| {
            let mut others = vec![far(2, "b"), far(3, "b"), far(4, "c")];
            let mut observer = Observer::new(Duration::from_secs(5), Some(4));
            let verdict = (1..=200).find_map(|tick| {
                others[1].beats += u64::from(TICK * tick <= last);
                others[2].beats += 1;
                observer.look(TICK, &own, Some(&others), (None, false), |_| Fate::Unknown)
            });
            match verdict {
                Some(Verdict::Lost { rank: 2, text }) => text,
                other => panic!("{other:?}"),
            }
        };
        let text = named(Duration::from_millis(600));
        assert!(text.starts_with("node b is lost: it gave no sign of life (ranks 2, 3;"), "{text}");
        let text = named(Duration::from_millis(4900));
        assert!(text.starts_with("rank 2 on node b gave no sign of life"), "{text}");
    }

    #[test]
    fn a_rank_whose_process_has_ended_is_lost_at_once() {
        for state in [State::Works, State::Waits, State::Runs] {
            let own = rank(0, state, 7, "graphs");
            let others = vec![rank(1, State::Works, 6, "backend")];
            let (when, verdict) = verdict(30, &own, others, &[], None, Fate::Gone).expect("a verdict");
            assert!(when < Duration::from_secs(1), "{when:?}");
            let text = "rank 1 is lost: its process has ended; it was last in `backend`".into();
            assert_eq!(verdict, Verdict::Lost { rank: 1, text });
        }
        // A rank that has finished does not count.
        let own = rank(0, State::Waits, 7, "end");
        assert!(
            verdict(30, &own, vec![rank(1, State::Left, 7, "end")], &[], None, Fate::Gone)
                .is_some_and(|(_, verdict)| matches!(verdict, Verdict::Overdue { .. }),)
        );
    }

    #[test]
    fn ranks_that_wait_for_each_other_in_different_places_end() {
        let own = rank(0, State::Waits, 12, "trace");
        let others = vec![rank(1, State::Waits, 13, "release")];
        let (when, verdict) = verdict(2, &own, others, &[1], None, Fate::Alive).expect("a verdict");
        assert!(when > Duration::from_secs(4) && when < Duration::from_secs(5), "{when:?}");
        let text = text(verdict);
        assert!(
            text.starts_with("rank 1 did not finish `trace` (it waits there; last in `release`)"),
            "{text}"
        );
    }

    #[test]
    fn a_call_that_does_not_end_has_a_minute() {
        let own = rank(0, State::Calls, 12, "NVSHMEM's start");
        let others = vec![rank(1, State::Calls, 12, "NVSHMEM's start")];
        let (when, verdict) = verdict(2, &own, others, &[1], None, Fate::Alive).expect("a verdict");
        assert!(when > Duration::from_secs(59) && when < Duration::from_secs(62), "{when:?}");
        let text = text(verdict);
        assert!(text.contains("`NVSHMEM's start` did not end, although all ranks are in it"), "{text}");
    }

    #[test]
    fn ranks_that_never_started_are_named() {
        let own = rank(0, State::Calls, 1, "MPI's start-up");
        let mut observer = Observer::new(Duration::from_secs(1), Some(4));
        let others = [Seen { beats: 0, ..rank(2, State::Calls, 1, "MPI's start-up") }];
        let verdict = (0..100).find_map(|tick| {
            let others: Vec<Seen> = others.iter().map(|o| Seen { beats: tick, ..o.clone() }).collect();
            observer.look(TICK, &own, Some(&others), (None, false), |_| Fate::Alive)
        });
        let text = text(verdict.expect("a verdict"));
        assert!(text.starts_with("ranks 1, 3 did not start"), "{text}");
    }

    #[test]
    fn a_job_that_was_stopped_as_a_whole_goes_on() {
        let own = rank(0, State::Waits, 7, "graphs");
        let mut observer = Observer::new(Duration::from_secs(1), Some(2));
        for tick in 0..1000 {
            let other = Seen { beats: tick, ..rank(1, State::Works, 6, "graphs") };
            // Every tenth interval seems to last an hour.
            let moment = if tick % 10 == 9 { Duration::from_secs(3600) } else { TICK };
            assert_eq!(observer.look(moment, &own, Some(&[other]), (None, false), |_| Fate::Alive), None);
        }
    }

    #[test]
    fn a_limit_holds_even_if_all_other_ranks_are_alive() {
        let own = rank(0, State::Waits, 7, "results");
        let others = vec![rank(1, State::Runs, 6, "run")];
        let limit = Some(Duration::from_secs(2));
        let (when, verdict) = verdict(30, &own, others, &[1], limit, Fate::Alive).expect("a verdict");
        assert!(when > Duration::from_secs(1) && when < Duration::from_secs(3), "{when:?}");
        assert!(text(verdict).starts_with("rank 1 did not reach `results`"));
        // Stopped in the step that this rank waits in, before its message was sent.
        let others = vec![rank(1, State::Waits, 7, "results"), rank(2, State::Waits, 7, "results")];
        let fate = |seen: &Seen| if seen.rank == 1 { Fate::Stopped } else { Fate::Alive };
        let mut observer = Observer::new(Duration::from_secs(30), Some(3));
        let verdict = (0..4000).find_map(|_| observer.look(TICK, &own, Some(&others), (limit, false), fate));
        let text = text(verdict.expect("a verdict"));
        assert!(
            text.starts_with("rank 1 did not continue in `results` (its process is stopped) within 2 s"),
            "{text}"
        );
    }

    #[test]
    fn only_an_idle_job_loses_a_stopped_rank() {
        let own = rank(0, State::Runs, 5, "requests");
        let others = [rank(1, State::Runs, 5, "requests")];
        let seen = |idle: bool| {
            let mut observer = Observer::new(Duration::from_secs(2), Some(2));
            let look = |_| observer.look(TICK, &own, Some(&others), (None, idle), |_| Fate::Stopped);
            (0..200).map(look).position(|verdict| verdict.is_some())
        };
        assert_eq!(seen(false), None, "its kernel finds out");
        let looks = seen(true).expect("nobody else does") as u32;
        assert!((38..=42).contains(&looks), "{looks}");
        let mut observer = Observer::new(Duration::from_secs(2), Some(2));
        let verdict =
            (0..200).find_map(|_| observer.look(TICK, &own, Some(&others), (None, true), |_| Fate::Stopped));
        let Some(Verdict::Lost { rank: 1, text }) = verdict else { panic!("{verdict:?}") };
        assert!(text.contains("RunConfig::deadline") && text.contains("is stopped"), "{text}");
    }
}
