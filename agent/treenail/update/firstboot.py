"""A machine's first boot, before it joins: what it was made to be, and the next move to there."""

from dataclasses import dataclass

from treenail.api.machineconfig import MachineConfig
from treenail.config.wanted import WantedOS, read_wanted_state
from treenail.errors import HostError, UnreconcilableError
from treenail.update.impact.os_change import OSChange, RunningOS, compute_os_change

Json = dict[str, object]

REBOOTS_ALLOWED = 3
"""Reboots into what is asked for before the machine waits for a person."""


@dataclass(frozen=True, slots=True)
class FirstBootTarget:
    """What the machine is to be; nothing is asked when all is empty."""

    config: MachineConfig | None = None
    """The config that it was provisioned with."""
    image: str = ""
    """An image that the settings name, which counts before the config's."""


@dataclass(frozen=True, slots=True)
class FirstBootProgress:
    """What was done in earlier boots."""

    reboot_count: int = 0
    boot_id: str = ""
    """The boot in which the last reboot was asked for."""
    staged_id: str = ""
    """The deployment that it was to be into."""


@dataclass(frozen=True, slots=True)
class FirstBootReady:
    """The machine may join its cluster."""

    reason: str


@dataclass(frozen=True, slots=True)
class FirstBootStage:
    """Stage this and reboot into it."""

    change: OSChange


def decide_first_boot(
    target: FirstBootTarget,
    running: RunningOS,
    progress: FirstBootProgress,
    *,
    fips: bool,
    boot_id: str,
) -> FirstBootReady | FirstBootStage:
    """The next move.

    Raises `UnreconcilableError` for what a machine can't be made to be once it is installed,
    `ConfigError` for what can't be read, and `HostError` when the reboots lead nowhere.
    """
    config = target.config
    if config is not None and config.fips != fips:
        raise UnreconcilableError(
            f"the config wants FIPS mode {'on' if config.fips else 'off'}, and this machine runs "
            "with it the other way",
            remedy="install the machine again, with fips=1 on the kernel's command line or without",
        )
    wish = read_wanted_state(config).os if config is not None else WantedOS()
    change = compute_os_change(WantedOS(), wish, running, image=target.image)
    if change.is_empty:
        return FirstBootReady("it is what it was made to be")
    if progress.reboot_count >= REBOOTS_ALLOWED and progress.boot_id != boot_id:
        raise HostError(
            f"{progress.reboot_count} reboots did not lead to what is asked for",
            remedy="see 'journalctl -b -1 -u ostree-finalize-staged', then restart "
            "treenail-firstboot.service after removing /var/lib/treenail/firstboot.json",
        )
    return FirstBootStage(change)


def to_json(progress: FirstBootProgress) -> Json:
    return {
        "version": 1,
        "reboots": progress.reboot_count,
        "bootID": progress.boot_id,
        "stagedID": progress.staged_id,
    }


def from_json(document: object) -> FirstBootProgress:
    """What `to_json` wrote; anything else counts as nothing done."""
    match document:
        case {
            "version": 1,
            "reboots": int(reboots),
            "bootID": str(boot_id),
            "stagedID": str(staged_id),
        }:
            return FirstBootProgress(reboots, boot_id, staged_id)
        case _:
            return FirstBootProgress()
