"""``treenail-controller plan``: what would happen to each pool and node."""

import argparse
import json
import sys

from treenail.cli.controller.connect import connect_cluster
from treenail.cli.files import read_documents
from treenail.clock import SystemClock
from treenail.controllers.plan import plan, read, text
from treenail.controllers.render import offline
from treenail.errors import UsageError

EXIT_FAILED = 1


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "plan",
        help="show what a change would do to each pool and node",
        description="Show what happens to each pool and node when documents are applied: what is "
        "restarted, drained or rebooted and which MachineConfig asks for it, in which order, how "
        "long it takes, and which PodDisruptionBudgets never let a drain end. Nothing is changed.",
    )
    parser.add_argument(
        "-f",
        "--filename",
        metavar="FILE",
        action="append",
        help="MachineConfigs, MachineConfigPools or a ControllerConfig to be applied: a file, a "
        "directory, or - for standard input; may be given several times",
    )
    parser.add_argument(
        "--live", action="store_true", help="plan what the cluster asks for already"
    )
    parser.add_argument("--pool", metavar="NAME", help="plan this pool only")
    parser.add_argument("--kubeconfig", metavar="FILE", help="how to reach the cluster")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=print_plan)


def print_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; 1 when some pool can't be planned."""
    if bool(arguments.filename) == arguments.live:
        raise UsageError("name the change with -f, or plan what is asked for already with --live")
    documents = offline.read_manifests(read_documents(arguments.filename or ()))
    with connect_cluster(arguments.kubeconfig) as client:
        found = read.read_snapshot(client)
    after = plan.apply_manifests(found, documents)
    if arguments.pool is not None and arguments.pool not in after.pools:
        known = ", ".join(sorted(after.pools)) or "none"
        raise UsageError(f"there is no MachineConfigPool {arguments.pool}, found are: {known}")
    plans = plan.plan_pools(after, now=SystemClock().now(), only=arguments.pool)
    if arguments.json:
        print(json.dumps(text.convert_to_json(plans), indent=2))
    else:
        print("\n".join(text.format_plans(plans)) or "there are no MachineConfigPools")
    sys.stdout.flush()
    return EXIT_FAILED if any(each.problems for each in plans) else 0
