/* A connection with both its ends in this process. */
#include <arpa/inet.h>
#include <unistd.h>

static int one, other;

/* With so many calls of each end that both are accelerated, mostly. `flags`: those of the sockets, as SOCK_CLOEXEC; `send_buffer`: of `one`,
 * or 0 for what the system has. */
static void connect_pair(int flags, int turns, int send_buffer) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(bind(listener, (void *)&address, length) == 0 && listen(listener, 8) == 0, "listen");
    getsockname(listener, (void *)&address, &length);
    one = socket(AF_INET, SOCK_STREAM | flags, 0);
    if (send_buffer)
        setsockopt(one, SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof send_buffer);
    must(connect(one, (void *)&address, length) == 0, "connect");
    other = accept4(listener, NULL, NULL, flags);
    must(other >= 0, "accept");
    close(listener);
    for (int i = 0; i < turns; i++) {
        must(send(one, "hello", 5, 0) == 5, "send");
        exactly(other, 5);
        must(send(other, "reply", 5, 0) == 5, "send");
        exactly(one, 5);
    }
}
