// For LD_PRELOAD: a task that stalls (--debug-stall) never ends, even if the run is aborted. Only a stall sleeps for exactly a
// millisecond.
#include <cerrno>
#include <cstring>
#include <ctime>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" int nanosleep(const struct timespec* time, struct timespec* left) {
    const bool ours = !strncmp(program_invocation_short_name, "mpk-", 4);
    while (ours && time->tv_sec == 0 && time->tv_nsec == 1000000) pause();
    return static_cast<int>(syscall(SYS_nanosleep, time, left));
}
