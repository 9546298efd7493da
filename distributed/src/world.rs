//! The ranks of a job: MPI where mpirun started us, a single rank without MPI otherwise.

use crate::error::{Error, Result};
use mpi::collective::SystemOperation;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

/// The job's ranks and what they say to each other outside the kernel.
///
/// All methods that take part in communication are collective: every rank calls them in the same order, on the
/// thread that made the world.
pub struct World {
    mpi: Option<Mpi>,
}

struct Mpi {
    universe: ManuallyDrop<Universe>,
    world: SimpleCommunicator,
    node: SimpleCommunicator,
}

/// Variables by which MPI launchers tell a process that it is one of several.
const LAUNCHER_VARIABLES: [&str; 4] = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"];

/// True where an MPI launcher started this process.
pub fn launched_by_mpi() -> bool {
    LAUNCHER_VARIABLES.iter().any(|v| std::env::var_os(v).is_some())
}

/// Number of processes that the MPI launcher started, where one did and says so; known before MPI is initialised.
pub fn launched_ranks() -> Option<u32> {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().find_map(|v| std::env::var(v).ok()?.parse().ok())
}

impl World {
    /// Initialises MPI where a launcher started this process; otherwise a world of one rank without MPI.
    pub fn init() -> Result<World> {
        if !launched_by_mpi() {
            return Ok(World::single());
        }
        let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Funneled)
            .ok_or_else(|| Error::MpiInit("it is initialised already".into()))?;
        let world = universe.world();
        let node = world.split_shared(world.rank());
        abort_the_job_on_panic();
        Ok(World { mpi: Some(Mpi { universe: ManuallyDrop::new(universe), world, node }) })
    }

    /// A world of one rank, without MPI.
    pub fn single() -> World {
        World { mpi: None }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.mpi.as_ref().map_or(0, |m| m.world.rank() as u32)
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.mpi.as_ref().map_or(1, |m| m.world.size() as u32)
    }

    /// This rank among those of its node.
    pub fn node_rank(&self) -> u32 {
        self.mpi.as_ref().map_or(0, |m| m.node.rank() as u32)
    }

    /// Ranks on this node.
    pub fn node_size(&self) -> u32 {
        self.mpi.as_ref().map_or(1, |m| m.node.size() as u32)
    }

    /// Name of this node.
    pub fn node_name(&self) -> String {
        self.mpi
            .as_ref()
            .and_then(|_| mpi::environment::processor_name().ok())
            .unwrap_or_else(|| "localhost".to_string())
    }

    /// Waits until every rank is here.
    pub fn barrier(&self) {
        if let Some(m) = &self.mpi {
            m.world.barrier();
        }
    }

    /// Waits until every rank is here, at most `limit`; false where some rank did not come.
    ///
    /// After `false` the barrier is still pending: the only thing left to do is [`World::abort`].
    pub fn barrier_within(&self, limit: Duration) -> bool {
        let Some(m) = &self.mpi else { return true };
        let begin = Instant::now();
        let mut request = m.world.immediate_barrier();
        loop {
            match request.test() {
                Ok(_) => return true,
                Err(pending) if begin.elapsed() < limit => request = pending,
                Err(pending) => {
                    // The request may not be dropped while pending; the process is about to end.
                    std::mem::forget(pending);
                    return false;
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The largest of the ranks' values, place by place.
    pub fn max(&self, values: &[u64]) -> Vec<u64> {
        let mut out = values.to_vec();
        if let Some(m) = &self.mpi {
            m.world.all_reduce_into(values, &mut out[..], SystemOperation::max());
        }
        out
    }

    /// One value of each rank, in rank order.
    pub fn all_gather(&self, value: u64) -> Vec<u64> {
        let mut out = vec![value; self.size() as usize];
        if let Some(m) = &self.mpi {
            m.world.all_gather_into(&value, &mut out[..]);
        }
        out
    }

    /// Bytes of rank `root`, on every rank.
    pub fn broadcast(&self, root: u32, bytes: Vec<u8>) -> Vec<u8> {
        let Some(m) = &self.mpi else { return bytes };
        let process = m.world.process_at_rank(root as i32);
        let mut length = bytes.len() as u64;
        process.broadcast_into(&mut length);
        let mut buffer = bytes;
        buffer.resize(length as usize, 0);
        // MPI counts are 32-bit.
        for piece in buffer.chunks_mut(1 << 30) {
            process.broadcast_into(piece);
        }
        buffer
    }

    /// Every rank's bytes at rank 0, in rank order; empty elsewhere.
    pub fn gather(&self, bytes: Vec<u8>) -> Vec<Vec<u8>> {
        let Some(m) = &self.mpi else { return vec![bytes] };
        const TAG: i32 = 1;
        if self.rank() != 0 {
            for piece in bytes.chunks((1 << 30).min(bytes.len().max(1))) {
                m.world.process_at_rank(0).send_with_tag(piece, TAG);
            }
            m.world.process_at_rank(0).send_with_tag(&[0u8; 0][..], TAG);
            return Vec::new();
        }
        let mut all = vec![bytes];
        for rank in 1..self.size() {
            let mut whole = Vec::new();
            loop {
                let (piece, _) = m.world.process_at_rank(rank as i32).receive_vec_with_tag::<u8>(TAG);
                if piece.is_empty() {
                    break;
                }
                whole.extend_from_slice(&piece);
            }
            all.push(whole);
        }
        all
    }

    /// Agreement on how a step went: the status is 0 where it went well here. Returns, on every rank, the first
    /// rank whose status is not 0 and that status.
    pub fn agree(&self, status: i32) -> Option<(u32, i32)> {
        let statuses = self.all_gather(status as u32 as u64);
        statuses.iter().position(|&s| s != 0).map(|rank| (rank as u32, statuses[rank] as u32 as i32))
    }

    /// Calls `with` with a pointer to the communicator of all ranks (null without MPI), an `MPI_Comm`.
    pub(crate) fn with_communicator<T>(&self, with: impl FnOnce(*mut std::ffi::c_void) -> T) -> T {
        match &self.mpi {
            Some(m) => {
                let mut communicator = m.world.as_raw();
                with((&raw mut communicator).cast())
            }
            None => with(std::ptr::null_mut()),
        }
    }

    /// The communicator of this node's ranks.
    pub(crate) fn node_communicator(&self) -> Option<&SimpleCommunicator> {
        self.mpi.as_ref().map(|m| &m.node)
    }

    /// Finalises MPI. Collective.
    pub fn finalize(mut self) {
        if let Some(mut m) = self.mpi.take() {
            drop(m.node);
            // SAFETY: the universe is dropped once, here; `self` is consumed.
            unsafe { ManuallyDrop::drop(&mut m.universe) };
        }
    }

    /// Ends the whole job with `status`, also where other ranks no longer answer.
    pub fn abort(&self, status: i32) -> ! {
        match &self.mpi {
            Some(m) => m.world.abort(status),
            None => std::process::exit(status),
        }
    }
}

/// Name and version of the MPI library.
pub fn mpi_library() -> String {
    mpi::environment::library_version().unwrap_or_else(|_| "unknown".into()).trim().to_string()
}

/// A rank that panics would leave the others waiting: print, then end the job.
fn abort_the_job_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        // SAFETY: MPI is initialised (this hook is installed after) and MPI_Abort may be called from any thread
        // of a process that is about to end.
        unsafe {
            mpi::ffi::MPI_Abort(mpi::ffi::RSMPI_COMM_WORLD, 4);
        }
    }));
}
