//! The bindings against the real headers and the real host library.
//!
//! Where either is absent a test says so and passes; with `MPK_REQUIRE_NVSHMEM=1`, which
//! `scripts/test.sh` sets after it has installed both, absence is a failure.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use nvshmem_sys::{BINDINGS, Error, HEADER_VERSION, InitStatus, Library, Team, Version, locate};
use object::{Object, ObjectSymbol};

const CHECKED_IN: &str = include_str!("../bindings/nvshmem.rs");
const BUILT: &str = include_str!(concat!(env!("OUT_DIR"), "/bindings.rs"));

/// The release that the checked-in bindings are made from, and that `scripts/setup.sh` installs.
const PINNED: Version = Version { major: 3, minor: 4, patch: 5 };

fn skip(reason: &str) {
    assert!(std::env::var_os("MPK_REQUIRE_NVSHMEM").is_none(), "MPK_REQUIRE_NVSHMEM is set, but {reason}");
    eprintln!("skipped: {reason}");
}

/// The host library's file, as the loader would take it.
fn library_path() -> Option<PathBuf> {
    let found = locate::candidates(std::env::var_os("NVSHMEM_HOME"))
        .into_iter()
        .map(|candidate| candidate.path)
        .find(|path| path.is_file());
    if found.is_none() {
        skip("NVSHMEM's host library is not installed (scripts/setup.sh --nvshmem installs it)");
    }
    found
}

/// The names in the table of bound functions.
fn bound_functions(bindings: &str) -> BTreeSet<String> {
    bindings
        .lines()
        .filter_map(|line| line.trim().strip_prefix("pub unsafe fn ")?.split(['(', '<']).next())
        .filter(|name| name.starts_with("nvshmem"))
        .map(str::to_owned)
        .collect()
}

/// The dynamic symbols that a shared library defines, read from the file, without loading it.
fn exported(path: &Path) -> BTreeSet<String> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file = object::File::parse(&*bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    file.dynamic_symbols()
        .filter(|symbol| symbol.is_definition())
        .map(|symbol| symbol.name().expect("a symbol's name").to_owned())
        .collect()
}

#[test]
fn every_bound_function_is_exported_by_the_library() {
    let bound = bound_functions(BUILT);
    assert!(bound.len() >= 38, "only {} functions are bound: {bound:?}", bound.len());
    let Some(path) = library_path() else { return };
    let exported = exported(&path);
    let missing: Vec<_> = bound.difference(&exported).collect();
    assert!(missing.is_empty(), "{} does not export {missing:?}", path.display());
}

#[test]
fn the_checked_in_bindings_are_what_the_headers_give() {
    if BINDINGS != "generated" {
        return skip(&format!("the bindings of this build are {BINDINGS}"));
    }
    if HEADER_VERSION != PINNED {
        return skip(&format!("the headers are of {HEADER_VERSION}, the checked-in bindings of {PINNED}"));
    }
    if std::env::var_os("MPK_UPDATE_BINDINGS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/bindings/nvshmem.rs");
        std::fs::write(path, BUILT).expect("write the bindings");
        return;
    }
    for (number, (checked_in, fresh)) in CHECKED_IN.lines().zip(BUILT.lines()).enumerate() {
        assert_eq!(
            checked_in,
            fresh,
            "sys/bindings/nvshmem.rs, line {}; MPK_UPDATE_BINDINGS=1 cargo test -p nvshmem-sys renews it",
            number + 1
        );
    }
    assert_eq!(CHECKED_IN.lines().count(), BUILT.lines().count(), "one of the two is longer");
}

#[test]
fn both_sets_of_bindings_bind_the_same_functions() {
    assert_eq!(bound_functions(CHECKED_IN), bound_functions(BUILT));
}

#[test]
fn the_library_opens_without_a_gpu_and_says_its_version() {
    let Some(path) = library_path() else { return };
    let nvshmem = Library::open(&path).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(nvshmem.path(), path);
    assert!(nvshmem.version().is_supported());
    if BINDINGS == "generated" && std::env::var_os("NVSHMEM_HOME").is_none() {
        assert_eq!(nvshmem.version(), HEADER_VERSION, "library and headers are of one installation");
    }
    assert_eq!(nvshmem.specification(), (1, 3), "the OpenSHMEM specification that NVSHMEM follows");
    assert_eq!(nvshmem.has_collective_launch(), exported(&path).contains("nvshmemx_collective_launch"));
}

#[test]
fn calls_before_initialisation_are_errors_and_not_the_end_of_the_process() {
    let Some(path) = library_path() else { return };
    let nvshmem = Library::open(&path).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(nvshmem.status(), InitStatus::NotInitialized);

    let somewhere = NonNull::<c_void>::dangling();
    let calls: Vec<(&str, Result<(), Error>)> = vec![
        ("nvshmem_my_pe", nvshmem.my_pe().map(drop)),
        ("nvshmem_n_pes", nvshmem.n_pes().map(drop)),
        ("nvshmem_team_my_pe", nvshmem.team_my_pe(Team::WORLD).map(drop)),
        ("nvshmem_team_n_pes", nvshmem.team_n_pes(Team::NODE).map(drop)),
        ("nvshmem_team_translate_pe", nvshmem.team_translate_pe(Team::WORLD, 0, Team::NODE).map(drop)),
        ("nvshmem_malloc", nvshmem.malloc(64).map(drop)),
        ("nvshmem_calloc", nvshmem.calloc(8, 8).map(drop)),
        ("nvshmem_align", nvshmem.align(256, 64).map(drop)),
        ("nvshmem_n_pes", nvshmem.peer_address(somewhere, 0).map(drop)),
        ("nvshmem_barrier_all", nvshmem.barrier_all()),
        ("nvshmem_sync_all", nvshmem.sync_all()),
        ("nvshmem_quiet", nvshmem.quiet()),
        // SAFETY: NVSHMEM is not initialised, so the calls are refused before they reach the library.
        ("nvshmem_free", unsafe { nvshmem.free(somewhere) }),
        // SAFETY: as above.
        ("nvshmemx_culibrary_init", unsafe { nvshmem.culibrary_init(std::ptr::null_mut()) }),
        // SAFETY: as above.
        ("nvshmemx_hostlib_finalize", unsafe { nvshmem.finalize() }),
    ];
    for (expected, result) in calls {
        match result {
            Err(Error::NotInitialized { function, status }) => {
                assert_eq!((function, status), (expected, InitStatus::NotInitialized));
            }
            other => panic!("{expected}: {other:?}"),
        }
    }
}

#[test]
fn arguments_are_refused_before_the_call() {
    let Some(path) = library_path() else { return };
    let nvshmem = Library::open(&path).unwrap_or_else(|error| panic!("{error}"));
    let id = nvshmem_sys::UniqueId::from_bytes([0; 128]);
    for (rank, world) in [(2, 2), (0, 0), (u32::MAX, u32::MAX)] {
        let error = nvshmem.init_with_unique_id(rank, world, &id).expect_err("no such rank");
        assert!(matches!(error, Error::Argument { argument: "rank", .. }), "{error}");
    }
    assert!(matches!(nvshmem.calloc(usize::MAX, 2), Err(Error::Argument { .. })), "the product overflows");
    assert!(matches!(nvshmem.align(24, 64), Err(Error::Argument { argument: "alignment", .. })));
    // SAFETY: a null communicator is refused before anything is called.
    let error = unsafe { nvshmem.init_with_mpi_communicator(std::ptr::null_mut()) }.expect_err("null");
    assert!(matches!(error, Error::Argument { argument: "mpi_comm", .. }), "{error}");
}
