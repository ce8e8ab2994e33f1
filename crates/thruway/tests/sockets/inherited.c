/* A program reads once for each event of epoll, so that its peer need not ring. Then something waits that only the kernel wakes: the child of
 * a fork, with bytes that lay in the ring before, or a signal (O_ASYNC). It has to learn of the bytes.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/syscall.h>

enum { TURNS = 60, LENGTH = 3000 };

static char message[LENGTH];
static int epoll;

/* Receives the next message by epoll, without a call that finds nothing. */
static void next(void) {
    struct epoll_event event;
    must(epoll_wait(epoll, &event, 1, 60000) == 1, "epoll_wait");
    must(recv(other, message, LENGTH, 0) == LENGTH, "recv");
}

static void begin(unsigned events) {
    struct epoll_event event = {.events = events};
    epoll = epoll_create1(EPOLL_CLOEXEC);
    connect_pair(0, 0, 0);
    must(epoll_ctl(epoll, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
    for (int turn = 0; turn < TURNS; turn++) {
        must(send(one, message, LENGTH, 0) == LENGTH, "send");
        next();
        must(send(other, message, 64, 0) == 64, "send");
        exactly(one, 64);
    }
}

static void end(void) {
    close(one);
    close(other);
    close(epoll);
}

static int answer(void *unused) {
    (void)unused;
    alarm(60);
    next();
    must(send(other, message, 64, 0) == 64, "send");
    _exit(0);
}

/* Runs `answer` in a child: by fork, by the system call, or by clone. */
static pid_t start_child(int how) {
    static char stack[1 << 16] __attribute__((aligned(16)));
    if (how == 2)
        return clone(answer, stack + sizeof stack, SIGCHLD, NULL);
    pid_t child = how ? syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
    if (child == 0)
        answer(NULL);
    return child;
}

/* `daemon`: the parent closes its end, as it does when it ends. */
static void fork_with_bytes(unsigned events, int how, int is_daemon) {
    int status;
    begin(events);
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    fflush(stdout);
    pid_t child = start_child(how);
    must(child > 0, "fork");
    if (is_daemon)
        close(other);
    exactly(one, 64);
    must(waitpid(child, &status, 0) == child && status == 0, "the child");
    end();
}

static void wait_for_a_signal(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGIO);
    sigprocmask(SIG_BLOCK, &set, NULL);
    begin(EPOLLIN);
    must(fcntl(other, F_SETOWN, getpid()) == 0, "F_SETOWN");
    must(fcntl(other, F_SETFL, O_ASYNC) == 0, "O_ASYNC");
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    must(sigwaitinfo(&set, NULL) == SIGIO, "sigwaitinfo");
    next();
    end();
}

int main(void) {
    alarm(60);
    for (int how = 0; how < 3; how++) {
        for (int is_daemon = 0; is_daemon < 2; is_daemon++) {
            fork_with_bytes(EPOLLIN, how, is_daemon);
            fork_with_bytes(EPOLLIN | EPOLLET, how, is_daemon);
        }
    }
    wait_for_a_signal();
    return 0;
}
