"""Every file of tests is collected, and `make test` or `make test-long` runs every test."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tools import python_tree
from tools.run_tests import CHECKED

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
IGNORED = {argument.removeprefix("--ignore=") for argument in CHECKED}


def read_recipe(target: str) -> str:
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found is not None, target
    return found[1]


def read_long_lane() -> str:
    """Return the expression that selects the tests of `make test-long`."""
    found = re.search(r'-m "([^"]+)"', read_recipe("test-long"))
    assert found is not None
    return found[1]


def find_uncollected(files: Iterable[str], tests: Iterable[str]) -> list[str]:
    return sorted(set(files) - {name.partition("::")[0] for name in tests})


def find_without_lane(tests: Mapping[str, set[str]], long_lane: str) -> list[str]:
    """Return the tests that neither `make test` nor `make test-long` selects."""
    expression = Expression.compile(long_lane)

    def has_lane(markers: set[str]) -> bool:
        return "long" not in markers or expression.evaluate(lambda word, **_: word in markers)

    return [name for name, markers in tests.items() if not has_lane(markers)]


def test_every_file_of_tests_is_collected(collected_tests: dict[str, set[str]]) -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert find_uncollected(files - IGNORED, collected_tests) == []


def test_every_test_belongs_to_a_lane(collected_tests: dict[str, set[str]]) -> None:
    assert find_without_lane(collected_tests, read_long_lane()) == []


def test_files_that_the_tests_leave_out_are_checked() -> None:
    assert {path for path in IGNORED if path not in read_recipe("check")} == set()


def test_lane_without_the_marker_of_a_test_is_noticed() -> None:
    tests = {"a::walk": {"walk", "long"}, "a::variant": {"long"}, "a::short": set[str]()}
    assert find_without_lane(tests, "walk") == ["a::variant"]
    assert find_without_lane(tests, "walk or long") == []


def test_file_that_is_not_collected_is_noticed() -> None:
    assert find_uncollected(["a.py", "build/b.py"], ["a.py::walk"]) == ["build/b.py"]


@pytest.mark.parametrize("folder", ["agent", "lab", "tests", "tools", "bench", "vm-tests"])
def test_no_folder_has_a_name_that_tools_leave_out(folder: str) -> None:
    # pytest's norecursedirs, ruff's exclude, and the folders that setuptools takes for output.
    left_out = {"build", "dist", "node_modules", "site-packages", "target", "venv", "CVS", "_darcs"}
    assert [path for path in (ROOT / folder).rglob("*") if path.name in left_out] == []


@pytest.mark.parametrize("folder", ["agent/treenail", "lab/treenail_lab"])
def test_every_folder_of_modules_is_a_package(folder: str) -> None:
    # setuptools finds no other folders, and mypy checks the packages that it finds.
    folders = {path.parent for path in (ROOT / folder).rglob("*.py")}
    assert [path for path in sorted(folders) if not (path / "__init__.py").exists()] == []


def test_every_data_file_is_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, folder in (("treenail", "agent"), ("treenail_lab", "lab")):
        top = ROOT / folder / package
        packaged = {
            path for pattern in patterns["package-data"][package] for path in top.glob(pattern)
        }
        files = {
            path for path in top.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}
        }
        assert files - packaged == set()


def test_packages_that_a_tree_leaves_out_exist() -> None:
    agent = ROOT / "agent/treenail"
    for program in python_tree.PROGRAMS.values():
        assert [name for name in program.left_out if not (agent / name).exists()] == []
