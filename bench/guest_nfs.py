"""Linux's nfsd and Thruway in a guest, each sharing a directory of one file system, over TCP and over soft-RoCE (rxe): the same client in
user space (`thruway bench nfs`) for both. Processor time is that of the whole guest, both ends together, because much of it is the
kernel's on no process's account.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from servers import THRUWAY, TOP, keep

RUNS = int(os.environ.get("THRUWAY_BENCH_RUNS", "3"))
SECONDS = 2
TICK = os.sysconf("SC_CLK_TCK")
# Name, version, operation, bytes, depth, more options.
WORKLOADS = [("4 KiB random read, depth 16", "3", "read", "4K", 16, []), ("4 KiB random read, depth 16, version 4.1", "4.1", "read", "4K", 16, []),
             ("4 KiB random write, depth 16", "3", "write", "4K", 16, []),
             ("1 MiB read, depth 4", "3", "read", "1M", 4, ["--sequential"]), ("1 MiB write, depth 4", "3", "write", "1M", 4, ["--sequential"]),
             ("GETATTR, depth 1", "3", "getattr", "4K", 1, []), ("GETATTR, depth 16", "3", "getattr", "4K", 16, []), ("LOOKUP, depth 16", "3", "lookup", "4K", 16, [])]
# Both are served by this namespace, whose RDMA device they use.
ADDRESS = "10.0.0.254"


def shell(script, **more):
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | more
    return subprocess.run(["bash", "-c", f"source {TOP}/testbed/lib.sh; set -euo pipefail; {script}"], check=True, text=True, **more)


def busy():
    """Seconds of all processors so far, but for those without work."""
    fields = pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    user, nice, system, idle, iowait, *rest = map(int, fields)
    return (user + nice + system + sum(rest[:3])) / TICK


class Server:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        if self.name == "nfsd":
            shell("exportfs -o rw,no_root_squash,insecure,fsid=0,async,no_subtree_check '*:/srv/data'; rpc.mountd -p 20048;"
                  "echo 1048576 >/proc/fs/nfsd/max_block_size; echo 10 >/proc/fs/nfsd/nfsv4leasetime; echo 10 >/proc/fs/nfsd/nfsv4gracetime; rpc.nfsd -U --rdma=20049 8;")
            # Nothing is opened by version 4 before its grace period is over.
            time.sleep(11)
            self.share, self.mount = {"3": "/srv/data", "4.1": "/"}, f"{ADDRESS}:20048"
        else:
            command = [THRUWAY, "serve", "--json", "--anonymous", "--provider", "verbs", "--share", "data=/srv/data,squash=none,async", "--nfs", f"{ADDRESS}:2049",
                       "--nfs-rdma", f"{ADDRESS}:20049", "--nfs-rpcbind", "none", "--state", "/tmp/state"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
            self.process.stdout.readline()
            self.share, self.mount = {"3": "data", "4.1": "data"}, f"{ADDRESS}:2049"
        return self

    def __exit__(self, *_):
        if self.name == "nfsd":
            shell("rpc.nfsd 0; exportfs -ua; pkill rpc.mountd || true")
        else:
            self.process.terminate()
            self.process.wait()

    def drive(self, transport, version, operation, size, depth, more):
        """Operations a second, and seconds of all processors for each thousand."""
        port, options = ("2049", []) if transport == "tcp" else ("20049", ["--rdma", "--provider", "verbs"])
        # Another host by TCP; by rxe the same, whose device is both ends'.
        where = ["ip", "netns", "exec", "other"] if transport == "tcp" else []
        mount = ["--mount", self.mount] if version == "3" else []
        before = busy()
        row = json.loads(subprocess.run([*where, THRUWAY, "bench", "nfs", "--json", "--connect", f"{ADDRESS}:{port}", *options, *mount, "--share",
                                         self.share[version], "--vers", version, "--op", operation, "--size", size, "--depth", str(depth), "--seconds", str(SECONDS), *more],
                                        check=True, stdout=subprocess.PIPE, text=True).stdout)[0]
        return row["ops_per_second"], (busy() - before) / row["operations"] * 1000


def inside(transport):
    shell("mount -t tmpfs none /tmp; hosts other; kernel_end rxe; mkdir -p /srv /mnt/n")
    shell("mount -t tmpfs none /srv; mkdir -p /srv/data;"
          "truncate -s 2G /srv/disk; mkfs.ext4 -qF /srv/disk; mount -o loop /srv/disk /srv/data; chmod 777 /srv/data;"
          "mkdir -p /run/rpcbind /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /proc/fs/nfsd; mount -t nfsd nfsd /proc/fs/nfsd 2>/dev/null || true; rpcbind -w 2>/dev/null || true")
    for run in range(RUNS):
        for name in ("thruway", "nfsd")[::1 if run % 2 else -1]:
            with Server(name) as server:
                rows = {}
                for title, version, operation, size, depth, more in WORKLOADS:
                    rows[title] = server.drive(transport, version, operation, size, depth, more)
                print(json.dumps({"server": name, "rows": rows}), flush=True)


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside(sys.argv[2])
    results = []
    print("| transport | workload | thruway /s | nfsd /s | ratio | processor, thruway and nfsd, ms for each thousand |\n|---|---|---|---|---|---|")
    for transport in sys.argv[1:] or ["tcp", "rxe"]:
        done = subprocess.run(["cargo", "xtask", "vm", "run", "--limit", "1500", "--",
                               f"export THRUWAY_BENCH_RUNS={RUNS}; exec python3 {TOP}/bench/guest_nfs.py --inside {transport}"],
                              cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        samples = {}
        for line in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
            for title, found in line["rows"].items():
                samples.setdefault(title, {}).setdefault(line["server"], []).append(found)
        for title, by_server in samples.items():
            median = lambda name, of: statistics.median(found[of] for found in by_server[name]) if name in by_server else float("nan")
            (ours, theirs), (cost, their_cost) = ([median(name, of) for name in ("thruway", "nfsd")] for of in (0, 1))
            print(f"| {transport} | {title} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} | {cost * 1000:.0f}, {their_cost * 1000:.0f} |", flush=True)
            results.append({"transport": transport, "workload": title, "samples": by_server, "ratio": ours / theirs})
        if done.returncode:
            sys.exit(done.stderr[-3000:])
    keep("guest_nfs", results)


sys.exit(main())
