/* What waits for connections in C, and what becomes of them when other programs start. Prints results that the test compares
 * with those of plain TCP. */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/select.h>
#include <sys/wait.h>

extern char **environ;

static void connect_both(int flags) { connect_pair(flags, 12, 0); }

static struct epoll_event event(int events, int fd) { return (struct epoll_event){.events = events, .data.fd = fd}; }

static void add(int ep, int fd, int events) {
    struct epoll_event e = event(events, fd);
    must(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e) == 0, "epoll_ctl");
}

/* As mio does: the registry has a descriptor of its own, and a short read means that there is no more. */
static void duplicated(void) {
    connect_both(SOCK_CLOEXEC);
    int ep = epoll_create1(EPOLL_CLOEXEC), registry = fcntl(ep, F_DUPFD_CLOEXEC, 3);
    fcntl(one, F_SETFL, O_NONBLOCK);
    add(registry, one, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    struct epoll_event got;
    char buffer[100];
    epoll_wait(ep, &got, 1, 0);
    printf("nothing yet %d\n", (int)recv(one, buffer, 100, 0));
    for (int i = 0; i < 100; i++) {
        send(other, "12345", 5, 0);
        int ready = epoll_wait(ep, &got, 1, 5000);
        must(ready == 1 && recv(one, buffer, 100, 0) == 5, "edge");
    }
    printf("edges ok\n");
    close(registry);
    send(other, "x", 1, 0);
    printf("after the registry %d\n", epoll_wait(ep, &got, 1, 5000));
}

static void *sleeper(void *ep) {
    struct epoll_event got;
    return (void *)(long)epoll_wait(*(int *)ep, &got, 1, 5000);
}

/* Another thread sleeps in epoll_wait already, and what comes is there already or comes later. */
static void registered_late(void) {
    for (int is_there = 0; is_there < 2; is_there++) {
        connect_both(SOCK_CLOEXEC);
        int ep = epoll_create1(EPOLL_CLOEXEC);
        add(ep, one, EPOLLIN);
        struct epoll_event got;
        send(other, "a", 1, 0);
        must(epoll_wait(ep, &got, 1, 5000) == 1, "first");
        exactly(one, 1);
        epoll_ctl(ep, EPOLL_CTL_DEL, one, NULL);
        pthread_t thread;
        pthread_create(&thread, NULL, sleeper, &ep);
        usleep(100000);
        if (is_there)
            send(other, "b", 1, 0);
        add(ep, one, EPOLLIN);
        if (!is_there) {
            usleep(100000);
            send(other, "b", 1, 0);
        }
        void *ready;
        pthread_join(thread, &ready);
        printf("registered late, %d: %ld\n", is_there, (long)ready);
    }
}

static void one_at_a_time(void) {
    connect_both(SOCK_CLOEXEC);
    int ep = epoll_create1(EPOLL_CLOEXEC), bell = eventfd(1, EFD_CLOEXEC);
    add(ep, one, EPOLLIN);
    add(ep, bell, EPOLLIN);
    int bells = 0;
    unsigned long long count;
    for (int i = 0; i < 200; i++) {
        struct epoll_event got;
        send(other, "x", 1, 0);
        must(epoll_wait(ep, &got, 1, 5000) == 1, "wait");
        if (got.data.fd == bell)
            bells += read(bell, &count, 8) == 8;
        else
            exactly(one, 1);
    }
    printf("both have their turn: %d\n", bells);
}

static void nested(void) {
    connect_both(SOCK_CLOEXEC);
    int inner = epoll_create1(EPOLL_CLOEXEC), outer = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event got;
    add(inner, one, EPOLLIN);
    send(other, "abcdef", 6, 0);
    must(epoll_wait(inner, &got, 1, 5000) == 1, "inner");
    exactly(one, 3);
    add(outer, inner, EPOLLIN);
    printf("unread, then nested: %d\n", epoll_wait(outer, &got, 1, 5000));
    printf("inner: %d\n", epoll_wait(inner, &got, 1, 5000));
    exactly(one, 3);
    printf("drained: %d\n", epoll_wait(inner, &got, 1, 0));
    for (int i = 0; i < 20; i++) {
        send(other, "x", 1, 0);
        must(epoll_wait(outer, &got, 1, 5000) == 1, "outer");
        must(epoll_wait(inner, &got, 1, 5000) == 1, "inner");
        exactly(one, 1);
    }
    printf("nested ok\n");
}

static void once(void) {
    connect_both(SOCK_CLOEXEC);
    int ep = epoll_create1(EPOLL_CLOEXEC);
    add(ep, one, EPOLLIN | EPOLLONESHOT);
    for (int i = 0; i < 100; i++) {
        struct epoll_event got, again = event(EPOLLIN | EPOLLONESHOT, one);
        send(other, "x", 1, 0);
        must(epoll_wait(ep, &got, 1, 5000) == 1, "wait");
        exactly(one, 1);
        send(other, "y", 1, 0);
        must(epoll_wait(ep, &got, 1, 0) == 0, "only once");
        exactly(one, 1);
        epoll_ctl(ep, EPOLL_CTL_MOD, one, &again);
    }
    printf("once ok\n");
}

/* Something to read, and no room to write. */
static void full(void) {
    connect_both(SOCK_CLOEXEC);
    char data[4096] = {0};
    int ep = epoll_create1(EPOLL_CLOEXEC), wake_ups = 0;
    struct epoll_event got;
    while (send(one, data, sizeof data, MSG_DONTWAIT) > 0)
        ;
    send(other, "x", 1, 0);
    add(ep, one, EPOLLOUT);
    for (int i = 0; i < 5; i++)
        wake_ups += epoll_wait(ep, &got, 1, 10);
    printf("no room: %d\n", wake_ups);
}

static void limits(void) {
    connect_both(SOCK_CLOEXEC);
    struct pollfd list = {.fd = one, .events = POLLIN};
    struct timespec wrong[] = {{-1, 0}, {0, 1000000000}, {0, -1}};
    for (int i = 0; i < 3; i++) {
        fd_set set;
        FD_ZERO(&set);
        FD_SET(one, &set);
        int result = ppoll(&list, 1, &wrong[i], NULL);
        printf("ppoll %d %d\n", result, errno);
        result = pselect(one + 1, &set, NULL, NULL, &wrong[i], NULL);
        printf("pselect %d %d\n", result, errno);
    }
}

/* Programs are started while something is unread, that inherit the connection and do not read it. */
static void inherited(void) {
    connect_both(0);
    send(one, "pending", 7, 0);
    printf("system %d\n", system("true"));
    FILE *pipe = popen("true", "r");
    pclose(pipe);
    send(one, "later", 5, 0);
    exactly(other, 12);
    printf("inherited ok\n");
}

static void spawned(void) {
    connect_both(SOCK_CLOEXEC);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, other, 0);
    posix_spawn_file_actions_adddup2(&actions, other, 1);
    char *args[] = {"cat", NULL};
    pid_t child;
    must(posix_spawnp(&child, "cat", &actions, NULL, args, environ) == 0, "spawn");
    close(other);
    send(one, "there and back", 14, 0);
    exactly(one, 14);
    shutdown(one, SHUT_WR);
    char byte;
    printf("end %d\n", (int)recv(one, &byte, 1, 0));
    waitpid(child, NULL, 0);
}

