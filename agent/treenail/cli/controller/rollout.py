"""``treenail-controller rollout status``: print or await the outcome of a rollout, for scripts."""

import argparse
import sys
from collections.abc import Callable, Sequence

from treenail import clocks, errors
from treenail.cli import argument_parser, output, output_format, terminal
from treenail.cli.controller import connect
from treenail.controllers.pools import os_image
from treenail.controllers.pools.pool_membership import ObservedPool
from treenail.controllers.status import leader_status, rollout_result, snapshot
from treenail.kube import api_client, resources

_EXIT_CODES = {
    rollout_result.RolloutOutcome.COMPLETE: output.EXIT_AT_TARGET,
    rollout_result.RolloutOutcome.IN_PROGRESS: output.EXIT_PENDING,
    rollout_result.RolloutOutcome.BLOCKED: output.EXIT_ATTENTION,
    rollout_result.RolloutOutcome.UNKNOWN: output.EXIT_FAILED,
}
_FORMATS = (output_format.OutputFormat.TEXT, *output_format.TABLE_FORMATS)
_COLUMNS = (
    output_format.TableColumn("POOL"),
    output_format.TableColumn("OUTCOME"),
    output_format.TableColumn("UPDATED"),
    output_format.TableColumn("TOTAL"),
    output_format.TableColumn("MESSAGE", is_wide=True),
)
_PERMISSION_REMEDY = (
    "permit this user to list machineconfigs and controllerconfigs of the group "
    f"{resources.MACHINECONFIGS.group}"
)
_REFRESH_S = 5.0
_MAX_STRAYS = 5
_DEFAULT_TIMEOUT = "2h"

