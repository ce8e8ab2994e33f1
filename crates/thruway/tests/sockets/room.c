/* Calls that do not wait, or not for ever, send more than there is room for, and wait for room in each way there is. Prints results that
 * the test compares with those of plain TCP. */
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
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/time.h>
#include <sys/wait.h>

enum { TOTAL = 8 << 20, PIECE = 30000 };
static int ep, outer;
static unsigned char data[TOTAL];
static int total = TOTAL;
static unsigned events;

static void connect_both(void) { connect_pair(SOCK_CLOEXEC, 1000, 20000); }

/* Reads all, now and then slowly, and says something itself at times. */
static void *drain(void *unused) {
    static unsigned char got[50000];
    for (int at = 0, turn = 0; at < total; turn++) {
        if (turn % 16 == 0)
            usleep(2000);
        int n = recv(other, got, turn % 3 ? 3000 : sizeof got, 0);
        must(n > 0 && memcmp(got, data + at, n) == 0, "the bytes that were sent");
        at += n;
        if (turn % 5 == 0)
            send(other, "x", 1, MSG_DONTWAIT);
    }
    shutdown(other, SHUT_WR);
    return unused;
}

static void by_poll(void) {
    struct pollfd list = {.fd = one, .events = POLLOUT};
    must(poll(&list, 1, 20000) == 1 && list.revents & POLLOUT, "poll");
}

static void by_poll_of_both(void) {
    struct pollfd list[] = {{.fd = one, .events = POLLIN}, {.fd = one, .events = POLLOUT | POLLIN}};
    char byte;
    do {
        must(poll(list, 2, 20000) > 0, "poll of both");
        if (list[1].revents & POLLIN)
            must(recv(one, &byte, 1, 0) == 1, "recv");
    } while (!(list[1].revents & POLLOUT));
}

static void by_select(void) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(one, &set);
    must(select(one + 1, NULL, &set, NULL, NULL) == 1 && FD_ISSET(one, &set), "select");
}

static void want(unsigned wanted) {
    struct epoll_event event = {.events = wanted, .data.u64 = 7};
    must(epoll_ctl(ep, EPOLL_CTL_MOD, one, &event) == 0, "epoll_ctl");
}

/* Until something can be sent; what comes meanwhile is taken. */
static void by_events(void) {
    struct epoll_event got[4];
    char bytes[100];
    for (;;) {
        if (outer)
            must(epoll_wait(outer, got, 4, 20000) > 0, "epoll_wait on the outer instance");
        int ready = epoll_wait(ep, got, 4, outer ? 0 : 20000);
        /* One connection is registered, so there is one event. */
        must(ready == (outer ? ready : 1) && (ready < 1 || got[0].data.u64 == 7), "epoll_wait");
        if (ready == 1 && got[0].events & EPOLLIN)
            while (recv(one, bytes, sizeof bytes, MSG_DONTWAIT) > 0) {
            }
        if (ready == 1 && got[0].events & EPOLLOUT)
            return;
    }
}

/* As libraries do that are told of what can be done for as long as it can: they ask for it when they need it. */
static void by_level(void) {
    want(events | EPOLLOUT);
    by_events();
    want(events);
}

static void *wait_elsewhere(void *is_over) {
    struct epoll_event got[4];
    char byte;
    while (epoll_wait(ep, got, 4, -1) >= 0 && !*(atomic_int *)is_over)
        if (got[0].events & EPOLLOUT)
            write(outer, "w", 1);
        else if (got[0].events & EPOLLIN)
            while (recv(one, &byte, 1, MSG_DONTWAIT) > 0) {
            }
    return NULL;
}

static int from_thread;
static void by_a_thread(void) {
    char byte;
    must(read(from_thread, &byte, 1) == 1, "read");
}

static void send_all(const char *what, void (*wait)(void), unsigned at_first, int flags, int file) {
    pthread_t thread;
    off_t at = 0;
    int waits = 0;
    events = at_first;
    if (events) {
        struct epoll_event event = {.events = events, .data.u64 = 7};
        must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &event) == 0, "epoll_ctl");
    }
    /* However busy the machine is, the sender waits once: before that, nothing is received. */
    int is_draining = !wait;
    if (is_draining)
        pthread_create(&thread, NULL, drain, NULL);
    while (at < total) {
        int length = at + PIECE < total ? PIECE : total - at, n;
        if (file >= 0)
            n = sendfile(one, file, &at, length);
        else if ((n = send(one, data + at, length, flags)) > 0)
            at += n;
        must(n > 0 || errno == EAGAIN, "send");
        if (n < length && at < total && (n < 0 || wait != by_a_thread)) {
            waits++;
            if (!is_draining)
                pthread_create(&thread, NULL, drain, NULL);
            is_draining = 1;
            if (wait)
                wait();
        }
    }
    if (!is_draining)
        pthread_create(&thread, NULL, drain, NULL);
    pthread_join(thread, NULL);
    char byte;
    int n;
    fcntl(one, F_SETFL, 0);
    while ((n = recv(one, &byte, 1, 0)) == 1) {
    }
    printf("%s: waits %d, end %d\n", what, waits > 0 || !wait, n);
    close(one);
    close(other);
}

