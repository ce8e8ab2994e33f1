"""Linux's own initiator in a guest: Thruway and tgt as its targets, by iSCSI over TCP, by iSER over soft-RoCE (rxe), and by
iSER over siw, where Thruway is iWARP in user space; of a file, and by TCP of a block device, too. fio on the disk, PostMark on ext4, and a key-value load in the manner of
YCSB (A: half of it updates; B: a twentieth; keys by Zipf) on SQLite on ext4.
"""

import bisect
import json
import os
import pathlib
import random
import re
import sqlite3
import statistics
import subprocess
import sys
import time

from servers import THRUWAY, TOP, keep

RUNS = int(os.environ.get("THRUWAY_BENCH_RUNS", "3"))
SECONDS = 3
SIZE = 600 << 20
TRANSPORTS = {"tcp": "iSCSI over TCP", "device": "iSCSI over TCP, of a block device", "rxe": "iSER over rxe", "siw": "iSER over siw"}
# fio: name, pattern, bytes, depth.
DISK = [("4 KiB random read, depth 1", "randread", 4096, 1), ("4 KiB random read, depth 32", "randread", 4096, 32),
        ("4 KiB random write, depth 32", "randwrite", 4096, 32), ("1 MiB read, depth 4", "read", 1 << 20, 4),
        ("1 MiB write, depth 4", "write", 1 << 20, 4)]
RECORDS = 20000
POSTMARK = """set location /mnt/d
set number 2000
set transactions 10000
set size 500 10000
set subdirectories 10
set read 4096
set write 4096
run
quit
"""


def shell(script, **more):
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | more
    return subprocess.run(["bash", "-c", f"source {TOP}/testbed/lib.sh; set -euo pipefail; {script}"], check=True, text=True, **more)


class Target:
    """A target that Linux logs in to; used as a context, it is the disk."""

    def __init__(self, name, transport):
        # What is exported: a file, or a block device over it.
        self.backing, self.is_device = "/tmp/disk.img", transport == "device"
        transport = "tcp" if self.is_device else transport
        self.name, self.transport = name, transport
        # Of user space over siw, the other end must be another host: siw speaks to itself through the kernel otherwise.
        self.address = {"tcp": "127.0.0.1", "rxe": "10.0.0.254", "siw": "10.0.0.1" if name == "thruway" else "10.0.0.254"}[transport]

    def __enter__(self):
        try:
            return self.disk()
        except BaseException:
            self.__exit__()
            raise

    def disk(self):
        pathlib.Path("/tmp/disk.img").unlink(missing_ok=True)
        shell(f"truncate -s {SIZE} /tmp/disk.img")
        if self.is_device:
            self.backing = shell("losetup --find --show /tmp/disk.img").stdout.strip()
        iqn = "iqn.2026-11.org.thruway:t"
        iface = "default" if self.transport == "tcp" else "iser"
        portal = f"{self.address}:3260"
        self.node = f"iscsiadm -m node -T {iqn} -p {portal}"
        lun = self.start()
        shell(f"{self.node} --interface {iface} -o new >/dev/null; {self.node} --login >/dev/null", timeout=60)
        return shell(f"disk {lun}", timeout=60).stdout.strip()

    def start(self):
        if self.name == "tgt":
            command = ["tgtd", "-f", "-C", "9", "--iscsi", f"portal={self.address}:3260"]
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            lld = "iscsi" if self.transport == "tcp" else "iser"
            time.sleep(1)
            who = ["-I ALL"] if lld == "iscsi" else ["-Q iqn.2026-11.org.example:guest", f"-I {self.address}"]
            for words in ["target --op new --tid 1 -T iqn.2026-11.org.thruway:t",
                          f"logicalunit --op new --tid 1 --lun 1 -b {self.backing} --bstype rdwr",
                          *(f"target --op bind --tid 1 {one}" for one in who)]:
                subprocess.run(["tgtadm", "-C", "9", "--lld", lld, "--mode", *words.split()], check=True)
            return 1
        command = [THRUWAY, "serve", "--json", "--anonymous", "--block", f"t={self.backing}"]
        if self.transport == "tcp":
            command += ["--iscsi", f"{self.address}:3260"]
        else:
            command += ["--iser", f"{self.address}:3260", "--provider", "verbs" if self.transport == "rxe" else "iwarp"]
        if self.transport == "siw":
            command = ["ip", "netns", "exec", "other", *command]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.process.stdout.readline()
        return 0

    def __exit__(self, *_):
        subprocess.run(f"{self.node} --logout >/dev/null; {self.node} -o delete", shell=True, timeout=60)
        if self.name == "tgt":
            # It keeps on as long as it has targets.
            self.process.kill()
        else:
            self.process.terminate()
        self.process.wait()
        if self.is_device:
            subprocess.run(f"losetup --detach {self.backing}", shell=True)


