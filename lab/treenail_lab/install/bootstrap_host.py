"""The bootstrap host: commands of ``treenail-controller install`` as a user runs them."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treenail.api.decode import Fields, Json, load_json
from treenail.errors import ConfigError, HostError
from treenail.installer.directory.install_files import InstallDirectory
from treenail.process import stop_process
from treenail.provisioning.content.pointer import build_pointer
from treenail_lab.controllers import CONTROLLER_COMMAND
from treenail_lab.lifetime.owner import owner

HOST = "127.0.0.1"
_COMMAND_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """How a command ended, and what it printed to both streams."""

    code: int
    text: str


class BootstrapHost:
    """A host with an install directory; `start` begins the stage ``bootstrap``."""

    def __init__(self, root: Path, log: Path, machines: int) -> None:
        """``machines`` is the number of control-plane machines."""
        self._machines = machines
        self.directory = InstallDirectory(root)
        self.log = log
        self.port = find_free_port()
        # The same at each start: machines keep it in the name of the mirror.
        self.registry_port = find_free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def run_command(self, verb: str, *arguments: str) -> CommandOutput:
        """Run ``install VERB`` to its end; raise `HostError` when it does not end."""
        command = [*CONTROLLER_COMMAND, "install", verb, "--dir", str(self.directory.root)]
        try:
            done = subprocess.run(
                [*command, *arguments],
                env={**os.environ, **owner.mark_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=_COMMAND_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise HostError(
                f"cannot run install {verb}: it did not end within {_COMMAND_TIMEOUT_S:g} s"
            ) from error
        return CommandOutput(done.returncode, done.stdout.decode("utf-8", "replace"))

    def start(self, *arguments: str) -> None:
        """Start the stage ``bootstrap``; its log is in `log`."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.make_command(arguments),
                env={**os.environ, **owner.mark_environment()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def make_command(self, arguments: Sequence[str] = ()) -> list[str]:
        """Return the command of the stage ``bootstrap``."""
        return [
            *(*CONTROLLER_COMMAND, "install", "bootstrap", "--dir", str(self.directory.root)),
            *("--host", HOST, "--listen", f"{HOST}:{self.port}"),
            *("--registry-listen", f"{HOST}:{self.registry_port}", "--stop-when-complete"),
            f"--control-plane-machines={self._machines}",
            *arguments,
        ]

    def find_exit_code(self) -> int | None:
        """Return the exit code of the stage; None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Stop the stage with SIGTERM."""
        process, self._process = self._process, None
        if process is None:
            return
        stop_process(process, _STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the stage and what it runs, as a power cut does."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def read_status(self) -> Json:
        """Return ``status.json``; empty before the stage wrote one."""
        try:
            content = self.directory.status.read_bytes()
            return Fields.from_json(load_json(content, where="status.json"), "").values
        except (OSError, ConfigError):
            return {}

    def create_pointer_config(self, pool: str) -> bytes:
        """Return the user data of a machine of the control plane."""
        authorities = self.directory.ca_certificate.read_bytes()
        url = f"https://{HOST}:{self.port}"
        return json.dumps(build_pointer(url, pool, "3.1.0", authorities=authorities)).encode()


def find_free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])
