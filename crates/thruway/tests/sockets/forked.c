/* A server forks after it has looked for the other end of a connection, and before that end can be met: parent and child share what is known
 * of the connection, and not the memory that one of them maps later. With "turns", both answer in turns. With "memory", the child answers, and
 * the parent, which has mapped memory of its own since, closes its descriptor.
 */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "common.h"
#include "pair.h"

enum { CONNECTIONS = 20, MESSAGES = 100, MAPPED = 400, LENGTH = 1 << 16 };

static int connection;

static void ask(int accepted) {
    char message[64] = "";
    alarm(60);
    must(send(accepted, message, 40, 0) == 40, "send");
    exactly(accepted, 40);
    for (int i = 0; i < MESSAGES + connection; i++) {
        must(send(accepted, message, sizeof message, 0) == sizeof message, "send");
        exactly(accepted, sizeof message);
    }
}

static void answer(void) {
    char message[64];
    must(recv(one, message, sizeof message, MSG_WAITALL) == sizeof message, "recv");
    must(send(one, message, sizeof message, 0) == sizeof message, "send");
}

/* Answers every other message, the first one if `is_first`. */
static void take_turns(int in, int out, int is_first) {
    char byte = 0;
    for (int i = 0; i < MESSAGES + connection; i++)
        if (i % 2 != is_first) {
            answer();
            must(write(out, &byte, 1) == 1, "write");
        } else
            must(read(in, &byte, 1) == 1, "read");
}

int main(int count, char **arguments) {
    int takes_turns = count > 1 && strcmp(arguments[1], "turns") == 0;
    alarm(60);
    for (connection = 0; connection < CONNECTIONS; connection++) {
        char byte;
        int to_child[2], to_parent[2], status;
        unsigned char *own[MAPPED];
        pid_t client = connect_to_child(ask);
        for (int i = 0; i < 40; i++) {
            exactly(one, 1);
            must(send(one, "a", 1, 0) == 1, "send");
        }
        must(pipe(to_child) == 0 && pipe(to_parent) == 0, "pipe");
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            if (takes_turns)
                take_turns(to_child[0], to_parent[1], 1);
            else {
                for (int i = 0; i < MESSAGES + connection; i++)
                    answer();
                must(write(to_parent[1], "c", 1) == 1, "write");
                must(read(to_child[0], &byte, 1) == 1, "read");
            }
            _exit(0);
        }
        if (takes_turns)
            take_turns(to_parent[0], to_child[1], 0);
        else {
            for (int i = 0; i < MAPPED; i++) {
                own[i] = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                memset(own[i], i, LENGTH);
            }
            must(read(to_parent[0], &byte, 1) == 1, "read");
        }
        close(one);
        for (int i = 0; i < MAPPED && !takes_turns; i++) {
            for (int at = 0; at < LENGTH; at += 4096)
                must(own[i][at] == (unsigned char)i, "memory of the program's own");
            munmap(own[i], LENGTH);
        }
        if (!takes_turns)
            must(write(to_child[1], "p", 1) == 1, "write");
        must(waitpid(child, &status, 0) == child && status == 0, "the child");
        must(waitpid(client, &status, 0) == client && status == 0, "the client");
        for (int i = 0; i < 2; i++) {
            close(to_child[i]);
            close(to_parent[i]);
        }
    }
    return 0;
}
