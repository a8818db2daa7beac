/* Faults of one process, preloaded (LD_PRELOAD) and steered by a mapped control file (fault_shim.py):

   - CLOCK_REALTIME is shifted, for clock_gettime, gettimeofday and time; monotonic clocks are not.
   - calls on files below a directory fail with an errno, every nth of the chosen kinds.

   A process without FAULT_CONTROL in its environment is not touched. A close that fails has closed its descriptor, as
   on Linux; every other failed call has no effect. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, FSYNC = 4, RENAME = 8, LINK = 16, UNLINK = 32, CLOSE = 64 };

struct control {
    int64_t clock_ns;
    int32_t error;
    uint32_t calls, every, seen, failed;
    char below[484];
};

static struct control *volatile control;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Also called by a process that was forked by a server and has got an environment of its own since. */
void fault_shim_open(void) {
    const char *path = getenv("FAULT_CONTROL");
    control = NULL;
    if (!path) return;
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int (*real_close)(int) = dlsym(RTLD_NEXT, "close");
    int fd = real_open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) abort();
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) abort();
    real_close(fd);
    control = mapped;
}

__attribute__((constructor)) static void begin(void) { fault_shim_open(); }

static int armed(unsigned call) {
    struct control *c = control;
    return c && c->error && (c->calls & call);
}

static int hits(const char *path) {
    struct control *c = control;
    size_t length = strnlen(c->below, sizeof c->below);
    if (strncmp(path, c->below, length) != 0 || (path[length] != '/' && path[length] != 0)) return 0;
    if (__atomic_fetch_add(&c->seen, 1, __ATOMIC_RELAXED) % (c->every ? c->every : 1) != 0) return 0;
    __atomic_fetch_add(&c->failed, 1, __ATOMIC_RELAXED);
    errno = c->error;
    return 1;
}

static int hits_fd(unsigned call, int fd) {
    char name[64], path[PATH_MAX];
    if (!armed(call)) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return hits(path);
}

static int hits_at(unsigned call, int directory, const char *path) {
    char name[64], whole[2 * PATH_MAX];
    if (!armed(call)) return 0;
    if (path[0] == '/') return hits(path);
    if (directory == AT_FDCWD) snprintf(name, sizeof name, "/proc/self/cwd");
    else snprintf(name, sizeof name, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(name, whole, PATH_MAX - 1);
    if (length <= 0) return 0;
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return hits(whole);
}

#define OPENING(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return hits_at(OPEN, AT_FDCWD, path) ? -1 : real(path, flags, mode); \
    }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name) \
    int name(int directory, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return hits_at(OPEN, directory, path) ? -1 : real(directory, path, flags, mode); \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

ssize_t write(int fd, const void *content, size_t size) {
    REAL(write);
    return hits_fd(WRITE, fd) ? -1 : real(fd, content, size);
}

ssize_t pwrite(int fd, const void *content, size_t size, off_t at) {
    REAL(pwrite);
    return hits_fd(WRITE, fd) ? -1 : real(fd, content, size, at);
}

ssize_t pwrite64(int fd, const void *content, size_t size, off64_t at) {
    REAL(pwrite64);
    return hits_fd(WRITE, fd) ? -1 : real(fd, content, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    return hits_fd(WRITE, fd) ? -1 : real(fd, parts, count);
}

#define WRITING_VECTORS(name, offset) \
    ssize_t name(int fd, const struct iovec *parts, int count, offset at) { \
        REAL(name); \
        return hits_fd(WRITE, fd) ? -1 : real(fd, parts, count, at); \
    }
WRITING_VECTORS(pwritev, off_t)
WRITING_VECTORS(pwritev64, off64_t)

#define WRITING_VECTORS_2(name, offset) \
    ssize_t name(int fd, const struct iovec *parts, int count, offset at, int flags) { \
        REAL(name); \
        return hits_fd(WRITE, fd) ? -1 : real(fd, parts, count, at, flags); \
    }
WRITING_VECTORS_2(pwritev2, off_t)
WRITING_VECTORS_2(pwritev64v2, off64_t)

int fsync(int fd) {
    REAL(fsync);
    return hits_fd(FSYNC, fd) ? -1 : real(fd);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    return hits_fd(FSYNC, fd) ? -1 : real(fd);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    return hits_at(RENAME, AT_FDCWD, to) ? -1 : real(from, to);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    REAL(renameat);
    return hits_at(RENAME, to_directory, to) ? -1 : real(from_directory, from, to_directory, to);
}

int link(const char *from, const char *to) {
    REAL(link);
    return hits_at(LINK, AT_FDCWD, to) ? -1 : real(from, to);
}

int linkat(int from_directory, const char *from, int to_directory, const char *to, int flags) {
    REAL(linkat);
    return hits_at(LINK, to_directory, to) ? -1 : real(from_directory, from, to_directory, to, flags);
}

int unlink(const char *path) {
    REAL(unlink);
    return hits_at(UNLINK, AT_FDCWD, path) ? -1 : real(path);
}

int unlinkat(int directory, const char *path, int flags) {
    REAL(unlinkat);
    return hits_at(UNLINK, directory, path) ? -1 : real(directory, path, flags);
}

int close(int fd) {
    REAL(close);
    int failed = hits_fd(CLOSE, fd), error = errno;
    int result = real(fd);
    if (!failed) return result;
    errno = error;
    return -1;
}

static void shift(int64_t *seconds, int64_t *nanoseconds) {
    struct control *c = control;
    if (!c || !c->clock_ns) return;
    int64_t total = *seconds * 1000000000 + *nanoseconds + c->clock_ns;
    *seconds = total / 1000000000;
    *nanoseconds = total % 1000000000;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t seconds = now->tv_sec, nanoseconds = now->tv_nsec;
        shift(&seconds, &nanoseconds);
        now->tv_sec = seconds, now->tv_nsec = nanoseconds;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(gettimeofday);
    int result = real(now, zone);
    if (result == 0) {
        int64_t seconds = now->tv_sec, nanoseconds = now->tv_usec * 1000;
        shift(&seconds, &nanoseconds);
        now->tv_sec = seconds, now->tv_usec = nanoseconds / 1000;
    }
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
