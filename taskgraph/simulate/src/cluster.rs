//! The description of a cluster: a file written by people, with a source for each figure.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use thiserror::Error;

/// The value of the file's `schema` field.
pub const SCHEMA: &str = "mpk-cluster/1";

/// Why a cluster file is refused.
#[derive(Debug, Error)]
pub enum ClusterError {
    /// The file is not JSON, or has an unknown field or a wrong type.
    #[error("{place}{problem}")]
    Syntax {
        /// The place in the file, with a colon. Empty for the file itself.
        place: String,
        /// What is wrong there.
        problem: String,
    },
    /// A value that no machine can have.
    #[error("`{field}` is {value}; it must be {wanted}")]
    Value {
        /// The field.
        field: &'static str,
        /// The value in the file.
        value: String,
        /// The allowed values.
        wanted: &'static str,
    },
}

/// A cluster: one kind of device, several devices per node, several nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// `mpk-cluster/1`.
    pub schema: String,
    /// Name of the cluster, for reports.
    pub name: String,
    /// Row of the hardware table, such as `h200`. Without it, graphs are built for the CPU target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Number of workers per rank on the CPU target. On a GPU the hardware table gives it: one for each
    /// multiprocessor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// Number of ranks per node. Ranks are assigned to nodes in order.
    pub ranks_per_node: u32,
    /// The memory that holds weights and caches.
    pub memory: Memory,
    /// Speed of one worker (a multiprocessor, or a core).
    pub worker: Worker,
    /// Times of the protocol's steps.
    pub protocol: Protocol,
    /// The link between ranks of one node.
    pub peer_link: Link,
    /// The link between nodes. Needed only if the ranks need more than one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Link>,
    /// The source of each figure, by field. The source of a fitted figure says what it was fitted to.
    pub sources: BTreeMap<String, String>,
}

/// Which ranks share a memory.
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
    /// Which ranks share it.
    pub shared_by: SharedBy,
    /// Read rate of all workers together, GB/s.
    pub gb_per_s: f64,
    /// Time from asking for a piece to its arrival, without other requests.
    pub latency_us: f64,
    /// Share of the requests that wait at this memory for which an event's trigger or a flagged word waits too. 0: none; 1:
    /// all of them.
    #[serde(default)]
    pub flag_share: f64,
}

/// One worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Worker {
    /// Size in bytes of one copy of the weight stream.
    pub stage_bytes: u32,
    /// Maximum bytes of weights that have arrived or are in flight before their task begins. 0: no weights run
    /// ahead.
    pub ring_bytes: u32,
    /// Maximum bytes in flight for the running task.
    pub in_flight_bytes: u32,
    /// Maximum bytes in flight for tasks that the worker has not reached.
    pub in_flight_ahead_bytes: u32,
    /// Maximum bytes in flight for the task that the worker has reached but that still waits. Default:
    /// `in_flight_ahead_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight_waiting_bytes: Option<u32>,
    /// Whether the pages of a cache stream ahead as weights do. Otherwise a task reads them once it runs.
    #[serde(default)]
    pub pages_run_ahead: bool,
    /// Rate at which it takes weights from the ring, GB/s.
    pub stream_gb_per_s: f64,
    /// The same for pages of a cache, where `pages_run_ahead`. Default: `stream_gb_per_s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_gb_per_s: Option<f64>,
    /// Rate at which it reads or writes activations (L2 cache, other cores' caches), GB/s.
    pub near_gb_per_s: f64,
    /// Products with weights, GFLOP/s.
    pub gflop_per_s: f64,
    /// Number of rows of a weight that a task multiplies together before it joins and stores their sums. 0: all.
    #[serde(default)]
    pub tile_rows: u32,
    /// Time for each such tile, in addition to its bytes and products.
    #[serde(default)]
    pub tile_us: f64,
    /// Time for each sum of a task that holds all its sums until the end, in nanoseconds: it joins, converts and stores them.
    #[serde(default)]
    pub sum_ns: f64,
    /// The rows of a weight that a full stage has in such a task. A tile with fewer rows fills a part of each stage. 0: its stages are full.
    #[serde(default)]
    pub step_rows: u32,
    /// The least time in which such a task uses a stage, full or not.
    #[serde(default)]
    pub step_us: f64,
}

