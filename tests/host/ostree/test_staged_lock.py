"""The lock of the staged deployment is read as libostree writes it."""

from pathlib import Path

import pytest
from gi.repository import GLib

from treenail.errors import HostError
from treenail.host.filesystem.root_directory import Root
from treenail.host.ostree.sysroot import is_staged_locked


def write_state(root: Path, content: bytes) -> Path:
    path = root / "run/ostree/staged-deployment"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def serialize(**values: GLib.Variant) -> bytes:
    content = GLib.Variant("a{sv}", values).get_data_as_bytes().get_data()
    assert content is not None
    return content


@pytest.mark.parametrize(
    ("values", "is_locked"),
    [
        ({"locked": GLib.Variant("b", True)}, True),
        ({"locked": GLib.Variant("b", False)}, False),
        ({"locked": GLib.Variant("s", "yes")}, False),
        ({}, False),
        (
            {
                "target": GLib.Variant("(sss)", ("fedora", "1" * 64, "0")),
                "kargs": GLib.Variant("as", ["rw", "nosmt"]),
                "locked": GLib.Variant("b", True),
            },
            True,
        ),
    ],
)
def test_lock_is_the_boolean_in_the_record(tmp_path: Path, values, is_locked: bool) -> None:
    write_state(tmp_path, serialize(**values))
    assert is_staged_locked(Root(tmp_path)) is is_locked


def test_nothing_staged_is_not_locked(tmp_path: Path) -> None:
    assert not is_staged_locked(Root(tmp_path))


def test_lock_file_of_former_libostree_counts(tmp_path: Path) -> None:
    path = write_state(tmp_path, serialize())
    path.with_name("staged-deployment-locked").touch()
    assert is_staged_locked(Root(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\0", b"locked", bytes(range(256)) * 9])
def test_damaged_record_is_not_locked(tmp_path: Path, content: bytes) -> None:
    write_state(tmp_path, content)
    assert not is_staged_locked(Root(tmp_path))


def test_record_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run/ostree/staged-deployment"
    path.mkdir(parents=True)
    with pytest.raises(HostError, match="cannot read /run/ostree/staged-deployment: Is a dir"):
        is_staged_locked(Root(tmp_path))
