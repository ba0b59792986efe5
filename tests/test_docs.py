"""The documents name what exists: paths, modules, tests, links, metrics, layers and phases."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from tests.test_layers import ROWS
from tools import diagrams
from treenail.daemon.agent_settings import (
    DriftSettings,
    FirstBootSettings,
    HealthSettings,
    LimitSettings,
    PartialSettings,
    PreflightSettings,
)
from treenail.update.checks.health import ROLLBACK_RULES

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
    ROOT / "vm-tests/README.md",
]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
SOURCES = ROOT / "agent/treenail"
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#]+)")
ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)+/?")
DOTTED = re.compile(r"(treenail|treenail_lab|vmlab|tests|tools|bench)(\.\w+)+")
# A path begins in one of these. A module may also have its name alone.
BASES = (ROOT, SOURCES, ROOT / "lab", ROOT / "lab/treenail_lab", ROOT / "vm-tests")
PLACEHOLDER = re.compile(r"\b[A-Z]+\b")
UNIT_FILES = (".service", ".if")
SETTINGS = (
    PartialSettings, LimitSettings, HealthSettings, PreflightSettings, DriftSettings,
    FirstBootSettings,
)  # fmt: skip
TARGET = re.compile(r"`?make ([a-z][a-z-]*)")


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_link_in_document_names_existing_file(document: Path) -> None:
    links = LINK.findall(document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_anchor_in_document_names_existing_heading(document: Path) -> None:
    for path, anchor in ANCHOR.findall(document.read_text()):
        target = document.parent / path if path else document
        assert anchor in list_anchors(target), f"{path}#{anchor}"


def list_anchors(document: Path) -> set[str]:
    """Return the anchors that a forge gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_path_in_document_exists(document: Path) -> None:
    assert [word for word in list_words(document) if not exists_in_repository(word)] == []


@pytest.mark.parametrize(
    ("word", "exists"),
    [
        ("update/impact/impact.py", True),
        ("update/drift", True),
        ("daemon/reconcile/absent.py", False),
        ("controllers/absent", False),
        ("decide_boot.py", True),
        ("absent_module.py", False),
        ("treenail.builder", True),
        ("treenail.absent.module", False),
        ("tests/test_docs.py", True),
        ("tests/absent", False),
        ("tests/data/fuzz/TARGET", True),
        ("treenail.service", True),
        ("/etc/treenail/agent.toml", True),
        ("quay.io/example/os", True),
    ],
)
def test_missing_path_of_the_repository_is_found_among_other_words(word: str, exists: bool) -> None:
    assert exists_in_repository(word) is exists


def list_words(document: Path) -> Iterator[str]:
    """Yield the words of inline code, without tests behind a path and punctuation."""
    for code in re.findall(r"`([^`\n]+)`", document.read_text()):
        for word in code.split():
            yield word.removeprefix("ARGS=").strip("'\".,;()").split("::")[0]


def exists_in_repository(word: str) -> bool:
    """Return False for a path or a module that the repository lacks; True for any other word."""
    if DOTTED.fullmatch(word) and not word.endswith(UNIT_FILES):
        # The last part may be a name of the module.
        path = word.replace(".", "/")
        bases = (ROOT, SOURCES.parent, ROOT / "lab", ROOT / "vm-tests")
        return any(exists_below(bases, each) for each in (path, path.rpartition("/")[0]))
    if re.fullmatch(r"\w+\.py", word):
        return word in list_module_names()
    top = word.split("/", maxsplit=1)[0]
    # `build` has what a command wrote, if it ran here.
    if PATH.fullmatch(word) and top != "build" and any((base / top).is_dir() for base in BASES):
        return exists_below(BASES, PLACEHOLDER.sub("", word))
    return True


def exists_below(bases: tuple[Path, ...], path: str) -> bool:
    return any((base / path).exists() or (base / f"{path}.py").exists() for base in bases)


@cache
def list_module_names() -> frozenset[str]:
    folders = ("agent", "lab", "tests", "tools", "bench", "vm-tests")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_tests_in_documents_exist() -> None:
    named = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"\b(test_\w+)\b(?!\.py|/)", document.read_text())
    }
    defined = {
        name
        for folder in ("tests", "vm-tests")
        for path in (ROOT / folder).rglob("*.py")
        for name in [path.stem, *re.findall(r"def (test_\w+)", path.read_text())]
    }
    assert named - defined == set()


def test_layers_in_document_are_the_rows_of_the_import_rules() -> None:
    block = ARCHITECTURE.split("ROWS of tests/test_layers.py -->\n```\n")[1].split("```")[0]
    rows = [set(re.split(r" {3,}", line)[0].split()) for line in block.splitlines()]
    # The lowest row is the last one of the document, which leaves __main__ out.
    expected = [{"treenail_lab" if name == "lab" else name for name in row} for row in ROWS[:-1]]
    assert rows == expected[::-1]


