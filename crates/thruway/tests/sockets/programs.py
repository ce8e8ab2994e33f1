"""Real programs, unmodified: what they do by `thruway run` is what they do over TCP, and their connections are accelerated.

    programs.py THRUWAY [NAME...]

Each is run as it is, by `thruway run`, and through a relay (`--remote`, in user space on this host). What its client gets is compared.
"""
import base64
import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

THRUWAY = os.path.abspath(sys.argv[1])
SOURCES = pathlib.Path(__file__).resolve().parent
HERE = pathlib.Path(tempfile.mkdtemp(prefix="thruway-programs-"))
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def relay_port():
    """A free port with a free one behind it, outside the range from which the kernel takes ports: the relay starts later, and again."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)), socket.create_server(("", port + 1)):
            return port


def relay(user="root"):
    """What `thruway run` is given to have a relay of this user's carry connections within this host."""
    key, policy = HERE / f"key-{user}", HERE / "policy.toml"
    subprocess.run([THRUWAY, "keygen", "--quiet", "--output", key], check=True)
    shutil.chown(key, user)
    policy.write_text('[[rule]]\nports = "1-65535"\nmode = "relay"\n')
    options = ["--relay-port", str(relay_port()), "--provider", "iwarp", "--key", key, "--peers", f"{key}.pub"]
    return [THRUWAY, "run", "--remote", *map(str, options), "--policy", str(policy)]


class Way:
    def __init__(self, name, run):
        self.name, self.run, self.counted = name, run, {}

    def server(self, args, **more):
        return [*self.run, "--", *args] if self.run else args

    def client(self, args, user=None, **more):
        """Runs it to its end, and returns its output; counts what its connections have become."""
        command = [*self.run, "--stats", "--json", "--", *args] if self.run else args
        done = subprocess.run([*(user or []), *command], capture_output=True, **{"timeout": 180, **more})
        out = done.stdout
        if self.run:
            out, _, last = out.rstrip().rpartition(b"{")
            for name, count in json.loads(b"{" + last).items():
                self.counted[name] = self.counted.get(name, 0) + count
        if done.returncode != 0:
            raise RuntimeError(f"{args} by {self.name}: status {done.returncode}: {(out + done.stderr)[-1500:].decode()}")
        return out.decode(errors="replace")

    def accelerated(self):
        return self.counted.get("accelerated", 0) + self.counted.get("relayed", 0)


@contextlib.contextmanager
def running(args, port, **more):
    """A server, until the end of the block."""
    log = open(HERE / "server.log", "ab")
    process = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **more)
    try:
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{args} does not listen: {(HERE / 'server.log').read_text()[-1500:]}") from None
                time.sleep(0.05)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def digest(data):
    return hashlib.sha256(data if isinstance(data, bytes) else data.encode()).hexdigest()[:16]


@program
def postgresql(way):
    """pgbench, sums, and a table as text."""
    tools = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"))[-1]
    home, port = HERE / f"postgresql-{way.name}", free_port()
    home.mkdir()
    shutil.chown(home, "nobody", "nogroup")
    os.chmod(HERE, 0o755)
    if way.name == "relay":
        way.run = [*relay("nobody"), "--after-calls", "4"]
    user = ["setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups", "env", f"HOME={home}"]
    subprocess.run([*user, tools / "initdb", "-D", home / "d", "-A", "trust"], check=True, capture_output=True)
    options = ["-c", "listen_addresses=127.0.0.1", "-p", str(port), "-c", f"unix_socket_directories={home}", "-c", "fsync=off"]
    to = ["-h", "127.0.0.1", "-p", str(port), "-U", "nobody"]
    with running([*user, *way.server([str(tools / "postgres"), "-D", str(home / "d"), *options])], port):
        pgbench, psql = str(tools / "pgbench"), [str(tools / "psql"), *to, "postgres", "-Atc"]
        for _ in range(100):
            if subprocess.run([tools / "pg_isready", "-q", *to[:4]]).returncode == 0:
                break
            time.sleep(0.1)
        subprocess.run([*user, pgbench, *to, "-i", "-q", "postgres"], check=True, capture_output=True)
        out = way.client([pgbench, *to, "-c", "4", "-j", "2", "-t", "250", "--random-seed", "7", "postgres"], user)
        done = re.findall(r"actually processed: (\S+)|failed transactions: (\d+)", out)
        sums = "select count(*), (select sum(abalance) from pgbench_accounts) = sum(delta) from pgbench_history"
        sums = way.client([*psql, sums], user)
        many = ";".join(["select aid, bid, abalance, filler from pgbench_accounts where aid % 7 = 0 order by aid"] * 20)
        return done, sums.strip(), digest(way.client([*psql, f"update pgbench_accounts set abalance = 1; {many}"], user))


