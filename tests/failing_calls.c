/* Loaded before the C library: the n-th call of a kind on a file of one folder fails, does a part, or is met by a
 * signal. Other files are left alone. Built and steered by tests/machine_faults.py; Linux with glibc. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN, READ, PREAD, WRITE, PWRITE, LSEEK, STAT, CLOSE, FSYNC, TRUNCATE, LINK, RENAME, UNLINK, OWNER,
            SPACE, MKDIR, LIST, KINDS };
enum action { NOTHING, FAIL, SHORT, SIGNAL };

static char folder[4096];
static atomic_int on;
static atomic_long counts[KINDS];
static int armed_kind = -1, action, value, without_unnamed, without_links;
static long armed_at;
static char hit[4200];

/* `at` counts from 0; -1 means every call. */
void faults_arm(const char *where, int kind, long at, int what, int with, int no_unnamed, int no_links)
{
    snprintf(folder, sizeof folder, "%s", where);
    for (int i = 0; i < KINDS; i++)
        counts[i] = 0;
    hit[0] = 0;
    armed_kind = kind, armed_at = at, action = what, value = with;
    without_unnamed = no_unnamed, without_links = no_links;
    on = 1;
}

void faults_disarm(void) { on = 0; }
long faults_count(int kind) { return counts[kind]; }
const char *faults_hit(void) { return hit; }

static int inside(const char *path)
{
    size_t n = strlen(folder);
    return strncmp(path, folder, n) == 0 && (path[n] == '/' || path[n] == 0);
}

static void path_of(int fd, char *path, size_t size)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, path, size - 1);
    path[n < 0 ? 0 : n] = 0;
}

/* Returns the action for this call; a signal is sent here, and the call then goes its way. */
static int met(enum kind kind, const char *path)
{
    if (!inside(path))
        return NOTHING;
    long count = counts[kind]++;
    if ((int)kind != armed_kind || (armed_at >= 0 && count != armed_at))
        return NOTHING;
    snprintf(hit, sizeof hit, "%s", path);
    if (action == SIGNAL) {
        raise(value);
        return NOTHING;
    }
    if (action == FAIL)
        errno = value;
    return action;
}

static int met_fd(enum kind kind, int fd)
{
    char path[4096];
    if (!on)
        return NOTHING;
    int saved = errno;
    path_of(fd, path, sizeof path);
    errno = saved;
    return met(kind, path);
}

static int met_at(enum kind kind, int fd, const char *name)
{
    char path[8300];
    if (!on || !name)
        return NOTHING;
    if (name[0] == '/')
        return met(kind, name);
    int saved = errno;
    char base[4096];
    if (fd == AT_FDCWD) {
        long n = syscall(SYS_readlinkat, AT_FDCWD, "/proc/self/cwd", base, sizeof base - 1);
        base[n < 0 ? 0 : n] = 0;
    } else
        path_of(fd, base, sizeof base);
    snprintf(path, sizeof path, "%s/%s", base, name);
    errno = saved;
    return met(kind, path);
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) \
        real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define SOME(count) ((count) > 1 ? (count) / 2 : (count))

static int refused(int flags, const char *path)
{
    if (!on || !without_unnamed || (flags & O_TMPFILE) != O_TMPFILE)
        return 0;
    (void)path;
    errno = EOPNOTSUPP;
    return 1;
}

