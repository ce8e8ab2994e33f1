/* A program that knows nothing of rings reads a connection, and its parent looks at the same connection with MSG_PEEK, to learn of its end:
 * what it has been shown is gone at the next look, and other bytes have come.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"

enum { MESSAGES = 60000, FIRST = 2000, LENGTH = 64 };

static void ask(int accepted) {
    char message[LENGTH] = "";
    alarm(60);
    for (int i = 0; i < MESSAGES; i++) {
        if (i < 100)
            exactly(accepted, LENGTH);
        /* Bytes that precede the reader are sent again for it, which a process that has ended cannot do. */
        if (i == FIRST)
            exactly(accepted, 1);
        must(send(accepted, message, LENGTH, 0) == LENGTH, "send");
    }
}

int main(int count, char **arguments) {
    char message[LENGTH] = "", buffer[4096];
    long sum = 0;
    int n, status;
    alarm(60);
    if (count > 1) {
        must(send(0, "g", 1, 0) == 1, "send");
        while ((n = recv(0, buffer, sizeof buffer, 0)) > 0)
            sum += n;
        must(n == 0, "recv");
        printf("%ld bytes\n", sum);
        return 0;
    }
    pid_t client = connect_to_child(ask);
    for (int i = 0; i < 100; i++) {
        must(send(one, message, LENGTH, 0) == LENGTH, "send");
        exactly(one, LENGTH);
    }
    pid_t reader = fork();
    if (reader == 0) {
        must(dup2(one, 0) == 0, "dup2");
        unsetenv("LD_PRELOAD");
        execl("/proc/self/exe", arguments[0], "reads", NULL);
        _exit(1);
    }
    while ((n = recv(one, buffer, sizeof buffer, MSG_PEEK | MSG_DONTWAIT)) != 0)
        must(n > 0 || errno == EAGAIN, "a look");
    must(waitpid(reader, &status, 0) == reader && status == 0, "the reader");
    must(waitpid(client, &status, 0) == client && status == 0, "the client");
    return 0;
}
