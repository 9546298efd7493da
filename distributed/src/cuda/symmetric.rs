//! The symmetric heap on GPUs: NVSHMEM's, or plain device memory for a single rank.

use super::device::{Context, is_stuck};
use super::library::Library;
use super::memory::{DeviceBuffer, Stream};
use crate::error::{Error, Result};
use crate::world::{World, agreed};
use kernels_cu::gpu::NvshmemVersion;
use nvshmem_sys::{Library as Nvshmem, UniqueId};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// NVSHMEM is initialised in this process.
static LIVE: AtomicBool = AtomicBool::new(false);

/// True if NVSHMEM was initialised and not finalised, as after a failed run.
pub(super) fn is_live() -> bool {
    LIVE.load(Ordering::Relaxed)
}

/// Bytes of the heap that NVSHMEM uses itself, and what alignment may cost.
const SLACK: u64 = 64 << 20;

/// NVSHMEM maps its heap in pieces of this size (its NVSHMEM_CUMEM_GRANULARITY).
const GRANULE: u64 = 512 << 20;

/// Alignment of the heap's part that is ours.
const ALIGN: usize = 4096;

/// How ranks write to each other's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Transport {
    /// By stores if all ranks reach each other's memory; otherwise through NVSHMEM to ranks out of reach.
    #[default]
    Auto,
    /// By stores only. A peer that cannot be reached is an error.
    P2p,
    /// Through NVSHMEM only, as between nodes.
    Nvshmem,
    /// Through the hosts, over MPI: each rank's kernel puts frames into a ring in its host's memory, and the hosts' proxies carry
    /// them.
    Host,
}

/// How NVSHMEM's ranks find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Bootstrap {
    /// With an id that rank 0 sends over MPI.
    #[default]
    UniqueId,
    /// With the MPI communicator.
    Mpi,
}

/// Memory at the same offset on every rank.
pub(crate) struct SymmetricHeap {
    base: u64,
    bases: Vec<u64>,
    backing: Backing,
}

enum Backing {
    Own(#[allow(dead_code, reason = "owns the memory that `base` names")] DeviceBuffer),
    Nvshmem {
        library: Box<Nvshmem>,
        address: NonNull<c_void>,
        /// True if the cubin contains NVSHMEM's device library.
        linked: bool,
    },
}

// SAFETY: the address is device memory, which the host never reads.
unsafe impl Send for SymmetricHeap {}

impl Transport {
    /// True if the kernel of one of `ranks` ranks puts through its host.
    pub fn puts_through_host(self, ranks: u32) -> bool {
        ranks > 1 && self == Transport::Host
    }

