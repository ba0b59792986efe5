"""Benchmark of importing the agent's modules, and CPU time of commands that need no cluster.

For comparison: the bare interpreter, and the official Kubernetes client, which the agent does not
use.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from bench.interpreter import BYTECODE, ProcessCost, measure_cost
from bench.result import Result
from treenail_lab.lifetime.interpreter import build_python_path

STATUS = "import treenail.cli.node.main, treenail.cli.node.status"
AGENT = "import treenail.cli.node.main, treenail.cli.node.run"
OFFICIAL = "import kubernetes.client; kubernetes.client.CoreV1Api"

COMMANDS = ("--help", "status", "history", "drift", "why")
RUNS = 5


def measure(_seconds: float) -> Iterator[Result]:
    yield from _build_results("bare interpreter", measure_cost("pass"))
    yield from _build_results("modules of treenail status", measure_cost(STATUS))
    yield from _build_results("modules of the agent", measure_cost(AGENT), max_rss_mib=32.0)
    yield from _build_results("official client alone", measure_cost(OFFICIAL))
    with tempfile.TemporaryDirectory() as root:
        yield Result("bare interpreter: CPU", "ms", measure_cpu_ms("-c", "pass"))
        for name in COMMANDS:
            words = [name] if name.startswith("-") else [name, "--root", root]
            spent_ms = measure_cpu_ms("-m", "treenail", *words)
            yield Result(f"treenail {name}: CPU", "ms", spent_ms, 100.0)


def measure_cpu_ms(*words: str) -> float:
    """Return the CPU time of the interpreter with these arguments, the least of several runs.

    It runs without site, whose time depends on the packages of the virtual environment.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": build_python_path(),
        "PYTHONPYCACHEPREFIX": BYTECODE,
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    spent: list[float] = []
    for _ in range(RUNS):
        process = subprocess.Popen(
            [sys.executable, "-S", "-P", *words],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        with process.stderr:
            text = process.stderr.read()
        _, process.returncode, usage = os.wait4(process.pid, 0)
        assert b"Traceback" not in text, text
        assert b"No module" not in text, text
        spent.append(usage.ru_utime + usage.ru_stime)
    return min(spent) * 1000


def _build_results(
    name: str, found: ProcessCost, *, max_rss_mib: float | None = None
) -> Iterator[Result]:
    yield Result(f"{name}: import", "ms", found.duration_s * 1000)
    yield Result(f"{name}: RSS", "MiB", found.rss_mib, max_rss_mib)
    yield Result(f"{name}: PSS", "MiB", found.pss_mib)
