"""Benchmark of the watches of the controllers: start with 5,000 nodes, memory with large objects.

A user with ``edit`` in one namespace can create 64 PodDisruptionBudgets of 1.2 MB. The start ends
with the first write. ``--compare`` measures the start of another version beside it, in turns.

    make bench ARGS=watches
    python -m bench.watches --compare ../other-worktree --rounds 5
"""

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.node import read_cpu
from bench.result import Result
from bench.scale import USER, cluster, is_at_rest, read_rss, store_objects
from treenail.api.decode import Json
from treenail_lab.apiserver.serving.server import LabServer
from treenail_lab.controllers import CONTROLLER_COMMAND

NODES, FEW_NODES = 5000, 100
BUDGETS, BUDGET_VALUES = 64, 18_000
START_TARGET, MEMORY_TARGET = 1.1, 1.3
LIMIT_S = 60.0
OWN_TREE = Path(__file__).parent.parent
WRITES = ("create", "update", "patch")


def measure(_seconds: float) -> Iterator[Result]:
    with cluster(NODES, ["worker"]) as (server, _):
        starts = [measure_start(server, OWN_TREE) for _ in range(3)]
        for what, seconds in zip(
            ("start", "CPU of the start"), zip(*starts, strict=True), strict=True
        ):
            value = statistics.median(seconds)
            yield Result(f"{what} to the first write, {NODES} nodes", "s", value)
    yield from measure_memory(OWN_TREE)


def measure_start(server: LabServer, tree: Path) -> tuple[float, float]:
    """Return the seconds from the start of the process to its first write, and those of its CPU."""
    before = count_writes(server)
    began = time.monotonic()
    with running(server, tree) as process:
        while count_writes(server) == before:
            if time.monotonic() > began + LIMIT_S:
                raise SystemExit(f"{tree}: no write within {LIMIT_S:g} s")
            time.sleep(0.01)
        return time.monotonic() - began, read_cpu(process.pid)


def measure_memory(tree: Path) -> Iterator[Result]:
    """Measure the memory without and with the budgets."""
    peaks = []
    for count in (0, BUDGETS):
        budgets = [build_budget(number) for number in range(count)]
        with cluster(FEW_NODES, ["worker"]) as (server, _):
            server.call_api(store_objects("poddisruptionbudgets", budgets, group="policy"))
            with running(server, tree) as process:
                end = time.monotonic() + LIMIT_S
                while not (count_writes(server) and is_at_rest(server)) and time.monotonic() < end:
                    time.sleep(0.1)
                peaks.append(read_rss(process.pid, "VmHWM"))
        started = float(count_writes(server) > 0)
        yield Result(f"{count} budgets of 1.2 MB: maximum of RSS", "MiB", peaks[-1])
        yield Result(f"{count} budgets of 1.2 MB: controllers started", "", started)
    yield Result("maximum of RSS with and without", "", peaks[1] / peaks[0], MEMORY_TARGET)


def count_writes(server: LabServer) -> int:
    return sum(server.count_requests(user=USER, verb=verb) for verb in WRITES)


def build_budget(number: int) -> Json:
    """Build a budget that allows no eviction, of 1.2 MB."""
    values = [f"{value:063}" for value in range(BUDGET_VALUES)]
    name = f"large-{number:02}"
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
        "spec": {
            "maxUnavailable": 0,
            "selector": {"matchExpressions": [
                {"key": "app", "operator": "NotIn", "values": values}
            ]},
        },
        "status": {"disruptionsAllowed": 0, "expectedPods": 1, "currentHealthy": 1,
                   "desiredHealthy": 1},
    }  # fmt: skip


@contextmanager
def running(server: LabServer, tree: Path) -> Iterator["subprocess.Popen[bytes]"]:
    kubeconfig = server.write_kubeconfig(USER, ["system:masters"])
    command = [
        *CONTROLLER_COMMAND, "run", "--enable=render,rollout,drain,approve",
        "--no-leader-election", f"--kubeconfig={kubeconfig}", "--metrics=127.0.0.1:0",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree / "agent")}
    log = kubeconfig.with_suffix(".log")
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stderr=output, env=environment) as process,
    ):
        yield process
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.watches", description=__doc__)
    parser.add_argument("--compare", type=Path, required=True, help="another worktree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--memory", action="store_true", help="measure the memory of both, too")
    arguments = parser.parse_args()
    trees: dict[Path, list[tuple[float, float]]] = {arguments.compare.resolve(): [], OWN_TREE: []}
    with cluster(arguments.nodes, ["worker"]) as (server, _):
        for _ in range(arguments.rounds):
            for tree, starts in trees.items():
                starts.append(measure_start(server, tree))
                print(f"{tree}: {starts[-1][0]:.2f} s, CPU {starts[-1][1]:.2f} s", flush=True)
    for number, what in enumerate(("start", "CPU of the start")):
        other, own = ([start[number] for start in starts] for starts in trees.values())
        ratios = [mine / its for mine, its in zip(own, other, strict=True)]
        value = statistics.median(ratios)
        show(Result(f"{what}, this and the other version", "", value, START_TARGET))
    for tree in trees if arguments.memory else ():
        print(tree)
        for result in measure_memory(tree):
            show(result)


def show(result: Any) -> None:
    print(f"{result.name:<60} {result.value:>10.3g} {result.unit} {result.verdict}", flush=True)


if __name__ == "__main__":
    main()
