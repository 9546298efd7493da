//! The functions of libcuda that the runtime calls, implemented by the emulator: one device, whose memory is the host's.
//! Copies and fills are done immediately. A cooperative kernel runs on its own thread until it ends.

use crate::{Allocations, Grid, Launch, Program};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

const SUCCESS: c_int = 0;
const INVALID: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NO_BINARY: c_int = 209;
const NOT_FOUND: c_int = 500;
const NOT_READY: c_int = 600;
const LAUNCH_FAILED: c_int = 719;

/// Header before the PTX, in a file that the runtime takes for a cubin (see `scripts/emulate.sh`).
const MAGIC: &[u8] = b"\x7fELFmpk-ptx\n";

struct State {
    /// Device memory, and host memory that the device can access: layout by address.
    memory: HashMap<u64, Layout>,
    /// Running kernels, by stream.
    running: HashMap<usize, JoinHandle<Result<(), String>>>,
    /// The error of a stream, or of the last call.
    failed: HashMap<usize, String>,
}

static ALLOCATIONS: LazyLock<Arc<Allocations>> = LazyLock::new(Arc::default);
static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
    Mutex::new(State { memory: HashMap::new(), running: HashMap::new(), failed: HashMap::new() })
});
static NEXT_STREAM: AtomicUsize = AtomicUsize::new(1);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A setting from the environment.
fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

/// Prints the error and returns its code.
fn fail(error: c_int, text: &str) -> c_int {
    eprintln!("emulator: {text}");
    state().failed.insert(0, text.to_string());
    error
}

/// Writes a result.
///
/// # Safety
/// `to` is NULL or writable.
unsafe fn give<T>(to: *mut T, value: T) -> c_int {
    if to.is_null() {
        return INVALID;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(value) };
    SUCCESS
}

struct Kernel {
    program: Arc<Program>,
    name: String,
}

fn allocate(bytes: usize, align: usize, fill: u8) -> Option<u64> {
    let layout = Layout::from_size_align(bytes.max(1), align).ok()?;
    // SAFETY: the size is not 0.
    let start = unsafe { alloc(layout) };
    if start.is_null() {
        return None;
    }
    // SAFETY: just allocated.
    unsafe { start.write_bytes(fill, layout.size()) };
    state().memory.insert(start as u64, layout);
    ALLOCATIONS.insert(start as u64, bytes as u64);
    Some(start as u64)
}

fn free(address: u64) -> c_int {
    let Some(layout) = state().memory.remove(&address) else { return INVALID };
    ALLOCATIONS.remove(address);
    // SAFETY: allocated with this layout, and removed from the table just now.
    unsafe { dealloc(address as *mut u8, layout) };
    SUCCESS
}

fn holds(address: u64, bytes: usize) -> bool {
    bytes == 0 || ALLOCATIONS.holding(address, bytes as u64).is_some()
}

/// Status of a stream: whether its kernel is still running. With `wait`, it first waits for the kernel.
fn stream(stream: usize, wait: bool) -> c_int {
    let handle = {
        let mut state = state();
        if state.failed.contains_key(&stream) {
            return LAUNCH_FAILED;
        }
        match state.running.get(&stream) {
            None => return SUCCESS,
            Some(handle) if !wait && !handle.is_finished() => return NOT_READY,
            Some(_) => state.running.remove(&stream),
        }
    };
    let result = handle
        .map_or(Ok(()), |handle| handle.join().unwrap_or_else(|_| Err("the emulator failed".to_string())));
    match result {
        Ok(()) => SUCCESS,
        Err(problem) => {
            state().failed.insert(stream, problem.clone());
            fail(LAUNCH_FAILED, &problem)
        }
    }
}

/// Prepares a launch.
///
/// # Safety
/// `kernel` comes from `cuLibraryGetKernel`, and `arguments` has a pointer to each of its arguments.
unsafe fn prepare(kernel: *mut c_void, grid: Grid, arguments: *mut *mut c_void) -> Result<Launch, String> {
    // SAFETY: guaranteed by the caller; kernels are never freed.
    let kernel = unsafe { &*kernel.cast::<Kernel>() };
    let entry = kernel.program.entries.get(&kernel.name).ok_or("no such kernel")?;
    let bytes = entry.parameters.iter().enumerate().map(|(index, &(_, bytes))| {
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts((*arguments.add(index)).cast::<u8>(), bytes as usize) }.to_vec()
    });
    let seed = setting("MPK_EMULATOR_SEED", 1);
    Launch::new(kernel.program.clone(), &kernel.name, grid, bytes.collect(), ALLOCATIONS.clone(), seed)
}

