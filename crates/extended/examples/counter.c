/* A counter that clients increase in the server's memory, which spends no time on it.
 *
 *   cc counter.c $(pkg-config --cflags --libs thruway-extended) -o counter
 *   ./counter serve 127.0.0.1 5000 2        until two clients have come and gone
 *   ./counter count 127.0.0.1 5000 1000     increases it a thousand times
 */
#include <arpa/inet.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thruway/extended.h>

static void fail(const char *what)
{
	fprintf(stderr, "counter: %s: %s\n", what, tw_error());
	exit(1);
}

static void serve_one(int listener, uint64_t *counter)
{
	int tcp = accept(listener, NULL, NULL);
	unsigned char description[TW_REMOTE_LEN];
	char nothing;
	tw_region *region;
	tw_socket *socket;

	if (tcp < 0) {
		perror("counter: accept");
		exit(1);
	}
	socket = tw_accept(tcp, NULL);
	if (!socket)
		fail("meeting a client");
	region = tw_register(socket, counter, sizeof(*counter), TW_READ | TW_ATOMIC);
	if (!region)
		fail("lending the counter");
	tw_describe(region, description);
	if (tw_send(socket, description, sizeof(description), 0) < 0)
		fail("describing the counter");
	/* The client does the rest. Its stream ends when it has. */
	while (tw_recv(socket, &nothing, 1, 0) > 0)
		;
	tw_unregister(region);
	tw_close(socket, 1000);
	close(tcp);
}

static void count(int tcp, long times)
{
	unsigned char description[TW_REMOTE_LEN];
	struct tw_info info = { .size = sizeof(info) };
	size_t got = 0;
	struct tw_remote counter;
	tw_socket *socket = tw_connect(tcp, NULL);
	uint64_t old = 0;

	if (!socket)
		fail("meeting the server");
	while (got < sizeof(description)) {
		ssize_t len = tw_recv(socket, description + got, sizeof(description) - got, 0);

		if (len <= 0)
			fail("learning of the counter");
		got += len;
	}
	tw_remote_from(description, &counter);
	for (long n = 0; n < times; n++)
		if (tw_fetch_add_wait(socket, &counter, 0, 1, &old))
			fail("counting");
	tw_get_info(socket, &info);
	printf("%" PRIu64 " by %s\n", old + 1, info.provider);
	if (tw_close(socket, 1000))
		fail("closing");
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET };
	socklen_t len = sizeof(at);
	int tcp = socket(AF_INET, SOCK_STREAM, 0);

	if (argc != 5 || inet_pton(AF_INET, argv[2], &at.sin_addr) != 1) {
		fprintf(stderr, "usage: counter serve|count ADDRESS PORT TIMES\n");
		return 2;
	}
	at.sin_port = htons(atoi(argv[3]));
	if (!strcmp(argv[1], "serve")) {
		static uint64_t counter;

		if (bind(tcp, (struct sockaddr *)&at, len) || listen(tcp, 16) ||
		    getsockname(tcp, (struct sockaddr *)&at, &len)) {
			perror("counter: listen");
			return 1;
		}
		printf("listening on port %d\n", ntohs(at.sin_port));
		fflush(stdout);
		for (int n = atoi(argv[4]); n > 0; n--)
			serve_one(tcp, &counter);
		printf("counted to %" PRIu64 "\n", counter);
		return 0;
	}
	if (connect(tcp, (struct sockaddr *)&at, len)) {
		perror("counter: connect");
		return 1;
	}
	count(tcp, atol(argv[4]));
	return 0;
}
