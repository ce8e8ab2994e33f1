"""One directory, shared by Thruway and by nfs-ganesha, and the same client in user space (`thruway bench nfs`) for both.

Servers take turns at each workload. Processor time is the server's, by the kernel's accounts; a `create` or `mkdir` is one that is
made and removed again. nfs-ganesha does not bring names to the medium before it answers; Thruway does, but for its second share, which
is `async`. To be run in a network namespace of its own, where rpcbind, which nfs-ganesha registers with, is no other program's.

With the argument `again`, both share a directory of a third server again, which is Thruway: nfs-ganesha by its FSAL PROXY_V4.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from servers import ONLY, Server, compare, keep, version
from settings import SECONDS, THRUWAY, sized

# Name, operation, bytes, depth, connections, more options.
WORKLOADS = [
    ("4 KiB random read, depth 1", "read", "4K", 1, 1, []),
    ("4 KiB random read, depth 16", "read", "4K", 16, 1, []),
    ("4 KiB random read, 64 clients of depth 1", "read", "4K", 1, 64, ["--file-size", "1M"]),
    ("1 MiB read, depth 4", "read", "1M", 4, 1, ["--sequential", "--file-size", sized("256M", "16M")]),
    ("4 KiB random write, depth 16", "write", "4K", 16, 1, []),
    ("4 KiB random write, stable, depth 16", "write", "4K", 16, 1, ["--stable"]),
    ("1 MiB write, depth 4", "write", "1M", 4, 1, ["--sequential", "--file-size", sized("256M", "16M")]),
    ("GETATTR, depth 1", "getattr", "4K", 1, 1, []),
    ("GETATTR, depth 16", "getattr", "4K", 16, 1, []),
    ("LOOKUP, depth 16", "lookup", "4K", 16, 1, []),
    ("create and remove, depth 16", "create", "4K", 16, 1, []),
    ("mkdir and rmdir, depth 16", "mkdir", "4K", 16, 1, []),
]

GANESHA = """
NFS_CORE_PARAM {{ NFS_Port = 10949; MNT_Port = 10948; NFS_Protocols = 3,4; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }}
NFSv4 {{ Graceless = true; RecoveryRoot = {folder}/recovery; }}
EXPORT {{
    Export_Id = 1; Path = {share}; Pseudo = /share; Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Protocols = 3,4;
    Transports = TCP; PrivilegedPort = false; FSAL {{ Name = VFS; }}
}}
LOG {{ Default_Log_Level = CRIT; }}
"""


PROXY = """
NFS_CORE_PARAM {{ NFS_Port = 10949; MNT_Port = 10948; NFS_Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }}
NFSv4 {{ Graceless = true; RecoveryRoot = {folder}/recovery; }}
EXPORT {{
    Export_Id = 1; Path = /share; Pseudo = /share; Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Protocols = 4;
    Transports = TCP; PrivilegedPort = false;
    FSAL {{ Name = PROXY_V4; Srv_Addr = 127.0.0.1; NFS_Port = {port}; Use_Privileged_Client_Port = false; }}
}}
LOG {{ Default_Log_Level = CRIT; }}
"""


def drive(server, vers, operation, size, depth, clients, more):
    """Operations a second, and how many there were."""
    options = ["--vers", vers, "--op", operation, "--size", size, "--depth", str(depth), "--clients", str(clients), "--seconds", str(SECONDS), *more]
    at = server.at if vers == "3" else server.at[:2]
    at = [*at, "--share", server.share[vers]]
    run = subprocess.run([THRUWAY, "bench", "nfs", "--json", *at, *options], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{server.name}: bench nfs --op {operation}: {run.stderr}")
    row = json.loads(run.stdout)[0]
    return row["ops_per_second"], row["operations"]


def ganesha(folder, share, text=None):
    config = os.path.join(folder, "ganesha.conf")
    pathlib.Path(config).write_text(text or GANESHA.format(folder=folder, share=share))
    os.makedirs(os.path.join(folder, "recovery"))
    os.makedirs("/var/run/ganesha", exist_ok=True)
    subprocess.run(["rpcbind", "-w"], check=True)
    command = ["ganesha.nfsd", "-F", "-f", config, "-L", os.path.join(folder, "ganesha.log"), "-p", os.path.join(folder, "ganesha.pid")]
    server = Server("nfs-ganesha", command, None)
    server.at = ["--connect", "127.0.0.1:10949", "--mount", "127.0.0.1:10948"]
    server.share = {"3": share, "4.1": "/share"}
    return server


def wait(server, vers="3"):
    """Until it serves."""
    at = server.at if vers == "3" else server.at[:2]
    for _ in range(200):
        run = subprocess.run([THRUWAY, "bench", "nfs", *at, "--vers", vers, "--share", server.share[vers], "--op", "getattr", "--seconds", "0.01"], capture_output=True)
        if run.returncode == 0:
            return
        time.sleep(0.1)
    raise SystemExit(f"{server.name} does not serve: {run.stderr.decode()}")


def again():
    folder = tempfile.mkdtemp(prefix="thruway-bench-", dir=os.environ.get("THRUWAY_BENCH_DISK", "/var/tmp"))
    share = os.path.join(folder, "share")
    os.mkdir(share)
    servers, results = [], []
    announced = lambda line: json.loads(line)["nfs"][0]

    def serve(name, what, state):
        command = [THRUWAY, "serve", "--json", "--share", f"share={what},squash=none", "--nfs", "127.0.0.1:0", "--state", os.path.join(folder, state)]
        server = Server(name, command, None, announced)
        server.at, server.share = ["--connect", server.address], {"3": "share", "4.1": "share"}
        servers.append(server)
        wait(server, "4.1")
        return server

    try:
        first = serve("without a second server", share, "first")
        ours = serve("thruway", f"nfs://{first.address}/share", "second")
        proxy = ganesha(folder, share, PROXY.format(folder=folder, port=first.address.rsplit(":", 1)[1]))
        servers.append(proxy)
        wait(proxy, "4.1")
        print(f"thruway {version([THRUWAY, '--version'])}; {version(['ganesha.nfsd', '-v'])}\n")
        print("| workload | server | requests/s | server µs/request | thruway ÷ server |\n|---|---|---|---|---|", flush=True)
        for title, *workload in WORKLOADS:
            title = f"a share of a share, NFS 4.1: {title}"
            if ONLY in title:
                results += compare(title, [ours, proxy, first], lambda s: drive(s, "4.1", *workload))
        keep("nfs-again", results)
    finally:
        for server in reversed(servers):
            server.stop()
        shutil.rmtree(folder)


def main():
    folder = tempfile.mkdtemp(prefix="thruway-bench-", dir=os.environ.get("THRUWAY_BENCH_DISK", "/var/tmp"))
    share = os.path.join(folder, "share")
    os.mkdir(share)
    servers, results = [], []
    try:
        announced = lambda line: json.loads(line)["nfs"][0]
        command = [THRUWAY, "serve", "--json", "--share", f"share={share},squash=none", "--nfs", "127.0.0.1:0", "--state", os.path.join(folder, "state")]
        ours = Server("thruway", command, None, announced)
        ours.at, ours.share = ["--connect", ours.address], {"3": "share", "4.1": "share"}
        servers += [ours, ganesha(folder, share)]
        command[4] += ",async"
        command[-1] += "-async"
        less = Server("thruway, async", command, None, announced)
        less.at, less.share = ["--connect", less.address], ours.share
        servers.append(less)
        for server in servers:
            wait(server)
        print(f"thruway {version([THRUWAY, '--version'])}; {version(['ganesha.nfsd', '-v'])}\n")
        print("| workload | server | requests/s | server µs/request | thruway ÷ server |\n|---|---|---|---|---|", flush=True)
        for vers in ["3", "4.1"]:
            for title, *workload in WORKLOADS:
                title = f"NFS {vers}: {title}"
                if ONLY in title:
                    results += compare(title, servers if workload[0] in ("create", "mkdir") else servers[:2], lambda s: drive(s, vers, *workload))
        keep("nfs", results)
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(folder)


again() if sys.argv[1:] == ["again"] else main()
