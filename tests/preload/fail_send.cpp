// For LD_PRELOAD: a send of rank 1 fails, as one does whose connection is gone.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

namespace {
// The first messages belong to MPI's start-up and to the comparison of command lines.
constexpr int kFails = 6;
constexpr int kCode = 17;
int count = 0;

// Handles of MPI are pointers or numbers. Either fits.
using Handle = std::uintptr_t;
using Send = int(const void*, int, Handle, int, int, Handle, void*);
using Call = int(Handle, int);
}  // namespace

extern "C" int MPI_Isend(const void* bytes, int number, Handle type, int to, int tag, Handle communicator, void* request) {
    const char* rank = getenv("OMPI_COMM_WORLD_RANK");
    if (rank && !strcmp(rank, "1") && ++count == kFails) {
        reinterpret_cast<Call*>(dlsym(RTLD_DEFAULT, "MPI_Comm_call_errhandler"))(communicator, kCode);
        return kCode;
    }
    return reinterpret_cast<Send*>(dlsym(RTLD_DEFAULT, "PMPI_Isend"))(bytes, number, type, to, tag, communicator, request);
}
