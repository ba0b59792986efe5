"""The controllers of ``treenail-controller run``: each has a module of its name beside this one."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from treenail import clocks
from treenail.api.decode import Json
from treenail.controllers.runtime import controller_metrics, workers
from treenail.kube import api_client, event_recorder, lease
from treenail.manifests import permissions

CONTROLLERS = tuple(permissions.CONTROLLER_VERBS)
_MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ControllerContext:
    """Parts of the process that each controller gets."""

    transport: api_client.Transport
    """Sends writes only while this process leads."""
    late_writes: lease.LateWrites
    """Withdraws what was created without the lead."""
    recorder: event_recorder.EventRecorder
    clock: clocks.Clock
    metrics: controller_metrics.ControllerMetrics
    own_node_name: str
    load_secret: Callable[[str], Json]
    """Reads a Secret of the controller's namespace. Raises `ClusterError`."""
    find_namespace: Callable[[], str]
    """Returns the controller's namespace; raises `UsageError` where it is unknown."""
    is_leader: Callable[[], bool] = lambda: True
    """Returns whether this process may write; for clients of other API servers."""

    def create_client(self, controller: str) -> api_client.Client:
        """Return a client whose writes the API server records under the controller's name."""
        return api_client.Client(self.transport, field_manager=f"treenail-{controller}")


@dataclass(frozen=True, slots=True)
class ControllerCommand:
    """Options of a controller, and how it is constructed from them.

    ``build`` imports the controller: a process loads only the controllers that it runs.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    build: Callable[[ControllerContext, argparse.Namespace], tuple[workers.ControllerSettings, ...]]


def load_command(name: str) -> ControllerCommand:
    """Return the ``CONTROLLER`` of the module that has the name of a controller."""
    command: ControllerCommand = import_module(f"treenail.cli.controller.run.{name}").CONTROLLER
    return command


def parse_controllers(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of controllers; drop duplicates."""
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    if unknown := [name for name in names if name not in CONTROLLERS]:
        known = ", ".join(CONTROLLERS)
        raise argparse.ArgumentTypeError(f"unknown controller {unknown[0]!r}, expected {known}")
    if not names:
        raise argparse.ArgumentTypeError("expected at least one controller")
    return names


def parse_seconds(text: str) -> float:
    """Parse seconds from 0 to an hour; raise `argparse.ArgumentTypeError`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected seconds from 0 to {_MAX_SECONDS:g}, found {text!r}"
        )
    return seconds