@program
def memcached(way):
    """libmemcached's own tests of a server."""
    port = free_port()
    with running(way.server(["memcached", "-u", "root", "-l", "127.0.0.1", "-p", str(port), "-U", "0"]), port):
        out = way.client(["memccapable", "-h", "127.0.0.1", "-p", str(port)])
        values = way.client(["/usr/bin/python3", "-c", MEMCACHED, str(port)])
        return sorted(out.splitlines()), values


MEMCACHED = """
import random, socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
stream, rng = sock.makefile("rb"), random.Random(1)
values = {f"key{n}": rng.randbytes(rng.choice([1, 100, 3000, 500_000])) for n in range(100)}
for key, value in values.items():
    sock.sendall(f"set {key} 0 0 {len(value)}\\r\\n".encode() + value + b"\\r\\n")
    assert stream.readline() == b"STORED\\r\\n"
for key, value in values.items():
    sock.sendall(f"get {key}\\r\\n".encode())
    assert stream.readline() == f"VALUE {key} 0 {len(value)}\\r\\n".encode()
    assert stream.read(len(value)) == value and stream.readline() + stream.readline() == b"\\r\\nEND\\r\\n"
print("all values")
"""


@program
def redis(way):
    """Keys set through a pipe, read back, and the benchmark's own errors."""
    port, rng = free_port(), random.Random(2)
    commands = b"".join(b"SET key%d %s\r\n" % (n, rng.randbytes(rng.choice([8, 200, 20_000])).hex().encode()) for n in range(2000))
    with running(way.server(["redis-server", "--port", str(port), "--save", "", "--daemonize", "no"]), port):
        cli = ["redis-cli", "-p", str(port)]
        piped = way.client([*cli, "--pipe"], input=commands)
        out = way.client(["redis-benchmark", "-p", str(port), "-q", "-n", "5000", "-c", "20", "-P", "4", "-t", "set,get,lpush,lrange_100"])
        keys = "\n".join(f"GET key{n}" for n in range(2000)).encode()
        return piped.splitlines()[-1], len(re.findall("requests per second", out)), digest(way.client(cli, input=keys))


@program
def redis_py(way):
    """The tests of redis-py, a client with threads, asyncio, subscriptions and processes: each has the result that it has over TCP."""
    home = pathlib.Path(os.environ.get("REDIS_PY", ""))
    if not (home / "source/tests").is_dir():
        raise RuntimeError("REDIS_PY is not where `cargo xtask programs` has put redis-py")
    port = free_port()
    chosen = "commands connection connection_pool encoding lock monitor multiprocessing pipeline pubsub scripting".split()
    tests = [f"tests/test_{name}.py" for name in chosen]
    tests += [f"tests/test_asyncio/test_{name}.py" for name in chosen if name != "multiprocessing"]
    # Without what needs modules of the server, a cluster or certificates.
    pytest = [home / "v/bin/python", "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", f"--redis-url=redis://localhost:{port}/9",
              "-m", "not redismod and not onlycluster and not ssl", *tests]
    # Its tests have it save.
    server = ["redis-server", "--port", str(port), "--save", "", "--dir", str(HERE), "--enable-debug-command", "yes"]
    with running(way.server(server), port):
        # Some of its tests fail over TCP, too.
        script = f"cd {home}/source; {shlex.join(map(str, pytest))}; true"
        out = way.client(["sh", "-c", script], timeout=600)
        results = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL) (\S+)", out, re.MULTILINE)
        if len(results) < 500:
            raise RuntimeError(f"only {len(results)} tests: {out[-800:]}")
        return sorted(results)


