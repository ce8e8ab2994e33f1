/* Connections within this process, and to a child. */
#include <arpa/inet.h>
#include <sys/wait.h>
#include <unistd.h>

static int one, other;

static int listen_anywhere(struct sockaddr_in *address) {
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof *address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(bind(listener, (void *)address, length) == 0 && listen(listener, 8) == 0, "listen");
    getsockname(listener, (void *)address, &length);
    return listener;
}

/* With so many calls of each end that both are accelerated, mostly. `flags`: those of the sockets, as SOCK_CLOEXEC; `send_buffer`: of `one`,
 * or 0 for what the system has. */
__attribute__((unused)) static void connect_pair(int flags, int turns, int send_buffer) {
    struct sockaddr_in address;
    int listener = listen_anywhere(&address);
    one = socket(AF_INET, SOCK_STREAM | flags, 0);
    if (send_buffer)
        setsockopt(one, SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof send_buffer);
    must(connect(one, (void *)&address, sizeof address) == 0, "connect");
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

/* Connects `one` to a child, which ends when `serve` returns. */
__attribute__((unused)) static pid_t connect_to_child(void (*serve)(int)) {
    struct sockaddr_in address;
    int listener = listen_anywhere(&address);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int accepted = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        close(listener);
        serve(accepted);
        exit(0);
    }
    close(listener);
    one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(connect(one, (void *)&address, sizeof address) == 0, "connect");
    return child;
}

/* Closes `one`, which ends the child. */
__attribute__((unused)) static void end_child(pid_t child) {
    int status;
    close(one);
    waitpid(child, &status, 0);
    must(status == 0, "the child");
}

/* Sends a descriptor, or receives it if that is -1. */
__attribute__((unused)) static int pass(int through, int fd) {
    char byte = 'x', space[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec text = {&byte, 1};
    struct msghdr header = {.msg_iov = &text, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    if (fd < 0) {
        must(recvmsg(through, &header, 0) == 1, "recvmsg");
        memcpy(&fd, CMSG_DATA(rights), sizeof fd);
        return fd;
    }
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    must(sendmsg(through, &header, 0) == 1, "sendmsg");
    return fd;
}
