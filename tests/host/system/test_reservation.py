"""Room that is kept for the way back."""

import logging
from pathlib import Path

import pytest

from treenail.host.filesystem.root import Root
from treenail.host.system.reservation import PATH, SIZE, Reserve


def test_room_is_taken_until_it_is_let_go(tmp_path: Path) -> None:
    (tmp_path / PATH[1:]).parent.mkdir(parents=True)
    reserve = Reserve(Root(tmp_path))
    for _ in range(2):
        reserve.keep()
        taken = (tmp_path / PATH[1:]).stat()
        assert (taken.st_size, taken.st_blocks * 512 >= SIZE) == (SIZE, True)
    for _ in range(2):
        reserve.let_go()
        assert list((tmp_path / PATH[1:]).parent.iterdir()) == []


def test_a_disk_without_room_keeps_nobody_from_rebooting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Reserve(Root(tmp_path)).keep()
    assert "no room is kept for the way back" in caplog.text
