/* What threads do to each other's connections: closes, forks, short sends. Prints results that the test compares with those of plain
 * TCP. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void must(int holds, const char *what) {
    if (!holds) {
        printf("%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static void exactly(int fd, char *to, int length) {
    while (length > 0) {
        int n = recv(fd, to, length, 0);
        must(n > 0, "recv");
        to += n;
        length -= n;
    }
}

static int listener;
static struct sockaddr_in address;

static void listens(void) {
    socklen_t length = sizeof address;
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(bind(listener, (void *)&address, length) == 0 && listen(listener, 64) == 0, "listen");
    getsockname(listener, (void *)&address, &length);
}

static int connects(void) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(connect(fd, (void *)&address, sizeof address) == 0, "connect");
    return fd;
}

/* A connection that is accelerated, if it is to be. */
static void pair(int *one, int *other) {
    char text[5];
    *one = connects();
    *other = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    must(*other >= 0, "accept");
    for (int i = 0; i < 12; i++) {
        must(send(*one, "hello", 5, 0) == 5, "send");
        exactly(*other, text, 5);
        must(send(*other, "reply", 5, 0) == 5, "send");
        exactly(*one, text, 5);
    }
}

static pthread_barrier_t together;

static void *closes(void *fd) {
    pthread_barrier_wait(&together);
    close((int)(long)fd);
    return NULL;
}

/* Two threads close the two descriptors of one connection at once. */
static void closed_twice(void) {
    pthread_barrier_init(&together, NULL, 2);
    int ends = 0;
    for (int i = 0; i < 2000; i++) {
        int one, other;
        char byte;
        pair(&one, &other);
        must(send(one, "last", 4, 0) == 4, "send");
        pthread_t thread;
        pthread_create(&thread, NULL, closes, (void *)(long)dup(one));
        pthread_barrier_wait(&together);
        close(one);
        pthread_join(thread, NULL);
        char text[4];
        exactly(other, text, 4);
        ends += recv(other, &byte, 1, 0) == 0 && memcmp(text, "last", 4) == 0;
        close(other);
    }
    printf("closed twice: %d\n", ends);
}

static atomic_int waiter;

static void *waits(void *fd) {
    char bytes[64];
    waiter = gettid();
    int n = recv((int)(long)fd, bytes, sizeof bytes, 0);
    return (void *)(long)(n > 0 ? bytes[0] : 0);
}

/* Until the thread that waits is inside the system call. */
static void until_it_waits(void) {
    char path[64], line[256];
    while (waiter == 0)
        sched_yield();
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", waiter);
    int number = -1;
    while (number != SYS_recvfrom) {
        FILE *file = fopen(path, "r");
        must(file != NULL && fgets(line, sizeof line, file) != NULL, path);
        fclose(file);
        number = strncmp(line, "running", 7) == 0 ? -1 : atoi(line);
    }
    waiter = 0;
}

/* A thread waits for one connection, which another one closes; the next connection has the same number. */
static void closed_under(void) {
    int stolen = 0, arrived = 0;
    for (int i = 0; i < 50; i++) {
        int one, other, next, next_other;
        pair(&one, &other);
        pthread_t thread;
        pthread_create(&thread, NULL, waits, (void *)(long)one);
        until_it_waits();
        int number = one;
        close(one);
        pair(&next, &next_other);
        must(next == number, "the same number");
        must(send(next_other, "n", 1, 0) == 1, "send");
        send(other, "o", 1, MSG_NOSIGNAL);
        shutdown(other, SHUT_WR);
        void *got;
        pthread_join(thread, &got);
        stolen += (long)got == 'n';
        char byte = 0;
        exactly(next, &byte, 1);
        arrived += byte == 'n';
        close(other);
        close(next);
        close(next_other);
    }
    printf("closed under: %d stolen, %d arrived\n", stolen, arrived);
}

static atomic_int stop, is_last;

static void *answers(void *unused) {
    char byte;
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        must(fd >= 0, "accept");
        while (recv(fd, &byte, 1, 0) == 1)
            must(send(fd, &byte, 1, 0) == 1, "send");
        close(fd);
        if (is_last)
            return unused;
    }
}

static void *asks(void *wrong) {
    for (int i = 0; !stop; i++) {
        int fd = connects();
        for (int turn = 0; turn < 20; turn++) {
            char byte = 'a' + (i + turn) % 26, got = 0;
            must(send(fd, &byte, 1, 0) == 1, "send");
            exactly(fd, &got, 1);
            *(int *)wrong += got != byte;
        }
        close(fd);
    }
    return NULL;
}

