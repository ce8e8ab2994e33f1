/* Extended sockets: registered memory, one-sided operations, bytes and messages beside a TCP connection.
 *
 * See thruway_extended(7). SPDX-License-Identifier: Apache-2.0 */
#ifndef THRUWAY_EXTENDED_H
#define THRUWAY_EXTENDED_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A connection, and memory that is registered with it. */
typedef struct tw_socket tw_socket;
typedef struct tw_region tw_region;

/* What may carry a connection. */
enum tw_provider {
	TW_AUTO = 0,  /* the best that both ends have */
	TW_SHM = 1,   /* shared memory, between processes of one user on one host */
	TW_VERBS = 2, /* an RDMA device */
	TW_IWARP = 3, /* iWARP in user space, over TCP */
};

/* How bytes are moved. */
enum tw_scheme {
	TW_ADAPTIVE = 0,   /* by size */
	TW_CREDIT = 1,     /* each message to a buffer of fixed size at the peer */
	TW_PACKETIZED = 2, /* the sender manages a ring at the peer */
	TW_RENDEZVOUS = 3, /* as packetized, but large buffers are not copied */
};

/* Flags of struct tw_options. */
#define TW_MESSAGES 1u  /* messages keep their boundaries: no stream of bytes */
#define TW_PLAINTEXT 2u /* the peer may be on another host, although nothing is encrypted */

/* How to make a connection; zero everywhere but in size is what most programs want. */
struct tw_options {
	size_t size;             /* sizeof(struct tw_options) */
	int provider;            /* enum tw_provider */
	int scheme;              /* enum tw_scheme */
	unsigned int flags;      /* TW_MESSAGES, TW_PLAINTEXT */
	int timeout_ms;          /* how long the peer may take; 0: 10 seconds */
	uint32_t receive_buffer; /* bytes, 4 KiB to 1 GiB; 0: 1 MiB */
	uint32_t send_buffer;    /* bytes, 4 KiB to 1 GiB; 0: 1 MiB */
};

/* What a connection is. */
struct tw_info {
	size_t size;       /* sizeof(struct tw_info), set by the caller */
	char provider[16]; /* "shm", "verbs" or "iwarp" */
	uint64_t bytes_copied;    /* sent by copying them first */
	uint64_t bytes_zero_copy; /* sent from where they were */
};

/* Meet the peer of a connected TCP socket, which calls the other of the two. NULL: errno and tw_error() say why,
 * and the TCP connection is of no use any more. options may be NULL. */
tw_socket *tw_accept(int fd, const struct tw_options *options);
tw_socket *tw_connect(int fd, const struct tw_options *options);

/* The text of the last error of this thread. Valid until its next call. */
const char *tw_error(void);

int tw_get_info(tw_socket *socket, struct tw_info *info);

/* Bytes, by tw_recv, or messages, by tw_recv_message. flags: 0 or MSG_DONTWAIT. tw_send returns len, or less with MSG_DONTWAIT;
 * tw_recv 0 at the end, and tw_recv_message -1 with ENODATA. A message that is longer than len is cut, and *truncated set, which may be NULL. */
ssize_t tw_send(tw_socket *socket, const void *bytes, size_t len, int flags);
ssize_t tw_recv(tw_socket *socket, void *bytes, size_t len, int flags);
ssize_t tw_recv_message(tw_socket *socket, void *bytes, size_t len, int flags, int *truncated);

/* Sends nothing more. */
int tw_shutdown(tw_socket *socket);
/* Ends it at once: calls of other threads that wait return ECONNRESET, and the peer's do. It has still to be closed. */
int tw_abort(tw_socket *socket);
/* The same, waits until the peer has everything (timeout_ms; -1: as long as it takes), and frees the socket in any case.
 * -1: bytes may have been lost. The TCP connection stays. No other thread may use the socket, and its regions must be gone. */
int tw_close(tw_socket *socket, int timeout_ms);

/* What a peer may do with a region. */
#define TW_READ 1u
#define TW_WRITE 2u
#define TW_ATOMIC 4u

/* Registers memory, which has to be mapped until it is unregistered. Its owner's operations may always read and write it.
 * tw_unregister waits for operations that are on their way. */
tw_region *tw_register(tw_socket *socket, void *memory, size_t len, unsigned int peer_access);
void tw_unregister(tw_region *region);

/* Memory of the peer, and how its description is sent to it. */
struct tw_remote {
	uint64_t addr;
	uint64_t len;
	uint32_t key;
};
#define TW_REMOTE_LEN 20
void tw_describe(const tw_region *region, unsigned char description[TW_REMOTE_LEN]);
void tw_remote_from(const unsigned char description[TW_REMOTE_LEN], struct tw_remote *remote);

/* Begin an operation, which completes with this context. Offsets are in bytes; words of atomic operations are 64 bits in the
 * peer's byte order, at multiples of 8. */
int tw_put(tw_socket *socket, const tw_region *from, uint64_t offset, const struct tw_remote *to, uint64_t remote_offset,
	   uint64_t len, uint64_t context);
int tw_get(tw_socket *socket, const tw_region *to, uint64_t offset, const struct tw_remote *from, uint64_t remote_offset,
	   uint64_t len, uint64_t context);
int tw_fetch_add(tw_socket *socket, const struct tw_remote *to, uint64_t offset, uint64_t add, uint64_t context);
int tw_compare_swap(tw_socket *socket, const struct tw_remote *to, uint64_t offset, uint64_t compare, uint64_t swap,
		    uint64_t context);
/* Completes when all that was put before is in the peer's memory. */
int tw_flush(tw_socket *socket, const struct tw_remote *to, uint64_t context);

struct tw_completion {
	uint64_t context;
	uint64_t value; /* what the word was, of atomic operations */
	int error;      /* 0, or an error number */
};
/* Takes completions: those that are there, or waits for at least one (timeout_ms; -1: as long as it takes).
 * Returns how many, 0 if none came in time. */
int tw_poll(tw_socket *socket, struct tw_completion *completions, int max);
int tw_wait(tw_socket *socket, struct tw_completion *completions, int max, int timeout_ms);

/* The same operations, waiting for their end. old may be NULL. tw_put_wait returns 0 when the peer has the bytes, and -1 if it refuses them,
 * which ends the connection. */
int tw_put_wait(tw_socket *socket, const tw_region *from, uint64_t offset, const struct tw_remote *to,
		uint64_t remote_offset, uint64_t len);
int tw_get_wait(tw_socket *socket, const tw_region *to, uint64_t offset, const struct tw_remote *from,
		uint64_t remote_offset, uint64_t len);
int tw_fetch_add_wait(tw_socket *socket, const struct tw_remote *to, uint64_t offset, uint64_t add, uint64_t *old);
int tw_compare_swap_wait(tw_socket *socket, const struct tw_remote *to, uint64_t offset, uint64_t compare,
			 uint64_t swap, uint64_t *old);
int tw_flush_wait(tw_socket *socket, const struct tw_remote *to);

/* A descriptor for poll(2) and its like, the socket's own: readable when a call that would have waited is worth another try.
 * tw_silence makes it unreadable until something new happens; call it before the look that finds nothing. */
int tw_descriptor(tw_socket *socket);
int tw_silence(tw_socket *socket);

#ifdef __cplusplus
}
#endif
#endif
