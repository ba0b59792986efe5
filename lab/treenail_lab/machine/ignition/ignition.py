"""The real Ignition, as the initramfs of a new machine runs it.

Its stage ``fetch`` reads the machine's user data and downloads the configs that it names; its
stage ``files`` writes users, files and units into the machine's root directory. The package
``ignition`` of Debian and Fedora has the program. Disks, file systems and kernel arguments stay as
they are.
"""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from treenail.errors import HostError
from treenail_lab.kubelet import runtime
from treenail_lab.kubelet.runtime import PortForward
from treenail_lab.lifetime.fork_server import run_process
from treenail_lab.lifetime.interpreter import PYTHON_MODULE, build_python_path
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.ignition import ignition_process
from treenail_lab.machine.unit_files import UnitFileTree

PROGRAM = Path("/usr/lib/dracut/modules.d/30ignition/ignition")
USER_DATA = "boot/ignition/config.ign"
"""Where coreos-installer writes user data; below a machine's root directory."""
CONFIG_CACHE = "run/ignition.json"
"""Where Ignition keeps the config that it applies, secrets and tokens included."""

_STATE, _NEED_NETWORK = "run/ignition/state", "run/ignition/neednet"
_PRESETS = "etc/systemd/system-preset/20-ignition.preset"
_POLICY = "etc/selinux/targeted/contexts/files/file_contexts"
_TIMEOUT_S = 300.0
# The machines of the lab have no SELinux labels. Ignition passes paths on standard input.
_SETFILES = "#!/bin/sh\nexec cat >/dev/null\n"


def find_refusal() -> str:
    """Return why this host cannot run Ignition; empty if it can."""
    if not PROGRAM.exists():
        return "no Ignition: install the package ignition"
    return runtime.find_refusal()


@dataclass(frozen=True, slots=True)
class StageResult:
    """How a stage of Ignition ended."""

    code: int
    log: str = field(repr=False)
    """What it printed. After a failure Ignition prints the whole config, secrets included."""


class Ignition:
    """Ignition on one machine. Call `run_fetch`, then `run_files`; or `provision` for both."""

    def __init__(
        self, directory: Path, root: Path, *, server_port: int, program: Path = PROGRAM
    ) -> None:
        """Allow connections to ``server_port`` of this host's loopback only.

        ``directory`` is for files of this class, which are not on the machine.
        """
        self._program = program
        self._directory = directory
        self._root = root
        self._port = server_port
        directory.mkdir(parents=True, exist_ok=True)
        self._programs = directory / "initramfs-bin"
        self._programs.mkdir(exist_ok=True)
        setfiles = self._programs / "setfiles"
        setfiles.write_text(_SETFILES, "utf-8")
        setfiles.chmod(0o755)

    def write_pointer_config(self, content: bytes) -> None:
        """Write the machine's user data where coreos-installer does."""
        place = self._root / USER_DATA
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(mode=0o600)
        place.write_bytes(content)

    def provision(self) -> None:
        """Run Ignition as the first boot does; raise `HostError` if a stage fails."""
        for name, run in (("fetch", self.run_fetch), ("files", self.run_files)):
            result = run()
            if result.code != 0:
                raise HostError(
                    f"cannot provision {self._root}: stage {name} of Ignition failed: "
                    f"{find_cause(result.log)}"
                )
        self._apply_presets()

    def run_fetch(self) -> StageResult:
        """Read the user data, and fetch the configs that it names."""
        return self._run_stage("fetch")

    def run_files(self) -> StageResult:
        """Write users, files and units; enable no unit, which systemd does by presets."""
        # Ignition refuses a root without SELinux's settings, and runs setfiles.
        policy = self._root / _POLICY
        policy.parent.mkdir(parents=True, exist_ok=True)
        policy.touch()
        settings = self._root / "etc/selinux/config"
        settings.write_text("SELINUX=disabled\nSELINUXTYPE=targeted\n", "utf-8")
        return self._run_stage("files")

    def _run_stage(self, stage: str) -> StageResult:
        (self._root / _STATE).parent.mkdir(parents=True, exist_ok=True)
        # A Unix socket's path has at most 107 bytes; this directory's is short.
        with owner.temporary_directory() as place:
            forward = PortForward(place / "s", self._port)
            forward.start()
            try:
                return self._run_program(stage, forward)
            finally:
                forward.stop()

    def _run_program(self, stage: str, forward: PortForward) -> StageResult:
        command = [
            *(*PYTHON_MODULE, ignition_process.__name__, str(forward.port), str(forward.path)),
            *(str(self._program), "-platform=file", f"-stage={stage}", "-log-to-stdout"),
            f"-config-cache={self._root / CONFIG_CACHE}",
            f"-state-file={self._root / _STATE}",
            f"-neednet={self._root / _NEED_NETWORK}",
            f"-root={self._root}",
        ]
        try:
            done = run_process(
                command,
                env={
                    **owner.mark_environment(),
                    "PYTHONPATH": build_python_path(),
                    "PATH": f"{self._programs}{os.pathsep}/usr/sbin:/usr/bin:/sbin:/bin",
                    "IGNITION_CONFIG_FILE": str(self._root / USER_DATA),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise HostError(
                f"cannot provision {self._root}: stage {stage} of Ignition did not end within "
                f"{_TIMEOUT_S:g} s"
            ) from error
        return StageResult(done.returncode, done.stdout.decode("utf-8", "replace"))

    def _apply_presets(self) -> None:
        """Enable and disable units by Ignition's preset file, as systemd does at a first boot."""
        place = self._root / _PRESETS
        lines = place.read_text("utf-8").splitlines() if place.exists() else []
        names = [line.split()[1] for line in lines if line.startswith(("enable ", "disable "))]
        units = UnitFileTree(self._root)
        present = [name for name in names if units.find_file(name) is not None]
        units.preset_units(present)


def find_cause(log: str) -> str:
    """Return Ignition's reason for its failure, from its log; the log itself has secrets."""
    lines = [line for line in log.splitlines() if line.startswith("CRITICAL : Ignition failed: ")]
    return lines[-1].removeprefix("CRITICAL : Ignition failed: ") if lines else "unknown"