/// Runs a launch to its end. With MPK_EMULATOR_VERBOSE=1 it prints the time that this took.
fn run(mut launch: Launch) -> Result<(), String> {
    let began = Instant::now();
    let result = launch.run(&|| false);
    if setting("MPK_EMULATOR_VERBOSE", 0) != 0 {
        let (seconds, count) = (began.elapsed().as_secs_f64(), launch.executed() as f64 / 1e6);
        eprintln!("emulator: {count:.1} million warp instructions in {seconds:.2} s");
    }
    result
}

macro_rules! driver {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As for the CUDA driver's function of this name.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int $body
        )*
    };
}

driver! {
    /// Nothing to do.
    fn cuInit(_flags: c_uint) { SUCCESS }
    /// CUDA 13.0.
    fn cuDriverGetVersion(version: *mut c_int) {
        // SAFETY: guaranteed by the caller.
        unsafe { give(version, 13_000) }
    }
    /// One device.
    fn cuDeviceGetCount(count: *mut c_int) {
        // SAFETY: guaranteed by the caller.
        unsafe { give(count, 1) }
    }
    /// The only device.
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        // SAFETY: guaranteed by the caller.
        if ordinal == 0 { unsafe { give(device, 0) } } else { 101 }
    }
    /// A name in the hardware table, so that graphs are those of a real device.
    fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) {
        let text = c"NVIDIA H200 (emulated)".to_bytes_with_nul();
        if (length as usize) < text.len() {
            return INVALID;
        }
        // SAFETY: guaranteed by the caller: `length` bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len()) };
        SUCCESS
    }
    /// An arbitrary id.
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _device: c_int) {
        // SAFETY: guaranteed by the caller.
        unsafe { give(uuid, *b"emulated device\0") }
    }
    /// MPK_EMULATOR_MEMORY, or 8 GB.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) {
        // SAFETY: guaranteed by the caller.
        unsafe { give(bytes, setting("MPK_EMULATOR_MEMORY", 8 << 30) as usize) }
    }
    /// A small Hopper GPU with MPK_EMULATOR_SMS SMs, or 4.
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        let number = match attribute {
            75 => 9,
            76 => 0,
            16 => setting("MPK_EMULATOR_SMS", 4) as c_int,
            97 => 232_448,
            38 => 50 << 20,
            95 => 1,
            _ => 0,
        };
        // SAFETY: guaranteed by the caller.
        unsafe { give(value, number) }
    }
    /// There is no other device.
    fn cuDeviceCanAccessPeer(can: *mut c_int, _device: c_int, _peer: c_int) {
        // SAFETY: guaranteed by the caller.
        unsafe { give(can, 0) }
    }
    /// A context has no state.
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _device: c_int) {
        // SAFETY: guaranteed by the caller.
        unsafe { give(context, std::ptr::without_provenance_mut(0x1000)) }
    }
    /// Nothing to do.
    fn cuDevicePrimaryCtxRelease_v2(_device: c_int) { SUCCESS }
    /// Nothing to do.
    fn cuCtxSetCurrent(_context: *mut c_void) { SUCCESS }
    /// Device memory that is not allocated.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let all = setting("MPK_EMULATOR_MEMORY", 8 << 30);
        // SAFETY: guaranteed by the caller.
        unsafe {
            give(free, all.saturating_sub(ALLOCATIONS.total()) as usize);
            give(total, all as usize)
        }
    }
    /// Host memory, filled with a pattern.
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        let all = setting("MPK_EMULATOR_MEMORY", 8 << 30);
        if bytes as u64 > all.saturating_sub(ALLOCATIONS.total()) {
            return OUT_OF_MEMORY;
        }
        match allocate(bytes, 256, 0xA5) {
            // SAFETY: guaranteed by the caller.
            Some(start) => unsafe { give(address, start) },
            None => OUT_OF_MEMORY,
        }
    }
    /// Frees the memory.
    fn cuMemFree_v2(address: u64) { free(address) }
    /// Memory that host and device can access.
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        match allocate(bytes, 4096, 0) {
            // SAFETY: guaranteed by the caller.
            Some(start) => unsafe { give(address, start as *mut c_void) },
            None => OUT_OF_MEMORY,
        }
    }
    /// Frees the memory.
    fn cuMemFreeHost(address: *mut c_void) { free(address as u64) }
    /// Lets the kernel access this memory of the process.
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, _flags: c_uint) {
        ALLOCATIONS.insert(address as u64, bytes as u64);
        SUCCESS
    }
    /// Ends that access.
    fn cuMemHostUnregister(address: *mut c_void) {
        if ALLOCATIONS.remove(address as u64).is_none() {
            return fail(INVALID, &format!("cuMemHostUnregister of {address:p}, which is not registered"));
        }
        SUCCESS
    }
    /// The same address.
    fn cuMemHostGetDevicePointer_v2(device: *mut u64, host: *mut c_void, _flags: c_uint) {
        // SAFETY: guaranteed by the caller.
        unsafe { give(device, host as u64) }
    }
    /// Fills the memory immediately.
    fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, _stream: *mut c_void) {
        if !holds(address, bytes) {
            return fail(INVALID, &format!("cuMemsetD8Async of {bytes} bytes at {address:#x}, which are in no allocation"));
        }
        // SAFETY: inside an allocation.
        unsafe { std::ptr::write_bytes(address as *mut u8, value, bytes) };
        SUCCESS
    }
    /// Copies immediately.
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, _stream: *mut c_void) {
        if !holds(to, bytes) {
            return fail(INVALID, &format!("cuMemcpyHtoDAsync of {bytes} bytes to {to:#x}, which are in no allocation"));
        }
        // SAFETY: the target is inside an allocation; the caller guarantees the source.
        unsafe { std::ptr::copy(from.cast::<u8>(), to as *mut u8, bytes) };
        SUCCESS
    }
    /// Copies immediately.
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, _stream: *mut c_void) {
        if !holds(from, bytes) {
            return fail(INVALID, &format!("cuMemcpyDtoHAsync of {bytes} bytes from {from:#x}, which are in no allocation"));
        }
        // SAFETY: the source is inside an allocation; the caller guarantees the target.
        unsafe { std::ptr::copy(from as *const u8, to.cast::<u8>(), bytes) };
        SUCCESS
    }
    /// A stream is a number.
    fn cuStreamCreate(stream: *mut *mut c_void, _flags: c_uint) {
        let number = NEXT_STREAM.fetch_add(1, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { give(stream, std::ptr::without_provenance_mut(number)) }
    }
    /// Nothing to do.
    fn cuStreamDestroy_v2(_stream: *mut c_void) { SUCCESS }
    /// Waits for the stream's kernel.
    fn cuStreamSynchronize(number: *mut c_void) { stream(number.addr(), true) }
    /// Whether the stream's kernel has ended.
    fn cuStreamQuery(number: *mut c_void) { stream(number.addr(), false) }
    /// Loads PTX with the header of `MAGIC`.
    fn cuLibraryLoadData(
        library: *mut *mut c_void,
        code: *const c_void,
        _options: *mut c_void,
        _option_values: *mut *mut c_void,
        _number: c_uint,
        _library_options: *mut c_void,
        _library_option_values: *mut *mut c_void,
        _library_number: c_uint,
    ) {
        // SAFETY: an ELF header is longer than this, and so is what `scripts/emulate.sh` makes.
        let magic = unsafe { std::slice::from_raw_parts(code.cast::<u8>(), MAGIC.len()) };
        if magic != MAGIC {
            return fail(NO_BINARY, "a cubin of real nvcc; run the program by scripts/emulate.sh, which gives it PTX");
        }
        // SAFETY: text after the header ends in a zero byte.
        let text = unsafe { CStr::from_ptr(code.cast::<c_char>().add(MAGIC.len())) };
        match text.to_str().map_err(|e| e.to_string()).and_then(Program::new) {
            Ok(program) => {
                if setting("MPK_EMULATOR_VERBOSE", 0) != 0 {
                    program.unsupported().for_each(|text| eprintln!("emulator: not emulated: {text}"));
                }
                // SAFETY: guaranteed by the caller.
                unsafe { give(library, Arc::into_raw(Arc::new(program)).cast_mut().cast()) }
            }
            Err(problem) => fail(NO_BINARY, &problem),
        }
    }
    /// Unloads the library; kernels keep what they need.
    fn cuLibraryUnload(library: *mut c_void) {
        // SAFETY: the pointer comes from cuLibraryLoadData and is unloaded once.
        drop(unsafe { Arc::from_raw(library.cast::<Program>()) });
        SUCCESS
    }
    /// The kernel of this name.
    fn cuLibraryGetKernel(kernel: *mut *mut c_void, library: *mut c_void, name: *const c_char) {
        // SAFETY: the library comes from cuLibraryLoadData, and the name ends in a zero byte.
        let (program, name) = unsafe {
            Arc::increment_strong_count(library.cast::<Program>());
            (Arc::from_raw(library.cast::<Program>()), CStr::from_ptr(name).to_string_lossy().into_owned())
        };
        if !program.entries.contains_key(&name) {
            return NOT_FOUND;
        }
        // Leaks a few bytes per kernel for the life of the process.
        let made = Box::leak(Box::new(Kernel { program, name }));
        // SAFETY: guaranteed by the caller.
        unsafe { give(kernel, std::ptr::from_mut(made).cast()) }
    }
    /// The function is the kernel.
    fn cuKernelGetFunction(function: *mut *mut c_void, kernel: *mut c_void) {
        // SAFETY: guaranteed by the caller.
        unsafe { give(function, kernel) }
    }
    /// Accepts dynamic shared memory up to a block's limit.
    fn cuKernelSetAttribute(_attribute: c_int, value: c_int, _kernel: *mut c_void, _device: c_int) {
        if value <= 232_448 { SUCCESS } else { INVALID }
    }
    /// Nothing to do.
    fn cuFuncSetAttribute(_function: *mut c_void, _attribute: c_int, _value: c_int) { SUCCESS }
    /// Maximum threads of a block.
    fn cuFuncGetAttribute(value: *mut c_int, _attribute: c_int, _function: *mut c_void) {
        // SAFETY: guaranteed by the caller.
        unsafe { give(value, 1024) }
    }
    /// One block per SM.
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        _function: *mut c_void,
        _threads: c_int,
        _shared_bytes: usize,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe { give(blocks, 1) }
    }
    /// Runs the kernel to its end, one block after the other.
    fn cuLaunchKernel(
        function: *mut c_void,
        blocks: c_uint,
        blocks_y: c_uint,
        blocks_z: c_uint,
        threads: c_uint,
        threads_y: c_uint,
        threads_z: c_uint,
        shared_bytes: c_uint,
        _stream: *mut c_void,
        arguments: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        if [blocks_y, blocks_z, threads_y, threads_z] != [1; 4] {
            return fail(INVALID, "a grid of more than one dimension");
        }
        let grid = Grid { blocks, threads, shared_bytes: shared_bytes.into(), cooperative: false };
        // SAFETY: guaranteed by the caller.
        match unsafe { prepare(function, grid, arguments) }.and_then(run) {
            Ok(()) => SUCCESS,
            Err(problem) => fail(LAUNCH_FAILED, &problem),
        }
    }
    /// Runs the kernel on its own thread.
    fn cuLaunchCooperativeKernel(
        function: *mut c_void,
        blocks: c_uint,
        blocks_y: c_uint,
        blocks_z: c_uint,
        threads: c_uint,
        threads_y: c_uint,
        threads_z: c_uint,
        shared_bytes: c_uint,
        number: *mut c_void,
        arguments: *mut *mut c_void,
    ) {
        if [blocks_y, blocks_z, threads_y, threads_z] != [1; 4] {
            return fail(INVALID, "a grid of more than one dimension");
        }
        let before = stream(number.addr(), true);
        if before != SUCCESS {
            return before;
        }
        let grid = Grid { blocks, threads, shared_bytes: shared_bytes.into(), cooperative: true };
        // SAFETY: guaranteed by the caller.
        let launch = match unsafe { prepare(function, grid, arguments) } {
            Ok(launch) => launch,
            Err(problem) => return fail(INVALID, &problem),
        };
        let thread = std::thread::Builder::new().name("emulator".to_string()).spawn(move || run(launch));
        match thread {
            Ok(thread) => {
                state().running.insert(number.addr(), thread);
                SUCCESS
            }
            Err(problem) => fail(OUT_OF_MEMORY, &problem.to_string()),
        }
    }
    /// The driver's names of errors.
    fn cuGetErrorName(error: c_int, text: *mut *const c_char) {
        let name = match error {
            SUCCESS => c"CUDA_SUCCESS",
            INVALID => c"CUDA_ERROR_INVALID_VALUE",
            OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            NO_BINARY => c"CUDA_ERROR_NO_BINARY_FOR_GPU",
            NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
            NOT_READY => c"CUDA_ERROR_NOT_READY",
            LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
            _ => c"CUDA_ERROR_UNKNOWN",
        };
        // SAFETY: guaranteed by the caller.
        unsafe { give(text, name.as_ptr()) }
    }
    /// Text of the last error.
    fn cuGetErrorString(_error: c_int, text: *mut *const c_char) {
        let last = state().failed.get(&0).cloned().unwrap_or_else(|| "as the emulator says".to_string());
        // Leaks a text per error for the life of the process.
        let last = CString::new(last).unwrap_or_default().into_raw();
        // SAFETY: guaranteed by the caller.
        unsafe { give(text, last.cast_const()) }
    }
}
