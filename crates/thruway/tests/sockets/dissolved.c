/* A socket whose connection is dissolved (`connect` with `AF_UNSPEC`), with and without unread bytes, and that is connected to another server.
 * The first server gets a reset, and the second one all bytes.
 */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <unistd.h>

enum { TURNS = 60, LENGTH = 3000 };

static char message[LENGTH];

int main(void) {
    struct sockaddr_in address;
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    char byte;
    alarm(60);
    for (int with_unread = 0; with_unread < 2; with_unread++) {
        connect_pair(SOCK_CLOEXEC, TURNS, 0);
        int first = other, listener = listen_anywhere(&address);
        if (with_unread)
            must(send(first, message, LENGTH, 0) == LENGTH, "send");
        must(connect(one, &none, sizeof none) == 0, "AF_UNSPEC");
        must(recv(first, &byte, 1, 0) == -1 && errno == ECONNRESET, "the first server");
        must(connect(one, (void *)&address, sizeof address) == 0, "connect");
        other = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        must(other >= 0, "accept");
        for (int i = 0; i < TURNS; i++) {
            must(send(one, message, LENGTH, 0) == LENGTH, "send");
            exactly(other, LENGTH);
            must(send(other, "reply", 5, 0) == 5, "send");
            exactly(one, 5);
        }
        int all[] = {one, other, first, listener};
        for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
            close(all[i]);
    }
    return 0;
}
