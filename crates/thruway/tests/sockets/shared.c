/* An epoll instance that several processes have. Each of them changes what is registered, and another one waits: it gets the events that the
 * kernel would give. The peer makes no call meanwhile.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <sys/epoll.h>
#include <sys/mman.h>

enum { TURNS = 60, LENGTH = 3000, CONNECTION = 5, PIPE = 6 };

static char message[LENGTH];
/* Has the connection registered, and has looked at it. */
static int own;
/* For the two processes to take turns. */
static int to_child[2], to_parent[2];

static void begin(void) {
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = CONNECTION};
    own = epoll_create1(EPOLL_CLOEXEC);
    connect_pair(0, 0, 0);
    must(epoll_ctl(own, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
    for (int turn = 0; turn < TURNS; turn++) {
        must(send(one, message, LENGTH, 0) == LENGTH, "send");
        must(epoll_wait(own, &event, 1, 60000) == 1, "epoll_wait");
        must(recv(other, message, LENGTH, 0) == LENGTH, "recv");
        must(send(other, message, 64, 0) == 64, "send");
        exactly(one, 64);
    }
    must(pipe(to_child) == 0 && pipe(to_parent) == 0, "pipe");
    fflush(stdout);
}

static void end(pid_t child) {
    int status, all[] = {one, other, own, to_child[0], to_child[1], to_parent[0], to_parent[1]};
    must(waitpid(child, &status, 0) == child && status == 0, "the child");
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        close(all[i]);
}

static void tell(int to[2]) { must(write(to[1], "x", 1) == 1, "write"); }

static void hear(int from[2]) {
    char byte;
    must(read(from[0], &byte, 1) == 1, "read");
}

/* Before one process changes a registration (`is_changing`) and the other one waits: the change comes first (`is_first`), or beside the wait. */
static void take_turn(int is_changing, int is_by_child, int is_first) {
    int *to_waiter = is_by_child ? to_parent : to_child, *to_changer = is_by_child ? to_child : to_parent;
    if (is_changing && !is_first)
        hear(to_changer);
    else if (!is_changing && is_first)
        hear(to_waiter);
    else if (!is_changing)
        tell(to_changer);
}

/* Starts a child, which alarm(2) ends if it waits in vain. */
static pid_t start(void) {
    pid_t child = fork();
    must(child >= 0, "fork");
    if (child == 0)
        alarm(60);
    return child;
}

/* One process takes the registration out, or changes it (`events`), while bytes are unread. The other one is not told of them. */
static void changed(int operation, unsigned events, int is_by_child) {
    struct epoll_event event = {.events = events, .data.u64 = CONNECTION};
    begin();
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    pid_t child = start();
    if ((child == 0) == is_by_child) {
        must(epoll_ctl(own, operation, other, &event) == 0, "epoll_ctl");
        tell(is_by_child ? to_parent : to_child);
    } else {
        hear(is_by_child ? to_parent : to_child);
        for (int i = 0; i < 3; i++)
            must(epoll_wait(own, &event, 1, 0) == 0, "an event of a registration that has ended");
    }
    if (child == 0)
        _exit(0);
    end(child);
}

/* A child with room for one event learns of a pipe, too, while it leaves bytes unread. */
static void one_event_at_a_time(void) {
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = PIPE};
    begin();
    must(epoll_ctl(own, EPOLL_CTL_ADD, to_child[0], &event) == 0, "epoll_ctl");
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    pid_t child = start();
    if (child == 0) {
        int connection = 0, pipe = 0;
        tell(to_child);
        while (!connection || !pipe) {
            must(epoll_wait(own, &event, 1, 60000) == 1, "epoll_wait");
            (event.data.u64 == PIPE ? pipe++ : connection++);
        }
        _exit(0);
    }
    end(child);
}

