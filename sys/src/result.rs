//! One method of [`Library`] for each call of the host API, with the library's state and the arguments
//! checked first, since NVSHMEM itself ends the process on some mistakes.
//!
//! Every PE must make the *collective* calls in the same order with the same arguments. If a peer never makes
//! one, the others wait forever. Methods that take or invalidate addresses are `unsafe`.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use crate::bootstrap::{UniqueId, init_attributes};
use crate::error::Error;
use crate::library::{Calls, Library};
use crate::sys;
use crate::types::{InitStatus, Team};

/// `Ok` for a zero status.
pub(crate) fn check(function: &'static str, status: c_int) -> Result<(), Error> {
    if status == 0 { Ok(()) } else { Err(Error::Call { function, status }) }
}

fn refuse(function: &'static str, argument: &'static str, problem: impl Into<String>) -> Error {
    Error::Argument { function, argument, problem: problem.into() }
}

/// Life cycle.
impl Library {
    /// A token for [`Library::init_with_unique_id`]. Rank 0 makes it; no other call is needed before.
    ///
    /// # Errors
    /// [`Error::Call`] if no network interface can be used for the bootstrap.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = UniqueId::empty();
        let calls = self.calls();
        // SAFETY: `id` is a valid token of the version that its version field says.
        let status = unsafe { calls.nvshmemx_get_uniqueid(&mut id.0) };
        check("nvshmemx_get_uniqueid", status)?;
        Ok(id)
    }

    /// Initialises NVSHMEM among `world` ranks that hold the same token. Collective. A CUDA context must be
    /// current on this thread.
    ///
    /// # Errors
    /// [`Error::AlreadyInitialized`], [`Error::Argument`] if `rank` is not below `world`, [`Error::Call`], or
    /// [`Error::Incomplete`].
    pub fn init_with_unique_id(&self, rank: u32, world: u32, id: &UniqueId) -> Result<(), Error> {
        const SET: &str = "nvshmemx_set_attr_uniqueid_args";
        let calls = self.not_initialized()?;
        let (my_rank, ranks) = match (c_int::try_from(rank), c_int::try_from(world)) {
            (Ok(my_rank), Ok(ranks)) if my_rank < ranks => (my_rank, ranks),
            _ => return Err(refuse(SET, "rank", format!("is {rank} of {world}"))),
        };
        let mut attributes = init_attributes();
        // SAFETY: both structs carry their version; the attributes keep a pointer to `id`, which outlives
        // the initialisation below.
        let status = unsafe { calls.nvshmemx_set_attr_uniqueid_args(my_rank, ranks, &id.0, &mut attributes) };
        check(SET, status)?;
        init(&calls, sys::NVSHMEMX_INIT_WITH_UNIQUEID, &mut attributes)
    }

    /// Initialises NVSHMEM among the ranks of an MPI communicator, through NVSHMEM's MPI plug-in (which
    /// needs the libmpi that the communicator comes from). Collective. A CUDA context must be current.
    ///
    /// # Safety
    /// `communicator` points to a valid `MPI_Comm` of an initialised MPI, for the length of the call.
    ///
    /// # Errors
    /// [`Error::AlreadyInitialized`], [`Error::Argument`] for a null pointer, [`Error::Call`], or
    /// [`Error::Incomplete`].
    pub unsafe fn init_with_mpi_communicator(&self, communicator: *mut c_void) -> Result<(), Error> {
        const INIT: &str = "nvshmemx_hostlib_init_attr";
        let calls = self.not_initialized()?;
        if communicator.is_null() {
            return Err(refuse(INIT, "mpi_comm", "is null"));
        }
        let mut attributes = init_attributes();
        attributes.mpi_comm = communicator;
        init(&calls, sys::NVSHMEMX_INIT_WITH_MPI_COMM, &mut attributes)
    }

    /// Ends NVSHMEM in this process. Collective.
    ///
    /// # Safety
    /// No symmetric memory is used after it by this process, its kernels or its peers, and no kernel that
    /// uses NVSHMEM is running.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub unsafe fn finalize(&self) -> Result<(), Error> {
        let calls = self.ready("nvshmemx_hostlib_finalize")?;
        // SAFETY: the caller's promise.
        unsafe { calls.nvshmemx_hostlib_finalize() };
        Ok(())
    }

    /// How far NVSHMEM is initialised in this process.
    #[must_use]
    pub fn status(&self) -> InitStatus {
        status(&self.calls())
    }

    /// The OpenSHMEM specification that the library follows, major and minor.
    #[must_use]
    pub fn specification(&self) -> (i32, i32) {
        let (mut major, mut minor) = (0, 0);
        let calls = self.calls();
        // SAFETY: both pointers are valid; the call needs no initialisation.
        unsafe { calls.nvshmem_info_get_version(&mut major, &mut minor) };
        (major, minor)
    }

    /// The functions, if NVSHMEM is initialised. It stays initialised until they are dropped.
    pub(crate) fn ready(&self, function: &'static str) -> Result<Calls<'_>, Error> {
        let calls = self.calls();
        let status = status(&calls);
        if status.is_ready() { Ok(calls) } else { Err(Error::NotInitialized { function, status }) }
    }

    fn not_initialized(&self) -> Result<Calls<'_>, Error> {
        let calls = self.calls();
        let status = status(&calls);
        if status.is_ready() { Err(Error::AlreadyInitialized { status }) } else { Ok(calls) }
    }
}

