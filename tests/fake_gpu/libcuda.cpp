/* A CUDA driver for tests on machines without a GPU: device memory is host memory, streams do everything at once, the
 * kernels that pack weights run on the host, and the persistent kernel does what FAKE_GPU says:
 *
 *   finish  gives every request its tokens (1, 2, 3 ...) and ends (the default)
 *   hang    waits for the host's abort word, passes it on and ends
 *   stuck   never ends
 *   fault   fails with an illegal address
 *
 * FAKE_GPU_DRIVER is the driver's version (13000), FAKE_GPU_MEMORY its free bytes, FAKE_GPU_SHARED the shared memory of a
 * block, FAKE_GPU_CAPABILITY the compute capability (90), FAKE_GPU_REFUSES=1 makes it refuse cubins.
 * FAKE_GPU_RANK_1_SEES_ONE=1 hides the first GPU from rank 1. FAKE_GPU_DUMP names a file that gets the packed matrices of the
 * first graph: a line of values for each row, in the order of addresses; of paired rows, first all gates and then all ups. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../../kernels-cu/src/gpu/weights.cuh"

namespace {

constexpr int kNotInitialized = 3, kOutOfMemory = 2, kNoDevice = 100, kNoBinary = 209, kInvalid = 1, kNotReady = 600, kIllegalAddress = 700;
bool initialised = false;
int running = 0; /* 1: the persistent kernel */
const mpk_rank* rank = nullptr;
std::map<uint64_t, size_t> allocations;
std::mutex allocations_lock; /* several threads bring weights */
const char* const kKernels[] = {"", "mpk_persistent", "mpk_pack_weights", "mpk_fill_random"};

std::string setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value != nullptr ? value : otherwise;
}
long number(const char* name, long otherwise) { return atol(setting(name, std::to_string(otherwise).c_str()).c_str()); }

/* MPI is linked but not started: a driver reads the environment, which MPI's start changes. */
bool beside_mpi() {
  const auto initialized = reinterpret_cast<int (*)(int*)>(dlsym(RTLD_DEFAULT, "MPI_Initialized"));
  int up = 0;
  return getenv("OMPI_COMM_WORLD_SIZE") != nullptr && initialized != nullptr && initialized(&up) == 0 && up == 0;
}

/* Number of GPUs that are hidden from this rank, before its first one. */
int hidden() { return number("FAKE_GPU_RANK_1_SEES_ONE", 0) != 0 && number("OMPI_COMM_WORLD_RANK", 0) == 1; }

bool is_device(uint64_t address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(allocations_lock);
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return false;
  --after;
  return address + bytes <= after->first + after->second;
}

float element(const mpk_operand& o, uint32_t row, uint32_t k) {
  const uint64_t tile = static_cast<uint64_t>(row / 16) * 16 * o.strides[0] + static_cast<uint64_t>(k / 16) * 256;
  const uint32_t r = row % 16, c = k % 16;
  if (o.dtype == MPK_F32) return reinterpret_cast<const float*>(o.addr)[tile + (c % 8 * 2 + c / 8) * 16 + r];
  const uint64_t at = tile + ((r % 8 * 4 + c / 4) * 4 + c % 4 / 2 * 2 + r / 8) * 2 + c % 2;
  if (o.dtype == MPK_F16) return __half2float(reinterpret_cast<const __half*>(o.addr)[at]);
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(o.addr)[at]);
}

/* The operand's rows with numbers in `rows`, in this order. */
void print(FILE* file, const mpk_operand& o, const std::vector<uint32_t>& rows) {
  for (const uint32_t row : rows) {
    for (uint32_t k = 0; k < o.dims[1]; ++k) fprintf(file, "%.9g ", element(o, row, k));
    fprintf(file, "\n");
  }
}

void dump(const char* path) {
  FILE* file = fopen(path, "w");
  const mpk_graph& graph = rank->graphs[0];
  std::map<uint64_t, const mpk_operand*> matrices;
  for (uint32_t i = 0; i < graph.num_operands; ++i) {
    const mpk_operand& o = graph.operands[i];
    if (o.layout == MPK_LAYOUT_FRAGMENT || o.layout == MPK_LAYOUT_PAIRED) matrices[o.addr] = &o;
  }
  for (auto at = matrices.begin(); at != matrices.end();) {
    /* Operands that lie one after the other are one matrix. */
    mpk_operand whole = *at->second;
    const uint64_t size = whole.dtype == MPK_F32 ? 4 : 2;
    for (++at; at != matrices.end() && at->second->layout == whole.layout && at->second->dims[1] == whole.dims[1] &&
               at->first == whole.addr + static_cast<uint64_t>(whole.dims[0]) * whole.strides[0] * size;
         ++at)
      whole.dims[0] += at->second->dims[0];
    std::vector<uint32_t> rows, ups;
    for (uint32_t row = 0; row < whole.dims[0]; ++row)
      (whole.layout == MPK_LAYOUT_PAIRED && row % 16 >= 8 ? ups : rows).push_back(row);
    print(file, whole, rows);
    print(file, whole, ups);
  }
  fclose(file);
}

