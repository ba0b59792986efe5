"""The rollout controller, and the one that writes MachineConfigNodes."""

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.cli import argument_parser
from treenail.cli.controller.run import controllers
from treenail.controllers.runtime import workers
from treenail.kube import api_client

if TYPE_CHECKING:
    from treenail.controllers.pools.registry_requests import LazyTagSource, TagSource

_IMAGE_SETTLE_FACTOR = 2.0
"""An image settles for longer than a MachineConfig, so that one decision covers both."""


def build(
    context: controllers.ControllerContext, arguments: argparse.Namespace
) -> tuple[workers.ControllerSettings, ...]:
    """Construct the controllers."""
    from treenail.controllers.rollout.controller import RolloutController
    from treenail.controllers.rollout.external_gates import GateClient
    from treenail.controllers.rollout.machineconfignodes import MachineConfigNodeController
    from treenail.controllers.rollout.reconcile import RolloutSettings
    from treenail.controllers.runtime.web import WebClient

    image_key = key.PREFIX + arguments.image_annotation
    client = context.create_client("rollout")
    controller = RolloutController(
        client,
        context.clock,
        GateClient(WebClient(), load_secret=context.load_secret),
        context.recorder,
        RolloutSettings(
            image_key=image_key,
            own_node=context.own_node_name,
            # The render controller waits this long before it renders the same change.
            image_settle_s=_IMAGE_SETTLE_FACTOR * arguments.settle,
        ),
        context.metrics,
        tags=make_tag_source(client, context.clock, context.find_namespace),
    )
    node_controller = MachineConfigNodeController(client, context.clock, image_key=image_key)
    return (
        workers.ControllerSettings(controller),
        workers.ControllerSettings(node_controller, workers=4),
    )


CONTROLLER = controllers.ControllerCommand(argument_parser.add_image_annotation_argument, build)


def make_tag_source(
    client: api_client.Client, clock: clocks.Clock, find_namespace: Callable[[], str]
) -> "LazyTagSource":
    """Make a source that reads logins from the namespace of the controllers."""
    from treenail.controllers.pools.registry_requests import LazyTagSource

    def make() -> "TagSource":
        from treenail.controllers.image_build.cluster_reader import ClusterReader
        from treenail.controllers.image_build.tag_resolver import TagResolver

        try:
            namespace = find_namespace()
        except errors.UsageError:
            # On a host, without --namespace.
            namespace = "default"
        reader = ClusterReader(client, clock, namespace=namespace, environ=os.environ)
        return TagResolver(reader, clock)

    return LazyTagSource(make)
