"""Run the benchmarks: a table on the terminal, and build/bench.json.

    make bench
    make bench ARGS="imports decode"
    make bench ARGS="node --seconds 10"

A benchmark is a module beside this one, named in MODULES, with ``measure(seconds)``: an iterator of
results. It measures the program as users run it, in its own process where it measures memory.
"""

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.result import Result

MODULES = (
    "imports",
    "decode",
    "node",
    "render",
    "serve",
    "rollout",
    "scale",
    "once",
    "drift",
    "health",
    "build",
    "builds",
    "layer",
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
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench.json")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(MODULES)):
        parser.error(f"unknown benchmark: {', '.join(unknown)}")

    records: list[Mapping[str, object]] = []
    print(f"{'benchmark':<52} {'value':>10} {'unit':<8} {'target':>8}")
    for module in arguments.names or MODULES:
        for result in measure_module(module, arguments.seconds):
            print(format_row(result), flush=True)
            records.append(format_record(result, module))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(
        json.dumps({"machine": describe_machine(), "results": records}, indent=2) + "\n"
    )
    print(f"\nwrote {arguments.output}")


def measure_module(module: str, seconds: float) -> Iterator[Result]:
    yield from importlib.import_module(f"bench.{module}").measure(seconds)


def format_row(result: Result) -> str:
    target = "" if result.at_most is None else f"<= {result.at_most:g}"
    return (
        f"{result.name:<52} {result.value:>10.3g} {result.unit:<8} {target:>8} {result.verdict}"
    ).rstrip()


def format_record(result: Result, module: str) -> Mapping[str, object]:
    return {
        "name": result.name,
        "unit": result.unit,
        "value": round(result.value, 6),
        "target": result.at_most,
        "command": f'make bench ARGS="{module}"',
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


def find_revision() -> str:
    """Return the measured commit; empty outside of a git clone."""
    if shutil.which("git") is None:
        return ""
    described = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def read_field(path: str, field: str) -> str:
    """Return the value of the first line ``field: value``, or empty."""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


if __name__ == "__main__":
    main()
