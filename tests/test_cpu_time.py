"""The CPU time of each folder and program is measured, and compared with a budget."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import cpu_time

ROOT = Path(__file__).parent.parent
BUSY = "import time\nwhile time.process_time() < 0.3: pass"
TESTS = f"""\
import subprocess
import sys

def test_started_program():
    subprocess.run([sys.executable, "-c", {BUSY!r}], check=True)

def test_idle():
    subprocess.run(["true"], check=True)
"""


@pytest.mark.process
def test_each_test_has_the_time_of_what_it_started(tmp_path: Path) -> None:
    folder = tmp_path / "tests/unit"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").touch()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tools.cpu_time", "--junitxml=it.xml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    folders, programs = cpu_time.read_files([str(tmp_path / "it.xml")])
    assert set(folders) == {"unit"}
    assert set(programs) == {Path(sys.executable).name, "true"}
    assert 0.3 <= programs[Path(sys.executable).name] <= folders["unit"]
    assert programs["true"] < 0.3


def test_folder_above_its_budget_is_named(tmp_path: Path) -> None:
    results = tmp_path / "it.xml"
    case = '<testcase classname="{}"><property name="cpu_s" value="{}"/></testcase>'
    cases = case.format("tests.host.test_a", 30) + case.format("tests.test_b", 5)
    results.write_text(f"<testsuite>{cases}</testsuite>")
    lines = cpu_time.describe([str(results)], 60.0, {"host": 20, "tests": 5})
    assert lines[:4] == [
        "CPU time: 1.0 minutes",
        "     30 s of   20 host  more than tests/cpu-budget.toml has",
        "     25 s         outside of tests",
        "      5 s of    5 tests",
    ]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/usr/bin/python3", "-S", "-m", "treenail.cli", "-m", "x"], "treenail.cli"),
        (["python3", "-c", "pass"], "python3"),
        (["/bin/sh", "-m"], "sh"),
        ("true", "true"),
        ([], ""),
    ],
)
def test_program_has_the_name_of_its_module_or_file(arguments: list[str] | str, name: str) -> None:
    assert cpu_time.name_program(arguments) == name


def test_every_folder_of_tests_has_a_budget() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests").parts[:1]
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    names = {parts[0] if parts else "tests" for parts in folders}
    assert names - set(cpu_time.read_budget()) == set()
