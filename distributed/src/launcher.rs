//! What the launcher of a job passes to a process in environment variables, available before MPI is initialised.

/// Variables that show that a process is one of several ranks.
const LAUNCHER_VARIABLES: [&str; 4] = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"];

/// True if an MPI launcher started this process.
pub fn launched_by_mpi() -> bool {
    LAUNCHER_VARIABLES.iter().any(|v| std::env::var_os(v).is_some())
}

/// Number of processes that the MPI launcher started, if there is a launcher and it sets this.
pub fn launched_ranks() -> Option<u32> {
    number(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
}

/// This process's place in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its rank.
    pub rank: u32,
    /// Number of ranks of the job; 0 if the launcher does not set it.
    pub size: u32,
    /// Index among the ranks of its node, if the launcher sets it.
    pub local_rank: Option<u32>,
    /// Number of ranks on its node, if the launcher sets it.
    pub local_size: Option<u32>,
    /// A name that only the job's processes on this node share.
    pub job: String,
}

impl Place {
    /// True if the launcher says that all ranks are on this node.
    pub(crate) fn is_one_node(&self) -> bool {
        self.size != 0 && self.local_size == Some(self.size)
    }

    /// Reads it from the launcher's variables.
    pub(crate) fn from_environment() -> Place {
        let rank = number(&["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"]);
        let size = number(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]);
        let local_rank = number(&["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"]);
        Place {
            rank: rank.unwrap_or(0),
            size: size.unwrap_or(0),
            local_rank: local_rank.filter(|_| rank.is_some() && size.is_some()),
            local_size: number(&["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"]),
            job: job_name(),
        }
    }
}

fn number(variables: &[&str]) -> Option<u32> {
    variables.iter().find_map(|v| std::env::var(v).ok()?.parse().ok())
}

/// Consists of the job's identification and of the launcher's process on this node, because containers may share a network.
fn job_name() -> String {
    const IDENTITY: [&str; 4] = ["PMIX_NAMESPACE", "PMIX_SERVER_URI2", "SLURM_JOB_ID", "SLURM_STEP_ID"];
    // An allocation may contain several jobs.
    const JOBS_OWN: [&str; 2] = ["PMIX_NAMESPACE", "SLURM_STEP_ID"];
    if JOBS_OWN.iter().all(|v| std::env::var_os(v).is_none()) {
        // Launchers that name no job start the ranks of a node as children of one process.
        return format!("parent-{}", std::os::unix::process::parent_id());
    }
    IDENTITY.iter().filter_map(|v| std::env::var(v).ok()).collect::<Vec<_>>().join("/")
}

/// Programs that start the ranks of a node, as the system names them (at most 15 characters).
const LAUNCHERS: [&str; 10] = [
    "mpirun",
    "mpiexec",
    "orterun",
    "orted",
    "prterun",
    "prted",
    "hydra_pmi_proxy",
    "mpiexec.hydra",
    "slurmstepd",
    "srun",
];

/// The nearest ancestor of this process that is a launcher, and its name. There may be shell scripts in between.
pub(crate) fn process() -> Option<(u32, String)> {
    const DEEPEST: usize = 16;
    let mut pid = std::os::unix::process::parent_id();
    for _ in 0..DEEPEST {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name).map(|value| value.trim().to_string()))
        };
        let name = field("Name:")?;
        if LAUNCHERS.contains(&name.as_str()) {
            return Some((pid, name));
        }
        pid = field("PPid:")?.parse().ok().filter(|&parent| parent > 1)?;
    }
    None
}
