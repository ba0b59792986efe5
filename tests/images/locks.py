"""The locks of the self-contained trees, parsed."""

import re
from pathlib import Path

LOCKS = {
    path.stem: path.read_text()
    for path in (Path(__file__).parents[2] / "tools/locks").glob("*.txt")
}


def read_locked_versions(lock: str) -> dict[str, str]:
    """Return the version of each package of a lock, by its normalized name."""
    rows = re.findall(r"^([\w.-]+)==(\S+)", LOCKS[lock], re.MULTILINE)
    return {normalize(name): version for name, version in rows}


def normalize(name: str) -> str:
    """Return the name of a package as package indexes compare it."""
    return name.lower().replace("_", "-")
