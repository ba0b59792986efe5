"""Running of buildah in namespaces of its own, with its output line by line."""

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from treenail.builder.buildah import sandbox
from treenail.builder.buildah.namespaces import IdMaps
from treenail.clock import Clock
from treenail.errors import CommandError, CommandTimeoutError

_CHUNK = 64 * 1024
_LINE_LIMIT = 16 * 1024  # bytes; a longer line is split
_SANDBOX = Path(sandbox.__file__)
# What a program of the build may need of the environment: the way to the network, and nothing else.
_PASSED_VARIABLES = (
    "PATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip


class SandboxedProgram:
    """Runs a program in user, PID, mount and IPC namespaces; nothing of it survives the run."""

    def __init__(
        self,
        clock: Clock,
        id_maps: IdMaps,
        environ: Mapping[str, str],
        *,
        directory: Path | None = None,
    ) -> None:
        """``environ`` is the whole environment of the program: see `make_environment`.

        ``directory`` becomes its working directory.
        """
        self._directory = directory
        self._clock = clock
        self._id_maps = id_maps
        self._environ = dict(environ)

    def run_program(
        self, argv: Sequence[str], *, timeout_s: float, add_line: Callable[[str], None]
    ) -> int:
        """Run the program; return its exit code, or 128 and the number of a signal.

        ``add_line`` receives each line of both outputs. Raises `CommandTimeoutError` after
        ``timeout_s`` seconds, and `CommandError` where the namespaces cannot be created. The
        program and all its child processes have ended when this returns or raises.
        """
        deadline = self._clock.monotonic() + timeout_s
        maps = self._id_maps
        # Without site-packages and the environment: starts in 20 ms.
        interpreter = [sys.executable, "-I", "-S", str(_SANDBOX)]
        program = subprocess.Popen(
            [*interpreter, maps.uid_map, maps.gid_map, maps.way, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environ,
            cwd=self._directory,
            start_new_session=True,
        )
        problems: list[str] = []

        def add_program_line(line: str) -> None:
            if line.startswith(sandbox.MESSAGE_PREFIX):
                problems.append(line.removeprefix(sandbox.MESSAGE_PREFIX))
            else:
                add_line(line)

        with program:
            try:
                self._follow_output(program, argv[0], deadline, add_program_line)
                program.wait(max(1.0, deadline - self._clock.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise _make_timeout(argv[0], timeout_s) from error
            except TimeoutError as error:
                raise _make_timeout(argv[0], timeout_s) from error
            finally:
                # The first process of the session: its death ends all others.
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
        if program.returncode == sandbox.EXIT_NO_NAMESPACE and problems:
            raise CommandError(
                f"cannot run {argv[0]}: {problems[0]}",
                remedy="allow user namespaces here: a container needs runAsUser 0, its default "
                "capabilities and a seccomp profile that permits unshare; "
                "on a host run: sysctl user.max_user_namespaces=65536",
            )
        return program.returncode if program.returncode >= 0 else 128 - program.returncode

    def _follow_output(
        self,
        program: "subprocess.Popen[bytes]",
        name: str,
        deadline: float,
        add_line: Callable[[str], None],
    ) -> None:
        if program.stdout is None:
            raise CommandError(f"cannot read the output of {name}")
        rest = b""
        with selectors.DefaultSelector() as readable:
            readable.register(program.stdout, selectors.EVENT_READ)
            while True:
                left_s = deadline - self._clock.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                if not readable.select(min(left_s, 60.0)):
                    continue
                chunk = os.read(program.stdout.fileno(), _CHUNK)
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _LINE_LIMIT:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    add_line(line.decode("utf-8", "replace"))
                if not chunk:
                    break
        if rest:
            add_line(rest.decode("utf-8", "replace"))


def make_environment(environ: Mapping[str, str], work: Path) -> dict[str, str]:
    """Make the environment of buildah: proxies and directories, and no variable besides."""
    passed = {name: environ[name] for name in _PASSED_VARIABLES if name in environ}
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        **passed,
        "HOME": str(work / "home"),
        "TMPDIR": str(work / "tmp"),
        "XDG_RUNTIME_DIR": str(work / "run"),
        "XDG_CONFIG_HOME": str(work / "home"),
        "CONTAINERS_STORAGE_CONF": str(work / "home/storage.conf"),
        "REGISTRY_AUTH_FILE": os.devnull,
        "LC_ALL": "C.UTF-8",
    }


def _make_timeout(name: str, timeout_s: float) -> CommandTimeoutError:
    return CommandTimeoutError(f"{name} did not exit within {timeout_s:g} s")
