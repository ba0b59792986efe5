"""All tests: ``python -m tools.run_tests [PYTEST-ARGUMENT ...]``.

pytest runs the tests in parallel, except those that `make check` has run. The smoke test of the
virtual machines runs beside them, because a machine occupies one core and often waits. With
arguments pytest alone runs, with them. The results are in build/tests/*.xml; at the end one line
counts them and ten lines name the slowest.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import summarize

RESULTS = Path("build/tests")
MACHINES_LOG = RESULTS / "vm.log"
PYTEST = (
    *(sys.executable, "-m", "pytest", "--dist", "worksteal"),
    *("--durations=0", "--durations-min=30", f"--junitxml={RESULTS}/tests.xml"),
)
CHECKED = ("--ignore=tests/test_style.py", "--ignore=tests/test_layers.py")
MACHINES = (
    *(sys.executable, "-m", "vmlab.run", "--if-possible", "-m", "smoke"),
    f"--junitxml={RESULTS}/vm.xml",
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
        codes = [subprocess.run(words, check=False).returncode]
        if machines is not None:
            if machines.poll() is None:
                print(f"waiting for the virtual machines; see {MACHINES_LOG}", flush=True)
            codes.append(machines.wait())
            print(MACHINES_LOG.read_text(encoding="utf-8", errors="replace"), flush=True)
    except KeyboardInterrupt:
        # Both received the signal, too, and end their processes.
        if machines is not None:
            machines.wait(_STOP_S)
        return 130
    summarize.main([str(path) for path in sorted(RESULTS.glob("*.xml"))])
    return next((code for code in codes if code), 0)


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
