"""What all comparisons have in common: the program under test, the number of runs, and the size of a smoke run.

`THRUWAY_BENCH_SMOKE=1` has each comparison run once with little data: it shows that the comparison works, and its figures say nothing.
"""

import os
import pathlib

TOP = pathlib.Path(__file__).resolve().parent.parent
THRUWAY = os.environ.get("THRUWAY_BENCH_PROGRAM", str(TOP / "target/release/thruway"))
SMOKE = os.environ.get("THRUWAY_BENCH_SMOKE", "") not in ("", "0")


def sized(full, smoke):
    """`full`, or in a smoke run `smoke`."""
    return smoke if SMOKE else full


RUNS = int(os.environ.get("THRUWAY_BENCH_RUNS", sized("5", "1")))
SECONDS = float(os.environ.get("THRUWAY_BENCH_SECONDS", sized("2", "0.1")))
