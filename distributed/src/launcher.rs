//! What the launcher of a job passes to a process in environment variables, available before MPI is initialised.

/// Variables that show that a process is one of several ranks.
const LAUNCHER_VARIABLES: [&str; 4] = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"];

/// True if an MPI launcher started this process.
pub fn launched_by_mpi() -> bool {
    of_mpi(&variable)
}

/// Number of processes that the MPI launcher started, if there is a launcher and it sets this.
pub fn launched_ranks() -> Option<u32> {
    Some(Place::from_environment().size).filter(|&size| launched_by_mpi() && size != 0)
}

/// The number of this job's ranks on this node: at least that many, if the launcher does not set it. `None` without an MPI launcher.
pub fn ranks_here() -> Option<u32> {
    let local = Place::from_environment().local_size.filter(|_| launched_by_mpi());
    local.or_else(launched_ranks)
}

/// True on the job's first process, and on every process that belongs to no job.
pub fn is_first() -> bool {
    !launched_by_mpi() || Place::from_environment().rank == 0
}

/// The number of this process's peers, with itself, if srun started them without MPI. Each would run the whole model.
pub(crate) fn tasks_without_mpi() -> Option<u32> {
    tasks_alone(&variable)
}

/// Looks up an environment variable.
type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
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
        Place::read(&variable)
    }

    fn read(variables: Environment<'_>) -> Place {
        let number = |name: &str| variables(name)?.parse::<u32>().ok();
        let rank = number("PMIX_RANK").or_else(|| number("PMI_RANK"));
        let (rank, size, local_rank, local_size) = match Launcher::find(variables) {
            Launcher::OpenMpi => (
                number("OMPI_COMM_WORLD_RANK"),
                number("OMPI_COMM_WORLD_SIZE"),
                number("OMPI_COMM_WORLD_LOCAL_RANK"),
                number("OMPI_COMM_WORLD_LOCAL_SIZE"),
            ),
            Launcher::Hydra => (
                number("PMI_RANK").or(rank),
                number("PMI_SIZE"),
                number("MPI_LOCALRANKID"),
                number("MPI_LOCALNRANKS"),
            ),
            Launcher::Srun => (
                number("SLURM_PROCID"),
                number("SLURM_STEP_NUM_TASKS"),
                number("SLURM_LOCALID"),
                tasks_here(variables),
            ),
            Launcher::Other => (rank, number("PMI_SIZE"), number("PMI_LOCAL_RANK"), number("PMI_LOCAL_SIZE")),
        };
        Place {
            rank: rank.unwrap_or(0),
            size: size.unwrap_or(0),
            local_rank: local_rank.filter(|_| rank.is_some() && size.is_some()),
            local_size,
            job: job_name(variables),
        }
    }
}

/// Which launcher started this process, with or without MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Launcher {
    /// Open MPI's mpirun.
    OpenMpi,
    /// mpiexec of MPICH or Intel MPI.
    Hydra,
    /// srun, as a task of a job step. A batch script, and a shell of `salloc`, have no step.
    Srun,
    /// Another one, or none.
    Other,
}

impl Launcher {
    /// Launchers may run inside each other's jobs: mpirun starts its daemons with srun, so its ranks have Slurm's variables too, but
    /// those describe a daemon. The innermost launcher counts.
    fn find(variables: Environment<'_>) -> Launcher {
        let set = |name: &str| variables(name).is_some();
        match () {
            () if set("OMPI_COMM_WORLD_SIZE") => Launcher::OpenMpi,
            () if set("MPI_LOCALNRANKS") => Launcher::Hydra,
            () if ["SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"].into_iter().all(set) => {
                Launcher::Srun
            }
            () => Launcher::Other,
        }
    }
}

fn of_mpi(variables: Environment<'_>) -> bool {
    LAUNCHER_VARIABLES.iter().any(|name| variables(name).is_some())
}

/// True if srun itself started this process as a rank of an MPI job.
pub(crate) fn is_started_by_srun() -> bool {
    launched_by_mpi() && Launcher::find(&variable) == Launcher::Srun
}

fn tasks_alone(variables: Environment<'_>) -> Option<u32> {
    let alone = Launcher::find(variables) == Launcher::Srun && !of_mpi(variables);
    variables("SLURM_STEP_NUM_TASKS")?.parse().ok().filter(|&tasks| alone && tasks > 1)
}

/// The number of tasks of the job step on this node: `2(x3),1` says that three nodes have 2 and the last one has 1.
fn tasks_here(variables: Environment<'_>) -> Option<u32> {
    let mut node = variables("SLURM_NODEID")?.parse::<u32>().ok()?;
    for part in variables("SLURM_STEP_TASKS_PER_NODE")?.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        if node < nodes {
            return tasks.parse().ok();
        }
        node -= nodes;
    }
    None
}

