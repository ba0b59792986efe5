"""``treenail-controller machines``: show which machines requested a config, and their Nodes."""

import argparse
import sys
from collections.abc import Sequence

from treenail.cli.argument_parser import parse_duration
from treenail.cli.controller.connect import (
    add_connection_arguments,
    connect_cluster,
    parse_namespace,
)
from treenail.cli.output import EXIT_ATTENTION, EXIT_PENDING
from treenail.cli.output_format import (
    OutputFormat,
    TableColumn,
    add_format_arguments,
    format_object_name,
    format_table_lines,
    print_output,
    print_table,
)
from treenail.cli.terminal import (
    HelpFormatter,
    find_width,
    format_duration,
    format_examples,
    print_lines,
    wrap_text,
)
from treenail.clocks import Clock, SystemClock
from treenail.controllers.status.snapshot import read_pools
from treenail.errors import ClusterError, NotFoundError
from treenail.kube.api_client import Client
from treenail.kube.resources import NODES
from treenail.manifests.ignition_server import NAME
from treenail.provisioning.approval.request import list_kubelet_requests
from treenail.provisioning.machines.joined_machines import (
    EXPECT_S,
    NodeArrival,
    join_machines,
    parse_nodes,
)
from treenail.provisioning.machines.logged_requests import select_newest
from treenail.provisioning.machines.machine_report import (
    ReportedRequest,
    build_report,
    build_report_document,
)
from treenail.provisioning.machines.request_log import REQUEST_CONFIGMAP, RequestStore
from treenail.sanitize import escape_line

DOCUMENT_KIND = "MachineRequestList"

