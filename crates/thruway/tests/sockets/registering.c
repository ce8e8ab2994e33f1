/* One thread registers connections with epoll. Another one has their first event before that call has returned, and changes the
 * registration at once. Later events come as it has been changed, and none comes after the connection is closed.
 *
 *     registering CONNECTIONS
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <sys/epoll.h>

#include "common.h"
#include "pair.h"

enum { EXCHANGES = 12 };

static int listener, ep, connections;
static struct sockaddr_in address;

/* Each connection sends a byte, and the rest in turns. */
static void call_in_turns(void) {
    for (int i = 0; i < connections; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        must(connect(fd, (void *)&address, sizeof address) == 0, "connect");
        for (int turn = 0; turn < EXCHANGES; turn++) {
            must(send(fd, "p", 1, 0) == 1, "send");
            exactly(fd, 1);
        }
        close(fd);
    }
}

/* The number of the connection, its descriptor, and whether its registration has been changed. */
static uint64_t data_of(int number, int fd, int is_changed) {
    return (uint64_t)number << 32 | fd << 1 | is_changed;
}

static void *register_all(void *unused) {
    for (int i = 0; i < connections; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        must(fd >= 0, "accept");
        struct epoll_event event = {.events = EPOLLIN | (i % 2 ? EPOLLONESHOT : 0), .data.u64 = data_of(i, fd, 0)};
        must(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event) == 0, "add");
    }
    return unused;
}

int main(int count, char **args) {
    must(count == 2, "registering CONNECTIONS");
    connections = atoi(args[1]);
    listener = listen_anywhere(&address);
    fflush(stdout);
    alarm(120);
    pid_t child = fork();
    if (child == 0) {
        call_in_turns();
        exit(0);
    }
    pthread_t thread;
    ep = epoll_create1(EPOLL_CLOEXEC);
    must(pthread_create(&thread, NULL, register_all, NULL) == 0, "thread");
    char *is_changed = calloc(connections, 1), *is_closed = calloc(connections, 1);
    int stale = 0, ended = 0;
    while (ended < connections) {
        struct epoll_event events[8];
        int ready = epoll_wait(ep, events, 8, -1);
        for (int i = 0; i < ready; i++) {
            int number = events[i].data.u64 >> 32, fd = (events[i].data.u64 & 0xffffffff) >> 1;
            if (is_closed[number] || (is_changed[number] && !(events[i].data.u64 & 1))) {
                stale++;
                continue;
            }
            int is_once = number % 2;
            if (!is_changed[number] || is_once) {
                struct epoll_event event = {.events = EPOLLIN | (is_once ? EPOLLONESHOT : 0), .data.u64 = data_of(number, fd, 1)};
                must(epoll_ctl(ep, EPOLL_CTL_MOD, fd, &event) == 0, "modify");
                is_changed[number] = 1;
            }
            char byte;
            int n = recv(fd, &byte, 1, MSG_DONTWAIT);
            if (n == 1) {
                must(send(fd, &byte, 1, MSG_NOSIGNAL) == 1, "send");
            } else if (n == 0 || errno != EAGAIN) {
                is_closed[number] = 1;
                close(fd);
                ended++;
            }
        }
    }
    int status;
    waitpid(child, &status, 0);
    must(status == 0, "the child");
    printf("%d stale events\n", stale);
    return stale > 0;
}
