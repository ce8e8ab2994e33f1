"""Cost of `thruway run` for connections that stay on TCP or return to it: programs as they are and by `thruway run`, in pairs.

All servers of a program run all the time. A pair is one run of the client with each, in alternating order. Pairs are added until the
interval of the median ratio is narrow.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from settings import THRUWAY, TOP, sized
from sockets import Server, nginx

SOURCES = TOP / "bench/fallback"
PAIRS_MIN, PAIRS_MAX = sized((15, 60), (1, 1))
# Of the interval of the median ratio, whose confidence is 95 %.
WIDTH_MAX = 0.06
ACCELERATED = [THRUWAY, "run", "--"]
REFUSED = [THRUWAY, "run", "--tcp", "1-65535", "--"]
# Connections, bytes of a message, seconds.
LOAD = ["4", "64", "1"]


def interval(values):
    """The interval of the median, without an assumption on how values are distributed: two of the sorted values."""
    ordered, n = sorted(values), len(values)
    outside, low = 0.0, 0
    while (outside := outside + math.comb(n, low) / 2**n) <= 0.025:
        low += 1
    return ordered[max(low - 1, 0)], ordered[min(n - low, n - 1)]


def client(args, pattern=r"^[0-9.]+$"):
    def ask(ways, port):
        command = [*ways, *args(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"{command}: {done.stdout[-500:]}{done.stderr[-500:]}")
        found = re.findall(pattern, done.stdout, re.MULTILINE)
        return float(found[0]), done.stdout

    return ask


def echo(command):
    """A server and a client by one program."""
    return lambda port: [*command, "serve", str(port)], client(lambda port: [*command, "ask", str(port), *LOAD])


def haproxy(directory, upstream):
    def server(port):
        conf = directory / f"haproxy-{port}.cfg"
        conf.write_text(f"""global
    nbthread 1
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    http-reuse always
frontend front
    bind 127.0.0.1:{port}
    default_backend back
backend back
    server one 127.0.0.1:{upstream}
""")
        return ["haproxy", "-db", "-f", str(conf)]

    return server


def is_accelerated(ask, port):
    """Whether the client's connections go through shared memory, in one run that is not counted."""
    _, out = ask([THRUWAY, "run", "--stats", "--json", "--"], port)
    counted = json.loads(out[out.rindex("{") :])
    return counted["accelerated"] > counted["demoted"]


def compare(title, start, ask):
    """`start`: starts the server in a way; returns its port."""
    with contextlib.ExitStack() as running:
        plain, accelerated, refused = ([start(running, ways), ways] for ways in ([], ACCELERATED, REFUSED))
        if is_accelerated(ask, accelerated[0]):
            pairs(f"{title}: accelerated", ask, plain, accelerated)
            pairs(f"{title}: left to TCP by `--tcp`", ask, plain, refused)
        else:
            pairs(f"{title}: TCP", ask, plain, accelerated)


def pairs(title, ask, *ends):
    samples, ratios = ([], []), []
    while len(ratios) < PAIRS_MAX:
        for which in (0, 1) if len(ratios) % 2 == 0 else (1, 0):
            port, ways = ends[which]
            samples[which].append(ask(ways, port)[0])
        ratios.append(samples[1][-1] / samples[0][-1])
        middle = statistics.median(ratios)
        if len(ratios) >= PAIRS_MIN:
            low, high = interval(ratios)
            if high - low <= WIDTH_MAX * middle:
                break
    medians = [f"{statistics.median(values):,.0f}" for values in samples]
    print(f"| {title} | {medians[0]} | {medians[1]} | {middle:.3f} | {low:.3f} to {high:.3f} | {len(ratios)} |", flush=True)


def main(names):
    with tempfile.TemporaryDirectory(prefix="thruway-bench-") as directory:
        measure(pathlib.Path(directory), names)


def measure(directory, names):
    (directory / "html").mkdir()
    (directory / "html/small").write_bytes(os.urandom(1000))
    subprocess.run(["cc", "-O2", "-o", directory / "uring", SOURCES / "uring.c", "-luring"], check=True)
    subprocess.run(["javac", "-d", directory, SOURCES / "Echo.java"], check=True)
    node = lambda version: [f"{os.environ['NODE']}/{version}/node_modules/node/bin/node", str(SOURCES / "echo.js")]  # noqa: E731
    programs = {
        "Node.js 20": echo(node("20")),
        "Node.js 24": echo(node("24.9")),
        "Java NIO": echo(["java", "-cp", str(directory), "Echo"]),
        "io_uring": echo([str(directory / "uring")]),
    }
    print("| messages or requests in a second | plain | thruway run | ratio | 95 % | pairs |\n|---|---|---|---|---|---|", flush=True)
    for title, (server, ask) in programs.items():
        if not names or title in names:
            compare(title, lambda running, ways: running.enter_context(Server(ways, server)).port, ask)
    if not names or "HAProxy" in names:
        wrk = client(lambda port: ["wrk", "-t1", "-c20", "-d1", f"http://127.0.0.1:{port}/small"], r"Requests/sec: +([0-9.]+)")

        def start(running, ways):
            upstream = running.enter_context(Server(ways, nginx(directory))).port
            return running.enter_context(Server(ways, haproxy(directory, upstream))).port

        compare("HAProxy", start, wrk)


main(sys.argv[1:])
