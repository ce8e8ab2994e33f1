/* Events of connections that have unread bytes, and of other files of the same epoll instance. One thread waits, so that the events are those of
 * plain TCP.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

static int ep;
/* Flags of one-shot registrations. */
static unsigned flags;

static int control(int instance, int operation, int fd, unsigned events, unsigned long data) {
    struct epoll_event event = {.events = events, .data.u64 = data};
    return epoll_ctl(instance, operation, fd, &event);
}

static void add(int fd, unsigned events, unsigned long data) {
    must(control(ep, EPOLL_CTL_ADD, fd, events, data) == 0, "EPOLL_CTL_ADD");
}

static void modify(int fd, unsigned events, unsigned long data) {
    must(control(ep, EPOLL_CTL_MOD, fd, events, data) == 0, "EPOLL_CTL_MOD");
}

static void say(const char *what, struct epoll_event *events, int count) {
    printf("%s:", what);
    for (int i = 0; i < count; i++)
        printf(" %x of %lu", events[i].events, (unsigned long)events[i].data.u64);
    printf("\n");
}

/* One event, for which the call waits. */
static void event_of(int instance, const char *what) {
    struct epoll_event event;
    int count = epoll_wait(instance, &event, 1, 20000);
    say(what, &event, count);
}

static void event(const char *what) {
    event_of(ep, what);
}

static void nothing(const char *what) {
    struct epoll_event events[8];
    int count = epoll_wait(ep, events, 8, 0);
    say(what, events, count);
}

static void bring(int length) {
    char bytes[1000] = {0};
    must(send(one, bytes, length, 0) == length, "send");
}

/* A connection with unread bytes in the ring, without a doorbell: it was registered with the instance, and the last bytes came while the library
 * looked at the ring. */
static void begin(void) {
    struct epoll_event event;
    ep = epoll_create1(EPOLL_CLOEXEC);
    connect_pair(0, 60, 0);
    add(other, EPOLLIN, 7);
    for (int i = 0; i < 3; i++) {
        bring(10);
        must(epoll_wait(ep, &event, 1, -1) == 1, "epoll_wait");
        exactly(other, 10);
    }
    bring(100);
}

static void end(void) {
    close(one);
    close(other);
    close(ep);
}

/* An eventfd, a pipe and two connections with the data of the connection. */
static void same_data(unsigned registered) {
    printf("same data, %x\n", registered);
    begin();
    exactly(other, 100);
    int files[2], counter = eventfd(0, EFD_CLOEXEC);
    must(pipe2(files, O_CLOEXEC) == 0, "pipe2");
    modify(other, registered, 0);
    add(counter, EPOLLIN | EPOLLET, 0);
    add(files[0], EPOLLIN | EPOLLONESHOT, 0);
    nothing("nothing yet");
    eventfd_write(counter, 1);
    event("eventfd");
    must(write(files[1], "x", 1) == 1, "write");
    event("pipe");
    bring(10);
    event("connection");
    eventfd_write(counter, 1);
    exactly(other, 10);
    event("eventfd again");
    int before[] = {one, other};
    connect_pair(0, 60, 0);
    add(other, registered, 0);
    bring(20);
    event("another connection");
    exactly(other, 20);
    nothing("nothing after that");
    end();
    one = before[0], other = before[1];
    close(one);
    close(other);
    close(counter);
    close(files[0]);
    close(files[1]);
}

