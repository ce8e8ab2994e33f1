/* Threads that sleep until something comes, by every call that does, and what ends their sleep. Prints results that the test compares
 * with those of plain TCP. */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>

enum { ROUNDS = 400 };

/* Long enough for both ends to be accelerated, mostly. */
static void connect_both(void) {
    int yes = 1;
    connect_pair(SOCK_CLOEXEC, 1000, 0);
    setsockopt(one, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    setsockopt(other, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

static void close_both(void) {
    close(one);
    close(other);
}

/* The other end sends back each byte, some time later or at once. */
static void *echo(void *unused) {
    char byte;
    for (int i = 0; recv(other, &byte, 1, 0) == 1; i++) {
        if (i % 3)
            usleep(i % 7 * 50);
        must(send(other, &byte, 1, 0) == 1, "send back");
    }
    shutdown(other, SHUT_WR);
    return unused;
}

static void start(pthread_t *thread) {
    connect_both();
    pthread_create(thread, NULL, echo, NULL);
}

static void stop(pthread_t thread, const char *what) {
    shutdown(one, SHUT_WR);
    char byte;
    int end = recv(one, &byte, 1, 0);
    pthread_join(thread, NULL);
    close_both();
    printf("%s, end %d\n", what, end);
}

static void by_recv(int limit) {
    pthread_t thread;
    start(&thread);
    struct timeval time = {.tv_sec = limit};
    setsockopt(one, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
    for (int i = 0; i < ROUNDS; i++) {
        send(one, "x", 1, 0);
        exactly(one, 1);
    }
    stop(thread, limit ? "recv with a limit" : "recv");
}

static void by_poll(void) {
    pthread_t thread;
    start(&thread);
    for (int i = 0; i < ROUNDS; i++) {
        struct pollfd list[] = {{.fd = -1}, {.fd = one, .events = POLLIN}, {.fd = 0, .events = 0}, {.fd = one, .events = POLLRDNORM}};
        send(one, "x", 1, 0);
        /* It may come when the kernel has looked at the first of the two. */
        must(poll(list, 4, 20000) > 0 && (list[1].revents == POLLIN || list[3].revents == POLLRDNORM), "poll");
        exactly(one, 1);
    }
    struct pollfd none = {.fd = one, .events = POLLIN};
    printf("nothing more: %d\n", poll(&none, 1, 1));
    stop(thread, "poll");
}

static void by_select(void) {
    pthread_t thread;
    start(&thread);
    for (int i = 0; i < ROUNDS; i++) {
        fd_set set;
        FD_ZERO(&set);
        FD_SET(one, &set);
        send(one, "x", 1, 0);
        must(select(one + 1, &set, NULL, NULL, NULL) == 1 && FD_ISSET(one, &set), "select");
        exactly(one, 1);
    }
    stop(thread, "select");
}

/* The data of the registration changes now and then, and the connection is taken out and put back. */
static void by_epoll(unsigned events, const char *what) {
    pthread_t thread;
    start(&thread);
    int ep = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event wanted = {.events = events, .data.u64 = 1}, got[4];
    must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
    for (int i = 0; i < ROUNDS; i++) {
        if (i % 50 == 49) {
            epoll_ctl(ep, EPOLL_CTL_DEL, one, NULL);
            must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
        } else if (i % 10 == 9 || events & EPOLLONESHOT) {
            wanted.data.u64++;
            must(epoll_ctl(ep, EPOLL_CTL_MOD, one, &wanted) == 0, "epoll_ctl");
        }
        send(one, "x", 1, 0);
        int ready;
        do
            ready = epoll_wait(ep, got, 4, 20000);
        while (ready == 1 && !(got[0].events & EPOLLIN));
        must(ready == 1 && got[0].data.u64 == wanted.data.u64, "epoll_wait");
        exactly(one, 1);
    }
    if (!(events & EPOLLOUT))
        printf("nothing more: %d\n", epoll_wait(ep, got, 4, 1));
    stop(thread, what);
    close(ep);
}

/* A connection that is registered with two instances, and one of these with another. */
static void by_several(void) {
    pthread_t thread;
    start(&thread);
    int inner = epoll_create1(EPOLL_CLOEXEC), outer = epoll_create1(EPOLL_CLOEXEC), second = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event wanted = {.events = EPOLLIN}, got;
    must(epoll_ctl(inner, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
    must(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &wanted) == 0, "epoll_ctl");
    for (int i = 0; i < ROUNDS; i++) {
        if (i == ROUNDS / 2)
            must(epoll_ctl(second, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
        send(one, "x", 1, 0);
        struct pollfd list = {.fd = inner, .events = POLLIN};
        switch (i % 4) {
        case 0:
            must(epoll_wait(outer, &got, 1, 20000) == 1, "outer");
            break;
        case 1:
            must(poll(&list, 1, 20000) == 1, "poll of an epoll instance");
            break;
        case 2:
            must(epoll_wait(i < ROUNDS / 2 ? inner : second, &got, 1, 20000) == 1, "second");
            break;
        }
        must(epoll_wait(inner, &got, 1, 20000) == 1, "inner");
        exactly(one, 1);
    }
    stop(thread, "several");
    close(inner);
    close(outer);
    close(second);
}

static void *say_last(void *unused) {
    send(other, "x", 1, 0);
    shutdown(other, SHUT_WR);
    return unused;
}

/* The last byte and the end of the connection come together, and are one event: the program may free its data then. */
static void one_event(void) {
    for (int i = 0; i < 8; i++) {
        connect_both();
        int ep = epoll_create1(EPOLL_CLOEXEC), ready = 1, all = 0;
        struct epoll_event wanted = {.events = EPOLLIN | EPOLLRDHUP | (i % 2 ? EPOLLET : 0)}, got[4];
        must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
        /* A thread that sleeps once is registered to be woken. */
        epoll_wait(ep, got, 4, 1);
        pthread_t thread;
        pthread_create(&thread, NULL, say_last, NULL);
        while (ready == 1 && !(all & EPOLLRDHUP)) {
            ready = epoll_wait(ep, got, 4, 20000);
            all |= got[0].events;
        }
        must(ready == 1, "one event");
        exactly(one, 1);
        pthread_join(thread, NULL);
        close_both();
        close(ep);
    }
    printf("one event\n");
}

/* What an instance has been told of a connection is over when that is taken out, also if it has been with another one meanwhile. */
static void taken_out(void) {
    pthread_t thread;
    start(&thread);
    int first = epoll_create1(EPOLL_CLOEXEC), second = epoll_create1(EPOLL_CLOEXEC), wrong = 0;
    struct epoll_event wanted = {.events = EPOLLIN, .data.u64 = 7}, got;
    must(epoll_ctl(first, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
    epoll_wait(first, &got, 1, 1);
    must(epoll_ctl(second, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
    must(epoll_ctl(second, EPOLL_CTL_DEL, one, NULL) == 0, "epoll_ctl");
    must(epoll_ctl(first, EPOLL_CTL_DEL, one, NULL) == 0, "epoll_ctl");
    for (int i = 0; i < 100; i++) {
        send(one, "x", 1, 0);
        exactly(one, 1);
        wrong += epoll_wait(first, &got, 1, 0) != 0;
    }
    stop(thread, "taken out");
    printf("told of it nevertheless: %d\n", wrong);
    close(first);
    close(second);
}

static struct pollfd list[2];
static int ends[2];
static void *change(void *unused) {
    usleep(20000);
    list[1].fd = ends[0];
    must(write(ends[1], "x", 1) == 1, "write");
    return unused;
}

/* Another thread changes the list of one that sleeps. */
static void changed_list(void) {
    connect_both();
    must(pipe(ends) == 0, "pipe");
    list[0] = (struct pollfd){.fd = one, .events = POLLIN};
    list[1] = (struct pollfd){.fd = -1, .events = POLLIN};
    pthread_t thread;
    pthread_create(&thread, NULL, change, NULL);
    int ready = poll(list, 2, 200);
    pthread_join(thread, NULL);
    if (ready == 0)
        ready = poll(list, 2, 20000);
    printf("changed list: %d %d\n", list[1].fd == ends[0], ready);
    close(ends[0]);
    close(ends[1]);
    close_both();
}

static void *wait_for_events(void *ep) {
    struct epoll_event got;
    for (int i = 0; i < 50; i++) {
        must(epoll_wait(*(int *)ep, &got, 1, 20000) == 1, "the thread beside one that polls");
        exactly(one, 1);
        must(send(one, "y", 1, 0) == 1, "send");
    }
    return NULL;
}

/* A thread that gives up waiting takes nothing from another that waits. */
static void beside_each_other(void) {
    connect_both();
    int ep = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event wanted = {.events = EPOLLIN};
    must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
    pthread_t thread;
    pthread_create(&thread, NULL, wait_for_events, &ep);
    for (int i = 0; i < 50; i++) {
        struct pollfd none = {.fd = one, .events = POLLIN};
        usleep(200);
        poll(&none, 1, 1);
        send(other, "x", 1, 0);
        exactly(other, 1);
    }
    pthread_join(thread, NULL);
    printf("beside each other\n");
    close(ep);
    close_both();
}

static void *send_later(void *unused) {
    usleep(30000);
    send(other, "x", 1, 0);
    return unused;
}

/* A connection that has been idle for long is looked at by other means than epoll, which is to tell of it afterwards. */
static void looked_at(void) {
    for (int how = 0; how < 3; how++) {
        connect_both();
        int ep = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event wanted = {.events = EPOLLIN | (how == 1 ? EPOLLET : 0)}, got;
        must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
        for (int i = 0; i < 500; i++)
            must(epoll_wait(ep, &got, 1, 0) == 0, "nothing yet");
        struct pollfd now = {.fd = one, .events = POLLIN};
        char byte;
        int found = how < 2 ? poll(&now, 1, 0) : recv(one, &byte, 1, MSG_DONTWAIT);
        pthread_t thread;
        pthread_create(&thread, NULL, send_later, NULL);
        int ready = epoll_wait(ep, &got, 1, 3000);
        pthread_join(thread, NULL);
        printf("looked at, %d: %d %d\n", how, found, ready);
        close(ep);
        close_both();
    }
}

/* A registration that is good for one event, of bytes that are there already, some of which have been read; and none while they are not. */
static void once_of_what_is_there(void) {
    for (int how = 0; how < 3; how++) {
        connect_both();
        int ep = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event wanted = {.events = EPOLLIN, .data.u64 = 3}, got;
        if (how == 1)
            must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
        must(send(other, "hello", 5, 0) == 5, "send");
        exactly(one, 1);
        wanted.events = EPOLLIN | (how == 2 ? EPOLLEXCLUSIVE : EPOLLONESHOT);
        must(epoll_ctl(ep, how == 1 ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
        int ready = epoll_wait(ep, &got, 1, 3000);
        printf("once, %d: %d %x %d\n", how, ready, ready == 1 ? got.events : 0, ready == 1 && got.data.u64 == 3);
        if (how < 2) {
            printf("and no more: %d\n", epoll_wait(ep, &got, 1, 200));
            must(epoll_ctl(ep, EPOLL_CTL_MOD, one, &wanted) == 0, "epoll_ctl");
            ready = epoll_wait(ep, &got, 1, 3000);
            printf("again: %d %x\n", ready, ready == 1 ? got.events : 0);
            exactly(one, 4);
            must(epoll_ctl(ep, EPOLL_CTL_MOD, one, &wanted) == 0, "epoll_ctl");
            printf("nothing: %d\n", epoll_wait(ep, &got, 1, 20));
            send(other, "x", 1, 0);
            ready = epoll_wait(ep, &got, 1, 3000);
            printf("new: %d %x\n", ready, ready == 1 ? got.events : 0);
        }
        close(ep);
        close_both();
    }
}

/* The number of a descriptor of which a copy is open is another connection's. */
static void copies(void) {
    connect_both();
    int ep = epoll_create1(EPOLL_CLOEXEC), number = one, peer = other, copy;
    struct epoll_event wanted = {.events = EPOLLIN, .data.u64 = 1}, got;
    must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
    copy = dup(one);
    close(one);
    connect_both();
    dup2(one, number);
    close(one);
    one = number;
    int wrong = 0;
    for (int i = 0; i < 200; i++) {
        send(peer, "a", 1, 0);
        send(i % 2 ? one : other, "bcd", 3, 0);
        int ready = epoll_wait(ep, &got, 1, 3000);
        wrong += ready != 1 || got.data.u64 != 1;
        char byte, rest[3];
        wrong += recv(copy, &byte, 1, 0) != 1 || byte != 'a';
        wrong += recv(i % 2 ? other : one, rest, 3, MSG_WAITALL) != 3 || memcmp(rest, "bcd", 3) != 0;
        if (i % 20 == 0)
            epoll_wait(ep, &got, 1, 1);
    }
    printf("copies: %d\n", wrong);
    close(copy);
    close(peer);
    close(ep);
    close_both();
}

/* Two connections with the same data, of which one is taken out: what the kernel says is of the other. An event comes with bytes. */
static void same_data(void) {
    connect_both();
    int first = one, peer = other, ep = epoll_create1(EPOLL_CLOEXEC), wrong = 0;
    pthread_t thread;
    start(&thread);
    struct epoll_event wanted = {.events = EPOLLIN, .data.u64 = 0}, got[4];
    must(epoll_ctl(ep, EPOLL_CTL_ADD, first, &wanted) == 0, "epoll_ctl");
    must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
    must(epoll_ctl(ep, EPOLL_CTL_DEL, first, NULL) == 0, "epoll_ctl");
    for (int i = 0; i < ROUNDS; i++) {
        send(one, "x", 1, 0);
        wrong += epoll_wait(ep, got, 4, 20000) != 1;
        char byte;
        int n = recv(one, &byte, 1, MSG_DONTWAIT);
        wrong += n != 1;
        if (n != 1)
            exactly(one, 1);
    }
    printf("the same data: %d, nothing more: %d\n", wrong, epoll_wait(ep, got, 4, 1));
    stop(thread, "the same data");
    close(ep);
    close(first);
    close(peer);
}

/* A list as long as lists may be. */
static void long_list(void) {
    pthread_t thread;
    start(&thread);
    struct rlimit limit, low;
    getrlimit(RLIMIT_NOFILE, &limit);
    low = limit;
    low.rlim_cur = 64;
    setrlimit(RLIMIT_NOFILE, &low);
    struct pollfd all[64];
    int wrong = 0;
    for (int i = 0; i < 64; i++)
        all[i] = (struct pollfd){.fd = -1, .events = POLLIN};
    all[40].fd = one;
    for (int i = 0; i < 100; i++) {
        send(one, "x", 1, 0);
        wrong += poll(all, 64, 3000) != 1;
        exactly(one, 1);
    }
    setrlimit(RLIMIT_NOFILE, &limit);
    stop(thread, "long list");
    printf("long list: %d\n", wrong);
}

/* Signals say when something comes, also where the program has polled before. */
static void by_signal(void) {
    connect_both();
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGIO);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    struct pollfd now = {.fd = one, .events = POLLIN};
    poll(&now, 1, 1);
    fcntl(one, F_SETOWN, getpid());
    fcntl(one, F_SETFL, O_NONBLOCK | O_ASYNC);
    struct timespec time = {.tv_sec = 3}, none = {0};
    int wrong = 0;
    char byte;
    for (int i = 0; i < 50; i++) {
        while (recv(one, &byte, 1, 0) == 1)
            ;
        while (sigtimedwait(&set, NULL, &none) > 0)
            ;
        if (recv(one, &byte, 1, 0) == 1)
            continue;
        send(other, "x", 1, 0);
        wrong += sigtimedwait(&set, NULL, &time) != SIGIO;
        for (int tries = 0; recv(one, &byte, 1, 0) != 1 && tries < 3000; tries++)
            usleep(1000);
    }
    printf("by signal: %d\n", wrong);
    close_both();
    while (sigtimedwait(&set, NULL, &none) > 0)
        ;
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}

/* Others use the numbers and the memory of connections that are closed while they are registered. */
static void closed_while_registered(void) {
    int ep = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event got[4];
    for (unsigned long i = 1; i <= 6; i++) {
        pthread_t thread;
        start(&thread);
        struct epoll_event wanted = {.events = i % 2 ? EPOLLIN : EPOLLIN | EPOLLET, .data.u64 = i};
        must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &wanted) == 0, "epoll_ctl");
        for (int round = 0; round < 50; round++) {
            send(one, "x", 1, 0);
            must(epoll_wait(ep, got, 4, 20000) == 1 && got[0].data.u64 == i, "only the new one");
            exactly(one, 1);
        }
        send(one, "x", 1, 0);
        shutdown(one, SHUT_WR);
        close(one);
        pthread_join(thread, NULL);
        close(other);
        printf("closed while registered: %d\n", epoll_wait(ep, got, 4, 0));
    }
    close(ep);
}

static atomic_int handled;
static void handler(int signal) { handled += signal != 0; }

static void handle(int signal, int flags) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    sigaction(signal, &action, NULL);
}

static atomic_int result, reason;
static void *receiver(void *unused) {
    char byte;
    int n = recv(one, &byte, 1, 0);
    reason = errno;
    result = n;
    return unused;
}

/* Sends a signal until it has been handled often enough, or has ended the call. */
static void interrupt(pthread_t thread, int signal, int times) {
    handled = 0;
    while (handled < times && result == 2) {
        pthread_kill(thread, signal);
        usleep(2000);
    }
}

/* One signal whose handler lets calls go on, and one whose does not. */
static void by_signals(void) {
    for (int how = 0; how < 4; how++) {
        connect_both();
        signal(SIGUSR1, SIG_DFL);
        signal(SIGUSR2, SIG_DFL);
        if (how != 1)
            handle(SIGUSR1, SA_RESTART);
        if (how != 0)
            handle(SIGUSR2, 0);
        if (how == 3) {
            struct timeval time = {.tv_sec = 1000};
            setsockopt(one, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
        }
        result = 2;
        pthread_t thread;
        pthread_create(&thread, NULL, receiver, NULL);
        if (how == 0 || how == 2)
            interrupt(thread, SIGUSR1, 20);
        printf("signals, %d: goes on %d\n", how, result == 2);
        if (how == 1 || how == 2)
            interrupt(thread, SIGUSR2, 1000000);
        else if (how == 3)
            interrupt(thread, SIGUSR1, 1000000);
        else
            send(other, "x", 1, 0);
        pthread_join(thread, NULL);
        int ended = result, why = ended < 0 ? reason : 0;
        printf("signals, %d: %d %d\n", how, ended, why);
        close_both();
    }
    /* While a handler that does not is there, calls sleep as before, also beside others. */
    signal(SIGUSR1, SIG_DFL);
    handle(SIGUSR1, SA_RESTART);
    by_recv(0);
    by_poll();
    signal(SIGUSR1, SIG_DFL);
    signal(SIGUSR2, SIG_DFL);
}

/* A thread that sleeps gets an event for each time that another one asks for it. */
static atomic_int told;
static void *be_told(void *ep) {
    struct epoll_event got;
    while (epoll_wait(*(int *)ep, &got, 1, -1) == 1 && got.data.u64 != 9)
        if (got.events & EPOLLOUT)
            told++;
    return NULL;
}

static void asked_for_meanwhile(void) {
    pthread_t thread;
    int ep = epoll_create1(EPOLL_CLOEXEC), ends[2];
    connect_both();
    must(pipe(ends) == 0, "pipe");
    struct epoll_event event = {.events = EPOLLIN | EPOLLET}, last = {.events = EPOLLOUT, .data.u64 = 9};
    epoll_ctl(ep, EPOLL_CTL_ADD, one, &event);
    pthread_create(&thread, NULL, be_told, &ep);
    for (int i = 0; i < 3000; i++) {
        int before = told, waited = 0;
        event.events = EPOLLIN | EPOLLET | EPOLLOUT;
        epoll_ctl(ep, EPOLL_CTL_MOD, one, &event);
        while (told == before && waited++ < 20000)
            usleep(waited < 100 ? 0 : 1000);
        must(told != before, "told of what was asked for");
        event.events = EPOLLIN | EPOLLET;
        epoll_ctl(ep, EPOLL_CTL_MOD, one, &event);
    }
    epoll_ctl(ep, EPOLL_CTL_ADD, ends[1], &last);
    pthread_join(thread, NULL);
    printf("asked for meanwhile\n");
    close(ends[0]);
    close(ends[1]);
    close(ep);
    close_both();
}

static void a_limit(void) {
    connect_both();
    struct timeval time = {.tv_usec = 30000};
    setsockopt(one, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
    char byte;
    for (int i = 0; i < 2; i++) {
        int n = recv(one, &byte, 1, 0);
        printf("limit: %d %d\n", n, n < 0 ? errno : 0);
        send(other, "x", 1, 0);
        exactly(one, 1);
    }
    close_both();
}

/* A system call by the program's own instruction, which the library does not see. */
static long system_call(long number, long a, long b, long c, long d) {
#ifdef __x86_64__
    long result;
    register long fourth __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth) : "rcx", "r11", "memory");
    return result;
#else
    return syscall(number, a, b, c, d);
#endif
}

/* After calls that wait for bytes, a program waits by system calls of its own, when a call has found nothing. */
static void by_system_calls(void) {
    pthread_t thread;
    char byte = 'b';
    struct epoll_event event = {.events = EPOLLIN};
    start(&thread);
    for (int i = 0; i < ROUNDS; i++) {
        must(send(one, &byte, 1, 0) == 1, "send");
        exactly(one, 1);
    }
    int ep = epoll_create1(EPOLL_CLOEXEC);
    must(fcntl(one, F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
    must(system_call(SYS_epoll_ctl, ep, EPOLL_CTL_ADD, one, (long)&event) == 0, "epoll_ctl");
    for (int i = 0; i < ROUNDS; i++) {
        must(send(one, &byte, 1, 0) == 1, "send");
        while (recv(one, &byte, 1, 0) != 1) {
            must(errno == EAGAIN, "recv");
            must(system_call(SYS_epoll_wait, ep, (long)&event, 1, 60000) == 1, "epoll_wait");
        }
    }
    close(ep);
    must(fcntl(one, F_SETFL, 0) == 0, "O_NONBLOCK");
    stop(thread, "by system calls");
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    by_recv(0);
    by_recv(100);
    by_poll();
    by_select();
    by_epoll(EPOLLIN, "level");
    by_epoll(EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, "edge");
    by_epoll(EPOLLIN | EPOLLONESHOT, "once");
    by_system_calls();
    by_several();
    one_event();
    taken_out();
    changed_list();
    beside_each_other();
    looked_at();
    once_of_what_is_there();
    copies();
    same_data();
    long_list();
    by_signal();
    closed_while_registered();
    by_signals();
    asked_for_meanwhile();
    a_limit();
    return 0;
}
