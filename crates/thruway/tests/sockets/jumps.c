/* Signal handlers that use the connection of the call which they interrupt, on any stack, or jump out of it; threads that are cancelled in a
 * call. Prints results that the test compares with those of plain TCP.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

#include "common.h"
#include "pair.h"

/* Messages to and fro, with which the connection comes to be accelerated. */
static void warm_up(void) {
    char bytes[64] = {'w'};
    for (int i = 0; i < 50; i++) {
        must(send(one, bytes, 64, 0) == 64, "send");
        exactly(one, 64);
    }
}

static void answer_warm_up(int other) {
    char bytes[64] = {0};
    for (int i = 0; i < 50; i++) {
        exactly(other, 64);
        must(send(other, bytes, 64, 0) == 64, "send");
    }
}

/* --- Handlers that send --- */

static atomic_int stop;
static atomic_long sent[3];

static void count_bytes(int other) {
    static char bytes[1 << 16];
    long counts[256] = {0}, n;
    answer_warm_up(other);
    while ((n = recv(other, bytes, sizeof bytes, 0)) > 0)
        for (long i = 0; i < n; i++)
            counts[(unsigned char)bytes[i]]++;
    long told[4] = {counts['M'], counts['1'], counts['2'], 0};
    for (int i = 0; i < 256; i++)
        told[3] += i == 'M' || i == '1' || i == '2' ? 0 : counts[i];
    must(send(other, told, sizeof told, 0) == sizeof told, "send");
}

static void send_some(int kind, char what) {
    char bytes[64];
    memset(bytes, what, sizeof bytes);
    int error = errno, n = send(one, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0)
        sent[kind] += n;
    errno = error;
}

static void on_first(int unused) {
    send_some(1, '1');
    (void)unused;
}

static void on_second(int unused) {
    send_some(2, '2');
    (void)unused;
}

static void *send_always(void *stack) {
    stack_t alternate = {.ss_sp = stack, .ss_size = 1 << 16};
    must(sigaltstack(&alternate, NULL) == 0, "sigaltstack");
    static char bytes[4096];
    memset(bytes, 'M', sizeof bytes);
    while (!stop) {
        int n = send(one, bytes, sizeof bytes, MSG_NOSIGNAL);
        must(n > 0 || errno == EINTR, "send");
        if (n > 0)
            sent[0] += n;
    }
    return NULL;
}