fn status(calls: &Calls<'_>) -> InitStatus {
    // SAFETY: reads the library's own state, in any state.
    InitStatus::from_raw(unsafe { calls.nvshmemx_init_status() })
}

fn init(
    calls: &Calls<'_>,
    flag: sys::flags,
    attributes: &mut sys::nvshmemx_init_attr_t,
) -> Result<(), Error> {
    // SAFETY: the attributes are complete for `flag`, and what they point to is alive in the callers.
    let result = unsafe { calls.nvshmemx_hostlib_init_attr(flag.cast_unsigned(), attributes) };
    check("nvshmemx_hostlib_init_attr", result)?;
    // It also returns 0 when only the bootstrap came up.
    match status(calls) {
        status if status.is_ready() => Ok(()),
        status => Err(Error::Incomplete { status }),
    }
}

/// Processing elements and teams.
impl Library {
    /// This process's PE, from 0.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub fn my_pe(&self) -> Result<i32, Error> {
        let calls = self.ready("nvshmem_my_pe")?;
        // SAFETY: NVSHMEM is initialised.
        Ok(unsafe { calls.nvshmem_my_pe() })
    }

    /// The number of PEs.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub fn n_pes(&self) -> Result<i32, Error> {
        let calls = self.ready("nvshmem_n_pes")?;
        // SAFETY: NVSHMEM is initialised.
        Ok(unsafe { calls.nvshmem_n_pes() })
    }

    /// This process's PE within `team`.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], or [`Error::Argument`] if this PE is not in the team.
    pub fn team_my_pe(&self, team: Team) -> Result<i32, Error> {
        let calls = self.ready("nvshmem_team_my_pe")?;
        // SAFETY: NVSHMEM is initialised; an invalid team gives -1.
        member("nvshmem_team_my_pe", unsafe { calls.nvshmem_team_my_pe(team.0) })
    }

    /// The number of PEs of `team`.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], or [`Error::Argument`] if there is no such team.
    pub fn team_n_pes(&self, team: Team) -> Result<i32, Error> {
        let calls = self.ready("nvshmem_team_n_pes")?;
        // SAFETY: NVSHMEM is initialised; an invalid team gives -1.
        member("nvshmem_team_n_pes", unsafe { calls.nvshmem_team_n_pes(team.0) })
    }

    /// The number in `to` of the PE that has number `pe` in `from`; `None` if that PE is not in `to`.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub fn team_translate_pe(&self, from: Team, pe: i32, to: Team) -> Result<Option<i32>, Error> {
        let calls = self.ready("nvshmem_team_translate_pe")?;
        // SAFETY: NVSHMEM is initialised; what does not exist gives -1.
        let translated = unsafe { calls.nvshmem_team_translate_pe(from.0, pe, to.0) };
        Ok((translated >= 0).then_some(translated))
    }

    /// [`Library::ready`], if there is a PE `pe`.
    fn ready_for(&self, function: &'static str, pe: i32) -> Result<Calls<'_>, Error> {
        let calls = self.ready("nvshmem_n_pes")?;
        // SAFETY: NVSHMEM is initialised.
        let pes = unsafe { calls.nvshmem_n_pes() };
        if (0..pes).contains(&pe) {
            Ok(calls)
        } else {
            Err(refuse(function, "pe", format!("is {pe}, but there are {pes}")))
        }
    }
}

fn member(function: &'static str, pe: c_int) -> Result<i32, Error> {
    if pe < 0 { Err(refuse(function, "team", "does not exist or does not hold this PE")) } else { Ok(pe) }
}

/// The symmetric heap: memory at the same offset on every PE, in device memory.
impl Library {
    /// Allocates `bytes` (at least 1) of symmetric memory. Collective, waits for all PEs.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Argument`] for no bytes, [`Error::OutOfSymmetricMemory`].
    pub fn malloc(&self, bytes: usize) -> Result<NonNull<c_void>, Error> {
        self.allocate("nvshmem_malloc", bytes, |functions| {
            // SAFETY: NVSHMEM is initialised and the size is not zero.
            unsafe { functions.nvshmem_malloc(bytes) }
        })
    }

