//! What can go wrong between ranks, and the exit status it maps to.

use thiserror::Error;

/// An error of the distributed runtime.
#[derive(Debug, Error)]
pub enum Error {
    /// MPI did not come up.
    #[error(
        "MPI could not be initialised: {0}; check that mpirun and libmpi are of one installation (`mpirun --version`)"
    )]
    MpiInit(String),
    /// The CPU target works within one node.
    #[error(
        "the CPU target runs on one node, but this job has {ranks} ranks of which {here} are on node {node}; start all ranks on one node (`mpirun --host {node}:{ranks} ...`)"
    )]
    SeveralNodes {
        /// Ranks of the job.
        ranks: u32,
        /// Ranks on this node.
        here: u32,
        /// This node's name.
        node: String,
    },
    /// The symmetric heaps do not fit.
    #[error(
        "/dev/shm has {free} bytes free, but the symmetric heaps of {ranks} ranks take {bytes} bytes each; enlarge it (`mount -o remount,size=... /dev/shm`, in a container `docker run --shm-size=...`), or use fewer slots (max_batch) or a smaller runtime.prefill_chunk"
    )]
    SharedMemory {
        /// Bytes of a rank's heap.
        bytes: u64,
        /// Ranks on this node.
        ranks: u32,
        /// Bytes free.
        free: u64,
    },
    /// Memory could not be had.
    #[error(
        "rank {rank}: no memory for {what} ({bytes} bytes): {reason}; use fewer slots (max_batch), shorter sequences (max_seq_len) or more ranks"
    )]
    OutOfMemory {
        /// This rank.
        rank: u32,
        /// What it is for.
        what: String,
        /// Size.
        bytes: u64,
        /// What the system said.
        reason: String,
    },
    /// Task graphs and kernels do not match; a bug of ours or a graph made for another build.
    #[error("graph {graph}: {problem}")]
    Graph {
        /// Name of the graph.
        graph: String,
        /// What is wrong.
        problem: String,
    },
    /// The ranks built different graphs.
    #[error(
        "rank {rank} built another graph {graph} than rank 0 expects of it (digest {found:016x}, expected {expected:016x}); run the same mpk-run and the same model.json on every node"
    )]
    Digest {
        /// The rank.
        rank: u32,
        /// Name of the graph.
        graph: String,
        /// What it built.
        found: u64,
        /// What rank 0 verified.
        expected: u64,
    },
    /// The host could not start a thread.
    #[error("rank {rank}: could not start {what}: {reason}")]
    Thread {
        /// This rank.
        rank: u32,
        /// Which thread.
        what: String,
        /// What the system said.
        reason: String,
    },
    /// The run ended early; the text is the report.
    #[error("{0}")]
    Aborted(String),
}

impl Error {
    /// Exit status by the contract: 3 the environment lacks something, 4 the run failed, 2 bad input.
    pub fn exit_status(&self) -> i32 {
        match self {
            Error::MpiInit(_)
            | Error::SeveralNodes { .. }
            | Error::OutOfMemory { .. }
            | Error::SharedMemory { .. }
            | Error::Thread { .. } => 3,
            Error::Graph { .. } => 2,
            Error::Digest { .. } | Error::Aborted(_) => 4,
        }
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
