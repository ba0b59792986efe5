"""Statements run by an interpreter of their own, and what they cost it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BYTECODE = str(Path(__file__).parent.parent / "build" / "bytecode")
"""Where modules are kept compiled, as a package has them, whatever this shell says of that."""

# Memory is read from outside of Python's own bookkeeping: what the kernel says is what a node pays.
_PROGRAM = """
import sys, time
begun = time.perf_counter()
exec(sys.argv[1])
taken_s = time.perf_counter() - begun
import json
sizes = dict(line.split(":") for line in open("/proc/self/smaps_rollup").readlines()[1:])
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]
kib = lambda name: int(sizes[name].split()[0])
print(json.dumps([taken_s, kib("Rss") / 1024, kib("Pss") / 1024, int(peak) / 1024]))
"""


@dataclass(frozen=True, slots=True)
class Cost:
    taken_s: float
    rss_mib: float
    pss_mib: float
    peak_mib: float


def cost(statements: str, *, times: int = 5) -> Cost:
    """The fastest of so many runs; memory hardly differs between them."""
    return min((_cost(statements) for _ in range(times)), key=lambda cost: cost.taken_s)


def _cost(statements: str) -> Cost:
    others = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, statements],
        env={**others, "PYTHONPYCACHEPREFIX": BYTECODE},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return Cost(*json.loads(done.stdout.splitlines()[-1]))
