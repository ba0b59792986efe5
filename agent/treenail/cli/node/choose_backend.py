"""What manages the operating system of this host, and talking to it."""

import json
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from treenail.clock import Clock
from treenail.daemon.settings.settings import BackendSetting
from treenail.errors import FileError, HostError
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.machine import Machine
from treenail.host.ostree.deployments import DeploymentStatus

if TYPE_CHECKING:
    # The port drags the whole daemon behind it.
    from treenail.daemon.reconcile.interfaces import OSBackend
    from treenail.host.ostree.pins import OstreePins

log = logging.getLogger(__name__)

STATUS_PATH = "/run/treenail/status.json"
_MAX_STATUS_BYTES = 1024 * 1024
_RPM_OSTREED_UNIT = "/usr/lib/systemd/system/rpm-ostreed.service"
_BOOTC_PROGRAM = "/usr/bin/bootc"
_STATUS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """One of the two, and the reason, for people."""

    backend: BackendSetting
    reason: str


def choose_backend(setting: BackendSetting, root: Root) -> BackendChoice:
    """The back end that is set, or else the one that can do most of those that are installed."""
    if setting is not BackendSetting.AUTO:
        return BackendChoice(setting, "the setting backend says so")
    if root.resolve_path(_RPM_OSTREED_UNIT).exists():
        return BackendChoice(
            BackendSetting.RPM_OSTREE,
            "it is installed, and changes kernel arguments and packages too",
        )
    if root.resolve_path(_BOOTC_PROGRAM).exists():
        return BackendChoice(BackendSetting.BOOTC, "it is installed, and rpm-ostree is not")
    return BackendChoice(
        BackendSetting.RPM_OSTREE, f"there is neither {_RPM_OSTREED_UNIT} nor {_BOOTC_PROGRAM}"
    )


def is_composefs(root: Root, clock: Clock) -> bool:
    """Whether bootc manages this host, and without OSTree, so that treenail can't."""
    program = root.resolve_path(_BOOTC_PROGRAM)
    if not program.exists():
        return False
    from treenail.host.bootc.status import is_composefs

    command = [str(program), "status", "--json", "--format-version=1"]
    with Machine(root, clock=clock) as machine:
        try:
            content = machine.unsandboxed.run_command(command, timeout_s=_STATUS_TIMEOUT_S)
        except HostError as error:
            log.info("bootc tells nothing of this host: %s", error)
            return False
        return is_composefs(content)


def create_operating_system(choice: BackendChoice, machine: Machine) -> "OSBackend":
    """The chosen back end."""
    # Each is imported when it is asked for, so that a process has only what it runs.
    from treenail.daemon.checks.signature_policy import needs_signature

    signed = partial(needs_signature, machine.files)
    if choice.backend is BackendSetting.BOOTC:
        from treenail.host.bootc.backend import BootcBackend

        return BootcBackend(machine, needs_signature=signed)
    from treenail.host.rpmostree.backend import RpmOstreeBackend

    return RpmOstreeBackend(machine, needs_signature=signed)


def create_pins(machine: Machine, os: "OSBackend") -> "OstreePins":
    """What keeps deployments, whichever the back end."""
    from treenail.host.ostree.pins import OstreePins

    return OstreePins(machine.jobs, machine.root, os.read_deployments)


def read_deployments(root: Root, clock: Clock) -> DeploymentStatus:
    """The deployments as the agent's back end sees them, for a command; raises `HostError`."""
    with Machine(root, clock=clock) as machine:
        os = create_operating_system(choose_backend(_find_agent_backend(root), root), machine)
        found = os.read_deployments()
        os.release_daemon()
    return found


def _find_agent_backend(root: Root) -> BackendSetting:
    """What the agent chose in this boot; if it has not run, what it would."""
    try:
        content = HostFiles(root).read_file(STATUS_PATH, limit=_MAX_STATUS_BYTES)
        match json.loads(content or b"{}"):
            case {"backend": {"name": str(name)}}:
                return BackendSetting(name)
            case _:
                return BackendSetting.AUTO
    except (FileError, ValueError):
        return BackendSetting.AUTO
