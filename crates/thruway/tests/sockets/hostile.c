/* A peer that stores any value into any word of the memory that it shares, at any time: it may break its own connection and nothing else.
 *
 *     hostile SECONDS SEED
 *
 * One process serves a clean client and hostile ones: a thread for each connection in every way to wait, and an event loop for several.
 * Another one is the client of a hostile server in the same ways. The calls of both return after the hostile end has gone, and the clean
 * client gets its own bytes.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void must(int holds, const char *what) {
    if (!holds) {
        printf("%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

enum { BLOCKING, IMPATIENT, POLL, SELECT, EPOLL, EPOLL_EDGE, PEEK, LOOP, MODES };

/* Time for calls to return in after the hostile end has gone. */
enum { PATIENCE = 30 };

static struct sockaddr_in victim, attacker;
static double end;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void pause_for(int microseconds) {
    nanosleep(&(struct timespec){0, microseconds * 1000}, NULL);
}

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static int listen_at(struct sockaddr_in *address) {
    socklen_t length = sizeof *address;
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(bind(listener, (void *)address, length) == 0 && listen(listener, 64) == 0, "listen");
    getsockname(listener, (void *)address, &length);
    return listener;
}

static int connect_to(struct sockaddr_in *address) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(fd >= 0, "socket");
    if (connect(fd, (void *)address, sizeof *address) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Waits as the mode says, and receives. What `recv` has returned. */
static int receive(int fd, int mode, int ep, char *to, int length) {
    for (;;) {
        struct pollfd one = {.fd = fd, .events = POLLIN};
        struct epoll_event event;
        fd_set set;
        int n;
        switch (mode) {
        case BLOCKING:
            return recv(fd, to, length, 0);
        case PEEK:
            n = recv(fd, to, length, MSG_PEEK);
            return n <= 0 ? n : recv(fd, to, n, 0);
        case IMPATIENT:
            sched_yield();
            break;
        case POLL:
            poll(&one, 1, -1);
            break;
        case SELECT:
            FD_ZERO(&set);
            FD_SET(fd, &set);
            select(fd + 1, &set, NULL, NULL, NULL);
            break;
        case EPOLL:
            epoll_wait(ep, &event, 1, -1);
            break;
        default:
            // Edges are told once: everything is read before the next wait.
            n = recv(fd, to, length, MSG_DONTWAIT);
            if (n >= 0 || errno != EAGAIN)
                return n;
            epoll_wait(ep, &event, 1, -1);
        }
        n = recv(fd, to, length, MSG_DONTWAIT);
        if (n >= 0 || errno != EAGAIN)
            return n;
    }
}

/* Sends everything that it receives back, to the end. */
static void echo(int fd, int mode) {
    char buffer[1 << 14];
    int ep = -1, n;
    if (mode == EPOLL || mode == EPOLL_EDGE) {
        struct epoll_event event = {.events = EPOLLIN | (mode == EPOLL_EDGE ? EPOLLET : 0)};
        ep = epoll_create1(EPOLL_CLOEXEC);
        must(ep >= 0 && epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event) == 0, "epoll");
    }
    int is_open = 1;
    while (is_open && (n = receive(fd, mode, ep, buffer, sizeof buffer)) > 0)
        for (int sent = 0, m; is_open && sent < n; sent += m) {
            m = send(fd, buffer + sent, n - sent, MSG_NOSIGNAL | (mode == IMPATIENT ? MSG_DONTWAIT : 0));
            // Also where a hostile end does not read.
            is_open = m >= 0;
        }
    if (ep >= 0)
        close(ep);
    close(fd);
}

static atomic_int serving[MODES];

/* An event loop: no call waits but that for events. Bytes that cannot be sent at once wait in `pending`. */
enum { FDS = 1024 };
static struct pending {
    char bytes[1 << 14];
    int length;
    // Of the connections that have had the descriptor.
    unsigned number;
} *pending[FDS];
static int loop_epoll;

