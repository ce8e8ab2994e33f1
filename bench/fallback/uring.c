/* Messages to and fro by io_uring: `uring serve PORT`, `uring ask PORT CONNECTIONS BYTES SECONDS`. Prints round trips in a second. */
#include <arpa/inet.h>
#include <liburing.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTIONS = 256, SIZE = 1 << 16 };

/* One request of each connection is in progress. */
static struct connection {
    int fd, is_sending, length, at;
    char bytes[SIZE];
} connections[CONNECTIONS];
static struct io_uring ring;

static void must(int holds, const char *what) {
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void submit(struct connection *one) {
    struct io_uring_sqe *request = io_uring_get_sqe(&ring);
    must(request != NULL, "a free request");
    if (one->is_sending)
        io_uring_prep_send(request, one->fd, one->bytes + one->at, one->length - one->at, MSG_NOSIGNAL);
    else
        io_uring_prep_recv(request, one->fd, one->bytes + one->at, one->length - one->at, 0);
    io_uring_sqe_set_data(request, one);
}

static void accept_next(int listener) {
    struct io_uring_sqe *request = io_uring_get_sqe(&ring);
    must(request != NULL, "a free request");
    io_uring_prep_accept(request, listener, NULL, NULL, 0);
    io_uring_sqe_set_data(request, NULL);
}

static struct connection *add(int fd, int length) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    for (int i = 0; i < CONNECTIONS; i++)
        if (connections[i].fd == 0) {
            connections[i].fd = fd;
            connections[i].length = length;
            return &connections[i];
        }
    must(0, "connections");
    return NULL;
}

/* `message`: bytes of each, or 0 for a server, which sends back what has come. The number of messages until `end`. */
static long turn(int listener, int message, double end) {
    long turns = 0;
    struct io_uring_cqe *done;
    while (now() < end) {
        must(io_uring_submit_and_wait(&ring, 1) >= 0, "io_uring_submit_and_wait");
        while (io_uring_peek_cqe(&ring, &done) == 0) {
            struct connection *one = io_uring_cqe_get_data(done);
            int result = done->res;
            io_uring_cqe_seen(&ring, done);
            if (one == NULL) {
                must(result >= 0, "accept");
                submit(add(result, SIZE));
                accept_next(listener);
                continue;
            }
            if (result <= 0) {
                must(message == 0, "the server");
                close(one->fd);
                one->fd = one->at = one->is_sending = 0;
                continue;
            }
            one->at += result;
            if (!one->is_sending && (message == 0 || one->at == one->length)) {
                turns++;
                one->is_sending = 1;
                one->length = one->at;
                one->at = 0;
            } else if (one->is_sending && one->at == one->length) {
                one->is_sending = one->at = 0;
                one->length = message ? message : SIZE;
            }
            submit(one);
        }
    }
    return turns;
}

int main(int count, char **arguments) {
    must(count >= 3, "arguments");
    struct sockaddr_in address = {AF_INET, htons(atoi(arguments[2])), {htonl(INADDR_LOOPBACK)}, {0}};
    must(io_uring_queue_init(2 * CONNECTIONS, &ring, 0) == 0, "io_uring_queue_init");
    if (strcmp(arguments[1], "serve") == 0) {
        int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        must(bind(listener, (void *)&address, sizeof address) == 0 && listen(listener, CONNECTIONS) == 0, "listen");
        accept_next(listener);
        turn(listener, 0, 1e300);
    }
    must(count >= 6, "arguments");
    int message = atoi(arguments[4]);
    for (int i = 0; i < atoi(arguments[3]); i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        must(connect(fd, (void *)&address, sizeof address) == 0, "connect");
        struct connection *one = add(fd, message);
        one->is_sending = 1;
        submit(one);
    }
    turn(-1, message, now() + 0.3);
    double begin = now();
    long turns = turn(-1, message, begin + atof(arguments[5]));
    printf("%f\n", turns / (now() - begin));
    return 0;
}
