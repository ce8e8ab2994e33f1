/* Events that doorbells could cause or hide: connections with the same data, copies of a descriptor, registrations that another process changes or
 * leaves behind, ends of connections, and no free descriptor. One thread waits, so that the events are those of plain TCP.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>

enum { TURNS = 20, CALLS = 60, CHILDREN = 3, LEFT = 400 };

static int ep;

static void control(int operation, int fd, unsigned events, unsigned data) {
    struct epoll_event event = {.events = events, .data.u64 = data};
    must(epoll_ctl(ep, operation, fd, &event) == 0, "epoll_ctl");
}

static void connect_both(int *fd, int *peer) {
    int on = 1;
    connect_pair(SOCK_CLOEXEC, CALLS, 0);
    *fd = one;
    *peer = other;
    setsockopt(*fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(*peer, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* Number of events of one call, which waits for so many milliseconds if there is none. */
static int count(int milliseconds) {
    struct epoll_event events[8];
    int n = epoll_wait(ep, events, 8, milliseconds);
    must(n >= 0, "epoll_wait");
    return n;
}

static void turn(int fd, int peer, int *spurious, int *missed) {
    *spurious += count(3) > 0;
    must(send(peer, "abc", 3, 0) == 3, "send");
    *missed += count(20000) == 0;
    exactly(fd, 3);
    must(send(fd, "r", 1, 0) == 1, "send");
    exactly(peer, 1);
}

static void same_data(unsigned flags) {
    int fds[2], peers[2], spurious = 0, missed = 0;
    ep = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < 2; i++) {
        connect_both(&fds[i], &peers[i]);
        control(EPOLL_CTL_ADD, fds[i], EPOLLIN | flags, 1);
    }
    for (int i = 0; i < TURNS; i++)
        turn(fds[i % 2], peers[i % 2], &spurious, &missed);
    printf("same data %x: %d without bytes, %d missed\n", flags, spurious, missed);
    for (int i = 0; i < 2; i++)
        close(fds[i]), close(peers[i]);
    close(ep);
}

static void copies(unsigned first, unsigned second) {
    int fd, peer, spurious = 0, missed = 0;
    ep = epoll_create1(EPOLL_CLOEXEC);
    connect_both(&fd, &peer);
    int copy = dup(fd);
    control(EPOLL_CTL_ADD, fd, EPOLLIN | first, 1);
    control(EPOLL_CTL_ADD, copy, EPOLLIN | second, 2);
    for (int i = 0; i < TURNS; i++)
        turn(fd, peer, &spurious, &missed);
    printf("copies %x %x: %d without bytes, %d missed\n", first, second, spurious, missed);
    close(copy), close(fd), close(peer), close(ep);
}

static void in_child(void (*action)(int, int, unsigned), int fd, int peer, unsigned argument) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        action(fd, peer, argument);
        _exit(0);
    }
    must(waitpid(child, &status, 0) == child && status == 0, "the child");
}

static void change(int fd, int peer, unsigned events) {
    control(EPOLL_CTL_MOD, fd, events, 5);
}

/* A child changes the parent's registration. */
static void changed(unsigned before, unsigned after, int is_read) {
    int fd, peer, events = 0;
    ep = epoll_create1(EPOLL_CLOEXEC);
    connect_both(&fd, &peer);
    must(send(peer, "abc", 3, 0) == 3, "send");
    control(EPOLL_CTL_ADD, fd, before, 5);
    if (is_read)
        exactly(fd, 3);
    in_child(change, fd, peer, after);
    if (is_read)
        must(send(peer, "abc", 3, 0) == 3, "send");
    for (int i = 0; i < 4; i++)
        events += count(20) > 0;
    printf("%x to %x, %d: %d events\n", before, after, is_read, events);
    close(fd), close(peer), close(ep);
}

static void send_and_register(int fd, int peer, unsigned events) {
    must(send(peer, "abc", 3, 0) == 3, "send");
    control(EPOLL_CTL_ADD, fd, events, 5);
}

static void wait_in_child(int fd, int peer, unsigned events) {
    printf("in the child: %d events\n", count(50));
    fflush(stdout);
}

/* A child registers the connection, and the parent reads its bytes. */
static void read_elsewhere(void) {
    int fd, peer;
    ep = epoll_create1(EPOLL_CLOEXEC);
    connect_both(&fd, &peer);
    in_child(send_and_register, fd, peer, EPOLLIN | EPOLLONESHOT);
    exactly(fd, 3);
    must(send(fd, "0123456789", 10, 0) == 10, "send");
    control(EPOLL_CTL_ADD, peer, EPOLLIN | EPOLLONESHOT | EPOLLRDHUP, 4);
    count(0);
    in_child(wait_in_child, fd, peer, 0);
    close(fd), close(peer), close(ep);
}

