"""Room that is kept for the way back."""

import logging
from pathlib import Path

import pytest

from treenail.host.filesystem.root import Root
from treenail.host.system.reservation import RESERVATION_PATH, RESERVATION_SIZE, SpaceReservation


def test_room_is_taken_until_it_is_let_go(tmp_path: Path) -> None:
    (tmp_path / RESERVATION_PATH[1:]).parent.mkdir(parents=True)
    reserve = SpaceReservation(Root(tmp_path))
    for _ in range(2):
        reserve.reserve_space()
        taken = (tmp_path / RESERVATION_PATH[1:]).stat()
        assert (taken.st_size, taken.st_blocks * 512 >= RESERVATION_SIZE) == (
            RESERVATION_SIZE,
            True,
        )
    for _ in range(2):
        reserve.release_space()
        assert list((tmp_path / RESERVATION_PATH[1:]).parent.iterdir()) == []


def test_a_disk_without_room_keeps_nobody_from_rebooting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        SpaceReservation(Root(tmp_path)).reserve_space()
    assert "no room is kept for the way back" in caplog.text
