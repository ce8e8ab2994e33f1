/* Programs that wait and receive by io_uring, or by system calls beside the C library's functions, beside ones that do not. Prints results
 * that the test compares with those of plain TCP.
 *
 *     rings raw | exclusive | early | late
 *
 * raw: by the C library's `syscall`
 * exclusive: by epoll, with EPOLLEXCLUSIVE
 * early: by a ring that is made before the connection
 * late: by a ring that is made while the connection is in use
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

enum { MESSAGE = 300, BULK = 8 << 20 };

static struct sockaddr_in address;
static struct io_uring ring;
static int ep = -1, rounds = 300;

static unsigned char byte_at(long at) {
    return (at * 2654435761u) >> 24;
}

static void send_pattern(int fd, long from, int length) {
    static unsigned char bytes[1 << 16];
    for (int sent = 0; sent < length;) {
        int some = length - sent < (int)sizeof bytes ? length - sent : (int)sizeof bytes;
        for (int i = 0; i < some; i++)
            bytes[i] = byte_at(from + sent + i);
        for (int done = 0, n; done < some; done += n) {
            n = send(fd, bytes + done, some - done, MSG_NOSIGNAL);
            must(n > 0, "send");
        }
        sent += some;
    }
}

/* The result of one request. */
static int submit(struct io_uring_sqe *request) {
    struct io_uring_cqe *done;
    request->user_data = 1;
    must(io_uring_submit(&ring) == 1, "submit");
    must(io_uring_wait_cqe(&ring, &done) == 0, "wait");
    int result = done->res;
    io_uring_cqe_seen(&ring, done);
    return result;
}

enum { POLL_ADD, RECEIVE, EPOLL_CTL, RING_MODES };
enum { RAW_POLL, RAW_PPOLL, RAW_SELECT, RAW_EPOLL, RAW_READ, RAW_MODES, EXCLUSIVE };

static int receive_by_ring(int fd, int mode, void *to, int length) {
    int n = recv(fd, to, length, MSG_DONTWAIT);
    if (n >= 0 || errno != EAGAIN)
        return n;
    struct io_uring_sqe *request = io_uring_get_sqe(&ring);
    if (mode == RECEIVE) {
        io_uring_prep_recv(request, fd, to, length, 0);
        return submit(request);
    }
    if (mode == POLL_ADD) {
        io_uring_prep_poll_add(request, fd, POLLIN);
        must(submit(request) > 0, "poll");
        return receive_by_ring(fd, mode, to, length);
    }
    struct epoll_event event = {.events = EPOLLIN};
    if (ep < 0) {
        ep = epoll_create1(EPOLL_CLOEXEC);
        io_uring_prep_epoll_ctl(request, ep, fd, EPOLL_CTL_ADD, &event);
        must(submit(request) == 0, "epoll_ctl");
    }
    must(epoll_wait(ep, &event, 1, -1) == 1, "epoll_wait");
    return receive_by_ring(fd, mode, to, length);
}

