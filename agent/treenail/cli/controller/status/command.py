"""``treenail-controller status``: show pools and nodes in one table."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from treenail import clocks, errors
from treenail.cli import output_format, terminal
from treenail.cli.controller import connect, rollout
from treenail.cli.controller.status import screen
from treenail.cli.controller.status.text import format_leader, format_table
from treenail.controllers.pools import node_facts, pool_membership, pool_views, rollout_policy
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.controllers.status import leader_status, snapshot, status_table
from treenail.kube import api_client, resources, watch

DEFAULT_INTERVAL_S = 2.0
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 3600.0
_LIST_LIMIT_S = 10.0
DOCUMENT_KIND = "PoolStatusList"


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "status",
        help="show pools and nodes, and follow them with --watch",
        description="Show pools and nodes in one table: state, booted version, progress, time out "
        "of service, what blocks them, and the estimated end.",
        epilog=terminal.format_examples(
            ("print the table once", "treenail-controller status"),
            ("follow a rollout", "treenail-controller status --watch"),
            ("list what blocks the pools", _BLOCKERS_EXAMPLE),
            ("show what NodePools wait for", "treenail-controller status --hosted"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument("pool", nargs="*", metavar="POOL", help="pools (default: all pools)")
    connect.add_connection_arguments(parser)
    connect.add_leader_arguments(parser)
    parser.add_argument(
        "-w",
        "--watch",
        action="store_true",
        help="follow the rollout until Ctrl-C: a live table on a terminal, a line for each change "
        "elsewhere",
    )
    parser.add_argument(
        "--interval",
        type=_parse_interval,
        default=DEFAULT_INTERVAL_S,
        metavar="S",
        help="with --watch, update the table every S seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--hosted",
        action="store_true",
        help="show the NodePools of HyperShift instead: what each one waits for, since when, and "
        "the next step. POOL is NAME or NAMESPACE/NAME, and -n the namespace of the NodePools",
    )
    # The default since --watch exists.
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    output_format.add_format_arguments(parser)
    parser.set_defaults(run=print_status)


_BLOCKERS_EXAMPLE = "treenail-controller status -o json | jq '.pools[] | {name, blockers}'"


def print_status(arguments: argparse.Namespace) -> int:
    """Print the table; with --watch, follow it until Ctrl-C."""
    if arguments.hosted:
        # Imported late: it reads other kinds, and few clusters have hosted ones.
        from treenail.cli.controller.status import hosted

        return hosted.print_hosted_status(arguments)
    chosen: output_format.OutputFormat = arguments.output
    if arguments.watch and chosen is not output_format.OutputFormat.TABLE:
        raise errors.UsageError(
            f"cannot use --watch with -o {chosen}",
            remedy="leave one of them out; rollout status --wait waits in a script",
        )
    clock = clocks.SystemClock()
    with connect.connect_cluster(arguments) as client:
        if arguments.watch:
            # The table shows why it is outdated; a log would write between its lines.
            logging.getLogger("treenail").addHandler(logging.NullHandler())
            with WatchedPools(client, clock, namespace=arguments.namespace or "") as pools:
                view = screen.create_view(sys.stdout, os.environ)
                if arguments.pool:
                    choose_pools(pools.read_rows(), arguments.pool)
                follow_status(
                    pools, clock, view, names=arguments.pool, interval_s=arguments.interval
                )
        leader = leader_status.LeaderReader(client, clock, arguments.namespace or "").read_leader()
        rows, strays = read_pool_rows(client, clock.now(), leader)
    rows = choose_pools(rows, arguments.pool)
    rollout.print_strays(strays)
    if chosen in (output_format.OutputFormat.TABLE, output_format.OutputFormat.WIDE):
        width = (
            None if chosen is output_format.OutputFormat.WIDE else terminal.find_width(sys.stdout)
        )
        table = format_table(rows, width, is_wide=chosen is output_format.OutputFormat.WIDE)
        screen.print_table([*format_leader(leader, width), *table], sys.stdout)
        return 0
    output_format.print_output(
        chosen,
        kind=DOCUMENT_KIND,
        content=lambda: status_table.build_status_document(rows, now=clock.now(), leader=leader),
        lines=tuple,
        names=lambda: [
            output_format.format_object_name(resources.MACHINECONFIGPOOLS, row.name) for row in rows
        ],
    )
    return 0


def read_pool_rows(
    client: api_client.Client, now: float, leader: leader_status.LeaderReport | None = None
) -> tuple[tuple[status_table.PoolRow, ...], tuple[str, ...]]:
    """Read the rows of the table, and descriptions of nodes without the expected pool."""
    policies = snapshot.try_read_policies(client)
    pools, nodes = snapshot.read_pools(client), snapshot.read_nodes(client)
    builds = snapshot.read_pool_builds(client, now)
    rows = status_table.build_rows(pools, nodes, policies, now=now, leader=leader, builds=builds)
    return rows, pool_membership.list_strays(
        pools, ((node.name, node.labels, node.current_config) for node in nodes.values())
    )


def choose_pools(
    rows: Sequence[status_table.PoolRow], names: Sequence[str]
) -> tuple[status_table.PoolRow, ...]:
    """Return the rows of these pools, or all rows; raise `UsageError` for one that is missing."""
    known = {row.name for row in rows}
    for name in names:
        if name not in known:
            raise errors.UsageError(
                f"cannot find MachineConfigPool {name}: the cluster has "
                f"{', '.join(sorted(known)) or 'none'}",
                remedy="name one of these",
            )
    return tuple(row for row in rows if not names or row.name in names)


class WatchedPools:
    """Watches pools and nodes; use it as a context manager.

    A list of all nodes for each update of the table would cost the API server 60 MB with 5,000
    nodes.
    """

    def __init__(
        self, client: api_client.Client, clock: clocks.Clock, *, namespace: str = ""
    ) -> None:
        self._clock = clock
        self._leader_reader = leader_status.LeaderReader(client, clock, namespace)
        self._informers = InformerSet(client, clock)
        self._pools = self._informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGPOOLS), pool_membership.ObservedPool.from_json
        )
        self._nodes = self._informers.add_view(
            watch.WatchScope(resources.NODES), node_facts.NodeFacts.from_json
        )
        self._read_policies: Callable[[], Mapping[str, rollout_policy.ObservedPolicy] | None] = (
            lambda: None
        )
        if snapshot.try_read_policies(client) is not None:
            self._read_policies = pool_views.add_policy_view(self._informers).get_all
        self._read_builds: Callable[[], Mapping[str, status_table.BuildRow]] = dict
        if snapshot.can_read_builds(client):
            configs, builds = pool_views.add_build_views(self._informers)
            self._read_builds = lambda: status_table.find_pool_builds(
                configs.get_all(), builds.get_all(), clock.now()
            )

    def __enter__(self) -> Self:
        self._informers.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._informers.stop()

    def read_rows(self) -> tuple[status_table.PoolRow, ...]:
        """Return the present rows; raise `ClusterError` when they may be outdated."""
        self._informers.wait_until_synced(_LIST_LIMIT_S)
        self._informers.check_silent()
        if reason := self._informers.summarize_problem():
            raise errors.ClusterError(reason)
        return status_table.build_rows(
            self._pools.get_all(),
            self._nodes.get_all(),
            self._read_policies(),
            now=self._clock.now(),
            leader=self.read_leader(),
            builds=self._read_builds(),
        )

    def read_leader(self) -> leader_status.LeaderReport:
        """Return whether a controller leads."""
        return self._leader_reader.read_leader()


def follow_status(
    pools: WatchedPools,
    clock: clocks.Clock,
    view: screen.StatusView,
    *,
    names: Sequence[str] = (),
    interval_s: float = DEFAULT_INTERVAL_S,
) -> None:
    """Update the view, also after the API server was unreachable; without names show all pools."""
    rows: Sequence[status_table.PoolRow] = ()
    while True:
        problem, leader = "", pools.read_leader()
        try:
            rows = tuple(row for row in pools.read_rows() if not names or row.name in names)
        except errors.ClusterError as error:
            problem = str(error)
        view.show_rows(rows, now=clock.now(), problem=problem, leader=leader)
        clock.sleep(interval_s)


def _parse_interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not _MIN_INTERVAL_S <= seconds <= _MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"expected seconds from {_MIN_INTERVAL_S:g} to {_MAX_INTERVAL_S:g}, found {text!r:.80}"
        )
    return seconds
