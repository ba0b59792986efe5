"""Health checks of the administrator, as real programs."""

from pathlib import Path

import pytest

from treenail.clocks import SystemClock
from treenail.errors import FileError
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.health_probes import MAX_CHECKS, HealthCheckDirectory
from treenail.process import ProgramRunner

DIRECTORY = "/etc/treenail/health.d"


def checks(root: Path) -> HealthCheckDirectory:
    programs = ProgramRunner(SystemClock(), {"PATH": "/usr/bin:/bin"})
    return HealthCheckDirectory(Root(root), programs, DIRECTORY)


def put(root: Path, name: str, text: str = "exit 0", mode: int = 0o755) -> None:
    path = root / DIRECTORY[1:] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)


def test_list_checks_returns_sorted_executable_files(tmp_path: Path) -> None:
    put(tmp_path, "20-dns")
    put(tmp_path, "10-disk")
    put(tmp_path, "notes.txt", mode=0o644)
    put(tmp_path, ".hidden")
    (tmp_path / DIRECTORY[1:] / "folder").mkdir()
    (tmp_path / DIRECTORY[1:] / "gone").symlink_to("nowhere")
    assert checks(tmp_path).list_checks() == ("10-disk", "20-dns")


def test_list_checks_without_directory_is_empty(tmp_path: Path) -> None:
    assert checks(tmp_path).list_checks() == ()


def test_list_checks_above_limit_is_an_error(tmp_path: Path) -> None:
    for number in range(MAX_CHECKS + 1):
        put(tmp_path, f"check-{number}")
    with pytest.raises(FileError, match=r"cannot run the checks in .*: 65 exceed the limit of 64"):
        checks(tmp_path).list_checks()


@pytest.mark.process
def test_check_with_exit_code_zero_passes(tmp_path: Path) -> None:
    put(tmp_path, "fine", "echo all is fine; exit 0")
    assert checks(tmp_path).run_check("fine", timeout_s=10) == ""


@pytest.mark.process
def test_failed_check_returns_its_error_without_credentials(tmp_path: Path) -> None:
    put(tmp_path, "dns", "echo 'no answer from https://me:hunter2@dns.example' >&2; exit 3")
    problem = checks(tmp_path).run_check("dns", timeout_s=10)
    assert problem == "dns failed with exit code 3: no answer from https://dns.example"


@pytest.mark.process
def test_hanging_check_is_killed(tmp_path: Path) -> None:
    put(tmp_path, "hangs", "sleep 600 & echo $! > $0.pid; wait")
    assert checks(tmp_path).run_check("hangs", timeout_s=0.5) == "hangs did not exit within 0.5 s"


@pytest.mark.process
def test_check_that_cannot_start_fails(tmp_path: Path) -> None:
    put(tmp_path, "odd")
    (tmp_path / DIRECTORY[1:] / "odd").write_text("#!/no/such/interpreter\n")
    assert (
        checks(tmp_path).run_check("odd", timeout_s=1)
        == "cannot run odd: No such file or directory"
    )


@pytest.mark.process
def test_check_with_endless_output_fails(tmp_path: Path) -> None:
    put(tmp_path, "loud", "exec cat /dev/zero")
    assert "wrote more than" in checks(tmp_path).run_check("loud", timeout_s=10)
