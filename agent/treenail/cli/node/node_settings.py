"""The settings of this machine's agent, for all commands."""

import argparse
import logging
import os
from pathlib import Path

from treenail.daemon.settings.settings import (
    SETTINGS_FILE,
    AgentSettings,
    PartialSettings,
    load_settings,
)
from treenail.host.filesystem.root import Root


def load_agent_settings(arguments: argparse.Namespace) -> AgentSettings:
    """Load the settings for ``run`` and ``firstboot``; options take precedence over the file."""
    given = PartialSettings(
        kubeconfig=getattr(arguments, "kubeconfig", None),
        node_name=getattr(arguments, "node_name", None),
        root=arguments.root,
        log_level=logging.DEBUG if arguments.verbose else None,
    )
    return _load_file(Root(arguments.root or "/"), arguments.config, given)


def load_node_settings(root: Root, config: str | None) -> AgentSettings:
    """Load the settings of the agent; raise `UsageError` if they are invalid."""
    return _load_file(root, config, PartialSettings(root=str(root.prefix)))


def _load_file(root: Root, config: str | None, given: PartialSettings) -> AgentSettings:
    path = Path(config) if config else root.resolve_path(SETTINGS_FILE)
    return load_settings(path, given, host_name=os.uname().nodename, is_required=config is not None)
