//! Errors between ranks, and their exit statuses.

use crate::gibibytes::gibibytes;
use taskgraph::words::counted;
use thiserror::Error;

/// An error of the distributed runtime.
#[derive(Debug, Error)]
pub enum Error {
    /// MPI could not be initialised.
    #[error("MPI could not be initialised: {0}")]
    MpiInit(String),
    /// srun has started several processes without MPI.
    #[error("srun has started {tasks} tasks without MPI, so each of them would run the whole model")]
    TasksAlone {
        /// Number of tasks.
        tasks: u32,
    },
    /// The launcher belongs to another MPI library.
    #[error(
        "the launcher has started {started} processes, but they are not one MPI job: the launcher does not belong to this program's MPI library, {library}"
    )]
    OtherMpi {
        /// Number of processes.
        started: u32,
        /// Name and version of the MPI library.
        library: String,
    },
    /// Ranks on several nodes need an MPI library that several threads may call.
    #[error(
        "this job's ranks are on {nodes} nodes, so several threads must be able to call the MPI library (MPI_THREAD_MULTIPLE), which this one does not support"
    )]
    ThreadLevel {
        /// Number of nodes of the job.
        nodes: usize,
    },
    /// `MPK_SANITIZE` asks for something that this machine lacks.
    #[error(transparent)]
    Sanitizer(#[from] kernels_cu::sanitizer::SanitizerError),
    /// The symmetric heaps do not fit in /dev/shm.
    #[error(
        "/dev/shm has {free} bytes free, but the symmetric heaps of {} take {bytes} bytes each",
        counted(*.ranks, "rank")
    )]
    SharedMemory {
        /// Bytes of a rank's heap.
        bytes: u64,
        /// Ranks on this node.
        ranks: u32,
        /// Bytes free.
        free: u64,
    },
    /// MPI refused to create the shared memory.
    #[error("MPI could not create the ranks' shared memory: {reason}")]
    SharedWindow {
        /// MPI's error.
        reason: String,
    },
    /// Memory could not be allocated.
    #[error("rank {rank}: cannot allocate memory for {what} ({bytes} bytes): {reason}")]
    OutOfMemory {
        /// This rank.
        rank: u32,
        /// What it is for.
        what: String,
        /// Size.
        bytes: u64,
        /// The system's error.
        reason: String,
    },
    /// Task graphs and kernels do not match: a bug, or a graph made for another build.
    #[error("graph {graph}: {problem}")]
    Graph {
        /// Name of the graph.
        graph: String,
        /// What is wrong.
        problem: String,
    },
    /// The ranks built different graphs.
    #[error(
        "rank {rank} built a graph {graph} that differs from the one that rank 0 built for it (digest {found:016x}, expected {expected:016x})"
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
    /// The NVIDIA driver cannot be used.
    #[error("the NVIDIA driver cannot be used: {reason}")]
    Driver {
        /// The driver's error.
        reason: String,
    },
    /// There is no usable GPU.
    #[error("no usable GPU: {reason}")]
    NoGpu {
        /// Why.
        reason: String,
    },
    /// The driver is older than needed.
    #[error("the NVIDIA driver supports {found}, but {needed} is needed")]
    DriverTooOld {
        /// The CUDA version that it supports.
        found: String,
        /// What is needed.
        needed: String,
    },
    /// The GPU's architecture is not supported.
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
    /// The driver cannot load the cubin.
    #[error("GPU {device} ({name}) cannot load the model's cubin: {reason}")]
    Cubin {
        /// Number of the GPU.
        device: u32,
        /// Its name.
        name: String,
        /// The driver's error.
        reason: String,
    },
    /// The kernel's blocks could not all run at the same time.
    #[error("GPU {device} ({name}) cannot run the kernel's {blocks} blocks at the same time: {problem}")]
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
    /// There is not enough device memory.
    #[error("{device} has {} of its memory free, but {} needed{}: {parts}",
        gibibytes(*.free),
        gibibytes(*.needed),
        if *.ranks > 1 { format!(" by each of {ranks} ranks on it") } else { String::new() })]
    DeviceMemory {
        /// The GPU.
        device: String,
        /// Number of ranks that share it.
        ranks: u32,
        /// Bytes free.
        free: u64,
        /// Bytes that a rank needs.
        needed: u64,
        /// The parts that need it.
        parts: String,
    },
    /// Pinned host memory could not be allocated.
    #[error("cannot allocate pinned host memory for {what} ({bytes} bytes): {reason}")]
    PinnedMemory {
        /// What it is for.
        what: String,
        /// Size.
        bytes: u64,
        /// The driver's error.
        reason: String,
    },
    /// NVSHMEM could not be started.
    #[error("NVSHMEM: {problem}")]
    Nvshmem {
        /// What is wrong.
        problem: String,
        /// How to fix it, if known.
        help: Option<String>,
    },
    /// The versions of the host library and the device library differ.
    #[error(
        "NVSHMEM's host library has version {host} ({path}), but its headers and device library have version {device}"
    )]
    NvshmemVersions {
        /// Version of the host library.
        host: String,
        /// Its path.
        path: String,
        /// Version of the headers and the device library.
        device: String,
    },
    /// The heap size that the user set is too small.
    #[error("NVSHMEM_SYMMETRIC_SIZE={given} is too small: the symmetric heap of a rank needs {needed} bytes")]
    SymmetricSize {
        /// The variable's value.
        given: String,
        /// Bytes needed.
        needed: u64,
    },
    /// Some GPUs have more ranks than others.
    #[error("{ranks} ranks share {gpus} GPUs unevenly ({} ranks on them), but NVSHMEM needs the same number on every GPU",
        list(.shares))]
    UnevenGpus {
        /// Ranks of the job.
        ranks: u32,
        /// Number of GPUs that they share.
        gpus: u32,
        /// Number of ranks on each GPU.
        shares: Vec<u32>,
    },
    /// A peer's memory cannot be reached.
    #[error("rank {rank} cannot reach the memory of rank {peer} by stores, which this run needs")]
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
        /// The driver's error.
        reason: String,
    },
    /// The GPU failed during the run.
    #[error("rank {rank}: the GPU failed: {reason}{place}")]
    Device {
        /// This rank.
        rank: u32,
        /// The driver's error.
        reason: String,
        /// How far the run had got.
        place: String,
    },
    /// Generating or compiling GPU code failed.
    #[error(transparent)]
    Code(#[from] kernels_cu::gpu::GpuError),
    /// Another rank's error. All ranks end with it.
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
    #[error("rank {rank}: cannot start {what}: {reason}")]
    Thread {
        /// This rank.
        rank: u32,
        /// Which thread.
        what: String,
        /// The system's error.
        reason: String,
    },
    /// No thread could be started to read weights.
    #[error("cannot start a thread to read weights: {reason}")]
    Readers {
        /// The system's error.
        reason: String,
    },
    /// The run ended early. The text is the report.
    #[error("{0}")]
    Aborted(String),
}

