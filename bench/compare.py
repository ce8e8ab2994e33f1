"""Runs thruway beside other programs, alternating, and prints medians and ratios."""

import contextlib
import ctypes
import json
import mmap
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from settings import RUNS, SECONDS, THRUWAY, TOP, sized

GIB = 1 << 30
rows = []


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(port):
    for _ in range(400):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    sys.exit(f"nothing listens at port {port}")


def descendants(pid):
    found = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += descendants(int(child))
    return found


def cpu_of(pid):
    """Processor seconds of a process, its children and those it has waited for."""
    ticks = 0
    for p in descendants(pid):
        with contextlib.suppress(OSError):
            fields = pathlib.Path(f"/proc/{p}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += sum(int(f) for f in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(args, port=None):
    process = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if port:
            wait_for(port)
        yield process
    finally:
        process.terminate()
        process.wait()


def run(args, **more):
    """Runs a client; returns its output, seconds, and processor seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(args, capture_output=True, text=True, **more)
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, args))}: {done.stderr or done.stdout}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, seconds, cpu


def version(args):
    done = subprocess.run(args, capture_output=True, text=True)
    text = (done.stdout + done.stderr).strip()
    found = re.search(r"\d+\.\d+[\w.+-]*", text)
    return found.group(0) if found else "?"


def compare(name, ours, peers, unit, better, aim=None):
    """Alternates the contenders and adds a row for each peer."""
    results = {who: [] for who in [ours[0], *(p[0] for p in peers)]}
    for _ in range(RUNS):
        for who, measure in [ours, *peers]:
            results[who].append(measure())
    mine = statistics.median(results[ours[0]])
    for who, _ in peers:
        theirs = statistics.median(results[who])
        ratio = mine / theirs if better == "more" else theirs / mine
        rows.append({
            "comparison": name, "thruway": mine, "peer": who, "peer_value": theirs, "unit": unit,
            "ratio": ratio, "aim": aim, "runs": RUNS, "samples": results,
        })
        print(f"{name:<34} {mine:>10.3f} {theirs:>10.3f} {unit:<7} {ratio:>6.2f} x {'(aim ' + str(aim) + ')' if aim else '':<11} {who}", flush=True)


def bench(*args):
    out, _, _ = run([THRUWAY, "bench", *args, "--json"])
    return json.loads(out)[0]


def stream():
    def iperf():
        port = free_port()
        with server(["iperf3", "-s", "-1", "-p", str(port)]):
            for _ in range(100):
                out = subprocess.run(["iperf3", "-c", "127.0.0.1", "-p", str(port), "-t", str(max(1, int(SECONDS))), "-C", "cubic", "-J"],
                                     capture_output=True, text=True)
                # A client that comes before the server says so in its report, with or without a status.
                received = json.loads(out.stdout or "{}").get("end", {}).get("sum_received")
                if received:
                    return received["bits_per_second"] / 1e9
                time.sleep(0.05)
        sys.exit("iperf3 does not run")

    peer = f"iperf3 {version(['iperf3', '--version'])}"
    for crc, aim in (("off", 0.9), ("on", 0.6)):
        def ours(crc=crc):
            port = free_port()
            with server([THRUWAY, "bench", "bw", "--listen", f"127.0.0.1:{port}", "--crc", crc], port):
                row = bench("bw", "--connect", f"127.0.0.1:{port}", "--op", "write", "--crc", crc, "--seconds", str(SECONDS))
                return row["bytes_per_second"] * 8 / 1e9
        compare(f"1 MiB write, CRC {crc}", ("thruway", ours), [(peer, iperf)], "Gbit/s", "more", aim)


def one_copy(memory):
    """MB/s of process_vm_writev alone, in pieces of 64 KiB, into another process: what a write in one copy could have at most."""

    class Piece(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]

    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_writev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong,
                                       ctypes.c_ulong]
    libc.process_vm_writev.restype = ctypes.c_ssize_t

    def touched():
        area = mmap.mmap(-1, memory, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.write(b"x" * memory)
        return area, ctypes.addressof(ctypes.c_char.from_buffer(area))

    target, to = touched()
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        # Pages of its own.
        target.seek(0)
        target.write(b"y" * memory)
        os.write(tell, b"r")
        signal.pause()
    os.read(ready, 1)
    source, of = touched()
    # A mebibyte for each call, so that the interpreter costs nothing of note.
    calls = []
    for at in range(0, memory, 1 << 20):
        pieces = [(Piece * 16)(*(Piece(base + at + i * 65536, 65536) for i in range(16))) for base in (of, to)]
        calls.append(pieces)
    start, done = time.monotonic(), 0
    while time.monotonic() - start < SECONDS / 2:
        for local, remote in calls:
            moved = libc.process_vm_writev(child, ctypes.byref(local), 16, ctypes.byref(remote), 16, 0)
            if moved != 1 << 20:
                sys.exit(f"process_vm_writev: {os.strerror(ctypes.get_errno())}")
            done += moved
    rate = done / (time.monotonic() - start) / 1e6
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    return rate


def shm():
    """Two processes of one host, through shared memory."""

    def ours(test, size, figure, op="send", more=()):
        port = free_port()
        with server([THRUWAY, "bench", test, "--listen", f"127.0.0.1:{port}", "--provider", "auto"], port):
            row = bench(test, "--connect", f"127.0.0.1:{port}", "--provider", "shm", "--op", op, "--size", size,
                        "--seconds", str(SECONDS), *more)
            return row[figure]

    def ucx(test, size, count, figure):
        port = free_port()
        env = {**os.environ, "UCX_TLS": "posix,self"}
        with server(["env", "UCX_TLS=posix,self", "ucx_perftest", "-p", str(port)]):
            for _ in range(100):
                done = subprocess.run(["ucx_perftest", "127.0.0.1", "-p", str(port), "-t", test, "-s", str(size),
                                       "-n", str(count)], capture_output=True, text=True, env=env)
                final = [l for l in done.stdout.splitlines() if l.startswith("Final:")]
                if final:
                    return float(final[0].split()[figure])
                time.sleep(0.05)
        sys.exit("ucx_perftest does not run")

    def iperf(size):
        port = free_port()
        with server(["iperf3", "-s", "-1", "-p", str(port)]):
            for _ in range(100):
                out = subprocess.run(["iperf3", "-c", "127.0.0.1", "-p", str(port), "-t", str(max(1, int(SECONDS))), "-l", size, "-J"],
                                     capture_output=True, text=True)
                received = json.loads(out.stdout or "{}").get("end", {}).get("sum_received")
                if received:
                    return received["bits_per_second"] / 8e6
                time.sleep(0.05)
        sys.exit("iperf3 does not run")

    peer = f"ucx {version(['ucx_info', '-v'])}, posix"
    tcp = f"iperf3 {version(['iperf3', '--version'])}, TCP"
    compare("64 B send, half round trip", ("thruway", lambda: ours("lat", "64", "lat_us_p50")),
            [(peer, lambda: ucx("tag_lat", 64, sized(1000000, 1000), 2))], "us", "less", 1.0)
    for size, count in (("64K", sized(100000, 1000)), ("1M", sized(10000, 100))):
        length = int(size[:-1]) << (20 if size[-1] == "M" else 10)
        compare(f"{size} send", ("thruway", lambda size=size: ours("bw", size, "bytes_per_second") / 1e6),
                [(peer, lambda length=length, count=count: ucx("tag_bw", length, count, 6) * 1.048576),
                 (tcp, lambda size=size: iperf(size))], "MB/s", "more", 1.5)
    for memory in (1, 64):
        compare(f"64K write, {memory} MiB of memory",
                ("thruway", lambda memory=memory: ours("bw", "64K", "bytes_per_second", "write",
                                                       ("--memory", f"{memory}M")) / 1e6),
                [("process_vm_writev alone", lambda memory=memory: one_copy(memory << 20))], "MB/s", "more")


def latency():
    def ours():
        port = free_port()
        with server([THRUWAY, "bench", "lat", "--listen", f"127.0.0.1:{port}"], port):
            return bench("lat", "--connect", f"127.0.0.1:{port}", "--op", "send", "--seconds", str(SECONDS))["lat_us_p50"]

    def ucx():
        port = free_port()
        env = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
        with server(["env", "UCX_TLS=tcp", "UCX_NET_DEVICES=lo", "ucx_perftest", "-p", str(port), "-t", "tag_lat"]):
            for _ in range(100):
                done = subprocess.run(["ucx_perftest", "127.0.0.1", "-p", str(port), "-t", "tag_lat", "-s", "64",
                                       "-n", str(sized(100000, 1000))], capture_output=True, text=True, env=env)
                final = [l for l in done.stdout.splitlines() if l.startswith("Final:")]
                if final:
                    return float(final[0].split()[2])
                time.sleep(0.05)
        sys.exit("ucx_perftest does not run")

    def fabric():
        port = free_port()
        with server(["fi_pingpong", "-p", "tcp", "-e", "msg", "-B", str(port), "-I", str(sized(50000, 500)), "-S", "64"]):
            for _ in range(100):
                done = subprocess.run(["fi_pingpong", "-p", "tcp", "-e", "msg", "-P", str(port), "-I", str(sized(50000, 500)), "-S", "64", "127.0.0.1"],
                                      capture_output=True, text=True)
                line = [l.split() for l in done.stdout.splitlines() if l.startswith("64")]
                if line:
                    return float(line[0][6])
                time.sleep(0.05)
        sys.exit("fi_pingpong does not run")

    compare("64 B send, half round trip", ("thruway", ours),
            [(f"ucx {version(['ucx_info', '-v'])}", ucx), (f"libfabric {version(['fi_info', '--version'])}", fabric)],
            "us", "less", 1.0)


@contextlib.contextmanager
def gridftp():
    port = free_port()
    args = ["globus-gridftp-server", "-aa", "-daemon", "-p", str(port)]
    if not os.geteuid():
        # As root it wants somebody to become.
        args += ["-anonymous-user", "nobody"]
    with server(args, port) as process:
        yield port, process


@contextlib.contextmanager
def daemon(directory):
    port = free_port()
    with server([THRUWAY, "serve", "--quiet", "--listen", f"127.0.0.1:{port}", "--export", f"e={directory}"], port) as process:
        yield f"tw://127.0.0.1:{port}", process


def memory():
    size = sized(16 * GIB, GIB >> 4)
    costs = {}

    def note(who, cpu):
        costs.setdefault(who, []).append(cpu / size * 1e9)

    with daemon("/tmp") as (url, ours_process), gridftp() as (port, peer_process):
        def ours(provider, verify):
            def measure():
                before = cpu_of(ours_process.pid)
                _, seconds, cpu = run([THRUWAY, "cp", "--quiet", "--provider", provider, "--verify", verify, "--size", str(size), "/dev/zero", f"{url}/dev/null"])
                note(f"{provider}, {verify}", cpu + cpu_of(ours_process.pid) - before)
                return size / seconds / 1e9
            return measure

        def peer():
            before = cpu_of(peer_process.pid)
            _, seconds, cpu = run(["globus-url-copy", "-len", str(size), "file:///dev/zero", f"ftp://127.0.0.1:{port}/dev/null"])
            note("peer", cpu + cpu_of(peer_process.pid) - before)
            return size / seconds / 1e9

        who = f"GridFTP {version(['globus-url-copy', '-version'])}"
        # GridFTP verifies nothing; ours is shown with and without.
        for provider in ("iwarp", "tcp"):
            for verify in ("none", "xxh3"):
                what = f"{provider}, {verify}"
                compare(f"/dev/zero to /dev/null, {what}", (what, ours(provider, verify)), [(who, peer)], "GB/s", "more", 2.0)
                mine, theirs = statistics.median(costs[what]), statistics.median(costs["peer"])
                rows.append({"comparison": f"CPU per byte, {what}", "thruway": mine, "peer": who, "peer_value": theirs,
                             "unit": "ns/B", "ratio": theirs / mine, "aim": 1.0})
                print(f"{'  CPU of both ends, ' + what:<34} {mine:>10.3f} {theirs:>10.3f} {'ns/B':<7} {theirs / mine:>6.2f} x (aim 1.0)   {who}")


@contextlib.contextmanager
def workspace():
    base = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 14 * GIB else None
    with tempfile.TemporaryDirectory(prefix="thruway-bench-", dir=base) as path:
        os.chmod(path, 0o777)
        yield pathlib.Path(path)


def file():
    size = sized(4 * GIB, GIB >> 5)
    with workspace() as work, daemon(work) as (url, _), gridftp() as (port, _), sshd(work) as scp:
        source, target = work / "source", work / "target"
        with open(source, "wb") as out:
            for _ in range(size >> 24):
                out.write(os.urandom(1 << 24))

        def timed(args):
            # Both write fresh pages: the target of the run before is gone.
            with contextlib.suppress(FileNotFoundError):
                target.unlink()
            _, seconds, _ = run(args)
            if target.stat().st_size != size:
                sys.exit(f"{args[0]} made a file of another size")
            return size / seconds / 1e9

        def ours(*extra):
            return lambda: timed([THRUWAY, "cp", "--quiet", *extra, str(source), f"{url}/e/target"])

        timed([THRUWAY, "cp", "--quiet", str(source), f"{url}/e/target"])
        who = f"GridFTP {version(['globus-url-copy', '-version'])}"
        peer = (who, lambda: timed(["globus-url-copy", f"file://{source}", f"ftp://127.0.0.1:{port}{target}"]))
        for provider in ("iwarp", "tcp"):
            compare(f"4 GiB tmpfs to tmpfs, {provider}", (provider, ours("--provider", provider)), [peer], "GB/s", "more", 1.5)
        peer = (f"scp {version(['ssh', '-V'])}", lambda: timed([*scp, str(source), f"127.0.0.1:{target}"]))
        compare("4 GiB encrypted", ("thruway", ours("--encrypt", "on")), [peer], "GB/s", "more", 5.0)


@contextlib.contextmanager
def sshd(work):
    """An ssh daemon of our own, and the scp command that uses it."""
    port = free_port()
    keys = work / "ssh"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    shutil.copy(keys / "user.pub", keys / "authorized")
    os.chmod(keys / "authorized", 0o600)
    os.makedirs("/run/sshd", exist_ok=True)
    options = {"HostKey": keys / "host", "AuthorizedKeysFile": keys / "authorized", "StrictModes": "no", "PidFile": "none",
               "Port": port, "ListenAddress": "127.0.0.1", "PermitRootLogin": "yes", "Subsystem": "sftp internal-sftp"}
    args = ["/usr/sbin/sshd", "-D", "-f", "/dev/null"]
    for key, value in options.items():
        args += ["-o", f"{key}={value}"]
    with server(args, port):
        yield ["scp", "-q", "-P", str(port), "-i", str(keys / "user"), "-o", "StrictHostKeyChecking=no",
               "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]


def small():
    count = sized(20_000, 600)
    with workspace() as work, daemon(work) as (url, _):
        source, target = work / "source", work / "target"
        state = 1
        for i in range(count):
            directory = source / f"d{i // 500:03}"
            directory.mkdir(parents=True, exist_ok=True)
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            (directory / f"f{i}").write_bytes(os.urandom(1024 + state % (15 * 1024)))
        port = free_port()
        config = work / "rsyncd.conf"
        config.write_text(f"port = {port}\naddress = 127.0.0.1\nuse chroot = no\n[e]\npath = {work}\nread only = no\nuid = {os.getuid()}\ngid = {os.getgid()}\n")

        def timed(args):
            shutil.rmtree(target, ignore_errors=True)
            _, seconds, _ = run(args)
            if sum(len(f) for _, _, f in os.walk(target)) != count:
                sys.exit(f"{args[0]} did not copy every file")
            return count / seconds

        with server(["rsync", "--daemon", "--no-detach", f"--config={config}"], port):
            peer = (f"rsync {version(['rsync', '--version'])}", lambda: timed(["rsync", "-a", "--whole-file", f"{source}/", f"rsync://127.0.0.1:{port}/e/target/"]))
            for provider in ("iwarp", "tcp"):
                ours = lambda p=provider: timed([THRUWAY, "cp", "-rp", "--quiet", "--provider", p, f"{source}/", f"{url}/e/target"])
                compare(f"20,000 files of 1-16 KiB, {provider}", (provider, ours), [peer], "files/s", "more", 3.0)


def disk():
    """One file from the disk that holds the temporary directory to the same disk, none of it cached."""
    size = sized(2 * GIB, GIB >> 5)
    base = os.environ.get("THRUWAY_BENCH_DISK", "/var/tmp")
    with tempfile.TemporaryDirectory(prefix="thruway-bench-", dir=base) as path, daemon(path) as (url, _):
        source, target = pathlib.Path(path) / "source", pathlib.Path(path) / "target"
        with open(source, "wb") as out:
            for _ in range(size >> 24):
                out.write(os.urandom(1 << 24))
            out.flush()
            os.fsync(out.fileno())

        def uncache():
            with open(source, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with contextlib.suppress(FileNotFoundError):
                target.unlink()

        def ours(*extra):
            def measure():
                uncache()
                _, seconds, _ = run([THRUWAY, "cp", "--quiet", *extra, str(source), f"{url}/e/target"])
                return size / seconds / 1e9
            return measure

        def fio(kind):
            def measure():
                uncache()
                out, _, _ = run(["fio", "--name=f", f"--filename={source if kind == 'read' else target}", f"--rw={kind}", f"--size={size}", "--bs=1M",
                                 "--iodepth=16", "--ioengine=io_uring", "--direct=1", "--end_fsync=1", "--output-format=json"])
                return json.loads(out)["jobs"][0][kind]["bw_bytes"] / 1e9
            return measure

        name = f"fio {version(['fio', '--version'])}"
        compare("2 GiB disk to disk", ("thruway", ours()), [(f"{name} read", fio("read")), (f"{name} write", fio("write"))], "GB/s", "more", 0.9)
        for direct in ("on", "off"):
            compare(f"  with --direct {direct}", ("thruway", ours("--direct", direct)), [("thruway --direct auto", ours())], "GB/s", "more")


ALL = {"disk": disk, "stream": stream, "latency": latency, "shm": shm, "memory": memory, "file": file, "small": small}


def main():
    names = sys.argv[1:] or list(ALL)
    for name in names:
        if name not in ALL:
            sys.exit(f"no comparison '{name}'; there are: {', '.join(ALL)}")
    print(f"{'':<34} {'thruway':>10} {'peer':>10} {'unit':<7} {'ratio':>8}")
    for name in names:
        ALL[name]()
    results = TOP / "bench/results"
    results.mkdir(exist_ok=True)
    path = results / time.strftime("%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps({"machine": " ".join(os.uname()), "cores": os.cpu_count(), "rows": rows}, indent=1))
    print(f"written to {path.relative_to(TOP)}")


if __name__ == "__main__":
    main()
