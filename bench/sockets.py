"""Programs with sockets on this host, as they are and by `thruway run`: the same servers and clients, in turns."""

import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from settings import RUNS, SECONDS, THRUWAY, sized

PING = """
import socket, sys, time
port, size, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
sock = socket.create_connection(("127.0.0.1", port))
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
data = bytes(size)
into = memoryview(bytearray(size))
def turn():
    sock.sendall(data)
    got = 0
    while got < size:
        got += sock.recv_into(into[got:])
for _ in range(2000):
    turn()
turns, begin = 0, time.perf_counter()
while time.perf_counter() - begin < seconds:
    for _ in range(100):
        turn()
    turns += 100
print(turns / (time.perf_counter() - begin))
"""
PONG = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    into = memoryview(bytearray(1 << 20))
    while length := sock.recv_into(into):
        sock.sendall(into[:length])
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


class Server:
    """A server, which runs until the end of the block."""

    def __init__(self, ways, make):
        self.port = free_port()
        self.process = subprocess.Popen([*ways, *make(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.05)
        raise RuntimeError(f"{make(self.port)} does not listen")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(ways, args, pattern):
    out = subprocess.run([*ways, *args], capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.findall(pattern, out)
    if not found:
        raise RuntimeError(f"{args}: {out[-500:]}")
    return found[-1]


def redis(port):
    return ["redis-server", "--port", str(port), "--save", "", "--daemonize", "no"]


def redis_client(*options):
    def client(ways, port):
        return float(run(ways, ["redis-benchmark", "-p", str(port), "-t", "get", "-q", *options], r"GET: ([0-9.]+) requests per second"))

    return client


def nginx(directory):
    def server(port):
        conf = directory / f"{port}.conf"
        conf.write_text(f"""worker_processes 1; user root; daemon off; pid {directory}/{port}.pid; error_log {directory}/{port}.err;
events {{ worker_connections 1024; }}
http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000000;
server {{ listen 127.0.0.1:{port}; root {directory}/html; }} }}""")
        return ["nginx", "-c", str(conf)]

    return server


def wrk(path, connections):
    def client(ways, port):
        args = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, int(SECONDS))}", f"http://127.0.0.1:{port}/{path}"]
        return float(run(ways, args, r"Requests/sec: +([0-9.]+)"))

    return client


def iperf(size):
    def client(ways, port):
        out = run(ways, ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-t", str(max(1, int(SECONDS))), "-l", size, "-f", "M"], r"([0-9.]+) MBytes/sec +receiver")
        return float(out) * 1048576

    return client


def ping(size):
    def client(ways, port):
        return float(run(ways, ["/usr/bin/python3", "-c", PING, str(port), str(size), str(SECONDS / 2)], r"[0-9.]+"))

    return client


def main():
    with tempfile.TemporaryDirectory(prefix="thruway-bench-") as directory:
        measure(pathlib.Path(directory))


def measure(directory):
    (directory / "html").mkdir()
    (directory / "html/small").write_bytes(os.urandom(1000))
    (directory / "html/large").write_bytes(os.urandom(100_000))
    pong = lambda port: ["/usr/bin/python3", "-c", PONG, str(port)]  # noqa: E731
    iperf_server = lambda port: ["iperf3", "-s", "-p", str(port)]  # noqa: E731
    rows = [
        ("round trips of 64 bytes, Python", pong, ping(64), "round trips"),
        ("round trips of 64 KiB, Python", pong, ping(65536), "round trips"),
        ("iperf3, writes of 64 KiB", iperf_server, iperf("64K"), "bytes"),
        ("iperf3, writes of 1 MiB", iperf_server, iperf("1M"), "bytes"),
        ("redis GET, 1 connection", redis, redis_client("-n", sized("50000", "1000"), "-c", "1"), "requests"),
        ("redis GET, 50 connections", redis, redis_client("-n", sized("200000", "5000"), "-c", "50"), "requests"),
        ("redis GET, 50 connections, 16 at a time", redis, redis_client("-n", sized("1000000", "5000"), "-c", "50", "-P", "16"), "requests"),
        ("nginx, 1,000 bytes, wrk with 1 connection", nginx(directory), wrk("small", 1), "requests"),
        ("nginx, 1,000 bytes, wrk with 20", nginx(directory), wrk("small", 20), "requests"),
        ("nginx, 100,000 bytes, wrk with 20", nginx(directory), wrk("large", 20), "requests"),
    ]
    accelerated = [THRUWAY, "run", "--"]
    refused = [THRUWAY, "run", "--tcp", "1-65535", "--"]
    print("| what, in a second | TCP | thruway run | ratio | thruway run, left to TCP | ratio |\n|---|---|---|---|---|---|")
    for title, server, client, unit in rows:
        samples = {"tcp": [], "run": [], "refused": []}
        for _ in range(RUNS):
            for name, ways in (("tcp", []), ("run", accelerated), ("refused", refused)):
                with Server(ways, server) as one:
                    samples[name].append(client(ways, one.port))
        median = {name: statistics.median(values) for name, values in samples.items()}
        shown = {name: f"{value / 1e9:.2f} GB" if unit == "bytes" else f"{value:,.0f}" for name, value in median.items()}
        print(f"| {title} | {shown['tcp']} | {shown['run']} | {median['run'] / median['tcp']:.2f} | {shown['refused']} | {median['refused'] / median['tcp']:.2f} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