static void start(int is_waiting) {
    connect_both();
    if (!is_waiting)
        fcntl(one, F_SETFL, O_NONBLOCK);
}

/* Fills it until there is no room. */
static void fill(void) {
    fcntl(one, F_SETFL, O_NONBLOCK);
    while (send(one, data, PIECE, MSG_NOSIGNAL) > 0) {
    }
    must(errno == EAGAIN, "no room");
}

static void readiness(void) {
    connect_both();
    fill();
    struct pollfd list = {.fd = one, .events = POLLOUT};
    struct timeval none = {0};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(one, &set);
    struct epoll_event event = {.events = EPOLLOUT}, got;
    epoll_ctl(ep, EPOLL_CTL_ADD, one, &event);
    printf("no room: poll %d %d, select %d", poll(&list, 1, 0), poll(&list, 1, 2), select(one + 1, NULL, &set, NULL, &none));
    printf(", epoll %d %d\n", epoll_wait(ep, &got, 1, 0), epoll_wait(ep, &got, 1, 2));
    fcntl(other, F_SETFL, O_NONBLOCK);
    char bytes[10000];
    do {
        while (recv(other, bytes, sizeof bytes, 0) > 0) {
        }
    } while (poll(&list, 1, 1) == 0);
    printf("room: poll %d, %d", poll(&list, 1, -1), list.revents);
    FD_SET(one, &set);
    printf(", select %d", select(one + 1, NULL, &set, NULL, NULL));
    printf(", epoll %d", epoll_wait(ep, &got, 1, -1));
    printf(" %d\n", got.events);
    close(one);
    close(other);
}

static void *end_it(void *how) {
    usleep(20000);
    if (how)
        shutdown(one, SHUT_RDWR);
    else
        close(other);
    return NULL;
}

/* What waits for room learns that there will be none. */
static void ends(int by_events_of_epoll, int by_itself) {
    pthread_t thread;
    connect_both();
    fill();
    struct epoll_event event = {.events = EPOLLOUT}, got = {0};
    epoll_ctl(ep, EPOLL_CTL_ADD, one, &event);
    pthread_create(&thread, NULL, end_it, by_itself ? &thread : NULL);
    struct pollfd list = {.fd = one, .events = POLLOUT};
    int ready = by_events_of_epoll ? epoll_wait(ep, &got, 1, 20000) : poll(&list, 1, 20000);
    pthread_join(thread, NULL);
    /* The first event may be that a call would not wait. */
    while (send(one, data, PIECE, MSG_NOSIGNAL) > 0 || errno == EAGAIN) {
    }
    int error = errno == EPIPE || errno == ECONNRESET;
    int told = by_events_of_epoll ? epoll_wait(ep, &got, 1, 20000) : poll(&list, 1, 20000);
    told = told == 1 && (by_events_of_epoll ? (int)got.events : list.revents) & (POLLHUP | POLLERR);
    printf("ends: %d, %d, %d\n", ready, told, error);
    close(one);
    if (by_itself)
        close(other);
}

/* A child is forked meanwhile. */
static void *fork_one(void *unused) {
    usleep(500);
    int child = fork();
    if (child == 0)
        _exit(0);
    waitpid(child, NULL, 0);
    return unused;
}

static void forked(int by_events_of_epoll) {
    pthread_t thread, reader;
    connect_both();
    fcntl(one, F_SETFL, O_NONBLOCK);
    long at = 0, n;
    while ((n = send(one, data + at, PIECE, MSG_NOSIGNAL)) > 0)
        at += n;
    struct epoll_event event = {.events = EPOLLOUT}, got = {0};
    epoll_ctl(ep, EPOLL_CTL_ADD, one, &event);
    pthread_create(&reader, NULL, drain, NULL);
    pthread_create(&thread, NULL, fork_one, NULL);
    struct pollfd list = {.fd = one, .events = POLLOUT};
    for (; at < total; at += n > 0 ? n : 0) {
        int ready = by_events_of_epoll ? epoll_wait(ep, &got, 1, 20000) : poll(&list, 1, 20000);
        must(ready == 1, "room after a fork");
        n = send(one, data + at, at + PIECE < total ? PIECE : total - at, MSG_NOSIGNAL);
    }
    pthread_join(thread, NULL);
    pthread_join(reader, NULL);
    printf("a fork: %d\n", by_events_of_epoll);
    close(one);
    close(other);
}

