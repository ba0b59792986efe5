"""The documents name what exists: paths, links, targets of make, and the phases of an update."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

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
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("**/*.md"))
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#]+)")
ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
MODULE = re.compile(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:py|md|service|toml))`")
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
def test_path_in_document_names_existing_module(document: Path) -> None:
    roots = (ROOT, ROOT / "agent/treenail", ROOT / "lab")
    paths = MODULE.findall(document.read_text())
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_make_target_in_document_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(re.findall(r"```.*?```|`[^`]*`", document.read_text(), re.DOTALL))
    assert set(TARGET.findall(code)) <= targets


@pytest.mark.parametrize("settings", SETTINGS)
def test_configuration_lists_every_setting_with_default(settings: type[PartialSettings]) -> None:
    rows = (ROOT / "docs/configuration.md").read_text().splitlines()
    for field in fields(settings):
        if isinstance(field.default, SETTINGS):
            continue
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


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