/// Consists of the job's identification and of the launcher's process on this node, because containers may share a network.
fn job_name(variables: Environment<'_>) -> String {
    const IDENTITY: [&str; 4] = ["PMIX_NAMESPACE", "PMIX_SERVER_URI2", "SLURM_JOB_ID", "SLURM_STEP_ID"];
    // An allocation may contain several jobs. A step of srun may be a shell in which several jobs are started.
    let jobs_own = ["PMIX_NAMESPACE", "SLURM_STEP_ID"].iter().any(|name| variables(name).is_some());
    if Launcher::find(variables) == Launcher::Hydra || !jobs_own {
        // Launchers that name no job start the ranks of a node from one process.
        return format!(
            "process-{}",
            process().map_or_else(std::os::unix::process::parent_id, |(pid, _)| pid)
        );
    }
    IDENTITY.iter().filter_map(|name| variables(name)).collect::<Vec<_>>().join("/")
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What one process found in its environment, as `NAME=VALUE` words.
    fn place(words: &str) -> (u32, u32, Option<u32>, Option<u32>) {
        let place = Place::read(&environment(words));
        (place.rank, place.size, place.local_rank, place.local_size)
    }

    fn environment(words: &str) -> impl Fn(&str) -> Option<String> {
        move |name| {
            let pairs = words.split_whitespace().filter_map(|word| word.split_once('='));
            pairs.filter(|(key, _)| *key == name).map(|(_, value)| value.to_string()).next()
        }
    }

    /// The variables of `srun -N 3 -n 5` for task 3, without MPI (Slurm 22.05).
    const TASK: &str = "SLURM_JOB_ID=2 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=5 \
        SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=2(x2),1";
    /// Those of a batch script, and of what it starts without srun.
    const BATCH: &str = "SLURM_JOB_ID=5 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=2(x2)";

    #[test]
    fn srun_says_where_a_rank_is() {
        let pmix = format!("{TASK} PMIX_RANK=3 PMIX_NAMESPACE=slurm.pmix.2.0");
        assert_eq!(place(&pmix), (3, 5, Some(1), Some(2)));
        assert_eq!(place(&pmix.replace("NODEID=1", "NODEID=2")).3, Some(1));
        assert_eq!(place(&pmix.replace("NODEID=1", "NODEID=3")).3, None);
        assert_eq!(place(&format!("{TASK} PMI_RANK=3 PMI_SIZE=5")), (3, 5, Some(1), Some(2)));
        assert!(of_mpi(&environment(&pmix)));
        assert_eq!(tasks_alone(&environment(&pmix)), None);
    }

    #[test]
    fn tasks_of_srun_without_mpi_are_noticed() {
        assert_eq!(tasks_alone(&environment(TASK)), Some(5));
        assert_eq!(tasks_alone(&environment(&TASK.replace("NUM_TASKS=5", "NUM_TASKS=1"))), None);
        assert_eq!(tasks_alone(&environment(BATCH)), None, "a batch script is no task");
        assert_eq!(place(BATCH), (0, 0, None, None));
        assert_eq!(tasks_alone(&environment("")), None);
    }

    #[test]
    fn the_innermost_launcher_counts() {
        // Daemons of mpirun and of Hydra are tasks of srun.
        let ompi = "OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=4";
        assert_eq!(place(&format!("{TASK} {ompi} PMIX_RANK=6")), (6, 8, Some(2), Some(4)));
        let hydra = "PMI_RANK=6 PMI_SIZE=8 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=4";
        assert_eq!(place(&format!("{TASK} {hydra}")), (6, 8, Some(2), Some(4)));
        let with_pmix = "PMIX_RANK=6 PMI_SIZE=8 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=4";
        assert_eq!(place(with_pmix), (6, 8, Some(2), Some(4)));
        assert_eq!(place("PMI_RANK=1 PMI_SIZE=2"), (1, 2, None, None));
    }

    #[test]
    fn jobs_of_one_node_have_different_names() {
        let name = |words: &str| job_name(&environment(words));
        let pmix = |step: u32| {
            name(&format!("PMIX_NAMESPACE=slurm.pmix.2.{step} SLURM_JOB_ID=2 SLURM_STEP_ID={step}"))
        };
        assert_ne!(pmix(0), pmix(1));
        // In one step of srun, Hydra may start several jobs.
        let hydra = name("PMIX_NAMESPACE=slurm.pmix.2.0 SLURM_JOB_ID=2 SLURM_STEP_ID=0 MPI_LOCALNRANKS=2");
        assert!(hydra.starts_with("process-"), "{hydra}");
    }
}
