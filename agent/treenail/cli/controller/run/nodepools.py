"""The controller that owns the NodePools of HostedClusters in its scope."""

import argparse

from treenail import errors
from treenail.api.hosted import token_secret
from treenail.cli import argument_parser
from treenail.cli.controller.run import controllers
from treenail.controllers.runtime import workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments beside ``--scope``, which is of both controllers of hosted clusters."""
    parser.add_argument(
        "--ignition-url", type=argument_parser.parse_server_url, metavar="URL",
        help="let the machines of nodepools fetch their config from serve --hosted at this "
        "address, https://HOST:PORT",
    )  # fmt: skip
    parser.add_argument(
        "--ignition-ca", default="", metavar="SECRET",
        help="Secret in the namespace of the controllers whose key ca.crt has the CAs of this "
        "server (default: machines trust the CAs of their image)",
    )  # fmt: skip


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for nodepools without what it needs."""
    if "hosted" not in arguments.enable:
        raise errors.UsageError(
            "cannot enable nodepools without hosted, which updates nodes in place and deletes "
            "machines by a RolloutPolicy",
            remedy="use --enable hosted,nodepools",
        )
    if not arguments.ignition_url:
        raise errors.UsageError(
            "cannot enable nodepools without --ignition-url: machines would get no config",
            remedy="add --ignition-url https://HOST:PORT",
        )


def build(
    context: controllers.ControllerContext, arguments: argparse.Namespace
) -> tuple[workers.ControllerSettings, ...]:
    """Construct the controller."""
    from treenail.controllers.hosted.owning.controller import OwningController, OwningSettings

    check_arguments(arguments)
    secret: str = arguments.ignition_ca

    def load_authorities() -> bytes:
        content = token_secret.read_value(context.load_secret(secret), "ca.crt") if secret else b""
        if secret and not content:
            raise errors.ConfigError(
                f"Secret {secret} has no key ca.crt",
                remedy="add the CAs of the Ignition server in PEM",
            )
        return content

    settings = OwningSettings(arguments.scope, arguments.ignition_url, load_authorities)
    controller = OwningController(
        context.create_client("nodepools"), context.clock, context.recorder, settings
    )
    return (workers.ControllerSettings(controller),)


CONTROLLER = controllers.ControllerCommand(add_arguments, build)
