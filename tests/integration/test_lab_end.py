"""However ``treenail-lab`` ends, its processes and its directory end with it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.commands import treenail_lab
from tests.waiting import wait_until
from treenail_lab.lifetime.owner import PREFIX, owner

pytestmark = pytest.mark.integration

LAB = "import sys; from treenail_lab.__main__ import main; sys.exit(main())"
LIMIT_S = 25.0


@contextmanager
def running_lab(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A lab that is up, in a directory that does not exist before."""
    with owner.temporary_directory() as parent:
        directory = parent / PREFIX
        process = subprocess.Popen(
            [sys.executable, "-c", LAB, "up", "--nodes", "1", "--directory", str(directory)],
            env={**os.environ, **owner.mark_environment(), "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("export KUBECONFIG=")
            try:
                yield process, directory
            finally:
                process.kill()


def find_processes(directory: Path) -> list[str]:
    """The command lines of the processes that name the directory in arguments or environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            text = command + (entry / "environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(directory) in text:
            found.append(command.decode().replace("\0", " "))
    return found


SIGNALS = [
    signal.SIGKILL,
    signal.SIGTERM,
    *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGHUP, signal.SIGINT)),
]


@pytest.mark.parametrize("number", SIGNALS)
def test_lab_ended_by_signal_leaves_no_process_and_no_directory(number: signal.Signals) -> None:
    with running_lab() as (process, directory):
        # The lab, the controllers, the bus, systemd and logind, the agent.
        wait_until(lambda: len(find_processes(directory)) >= 5)
        process.send_signal(number)
        if number is signal.SIGINT:
            process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == (-number if number is signal.SIGKILL else 130)
        assert "Traceback" not in errors
        wait_until(lambda: not find_processes(directory))
        wait_until(lambda: not directory.exists())


def test_lab_in_use_is_not_removed_by_another(tmp_path: Path) -> None:
    with running_lab() as (process, directory):
        completed = treenail_lab("up", "--nodes", "1", "--directory", str(directory))
        assert completed.returncode == 2
        assert f"cannot use {directory}: a lab runs in it" in completed.stderr
        assert process.poll() is None
        assert directory.exists()
