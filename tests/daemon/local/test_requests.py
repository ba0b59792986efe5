"""The file in which people leave their requests."""

import stat
from pathlib import Path

import pytest

from treenail.daemon.local.requests import PATH, RequestFile
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.update.decision.request import Kind, Request

CANCEL = Request(Kind.CANCEL, "1")


def test_request_is_there_until_it_is_dropped_and_roots_alone(tmp_path: Path) -> None:
    requests = RequestFile(Files(Root(tmp_path)))
    assert requests.read() is None
    requests.leave(CANCEL)
    assert stat.S_IMODE((tmp_path / PATH[1:]).stat().st_mode) == 0o600
    assert requests.read() == CANCEL
    requests.drop()
    requests.drop()
    assert requests.read() is None


@pytest.mark.parametrize("text", ["", "{", "[" * 5000, '{"version": 9}', "x" * 5000])
def test_what_nobody_understands_is_taken_away(tmp_path: Path, text: str) -> None:
    path = tmp_path / PATH[1:]
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert RequestFile(Files(Root(tmp_path))).read() is None
    assert not path.exists()
