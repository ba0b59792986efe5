"""The request file of the node's user."""

import stat
from pathlib import Path

import pytest

from treenail.daemon.local.requests import REQUEST_FILE, RequestFile
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail.update.decision.user_requests import RequestKind, UserRequest

CANCEL = UserRequest(RequestKind.CANCEL, "1")


def test_request_file_has_mode_0600_and_can_be_removed(tmp_path: Path) -> None:
    requests = RequestFile(HostFiles(Root(tmp_path)))
    assert requests.read_request() is None
    requests.write_request(CANCEL)
    assert stat.S_IMODE((tmp_path / REQUEST_FILE[1:]).stat().st_mode) == 0o600
    assert requests.read_request() == CANCEL
    requests.remove_request()
    requests.remove_request()
    assert requests.read_request() is None


@pytest.mark.parametrize("text", ["", "{", "[" * 5000, '{"version": 9}', "x" * 5000])
def test_invalid_request_is_removed(tmp_path: Path, text: str) -> None:
    path = tmp_path / REQUEST_FILE[1:]
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert RequestFile(HostFiles(Root(tmp_path))).read_request() is None
    assert not path.exists()
