"""ID maps, and the sandbox that a real process runs in."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.builder.sandboxing import make_program, needs_namespaces
from tests.fixtures.processes import find_processes
from tests.waiting import wait_until
from treenail.builder.buildah.program import (
    choose_id_maps,
    count_own_ids,
    find_subordinate_ids,
    make_environment,
)
from treenail.builder.phases.build import count_oom_kills
from treenail.errors import CommandError, CommandTimeoutError, HostError

KEEPER = """
import os, sys
from pathlib import Path
from tests.builder.sandboxing import make_program
make_program(Path(sys.argv[1])).run_program(
    ["sh", "-c", "sleep 7654321 & sleep 7654321 & echo started; wait"], timeout_s=60,
    add_line=lambda line: print(line, flush=True))
"""


def test_count_of_own_ids_ends_at_the_first_gap() -> None:
    assert count_own_ids("         0          0 4294967295\n") == 4294967295
    assert count_own_ids("0 1000 1\n1 100000 65536\n") == 65537
    assert count_own_ids("0 1000 1\n5 100000 65536\n") == 1
    assert count_own_ids("") == 0


def test_subordinate_ids_are_those_of_name_or_number() -> None:
    text = "# comment\nalice:100000:65536\n1000:300000:70000\nbob:1:x\n"
    assert find_subordinate_ids(text, 1000, "alice") == (300000, 70000)
    assert find_subordinate_ids(text, 7, "bob") == (0, 0)


@pytest.mark.parametrize(
    ("own", "subordinate", "expected"),
    [
        ("0 0 4294967295", "", f"0 {0x7F000000} 65536"),
        ("0 0 4294967295", "alice:1:65536\nroot:200000:65536", "0 200000 65536"),
        ("0 0 4294967295", "root:200000:1000", f"0 {0x7F000000} 65536"),
        # In a container with a user namespace.
        ("0 100000 65536", "root:200000:65536", "0 1 65535"),
        ("0 1000 1\n1 100000 65536", "", "0 1 65536"),
        ("0 1000 1", "", None),
    ],
)
def test_instructions_of_root_have_other_ids(
    tmp_path: Path, own: str, subordinate: str, expected: str | None
) -> None:
    (tmp_path / "self").mkdir()
    for name in ("subuid", "subgid", "self/uid_map", "self/gid_map"):
        (tmp_path / name).write_text(own if "self" in name else subordinate)
    if expected is None:
        with pytest.raises(HostError, match="expected 65536 IDs in /proc/self/uid_map, found 1"):
            choose_id_maps(0, "root", 0, proc=tmp_path, etc=tmp_path)
        return
    maps = choose_id_maps(0, "root", 0, proc=tmp_path, etc=tmp_path)
    assert (maps.uid_map, maps.gid_map) == (expected, expected)
    assert maps.root == (int(expected.split()[1]),) * 2


def test_choice_for_user_without_subordinate_ids_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        choose_id_maps(4711, "unknown-user", 4711, proc=Path("/proc"), etc=tmp_path)
    assert "usermod" in caught.value.remedy or "uidmap" in caught.value.remedy


def test_environment_has_proxies_and_no_other_variable(tmp_path: Path) -> None:
    given = {"HTTPS_PROXY": "http://proxy:3128", "TOKEN": "secret", "REGISTRY_AUTH_FILE": "/auth"}
    made = make_environment(given, tmp_path)
    assert made["HTTPS_PROXY"] == "http://proxy:3128"
    assert "TOKEN" not in made
    assert made["REGISTRY_AUTH_FILE"] == os.devnull


@pytest.mark.parametrize(
    ("cgroup", "file", "content"),
    [
        ("0::/pod/builder\n", "pod/builder/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("5:cpu:/\n4:memory:/pod\n", "memory/pod/memory.oom_control", "under_oom 0\noom_kill 2\n"),
    ],
)
def test_oom_count_is_read_from_the_own_cgroup(
    tmp_path: Path, cgroup: str, file: str, content: str
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroups"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    assert count_oom_kills(proc, cgroups) is None
    (cgroups / file).parent.mkdir(parents=True)
    (cgroups / file).write_text(content)
    assert count_oom_kills(proc, cgroups) == 2


@needs_namespaces
@pytest.mark.process
def test_sandboxed_program_reports_output_and_exit_code(tmp_path: Path) -> None:
    lines: list[str] = []
    program = make_program(tmp_path)
    script = "echo out; echo err >&2; id -u; printf rest; exit 3"
    code = program.run_program(["sh", "-c", script], timeout_s=30, add_line=lines.append)
    assert (code, lines) == (3, ["out", "err", "0", "rest"])
    assert program.run_program(["sh", "-c", "kill -9 $$"], timeout_s=30, add_line=print) == 137


@needs_namespaces
@pytest.mark.process
def test_sandboxed_program_that_forks_without_end_is_stopped(tmp_path: Path) -> None:
    lines: list[str] = []
    script = "i=0; while [ $i -lt 100 ]; do sleep 7654327 & i=$((i+1)); done; echo no"
    command = ["prlimit", "--nproc=64", "sh", "-c", script]
    make_program(tmp_path).run_program(command, timeout_s=30, add_line=lines.append)
    assert lines
    assert "no" not in lines
    wait_until(lambda: not find_processes("7654327"))


def run_elsewhere(
    work: Path, command: list[str], *, before: Sequence[str] = (), **options: Any
) -> list[str]:
    """Sandbox the command from another process; return its lines."""
    code = (
        "import sys; from pathlib import Path; from tests.builder.sandboxing import make_program\n"
        "make_program(Path(sys.argv[1])).run_program(sys.argv[2:], timeout_s=30, add_line=print)"
    )
    done = subprocess.run(
        [*before, sys.executable, "-c", code, str(work), *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        **options,
    )
    return str(done.stdout).splitlines()


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to have another group")
@pytest.mark.process
def test_sandboxed_program_has_no_group_of_its_user(tmp_path: Path) -> None:
    lines = run_elsewhere(tmp_path, ["cat", "/proc/self/status"], extra_groups=[4, 47110])
    assert [line.split()[1:] for line in lines if "Groups:" in line] == [[]]


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mask /proc")
@pytest.mark.process
def test_working_directory_of_no_process_leads_out_where_proc_is_masked(tmp_path: Path) -> None:
    # As a container runtime does; the kernel then refuses another mount of proc.
    mask = (
        "mount --make-rprivate / && mount -t proc proc /proc && "
        'mount --bind -o ro /proc/sys /proc/sys && exec "$@"'
    )
    script = "for p in /proc/[0-9]*; do echo $(readlink $p/cwd); done; echo end"
    *found, end = run_elsewhere(
        tmp_path,
        ["sh", "-c", script],
        before=("unshare", "--mount", "--pid", "--fork", "sh", "-c", mask, "sh"),
    )
    assert end == "end"
    assert {path for path in found if path} <= {"/"}


@needs_namespaces
@pytest.mark.process
def test_sandboxed_program_that_is_missing_raises(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nosuchprogram"):
        make_program(tmp_path).run_program(["nosuchprogram"], timeout_s=30, add_line=print)


@needs_namespaces
@pytest.mark.process
def test_sandboxed_program_beyond_its_time_leaves_no_process(tmp_path: Path) -> None:
    script = "sleep 7654322 & sleep 7654322"
    with pytest.raises(CommandTimeoutError):
        make_program(tmp_path).run_program(["sh", "-c", script], timeout_s=1, add_line=print)
    wait_until(lambda: not find_processes("7654322"))


@needs_namespaces
@pytest.mark.process
def test_sandboxed_program_that_ends_takes_its_children_along(tmp_path: Path) -> None:
    script = "setsid sleep 7654323 & exit 0"
    assert not make_program(tmp_path).run_program(
        ["sh", "-c", script], timeout_s=30, add_line=print
    )
    wait_until(lambda: not find_processes("7654323"))


@needs_namespaces
@pytest.mark.process
def test_sandboxed_program_of_a_killed_builder_ends(tmp_path: Path) -> None:

    with subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as builder:
        assert builder.stdout.readline() == b"started\n"
        builder.send_signal(signal.SIGKILL)
    wait_until(lambda: not find_processes("7654321"))
