"""``treenail-controller status``: pools and nodes in one table that follows what happens."""

import argparse
import json
import shutil
import sys
from typing import TextIO

from treenail.cli.controller.connect import connected
from treenail.clock import Clock, SystemClock
from treenail.controllers.plan import read, status_table
from treenail.controllers.plan.status_table import PoolRow
from treenail.errors import ClusterError
from treenail.kube.client import Client

LOOK_S = 2.0

_UP = "\x1b[{}A"
_CLEAR = "\x1b[K"
_BELOW = "\x1b[J"


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "status",
        help="show pools and nodes, and follow them on a terminal",
        description="Show pools and nodes in one table. On a terminal it is kept up to date until "
        "Ctrl-C.",
    )
    parser.add_argument("--kubeconfig", metavar="FILE", help="how to reach the cluster")
    parser.add_argument("--once", action="store_true", help="print the table once")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; on a terminal, until interrupted."""
    with connected(arguments.kubeconfig) as client:
        found = look(client)
        if arguments.json:
            print(json.dumps(status_table.document(found), indent=2))
        elif arguments.once or not sys.stdout.isatty():
            print("\n".join(status_table.lines(found)))
        else:
            follow(client, SystemClock(), Picture(sys.stdout))
    sys.stdout.flush()
    return 0


def look(client: Client) -> tuple[PoolRow, ...]:
    """The table's content as it is now."""
    return status_table.rows(read.pools(client), read.nodes(client))


def follow(client: Client, clock: Clock, picture: "Picture") -> None:
    """Show the table again and again, also when the API server is away for a while."""
    lines: list[str] = []
    while True:
        try:
            lines = list(status_table.lines(look(client)))
            picture.show(lines)
        except ClusterError as error:
            picture.show([f"as it was before: {error}", *lines])
        clock.sleep(LOOK_S)


class Picture:
    """A place on a terminal that always shows the latest lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = 0

    def show(self, lines: list[str]) -> None:
        """Draw the lines over those before; what the terminal is too small for is cut."""
        size = shutil.get_terminal_size()
        # A line that wraps would be two, and the next picture would miss its place.
        shown = [line[: size.columns] for line in lines[: max(size.lines - 1, 1)]]
        up = _UP.format(self._drawn) if self._drawn else ""
        text = "".join(f"{line}{_CLEAR}\n" for line in shown)
        self._stream.write(f"{up}{text}{_BELOW}")
        self._stream.flush()
        self._drawn = len(shown)
