"""A disk on tmpfs for each server, Thruway and its peers: NBD (nbdkit, qemu-nbd, nbd-server) and iSCSI (tgt).

Servers take turns at each workload. fio drives NBD, iscsi-perf drives iSCSI. Processor time is the server's, by the
kernel's accounts.
"""

import json
import os
import shutil
import pathlib
import subprocess
import sys
import tempfile
import time

from servers import ONLY, SIZE, Server, compare, fio, iscsi_perf, keep, random_disk, version
from settings import THRUWAY, sized

# Name, pattern, bytes, depth, connections.
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
WORKLOADS = sized(WORKLOADS, WORKLOADS[3:6])
# Seconds of connections without requests.
IDLE = sized(4, 1)
# Clients of 512-byte reads (Ren 2015, figure 5-12).
CLIENTS = sized([1, 4, 16, 64], [4])
# The same for iSCSI: name, options of iscsi-perf (512-byte blocks), connections.
ISCSI = [
    ("4 KiB random read, depth 1", ["-m", "1", "-b", "8", "-r"], 1),
    ("4 KiB random read, depth 32", ["-m", "32", "-b", "8", "-r"], 1),
    ("4 KiB random read, depth 32, 8 connections", ["-m", "32", "-b", "8", "-r"], 8),
    ("1 MiB read, depth 4", ["-m", "4", "-b", "2048"], 1),
]
ISCSI = sized(ISCSI, ISCSI[2:3])


def idle(server, clients):
    """Share of a core used with so many connections that do nothing."""
    script = f"import nbd,time\nh=[nbd.NBD() for _ in range({clients})]\n[x.connect_uri('{server.address}') for x in h]\nprint(1,flush=True)\ntime.sleep({IDLE})"
    client = subprocess.Popen(["/usr/bin/python3", "-c", script], stdout=subprocess.PIPE)
    client.stdout.readline()
    before = server.cpu()
    client.wait()
    return (server.cpu() - before) / IDLE


def main():
    folder = tempfile.mkdtemp(prefix="thruway-bench-", dir="/dev/shm")
    disk = lambda number: random_disk(os.path.join(folder, f"{number}.img"), SIZE)
    announced = lambda key: lambda line: json.loads(line)[key][0]
    servers, results = [], []
    try:
        nbd = lambda line: f"nbd://{announced('nbd')(line)}/d"
        servers.append(Server("thruway", [THRUWAY, "serve", "--json", "--block", f"d={disk(0)}", "--nbd", "127.0.0.1:0"], None, nbd))
        servers.append(Server("nbdkit", ["nbdkit", "-f", "-p", "10951", "file", disk(1)], "nbd://127.0.0.1:10951/"))
        servers.append(Server("qemu-nbd", ["qemu-nbd", "-f", "raw", "-p", "10952", "-t", "-e", "128", "--cache=writeback", disk(2)], "nbd://127.0.0.1:10952/"))
        config = os.path.join(folder, "nbd.conf")
        pathlib.Path(config).write_text(f"[generic]\nport = 10953\nuser = root\ngroup = root\n[d]\nexportname = {disk(3)}\n")
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
            title = f"512-byte read, depth 1, {clients} clients"
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
        servers.append(Server("thruway", [THRUWAY, "serve", "--json", "--block", f"d={disk(0)}", "--iscsi", "127.0.0.1:0"], None, url))
        servers.append(Server("tgt", ["tgtd", "-f", "--iscsi", "portal=127.0.0.1:3951", "-C", "7"], "iscsi://127.0.0.1:3951/iqn.t:d/1"))
        time.sleep(1)
        for command in ["target --op new --tid 1 -T iqn.t:d", f"logicalunit --op new --tid 1 --lun 1 -b {disk(1)}", "target --op bind --tid 1 -I ALL"]:
            subprocess.run(["tgtadm", "-C", "7", "--lld", "iscsi", "--mode", *command.split()], check=True)
        for title, options, connections in ISCSI:
            if ONLY in f"iSCSI: {title}":
                results += compare(f"iSCSI: {title}", servers, lambda s: iscsi_perf(s.address, options, connections))
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(folder)
    keep("block", results)


sys.exit(main())
