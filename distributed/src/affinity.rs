//! The cores that a rank may use. mpirun's binding is ignored, because it ties a rank to one core. srun's binding holds, because it
//! ties a rank to the cores that it was given (`--cpus-per-task`), and others may belong to other jobs.

use crate::launcher::{self, Place, is_started_by_srun, launched_by_mpi};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::OnceLock;

/// The cores of this rank, and how many ranks share them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Core numbers.
    pub own: Vec<usize>,
    /// The most ranks that one of them belongs to: 1 if they are this rank's alone.
    pub sharers: usize,
}

/// The part of rank `rank` in the cores that `ranks` ranks have together: contiguous shares, or one shared core per rank if there are
/// more ranks than cores.
pub(crate) fn share(allowed: &[usize], rank: usize, ranks: usize) -> Cores {
    let n = allowed.len().max(1);
    if ranks <= n {
        Cores {
            own: allowed[n * rank / ranks..(n * (rank + 1) / ranks).min(allowed.len())].to_vec(),
            sharers: 1,
        }
    } else {
        Cores { own: vec![allowed[rank * n / ranks]], sharers: ranks.div_ceil(n) }
    }
}

/// The part of rank `rank` where each rank has a set of allowed cores: ranks with the same set divide it.
pub(crate) fn share_sets(sets: &[Vec<usize>], rank: usize) -> Cores {
    let same = |other: &Vec<usize>| *other == sets[rank];
    let before = sets[..rank].iter().filter(|set| same(set)).count();
    let mut cores = share(&sets[rank], before, sets.iter().filter(|set| same(set)).count());
    let overlaps = |set: &&Vec<usize>| !same(set) && set.iter().any(|core| cores.own.contains(core));
    cores.sharers += sets.iter().filter(overlaps).count();
    cores
}

/// Number of bits of a word of a mask.
const BITS: usize = u64::BITS as usize;

/// A set of cores, a bit for each.
pub(crate) fn to_mask(cores: &[usize]) -> Vec<u64> {
    let mut mask = vec![0; CpuSet::MAX_CPU.div_ceil(BITS)];
    cores
        .iter()
        .filter(|&&core| core < CpuSet::MAX_CPU)
        .for_each(|core| mask[core / BITS] |= 1 << (core % BITS));
    mask
}

/// The set of cores of [`to_mask`].
pub(crate) fn from_mask(mask: &[u64]) -> Vec<usize> {
    (0..mask.len() * BITS).filter(|core| mask[core / BITS] >> (core % BITS) & 1 == 1).collect()
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
    if is_started_by_srun() {
        return; // which ranks share cores is not known before MPI's start
    }
    let ranks = Place::from_environment().local_size.unwrap_or(1) as usize;
    // A single rank has no other rank to yield to, however few cores there are, so the launcher need not be asked.
    if ranks > 1 && ranks > allowed() && std::env::var_os(YIELD).is_none() {
        // SAFETY: the caller's.
        unsafe { std::env::set_var(YIELD, "1") };
    }
}

/// Number of cores of this machine that the job may use; under srun, only those of this rank.
pub fn allowed() -> usize {
    allowed_cores().len()
}

/// Lets the calling thread use all cores of the job on this machine, even if mpirun has bound it; under srun, those of this rank.
pub fn unbind() {
    bind(&allowed_cores());
}

/// Cores that the job may use, as far as this process knows. Under mpirun these are the launcher's cores, because its child is already
/// bound; otherwise our own.
pub(crate) fn allowed_cores() -> Vec<usize> {
    // This process binds its threads later.
    static OWN: OnceLock<Vec<usize>> = OnceLock::new();
    let own = || match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        Err(_) => vec![0],
    };
    if !launched_by_mpi() {
        return own();
    }
    if is_started_by_srun() {
        return OWN.get_or_init(own).clone();
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
        assert_eq!(share(&[0, 1], 7, 8), Cores { own: vec![1], sharers: 4 });
    }

    #[test]
    fn ranks_divide_only_the_cores_that_they_have_in_common() {
        let sets = |lists: &[&str]| lists.iter().map(|list| parse_list(list)).collect::<Vec<_>>();
        let own = |lists: &[&str], rank: usize| share_sets(&sets(lists), rank);
        let bound = ["0-1", "2-3", "8-9"];
        for (rank, list) in bound.iter().enumerate() {
            assert_eq!(own(&bound, rank), Cores { own: parse_list(list), sharers: 1 });
        }
        assert_eq!(own(&["4-7"; 2], 1), Cores { own: vec![6, 7], sharers: 1 });
        assert_eq!(own(&["4", "4", "5"], 1), Cores { own: vec![4], sharers: 2 });
        assert_eq!(own(&["0-3", "2"], 1), Cores { own: vec![2], sharers: 2 });
        assert_eq!(own(&["0-3", "5"], 0), Cores { own: vec![0, 1, 2, 3], sharers: 1 });
        let cores = parse_list("0-1,63-64,1023");
        assert_eq!(from_mask(&to_mask(&cores)), cores);
    }
}
