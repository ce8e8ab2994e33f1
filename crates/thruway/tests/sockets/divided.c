/* A process receives part of what has been sent, and forks; the child receives the rest and answers. The sender waits for the answer: it has to
 * learn from the call of the receiver that some of its bytes are to be sent again, also where the receiver has sent nothing for long.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"

enum { ROUNDS = 40, PART = 300, LENGTH = 60000 };

static int parts, received[2];

static void serve(int accepted) {
    static char message[LENGTH];
    char byte;
    alarm(60);
    exactly(accepted, 1);
    for (int i = 0; i < parts; i++) {
        must(send(accepted, message, PART, 0) == PART, "send");
        must(read(received[0], &byte, 1) == 1, "read");
    }
    must(send(accepted, message, LENGTH, 0) == LENGTH, "send");
    exactly(accepted, 1);
}

int main(void) {
    alarm(60);
    for (int round = 0; round < ROUNDS; round++) {
        int status;
        parts = 5 * round;
        must(pipe(received) == 0, "pipe");
        pid_t server = connect_to_child(serve);
        must(send(one, "a", 1, 0) == 1, "send");
        for (int i = 0; i < parts; i++) {
            exactly(one, PART);
            must(write(received[1], "r", 1) == 1, "write");
        }
        exactly(one, PART);
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            exactly(one, LENGTH - PART);
            must(send(one, "a", 1, 0) == 1, "send");
            _exit(0);
        }
        must(waitpid(child, &status, 0) == child && status == 0, "the child");
        end_child(server);
        close(received[0]);
        close(received[1]);
    }
    return 0;
}
