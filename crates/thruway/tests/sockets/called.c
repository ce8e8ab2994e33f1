/* A server has an unread request, sends as much as there is room for, and starts another program. The client reads the answer, and
 * waits for more in some way: it has to learn from its reads that the request is to be sent again, because the direction of the server has
 * gone by TCP, where no doorbell can be sent.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/select.h>

enum { TURNS = 60, PIECE = 50000, ANSWER = 8 << 20 };

extern char **environ;
static const int requests[] = {500, 60000, 200000};
static int request, requested[2], answered[2];

static void serve(int accepted) {
    static char message[PIECE];
    int length = 0, sent;
    char byte, *arguments[] = {"true", NULL};
    pid_t child;
    alarm(60);
    /* The other program has it, too. */
    must(fcntl(accepted, F_SETFD, 0) == 0, "fcntl");
    for (int i = 0; i < TURNS; i++) {
        exactly(accepted, 64);
        must(send(accepted, message, 64, 0) == 64, "send");
    }
    must(read(requested[0], &byte, 1) == 1, "read");
    while (length < ANSWER && (sent = send(accepted, message, PIECE, MSG_DONTWAIT)) > 0)
        length += sent;
    must(posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ) == 0, "posix_spawn");
    must(waitpid(child, NULL, 0) == child, "waitpid");
    must(write(answered[1], &length, sizeof length) == sizeof length, "write");
    exactly(accepted, request);
    must(send(accepted, message, 1, 0) == 1, "send");
}

static void wait_for_more(int how, int epoll) {
    struct epoll_event event;
    struct pollfd list = {.fd = one, .events = POLLIN};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(one, &set);
    switch (how) {
    case 0:
        must(epoll_wait(epoll, &event, 1, -1) == 1, "epoll_wait");
        break;
    case 1:
        must(poll(&list, 1, -1) == 1, "poll");
        break;
    case 2:
        must(select(one + 1, &set, NULL, NULL, NULL) == 1, "select");
    }
}

int main(void) {
    static char message[200000];
    int length;
    alarm(60);
    for (int how = 0; how < 4; how++) {
        for (unsigned i = 0; i < sizeof requests / sizeof *requests; i++) {
            request = requests[i];
            must(pipe(requested) == 0 && pipe(answered) == 0, "pipe");
            pid_t server = connect_to_child(serve);
            struct epoll_event event = {.events = EPOLLIN};
            int epoll = epoll_create1(EPOLL_CLOEXEC);
            if (how == 0)
                must(epoll_ctl(epoll, EPOLL_CTL_ADD, one, &event) == 0, "epoll_ctl");
            for (int turn = 0; turn < TURNS; turn++) {
                must(send(one, message, 64, 0) == 64, "send");
                exactly(one, 64);
            }
            must(send(one, message, request, 0) == request, "send");
            must(write(requested[1], "r", 1) == 1, "write");
            must(read(answered[0], &length, sizeof length) == sizeof length, "read");
            exactly(one, length);
            wait_for_more(how, epoll);
            exactly(one, 1);
            close(epoll);
            end_child(server);
            for (int end = 0; end < 2; end++) {
                close(requested[end]);
                close(answered[end]);
            }
        }
    }
    return 0;
}
