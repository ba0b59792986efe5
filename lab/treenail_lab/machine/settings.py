"""The behaviour of a machine of the lab: speeds, limits and current faults.

One JSON file beside the machine's root. The emulators read it whenever they need a value, so a
change takes effect in the middle of a pull.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DISK_FULL = "min-free-space-percent '3%' would be exceeded, at least 1.2 GB requested"


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """The current values; an empty text means that this fault does not occur."""

    pull_bytes_per_s: float = 200e6
    pull_error: str = ""
    staging_s: float = 0.2
    staging_error: str = ""
    sanity_error: str = ""
    """The error of rpm-ostree's check of a deployment that it has staged, and leaves staged."""
    staged_instead: str = ""
    """The pull spec of the image that bootc stages instead of each requested one."""
    finalization_error: str = ""
    refresh_md_s: float = 0.2
    missing_packages: tuple[str, ...] = ()
    """Packages that are in no repository."""
    finalizes_by_commit: bool = False
    """Whether FinalizeDeployment compares the base commit, not the manifest digest."""
    idle_exit_s: float = 0.0
    """Seconds without a client after which rpm-ostreed exits; 0 for never.

    The real daemon exits after 60 s (rpmostreed-daemon.cxx).
    """
    force_close_s: float = 30.0
    """Seconds after the end of a transaction when remaining peers are disconnected.

    rpm-ostree waits 30 s too.
    """
    properties_lag_s: float = 0.1
    """Seconds from ``Finished`` until the D-Bus properties follow, unless Reload is called."""
    inhibit_delay_max_s: float = 1.0
    systemd_version: int = 252
    failing_units: tuple[str, ...] = ()
    boot_tries: int = 3
    """How often the boot loader tries a deployment whose kernel crashes before it falls back."""
    boot_s: float = 0.0
    """Seconds between the end of one boot and the beginning of the next."""
    agent_stop_s: float = 10.0
    """TimeoutStopSec= of the agent's unit."""
    agent_watchdog_s: float = 0.0
    """WatchdogSec= of the agent's unit: seconds without WATCHDOG=1; 0 for no limit."""


def load_settings(path: Path | None) -> MachineSettings:
    """Read the settings from ``path``; defaults when there is no file."""
    if path is None:
        return MachineSettings()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return MachineSettings()
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in document.items()
    }
    return MachineSettings(**values)


def save_settings(settings: MachineSettings, path: Path) -> None:
    """Replace the file ``path`` atomically by these settings."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(asdict(settings), indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
