"""Run the benchmarks: a table on the terminal, and build/bench.json.

    make bench
    make bench ARGS="imports decode"
    make bench ARGS="node --seconds 10"

A benchmark is a module beside this one, named in MODULES, with ``measure(seconds)``: an iterator of
results. It measures the program as users run it, in its own process where it measures memory.

Times and memory are also recorded as ratios to a baseline of the same run. The column "change"
compares with docs/records/bench.json, by these ratios where there are any. ``--record`` replaces
the figures there, and `make reports` writes docs/what-it-costs.md of them.
"""

import argparse
import importlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.baseline import Baseline, measure_baseline
from bench.committed import COMMITTED, compare, read_committed, write_committed
from bench.result import Result
from tools.revision import find_revision
from treenail_lab.lifetime import fork_server

MODULES = (
    "imports",
    "decode",
    "node",
    "render",
    "generate",
    "serve",
    "hosted",
    "rollout",
    "scale",
    "watches",
    "once",
    "drift",
    "health",
    "build",
    "builds",
    "install_build",
    "handover",
    "layer",
    "install",
)
ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description="Measure treenail.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(MODULES)} (default: all)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of measurements at rest (default: 60)"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="replace the committed figures, which later runs are compared with",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench.json")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(MODULES)):
        parser.error(f"unknown benchmark: {', '.join(unknown)}")

    # Users have no process to fork from: its modules would be in every figure.
    os.environ[fork_server.SWITCH] = "no"
    records: list[Mapping[str, object]] = []
    committed = read_committed()
    print(f"{'benchmark':<52} {'value':>10} {'unit':<8} {'target':>8} {'verdict':<7} {'change':>7}")
    for module in arguments.names or MODULES:
        for record, result in measure_module(module, arguments.seconds):
            print(format_row(result, compare(record, committed)), flush=True)
            records.append(record)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(
        json.dumps({"machine": describe_machine(), "results": records}, indent=2) + "\n"
    )
    print(f"\nwrote {arguments.output}")
    if arguments.record:
        write_committed(records)
        print(f"wrote {COMMITTED}; now run: make reports")


def measure_module(module: str, seconds: float) -> Iterator[tuple[Mapping[str, object], Result]]:
    """Measure, with a baseline of the same time; yield each figure as record and as result."""
    baseline = measure_baseline()
    names: Counter[str] = Counter()
    for result in importlib.import_module(f"bench.{module}").measure(seconds):
        names[result.name] += 1
        key = f"{module}: {result.name.strip()}: {names[result.name]}"
        yield format_record(result, module, key, baseline), result


def format_row(result: Result, change: float | None = None) -> str:
    """Format a line of the table; ``change`` is the quotient of this and the committed figure."""
    target = "" if result.at_most is None else f"<= {result.at_most:g}"
    compared = "" if change is None else f"x{change:.2f}"
    return (
        f"{result.name:<52} {result.value:>10.3g} {result.unit:<8} {target:>8} "
        f"{result.verdict:<7} {compared:>7}"
    ).rstrip()


def format_record(
    result: Result, module: str, key: str, baseline: Baseline
) -> Mapping[str, object]:
    ratio = baseline.divide(result)
    return {
        "key": key,
        "module": module,
        "name": result.name,
        "unit": result.unit,
        "value": round(result.value, 6),
        "target": result.at_most,
        "ratio": None if ratio is None else round(ratio, 4),
        "command": f'make bench ARGS="{module}"',
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "revision": find_revision(),
    }


def describe_machine() -> Mapping[str, object]:
    """Describe the machine that the values depend on."""
    return {
        "cpu": read_field("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "memory": read_field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "revision": find_revision(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read_field(path: str, field: str) -> str:
    """Return the value of the first line ``field: value``, or empty."""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


if __name__ == "__main__":
    main()
