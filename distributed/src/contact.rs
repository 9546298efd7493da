//! The first messages between the ranks of a job on several nodes.

use mpi::request::multiple_scope;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use std::ops::Range;

/// Length of a node's name in messages, which all ranks must know in advance. A longer name is cut off.
const NAME_BYTES: usize = 64;

/// Connects each rank with each other one: the higher rank sends the name of its node, then the lower one answers. All ranks call this
/// together, before anything else. Open MPI connects two ranks at their first message. Its TCP transport may lose the connection if both
/// ranks, or two threads of one, begin it at the same time ("Known IPs of peer: NONE", "connect() failed"). A process then hangs in MPI.
///
/// `node` is the name of this rank's node. Returns the names of the other nodes. Calls `awaits` with the ranks that have not been heard
/// from, each time that their number changes.
pub(crate) fn connect(ranks: &SimpleCommunicator, node: &str, awaits: impl Fn(&[i32])) -> Vec<String> {
    let own = ranks.rank();
    let others: Vec<i32> = (0..ranks.size()).filter(|&rank| rank != own).collect();
    let name = padded(node);
    let mut come = vec![0_u8; NAME_BYTES * others.len()];
    let mut missing = others.clone();
    awaits(&missing);
    multiple_scope(others.len(), |scope, receives| {
        for (&peer, place) in others.iter().zip(come.chunks_mut(NAME_BYTES)) {
            receives.add(ranks.process_at_rank(peer).immediate_receive_into(scope, place));
        }
        let send = |peer: i32| ranks.process_at_rank(peer).immediate_send(scope, &name[..]);
        let mut sends: Vec<_> = (0..own).map(send).collect();
        while !missing.is_empty()
            && let Some((index, ..)) = receives.wait_any()
        {
            let peer = others[index];
            if peer > own {
                sends.push(send(peer));
            }
            missing.retain(|&rank| rank != peer);
            awaits(&missing);
        }
        for send in sends {
            send.wait();
        }
    });
    let mut names: Vec<String> = Vec::new();
    for other in come.chunks(NAME_BYTES).filter(|&other| other != name) {
        let other = String::from_utf8_lossy(other).trim_end_matches('\0').to_string();
        if !names.contains(&other) {
            names.push(other);
        }
    }
    names
}

fn padded(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(NAME_BYTES, 0);
    bytes
}

/// Names ranks, given in ascending order, in few words: `ranks 1-3, 5`. Nothing if there are none.
pub(crate) fn list(ranks: &[i32]) -> String {
    if ranks.is_empty() {
        return String::new();
    }
    let mut parts: Vec<Range<i32>> = Vec::new();
    for &rank in ranks {
        match parts.last_mut() {
            Some(part) if part.end == rank => part.end += 1,
            _ => parts.push(rank..rank + 1),
        }
    }
    let text = |part: &Range<i32>| match part.len() {
        1 => part.start.to_string(),
        _ => format!("{}-{}", part.start, part.end - 1),
    };
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", parts.iter().map(text).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_in_few_words() {
        for (ranks, text) in [
            (&[][..], ""),
            (&[3], "rank 3"),
            (&[0, 1], "ranks 0-1"),
            (&[1, 2, 3, 5, 7, 8], "ranks 1-3, 5, 7-8"),
        ] {
            assert_eq!(list(ranks), text);
        }
    }
}
