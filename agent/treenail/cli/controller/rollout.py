"""``treenail-controller rollout status``: print or await the outcome of a rollout, for scripts."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence

from treenail.cli.controller.connect import add_connection_arguments, connect_cluster
from treenail.cli.terminal import (
    HelpFormatter,
    find_width,
    format_examples,
    wrap_text,
)
from treenail.clock import Clock, SystemClock
from treenail.controllers.plan import read
from treenail.controllers.plan.rollout_result import (
    RolloutOutcome,
    RolloutResult,
    compute_rollout_result,
)
from treenail.errors import ConfigError, UnreachableError, UsageError
from treenail.kube.client import Client

EXIT_BLOCKED = 3
EXIT_IN_PROGRESS = 4
_EXIT_CODES = {
    RolloutOutcome.COMPLETE: 0,
    RolloutOutcome.IN_PROGRESS: EXIT_IN_PROGRESS,
    RolloutOutcome.BLOCKED: EXIT_BLOCKED,
}
_REFRESH_S = 5.0
_DEFAULT_TIMEOUT = "2h"
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")

ReadResults = Callable[[], Sequence[RolloutResult]]


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "rollout",
        help="print or await the outcome of a rollout",
        description="Print the outcome of the rollouts of pools. Exit codes: 0 all nodes are "
        "updated, 1 the cluster cannot be read, 2 an argument is invalid, 3 a rollout does not "
        "continue before a user acts, 4 a rollout is in progress, with --wait after the time "
        "limit.",
        epilog=format_examples(
            ("fail a pipeline unless all nodes are updated", "treenail-controller rollout status"),
            (
                "wait for one pool, an hour at most",
                "treenail-controller rollout status worker --wait --timeout 1h",
            ),
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("verb", choices=("status",), metavar="status", help="the only verb")
    parser.add_argument("pool", nargs="*", metavar="POOL", help="pools (default: all pools)")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait until the rollouts are complete, or one needs a user",
    )
    parser.add_argument(
        "--timeout",
        type=_parse_timeout,
        default=_DEFAULT_TIMEOUT,
        metavar="TIME",
        help="wait at most this long, such as 45s, 30m or 1h30m (default: %(default)s)",
    )
    add_connection_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")
    parser.set_defaults(run=print_rollout)


def print_rollout(arguments: argparse.Namespace) -> int:
    """Print the outcome; return its exit code."""
    with connect_cluster(arguments) as client:

        def read_results() -> Sequence[RolloutResult]:
            return read_rollouts(client, arguments.pool)

        found = await_rollouts(
            read_results,
            SystemClock(),
            timeout_s=arguments.timeout if arguments.wait else 0.0,
            show=None if arguments.json else _print_result,
        )
    if arguments.json:
        print(json.dumps(_build_document(found), indent=2))
    return compute_exit_code(found)


def read_rollouts(client: Client, names: Sequence[str]) -> Sequence[RolloutResult]:
    """Read the outcomes of these pools, or of all; raise `UsageError` for one that is missing."""
    pools = read.read_pools(client)
    if not pools:
        raise UsageError("cannot find a rollout: the cluster has no MachineConfigPool")
    for name in names:
        if name not in pools:
            known = ", ".join(sorted(pools)) or "none"
            raise UsageError(
                f"cannot find MachineConfigPool {name}: the cluster has {known}",
                remedy="name one of these",
            )
    results = []
    for name in dict.fromkeys(names or sorted(pools)):
        observed = pools[name]
        try:
            if observed.error is not None:
                raise observed.error
            results.append(compute_rollout_result(observed.pool))
        except ConfigError as error:
            results.append(RolloutResult(name, RolloutOutcome.BLOCKED, str(error), 0, 0))
    return results


def await_rollouts(
    read_results: ReadResults,
    clock: Clock,
    *,
    timeout_s: float,
    show: Callable[[RolloutResult], None] | None,
) -> Sequence[RolloutResult]:
    """Wait until all rollouts are complete or one is blocked, for ``timeout_s`` at most.

    Calls ``show`` with each new result. An unreachable API server is tried again; raises
    `UnreachableError` if it never answered.
    """
    deadline = clock.monotonic() + timeout_s
    shown: dict[str, str] = {}
    found: Sequence[RolloutResult] = ()
    while True:
        try:
            found = read_results()
        except UnreachableError:
            if clock.monotonic() >= deadline and not found:
                raise
        for each in found:
            if show is not None and shown.get(each.pool) != str(each):
                shown[each.pool] = str(each)
                show(each)
        is_over = bool(found) and compute_exit_code(found) != EXIT_IN_PROGRESS
        if is_over or clock.monotonic() >= deadline:
            return found
        clock.sleep(min(_REFRESH_S, max(0.0, deadline - clock.monotonic())))


def compute_exit_code(found: Sequence[RolloutResult]) -> int:
    """Return the exit code: that of a blocked rollout first, then that of one in progress."""
    outcomes = {each.outcome for each in found}
    for outcome in (RolloutOutcome.BLOCKED, RolloutOutcome.IN_PROGRESS):
        if outcome in outcomes:
            return _EXIT_CODES[outcome]
    return 0


def _print_result(result: RolloutResult) -> None:
    print("\n".join(wrap_text(str(result), find_width(sys.stdout), hanging="  ")), flush=True)


def _build_document(found: Sequence[RolloutResult]) -> dict[str, object]:
    return {
        "pools": [
            {
                "name": each.pool,
                "outcome": each.outcome,
                "message": each.message,
                "updated": each.updated,
                "total": each.total,
            }
            for each in found
        ]
    }


def _parse_timeout(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30m or 1h30m, found {text!r}")
    hours, minutes, seconds = (int(each or 0) for each in found.groups())
    return float(hours * 3600 + minutes * 60 + seconds)
