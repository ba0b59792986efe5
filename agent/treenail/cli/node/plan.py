"""``treenail plan``: show what an update changes, what that costs, and why."""

import argparse
import os
import sys
from collections.abc import Iterator

from treenail.api import documents
from treenail.api.disruptionpolicy import DEFAULT_POLICY, ClusterDisruptionPolicy, DisruptionPolicy
from treenail.cli.files import STDIN, read_input, read_machine_config
from treenail.cli.output import EXIT_AT_TARGET, EXIT_ATTENTION, EXIT_FAILED, EXIT_PENDING
from treenail.cli.output_format import print_output
from treenail.cli.terminal import Painter, VerbatimLine, create_painter
from treenail.errors import UsageError
from treenail.update.impact.preview import (
    ChangeMark,
    Preview,
    PreviewAction,
    PreviewEntry,
    preview_update,
)

Json = dict[str, object]


_MARK_SIGNS = {ChangeMark.ADDED: "+", ChangeMark.CHANGED: "~", ChangeMark.REMOVED: "-"}
_MAX_REASONS = 20


def main(arguments: argparse.Namespace) -> int:
    """Print the plan; return its exit code, see `compute_exit_code`."""
    found, notes = _plan_files(arguments) if arguments.files else _plan_this_node(arguments)
    paint = create_painter(sys.stdout, os.environ)
    print_output(
        arguments.output,
        kind="UpdatePlan",
        content=lambda: {**build_plan_document(found), "notes": list(notes)},
        lines=lambda: [*format_plan(found, paint), *(f"note: {note}" for note in notes)],
    )
    return compute_exit_code(found)


def compute_exit_code(found: Preview) -> int:
    """Return the exit code for the plan."""
    if found.irreconcilable_changes:
        return EXIT_FAILED
    if found.needs_drain:
        return EXIT_ATTENTION
    return EXIT_AT_TARGET if found.is_empty else EXIT_PENDING


def format_plan(found: Preview, paint: Painter) -> Iterator[str]:
    """Format the plan for users."""
    yield paint(f"{found.old or 'the old config'} -> {found.new or 'the new config'}", "!")
    if found.is_empty:
        yield "nothing differs"
        return
    yield ""
    for entry in found.entries:
        yield from _format_entry(entry, paint)
    if found.irreconcilable_changes:
        yield ""
        yield paint("A running node cannot make these changes:", "!")
        for obstacle in found.irreconcilable_changes:
            yield f"  {obstacle.reason}"
            yield f"    at {obstacle.place}; {obstacle.remedy}"
    yield ""
    yield paint(_format_cost_heading(found), "!")
    for action in found.actions:
        yield from _format_action(action)
    if found.harmless:
        yield "  no action, because"
        yield from _format_reasons(PreviewAction("", found.harmless))
    if found.in_image:
        yield ""
        yield paint("The image must contain, as the agent checks before the drain:", "!")
        yield from (f"  {each}" for each in found.in_image)


def build_plan_document(found: Preview) -> Json:
    """Build the JSON document of the plan."""
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
        "harmless": _build_reason_documents(PreviewAction("", found.harmless)),
        "drains": found.needs_drain,
        "reboots": found.needs_reboot,
        "obstacles": [
            {"place": each.place, "reason": each.reason, "remedy": each.remedy}
            for each in found.irreconcilable_changes
        ],
        "steps": list(found.steps),
        "inImage": list(found.in_image),
    }


def _plan_this_node(arguments: argparse.Namespace) -> tuple[Preview, tuple[str, ...]]:
    # Imported late: two files need neither a machine nor a cluster.
    from treenail.cli.node.local_machine import open_machine
    from treenail.cli.node.own_node import plan_node

    policy = _read_policy(arguments.policy) if arguments.policy else None
    return plan_node(open_machine(arguments.root), arguments.config, policy)


def _plan_files(arguments: argparse.Namespace) -> tuple[Preview, tuple[str, ...]]:
    if len(arguments.files) != 2:
        raise UsageError(
            "cannot plan: expected two files, OLD and NEW, or none for the plan of this node",
            remedy="see: treenail plan --help",
        )
    if arguments.files == [STDIN, STDIN]:
        raise UsageError("cannot plan: only one of OLD and NEW can be the standard input")
    old, new = map(read_machine_config, arguments.files)
    policy = _read_policy(arguments.policy) if arguments.policy else DEFAULT_POLICY
    return preview_update(old, new, policy), ()


def _read_policy(name: str) -> DisruptionPolicy:
    """Read the policy from the file of a MachineConfiguration."""
    return ClusterDisruptionPolicy.from_json(
        documents.load_document(read_input(name), where=name)
    ).policy


def _format_entry(entry: PreviewEntry, paint: Painter) -> Iterator[str]:
    sign = _MARK_SIGNS[entry.mark]
    yield paint(f"{sign} {entry.kind} {entry.name}".rstrip(), sign)
    for detail in entry.details:
        yield f"    {paint(detail, detail[:1])}"
    for each in entry.contents:
        if each.path != entry.name:
            yield f"    {each.path}"
        for line in each.diff.lines:
            yield VerbatimLine(f"    {paint(line, line[:1])}")
        if each.diff.note:
            yield f"    ({each.diff.note})"


def _format_cost_heading(found: Preview) -> str:
    if found.irreconcilable_changes:
        return "The other changes cost:"
    if found.needs_reboot:
        return "The node must drain and reboot:"
    if found.needs_drain:
        return "The node must drain:"
    return "The node stays in service:"


def _format_action(action: PreviewAction) -> Iterator[str]:
    yield f"  {action.description}, because"
    yield from _format_reasons(action)


def _format_reasons(action: PreviewAction) -> Iterator[str]:
    yield from (f"    {reason}" for reason in action.reasons[:_MAX_REASONS])
    hidden = len(action.reasons) - _MAX_REASONS
    if hidden > 0:
        yield f"    and {hidden} more; --json lists all"


def _build_reason_documents(action: PreviewAction) -> list[Json]:
    return [
        {"subject": each.subject, "rule": each.rule, "source": each.source}
        for each in action.reasons
    ]