/* A connection with unread bytes is registered with another instance after the fork. The other process waits for that. */
static void registered_later(unsigned events, int is_by_child, int is_first) {
    struct epoll_event event = {.events = events, .data.u64 = CONNECTION};
    begin();
    int shared = epoll_create1(EPOLL_CLOEXEC);
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    pid_t child = start();
    int *way = is_by_child ? to_parent : to_child;
    if ((child == 0) == is_by_child) {
        take_turn(1, is_by_child, is_first);
        must(epoll_ctl(shared, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
        tell(way);
    } else {
        take_turn(0, is_by_child, is_first);
        must(epoll_wait(shared, &event, 1, 60000) == 1, "epoll_wait");
        must(event.events == EPOLLIN && event.data.u64 == CONNECTION, "the event");
        exactly(other, LENGTH);
    }
    if (child == 0)
        _exit(0);
    end(child);
    close(shared);
}

/* A server of blocking sockets, which reads each request exactly: an event without data would have it wait. */
static void served_by_a_child(unsigned events, int is_registered_by_child) {
    struct epoll_event event = {.events = events, .data.u64 = CONNECTION};
    begin();
    int shared = epoll_create1(EPOLL_CLOEXEC);
    pid_t child = start();
    if ((child == 0) == is_registered_by_child) {
        must(epoll_ctl(shared, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
        tell(is_registered_by_child ? to_parent : to_child);
    } else {
        hear(is_registered_by_child ? to_parent : to_child);
    }
    if (child == 0) {
        for (int turn = 0; turn < TURNS; turn++) {
            must(epoll_wait(shared, &event, 1, 60000) == 1, "epoll_wait");
            must(recv(other, message, 64, 0) == 64 && send(other, message, 64, 0) == 64, "a request");
            event = (struct epoll_event){.events = events, .data.u64 = CONNECTION};
            must(!(events & EPOLLONESHOT) || epoll_ctl(shared, EPOLL_CTL_MOD, other, &event) == 0, "epoll_ctl");
        }
        _exit(0);
    }
    for (int turn = 0; turn < TURNS; turn++) {
        must(send(one, message, 64, 0) == 64, "send");
        exactly(one, 64);
    }
    end(child);
    close(shared);
}

/* Two processes wait for a connection that is good for one event. Each reads a part, and registers it again. */
static void read_in_turns(unsigned events, int is_by_child) {
    struct epoll_event event = {.events = events, .data.u64 = CONNECTION};
    int *left = mmap(NULL, sizeof *left, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(left != MAP_FAILED, "mmap");
    *left = LENGTH;
    begin();
    int shared = epoll_create1(EPOLL_CLOEXEC);
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    pid_t child = start();
    if ((child == 0) == is_by_child)
        must(epoll_ctl(shared, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
    while (__atomic_load_n(left, __ATOMIC_SEQ_CST) > 0) {
        /* The limit is for the process that does not get the last event. */
        int ready = epoll_wait(shared, &event, 1, 10);
        must(ready >= 0, "epoll_wait");
        if (ready == 0)
            continue;
        must(event.events == EPOLLIN && event.data.u64 == CONNECTION, "the event");
        must(recv(other, message, LENGTH / 30, 0) == LENGTH / 30, "recv");
        __atomic_fetch_sub(left, LENGTH / 30, __ATOMIC_SEQ_CST);
        event = (struct epoll_event){.events = events, .data.u64 = CONNECTION};
        must(epoll_ctl(shared, EPOLL_CTL_MOD, other, &event) == 0, "epoll_ctl");
    }
    if (child == 0)
        _exit(0);
    end(child);
    munmap(left, sizeof *left);
    close(shared);
}

/* One process changes a one-shot registration from EPOLLIN to EPOLLOUT. The other waits for the event: after the change (is_first), or during it. */
static void changed_to_room(int is_by_child, int is_first) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.u64 = CONNECTION};
    begin();
    int shared = epoll_create1(EPOLL_CLOEXEC);
    must(epoll_ctl(shared, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
    pid_t child = start();
    int *way = is_by_child ? to_parent : to_child;
    if ((child == 0) == is_by_child) {
        event.events = EPOLLOUT | EPOLLONESHOT;
        take_turn(1, is_by_child, is_first);
        must(epoll_ctl(shared, EPOLL_CTL_MOD, other, &event) == 0, "epoll_ctl");
        tell(way);
    } else {
        take_turn(0, is_by_child, is_first);
        must(epoll_wait(shared, &event, 1, 60000) == 1, "epoll_wait");
        must(event.events == EPOLLOUT && event.data.u64 == CONNECTION, "the event");
        must(epoll_wait(shared, &event, 1, 0) == 0, "a second event");
    }
    if (child == 0)
        _exit(0);
    end(child);
    close(shared);
}

/* Only the child waits. It has a connection with unread bytes from before the fork, and the parent registers another one. */
static void registered_beside_another(unsigned events) {
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = PIPE};
    begin();
    int first[] = {one, other, own, to_child[0], to_child[1], to_parent[0], to_parent[1]};
    int shared = epoll_create1(EPOLL_CLOEXEC);
    must(epoll_ctl(shared, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    begin();
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    pid_t child = start();
    if (child == 0) {
        hear(to_child);
        int unread = LENGTH, found = 0;
        while (unread > 0 || !found) {
            must(epoll_wait(shared, &event, 1, 60000) == 1, "epoll_wait");
            if (event.data.u64 == CONNECTION)
                exactly(other, LENGTH), found = 1;
            else
                exactly(first[1], LENGTH / 30), unread -= LENGTH / 30;
        }
        _exit(0);
    }
    event = (struct epoll_event){.events = events, .data.u64 = CONNECTION};
    must(epoll_ctl(shared, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
    tell(to_child);
    end(child);
    for (unsigned i = 0; i < sizeof first / sizeof *first; i++)
        close(first[i]);
    close(shared);
}

/* The process that has registered a connection with unread bytes waits itself. */
static void registered_by_who_waits(unsigned events) {
    struct epoll_event event = {.events = events, .data.u64 = CONNECTION};
    begin();
    int shared = epoll_create1(EPOLL_CLOEXEC);
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    pid_t child = start();
    if (child == 0) {
        must(epoll_ctl(shared, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
        must(epoll_wait(shared, &event, 1, 60000) == 1, "epoll_wait");
        must(event.events == EPOLLIN && event.data.u64 == CONNECTION, "the event");
        exactly(other, LENGTH);
        _exit(0);
    }
    end(child);
    close(shared);
}

/* A connection is registered with an instance that another process has made, beside its own. */
static void received(unsigned events) {
    struct epoll_event event = {.events = events, .data.u64 = CONNECTION};
    int way[2];
    char byte;
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, way) == 0, "socketpair");
    fflush(stdout);
    pid_t child = start();
    if (child == 0) {
        pass(way[1], epoll_create1(0));
        must(read(way[1], &byte, 1) == 1, "read");
        _exit(0);
    }
    int given = pass(way[0], -1);
    begin();
    must(epoll_ctl(given, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
    for (int turn = 0; turn < 3; turn++) {
        must(send(one, message, LENGTH, 0) == LENGTH, "send");
        must(epoll_wait(given, &event, 1, 60000) == 1, "epoll_wait");
        must(event.events == EPOLLIN && event.data.u64 == CONNECTION, "the event");
        must(recv(other, message, LENGTH, 0) == LENGTH, "recv");
        must(epoll_wait(given, &event, 1, 0) == 0, "an event without data");
    }
    must(write(way[0], "x", 1) == 1, "write");
    end(child);
    close(given);
    close(way[0]);
    close(way[1]);
}

static pid_t sleeper;

static void *sleep_on(void *waited) {
    struct epoll_event event;
    __atomic_store_n(&sleeper, gettid(), __ATOMIC_SEQ_CST);
    must(epoll_wait(*(int *)waited, &event, 1, 60000) == 1 && event.data.u64 == CONNECTION, "epoll_wait");
    return NULL;
}

/* State of a thread: one letter of proc(5). */
static char state_of(pid_t thread) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "r");
    must(file != NULL && fgets(text, sizeof text, file) != NULL, path);
    fclose(file);
    return strrchr(text, ')')[2];
}

/* A thread sleeps on an instance that is older than a fork and than all connections. Another thread moves a connection with unread bytes there. */
static void moved_to_an_old_instance(void) {
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = CONNECTION};
    pthread_t thread;
    int old = epoll_create1(EPOLL_CLOEXEC), status;
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    must(waitpid(child, &status, 0) == child, "waitpid");
    begin();
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    must(pthread_create(&thread, NULL, sleep_on, &old) == 0, "pthread_create");
    while (__atomic_load_n(&sleeper, __ATOMIC_SEQ_CST) == 0 || state_of(sleeper) != 'S')
        sched_yield();
    must(epoll_ctl(own, EPOLL_CTL_DEL, other, NULL) == 0, "epoll_ctl");
    must(epoll_ctl(old, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
    pthread_join(thread, NULL);
    exactly(other, LENGTH);
    child = start();
    if (child == 0)
        _exit(0);
    end(child);
    close(old);
}

enum { THREADS = 4 };
static pthread_barrier_t all_woken;

/* The kernel does not interrupt another thread when it wakes this one. */
static void wake_later(void) {
    struct sched_param none = {0};
    must(sched_setscheduler(0, SCHED_BATCH, &none) == 0, "sched_setscheduler");
}

static void *take_one(void *waited) {
    struct epoll_event event;
    wake_later();
    must(epoll_wait(*(int *)waited, &event, 1, 60000) == 1, "epoll_wait");
    exactly(event.data.fd, LENGTH);
    pthread_barrier_wait(&all_woken);
    return NULL;
}

static void run_on_one_processor(cpu_set_t *before) {
    cpu_set_t single;
    must(sched_getaffinity(0, sizeof *before, before) == 0, "sched_getaffinity");
    CPU_ZERO(&single);
    CPU_SET(sched_getcpu(), &single);
    must(sched_setaffinity(0, sizeof single, &single) == 0, "sched_setaffinity");
}

/* Makes a connection that is in no instance. */
static void begin_alone(void) {
    begin();
    int ways[] = {own, to_child[0], to_child[1], to_parent[0], to_parent[1]};
    for (unsigned way = 0; way < sizeof ways / sizeof *ways; way++)
        close(ways[way]);
}

/* Threads sleep on an instance. Another thread moves as many connections with unread bytes there, and each thread is needed for one of them. */
static void moved_to_threads(unsigned events) {
    struct epoll_event event = {.events = events};
    pthread_t threads[THREADS];
    int moved[THREADS], kept[THREADS], shared = epoll_create1(EPOLL_CLOEXEC);
    cpu_set_t before;
    pthread_barrier_init(&all_woken, NULL, THREADS + 1);
    /* On one processor, all are moved before the first thread runs: see wake_later. */
    run_on_one_processor(&before);
    for (int i = 0; i < THREADS; i++) {
        begin_alone();
        must(send(one, message, LENGTH, 0) == LENGTH, "send");
        moved[i] = other, kept[i] = one;
        must(pthread_create(&threads[i], NULL, take_one, &shared) == 0, "pthread_create");
    }
    for (int i = 0; i < THREADS; i++) {
        event.data.fd = moved[i];
        must(epoll_ctl(shared, EPOLL_CTL_ADD, moved[i], &event) == 0, "epoll_ctl");
    }
    pthread_barrier_wait(&all_woken);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        close(moved[i]);
        close(kept[i]);
    }
    must(sched_setaffinity(0, sizeof before, &before) == 0, "sched_setaffinity");
    close(shared);
}

static int pipe_in_instance[2];
static sem_t taken;

static void *take_all(void *waited) {
    struct epoll_event events[2];
    char bytes[LENGTH];
    int has_taken = 0;
    wake_later();
    while (!has_taken) {
        int count = epoll_wait(*(int *)waited, events, 2, 60000);
        must(count > 0, "epoll_wait");
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd, is_pipe = fd == pipe_in_instance[0];
            /* The other thread may have taken the bytes. */
            if (is_pipe ? read(fd, bytes, 1) == 1 : recv(fd, bytes, LENGTH, MSG_DONTWAIT) == LENGTH)
                has_taken = sem_post(&taken) == 0;
        }
    }
    /* As if the work took long. */
    pthread_barrier_wait(&all_woken);
    return NULL;
}

/* Two threads sleep on an instance. Another thread moves a connection with unread bytes there and writes to a pipe: a thread that is woken for
 * both and returns the pipe's event alone leaves the connection to the other one. */
static void moved_beside_an_event(unsigned events) {
    struct epoll_event event = {.events = events}, of_pipe = {.events = EPOLLIN};
    pthread_t threads[2];
    int shared = epoll_create1(EPOLL_CLOEXEC);
    cpu_set_t before;
    must(pipe2(pipe_in_instance, O_NONBLOCK) == 0 && sem_init(&taken, 0, 0) == 0, "pipe");
    of_pipe.data.fd = pipe_in_instance[0];
    must(epoll_ctl(shared, EPOLL_CTL_ADD, pipe_in_instance[0], &of_pipe) == 0, "epoll_ctl");
    pthread_barrier_init(&all_woken, NULL, 3);
    run_on_one_processor(&before);
    begin_alone();
    must(send(one, message, LENGTH, 0) == LENGTH, "send");
    for (int i = 0; i < 2; i++)
        must(pthread_create(&threads[i], NULL, take_all, &shared) == 0, "pthread_create");
    sched_yield();
    event.data.fd = other;
    must(epoll_ctl(shared, EPOLL_CTL_ADD, other, &event) == 0, "epoll_ctl");
    must(write(pipe_in_instance[1], "x", 1) == 1, "write");
    sem_wait(&taken);
    sem_wait(&taken);
    /* For a thread that has got nothing. */
    must(write(pipe_in_instance[1], "x", 1) == 1, "write");
    pthread_barrier_wait(&all_woken);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    must(sched_setaffinity(0, sizeof before, &before) == 0, "sched_setaffinity");
    int all[] = {one, other, shared, pipe_in_instance[0], pipe_in_instance[1]};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        close(all[i]);
}

int main(void) {
    alarm(60);
    moved_to_an_old_instance();
    for (int i = 0; i < 10; i++)
        moved_beside_an_event(i % 2 ? EPOLLIN | EPOLLET : EPOLLIN);
    moved_to_threads(EPOLLIN | EPOLLET);
    moved_to_threads(EPOLLIN | EPOLLONESHOT);
    moved_to_threads(EPOLLIN | EPOLLEXCLUSIVE);
    for (int is_by_child = 0; is_by_child < 2; is_by_child++) {
        changed(EPOLL_CTL_DEL, 0, is_by_child);
        changed(EPOLL_CTL_MOD, EPOLLPRI, is_by_child);
        changed(EPOLL_CTL_MOD, 0, is_by_child);
        unsigned events[] = {EPOLLIN, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT, EPOLLIN | EPOLLEXCLUSIVE};
        for (int i = 0; i < 4; i++) {
            registered_later(events[i], is_by_child, 1);
            registered_later(events[i], is_by_child, 0);
            served_by_a_child(events[i], is_by_child);
        }
        changed_to_room(is_by_child, 1);
        changed_to_room(is_by_child, 0);
        read_in_turns(EPOLLIN | EPOLLONESHOT, is_by_child);
        read_in_turns(EPOLLIN | EPOLLET | EPOLLONESHOT, is_by_child);
    }
    for (int i = 0; i < 4; i++) {
        unsigned events[] = {EPOLLIN, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT, EPOLLIN | EPOLLEXCLUSIVE};
        registered_beside_another(events[i]);
        registered_by_who_waits(events[i]);
    }
    one_event_at_a_time();
    received(EPOLLIN);
    received(EPOLLIN | EPOLLET);
    return 0;
}
