"""The controller that generates MachineConfigs from other objects."""

import argparse

from treenail.cli.controller.run import controllers
from treenail.controllers.runtime import workers


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def build(
    context: controllers.ControllerContext, _arguments: argparse.Namespace
) -> tuple[workers.ControllerSettings, ...]:
    """Construct the controller."""
    from treenail.controllers.generate.controller import GenerateController

    client = context.create_client("generate")
    controller = GenerateController(client, context.clock, context.recorder)
    return (workers.ControllerSettings(controller, workers=1),)


CONTROLLER = controllers.ControllerCommand(add_arguments, build)
