"""The controller that conducts rollouts of NodePools, and updates the nodes of its own in place."""

import argparse

from treenail.api.hosted import annotations as hosted_key
from treenail.cli.controller.run import controllers
from treenail.controllers.runtime import workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--scope", default=hosted_key.OWN_SCOPE, metavar="SCOPE",
        help="let hosted and nodepools own the HostedClusters whose annotation "
        f"{hosted_key.SCOPE} has this value (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--agent-image", default="", metavar="IMAGE",
        help="let hosted update nodes of owned NodePools whose own image has no treenail by pods "
        "of this image, the target hosted of the Containerfile (default: none)",
    )  # fmt: skip


def build(
    context: controllers.ControllerContext, arguments: argparse.Namespace
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
        scope=arguments.scope,
        agent_image=arguments.agent_image,
    )
    return (workers.ControllerSettings(controller),)


CONTROLLER = controllers.ControllerCommand(add_arguments, build)
