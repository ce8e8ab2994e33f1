"""Copies over paths with delay, a rate and losses, in a guest with netem, by thruway and by others.

Outside the guest this starts one guest per path, gathers what is printed there, one JSON object a
line, and prints a table. Two hosts, a and b, are joined by a router that delays, limits and loses.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time

TOP = pathlib.Path(__file__).resolve().parent.parent
THRUWAY = os.environ.get("THRUWAY_BENCH_PROGRAM", str(TOP / "target/release/thruway"))
RUNS = int(os.environ.get("THRUWAY_BENCH_RUNS", "3"))
MIB = 1 << 20
SERVER = "10.0.2.2"

# Rate in Mbit/s, round trip in ms, loss in percent (each way), file in MiB. A guest's processor keeps up with 500 Mbit/s.
PATHS = [
    (500, 0, 0, 256), (500, 1, 0, 256), (500, 10, 0, 256), (500, 50, 0, 256), (500, 100, 0, 256),
    (500, 50, 0, 512), (200, 50, 0, 256), (200, 50, 0, 512), (100, 50, 0, 256), (500, 50, 0.01, 256), (500, 50, 0.1, 256),
]
QUICK = [(500, 50, 0, 256)]
PROGRAMS = ["thruway iwarp", "thruway tcp", "thruway iwarp pull", "thruway tcp pull", "gridftp", "gridftp tuned", "rsync", "rclone", "one tcp stream"]


def sh(command, **more):
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True, **more)


def on(host, *command):
    return ["ip", "netns", "exec", host, *map(str, command)]


def lay_out(rate, rtt, loss, mtu):
    """Two hosts and a router between them that holds one bandwidth-delay product of packets beside those in flight."""
    for host in "arb":
        sh(f"ip netns add {host}; ip -n {host} link set lo up")
    sh("ip netns exec r sysctl -qw net.ipv4.ip_forward=1")
    for host, net in (("a", 1), ("b", 2)):
        sh(f"ip link add eth0 netns {host} mtu {mtu} type veth peer name {host} netns r mtu {mtu}")
        for where, device, addr in ((host, "eth0", f"10.0.{net}.2/24"), ("r", host, f"10.0.{net}.1/24")):
            # A segment is a packet on this path: losses and queues count packets.
            sh(f"ip -n {where} link set dev {device} gso_max_segs 1 gro_max_size {mtu}")
            sh(f"ip -n {where} addr add {addr} dev {device}; ip -n {where} link set dev {device} up")
        sh(f"ip -n {host} route add default via 10.0.{net}.1")
        with open("/etc/hosts", "a") as hosts:  # GridFTP wants a name for every address
            hosts.write(f"10.0.{net}.2 {host}\n")
    in_flight = rate * 1e6 / 8 * rtt / 1e3 / mtu
    limit = int(2 * in_flight + max(in_flight, rate * 1e6 / 8 * 0.005 / mtu)) + 50
    for device in "ab":
        sh(f"ip netns exec r tc qdisc add dev {device} root netem rate {rate}mbit limit {limit}"
           + (f" delay {rtt / 2}ms" if rtt else "") + (f" loss {loss}%" if loss else ""))


class Arrivals(threading.Thread):
    """Watches what arrives at a host, for how soon the path is full."""

    def __init__(self, host):
        super().__init__(daemon=True)
        # /proc/PID/net shows the namespace of the process, once it has entered it.
        self.keeper = subprocess.Popen(on(host, "sleep", "1000"))
        while pathlib.Path(f"/proc/{self.keeper.pid}/comm").read_text().strip() != "sleep":
            time.sleep(0.002)
        self.path = f"/proc/{self.keeper.pid}/net/dev"
        self.samples, self.done = [], threading.Event()

    def read(self):
        for line in open(self.path):
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[0])
        return 0

    def run(self):
        while not self.done.wait(0.005):
            self.samples.append((time.monotonic(), self.read()))

    def stop(self):
        self.done.set()
        self.join()
        self.keeper.kill()
        self.keeper.wait()

    def full_after(self, rate, window):
        """Seconds from the first bytes of weight until nine tenths of the rate had come within one window."""
        base, began = 0, None
        for at, bytes in self.samples:
            if began is None:
                began = at if bytes - self.samples[0][1] > 50_000 else None
                continue
            while self.samples[base][0] < at - window:
                base += 1
            span = at - self.samples[base][0]
            if span > 0.8 * window and (bytes - self.samples[base][1]) / span > 0.9 * rate:
                return at - began
        return None


@contextlib.contextmanager
def server(port, *command):
    process = subprocess.Popen(on("b", *command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1000):
            if port is None or f":{port} " in sh(f"ip netns exec b ss -Hltn sport = :{port}").stdout:
                break
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def peak_of(process):
    """MiB of resident memory a process had at its height; ip netns exec becomes the command."""
    with contextlib.suppress(OSError):
        for line in open(f"/proc/{process.pid}/status"):
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return None


def measure(program, rate, rtt, size):
    """Runs one copy; returns seconds and more."""
    source, target = "/tmp/source", "/tmp/target/copy"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)
    if program.startswith("thruway"):
        serve = (7117, THRUWAY, "serve", "--quiet", "--anonymous", "--listen", f"{SERVER}:7117",
                 "--export", "e=/tmp")
        ends = [f"tw://{SERVER}/e/source", target] if program.endswith("pull") else [source, f"tw://{SERVER}/e/target/copy"]
        client = [THRUWAY, "cp", "--quiet", "--encrypt", "off", "--provider", program.split()[1], *ends]
    elif program.startswith("gridftp"):
        serve = (2811, "globus-gridftp-server", "-aa", "-anonymous-user", "nobody", "-daemon",
                 "-p", 2811, "-control-interface", SERVER, "-data-interface", SERVER)
        tuned = []
        if program.endswith("tuned"):
            streams = 8
            window = max(int(2 * rate * 1e6 / 8 * rtt / 1e3 / streams), MIB)
            tuned = ["-p", streams, "-tcp-bs", window, "-bs", MIB]
        client = ["globus-url-copy", *tuned, f"file://{source}", f"ftp://anonymous:x@{SERVER}:2811{target}"]
    elif program == "rsync":
        pathlib.Path("/tmp/rsyncd.conf").write_text(
            "use chroot = no\n[e]\npath = /tmp/target\nread only = no\nuid = root\ngid = root\n")
        serve = (873, "rsync", "--daemon", "--no-detach", "--config=/tmp/rsyncd.conf", "--port=873")
        client = ["rsync", "--inplace", "--whole-file", source, f"rsync://{SERVER}/e/copy"]
    elif program == "rclone":
        serve = (8080, "rclone", "serve", "webdav", "/tmp/target", "--addr", f"{SERVER}:8080")
        client = ["rclone", "copyto", source, ":webdav:copy", "--webdav-url", f"http://{SERVER}:8080"]
    else:
        serve = (5201, "iperf3", "-s", "-1")
        client = ["iperf3", "-c", SERVER, "-n", size * MIB]
    with server(*serve) as daemon:
        watch = Arrivals("a" if program.endswith("pull") else "b")
        watch.start()
        began = time.monotonic()
        process = subprocess.Popen(on("a", *client), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        _, error = process.communicate(timeout=900)
        seconds = time.monotonic() - began
        watch.stop()
        daemon_peak = peak_of(daemon)
    if process.returncode:
        print(f"{program}: {error}", file=sys.stderr)
        return None
    if program != "one tcp stream" and os.stat(target).st_size != size * MIB:
        print(f"{program}: a copy of the wrong size", file=sys.stderr)
        return None
    bytes = rate * 1e6 / 8
    full = watch.full_after(bytes, max(rtt / 1e3, 0.02))
    return {"seconds": seconds, "share": size * MIB / seconds / bytes, "full_after": full, "daemon_mib": daemon_peak}


def inside(rate, rtt, loss, size, mtu, programs, runs):
    lay_out(rate, rtt, loss, mtu)
    os.makedirs("/tmp/target")
    os.chmod("/tmp/target", 0o777)
    with open("/tmp/source", "wb") as f:
        for _ in range(size):
            f.write(os.urandom(MIB))
    for _ in range(runs):
        for program in programs:
            try:
                result = measure(program, rate, rtt, size)
            except Exception as e:  # noqa: BLE001 - the others go on
                print(f"{program}: {e}", file=sys.stderr)
                result = None
            row = {"rate": rate, "rtt": rtt, "loss": loss, "size": size, "mtu": mtu, "program": program, "result": result}
            print(json.dumps(row), flush=True)


def main():
    if sys.argv[1:2] == ["--inside"]:
        return inside(**json.loads(sys.argv[2]))
    names = sys.argv[1:]
    paths = QUICK if "quick" in names else PATHS
    if chosen := os.environ.get("THRUWAY_BENCH_PATHS"):
        paths = [tuple(float(n) if "." in n else int(n) for n in path.split(",")) for path in chosen.split()]
    programs = [p for p in PROGRAMS if not os.environ.get("THRUWAY_BENCH_ONLY") or os.environ["THRUWAY_BENCH_ONLY"] in p]
    mtu = int(os.environ.get("THRUWAY_BENCH_MTU", "9000"))
    report = []
    print(f"{'Mbit/s':>7} {'ms':>4} {'loss %':>6} {'MiB':>5}  {'program':<18} {'seconds':>8} {'share':>6} {'full after':>10} {'daemon MiB':>10}")
    for rate, rtt, loss, size in paths:
        params = json.dumps({"rate": rate, "rtt": rtt, "loss": loss, "size": size, "mtu": mtu, "programs": programs, "runs": RUNS})
        command = f"exec python3 {TOP}/bench/wide_area.py --inside '{params}'"
        done = subprocess.run(["cargo", "xtask", "vm", "run", "--limit", "3000", "--", command], cwd=TOP,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        said = done.stderr.split("--- the guest's kernel log")[0].strip()
        if said:
            print(said[-1500:], file=sys.stderr)
        for program in programs:
            results = [line["result"] for line in lines if line["program"] == program and line["result"]]
            if not results:
                print(f"{rate:>7} {rtt:>4} {loss:>6} {size:>5}  {program:<18} failed", flush=True)
                continue
            middle = {}
            for key in results[0]:
                known = [r[key] for r in results if r[key] is not None]
                middle[key] = statistics.median(known) if known else None
            report.append({"rate_mbit": rate, "rtt_ms": rtt, "loss_percent": loss, "size_mib": size, "mtu": mtu,
                           "program": program, "runs": len(results), **middle, "samples": results})
            full = f"{middle['full_after'] * 1e3 / rtt:.1f} rtt" if middle["full_after"] and rtt else (
                f"{middle['full_after'] * 1e3:.0f} ms" if middle["full_after"] else "never")
            peak = f"{middle['daemon_mib']:.0f}" if middle["daemon_mib"] else ""
            print(f"{rate:>7} {rtt:>4} {loss:>6} {size:>5}  {program:<18} {middle['seconds']:>8.2f} {middle['share']:>6.3f} {full:>10} {peak:>10}", flush=True)
    results = TOP / "bench/results"
    results.mkdir(exist_ok=True)
    (results / "wide_area.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