@program
def nginx(way):
    """Files of all sizes, whole and in parts, by curl, one connection for all."""
    port, home, rng = free_port(), HERE / f"nginx-{way.name}", random.Random(3)
    (home / "html").mkdir(parents=True)
    os.chmod(HERE, 0o755)
    for n, size in enumerate([0, 1, 1000, 70_000, 3_000_000, 20_000_000]):
        (home / f"html/{n}").write_bytes(rng.randbytes(size))
    (home / "conf").write_text(f"""worker_processes 2; user root; daemon off; pid {home}/pid; error_log {home}/err;
events {{ worker_connections 1024; }}
http {{ access_log off; sendfile on; tcp_nopush on; server {{ listen 127.0.0.1:{port}; root {home}/html; }} }}""")
    with running(way.server(["nginx", "-c", str(home / "conf")]), port):
        urls = [f"http://127.0.0.1:{port}/{n}" for n in range(6)] * 5
        got = [digest(way.client(["curl", "-s", *urls]))]
        got.append(digest(way.client(["curl", "-s", "-r", "500000-2500000", *urls[4:6] * 8])))
        out = way.client(["wrk", "-t1", "-c20", "-d1", urls[3]])
        return *got, re.findall("Socket errors|Non-2xx", out)


@program
def openmpi(way):
    """Open MPI over its TCP transport: latency and bandwidth tests, each message checked."""
    source, binary = HERE / "ping.c", HERE / "ping"
    source.write_text(MPI)
    subprocess.run(["mpicc", "-O2", "-o", binary, source], check=True)
    options = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,tcp", "--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", "lo"]
    return way.client(["mpirun", *options, "-n", "3", str(binary)], env={**os.environ, "OMPI_MCA_plm_rsh_agent": "false"})


