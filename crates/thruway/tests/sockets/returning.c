/* A peer stores into the shared memory of its connection that it returns bytes, and returns none. Calls that do not wait fail, and another
 * connection of the same thread is served meanwhile. In the end the connection breaks.
 *
 *     returning
 *
 * The peers are programs of their own, as `returning echo PORT` and `returning hostile PORT`: a child would have its parent's memory.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/prctl.h>

#include "common.h"
#include "pair.h"

/* Of crates/sockets/src/segment.rs: bytes before the control words, those of one direction, and the word `returned` in them. */
enum { HEAD = 128, DIRECTION = 896, RETURNED = 144 };

/* Time for all of it. */
enum { PATIENCE = 120 };

static int connect_to(const char *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(atoi(port))};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(connect(fd, (void *)&address, sizeof address) == 0, "connect");
    return fd;
}

static void echo(int fd) {
    char byte;
    while (recv(fd, &byte, 1, 0) == 1)
        must(send(fd, &byte, 1, 0) == 1, "send");
}

/* The shared memory of the connection, if it has some. */
static char *find_memory(void) {
    char line[512], *found = NULL;
    FILE *maps = fopen("/proc/self/maps", "re");
    must(maps != NULL, "maps");
    while (found == NULL && fgets(line, sizeof line, maps))
        if (strstr(line, "memfd:thruway socket"))
            found = (char *)strtoul(line, NULL, 16);
    fclose(maps);
    return found;
}

static _Atomic uint64_t *word(char *memory, int direction, int at) {
    return (_Atomic uint64_t *)(memory + HEAD + direction * DIRECTION + at);
}

static void hostile(int fd) {
    char byte, *memory = NULL;
    uint64_t first[2];
    for (;;) {
        if (memory == NULL && (memory = find_memory()))
            for (int i = 0; i < 2; i++)
                first[i] = *word(memory, i, 0);
        must(recv(fd, &byte, 1, 0) == 1, "recv");
        // Bytes of both directions go through the memory.
        if (memory && *word(memory, 0, 0) != first[0] && *word(memory, 1, 0) != first[1])
            break;
        must(send(fd, &byte, 1, 0) == 1, "send");
    }
    for (int i = 0; i < 2; i++) {
        // The reader has closed the ring, and returns bytes.
        *word(memory, i, RETURNED) = 1;
        *word(memory, i, 0) |= 1;
    }
    printf("stored\n");
    fflush(stdout);
    for (;;)
        pause();
}

/* Starts this program with these arguments, and accepts its connection. */
static int start(const char *role, int output, pid_t *child) {
    struct sockaddr_in address;
    int listener = listen_anywhere(&address);
    char port[8];
    snprintf(port, sizeof port, "%d", ntohs(address.sin_port));
    fflush(stdout);
    *child = fork();
    if (*child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(output, 1);
        execl("/proc/self/exe", "returning", role, port, NULL);
        _exit(1);
    }
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    must(fd >= 0, "accept");
    close(listener);
    return fd;
}

int main(int count, char **args) {
    alarm(PATIENCE);
    if (count == 3) {
        (strcmp(args[1], "echo") == 0 ? echo : hostile)(connect_to(args[2]));
        return 0;
    }
    int stored[2];
    pid_t children[2];
    must(pipe2(stored, O_CLOEXEC) == 0, "pipe");
    int clean = start("echo", stored[1], &children[0]), bad = start("hostile", stored[1], &children[1]);
    char byte;
    struct pollfd ends[] = {{.fd = bad, .events = POLLIN}, {.fd = stored[0], .events = POLLIN}};
    do {
        must(send(clean, "p", 1, 0) == 1 && send(bad, "p", 1, 0) == 1, "send");
        exactly(clean, 1);
        must(poll(ends, 2, -1) > 0, "poll");
        if (ends[0].revents)
            exactly(bad, 1);
    } while (!ends[1].revents);
    must(read(stored[0], &byte, 1) == 1, "read");
    long served = 0;
    while (send(bad, "y", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EAGAIN) {
        must(send(clean, "p", 1, 0) == 1, "send");
        exactly(clean, 1);
        served++;
    }
    printf("%s, %s\n", strerror(errno), served >= 100 ? "others are served" : "others wait");
    for (int i = 0; i < 2; i++)
        kill(children[i], SIGKILL);
    return served < 100;
}