/* Handlers on a stack above the thread's or below it, and one inside the other. */
static void send_in_handlers(int is_above) {
    enum { PART = 1 << 18 };
    char *memory = mmap(NULL, 3 * PART, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(memory != MAP_FAILED, "mmap");
    struct sigaction first = {.sa_handler = on_first, .sa_flags = SA_ONSTACK | SA_RESTART};
    struct sigaction second = {.sa_handler = on_second, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &first, NULL);
    sigaction(SIGUSR2, &second, NULL);
    pid_t child = connect_to_child(count_bytes);
    warm_up();
    stop = sent[0] = sent[1] = sent[2] = 0;
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    must(pthread_attr_setstack(&attributes, memory + PART, PART) == 0, "stack");
    must(pthread_create(&thread, &attributes, send_always, memory + (is_above ? 2 * PART : 0)) == 0, "thread");
    for (int i = 0; i < 100000; i++) {
        pthread_kill(thread, i % 3 ? SIGUSR1 : SIGUSR2);
        for (volatile int spin = 0; spin < i % 500; spin++)
            continue;
    }
    stop = 1;
    pthread_join(thread, NULL);
    shutdown(one, SHUT_WR);
    long told[4];
    must(recv(one, told, sizeof told, MSG_WAITALL) == sizeof told, "told");
    printf("handlers %s: %s\n", is_above ? "above" : "below",
           told[0] == sent[0] && told[1] == sent[1] && told[2] == sent[2] && told[3] == 0 ? "all bytes once" : "WRONG");
    if (told[0] != sent[0] || told[1] != sent[1] || told[2] != sent[2])
        printf("sent %ld %ld %ld, arrived %ld %ld %ld and %ld others\n", sent[0], sent[1], sent[2], told[0], told[1], told[2], told[3]);
    end_child(child);
    munmap(memory, 3 * PART);
}

/* --- Jumps and cancellation --- */

enum { RECORD = 256, RECORDS = 20000 };

/* Acknowledges whole records, of which any may come again. */
static void acknowledge(int other) {
    uint64_t record[RECORD / 8], last = 0;
    answer_warm_up(other);
    while (recv(other, record, RECORD, MSG_WAITALL) == RECORD) {
        for (int i = 1; i < RECORD / 8; i++)
            must(record[i] == record[0] * (i + 1), "a whole record");
        must(record[0] == last || record[0] == last + 1, "the next record");
        last = record[0];
        must(send(other, &last, 8, MSG_NOSIGNAL) == 8, "acknowledgement");
    }
}

/* Sends a record again and again until it is acknowledged. */
static void exchange(uint64_t number) {
    uint64_t record[RECORD / 8], got = 0;
    for (int i = 0; i < RECORD / 8; i++)
        record[i] = number * (i + 1);
    must(send(one, record, RECORD, MSG_NOSIGNAL) == RECORD, "send");
    while (got != number)
        must(recv(one, &got, 8, MSG_WAITALL) == 8, "acknowledgement");
}

static sigjmp_buf before;
static volatile sig_atomic_t may_jump;
static volatile long jumps;

static void jump(int unused) {
    (void)unused;
    if (may_jump) {
        may_jump = 0;
        jumps++;
        siglongjmp(before, 1);
    }
}

static void jump_out(void) {
    pid_t child = connect_to_child(acknowledge);
    warm_up();
    struct sigaction action = {.sa_handler = jump, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {{0, 97}, {0, 97}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    for (volatile uint64_t number = 1; number <= RECORDS; number++) {
        // The record comes again after a jump.
        sigsetjmp(before, 1);
        may_jump = 1;
        exchange(number);
        may_jump = 0;
    }
    setitimer(ITIMER_REAL, &never, NULL);
    printf("jumps out of calls: all records arrived, many jumps: %d\n", jumps > 100);
    end_child(child);
}

static atomic_ulong number;

static void *exchange_always(void *unused) {
    for (;;) {
        exchange(number + 1);
        number++;
    }
    return unused;
}

static void cancel(void) {
    pid_t child = connect_to_child(acknowledge);
    warm_up();
    for (int i = 0; i < 500; i++) {
        pthread_t thread;
        void *result;
        must(pthread_create(&thread, NULL, exchange_always, NULL) == 0, "thread");
        nanosleep(&(struct timespec){0, i * 997 % 300000}, NULL);
        pthread_cancel(thread);
        pthread_join(thread, &result);
        must(result == PTHREAD_CANCELED, "cancelled");
        // As what the thread had begun may have come.
        exchange(number + 1);
        number++;
    }
    printf("threads cancelled in calls: all records arrived\n");
    end_child(child);
}

/* --- What the program sees of its handlers --- */

static volatile int once_ran;

static void once(int unused) {
    (void)unused;
    once_ran++;
}

static void with_information(int signal, siginfo_t *information, void *context) {
    once_ran += context != NULL && information->si_signo == signal && information->si_value.sival_int == 7;
}

static void see_handlers(void) {
    struct sigaction action = {.sa_handler = once, .sa_flags = SA_RESETHAND}, old;
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR1, NULL, &old);
    int is_same = old.sa_handler == once && (old.sa_flags & (SA_RESETHAND | SA_SIGINFO)) == SA_RESETHAND;
    raise(SIGUSR1);
    sigaction(SIGUSR1, NULL, &old);
    printf("reset: same %d, ran %d, default %d\n", is_same, once_ran, old.sa_handler == SIG_DFL);
    int was_default = signal(SIGUSR1, once) == SIG_DFL;
    printf("signal: default %d, once %d\n", was_default, signal(SIGUSR1, SIG_IGN) == once);
    printf("ignored %d\n", signal(SIGUSR1, SIG_DFL) == SIG_IGN);
    action = (struct sigaction){.sa_sigaction = with_information, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR2, &action, NULL);
    once_ran = 0;
    sigqueue(getpid(), SIGUSR2, (union sigval){.sival_int = 7});
    sigaction(SIGUSR2, NULL, &old);
    printf("information: %d, same %d\n", once_ran, old.sa_sigaction == with_information && old.sa_flags & SA_SIGINFO);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    see_handlers();
    send_in_handlers(1);
    send_in_handlers(0);
    jump_out();
    cancel();
    return 0;
}
