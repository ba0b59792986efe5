"""Choice of the back end that manages the operating system: rpm-ostree or bootc."""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import errors
from treenail.cli.node.local_machine import find_agent_status
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.backend_settings import BackendSetting
from treenail.host.ostree.deployments import DeploymentStatus

if TYPE_CHECKING:
    # This import would load the whole daemon.
    from treenail.host.ostree.admin import OstreePins
    from treenail.host.ostree.deployments import OSBackend

log = logging.getLogger(__name__)

_RPM_OSTREED_UNIT = "/usr/lib/systemd/system/rpm-ostreed.service"
_BOOTC_PROGRAM = "/usr/bin/bootc"
_STATUS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A back end, and the reason for it."""

    backend: BackendSetting
    reason: str


def choose_backend(setting: BackendSetting, root: Root) -> BackendChoice:
    """Return the configured back end, or else the installed one, rpm-ostree if both are."""
    if setting is not BackendSetting.AUTO:
        return BackendChoice(setting, "selected by the setting backend")
    if root.resolve_path(_RPM_OSTREED_UNIT).exists():
        return BackendChoice(
            BackendSetting.RPM_OSTREE,
            "installed, and can also change kernel arguments and packages",
        )
    if root.resolve_path(_BOOTC_PROGRAM).exists():
        return BackendChoice(BackendSetting.BOOTC, "installed, without rpm-ostree")
    return BackendChoice(
        BackendSetting.RPM_OSTREE,
        f"default: neither {_RPM_OSTREED_UNIT} nor {_BOOTC_PROGRAM} exists",
    )


def is_composefs(machine: Machine) -> bool:
    """Return whether bootc manages this host with composefs, without OSTree deployments."""
    program = machine.root.resolve_path(_BOOTC_PROGRAM)
    if not program.exists():
        return False
    from treenail.host.bootc.status import is_composefs

    # bootc status waits for the sysroot lock of any transaction, hence the time limit.
    command = [str(program), "status", "--json", "--format-version=1"]
    try:
        content = machine.unsandboxed.run_command(command, timeout_s=_STATUS_TIMEOUT_S)
    except errors.HostError as error:
        log.info("bootc status failed: %s", error)
        return False
    return is_composefs(content)


def create_operating_system(choice: BackendChoice, machine: Machine) -> "OSBackend":
    """Create the chosen back end."""
    # Imported late: a process loads only the back end that it uses.
    from treenail.daemon.checks.signature_policy import needs_signature

    signed = partial(needs_signature, machine.files)
    if choice.backend is BackendSetting.BOOTC:
        from treenail.host.bootc.backend import BootcBackend

        return BootcBackend(machine, needs_signature=signed)
    from treenail.host.rpmostree.backend import RpmOstreeBackend

    return RpmOstreeBackend(machine, needs_signature=signed)


def create_pins(machine: Machine, os: "OSBackend") -> "OstreePins":
    """Create the pins; both back ends pin with ``ostree admin pin``."""
    from treenail.host.ostree.admin import OstreePins

    return OstreePins(machine.jobs, machine.root, os.read_deployments)


def read_deployments(machine: Machine) -> DeploymentStatus:
    """Read the deployments with the back end of the agent; raise `HostError`."""
    if machine.root.prefix != Path("/") and not machine.files.has_entry("/proc/cmdline"):
        # The deployments on the bus are those of this host.
        raise errors.HostError("cannot read deployments: this directory was never booted")
    choice = choose_backend(_find_agent_backend(machine), machine.root)
    os = create_operating_system(choice, machine)
    deployments = os.read_deployments()
    os.release_daemon()
    return deployments


def _find_agent_backend(machine: Machine) -> BackendSetting:
    """Return the back end that the agent chose in this boot, AUTO if no agent has run."""
    match find_agent_status(machine):
        case {"backend": {"name": str(name)}} if name in list(BackendSetting):
            return BackendSetting(name)
        case _:
            return BackendSetting.AUTO
