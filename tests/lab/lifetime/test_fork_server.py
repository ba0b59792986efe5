"""Processes that the fork server starts are those that their command lines would start."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from treenail_lab.lifetime import fork_server
from treenail_lab.lifetime.fork_server import LabProcess, build_client_command, run_process
from treenail_lab.lifetime.interpreter import PYTHON_MODULE, build_python_path
from treenail_lab.lifetime.owner import owner
from treenail_lab.lifetime.reaper import find_marked

pytestmark = pytest.mark.process

PYTHON = PYTHON_MODULE[:-1]
Starter = Callable[..., "subprocess.Popen[str]"]

# What a program can see of its start.
SIGHT = """
import gc, json, os, resource, signal, sys, threading, warnings
number = resource.RLIMIT_NOFILE
print(json.dumps({
    "arguments": sys.argv,
    "name": __name__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "environment": {k: v for k, v in os.environ.items() if not k.startswith("LC_")},
    "shown": sorted(
        line for line in open("/proc/self/environ").read().split("\\0")
        if line and not line.startswith("LC_")
    ),
    "directory": os.getcwd(),
    "descriptors": sorted(set(os.listdir("/proc/self/fd")) - {str(os.open("/proc/self/fd", 0))}),
    "session": os.getsid(0) == os.getpid(),
    "group": os.getpgid(0) == os.getpid(),
    "umask": os.umask(0),
    "ignored": [n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "path": sys.path[:4],
    "threads": threading.active_count(),
    "gc": gc.isenabled(),
    "limit": resource.getrlimit(number),
    "errors": [sys.stdin.errors, sys.stdout.errors, sys.stderr.errors],
    "encoding": [sys.stdin.encoding, sys.stdout.encoding],
    "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "input": sys.stdin.read(),
}))
"""


def make_environment(**more: str) -> dict[str, str]:
    return {**os.environ, **owner.mark_environment(), "PYTHONPATH": build_python_path(), **more}


def start_client(command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(build_client_command(command), **options)


def start_forked(command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    process = LabProcess(command, **options)
    assert process.is_forked
    return process


starters = pytest.mark.parametrize("start", [start_forked, start_client])


def look(start: Starter, words: Sequence[str] = ("a", "b c"), **options: Any) -> dict[str, Any]:
    options = {"env": make_environment(), **options}
    with start(
        [*PYTHON, "-c", SIGHT, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options,
    ) as process:  # fmt: skip
        output, _ = process.communicate("some text\n", timeout=60)
    found: dict[str, Any] = json.loads(output)
    return found


@starters
def test_forked_process_sees_what_a_started_one_sees(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = os.umask(0o027)
    try:
        options = {
            "env": make_environment(TREENAIL_LAB_X="x", TZ="Asia/Tokyo", LANG="C.UTF-8"),
            "cwd": tmp_path,
        }
        assert look(start, **options) == look(subprocess.Popen, **options)
    finally:
        os.umask(before)


def test_forked_process_has_the_options_of_its_start(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        options = {"start_new_session": True, "pass_fds": (file.fileno(),)}
        found = look(start_forked, **options)
        assert found == look(subprocess.Popen, **options)
    assert found["session"]


@starters
@pytest.mark.parametrize(
    "code",
    [
        "",
        "import sys; sys.exit(7)",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit('the cause')",
        "import sys; sys.exit(None)",
        "1 / 0",
        "syntax error",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getpid(), 15)",
        "import os; os._exit(5)",
        "import os; print(); os.close(1)",
    ],
)
def test_process_ends_as_python_ends(start: Starter, code: str) -> None:
    def end(starter: Starter) -> tuple[int, str]:
        with starter(
            [*PYTHON, "-c", code],
            env=make_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            _, errors = process.communicate(timeout=60)
        return process.returncode, errors

    assert end(start) == end(subprocess.Popen)


@starters
def test_exit_handlers_and_threads_run_at_the_end(start: Starter) -> None:
    code = (
        "import atexit, threading\n"
        "atexit.register(print, 'handler')\n"
        "gate = threading.Event()\n"
        "threading.Thread(target=lambda: (gate.wait(), print('thread'))).start()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "gate.set()"
    )
    with start(
        [*PYTHON, "-c", code], env=make_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        output, _ = process.communicate(timeout=60)
    assert (output.split(), process.returncode) == (["thread", "handler"], 0)


def test_processes_share_no_state() -> None:
    code = (
        "import random, sys, uuid, treenail.errors\n"
        "from treenail_lab.lifetime.owner import owner\n"
        "known = hasattr(treenail.errors, 'mark'); treenail.errors.mark = 1\n"
        "print(known, random.random(), uuid.uuid4(), owner._token)"
    )
    lines = {
        run_process(
            [*PYTHON, "-c", code], env=make_environment(), capture_output=True, text=True
        ).stdout
        for _ in range(3)
    }
    assert len(lines) == 3
    assert [line.split()[0] for line in lines] == ["False"] * 3
    columns = list(zip(*map(str.split, lines), strict=True))
    assert all(len(set(column)) == 3 for column in columns[1:])


def test_module_runs_as_main_with_its_path(tmp_path: Path) -> None:
    command = [*PYTHON_MODULE, "treenail", "--version"]
    done = run_process(command, env=make_environment(), capture_output=True, text=True)
    expected = subprocess.run(
        command, env=make_environment(), capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr, done.returncode) == (expected.stdout, "", 0)


def test_script_runs_with_its_directory_in_the_search_path(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside; print(__name__, sys.argv[0], beside.WORD)")
    command = [sys.executable, str(script)]
    with start_forked(command, env=make_environment(), stdout=subprocess.PIPE, text=True) as found:
        output, _ = found.communicate(timeout=60)
    assert output.split() == ["__main__", str(script), "beside"]


def test_process_is_a_child_in_proc_with_its_own_words() -> None:
    environment = make_environment(TREENAIL_LAB_TEST="the mark")
    command = [*PYTHON, "-c", "import sys; sys.stdin.read()", "some word"]
    with start_forked(command, env=environment, stdin=subprocess.PIPE, text=True) as process:
        place = Path(f"/proc/{process.pid}")
        assert place.joinpath("cmdline").read_bytes().rstrip(b"\0").decode().split("\0") == command
        assert list(find_marked("TREENAIL_LAB_TEST", "the mark")) == [process.pid]
        status = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines())
        assert int(status["PPid"]) == os.getpid()
    assert process.returncode == 0
    assert not place.exists()


def test_client_forwards_signals_and_ends_with_its_process() -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(9))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: signal.pause()"
    )
    with start_client(
        [*PYTHON, "-c", code], env=make_environment(), stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert int(client.stdout.readline()) != client.pid
        client.terminate()
        assert client.wait(60) == 9


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_process_ends_with_its_client(number: signal.Signals) -> None:
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with start_client(
        [*PYTHON, "-c", code], env=make_environment(), stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        client.send_signal(number)
        assert client.wait(60) == -number
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_client_ends_by_the_signal_that_ended_its_process() -> None:
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with start_client(
        [*PYTHON, "-c", code], env=make_environment(), stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        os.kill(int(client.stdout.readline()), signal.SIGKILL)
        assert client.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["/bin/true"], {}),
        ([sys.executable, "-B", "-c", ""], {}),
        ([sys.executable, "-c", ""], {"preexec_fn": os.getpid}),
        ([sys.executable, "-c", ""], {"process_group": 0}),
        ([sys.executable, "-c", ""], {"umask": 0o077}),
        ([sys.executable, "-c", ""], {"env": {"PYTHONHASHSEED": "1"}}),
        ([sys.executable, "-c", ""], {"env": make_environment(TREENAIL_LAB_FORK_SERVER="no")}),
        ([sys.executable, "-c", ""], {"env": make_environment(PYTHONPATH="/usr/lib")}),
        ([sys.executable, "-c", ""], {"env": make_environment(LC_ALL="en_US.ISO-8859-1")}),
    ],
)
def test_start_that_a_fork_cannot_imitate_runs_the_command(
    command: list[str], options: dict[str, Any]
) -> None:
    process = LabProcess(command, **{"env": make_environment(), **options})
    assert (process.wait(60), process.is_forked) == (0, False)


def test_missing_directory_is_the_error_of_a_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LabProcess([*PYTHON, "-c", ""], env=make_environment(), cwd=tmp_path / "missing")


def test_other_limits_run_the_command_itself() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    other = 4096 if soft != 4096 else 8192
    code = (
        "import resource, subprocess, sys\n"
        f"resource.setrlimit(resource.RLIMIT_CORE, ({other}, {hard}))\n"
        "print(subprocess.run(sys.argv[1:], capture_output=True, text=True).stdout)"
    )
    inner = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
    if hard != resource.RLIM_INFINITY and hard < other:
        pytest.skip("the hard limit is lower")
    command = [sys.executable, "-c", code, *build_client_command([*PYTHON, "-c", inner])]
    done = subprocess.run(
        command, env=make_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(other)


def test_variable_turns_the_fork_server_off() -> None:
    code = (
        "from treenail_lab.lifetime.fork_server import *\n"
        "command = [sys.executable, '-c', '']\n"
        "process = LabProcess(command); process.wait()\n"
        "print(process.is_forked, build_client_command(command) == command)"
    )
    environment = make_environment(**{fork_server.SWITCH: "no"})
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


OWNER = """
import os, sys
from treenail_lab.lifetime.fork_server import LabProcess
from treenail_lab.lifetime.owner import owner
program = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
environment = {**os.environ, **owner.mark_environment()}
process = LabProcess([sys.executable, "-c", program], env=environment, stdout=-1)
process.stdout.readline()
print(process.is_forked, flush=True)
sys.stdin.readline()
process.kill(), process.wait()
"""


@pytest.mark.parametrize("number", [0, signal.SIGKILL])
def test_server_and_its_processes_end_with_their_owner(number: int) -> None:
    environment = make_environment(TREENAIL_LAB_TEST=str(number))
    with subprocess.Popen(
        [*PYTHON, "-c", OWNER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        children = list(find_marked("TREENAIL_LAB_TEST", str(number)))
        assert len(children) == 4  # the owner, its reaper, the server and the program
        if number:
            process.send_signal(number)
        process.communicate("\n", timeout=60)
        assert process.returncode == -number
    wait_until(lambda: not list(find_marked("TREENAIL_LAB_TEST", str(number))))


def test_server_keeps_no_descriptor_and_no_child() -> None:
    def count_files() -> tuple[int, str]:
        place = Path(f"/proc/{server}")
        return len(list((place / "fd").iterdir())), (place / f"task/{server}/children").read_text()

    command = [*PYTHON, "-c", "import os; print(os.getppid())"]
    with start_client(
        command, env=make_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        server = int(process.communicate(timeout=60)[0])
    wait_until(lambda: not count_files()[1])
    before = count_files()
    for start in (start_client, start_forked) * 3:
        with start(command, env=make_environment(), stdout=subprocess.DEVNULL):
            pass
    # The connection of the first process may have been open at the first count.
    wait_until(lambda: count_files() <= before)
