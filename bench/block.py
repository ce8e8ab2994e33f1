"""One disk, in memory or on tmpfs, served by Thruway and by its peers: NBD (nbdkit, qemu-nbd, nbd-server) and iSCSI (tgt).

Servers take turns at each workload. fio drives NBD, iscsi-perf drives iSCSI. Processor time is the server's, by the
kernel's accounts.
"""

import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parent.parent
THRUWAY = str(TOP / "target/release/thruway")
RUNS = int(os.environ.get("THRUWAY_BENCH_RUNS", "5"))
SECONDS = float(os.environ.get("THRUWAY_BENCH_SECONDS", "2"))
ONLY = os.environ.get("THRUWAY_BENCH_ONLY", "")
SIZE = 1 << 30
TICK = os.sysconf("SC_CLK_TCK")

# Name, pattern, octets, depth, connections.
WORKLOADS = [
    ("4 KiB random read, depth 1", "randread", 4096, 1, 1),
    ("4 KiB random read, depth 32", "randread", 4096, 32, 1),
    ("4 KiB random read, depth 128", "randread", 4096, 128, 1),
    ("4 KiB random read, depth 32, 8 connections", "randread", 4096, 32, 8),
    ("4 KiB random write, depth 32", "randwrite", 4096, 32, 1),
    ("4 KiB random write, depth 32, 8 connections", "randwrite", 4096, 32, 8),
    ("4 KiB random 70/30, depth 32", "randrw", 4096, 32, 1),
    ("1 MiB read, depth 4", "read", 1 << 20, 4, 1),
    ("1 MiB write, depth 4", "write", 1 << 20, 4, 1),
]
# Clients of 512-octet reads (Ren 2015, figure 5-12).
CLIENTS = [1, 4, 16, 64]
# The same for iSCSI: name, options of iscsi-perf (512-octet blocks), connections.
ISCSI = [
    ("4 KiB random read, depth 1", ["-m", "1", "-b", "8", "-r"], 1),
    ("4 KiB random read, depth 32", ["-m", "32", "-b", "8", "-r"], 1),
    ("4 KiB random read, depth 32, 8 connections", ["-m", "32", "-b", "8", "-r"], 8),
    ("1 MiB read, depth 4", ["-m", "4", "-b", "2048"], 1),
]


class Server:
    """A server process; `address` is an NBD URI or an iSCSI URL."""

    def __init__(self, name, command, address, ready=None, pid_file=None):
        self.name, self.address = name, address
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE if ready else subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.pid = self.process.pid
        if ready:
            self.address = ready(self.process.stdout.readline().decode())
        if pid_file:
            # It goes into the background by itself.
            self.process.wait()
            while not os.path.exists(pid_file) or not pathlib.Path(pid_file).read_text().strip():
                time.sleep(0.05)
            self.pid = int(pathlib.Path(pid_file).read_text())

    def cpu(self):
        """Seconds of the process and its children so far."""
        total = 0
        for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(status.parent.name) == self.pid:
                # With the children that have ended.
                total += sum(map(int, fields[11:15])) / TICK
            elif int(fields[1]) == self.pid:
                total += (int(fields[11]) + int(fields[12])) / TICK
        return total

    def stop(self):
        if self.pid != self.process.pid:
            os.kill(self.pid, signal.SIGTERM)
            return
        self.process.terminate()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            # tgtd keeps on as long as it has targets.
            self.process.kill()
            self.process.wait()


def fio(uri, pattern, size, depth, jobs):
    command = ["fio", "--name=b", "--ioengine=nbd", f"--uri={uri}", f"--rw={pattern}", f"--bs={size}", f"--iodepth={depth}",
               f"--numjobs={jobs}", f"--size={SIZE}", f"--runtime={SECONDS}", "--time_based", "--group_reporting", "--output-format=json",
               "--rwmixread=70", "--norandommap", "--randrepeat=0"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(out[out.index("{"):])["jobs"][0]
    return job["read"]["iops"] + job["write"]["iops"]


def iscsi_perf(url, options, connections):
    command = ["iscsi-perf", *options, "-t", str(max(2, int(SECONDS))), url]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(connections)]
    averages = [re.findall(r"iops average (\d+)", process.communicate()[0])[-1] for process in started]
    return sum(map(int, averages))


def compare(title, servers, measure):
    """Runs of all servers in turn; medians, ratios to the first."""
    samples = {server.name: [] for server in servers}
    for run in range(RUNS):
        # Whoever goes first is not always the same.
        for server in servers[run % len(servers):] + servers[:run % len(servers)]:
            before = server.cpu()
            rate = measure(server)
            samples[server.name].append((rate, server.cpu() - before))
    rows = []
    ours = None
    for server in servers:
        rate = statistics.median(r for r, _ in samples[server.name])
        cpu = statistics.median(c for _, c in samples[server.name])
        ours = ours or rate
        rows.append({"workload": title, "server": server.name, "per_second": rate, "cpu_us_per_request": 1e6 * cpu / max(1, rate * SECONDS),
                     "ratio": ours / rate})
        # nbd-server does not wait for its children, so their time is in nobody's account.
        cost = f"{rows[-1]['cpu_us_per_request']:.1f}" if cpu > 0.05 else "-"
        print(f"| {title} | {server.name} | {rate:,.0f} | {cost} | {ours / rate:.2f} |", flush=True)
    return rows


