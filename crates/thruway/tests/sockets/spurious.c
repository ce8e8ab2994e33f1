/* A loop with blocking sockets, which receives one message for each event: an event without a message stops it for ever. The connections are
 * registered exclusively, or with an instance from before a fork, or by two descriptors with the same data.
 */
#define _GNU_SOURCE
#include <sys/epoll.h>

#include "common.h"
#include "pair.h"

enum { TURNS = 3000, LENGTH = 64 };

static void serve(int listener, int ep, const char *how) {
    char message[LENGTH];
    for (int i = 0; i < 2; i++) {
        int accepted = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        struct epoll_event event = {.events = EPOLLIN, .data.fd = accepted};
        must(accepted >= 0, "accept");
        if (strcmp(how, "exclusive") == 0)
            event.events |= EPOLLEXCLUSIVE;
        must(epoll_ctl(ep, EPOLL_CTL_ADD, accepted, &event) == 0, "epoll_ctl");
        event.events = 0;
        if (strcmp(how, "duplicate") == 0)
            must(epoll_ctl(ep, EPOLL_CTL_ADD, dup(accepted), &event) == 0, "epoll_ctl");
    }
    for (;;) {
        struct epoll_event events[8];
        int ready = epoll_wait(ep, events, 8, -1);
        must(ready > 0, "epoll_wait");
        for (int i = 0; i < ready; i++) {
            int n = recv(events[i].data.fd, message, LENGTH, 0);
            if (n == 0)
                return;
            must(n == LENGTH, "recv");
            must(send(events[i].data.fd, message, LENGTH, 0) == LENGTH, "send");
        }
    }
}

int main(int count, char **arguments) {
    struct sockaddr_in address;
    int listener = listen_anywhere(&address), connections[2], status;
    int ep = count > 1 && strcmp(arguments[1], "inherited") == 0 ? epoll_create1(EPOLL_CLOEXEC) : -1;
    alarm(60);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        serve(listener, ep >= 0 ? ep : epoll_create1(EPOLL_CLOEXEC), arguments[1]);
        exit(0);
    }
    for (int i = 0; i < 2; i++) {
        connections[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        must(connect(connections[i], (void *)&address, sizeof address) == 0, "connect");
    }
    for (int turn = 0; turn < TURNS; turn++) {
        // The second connection is used rarely.
        int fd = connections[turn > 200 ? turn % 50 == 0 : turn % 2];
        char message[LENGTH] = "";
        must(send(fd, message, LENGTH, 0) == LENGTH, "send");
        exactly(fd, LENGTH);
    }
    close(connections[0]);
    close(connections[1]);
    must(waitpid(child, &status, 0) == child && status == 0, "the server");
    printf("%d turns\n", TURNS);
    return 0;
}