/* One thread sends and waits for room, another one sleeps until something comes: each is woken for what it waits for. */
static void *receive(void *how) {
    static char bytes[4];
    struct pollfd list = {.fd = one, .events = POLLIN};
    for (long i = 0, n; i < 3000; i += n) {
        if (how)
            must(poll(&list, 1, 20000) == 1, "something comes");
        n = recv(one, bytes, sizeof bytes, 0);
        must(n > 0, "recv beside a sender");
    }
    return NULL;
}

static void *both_ways(void *unused) {
    static char got[4000];
    for (int at = 0, turn = 0, sent = 0; at < total || sent < 3000; turn++) {
        if (turn % 8 == 0)
            usleep(300);
        if (sent < 3000)
            sent += send(other, "x", 1, 0);
        int n = at < total ? recv(other, got, sizeof got, 0) : 0;
        must(at == total || n > 0, "recv");
        at += n;
    }
    return unused;
}

static void beside_a_receiver(int by_poll_there, int by_epoll_here) {
    pthread_t receiver, peer;
    connect_both();
    struct epoll_event event = {.events = EPOLLOUT}, got;
    if (by_epoll_here)
        epoll_ctl(ep, EPOLL_CTL_ADD, one, &event);
    pthread_create(&receiver, NULL, receive, by_poll_there ? &receiver : NULL);
    pthread_create(&peer, NULL, both_ways, NULL);
    for (long at = 0, n; at < total; at += n > 0 ? n : 0) {
        n = send(one, data + at, at + PIECE < total ? PIECE : total - at, MSG_DONTWAIT);
        must(n > 0 || errno == EAGAIN, "send beside a receiver");
        if (n < 0 && by_epoll_here)
            must(epoll_wait(ep, &got, 1, 20000) == 1 && got.events == EPOLLOUT, "epoll_wait beside a receiver");
        else if (n < 0)
            by_poll();
    }
    pthread_join(receiver, NULL);
    pthread_join(peer, NULL);
    printf("beside a receiver: %d, %d\n", by_poll_there, by_epoll_here);
    close(one);
    close(other);
}

/* Many wait for the same room, each in its way. */
static void *wait_for_room(void *unused) {
    by_poll();
    return unused;
}

