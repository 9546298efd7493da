//! `include/mpk/abi.h` and the `params.h` of every task, read by bindgen. Sizes and offsets of every struct are
//! asserted on both sides: by rustc in bindgen's output, by g++ and nvcc in the output of `build.rs`.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals, missing_docs)]
#![allow(clippy::all, clippy::pedantic, clippy::undocumented_unsafe_blocks)]

include!(concat!(env!("OUT_DIR"), "/abi.rs"));

/// A task's kernel on the CPU target.
pub type KernelFn = unsafe extern "C" fn(*const mpk_kernel_args) -> i32;

/// No event.
pub const MPK_EVENT_INVALID: u64 = u64::MAX;

/// The words of a params struct, as they are stored in `mpk_variant.params`.
pub fn params_words<T: bytemuck::Pod>(params: &T) -> Vec<u32> {
    const {
        assert!(size_of::<T>() % 4 == 0 && size_of::<T>() <= 4 * MPK_MAX_PARAMS as usize);
    }
    bytemuck::bytes_of(params)
        .chunks_exact(4)
        .map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}
