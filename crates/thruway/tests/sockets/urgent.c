/* Urgent data on a connection in use. Prints results that the test compares with those of plain TCP.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include "common.h"
#include "pair.h"

static void echo(int accepted) {
    char byte;
    while (recv(accepted, &byte, 1, 0) == 1 && byte != 'a')
        must(send(accepted, &byte, 1, 0) == 1, "send");
    must(byte == 'a', "the first byte behind the exchanges");
}

/* Receives to the end, and counts. Says when it has received so many bytes. */
static void count(int accepted, const char *how, long said_after) {
    long before = 1, behind = 0, others = 0;
    char bytes[4096];
    int ep = epoll_create1(EPOLL_CLOEXEC), n;
    struct epoll_event event = {.events = EPOLLIN};
    must(epoll_ctl(ep, EPOLL_CTL_ADD, accepted, &event) == 0, "epoll");
    int waits = how[0] == 'w';
    for (;;) {
        if (!waits)
            epoll_wait(ep, &event, 1, -1);
        n = recv(accepted, bytes, sizeof bytes, waits ? 0 : MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN)
            continue;
        if (n <= 0)
            break;
        for (int i = 0; i < n; i++) {
            before += bytes[i] == 'a';
            behind += bytes[i] == 'b';
            others += bytes[i] != 'a' && bytes[i] != 'b';
        }
        if (before + behind >= said_after) {
            must(send(accepted, "d", 1, 0) == 1, "send");
            said_after = 1 << 30;
        }
    }
    printf("%s: %ld before, %ld behind, %ld others, end %d\n", how, before, behind, others, n);
}

static void waiting(int accepted) {
    echo(accepted);
    count(accepted, "waiting", 1 << 30);
}

static void polling(int accepted) {
    echo(accepted);
    count(accepted, "polling", 1 << 30);
}

/* Bytes before the urgent one, and behind it. */
enum { BEFORE = 5000, BEHIND = 3000 };

static int all_sent[2];

/* Hands the connection over to another process before anything is read but the first byte. */
static void handing(int accepted) {
    char byte, control[CMSG_SPACE(sizeof accepted)] = {0};
    int pair[2], status;
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    echo(accepted);
    must(read(all_sent[0], &byte, 1) == 1, "read");
    struct iovec bytes = {.iov_base = &byte, .iov_len = 1};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    fflush(stdout);
    pid_t other = fork();
    if (other == 0) {
        close(accepted);
        must(recvmsg(pair[1], &message, 0) == 1, "recvmsg");
        memcpy(&accepted, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof accepted);
        count(accepted, "handed over", BEFORE + BEHIND);
        exit(0);
    }
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof accepted), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &accepted, sizeof accepted);
    must(sendmsg(pair[0], &message, 0) == 1, "sendmsg");
    close(accepted);
    waitpid(other, &status, 0);
    must(status == 0, "the other process");
}

static int marked_flags, marked_length;

/* Discards the bytes before the mark, as servers of telnet do, and then reads those behind it. */
static void marking(int accepted) {
    char byte, bytes[BEFORE + BEHIND] = {0};
    echo(accepted);
    must(read(all_sent[0], &byte, 1) == 1, "read");
    long before = 1, n;
    int counted;
    while ((n = sockatmark(accepted)) == 0) {
        must(ioctl(accepted, FIONREAD, &counted) == 0 && before + counted == BEFORE, "FIONREAD before the mark");
        n = recv(accepted, bytes, marked_length, marked_flags);
        must(n > 0 && memchr(bytes, 'b', n) == NULL, "recv");
        before += n;
    }
    must(n == 1, "sockatmark");
    must(ioctl(accepted, FIONREAD, &counted) == 0 && counted == 0, "FIONREAD at the mark");
    n = recv(accepted, bytes, sizeof bytes, 0);
    printf("%d bytes, flags %d: %ld before the mark, %ld behind it\n", marked_length, marked_flags, before, n);
    must(n > 0 && memchr(bytes, 'a', n) == NULL, "recv");
    must(send(accepted, "d", 1, 0) == 1, "send");
}

/* Sends bytes before an urgent one and behind it, when the child of `serve` is used to small messages. */
static void send_around_mark(void (*serve)(int)) {
    pid_t child = connect_to_child(serve);
    for (int turn = 0; turn < 100; turn++) {
        must(send(one, "p", 1, 0) == 1, "send");
        exactly(one, 1);
    }
    char bytes[BEFORE];
    memset(bytes, 'a', BEFORE);
    must(send(one, bytes, BEFORE, 0) == BEFORE && send(one, "!", 1, MSG_OOB) == 1, "send");
    memset(bytes, 'b', BEHIND);
    must(send(one, bytes, BEHIND, 0) == BEHIND && write(all_sent[1], "s", 1) == 1, "send");
    exactly(one, 1);
    shutdown(one, SHUT_WR);
    end_child(child);
}

int main(void) {
    alarm(60);
    must(pipe2(all_sent, O_CLOEXEC) == 0, "pipe");
    void (*ends[])(int) = {waiting, polling};
    for (int i = 0; i < 2; i++) {
        pid_t child = connect_to_child(ends[i]);
        for (int turn = 0; turn < 100; turn++) {
            must(send(one, "p", 1, 0) == 1, "send");
            exactly(one, 1);
        }
        static char before[5000], behind[300000];
        memset(before, 'a', sizeof before);
        memset(behind, 'b', sizeof behind);
        must(send(one, before, sizeof before, 0) == sizeof before, "send");
        must(send(one, "!", 1, MSG_OOB) == 1, "urgent");
        must(send(one, behind, sizeof behind, 0) == sizeof behind, "send");
        shutdown(one, SHUT_WR);
        end_child(child);
    }
    send_around_mark(handing);
    const int flags[] = {0, MSG_WAITALL, MSG_TRUNC};
    for (int k = 0; k < 3; k++) {
        const int lengths[] = {BEFORE + BEHIND, BEFORE - 1, 700};
        for (int i = 0; i < 3; i++) {
            marked_flags = flags[k], marked_length = lengths[i];
            send_around_mark(marking);
        }
    }
    return 0;
}