/* Children that exit at once or start a program, while other threads make connections and accept them. */
static void forked_beside(void) {
    pthread_t server, client;
    int wrong = 0;
    pthread_create(&server, NULL, answers, NULL);
    pthread_create(&client, NULL, asks, &wrong);
    for (int i = 0; i < 300; i++) {
        pid_t child = fork();
        if (child == 0) {
            if (i % 8 == 0)
                execlp("true", "true", NULL);
            _exit(0);
        }
        waitpid(child, NULL, 0);
    }
    stop = 1;
    pthread_join(client, NULL);
    is_last = 1;
    close(connects());
    pthread_join(server, NULL);
    printf("forked beside: %d wrong\n", wrong);
}

/* Threads that fork at once. */
static void *forks(void *unused) {
    for (int i = 0; i < 200; i++) {
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        waitpid(child, NULL, 0);
    }
    return unused;
}

static void forked_at_once(void) {
    int one, other;
    char text[5];
    pair(&one, &other);
    pthread_t first, second;
    pthread_create(&first, NULL, forks, NULL);
    pthread_create(&second, NULL, forks, NULL);
    for (int i = 0; i < 2000; i++) {
        must(send(one, "hello", 5, 0) == 5, "send");
        exactly(other, text, 5);
    }
    pthread_join(first, NULL);
    pthread_join(second, NULL);
    close(one);
    printf("forked at once: end %d\n", (int)recv(other, text, 1, 0));
    close(other);
}

/* What sendmmsg says to have sent is what arrives, without a gap. */
static void sent_in_part(void) {
    int one, other;
    pair(&one, &other);
    int small = 8192;
    setsockopt(one, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    fcntl(one, F_SETFL, O_NONBLOCK);
    static unsigned char bytes[8][100000];
    unsigned sent = 0, taken = 0;
    int wrong = 0;
    for (int round = 0; round < 400; round++) {
        struct iovec pieces[8];
        struct mmsghdr messages[8] = {0};
        unsigned at = sent;
        for (int m = 0; m < 8; m++) {
            unsigned length = 7001 + 11003 * m % 90000;
            for (unsigned i = 0; i < length; i++)
                bytes[m][i] = (at++ * 2654435761u) >> 24;
            pieces[m] = (struct iovec){.iov_base = bytes[m], .iov_len = length};
            messages[m].msg_hdr.msg_iov = &pieces[m];
            messages[m].msg_hdr.msg_iovlen = 1;
        }
        int count = sendmmsg(one, messages, 8, MSG_NOSIGNAL);
        for (int m = 0; m < count; m++)
            sent += messages[m].msg_len;
        unsigned char some[4096 * 16];
        int n = recv(other, some, 1 + round * 997 % sizeof some, MSG_DONTWAIT);
        for (int i = 0; i < n; i++)
            wrong += some[i] != (unsigned char)((taken++ * 2654435761u) >> 24);
    }
    shutdown(one, SHUT_WR);
    unsigned char some[4096 * 16];
    int n;
    while ((n = recv(other, some, sizeof some, 0)) > 0)
        for (int i = 0; i < n; i++)
            wrong += some[i] != (unsigned char)((taken++ * 2654435761u) >> 24);
    printf("sent in part: %d wrong, all arrived: %d\n", wrong, taken == sent);
    close(one);
    close(other);
}

/* A full pipe makes splice that must not wait say so. */
static void spliced(void) {
    int one, other, pipes[2];
    char full[65536] = {0};
    pair(&one, &other);
    must(pipe(pipes) == 0, "pipe");
    must(send(other, full, 50000, 0) == 50000, "send");
    must(write(pipes[1], full, sizeof full) == sizeof full, "write");
    ssize_t n = splice(one, NULL, pipes[1], NULL, 65536, SPLICE_F_NONBLOCK);
    printf("spliced into a full pipe: %d %s\n", (int)n, strerror(errno));
    for (int left = 65536; left > 0;)
        left -= read(pipes[0], full, sizeof full);
    int sum = 0;
    while (sum < 50000) {
        n = splice(one, NULL, pipes[1], NULL, 50000 - sum, SPLICE_F_NONBLOCK);
        must(n > 0, "splice");
        for (int left = n; left > 0;)
            left -= read(pipes[0], full, left);
        sum += n;
    }
    printf("spliced: %d\n", sum);
    close(one);
    close(other);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    alarm(600);
    listens();
    closed_twice();
    closed_under();
    sent_in_part();
    spliced();
    forked_at_once();
    forked_beside();
    return 0;
}