static void watch(int operation, int fd, int events) {
    struct epoll_event event = {.events = events, .data.u64 = (uint64_t)pending[fd]->number << 32 | fd};
    must(epoll_ctl(loop_epoll, operation, fd, &event) == 0, operation == EPOLL_CTL_ADD ? "add" : "modify");
}

/* Whether the connection goes on. */
static int step(int fd) {
    struct pending *waits = pending[fd];
    int n;
    if (waits->length == 0) {
        n = recv(fd, waits->bytes, sizeof waits->bytes, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN))
            return 0;
        waits->length = n > 0 ? n : 0;
    }
    if (waits->length > 0) {
        n = send(fd, waits->bytes, waits->length, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN)
            return 0;
        if (n > 0)
            memmove(waits->bytes, waits->bytes + n, waits->length -= n);
    }
    watch(EPOLL_CTL_MOD, fd, waits->length > 0 ? EPOLLOUT : EPOLLIN);
    return 1;
}

static void *loop(void *unused) {
    for (;;) {
        struct epoll_event events[64];
        int count = epoll_wait(loop_epoll, events, 64, -1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.u64 & (FDS - 1);
            errno = 0;
            must(pending[fd]->number == events[i].data.u64 >> 32, "an event of a connection that is open");
            if (!step(fd)) {
                pending[fd]->number++;
                close(fd);
                serving[LOOP]--;
            }
        }
    }
    return unused;
}

static void serve_in_loop(int fd) {
    must(fd < FDS, "room for the connection");
    if (pending[fd] == NULL)
        pending[fd] = calloc(1, sizeof *pending[fd]);
    pending[fd]->length = 0;
    serving[LOOP]++;
    watch(EPOLL_CTL_ADD, fd, EPOLLIN);
}

static void *serve(void *arg) {
    int fd = (int)(long)arg;
    unsigned char mode;
    int is_told = recv(fd, &mode, 1, 0) == 1 && mode < MODES;
    if (is_told && mode == LOOP) {
        serve_in_loop(fd);
    } else if (is_told) {
        serving[mode]++;
        echo(fd, mode);
        serving[mode]--;
    } else {
        close(fd);
    }
    return NULL;
}

static atomic_int is_accepting = 1;
static int listener_of_victim;

static void *accepts(void *unused) {
    for (;;) {
        int fd = accept4(listener_of_victim, NULL, NULL, SOCK_CLOEXEC);
        pthread_t thread;
        must(fd >= 0, "accept");
        if (!is_accepting) {
            close(fd);
            return unused;
        }
        must(pthread_create(&thread, NULL, serve, (void *)(long)fd) == 0, "thread");
        pthread_detach(thread);
    }
}

/* The victim as a server. SIGTERM says that all clients have gone. */
static void serve_all(void) {
    pthread_t thread;
    sigset_t set;
    int signal;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    loop_epoll = epoll_create1(EPOLL_CLOEXEC);
    must(pthread_create(&thread, NULL, loop, NULL) == 0, "thread");
    must(pthread_create(&thread, NULL, accepts, NULL) == 0, "thread");
    sigwait(&set, &signal);
    double limit = now() + PATIENCE;
    for (;;) {
        int left = 0;
        for (int mode = 0; mode < MODES; mode++)
            left += serving[mode];
        if (left == 0)
            break;
        if (now() > limit) {
            for (int mode = 0; mode < MODES; mode++)
                printf("server: %d calls of mode %d do not return\n", serving[mode], mode);
            exit(1);
        }
        pause_for(1000);
    }
    is_accepting = 0;
    close(connect_to(&victim));
    pthread_join(thread, NULL);
    exit(0);
}

