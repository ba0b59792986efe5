"""The drain controller."""

import argparse

from treenail.cli import argument_parser
from treenail.cli.controller.run import controllers
from treenail.controllers.runtime import workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--drains", type=argument_parser.parse_count, default=50, metavar="N",
        help="drain at most N nodes at the same time, in all pools (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--report-blockers-after", type=controllers.parse_seconds, default=30.0, metavar="S",
        help="report what blocks a drain, on the Node, in an Event and in its MachineConfigNode, "
        "after S seconds (default: %(default)g)",
    )  # fmt: skip


def build(
    context: controllers.ControllerContext, arguments: argparse.Namespace
) -> tuple[workers.ControllerSettings, ...]:
    """Construct the controller."""
    from treenail.controllers.drain.controller import DrainController

    controller = DrainController(
        context.create_client("drain"),
        context.recorder,
        context.clock,
        context.metrics,
        max_parallel=arguments.drains,
        report_after_s=arguments.report_blockers_after,
    )
    return (workers.ControllerSettings(controller, workers=8, max_retry_s=15.0),)


CONTROLLER = controllers.ControllerCommand(add_arguments, build)
