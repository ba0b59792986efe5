"""``treenail-controller plan``: show what a change does to each pool and node."""

import argparse
import sys

from treenail import clocks, errors
from treenail.cli import files, output, output_format, terminal
from treenail.cli.controller import connect
from treenail.controllers.render import render
from treenail.controllers.status import rollout_plan, snapshot


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "plan",
        help="show what a change does to each pool and node",
        description="Show what a change does to each pool and node: what is restarted, drained or "
        "rebooted, which MachineConfig requires it, the order, the estimated duration, and the "
        "PodDisruptionBudgets that never allow a drain to finish. Changes nothing.",
        epilog=terminal.format_examples(
            ("plan a change", "treenail-controller plan -f pool.yaml"),
            ("plan what the cluster requests already", "treenail-controller plan --live"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "-f",
        "--filename",
        metavar="FILE",
        action="append",
        help="plan the MachineConfigs, MachineConfigPools, KubeletConfigs and other objects in "
        "this file, this directory, or - for the standard input; repeatable",
    )
    parser.add_argument(
        "--live", action="store_true", help="plan the changes that the cluster requests already"
    )
    parser.add_argument("--pool", metavar="NAME", help="plan this pool only (default: all pools)")
    connect.add_connection_arguments(parser)
    output_format.add_format_arguments(parser, output_format.TEXT_FORMATS)
    parser.set_defaults(run=print_plan)


def print_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 if a pool cannot be planned, or an object cannot be applied."""
    if bool(arguments.filename) == arguments.live:
        raise errors.UsageError("cannot plan: name the change with -f, or use --live")
    documents = render.read_manifests(files.read_documents(arguments.filename or ()))
    for warning in (shown := tuple(documents.warnings)):
        print(f"{arguments.program}: warning: {warning}", file=sys.stderr)
    if arguments.filename:
        documents.require_objects("plan")
    with connect.connect_cluster(arguments) as client:
        before = snapshot.read_snapshot(client)
        if documents.locations:
            before = snapshot.add_generator_objects(client, before)
    after = rollout_plan.apply_manifests(before, documents)
    for warning in documents.warnings[len(shown) :]:
        print(f"{arguments.program}: warning: {warning}", file=sys.stderr)
    if arguments.pool is not None and arguments.pool not in after.pools:
        known = ", ".join(sorted(after.pools)) or "none"
        raise errors.UsageError(
            f"cannot plan: MachineConfigPool {arguments.pool} does not exist, found: {known}"
        )
    for name, image_config in sorted(documents.image_configs.items()):
        if image_config.pool not in after.pools:
            known = ", ".join(sorted(after.pools)) or "none"
            raise errors.UsageError(
                f"cannot plan: MachineOSConfig {name} names MachineConfigPool "
                f"{image_config.pool!r:.260}, which does not exist, found: {known}",
                remedy="correct spec.machineConfigPool.name, or name the pool with -f, too",
            )
    plans = rollout_plan.plan_pools(after, now=clocks.SystemClock().now(), only=arguments.pool)
    output_format.print_output(
        arguments.output,
        kind="RolloutPlan",
        content=lambda: rollout_plan.convert_to_json(plans),
        lines=lambda: [*rollout_plan.format_plans(plans)] or ["no MachineConfigPools found"],
    )
    sys.stdout.flush()
    is_wrong = documents.mistakes or any(pool_plan.problems for pool_plan in plans)
    return output.EXIT_FAILED if is_wrong else 0
