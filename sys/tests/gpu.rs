//! The calls on a real GPU: one process, one PE. Skipped where there is no CUDA driver, device or NVSHMEM.

use std::ffi::{c_int, c_uint, c_void};

use nvshmem_sys::{Error, Library, Team};

/// Makes the primary context of device 0 current; or says why not.
fn cuda_context() -> Result<(), String> {
    type Init = unsafe extern "C" fn(c_uint) -> c_int;
    type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
    type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_int;
    // SAFETY: the driver library, whose initialisers are its own.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") }.map_err(|error| error.to_string())?;
    let check = |function, status| if status == 0 { Ok(()) } else { Err(format!("{function}: {status}")) };
    let mut context = std::ptr::null_mut();
    // SAFETY: the signatures are cuda.h's, and every pointer is valid for its call.
    unsafe {
        let symbol = |error: libloading::Error| error.to_string();
        check("cuInit", driver.get::<Init>(b"cuInit").map_err(symbol)?(0))?;
        let retain = driver.get::<Retain>(b"cuDevicePrimaryCtxRetain").map_err(symbol)?;
        check("cuDevicePrimaryCtxRetain", retain(&mut context, 0))?;
        let set_current = driver.get::<SetCurrent>(b"cuCtxSetCurrent").map_err(symbol)?;
        check("cuCtxSetCurrent", set_current(context))?;
    }
    std::mem::forget(driver);
    Ok(())
}

#[test]
fn one_pe_initialises_allocates_transfers_and_finalises() -> Result<(), Error> {
    let nvshmem = match Library::load() {
        Ok(library) => library,
        Err(error @ Error::NotFound { .. }) => {
            eprintln!("skipped: {error}");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    if let Err(reason) = cuda_context() {
        eprintln!("skipped: no GPU: {reason}");
        return Ok(());
    }

    // Multicast objects are of no use to one PE, and some machines must not make them.
    // SAFETY: this is the only test of its process, and NVSHMEM has not started a thread yet.
    unsafe { std::env::set_var("NVSHMEM_DISABLE_NVLS", "1") };
    let id = nvshmem_sys::UniqueId::from_bytes(nvshmem.unique_id()?.to_bytes());
    nvshmem.init_with_unique_id(0, 1, &id)?;
    assert!(nvshmem.status().is_ready(), "{}", nvshmem.status());
    assert!(matches!(nvshmem.init_with_unique_id(0, 1, &id), Err(Error::AlreadyInitialized { .. })));

    assert_eq!((nvshmem.my_pe()?, nvshmem.n_pes()?), (0, 1));
    assert_eq!((nvshmem.team_my_pe(Team::WORLD)?, nvshmem.team_n_pes(Team::NODE)?), (0, 1));
    assert_eq!(nvshmem.team_translate_pe(Team::WORLD, 0, Team::NODE)?, Some(0));

    const BYTES: usize = 1 << 20;
    let aligned = nvshmem.align(4096, BYTES)?;
    assert_eq!(aligned.as_ptr() as usize % 4096, 0);
    assert_eq!(nvshmem.peer_address(aligned, 0)?, Some(aligned), "this PE's own memory");
    assert!(matches!(nvshmem.peer_address(aligned, 1), Err(Error::Argument { argument: "pe", .. })));
    let zeroed = nvshmem.calloc(BYTES / 4, 4)?;

    let sent: Vec<u8> = (0..BYTES).map(|index| (index * 7 + index / 251) as u8).collect();
    let (mut received, mut zeros) = (vec![0u8; BYTES], vec![1u8; BYTES]);
    // SAFETY: all memory holds BYTES bytes, and no one else uses it.
    unsafe {
        nvshmem.put(aligned, sent.as_ptr().cast(), BYTES, 0)?;
        nvshmem.quiet()?;
        nvshmem.get(received.as_mut_ptr().cast(), aligned, BYTES, 0)?;
        nvshmem.get(zeros.as_mut_ptr().cast(), zeroed, BYTES, 0)?;
        nvshmem.barrier_all_on_stream(std::ptr::null_mut())?;
    }
    nvshmem.barrier_all()?;
    assert!(received == sent, "what was put is what is got");
    assert!(zeros.iter().all(|&byte| byte == 0), "calloc zeroes");

    // SAFETY: the allocations are not used after this, and nothing runs on the GPU.
    unsafe {
        nvshmem.free(zeroed)?;
        nvshmem.free(aligned)?;
        nvshmem.finalize()?;
    }
    assert!(!nvshmem.status().is_ready(), "{}", nvshmem.status());
    assert!(matches!(nvshmem.my_pe(), Err(Error::NotInitialized { .. })));
    Ok(())
}
