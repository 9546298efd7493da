//! The CUDA driver: finds it at run time, and describes its errors.

use crate::error::{Error, Result};
use cudarc::driver::{DriverError, result, sys};
use std::ffi::CStr;

/// The oldest driver interface that has all the calls used here (CUDA 12.0: libraries and kernels as objects).
const OLDEST: i32 = 12_000;
/// Functions that are called before the driver's version is known, and with it which functions exist. cudarc panics if
/// one is missing.
const USED_BEFORE_VERSION: [&str; 3] = ["cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"];

/// The driver's library is loaded and initialised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Driver {
    version: i32,
    devices: i32,
}

/// The result of looking for a driver.
#[derive(Debug)]
pub enum Found {
    /// There is no driver on this machine, or it finds no GPU. Contains the reason.
    Nothing(String),
    /// A driver with at least one GPU.
    Driver(Driver),
}

/// Looks for the driver and a GPU.
///
/// # Errors
/// There is a driver, but it is too old or cannot be initialised.
pub fn find() -> Result<Found> {
    // SAFETY: loads the driver's library by name and unloads it again.
    if !unsafe { sys::is_culib_present() } {
        return Ok(Found::Nothing("libcuda.so.1, the NVIDIA driver's library, was not found".into()));
    }
    // SAFETY: the library is there.
    let library = unsafe { sys::culib() };
    for name in USED_BEFORE_VERSION {
        // SAFETY: the function is only looked up, not called.
        if unsafe { library.get::<*const ()>(name) }.is_err() {
            let reason = format!("its library (libcuda.so) has no function {name}");
            return Err(Error::Driver { reason });
        }
    }
    let mut version = 0;
    // SAFETY: the library is there; the call needs no initialisation, and the out-pointer is valid.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) }.result())?;
    if version < OLDEST {
        return Err(Error::DriverTooOld { found: version_text(version), needed: version_text(OLDEST) });
    }
    match result::init() {
        Ok(()) => {}
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
            return Ok(Found::Nothing("the NVIDIA driver finds no GPU (`nvidia-smi -L`)".into()));
        }
        Err(DriverError(sys::CUresult::CUDA_ERROR_STUB_LIBRARY)) => {
            return Ok(Found::Nothing(
                "libcuda.so is the toolkit's stub, not the NVIDIA driver's library".into(),
            ));
        }
        Err(error) => return Err(Error::Driver { reason: describe(error) }),
    }
    let devices = check("cuDeviceGetCount", result::device::get_count())?;
    if devices < 1 {
        return Ok(Found::Nothing("the NVIDIA driver finds no GPU (`nvidia-smi -L`)".into()));
    }
    Ok(Found::Driver(Driver { version, devices }))
}

impl Driver {
    /// The newest CUDA version that the driver supports, such as (13, 0).
    pub fn cuda_version(self) -> (u32, u32) {
        (self.version as u32 / 1000, self.version as u32 % 1000 / 10)
    }

    /// Number of GPUs that this process may use.
    pub fn devices(self) -> u32 {
        self.devices as u32
    }

    /// Refuses a driver that cannot load what a toolkit of `release` compiles. The major versions count.
    ///
    /// # Errors
    /// [`Error::DriverTooOld`].
    pub fn serves(self, release: (u32, u32)) -> Result<()> {
        if self.cuda_version().0 < release.0 {
            let needed = version_text(release.0 as i32 * 1000);
            return Err(Error::DriverTooOld { found: version_text(self.version), needed });
        }
        Ok(())
    }
}

/// `CUDA 13.0` from 13000.
fn version_text(version: i32) -> String {
    format!("CUDA {}.{}", version / 1000, version % 1000 / 10)
}

/// The release in nvcc's build description, such as `Build cuda_13.0.r13.0/compiler.36424714_0`.
pub fn release_of_build(build: &str) -> Option<(u32, u32)> {
    let (_, rest) = build.split_once("cuda_")?;
    let mut numbers = rest.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The result of a call, or its error in the driver's words.
pub(crate) fn check<T>(call: &'static str, result: std::result::Result<T, DriverError>) -> Result<T> {
    result.map_err(|error| Error::Cuda { call, reason: describe(error) })
}

/// Name and text of an error.
pub(crate) fn describe(error: DriverError) -> String {
    let text = |text: std::result::Result<&CStr, DriverError>| {
        text.ok().map(|text| text.to_string_lossy().into_owned())
    };
    let name = text(error.error_name()).unwrap_or_else(|| format!("error {}", error.0 as u32));
    match text(error.error_string()) {
        Some(words) => format!("{name}: {words}"),
        None => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_from_nvccs_words() {
        assert_eq!(release_of_build("Build cuda_13.0.r13.0/compiler.36424714_0"), Some((13, 0)));
        assert_eq!(release_of_build("cuda_12.8.r12.8"), Some((12, 8)));
        assert_eq!(release_of_build("something else"), None);
    }

    #[test]
    fn only_an_older_major_version_of_the_driver_is_refused() {
        let driver = Driver { version: 13_000, devices: 1 };
        assert_eq!(driver.cuda_version(), (13, 0));
        assert!(driver.serves((13, 2)).is_ok());
        assert!(driver.serves((12, 8)).is_ok());
        let old = Driver { version: 12_080, devices: 1 };
        let error = old.serves((13, 0)).unwrap_err();
        assert_eq!(error.exit_status(), 3);
        assert!(error.to_string().contains("CUDA 12.8"), "{error}");
    }

    /// Nothing panics on a machine without a driver.
    #[test]
    fn a_machine_without_a_driver_says_so() {
        match find() {
            Ok(Found::Nothing(reason)) => assert!(!reason.is_empty()),
            Ok(Found::Driver(driver)) => assert!(driver.devices() > 0),
            Err(error) => assert_eq!(error.exit_status(), 3),
        }
    }
}
