"""The controller that completes an installation in image mode."""

import argparse
import os

from treenail.cli import argument_parser
from treenail.cli.controller.run import build as build_command
from treenail.cli.controller.run import controllers
from treenail.controllers.runtime import workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--handover-deadline", type=argument_parser.parse_duration, default=3600.0, metavar="TIME",
        help="report that an image of an installation is not in its final registry after this "
        "time; install retries further (default: 60m)",
    )  # fmt: skip


def build(
    context: controllers.ControllerContext, arguments: argparse.Namespace
) -> tuple[workers.ControllerSettings, ...]:
    """Construct the controller."""
    from treenail.controllers.handover.controller import InstallController
    from treenail.controllers.handover.image_mover import ImageMover
    from treenail.controllers.image_build.cluster_reader import ClusterReader

    client = context.create_client("install")
    namespace = build_command.find_build_namespace(context, arguments)
    reader = ClusterReader(client, context.clock, namespace=namespace, environ=os.environ)
    controller = InstallController(
        client,
        context.clock,
        context.recorder,
        ImageMover(reader, context.clock),
        deadline_s=arguments.handover_deadline,
        metrics=context.metrics,
    )
    return (workers.ControllerSettings(controller, workers=1, max_retry_s=15.0),)


CONTROLLER = controllers.ControllerCommand(add_arguments, build)
