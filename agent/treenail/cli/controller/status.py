"""``treenail-controller status``: show pools and nodes in one table."""

import argparse
import json
import logging
import shutil
import sys
from typing import Protocol, Self, TextIO

from treenail.cli.controller.connect import add_connection_arguments, connect_cluster
from treenail.cli.controller.status_text import format_table
from treenail.cli.safe_output import GuardedStream
from treenail.cli.terminal import HelpFormatter, find_width, format_examples, wrap_text
from treenail.clock import Clock, SystemClock
from treenail.controllers.plan import read, status_table
from treenail.controllers.plan.status_table import PoolRow
from treenail.controllers.rollout.pools import ObservedPool
from treenail.controllers.runtime.informers import Informers
from treenail.errors import ClusterError
from treenail.escape import escape_text
from treenail.kube.client import Client
from treenail.kube.resources import MACHINECONFIGPOOLS, NODES
from treenail.kube.watch import WatchScope

REFRESH_S = 2.0
_LIST_LIMIT_S = 10.0

_CURSOR_UP = "\x1b[{}A"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "status",
        help="show pools and nodes, and follow them on a terminal",
        description="Show pools and nodes in one table. On a terminal, update the table until "
        "Ctrl-C.",
        epilog=format_examples(
            ("follow a rollout", "treenail-controller status"),
            ("print the table once", "treenail-controller status --once"),
        ),
        formatter_class=HelpFormatter,
    )
    add_connection_arguments(parser)
    parser.add_argument(
        "--once", action="store_true", help="print the table once, also on a terminal"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=print_status)


def print_status(arguments: argparse.Namespace) -> int:
    """Print the table; on a terminal, update it until Ctrl-C."""
    with connect_cluster(arguments) as client:
        found = read_pool_rows(client)
        if arguments.json:
            print(json.dumps(status_table.convert_to_json(found), indent=2))
        elif arguments.once or not sys.stdout.isatty():
            print("\n".join(format_table(found, find_width(sys.stdout))))
        else:
            # The table shows why it is outdated; a log would write between its lines.
            logging.getLogger("treenail").addHandler(logging.NullHandler())
            clock = SystemClock()
            with WatchedPools(client, clock) as pools:
                follow_status(pools, clock, LiveTable(sys.stdout))
    sys.stdout.flush()
    return 0


def read_pool_rows(client: Client) -> tuple[PoolRow, ...]:
    """Read the rows of the table."""
    return status_table.build_rows(read.read_pools(client), read.read_nodes(client))


class PoolReader(Protocol):
    """Source of the rows. Raises `ClusterError` when they may be outdated."""

    def read_rows(self) -> tuple[PoolRow, ...]: ...


class WatchedPools:
    """Watches pools and nodes; use it as a context manager.

    A list of all nodes for each update of the table would cost the API server 60 MB with 5,000
    nodes.
    """

    def __init__(self, client: Client, clock: Clock) -> None:
        self._informers = Informers(client, clock)
        self._pools = self._informers.add_view(
            WatchScope(MACHINECONFIGPOOLS), ObservedPool.from_json
        )
        self._nodes = self._informers.add_view(WatchScope(NODES), read.parse_node)

    def __enter__(self) -> Self:
        self._informers.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._informers.stop()

    def read_rows(self) -> tuple[PoolRow, ...]:
        """Return the present rows; raise `ClusterError` when they may be outdated."""
        self._informers.wait_until_synced(_LIST_LIMIT_S)
        self._informers.check_silent()
        if reason := self._informers.unsynced_reason or self._informers.describe_staleness():
            raise ClusterError(reason)
        return status_table.build_rows(self._pools.get_all(), self._nodes.get_all())


def follow_status(pools: PoolReader, clock: Clock, table: "LiveTable") -> None:
    """Update the table, also after the API server was unreachable."""
    lines: list[str] = []
    while True:
        try:
            lines = list(format_table(pools.read_rows(), table.width))
            table.draw_lines(lines)
        except ClusterError as error:
            problem = wrap_text(f"cannot update the table: {error}", table.width)
            table.draw_lines([*problem, *lines])
        clock.sleep(REFRESH_S)


class LiveTable:
    """Lines on a terminal that are drawn again in the same place."""

    def __init__(self, stream: TextIO) -> None:
        # The guard escapes the cursor movements too; the lines are escaped here.
        self._stream = stream.unguarded if isinstance(stream, GuardedStream) else stream
        self._drawn_count = 0

    @property
    def width(self) -> int:
        """The columns of the terminal."""
        return shutil.get_terminal_size().columns

    def draw_lines(self, lines: list[str]) -> None:
        """Draw the lines over the previous ones, cut to the size of the terminal."""
        size = shutil.get_terminal_size()
        most = max(size.lines - 1, 1)
        if len(lines) > most > 1:
            hidden = len(lines) - most + 1
            lines = [*lines[: most - 1], f"and {hidden} more lines; --once prints all"]
        # A wrapped line would take two rows, and the next drawing would start in the wrong row.
        shown = [escape_text(line)[: size.columns] for line in lines[:most]]
        up = _CURSOR_UP.format(self._drawn_count) if self._drawn_count else ""
        text = "".join(f"{line}{_CLEAR_LINE}\n" for line in shown)
        self._stream.write(f"{up}{text}{_CLEAR_BELOW}")
        self._stream.flush()
        self._drawn_count = len(shown)
