//! Resources that tasks share: memory and links. Each serves requests in the order of arrival.

use crate::cluster::{Cluster, SharedBy};
use crate::time::{Ps, at_rate, ps};

/// Serves one request after another.
#[derive(Clone, Copy, Debug, Default)]
struct Server {
    free: Ps,
}

impl Server {
    /// Start and end of a request that arrives at `now` and takes `took`.
    fn serve(&mut self, now: Ps, took: Ps) -> (Ps, Ps) {
        let begin = now.max(self.free);
        self.free = begin + took;
        (begin, self.free)
    }
}

/// A kind of message between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Flagged words.
    Flagged,
    /// A put or a signal.
    Put,
}

/// All shared resources of a cluster.
pub(crate) struct Resources<'a> {
    cluster: &'a Cluster,
    nodes: Vec<u32>,
    memories: Vec<Server>,
    /// Links out of and into each rank.
    peer: Vec<[Server; 2]>,
    /// Links out of and into each node.
    network: Vec<[Server; 2]>,
}

impl<'a> Resources<'a> {
    pub(crate) fn new(cluster: &'a Cluster, ranks: u32) -> Self {
        let nodes = cluster.nodes(ranks);
        let count = nodes.last().map_or(1, |last| *last as usize + 1);
        let memories = match cluster.memory.shared_by {
            SharedBy::Rank => ranks as usize,
            SharedBy::Node => count,
        };
        Resources {
            cluster,
            nodes,
            memories: vec![Server::default(); memories],
            peer: vec![Default::default(); ranks as usize],
            network: vec![Default::default(); count],
        }
    }

    /// When the bytes that rank `rank` asks for at `now` arrive.
    pub(crate) fn read(&mut self, rank: u32, now: Ps, bytes: u64) -> Ps {
        let took = at_rate(bytes, self.cluster.memory.gb_per_s);
        let memory = self.memory_of(rank);
        let (_, end) = self.memories[memory].serve(now, took);
        end + ps(self.cluster.memory.latency_us)
    }

    /// How long a flag of rank `rank` waits for the loads that are queued before it at its memory at `now`.
    pub(crate) fn flag_delay(&self, rank: u32, now: Ps) -> Ps {
        let waits = self.memories[self.memory_of(rank)].free.saturating_sub(now);
        (waits as f64 * self.cluster.memory.flag_share) as Ps
    }

    fn memory_of(&self, rank: u32) -> usize {
        match self.cluster.memory.shared_by {
            SharedBy::Rank => rank as usize,
            SharedBy::Node => self.nodes[rank as usize] as usize,
        }
    }

    /// When rank `to` sees a message that rank `from` sends at `now`.
    pub(crate) fn send(&mut self, kind: Message, from: u32, to: u32, now: Ps, bytes: u64) -> Ps {
        let [source, target] = [from, to].map(|rank| self.nodes[rank as usize] as usize);
        let (link, ends, out, into) = match &self.cluster.network {
            Some(link) if source != target => (link, &mut self.network, source, target),
            _ => (&self.cluster.peer_link, &mut self.peer, from as usize, to as usize),
        };
        let latency = ps(match kind {
            Message::Flagged => link.flag_us,
            Message::Put => link.put_us,
        });
        let took = at_rate(bytes, link.gb_per_s);
        let (begin, sent) = ends[out][0].serve(now, took.max(ps(link.message_us)));
        // The bytes arrive while they are sent, unless others arrive at the same time.
        let (_, arrived) = ends[into][1].serve(begin + latency, took);
        arrived.max(sent + latency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;

    fn cluster() -> Cluster {
        let mut cluster = Cluster::parse(include_str!("../tests/plain.json")).unwrap();
        cluster.memory.gb_per_s = 1.0;
        cluster.memory.latency_us = 2.0;
        cluster.peer_link.gb_per_s = 1.0;
        cluster
    }

    #[test]
    fn reads_of_one_memory_wait_for_each_other_and_those_of_two_do_not() {
        let cluster = cluster();
        let mut resources = Resources::new(&cluster, 2);
        assert_eq!(resources.read(0, 0, 1000), ps(3.0));
        assert_eq!(resources.read(0, 0, 1000), ps(4.0), "after the first one's bytes, latencies overlap");
        assert_eq!(resources.read(1, 0, 1000), ps(3.0));
    }

    #[test]
    fn flags_wait_for_a_share_of_the_requests_of_their_own_memory() {
        let mut cluster = cluster();
        cluster.memory.flag_share = 0.25;
        let mut resources = Resources::new(&cluster, 2);
        resources.read(0, 0, 4000);
        assert_eq!([0, 1].map(|rank| resources.flag_delay(rank, ps(2.0))), [ps(0.5), 0]);
        assert_eq!(resources.flag_delay(0, ps(9.0)), 0);
    }

    #[test]
    fn messages_share_the_senders_and_the_receivers_link() {
        let mut cluster = cluster();
        cluster.peer_link.put_us = 10.0;
        let mut resources = Resources::new(&cluster, 4);
        assert_eq!(resources.send(Message::Put, 0, 1, 0, 1000), ps(11.0));
        assert_eq!(resources.send(Message::Put, 0, 2, 0, 1000), ps(12.0), "one sender");
        assert_eq!(resources.send(Message::Put, 3, 1, 0, 1000), ps(12.0), "one receiver");
    }
}
