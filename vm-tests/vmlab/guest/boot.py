"""Tells the host what this boot found on the disk, before the agent can change anything."""

import json
import sys
from pathlib import Path

from gi.repository import GLib, OSTree

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
    """Of the image that runs."""
    sysroot = OSTree.Sysroot.new_default()
    sysroot.load(None)
    booted = sysroot.get_booted_deployment()
    if booted is None:
        return ""
    _, repository = sysroot.get_repo(None)
    _, commit, _ = repository.load_commit(booted.get_csum())
    found = commit.get_child_value(0).lookup_value(DIGEST_KEY, GLib.VariantType.new("s"))
    return str(found.unpack()) if found is not None else ""


if __name__ == "__main__":
    sys.exit(main())
