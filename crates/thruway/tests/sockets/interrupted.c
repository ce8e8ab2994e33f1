/* A signal handler ends a call that waits, as on TCP, whenever it runs: also at the moment at which the library looks at its connections during
 * a long sleep, and when the call has received a part of what it waits for.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/time.h>

/* The first look is after 100 ms. A signal that comes before the call, on a busy machine, does not end it: a second one does. */
enum { ROUNDS = 24, LOST_MAX = 6, LOOK = 100000, SECOND = 1000000 };

static atomic_int handled, is_over;
static pthread_t waiter;

static void handle(int signal) {
    (void)signal;
    handled++;
}

static void handle_by(int signal, int flags) {
    struct sigaction action = {.sa_handler = handle, .sa_flags = flags};
    must(sigaction(signal, &action, NULL) == 0, "sigaction");
}

static void be_interrupted_at_a_look(int by_epoll) {
    struct epoll_event event = {.events = EPOLLIN};
    int lost = 0, epoll = epoll_create1(0);
    handle_by(SIGALRM, SA_RESTART);
    connect_pair(SOCK_CLOEXEC, 60, 0);
    must(epoll_ctl(epoll, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
    must(recv(other, &event, 1, MSG_DONTWAIT) < 0, "nothing is there");
    for (int round = 0; round < ROUNDS; round++) {
        struct itimerval time = {.it_interval = {.tv_sec = SECOND / 1000000}, .it_value = {.tv_usec = LOOK + 10 * round}};
        handled = 0;
        setitimer(ITIMER_REAL, &time, NULL);
        int ready = by_epoll ? epoll_wait(epoll, &event, 1, -1) : poll(&(struct pollfd){.fd = other, .events = POLLIN}, 1, -1);
        must(ready < 0 && errno == EINTR, "the wait ends by the signal");
        lost += handled > 1;
        setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
    }
    errno = 0;
    must(lost <= LOST_MAX, "the first signal ends the wait");
    close(epoll);
    close(one);
    close(other);
}

static void *interrupt(void *unused) {
    while (!is_over) {
        pthread_kill(waiter, SIGUSR1);
        poll(NULL, 0, 10);
    }
    return unused;
}

static void be_interrupted_with_a_part(void) {
    char buffer[1000] = {0};
    pthread_t thread;
    handle_by(SIGUSR1, SA_RESTART);
    connect_pair(SOCK_CLOEXEC, 60, 0);
    must(send(one, buffer, 500, 0) == 500, "send");
    waiter = pthread_self();
    must(pthread_create(&thread, NULL, interrupt, NULL) == 0, "pthread_create");
    int length = recv(other, buffer, sizeof buffer, MSG_WAITALL);
    is_over = 1;
    pthread_join(thread, NULL);
    must(length == 500, "a part");
    close(one);
    close(other);
}

/* Ends the program if a wait does not end. */
static void *watch(void *unused) {
    poll(NULL, 0, 110000);
    printf("a wait does not end\n");
    exit(1);
    return unused;
}

int main(void) {
    pthread_t watcher;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    must(pthread_create(&watcher, NULL, watch, NULL) == 0, "pthread_create");
    pthread_sigmask(SIG_UNBLOCK, &all, NULL);
    be_interrupted_at_a_look(1);
    be_interrupted_at_a_look(0);
    be_interrupted_with_a_part();
    printf("ok\n");
    return 0;
}
