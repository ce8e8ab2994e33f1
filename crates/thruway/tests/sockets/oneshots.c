/* Threads of one or several processes wait for accelerated connections that are registered with EPOLLONESHOT. Every call of `epoll_ctl` sets new
 * data. Each event was requested, comes once, and has the data of the last call. Some connections have unread bytes when they are registered.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/mman.h>

enum { CONNECTIONS = 4, THREADS = 4, TURNS = 600, LENGTH = 64, PROCESSES = 3 };

static int ep, ends[CONNECTIONS][2];
/* Shared with the child. For each connection: number of the last `epoll_ctl` call, in `armed` 0 after its event; and the events it requested. */
static struct shared {
    unsigned long armed[CONNECTIONS], last[CONNECTIONS], done;
    unsigned events[CONNECTIONS], got[CONNECTIONS];
} *shared;
/* Number of messages that a caller sends before it waits for an answer; most bytes of one `recv` call of the server; and a flag of all registrations. */
static int depth, piece;
static unsigned flag;

static void arm(int connection, int operation, unsigned events) {
    unsigned long number = ++shared->last[connection];
    shared->events[connection] = events;
    __atomic_store_n(&shared->armed[connection], number, __ATOMIC_SEQ_CST);
    struct epoll_event event = {.events = events | flag | EPOLLONESHOT, .data.u64 = number << 8 | connection};
    if (depth > 1 && operation == EPOLL_CTL_MOD && number % 4 == 0) {
        /* The kernel ignores this event. */
        struct epoll_event ignored = {.events = EPOLLIN | EPOLLONESHOT, .data.u64 = -1};
        must(epoll_ctl(ep, EPOLL_CTL_DEL, ends[connection][1], number % 8 == 0 ? NULL : number % 16 == 4 ? &ignored : (void *)8) == 0, "epoll_ctl");
        operation = EPOLL_CTL_ADD;
    }
    must(epoll_ctl(ep, operation, ends[connection][1], &event) == 0, "epoll_ctl");
}

/* Reads a message when there is one, and answers when there is room. */
static void *serve(void *unused) {
    while (__atomic_load_n(&shared->done, __ATOMIC_SEQ_CST) < CONNECTIONS) {
        struct epoll_event event;
        char message[LENGTH];
        if (epoll_wait(ep, &event, 1, 20) != 1)
            continue;
        int connection = event.data.u64 & 0xff, fd = ends[connection][1];
        unsigned long armed = __atomic_exchange_n(&shared->armed[connection], 0, __ATOMIC_SEQ_CST);
        must(armed == event.data.u64 >> 8, "an event of an earlier call");
        must((event.events & shared->events[connection]) != 0, "an event that was not asked for");
        if (event.events & EPOLLIN) {
            ssize_t length = recv(fd, message, piece, MSG_DONTWAIT);
            must(length == piece || length == 0, "an event without data");
            if (length == 0) {
                __atomic_fetch_add(&shared->done, 1, __ATOMIC_SEQ_CST);
                continue;
            }
            unsigned got = shared->got[connection] += length;
            arm(connection, EPOLL_CTL_MOD, got % LENGTH == 0 ? EPOLLOUT : EPOLLIN);
        } else {
            must(send(fd, "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", LENGTH, 0) == LENGTH, "send");
            arm(connection, EPOLL_CTL_MOD, EPOLLIN);
        }
    }
    return unused;
}

static void *call(void *at) {
    int *pair = at;
    char message[LENGTH] = {0};
    for (int sent = 0, answered = 0; answered < TURNS;) {
        if (sent < TURNS && sent - answered < depth) {
            must(send(pair[0], message, LENGTH, 0) == LENGTH, "send");
            sent++;
        } else {
            exactly(pair[0], LENGTH);
            answered++;
        }
    }
    must(shutdown(pair[0], SHUT_WR) == 0, "shutdown");
    return NULL;
}

static void serve_by(int processes, int depth_now, int piece_now, unsigned flag_now) {
    pthread_t threads[THREADS], callers[CONNECTIONS];
    pid_t children[PROCESSES];
    memset(shared, 0, sizeof *shared);
    depth = depth_now, piece = piece_now, flag = flag_now;
    ep = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < CONNECTIONS; i++) {
        connect_pair(0, 60, 0);
        ends[i][0] = one, ends[i][1] = other;
        if (i % 2 == 0 && depth == 1)
            arm(i, EPOLL_CTL_ADD, EPOLLIN);
    }
    fflush(stdout);
    for (int i = 1; i < processes; i++)
        if ((children[i] = fork()) == 0) {
            serve(NULL);
            _exit(0);
        }
    for (int i = 0; i < CONNECTIONS; i++) {
        must(pthread_create(&callers[i], NULL, call, ends[i]) == 0, "pthread_create");
        /* Of some connections, a message is there before they are registered. */
        struct pollfd message = {.fd = ends[i][1], .events = POLLIN};
        int is_late = i % 2 == 1 || depth > 1;
        if (is_late && ((i == 1 && depth == 1) || poll(&message, 1, -1) == 1))
            arm(i, EPOLL_CTL_ADD, EPOLLIN);
    }
    for (int i = 0; i < THREADS; i++)
        must(pthread_create(&threads[i], NULL, serve, NULL) == 0, "pthread_create");
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < CONNECTIONS; i++) {
        pthread_join(callers[i], NULL);
        close(ends[i][0]);
        close(ends[i][1]);
    }
    int status = 0;
    for (int i = 1; i < processes; i++)
        must(waitpid(children[i], &status, 0) == children[i] && status == 0, "a child");
    close(ep);
    printf("served by %d processes, depth %d\n", processes, depth);
}

int main(void) {
    alarm(60);
    setvbuf(stdout, NULL, _IOLBF, 0);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(shared != MAP_FAILED, "mmap");
    for (int processes = 1; processes <= 2; processes++)
        serve_by(processes, 1, LENGTH, 0);
    for (int processes = 1; processes <= PROCESSES; processes++)
        for (int edge = 0; edge < 2; edge++)
            serve_by(processes, 8, LENGTH / 4, edge ? EPOLLET : 0);
    return 0;
}
