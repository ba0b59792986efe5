"""Commands whose output cannot be written."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.node.test_once import entry, written

pytestmark = pytest.mark.process

AGENT = ("-m", "treenail")
CONTROLLER = ("-c", "import treenail.cli.controller.main as m, sys; sys.exit(m.main())")
FULL = "treenail: cannot write the output: No space left on device\n"


def run(output: int, *arguments: object, start: tuple[str, str] = AGENT) -> tuple[int, str]:
    """The exit code, and the standard error."""
    done = subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        stdout=output,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.fixture(autouse=True, params=["", "1"], ids=["buffered", "unbuffered"])
def _buffering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", request.param)


@pytest.fixture
def closed() -> Iterator[int]:
    """A pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def full() -> Iterator[int]:
    """A file that takes nothing more."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    return root


def config(path: Path, count: int) -> str:
    return written(path, {"files": [entry(f"/etc/{number}", "x") for number in range(count)]})


@pytest.mark.parametrize("count", [1, 400])
def test_plan_with_closed_output_does_not_return_unchanged(
    tmp_path: Path, closed: int, count: int
) -> None:
    old, new = written(tmp_path / "old"), config(tmp_path / "new", count)
    assert run(closed, "plan", old, new) == (141, "")


@pytest.mark.parametrize("count", [1, 400])
def test_unwritable_output_fails_with_one_line(tmp_path: Path, full: int, count: int) -> None:
    old, new = written(tmp_path / "old"), config(tmp_path / "new", count)
    assert run(full, "plan", old, new) == (1, FULL)


@pytest.mark.parametrize("count", [1, 400])
def test_once_with_unwritable_output_reports_change_as_done(
    tmp_path: Path, root: Path, full: int, closed: int, count: int
) -> None:
    file = config(tmp_path / "file", count)
    assert run(full, "once", file, "--root", root) == (
        1,
        f"treenail: applied the config\n{FULL}",
    )
    assert (root / "etc/0").read_text() == "x"
    assert run(closed, "once", file, "--root", root) == (141, "")
    empty = written(tmp_path / "empty")
    assert run(closed, "once", empty, "--root", root) == (141, "treenail: applied the config\n")
    assert not (root / "etc/0").exists()


def run_without_stdout(command: str, *arguments: str) -> tuple[int, bytes]:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" {command} >&-', sys.executable, *arguments],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def test_process_without_stdout_runs_command(tmp_path: Path, root: Path) -> None:
    command = f"-m treenail once {config(tmp_path / 'file', 1)} --root {root}"
    assert run_without_stdout(command) == (0, b"")
    assert (root / "etc/0").read_text() == "x"
    # The controllers print no traceback either.
    assert run_without_stdout('"$@" manifests', *CONTROLLER) == (0, b"")


def test_controller_command_with_unwritable_output_prints_no_traceback(
    full: int, closed: int
) -> None:
    message = "treenail-controller: cannot write the output: No space left on device\n"
    assert run(full, "--version", start=CONTROLLER) == (1, message)
    assert run(full, "manifests", start=CONTROLLER) == (1, message)
    assert run(closed, "manifests", start=CONTROLLER) == (141, "")
