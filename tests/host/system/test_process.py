from pathlib import Path

import pytest

from tests.waiting import wait_until
from treenail.clock import SystemClock
from treenail.errors import CommandError
from treenail.host.system.process import ProgramRunner

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


def test_the_output_of_a_program_is_returned(programs, tmp_path):
    tool = program(tmp_path, 'printf "%s|" "$@"; echo noise >&2')
    assert programs.run_command([tool, "a b", "$HOME", "*"], timeout_s=10) == b"a b|$HOME|*|"


def test_input_goes_in_by_standard_input_however_long_it_is(programs, tmp_path):
    assert programs.run_command(["cat"], timeout_s=10, stdin=b"x" * 500_000) == b"x" * 500_000
    assert programs.run_command(["cat"], timeout_s=10) == b""


def test_a_program_sees_the_environment_it_was_given_and_speaks_english(tmp_path):
    programs = ProgramRunner(SystemClock(), {"PATH": PATH, "LC_ALL": "de_DE"})
    found = dict(
        line.split("=", 1)
        for line in programs.run_command(["env"], timeout_s=10).decode().splitlines()
    )
    assert found == {"PATH": PATH, "LC_ALL": "C.UTF-8"}


def test_a_failure_names_program_code_and_the_beginning_of_its_error_output(programs, tmp_path):
    tool = program(tmp_path, f"echo first >&2; echo {'x' * 5000} >&2; exit 3")
    with pytest.raises(CommandError) as failed:
        programs.run_command([tool, "--with", "argument"], timeout_s=10)
    assert str(failed.value) == f"{tool} failed with exit code 3: first {'x' * 249}…"


def test_a_silent_failure_is_told_by_its_code(programs):
    with pytest.raises(CommandError, match=r"^false failed with exit code 1$"):
        programs.run_command(["false"], timeout_s=10)


def test_a_program_that_was_killed_is_told_by_the_signal(programs, tmp_path):
    tool = program(tmp_path, "kill -TERM $$")
    with pytest.raises(CommandError, match=r"tool was killed by SIGTERM$"):
        programs.run_command([tool], timeout_s=10)


def test_credentials_in_the_error_output_are_taken_out(programs, tmp_path):
    tool = program(tmp_path, "echo https://me:hunter2@example.com/ >&2; exit 1")
    with pytest.raises(CommandError, match=r"exit code 1: https://example.com/$"):
        programs.run_command([tool], timeout_s=10)


def test_a_program_that_is_not_there_is_an_error_of_ours(programs):
    with pytest.raises(CommandError, match=r"^can't run /no/such: No such file or directory$"):
        programs.run_command(["/no/such"], timeout_s=10)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("silent", ["", "exec >&- 2>&-;"])
def test_a_program_that_takes_too_long_is_killed_with_all_it_started(programs, tmp_path, silent):
    tool = program(tmp_path, f"{silent} sleep 600 & echo $$ $! > {tmp_path}/pids; {silent} wait")
    with pytest.raises(CommandError, match=r"tool was not done within 0.5 s$"):
        programs.run_command([tool], timeout_s=0.5)
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=int(pid): not running(pid))


def test_output_without_end_is_cut_off(programs):
    with pytest.raises(CommandError, match=r"^yes wrote more than 1048576 bytes$"):
        programs.run_command(["yes"], timeout_s=60)


def test_error_output_without_end_is_not_kept(programs, tmp_path):
    tool = program(tmp_path, "head -c 3000000 /dev/zero >&2; echo done")
    assert programs.run_command([tool], timeout_s=60) == b"done\n"
