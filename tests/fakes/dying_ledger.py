"""The agent with a ledger that kills it; a command to be run in place of ``treenail run``.

The file `ORDER` beside the root says when: ``before 3`` kills the process right before its third
write from now, ``after 3`` right after it. A third word is another signal than SIGKILL: ``after 3
SIGTERM``. The order goes with the process; without one, and once it was obeyed, the agent is the
ordinary one.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from treenail.cli.node.run import AgentInputs, run_agents
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.state_file import Json, Ledger
from treenail.host.systemd.bus_process import BusProcess
from treenail.host.systemd.system_bus import SystemBus

ORDER = "die"


class DyingLedger(Ledger):
    """A ledger that obeys the order in a file."""

    def __init__(self, root: Root, order: Path) -> None:
        super().__init__(root)
        self._order = order

    def write_document(self, document: Json) -> None:
        when = self._when()
        if when == "before":
            self._die()
        super().write_document(document)
        if when == "after":
            self._die()

    def _when(self) -> str:
        """The order's word for this write; empty when it is about another."""
        if not self._order.exists():
            return ""
        when, count, *words = self._order.read_text().split()
        self._order.write_text(" ".join((when, str(int(count) - 1), *words)))
        return when if count == "1" else ""

    def _die(self) -> None:
        words = self._order.read_text().split()
        self._order.unlink()
        os.kill(os.getpid(), signal.Signals[words[2] if len(words) > 2 else "SIGKILL"])


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--root", "--node-name", "--kubeconfig"):
        parser.add_argument(name, required=True)
    parser.add_argument("--order", type=Path, help="the file with the order")
    given = parser.parse_args(namespace=argparse.Namespace(verbose=False, config=None))
    inputs = AgentInputs(given)
    root = Root(given.root)
    dying = DyingLedger(root, given.order or root.prefix.parent / ORDER)
    bus_process = BusProcess(os.environ)
    with dying.hold_lock():
        return run_agents(inputs, SystemBus(service=bus_process), dying, bus_process)


if __name__ == "__main__":
    sys.exit(main())