_COLUMNS = (
    TableColumn("AGE"),
    TableColumn("ADDRESS"),
    TableColumn("POOL"),
    TableColumn("TOKEN"),
    TableColumn("MACHINE"),
    TableColumn("VERSION"),
    TableColumn("OUTCOME"),
    TableColumn("NODE"),
    TableColumn("COUNT", is_wide=True),
    TableColumn("STATUS", is_wide=True),
    TableColumn("BYTES", is_wide=True),
    TableColumn("SECONDS", is_wide=True),
    TableColumn("CONFIG", is_wide=True),
    TableColumn("IMAGE"),
    TableColumn("PROBLEM", is_wide=True),
)
_DIGEST_DIGITS = 12


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "machines",
        help="show which machines requested an Ignition config, and whether they joined",
        description="Show the requests for Ignition configs of the last 24 hours, and whether the "
        "Nodes of the machines appeared; machines that need a user come first. Exit code 0: no "
        "machine is expected, 2: a machine is expected, 3: a machine does not join before a user "
        "acts, 1: the cluster cannot be read.",
        epilog=format_examples(
            ("find out why a machine does not join", "treenail-controller machines"),
            (
                "list the machines without a Node",
                "treenail-controller machines --json | jq '.requests[] | select(.needsUser)'",
            ),
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("pool", nargs="*", metavar="POOL", help="pools (default: all pools)")
    parser.add_argument(
        "--expect", type=parse_duration, default=EXPECT_S, metavar="TIME",
        help="expect the Node of a machine within this time, such as 45s, 30m or 1h30m (default: "
        "20m)",
    )  # fmt: skip
    add_connection_arguments(parser)
    parser.add_argument(
        "-n", "--namespace", type=parse_namespace, default=NAME,
        help="namespace of the server (default: %(default)s)",
    )  # fmt: skip
    add_format_arguments(parser)
    parser.set_defaults(run=print_machines)


def print_machines(arguments: argparse.Namespace) -> int:
    """Print the requests; return the exit code of the worst machine."""
    clock = SystemClock()
    with connect_cluster(arguments) as client:
        found = read_report(client, clock, arguments.namespace, expect_s=arguments.expect)
    rows = [each for each in found if not arguments.pool or each.logged.row.pool in arguments.pool]
    chosen: OutputFormat = arguments.output
    if chosen in (OutputFormat.TABLE, OutputFormat.WIDE):
        if not rows:
            pools = f" of pool {' or '.join(arguments.pool)}" if arguments.pool else ""
            line = f"no machine requested a config{pools} in the last 24 hours"
            print_lines([line], sys.stderr)
            return 0
        is_wide = chosen is OutputFormat.WIDE
        now = clock.now()
        cells = [_build_cells(each, now, is_wide=is_wide) for each in rows]
        if is_wide:
            print_table(chosen, _COLUMNS, cells)
        else:
            _print_with_problems(rows, cells)
    else:
        print_output(
            chosen,
            kind=DOCUMENT_KIND,
            content=lambda: build_report_document(rows, expect_s=arguments.expect),
            lines=tuple,
            names=lambda: _list_node_names(rows),
        )
    return compute_exit_code(rows)


def read_report(
    client: Client, clock: Clock, namespace: str, *, expect_s: float
) -> list[ReportedRequest]:
    """Read the log, the Nodes and the pools; raise `ClusterError`."""
    try:
        stored = RequestStore(client, namespace, REQUEST_CONFIGMAP).read_rows()
    except NotFoundError as error:
        raise ClusterError(
            f"cannot read the log of requests: ConfigMap {namespace}/{REQUEST_CONFIGMAP} does not "
            "exist",
            remedy="name the namespace of the server with --namespace, or install it: "
            "treenail-controller manifests --enable serve | kubectl apply -f -",
        ) from error
    now = clock.now()
    pools = [each.pool for each in read_pools(client).values()]
    nodes = [*parse_nodes(client.list(NODES).items)]
    certificates = list_kubelet_requests(client)
    machines = join_machines(
        select_newest(stored, now), nodes, pools, now, expect_s=expect_s, certificates=certificates
    )
    return build_report(machines)


def compute_exit_code(rows: Sequence[ReportedRequest]) -> int:
    """Return the code of a machine that needs a user, else of one that is expected."""
    if any(each.machine.needs_user for each in rows):
        return EXIT_ATTENTION
    is_waiting = any(each.machine.arrival is NodeArrival.WAITING for each in rows)
    return EXIT_PENDING if is_waiting else 0


def _print_with_problems(rows: Sequence[ReportedRequest], cells: Sequence[Sequence[str]]) -> None:
    """Print the table with the whole problem of a request on the lines below it."""
    width = find_width(sys.stdout)
    heading, *lines = format_table_lines(_COLUMNS, cells, width=width)
    print(heading)
    for reported, line in zip(rows, lines, strict=True):
        print(line)
        for text in filter(None, (reported.problem, reported.remedy)):
            for part in wrap_text(escape_line(text), width, indent="  ", hanging="  "):
                print(part)


def _build_cells(reported: ReportedRequest, now: float, *, is_wide: bool) -> tuple[str, ...]:
    logged, row = reported.logged, reported.logged.row
    return (
        _format_age(now - row.at),
        row.address,
        row.pool,
        row.token,
        row.machine,
        row.version,
        row.outcome.value,
        _format_node(reported, now),
        str(logged.count),
        str(row.status),
        str(row.bytes),
        f"{row.seconds:.3f}",
        row.rendered,
        row.image if is_wide else _shorten_image(row.image),
        "; ".join(filter(None, (reported.problem, reported.remedy))),
    )


def _format_node(reported: ReportedRequest, now: float) -> str:
    machine = reported.machine
    since = machine.expected_since
    match machine.arrival:
        case NodeArrival.APPEARED:
            return machine.node
        case NodeArrival.MISSING:
            return f"none for {_format_age(now - (since or now))}"
        case NodeArrival.WAITING:
            return "none yet"
        case NodeArrival.UNKNOWN:
            return "unknown"
        case NodeArrival.UNEXPECTED:
            return ""


def _format_age(seconds: float) -> str:
    return format_duration(max(0.0, seconds))


def _shorten_image(image: str) -> str:
    """Return the last part of the name and the begin of the digest."""
    name, at, digest = image.rpartition("/")[2].partition("@sha256:")
    return f"{name}@{digest[:_DIGEST_DIGITS]}" if at else name


def _list_node_names(rows: Sequence[ReportedRequest]) -> list[str]:
    names = dict.fromkeys(each.machine.node for each in rows if each.machine.node)
    return [format_object_name(NODES, name) for name in names]
