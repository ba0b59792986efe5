"""``treenail plan``: what would change, what that costs and why, before anything is touched."""

import argparse
import json
import os
import sys
from collections.abc import Iterator

from treenail.api import documents
from treenail.api.disruptionpolicy import DEFAULTS, ClusterPolicy, DisruptionPolicy
from treenail.cli.files import STDIN, content, machine_config
from treenail.cli.terminal import Paint, paint
from treenail.clock import SystemClock
from treenail.errors import UsageError
from treenail.host.filesystem.root import Root
from treenail.update.impact.preview import Action, Entry, Mark, Preview, preview

Json = dict[str, object]

NOTHING = 0
CANNOT = 1
CHANGES = 2
DISRUPTS = 3

_SIGNS = {Mark.ADDED: "+", Mark.CHANGED: "~", Mark.REMOVED: "-"}
_REASONS_SHOWN = 20


def main(arguments: argparse.Namespace) -> int:
    """Print the plan; 0 nothing differs, 2 it does, 3 with a drain, 1 it can't be done."""
    found, notes = _of_files(arguments) if arguments.files else _of_node(arguments)
    if arguments.json:
        print(json.dumps({**document(found), "notes": list(notes)}, indent=1))
        return code(found)
    for line in lines(found, paint(sys.stdout, os.environ)):
        print(line)
    for note in notes:
        print(f"note: {note}")
    return code(found)


def code(found: Preview) -> int:
    """The exit code that tells a program what a person reads."""
    if found.obstacles:
        return CANNOT
    if found.drains:
        return DISRUPTS
    return NOTHING if found.empty else CHANGES


def lines(found: Preview, paint: Paint) -> Iterator[str]:
    """The plan for a person."""
    yield paint(f"{found.old or 'the old config'} -> {found.new or 'the new config'}", "!")
    if found.empty:
        yield "nothing differs"
        return
    yield ""
    for entry in found.entries:
        yield from _entry(entry, paint)
    if found.obstacles:
        yield ""
        yield paint("This can't be done on a running node:", "!")
        for obstacle in found.obstacles:
            yield f"  {obstacle.reason}"
            yield f"    at {obstacle.place}; {obstacle.remedy}"
    yield ""
    yield paint(_cost(found), "!")
    for action in found.actions:
        yield from _action(action)
    if found.free:
        yield "  at no cost"
        yield from _because(Action("", found.free))


def document(found: Preview) -> Json:
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
                    for each in entry.written
                ],
            }
            for entry in found.entries
        ],
        "actions": [
            {"action": action.words, "reasons": _reasons(action)} for action in found.actions
        ],
        "free": _reasons(Action("", found.free)),
        "drains": found.drains,
        "reboots": found.reboots,
        "obstacles": [
            {"place": each.place, "reason": each.reason, "remedy": each.remedy}
            for each in found.obstacles
        ],
        "steps": list(found.steps),
    }


def _of_node(arguments: argparse.Namespace) -> tuple[Preview, tuple[str, ...]]:
    # Two files need neither a machine nor a cluster.
    from treenail.cli.node.plan_node import node_plan

    root = Root(arguments.root or "/")
    policy = _policy(arguments.policy) if arguments.policy else None
    return node_plan(root, arguments.config, policy, SystemClock())


def _of_files(arguments: argparse.Namespace) -> tuple[Preview, tuple[str, ...]]:
    if len(arguments.files) != 2:
        raise UsageError(
            "expected two files, OLD and NEW, or none for the plan of this node",
            remedy="see: treenail plan --help",
        )
    if arguments.files == [STDIN, STDIN]:
        raise UsageError("only one of the two can be read from standard input")
    old, new = map(machine_config, arguments.files)
    policy = _policy(arguments.policy) if arguments.policy else DEFAULTS
    return preview(old, new, policy), ()


def _policy(name: str) -> DisruptionPolicy:
    """The policy in the file of a MachineConfiguration."""
    return ClusterPolicy.from_json(documents.load(content(name), where=name)).policy


def _entry(entry: Entry, paint: Paint) -> Iterator[str]:
    sign = _SIGNS[entry.mark]
    yield paint(f"{sign} {entry.kind} {entry.name}".rstrip(), sign)
    for detail in entry.details:
        yield f"    {paint(detail, detail[:1])}"
    for written in entry.written:
        if written.path != entry.name:
            yield f"    {written.path}"
        for line in written.diff.lines:
            yield f"    {paint(line, line[:1])}"
        if written.diff.note:
            yield f"    ({written.diff.note})"


def _cost(found: Preview) -> str:
    if found.obstacles:
        return "Where it can be done, it costs:"
    if found.reboots:
        return "The node is drained and reboots:"
    if found.drains:
        return "The node is drained:"
    return "The node stays in service:"


def _action(action: Action) -> Iterator[str]:
    yield f"  {action.words}, because"
    yield from _because(action)


def _because(action: Action) -> Iterator[str]:
    yield from (f"    {reason}" for reason in action.reasons[:_REASONS_SHOWN])
    left = len(action.reasons) - _REASONS_SHOWN
    if left > 0:
        yield f"    and {left} more; --json has them all"


def _reasons(action: Action) -> list[Json]:
    return [
        {"subject": each.subject, "rule": each.rule, "source": each.source}
        for each in action.reasons
    ]
