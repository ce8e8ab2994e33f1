/* A reader that leaves a message in the socket until it is complete, and waits for edges: each piece is one, also behind unread bytes. */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <pthread.h>
#include <sys/epoll.h>

enum { PIECE = 100, PIECES = 8, LEFT = 60000 };

static char bytes[1 << 17];
static int ep;

static void print_event(int timeout) {
    struct epoll_event event = {0};
    int number = epoll_wait(ep, &event, 1, timeout);
    printf("%d(%d) ", number, recv(one, bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT) > 0);
}

static void *send_piece(void *unused) {
    usleep(20000);
    must(send(other, bytes, PIECE, 0) == PIECE, "send");
    return unused;
}

/* Pieces that come before the wait, and pieces that come during it. */
static void print_pieces(void) {
    for (int i = 0; i < PIECES; i++) {
        pthread_t sender;
        if (i % 4 < 3) {
            must(send(other, bytes, PIECE, 0) == PIECE, "send");
            print_event(100);
        } else {
            must(pthread_create(&sender, NULL, send_piece, NULL) == 0, "pthread_create");
            print_event(10000);
            pthread_join(sender, NULL);
        }
    }
    print_event(0);
    printf("| ");
}

/* Leaves so many bytes unread. */
static void skip(long unread, long left) {
    while (unread > left) {
        long most = unread - left < (long)sizeof bytes ? unread - left : (long)sizeof bytes;
        long n = recv(one, bytes, most, 0);
        must(n > 0, "recv");
        unread -= n;
    }
}

int main(void) {
    alarm(60);
    for (int turns = 0; turns <= 20; turns += 10) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLET};
        ep = epoll_create1(EPOLL_CLOEXEC);
        connect_pair(SOCK_CLOEXEC, turns, 0);
        must(epoll_ctl(ep, EPOLL_CTL_ADD, one, &event) == 0, "epoll_ctl");
        print_pieces();
        skip(PIECES * PIECE, 0);
        /* More than the ring has room for: TCP has bytes behind those of the ring. */
        long sent = 0, n;
        while (sent < 400000 && (n = send(other, bytes, 8192, MSG_DONTWAIT)) > 0)
            sent += n;
        must(sent > LEFT, "send");
        print_event(100);
        skip(sent, LEFT);
        while (epoll_wait(ep, &event, 1, 0) > 0)
            ;
        print_pieces();
        printf("\n");
        skip(LEFT + PIECES * PIECE, 0);
        close(one);
        close(other);
        close(ep);
    }
    return 0;
}
