"""NetPIPE, an unmodified program with sockets, over Linux's soft-RoCE (rxe) and soft-iWARP (siw) in a guest: by TCP, by librdmacm's
librspreload, and by `thruway run --remote` through a relay. Both ends are on one host: a device of the kernel's has one address."""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from settings import RUNS, THRUWAY, TOP

ADDRESS = "10.0.0.254"
LIBRARY = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"
# NetPIPE's options: the size, the number of messages, and -s for one direction.
ROWS = {
    "64 B there and back": ["-l", "64", "-u", "64", "-n", "2000"],
    "64 KiB there and back": ["-l", "65536", "-u", "65536", "-n", "300"],
    "64 KiB one way": ["-s", "-l", "65536", "-u", "65536", "-n", "1000"],
}
WAYS = ["tcp", "librspreload", "relay"]


def command(way, args, counters="/dev/null"):
    run = ["NPtcp", *args, "-p", "0"]
    if way == "librspreload":
        return ["env", f"LD_PRELOAD={LIBRARY}", *run]
    if way == "relay":
        # Without the encryption that librspreload does not have.
        return [THRUWAY, "run", "--remote", "--policy", "/tmp/policy.toml", "--key", "/tmp/key", "--peers", "/tmp/key.pub", "--plaintext",
                "--stats", "--json", "--report", counters, "--", *run]
    return run


def listens():
    return subprocess.run(["ss", "-Hltn", "sport = :5002"], capture_output=True, text=True).stdout.strip()


def queue_pairs():
    lines = subprocess.run(["rdma", "resource", "show", "qp"], capture_output=True, text=True).stdout.splitlines()
    return sum(" type RC " in line for line in lines)


def measure(way, args):
    """Microseconds of half a round trip, or of a message one way. None if NetPIPE has failed, or has gone by TCP after all."""
    before = queue_pairs()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command(way, args), **quiet)
    try:
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as counters:
            if way == "librspreload":
                # It listens where ss does not see it.
                time.sleep(1)
            while way != "librspreload" and not listens() and server.poll() is None:
                time.sleep(0.02)
            client = subprocess.Popen(command(way, ["-h", ADDRESS, "-o", out.name, *args], counters.name), **quiet)
            is_by_rdma = way == "tcp"
            deadline = time.monotonic() + 20
            while client.poll() is None and time.monotonic() < deadline:
                is_by_rdma |= way == "librspreload" and queue_pairs() > before
                time.sleep(0.02)
            if client.poll() is None:
                client.kill()
                client.wait()
                return None
            row = out.read().split()
            if way == "relay" and client.returncode == 0:
                counted = json.load(counters)
                is_by_rdma = counted["ring_bytes"] > 10 * counted["overflow_bytes"]
            return float(row[2]) * 1e6 if client.returncode == 0 and len(row) == 3 and is_by_rdma else None
    finally:
        server.kill()
        server.wait()


def inside():
    setup = ["ip link add eth0 type veth peer name p-kernel", "ip addr add 10.0.0.254/24 dev eth0", "ip link set eth0 up",
             "ip link set p-kernel up", f"{THRUWAY} keygen --quiet --output /tmp/key"]
    for line in setup:
        subprocess.run(line, shell=True, check=True)
    pathlib.Path("/tmp/policy.toml").write_text('[[rule]]\nports = "1-65535"\nmode = "relay"\n')
    for device in ("rxe", "siw"):
        subprocess.run(f"rdma link add {device}0 type {device} netdev eth0", shell=True, check=True)
        relay = subprocess.Popen([THRUWAY, "relay", "--key", "/tmp/key", "--peers", "/tmp/key.pub", "--plaintext"],
                                 stderr=subprocess.PIPE, text=True)
        for line in relay.stderr:
            if "relay at" in line:
                break
        for name, args in ROWS.items():
            samples = {way: [] for way in WAYS}
            for _ in range(RUNS):
                for way in WAYS:
                    samples[way].append(measure(way, args))
            print(json.dumps({"device": device, "row": name, "samples": samples}), flush=True)
        relay.terminate()
        relay.wait()
        subprocess.run(f"rdma link del {device}0", shell=True, check=True)


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside()
    done = subprocess.run(["cargo", "xtask", "vm", "run", "--limit", "900", "--", f"exec python3 {TOP}/bench/rsockets.py --inside"],
                          cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print("microseconds, medians (fastest to slowest) of", RUNS, "alternating runs")
    print(f"{'':<27}" + "".join(f"{way:>34}" for way in WAYS) + f"{'relay against librspreload':>28}")
    for row in rows:
        text, medians = f"{row['device']}, {row['row']:<22}", {}
        for way in WAYS:
            whole = [value for value in row["samples"][way] if value is not None]
            medians[way] = statistics.median(whole) if whole else float("nan")
            lost = len(row["samples"][way]) - len(whole)
            spread = f"({min(whole):.0f} to {max(whole):.0f})" if whole else ""
            text += f"{medians[way]:>10.1f} {spread + (f' {lost} failed' if lost else ''):>23}"
        row["ratio"] = medians["librspreload"] / medians["relay"]
        print(f"{text}{row['ratio']:>28.2f}")
    if done.returncode:
        sys.exit(done.stderr.split("--- the guest's kernel log")[0][-1500:])
    results = TOP / "bench/results"
    results.mkdir(exist_ok=True)
    (results / "rsockets.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
