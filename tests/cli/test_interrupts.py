"""Ctrl-C, closed pipes and plain terminals, through processes."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ENTRIES = ("run_treenail", "run_controller", "run_kubectl_plugin")
# Sends SIGINT to itself while it imports the module.
INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from treenail.cli import entry
sys.exit(entry.{entry}())
"""
CONFIG = "kind: MachineConfig\nmetadata: {name: a}\n"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def start(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]  # options of the caller
        [sys.executable, "-c", code, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        **{"env": ENVIRONMENT, "stdout": subprocess.PIPE, **options},
    )


# The tests themselves may be a background job, whose children ignore interrupts.
HEEDED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def call(entry: str) -> str:
    return f"import sys; from treenail.cli import entry; sys.exit(entry.{entry}())"


@pytest.mark.parametrize("entry", ENTRIES)
def test_interrupt_while_modules_load_prints_nothing(entry: str) -> None:
    module = "treenail.cli.node.main" if entry == "run_treenail" else "treenail.cli.controller.main"
    with start(
        HEEDED + INTERRUPTED_IMPORT.format(module=module, entry=entry), "--version"
    ) as process:
        assert process.communicate(timeout=100) == ("", "")
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("entry", "command"),
    [
        ("run_treenail", ("plan", "{file}", "{file}")),
        ("run_controller", ("render", "-f", "{file}")),
        ("run_kubectl_plugin", ("plan", "-f", "{file}")),
    ],
)
def test_interrupt_of_a_command_prints_nothing(
    tmp_path: Path, entry: str, command: tuple[str, ...]
) -> None:
    file = tmp_path / "file"
    os.mkfifo(file)
    arguments = [each.format(file=file) for each in command]
    with start(HEEDED + call(entry), *arguments) as process:
        # The pipe is opened for writing as soon as the command reads it.
        with file.open("wb"):
            process.send_signal(signal.SIGINT)
        # The end of file wakes a command that began to read after Python had noted the signal.
        assert process.communicate(timeout=100) == ("", "")
    assert process.returncode == 130


def test_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    os.mkfifo(file)
    other.write_text(CONFIG)
    # As a shell starts a background job.
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + call("run_treenail")
    with start(code, "plan", str(file), str(other)) as process:
        with file.open("w") as stream:
            process.send_signal(signal.SIGINT)
            stream.write(CONFIG)
        process.communicate(timeout=100)
    assert process.returncode == 0


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "xterm"}])
def test_terminal_gets_escape_sequences_unless_it_is_plain(
    tmp_path: Path, setting: dict[str, str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text(CONFIG)
    new.write_text("kind: MachineConfig\nmetadata: {name: b}\nspec: {kernelArguments: [quiet]}\n")
    terminal, other = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm", **setting}
    environment = {
        name: value
        for name, value in environment.items()
        if name != "NO_COLOR" or "NO_COLOR" in setting
    }
    with start(
        call("run_treenail"), "plan", str(old), str(new), stdout=other, env=environment
    ) as process:
        os.close(other)
        shown = os.read(terminal, 65536)
        process.communicate(timeout=100)
    os.close(terminal)
    assert process.returncode == 3
    assert (b"\x1b[" in shown) is (setting == {"TERM": "xterm"})
