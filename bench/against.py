"""Thruway beside an earlier revision of itself: `cargo xtask bench against REVISION`.

Builds the revision in a worktree of its own, and lets both programs take turns at each line. A difference counts where the middle
halves of both programs' runs do not overlap.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys

from compare import GIB, TOP, free_port, run, server, workspace
from servers import Server, fio, iscsi_perf

HEAD = str(TOP / "target/release/thruway")
RUNS = int(os.environ.get("THRUWAY_BENCH_RUNS", "7"))
ONLY = os.environ.get("THRUWAY_BENCH_ONLY", "")


def build(revision):
    """The program as of a revision."""
    kept = TOP / "target/against"
    tree = kept / "tree"
    git = lambda *args: subprocess.run(["git", "-C", str(TOP), *args], check=True, capture_output=True, text=True).stdout.strip()
    name = git("rev-parse", "--short", f"{revision}^{{commit}}")
    program = kept / f"thruway-{name}"
    if not program.exists():
        with contextlib.suppress(subprocess.CalledProcessError):
            git("worktree", "remove", "--force", str(tree))
        git("worktree", "add", "--detach", str(tree), name)
        try:
            environment = {**os.environ, "CARGO_TARGET_DIR": str(kept / "build")}
            subprocess.run(["cargo", "build", "--release", "--package", "thruway"], cwd=tree, check=True, env=environment)
            shutil.copy(kept / "build/release/thruway", program)
        finally:
            git("worktree", "remove", "--force", str(tree))
    return name, str(program)


def middle(samples):
    """First quartile, median, third quartile."""
    first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, median, third


class Table:
    def __init__(self, base):
        self.name, self.programs = base[0], {"before": base[1], "now": HEAD}
        self.rows = []
        print(f"| what | unit | {base[0]} (middle half) | now (middle half) | now ÷ {base[0]} | verdict |\n|---|---|---|---|---|---|", flush=True)

    def line(self, what, unit, measure, more_is_better=True):
        """`measure` gets "before" or "now"."""
        if ONLY not in what:
            return
        samples = {"before": [], "now": []}
        for i in range(RUNS):
            for which in ("before", "now") if i % 2 else ("now", "before"):
                samples[which].append(measure(which))
        before, now = middle(samples["before"]), middle(samples["now"])
        ratio = now[1] / before[1] if before[1] else float("nan")
        verdict = "same"
        if now[0] > before[2] or now[2] < before[0]:
            verdict = "better" if (now[1] > before[1]) == more_is_better else "worse"
        shown = lambda m: f"{m[1]:,.4g} ({m[0]:,.4g} to {m[2]:,.4g})"
        print(f"| {what} | {unit} | {shown(before)} | {shown(now)} | {ratio:.2f} | {verdict} |", flush=True)
        self.rows.append({"what": what, "unit": unit, "samples": samples, "ratio": ratio, "verdict": verdict})


def fabric(table):
    def both(kind, *options):
        def measure(which):
            program, port = table.programs[which], free_port()
            with server([program, "bench", kind, "--listen", f"127.0.0.1:{port}"], port):
                out, _, _ = run([program, "bench", kind, "--connect", f"127.0.0.1:{port}", *options, "--seconds", "2", "--json"])
                row = json.loads(out)[0]
                return row["lat_us_p50"] if kind == "lat" else row["bytes_per_second"] * 8 / 1e9
        return measure
    table.line("fabric: 1 MiB RDMA writes", "Gbit/s", both("bw", "--op", "write"))
    table.line("fabric: 64 B send, half round trip", "us", both("lat", "--op", "send"), more_is_better=False)


def copies(table):
    size, small = 8 * GIB, 5_000
    with workspace() as work, contextlib.ExitStack() as stack:
        urls = {}
        for which, program in table.programs.items():
            port = free_port()
            stack.enter_context(server([program, "serve", "--quiet", "--listen", f"127.0.0.1:{port}", "--export", f"e={work}"], port))
            urls[which] = f"tw://127.0.0.1:{port}"

        def memory(provider, verify):
            def measure(which):
                command = [table.programs[which], "cp", "--quiet", "--provider", provider, "--verify", verify, "--size", str(size)]
                return size / run([*command, "/dev/zero", f"{urls[which]}/dev/null"])[1] / 1e9
            return measure
        for provider in ("iwarp", "tcp"):
            for verify in ("none", "xxh3"):
                table.line(f"cp: memory to memory, {provider}, verify {verify}", "GB/s", memory(provider, verify))

        source, target = work / "source", work / "target"
        with open(source, "wb") as out:
            for _ in range(2 * GIB >> 24):
                out.write(os.urandom(1 << 24))

        def file(*options):
            def measure(which):
                with contextlib.suppress(FileNotFoundError):
                    target.unlink()
                _, seconds, _ = run([table.programs[which], "cp", "--quiet", *options, str(source), f"{urls[which]}/e/target"])
                return 2 * GIB / seconds / 1e9
            return measure
        table.line("cp: 2 GiB on tmpfs, iwarp", "GB/s", file("--provider", "iwarp"))
        table.line("cp: 2 GiB on tmpfs, tcp", "GB/s", file("--provider", "tcp"))
        table.line("cp: 2 GiB on tmpfs, encrypted", "GB/s", file("--encrypt", "on"))
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        source.unlink()
        for i in range(small):
            directory = source / f"d{i // 500:03}"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"f{i}").write_bytes(os.urandom(1024 + i * 7919 % (15 * 1024)))

        def tree(provider):
            def measure(which):
                shutil.rmtree(target, ignore_errors=True)
                command = [table.programs[which], "cp", "-rp", "--quiet", "--provider", provider]
                return small / run([*command, f"{source}/", f"{urls[which]}/e/target"])[1]
            return measure
        for provider in ("iwarp", "tcp"):
            table.line(f"cp: {small:,} files of 1-16 KiB, {provider}", "files/s", tree(provider))


def disks(table):
    with workspace() as work:
        # One image, and a server of its own for each run: where the kernel happens to lay out memory differs by more than
        # two revisions do, and must not go to the same program each time.
        disk = work / "disk.img"
        with open(disk, "wb") as out:
            for _ in range(GIB >> 24):
                out.write(os.urandom(1 << 24))

        def served(which, protocol, measure):
            addresses = {}

            def announced(line):
                addresses.update(json.loads(line))

            command = [table.programs[which], "serve", "--json", "--block", f"d={disk}", f"--{protocol}", "127.0.0.1:0"]
            one = Server(which, command, None, announced)
            try:
                return measure(addresses[protocol][0])[0]
            finally:
                one.stop()

        for what, pattern, size, depth, jobs in [
            ("4 KiB random read, depth 1", "randread", 4096, 1, 1),
            ("4 KiB random read, depth 32", "randread", 4096, 32, 1),
            ("4 KiB random read, depth 32, 8 connections", "randread", 4096, 32, 8),
            ("4 KiB random write, depth 32", "randwrite", 4096, 32, 1),
            ("1 MiB read, depth 4", "read", 1 << 20, 4, 1),
            ("1 MiB write, depth 4", "write", 1 << 20, 4, 1),
        ]:
            by_fio = lambda address: fio(f"nbd://{address}/d", pattern, size, depth, jobs)
            table.line(f"nbd: {what}", "1/s", lambda which: served(which, "nbd", by_fio))
        for what, options, connections in [
            ("4 KiB random read, depth 32", ["-m", "32", "-b", "8", "-r"], 1),
            ("1 MiB read, depth 4", ["-m", "4", "-b", "2048"], 1),
        ]:
            by_perf = lambda address: iscsi_perf(f"iscsi://{address}/iqn.2026-11.org.thruway:d/0", options, connections)
            table.line(f"iscsi: {what}", "1/s", lambda which: served(which, "iscsi", by_perf))


def main():
    if len(sys.argv) != 2:
        sys.exit("which revision? cargo xtask bench against REVISION")
    table = Table(build(sys.argv[1]))
    for lines in (fabric, copies, disks):
        lines(table)
    out = TOP / "bench/results"
    out.mkdir(exist_ok=True)
    (out / "against.json").write_text(json.dumps({"base": table.name, "runs": RUNS, "rows": table.rows}, indent=1))


if __name__ == "__main__":
    main()
