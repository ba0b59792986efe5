"""Time and memory of statements in a new interpreter."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BYTECODE = str(Path(__file__).parent.parent / "build" / "bytecode")
"""Cache of compiled modules, as in an installed package, whatever the environment says."""

# Memory comes from the kernel (smaps_rollup), not from Python: it is what the node loses.
_PROGRAM = """
import sys, time
started_at = time.perf_counter()
exec(sys.argv[1])
duration_s = time.perf_counter() - started_at
import json
sizes = dict(line.split(":") for line in open("/proc/self/smaps_rollup").readlines()[1:])
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]
kib = lambda name: int(sizes[name].split()[0])
print(json.dumps([duration_s, kib("Rss") / 1024, kib("Pss") / 1024, int(peak) / 1024]))
"""


@dataclass(frozen=True, slots=True)
class ProcessCost:
    duration_s: float
    rss_mib: float
    pss_mib: float
    peak_mib: float


def measure_cost(statements: str, *, times: int = 5) -> ProcessCost:
    """Return the fastest of several runs; their memory hardly differs."""
    return min((_run_once(statements) for _ in range(times)), key=lambda cost: cost.duration_s)


def _run_once(statements: str) -> ProcessCost:
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, statements],
        env={**environment, "PYTHONPYCACHEPREFIX": BYTECODE},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return ProcessCost(*json.loads(done.stdout.splitlines()[-1]))
