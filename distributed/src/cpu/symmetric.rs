//! The symmetric heap of the CPU target: an MPI shared-memory window within each node. Ranks of other nodes write to it through the
//! proxies.

use crate::error::{Error, Result};
use crate::memory::HugeBuffer;
use crate::world::{World, agreed};
use mpi::ffi;
use mpi::traits::*;

/// Space in the file system that MPI needs besides the heaps, approximately at most.
const MPI_SHARE: u64 = 1 << 20;

/// Memory at the same offset on every rank, reachable by stores from every rank of the node.
pub struct SymmetricHeap {
    bases: Vec<*mut u8>,
    bytes: usize,
    rank: usize,
    backing: Backing,
}

enum Backing {
    Window(ffi::MPI_Win),
    // A single rank without MPI.
    Own(#[allow(dead_code, reason = "owns the mapping that `bases` points into")] HugeBuffer),
}

impl SymmetricHeap {
    /// Collective: `bytes` zeroed bytes on every rank (the same number everywhere).
    pub fn allocate(world: &World, bytes: usize) -> Result<Self> {
        let rank = world.rank() as usize;
        let Some(node) = world.node_communicator() else {
            let own = HugeBuffer::new(0, "the symmetric heap", bytes)?;
            return Ok(SymmetricHeap { bases: vec![own.as_ptr()], bytes, rank, backing: Backing::Own(own) });
        };
        agreed(world, check(world, bytes as u64))?;
        let mut window = std::mem::MaybeUninit::uninit();
        let mut own: *mut u8 = std::ptr::null_mut();
        world.phase("the shared window");
        // SAFETY: a collective call on the node's communicator with valid out-pointers; the window is freed in `free`. From now on,
        // errors of this communicator are returned. By default, MPI would end the job.
        let code = world.call(|| unsafe {
            ffi::MPI_Comm_set_errhandler(node.as_raw(), ffi::RSMPI_ERRORS_RETURN);
            ffi::MPI_Win_allocate_shared(
                bytes as ffi::MPI_Aint,
                1,
                ffi::RSMPI_INFO_NULL,
                node.as_raw(),
                (&raw mut own).cast(),
                window.as_mut_ptr(),
            )
        });
        agreed(world, if code == 0 { Ok(()) } else { Err(Error::SharedWindow { reason: describe(code) }) })?;
        // SAFETY: set by the call above, which succeeded.
        let window = unsafe { window.assume_init() };
        let bases = (0..world.size())
            .map(|peer| {
                if !world.nodes().share(peer, world.rank()) {
                    return std::ptr::null_mut();
                }
                // The ranks of a node are in the job's order.
                let of_node = (0..peer).filter(|&other| world.nodes().share(other, peer)).count();
                let (mut size, mut unit, mut base) = (0 as ffi::MPI_Aint, 0, std::ptr::null_mut::<u8>());
                // SAFETY: a local query of a live shared window, with valid out-pointers.
                unsafe {
                    ffi::MPI_Win_shared_query(
                        window,
                        of_node as i32,
                        &mut size,
                        &mut unit,
                        (&raw mut base).cast(),
                    );
                }
                base
            })
            .collect::<Vec<_>>();
        // SAFETY: this rank's own `bytes` bytes; nobody accesses them before the barrier below.
        unsafe { std::ptr::write_bytes(bases[rank], 0, bytes) };
        world.barrier();
        Ok(SymmetricHeap { bases, bytes, rank, backing: Backing::Window(window) })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Base address of each rank's heap, as seen from this process; null on other nodes.
    pub fn bases(&self) -> &[*mut u8] {
        &self.bases
    }

    /// This rank's heap.
    pub fn own(&self) -> *mut u8 {
        self.bases[self.rank]
    }

    /// Collective: frees the memory. Not in `Drop`, because a rank that unwinds alone would wait for the others.
    pub fn free(self, world: &World) {
        if let Backing::Window(mut window) = self.backing {
            // SAFETY: the window is live and freed once; no worker runs any more.
            world.call(|| unsafe { ffi::MPI_Win_free(&mut window) });
        }
    }
}

/// Refuses a heap for which there is no room. A full file system would end the job inside MPI, or with a bus error at the first
/// store.
fn check(world: &World, bytes: u64) -> Result<()> {
    let ranks = world.node_size();
    if let Some(free) = shared_memory_free()
        && bytes.saturating_mul(u64::from(ranks)).saturating_add(MPI_SHARE) > free
    {
        return Err(Error::SharedMemory { bytes, ranks, free });
    }
    let all = bytes.saturating_mul(u64::from(ranks));
    address_space(all as usize).map_err(|error| Error::OutOfMemory {
        rank: world.rank(),
        what: "the symmetric heaps of all ranks of this node".into(),
        bytes: all,
        reason: error.to_string(),
    })
}

/// MPI's text for an error.
fn describe(code: i32) -> String {
    // Longer than any MPI's MPI_MAX_ERROR_STRING.
    let mut text = [0u8; 4096];
    let mut length = 0;
    // SAFETY: the buffer has room for every message, and the length is set.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    String::from_utf8_lossy(&text[..(length.max(0) as usize).min(text.len())]).into_owned()
}

/// Checks that this process has room for a mapping of `bytes` bytes.
fn address_space(bytes: usize) -> std::io::Result<()> {
    // SAFETY: a new mapping that nothing refers to; it is removed at once.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let start = libc::mmap(std::ptr::null_mut(), bytes.max(1), libc::PROT_NONE, flags, -1, 0);
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        libc::munmap(start, bytes.max(1));
    }
    Ok(())
}

/// Number of free bytes in the file system where MPI creates shared windows, if known.
pub fn shared_memory_free() -> Option<u64> {
    let status = rustix::fs::statvfs("/dev/shm").ok()?;
    Some(status.f_bavail.saturating_mul(status.f_frsize))
}
