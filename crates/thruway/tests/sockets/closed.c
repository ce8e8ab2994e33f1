/* A thread waits in recv on a connection that a child has, too, when another thread shuts it down and closes it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>

#include "common.h"
#include "pair.h"

enum { ROUNDS = 10 };

static void *wait_for_end(void *waiting) {
    char byte;
    pid_t thread = gettid();
    must(write(*(int *)waiting, &thread, sizeof thread) == sizeof thread, "write");
    must(recv(one, &byte, 1, 0) == 0, "recv");
    return NULL;
}

static int sleeps(pid_t thread) {
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "r");
    must(file && fgets(line, sizeof line, file), path);
    fclose(file);
    return strstr(line, ") S ") != NULL;
}

static void answer(int accepted) {
    char byte;
    alarm(60);
    while (recv(accepted, &byte, 1, 0) == 1)
        must(send(accepted, &byte, 1, 0) == 1, "send");
}

int main(void) {
    alarm(60);
    for (int round = 0; round < ROUNDS; round++) {
        int status, waiting[2];
        pthread_t thread;
        pid_t number;
        pid_t server = connect_to_child(answer);
        for (int i = 0; i < 100; i++) {
            must(send(one, "a", 1, 0) == 1, "send");
            exactly(one, 1);
        }
        must(pipe(waiting) == 0, "pipe");
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            pause();
            _exit(0);
        }
        must(pthread_create(&thread, NULL, wait_for_end, &waiting[1]) == 0, "pthread_create");
        must(read(waiting[0], &number, sizeof number) == sizeof number, "read");
        while (!sleeps(number))
            sched_yield();
        must(shutdown(one, SHUT_RDWR) == 0, "shutdown");
        close(one);
        must(pthread_join(thread, NULL) == 0, "pthread_join");
        kill(child, SIGKILL);
        must(waitpid(child, &status, 0) == child, "the child");
        must(waitpid(server, &status, 0) == server && status == 0, "the server");
        close(waiting[0]);
        close(waiting[1]);
    }
    return 0;
}
