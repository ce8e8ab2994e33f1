/* Doorbells that never come: a thread sleeps until bytes arrive, and the word by which it has asked for a doorbell is cleared. It has to find
 * the bytes by looking again. Where the library does not see how it sleeps, the sender has to ring again.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/select.h>

enum { POLL, SELECT, LEVEL, EDGE, NESTED, KINDS };
enum { TURNS = 3 };
/* Of a segment, in bytes: the head, the control words of one direction, and the place of `armed` among them. */
enum { HEAD = 128, CONTROL = 896, ARMED = 256 };

static int kind, epoll, outer;
static pid_t waiter;

/* Makes every reader look as one that wants no doorbell. */
static void forget_requests(void) {
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    must(maps != NULL, "maps");
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "memfd:thruway socket"))
            for (int direction = 0; direction < 2; direction++)
                *(_Atomic uint32_t *)(strtoul(line, NULL, 16) + HEAD + direction * CONTROL + ARMED) = 0;
    fclose(maps);
}

/* Returns when a thread of this process sleeps. */
static void await_sleep(pid_t thread) {
    char path[64], stat[512], state = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    while (state != 'S') {
        FILE *file = fopen(path, "re");
        must(file != NULL && fgets(stat, sizeof stat, file) != NULL, path);
        fclose(file);
        state = strrchr(stat, ')')[2];
    }
}

/* Sends a message to the sleeping thread without a doorbell. */
static void *send_quietly(void *unused) {
    await_sleep(waiter);
    forget_requests();
    must(send(one, "hello", 5, 0) == 5, "send");
    return unused;
}

static void wait_for_other(void) {
    struct pollfd entry = {.fd = other, .events = POLLIN};
    struct epoll_event event;
    fd_set set;
    switch (kind) {
    case POLL:
        must(poll(&entry, 1, -1) == 1, "poll");
        break;
    case SELECT:
        FD_ZERO(&set);
        FD_SET(other, &set);
        must(select(other + 1, &set, NULL, NULL, NULL) == 1, "select");
        break;
    default:
        must(epoll_wait(kind == NESTED ? outer : epoll, &event, 1, -1) == 1, "epoll_wait");
    }
}

/* Connects both ends. The doorbell of the last greeting would end a sleep: it is discarded. */
static void begin(void) {
    char byte;
    connect_pair(SOCK_CLOEXEC, 60, 0);
    must(recv(other, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN, "nothing is there");
}

static void *answer_unseen(void *unused) {
    int (*unseen_poll)(struct pollfd *, nfds_t, int) = dlsym(dlopen("libc.so.6", RTLD_NOW), "poll");
    struct pollfd entry = {.fd = other, .events = POLLIN};
    must(unseen_poll != NULL && unseen_poll(&entry, 1, -1) == 1, "poll of the C library");
    exactly(other, 5);
    must(send(other, "reply", 5, 0) == 5, "send");
    return unused;
}

int main(void) {
    pthread_t thread;
    waiter = getpid();
    alarm(100);
    for (kind = 0; kind < KINDS; kind++)
        for (int turn = 0; turn < TURNS; turn++) {
            struct epoll_event event = {.events = EPOLLIN | (kind == EDGE ? EPOLLET : 0)};
            begin();
            must((epoll = epoll_create1(0)) >= 0 && (outer = epoll_create1(0)) >= 0, "epoll_create1");
            if (kind >= LEVEL)
                must(epoll_ctl(epoll, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
            must(epoll_ctl(outer, EPOLL_CTL_ADD, epoll, &event) == 0, "epoll_ctl");
            must(pthread_create(&thread, NULL, send_quietly, NULL) == 0, "pthread_create");
            wait_for_other();
            exactly(other, 5);
            pthread_join(thread, NULL);
            must(poll(&(struct pollfd){.fd = other, .events = POLLIN}, 1, 0) == 0, "nothing is left");
            close(epoll);
            close(outer);
            close(one);
            close(other);
        }
    for (int turn = 0; turn < TURNS; turn++) {
        begin();
        must(pthread_create(&thread, NULL, answer_unseen, NULL) == 0, "pthread_create");
        forget_requests();
        must(send(one, "hello", 5, 0) == 5, "send");
        must(poll(&(struct pollfd){.fd = one, .events = POLLIN}, 1, -1) == 1, "poll");
        exactly(one, 5);
        pthread_join(thread, NULL);
        close(one);
        close(other);
    }
    printf("ok\n");
    return 0;
}
