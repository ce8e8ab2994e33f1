/* Both ends of a connection have unread bytes in the ring, which precede bytes that went by TCP, and both first use io_uring at the same time.
 * Each end sends the bytes of its direction again for the other one.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/syscall.h>

#include "common.h"
#include "pair.h"

enum { TURNS = 200, LENGTH = 100000 };

/* Each end tells the other one how much it has sent. */
static int sent[2][2];
/* Each end then ends its direction. */
static int ends;

static void exchange(int fd, int is_first) {
    for (int turn = 0; turn < TURNS; turn++) {
        if (is_first)
            must(send(fd, "p", 1, 0) == 1, "send");
        exactly(fd, 1);
        if (!is_first)
            must(send(fd, "p", 1, 0) == 1, "send");
    }
}

static void both(int fd, int end) {
    static char bytes[LENGTH], got[LENGTH];
    struct io_uring_params params = {0};
    alarm(60);
    exchange(fd, end);
    for (int i = 0; i < LENGTH; i++)
        bytes[i] = i * 7 + i / 251;
    long length = send(fd, bytes, LENGTH, MSG_DONTWAIT), received = 0, n;
    must(length > LENGTH / 2, "send");
    must(write(sent[end][1], &length, sizeof length) == sizeof length, "write");
    must(read(sent[!end][0], &length, sizeof length) == sizeof length, "the other end");
    int ring = syscall(SYS_io_uring_setup, 4, &params);
    must(ring >= 0, "io_uring_setup");
    if (ends)
        must(shutdown(fd, SHUT_WR) == 0, "shutdown");
    for (; received < length; received += n) {
        n = recv(fd, got, LENGTH, 0);
        must(n > 0 && received + n <= length && memcmp(got, bytes + received, n) == 0, "recv");
    }
    must(!ends || recv(fd, got, LENGTH, 0) == 0, "the end");
    must(write(sent[end][1], "d", 1) == 1, "write");
    /* The other end may still wait for bytes that this one has to send again. */
    struct pollfd last[] = {{.fd = fd, .events = POLLIN}, {.fd = sent[!end][0], .events = POLLIN}};
    while (!last[1].revents)
        must(poll(last, 2, -1) > 0, "poll");
}

static void serve(int fd) { both(fd, 0); }

int main(int count, char **arguments) {
    (void)arguments;
    ends = count > 1;
    must(pipe2(sent[0], O_CLOEXEC) == 0 && pipe2(sent[1], O_CLOEXEC) == 0, "pipe");
    pid_t child = connect_to_child(serve);
    both(one, 1);
    end_child(child);
    return 0;
}
