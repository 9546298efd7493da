//! What MPI says about this process.

use crate::affinity::{self, Cores};
use crate::launcher::is_started_by_srun;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;

/// Collective: the cores of this rank of the node. mpirun's binding is ignored. srun's is not: it may leave cores to other jobs.
pub(crate) fn cores_of_rank(node: &SimpleCommunicator) -> Cores {
    let allowed = affinity::allowed_cores();
    let (rank, size) = (node.rank() as usize, node.size() as usize);
    if !is_started_by_srun() {
        return affinity::share(&allowed, rank, size);
    }
    let own = affinity::to_mask(&allowed);
    let mut all = vec![0; own.len() * size];
    node.all_gather_into(&own[..], &mut all[..]);
    let sets: Vec<Vec<usize>> = all.chunks(own.len()).map(affinity::from_mask).collect();
    affinity::share_sets(&sets, rank)
}

/// True if this process has initialised MPI.
pub(crate) fn is_initialised() -> bool {
    let mut initialised = 0;
    // SAFETY: this call is allowed at any time.
    unsafe { mpi::ffi::MPI_Initialized(&mut initialised) };
    initialised != 0
}

/// Name of this node. MPI must be initialised.
pub(crate) fn node_name() -> String {
    mpi::environment::processor_name().unwrap_or_else(|_| "localhost".to_string())
}
