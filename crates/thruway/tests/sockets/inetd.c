/* A connection with many unread bytes becomes standard input and output of a program without the library. The peer does not block, and has
 * filled the ring and the TCP connection.
 *
 *     inetd
 *
 * The other programs are this one: `inetd peer PORT PIPE`, and `inetd rest POSITION` without the library.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>

#include "common.h"
#include "pair.h"

enum { TOTAL = 3000000, CALLS = 30, ROUNDS = 4, PATIENCE = 120 };

static char buffer[1 << 16];

static unsigned char at(uint64_t position) {
    uint64_t mixed = position * 0x9e3779b97f4a7c15u;
    return (mixed ^ mixed >> 29) >> 40;
}

/* Receives `length` bytes of the stream, or as many as there are. */
static long receive(int fd, long position, long length) {
    long begin = position;
    while (length > 0) {
        long n = recv(fd, buffer, length < (long)sizeof buffer ? length : (long)sizeof buffer, 0);
        must(n >= 0, "recv");
        if (n == 0)
            break;
        for (long i = 0; i < n; i++)
            if ((unsigned char)buffer[i] != at(position + i)) {
                fprintf(stderr, "another byte at %ld\n", position + i);
                exit(1);
            }
        position += n;
        length -= n;
    }
    return position - begin;
}

/* Sends the whole stream, and says each time that it has filled the connection. */
static void peer(const char *port, int full) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(atoi(port))};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), small = 32768;
    must(connect(fd, (void *)&address, sizeof address) == 0, "connect");
    for (int i = 0; i < CALLS; i++) {
        must(send(fd, "call", 4, 0) == 4, "send");
        exactly(fd, 4);
    }
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    for (long sent = 0; sent < TOTAL;) {
        long length = 1 + sent * 7919 % 40000;
        if (length > TOTAL - sent)
            length = TOTAL - sent;
        for (long i = 0; i < length; i++)
            buffer[i] = at(sent + i);
        long n = send(fd, buffer, length, 0);
        if (n < 0) {
            must(errno == EAGAIN, "send");
            struct pollfd one = {.fd = fd, .events = POLLOUT};
            must(write(full, "f", 1) == 1 && poll(&one, 1, -1) == 1, "poll");
        } else {
            sent += n;
        }
    }
    write(full, "e", 1);
    fcntl(fd, F_SETFL, 0);
    exactly(fd, 1);
}

/* `copies`: standard descriptors that the connection becomes. */
static void round_with(int copies) {
    struct sockaddr_in address;
    int listener = listen_anywhere(&address), full[2], status[2];
    char port[8], number[16], byte;
    must(pipe(full) == 0, "pipe");
    fcntl(full[0], F_SETFD, FD_CLOEXEC);
    snprintf(port, sizeof port, "%d", ntohs(address.sin_port));
    snprintf(number, sizeof number, "%d", full[1]);
    pid_t sender = fork();
    if (sender == 0) {
        execl("/proc/self/exe", "inetd", "peer", port, number, NULL);
        _exit(1);
    }
    close(full[1]);
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    must(fd >= 0, "accept");
    close(listener);
    for (int i = 0; i < CALLS; i++) {
        exactly(fd, 4);
        must(send(fd, "call", 4, 0) == 4, "send");
    }
    must(read(full[0], &byte, 1) == 1, "read");
    // More than the ring has. Then the peer fills it again.
    long position = receive(fd, 0, 262144 + 500);
    must(read(full[0], &byte, 1) == 1, "read");
    snprintf(number, sizeof number, "%ld", position);
    pid_t child = fork();
    if (child == 0) {
        unsetenv("LD_PRELOAD");
        for (int i = 0; i < copies; i++)
            dup2(fd, i);
        execl("/proc/self/exe", "inetd", "rest", number, NULL);
        _exit(1);
    }
    close(fd);
    waitpid(child, &status[0], 0);
    waitpid(sender, &status[1], 0);
    close(full[0]);
    printf("%d copies: %d, %d\n", copies, status[0], status[1]);
    if (status[0] != 0 || status[1] != 0)
        exit(1);
}

int main(int count, char **args) {
    alarm(PATIENCE);
    if (count == 4) {
        peer(args[2], atoi(args[3]));
    } else if (count == 3) {
        long position = atol(args[2]), left = TOTAL - position;
        if (receive(0, position, left) != left || send(0, "k", 1, MSG_NOSIGNAL) != 1)
            return 1;
    }
    if (count > 1)
        return 0;
    for (int i = 0; i < ROUNDS; i++)
        round_with(1 + i % 2);
}
