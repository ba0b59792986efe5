"""Commands in the other documents are accepted by the parsers of the product."""

import re
from pathlib import Path

import pytest

from tests.docs.command_lines import find_problems

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_BLOCK = re.compile(r"^ *```.*?\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_commands_in_document_are_accepted_by_parsers(document: Path) -> None:
    blocks = _BLOCK.findall(document.read_text(encoding="utf-8"))
    assert [found for block in blocks for found in find_problems(_find_input(block))] == []


def _find_input(block: str) -> str:
    """Return the block without prompts and output."""
    typed = re.findall(r"^\$ (.*(?:\\\n.*)*)", block, re.MULTILINE)
    return "\n".join(typed) if typed else block


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_applied_manifests_name_an_image(document: Path) -> None:
    # The default is an image that only the machine of the build has.
    text = document.read_text(encoding="utf-8")
    applied = re.findall(r"^.*manifests .*\| kubectl apply.*$", text, re.MULTILINE)
    assert [line for line in applied if not re.search("--image|--only", line)] == []
