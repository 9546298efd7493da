/* NVSHMEM's host library for tests with the fake driver: ranks know their numbers, and the heap is the rank's own memory.
 * FAKE_NVSHMEM_VERSION is its version (3.4.5). FAKE_NVSHMEM_PEERS=1 makes it claim that peers are within reach.
 * FAKE_NVSHMEM_FAILS is the rank whose initialisation fails, FAKE_NVSHMEM_STOPS the rank that stops in it.
 * FAKE_NVSHMEM_LAUNCH_FAILS=1 makes the launch fail. NVSHMEM_DEBUG makes it print to standard output. Built with
 * EXPORT_LAUNCH, it exports the collective launch. */
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

namespace {

int pe = -1, pes = -1, state = 0; /* 2: initialised */

template <typename F>
F driver(const char* name) {
  return reinterpret_cast<F>(dlsym(dlopen("libcuda.so", RTLD_NOW), name));
}

int variable(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value != nullptr ? atoi(value) : otherwise;
}

struct UniqueIdArgs {
  int version;
  const void* id;
  int myrank, nranks;
};
struct Attributes {
  int version;
  void* mpi_comm;
  struct {
    int version;
    UniqueIdArgs uid_args;
  } args;
};
static_assert(offsetof(Attributes, args) == 16, "as NVSHMEM's");

}  // namespace

extern "C" {

void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
  const char* version = getenv("FAKE_NVSHMEM_VERSION");
  sscanf(version != nullptr ? version : "3.4.5", "%d.%d.%d", major, minor, patch);
}
int nvshmemx_get_uniqueid(void* id) { return memcpy(static_cast<char*>(id) + 8, "token", 5), 0; }
int nvshmemx_set_attr_uniqueid_args(int rank, int ranks, const void* id, Attributes* attributes) {
  attributes->args.uid_args.id = id;
  attributes->args.uid_args.myrank = rank;
  attributes->args.uid_args.nranks = ranks;
  return 0;
}
int nvshmemx_set_attr_mpi_comm_args(void*, Attributes*) { return 0; }
int nvshmemx_hostlib_init_attr(unsigned flags, Attributes* attributes) {
  if (getenv("NVSHMEM_SYMMETRIC_SIZE") == nullptr || strcmp(getenv("NVSHMEM_DISABLE_NVLS"), "1") != 0) return 1;
  if (attributes->mpi_comm != nullptr) {
    pe = variable("OMPI_COMM_WORLD_RANK", 0);
    pes = variable("OMPI_COMM_WORLD_SIZE", 1);
  } else {
    const UniqueIdArgs& args = attributes->args.uid_args;
    if (memcmp(static_cast<const char*>(args.id) + 8, "token", 5) != 0) return 1;
    pe = args.myrank;
    pes = args.nranks;
  }
  if (variable("FAKE_NVSHMEM_FAILS", -1) == pe) return 7;
  if (variable("FAKE_NVSHMEM_STOPS", -1) == pe) raise(SIGSTOP);
  /* As in the library, each rank waits for the others. */
  if (variable("FAKE_NVSHMEM_STOPS", -1) >= 0) pause();
  state = 2;
  if (getenv("NVSHMEM_DEBUG") != nullptr) {
    printf("NVSHMEM INFO of PE %d\n", pe);
    fflush(stdout);
  }
  return 0;
}
void nvshmemx_hostlib_finalize() { state = 0; }
int nvshmemx_init_status() { return state; }
int nvshmem_my_pe() { return pe; }
int nvshmem_n_pes() { return pes; }
void* nvshmem_align(size_t, size_t bytes) {
  uint64_t address = 0;
  return driver<int (*)(uint64_t*, size_t)>("cuMemAlloc_v2")(&address, bytes) == 0 ? reinterpret_cast<void*>(address) : nullptr;
}
void nvshmem_free(void* memory) { driver<int (*)(uint64_t)>("cuMemFree_v2")(reinterpret_cast<uint64_t>(memory)); }
void* nvshmem_ptr(const void* memory, int peer) {
  return peer == pe || variable("FAKE_NVSHMEM_PEERS", 0) == 1 ? const_cast<void*>(memory) : nullptr;
}
int nvshmemx_culibrary_init(void* library) { return library == nullptr; }
int nvshmemx_culibrary_finalize(void* library) { return library == nullptr; }
#ifdef EXPORT_LAUNCH
struct Dim3 {
  unsigned x, y, z;
};
int nvshmemx_collective_launch(const void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared, void* stream) {
  if (variable("FAKE_NVSHMEM_LAUNCH_FAILS", 0) == 1) return 6;
  using Launch = int (*)(const void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**);
  return driver<Launch>("cuLaunchCooperativeKernel")(kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                                     static_cast<unsigned>(shared), stream, arguments);
}
#endif

/* Loaded by the bindings, but not called in these tests. */
#define UNUSED(name) \
  void name() { abort(); }
UNUSED(nvshmem_query_thread)
UNUSED(nvshmem_global_exit)
UNUSED(nvshmem_info_get_version)
UNUSED(nvshmem_info_get_name)
UNUSED(nvshmem_team_my_pe)
UNUSED(nvshmem_team_n_pes)
UNUSED(nvshmem_team_translate_pe)
UNUSED(nvshmem_malloc)
UNUSED(nvshmem_calloc)
UNUSED(nvshmemx_buffer_register)
UNUSED(nvshmemx_buffer_unregister)
UNUSED(nvshmemx_buffer_unregister_all)
UNUSED(nvshmemx_buffer_register_symmetric)
UNUSED(nvshmemx_buffer_unregister_symmetric)
UNUSED(nvshmem_barrier_all)
UNUSED(nvshmem_sync_all)
UNUSED(nvshmem_quiet)
UNUSED(nvshmem_fence)
UNUSED(nvshmem_putmem)
UNUSED(nvshmem_getmem)
UNUSED(nvshmemx_barrier_all_on_stream)
UNUSED(nvshmemx_quiet_on_stream)
UNUSED(nvshmemx_cumodule_init)
UNUSED(nvshmemx_cumodule_finalize)
}
