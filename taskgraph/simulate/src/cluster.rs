//! The description of a cluster: a file that people write, with the source of each figure.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use thiserror::Error;

/// What the file's `schema` says.
pub const SCHEMA: &str = "mpk-cluster/1";

/// Why a cluster file is refused.
#[derive(Debug, Error)]
pub enum ClusterError {
    /// Not JSON, an unknown field, or a wrong type.
    #[error("{place}: {problem}")]
    Syntax {
        /// Where in the file.
        place: String,
        /// What is wrong there.
        problem: String,
    },
    /// A value that no machine has.
    #[error("`{field}` is {value}; it must be {wanted}")]
    Value {
        /// The field.
        field: &'static str,
        /// What the file says.
        value: String,
        /// What it may be.
        wanted: &'static str,
    },
}

/// A cluster: one kind of device, several on a node, several nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// `mpk-cluster/1`.
    pub schema: String,
    /// Name, for reports.
    pub name: String,
    /// Row of the hardware table, such as `h200`. Without it, graphs are built for the CPU target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Workers of a rank on the CPU target. On a GPU the hardware table says it: one for each multiprocessor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// Ranks on a node; the ranks are dealt to nodes in order.
    pub ranks_per_node: u32,
    /// Memory that weights and caches are read from.
    pub memory: Memory,
    /// What one worker (a multiprocessor, or a core) does.
    pub worker: Worker,
    /// What the protocol takes.
    pub protocol: Protocol,
    /// Between ranks of one node.
    pub peer_link: Link,
    /// Between nodes; needed only where the ranks take more than one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Link>,
    /// Where each figure comes from: the field, and its source. A fitted one says on what it was fitted.
    pub sources: BTreeMap<String, String>,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SharedBy {
    /// Each rank has its own (a GPU).
    Rank,
    /// The ranks of a node share it (a CPU).
    Node,
}

/// Device memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Whose it is.
    pub shared_by: SharedBy,
    /// All workers together, GB/s.
    pub gb_per_s: f64,
    /// From asking for a piece to having it, where nothing else is asked for.
    pub latency_us: f64,
}

/// One worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Worker {
    /// Bytes of one copy of the weight stream.
    pub stage_bytes: u32,
    /// Bytes of weights that can be there or on the way before the task that reads them begins. 0: none run ahead.
    pub ring_bytes: u32,
    /// Most bytes on the way for the task that runs.
    pub in_flight_bytes: u32,
    /// Most bytes on the way for tasks that have not begun.
    pub in_flight_ahead_bytes: u32,
    /// Weights that it takes from the ring, GB/s.
    pub stream_gb_per_s: f64,
    /// Activations that it reads or writes (L2 cache, other cores' caches), GB/s.
    pub near_gb_per_s: f64,
    /// Products with weights, GFLOP/s.
    pub gflop_per_s: f64,
}

/// Steps of the protocol.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// Static placement: from a task's end to the begin of one that waits for its event.
    pub hop_us: f64,
    /// Dynamic placement: the same, through a scheduler.
    pub dynamic_hop_us: f64,
    /// From pushing a flagged word to a poll that sees it, within a rank.
    pub flag_us: f64,
    /// From a task's end to the begin of the next one of the same worker that waits for nothing.
    pub task_us: f64,
    /// What a task that does something takes besides bytes and products.
    pub work_us: f64,
    /// What it takes more where its bytes are known at run time only (page tables, lengths): loads that need each other.
    pub indirect_us: f64,
    /// Between the last task of an iteration and the first of the next, at one active slot.
    pub between_us: f64,
    /// What each further active slot adds to that.
    pub between_per_slot_us: f64,
}

/// Links between ranks of a node, or between nodes. Each rank (each node) has one in each direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// From pushing a flagged word to the peer's poll that sees it.
    pub flag_us: f64,
    /// From a put's begin to the peer's wait that sees its signal, without the bytes.
    pub put_us: f64,
    /// Each way, GB/s.
    pub gb_per_s: f64,
    /// Time for which a message keeps the sender's link (network) or proxy busy, besides its bytes.
    #[serde(default)]
    pub message_us: f64,
}

