"""Run the benchmarks: a table on the terminal, and build/bench.json.

    make bench
    make bench ARGS="imports decode"
    make bench ARGS="node --seconds 10"

A benchmark is a module beside this one, named in MODULES, with ``measure(seconds)``: an iterator of
results. It measures the program as it is used, in a process of its own where memory is counted.
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

MODULES = ("imports", "decode", "node", "render", "rollout", "once", "drift")
ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description="Measure treenail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODULES)} (all)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long to watch what is idle (60)"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench.json")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(MODULES)):
        parser.error(f"no such benchmark: {', '.join(unknown)}")

    records: list[Mapping[str, object]] = []
    print(f"{'benchmark':<52} {'value':>10} {'unit':<8} {'aim':>8}")
    for module in arguments.names or MODULES:
        for result in measured(module, arguments.seconds):
            print(row(result), flush=True)
            records.append(record(result, module))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(
        json.dumps({"machine": machine(), "results": records}, indent=2) + "\n"
    )
    print(f"\nwritten to {arguments.output}")


def measured(module: str, seconds: float) -> Iterator[Result]:
    yield from importlib.import_module(f"bench.{module}").measure(seconds)


def row(result: Result) -> str:
    aim = "" if result.at_most is None else f"<= {result.at_most:g}"
    return (
        f"{result.name:<52} {result.value:>10.3g} {result.unit:<8} {aim:>8} {result.verdict}"
    ).rstrip()


def record(result: Result, module: str) -> Mapping[str, object]:
    return {
        "name": result.name,
        "unit": result.unit,
        "value": round(result.value, 6),
        "aim": result.at_most,
        "command": f'make bench ARGS="{module}"',
    }


def machine() -> Mapping[str, object]:
    """What the numbers depend on."""
    return {
        "cpu": first("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "memory": first("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "revision": revision(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def revision() -> str:
    """The commit that was measured, empty where git does not know."""
    if shutil.which("git") is None:
        return ""
    described = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def first(path: str, field: str) -> str:
    """The value of the first line ``field: value``; empty when there is none."""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


if __name__ == "__main__":
    main()