#define OPENS(name) \
    int name(const char *path, int flags, ...) \
    { \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = va_arg(list, mode_t); \
        va_end(list); \
        REAL(int, #name, const char *, int, ...); \
        if (refused(flags, path) || met_at(OPEN, AT_FDCWD, path) == FAIL) \
            return -1; \
        return real(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)

#define OPENATS(name) \
    int name(int fd, const char *path, int flags, ...) \
    { \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = va_arg(list, mode_t); \
        va_end(list); \
        REAL(int, #name, int, const char *, int, ...); \
        if (refused(flags, path) || met_at(OPEN, fd, path) == FAIL) \
            return -1; \
        return real(fd, path, flags, mode); \
    }
OPENATS(openat)
OPENATS(openat64)

ssize_t read(int fd, void *data, size_t count)
{
    REAL(ssize_t, "read", int, void *, size_t);
    int what = met_fd(READ, fd);
    return what == FAIL ? -1 : real(fd, data, what == SHORT ? SOME(count) : count);
}

ssize_t write(int fd, const void *data, size_t count)
{
    REAL(ssize_t, "write", int, const void *, size_t);
    int what = met_fd(WRITE, fd);
    return what == FAIL ? -1 : real(fd, data, what == SHORT ? SOME(count) : count);
}

#define PREADS(name, offset) \
    ssize_t name(int fd, void *data, size_t count, offset at) \
    { \
        REAL(ssize_t, #name, int, void *, size_t, offset); \
        int what = met_fd(PREAD, fd); \
        return what == FAIL ? -1 : real(fd, data, what == SHORT ? SOME(count) : count, at); \
    }
PREADS(pread, off_t)
PREADS(pread64, off64_t)

#define PWRITES(name, offset) \
    ssize_t name(int fd, const void *data, size_t count, offset at) \
    { \
        REAL(ssize_t, #name, int, const void *, size_t, offset); \
        int what = met_fd(PWRITE, fd); \
        return what == FAIL ? -1 : real(fd, data, what == SHORT ? SOME(count) : count, at); \
    }
PWRITES(pwrite, off_t)
PWRITES(pwrite64, off64_t)

#define PREADVS(name, offset) \
    ssize_t name(int fd, const struct iovec *parts, int count, offset at, int flags) \
    { \
        REAL(ssize_t, #name, int, const struct iovec *, int, offset, int); \
        int what = met_fd(PREAD, fd); \
        if (what == FAIL) \
            return -1; \
        struct iovec part = {parts[0].iov_base, SOME(parts[0].iov_len)}; \
        return what == SHORT ? real(fd, &part, 1, at, flags) : real(fd, parts, count, at, flags); \
    }
PREADVS(preadv2, off_t)
PREADVS(preadv64v2, off64_t)

#define LSEEKS(name, offset) \
    offset name(int fd, offset at, int whence) \
    { \
        REAL(offset, #name, int, offset, int); \
        return met_fd(LSEEK, fd) == FAIL ? -1 : real(fd, at, whence); \
    }
LSEEKS(lseek, off_t)
LSEEKS(lseek64, off64_t)

#define STATS(name, type) \
    int name(const char *path, struct type *found) \
    { \
        REAL(int, #name, const char *, struct type *); \
        return met_at(STAT, AT_FDCWD, path) == FAIL ? -1 : real(path, found); \
    }
STATS(stat, stat)
STATS(stat64, stat64)
STATS(lstat, stat)
STATS(lstat64, stat64)

#define FSTATS(name, type) \
    int name(int fd, struct type *found) \
    { \
        REAL(int, #name, int, struct type *); \
        return met_fd(STAT, fd) == FAIL ? -1 : real(fd, found); \
    }
FSTATS(fstat, stat)
FSTATS(fstat64, stat64)

#define FSTATATS(name, type) \
    int name(int fd, const char *path, struct type *found, int flags) \
    { \
        REAL(int, #name, int, const char *, struct type *, int); \
        return met_at(STAT, fd, path) == FAIL ? -1 : real(fd, path, found, flags); \
    }
FSTATATS(fstatat, stat)
FSTATATS(fstatat64, stat64)

int close(int fd)
{
    REAL(int, "close", int);
    int what = met_fd(CLOSE, fd), error = errno;
    int result = real(fd); /* the descriptor is gone, whatever is returned */
    if (what != FAIL)
        return result;
    errno = error;
    return -1;
}

int fsync(int fd)
{
    REAL(int, "fsync", int);
    return met_fd(FSYNC, fd) == FAIL ? -1 : real(fd);
}

#define TRUNCATES(name, offset) \
    int name(int fd, offset size) \
    { \
        REAL(int, #name, int, offset); \
        return met_fd(TRUNCATE, fd) == FAIL ? -1 : real(fd, size); \
    }
TRUNCATES(ftruncate, off_t)
TRUNCATES(ftruncate64, off64_t)

int linkat(int from, const char *old, int to, const char *path, int flags)
{
    REAL(int, "linkat", int, const char *, int, const char *, int);
    if (on && without_links && old[0] != '/') { /* a file without a name has no other way to one */
        errno = EPERM;
        return -1;
    }
    return met_at(LINK, to, path) == FAIL ? -1 : real(from, old, to, path, flags);
}

int renameat(int from, const char *old, int to, const char *path)
{
    REAL(int, "renameat", int, const char *, int, const char *);
    return met_at(RENAME, to, path) == FAIL ? -1 : real(from, old, to, path);
}

int unlinkat(int fd, const char *path, int flags)
{
    REAL(int, "unlinkat", int, const char *, int);
    return met_at(UNLINK, fd, path) == FAIL ? -1 : real(fd, path, flags);
}

int unlink(const char *path)
{
    REAL(int, "unlink", const char *);
    return met_at(UNLINK, AT_FDCWD, path) == FAIL ? -1 : real(path);
}

int fchmod(int fd, mode_t mode)
{
    REAL(int, "fchmod", int, mode_t);
    return met_fd(OWNER, fd) == FAIL ? -1 : real(fd, mode);
}

int fchown(int fd, uid_t user, gid_t group)
{
    REAL(int, "fchown", int, uid_t, gid_t);
    return met_fd(OWNER, fd) == FAIL ? -1 : real(fd, user, group);
}

#define SPACES(name, type) \
    int name(const char *path, struct type *found) \
    { \
        REAL(int, #name, const char *, struct type *); \
        return met_at(SPACE, AT_FDCWD, path) == FAIL ? -1 : real(path, found); \
    }
SPACES(statvfs, statvfs)
SPACES(statvfs64, statvfs64)

int mkdir(const char *path, mode_t mode)
{
    REAL(int, "mkdir", const char *, mode_t);
    return met_at(MKDIR, AT_FDCWD, path) == FAIL ? -1 : real(path, mode);
}

#include <dirent.h>

DIR *opendir(const char *path)
{
    REAL(DIR *, "opendir", const char *);
    return met_at(LIST, AT_FDCWD, path) == FAIL ? NULL : real(path);
}
