"""Commands on damaged and foreign files: one sentence and an exit code, no traceback."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from treenail.cli.node.main import main
from treenail.cli.output import run_with_output

PROGRAM = "import sys; from treenail.cli.node.main import main; sys.exit(main())"
CONTENTS = {
    "empty": b"",
    "binary": bytes(range(256)),
    "null": b"null",
    "list": b"[]",
    "deep": b"[" * 50_000,
    "infinite": b'{"version": 1e999}',
    "digits": b'{"version": ' + b"9" * 5000 + b"}",
    "surrogate": b'{"current": {"config": "\\ud800"}, "update": null, "quarantined": null}',
    "tag": b'!!python/object/apply:os.system ["id"]',
}
STATE_FILES = (
    "var/lib/treenail/ledger.json",
    "var/lib/treenail/managed.json",
    "var/lib/treenail/once.json",
    "var/lib/treenail/undo/log",
    "var/lib/treenail/undo/pending",
    "run/treenail/status.json",
    "run/treenail/request.json",
    "etc/treenail/agent.toml",
    "etc/machine-config-daemon/currentconfig",
)
ON_STATE = ("status", "plan", "drift", "why", "history", "cancel", "retry", "handback")
ON_FILES = {"plan": ["plan", "{file}", "{file}"], "once": ["once", "{file}", "--root", "{root}"]}
FAILED = (1, 3, 64)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run a command; return its exit code, what it printed, and its errors."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run_command


@pytest.mark.parametrize("path", STATE_FILES)
def test_damaged_state_file_gives_no_traceback(run, tmp_path: Path, path: str) -> None:
    damaged = tmp_path / path
    damaged.parent.mkdir(parents=True)
    once = tmp_path / "config.json"
    once.write_text('{"ignition": {"version": "3.4.0"}}')
    for content in map(CONTENTS.__getitem__, ("empty", "binary", "list", "deep", "surrogate")):
        for arguments in (*([each] for each in ON_STATE), ["once", str(once)]):
            damaged.write_bytes(content)
            code, output, errors = run(*arguments, "--root", str(tmp_path))
            assert code == 0 or errors or output, (arguments, content[:20])
            assert len(errors) < 2000


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("command", ON_FILES)
def test_file_that_is_no_config_is_refused_in_one_sentence(
    run, tmp_path: Path, command: str, content: bytes
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    places = {"file": str(file), "root": str(tmp_path)}
    code, output, errors = run(*(each.format(**places) for each in ON_FILES[command]))
    assert (code in FAILED, output) == (True, "")
    assert errors.startswith("treenail: ")


@pytest.mark.parametrize("name", ["/nowhere", "/", "/proc/self/mem", "x" * 5000, "/dev/zero"])
def test_unreadable_file_is_refused_in_one_sentence(run, tmp_path: Path, name: str) -> None:
    for arguments in (["plan", name, name], ["once", name, "--root", str(tmp_path)]):
        code, output, errors = run(*arguments)
        assert (code in FAILED, output) == (True, "")
        assert errors.startswith("treenail: cannot read ")
        assert len(errors) < 500


@pytest.mark.process
def test_closed_standard_input_is_refused_in_one_sentence() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" once - <&-', sys.executable, PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (
        64, "treenail: cannot read the standard input: it is closed\n  name a file\n"
    )  # fmt: skip


@pytest.mark.parametrize("root", ["/nowhere", "", "x" * 5000, "/dev/null"])
@pytest.mark.parametrize("command", [*ON_STATE, "collect"])
def test_unusable_root_is_refused_in_one_sentence(run, command: str, root: str) -> None:
    code, output, errors = run(command, "--root", root)
    assert (code, output) == (64, "")
    assert "Traceback" not in errors
    assert len(errors) < 1500


def test_huge_settings_are_refused(run, tmp_path: Path) -> None:
    settings = tmp_path / "agent.toml"
    settings.write_bytes(b"#" * 2_000_000)
    code, _, errors = run("drift", "--config", str(settings), "--root", str(tmp_path))
    assert code in FAILED
    assert "more than 1048576 bytes" in " ".join(errors.split())


def test_error_with_a_file_name_is_no_error_of_the_output() -> None:
    def fail() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/var/lib/x")

    with pytest.raises(OSError, match="/var/lib/x"):
        run_with_output(fail, lambda _error, code: code)


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_user_without_permission_is_sent_to_root() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        state = Path(directory) / "var/lib/treenail"
        state.mkdir(parents=True, mode=0o755)
        state.chmod(0o700)
        Path(directory).chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "why", "--root", directory],
            env={"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("treenail: cannot ")
    assert done.stderr.endswith(
        "Permission denied\n  run the command as root, for example with sudo\n"
    )
