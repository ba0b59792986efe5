"""The machine below a root, for commands: its context, settings, inspector and step runner."""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import clocks, errors
from treenail.encoding import json_text
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine

if TYPE_CHECKING:
    from treenail.daemon.agent_settings import AgentSettings, PartialSettings
    from treenail.daemon.configuration.node_configuration import NodeConfiguration
    from treenail.host.systemd.system_bus import SystemBus


STATUS_PATH = "/run/treenail/status.json"
_MAX_STATUS_BYTES = 1024 * 1024


def open_machine(path: str | None, bus: "SystemBus | None" = None) -> Machine:
    """Open the machine below the directory (None: ``/``); it connects to the bus on first use."""
    return Machine(Root(path or "/"), clock=clocks.SystemClock(), bus=bus)


def load_agent_status(machine: Machine) -> object:
    """Load the document that the agent shows in this boot; raise `FileError` or `ValueError`."""
    content = machine.files.read_file(STATUS_PATH, limit=_MAX_STATUS_BYTES)
    return json_text.parse_json(content or b"{}")


def find_agent_status(machine: Machine) -> object:
    """Return that document; None if it cannot be read."""
    try:
        return load_agent_status(machine)
    except (errors.FileError, ValueError):
        return None


def create_configuration(machine: Machine, *, is_running: bool) -> "NodeConfiguration":
    """Create what plans and applies steps; it uses systemd only if the machine is running."""
    # Imported late: commands that only read the ledger do not need it.
    from treenail.daemon.configuration.node_configuration import MachineInspector, NodeConfiguration
    from treenail.daemon.configuration.step_runner import StepRunner

    systemd = machine.systemd if is_running else None
    return NodeConfiguration(MachineInspector(machine, systemd), StepRunner(machine, systemd))


def load_agent_settings(arguments: argparse.Namespace) -> "AgentSettings":
    """Load the settings for ``run`` and ``firstboot``; options take precedence over the file."""
    from treenail.daemon.agent_settings import PartialSettings

    options = PartialSettings(
        kubeconfig=getattr(arguments, "kubeconfig", None),
        node_name=getattr(arguments, "node_name", None),
        root=arguments.root,
        log_level=logging.DEBUG if arguments.verbose else None,
    )
    return _load_file(Root(arguments.root or "/"), arguments.config, options)


def load_node_settings(root: Root, config: str | None) -> "AgentSettings":
    """Load the settings of the agent; raise `UsageError` if they are invalid."""
    from treenail.daemon.agent_settings import PartialSettings

    return _load_file(root, config, PartialSettings(root=str(root.prefix)))


def _load_file(root: Root, config: str | None, options: "PartialSettings") -> "AgentSettings":
    from treenail.daemon.agent_settings import SETTINGS_FILE, load_settings

    path = Path(config) if config else root.resolve_path(SETTINGS_FILE)
    return load_settings(path, options, is_required=config is not None)
