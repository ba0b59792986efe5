"""CPU time of tests: ``pytest -p tools.cpu_time`` measures it, `run_tests` prints it.

Each test in the JUnit file gets the property ``cpu_s``: user and system time of pytest and of the
processes that ended during the test, in seconds; and a property ``cpu_s of PROGRAM`` for each
program that it started and waited for. A program includes the processes that it waited for.
"""

import os
import resource
import subprocess
import tomllib
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

CPU_S = "cpu_s"
BUDGET_FILE = Path("tests/cpu-budget.toml")
"""CPU seconds of each folder, on the machine that the file names."""
SHOWN_PROGRAMS = 10
_OF = f"{CPU_S} of "
_FEW_PARTS = 2

_programs: Counter[str] = Counter()
"""Seconds of each program that ended in the running test."""


def measure_s() -> float:
    """Return the CPU seconds of this process and of the children that it waited for."""
    return _sum_up(resource.RUSAGE_SELF) + _sum_up(resource.RUSAGE_CHILDREN)


def _sum_up(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def name_program(arguments: Any) -> str:
    """Name the program of a command line: the module of ``python -m``, or the file."""
    is_one = isinstance(arguments, (str, bytes, os.PathLike))
    words = [os.fsdecode(word) for word in ([arguments] if is_one else arguments)]
    if "-m" in words[1:] and Path(words[0]).name.startswith("python"):
        return " ".join(words[words.index("-m") + 1 :][:1])
    return Path(words[0]).name if words else ""


def pytest_configure() -> None:
    """Note the CPU time of each program when Popen has waited for it."""
    handle_end = subprocess.Popen._handle_exitstatus  # noqa: SLF001
    # CPython has no public place that knows both the command and the moment of the wait.
    before_s = _sum_up(resource.RUSAGE_CHILDREN)

    def note_end(process: subprocess.Popen[Any], *arguments: Any) -> Any:
        nonlocal before_s
        now_s = _sum_up(resource.RUSAGE_CHILDREN)
        _programs[name_program(process.args)] += now_s - before_s
        before_s = now_s
        return handle_end(process, *arguments)

    subprocess.Popen._handle_exitstatus = note_end  # noqa: SLF001


_STARTED_S = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin to measure before the fixtures."""
    _programs.clear()
    item.stash[_STARTED_S] = measure_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the properties to the report of the clean-up."""
    report = yield
    if call.when == "teardown" and _STARTED_S in item.stash:
        seconds = {CPU_S: measure_s() - item.stash[_STARTED_S]}
        seconds |= {f"{_OF}{program}": used_s for program, used_s in _programs.items()}
        report.user_properties += [(name, f"{used_s:.3f}") for name, used_s in seconds.items()]
    return report


def read_files(files: Iterable[str]) -> tuple[Counter[str], Counter[str]]:
    """Return the CPU seconds of each folder and of each program in JUnit files."""
    folders: Counter[str] = Counter()
    programs: Counter[str] = Counter()
    for file in files:
        for case in ET.parse(file).iter("testcase"):  # noqa: S314 - pytest wrote the file
            parts = case.get("classname", "").split(".")
            folder = parts[1] if parts[0] == "tests" and len(parts) > _FEW_PARTS else parts[0]
            for item in case.iter("property"):
                name, seconds = item.get("name", ""), float(item.get("value", "0"))
                if name == CPU_S:
                    folders[folder] += seconds
                elif name.startswith(_OF):
                    programs[name.removeprefix(_OF)] += seconds
    return folders, programs


def describe(files: Sequence[str], whole_s: float, budget: Mapping[str, float]) -> list[str]:
    """Return the lines that print the CPU time of a run of ``whole_s`` seconds."""
    folders, programs = read_files(files)
    rest_s = max(whole_s - folders.total(), 0.0)
    lines = [f"CPU time: {whole_s / 60:.1f} minutes"]
    rows = folders + Counter({"outside of tests": rest_s})
    for folder, seconds in rows.most_common():
        limit_s = budget.get(folder)
        note = "" if limit_s is None else f" of {limit_s:4g}"
        lines.append(f"{seconds:7.0f} s{note:8} {folder}{_judge(seconds, limit_s)}")
    lines.append("programs that tests started, with their own processes:")
    lines += [
        f"{seconds:7.0f} s         {name}" for name, seconds in programs.most_common(SHOWN_PROGRAMS)
    ]
    return lines


def _judge(seconds: float, limit_s: float | None) -> str:
    if limit_s is None or seconds <= limit_s:
        return ""
    return f"  more than {BUDGET_FILE} has"


def read_budget() -> dict[str, float]:
    """Return the budget of each folder; empty where the file is not there."""
    if not BUDGET_FILE.exists():
        return {}
    return dict(tomllib.loads(BUDGET_FILE.read_text(encoding="utf-8"))["folders"])
