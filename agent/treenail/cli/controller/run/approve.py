"""The controller that approves the certificates of kubelets."""

import argparse

from treenail.api import component_names
from treenail.cli.controller import connect
from treenail.cli.controller.run import controllers
from treenail.controllers.runtime import workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--serve-namespace", type=connect.parse_namespace, metavar="NAME",
        default=component_names.IGNITION_SERVER,
        help="let approve find access tokens in this namespace (default: %(default)s)",
    )  # fmt: skip


def build(
    context: controllers.ControllerContext, arguments: argparse.Namespace
) -> tuple[workers.ControllerSettings, ...]:
    """Construct the controller."""
    from treenail.provisioning.approval.controller import ApprovalController

    controller = ApprovalController(
        context.create_client("approve"),
        context.clock,
        context.recorder,
        arguments.serve_namespace,
    )
    return (workers.ControllerSettings(controller, workers=1, max_retry_s=15.0),)


CONTROLLER = controllers.ControllerCommand(add_arguments, build)
