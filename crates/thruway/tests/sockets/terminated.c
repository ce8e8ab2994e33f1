/* A child that has a connection, too, is killed. Its parent, which receives exactly what is there, sends much and closes the connection before
 * the peer receives: all of it arrives.
 */
#define _GNU_SOURCE
#include <signal.h>

#include "common.h"
#include "pair.h"

enum { ROUNDS = 5, LENGTH = 1000000 };

static int closed[2];

static void count(int accepted) {
    static char buffer[1 << 16];
    char byte;
    int sum = 0, n;
    alarm(60);
    close(closed[1]);
    for (int i = 0; i < 200; i++) {
        must(send(accepted, buffer, 64, 0) == 64, "send");
        exactly(accepted, 64);
    }
    must(send(accepted, buffer, 64, 0) == 64, "send");
    must(read(closed[0], &byte, 1) == 1, "read");
    while ((n = recv(accepted, buffer, sizeof buffer, 0)) > 0)
        sum += n;
    must(n == 0, "recv");
    printf("%d bytes\n", sum);
    fflush(stdout);
}

int main(void) {
    static char buffer[LENGTH];
    alarm(60);
    for (int round = 0; round < ROUNDS; round++) {
        int status, sent = 0;
        must(pipe(closed) == 0, "pipe");
        pid_t receiver = connect_to_child(count);
        for (int i = 0; i < 200; i++) {
            if (i == 100) {
                pid_t child = fork();
                if (child == 0) {
                    pause();
                    _exit(0);
                }
                kill(child, SIGKILL);
                must(waitpid(child, &status, 0) == child, "the child");
            }
            exactly(one, 64);
            must(send(one, buffer, 64, 0) == 64, "send");
        }
        exactly(one, 64);
        while (sent < LENGTH) {
            int n = send(one, buffer + sent, LENGTH - sent, 0);
            must(n > 0, "send");
            sent += n;
        }
        close(one);
        must(write(closed[1], "c", 1) == 1, "write");
        must(waitpid(receiver, &status, 0) == receiver && status == 0, "the receiver");
        close(closed[0]);
        close(closed[1]);
    }
    return 0;
}