MPI = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
static unsigned char at(int from, int turn, int i) { return (unsigned char)(from * 31 + turn * 7 + i * 13 + (i >> 8)); }
int main(int argc, char **argv) {
    int me, all, wrong = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &all);
    for (int size = 1; size <= 4 << 20; size *= 8) {
        unsigned char *out = malloc(size), *in = malloc(size);
        for (int turn = 0; turn < (size < 4096 ? 500 : 20); turn++) {
            int next = (me + 1) % all, last = (me + all - 1) % all;
            for (int i = 0; i < size; i++) out[i] = at(me, turn, i);
            MPI_Sendrecv(out, size, MPI_BYTE, next, 1, in, size, MPI_BYTE, last, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            for (int i = 0; i < size; i++) wrong += in[i] != at(last, turn, i);
        }
        free(out);
        free(in);
    }
    int sum = 0;
    MPI_Allreduce(&wrong, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (me == 0) printf("%d processes, %d wrong bytes\n", all, sum);
    MPI_Finalize();
    return sum != 0;
}
"""


@program
def java(way, role="call"):
    """A client whose sockets wait, and a server of channels with a selector."""
    home = HERE / "java"
    if not home.exists():
        home.mkdir()
        (home / "Echo.java").write_text(JAVA)
        subprocess.run(["javac", "-d", home, home / "Echo.java"], check=True)
    port = free_port()
    with running(way.server(["java", "-cp", str(home), "Echo", "serve", str(port)]), port):
        return way.client(["java", "-cp", str(home), "Echo", role, str(port)])


@program
def java_nio(way):
    """Channels with a selector at both ends."""
    return java(way, "select")


JAVA = r"""
import java.io.*;
import java.net.*;
import java.nio.*;
import java.nio.channels.*;
import java.util.*;
public class Echo {
    public static void main(String[] args) throws Exception {
        int port = Integer.parseInt(args[1]);
        if (args[0].equals("serve")) serve(port);
        else if (args[0].equals("select")) select(port);
        else call(port);
    }
    static class Turns {
        final Random random;
        byte[] sent;
        ByteBuffer out, in;
        int turns;
        Turns(int seed) { random = new Random(seed); next(); }
        void next() {
            sent = new byte[new int[] {1, 100, 5000, 60000, 700000}[random.nextInt(turns < 200 ? 3 : 5)]];
            random.nextBytes(sent);
            out = ByteBuffer.wrap(sent);
            in = ByteBuffer.allocate(sent.length);
            turns++;
        }
    }
    static void select(int port) throws Exception {
        Selector selector = Selector.open();
        for (int i = 0; i < 4; i++) {
            SocketChannel channel = SocketChannel.open();
            channel.configureBlocking(false);
            channel.connect(new InetSocketAddress("127.0.0.1", port));
            channel.register(selector, SelectionKey.OP_CONNECT, new Turns(i));
        }
        long bytes = 0;
        for (int left = 4; left > 0;) {
            selector.select();
            for (Iterator<SelectionKey> keys = selector.selectedKeys().iterator(); keys.hasNext();) {
                SelectionKey key = keys.next();
                keys.remove();
                SocketChannel channel = (SocketChannel) key.channel();
                Turns turns = (Turns) key.attachment();
                if (key.isConnectable()) channel.finishConnect();
                if (key.isReadable() && channel.read(turns.in) < 0) throw new RuntimeException("an early end");
                if (!turns.in.hasRemaining()) {
                    if (!Arrays.equals(turns.sent, turns.in.array())) throw new RuntimeException("other bytes");
                    bytes += turns.sent.length;
                    if (turns.turns == 250) { channel.close(); left--; continue; }
                    turns.next();
                }
                channel.write(turns.out);
                key.interestOps(SelectionKey.OP_READ | (turns.out.hasRemaining() ? SelectionKey.OP_WRITE : 0));
            }
        }
        System.out.println(bytes + " bytes");
    }
    static void serve(int port) throws Exception {
        Selector selector = Selector.open();
        ServerSocketChannel listener = ServerSocketChannel.open();
        listener.bind(new InetSocketAddress("127.0.0.1", port));
        listener.configureBlocking(false);
        listener.register(selector, SelectionKey.OP_ACCEPT);
        while (true) {
            selector.select();
            for (Iterator<SelectionKey> keys = selector.selectedKeys().iterator(); keys.hasNext();) {
                SelectionKey key = keys.next();
                keys.remove();
                if (key.isAcceptable()) {
                    SocketChannel channel = listener.accept();
                    channel.configureBlocking(false);
                    channel.register(selector, SelectionKey.OP_READ, ByteBuffer.allocate(1 << 16));
                    continue;
                }
                SocketChannel channel = (SocketChannel) key.channel();
                ByteBuffer buffer = (ByteBuffer) key.attachment();
                if (key.isReadable() && channel.read(buffer) < 0) { channel.close(); continue; }
                buffer.flip();
                channel.write(buffer);
                buffer.compact();
                key.interestOps((buffer.position() < buffer.capacity() ? SelectionKey.OP_READ : 0) | (buffer.position() > 0 ? SelectionKey.OP_WRITE : 0));
            }
        }
    }
    static void call(int port) throws Exception {
        Random random = new Random(4);
        try (Socket socket = new Socket("127.0.0.1", port)) {
            socket.setTcpNoDelay(true);
            OutputStream out = socket.getOutputStream();
            DataInputStream in = new DataInputStream(socket.getInputStream());
            long bytes = 0;
            for (int turn = 0; turn < 600; turn++) {
                byte[] sent = new byte[new int[] {1, 100, 5000, 60000, 700000}[random.nextInt(turn < 500 ? 3 : 5)]];
                random.nextBytes(sent);
                Thread sender = new Thread(() -> { try { out.write(sent); } catch (IOException error) { throw new UncheckedIOException(error); } });
                sender.start();
                byte[] got = new byte[sent.length];
                in.readFully(got);
                sender.join();
                if (!Arrays.equals(sent, got)) throw new RuntimeException("turn " + turn + ": other bytes");
                bytes += got.length;
            }
            System.out.println(bytes + " bytes");
        }
    }
}
"""


@program
def erlang(way):
    """gen_tcp, in the modes active, once and passive, with a process for each of four connections."""
    home = HERE / "erlang"
    if not home.exists():
        home.mkdir()
        (home / "echo.erl").write_text(ERLANG)
        subprocess.run(["erlc", "-o", home, home / "echo.erl"], check=True)
    port = free_port()
    command = lambda role: ["erl", "-noinput", "-pa", str(home), "-run", "echo", role, str(port)]  # noqa: E731
    environment = {**os.environ, "HOME": str(home), "ERL_CRASH_DUMP": str(home / "crash")}
    with running(way.server(command("serve")), port, env=environment):
        return way.client(command("ask"), env=environment)


ERLANG = r"""
-module(echo).
-export([serve/1, ask/1]).
options() -> [binary, {active, false}, {nodelay, true}, {reuseaddr, true}, {ip, {127, 0, 0, 1}}, {backlog, 100}].
serve([Port]) ->
    {ok, Listener} = gen_tcp:listen(list_to_integer(Port), options()),
    accept(Listener).
accept(Listener) ->
    {ok, Socket} = gen_tcp:accept(Listener),
    Pid = spawn(fun() -> receive go -> inet:setopts(Socket, [{active, once}]), echo(Socket) end end),
    ok = gen_tcp:controlling_process(Socket, Pid),
    Pid ! go,
    accept(Listener).
echo(Socket) ->
    receive
        {tcp, Socket, Data} -> ok = gen_tcp:send(Socket, Data), inet:setopts(Socket, [{active, once}]), echo(Socket);
        {tcp_closed, Socket} -> ok
    end.
ask([Port]) ->
    Self = self(),
    Modes = [false, true, once, false],
    [spawn_link(fun() -> Self ! {done, client(list_to_integer(Port), Mode)} end) || Mode <- Modes],
    Sum = lists:sum([receive {done, Bytes} -> Bytes end || _ <- Modes]),
    io:format("~p bytes~n", [Sum]),
    halt(0).
client(Port, Mode) ->
    {ok, Socket} = gen_tcp:connect({127, 0, 0, 1}, Port, [binary, {active, Mode}, {nodelay, true}]),
    rand:seed(exsss, {1, 2, 3}),
    Sizes = [lists:nth(rand:uniform(4), [1, 100, 5000, 60000]) || _ <- lists:seq(1, 300)] ++ [700000, 3000000],
    lists:foreach(fun(Size) ->
        Sent = rand:bytes(Size),
        Self = self(),
        Sender = spawn_link(fun() -> ok = gen_tcp:send(Socket, Sent), Self ! {sent, self()} end),
        Sent = take(Socket, Mode, Size, []),
        receive {sent, Sender} -> ok end
    end, Sizes),
    gen_tcp:close(Socket),
    lists:sum(Sizes).
take(_, _, 0, Got) -> iolist_to_binary(lists:reverse(Got));
take(Socket, false, Left, Got) ->
    {ok, Data} = gen_tcp:recv(Socket, min(Left, 100000)),
    take(Socket, false, Left - byte_size(Data), [Data | Got]);
take(Socket, Mode, Left, Got) ->
    receive {tcp, Socket, Data} ->
        if Mode =:= once -> inet:setopts(Socket, [{active, once}]); true -> ok end,
        take(Socket, Mode, Left - byte_size(Data), [Data | Got])
    end.
"""


def files(home):
    """Files of several sizes for a server of web pages."""
    rng = random.Random(6)
    home.mkdir(parents=True)
    os.chmod(HERE, 0o755)
    for n, size in enumerate([0, 1, 1000, 70_000, 3_000_000]):
        (home / str(n)).write_bytes(rng.randbytes(size))


def fetch(way, port, times=5):
    """Files one after the other on one connection, whole and in parts, and many at a time."""
    urls = [f"http://127.0.0.1:{port}/{n}" for n in range(5)] * times
    got = [digest(way.client(["curl", "-s", *urls])), digest(way.client(["curl", "-s", "-r", "500-60000", *urls[3:5] * 8]))]
    out = way.client(["wrk", "-t1", "-c20", "-d1", urls[3]])
    return *got, re.findall("Socket errors|Non-2xx", out)


@contextlib.contextmanager
def web(way, server, home):
    """nginx with `server` in its configuration; the port."""
    port = free_port()
    (home / f"{port}.conf").write_text(f"""worker_processes 2; user root; daemon off; pid {home}/{port}.pid; error_log {home}/{port}.err;
events {{ worker_connections 1024; }}
http {{ access_log off; sendfile on; client_max_body_size 20m; {server.replace("LISTEN", f"listen 127.0.0.1:{port}")} }}""")
    with running(way.server(["nginx", "-c", str(home / f"{port}.conf")]), port):
        yield port


@program
def php_fpm(way):
    """PHP-FPM behind nginx, by FastCGI over TCP: bodies, which come back, and pages."""
    home, port, body = HERE / f"php-{way.name}", free_port(), HERE / "body"
    home.mkdir()
    os.chmod(HERE, 0o755)
    body.write_bytes(random.Random(7).randbytes(3_000_000))
    (home / "back.php").write_text('<?php ini_set("memory_limit", "256M"); header("X-Sum: " . md5(file_get_contents("php://input"))); readfile("php://input");')
    (home / "page.php").write_text('<?php for ($i = 0; $i < (int) $_GET["n"]; $i++) echo md5((string) $i), "\\n";')
    (home / "fpm.conf").write_text(f"""[global]
daemonize = no
error_log = {home}/fpm.err
[www]
listen = 127.0.0.1:{port}
user = root
group = root
pm = static
pm.max_children = 2
""")
    fpm = str(sorted(pathlib.Path("/usr/sbin").glob("php-fpm*"))[-1])
    location = f"""upstream php {{ server 127.0.0.1:{port}; keepalive 2; }}
server {{ LISTEN; location / {{ fastcgi_pass php; fastcgi_keep_conn on; include /etc/nginx/fastcgi_params; fastcgi_param SCRIPT_FILENAME {home}$fastcgi_script_name; }} }}"""
    with running(way.server([fpm, "-R", "-n", "-y", str(home / "fpm.conf")]), port), web(way, location, home) as front:
        at = f"http://127.0.0.1:{front}"
        back = [digest(way.client(["curl", "-s", "-i", "-H", "Expect:", "-H", "Content-Type: application/octet-stream", "--data-binary", f"@{body}", f"{at}/back.php"]).split("X-Sum")[1]) for _ in range(5)]
        pages = digest(way.client(["curl", "-s", *[f"{at}/page.php?n={n}" for n in (0, 1, 10, 1000, 100_000)] * 20]))
        return *back, pages


@program
def haproxy(way):
    """HAProxy between curl or wrk and nginx."""
    home, port = HERE / f"haproxy-{way.name}", free_port()
    files(home / "html")
    with web(way, f"server {{ LISTEN; root {home}/html; }}", home) as back:
        (home / "conf").write_text(f"""global
    nbthread 2
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
frontend front
    bind 127.0.0.1:{port}
    default_backend back
backend back
    server one 127.0.0.1:{back}
""")
        with running(way.server(["/usr/sbin/haproxy", "-db", "-f", str(home / "conf")]), port):
            return fetch(way, port)


@program
def varnish(way):
    """Varnish between curl or wrk and nginx."""
    home, port = HERE / f"varnish-{way.name}", free_port()
    files(home / "html")
    with web(way, f"server {{ LISTEN; root {home}/html; }}", home) as back:
        options = ["-n", str(home / "varnish"), "-a", f"127.0.0.1:{port}", "-b", f"127.0.0.1:{back}", "-s", "malloc,64m", "-j", "none"]
        with running(way.server(["/usr/sbin/varnishd", "-F", *options]), port):
            return fetch(way, port)


@program
def nats(way):
    """Messages by NATS, from a connection that publishes to one that has subscribed."""
    port = free_port()
    with running(way.server(["/usr/sbin/nats-server", "-a", "127.0.0.1", "-p", str(port)]), port):
        return way.client(["/usr/bin/python3", "-c", NATS, str(port)])


NATS = """
import hashlib, random, socket, sys, threading
def connect():
    sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    stream = sock.makefile("rb")
    assert stream.readline().startswith(b"INFO ")
    sock.sendall(b'CONNECT {"verbose":false,"pedantic":false}\\r\\nPING\\r\\n')
    assert stream.readline() == b"PONG\\r\\n"
    return sock, stream
(reader, stream), (writer, _), rng = connect(), connect(), random.Random(1)
reader.sendall(b"SUB it 1\\r\\nPING\\r\\n")
assert stream.readline() == b"PONG\\r\\n"
messages = [rng.randbytes(rng.choice([0, 1, 100, 3000, 500_000])) for _ in range(300)]
def publish():
    for message in messages:
        writer.sendall(b"PUB it %d\\r\\n" % len(message) + message + b"\\r\\n")
thread = threading.Thread(target=publish)
thread.start()
for message in messages:
    while (line := stream.readline()) == b"PING\\r\\n":
        reader.sendall(b"PONG\\r\\n")
    assert line == b"MSG it 1 %d\\r\\n" % len(message), line
    assert stream.read(len(message)) == message and stream.read(2) == b"\\r\\n"
thread.join()
print(hashlib.sha256(b"".join(messages)).hexdigest())
"""


@program
def etcd(way):
    """Keys and values of etcd, by curl and its interface for JSON."""
    home, port, peer = HERE / f"etcd-{way.name}", free_port(), free_port()
    home.mkdir()
    at = [f"http://127.0.0.1:{one}" for one in (port, peer)]
    options = ["--data-dir", str(home / "data"), "--listen-client-urls", at[0], "--advertise-client-urls", at[0]]
    options += ["--listen-peer-urls", at[1], "--initial-advertise-peer-urls", at[1], "--initial-cluster", f"default={at[1]}"]
    rng, text = random.Random(8), lambda data: base64.b64encode(data).decode()  # noqa: E731
    values = {text(b"key%d" % n): text(rng.randbytes(size)) for n, size in enumerate([0, 1, 1000, 70_000, 900_000] * 4)}
    with running(way.server(["etcd", *options]), port, env={**os.environ, "HOME": str(home)}):
        until = time.monotonic() + 30
        while b"true" not in subprocess.run(["curl", "-s", f"{at[0]}/health"], capture_output=True).stdout and time.monotonic() < until:
            time.sleep(0.1)
        def post(path, bodies):
            calls = []
            for n, body in enumerate(bodies):
                (home / f"{path.replace('/', '-')}{n}").write_text(json.dumps(body))
                calls += [*(["--next"] if n else []), "-s", "-X", "POST", "--data-binary", f"@{home}/{path.replace('/', '-')}{n}", f"{at[0]}/v3/{path}"]
            return way.client(["curl", *calls])
        post("kv/put", [{"key": key, "value": value} for key, value in values.items()])
        got = re.findall(r'"key":"([^"]*)".*?(?:"value":"([^"]*)")?}', post("kv/range", [{"key": key} for key in values]))
        if dict(got) != values:
            raise RuntimeError("other values")
        return len(got)


@program
def golang(way):
    """Go makes its own system calls: TCP, without disturbance."""
    home, port = HERE / "go", free_port()
    if not home.exists():
        home.mkdir()
        (home / "main.go").write_text(GO)
        environment = {**os.environ, "GOFLAGS": "-mod=mod", "GOCACHE": str(home / "cache"), "CGO_ENABLED": "0", "GO111MODULE": "off"}
        subprocess.run(["go", "build", "-o", home / "echo", home / "main.go"], check=True, env=environment)
    with running(way.server([str(home / "echo"), "serve", f"127.0.0.1:{port}"]), port):
        return way.client([str(home / "echo"), "call", f"127.0.0.1:{port}"])


golang.is_plain = True

GO = r"""
package main
import ("bytes"; "fmt"; "io"; "math/rand"; "net"; "os")
func main() {
	if os.Args[1] == "serve" {
		listener, _ := net.Listen("tcp", os.Args[2])
		for { conn, err := listener.Accept(); if err != nil { return }; go func() { io.Copy(conn, conn); conn.Close() }() }
	}
	conn, err := net.Dial("tcp", os.Args[2])
	if err != nil { panic(err) }
	for turn := 0; turn < 200; turn++ {
		sent := make([]byte, 1+turn*500)
		rand.Read(sent)
		go conn.Write(sent)
		got := make([]byte, len(sent))
		if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(sent, got) { panic("other bytes") }
	}
	fmt.Println("all bytes")
}
"""


@program
def ssh(way):
    """rsync over ssh: a tree there and back."""
    home, port = HERE / f"ssh-{way.name}", free_port()
    home.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / name], check=True)
    os.chmod(HERE, 0o755)
    os.makedirs("/run/sshd", exist_ok=True)
    options = {"HostKey": home / "host", "AuthorizedKeysFile": home / "user.pub", "StrictModes": "no", "PidFile": "none", "UsePAM": "no"}
    listen = ["-o", "ListenAddress=127.0.0.1", "-p", str(port), *(f"-o{name}={value}" for name, value in options.items())]
    known = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    with running(way.server(["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *listen]), port):
        rsh = " ".join(["ssh", "-i", str(home / "user"), "-p", str(port), *known])
        tree = HERE / "tree"
        if not tree.exists():
            tree.mkdir()
            for n in range(300):
                (tree / str(n)).write_bytes(random.Random(n).randbytes(n * 337 + 11))
        way.client(["rsync", "-a", "-e", rsh, f"{tree}/", f"127.0.0.1:{home}/there/"])
        way.client(["rsync", "-a", "-e", rsh, f"127.0.0.1:{home}/there/", f"{home}/back/"])
        return subprocess.run(["diff", "-r", tree, home / "back"], capture_output=True).stdout or "the same tree"


# sshd starts itself again for each connection, which it has inherited then.
ssh.is_plain = True


@program
def qperf(way):
    """Latency and bandwidth by qperf, which opens a second connection for its data."""
    port = free_port()
    with running(way.server(["qperf", "-lp", str(port)]), port):
        out = way.client(["qperf", "-lp", str(port), "-t", "1", "127.0.0.1", "tcp_lat", "tcp_bw"])
        return re.findall(r"(latency|bw) +=", out)


@program
def netpipe(way):
    """NetPIPE's test that what arrives is what was sent, in messages of 1 byte to 128 KiB."""
    port = str(free_port())
    options = ["-i", "-u", "131072", "-p", "0", "-n", "20", "-P", port]
    # It serves one client: looking whether it listens must be none.
    with subprocess.Popen(way.server(["NPtcp", *options]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        until = time.monotonic() + 30
        while not subprocess.run(["ss", "-Hltn", f"sport = :{port}"], capture_output=True).stdout and time.monotonic() < until:
            time.sleep(0.05)
        try:
            out = way.client(["sh", "-c", 'exec NPtcp "$@" 2>&1', "NPtcp", "-h", "127.0.0.1", "-o", str(HERE / "netpipe"), *options])
            checks = re.findall(r"Integrity check passed|failed", out)
            if len(checks) < 20 or "failed" in checks:
                raise RuntimeError(f"{len(checks)} checks: {out[-800:]}")
            return checks
        finally:
            server.kill()


@program
def socat(way):
    """Bulk through socat, to a file."""
    port, data, to = free_port(), HERE / "bulk", HERE / f"bulk-{way.name}"
    data.write_bytes(random.Random(5).randbytes(60_000_000))
    with running(way.server(["socat", f"TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr", f"OPEN:{to},creat,trunc"]), port):
        way.client(["socat", "-u", f"FILE:{data}", f"TCP:127.0.0.1:{port}"])
        until = time.monotonic() + 30
        while to.stat().st_size < data.stat().st_size and time.monotonic() < until:
            time.sleep(0.05)
        return digest(to.read_bytes())


# It shuts down the direction that it does not use, before anything else.
socat.is_plain = True


def node_js(way, server, client):
    """Node.js: sockets and HTTP, by these versions."""
    script = str(SOURCES / "node.js")
    ports = [str(free_port()), str(free_port())]
    command = lambda version, role: [f"{os.environ['NODE']}/{version}/node_modules/node/bin/node", script, role, *ports]
    with running(way.server(command(server, "serve")), int(ports[0])):
        return way.client(command(client, "ask"))


@program
def node20(way):
    return node_js(way, "20", "20")


# It registers sockets with epoll by io_uring.
@program
def node24(way):
    return node_js(way, "24.9", "24.9")


@program
def node20_for_24(way):
    return node_js(way, "20", "24.9")


@program
def node24_for_20(way):
    return node_js(way, "24.9", "20")


def asio_with(way, *, server, client):
    """Boost.Asio, which waits by io_uring or by epoll at either end."""
    options = {"uring": ["-DBOOST_ASIO_HAS_IO_URING", "-DBOOST_ASIO_DISABLE_EPOLL", "-luring"], "epoll": []}
    for kind in {server, client}:
        if not (HERE / f"asio-{kind}").exists():
            subprocess.run(["g++", "-O1", "-pthread", "-o", HERE / f"asio-{kind}", SOURCES / "asio.cpp", *options[kind]], check=True)
    port = free_port()
    with running(way.server([str(HERE / f"asio-{server}"), "serve", str(port)]), port):
        return way.client([str(HERE / f"asio-{client}"), "ask", str(port)])


@program
def asio(way):
    return asio_with(way, server="epoll", client="epoll")


@program
def asio_by_io_uring(way):
    return asio_with(way, server="uring", client="uring")


@program
def asio_serves_io_uring(way):
    return asio_with(way, server="epoll", client="uring")


@program
def asio_asks_io_uring(way):
    return asio_with(way, server="uring", client="epoll")


for function in [etcd, nats, node24, node20_for_24, node24_for_20, asio_by_io_uring, asio_serves_io_uring, asio_asks_io_uring]:
    function.is_plain = True


def main():
    ways = [("tcp", None), ("run", [THRUWAY, "run", "--after-calls", "4"]), ("relay", [*relay(), "--after-calls", "4"])]
    failed = []
    for name in sys.argv[2:] or PROGRAMS:
        results = {}
        for label, run in ways:
            way = Way(label, run)
            try:
                result = PROGRAMS[name](way)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure of this program
                result = f"failed: {error}"
            results[label] = result
            is_plain = run is None or getattr(PROGRAMS[name], "is_plain", False)
            is_same = not str(result).startswith("failed") and result == results["tcp"]
            is_good = is_same and (is_plain or way.accelerated() > 0)
            if not is_good:
                failed.append(f"{name} by {label}")
            count = f"{way.accelerated()} accelerated, {way.counted.get('ring_bytes', 0)} bytes" if run else ""
            print(f"{'ok    ' if is_good else 'FAILED'} {name:<20} {label:<6} {count:<36} {'' if is_good else str(result)[-900:]}", flush=True)
    shutil.rmtree(HERE, ignore_errors=True)
    if failed:
        sys.exit(f"other results than over TCP: {', '.join(failed)}")


main()
