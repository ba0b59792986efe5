"""All tests: ``python -m tools.run_tests [PYTEST-ARGUMENT ...]``.

pytest runs the tests in parallel, except those that `make check` has run. The smoke test of the
virtual machines runs beside them, because a machine occupies one core and often waits. With
arguments pytest alone runs, with them. The results are in build/tests/*.xml; at the end lines name
the ten slowest and the CPU time of each folder of tests, and the last line counts them.

A few tests that failed run once more, one after the other and beside nothing else. A test that
passes then is named: it depends on the speed of the machine, or the product has a race.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import cpu_time, summarize

RESULTS = Path("build/tests")
MACHINES_LOG = RESULTS / "vm.log"
TESTS_FILE = RESULTS / "tests.xml"
ALONE_FILE = RESULTS / "alone.xml"
MACHINES_FILE = RESULTS / "vm.xml"
CPU_TIME = ("-p", cpu_time.__name__)
PYTEST = (
    *(sys.executable, "-m", "pytest", *CPU_TIME, "--dist", "worksteal", "--cache-clear"),
    *("--durations=0", "--durations-min=30", f"--junitxml={TESTS_FILE}"),
)
ALONE = (
    *(sys.executable, "-m", "pytest", "--last-failed", "--last-failed-no-failures=none"),
    *("-n", "0", "--durations=0", "--durations-min=30", f"--junitxml={ALONE_FILE}"),
)
MOST_ALONE = 12
"""The failures that run again. More of them have a cause of their own."""
TESTS_FAILED = 1
"""pytest's exit code when tests ran and some failed."""
CHECKED = ("--ignore=tests/test_style.py", "--ignore=tests/test_layers.py")
MACHINES = (
    *(sys.executable, "-m", "vmlab.run", "--if-possible", "-m", "smoke"),
    # Its cache would replace that of the tests, which names the failed ones.
    *("-p", "no:cacheprovider", *CPU_TIME),
    f"--junitxml={MACHINES_FILE}",
)
PATIENCE = "3"
"""The factor of the time limits in a virtual machine, which shares its core with tests."""
_STOP_S = 120.0


def main(arguments: Sequence[str]) -> int:
    """Return the first exit code that is not 0."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for old in RESULTS.glob("*.xml"):
        old.unlink()
    jobs = os.environ.get("TREENAIL_TEST_JOBS") or str(2 * (os.cpu_count() or 1))
    words = [*PYTEST, "-n", jobs, *(arguments or CHECKED)]
    machines = None if arguments else start_machines()
    try:
        code = subprocess.run(words, check=False).returncode
        machines_code = 0
        if machines is not None:
            if machines.poll() is None:
                print(f"waiting for the virtual machines; see {MACHINES_LOG}", flush=True)
            machines_code = machines.wait()
            print(MACHINES_LOG.read_text(encoding="utf-8", errors="replace"), flush=True)
        failed = find_failed(TESTS_FILE) if code == TESTS_FAILED else ()
        if 0 < len(failed) <= MOST_ALONE:
            code = run_alone(failed)
    except KeyboardInterrupt:
        # Both received the signal, too, and end their processes.
        if machines is not None:
            machines.wait(_STOP_S)
        return 130
    files = [str(path) for path in (TESTS_FILE, ALONE_FILE, MACHINES_FILE) if path.exists()]
    budget = cpu_time.read_budget()
    print("\n".join(cpu_time.describe(files, cpu_time.measure_s(), budget)))
    summarize.main(files)
    return code or machines_code


def find_failed(results: Path) -> tuple[str, ...]:
    """Name the tests that failed; empty when pytest wrote no results."""
    if not results.exists():
        return ()
    return tuple(
        name
        for name, (_, kinds) in summarize.read_results(str(results)).items()
        if kinds & summarize.FAILED
    )


def run_alone(failed: Sequence[str]) -> int:
    """Run the tests that failed once more, without others beside them; return the exit code."""
    print(f"running {len(failed)} failed tests again, alone", flush=True)
    code = subprocess.run(ALONE, check=False).returncode
    failed_again = find_failed(ALONE_FILE)
    ran_again = summarize.read_results(str(ALONE_FILE)) if ALONE_FILE.exists() else {}
    for name in failed:
        result = "failed again" if name in failed_again else "failed, and passed alone"
        if name not in ran_again:
            result = "failed, and did not run again"
        print(f"{result}: {name}", flush=True)
    return code


def start_machines() -> subprocess.Popen[bytes]:
    """Start the smoke test, whose output would be between that of the tests."""
    environment = {
        "TREENAIL_VM_PATIENCE": PATIENCE,
        **os.environ,
        "PYTHONPATH": f".{os.pathsep}vm-tests",
    }
    with MACHINES_LOG.open("wb") as log:
        return subprocess.Popen(
            MACHINES, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
