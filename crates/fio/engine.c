/*
 * fio's external engine `thruway`: reads and writes are RDMA Reads and Writes on memory that `thruway bench region` lends.
 * Built against the headers of the fio that loads it by `cargo xtask fio`; what it does is in src/.
 */
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "fio.h"
#include "optgroup.h"

struct handle;
struct handle *thruway_open(const char *host, unsigned int port, int over_verbs, unsigned int depth, char *why, size_t room);
uint64_t thruway_size(struct handle *handle);
int thruway_register(struct handle *handle, void *memory, size_t len, char *why, size_t room);
int thruway_start(struct handle *handle, uint64_t id, int kind, void *local, unsigned int len, uint64_t offset, char *why,
		  size_t room);
int thruway_wait(struct handle *handle, unsigned int min, unsigned int max, uint64_t limit_ns, char *why, size_t room);
uint64_t thruway_finished(struct handle *handle, unsigned int index, int *failed);
void thruway_close(struct handle *handle);

enum { READ_IT, WRITE_IT, FLUSH_IT };

struct settings {
	struct thread_data *td;
	char *hostname;
	unsigned int port;
	unsigned int provider;
};

static struct fio_option options[] = {
	{
		.name = "hostname",
		.lname = "Host that lends memory",
		.type = FIO_OPT_STR_STORE,
		.off1 = offsetof(struct settings, hostname),
		.help = "Where `thruway bench region` listens",
		.def = "127.0.0.1",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_NETIO,
	},
	{
		.name = "port",
		.lname = "Port",
		.type = FIO_OPT_INT,
		.off1 = offsetof(struct settings, port),
		.minval = 1,
		.maxval = 65535,
		.help = "The port it listens at",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_NETIO,
	},
	{
		.name = "provider",
		.lname = "Fabric provider",
		.type = FIO_OPT_STR,
		.off1 = offsetof(struct settings, provider),
		.help = "What carries the requests",
		.def = "iwarp",
		.posval = {
			{ .ival = "iwarp", .oval = 0, .help = "iWARP in user space" },
			{ .ival = "verbs", .oval = 1, .help = "An RDMA device" },
		},
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_NETIO,
	},
	{ .name = NULL },
};

extern struct ioengine_ops ioengine;

static struct handle *connect_for(struct thread_data *td, unsigned int depth)
{
	struct settings *settings = td->eo;
	char why[256] = "";
	struct handle *handle;

	if (!settings->port) {
		log_err("thruway: port= says where `thruway bench region` listens\n");
		return NULL;
	}
	handle = thruway_open(settings->hostname, settings->port, settings->provider, depth, why, sizeof(why));
	if (!handle)
		log_err("thruway: %s\n", why);
	return handle;
}

/*
 * How much memory there is, asked by a process of its own: what a process opens of an RDMA device, the jobs that are forked
 * from it cannot use, and librdmacm opens each device once.
 */
static uint64_t ask_size(struct thread_data *td)
{
	uint64_t size = 0;
	int ends[2];
	pid_t child;

	if (pipe(ends)) {
		log_err("thruway: pipe: %s\n", strerror(errno));
		return 0;
	}
	child = fork();
	if (!child) {
		struct handle *handle = connect_for(td, 1);

		size = handle ? thruway_size(handle) : 0;
		thruway_close(handle);
		_exit(write(ends[1], &size, sizeof(size)) != sizeof(size));
	}
	close(ends[1]);
	if (child < 0)
		log_err("thruway: fork: %s\n", strerror(errno));
	else {
		if (read(ends[0], &size, sizeof(size)) != sizeof(size))
			size = 0;
		waitpid(child, NULL, 0);
	}
	close(ends[0]);
	return size;
}

/* Before jobs are forked. */
static int setup(struct thread_data *td)
{
	uint64_t size;

	/* Wrong if fio was built otherwise than the headers say. */
	if (td->io_ops != &ioengine) {
		log_err("thruway: this engine was built for another fio than this one\n");
		return 1;
	}
	size = ask_size(td);
	if (!size)
		return 1;
	if (!td->files_index) {
		add_file(td, "thruway", 0, 0);
		td->o.nr_files = td->o.nr_files ? : 1;
		td->o.open_files++;
	}
	td->files[0]->real_file_size = size;
	return 0;
}

static int init(struct thread_data *td)
{
	td->io_ops_data = connect_for(td, td->o.iodepth);
	return td->io_ops_data ? 0 : 1;
}

/* When the buffers are there. */
static int post_init(struct thread_data *td)
{
	char why[256] = "";

	if (thruway_register(td->io_ops_data, td->orig_buffer, td->orig_buffer_size, why, sizeof(why))) {
		log_err("thruway: %s\n", why);
		return 1;
	}
	return 0;
}

static void cleanup(struct thread_data *td)
{
	thruway_close(td->io_ops_data);
	td->io_ops_data = NULL;
}

static enum fio_q_status queue(struct thread_data *td, struct io_u *io_u)
{
	char why[256] = "";
	int kind;

	fio_ro_check(td, io_u);
	if (io_u->ddir == DDIR_READ)
		kind = READ_IT;
	else if (io_u->ddir == DDIR_WRITE)
		kind = WRITE_IT;
	else if (ddir_sync(io_u->ddir))
		kind = FLUSH_IT;
	else {
		io_u->error = EINVAL;
		return FIO_Q_COMPLETED;
	}
	switch (thruway_start(td->io_ops_data, (uintptr_t) io_u, kind, io_u->xfer_buf, io_u->xfer_buflen, io_u->offset, why,
			      sizeof(why))) {
	case 0:
		return FIO_Q_QUEUED;
	case 1:
		return FIO_Q_BUSY;
	}
	log_err("thruway: %s\n", why);
	io_u->error = EIO;
	return FIO_Q_COMPLETED;
}

static int getevents(struct thread_data *td, unsigned int min, unsigned int max, const struct timespec *t)
{
	uint64_t limit = t ? t->tv_sec * 1000000000ULL + t->tv_nsec : 0;
	char why[256] = "";
	int n = thruway_wait(td->io_ops_data, min, max, limit, why, sizeof(why));

	if (n < 0)
		log_err("thruway: %s\n", why);
	return n;
}

static struct io_u *event(struct thread_data *td, int index)
{
	int failed;
	struct io_u *io_u = (struct io_u *) (uintptr_t) thruway_finished(td->io_ops_data, index, &failed);

	if (failed)
		io_u->error = EIO;
	return io_u;
}

static int open_file(struct thread_data *td, struct fio_file *f)
{
	return 0;
}

static int close_file(struct thread_data *td, struct fio_file *f)
{
	return 0;
}

static int invalidate(struct thread_data *td, struct fio_file *f)
{
	return 0;
}

struct ioengine_ops ioengine = {
	.name = "thruway",
	.version = FIO_IOOPS_VERSION,
	.flags = FIO_DISKLESSIO | FIO_NOEXTEND,
	.options = options,
	.option_struct_size = sizeof(struct settings),
	.setup = setup,
	.init = init,
	.post_init = post_init,
	.cleanup = cleanup,
	.queue = queue,
	.getevents = getevents,
	.event = event,
	.open_file = open_file,
	.close_file = close_file,
	.invalidate = invalidate,
};
