//! What can go wrong between ranks, and the exit status it maps to.

use crate::gibibytes::gibibytes;
use thiserror::Error;

/// An error of the distributed runtime.
#[derive(Debug, Error)]
pub enum Error {
    /// MPI did not come up.
    #[error("MPI could not be initialised: {0}")]
    MpiInit(String),
    /// Ranks on several nodes need an MPI that several threads may call.
    #[error(
        "this job's ranks are on {nodes} nodes, and this MPI library does not let several threads call it (MPI_THREAD_MULTIPLE), which the proxy between nodes needs"
    )]
    ThreadLevel {
        /// Nodes of the job.
        nodes: usize,
    },
    /// `MPK_SANITIZE` asks for what this machine lacks.
    #[error(transparent)]
    Sanitizer(#[from] kernels_cu::sanitizer::SanitizerError),
    /// The symmetric heaps do not fit.
    #[error(
        "/dev/shm has {free} bytes free, but the symmetric heaps of {ranks} ranks take {bytes} bytes each"
    )]
    SharedMemory {
        /// Bytes of a rank's heap.
        bytes: u64,
        /// Ranks on this node.
        ranks: u32,
        /// Bytes free.
        free: u64,
    },
    /// MPI refuses the shared memory.
    #[error("MPI could not make the ranks' shared memory: {reason}")]
    SharedWindow {
        /// What MPI says.
        reason: String,
    },
    /// Memory could not be had.
    #[error("rank {rank}: no memory for {what} ({bytes} bytes): {reason}")]
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
        "rank {rank} built another graph {graph} than rank 0 expects of it (digest {found:016x}, expected {expected:016x})"
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
    /// The NVIDIA driver does not come up.
    #[error("the NVIDIA driver does not come up: {reason}")]
    Driver {
        /// What it says.
        reason: String,
    },
    /// No GPU.
    #[error("no usable GPU: {reason}")]
    NoGpu {
        /// Why.
        reason: String,
    },
    /// The driver is older than the code needs.
    #[error("the NVIDIA driver serves {found}, but {needed} is needed")]
    DriverTooOld {
        /// What it serves.
        found: String,
        /// What is needed.
        needed: String,
    },
    /// No cubin can be made for the GPU.
    #[error(
        "GPU {device} ({name}) has compute capability {capability}, but there is GPU code only for 8.x (A100), 9.0 (H100, H200) and 10.0 (B200)"
    )]
    Architecture {
        /// Number of the GPU.
        device: u32,
        /// Its name.
        name: String,
        /// Its compute capability.
        capability: String,
    },
    /// The driver does not load the cubin.
    #[error("GPU {device} ({name}) does not load the model's cubin: {reason}")]
    Cubin {
        /// Number of the GPU.
        device: u32,
        /// Its name.
        name: String,
        /// What the driver says.
        reason: String,
    },
    /// The kernel's blocks would not all run at once.
    #[error("GPU {device} ({name}) can't run the {blocks} blocks of the kernel at the same time: {problem}")]
    Residency {
        /// Number of the GPU.
        device: u32,
        /// Its name.
        name: String,
        /// Blocks wanted.
        blocks: u32,
        /// Why not.
        problem: String,
    },
    /// Device memory does not suffice.
    #[error("{device} has {} of its memory free, but {} needed{}: {parts}",
        gibibytes(*.free),
        gibibytes(*.needed),
        if *.ranks > 1 { format!(" by each of {ranks} ranks on it") } else { String::new() })]
    DeviceMemory {
        /// The GPU.
        device: String,
        /// Ranks that share it.
        ranks: u32,
        /// Bytes free.
        free: u64,
        /// Bytes that a rank needs.
        needed: u64,
        /// What takes them.
        parts: String,
    },
    /// Pinned host memory could not be had.
    #[error("no pinned host memory for {what} ({bytes} bytes): {reason}")]
    PinnedMemory {
        /// What it is for.
        what: String,
        /// Size.
        bytes: u64,
        /// What the driver said.
        reason: String,
    },
    /// NVSHMEM does not come up.
    #[error("NVSHMEM: {problem}")]
    Nvshmem {
        /// What is wrong.
        problem: String,
        /// How to fix it, where that is known.
        help: Option<String>,
    },
    /// The host library and the device library are of different versions.
    #[error("NVSHMEM's host library is {host} ({path}), but headers and device library are {device}")]
    NvshmemVersions {
        /// Version of the host library.
        host: String,
        /// Its path.
        path: String,
        /// Version of the headers and the device library.
        device: String,
    },
    /// The user's heap size is too small.
    #[error("NVSHMEM_SYMMETRIC_SIZE={given} is too small: the symmetric heap of a rank needs {needed} bytes")]
    SymmetricSize {
        /// The variable's value.
        given: String,
        /// Bytes needed.
        needed: u64,
    },
    /// Some GPUs have more ranks than others.
    #[error("{ranks} ranks share {gpus} GPUs unevenly ({} ranks on them), and NVSHMEM starts only where every GPU has the same number",
        list(.shares))]
    UnevenGpus {
        /// Ranks of the job.
        ranks: u32,
        /// GPUs that they are on.
        gpus: u32,
        /// Ranks of each GPU.
        shares: Vec<u32>,
    },
    /// A peer's memory is out of reach.
    #[error("rank {rank} can't reach the memory of rank {peer} by stores, which this run needs")]
    PeerAccess {
        /// This rank.
        rank: u32,
        /// The other.
        peer: u32,
    },
    /// A call of the CUDA driver failed.
    #[error("{call} failed: {reason}")]
    Cuda {
        /// The call.
        call: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// The GPU failed during the run.
    #[error("rank {rank}: the GPU failed: {reason}{place}")]
    Device {
        /// This rank.
        rank: u32,
        /// What the driver says.
        reason: String,
        /// How far the run had come.
        place: String,
    },
    /// Code generation or compilation failed.
    #[error(transparent)]
    Code(#[from] kernels_cu::gpu::GpuError),
    /// Another rank's error, which all ranks end with.
    #[error("rank {rank}: {message}")]
    AtRank {
        /// The rank.
        rank: u32,
        /// Its exit status.
        status: i32,
        /// Its error.
        message: String,
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
    /// No thread for reading weights.
    #[error("no thread to read weights could be started: {reason}")]
    Readers {
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
            | Error::ThreadLevel { .. }
            | Error::OutOfMemory { .. }
            | Error::SharedMemory { .. }
            | Error::SharedWindow { .. }
            | Error::Driver { .. }
            | Error::NoGpu { .. }
            | Error::DriverTooOld { .. }
            | Error::Architecture { .. }
            | Error::Cubin { .. }
            | Error::Residency { .. }
            | Error::DeviceMemory { .. }
            | Error::PinnedMemory { .. }
            | Error::Nvshmem { .. }
            | Error::NvshmemVersions { .. }
            | Error::SymmetricSize { .. }
            | Error::UnevenGpus { .. }
            | Error::PeerAccess { .. }
            | Error::Sanitizer(_)
            | Error::Readers { .. }
            | Error::Thread { .. } => 3,
            Error::Graph { .. } => 2,
            Error::Digest { .. } | Error::Cuda { .. } | Error::Device { .. } | Error::Aborted(_) => 4,
            Error::Code(error) => i32::from(error.exit_status()),
            Error::AtRank { status, .. } => *status,
        }
    }
    /// How to fix it, if that is known.
    pub fn help(&self) -> Option<String> {
        let help = match self {
            Error::Sanitizer(error) => return Some(error.help().into()),
            Error::Code(error) => return error.help(),
            Error::Nvshmem { help, .. } => return help.clone(),
            Error::MpiInit(_) => "check that mpirun and libmpi are of one installation (`mpirun --version`)",
            Error::ThreadLevel { .. } => {
                "use an MPI library that does (Open MPI: `ompi_info | grep MPI_THREAD_MULTIPLE`), or start all ranks on one node"
            }
            Error::SharedMemory { .. } => {
                "enlarge /dev/shm (`mount -o remount,size=... /dev/shm`, in a container `docker run --shm-size=...`), or use fewer slots (max_batch) or a smaller runtime.prefill_chunk"
            }
            Error::SharedWindow { .. } => "check the room and the rights in /dev/shm (`df /dev/shm`)",
            Error::OutOfMemory { .. } => {
                "use fewer slots (max_batch), shorter sequences (max_seq_len) or more ranks"
            }
            Error::Digest { .. } => "run the same mpk-run and the same model.json on every node",
            Error::Driver { .. } => {
                "check it with `nvidia-smi` (in a container: `docker run --gpus all`), or run with --backend cpu"
            }
            Error::NoGpu { .. } => {
                "install the NVIDIA driver (`sudo apt-get install nvidia-driver-580-open`), in a container pass the GPUs in (`docker run --gpus all`), or run with --backend cpu"
            }
            Error::DriverTooOld { .. } => {
                "install a newer driver (CUDA 13 needs 580 or later, CUDA 12 525 or later: `sudo apt-get install nvidia-driver-580-open`), or run with --backend cpu"
            }
            Error::Architecture { .. } => {
                "choose another GPU with CUDA_VISIBLE_DEVICES, or run with --backend cpu"
            }
            Error::Cubin { .. } => {
                "if the driver is older than the CUDA toolkit (`mpk-run doctor`), update it; if the cache is damaged, empty its folder"
            }
            Error::Residency { .. } => "use fewer workers (--workers), or another GPU (CUDA_VISIBLE_DEVICES)",
            Error::DeviceMemory { .. } => {
                "use more ranks or GPUs, fewer slots (max_batch), shorter sequences (max_seq_len), fewer KV pages (runtime.kv_pages), or end what else uses the GPU (`nvidia-smi`)"
            }
            Error::PinnedMemory { .. } => "raise the limit of locked memory (`ulimit -l unlimited`)",
            Error::NvshmemVersions { .. } => {
                "use the same major.minor version of both: set NVSHMEM_HOME to one installation, or run scripts/setup.sh --nvshmem"
            }
            Error::SymmetricSize { .. } => {
                "unset the variable, or use fewer slots (max_batch), a smaller runtime.prefill_chunk or fewer ranks"
            }
            Error::UnevenGpus { gpus, .. } => {
                return Some(format!(
                    "use {} ranks (as far as the model allows), or show mpk-run fewer or more GPUs (CUDA_VISIBLE_DEVICES)",
                    even_ranks(*gpus)
                ));
            }
            Error::PeerAccess { .. } => {
                "leave out --transport p2p if it was given, else use --transport nvshmem, or GPUs that are joined by NVLink or PCIe peer access (`nvidia-smi topo -p2p rw`)"
            }
            Error::Device { .. } => "`compute-sanitizer mpk-run ...` finds the instruction that failed",
            Error::Thread { .. } => {
                "raise the limits of processes and of memory (`ulimit -u unlimited -v unlimited`)"
            }
            Error::Readers { .. } => {
                "raise the limits of processes and of memory (`ulimit -u unlimited -v unlimited`)"
            }
            _ => return None,
        };
        Some(help.into())
    }

    /// What is wrong and, where that is known, how to fix it, in one line: for a place that has no line for each.
    pub fn whole(&self) -> String {
        match self.help() {
            Some(help) => format!("{self}; {help}"),
            None => self.to_string(),
        }
    }
}

fn list(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// The numbers of ranks that fill this many GPUs evenly.
fn even_ranks(gpus: u32) -> String {
    let few: Vec<u32> = (1..=gpus).collect();
    format!("{}, or {} ...", list(&few), list(&[2 * gpus, 3 * gpus, 4 * gpus]))
}

impl From<nvshmem_sys::Error> for Error {
    fn from(error: nvshmem_sys::Error) -> Self {
        Error::Nvshmem { problem: error.to_string(), help: error.help() }
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
