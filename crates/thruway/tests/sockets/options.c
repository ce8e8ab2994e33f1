/* Options and rights that a program sets while its connection is in use, and that only the kernel's TCP can honour. Prints results that the
 * test compares with those of plain TCP.
 */
#define _GNU_SOURCE
#include <linux/seccomp.h>
#include <netinet/tcp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

#include "common.h"
#include "pair.h"

#ifndef TCP_INQ
#define TCP_INQ 36
#endif

static void echo(int accepted) {
    char bytes[4096];
    int n;
    while ((n = recv(accepted, bytes, sizeof bytes, 0)) > 0)
        must(send(accepted, bytes, n, 0) == n, "send");
}

static void exchange(int times) {
    char sent[64], got[64];
    for (int i = 0; i < times; i++) {
        memset(sent, i, sizeof sent);
        must(write(one, sent, 64) == 64, "write");
        for (int at = 0, n; at < 64; at += n) {
            n = read(one, got + at, 64 - at);
            must(n > 0, "read");
        }
        must(memcmp(sent, got, 64) == 0, "bytes");
    }
}

/* Control messages beside what is received after the option is set. */
static void beside(const char *name, int level, int option, int type) {
    pid_t child = connect_to_child(echo);
    exchange(200);
    int on = 1, found = 0, wrong = 0;
    must(setsockopt(one, level, option, &on, sizeof on) == 0, name);
    // The kernel takes times from some moment after the call on: with busy processors more than a second later.
    time_t limit = time(NULL) + 60;
    for (int i = 0; i < 50; i += found > 0 || time(NULL) > limit) {
        char bytes[64] = {i}, control[256];
        must(send(one, bytes, 64, 0) == 64, "send");
        for (int at = 0, n; at < 64; at += n) {
            struct iovec piece = {bytes + at, 64 - at};
            struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
            n = recvmsg(one, &message, 0);
            must(n > 0, "recvmsg");
            int is_there = 0;
            for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each))
                is_there |= each->cmsg_level == level && each->cmsg_type == type;
            found += at == 0 && is_there;
        }
        wrong += bytes[0] != i;
    }
    printf("%s: %d messages of 50, %d wrong\n", name, found, wrong);
    end_child(child);
}

/* A process that may read and write, and nothing else. */
static void sandboxed(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        connect_to_child(echo);
        exchange(200);
        must(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0, "prctl");
        exchange(200);
        syscall(SYS_exit, 0);
    }
    int status;
    waitpid(child, &status, 0);
    printf("sandboxed: %x\n", status);
}

/* Calls that ask for no bytes. */
static void empty(void) {
    char byte;
    struct msghdr message = {0};
    connect_pair(0, 100, 0);
    for (int has_bytes = 0; has_bytes < 2; has_bytes++) {
        must(!has_bytes || send(one, "hello", 5, 0) == 5, "send");
        ssize_t got = recv(other, &byte, 0, MSG_DONTWAIT);
        printf("recv %zd %s\n", got, got < 0 ? strerror(errno) : "");
        got = recvmsg(other, &message, MSG_DONTWAIT);
        printf("recvmsg %zd %s\n", got, got < 0 ? strerror(errno) : "");
        printf("read %zd\n", read(other, &byte, 0));
    }
    printf("recv %zd\n", recv(other, &byte, 0, 0));
    exactly(other, 5);
    must(close(one) == 0, "close");
    printf("recv %zd at the end\n", recv(other, &byte, 0, 0));
    close(other);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    empty();
    beside("SO_TIMESTAMP", SOL_SOCKET, SO_TIMESTAMP, SO_TIMESTAMP);
    beside("TCP_INQ", IPPROTO_TCP, TCP_INQ, TCP_INQ);
    sandboxed();
    return 0;
}