/// Times of the protocol's steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// Static placement: from the end of a task to the start of a task that waits for its event.
    pub hop_us: f64,
    /// Dynamic placement: the same, through a scheduler.
    pub dynamic_hop_us: f64,
    /// From a push of a flagged word to a poll that sees it, within a rank.
    pub flag_us: f64,
    /// From the end of a task to the start of the same worker's next task, if that one has nothing to wait for.
    pub task_us: f64,
    /// Time of a task with work, in addition to its bytes and products.
    pub work_us: f64,
    /// Additional time of a task that multiplies with weights: its rows must be ready before the first product.
    #[serde(default)]
    pub product_us: f64,
    /// Additional time of a task whose bytes are known only at run time (page tables, lengths): its loads depend on
    /// each other.
    pub indirect_us: f64,
    /// From the last task of an iteration to the first task of the next, with one active slot.
    pub between_us: f64,
    /// Additional time between iterations for each further active slot.
    pub between_per_slot_us: f64,
}

/// Links between ranks of a node, or between nodes. Each rank (or node) has one link in each direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// From a push of a flagged word to the poll of the peer that sees it.
    pub flag_us: f64,
    /// From the start of a put to the peer's wait that sees its signal, without the time of the bytes.
    pub put_us: f64,
    /// Rate in each direction, GB/s.
    pub gb_per_s: f64,
    /// Time for which a message occupies the sender's link (network) or proxy, in addition to its bytes.
    #[serde(default)]
    pub message_us: f64,
}

impl Cluster {
    /// Reads and checks a description.
    ///
    /// # Errors
    /// The error names the place in the file and what is wrong there.
    pub fn parse(text: &str) -> Result<Cluster, ClusterError> {
        let reader = &mut serde_json::Deserializer::from_str(text);
        let cluster: Cluster =
            serde_path_to_error::deserialize(reader).map_err(|e| ClusterError::Syntax {
                place: Some(e.path().to_string()).filter(|p| p != ".").map_or_else(String::new, |p| p + ": "),
                problem: taskgraph::json::plain(&e.inner().to_string()),
            })?;
        cluster.check()?;
        Ok(cluster)
    }

    /// The JSON schema of the file.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Cluster).to_value()
    }

    /// The node of each of `ranks` ranks, in order.
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
                &self.workers.map_or("missing".to_string(), |workers| workers.to_string()),
                "present if `device` is missing, and only then",
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
        if !(0.0..=1.0).contains(&self.memory.flag_share) {
            return value("memory.flag_share", &self.memory.flag_share, "0 to 1");
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
            ("protocol.product_us", p.product_us),
            ("protocol.indirect_us", p.indirect_us),
            ("protocol.between_us", p.between_us),
            ("protocol.between_per_slot_us", p.between_per_slot_us),
            ("peer_link.flag_us", self.peer_link.flag_us),
            ("peer_link.put_us", self.peer_link.put_us),
            ("peer_link.message_us", self.peer_link.message_us),
            ("worker.tile_us", self.worker.tile_us),
            ("worker.sum_ns", self.worker.sum_ns),
            ("worker.step_us", self.worker.step_us),
        ];
        rates.extend(self.worker.page_gb_per_s.map(|rate| ("worker.page_gb_per_s", rate)));
        if let Some(network) = &self.network {
            rates.push(("network.gb_per_s", network.gb_per_s));
            times.push(("network.flag_us", network.flag_us));
            times.push(("network.put_us", network.put_us));
            times.push(("network.message_us", network.message_us));
        }
        // These limits keep sums from overflowing and rates from rounding to nothing.
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