/* No room to send, so the kernel has nothing to report. */
static void full(void) {
    char bytes[1 << 16] = {0};
    printf("full\n");
    begin();
    exactly(other, 100);
    for (int i = 0; i < 20; i++)
        while (send(other, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
            ;
    bring(5);
    modify(other, EPOLLIN | EPOLLONESHOT | flags, 1);
    event("unread bytes");
    nothing("no second event");
    bring(5);
    nothing("nor with more bytes");
    modify(other, EPOLLIN | EPOLLOUT | EPOLLONESHOT | flags, 2);
    event("again");
    end();
}

/* The descriptor that is registered is closed, and the connection has another one. */
static void closed(void) {
    printf("closed\n");
    for (int is_read = 0; is_read < 2; is_read++) {
        begin();
        int copy = dup(other);
        must(control(ep, EPOLL_CTL_DEL, other, 0, 0) == 0, "EPOLL_CTL_DEL");
        add(copy, EPOLLIN | EPOLLONESHOT | flags, 9);
        if (is_read)
            exactly(other, 100);
        close(copy);
        if (is_read) {
            nothing("all is read");
            bring(10);
        }
        event("bytes");
        nothing("no second event");
        end();
    }
    begin();
    modify(other, EPOLLIN | EPOLLONESHOT | flags, 9);
    int moved = fcntl(other, F_DUPFD_CLOEXEC, 100);
    close(other);
    other = moved;
    event("moved");
    nothing("no second event");
    end();
}

/* Events that the program requests of other files come. */
static void requested_elsewhere(int forks) {
    printf("elsewhere\n");
    begin();
    modify(other, EPOLLIN | EPOLLONESHOT | flags, 9);
    event("connection");
    pid_t child = -1;
    if (forks) {
        fflush(stdout);
        child = fork();
        if (child == 0) {
            /* Gets the event of a connection that it does not have any more. */
            close(other);
            event("in the child");
            exit(0);
        }
        modify(other, EPOLLIN | EPOLLONESHOT | flags, 10);
        int status;
        must(waitpid(child, &status, 0) == child && status == 0, "the child");
        nothing("the child has it");
    }
    int files[2];
    must(pipe2(files, O_CLOEXEC) == 0, "pipe2");
    add(files[1], EPOLLOUT | EPOLLWRNORM, 3);
    event("pipe");
    modify(files[1], EPOLLWRNORM | EPOLLONESHOT, 4);
    event("pipe once");
    modify(other, EPOLLRDNORM | EPOLLONESHOT | flags, 5);
    event("EPOLLRDNORM");
    modify(other, EPOLLIN | EPOLLOUT | EPOLLWRNORM | EPOLLONESHOT | flags, 6);
    event("all");
    close(files[0]);
    close(files[1]);
    end();
}

/* Calls that fail change nothing. */
static void failing(void) {
    printf("failing\n");
    begin();
    modify(other, EPOLLIN | EPOLLONESHOT | flags, 1);
    must(control(ep, EPOLL_CTL_ADD, other, EPOLLOUT | EPOLLONESHOT, 2) < 0 && errno == EEXIST, "EPOLL_CTL_ADD");
    event("after EEXIST");
    must(control(ep, EPOLL_CTL_ADD, other, EPOLLIN | EPOLLONESHOT, 3) < 0 && errno == EEXIST, "EPOLL_CTL_ADD");
    nothing("after its event");
    modify(other, EPOLLIN | EPOLLONESHOT | flags, 4);
    must(control(ep, EPOLL_CTL_MOD, other, EPOLLIN | EPOLLONESHOT | EPOLLEXCLUSIVE, 5) < 0 && errno == EINVAL, "EPOLL_CTL_MOD");
    must(epoll_ctl(ep, EPOLL_CTL_MOD, other, (void *)8) < 0 && errno == EFAULT, "a bad address");
    event("after EINVAL");
    must(control(ep, EPOLL_CTL_DEL, other, 0, 0) == 0, "EPOLL_CTL_DEL");
    must(control(ep, EPOLL_CTL_MOD, other, EPOLLIN | EPOLLONESHOT, 6) < 0 && errno == ENOENT, "EPOLL_CTL_MOD");
    nothing("deleted");
    add(other, EPOLLIN | EPOLLONESHOT | flags, 7);
    event("added again");
    end();
}

static void changed(void) {
    printf("changed\n");
    begin();
    modify(other, EPOLLIN | EPOLLONESHOT | flags, 1);
    modify(other, EPOLLONESHOT | flags, 2);
    nothing("without events");
    modify(other, EPOLLIN | EPOLLONESHOT | flags, 3);
    modify(other, EPOLLIN | EPOLLET, 4);
    event("an edge");
    nothing("no second edge");
    modify(other, EPOLLIN | EPOLLONESHOT | flags, 5);
    modify(other, EPOLLIN, 6);
    event("a level");
    event("again");
    modify(other, EPOLLOUT | EPOLLONESHOT | flags, 7);
    event("room");
    modify(other, EPOLLIN | EPOLLONESHOT | flags, 8);
    exactly(other, 100);
    nothing("read before its event");
    bring(10);
    event("later bytes");
    end();
}

/* Several instances have it. */
static void several(void) {
    int instances[5];
    printf("several\n");
    begin();
    must(control(ep, EPOLL_CTL_DEL, other, 0, 0) == 0, "EPOLL_CTL_DEL");
    for (int i = 0; i < 5; i++) {
        instances[i] = epoll_create1(EPOLL_CLOEXEC);
        must(control(instances[i], EPOLL_CTL_ADD, other, EPOLLIN | EPOLLONESHOT | flags, i) == 0, "EPOLL_CTL_ADD");
    }
    for (int turn = 0; turn < 2; turn++)
        for (int i = 0; i < 5; i++) {
            struct epoll_event event;
            event_of(instances[i], "one of several");
            must(epoll_wait(instances[i], &event, 1, 0) == 0, "a second event");
            must(control(instances[i], EPOLL_CTL_MOD, other, EPOLLIN | EPOLLONESHOT | flags, 10 + i) == 0, "EPOLL_CTL_MOD");
        }
    exactly(other, 100);
    for (int i = 0; i < 5; i++) {
        struct epoll_event event;
        must(epoll_wait(instances[i], &event, 1, 0) == 0, "an event without bytes");
    }
    bring(10);
    for (int i = 0; i < 5; i++) {
        event_of(instances[i], "later bytes");
        close(instances[i]);
    }
    end();
}

/* No descriptor is free. */
static void limited(void) {
    printf("limited\n");
    begin();
    int last = dup(0);
    close(last);
    struct rlimit before, now;
    getrlimit(RLIMIT_NOFILE, &before);
    now = before, now.rlim_cur = last;
    must(setrlimit(RLIMIT_NOFILE, &now) == 0 && dup(0) < 0, "setrlimit");
    for (int i = 0; i < 2; i++) {
        modify(other, EPOLLIN | EPOLLONESHOT | flags, i);
        event("without a descriptor");
    }
    exactly(other, 100);
    modify(other, EPOLLIN | EPOLLONESHOT | flags, 3);
    bring(10);
    event("later bytes");
    must(setrlimit(RLIMIT_NOFILE, &before) == 0, "setrlimit");
    end();
}

int main(void) {
    alarm(60);
    setvbuf(stdout, NULL, _IOLBF, 0);
    unsigned registered[] = {EPOLLIN, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT, EPOLLIN | EPOLLONESHOT | EPOLLET};
    for (int i = 0; i < 4; i++)
        same_data(registered[i]);
    for (flags = 0;; flags = EPOLLET) {
        full();
        closed();
        requested_elsewhere(0);
        requested_elsewhere(1);
        failing();
        changed();
        several();
        limited();
        if (flags)
            return 0;
    }
}
