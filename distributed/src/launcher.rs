//! What the launcher of a job tells a process through its environment, before MPI is initialised.

/// Variables by which MPI launchers tell a process that it is one of several.
const LAUNCHER_VARIABLES: [&str; 4] = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"];

/// True where an MPI launcher started this process.
pub fn launched_by_mpi() -> bool {
    LAUNCHER_VARIABLES.iter().any(|v| std::env::var_os(v).is_some())
}

/// Number of processes that the MPI launcher started, where one did and says so.
pub fn launched_ranks() -> Option<u32> {
    number(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
}

/// This process's place in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its rank.
    pub rank: u32,
    /// Ranks of the job; 0 where the launcher does not say.
    pub size: u32,
    /// Its number among the ranks of its node, where the launcher says so.
    pub local_rank: Option<u32>,
    /// Ranks of its node, where the launcher says so.
    pub local_size: Option<u32>,
    /// A name that the job's processes on this node share, and no others.
    pub job: String,
}

impl Place {
    /// Whether the launcher says that all ranks are on this node.
    pub(crate) fn is_one_node(&self) -> bool {
        self.size != 0 && self.local_size == Some(self.size)
    }

    /// As the launcher has it.
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

/// Made of what identifies the job and, since containers may share a network, the launcher's process on this node.
fn job_name() -> String {
    const IDENTITY: [&str; 4] = ["PMIX_NAMESPACE", "PMIX_SERVER_URI2", "SLURM_JOB_ID", "SLURM_STEP_ID"];
    // Several jobs may share an allocation.
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

/// The nearest ancestor of this process that is a launcher, and its name. There may be shell scripts between.
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
