from pathlib import Path

import pytest

from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.errors import CommandError
from treenail.process import ProgramRunner

pytestmark = pytest.mark.process

PATH = "/usr/bin:/bin"


@pytest.fixture
def programs() -> ProgramRunner:
    return ProgramRunner(SystemClock(), {"PATH": PATH})


def program(directory: Path, text: str) -> str:
    path = directory / "tool"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_run_command_returns_standard_output(programs, tmp_path):
    tool = program(tmp_path, 'printf "%s|" "$@"; echo noise >&2')
    assert programs.run_command([tool, "a b", "$HOME", "*"], timeout_s=10) == b"a b|$HOME|*|"


def test_long_stdin_is_passed_to_program(programs, tmp_path):
    assert programs.run_command(["cat"], timeout_s=10, stdin=b"x" * 500_000) == b"x" * 500_000
    assert programs.run_command(["cat"], timeout_s=10) == b""


def test_program_has_given_environment_and_c_locale(tmp_path):
    programs = ProgramRunner(SystemClock(), {"PATH": PATH, "LC_ALL": "de_DE"})
    found = dict(
        line.split("=", 1)
        for line in programs.run_command(["env"], timeout_s=10).decode().splitlines()
    )
    assert found == {"PATH": PATH, "LC_ALL": "C.UTF-8"}


def test_failure_reports_program_exit_code_and_start_of_stderr(programs, tmp_path):
    tool = program(tmp_path, f"echo first >&2; echo {'x' * 5000} >&2; exit 3")
    with pytest.raises(CommandError) as failed:
        programs.run_command([tool, "--with", "argument"], timeout_s=10)
    assert str(failed.value) == f"{tool} failed with exit code 3: first {'x' * 249}…"


def test_failure_without_stderr_reports_exit_code(programs):
    with pytest.raises(CommandError, match=r"^false failed with exit code 1$"):
        programs.run_command(["false"], timeout_s=10)


def test_killed_program_reports_signal(programs, tmp_path):
    tool = program(tmp_path, "kill -TERM $$")
    with pytest.raises(CommandError, match=r"tool was killed by SIGTERM$"):
        programs.run_command([tool], timeout_s=10)


def test_failure_withholds_credentials_of_stderr(programs, tmp_path):
    tool = program(tmp_path, "echo https://me:hunter2@example.com/ >&2; exit 1")
    with pytest.raises(CommandError, match=r"exit code 1: https://example.com/$"):
        programs.run_command([tool], timeout_s=10)


def test_missing_program_is_a_command_error(programs):
    with pytest.raises(CommandError, match=r"^cannot run /no/such: No such file or directory$"):
        programs.run_command(["/no/such"], timeout_s=10)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("silent", ["", "exec >&- 2>&-;"])
def test_timeout_kills_program_and_its_children(programs, tmp_path, silent):
    tool = program(tmp_path, f"{silent} sleep 600 & echo $$ $! > {tmp_path}/pids; {silent} wait")
    with pytest.raises(CommandError, match=r"tool did not exit within 0.5 s$"):
        programs.run_command([tool], timeout_s=0.5)
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=int(pid): not running(pid))


def test_endless_output_is_an_error(programs):
    with pytest.raises(CommandError, match=r"^yes wrote more than 1048576 bytes$"):
        programs.run_command(["yes"], timeout_s=60)


def test_endless_stderr_is_discarded(programs, tmp_path):
    tool = program(tmp_path, "head -c 3000000 /dev/zero >&2; echo done")
    assert programs.run_command([tool], timeout_s=60) == b"done\n"
