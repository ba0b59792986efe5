"""The snapshot of a booted machine that tests in virtual machines start from."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vmlab.snapshot import keep_snapshot
from vmlab.tools import ToolError

NAME = "booted-qemu"
KILLED_BUILD = """
import os, signal, sys
from pathlib import Path
from vmlab.snapshot import keep_snapshot

def make(disk):
    disk.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

keep_snapshot(Path(sys.argv[1]), sys.argv[2], "1", make)
"""


def keep(directory: Path, digest: str, content: bytes) -> bytes:
    def make(disk: Path) -> None:
        disk.write_bytes(content)

    return keep_snapshot(directory, NAME, digest, make).read_bytes()


def test_snapshot_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keep(tmp_path, "1", b"first") == b"first"
    assert keep(tmp_path, "1", b"second") == b"first"
    assert capsys.readouterr().err == ""


def test_stale_snapshot_is_replaced_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "1", b"first")
    assert keep(tmp_path, "2", b"second") == b"second"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("the snapshot booted-qemu-1 is stale, making booted-qemu-2")
    assert [path.name for path in tmp_path.iterdir()] == ["booted-qemu-2"]


@pytest.mark.parametrize("kept", [b"", b"firs", b"f1rst"])
def test_damaged_snapshot_is_made_again_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: bytes
) -> None:
    keep(tmp_path, "1", b"first")
    (tmp_path / "booted-qemu-1/disk.qcow2").write_bytes(kept)
    assert keep(tmp_path, "1", b"second") == b"second"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("the snapshot booted-qemu-1 is damaged, making it again")


@pytest.mark.parametrize("lost", ["disk.qcow2", "checksum"])
def test_snapshot_that_lost_a_file_is_made_again(tmp_path: Path, lost: str) -> None:
    keep(tmp_path, "1", b"first")
    (tmp_path / "booted-qemu-1" / lost).unlink()
    assert keep(tmp_path, "1", b"second") == b"second"


def test_snapshot_of_an_earlier_layout_is_removed(tmp_path: Path) -> None:
    (tmp_path / "booted-qemu-1.qcow2").write_bytes(b"earlier")
    keep(tmp_path, "1", b"first")
    assert [path.name for path in tmp_path.iterdir()] == ["booted-qemu-1"]


def test_failed_build_leaves_no_snapshot(tmp_path: Path) -> None:
    def fail(disk: Path) -> None:
        disk.write_bytes(b"half")
        raise ToolError("boot 1 not within 240 s")

    with pytest.raises(ToolError):
        keep_snapshot(tmp_path, NAME, "1", fail)
    assert keep(tmp_path, "1", b"second") == b"second"
    assert [path.name for path in tmp_path.iterdir()] == ["booted-qemu-1"]


@pytest.mark.process
def test_killed_build_leaves_no_snapshot(tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED_BUILD, str(tmp_path), NAME]
    killed = subprocess.run(words, env={"PYTHONPATH": ":".join(sys.path)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert keep(tmp_path, "1", b"second") == b"second"
    assert [path.name for path in tmp_path.iterdir()] == ["booted-qemu-1"]
