"""``treenail plan``: what would change, what that costs and why, before anything is touched."""

import argparse
import json
import os
import sys
from collections.abc import Iterator

from treenail.api import documents
from treenail.api.disruptionpolicy import DEFAULT_POLICY, ClusterDisruptionPolicy, DisruptionPolicy
from treenail.cli.files import STDIN, read_input, read_machine_config
from treenail.cli.terminal import Painter, create_painter
from treenail.clock import SystemClock
from treenail.errors import UsageError
from treenail.host.filesystem.root import Root
from treenail.update.impact.preview import (
    ChangeMark,
    Preview,
    PreviewAction,
    PreviewEntry,
    preview_update,
)

Json = dict[str, object]

EXIT_UNCHANGED = 0
EXIT_FAILED = 1
EXIT_CHANGES = 2
EXIT_DISRUPTS = 3

_MARK_SIGNS = {ChangeMark.ADDED: "+", ChangeMark.CHANGED: "~", ChangeMark.REMOVED: "-"}
_MAX_REASONS = 20


def main(arguments: argparse.Namespace) -> int:
    """Print the plan; 0 nothing differs, 2 it does, 3 with a drain, 1 it can't be done."""
    found, notes = _plan_files(arguments) if arguments.files else _plan_this_node(arguments)
    if arguments.json:
        print(json.dumps({**build_plan_document(found), "notes": list(notes)}, indent=1))
        return compute_exit_code(found)
    for line in format_plan(found, create_painter(sys.stdout, os.environ)):
        print(line)
    for note in notes:
        print(f"note: {note}")
    return compute_exit_code(found)


def compute_exit_code(found: Preview) -> int:
    """The exit code that tells a program what a person reads."""
    if found.irreconcilable_changes:
        return EXIT_FAILED
    if found.needs_drain:
        return EXIT_DISRUPTS
    return EXIT_UNCHANGED if found.is_empty else EXIT_CHANGES


def format_plan(found: Preview, paint: Painter) -> Iterator[str]:
    """The plan for a person."""
    yield paint(f"{found.old or 'the old config'} -> {found.new or 'the new config'}", "!")
    if found.is_empty:
        yield "nothing differs"
        return
    yield ""
    for entry in found.entries:
        yield from _format_entry(entry, paint)
    if found.irreconcilable_changes:
        yield ""
        yield paint("This can't be done on a running node:", "!")
        for obstacle in found.irreconcilable_changes:
            yield f"  {obstacle.reason}"
            yield f"    at {obstacle.place}; {obstacle.remedy}"
    yield ""
    yield paint(_format_cost_heading(found), "!")
    for action in found.actions:
        yield from _format_action(action)
    if found.harmless:
        yield "  at no cost"
        yield from _format_reasons(PreviewAction("", found.harmless))


def build_plan_document(found: Preview) -> Json:
    """The plan for a program."""
    return {
        "old": found.old,
        "new": found.new,
        "changes": [
            {
                "kind": entry.kind,
                "name": entry.name,
                "change": entry.mark,
                "details": list(entry.details),
                "diffs": [
                    {"path": each.path, "lines": list(each.diff.lines), "note": each.diff.note}
                    for each in entry.contents
                ],
            }
            for entry in found.entries
        ],
        "actions": [
            {"action": action.description, "reasons": _build_reason_documents(action)}
            for action in found.actions
        ],
        "free": _build_reason_documents(PreviewAction("", found.harmless)),
        "drains": found.needs_drain,
        "reboots": found.needs_reboot,
        "obstacles": [
            {"place": each.place, "reason": each.reason, "remedy": each.remedy}
            for each in found.irreconcilable_changes
        ],
        "steps": list(found.steps),
    }


def _plan_this_node(arguments: argparse.Namespace) -> tuple[Preview, tuple[str, ...]]:
    # Two files need neither a machine nor a cluster.
    from treenail.cli.node.plan_node import plan_node

    root = Root(arguments.root or "/")
    policy = _read_policy(arguments.policy) if arguments.policy else None
    return plan_node(root, arguments.config, policy, SystemClock())


def _plan_files(arguments: argparse.Namespace) -> tuple[Preview, tuple[str, ...]]:
    if len(arguments.files) != 2:
        raise UsageError(
            "expected two files, OLD and NEW, or none for the plan of this node",
            remedy="see: treenail plan --help",
        )
    if arguments.files == [STDIN, STDIN]:
        raise UsageError("only one of the two can be read from standard input")
    old, new = map(read_machine_config, arguments.files)
    policy = _read_policy(arguments.policy) if arguments.policy else DEFAULT_POLICY
    return preview_update(old, new, policy), ()


def _read_policy(name: str) -> DisruptionPolicy:
    """The policy in the file of a MachineConfiguration."""
    return ClusterDisruptionPolicy.from_json(
        documents.load_document(read_input(name), where=name)
    ).policy


def _format_entry(entry: PreviewEntry, paint: Painter) -> Iterator[str]:
    sign = _MARK_SIGNS[entry.mark]
    yield paint(f"{sign} {entry.kind} {entry.name}".rstrip(), sign)
    for detail in entry.details:
        yield f"    {paint(detail, detail[:1])}"
    for written in entry.contents:
        if written.path != entry.name:
            yield f"    {written.path}"
        for line in written.diff.lines:
            yield f"    {paint(line, line[:1])}"
        if written.diff.note:
            yield f"    ({written.diff.note})"


def _format_cost_heading(found: Preview) -> str:
    if found.irreconcilable_changes:
        return "Where it can be done, it costs:"
    if found.needs_reboot:
        return "The node is drained and reboots:"
    if found.needs_drain:
        return "The node is drained:"
    return "The node stays in service:"


def _format_action(action: PreviewAction) -> Iterator[str]:
    yield f"  {action.description}, because"
    yield from _format_reasons(action)


def _format_reasons(action: PreviewAction) -> Iterator[str]:
    yield from (f"    {reason}" for reason in action.reasons[:_MAX_REASONS])
    left = len(action.reasons) - _MAX_REASONS
    if left > 0:
        yield f"    and {left} more; --json has them all"


def _build_reason_documents(action: PreviewAction) -> list[Json]:
    return [
        {"subject": each.subject, "rule": each.rule, "source": each.source}
        for each in action.reasons
    ]
