"""Tells the host what this boot found on the disk, before the agent can change anything."""

import json
import subprocess
import sys
from pathlib import Path

from vmlab.guest.names import DIGEST_KEY

PORT = Path("/dev/virtio-ports/treenail.boot")


def main() -> int:
    """Write one line."""
    try:
        ledger = json.loads(Path("/var/lib/treenail/ledger.json").read_bytes())
    except FileNotFoundError:
        ledger = None
    except ValueError:
        ledger = "broken"
    found = {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip(),
        "digest": _digest(),
        "ledger": ledger,
    }
    PORT.write_text(f"{json.dumps(found)}\n", "utf-8")
    return 0


def _digest() -> str:
    """Of the image that runs; libostree's bindings would take seconds to load under emulation."""
    arguments = dict(
        word.partition("=")[::2] for word in Path("/proc/cmdline").read_text("ascii").split()
    )
    if "ostree" not in arguments:
        return ""
    deployment = Path(f"/sysroot{arguments['ostree']}").resolve()
    # The directory's name is the commit, and a number after a dot.
    commit = deployment.name.partition(".")[0]
    shown = subprocess.run(
        ["ostree", "show", f"--print-metadata-key={DIGEST_KEY}", commit],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return shown.stdout.strip().strip("'")


if __name__ == "__main__":
    sys.exit(main())
