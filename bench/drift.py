"""Benchmark of a full drift check of 10,000 files, without drift and with every hundredth drifted.

The check reads every file and compares its digest, as at the start of the agent. Reading the config
is measured separately, because the agent does it only when the config changes.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.once import ROOT, write_config
from bench.result import Result

COUNT = 10_000
TIMES = 5

_PROGRAM = """
import contextlib, io, sys, time
from pathlib import Path
from treenail.cli.files import read_machine_config
from treenail.cli.node.main import main
from treenail.clocks import SystemClock
from treenail.config.wanted_state import read_wanted_state
from treenail.daemon.configuration.drift import BootedState, DriftCheck, ExpectedState
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine

config, top, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["once", config, "--root", top]) == 0

def measure_check(expected_state, drifted):
    started_at = time.perf_counter()
    machine = Machine(root, clock=SystemClock())
    found = DriftCheck(machine, machine.unit_files).check_everything(expected_state, BootedState())
    duration_s = time.perf_counter() - started_at
    assert len(found) == drifted, len(found)
    return duration_s

root = Root(top)
started_at = time.perf_counter()
expected_state = ExpectedState.from_wanted(read_wanted_state(read_machine_config(config)))
read_s = time.perf_counter() - started_at
clean_s = measure_check(expected_state, 0)
for path in list(expected_state.entries)[::100]:
    Path(top + path).write_text("another")
print(read_s, clean_s, measure_check(expected_state, count // 100))
"""


def measure(_seconds: float) -> Iterator[Result]:
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        runs = list(zip(*(_run(Path(folder), time) for time in range(TIMES)), strict=True))
    read_s, clean_s, drifted_s = map(median, runs)
    yield Result(f"drift, {COUNT} files: nothing drifted", "s", clean_s, 1.0)
    yield Result("  every hundredth drifted", "s", drifted_s, 1.0)
    yield Result("  reading the config", "s", read_s)


def _run(folder: Path, time: int) -> list[float]:
    config, top = folder / "config.json", folder / str(time)
    write_config(config, COUNT, "some", changed=-1)
    top.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, config, top, str(COUNT)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    return [float(word) for word in done.stdout.split()]
