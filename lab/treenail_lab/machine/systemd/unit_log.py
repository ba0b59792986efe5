"""Where the output of a transient service is, for the service and for the emulated journalctl."""

from pathlib import Path


def find_unit_log(root: Path, invocation: str) -> Path:
    """Return the file that gets the output of a run, instead of the journal."""
    return root / "var/log/units" / f"{invocation}.log"
