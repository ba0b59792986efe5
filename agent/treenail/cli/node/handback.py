"""``treenail handback``: make the node over to the Machine Config Daemon."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from treenail.api.decode import Fields, load_json
from treenail.api.machineconfig import MachineConfig
from treenail.cli.files import machine_config
from treenail.cli.node.local_machine import survey_and_runner
from treenail.cli.node.own_node import own_node, settings_of
from treenail.clock import SystemClock
from treenail.config.wanted import wanted
from treenail.daemon.configuration.config_cache import DIRECTORY
from treenail.daemon.configuration.inspect import Survey
from treenail.daemon.configuration.mcd_handback import hand_back
from treenail.daemon.configuration.mcd_state import CURRENT_CONFIG
from treenail.daemon.settings.settings import ImageFiles
from treenail.errors import DriftError, TreenailError, UsageError
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.system.state_file import Ledger
from treenail.update.handback import annotations, check
from treenail.update.impact.impact import in_image_mode
from treenail.update.state import record as records
from treenail.update.state.record import Target
from treenail.update.steps.plan import plan
from treenail.update.steps.steps import Keep, Remember, Step

Changes = dict[str, str | None]
_SHOWN = 5
_LIMIT = 64 * 1024 * 1024


def main(arguments: argparse.Namespace) -> int:
    """Hand the node back; refuses, before anything is touched, what would be found to differ."""
    root = Root(arguments.root or "/")
    ledger = Ledger(root)
    with ledger.lock():
        record = records.from_json(ledger.read())
        check(record)
        config = _config(arguments.file, Files(root), record.current.config)
        survey, runner = survey_and_runner(root, running=root.prefix == Path("/"))
        runner.undo.check()
        images_bake = settings_of(root, arguments.config).image_files is ImageFiles.BAKED
        _refuse_drift(_differing(survey, config, record.current, images_bake=images_bake))
        paths = hand_back(root, config, record.current)
    told, problem = _annotate(root, arguments.config, record.current)
    if arguments.json:
        document = {"files": list(paths), "annotations": told, "problem": problem}
        print(json.dumps(document, indent=1))
        return 0
    print(f"handed back: {record.current}")
    print("\n".join(f"  {path}" for path in paths))
    if problem:
        print(f"the Node can't be annotated: {problem}")
        print("before the Machine Config Daemon starts, annotate it with kubectl:")
        print("\n".join(f"  {_argument(name, value)}" for name, value in told.items()))
    print("keep treenail from starting again: systemctl disable treenail")
    return 0


def _config(given: str | None, files: Files, name: str) -> MachineConfig:
    """The current config, from a file or as it is kept on this machine."""
    if given is not None:
        config = machine_config(given)
        if config.name != name:
            raise UsageError(f"{given}: expected {name}, which this node has, found {config.name}")
        return config
    for path in (f"{DIRECTORY}/{name}.json", CURRENT_CONFIG):
        content = files.read(path, limit=_LIMIT)
        if content is not None:
            config = MachineConfig.from_json(load_json(content, where=path))
            if config.name == name:
                return config
    raise UsageError(
        f"there is no copy of {name} on this machine",
        remedy=f"name one: kubectl get machineconfig {name} -o json > FILE",
    )


def _differing(
    survey: Survey, config: MachineConfig, current: Target, *, images_bake: bool
) -> tuple[Step, ...]:
    """What it would take to bring the machine to its own config; nothing when all is well."""
    wish = wanted(config)
    if current.image and images_bake:
        wish = in_image_mode(wish)
    old = survey.managed()
    steps = plan(old, wish, survey.see(old, wish), config=config.name).steps
    return tuple(step for step in steps if not isinstance(step, Keep | Remember))


def _refuse_drift(differing: Sequence[Step]) -> None:
    if differing:
        shown = "; ".join(map(str, differing[:_SHOWN]))
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise DriftError(
            f"the machine is not as its config says, and would be found degraded: {shown}{more}",
            remedy="let the agent mend it first",
        )


def _annotate(root: Root, config: str | None, current: Target) -> tuple[Changes, str]:
    """What the Node is told, or has to be told yet, and why it could not be."""
    found: Mapping[str, str] = {}
    try:
        with own_node(root, config, SystemClock()) as node:
            found = Fields.of(node.read(), "Node").nested("metadata").text_map("annotations")
            changes = annotations(found, current)
            node.annotate(changes)
    except TreenailError as error:
        return annotations(found, current), str(error)
    return changes, ""


def _argument(name: str, value: str | None) -> str:
    """As ``kubectl annotate`` takes it."""
    return f"{name}-" if value is None else f"{name}={value}"