static int receive_raw(int fd, int mode, void *to, int length) {
    struct pollfd one = {.fd = fd, .events = POLLIN};
    struct epoll_event event = {.events = EPOLLIN};
    struct iovec piece = {to, length};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    switch (mode) {
    case RAW_POLL:
        must(syscall(SYS_poll, &one, 1, -1) == 1, "poll");
        return syscall(SYS_read, fd, to, length);
    case RAW_PPOLL:
        must(syscall(SYS_ppoll, &one, 1, NULL, NULL, 8) == 1, "ppoll");
        return syscall(SYS_recvfrom, fd, to, length, MSG_DONTWAIT, NULL, NULL);
    case RAW_SELECT:
        must(syscall(SYS_pselect6, fd + 1, &set, NULL, NULL, NULL, NULL) == 1, "pselect6");
        return recv(fd, to, length, MSG_DONTWAIT);
    case RAW_EPOLL:
        if (ep < 0) {
            ep = syscall(SYS_epoll_create1, EPOLL_CLOEXEC);
            must(syscall(SYS_epoll_ctl, ep, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
        }
        must(syscall(SYS_epoll_wait, ep, &event, 1, -1) == 1, "epoll_wait");
        return syscall(SYS_readv, fd, &piece, 1);
    case EXCLUSIVE:
        event.events |= EPOLLEXCLUSIVE;
        if (ep < 0) {
            ep = epoll_create1(EPOLL_CLOEXEC);
            must(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
        }
        must(epoll_wait(ep, &event, 1, -1) == 1, "epoll_wait");
        return recv(fd, to, length, MSG_DONTWAIT);
    default:
        return syscall(SYS_read, fd, to, length);
    }
}

/* How one end receives: by `mode` of a ring, by a raw call, or as most do. */
enum { PLAIN, RING, RAW };

static void receive_pattern(int fd, int way, int mode, long from, long length) {
    // Reads that fill their buffer, and others.
    static unsigned char bytes[1 << 16];
    for (long got = 0; got < length;) {
        long left = length - got, most = got % 3 ? MESSAGE : (long)sizeof bytes;
        int some = left < most ? left : most;
        int n = way == RING ? receive_by_ring(fd, mode, bytes, some) : way == RAW ? receive_raw(fd, mode, bytes, some) : recv(fd, bytes, some, 0);
        must(n > 0, "receive");
        for (int i = 0; i < n; i++)
            if (bytes[i] != byte_at(from + got + i)) {
                printf("wrong byte %ld by way %d, mode %d\n", from + got + i, way, mode);
                exit(1);
            }
        got += n;
    }
}

/* Messages to and fro, then much in each direction. `first`: sends first. */
static void talk(int fd, int way, int mode, int is_late, int first) {
    long sent = 0, got = 0;
    for (int round = 0; round < rounds; round++) {
        if (is_late && round == rounds / 3) {
            must(io_uring_queue_init(8, &ring, 0) == 0, "ring");
            is_late = 0;
        }
        int by = way == RING && round < rounds / 3 && is_late ? PLAIN : way;
        if (first) {
            send_pattern(fd, sent, MESSAGE);
            sent += MESSAGE;
        }
        receive_pattern(fd, by, mode, got, MESSAGE);
        got += MESSAGE;
        if (!first) {
            send_pattern(fd, sent, MESSAGE);
            sent += MESSAGE;
        }
    }
    for (int direction = 0; direction < 2; direction++)
        if (direction == first)
            send_pattern(fd, sent, BULK);
        else
            receive_pattern(fd, way, mode, got, BULK);
    // Both ends are done before one of them closes.
    char byte = 0;
    must(send(fd, &byte, 1, MSG_NOSIGNAL) == 1 && recv(fd, &byte, 1, 0) == 1, "end");
    close(fd);
    exit(0);
}

static pid_t start(int listener, int is_server, int way, int mode, int is_late) {
    fflush(stdout);
    pid_t child = fork();
    must(child >= 0, "fork");
    if (child > 0)
        return child;
    alarm(60);
    if (way == RING && !is_late)
        must(io_uring_queue_init(8, &ring, 0) == 0, "ring");
    int fd;
    if (is_server) {
        fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    } else {
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        must(connect(fd, (void *)&address, sizeof address) == 0, "connect");
    }
    close(listener);
    must(fd >= 0, "connection");
    talk(fd, way, mode, is_late, !is_server);
    return 0;
}

int main(int count, char **args) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    must(count == 2, "rings raw | exclusive | early | late");
    int is_exclusive = strcmp(args[1], "exclusive") == 0;
    int is_raw = is_exclusive || strcmp(args[1], "raw") == 0, is_late = strcmp(args[1], "late") == 0;
    socklen_t length = sizeof address;
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(bind(listener, (void *)&address, length) == 0 && listen(listener, 8) == 0, "listen");
    getsockname(listener, (void *)&address, &length);
    if (is_exclusive) {
        /* On one processor, an end sleeps before each message comes. */
        cpu_set_t first;
        CPU_ZERO(&first);
        sched_getaffinity(0, sizeof first, &first);
        int processor = 0;
        while (!CPU_ISSET(processor, &first))
            processor++;
        CPU_ZERO(&first);
        CPU_SET(processor, &first);
        must(sched_setaffinity(0, sizeof first, &first) == 0, "sched_setaffinity");
        rounds = 2000;
    }
    int first = is_exclusive ? EXCLUSIVE : 0, end = is_exclusive ? EXCLUSIVE + 1 : is_raw ? RAW_MODES : RING_MODES;
    for (int mode = first; mode < end; mode++)
        for (int server = 0; server < 2; server++) {
            int way = is_raw ? RAW : RING, status[2];
            pid_t one = start(listener, server, way, mode, is_late), other = start(listener, !server, PLAIN, 0, 0);
            waitpid(one, &status[0], 0);
            waitpid(other, &status[1], 0);
            printf("%s mode %d as %s: %x %x\n", args[1], mode, server ? "server" : "client", status[0], status[1]);
        }
    return 0;
}