/* The clean client: what it sends comes back. */
static void check(uint64_t seed) {
    static char sent[1 << 15], got[1 << 15];
    long exchanges = 0;
    while (now() < end) {
        char mode = next_random(&seed) % MODES;
        int fd = connect_to(&victim);
        must(fd >= 0 && send(fd, &mode, 1, 0) == 1, "connect");
        // A server that does not wait for room has to have some.
        int most = mode == IMPATIENT ? 1 << 10 : sizeof sent;
        for (int turn = 0; turn < 400 && now() < end; turn++, exchanges++) {
            // The event loop serves others beside hostile peers.
            alarm(PATIENCE);
            int length = 1 + next_random(&seed) % most;
            for (int i = 0; i < length; i++)
                sent[i] = next_random(&seed);
            must(send(fd, sent, length, MSG_NOSIGNAL) == length, "clean send");
            must(recv(fd, got, length, MSG_WAITALL) == length, "clean receive");
            must(memcmp(sent, got, length) == 0, "clean bytes");
        }
        close(fd);
    }
    must(exchanges > 0, "exchanges");
    exit(0);
}

/* The victim as a client of a hostile server. */
static void ask(uint64_t seed) {
    for (int mode = 0; now() < end; mode = (mode + 1) % LOOP) {
        int fd = connect_to(&attacker);
        if (fd < 0)
            continue;
        alarm(PATIENCE);
        char some[64];
        memset(some, mode, sizeof some);
        if (send(fd, some, 1 + next_random(&seed) % sizeof some, MSG_NOSIGNAL) > 0)
            echo(fd, mode);
        else
            close(fd);
        alarm(0);
    }
    exit(0);
}

/* Shared memory of this process's connections, and of those before them. */
static int find_memory(uint64_t **memory, int most) {
    char line[512];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    must(maps != NULL, "maps");
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "memfd:thruway socket") && count < most)
            memory[count++] = (uint64_t *)strtoul(line, NULL, 16);
    fclose(maps);
    return count;
}

/* Words of 64 bits: those of the segment's head, these and the control words of both directions, and all before the rings. */
enum { HEAD = 128 / 8, CONTROL = HEAD + 2 * 896 / 8, WORDS = 4096 / 8 };
static const int regions[] = {HEAD, CONTROL, WORDS};

/* Stores something into one of the first words. */
static void scribble(uint64_t *memory, uint64_t *seed, int words) {
    uint64_t random = next_random(seed);
    int at = next_random(seed) % words;
    _Atomic uint32_t *narrow = (_Atomic uint32_t *)(memory + at) + random % 2;
    _Atomic uint64_t *wide = (_Atomic uint64_t *)(memory + at);
    uint64_t old = *wide;
    switch (random >> 8 & 15) {
    case 8:
    case 9:
    case 10:
    case 11:
        // The state of a word: the lowest bits.
        *wide = old ^ 1 << (random >> 16 & 3);
        break;
    case 0:
        *narrow = random >> 16 & 3;
        break;
    case 1:
        *narrow = random >> 16;
        break;
    case 2:
        *wide = random >> 16 & 0xfffff;
        break;
    case 3:
        *wide = next_random(seed);
        break;
    case 4:
        *wide = old + (random >> 16 & 63) - 32;
        break;
    case 5:
        *narrow += 1;
        break;
    case 6:
        *wide = ~0ull;
        break;
    default:
        // Back and forth.
        *wide = random >> 16 & 0xffff;
        sched_yield();
        *wide = old;
    }
}

