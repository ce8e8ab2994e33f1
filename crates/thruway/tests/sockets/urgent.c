/* Urgent data on a connection in use. Prints results that the test compares with those of plain TCP.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>

#include "common.h"
#include "pair.h"

static void echo(int accepted) {
    char byte;
    while (recv(accepted, &byte, 1, 0) == 1 && byte != 'a')
        must(send(accepted, &byte, 1, 0) == 1, "send");
    must(byte == 'a', "the first byte behind the exchanges");
}

/* Receives to the end, and counts. */
static void count(int accepted, const char *how) {
    long before = 1, behind = 0, others = 0;
    char bytes[4096];
    int ep = epoll_create1(EPOLL_CLOEXEC), n;
    struct epoll_event event = {.events = EPOLLIN};
    must(epoll_ctl(ep, EPOLL_CTL_ADD, accepted, &event) == 0, "epoll");
    int waits = how[0] == 'w';
    for (;;) {
        if (!waits)
            epoll_wait(ep, &event, 1, -1);
        n = recv(accepted, bytes, sizeof bytes, waits ? 0 : MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN)
            continue;
        if (n <= 0)
            break;
        for (int i = 0; i < n; i++) {
            before += bytes[i] == 'a';
            behind += bytes[i] == 'b';
            others += bytes[i] != 'a' && bytes[i] != 'b';
        }
    }
    printf("%s: %ld before, %ld behind, %ld others, end %d\n", how, before, behind, others, n);
}

static void waiting(int accepted) {
    echo(accepted);
    count(accepted, "waiting");
}

static void polling(int accepted) {
    echo(accepted);
    count(accepted, "polling");
}

int main(void) {
    alarm(60);
    void (*ends[])(int) = {waiting, polling};
    for (int i = 0; i < 2; i++) {
        pid_t child = connect_to_child(ends[i]);
        for (int turn = 0; turn < 100; turn++) {
            must(send(one, "p", 1, 0) == 1, "send");
            exactly(one, 1);
        }
        static char before[5000], behind[300000];
        memset(before, 'a', sizeof before);
        memset(behind, 'b', sizeof behind);
        must(send(one, before, sizeof before, 0) == sizeof before, "send");
        must(send(one, "!", 1, MSG_OOB) == 1, "urgent");
        must(send(one, behind, sizeof behind, 0) == sizeof behind, "send");
        shutdown(one, SHUT_WR);
        end_child(child);
    }
    return 0;
}
