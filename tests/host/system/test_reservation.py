"""Disk space that is reserved for a rollback."""

import logging
from pathlib import Path

import pytest

from treenail.host.filesystem.root_directory import Root
from treenail.host.system.disk_space import RESERVATION_PATH, RESERVATION_SIZE, SpaceReservation


def test_space_is_reserved_until_released(tmp_path: Path) -> None:
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


def test_reserve_on_full_disk_logs_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        SpaceReservation(Root(tmp_path)).reserve_space()
    assert "cannot reserve disk space for a rollback" in caplog.text
