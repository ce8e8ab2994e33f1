"""Servers of disks and their measurement: what the comparisons of the block service have in common."""

import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import time

from settings import RUNS, SECONDS, THRUWAY, TOP, sized

ONLY = os.environ.get("THRUWAY_BENCH_ONLY", "")
SIZE = sized(1 << 30, 1 << 26)
TICK = os.sysconf("SC_CLK_TCK")
# iscsi-perf prints an average each second.
ISCSI_SECONDS = max(2, int(SECONDS))


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
            try:
                os.kill(self.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass  # nbd-server does not survive 64 clients
            return
        self.process.terminate()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            # tgtd keeps on as long as it has targets.
            self.process.kill()
            self.process.wait()


def random_disk(path, size):
    """A file with random content, made if it is not there. Servers that run at the same time have one each, as some lock theirs."""
    if not os.path.exists(path):
        with open(path, "wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
    return path


def fio(uri, pattern, size, depth, jobs, *more):
    """Requests a second, and how many there were; nothing if the server does not finish.

    Of several clients all requests count, by the clock on the wall: fio adds up the rates of its jobs, each over its own
    time, and where a server lets some clients begin late these times are not the same.
    """
    start = time.monotonic()
    command = ["fio", "--name=b", "--ioengine=nbd", f"--uri={uri}", f"--rw={pattern}", f"--bs={size}", f"--iodepth={depth}",
               f"--numjobs={jobs}", f"--size={SIZE}", f"--runtime={int(1000 * SECONDS)}ms", "--time_based", "--group_reporting", "--output-format=json",
               "--rwmixread=70", "--norandommap", "--randrepeat=0", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        out = process.communicate(timeout=4 * SECONDS + 20)[0]
    except subprocess.TimeoutExpired:
        # With its jobs, which are processes in sessions of their own.
        jobs = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in [process.pid, *map(int, jobs)]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}")
    job = json.loads(out[out.index("{"):])["jobs"][0]
    count = job["read"]["total_ios"] + job["write"]["total_ios"]
    if jobs > 1:
        return count / (time.monotonic() - start), count
    return job["read"]["iops"] + job["write"]["iops"], count


def iscsi_perf(url, options, connections):
    command = ["iscsi-perf", *options, "-t", str(ISCSI_SECONDS), url]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(connections)]
    averages = [re.findall(r"iops average (\d+)", process.communicate()[0])[-1] for process in started]
    rate = sum(map(int, averages))
    return rate, rate * ISCSI_SECONDS


def compare(title, servers, measure):
    """Runs of all servers in turn; medians, ratios to the first."""
    samples = {server.name: [] for server in servers}
    for run in range(RUNS):
        # Whoever goes first is not always the same.
        for server in servers[run % len(servers):] + servers[:run % len(servers)]:
            before = server.cpu()
            measured = measure(server)
            if measured:
                samples[server.name].append((*measured, server.cpu() - before))
            else:
                print(f"| {title} | {server.name} | does not finish | | |", flush=True)
                servers = [s for s in servers if s is not server]
    rows = []
    ours = None
    for server in servers:
        rate = statistics.median(rate for rate, _, _ in samples[server.name])
        cost = statistics.median(cpu / max(1, count) for _, count, cpu in samples[server.name])
        cpu = statistics.median(cpu for _, _, cpu in samples[server.name])
        ours = ours or rate
        rows.append({"workload": title, "server": server.name, "per_second": rate, "cpu_us_per_request": 1e6 * cost, "ratio": ours / rate})
        # nbd-server does not wait for its children, so their time is in nobody's account.
        cost = f"{rows[-1]['cpu_us_per_request']:.1f}" if cpu > 0.05 else "-"
        print(f"| {title} | {server.name} | {rate:,.0f} | {cost} | {ours / rate:.2f} |", flush=True)
    return rows


def version(command):
    out = subprocess.run(command, capture_output=True, text=True)
    return (out.stdout + out.stderr).strip().splitlines()[0]


def keep(name, results):
    """Keeps the figures for whoever wants to plot them."""
    out = TOP / "bench/results"
    out.mkdir(exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(results, indent=1))
