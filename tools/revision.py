"""The commit that a figure or a result belongs to."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def find_revision() -> str:
    """Return the commit of this clone, with ``-dirty`` for changes; empty outside of a clone."""
    if shutil.which("git") is None:
        return ""
    described = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