def test_rooms_in_document_are_packages_and_complete() -> None:
    table = ARCHITECTURE.split("| package | rooms |\n|---|---|\n")[1].split("\n\n")[0]
    for line in table.splitlines():
        package, rooms = line.strip("| ").split(" | ")
        folder = SOURCES / package.strip("`")
        names = {each.name for each in folder.iterdir() if (each / "__init__.py").exists()}
        written = [each for each in re.findall(r"`(\w+)`", rooms) if each in names]
        assert set(written) == names, package


def test_index_of_modules_is_short() -> None:
    table = ARCHITECTURE.split("| question | module |\n|---|---|\n")[1].split("\n\n")[0]
    assert len(table.splitlines()) <= 25


@cache
def list_metrics() -> set[str]:
    """Return the names of the metrics, without the prefix of those of the controllers."""
    makers = {"add_counter", "add_gauge", "add_histogram", "MetricTable", "make_table"}
    calls = [
        call
        for path in SOURCES.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] in makers
    ]
    names = {
        call.args[0].value
        for call in calls
        if call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }
    of_agent = (SOURCES / "daemon/local/metrics.py").read_text()
    return names | set(re.findall(r'"((?:mcd|treenail)_\w+)"', of_agent))


def test_operations_list_every_metric() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    assert {name for name in list_metrics() if not re.search(rf"\b{name}\b", text)} == set()
    assert len(list_metrics()) > 35


def test_event_reasons_in_documents_are_in_the_sources() -> None:
    sources = "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))
    named = {
        reason
        for document in DOCUMENTS
        for list_of_reasons in re.findall(
            r"Events? ((?:`[A-Z]\w+`(?:, | and | or )?)+)", document.read_text()
        )
        for reason in re.findall(r"`(\w+)`", list_of_reasons)
    }
    assert {reason for reason in named if f'"{reason}"' not in sources} == set()
    assert len(named) >= 10


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_make_target_in_document_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(re.findall(r"```.*?```|`[^`]*`", document.read_text(), re.DOTALL))
    assert set(TARGET.findall(code)) <= targets


@pytest.mark.parametrize("settings", SETTINGS)
def test_configuration_lists_every_setting_with_default(settings: type[PartialSettings]) -> None:
    rows = (ROOT / "docs/configuration.md").read_text().splitlines()
    for field in fields(settings):
        if any(f"`[{field.name}]`" in row for row in rows):
            continue  # a table
        (row,) = (row for row in rows if row.startswith(f"| `{field.name}` |"))
        default = row.split(" | ")[-1].removesuffix(" |")
        if isinstance(field.default, str) and field.default:
            assert default == f'`"{field.default}"`', field.name
        elif isinstance(field.default, int | float):
            assert default == f"{field.default:g}", field.name
        else:
            assert default, field.name


def test_rollback_rules_in_documents_equal_those_of_the_code() -> None:
    document = (ROOT / "docs/health.md").read_text()
    table = document.split("equal to ROLLBACK_RULES -->\n")[1].split("<!-- end of rollback rules")[
        0
    ]
    rows = [row.strip("|").split(" | ") for row in table.splitlines()[2:]]
    assert [(check.strip(), text.strip()) for check, text in rows] == [
        (rule.check, rule.condition) for rule in ROLLBACK_RULES
    ]


def test_phases_in_document_equal_transition_table() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert diagrams.document_with_phases(text) == text
    assert (ROOT / "docs/phases.dot").read_text() == diagrams.phases_dot()


@pytest.mark.parametrize("source", sorted((ROOT / "docs").glob("*.dot")), ids=ids)
def test_diagram_was_drawn_from_its_source(source: Path) -> None:
    drawn = source.with_suffix(".svg").read_text()
    assert drawn.endswith(diagrams.digest_comment(source.read_text()))


def test_glossary_has_words_of_the_sources_only() -> None:
    folders = (SOURCES, ROOT / "lab", ROOT / "tests")
    sources = "".join(path.read_text() for each in folders for path in each.rglob("*.py"))
    plain = re.sub(r"[\W_]", "", sources).lower()
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    words = [word for word in rows if word != "word"]
    assert [word for word in words if re.sub(r"[\W_]", "", word).lower() not in plain] == []
    assert len(words) > 20


def test_news_is_short_and_no_diary() -> None:
    text = (ROOT / "NEWS.md").read_text()
    assert len(text.splitlines()) <= 250
    assert re.findall(r"\b[Bb]efore,|\bso far\b|\bused to\b", text) == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
