"""Processes and directories of a lab end with the process that owns them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_until
from treenail_lab.lifetime.owner import OWNER_FILE, PREFIX, owner, remove_leftovers
from treenail_lab.lifetime.reaper import MARK, find_marked

pytestmark = pytest.mark.process

# An owner with a directory and a child in another session that has a child itself.
OWNER = """
import os, signal, subprocess, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup(1) makes the tests ignore it
from treenail_lab.lifetime.owner import owner
directory = owner.make_directory()
environment = {**os.environ, **owner.mark_environment()}
subprocess.Popen(
    ["sh", "-c", "trap '' HUP TERM INT; sleep 600 & sleep 600"],
    env=environment, stdout=subprocess.DEVNULL, start_new_session=True,
)
print(directory, next(iter(owner.mark_environment().values())), flush=True)
sys.stdin.readline()
if sys.argv[1:] == ["crash"]:
    os.abort()
"""


@contextmanager
def running_owner(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path, str]]:
    """An owner with children, its directory and its token."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        directory, token = process.stdout.readline().split()
        try:
            wait_until(lambda: len(list(find_marked(MARK, token))) == 3)
            yield process, Path(directory), token
        finally:
            process.kill()


def find_reaper(token: str) -> int:
    """The process id of the reaper of the owner with this token; 0 when there is none."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if token.encode() in words and any(word.endswith(b"reaper.py") for word in words):
            return int(path.parent.name)
    return 0


def ignores_signals(pid: int) -> bool:
    """Return whether the process has set its signal handlers (SigIgn of proc_pid_status(5))."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    return all(int(mask, 16) & 1 << (number - 1) for number in numbers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGSEGV])
def test_owner_ends_by_signal_children_and_directory_are_gone(number: signal.Signals) -> None:
    with running_owner() as (process, directory, token):
        process.send_signal(number)
        assert process.wait(10) == -number
        wait_until(lambda: not list(find_marked(MARK, token)))
        wait_until(lambda: not directory.exists())
        wait_until(lambda: not find_reaper(token))


@pytest.mark.parametrize("arguments", [(), ("crash",)])
def test_owner_exits_or_crashes_children_and_directory_are_gone(arguments: tuple[str, ...]) -> None:
    with running_owner(*arguments) as (process, directory, token):
        process.communicate("go\n", timeout=10)
        wait_until(lambda: not list(find_marked(MARK, token)))
        wait_until(lambda: not directory.exists())


def test_owner_exits_without_a_warning_after_reaper_cleaned_up() -> None:
    script = "from treenail_lab.lifetime.owner import owner; print(owner.make_directory())"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert done.stderr == ""
    assert not Path(done.stdout.strip()).exists()


def test_reaper_ignores_the_signals_of_a_terminal() -> None:
    with running_owner() as (process, directory, token):
        reaper = find_reaper(token)
        wait_until(lambda: ignores_signals(reaper))
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            os.kill(reaper, number)
        process.kill()
        wait_until(lambda: not directory.exists())


def test_start_after_reaper_and_owner_were_killed_removes_leftovers() -> None:
    with running_owner() as (process, directory, token):
        os.kill(find_reaper(token), signal.SIGKILL)
        process.kill()
        process.wait(10)
        assert len(list(find_marked(MARK, token))) == 3
        assert directory.exists()
        with owner.temporary_directory():
            assert not list(find_marked(MARK, token))
            assert not directory.exists()


def test_start_beside_a_running_lab_leaves_it_alone(tmp_path: Path) -> None:
    with running_owner() as (process, directory, token):
        remove_leftovers(directory.parent)
        assert directory.exists()
        assert len(list(find_marked(MARK, token))) == 3
        assert process.poll() is None


def test_directory_without_owner_file_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / f"{PREFIX}abc"
    foreign.mkdir()
    remove_leftovers(tmp_path)
    assert foreign.exists()


def test_removed_directory_is_forgotten() -> None:
    with owner.temporary_directory() as directory:
        assert (directory / OWNER_FILE).exists()
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()
