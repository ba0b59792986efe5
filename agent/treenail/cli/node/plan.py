"""``treenail plan``: show what an update changes, what that costs, and why."""

import argparse
import os
import sys
from collections.abc import Iterator

from treenail.api import disruptionpolicy, documents
from treenail.cli import files, output, output_format, terminal
from treenail.config.wanted_state import ParsedConfig
from treenail.errors import UsageError
from treenail.update.impact import preview

Json = dict[str, object]


_MARK_SIGNS = {
    preview.ChangeMark.ADDED: "+",
    preview.ChangeMark.CHANGED: "~",
    preview.ChangeMark.REMOVED: "-",
}
_MAX_REASONS = 20


def main(arguments: argparse.Namespace) -> int:
    """Print the plan; return its exit code, see `compute_exit_code`."""
    update, notes = _plan_files(arguments) if arguments.files else _plan_this_node(arguments)
    paint = terminal.create_painter(sys.stdout, os.environ)
    output_format.print_output(
        arguments.output,
        kind="UpdatePlan",
        content=lambda: {**build_plan_document(update), "notes": list(notes)},
        lines=lambda: [*format_plan(update, paint), *(f"note: {note}" for note in notes)],
    )
    return compute_exit_code(update)


def compute_exit_code(update: preview.Preview) -> int:
    """Return the exit code for the plan."""
    if update.irreconcilable_changes:
        return output.EXIT_FAILED
    if update.needs_drain:
        return output.EXIT_ATTENTION
    return output.EXIT_AT_TARGET if update.is_empty else output.EXIT_PENDING


def format_plan(update: preview.Preview, paint: terminal.Painter) -> Iterator[str]:
    """Format the plan for users."""
    yield paint(f"{update.old or 'the old config'} -> {update.new or 'the new config'}", "!")
    if update.is_empty:
        yield "nothing differs"
        return
    yield ""
    for entry in update.entries:
        yield from _format_entry(entry, paint)
    if update.irreconcilable_changes:
        yield ""
        yield paint("A running node cannot make these changes:", "!")
        for obstacle in update.irreconcilable_changes:
            yield f"  {obstacle.reason}"
            yield f"    at {obstacle.place}; {obstacle.remedy}"
    yield ""
    yield paint(_format_cost_heading(update), "!")
    for action in update.actions:
        yield from _format_action(action)
    if update.harmless:
        yield "  no action, because"
        yield from _format_reasons(preview.PreviewAction("", update.harmless))
    if update.in_image:
        yield ""
        yield paint("The image must contain, as the agent checks before the drain:", "!")
        yield from (f"  {path}" for path in update.in_image)


def build_plan_document(update: preview.Preview) -> Json:
    """Build the JSON document of the plan."""
    return {
        "old": update.old,
        "new": update.new,
        "changes": [
            {
                "kind": entry.kind,
                "name": entry.name,
                "change": entry.mark,
                "details": list(entry.details),
                "diffs": [
                    {
                        "path": content.path,
                        "lines": list(content.diff.lines),
                        "note": content.diff.note,
                    }
                    for content in entry.contents
                ],
            }
            for entry in update.entries
        ],
        "actions": [
            {"action": action.description, "reasons": _build_reason_documents(action)}
            for action in update.actions
        ],
        "harmless": _build_reason_documents(preview.PreviewAction("", update.harmless)),
        "drains": update.needs_drain,
        "reboots": update.needs_reboot,
        "obstacles": [
            {"place": change.place, "reason": change.reason, "remedy": change.remedy}
            for change in update.irreconcilable_changes
        ],
        "steps": list(update.steps),
        "inImage": list(update.in_image),
    }


def _plan_this_node(arguments: argparse.Namespace) -> tuple[preview.Preview, tuple[str, ...]]:
    # Imported late: two files need neither a machine nor a cluster.
    from treenail.cli.node.local_machine import open_machine
    from treenail.cli.node.own_node import plan_node

    policy = _read_policy(arguments.policy) if arguments.policy else None
    return plan_node(open_machine(arguments.root), arguments.config, policy)


def _plan_files(arguments: argparse.Namespace) -> tuple[preview.Preview, tuple[str, ...]]:
    if len(arguments.files) != 2:
        raise UsageError(
            "cannot plan: expected two files, OLD and NEW, or none for the plan of this node",
            remedy="see: treenail plan --help",
        )
    if arguments.files == [files.STDIN, files.STDIN]:
        raise UsageError("cannot plan: only one of OLD and NEW can be the standard input")
    old, new = (ParsedConfig(files.read_machine_config(name)) for name in arguments.files)
    policy = _read_policy(arguments.policy) if arguments.policy else disruptionpolicy.DEFAULT_POLICY
    return preview.preview_update(old, new, policy), ()


def _read_policy(name: str) -> disruptionpolicy.DisruptionPolicy:
    """Read the policy from the file of a MachineConfiguration."""
    document = documents.load_document(files.read_input(name), where=name)
    files.require_kind(document, name, "MachineConfiguration", "operator.openshift.io/v1")
    return disruptionpolicy.ClusterDisruptionPolicy.from_json(document).policy


def _format_entry(entry: preview.PreviewEntry, paint: terminal.Painter) -> Iterator[str]:
    sign = _MARK_SIGNS[entry.mark]
    yield paint(f"{sign} {entry.kind} {entry.name}".rstrip(), sign)
    for detail in entry.details:
        yield f"    {paint(detail, detail[:1])}"
    for content in entry.contents:
        if content.path != entry.name:
            yield f"    {content.path}"
        for line in content.diff.lines:
            yield terminal.VerbatimLine(f"    {paint(line, line[:1])}")
        if content.diff.note:
            yield f"    ({content.diff.note})"


def _format_cost_heading(update: preview.Preview) -> str:
    if update.irreconcilable_changes:
        return "The other changes cost:"
    if update.needs_reboot:
        return "The node must drain and reboot:"
    if update.needs_drain:
        return "The node must drain:"
    return "The node stays in service:"


def _format_action(action: preview.PreviewAction) -> Iterator[str]:
    yield f"  {action.description}, because"
    yield from _format_reasons(action)


def _format_reasons(action: preview.PreviewAction) -> Iterator[str]:
    yield from (f"    {reason}" for reason in action.reasons[:_MAX_REASONS])
    hidden = len(action.reasons) - _MAX_REASONS
    if hidden > 0:
        yield f"    and {hidden} more; --json lists all"


def _build_reason_documents(action: preview.PreviewAction) -> list[Json]:
    return [
        {"subject": reason.subject, "rule": reason.rule, "source": reason.source}
        for reason in action.reasons
    ]
