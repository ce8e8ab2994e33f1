/* Threads of a server serve short connections while another thread starts programs, which inherit the connections' descriptors. Each start
 * returns the connections to TCP, while their descriptors are closed and reused. No byte is lost or wrong. `splice`: the server sends by `splice` from
 * a pipe, which waits for requests. `fork`: programs are started by `fork` and `exec`, and the clients are threads of the same process.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <fcntl.h>
#include <pthread.h>

enum { THREADS = 4, CLIENTS = 4, CONNECTIONS = 60, MESSAGES = 40, LONGEST = 100 };

static int listener, splices, forks;
static struct sockaddr_in address;

/* Sends what comes from a pipe. */
static void *answer(void *ends) {
    int from = ((int *)ends)[0], to = ((int *)ends)[1];
    while (splice(from, NULL, to, NULL, LONGEST, 0) > 0)
        ;
    return NULL;
}

static void serve_by_splice(int fd) {
    char bytes[LONGEST];
    int ends[2], answers[2];
    pthread_t thread;
    must(pipe2(ends, O_CLOEXEC) == 0, "pipe2");
    answers[0] = ends[0], answers[1] = fd;
    must(pthread_create(&thread, NULL, answer, answers) == 0, "pthread_create");
    /* Requests are unread for a while. */
    for (ssize_t length; usleep(300), (length = recv(fd, bytes, sizeof bytes, 0)) > 0;)
        must(write(ends[1], bytes, length) == length, "write");
    close(ends[1]);
    pthread_join(thread, NULL);
    close(ends[0]);
}

static void *serve(void *unused) {
    char bytes[LONGEST];
    int fd;
    while ((fd = accept(listener, NULL, NULL)) >= 0) {
        unsigned char next = 0;
        if (splices) {
            serve_by_splice(fd);
            close(fd);
            continue;
        }
        ssize_t length;
        while ((length = recv(fd, bytes, sizeof bytes, 0)) > 0) {
            for (int i = 0; i < length; i++)
                must((unsigned char)bytes[i] == next++, "a byte for the server");
            must(send(fd, bytes, length, MSG_NOSIGNAL) == length, "send");
        }
        must(length == 0, "the end of a connection");
        close(fd);
    }
    return unused;
}

static void *call(void *seed) {
    srand((long)seed);
    for (int connection = 0; connection < CONNECTIONS; connection++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0), messages = 1 + rand() % MESSAGES;
        unsigned char bytes[LONGEST], sent = 0, next = 0;
        must(connect(fd, (void *)&address, sizeof address) == 0, "connect");
        for (int message = 0; message < messages; message++) {
            int length = 1 + rand() % LONGEST;
            for (int i = 0; i < length; i++)
                bytes[i] = sent++;
            must(send(fd, bytes, length, 0) == length, "send");
            for (int got = 0; got < length;) {
                ssize_t some = recv(fd, bytes, length - got, 0);
                must(some > 0, "recv");
                for (int i = 0; i < some; i++)
                    must(bytes[i] == next++, "a byte for the client");
                got += some;
            }
        }
        close(fd);
    }
    return NULL;
}

static void start(void) {
    if (!forks) {
        must(system("true") == 0, "system");
        return;
    }
    char *arguments[] = {"true", NULL};
    pid_t child = fork();
    if (child == 0) {
        execv("/bin/true", arguments);
        _exit(1);
    }
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "a program");
}

int main(int count, char **arguments) {
    pthread_t threads[THREADS], callers[CLIENTS] = {0};
    pid_t clients[CLIENTS] = {0};
    splices = count > 1 && strcmp(arguments[1], "splice") == 0;
    forks = count > 1 && strcmp(arguments[1], "fork") == 0;
    alarm(60);
    listener = listen_anywhere(&address);
    for (long i = 0; i < CLIENTS && !forks; i++) {
        clients[i] = fork();
        if (clients[i] == 0) {
            alarm(60);
            close(listener);
            call((void *)i);
            _exit(0);
        }
    }
    for (int i = 0; i < THREADS; i++)
        must(pthread_create(&threads[i], NULL, serve, NULL) == 0, "pthread_create");
    for (long i = 0; i < CLIENTS && forks; i++)
        must(pthread_create(&callers[i], NULL, call, (void *)i) == 0, "pthread_create");
    int left = CLIENTS, status;
    while (left > 0) {
        start();
        /* system() waits for its own child only. */
        for (int i = 0; i < CLIENTS; i++)
            if (forks ? callers[i] && pthread_tryjoin_np(callers[i], NULL) == 0
                      : clients[i] > 0 && waitpid(clients[i], &status, WNOHANG) == clients[i]) {
                must(forks || status == 0, "a client");
                clients[i] = 0, callers[i] = 0, left--;
            }
    }
    printf("served\n");
    return 0;
}