def idle(server, clients):
    """Share of a core used with so many connections that do nothing."""
    script = f"import nbd,time\nh=[nbd.NBD() for _ in range({clients})]\n[x.connect_uri('{server.address}') for x in h]\nprint(1,flush=True)\ntime.sleep(4)"
    client = subprocess.Popen(["/usr/bin/python3", "-c", script], stdout=subprocess.PIPE)
    client.stdout.readline()
    before = server.cpu()
    client.wait()
    return (server.cpu() - before) / 4


def version(command):
    out = subprocess.run(command, capture_output=True, text=True)
    return (out.stdout + out.stderr).strip().splitlines()[0]


def main():
    folder = tempfile.mkdtemp(prefix="thruway-bench-", dir="/dev/shm")
    disk = os.path.join(folder, "disk.img")
    with open(disk, "wb") as file:
        for _ in range(SIZE >> 20):
            file.write(os.urandom(1 << 20))
    announced = lambda key: lambda line: json.loads(line)[key][0]
    servers, results = [], []
    try:
        nbd = lambda line: f"nbd://{announced('nbd')(line)}/d"
        servers.append(Server("thruway", [THRUWAY, "serve", "--json", "--block", f"d={disk}", "--nbd", "127.0.0.1:0"], None, nbd))
        servers.append(Server("nbdkit", ["nbdkit", "-f", "-p", "10951", "file", disk], "nbd://127.0.0.1:10951/"))
        servers.append(Server("qemu-nbd", ["qemu-nbd", "-f", "raw", "-p", "10952", "-t", "-e", "128", "--cache=writeback", disk], "nbd://127.0.0.1:10952/"))
        config = os.path.join(folder, "nbd.conf")
        pathlib.Path(config).write_text(f"[generic]\nport = 10953\nuser = root\ngroup = root\n[d]\nexportname = {disk}\n")
        pid_file = os.path.join(folder, "nbd.pid")
        servers.append(Server("nbd-server", ["nbd-server", "-C", config, "-p", pid_file], "nbd://127.0.0.1:10953/d", pid_file=pid_file))
        time.sleep(1)
        print(f"thruway {version([THRUWAY, '--version'])}; {version(['nbdkit', '--version'])}; {version(['qemu-nbd', '--version'])}; "
              f"nbd-server {version(['nbd-server', '-V'])}; {version(['fio', '--version'])}; tgt {version(['tgtd', '--version'])}\n")
        print("| workload | server | requests/s | server µs/request | thruway ÷ server |\n|---|---|---|---|---|", flush=True)
        for title, pattern, size, depth, jobs in WORKLOADS:
            if ONLY in title:
                results += compare(title, servers, lambda s: fio(s.address, pattern, size, depth, jobs))
        for clients in CLIENTS:
            title = f"512-octet read, depth 1, {clients} clients"
            if ONLY in title:
                results += compare(title, servers, lambda s: fio(s.address, "randread", 512, 1, clients))
        if ONLY in "idle":
            for server in servers:
                share = idle(server, 16)
                results.append({"workload": "16 idle connections", "server": server.name, "cpu_share": share})
                print(f"| 16 idle connections | {server.name} | {100 * share:.1f} % of a core | | |")
        for server in servers:
            server.stop()
        servers = []
        url = lambda line: f"iscsi://{announced('iscsi')(line)}/iqn.2026-11.org.thruway:d/0"
        servers.append(Server("thruway", [THRUWAY, "serve", "--json", "--block", f"d={disk}", "--iscsi", "127.0.0.1:0"], None, url))
        servers.append(Server("tgt", ["tgtd", "-f", "--iscsi", "portal=127.0.0.1:3951", "-C", "7"], "iscsi://127.0.0.1:3951/iqn.t:d/1"))
        time.sleep(1)
        for command in ["target --op new --tid 1 -T iqn.t:d", f"logicalunit --op new --tid 1 --lun 1 -b {disk}", "target --op bind --tid 1 -I ALL"]:
            subprocess.run(["tgtadm", "-C", "7", "--lld", "iscsi", "--mode", *command.split()], check=True)
        for title, options, connections in ISCSI:
            if ONLY in title:
                results += compare(f"iSCSI: {title}", servers, lambda s: iscsi_perf(s.address, options, connections))
    finally:
        for server in servers:
            server.stop()
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    out = TOP / "bench/results"
    out.mkdir(exist_ok=True)
    (out / "block.json").write_text(json.dumps(results, indent=1))


sys.exit(main())