    /// True if the kernel of one of `ranks` ranks calls NVSHMEM's device library. `local` means that all ranks reach each other's
    /// memory. A kernel without that library is compiled as a whole, which makes it faster: in a linked kernel, ptxas cannot give
    /// the compute warps the registers of the other warps (`setmaxnreg`, its message C7504).
    pub fn puts_through_nvshmem(self, ranks: u32, local: bool) -> bool {
        ranks > 1
            && match self {
                Transport::Auto => !local,
                Transport::P2p | Transport::Host => false,
                Transport::Nvshmem => true,
            }
    }
}

/// The inputs of [`SymmetricHeap::allocate`].
pub(crate) struct HeapOptions {
    pub bytes: u64,
    pub transport: Transport,
    pub bootstrap: Bootstrap,
    /// The version of the headers and the device library, if there are any.
    pub version: Option<NvshmemVersion>,
    /// True if the cubin contains the device library. Otherwise `transport` must only use stores.
    pub linked: bool,
    /// True if all ranks are on this node and their GPUs reach each other.
    pub local: bool,
}

impl SymmetricHeap {
    /// Collective: `bytes` zeroed bytes on every rank.
    pub fn allocate(
        world: &World,
        context: &Arc<Context>,
        stream: &Stream,
        options: &HeapOptions,
    ) -> Result<SymmetricHeap> {
        if world.size() == 1 || options.transport == Transport::Host {
            let own = || {
                let own = DeviceBuffer::new(context, "the symmetric heap", options.bytes)?;
                own.fill(0, stream)?;
                stream.wait().map(|()| own)
            };
            let own = agreed(world, own())?;
            let base = own.address();
            // No other rank's memory can be reached.
            let mut bases = vec![0; world.size() as usize];
            bases[world.rank() as usize] = base;
            return Ok(SymmetricHeap { base, bases, backing: Backing::Own(own) });
        }
        let library = agreed(world, load(options))?;
        agreed(world, set_variables(options))?;
        context.make_current()?;
        let initialised = match options.bootstrap {
            Bootstrap::UniqueId => {
                let id = if world.rank() == 0 {
                    library.unique_id().map(|id| id.to_bytes().to_vec())
                } else {
                    Ok(Vec::new())
                };
                let bytes = agreed(world, id.map_err(Error::from))?;
                let bytes = world.broadcast(0, bytes);
                let id: Result<[u8; UniqueId::BYTES]> = bytes
                    .try_into()
                    .map_err(|_| nvshmem_error("rank 0 sent a unique id of another length".into()));
                let id = UniqueId::from_bytes(agreed(world, id)?);
                world.phase("NVSHMEM's start");
                let init = || library.init_with_unique_id(world.rank(), world.size(), &id);
                world.call(init).map_err(Error::from)
            }
            Bootstrap::Mpi => world.with_communicator(|communicator| {
                world.phase("NVSHMEM's start");
                // SAFETY: MPI is initialised (the world has several ranks), and the pointer is valid for the call.
                let init = || unsafe { library.init_with_mpi_communicator(communicator) };
                world.call(init).map_err(Error::from)
            }),
        };
        if initialised.is_ok() {
            LIVE.store(true, Ordering::Relaxed);
        }
        agreed(world, initialised)?;
        agreed(world, check_ranks(&library, world))?;
        // NVSHMEM may have changed the current context.
        context.make_current()?;
        world.phase("the symmetric heap");
        let address = world.call(|| library.align(ALIGN, options.bytes.max(1) as usize)).map_err(Error::from);
        let address = agreed(world, address)?;
        let base = address.as_ptr() as u64;
        // SAFETY: this rank's own part of the heap; no peer writes to it before the agreement below.
        let zeroed = unsafe { stream.memset(base, 0, options.bytes) }.and_then(|()| stream.wait());
        agreed(world, zeroed)?;
        let bases = agreed(world, peer_bases(&library, world, address, options.transport))?;
        let library = Box::new(library);
        let backing = Backing::Nvshmem { library, address, linked: options.linked };
        Ok(SymmetricHeap { base, bases, backing })
    }

    /// This rank's part.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Each rank's part as seen from this rank; 0 if stores cannot reach it or must not be used.
    pub fn bases(&self) -> &[u64] {
        &self.bases
    }

    /// NVSHMEM, if it is in use.
    pub fn nvshmem(&self) -> Option<&Nvshmem> {
        match &self.backing {
            Backing::Own(_) => None,
            Backing::Nvshmem { library, .. } => Some(library),
        }
    }

    /// NVSHMEM, if the cubin contains its device library.
    pub fn linked(&self) -> Option<&Nvshmem> {
        match &self.backing {
            Backing::Nvshmem { library, linked: true, .. } => Some(library),
            _ => None,
        }
    }

