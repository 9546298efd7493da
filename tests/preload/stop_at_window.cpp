// For LD_PRELOAD: rank 1 stops when it opens the file of a shared window that rank 0 has created. At that time the file
// has a name.
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" int open(const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    const char* rank = getenv("OMPI_COMM_WORLD_RANK");
    if (rank && !strcmp(rank, "1") && !strncmp(path, "/dev/shm/osc_sm.", 16)) raise(SIGSTOP);
    return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

extern "C" int open64(const char* path, int flags, ...) __attribute__((alias("open")));
