"""The render controller."""

import argparse

from treenail.cli.controller.run import controllers
from treenail.controllers.runtime import workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; the rollout controller reads them too."""
    parser.add_argument(
        "--settle", type=controllers.parse_seconds, default=5.0, metavar="S",
        help="render a pool after its MachineConfigs have not changed for S seconds "
        "(default: %(default)g)",
    )  # fmt: skip


def build(
    context: controllers.ControllerContext, arguments: argparse.Namespace
) -> tuple[workers.ControllerSettings, ...]:
    """Construct the controller."""
    from treenail.controllers.render.controller import RenderController

    controller = RenderController(
        context.create_client("render"),
        context.clock,
        context.recorder,
        settle_s=arguments.settle,
        is_generating="generate" in arguments.enable,
    )
    return (workers.ControllerSettings(controller),)


CONTROLLER = controllers.ControllerCommand(add_arguments, build)