/* Checks that the struct's pointers lead to device memory, and that activations are poisoned. */
bool sound() {
  if (!is_device(reinterpret_cast<uint64_t>(rank), sizeof(mpk_rank)) || rank->abi_version != MPK_ABI_VERSION) return false;
  for (uint32_t g = 0; g < rank->num_graphs; ++g) {
    const mpk_graph& graph = rank->graphs[g];
    if (!is_device(reinterpret_cast<uint64_t>(graph.tasks), graph.num_tasks * sizeof(mpk_task))) return false;
    if (!is_device(reinterpret_cast<uint64_t>(graph.counters), graph.num_events * 64)) return false;
    for (uint32_t i = 0; i < graph.num_operands; ++i) {
      if (!is_device(graph.operands[i].addr, 1)) return false;
    }
    for (uint32_t t = 3; t < graph.num_tasks; ++t) {
      if (graph.tasks[t].task_type > 2 && graph.tasks[t].task_type != 4 && graph.tasks[t].code == MPK_NO_CODE) return false;
    }
  }
  for (uint32_t w = 0; w < rank->num_workers; ++w) {
    uint32_t most = 1;
    for (uint32_t g = 0; g < rank->num_graphs; ++g) most = rank->graphs[g].num_tasks > most ? rank->graphs[g].num_tasks : most;
    if (!is_device(reinterpret_cast<uint64_t>(rank->scratch[w]) - (most * 4 + 255) / 256 * 256, most * 4)) return false;
  }
  return rank->kernels == nullptr && rank->host_abort != nullptr && *rank->host_abort == 0 && rank->control->iteration == 0 &&
         reinterpret_cast<uint8_t*>(rank->control) == rank->sym[rank->rank];
}

