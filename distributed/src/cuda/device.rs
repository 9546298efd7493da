//! GPUs and contexts.

use super::driver::{Driver, check};
use crate::error::{Error, Result};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{result, sys};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use taskgraph::target::{DEVICES, Device};

/// Set if a kernel did not end. Then nothing in this process may wait for the GPU any more.
static STUCK: AtomicBool = AtomicBool::new(false);

/// True if a kernel of this process did not end when it was told to.
pub(crate) fn is_stuck() -> bool {
    STUCK.load(Ordering::Relaxed)
}

pub(crate) fn set_stuck() {
    STUCK.store(true, Ordering::Relaxed);
}

/// A GPU and its properties according to the driver.
#[derive(Clone, Debug)]
pub struct Gpu {
    driver: Driver,
    device: sys::CUdevice,
    /// Its number among the GPUs that this process sees.
    pub ordinal: u32,
    /// Distinguishes it from all other GPUs, including those of other nodes.
    pub identity: u64,
    /// Name that the driver gives it.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Maximum shared memory of a block, in bytes.
    pub shared_memory: u32,
    /// Size of the L2 cache in bytes.
    pub l2: u64,
    /// Device memory in bytes.
    pub memory: u64,
    /// True if it can launch cooperative kernels, whose blocks all run at once.
    pub cooperative: bool,
}

impl Gpu {
    /// The GPU with this number.
    ///
    /// # Errors
    /// There is no such GPU, or the driver fails.
    pub fn open(driver: Driver, ordinal: u32) -> Result<Gpu> {
        let device = check("cuDeviceGet", result::device::get(ordinal as i32))?;
        let name = check("cuDeviceGetName", result::device::get_name(device))?;
        // SAFETY: the driver gave the device.
        let memory = check("cuDeviceTotalMem", unsafe { result::device::total_mem(device) })?;
        let uuid = check("cuDeviceGetUuid", result::device::get_uuid(device))?;
        let half = |bytes: &[std::ffi::c_char]| {
            bytes.iter().fold(0u64, |number, &byte| number << 8 | u64::from(byte as u8))
        };
        let identity = half(&uuid.bytes[..8]) ^ half(&uuid.bytes[8..]).rotate_left(1);
        let attribute = |attribute: Attribute| -> Result<u32> {
            // SAFETY: the driver gave the device.
            let value = unsafe { result::device::get_attribute(device, attribute) };
            Ok(check("cuDeviceGetAttribute", value)?.max(0) as u32)
        };
        Ok(Gpu {
            driver,
            device,
            ordinal,
            identity,
            name,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
            memory: memory as u64,
            cooperative: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)? != 0,
        })
    }

    /// All GPUs that this process sees.
    ///
    /// # Errors
    /// Those of [`Gpu::open`].
    pub fn all(driver: Driver) -> Result<Vec<Gpu>> {
        (0..driver.devices()).map(|ordinal| Gpu::open(driver, ordinal)).collect()
    }

    /// The driver.
    pub fn driver(&self) -> Driver {
        self.driver
    }

    /// The row of the hardware table, with the device's own numbers. If its name is not in the table, a row made from its
    /// attributes.
    ///
    /// # Errors
    /// No cubin can be compiled for its architecture.
    pub fn row(&self) -> Result<Device> {
        hardware_row(&self.name, self.capability, self.sms, self.shared_memory, self.l2).ok_or_else(|| {
            Error::Architecture {
                device: self.ordinal,
                name: self.name.clone(),
                capability: format!("{}.{}", self.capability.0, self.capability.1),
            }
        })
    }

    /// True if this GPU can access the memory of `peer`.
    ///
    /// # Errors
    /// The driver fails.
    pub fn reaches(&self, peer: &Gpu) -> Result<bool> {
        if self.device == peer.device {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: both devices exist; the out-pointer is valid.
        check("cuDeviceCanAccessPeer", unsafe {
            sys::cuDeviceCanAccessPeer(&mut can, self.device, peer.device).result()
        })?;
        Ok(can != 0)
    }
}

