"""The README's picture of a rollout shows the table as the command prints it today."""

import json
import re
from pathlib import Path

from tools.picture import OBJECTS, PICTURE, draw_picture, rate_moment, read_picture_text
from tools.picture import build_picture_rows as build_rows

ROOT = Path(__file__).parent.parent


def test_picture_is_current() -> None:
    # Texts alone: another version of rich may draw other colours and distances.
    drawn = draw_picture(json.loads(OBJECTS.read_text()))
    assert read_picture_text(PICTURE.read_text()) == read_picture_text(drawn), "run: make picture"


def test_picture_shows_a_rollout_in_progress() -> None:
    rows = build_rows(json.loads(OBJECTS.read_text()))
    assert rate_moment(rows) >= 5
    assert [row.state for row in rows] == ["Updating"]
    text = " ".join(read_picture_text(PICTURE.read_text()))
    for word in ("NODE", "STATE", "BOOTED", "PROGRESS", "OUT", "nodes updated"):
        assert word in text


def test_picture_loads_nothing_and_readme_shows_it() -> None:
    found = set(re.findall(r"https?://[^\"' <)]+", PICTURE.read_text()))
    assert found <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "](docs/picture.svg)" in (ROOT / "README.md").read_text()