static void several(void) {
    pthread_t threads[4], reader;
    connect_both();
    fcntl(one, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLOUT | EPOLLET}, got;
    epoll_ctl(ep, EPOLL_CTL_ADD, one, &event);
    long at = 0, n;
    for (int turn = 0; turn < 3; turn++) {
        while (epoll_wait(ep, &got, 1, 0) == 1) {
        }
        while ((n = send(one, data + at, at + PIECE < total ? PIECE : total - at, 0)) > 0)
            at += n;
        for (int i = 0; i < 4; i++)
            pthread_create(&threads[i], NULL, wait_for_room, NULL);
        usleep(5000);
        if (turn == 0)
            pthread_create(&reader, NULL, drain, NULL);
        if (turn < 2)
            must(epoll_wait(ep, &got, 1, 20000) == 1, "epoll_wait beside others");
        for (int i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
    }
    while (at < total) {
        n = send(one, data + at, at + PIECE < total ? PIECE : total - at, 0);
        at += n > 0 ? n : 0;
        if (n < 0)
            by_poll();
    }
    pthread_join(reader, NULL);
    printf("several wait\n");
    close(one);
    close(other);
}

/* What is registered for room does not end, or lengthen, what waits for something else. */
static void beside_a_registration(void) {
    connect_both();
    struct timeval limit = {.tv_usec = 50000};
    setsockopt(one, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    struct epoll_event event = {.events = EPOLLOUT | EPOLLET}, got;
    epoll_ctl(ep, EPOLL_CTL_ADD, one, &event);
    fill();
    fcntl(other, F_SETFL, O_NONBLOCK);
    char bytes[10000];
    struct pollfd list = {.fd = one, .events = POLLOUT};
    do {
        while (recv(other, bytes, sizeof bytes, 0) > 0) {
        }
    } while (poll(&list, 1, 1) == 0);
    fcntl(one, F_SETFL, 0);
    int n = recv(one, bytes, 1, 0);
    list.events = POLLIN;
    printf("beside a registration: %d %d, %d, %d\n", n, errno, poll(&list, 1, 20), epoll_wait(ep, &got, 1, 20000));
    close(one);
    close(other);
}

/* Registered by a descriptor that is closed, where another one is the same connection. */
static void by_another_descriptor(int is_full) {
    pthread_t reader;
    connect_both();
    struct epoll_event event = {.events = EPOLLOUT}, got;
    epoll_ctl(ep, EPOLL_CTL_ADD, one, &event);
    int copy = dup(one);
    long at = 0, n = 0;
    fcntl(one, F_SETFL, O_NONBLOCK);
    while (is_full && (n = send(one, data + at, PIECE, 0)) > 0)
        at += n;
    close(one);
    one = copy;
    pthread_create(&reader, NULL, drain, NULL);
    if (is_full)
        must(epoll_wait(ep, &got, 1, 20000) == 1, "epoll_wait by a descriptor that was closed");
    for (; at < total; at += n > 0 ? n : 0)
        if ((n = send(one, data + at, at + PIECE < total ? PIECE : total - at, 0)) < 0)
            must(epoll_wait(ep, &got, 1, 20000) == 1, "epoll_wait by another descriptor");
    pthread_join(reader, NULL);
    printf("another descriptor: %d\n", is_full);
    close(one);
    close(other);
    close(ep);
    ep = epoll_create1(EPOLL_CLOEXEC);
}

/* As a program that goes on in a child: the instance is from before. */
static void in_a_child(void) {
    int status, child = fork();
    if (child == 0) {
        start(0), send_all("in a child, level", by_level, EPOLLIN, 0, -1);
        for (int i = 0; i < 10; i++)
            start(0), send_all("in a child, edge", by_events, EPOLLIN | EPOLLOUT | EPOLLET, 0, -1);
        _exit(0);
    }
    waitpid(child, &status, 0);
    printf("a child: %d\n", status);
}

static void limited(void) {
    connect_both();
    struct timeval time = {.tv_usec = 30000};
    setsockopt(one, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
    long n, calls = 0;
    while ((n = send(one, data, PIECE, 0)) > 0)
        calls++;
    printf("a limit: %d, %d, %d\n", (int)n, errno, calls > 0);
    close(one);
    close(other);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; i < TOTAL; i++)
        data[i] = (i * 2654435761u) >> 24 ?: 1;
    FILE *temporary = tmpfile();
    fwrite(data, 1, TOTAL, temporary);
    fflush(temporary);
    int file = fileno(temporary);
    ep = epoll_create1(EPOLL_CLOEXEC);
    start(0), send_all("poll", by_poll, 0, 0, -1);
    start(0), send_all("poll of both", by_poll_of_both, 0, 0, -1);
    start(0), send_all("select", by_select, 0, 0, -1);
    start(1), send_all("calls that do not wait", by_poll, 0, MSG_DONTWAIT, -1);
    start(0), send_all("level", by_level, EPOLLIN, 0, -1);
    start(0), send_all("level, by data alone", by_level, EPOLLRDHUP, 0, -1);
    start(0), send_all("always asked for", by_events, EPOLLIN | EPOLLOUT, 0, -1);
    start(0), send_all("edge", by_events, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, 0, -1);
    start(0), send_all("edge, room alone", by_events, EPOLLOUT | EPOLLET, 0, -1);
    start(0), send_all("sendfile, edge", by_events, EPOLLIN | EPOLLOUT | EPOLLET, 0, file);
    start(0), send_all("sendfile, level", by_level, EPOLLIN, 0, file);
    start(1), send_all("calls that wait", NULL, 0, 0, -1);
    start(1), send_all("sendfile that waits", NULL, 0, 0, file);
    struct timeval time = {.tv_sec = 20};
    start(1), setsockopt(one, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
    send_all("calls with a limit", NULL, 0, 0, -1);
    in_a_child();
    limited();
    readiness();
    several();
    beside_a_registration();
    by_another_descriptor(0);
    by_another_descriptor(1);
    for (int how = 0; how < 4; how++)
        ends(how & 1, how >> 1);
    for (int how = 0; how < 4; how++)
        beside_a_receiver(how & 1, how >> 1);
    /* Another thread sleeps on the instance already. */
    int pair[2];
    atomic_int is_over = 0;
    pthread_t thread;
    must(pipe(pair) == 0, "pipe");
    from_thread = pair[0], outer = pair[1];
    start(0);
    pthread_create(&thread, NULL, wait_elsewhere, &is_over);
    send_all("a thread that sleeps", by_a_thread, EPOLLIN | EPOLLOUT | EPOLLET, 0, -1);
    is_over = 1;
    struct epoll_event always = {.events = EPOLLOUT};
    epoll_ctl(ep, EPOLL_CTL_ADD, pair[1], &always);
    pthread_join(thread, NULL);
    epoll_ctl(ep, EPOLL_CTL_DEL, pair[1], NULL);
    /* An instance in another one. */
    struct epoll_event inner = {.events = EPOLLIN};
    outer = epoll_create1(EPOLL_CLOEXEC);
    epoll_ctl(outer, EPOLL_CTL_ADD, ep, &inner);
    start(0), send_all("an instance in another", by_events, EPOLLIN | EPOLLOUT, 0, -1);
    close(outer);
    outer = 0;
    /* Which go on by TCP. */
    total = 500000;
    for (int how = 0; how < 2; how++)
        forked(how);
    return 0;
}
