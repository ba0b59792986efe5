"""Tests that failed beside others run once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

TOP = Path(__file__).parents[1]
HURRIED = """\
import os

def test_hurried():
    assert "PYTEST_XDIST_WORKER" not in os.environ

def test_good():
    pass
"""
WRONG = """\
def test_wrong():
    assert False
"""


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(TOP), "TREENAIL_TEST_JOBS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [sys.executable, "-m", "tools.run_tests", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_failure_that_passes_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HURRIED)
    completed = run(tmp_path, "test_it.py")
    assert completed.returncode == 0, completed.stdout
    assert "failed, and passed alone: test_it::test_hurried\n" in completed.stdout
    assert completed.stdout.endswith("tests: 2 passed, 0 failed, 0 skipped\n")


def test_failure_that_stays_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HURRIED)
    (tmp_path / "test_wrong.py").write_text(WRONG)
    completed = run(tmp_path, "test_it.py", "test_wrong.py")
    assert completed.returncode == 1
    assert "failed, and passed alone: test_it::test_hurried\n" in completed.stdout
    assert "failed again: test_wrong::test_wrong\n" in completed.stdout
    assert completed.stdout.endswith("tests: 2 passed, 1 failed, 0 skipped\n")


def test_many_failures_are_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HURRIED)
    wrong = "".join(f"def test_wrong_{number}():\n    assert False\n" for number in range(12))
    (tmp_path / "test_wrong.py").write_text(wrong)
    completed = run(tmp_path, "test_it.py", "test_wrong.py")
    assert completed.returncode == 1
    assert "alone" not in completed.stdout
    assert completed.stdout.endswith("tests: 1 passed, 13 failed, 0 skipped\n")
