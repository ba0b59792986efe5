"""``treenail handback``: hand this node over to the Machine Config Daemon (MCD)."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from treenail import errors
from treenail.api import decode, machineconfig
from treenail.cli import output_format
from treenail.cli.files import read_machine_config
from treenail.cli.node import local_machine, own_node
from treenail.config.image_content import ImageSplit, compare_with_image
from treenail.config.wanted_state import read_wanted_state
from treenail.daemon.configuration import config_cache, mcd_handback, mcd_state
from treenail.daemon.configuration.image_content import read_image_content
from treenail.daemon.configuration.node_configuration import NodeConfiguration
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.machine import Machine
from treenail.update.state import ledger_record
from treenail.update.state import ledger_record as records
from treenail.update.steps import step_types

AnnotationChanges = dict[str, str | None]
_MAX_STEPS_SHOWN = 5
_MAX_CONFIG_BYTES = 64 * 1024 * 1024


def main(arguments: argparse.Namespace) -> int:
    """Hand the node over; refuse, before any change, a machine that the MCD would degrade."""
    machine = local_machine.open_machine(arguments.root)
    root, ledger = machine.root, machine.ledger
    with ledger.hold_lock():
        record = records.from_json(ledger.read_document())
        mcd_handback.check_handback(record)
        config = _read_current_config(arguments.file, machine.files, record.current.config)
        configuration = local_machine.create_configuration(
            machine, is_running=root.prefix == Path("/")
        )
        machine.undo.ensure_none_interrupted()
        _refuse_drift(_find_differing_steps(machine, configuration, config, record.current))
        paths = mcd_handback.hand_back_node(root, config, record.current)
    changes, problem = _annotate_node(machine, arguments.config, record.current)
    if arguments.json:
        document = {"files": list(paths), "annotations": changes, "problem": problem}
        output_format.print_document(output_format.OutputFormat.JSON, "Handback", document)
        return 0
    print(f"handed over to the Machine Config Daemon: {record.current}")
    print("\n".join(f"  {path}" for path in paths))
    if problem:
        print(f"cannot annotate the Node: {problem}")
        print("before you start the Machine Config Daemon, annotate the Node with kubectl:")
        print(
            "\n".join(
                f"  {_format_kubectl_argument(name, value)}" for name, value in changes.items()
            )
        )
    print("disable the agent: systemctl disable treenail")
    return 0


def _read_current_config(
    config_file: str | None, files: atomic_files.HostFiles, name: str
) -> machineconfig.MachineConfig:
    """Read the current config from the file, or from the copy on this machine."""
    if config_file is not None:
        config = read_machine_config(config_file)
        if config.name != name:
            raise errors.UsageError(
                f"cannot use {config_file}: expected {name}, the config of this node, "
                f"found {config.name}"
            )
        return config
    for path in (f"{config_cache.DIRECTORY}/{name}.json", mcd_state.CURRENT_CONFIG):
        content = files.read_file(path, limit=_MAX_CONFIG_BYTES)
        if content is not None:
            config = machineconfig.MachineConfig.from_json(decode.load_json(content, where=path))
            if config.name == name:
                return config
    raise errors.UsageError(
        f"cannot hand over: this machine stores no copy of {name}",
        remedy=f"fetch it: kubectl get machineconfig {name} -o json > FILE; "
        "then run: treenail handback FILE",
    )


def _find_differing_steps(
    machine: Machine,
    configuration: NodeConfiguration,
    config: machineconfig.MachineConfig,
    current: ledger_record.Target,
) -> tuple[step_types.ConfigStep, ...]:
    """Find the steps that change files; none if the machine matches its config."""
    wanted = read_wanted_state(config)
    split = ImageSplit(wanted)
    if current.image:
        content = read_image_content(root_directory.open_booted_tree(machine.root), wanted)
        split = compare_with_image(wanted, content)
    steps = configuration.plan_steps(split.wanted, config.name, split.provided).steps
    # Backups and the ownership record change no file that the MCD compares.
    return tuple(
        step
        for step in steps
        if not isinstance(step, step_types.BackUpEntry | step_types.RecordOwnership)
    )


def _refuse_drift(differing_steps: Sequence[step_types.ConfigStep]) -> None:
    if differing_steps:
        shown = "; ".join(map(str, differing_steps[:_MAX_STEPS_SHOWN]))
        more = (
            f" and {len(differing_steps) - _MAX_STEPS_SHOWN} more"
            if len(differing_steps) > _MAX_STEPS_SHOWN
            else ""
        )
        raise errors.DriftError(
            f"cannot hand over: the machine differs from its config: {shown}{more}",
            remedy="repair it first: treenail drift --repair PATH",
        )


def _annotate_node(
    machine: Machine, config: str | None, current: ledger_record.Target
) -> tuple[AnnotationChanges, str]:
    """Annotate the Node; return the changes and, if they are still to make, the cause."""
    annotations: Mapping[str, str] = {}
    try:
        with own_node.connect_own_node(machine, config) as node:
            annotations = (
                decode.Fields.from_json(node.read_node(), "Node")
                .get_object("metadata")
                .get_text_map("annotations")
            )
            changes = mcd_handback.compute_handback_annotations(annotations, current)
            node.annotate_node(changes)
    except errors.TreenailError as error:
        return mcd_handback.compute_handback_annotations(annotations, current), str(error)
    return changes, ""


def _format_kubectl_argument(name: str, value: str | None) -> str:
    """Format an annotation as an argument of ``kubectl annotate``."""
    return f"{name}-" if value is None else f"{name}={value}"
