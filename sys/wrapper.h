// What bindgen reads: the host half of NVSHMEM, and the version fields of its structs.
//
// The structs carry `(revision << 16) + sizeof` in their first field, written by C initialiser macros
// that bindgen does not translate. The revision differs between releases, so it is taken from the
// headers here instead of being written down in Rust.
#define NVSHMEM_HOSTLIB_ONLY
#include <nvshmem_host.h>

namespace nvshmem_sys_detail {
constexpr nvshmemx_init_attr_t init_attr = NVSHMEMX_INIT_ATTR_INITIALIZER;
constexpr nvshmemx_uniqueid_t uniqueid = NVSHMEMX_UNIQUEID_INITIALIZER;
}  // namespace nvshmem_sys_detail

constexpr int NVSHMEM_SYS_INIT_ATTR_VERSION = nvshmem_sys_detail::init_attr.version;
constexpr int NVSHMEM_SYS_INIT_ARGS_VERSION = nvshmem_sys_detail::init_attr.args.version;
constexpr int NVSHMEM_SYS_UNIQUEID_ARGS_VERSION = nvshmem_sys_detail::init_attr.args.uid_args.version;
constexpr int NVSHMEM_SYS_UNIQUEID_VERSION = nvshmem_sys_detail::uniqueid.version;
