"""docs/fidelity.md: the form of its tables, and the tests that its rows name."""

import ast
import re
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs/fidelity.md").read_text()
COLUMNS = ("behaviour", "lab", "real", "version", "last run", "test")
PROGRAMS = (
    "rpm-ostree", "bootc", "libostree and systemd", "kube-apiserver", "kubelet",
    "Container runtimes",
    "machine-config-controller",
    "machine-config-daemon", "Ignition and the MCO's config server", "buildah and BuildKit",
    "Failures of image builds",
)  # fmt: skip
LAB = re.compile(r"same|(differs|absent): \S.*")
TESTS = re.compile(r"`[\w/.-]+\.py(::\w+)+`(, `[\w/.-]+\.py(::\w+)+`)*")
NOT_TRIED = "not tried: "

Row = dict[str, str]


def read_tables(text: str) -> dict[str, list[list[str]]]:
    """Return the rows of the tables by heading, the row of the column names first."""
    tables: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("|") and not line.startswith("|---"):
            cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
            tables.setdefault(heading, []).append([cell.strip() for cell in cells])
    return tables


def find_errors(cells: list[str]) -> Iterator[str]:
    """Yield one sentence for each mistake in a row."""
    if len(cells) != len(COLUMNS):
        yield f"has {len(cells)} cells and not {len(COLUMNS)}"
        return
    row = dict(zip(COLUMNS, cells, strict=True))
    yield from (f"{name} is empty" for name, cell in row.items() if not cell)
    if not LAB.fullmatch(row["lab"]):
        yield "lab is neither `same` nor `differs: HOW` nor `absent: WHY`"
    is_tried = not row["real"].startswith(NOT_TRIED)
    if row["real"] == NOT_TRIED.strip():
        yield "not tried without a reason"
    if is_tried != bool(re.search(r"\d", row["version"])):
        yield "version is `none` exactly if the program was not tried"
    if is_tried != is_past_day(row["last run"]) or (not is_tried and row["last run"] != "never"):
        yield "last run is a past day, as 2026-11-22, or `never` if the program was not tried"
    if row["test"] == "none":
        if is_tried:
            yield "was tried, and names no test"
    elif TESTS.fullmatch(row["test"]):
        yield from (f"{name} does not exist" for name in missing_tests(row["test"]))
    else:
        yield "test is not `path.py::name`"


def is_past_day(text: str) -> bool:
    try:
        return date.fromisoformat(text) <= date.today() and len(text) == 10  # noqa: DTZ011  # a day, not a moment
    except ValueError:
        return False


def missing_tests(cell: str) -> list[str]:
    named = re.findall(r"`([^`]+)`", cell)
    return [name for name in named if not is_defined(*name.split("::"))]


def is_defined(path: str, *names: str) -> bool:
    return (ROOT / path).is_file() and set(names) <= defined_names(path)


@cache
def defined_names(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    kinds = ast.FunctionDef | ast.ClassDef
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


TABLES = read_tables(DOCUMENT)


def test_document_has_one_table_for_each_program() -> None:
    assert tuple(TABLES) == PROGRAMS
    assert {tuple(rows[0]) for rows in TABLES.values()} == {COLUMNS}
    assert {name for name, rows in TABLES.items() if len(rows) < 2} == set()


@pytest.mark.parametrize("program", PROGRAMS)
def test_rows_of_program_are_complete(program: str) -> None:
    rows = TABLES[program][1:]
    assert [f"{row[0]}: {error}" for row in rows for error in find_errors(row)] == []
    behaviours = [row[0] for row in rows]
    assert sorted(behaviours) == sorted(set(behaviours))


GOOD = ["a", "same", "b", "1.2", "2026-11-22", "`tests/test_fidelity.py::find_errors`"]


@pytest.mark.parametrize(
    ("place", "cell"),
    [
        ("behaviour", ""),
        ("lab", "similar"),
        ("lab", "differs:"),
        ("real", "not tried: no program"),
        ("version", "none"),
        ("last run", "22.11.2026"),
        ("last run", "never"),
        ("last run", "9999-01-01"),
        ("test", "none"),
        ("test", "tests/test_fidelity.py"),
        ("test", "`tests/test_fidelity.py::test_absent`"),
        ("test", "`tests/absent.py::test_absent`"),
    ],
)
def test_wrong_cell_is_found(place: str, cell: str) -> None:
    assert list(find_errors(GOOD)) == []
    wrong = list(GOOD)
    wrong[COLUMNS.index(place)] = cell
    assert list(find_errors(wrong)) != []
    assert list(find_errors(GOOD[1:])) != []