/* Does what a kernel does with the entries it finds, before it ends for lack of work: all requests at once. */
void finish() {
  mpk_batch_output* output = rank->batch_output;
  const mpk_batch_config* config = rank->batch_config;
  const uint32_t entries = __atomic_load_n(config->num_admissions, __ATOMIC_ACQUIRE);
  uint64_t finished = output->finished;
  for (uint32_t e = output->entries_taken; e != entries; ++e) {
    const mpk_admission& entry = config->admissions[e % config->admission_ring];
    if (entry.kind != MPK_ADMIT) continue;
    const mpk_request& request = config->requests[entry.request];
    for (uint32_t i = 0; i < request.max_new_tokens; ++i) output->tokens[request.first_output + i] = static_cast<int32_t>(i + 1);
    output->decode_steps = request.max_new_tokens - 1;
    output->prefill_ns = output->decode_ns = 1000000;
    __atomic_store_n(&output->requests[entry.request].num_tokens, request.max_new_tokens, __ATOMIC_RELEASE);
    __atomic_store_n(&output->requests[entry.request].finish, static_cast<uint32_t>(MPK_FINISH_LENGTH), __ATOMIC_RELEASE);
    ++finished;
  }
  __atomic_store_n(&output->finished, finished, __ATOMIC_RELEASE);
  __atomic_store_n(&output->entries_taken, entries, __ATOMIC_RELEASE);
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  if (beside_mpi()) {
    fprintf(stderr, "fake libcuda: cuInit while MPI comes up\n");
    abort();
  }
  if (number("FAKE_GPU_COUNT", 1) == 0) return kNoDevice;
  initialised = true;
  return 0;
}
int cuDriverGetVersion(int* version) { return *version = static_cast<int>(number("FAKE_GPU_DRIVER", 13000)), 0; }
int cuDeviceGetCount(int* count) { return *count = static_cast<int>(number("FAKE_GPU_COUNT", 1)) - hidden(), initialised ? 0 : kNotInitialized; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char* name, int length, int) { return snprintf(name, static_cast<size_t>(length), "NVIDIA H200"), 0; }
int cuDeviceGetUuid_v2(char* uuid, int device) { return memset(uuid, 7 + hidden() + device, 16), 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = static_cast<size_t>(number("FAKE_GPU_MEMORY", 8l << 30)), 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int capability = static_cast<int>(number("FAKE_GPU_CAPABILITY", 90));
  switch (attribute) {
    case 75: *value = capability / 10; break;
    case 76: *value = capability % 10; break;
    case 16: *value = 12; break;             /* multiprocessors */
    case 97: *value = static_cast<int>(number("FAKE_GPU_SHARED", 232448)); break;
    case 38: *value = 50 << 20; break;       /* L2 */
    case 95: *value = 1; break;              /* cooperative launch */
    default: *value = 0;
  }
  return 0;
}
int cuDeviceCanAccessPeer(int* can, int, int) { return *can = 1, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = reinterpret_cast<void*>(0x1000), 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  *total = *free = static_cast<size_t>(number("FAKE_GPU_MEMORY", 8l << 30));
  return 0;
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  void* memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (memory == nullptr) return kOutOfMemory;
  memset(memory, 0xA5, bytes);
  *address = reinterpret_cast<uint64_t>(memory);
  const std::lock_guard<std::mutex> lock(allocations_lock);
  allocations[*address] = bytes;
  return 0;
}
int cuMemFree_v2(uint64_t address) {
  const std::lock_guard<std::mutex> lock(allocations_lock);
  if (allocations.erase(address) == 0) return kInvalid;
  free(reinterpret_cast<void*>(address));
  return 0;
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned) { return *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), 0; }
int cuMemFreeHost(void* address) { return free(address), 0; }
int cuMemHostGetDevicePointer_v2(uint64_t* device, void* host, unsigned) { return *device = reinterpret_cast<uint64_t>(host), 0; }
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void*) {
  if (!is_device(address, bytes)) return kInvalid;
  return memset(reinterpret_cast<void*>(address), value, bytes), 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
  if (!is_device(to, bytes)) return kInvalid;
  return memcpy(reinterpret_cast<void*>(to), from, bytes), 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
  if (!is_device(from, bytes)) return kInvalid;
  return memcpy(to, reinterpret_cast<void*>(from), bytes), 0;
}
int cuStreamCreate(void** stream, unsigned) {
  static uintptr_t next = 0;
  return *stream = reinterpret_cast<void*>(++next), 0;
}
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void*) { return 0; }
/* The first stream is the kernel's. */
int cuStreamQuery(void* stream) {
  if (running == 0 || stream != reinterpret_cast<void*>(1)) return 0;
  const std::string what = setting("FAKE_GPU", "finish");
  if (what == "fault") return kIllegalAddress;
  if (what == "stuck") return kNotReady;
  if (what == "hang") {
    const uint32_t code = __atomic_load_n(rank->host_abort, __ATOMIC_ACQUIRE);
    if (code == 0) return kNotReady;
    rank->control->abort = code;
    rank->control->abort_rank = rank->rank;
    rank->status[0].state = MPK_WORKER_WAITS_EVENT;
    rank->status[0].task = 5;
    rank->status[0].event = 1;
  }
  running = 0;
  return 0;
}
int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  if (number("FAKE_GPU_REFUSES", 0) != 0) return kNoBinary;
  return *library = const_cast<void*>(code), 0;
}
int cuLibraryUnload(void*) { return 0; }
int cuLibraryGetKernel(void** kernel, void*, const char* name) {
  for (uintptr_t i = 1; i < 4; ++i) {
    if (strcmp(name, kKernels[i]) == 0) return *kernel = reinterpret_cast<void*>(i), 0;
  }
  return 500;
}
int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, 0; }
int cuKernelSetAttribute(int, int bytes, void*, int) { return bytes <= number("FAKE_GPU_SHARED", 232448) ? 0 : kInvalid; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuFuncGetAttribute(int* value, int, void*) { return *value = 1024, 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
  return *blocks = static_cast<int>(number("FAKE_GPU_OCCUPANCY", 1)), 0;
}
int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void** a, void**) {
  const mpk_weights_target target = *static_cast<const mpk_weights_target*>(a[0]);
  auto word = [&](int i) { return *static_cast<const uint64_t*>(a[i]); };
  if (function == reinterpret_cast<void*>(2)) {
    mpk_pack_weights(target, *static_cast<void* const*>(a[1]), word(2), *static_cast<const uint32_t*>(a[3]));
  } else {
    mpk_fill_random(target, word(1), word(2), word(3), word(4), *static_cast<const uint32_t*>(a[5]));
  }
  return 0;
}
int cuLaunchCooperativeKernel(void*, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream, void** a) {
  rank = *static_cast<const mpk_rank* const*>(a[0]);
  if (stream != reinterpret_cast<void*>(1) || blocks != rank->num_workers || !sound()) return kInvalid;
  const std::string path = setting("FAKE_GPU_DUMP", "");
  if (!path.empty()) dump(path.c_str());
  if (setting("FAKE_GPU", "finish") == "finish") finish();
  running = 1;
  return 0;
}
int cuGetErrorName(int error, const char** text) {
  switch (error) {
    case kIllegalAddress: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case kNoBinary: *text = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
    default: *text = "CUDA_ERROR_INVALID_VALUE";
  }
  return 0;
}
int cuGetErrorString(int, const char** text) { return *text = "as the fake driver says", 0; }
}
