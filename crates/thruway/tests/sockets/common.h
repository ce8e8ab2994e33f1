/* What the programs in C have in common: `_GNU_SOURCE` comes before it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* Ends the program, and says what has failed, unless that holds. */
static void must(int holds, const char *what) {
    if (!holds) {
        printf("%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

/* Receives so many bytes. */
__attribute__((unused)) static void exactly(int fd, int length) {
    char buffer[1 << 16];
    while (length > 0) {
        int n = recv(fd, buffer, length < (int)sizeof buffer ? length : (int)sizeof buffer, 0);
        must(n > 0, "recv");
        length -= n;
    }
}