def fio(disk, pattern, size, depth):
    command = ["fio", "--name=b", "--ioengine=libaio", "--direct=1", f"--filename={disk}", f"--rw={pattern}", f"--bs={size}",
               f"--iodepth={depth}", f"--runtime={SECONDS}", "--time_based", "--output-format=json", "--norandommap"]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=60).stdout
    job = json.loads(out[out.index("{"):])["jobs"][0]
    return job["read"]["iops"] + job["write"]["iops"]


def postmark():
    """Transactions a second, with what is written down at the end."""
    start = time.monotonic()
    subprocess.run(["postmark"], input=POSTMARK, text=True, stdout=subprocess.DEVNULL, check=True, timeout=120)
    shell("sync -f /mnt/d")
    return 10000 / (time.monotonic() - start)


def key_values(updates):
    """Operations a second on records of 1 KiB, each update its own transaction."""
    path = "/mnt/d/kv.db"
    pathlib.Path(path).unlink(missing_ok=True)
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("pragma journal_mode=wal")
    db.execute("pragma synchronous=normal")
    db.execute("pragma cache_size=-1024")
    db.execute("create table t(k integer primary key, v blob)")
    draw = random.Random(7)
    db.execute("begin")
    db.executemany("insert into t values(?, ?)", ((k, draw.randbytes(1024)) for k in range(RECORDS)))
    db.execute("commit")
    weights, total = [], 0.0
    for rank in range(1, RECORDS + 1):
        total += rank ** -0.99
        weights.append(total)
    order = draw.sample(range(RECORDS), RECORDS)
    # Nothing of it is in memory at first.
    shell("sync -f /mnt/d; echo 3 >/proc/sys/vm/drop_caches")
    count, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        key = order[min(bisect.bisect(weights, draw.random() * total), RECORDS - 1)]
        if draw.random() < updates:
            db.execute("update t set v = ? where k = ?", (draw.randbytes(1024), key))
        else:
            db.execute("select v from t where k = ?", (key,)).fetchone()
        count += 1
    db.close()
    return count / SECONDS


def measure(disk):
    rows = {name: fio(disk, pattern, size, depth) for name, pattern, size, depth in DISK}
    shell(f"mkfs.ext4 -qF {disk}; mkdir -p /mnt/d; mount {disk} /mnt/d")
    try:
        rows["PostMark"] = postmark()
        rows["key-value A"] = key_values(0.5)
        rows["key-value B"] = key_values(0.05)
    finally:
        shell("umount /mnt/d")
    return rows


def inside(transport):
    shell("mount -t tmpfs none /tmp")
    shell("hosts other; " + (f"kernel_end {transport}" if transport in ("rxe", "siw") else "ip link set lo up"))
    shell("initiator_start", stdout=None, stderr=None)
    targets = [Target(name, transport) for name in ("thruway", "tgt")]
    broken = set()
    for run in range(RUNS):
        for target in targets[::1 if run % 2 else -1]:
            if target.name in broken:
                continue
            try:
                with target as disk:
                    print(json.dumps({"target": target.name, "rows": measure(disk)}), flush=True)
            except (subprocess.SubprocessError, OSError) as error:
                broken.add(target.name)
                print(json.dumps({"target": target.name, "failed": (getattr(error, "stdout", None) or str(error))[-300:]}), flush=True)


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside(sys.argv[2])
    results = []
    tgt = re.sub(r"\s", "", subprocess.run(["tgtd", "--version"], stdout=subprocess.PIPE, text=True).stdout)
    print(f"{subprocess.run([THRUWAY, '--version'], stdout=subprocess.PIPE, text=True).stdout.strip()}; tgt {tgt}\n")
    print("| transport | workload | thruway /s | tgt /s | ratio |\n|---|---|---|---|---|")
    for transport in sys.argv[1:] or TRANSPORTS:
        done = subprocess.run(["cargo", "xtask", "vm", "run", "--limit", "1500", "--",
                               f"export THRUWAY_BENCH_RUNS={RUNS}; exec python3 {TOP}/bench/guest_block.py --inside {transport}"],
                              cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        samples = {}
        for line in lines:
            if "failed" in line:
                print(f"| {TRANSPORTS[transport]} | {line['target']} failed: {line['failed']} | | | |")
            for name, rate in line.get("rows", {}).items():
                samples.setdefault(name, {}).setdefault(line["target"], []).append(rate)
        for name, rates in samples.items():
            medians = {who: statistics.median(found) for who, found in rates.items()}
            ours, theirs = medians.get("thruway"), medians.get("tgt")
            ratio = ours / theirs if ours and theirs else None
            cell = lambda value, form: form.format(value) if value else "-"
            print(f"| {TRANSPORTS[transport]} | {name} | {cell(ours, '{:,.0f}')} | {cell(theirs, '{:,.0f}')} | {cell(ratio, '{:.2f}')} |", flush=True)
            results.append({"transport": transport, "workload": name, "samples": rates, "ratio": ratio})
        if done.returncode:
            sys.exit(done.stderr.split("--- the guest's kernel log")[0][-1500:])
    keep("guest_block", results)


sys.exit(main())
