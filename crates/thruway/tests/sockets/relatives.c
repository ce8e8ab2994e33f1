/* A server forks when it has an accelerated connection, and leaves the connection to its child: it closes its descriptor, or ends. The child ends
 * its direction before it receives the rest, or is killed, or starts another program, which may have the connection for longer than the
 * server that goes on with it. The client gets the end of the stream each time, and the server or its child all bytes. The argument is a
 * number of further children that do nothing.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <fcntl.h>
#include <signal.h>

enum { ROUNDS = 40, EXCHANGES = 60, UNREAD = 200000, MORE = 300000, ANSWER = 20000 };
/* What becomes of the server and its child. */
enum { CLOSES, ENDS, CHILD_KILLED, CHILD_EXECUTES, GOES_ON, WAYS };

static char bytes[MORE];
static int way, idle, sent[2], done[2], executed[2];

static void answer(int fd) {
    must(send(fd, bytes, ANSWER, 0) == ANSWER, "answer");
}

static void go_on(int fd) {
    char byte;
    alarm(60);
    if (way == CHILD_EXECUTES || way == GOES_ON) {
        char *arguments[] = {"sleep", "0.05", NULL};
        must(fcntl(fd, F_SETFD, 0) == 0, "fcntl");
        if (way == CHILD_EXECUTES)
            answer(fd);
        execvp("sleep", arguments);
        must(0, "execvp");
    }
    answer(fd);
    if (way == CHILD_KILLED)
        raise(SIGKILL);
    must(shutdown(fd, SHUT_WR) == 0, "shutdown");
    exactly(fd, UNREAD + MORE);
    must(recv(fd, &byte, 1, 0) == 0, "the client's end");
    must(write(done[1], "d", 1) == 1, "write");
    _exit(0);
}

static void serve(int accepted) {
    char byte;
    alarm(60);
    for (int i = 0; i < EXCHANGES; i++) {
        exactly(accepted, 1);
        must(send(accepted, "b", 1, 0) == 1, "send");
    }
    must(read(sent[0], &byte, 1) == 1, "read");
    if (way == CHILD_KILLED || way == CHILD_EXECUTES)
        exactly(accepted, UNREAD);
    int over[2];
    must(pipe(over) == 0, "pipe");
    for (int i = 0; i < idle; i++)
        if (fork() == 0) {
            close(accepted);
            close(over[1]);
            close(executed[1]);
            _exit(read(over[0], &byte, 1));
        }
    pid_t child = fork();
    if (child == 0)
        go_on(accepted);
    if (way == ENDS)
        _exit(0);
    close(executed[1]);
    if (way == GOES_ON) {
        must(read(executed[0], &byte, 1) == 0, "the other program");
        exactly(accepted, UNREAD);
        answer(accepted);
    }
    close(accepted);
    waitpid(child, NULL, 0);
    /* The process goes on without the connection until the client has had its end. */
    must(read(sent[0], &byte, 1) == 1, "read");
}

int main(int count, char **arguments) {
    char byte;
    idle = count > 1 ? atoi(arguments[1]) : 0;
    for (int round = 0; round < (idle ? WAYS : ROUNDS); round++) {
        way = round % WAYS;
        alarm(60);
        must(pipe(sent) == 0 && pipe(done) == 0 && pipe2(executed, O_CLOEXEC) == 0, "pipe");
        pid_t server = connect_to_child(serve);
        close(executed[1]);
        for (int i = 0; i < EXCHANGES; i++) {
            must(send(one, "a", 1, 0) == 1, "send");
            exactly(one, 1);
        }
        must(send(one, bytes, UNREAD, 0) == UNREAD, "send");
        must(write(sent[1], "s", 1) == 1, "write");
        exactly(one, ANSWER);
        must(recv(one, &byte, 1, 0) == 0, "the server's end");
        if (way == CLOSES || way == ENDS) {
            must(send(one, bytes, MORE, 0) == MORE, "send");
            must(shutdown(one, SHUT_WR) == 0, "shutdown");
            must(read(done[0], &byte, 1) == 1, "the child has all");
        }
        must(write(sent[1], "e", 1) == 1, "write");
        end_child(server);
        close(sent[0]), close(sent[1]), close(done[0]), close(done[1]), close(executed[0]);
    }
    return 0;
}
