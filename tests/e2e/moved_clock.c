// A wall clock that is off by the seconds in the file MOVED_CLOCK, for LD_PRELOAD: libfaketime 0.9.10
// fails in Python's `time.sleep`, which sleeps until a time of the monotonic clock.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static const volatile long *seconds;
    if (!seconds) seconds = mmap(0, 8, PROT_READ, MAP_SHARED, open(getenv("MOVED_CLOCK"), O_RDONLY), 0);
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += *seconds;
    return failed;
}
