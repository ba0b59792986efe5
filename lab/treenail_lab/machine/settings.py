"""How a machine of the lab behaves: speeds, limits and the faults it has just now.

One JSON file beside the machine's root. The stand-ins read it whenever they need a value, so a
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
    """The values in force; an empty text means that nothing goes wrong."""

    pull_bytes_per_s: float = 200e6
    pull_error: str = ""
    staging_s: float = 0.2
    staging_error: str = ""
    finalization_error: str = ""
    refresh_md_s: float = 0.2
    missing_packages: tuple[str, ...] = ()
    """Packages that no repository has."""
    finalizes_by_commit: bool = False
    """FinalizeDeployment compares the base commit, as before rpm-ostree knew images by digest."""
    idle_exit_s: float = 0.0
    """Seconds after which rpm-ostreed exits with nobody registered; 0 for never."""
    force_close_s: float = 30.0
    """Seconds after a transaction's end when peers that stayed are thrown out."""
    properties_lag_s: float = 0.1
    """Seconds after ``TransactionFinished`` when the D-Bus properties follow, unless Reload is called."""
    inhibit_delay_max_s: float = 1.0
    systemd_version: int = 252
    failing_units: tuple[str, ...] = ()
    boot_tries: int = 3
    """How often the boot loader starts a deployment whose kernel dies, before it falls back."""
    boot_s: float = 0.0
    """Seconds between the end of one boot and the beginning of the next."""
    agent_stop_s: float = 10.0
    """Seconds that the agent has to end after SIGTERM."""
    agent_watchdog_s: float = 0.0
    """Seconds without a sign of life after which the agent is killed; 0 for never."""


def load_settings(path: Path | None) -> MachineSettings:
    """The settings in the file ``path``; the standard ones without a file."""
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
    """Put the settings into the file ``path``, all at once."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(asdict(settings), indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