    /// Allocates `count` x `size` bytes of zeroed symmetric memory. Collective, waits for all PEs.
    ///
    /// # Errors
    /// As [`Library::malloc`]; [`Error::Argument`] also if the product overflows.
    pub fn calloc(&self, count: usize, size: usize) -> Result<NonNull<c_void>, Error> {
        const FUNCTION: &str = "nvshmem_calloc";
        let bytes = count
            .checked_mul(size)
            .ok_or_else(|| refuse(FUNCTION, "size", format!("overflows: {count} x {size} bytes")))?;
        self.allocate(FUNCTION, bytes, |functions| {
            // SAFETY: NVSHMEM is initialised; the product neither overflows nor is zero.
            unsafe { functions.nvshmem_calloc(count, size) }
        })
    }

    /// Allocates `bytes` of symmetric memory at a multiple of `alignment`, a power of two and at least the
    /// size of a pointer. Collective, waits for all PEs.
    ///
    /// # Errors
    /// As [`Library::malloc`]; [`Error::Argument`] also for the alignment.
    pub fn align(&self, alignment: usize, bytes: usize) -> Result<NonNull<c_void>, Error> {
        const FUNCTION: &str = "nvshmem_align";
        if !alignment.is_power_of_two() || alignment < size_of::<usize>() {
            return Err(refuse(
                FUNCTION,
                "alignment",
                format!("is {alignment}, not a power of two from 8 on"),
            ));
        }
        self.allocate(FUNCTION, bytes, |functions| {
            // SAFETY: NVSHMEM is initialised; alignment and size are as the call wants them.
            unsafe { functions.nvshmem_align(alignment, bytes) }
        })
    }

    fn allocate(
        &self,
        function: &'static str,
        bytes: usize,
        call: impl FnOnce(&sys::Functions) -> *mut c_void,
    ) -> Result<NonNull<c_void>, Error> {
        let calls = self.ready(function)?;
        if bytes == 0 {
            return Err(refuse(function, "size", "is zero"));
        }
        NonNull::new(call(&calls)).ok_or(Error::OutOfSymmetricMemory { function, bytes })
    }

    /// Frees symmetric memory. Collective, waits for all PEs.
    ///
    /// # Safety
    /// `address` came from [`Library::malloc`], [`Library::calloc`] or [`Library::align`], was not freed,
    /// and neither this PE nor a peer uses it any more.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub unsafe fn free(&self, address: NonNull<c_void>) -> Result<(), Error> {
        let calls = self.ready("nvshmem_free")?;
        // SAFETY: the caller's promise.
        unsafe { calls.nvshmem_free(address.as_ptr()) };
        Ok(())
    }

    /// The address at which plain loads and stores of this PE's GPU reach the memory that `address` names on `pe`.
    /// `None` if they cannot reach it, or if `address` is not symmetric.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Argument`] if there is no such PE.
    pub fn peer_address(&self, address: NonNull<c_void>, pe: i32) -> Result<Option<NonNull<c_void>>, Error> {
        let calls = self.ready_for("nvshmem_ptr", pe)?;
        // SAFETY: the address is looked up, not read.
        Ok(NonNull::new(unsafe { calls.nvshmem_ptr(address.as_ptr(), pe) }))
    }

    /// Makes local memory usable as the local side of transfers between nodes.
    ///
    /// # Safety
    /// `address` holds `bytes` bytes until [`Library::unregister_buffer`].
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Argument`] for no bytes, [`Error::Call`].
    pub unsafe fn register_buffer(&self, address: NonNull<c_void>, bytes: usize) -> Result<(), Error> {
        const FUNCTION: &str = "nvshmemx_buffer_register";
        let calls = self.ready(FUNCTION)?;
        if bytes == 0 {
            return Err(refuse(FUNCTION, "length", "is zero"));
        }
        // SAFETY: the caller's promise.
        check(FUNCTION, unsafe { calls.nvshmemx_buffer_register(address.as_ptr(), bytes) })
    }

    /// Undoes [`Library::register_buffer`].
    ///
    /// # Safety
    /// No transfer from or to the memory is under way.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Call`].
    pub unsafe fn unregister_buffer(&self, address: NonNull<c_void>) -> Result<(), Error> {
        const FUNCTION: &str = "nvshmemx_buffer_unregister";
        let calls = self.ready(FUNCTION)?;
        // SAFETY: the caller's promise.
        check(FUNCTION, unsafe { calls.nvshmemx_buffer_unregister(address.as_ptr()) })
    }

    /// Makes device memory of this PE symmetric, and gives the address to use for it. Collective.
    ///
    /// # Safety
    /// `address` holds `bytes` bytes of device memory, allocated as NVSHMEM's documentation of
    /// `nvshmemx_buffer_register_symmetric` asks, until [`Library::unregister_symmetric`].
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Argument`] for no bytes, [`Error::OutOfSymmetricMemory`] if it is
    /// refused.
    pub unsafe fn register_symmetric(
        &self,
        address: NonNull<c_void>,
        bytes: usize,
    ) -> Result<NonNull<c_void>, Error> {
        self.allocate("nvshmemx_buffer_register_symmetric", bytes, |functions| {
            // SAFETY: the caller's promise; no flag is defined.
            unsafe { functions.nvshmemx_buffer_register_symmetric(address.as_ptr(), bytes, 0) }
        })
    }

    /// Undoes [`Library::register_symmetric`], whose result `address` is. Collective.
    ///
    /// # Safety
    /// Neither this PE nor a peer uses the memory any more, and `bytes` is what was registered.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Call`].
    pub unsafe fn unregister_symmetric(&self, address: NonNull<c_void>, bytes: usize) -> Result<(), Error> {
        const FUNCTION: &str = "nvshmemx_buffer_unregister_symmetric";
        let calls = self.ready(FUNCTION)?;
        // SAFETY: the caller's promise.
        let status = unsafe { calls.nvshmemx_buffer_unregister_symmetric(address.as_ptr(), bytes) };
        check(FUNCTION, status)
    }
}

