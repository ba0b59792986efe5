"""``treenail-controller machines``: show which machines requested a config, and their Nodes."""

import argparse
import sys
from collections.abc import Sequence

from treenail import clocks, errors
from treenail.cli import argument_parser, output, output_format, terminal
from treenail.cli.controller import connect
from treenail.controllers.status.snapshot import read_pools
from treenail.kube import api_client, resources
from treenail.manifests.ignition_server import NAME
from treenail.provisioning.approval.request import list_kubelet_requests
from treenail.provisioning.machines import (
    joined_machines,
    logged_requests,
    machine_report,
    request_log,
)

DOCUMENT_KIND = "MachineRequestList"

_COLUMNS = (
    output_format.TableColumn("AGE"),
    output_format.TableColumn("ADDRESS"),
    output_format.TableColumn("POOL"),
    output_format.TableColumn("TOKEN"),
    output_format.TableColumn("MACHINE"),
    output_format.TableColumn("VERSION"),
    output_format.TableColumn("OUTCOME"),
    output_format.TableColumn("NODE"),
    output_format.TableColumn("COUNT", is_wide=True),
    output_format.TableColumn("STATUS", is_wide=True),
    output_format.TableColumn("BYTES", is_wide=True),
    output_format.TableColumn("SECONDS", is_wide=True),
    output_format.TableColumn("CONFIG", is_wide=True),
    output_format.TableColumn("IMAGE"),
    output_format.TableColumn("PROBLEM", is_wide=True),
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
        epilog=terminal.format_examples(
            ("find out why a machine does not join", "treenail-controller machines"),
            (
                "list the machines without a Node",
                "treenail-controller machines --json | jq '.requests[] | select(.needsUser)'",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument("pool", nargs="*", metavar="POOL", help="pools (default: all pools)")
    parser.add_argument(
        "--expect", type=argument_parser.parse_duration, default=joined_machines.EXPECT_S,
        metavar="TIME",
        help="expect the Node of a machine within this time, such as 45s, 30m or 1h30m (default: "
        "20m)",
    )  # fmt: skip
    connect.add_connection_arguments(parser)
    parser.add_argument(
        "-n", "--namespace", type=connect.parse_namespace, default=NAME,
        help="namespace of the server (default: %(default)s)",
    )  # fmt: skip
    output_format.add_format_arguments(parser)
    parser.set_defaults(run=print_machines)


def print_machines(arguments: argparse.Namespace) -> int:
    """Print the requests; return the exit code of the worst machine."""
    clock = clocks.SystemClock()
    with connect.connect_cluster(arguments) as client:
        report = read_report(client, clock, arguments.namespace, expect_s=arguments.expect)
    rows = [row for row in report if not arguments.pool or row.logged.row.pool in arguments.pool]
    chosen: output_format.OutputFormat = arguments.output
    if chosen in (output_format.OutputFormat.TABLE, output_format.OutputFormat.WIDE):
        if not rows:
            pools = f" of pool {' or '.join(arguments.pool)}" if arguments.pool else ""
            line = f"no machine requested a config{pools} in the last 24 hours"
            terminal.print_lines([line], sys.stderr)
            return 0
        is_wide = chosen is output_format.OutputFormat.WIDE
        now = clock.now()
        cells = [_build_cells(row, now, is_wide=is_wide) for row in rows]
        if is_wide:
            output_format.print_table(chosen, _COLUMNS, cells)
        else:
            notes = ((row.problem, row.remedy) for row in rows)
            output_format.print_table_with_notes(_COLUMNS, cells, notes)
    else:
        output_format.print_output(
            chosen,
            kind=DOCUMENT_KIND,
            content=lambda: machine_report.build_report_document(rows, expect_s=arguments.expect),
            lines=tuple,
            names=lambda: _list_node_names(rows),
        )
    return compute_exit_code(rows)


def read_report(
    client: api_client.Client, clock: clocks.Clock, namespace: str, *, expect_s: float
) -> list[machine_report.ReportedRequest]:
    """Read the log, the Nodes and the pools; raise `ClusterError`."""
    try:
        stored = request_log.RequestStore(
            client, namespace, request_log.REQUEST_CONFIGMAP
        ).read_rows()
    except errors.NotFoundError as error:
        raise errors.ClusterError(
            "cannot read the log of requests: ConfigMap "
            f"{namespace}/{request_log.REQUEST_CONFIGMAP} does not exist",
            remedy="name the namespace of the server with --namespace, or install it: "
            "treenail-controller manifests --enable serve | kubectl apply -f -",
        ) from error
    now = clock.now()
    pools = [observed.pool for observed in read_pools(client).values()]
    nodes = [*joined_machines.parse_nodes(client.list(resources.NODES).items)]
    certificates = list_kubelet_requests(client)
    machines = joined_machines.join_machines(
        logged_requests.select_newest(stored, now),
        nodes,
        pools,
        now,
        expect_s=expect_s,
        certificates=certificates,
    )
    return machine_report.build_report(machines)


def compute_exit_code(rows: Sequence[machine_report.ReportedRequest]) -> int:
    """Return the code of a machine that needs a user, else of one that is expected."""
    if any(row.machine.needs_user for row in rows):
        return output.EXIT_ATTENTION
    is_waiting = any(row.machine.arrival is joined_machines.NodeArrival.WAITING for row in rows)
    return output.EXIT_PENDING if is_waiting else 0


def _build_cells(
    reported: machine_report.ReportedRequest, now: float, *, is_wide: bool
) -> tuple[str, ...]:
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


def _format_node(reported: machine_report.ReportedRequest, now: float) -> str:
    machine = reported.machine
    since = machine.expected_since
    match machine.arrival:
        case joined_machines.NodeArrival.APPEARED:
            return machine.node
        case joined_machines.NodeArrival.MISSING:
            return f"none for {_format_age(now - (since or now))}"
        case joined_machines.NodeArrival.WAITING:
            return "none yet"
        case joined_machines.NodeArrival.UNKNOWN:
            return "unknown"
        case joined_machines.NodeArrival.UNEXPECTED:
            return ""


def _format_age(seconds: float) -> str:
    return terminal.format_duration(max(0.0, seconds))


def _shorten_image(image: str) -> str:
    """Return the last part of the name and the begin of the digest."""
    name, at, digest = image.rpartition("/")[2].partition("@sha256:")
    return f"{name}@{digest[:_DIGEST_DIGITS]}" if at else name


def _list_node_names(rows: Sequence[machine_report.ReportedRequest]) -> list[str]:
    names = dict.fromkeys(row.machine.node for row in rows if row.machine.node)
    return [output_format.format_object_name(resources.NODES, name) for name in names]
