"""``treenail-controller status``: pools and nodes in one table that follows what happens."""

import argparse
import json
import shutil
import sys
from typing import TextIO

from treenail.cli.controller.connect import connect_cluster
from treenail.clock import Clock, SystemClock
from treenail.controllers.plan import read, status_table
from treenail.controllers.plan.status_table import PoolRow
from treenail.errors import ClusterError
from treenail.kube.client import Client

REFRESH_S = 2.0

_CURSOR_UP = "\x1b[{}A"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
    parser.set_defaults(run=print_status)


def print_status(arguments: argparse.Namespace) -> int:
    """Print the table; on a terminal, until interrupted."""
    with connect_cluster(arguments.kubeconfig) as client:
        found = read_pool_rows(client)
        if arguments.json:
            print(json.dumps(status_table.convert_to_json(found), indent=2))
        elif arguments.once or not sys.stdout.isatty():
            print("\n".join(status_table.format_table(found)))
        else:
            follow_status(client, SystemClock(), LiveTable(sys.stdout))
    sys.stdout.flush()
    return 0


def read_pool_rows(client: Client) -> tuple[PoolRow, ...]:
    """The table's content as it is now."""
    return status_table.build_rows(read.read_pools(client), read.read_nodes(client))


def follow_status(client: Client, clock: Clock, table: "LiveTable") -> None:
    """Show the table again and again, also when the API server is away for a while."""
    lines: list[str] = []
    while True:
        try:
            lines = list(status_table.format_table(read_pool_rows(client)))
            table.draw_lines(lines)
        except ClusterError as error:
            table.draw_lines([f"as it was before: {error}", *lines])
        clock.sleep(REFRESH_S)


class LiveTable:
    """A place on a terminal that always shows the latest lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn_count = 0

    def draw_lines(self, lines: list[str]) -> None:
        """Draw the lines over those before; what the terminal is too small for is cut."""
        size = shutil.get_terminal_size()
        # A line that wraps would be two, and the next picture would miss its place.
        shown = [line[: size.columns] for line in lines[: max(size.lines - 1, 1)]]
        up = _CURSOR_UP.format(self._drawn_count) if self._drawn_count else ""
        text = "".join(f"{line}{_CLEAR_LINE}\n" for line in shown)
        self._stream.write(f"{up}{text}{_CLEAR_BELOW}")
        self._stream.flush()
        self._drawn_count = len(shown)
