/* POSIX AIO on accelerated connections, with unread bytes, beside calls that the library sees. */
#define _GNU_SOURCE
#include "common.h"
#include "pair.h"
#include <aio.h>

enum { TURNS = 60, LENGTH = 3000, ROUNDS = 20 };

static char sent[LENGTH], got[LENGTH];

/* Waits for a request. The number of bytes. */
static int result(struct aiocb *request) {
    const struct aiocb *list[] = {request};
    while (aio_error(request) == EINPROGRESS)
        must(aio_suspend(list, 1, NULL) == 0, "aio_suspend");
    return aio_return(request);
}

static void receive(int with_aio, int by_list) {
    int length = 0;
    while (length < LENGTH) {
        struct aiocb request = {.aio_fildes = other, .aio_buf = got + length, .aio_nbytes = LENGTH - length};
        struct aiocb *list[] = {&request};
        int n;
        request.aio_lio_opcode = LIO_READ;
        if (!with_aio)
            n = recv(other, got + length, LENGTH - length, 0);
        else if (by_list)
            n = lio_listio(LIO_WAIT, list, 1, NULL) == 0 ? aio_return(&request) : -1;
        else
            n = aio_read(&request) == 0 ? result(&request) : -1;
        must(n > 0, "receive");
        length += n;
    }
    must(memcmp(sent, got, LENGTH) == 0, "the bytes");
}

int main(void) {
    alarm(60);
    for (int i = 0; i < LENGTH; i++)
        sent[i] = i * 7 % 251;
    for (int round = 0; round < 4; round++) {
        connect_pair(SOCK_CLOEXEC, TURNS, 0);
        for (int i = 0; i < ROUNDS; i++) {
            struct aiocb request = {.aio_fildes = one, .aio_buf = sent, .aio_nbytes = LENGTH};
            if (round < 2 || i % 2)
                must(send(one, sent, LENGTH, 0) == LENGTH, "send");
            else
                must(aio_write(&request) == 0 && result(&request) == LENGTH, "aio_write");
            receive(round < 2 || i % 3 == 0, round % 2);
        }
        close(one);
        close(other);
    }
    return 0;
}