/* Uses a connection until it is accelerated, and stores into its memory meanwhile. */
static long attack(int fd, uint64_t *seed, int is_server) {
    char buffer[1 << 14] = {0};
    uint64_t *memory[64];
    long stores = 0;
    // A peer that breaks the connection at once, or later, or only when it is about to be closed, which may be as the protocol says.
    int turns = 4 + next_random(seed) % 60, quiet = next_random(seed) % 40, count = 0;
    int words = regions[next_random(seed) % 3], is_orderly = next_random(seed) % 2;
    for (int turn = 0; turn < turns; turn++) {
        if (count == 0 && turn >= quiet)
            count = find_memory(memory, 64);
        for (int i = next_random(seed) % 20; count > 0 && i > 0; i--, stores++)
            scribble(memory[next_random(seed) % count], seed, words);
        int length = 1 + next_random(seed) % (next_random(seed) % 8 ? 100 : sizeof buffer);
        if (!is_server && send(fd, buffer, length, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN)
            break;
        for (int tries = 0; tries < 20; tries++) {
            int n = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
            if (n > 0 && is_server)
                send(fd, buffer, n, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n >= 0 || errno != EAGAIN)
                break;
            pause_for(20);
        }
    }
    if (is_orderly) {
        pause_for(500);
        while (recv(fd, buffer, sizeof buffer, MSG_DONTWAIT) > 0)
            continue;
    }
    close(fd);
    // What both ends keep for the next connection.
    count = find_memory(memory, 64);
    for (int i = next_random(seed) % 4; count > 0 && i > 0; i--)
        scribble(memory[next_random(seed) % count], seed, words);
    return stores;
}

static pid_t begin(void) {
    fflush(stdout);
    pid_t child = fork();
    must(child >= 0, "fork");
    return child;
}

/* Attacks in processes of their own, for some connections each: what they store may stop or end them. Reports whether one has stored
 * anything. */
static void attack_in_turns(long (*attack_some)(uint64_t), uint64_t seed) {
    int has_stored = 0, status;
    while (now() < end) {
        pid_t child = begin();
        if (child == 0) {
            alarm(3);
            _exit(attack_some(next_random(&seed)) > 0);
        }
        next_random(&seed);
        waitpid(child, &status, 0);
        has_stored |= status != 0;
    }
    must(has_stored, "stores into the memory of connections");
    exit(0);
}

static long attack_server(uint64_t seed) {
    long stores = 0;
    for (int i = 0; i < 16 && now() < end; i++) {
        int fd = connect_to(&victim);
        must(fd >= 0, "hostile connect");
        char mode = next_random(&seed) % MODES;
        if (send(fd, &mode, 1, MSG_NOSIGNAL) == 1)
            stores += attack(fd, &seed, 0);
        else
            close(fd);
    }
    return stores;
}

static int listener_of_attacker;

static long attack_clients(uint64_t seed) {
    long stores = 0;
    for (int i = 0; i < 16 && now() < end; i++) {
        struct pollfd one = {.fd = listener_of_attacker, .events = POLLIN};
        if (poll(&one, 1, 100) == 1) {
            int fd = accept4(listener_of_attacker, NULL, NULL, SOCK_CLOEXEC);
            must(fd >= 0, "accept");
            stores += attack(fd, &seed, 1);
        }
    }
    return stores;
}

int main(int count, char **args) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    must(count == 3, "hostile SECONDS SEED");
    uint64_t seed = strtoull(args[2], NULL, 10) * 2654435761u + 88172645463325252u;
    signal(SIGPIPE, SIG_IGN);
    listener_of_victim = listen_at(&victim);
    listener_of_attacker = listen_at(&attacker);
    end = now() + atof(args[1]);
    pid_t server = begin(), others[4];
    if (server == 0) {
        close(listener_of_attacker);
        serve_all();
    }
    for (int i = 0; i < 4; i++) {
        others[i] = begin();
        if (others[i] == 0) {
            close(listener_of_victim);
            if (i != 3)
                close(listener_of_attacker);
            if (i == 0)
                check(seed);
            if (i == 1)
                attack_in_turns(attack_server, seed + 1);
            if (i == 2)
                ask(seed + 2);
            attack_in_turns(attack_clients, seed + 3);
        }
    }
    close(listener_of_attacker);
    static const char *names[] = {"the clean client", "the hostile client", "the client of a hostile server", "the hostile server"};
    int failures = 0, status;
    for (int i = 0; i < 4; i++) {
        waitpid(others[i], &status, 0);
        if (status != 0)
            printf("%s: status %x\n", names[i], status);
        // The hostile ones may break themselves.
        failures += status != 0 && i % 2 == 0;
    }
    kill(server, SIGTERM);
    waitpid(server, &status, 0);
    if (status != 0)
        printf("the server: status %x\n", status);
    return failures + (status != 0);
}
