"""Fuzzes the readers of input from outside, one after the other: ``python -m tests.fuzz.run``."""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.fuzz.target import ROOT, Finding, FuzzTarget, run_input
from tests.fuzz.targets import load_all_targets
from tests.records import write_record

BUILD = ROOT / "build" / "fuzz"
_GRACE_S = 600.0
"""For the start, and for an input that hangs in C code, where no signal handler of Python runs."""
_LOOK_S = 1.0
_STATUS = re.compile(r"^#(\d+)\s+(\w+)\s+cov: (\d+) ft: (\d+) corp: (\d+)", re.MULTILINE)
_MINIMIZE_S = 20.0


@dataclass(frozen=True, slots=True)
class FuzzReport:
    """One run of one target. Coverage is the number of edges; ``initial`` is that of the seeds."""

    target: str
    seconds: float
    cpu_seconds: float
    executions: int
    initial_coverage: int
    coverage: int
    corpus: int
    findings: tuple[str, ...]
    status: int


def main(arguments: list[str]) -> int:
    """Run the targets that the arguments name; return 1 if one has a finding."""
    targets = load_all_targets()
    parser = argparse.ArgumentParser(prog="make fuzz ARGS=…", description=__doc__)
    parser.add_argument("--target", action="append", choices=sorted(targets), help="(default: all)")
    parser.add_argument(
        "--seconds", type=int, default=600, help="of CPU time of each target (default: 600)"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the targets")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(sorted(targets)))
        return 0
    reports = []
    for name in options.target or sorted(targets):
        module, target = targets[name]
        report = fuzz_target(module, target, options.seconds)
        print(format_report(report), flush=True)
        write_report(report)
        record_report(report)
        reports.append(report)
    return int(any(each.findings or each.status for each in reports))


def fuzz_target(module: str, target: FuzzTarget, seconds: int) -> FuzzReport:
    """Fuzz one target in a process of its own, and minimize what it finds."""
    work = BUILD / target.name
    work.mkdir(parents=True, exist_ok=True)
    drop_fixed_findings(target, work / "found")
    log = work / "log"
    began, used = time.monotonic(), sum(os.times()[2:4])
    command = [sys.executable, "-m", "tests.fuzz.child", module, target.name, str(work)]
    limits = ["-timeout=86400", "-rss_limit_mb=0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *limits, "-print_final_stats=1"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/agent:{ROOT}/lab"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        status = wait_for_end(process, seconds)
    if status:
        save_last_input(work)
    lines = _STATUS.findall(log.read_text("utf-8", errors="replace"))
    first = next((each for each in lines if each[1] == "INITED"), ("0", "", "0", "0", "0"))
    last = lines[-1] if lines else first
    return FuzzReport(
        target=target.name,
        seconds=round(time.monotonic() - began, 1),
        cpu_seconds=round(sum(os.times()[2:4]) - used, 1),
        executions=int(last[0]),
        initial_coverage=int(first[2]),
        coverage=int(last[2]),
        corpus=int(last[4]),
        findings=tuple(sorted(minimize_findings(target, work / "found"))),
        status=status,
    )


def wait_for_end(process: subprocess.Popen[bytes], seconds: int) -> int:
    """End the process after its CPU time; return its exit status, -1 for one that hangs.

    On a busy machine minutes of the wall clock say little.
    """
    observed = psutil.Process(process.pid)
    is_over, used, changed = False, 0.0, time.monotonic()
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            now = sum(observed.cpu_times()[:2])
            if now - used > _LOOK_S / 100:
                used, changed = now, time.monotonic()
        if not is_over and used >= seconds:
            is_over = True
            # libFuzzer ends after the input in progress.
            process.send_signal(signal.SIGUSR1)
        if used >= seconds + _GRACE_S or time.monotonic() - changed > _GRACE_S:
            process.kill()
            process.wait()
            return -1
    return process.returncode


def save_last_input(work: Path) -> None:
    """Keep the input of a process that was killed."""
    current = work / "current"
    if current.exists():
        content = current.read_bytes()
        size = int.from_bytes(content[:8], "big")
        (work / "found" / "process-ended").write_bytes(content[8 : 8 + size])


def drop_fixed_findings(target: FuzzTarget, directory: Path) -> None:
    """Remove what an earlier run found and the reader now accepts."""
    for path in sorted(directory.glob("*")):
        if path.suffix != ".txt" and run_input(target, path.read_bytes()) is None:
            path.unlink()
            path.with_name(f"{path.name}.txt").unlink(missing_ok=True)


def minimize_findings(target: FuzzTarget, directory: Path) -> list[str]:
    """Make each found input shorter while its finding stays; return the names."""
    names = []
    for path in sorted(directory.glob("*")):
        if path.suffix == ".txt" or path.name.startswith("libfuzzer-slow"):
            continue
        names.append(path.name)
        content = path.read_bytes()
        if (finding := run_input(target, content)) is not None and len(content) < 65536:
            path.write_bytes(minimize_input(target, content, finding))
    return names


def minimize_input(target: FuzzTarget, content: bytes, finding: Finding) -> bytes:
    """Remove ever smaller pieces while the input keeps its finding."""
    end = time.monotonic() + _MINIMIZE_S
    size = max(len(content) // 2, 1)
    while size and time.monotonic() < end:
        begin = 0
        while begin < len(content) and time.monotonic() < end:
            shorter = content[:begin] + content[begin + size :]
            found = run_input(target, shorter)
            if found is not None and found.key == finding.key:
                content = shorter
            else:
                begin += size
        size //= 2
    return content


def format_report(report: FuzzReport) -> str:
    """Return one line for a terminal."""
    found = ", ".join(report.findings) or "nothing"
    rate = report.executions / max(report.seconds, 0.1)
    return (
        f"{report.target:20} {report.seconds:6.0f} s {report.executions:9} inputs "
        f"({rate:5.0f}/s)  coverage {report.initial_coverage} to {report.coverage}  "
        f"found: {found}"
        f"{f'  (exit status {report.status})' if report.status else ''}"
    )


def write_report(report: FuzzReport) -> None:
    """Add the report to build/fuzz/reports.jsonl."""
    with (BUILD / "reports.jsonl").open("a", encoding="utf-8") as output:
        output.write(json.dumps(asdict(report)) + "\n")


def record_report(report: FuzzReport) -> None:
    """Record executions and minutes for the documents."""
    found = ", ".join(report.findings) or "no finding"
    write_record(
        "fuzz",
        what=f"coverage-guided fuzzing of the reader {report.target}",
        result=f"{found} in {report.cpu_seconds / 60:.1f} minutes of CPU time; "
        f"{report.initial_coverage} edges at the start, {report.coverage} at the end",
        count=report.executions,
        command=f'make fuzz ARGS="--target {report.target}"',
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