/* Descriptors that the C library closes are other files afterwards. */
static void reused(void) {
    connect_both(SOCK_CLOEXEC);
    FILE *stream = fdopen(one, "r+");
    int number = one;
    fclose(stream);
    char byte;
    int file = open("/etc/passwd", O_RDONLY | O_CLOEXEC);
    while (file < number)
        file = open("/etc/passwd", O_RDONLY | O_CLOEXEC);
    must(file == number, "the same number");
    printf("reads a file: %d\n", (int)read(file, &byte, 1));
}

/* A child that exits or starts a program leaves its parent's connections alone. */
static void children(void) {
    for (int how = 0; how < 2; how++) {
        connect_both(SOCK_CLOEXEC);
        pid_t child = fork();
        if (child == 0) {
            if (how == 0)
                _exit(0);
            execlp("true", "true", NULL);
            _exit(1);
        }
        waitpid(child, NULL, 0);
        send(one, "question", 8, 0);
        exactly(other, 8);
        send(other, "answer", 6, 0);
        exactly(one, 6);
        close(one);
        char byte;
        printf("child %d, end %d\n", how, (int)recv(other, &byte, 1, 0));
        close(other);
    }
}

/* The end of a process that is killed, having read all of it or not. */
static void killed(void) {
    for (int is_unread = 0; is_unread < 2; is_unread++) {
        connect_both(SOCK_CLOEXEC);
        pid_t child = fork();
        if (child == 0) {
            close(one);
            if (!is_unread) {
                exactly(other, 100);
                send(other, "r", 1, 0);
            }
            for (;;)
                pause();
        }
        close(other);
        char data[1000] = {0};
        if (is_unread) {
            send(one, data, sizeof data, 0);
            usleep(50000);
        } else {
            send(one, data, 100, 0);
            exactly(one, 1);
        }
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        int result = recv(one, data, 1, 0);
        printf("killed, %d: %d %d\n", is_unread, result, result < 0 ? errno : 0);
        close(one);
    }
}

/* A program that closes all that it does not know, as daemons do, one by one and in one call; and others have the numbers then. */
static void closed_all(void) {
    for (int how = 0; how < 2; how++) {
        registered_late();
        int limit = sysconf(_SC_OPEN_MAX);
        if (how == 0)
            for (int fd = 3; fd < limit; fd++)
                close(fd);
        else
            close_range(3, ~0U, 0);
        connect_both(SOCK_CLOEXEC);
        int file = open("/dev/null", O_RDWR | O_CLOEXEC);
        printf("closed all, %d: %d %d\n", how, file, dup2(file, 500));
        registered_late();
    }
}

static void in_background(void) {
    connect_both(SOCK_CLOEXEC);
    int out = fcntl(1, F_DUPFD_CLOEXEC, 10);
    if (daemon(0, 0) != 0)
        exit(1);
    dprintf(out, "child of daemon\n");
    connect_both(SOCK_CLOEXEC);
    int number = one;
    close(one);
    int file = open("/etc/passwd", O_RDONLY | O_CLOEXEC);
    while (file < number)
        file = open("/etc/passwd", O_RDONLY | O_CLOEXEC);
    char byte;
    dprintf(out, "reads a file: %d %d\n", file == number, (int)read(file, &byte, 1));
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    duplicated();
    registered_late();
    one_at_a_time();
    nested();
    once();
    full();
    limits();
    inherited();
    spawned();
    reused();
    children();
    killed();
    closed_all();
    in_background();
    return 0;
}
