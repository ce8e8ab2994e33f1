"""Operations over Linux's soft-RoCE (rxe), in a guest, by `thruway bench --provider verbs` and by perftest."""

import json
import statistics
import subprocess
import sys
import time

from settings import RUNS, THRUWAY, TOP

ADDRESS = "10.0.0.254"
DEPTH = 64

# Ours, perftest's program, its column, and whether more is better.
ROWS = [
    ("bw", "send", 65536), ("bw", "write", 65536), ("bw", "read", 65536), ("bw", "atomic", 8),
    ("lat", "send", 64), ("lat", "write", 64), ("lat", "read", 64),
]


def ours(kind, op, size, port):
    server = subprocess.Popen([THRUWAY, "bench", kind, "--provider", "verbs", "--quiet", "--listen", f"{ADDRESS}:{port}"])
    try:
        time.sleep(0.5)
        out = subprocess.run([THRUWAY, "bench", kind, "--provider", "verbs", "--json", "--connect", f"{ADDRESS}:{port}", "--op", op,
                              "--size", str(size), "--depth", str(DEPTH), "--seconds", "1"], capture_output=True, text=True, check=True)
    finally:
        server.terminate()
        server.wait()
    row = json.loads(out.stdout)[0]
    return row["ops_per_second"] if kind == "bw" else row["lat_us_p50"]


def perftest(kind, op, size, port):
    program = f"ib_{op}_{kind}"
    args = [program, "-d", "rxe0", "-x", "1", "-p", str(port), "-n", "2000", "-F"]
    args += [] if op == "atomic" else ["-s", str(size)]
    args += ["-t", str(DEPTH)] if kind == "bw" else []
    server = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.5)
    out = subprocess.run([*args, ADDRESS], capture_output=True, text=True, timeout=120)
    server.wait(30)
    figures = [line.split() for line in out.stdout.splitlines() if line.split()[:1] == [str(size)]]
    if not figures:
        raise RuntimeError(f"{program}: {out.stdout[-300:]}{out.stderr[-300:]}")
    # bw: bytes, iterations, peak, average, Mmsg/s; lat: bytes, iterations, least, most, typical, ...
    return float(figures[0][4]) * (1e6 if kind == "bw" else 1)


def inside():
    setup = ["ip link add eth0 type veth peer name p-kernel", "ip addr add 10.0.0.254/24 dev eth0", "ip link set eth0 up",
             "ip link set p-kernel up", "rdma link add rxe0 type rxe netdev eth0"]
    for command in setup:
        subprocess.run(command, shell=True, check=True)
    port = 18000
    for kind, op, size in ROWS:
        samples = {"thruway": [], "perftest": []}
        for _ in range(RUNS):
            for who, measure in (("thruway", ours), ("perftest", perftest)):
                port += 1
                samples[who].append(measure(kind, op, size, port))
        print(json.dumps({"kind": kind, "op": op, "size": size, "samples": samples}), flush=True)


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside()
    done = subprocess.run(["cargo", "xtask", "vm", "run", "--limit", "1200", "--", f"exec python3 {TOP}/bench/rdma.py --inside"],
                          cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"{'operation over rxe':<24} {'thruway':>10} {'perftest':>10} {'unit':<6} {'ratio':>6}")
    for row in rows:
        mine, theirs = (statistics.median(row["samples"][who]) for who in ("thruway", "perftest"))
        lat = row["kind"] == "lat"
        row["ratio"] = theirs / mine if lat else mine / theirs
        name = f"{row['op']} {row['size']} B, " + ("latency" if lat else f"{DEPTH} under way")
        print(f"{name:<24} {mine:>10.1f} {theirs:>10.1f} {'us' if lat else 'op/s':<6} {row['ratio']:>6.2f}")
    if done.returncode:
        sys.exit(done.stderr.split("--- the guest's kernel log")[0][-1500:])
    results = TOP / "bench/results"
    results.mkdir(exist_ok=True)
    (results / "rdma.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
