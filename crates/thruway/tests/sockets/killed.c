/* A program starts another one, which gives its connections back to TCP, while the last message of a peer lies in the ring. The peer is
 * killed before it takes notice. The message is read nevertheless.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>

#include "common.h"
#include "pair.h"

static int sent[2];

static void send_last(int accepted) {
    char byte, message[64] = "last";
    alarm(60);
    for (int turn = 0; turn < 100; turn++) {
        must(recv(accepted, &byte, 1, 0) == 1, "recv");
        must(send(accepted, &byte, 1, 0) == 1, "send");
    }
    must(send(accepted, message, sizeof message, 0) == sizeof message, "send");
    must(write(sent[1], "s", 1) == 1, "write");
    for (;;)
        pause();
}

int main(void) {
    alarm(60);
    for (int round = 0; round < 10; round++) {
        char byte, message[64];
        int status;
        must(pipe2(sent, O_CLOEXEC) == 0, "pipe");
        pid_t child = connect_to_child(send_last);
        // The other program inherits the connection.
        must(fcntl(one, F_SETFD, 0) == 0, "fcntl");
        for (int turn = 0; turn < 100; turn++) {
            must(send(one, "p", 1, 0) == 1, "send");
            exactly(one, 1);
        }
        must(read(sent[0], &byte, 1) == 1, "read");
        fcntl(one, F_SETFL, O_NONBLOCK);
        int ep = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = {.events = EPOLLIN};
        must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &event) == 0, "epoll_ctl");
        must(system("true") == 0, "system");
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        int n = -1;
        while (n < 0) {
            must(epoll_wait(ep, &event, 1, -1) == 1, "epoll_wait");
            n = recv(one, message, sizeof message, 0);
            must(n >= 0 || errno == EAGAIN, "the last message");
        }
        printf("%d bytes\n", n);
        close(one);
        close(ep);
        close(sent[0]);
        close(sent[1]);
    }
    return 0;
}