impl Cluster {
    /// Reads and checks a description.
    ///
    /// # Errors
    /// The place in the file, and what is wrong there.
    pub fn parse(text: &str) -> Result<Cluster, ClusterError> {
        let reader = &mut serde_json::Deserializer::from_str(text);
        let cluster: Cluster = serde_path_to_error::deserialize(reader).map_err(|e| {
            ClusterError::Syntax { place: e.path().to_string(), problem: e.inner().to_string() }
        })?;
        cluster.check()?;
        Ok(cluster)
    }

    /// The JSON schema of the file.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Cluster).to_value()
    }

    /// Nodes of `ranks` ranks, in order.
    pub fn nodes(&self, ranks: u32) -> Vec<u32> {
        (0..ranks).map(|rank| rank / self.ranks_per_node).collect()
    }

    fn check(&self) -> Result<(), ClusterError> {
        let value = |field, value: &dyn ToString, wanted| {
            Err(ClusterError::Value { field, value: value.to_string(), wanted })
        };
        if self.schema != SCHEMA {
            return value("schema", &self.schema, "\"mpk-cluster/1\"");
        }
        if self.device.is_some() == self.workers.is_some() {
            return value(
                "workers",
                &format!("{:?}", self.workers),
                "given if `device` is not, and only then",
            );
        }
        if self.workers.is_some_and(|w| w == 0 || w > 65_535) {
            return value("workers", &self.workers.unwrap_or(0), "1 to 65535");
        }
        if self.ranks_per_node == 0 {
            return value("ranks_per_node", &0, "at least 1");
        }
        if self.worker.stage_bytes < 256 {
            return value("worker.stage_bytes", &self.worker.stage_bytes, "at least 256");
        }
        if self.worker.in_flight_bytes < self.worker.stage_bytes {
            return value("worker.in_flight_bytes", &self.worker.in_flight_bytes, "at least `stage_bytes`");
        }
        let mut rates = vec![
            ("memory.gb_per_s", self.memory.gb_per_s),
            ("worker.stream_gb_per_s", self.worker.stream_gb_per_s),
            ("worker.near_gb_per_s", self.worker.near_gb_per_s),
            ("worker.gflop_per_s", self.worker.gflop_per_s),
            ("peer_link.gb_per_s", self.peer_link.gb_per_s),
        ];
        let p = &self.protocol;
        let mut times = vec![
            ("memory.latency_us", self.memory.latency_us),
            ("protocol.hop_us", p.hop_us),
            ("protocol.dynamic_hop_us", p.dynamic_hop_us),
            ("protocol.flag_us", p.flag_us),
            ("protocol.task_us", p.task_us),
            ("protocol.work_us", p.work_us),
            ("protocol.indirect_us", p.indirect_us),
            ("protocol.between_us", p.between_us),
            ("protocol.between_per_slot_us", p.between_per_slot_us),
            ("peer_link.flag_us", self.peer_link.flag_us),
            ("peer_link.put_us", self.peer_link.put_us),
            ("peer_link.message_us", self.peer_link.message_us),
        ];
        if let Some(network) = &self.network {
            rates.push(("network.gb_per_s", network.gb_per_s));
            times.push(("network.flag_us", network.flag_us));
            times.push(("network.put_us", network.put_us));
            times.push(("network.message_us", network.message_us));
        }
        // So that no sum of them overflows, and no rate rounds to nothing.
        for (field, rate) in rates {
            if !(1e-3..=1e9).contains(&rate) {
                return value(field, &rate, "0.001 to 1e9");
            }
        }
        for (field, time) in times {
            if !(0.0..=1e7).contains(&time) {
                return value(field, &time, "0 to 1e7");
            }
        }
        Ok(())
    }
}
