//! The cores that a rank may use. mpirun's binding is ignored, because it ties a rank to one core.

use crate::launcher::{self, Place, launched_by_mpi};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores of this rank, and whether ranks must share them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Core numbers.
    pub own: Vec<usize>,
    /// True if a core belongs to several ranks.
    pub shared: bool,
}

/// Divides the node's allowed cores among its ranks: contiguous shares, or one shared core per rank if there are more ranks than
/// cores.
pub(crate) fn cores_of_rank(node_rank: u32, node_size: u32) -> Cores {
    share(&allowed_cores(), node_rank as usize, node_size as usize)
}

fn share(allowed: &[usize], rank: usize, ranks: usize) -> Cores {
    let n = allowed.len().max(1);
    if ranks <= n {
        Cores {
            own: allowed[n * rank / ranks..(n * (rank + 1) / ranks).min(allowed.len())].to_vec(),
            shared: false,
        }
    } else {
        Cores { own: vec![allowed[rank * n / ranks]], shared: true }
    }
}

/// Open MPI's parameter: a process that waits in a call of MPI yields its core.
const YIELD: &str = "OMPI_MCA_mpi_yield_when_idle";

/// Makes MPI yield the core while it waits, if this node's ranks must share cores. Otherwise each wait in MPI's start-up, in its collective
/// calls and in its end polls for a whole time slice, while the awaited rank has no core. Open MPI decides this by the number of slots, which a
/// host file may set to anything. A value that is set already stays.
///
/// # Safety
/// No other thread runs yet: the environment changes.
pub unsafe fn yield_in_mpi() {
    let ranks = Place::from_environment().local_size.unwrap_or(1) as usize;
    // A single rank has no other rank to yield to, however few cores there are, so the launcher need not be asked.
    if ranks > 1 && ranks > allowed() && std::env::var_os(YIELD).is_none() {
        // SAFETY: the caller's.
        unsafe { std::env::set_var(YIELD, "1") };
    }
}

/// Number of cores of this machine that the job may use.
pub fn allowed() -> usize {
    allowed_cores().len()
}

/// Lets the calling thread use all cores of the job on this machine, even if the launcher has bound it.
pub fn unbind() {
    bind(&allowed_cores());
}

/// Cores that the job may use. Under mpirun these are the launcher's cores, because its child is already bound; otherwise our
/// own.
fn allowed_cores() -> Vec<usize> {
    let own = || match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        Err(_) => vec![0],
    };
    if !launched_by_mpi() {
        return own();
    }
    launcher_cores().filter(|cores| !cores.is_empty()).unwrap_or_else(own)
}

/// Cores of the launcher that started this process, otherwise of its parent.
fn launcher_cores() -> Option<Vec<usize>> {
    let process = launcher::process().map_or_else(std::os::unix::process::parent_id, |(process, _)| process);
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(parse_list(list.trim()))
}

/// Parses `0-3,8,10-11`.
fn parse_list(list: &str) -> Vec<usize> {
    list.split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()?)
        })
        .flatten()
        .collect()
}

/// Binds the calling thread to `cores`. A refusal only costs speed.
pub fn bind(cores: &[usize]) {
    let mut set = CpuSet::new();
    cores.iter().filter(|&&core| core < CpuSet::MAX_CPU).for_each(|&core| set.set(core));
    let _ = sched_setaffinity(None, &set);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_core_is_used_and_none_twice_where_there_are_enough() {
        let allowed = parse_list("0-5,8,10-11");
        assert_eq!(allowed, [0, 1, 2, 3, 4, 5, 8, 10, 11]);
        for ranks in 1..=9 {
            let all: Vec<usize> = (0..ranks).flat_map(|r| share(&allowed, r, ranks).own).collect();
            assert_eq!(all, allowed);
        }
        assert_eq!(share(&[0, 1], 7, 8), Cores { own: vec![1], shared: true });
    }
}
