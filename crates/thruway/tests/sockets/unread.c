/* Bytes that arrive behind unread ones wake whatever waits for the connection: by an instance around that of the connection, in a child that
 * has the instance from its parent, or by poll and select for an instance that had no connection when they began.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/select.h>

enum { PIECES = 6, SECONDS = 20 };

static int ep;

static void add(int instance, int fd, unsigned events) {
    struct epoll_event event = {.events = events};
    must(epoll_ctl(instance, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
}

/* Waits again and again for a short time. */
static int has_event(int instance) {
    struct epoll_event event;
    for (int i = 0; i < SECONDS * 50; i++)
        if (epoll_wait(instance, &event, 1, 20) > 0)
            return 1;
    return 0;
}

static void connect_again(void) {
    ep = epoll_create1(EPOLL_CLOEXEC);
    connect_pair(SOCK_CLOEXEC, 20, 0);
}

static void close_all(void) {
    close(one);
    close(other);
    close(ep);
}

static void nested(void) {
    struct epoll_event event;
    int outer = epoll_create1(EPOLL_CLOEXEC);
    connect_again();
    add(ep, one, EPOLLIN | EPOLLET);
    add(outer, ep, EPOLLIN);
    for (int i = 0; i < PIECES; i++) {
        must(send(other, "piece", 5, 0) == 5, "send");
        printf("%d", has_event(outer));
        printf("%d ", epoll_wait(ep, &event, 1, 0));
    }
    printf("nested\n");
    close(outer);
    close_all();
}

static void forked(void) {
    char byte = 0;
    int status, pair[2];
    connect_again();
    add(ep, one, EPOLLIN | EPOLLET);
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < PIECES; i++) {
            printf("%d ", has_event(ep));
            must(write(pair[1], &byte, 1) == 1, "write");
        }
        printf("forked\n");
        exit(0);
    }
    for (int i = 0; i < PIECES; i++) {
        must(send(other, "piece", 5, 0) == 5, "send");
        must(read(pair[0], &byte, 1) == 1, "read");
    }
    must(waitpid(child, &status, 0) == child && status == 0, "the child");
    close(pair[0]);
    close(pair[1]);
    close_all();
}

static void *sleep_in(void *selects) {
    struct pollfd polled = {ep, POLLIN, 0};
    struct timeval limit = {SECONDS, 0};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ep, &set);
    int ready = selects ? select(ep + 1, &set, NULL, NULL, &limit) : poll(&polled, 1, SECONDS * 1000);
    printf("%d ", ready);
    return NULL;
}

/* The thread sleeps in most runs when the connection is registered. */
static void without_connections(int selects) {
    pthread_t thread;
    connect_again();
    must(send(other, "piece", 5, 0) == 5, "send");
    must(pthread_create(&thread, NULL, sleep_in, selects ? &ep : NULL) == 0, "pthread_create");
    usleep(20000);
    add(ep, one, EPOLLIN | EPOLLONESHOT);
    pthread_join(thread, NULL);
    printf("%s\n", selects ? "select" : "poll");
    close_all();
}

int main(void) {
    alarm(120);
    nested();
    forked();
    without_connections(0);
    without_connections(1);
    return 0;
}
