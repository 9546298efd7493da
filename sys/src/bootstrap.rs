use std::ffi::{c_char, c_int};
use std::fmt;
use std::mem::{size_of, zeroed};

use crate::sys;

/// The token with which ranks find each other. Rank 0 makes it, every rank gets its bytes, and it is used once.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct UniqueId(pub(crate) sys::nvshmemx_uniqueid_t);

impl UniqueId {
    /// Its size in bytes.
    pub const BYTES: usize = size_of::<sys::nvshmemx_uniqueid_t>();

    /// The bytes to send to the other ranks.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (version, internal) = bytes.split_at_mut(VERSION_BYTES);
        version.copy_from_slice(&self.0.version.to_ne_bytes());
        for (byte, &own) in internal.iter_mut().zip(&self.0.internal) {
            *byte = own as u8;
        }
        bytes
    }

    /// The token that rank 0 sent.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let mut id = Self::empty();
        let (version, internal) = bytes.split_at(VERSION_BYTES);
        let mut number = [0; VERSION_BYTES];
        number.copy_from_slice(version);
        id.0.version = c_int::from_ne_bytes(number);
        for (own, &byte) in id.0.internal.iter_mut().zip(internal) {
            *own = byte as c_char;
        }
        id
    }

    /// An empty token with the version field set, for `nvshmemx_get_uniqueid` to fill.
    pub(crate) fn empty() -> Self {
        // SAFETY: integers only; all zero is a valid value.
        let mut id: sys::nvshmemx_uniqueid_t = unsafe { zeroed() };
        id.version = version_field::<sys::nvshmemx_uniqueid_t>(1);
        Self(id)
    }
}

impl fmt::Debug for UniqueId {
    /// Leaves out the content: anyone who has it can join the job.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").field("version", &self.0.version).finish_non_exhaustive()
    }
}

/// The bytes at a token's start, before rank 0's address.
const VERSION_BYTES: usize = size_of::<c_int>();

/// The value of an NVSHMEM struct's version field: the revision in the upper half, the size in the lower.
pub(crate) const fn version_field<T>(revision: i32) -> i32 {
    assert!(size_of::<T>() < 1 << 16);
    (revision << 16) + size_of::<T>() as i32
}

/// Initialisation attributes as NVSHMEM 3.4's own initialiser makes them, at revision 1.
///
/// Later headers write revision 2 of the same size, whose extra field is the CUDA device (-1: the current
/// one). Revision 1 has no such field, every library from 3.4 on reads it, and it does not depend on the
/// headers that this build saw.
pub(crate) fn init_attributes() -> sys::nvshmemx_init_attr_t {
    // SAFETY: integers, bytes and raw pointers only; all zero is a valid value.
    let mut attributes: sys::nvshmemx_init_attr_t = unsafe { zeroed() };
    attributes.version = version_field::<sys::nvshmemx_init_attr_t>(1);
    attributes.args.version = version_field::<sys::nvshmemx_init_args_t>(1);
    attributes.args.uid_args.version = version_field::<sys::nvshmemx_uniqueid_args_t>(1);
    attributes.args.uid_args.myrank = -1;
    attributes.args.uid_args.nranks = -1;
    attributes
}

// What g++ gives for the same structs, on every release from 3.4 to 3.7; `wrapper.h` asserts the same of the headers
// that bindings are generated from.
const _: () = {
    assert!(size_of::<sys::nvshmemx_uniqueid_t>() == 128);
    assert!(std::mem::offset_of!(sys::nvshmemx_uniqueid_t, version) == 0);
    assert!(std::mem::offset_of!(sys::nvshmemx_uniqueid_t, internal) == VERSION_BYTES);
    assert!(size_of::<sys::nvshmemx_uniqueid_args_t>() == 24);
    assert!(std::mem::offset_of!(sys::nvshmemx_uniqueid_args_t, version) == 0);
    assert!(std::mem::offset_of!(sys::nvshmemx_uniqueid_args_t, id) == 8);
    assert!(std::mem::offset_of!(sys::nvshmemx_uniqueid_args_t, myrank) == 16);
    assert!(std::mem::offset_of!(sys::nvshmemx_uniqueid_args_t, nranks) == 20);
    assert!(size_of::<sys::nvshmemx_init_args_t>() == 128);
    assert!(size_of::<sys::nvshmemx_init_attr_t>() == 144);
    assert!(std::mem::offset_of!(sys::nvshmemx_init_attr_t, version) == 0);
    assert!(std::mem::offset_of!(sys::nvshmemx_init_attr_t, mpi_comm) == 8);
    assert!(std::mem::offset_of!(sys::nvshmemx_init_attr_t, args) == 16);
    assert!(std::mem::offset_of!(sys::nvshmemx_init_args_t, version) == 0);
    assert!(std::mem::offset_of!(sys::nvshmemx_init_args_t, uid_args) == 8);
    assert!(size_of::<crate::types::Dim3>() == 12);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_fields_are_revision_and_size() {
        assert_eq!(version_field::<sys::nvshmemx_init_attr_t>(1), 65536 + 144);
        assert_eq!(version_field::<sys::nvshmemx_init_attr_t>(2), 2 * 65536 + 144);
        assert_eq!(version_field::<sys::nvshmemx_uniqueid_t>(1), 65536 + 128);
    }

    #[test]
    fn attributes_agree_with_the_headers_initialiser() {
        let ours = init_attributes();
        let headers = [
            (ours.version, sys::NVSHMEM_SYS_INIT_ATTR_VERSION),
            (ours.args.version, sys::NVSHMEM_SYS_INIT_ARGS_VERSION),
            (ours.args.uid_args.version, sys::NVSHMEM_SYS_UNIQUEID_ARGS_VERSION),
            (UniqueId::empty().0.version, sys::NVSHMEM_SYS_UNIQUEID_VERSION),
        ];
        for (ours, theirs) in headers {
            assert_eq!(ours & 0xffff, theirs & 0xffff, "the size half");
            assert!(ours >> 16 <= theirs >> 16, "the headers have gone back to an earlier revision");
            // From 3.5 on the initialiser writes revision 2 of two of them.
            assert!(crate::HEADER_VERSION.minor > 4 || ours == theirs, "{ours:#x} against {theirs:#x}");
        }
    }

    #[test]
    fn a_unique_id_survives_the_broadcast() {
        let mut bytes = [0u8; UniqueId::BYTES];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::try_from(255 - index).expect("128 bytes");
        }
        assert_eq!(UniqueId::from_bytes(bytes).to_bytes(), bytes);
        assert!(!format!("{:?}", UniqueId::from_bytes(bytes)).contains("internal"));
    }
}