/// Ordering and transfers by the host, for set-up, shut-down and tests.
impl Library {
    /// Completes all transfers of all PEs and waits for all PEs. Collective.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub fn barrier_all(&self) -> Result<(), Error> {
        let calls = self.ready("nvshmem_barrier_all")?;
        // SAFETY: NVSHMEM is initialised.
        unsafe { calls.nvshmem_barrier_all() };
        Ok(())
    }

    /// Waits for all PEs, without completing transfers. Collective.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub fn sync_all(&self) -> Result<(), Error> {
        let calls = self.ready("nvshmem_sync_all")?;
        // SAFETY: NVSHMEM is initialised.
        unsafe { calls.nvshmem_sync_all() };
        Ok(())
    }

    /// Completes this PE's transfers.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub fn quiet(&self) -> Result<(), Error> {
        let calls = self.ready("nvshmem_quiet")?;
        // SAFETY: NVSHMEM is initialised.
        unsafe { calls.nvshmem_quiet() };
        Ok(())
    }

    /// Writes `bytes` bytes at local `source` to the memory that `destination` names on `pe`. Returns when
    /// `source` can be reused; [`Library::quiet`] completes it.
    ///
    /// # Safety
    /// `destination` is symmetric and `source` readable memory of `bytes` bytes, and no one else writes or
    /// reads the destination at the same time.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Argument`] if there is no such PE.
    pub unsafe fn put(
        &self,
        destination: NonNull<c_void>,
        source: *const c_void,
        bytes: usize,
        pe: i32,
    ) -> Result<(), Error> {
        let calls = self.ready_for("nvshmem_putmem", pe)?;
        // SAFETY: the caller's promise.
        unsafe { calls.nvshmem_putmem(destination.as_ptr(), source, bytes, pe) };
        Ok(())
    }

    /// Reads `bytes` bytes of the memory that `source` names on `pe` into local `destination`.
    ///
    /// # Safety
    /// `source` is symmetric and `destination` writable memory of `bytes` bytes, and no one writes the
    /// source at the same time.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Argument`] if there is no such PE.
    pub unsafe fn get(
        &self,
        destination: *mut c_void,
        source: NonNull<c_void>,
        bytes: usize,
        pe: i32,
    ) -> Result<(), Error> {
        let calls = self.ready_for("nvshmem_getmem", pe)?;
        // SAFETY: the caller's promise.
        unsafe { calls.nvshmem_getmem(destination, source.as_ptr(), bytes, pe) };
        Ok(())
    }

    /// [`Library::barrier_all`] as work on a CUDA stream. Collective.
    ///
    /// # Safety
    /// `stream` is a stream of the context that NVSHMEM was initialised with, or null.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub unsafe fn barrier_all_on_stream(&self, stream: sys::cudaStream_t) -> Result<(), Error> {
        let calls = self.ready("nvshmemx_barrier_all_on_stream")?;
        // SAFETY: the caller's promise.
        unsafe { calls.nvshmemx_barrier_all_on_stream(stream) };
        Ok(())
    }
}
