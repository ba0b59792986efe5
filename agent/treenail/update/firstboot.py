"""A machine's first boot, before it joins: what it was made to be, and the next move to there."""

from dataclasses import dataclass, field

from treenail import codec
from treenail.api.machineconfig import MachineConfig
from treenail.codec import CodecError, key
from treenail.config.wanted import WantedOS, read_wanted_state
from treenail.errors import HostError, UnreconcilableError
from treenail.update.impact.os_change import OSChange, RunningOS, compute_os_change

Json = dict[str, object]

_VERSION = 1

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

    reboot_count: int = field(default=0, metadata=key("rebootCount"))
    boot_id: str = field(default="", metadata=key("bootID"))
    """The boot in which the last reboot was asked for."""
    staged_id: str = field(default="", metadata=key("stagedID"))
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
    """Return the JSON document of the progress."""
    return codec.encode(progress, version=_VERSION)


def from_json(document: object) -> FirstBootProgress:
    """Return the progress in ``document``; a document that cannot be read counts as none."""
    try:
        return codec.decode(FirstBootProgress, document, version=_VERSION)
    except CodecError:
        return FirstBootProgress()
