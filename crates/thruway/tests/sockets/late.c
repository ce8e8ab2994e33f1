/* A library for LD_PRELOAD, after Thruway's: `send` returns a millisecond after the kernel has sent the bytes, as if the kernel had stopped the
 * thread then. The receiver has acted by then.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

ssize_t send(int fd, const void *from, size_t length, int flags) {
    ssize_t (*next)(int, const void *, size_t, int) = dlsym(RTLD_NEXT, "send");
    ssize_t sent = next(fd, from, length, flags);
    int error = errno;
    usleep(1000);
    errno = error;
    return sent;
}