    /// Collective: frees the memory and ends NVSHMEM. Not in `Drop`, because a rank that unwinds alone would wait for the others.
    pub fn free(self, world: &World, code: &Library) -> Result<()> {
        let Backing::Nvshmem { library, address, linked } = self.backing else { return Ok(()) };
        if is_stuck() {
            return Ok(());
        }
        let begin = Instant::now();
        if linked {
            // SAFETY: the library was given to culibrary_init, and no kernel of it runs any more.
            let ended = world.call(|| unsafe { library.culibrary_finalize(code.raw().cast()) });
            let ended = ended.map_err(Error::from);
            agreed(world, ended)?;
        }
        // SAFETY: allocated above and freed once; every rank's kernel has ended (the caller agreed on it).
        agreed(world, world.call(|| unsafe { library.free(address) }).map_err(Error::from))?;
        world.phase("NVSHMEM's end");
        // SAFETY: no symmetric memory is left, and no kernel runs.
        world.call(|| unsafe { library.finalize() })?;
        tracing::info!("symmetric heap given back, NVSHMEM ended: {:.2} s", begin.elapsed().as_secs_f64());
        LIVE.store(false, Ordering::Relaxed);
        Ok(())
    }
}

/// Opens the host library and compares its version with that of the headers and the device library.
fn load(options: &HeapOptions) -> Result<Nvshmem> {
    let library = Nvshmem::load()?;
    let host = library.version();
    match options.version {
        Some(device) if (device.major, device.minor) == (host.major, host.minor) => Ok(library),
        Some(device) => Err(Error::NvshmemVersions {
            host: host.to_string(),
            path: library.path().display().to_string(),
            device: device.to_string(),
        }),
        None => Ok(library),
    }
}

/// Total number of bytes for a heap of `bytes`.
pub(crate) fn heap_bytes(bytes: u64) -> u64 {
    (bytes + SLACK).next_multiple_of(GRANULE)
}

/// Sets the environment variables that NVSHMEM reads, unless the user has set them.
fn set_variables(options: &HeapOptions) -> Result<()> {
    let needed = heap_bytes(options.bytes);
    let size = std::env::var("NVSHMEM_SYMMETRIC_SIZE").ok();
    if let Some(text) = &size
        && let Some(given) = parse_size(text)
        && given < options.bytes
    {
        return Err(Error::SymmetricSize { given: text.clone(), needed });
    }
    let mut wanted = vec![
        ("NVSHMEM_DISABLE_NVLS", "1".to_string()),
        // It only serves NVSHMEM's host collectives, which are not used here, and starting it takes most of a second.
        ("NVSHMEM_DISABLE_NCCL", "1".to_string()),
    ];
    if size.is_none() {
        wanted.push(("NVSHMEM_SYMMETRIC_SIZE", needed.to_string()));
    }
    if options.local {
        // All ranks can be reached, so NVSHMEM need not search for a network between nodes.
        wanted.push(("NVSHMEM_REMOTE_TRANSPORT", "none".to_string()));
    }
    for (name, value) in wanted {
        if std::env::var_os(name).is_none() {
            // SAFETY: threads of MPI and the driver may exist, but none of them reads the environment after its
            // start; ours are not running.
            unsafe { std::env::set_var(name, value) };
        }
    }
    Ok(())
}

/// A size in NVSHMEM's notation: a number followed by K, M, G or T. A negative number gives 0.
fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    if let Some(number) = text.strip_prefix('-') {
        return parse_size(number).map(|_| 0);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().ok()?;
    let shift = match text[digits..].trim().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" => 10,
        "M" | "MB" => 20,
        "G" | "GB" => 30,
        "T" | "TB" => 40,
        _ => return None,
    };
    Some((number * (1u64 << shift) as f64) as u64)
}

fn check_ranks(library: &Nvshmem, world: &World) -> Result<()> {
    let (pe, pes) = (library.my_pe()?, library.n_pes()?);
    if (pe, pes) != (world.rank() as i32, world.size() as i32) {
        let problem = format!("rank {} of {} is PE {pe} of {pes}", world.rank(), world.size());
        return Err(nvshmem_error(problem));
    }
    Ok(())
}

fn nvshmem_error(problem: String) -> Error {
    Error::Nvshmem { problem, help: None }
}

/// Each rank's heap as seen from this rank.
fn peer_bases(
    library: &Nvshmem,
    world: &World,
    own: NonNull<c_void>,
    transport: Transport,
) -> Result<Vec<u64>> {
    (0..world.size())
        .map(|peer| {
            if peer == world.rank() {
                return Ok(own.as_ptr() as u64);
            }
            if transport == Transport::Nvshmem {
                return Ok(0);
            }
            let address = library.peer_address(own, peer as i32)?;
            match address {
                None if transport == Transport::P2p => Err(Error::PeerAccess { rank: world.rank(), peer }),
                address => Ok(address.map_or(0, |a| a.as_ptr() as u64)),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_nvshmem_writes_them() {
        assert_eq!(parse_size("1073741824"), Some(1 << 30));
        assert_eq!(parse_size("1.5G"), Some(3 << 29));
        assert_eq!(parse_size(" 64m "), Some(64 << 20));
        assert_eq!(parse_size("-5"), Some(0));
        assert_eq!(parse_size("many"), None);
    }

    #[test]
    fn the_heap_has_room_for_nvshmems_own() {
        for bytes in [0, 1, GRANULE - SLACK, GRANULE, 5 << 30] {
            let whole = heap_bytes(bytes);
            assert!(whole >= bytes + SLACK && whole.is_multiple_of(GRANULE) && whole < bytes + 2 * GRANULE);
        }
    }
}