/* The peer ends the connection, which has unread bytes. */
static void ended(int messages) {
    int fd, peer;
    ep = epoll_create1(EPOLL_CLOEXEC);
    connect_both(&fd, &peer);
    control(EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLET, 7);
    count(0);
    for (int i = 0; i < messages; i++) {
        if (i > 0)
            exactly(fd, 3);
        must(send(peer, "abc", 3, 0) == 3 && count(20000) == 1, "an event");
    }
    close(peer);
    printf("ended after %d: %d events\n", messages, count(20000));
    close(fd), close(ep);
}

static void *sleep_in_wait(void *thread) {
    *(volatile pid_t *)thread = syscall(SYS_gettid);
    struct epoll_event event;
    int n = epoll_wait(ep, &event, 1, 20000);
    printf("no descriptor: %d events\n", n);
    return NULL;
}

/* A thread sleeps, and another registers a connection with unread bytes, without a free descriptor. */
static void limited(void) {
    int fd, peer, copy, copied[64], copies = 0, stat;
    volatile pid_t number = 0;
    char path[64], line[512];
    struct rlimit before, now;
    pthread_t thread;
    ep = epoll_create1(EPOLL_CLOEXEC);
    connect_both(&fd, &peer);
    must(send(peer, "abc", 3, 0) == 3, "send");
    pthread_create(&thread, NULL, sleep_in_wait, (void *)&number);
    while (number == 0)
        sched_yield();
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)number);
    must((stat = open(path, O_RDONLY | O_CLOEXEC)) >= 0, "open");
    do {
        ssize_t length = pread(stat, line, sizeof line - 1, 0);
        must(length > 0, "pread");
        line[length] = 0;
    } while (strstr(line, ") S ") == NULL);
    getrlimit(RLIMIT_NOFILE, &before);
    now = before, now.rlim_cur = stat + 8;
    must(setrlimit(RLIMIT_NOFILE, &now) == 0, "setrlimit");
    while ((copy = dup(stat)) >= 0)
        copied[copies++] = copy;
    control(EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLONESHOT, 5);
    pthread_join(thread, NULL);
    must(setrlimit(RLIMIT_NOFILE, &before) == 0, "setrlimit");
    while (copies > 0)
        close(copied[--copies]);
    close(stat), close(fd), close(peer), close(ep);
}

static void serve(int fd) {
    for (int i = 0; i < CALLS; i++) {
        exactly(fd, 5);
        must(send(fd, "reply", 5, 0) == 5, "send");
    }
    must(send(fd, "abc", 3, 0) == 3, "send");
    exactly(fd, 1);
}

/* Children with one-shot registrations and unread bytes are killed, one after the other. */
static void killed(void) {
    int ready[2], fd, peer;
    char byte;
    for (int i = 0; i < CHILDREN; i++) {
        must(pipe(ready) == 0, "pipe");
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            ep = epoll_create1(EPOLL_CLOEXEC);
            for (int j = 0; j < LEFT; j++) {
                connect_pair(SOCK_CLOEXEC, 20, 0);
                fd = one, peer = other;
                send_and_register(fd, peer, EPOLLIN | EPOLLONESHOT);
            }
            must(write(ready[1], "x", 1) == 1, "write");
            for (;;)
                pause();
        }
        must(read(ready[0], &byte, 1) == 1, "read");
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        close(ready[0]), close(ready[1]);
    }
    pid_t child = connect_to_child(serve);
    for (int i = 0; i < CALLS; i++) {
        must(send(one, "hello", 5, 0) == 5, "send");
        exactly(one, 5);
    }
    struct pollfd bytes = {.fd = one, .events = POLLIN};
    must(poll(&bytes, 1, -1) == 1, "poll");
    ep = epoll_create1(EPOLL_CLOEXEC);
    control(EPOLL_CTL_ADD, one, EPOLLIN | EPOLLONESHOT, 7);
    printf("killed children: %d events\n", count(20000));
    exactly(one, 3);
    must(send(one, "x", 1, 0) == 1, "send");
    end_child(child);
    close(ep);
}

int main(void) {
    alarm(100);
    struct rlimit files = {4096, 4096};
    setrlimit(RLIMIT_NOFILE, &files);
    setvbuf(stdout, NULL, _IOLBF, 0);
    unsigned flags[] = {0, EPOLLET, EPOLLEXCLUSIVE};
    for (int i = 0; i < 3; i++)
        same_data(flags[i]);
    copies(0, 0);
    copies(0, EPOLLET);
    copies(EPOLLET, EPOLLET);
    for (int is_read = 0; is_read < 2; is_read++) {
        changed(EPOLLIN, EPOLLIN | EPOLLONESHOT, is_read);
        changed(EPOLLIN, EPOLLONESHOT, is_read);
        changed(EPOLLIN | EPOLLONESHOT, EPOLLIN | EPOLLET, is_read);
    }
    read_elsewhere();
    ended(1);
    ended(2);
    limited();
    killed();
}