ReadResults = Callable[[], Sequence[rollout_result.RolloutResult]]


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    rollout = commands.add_parser(
        "rollout",
        help="print or await the outcome of a rollout",
        description="Print or await the outcome of the rollouts of pools, for scripts.",
        epilog=terminal.format_examples(
            (
                "wait for all pools, two hours at most",
                "treenail-controller rollout status --wait",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    verbs = rollout.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = verbs.add_parser(
        "status",
        help="print or await the outcome",
        description="Print the outcome of the rollouts of pools. Exit code 0: all nodes are "
        "updated, 2: a rollout is in progress, with --wait after the time limit, 3: a rollout "
        "is halted, degraded, stalled or paused, and does not continue before a user acts, 1: the "
        "cluster cannot be read, or this user may not read what decides the outcome.",
        epilog=terminal.format_examples(
            ("fail a pipeline unless all nodes are updated", "treenail-controller rollout status"),
            (
                "wait for one pool, an hour at most",
                "treenail-controller rollout status worker --wait --timeout 1h",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument("pool", nargs="*", metavar="POOL", help="pools (default: all pools)")
    parser.add_argument(
        "-w",
        "--wait",
        action="store_true",
        help="wait until the rollouts are complete, or one needs a user",
    )
    parser.add_argument(
        "--timeout",
        type=argument_parser.parse_duration,
        default=_DEFAULT_TIMEOUT,
        metavar="TIME",
        help="wait at most this long, such as 45s, 30m or 1h30m (default: %(default)s)",
    )
    connect.add_connection_arguments(parser)
    connect.add_leader_arguments(parser)
    output_format.add_format_arguments(parser, _FORMATS)
    parser.set_defaults(run=print_rollout)


def print_rollout(arguments: argparse.Namespace) -> int:
    """Print the outcome; return its exit code."""
    clock = clocks.SystemClock()
    with connect.connect_cluster(arguments) as client:
        leader_reader = leader_status.LeaderReader(client, clock, arguments.namespace or "")

        def read_results() -> Sequence[rollout_result.RolloutResult]:
            results = read_rollouts(client, arguments.pool)
            leader = leader_reader.read_leader()
            return [
                rollout_result.check_leader(result, leader, now=clock.now()) for result in results
            ]

        results = await_rollouts(
            read_results,
            clock,
            timeout_s=arguments.timeout if arguments.wait else 0.0,
            show=_print_result if arguments.output is output_format.OutputFormat.TEXT else None,
            warn=_print_warning,
        )
        leader = leader_reader.read_leader()
        try:
            print_strays(snapshot.read_strays(client, snapshot.read_pools(client)))
        except errors.ClusterError as error:
            _print_warning(f"cannot check that each node has a pool: {error}")
    if leader.message and leader.state is not leader_status.LeaderState.NONE:
        # Not a part of the output: a script may compare that.
        notice = [f"warning: {leader.message}", f"  {leader.remedy}"]
        terminal.print_lines(notice, sys.stderr, hanging_columns=4)
    if arguments.output in (output_format.OutputFormat.TABLE, output_format.OutputFormat.WIDE):
        output_format.print_table(arguments.output, _COLUMNS, map(_build_row, results))
    else:
        # Sentences were printed while they changed.
        output_format.print_output(
            arguments.output,
            kind="RolloutStatus",
            content=lambda: {"controller": leader.to_json(), **_build_document(results)},
            lines=tuple,
            names=lambda: (
                output_format.format_object_name(resources.MACHINECONFIGPOOLS, result.pool)
                for result in results
            ),
        )
    return compute_exit_code(results)


def read_rollouts(
    client: api_client.Client, names: Sequence[str]
) -> Sequence[rollout_result.RolloutResult]:
    """Read the outcomes of these pools, or of all; raise `UsageError` for one that is missing."""
    pools = snapshot.read_pools(client)
    if not pools:
        raise errors.UsageError("cannot find a rollout: the cluster has no MachineConfigPool")
    for name in names:
        if name not in pools:
            known = ", ".join(sorted(pools)) or "none"
            raise errors.UsageError(
                f"cannot find MachineConfigPool {name}: the cluster has {known}",
                remedy="name one of these",
            )
    chosen = [pools[name] for name in dict.fromkeys(names or sorted(pools))]
    results = [_read_result(observed) for observed in chosen]
    if not any(map(rollout_result.needs_render_inputs, results)):
        return results
    try:
        configs = snapshot.read_metadata(client, resources.MACHINECONFIGS)
        controller_configs = snapshot.read_metadata(client, resources.CONTROLLERCONFIGS)
        stream = snapshot.read_image_stream(client)
    except errors.ForbiddenError as error:
        return [
            rollout_result.mark_unknown(result, f"{error}; {_PERMISSION_REMEDY}")
            for result in results
        ]
    every_pool = {name: observed.pool for name, observed in pools.items()}
    return [
        rollout_result.check_render_inputs(
            result,
            observed.pool,
            configs,
            controller_configs,
            os_image.describe_stream(observed.pool, every_pool, stream),
        )
        if rollout_result.needs_render_inputs(result) and observed.error is None
        else result
        for result, observed in zip(results, chosen, strict=True)
    ]


def _read_result(observed: ObservedPool) -> rollout_result.RolloutResult:
    try:
        if observed.error is not None:
            raise observed.error
        return rollout_result.compute_rollout_result(observed.pool)
    except errors.ConfigError as error:
        name = observed.pool.name
        return rollout_result.RolloutResult(
            name, rollout_result.RolloutOutcome.BLOCKED, str(error), None, None
        )


def await_rollouts(
    read_results: ReadResults,
    clock: clocks.Clock,
    *,
    timeout_s: float,
    show: Callable[[rollout_result.RolloutResult], None] | None,
    warn: Callable[[str], None] = lambda _: None,
) -> Sequence[rollout_result.RolloutResult]:
    """Wait until all rollouts are complete or one is blocked, for ``timeout_s`` at most.

    Calls ``show`` with each new result. An unreachable API server is tried again, and ``warn``
    gets the reason once for each outage; raises `UnreachableError` if it never answered.
    """
    deadline = clock.monotonic() + timeout_s
    shown: dict[str, str] = {}
    results: Sequence[rollout_result.RolloutResult] = ()
    is_reachable = True
    while True:
        try:
            results = read_results()
            is_reachable = True
        except errors.UnreachableError as error:
            if clock.monotonic() >= deadline and not results:
                raise
            if is_reachable:
                warn(f"cannot read the cluster, trying again until the time limit: {error}")
            is_reachable = False
        for result in results:
            if show is not None and shown.get(result.pool) != str(result):
                shown[result.pool] = str(result)
                show(result)
        is_over = bool(results) and compute_exit_code(results) != output.EXIT_PENDING
        if is_over or clock.monotonic() >= deadline:
            return results
        clock.sleep(min(_REFRESH_S, max(0.0, deadline - clock.monotonic())))


def compute_exit_code(results: Sequence[rollout_result.RolloutResult]) -> int:
    """Return the code of a blocked rollout, else of one in progress, else of an unknown one."""
    outcomes = {result.outcome for result in results}
    for outcome in (
        rollout_result.RolloutOutcome.BLOCKED,
        rollout_result.RolloutOutcome.IN_PROGRESS,
        rollout_result.RolloutOutcome.UNKNOWN,
    ):
        if outcome in outcomes:
            return _EXIT_CODES[outcome]
    return 0


def _print_result(result: rollout_result.RolloutResult) -> None:
    print(
        "\n".join(terminal.wrap_text(str(result), terminal.find_width(sys.stdout), hanging="  ")),
        flush=True,
    )


def print_strays(strays: Sequence[str]) -> None:
    """Print warnings about the first nodes with an agent that no pool, or another one, has."""
    for text in strays[:_MAX_STRAYS]:
        _print_warning(text)
    if len(strays) > _MAX_STRAYS:
        _print_warning(f"{len(strays) - _MAX_STRAYS} more such nodes")


def _print_warning(text: str) -> None:
    terminal.print_lines([f"warning: {text}"], sys.stderr, hanging_columns=2)


def _build_row(result: rollout_result.RolloutResult) -> tuple[str, ...]:
    counts = ["" if count is None else str(count) for count in (result.updated, result.total)]
    return result.pool, result.outcome, *counts, result.message


def _build_document(results: Sequence[rollout_result.RolloutResult]) -> dict[str, object]:
    return {
        "pools": [
            {
                "name": result.pool,
                "outcome": result.outcome,
                "message": result.message,
                "updated": result.updated,
                "total": result.total,
            }
            for result in results
        ]
    }
