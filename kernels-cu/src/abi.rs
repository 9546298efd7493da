//! `include/mpk/abi.h` and every task's `params.h`, read by bindgen.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals, missing_docs)]
#![allow(clippy::all, clippy::pedantic, clippy::undocumented_unsafe_blocks)]

include!(concat!(env!("OUT_DIR"), "/abi.rs"));

/// No event.
pub const MPK_EVENT_INVALID: u64 = u64::MAX;

// The sizes that the C side asserts too: a differing layout must not compile.
const _: () = {
    assert!(size_of::<mpk_operand>() == 48);
    assert!(size_of::<mpk_dependency>() == 8);
    assert!(size_of::<mpk_task>() == 80);
    assert!(size_of::<mpk_event>() == 16);
    assert!(size_of::<mpk_variant>() == 128);
    assert!(size_of::<mpk_status>() == 64);
    assert!(size_of::<mpk_control>() == 256);
    assert!(size_of::<mpk_remote_entry>() == 16);
    assert!(size_of::<mpk_queue>() == 192);
    assert!(std::mem::offset_of!(mpk_operand, dtype) == 40);
    assert!(std::mem::offset_of!(mpk_operand, pe) == 44);
    assert!(std::mem::offset_of!(mpk_task, args) == 36);
    assert!(std::mem::offset_of!(mpk_variant, params) == 8);
};

/// The words of a params struct, as `mpk_variant.params` holds them.
pub fn params_words<T: bytemuck::Pod>(params: &T) -> Vec<u32> {
    const {
        assert!(size_of::<T>() % 4 == 0 && size_of::<T>() <= 4 * MPK_MAX_PARAMS as usize);
    }
    bytemuck::bytes_of(params)
        .chunks_exact(4)
        .map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}
