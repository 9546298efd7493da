// What bindgen reads: the host half of NVSHMEM, and the version fields of its structs.
//
// The structs carry `(revision << 16) + sizeof` in their first field, written by C initialiser macros
// that bindgen does not translate. The revision differs between releases, so it is taken from the
// headers here instead of being written down in Rust.
#define NVSHMEM_HOSTLIB_ONLY
#include <nvshmem_host.h>

#include <cstddef>

namespace nvshmem_sys_detail {
constexpr nvshmemx_init_attr_t init_attr = NVSHMEMX_INIT_ATTR_INITIALIZER;
constexpr nvshmemx_uniqueid_t uniqueid = NVSHMEMX_UNIQUEID_INITIALIZER;
}  // namespace nvshmem_sys_detail

constexpr int NVSHMEM_SYS_INIT_ATTR_VERSION = nvshmem_sys_detail::init_attr.version;
constexpr int NVSHMEM_SYS_INIT_ARGS_VERSION = nvshmem_sys_detail::init_attr.args.version;
constexpr int NVSHMEM_SYS_UNIQUEID_ARGS_VERSION = nvshmem_sys_detail::init_attr.args.uid_args.version;
constexpr int NVSHMEM_SYS_UNIQUEID_VERSION = nvshmem_sys_detail::uniqueid.version;

// The layouts that src/bootstrap.rs asserts of the bindings.
static_assert(sizeof(nvshmemx_uniqueid_t) == 128);
static_assert(offsetof(nvshmemx_uniqueid_t, version) == 0);
static_assert(offsetof(nvshmemx_uniqueid_t, internal) == 4);
static_assert(sizeof(nvshmemx_uniqueid_args_t) == 24);
static_assert(offsetof(nvshmemx_uniqueid_args_t, version) == 0);
static_assert(offsetof(nvshmemx_uniqueid_args_t, id) == 8);
static_assert(offsetof(nvshmemx_uniqueid_args_t, myrank) == 16);
static_assert(offsetof(nvshmemx_uniqueid_args_t, nranks) == 20);
static_assert(sizeof(nvshmemx_init_args_t) == 128);
static_assert(offsetof(nvshmemx_init_args_t, version) == 0);
static_assert(offsetof(nvshmemx_init_args_t, uid_args) == 8);
static_assert(sizeof(nvshmemx_init_attr_t) == 144);
static_assert(offsetof(nvshmemx_init_attr_t, version) == 0);
static_assert(offsetof(nvshmemx_init_attr_t, mpi_comm) == 8);
static_assert(offsetof(nvshmemx_init_attr_t, args) == 16);
