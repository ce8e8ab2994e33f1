"""An unmodified socket program over Linux's soft-RoCE (rxe) and soft-iWARP (siw), in a guest: over TCP, by librdmacm's librspreload, and by
`thruway run --remote` through a relay. Both ends are on one host: a device of the kernel's has one address."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

TOP = pathlib.Path(__file__).resolve().parent.parent
THRUWAY = str(TOP / "target/release/thruway")
RUNS = int(os.environ.get("THRUWAY_BENCH_RUNS", "3"))
ADDRESS = "10.0.0.254"
LIBRARY = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"
ROWS = [("lat", "64"), ("lat", "4K"), ("in", "4K"), ("in", "64K"), ("in", "1M"), ("both", "64K")]
WAYS = ["tcp", "librspreload", "relay"]


def command(way, args):
    env = dict(os.environ)
    run = [THRUWAY, "bench", "sockets", *args]
    if way == "librspreload":
        env["LD_PRELOAD"] = LIBRARY
    if way == "relay":
        # Without the encryption that librspreload does not have.
        run = [THRUWAY, "run", "--remote", "--quiet", "--policy", "/tmp/policy.toml", "--key", "/tmp/key", "--peers", "/tmp/key.pub",
               "--plaintext", "--", *run]
    return run, env


def measure(way, test, size, port):
    run, env = command(way, ["--listen", f"{ADDRESS}:{port}"])
    server = subprocess.Popen(run, env=env, stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            if "listening on" in line:
                break
        args = ["--json", "--seconds", "1.5", "--connect", f"{ADDRESS}:{port}", "--test", test, "--size", size]
        run, env = command(way, args)
        out = subprocess.run(run, env=env, capture_output=True, text=True, timeout=60)
        if out.returncode:
            return None
        row = json.loads(out.stdout)[0]
        return row["lat_us_p50"] if test == "lat" else row["bytes_per_second"]
    except subprocess.TimeoutExpired:
        return None
    finally:
        server.kill()
        server.wait()


def inside():
    setup = ["ip link add eth0 type veth peer name p-kernel", "ip addr add 10.0.0.254/24 dev eth0", "ip link set eth0 up",
             "ip link set p-kernel up", f"{THRUWAY} keygen --quiet --output /tmp/key"]
    for line in setup:
        subprocess.run(line, shell=True, check=True)
    pathlib.Path("/tmp/policy.toml").write_text('[[rule]]\nports = "1-65535"\nmode = "relay"\n')
    port = 18000
    for device in ("rxe", "siw"):
        subprocess.run(f"rdma link add {device}0 type {device} netdev eth0", shell=True, check=True)
        relay = subprocess.Popen([THRUWAY, "relay", "--key", "/tmp/key", "--peers", "/tmp/key.pub", "--plaintext"],
                                 stderr=subprocess.PIPE, text=True)
        for line in relay.stderr:
            if "relay at" in line:
                break
        for test, size in ROWS:
            samples = {way: [] for way in WAYS}
            for _ in range(RUNS):
                for way in WAYS:
                    port += 1
                    samples[way].append(measure(way, test, size, port))
            print(json.dumps({"device": device, "test": test, "size": size, "samples": samples}), flush=True)
        relay.terminate()
        relay.wait()
        subprocess.run(f"rdma link del {device}0", shell=True, check=True)
        time.sleep(1)


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside()
    done = subprocess.run(["cargo", "xtask", "vm", "run", "--limit", "1500", "--", f"exec python3 {TOP}/bench/rsockets.py --inside"],
                          cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"{'':<18} " + " ".join(f"{way:>14}" for way in WAYS) + f" {'unit':<5} {'relay against librspreload':>27}")
    for row in rows:
        lat = row["test"] == "lat"
        medians = {}
        for way in WAYS:
            whole = [value for value in row["samples"][way] if value is not None]
            medians[way] = statistics.median(whole) / (1 if lat else 1e6) if whole else float("nan")
        theirs, mine = medians["librspreload"], medians["relay"]
        row["ratio"] = theirs / mine if lat else mine / theirs
        name = f"{row['device']}, {row['test']} {row['size']}"
        print(f"{name:<18} " + " ".join(f"{medians[way]:>14.1f}" for way in WAYS) + f" {'us' if lat else 'MB/s':<5} {row['ratio']:>27.2f}")
    if done.returncode:
        sys.exit(done.stderr.split("--- the guest's kernel log")[0][-1500:])
    results = TOP / "bench/results"
    results.mkdir(exist_ok=True)
    (results / "rsockets.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
