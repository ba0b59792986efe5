"""Programs of the controllers beside a lab, as a cluster and its user run them.

Each replica of ``treenail-controller run`` is a process with the ServiceAccount of the manifests,
so RBAC applies to it. ``treenail-controller status --watch`` draws on this terminal while a demo
goes on.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from treenail.manifests import installation
from treenail.manifests.installation import NAME, InstallOptions
from treenail.process import stop_process
from treenail_lab.cluster import Lab
from treenail_lab.lifetime.fork_server import LabProcess
from treenail_lab.lifetime.owner import owner

CONTROLLER_COMMAND = (
    sys.executable,
    "-P",  # a folder named treenail in the current directory is not the package
    "-c",
    "import sys; from treenail.cli.controller.main import main; sys.exit(main())",
)
ALL_CONTROLLERS = ("render", "rollout", "drain")
# A user watches the demo, so the controllers report sooner than in a cluster.
QUICK_OPTIONS = ("--settle=0.2", "--report-blockers-after=2")

_STOP_TIMEOUT_S = 30.0


class ControllerReplicas:
    """The replicas, by number; none runs before `start_replica`."""

    def __init__(
        self,
        lab: Lab,
        *,
        enable: Sequence[str] = ALL_CONTROLLERS,
        arguments: Sequence[str] = QUICK_OPTIONS,
        command: Sequence[str] = CONTROLLER_COMMAND,
        options: InstallOptions | None = None,
    ) -> None:
        """``options`` have the controllers instead of ``enable``."""
        self._lab = lab
        self._options = options or InstallOptions(controllers=tuple(enable))
        self._arguments = tuple(arguments)
        self._command = tuple(command)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def create_manifests(self) -> None:
        """Create the objects of the manifests."""
        self._lab.create_objects(installation.build_documents(self._options))

    def start_replica(self, number: int = 0) -> None:
        """Start a replica; it acts once its caches are filled and it holds the lease."""
        kubeconfig = self._lab.server.write_account_kubeconfig(self._options.namespace, NAME)
        with self.find_log(number).open("ab") as output:
            self._processes[number] = LabProcess(
                [
                    *self._command,
                    "run",
                    f"--enable={','.join(self._options.controllers)}",
                    f"--kubeconfig={kubeconfig}",
                    "--metrics=127.0.0.1:0",
                    *self._arguments,
                ],
                env={
                    **os.environ,
                    **owner.mark_environment(),
                    "POD_NAME": f"{NAME}-{number}",
                    "POD_NAMESPACE": self._options.namespace,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def find_exit_code(self, number: int = 0) -> int | None:
        """Return the exit code of a replica that ended on its own; None while it runs."""
        return self._processes[number].poll()

    def kill_replica(self, number: int = 0) -> None:
        """Kill a replica with SIGKILL."""
        process = self._processes.pop(number)
        process.kill()
        process.wait()

    def stop_replica(self, number: int = 0) -> None:
        """Stop a replica with SIGTERM."""
        process = self._processes.pop(number)
        stop_process(process, _STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Stop all replicas with SIGTERM."""
        for number in list(self._processes):
            self.stop_replica(number)

    def read_last_line(self, number: int = 0) -> str:
        """Return the last line of a replica's log."""
        lines = self.find_log(number).read_text("utf-8", "replace").splitlines()
        return lines[-1] if lines else "its log is empty"

    def find_log(self, number: int = 0) -> Path:
        """Return the path of a replica's log."""
        return self._lab.directory / f"{NAME}-{number}.log"


_INTERVAL_S = 0.2
_LAST_LOOK_S = 4 * _INTERVAL_S
_STOP_WATCH_S = 10.0


class StatusWatch:
    """The command as a user runs it, with a shorter interval."""

    def __init__(self, kubeconfig: Path, stream: TextIO) -> None:
        self._kubeconfig = kubeconfig
        self._stream = stream
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command; it draws its table until `stop`."""
        self._stream.flush()
        self._process = LabProcess(
            [
                *CONTROLLER_COMMAND,
                "status",
                "--watch",
                f"--interval={_INTERVAL_S}",
                f"--kubeconfig={self._kubeconfig}",
            ],
            env={**os.environ, **owner.mark_environment()},
            stdin=subprocess.DEVNULL,
            stdout=self._stream.fileno(),
            # Ctrl-C reaches the demo, which stops the command.
            start_new_session=True,
        )

    def finish(self) -> None:
        """Let the command draw the last state, and stop it."""
        if self._process is not None and self._process.poll() is None:
            time.sleep(_LAST_LOOK_S)
        self.stop()

    def stop(self) -> None:
        """Stop the command; nothing happens when it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        stop_process(process, _STOP_WATCH_S)