/// The architecture for which cubins of a compute capability are compiled. 8.6 and 8.9 run code for 8.0.
fn architecture(capability: (u32, u32)) -> Option<&'static str> {
    match capability {
        (8, _) => Some("sm_80"),
        (9, 0) => Some("sm_90a"),
        (10, 0) => Some("sm_100a"),
        _ => None,
    }
}

/// A row of the hardware table for a device with these attributes; `None` if no cubin can be compiled for it.
pub fn hardware_row(
    name: &str,
    capability: (u32, u32),
    sms: u32,
    shared_memory: u32,
    l2: u64,
) -> Option<Device> {
    let architecture = architecture(capability)?;
    let known = DEVICES.iter().find(|d| name.contains(d.driver_name) && d.architecture == architecture);
    Some(match known {
        // Some models of a name have fewer multiprocessors, so the device's own numbers are used.
        Some(row) => Device { sms, shared_memory, l2, ..*row },
        None => {
            // The names in the table are static. This name is created once and leaked to be static too.
            let name: &'static str = Box::leak(name.to_string().into_boxed_str());
            Device { name, driver_name: name, architecture, sms, shared_memory, l2, memory_bandwidth: 0.0 }
        }
    })
}

/// A GPU's primary context, kept until its last buffer is gone.
#[derive(Debug)]
pub struct Context {
    gpu: Gpu,
    raw: sys::CUcontext,
}

// SAFETY: a context is a handle that any thread may make current.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of `gpu`, current on this thread.
    ///
    /// # Errors
    /// The driver fails.
    pub fn new(gpu: Gpu) -> Result<Arc<Context>> {
        // SAFETY: the driver gave the device.
        let raw = check("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(gpu.device) })?;
        let context = Arc::new(Context { gpu, raw });
        context.make_current()?;
        Ok(context)
    }

    /// Makes the context current on the calling thread.
    ///
    /// # Errors
    /// The driver fails.
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        check("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.raw) })
    }

    /// Its GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(crate) fn device(&self) -> sys::CUdevice {
        self.gpu.device
    }

    /// Free bytes of device memory.
    ///
    /// # Errors
    /// The driver fails.
    pub fn free_memory(&self) -> Result<u64> {
        self.make_current()?;
        let (free, _) = check("cuMemGetInfo", result::mem_get_info())?;
        Ok(free as u64)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !is_stuck() {
            // SAFETY: retained once in `new`. Errors are ignored, because the end of the process releases it too.
            let _ = unsafe { result::primary_ctx::release(self.gpu.device) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_known_names_keep_their_bandwidth_and_take_the_devices_numbers() {
        let row = hardware_row("NVIDIA H200", (9, 0), 132, 232_448, 60 << 20).unwrap();
        assert_eq!((row.name, row.architecture, row.sms), ("h200", "sm_90a", 132));
        assert_eq!((row.shared_memory, row.l2), (232_448, 60 << 20));
        assert!(row.memory_bandwidth > 4e12);
        let pcie = hardware_row("NVIDIA H100 PCIe", (9, 0), 114, 232_448, 50 << 20).unwrap();
        assert_eq!((pcie.name, pcie.sms), ("h100", 114));
    }

    #[test]
    fn unknown_names_get_a_row_where_there_is_a_cubin_for_them() {
        let row = hardware_row("NVIDIA RTX A6000", (8, 6), 84, 101_376, 6 << 20).unwrap();
        assert_eq!((row.architecture, row.sms, row.name), ("sm_80", 84, "NVIDIA RTX A6000"));
        assert!(hardware_row("Tesla V100", (7, 0), 80, 98_304, 6 << 20).is_none());
        assert!(hardware_row("NVIDIA GeForce RTX 5090", (12, 0), 170, 101_376, 96 << 20).is_none());
    }
}