impl Error {
    /// Exit status: 2 bad input, 3 the environment lacks something, 4 the run failed.
    pub fn exit_status(&self) -> i32 {
        match self {
            Error::MpiInit(_)
            | Error::TasksAlone { .. }
            | Error::OtherMpi { .. }
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
    /// How to fix it, if known.
    pub fn help(&self) -> Option<String> {
        let help = match self {
            Error::Sanitizer(error) => return Some(error.help().into()),
            Error::Code(error) => return error.help(),
            Error::Nvshmem { help, .. } => return help.clone(),
            Error::MpiInit(_) => {
                "check that mpirun and libmpi belong to the same installation (`mpirun --version`)"
            }
            Error::TasksAlone { .. } => {
                "start them as one job: `srun --mpi=pmix` (`srun --mpi=list` shows what Slurm offers); for independent runs, start each with `env -u SLURM_STEP_NUM_TASKS`"
            }
            Error::OtherMpi { .. } => {
                "start the job with that library's mpirun, or build the program with the launcher's library, such as `MPICC=mpicc.mpich cargo build --release` (docs/multi-node.md)"
            }
            Error::ThreadLevel { .. } => {
                "use an MPI library that does (Open MPI: `ompi_info | grep MPI_THREAD_MULTIPLE`), or start all ranks on one node"
            }
            Error::SharedMemory { .. } => {
                "enlarge /dev/shm (`mount -o remount,size=... /dev/shm`, in a container `docker run --shm-size=...`), or use fewer slots (max_batch) or a smaller runtime.prefill_chunk, in a graph of your own smaller tensors"
            }
            Error::SharedWindow { .. } => {
                "check the free space and the permissions of /dev/shm (`df /dev/shm`)"
            }
            Error::OutOfMemory { .. } => {
                "use fewer slots (max_batch), shorter sequences (max_seq_len) or fewer KV pages (runtime.kv_pages), in a graph of your own smaller tensors, or more ranks"
            }
            Error::Digest { .. } => "run the same mpk-run and the same model.json on every node",
            Error::Driver { .. } => {
                "check it with `nvidia-smi` (in a container: `docker run --gpus all`), or run with BackendChoice::Cpu"
            }
            Error::NoGpu { .. } => {
                "install the NVIDIA driver (`sudo apt-get install nvidia-driver-580-open`; in a container: `docker run --gpus all`), or run with BackendChoice::Cpu"
            }
            Error::DriverTooOld { .. } => {
                "install a newer driver (CUDA 13 needs 580 or later, CUDA 12 525 or later: `sudo apt-get install nvidia-driver-580-open`), or run with BackendChoice::Cpu"
            }
            Error::Architecture { .. } => {
                "choose another GPU with CUDA_VISIBLE_DEVICES, or run with BackendChoice::Cpu"
            }
            Error::Cubin { .. } => {
                "if the driver is older than the CUDA toolkit (`mpk-run doctor`), update it; if the cache is damaged, empty its folder"
            }
            Error::Residency { .. } => {
                "use fewer workers (Overrides::workers), or another GPU (CUDA_VISIBLE_DEVICES)"
            }
            Error::DeviceMemory { .. } => {
                "use more ranks or GPUs, fewer slots (max_batch), shorter sequences (max_seq_len), fewer KV pages (runtime.kv_pages), in a graph of your own smaller tensors, or end other programs on the GPU (`nvidia-smi` lists them)"
            }
            Error::PinnedMemory { .. } => "raise the limit of locked memory with `ulimit -l unlimited`",
            Error::NvshmemVersions { .. } => {
                "set NVSHMEM_HOME to one installation, so that both have the same major.minor version, or run scripts/setup.sh --nvshmem"
            }
            Error::SymmetricSize { .. } => {
                "unset the variable, or use fewer slots (max_batch), a smaller runtime.prefill_chunk or fewer ranks, in a graph of your own smaller tensors"
            }
            Error::UnevenGpus { gpus, .. } => {
                return Some(format!(
                    "use {} ranks (if the model allows that), or another number of GPUs (CUDA_VISIBLE_DEVICES)",
                    even_ranks(*gpus)
                ));
            }
            Error::PeerAccess { .. } => {
                "leave out Transport::P2p if it was given; otherwise use Transport::Nvshmem, or GPUs with NVLink or PCIe peer access (`nvidia-smi topo -p2p rw`)"
            }
            Error::Device { .. } => "`compute-sanitizer mpk-run ...` finds the instruction that failed",
            Error::Thread { .. } => {
                "raise the limits of processes and memory with `ulimit -u unlimited -v unlimited`"
            }
            Error::Readers { .. } => {
                "raise the limits of processes and memory with `ulimit -u unlimited -v unlimited`"
            }
            _ => return None,
        };
        Some(help.into())
    }

    /// What is wrong and, if known, how to fix it, on one line.
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

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    /// Slots and sequences are sizes of models. The sizes of a user's graph are in its tensors.
    #[test]
    fn help_against_a_lack_of_memory_also_fits_a_users_graph() {
        for error in [
            Error::OutOfMemory { rank: 0, what: "activations".into(), bytes: 1, reason: "full".into() },
            Error::SharedMemory { bytes: 2, ranks: 1, free: 1 },
            Error::DeviceMemory {
                device: "GPU 0".into(),
                ranks: 1,
                free: 1,
                needed: 2,
                parts: "weights".into(),
            },
            Error::SymmetricSize { given: "1".into(), needed: 2 },
        ] {
            let help = error.help().unwrap();
            assert!(help.contains("max_batch"), "{help}");
            assert!(help.contains("in a graph of your own smaller tensors"), "{help}");
        }
    }
}
