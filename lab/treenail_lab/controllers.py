"""``treenail-controller run`` beside a lab, as a cluster runs it.

Each replica is a process with the ServiceAccount of the manifests, so RBAC applies to it.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from treenail.manifests import installation
from treenail.manifests.installation import NAME, InstallOptions
from treenail.process import stop_process
from treenail_lab.cluster import Lab
from treenail_lab.lifetime.owner import owner

CONTROLLER_COMMAND = (
    sys.executable,
    "-P",  # a folder named treenail in the current directory is not the package
    "-c",
    "import sys; from treenail.cli.controller.main import main; sys.exit(main())",
)
ALL_CONTROLLERS = ("render", "rollout", "drain")
# A user watches the demo, so the controllers report sooner than in a cluster.
QUICK_OPTIONS = ("--settle=0.2", "--name-after=2")

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
    ) -> None:
        self._lab = lab
        self._options = InstallOptions(controllers=tuple(enable))
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
            self._processes[number] = subprocess.Popen(
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
