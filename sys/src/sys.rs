//! The output of bindgen for NVSHMEM's headers: types, constants and [`Functions`], the table of bound functions.
//! `build.rs` holds the list of names.

#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
