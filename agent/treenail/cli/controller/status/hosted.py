"""``treenail-controller status --hosted``: NodePools of HyperShift, and what they wait for."""

import argparse
from collections.abc import Iterator

from treenail import clocks, errors
from treenail.cli import output_format, terminal
from treenail.cli.controller import connect
from treenail.controllers.hosted.status import rows, snapshot
from treenail.kube import resources

_COLUMNS = [
    output_format.TableColumn(heading, is_wide=heading == "PLATFORM")
    for heading in (
        *("NAMESPACE", "CLUSTER", "POOL", "PLATFORM", "TYPE"),
        *("STATE", "SINCE", "HASH", "VERSION", "NODES"),
    )
]


def print_hosted_status(arguments: argparse.Namespace) -> int:
    """Print one row for each NodePool, with what it waits for on the lines below."""
    if arguments.watch:
        raise errors.UsageError(
            "cannot use --watch with --hosted",
            remedy="run: watch treenail-controller status --hosted",
        )
    clock = clocks.SystemClock()
    with connect.connect_cluster(arguments) as client:
        pools = snapshot.read_pools(client, clock, arguments.namespace or "", arguments.pool)
    now = clock.now()
    listed = rows.build_rows(pools, now=now)
    chosen: output_format.OutputFormat = arguments.output
    if chosen in (output_format.OutputFormat.TABLE, output_format.OutputFormat.WIDE):
        if not listed:
            print("no NodePools found")
            return 0
        cells = [_format_cells(row, now) for row in listed]
        notes = (_format_notes(row, now) for row in listed)
        output_format.print_table_with_notes(
            _COLUMNS, cells, notes, is_wide=chosen is output_format.OutputFormat.WIDE
        )
        return 0
    output_format.print_output(
        chosen,
        kind=rows.DOCUMENT_KIND,
        content=lambda: rows.build_document(listed),
        lines=tuple,
        names=lambda: [
            output_format.format_object_name(resources.NODEPOOLS, row.name) for row in listed
        ],
    )
    return 0


def _format_cells(row: rows.NodePoolRow, now: float) -> tuple[str, ...]:
    return (
        row.namespace,
        row.cluster,
        row.name,
        row.platform,
        row.upgrade_type,
        row.state,
        _format_age(row.since, now),
        _format_change(row.current_hash, row.wanted_hash),
        _format_change(row.current_version, row.wanted_version),
        ", ".join(f"{count} {state}" for state, count in row.counts.items()),
    )


def _format_notes(row: rows.NodePoolRow, now: float) -> Iterator[str]:
    for cause in row.causes:
        age = f" for {_format_age(cause.since, now)}" if cause.since else ""
        yield f"{cause.kind}{age}: {cause.message}"
        if cause.next_step:
            yield f"next: {cause.next_step}"
    yield from (f"not looked at: {text}" for text in row.unread)


def _format_age(since: str, now: float) -> str:
    began = clocks.parse_rfc3339(since)
    return terminal.format_duration(max(now - began, 0)) if began is not None else ""


def _format_change(current: str, wanted: str) -> str:
    return f"{current or '-'} -> {wanted}" if wanted and wanted != current else current
