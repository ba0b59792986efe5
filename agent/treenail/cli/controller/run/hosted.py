"""The controller that conducts rollouts of HyperShift's NodePools."""

import argparse

from treenail.cli.controller.run import controllers
from treenail.controllers.runtime import workers


def build(
    context: controllers.ControllerContext, _arguments: argparse.Namespace
) -> tuple[workers.ControllerSettings, ...]:
    """Construct the controller."""
    from treenail.controllers.hosted.conduct.controller import ConductController
    from treenail.controllers.rollout.external_gates import GateClient
    from treenail.controllers.runtime.web import WebClient

    controller = ConductController(
        context.create_client("hosted"),
        context.clock,
        GateClient(WebClient(), load_secret=context.load_secret),
        context.recorder,
        context.is_leader,
    )
    return (workers.ControllerSettings(controller),)


CONTROLLER = controllers.ControllerCommand(lambda _parser: None, build)
