/* Connections that are handed to a program without the library (SCM_RIGHTS), in the middle of a stream. The peer is a child that still
 * sends, or that has sent all and waits for the answer in one of several ways. Prints results that the test compares with those of plain
 * TCP.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <sys/epoll.h>

#include "common.h"
#include "pair.h"

enum { TURNS = 30, MESSAGE = 64 };

static unsigned char at(uint64_t position) {
    uint64_t mixed = position * 0x9E3779B97F4A7C15ull;
    return (mixed ^ mixed >> 29) >> 40;
}

/* Of this process's stream. */
static uint64_t total;
static int is_nonblocking;
static enum { BY_RECV, BY_POLL, BY_EPOLL } way;

static void wait_for(int fd, int events) {
    if (way == BY_EPOLL) {
        int instance = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = {.events = events};
        must(epoll_ctl(instance, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
        must(epoll_wait(instance, &event, 1, -1) == 1, "epoll_wait");
        close(instance);
    } else {
        struct pollfd entry = {fd, events, 0};
        must(poll(&entry, 1, -1) == 1, "poll");
    }
}

static void send_stream(int fd) {
    static unsigned char bytes[40000];
    uint64_t sent = 0;
    for (int i = 0; i < TURNS; i++) {
        exactly(fd, MESSAGE);
        must(send(fd, bytes, MESSAGE, 0) == MESSAGE, "send");
    }
    if (is_nonblocking)
        fcntl(fd, F_SETFL, O_NONBLOCK);
    while (sent < total) {
        size_t length = 1 + sent * 7919 % sizeof bytes;
        length = length < total - sent ? length : total - sent;
        for (size_t i = 0; i < length; i++)
            bytes[i] = at(sent + i);
        ssize_t n = send(fd, bytes, length, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN)
            wait_for(fd, POLLOUT);
        else {
            must(n > 0, "send");
            sent += n;
        }
    }
    if (way != BY_RECV)
        wait_for(fd, POLLIN);
    uint64_t answer;
    if (is_nonblocking && way == BY_RECV)
        fcntl(fd, F_SETFL, 0);
    must(recv(fd, &answer, sizeof answer, MSG_WAITALL) == sizeof answer && answer == total, "answer");
}

/* Reads a part of the stream. Its end. */
static uint64_t read_stream(int fd, uint64_t from, uint64_t to) {
    static unsigned char bytes[3000];
    while (from < to) {
        size_t length = to - from < sizeof bytes ? to - from : sizeof bytes;
        ssize_t n = recv(fd, bytes, length, 0);
        must(n > 0, "recv of what was handed over");
        for (ssize_t i = 0; i < n; i++, from++)
            must(bytes[i] == at(from), "the byte");
    }
    return from;
}

/* The program that is handed a connection: `handed END`, its standard input is a Unix socket. */
static int take_over(uint64_t end) {
    uint64_t position;
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec piece = {&position, sizeof position};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    must(recvmsg(0, &message, 0) == sizeof position, "recvmsg");
    int fd;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    must(read_stream(fd, position, end) == end, "the stream");
    must(send(fd, &end, sizeof end, MSG_NOSIGNAL) == sizeof end, "answer");
    return 0;
}

static pid_t start_other_program(int *channel) {
    int ends[2];
    char end[32];
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 0);
        unsetenv("LD_PRELOAD");
        snprintf(end, sizeof end, "%llu", (unsigned long long)total);
        execl("/proc/self/exe", "handed", end, NULL);
        exit(1);
    }
    close(ends[1]);
    *channel = ends[0];
    return child;
}

static void hand_over(int channel, int fd, uint64_t position) {
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec piece = {&position, sizeof position};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    must(sendmsg(channel, &message, 0) == sizeof position, "sendmsg");
}

static void hand_in_the_middle(const char *name, uint64_t length, int step) {
    total = length;
    int handed = 0;
    for (int part = 1; part < 10; part += step) {
        int channel, status;
        pid_t program = start_other_program(&channel), child = connect_to_child(send_stream);
        char bytes[MESSAGE] = {0};
        for (int i = 0; i < TURNS; i++) {
            must(send(one, bytes, MESSAGE, 0) == MESSAGE, "send");
            exactly(one, MESSAGE);
        }
        uint64_t position = read_stream(one, 0, total * part / 10 + part);
        hand_over(channel, one, position);
        close(one);
        waitpid(program, &status, 0);
        must(status == 0, "the other program");
        waitpid(child, &status, 0);
        must(status == 0, "the child");
        close(channel);
        handed++;
    }
    printf("%s: %d handed over\n", name, handed);
}

int main(int count, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count > 1)
        return take_over(strtoull(arguments[1], NULL, 10));
    for (way = BY_RECV; way <= BY_EPOLL; way++)
        for (is_nonblocking = 0; is_nonblocking < 2; is_nonblocking++) {
            printf("way %d, nonblocking %d\n", way, is_nonblocking);
            // Less than a ring, more than one, and more than the kernel's buffers.
            hand_in_the_middle("100 kB", 100000, 4);
            hand_in_the_middle("1 MB", 1000000, 2);
            hand_in_the_middle("8 MB", 8000000, 2);
        }
    return 0;
}
