"""Records of suites, as docs/what-it-survives.md shows them."""

import json
from pathlib import Path

import pytest

from tests.records import VARIABLE, write_record


@pytest.mark.process
def test_record_of_the_same_subject_replaces_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    write_record("crash", what="states", count=1, result="old or new", command="make test-long")
    write_record("crash", what="mutations", count=7, result="noticed", command="make test-long")
    write_record("crash", what="states", count=2, result="old or new", command="make test-long")
    records = json.loads((tmp_path / "crash.json").read_text())
    assert [(each["what"], each["count"]) for each in records] == [("mutations", 7), ("states", 2)]
    assert set(records[0]) == {"what", "count", "result", "command", "day", "revision"}


def test_record_is_written_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    write_record("crash", what="states", count=1, result="old or new", command="make test-long")
    assert list(tmp_path.iterdir()) == []
