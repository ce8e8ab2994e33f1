"""The ways from a disk to the network, and what they cost the rest of the machine: past the page cache and through it,
requests in pieces and whole, our cache and the page cache, each beside nbdkit (Koukis 2010, figures 3.8 to 3.11 and
chapter 4; Ren 2015, figures 5-9 to 5-11).

Each server has a disk: a file on a real one (`THRUWAY_BENCH_DISK`, default /var/tmp); nothing of it is in the page cache at the
beginning of a run, except where that is what is measured.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import servers
from servers import ONLY, Server, compare, fio, keep, random_disk, version
from settings import RUNS, SECONDS, THRUWAY, sized

SIZE = sized(4 << 30, 1 << 26)
HOT = sized(1 << 30, 1 << 25)
SIZES = [("4 KiB", 4 << 10), ("16 KiB", 16 << 10), ("64 KiB", 64 << 10), ("256 KiB", 256 << 10), ("1 MiB", 1 << 20)]
LONG = [("64 KiB", 64 << 10), ("256 KiB", 256 << 10), ("1 MiB", 1 << 20), ("4 MiB", 4 << 20)]
# What the paced reader asks for in the interference test, in bytes a second.
PACE = 400 << 20


def thruway(name, disk, options):
    address = lambda line: f"nbd://{json.loads(line)['nbd'][0]}/d"
    server = Server(f"thruway, {name}", [THRUWAY, "serve", "--json", "--block", f"d={disk}{options}", "--nbd", "127.0.0.1:0"], None, address)
    server.disk = disk
    return server


def nbdkit(disk):
    server = Server("nbdkit", ["nbdkit", "-f", "-p", "10951", "file", disk], "nbd://127.0.0.1:10951/")
    server.disk = disk
    time.sleep(1)
    return server


def forget(disk):
    """Nothing of it is in the page cache."""
    fd = os.open(disk, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cold(pattern, size, depth, *more):
    def measure(server):
        forget(server.disk)
        return fio(server.address, pattern, size, depth, 1, f"--size={SIZE}", *more)

    return measure


def warm(group):
    """All of the disk is in the caches."""
    for server in group:
        subprocess.run(["nbdcopy", server.address, "null:"], check=True, timeout=120)


def settled(server, size):
    """Random writes that begin with nothing dirty, of whoever was before."""
    os.sync()
    return fio(server.address, "randwrite", size, 32, 1)


def memory_program():
    """A program that is bound by memory, on every core; its rate when it ends."""
    command = ["stress-ng", "--stream", str(os.cpu_count()), "--timeout", str(max(2, int(SECONDS))), "--metrics-brief"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def memory_rate(process):
    # Bytes a second are said per instance; operations by the clock are the last but one of the brief line.
    line = [line for line in process.communicate()[0].splitlines() if re.search(r"\] stream +\d", line)][-1]
    return float(line.split()[8])


def interference(group):
    """What a memory-bound program loses to a server, and the server to it."""
    results = []
    alone, with_server, paced, pressed = [], {s.name: [] for s in group}, {s.name: [] for s in group}, {s.name: [] for s in group}
    for run in range(RUNS):
        alone.append(memory_rate(memory_program()))
        for server in group[run % len(group):] + group[:run % len(group)]:
            program = memory_program()
            before = server.cpu()
            paced[server.name].append(cold("read", 1 << 20, 4, f"--rate={PACE}")(server)[0])
            with_server[server.name].append((memory_rate(program), server.cpu() - before))
            program = memory_program()
            pressed[server.name].append(cold("read", 1 << 20, 4)(server)[0])
            memory_rate(program)
    base = statistics.median(alone)
    print(f"\n| beside a memory-bound program ({base:,.0f} operations/s alone) | it keeps, reads paced to {PACE >> 20} MiB/s | paced reads | "
          "server s of processor | unpaced reads beside it |\n|---|---|---|---|---|")
    for server in group:
        keeps = statistics.median(r for r, _ in with_server[server.name]) / base
        cpu = statistics.median(c for _, c in with_server[server.name])
        steady, free = statistics.median(paced[server.name]), statistics.median(pressed[server.name])
        results.append({"workload": "interference", "server": server.name, "program_keeps": keeps, "paced_per_second": steady,
                        "server_cpu_seconds": cpu, "unpaced_per_second": free})
        print(f"| {server.name} | {100 * keeps:.0f} % | {steady:,.0f} MiB/s | {cpu:.2f} | {free:,.0f} MiB/s |", flush=True)
    return results


def main():
    folder = tempfile.mkdtemp(prefix="thruway-bench-", dir=os.environ.get("THRUWAY_BENCH_DISK", "/var/tmp"))
    running, results = [], []
    disk = lambda number, size=SIZE: random_disk(os.path.join(folder, f"{size}-{number}.img"), size)
    head = "| workload | server | requests/s | server µs/request | first ÷ server |\n|---|---|---|---|---|"
    try:
        print(f"thruway {version([THRUWAY, '--version'])}; {version(['nbdkit', '--version'])}; {version(['fio', '--version'])}\n")
        running = [thruway("direct", disk(0), ",mode=direct"), thruway("page cache", disk(1), ",mode=writeback"), nbdkit(disk(2))]
        if ONLY in "path":
            print(head, flush=True)
            for name, size, depth in [("4 KiB random", 4096, 32), ("64 KiB random", 64 << 10, 8), ("1 MiB", 1 << 20, 4)]:
                pattern = "randread" if "random" in name else "read"
                results += compare(f"path: {name} read, not cached, depth {depth}", running, cold(pattern, size, depth))
        if ONLY in "interference":
            results += interference(running)
        for server in running:
            server.stop()
        running = [thruway("in pieces of 64 KiB", disk(0), ",mode=direct,chunk=64K"), thruway("in pieces of 256 KiB", disk(1), ",mode=direct"),
                   thruway("whole", disk(2), ",mode=direct,chunk=4M")]
        if ONLY in "overlap":
            print("\n" + head, flush=True)
            for name, size in LONG:
                results += compare(f"overlap: {name} read, not cached, depth 1", running, cold("read", size, 1))
        for server in running:
            server.stop()
        running = [thruway("own cache", disk(0, HOT), ",cache=1200M"), thruway("page cache", disk(1, HOT), ",mode=writeback"), nbdkit(disk(2, HOT))]
        if ONLY in "cache":
            print("\n" + head, flush=True)
            servers.SIZE = HOT
            warm(running)
            for name, size in SIZES:
                results += compare(f"cache: {name} random read, all cached, depth 32", running, lambda s: fio(s.address, "randread", size, 32, 1))
        for server in running:
            server.stop()
        running = [thruway("own cache", disk(0, HOT), ",cache=1200M:writeback"), thruway("page cache", disk(1, HOT), ",mode=writeback"), nbdkit(disk(2, HOT))]
        if ONLY in "cache":
            warm(running)
            for name, size in SIZES:
                results += compare(f"cache: {name} random write, depth 32", running, lambda s: settled(s, size))
    finally:
        for server in running:
            server.stop()
        shutil.rmtree(folder)
    keep("paths", results)


sys.exit(main())
