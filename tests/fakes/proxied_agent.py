"""The agent on a proxied bus; a command to be run in place of ``treenail run``.

Files beside the root say what differs: `ADDRESS` has the address of the bus, and `LIMITS` a JSON
object with the time limit of methods, in seconds; that of "" is for all others. It appends the
method and the true time limit of each call to `CALLS`.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from treenail.cli.node.run import run_agent
from treenail.errors import TreenailError
from treenail.host.systemd.bus_process import BusProcess
from treenail.host.systemd.system_bus import PlainArgument, PlainInterface

ADDRESS = "bus-address"
LIMITS = "bus-limits"
CALLS = "bus-calls"


class LimitedProcess(BusProcess):
    """A process for D-Bus that records time limits, and shortens some."""

    def __init__(self, folder: Path) -> None:
        super().__init__(os.environ, read_text(folder / ADDRESS))
        self._folder = folder

    def call_method(
        self,
        address: PlainInterface,
        member: str,
        arguments: Sequence[PlainArgument],
        timeout_s: float,
    ) -> object:
        timeout_s = self._limit(f"{address[0]} {member}", timeout_s)
        return super().call_method(address, member, arguments, timeout_s)

    def read_properties(self, address: PlainInterface, timeout_s: float) -> dict[str, object]:
        interface = address[2].rpartition(".")[2]
        timeout_s = self._limit(f"{address[0]} properties of {interface}", timeout_s)
        return super().read_properties(address, timeout_s)

    def call_peer(self, peer: int, member: str, timeout_s: float) -> object:
        return super().call_peer(peer, member, self._limit(f"peer {member}", timeout_s))

    def read_peer(self, peer: int, timeout_s: float) -> dict[str, object]:
        timeout_s = self._limit("peer properties of Transaction", timeout_s)
        return super().read_peer(peer, timeout_s)

    def _limit(self, call: str, timeout_s: float) -> float:
        with (self._folder / CALLS).open("a") as file:
            file.write(f"{timeout_s:g} {call}\n")
        limits: dict[str, float] = json.loads(read_text(self._folder / LIMITS) or "{}")
        introspect = f"{call.split(maxsplit=1)[0]} Introspect"
        chosen = (limits[each] for each in (call, introspect, "") if each in limits)
        return min(next(chosen, timeout_s), timeout_s)


def read_text(path: Path) -> str:
    """Return the content of the file; empty without one."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--root", "--node-name", "--kubeconfig"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args(namespace=argparse.Namespace(verbose=False, config=None))
    bus_process = LimitedProcess(Path(arguments.root).parent)
    try:
        return run_agent(arguments, bus_process)
    except TreenailError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        bus_process.close_connection()


if __name__ == "__main__":
    sys.exit(main())
