"""``treenail history`` and ``treenail why``: show the last updates, and what required a reboot."""

import argparse
import os
import sys
from collections.abc import Iterator

from treenail.cli import output_format, terminal
from treenail.cli.node.local_machine import open_machine
from treenail.clocks import format_rfc3339
from treenail.update.state import ledger_record
from treenail.update.state import ledger_record as records
from treenail.update.state.history import (
    DisruptionHistory,
    UpdateSummary,
    list_causes,
    summarize_history,
)

Json = dict[str, object]

_OUTCOME_COLOURS = {
    ledger_record.UpdateOutcome.DONE: "+",
    ledger_record.UpdateOutcome.CANCELLED: "~",
    ledger_record.UpdateOutcome.FAILED: "-",
}


def main(arguments: argparse.Namespace) -> int:
    """Print the last updates, newest first."""
    record = records.from_json(open_machine(arguments.root).ledger.read_document())
    shown = record.history[: arguments.number]
    paint = terminal.create_painter(sys.stdout, os.environ)
    output_format.print_output(
        arguments.output,
        kind="UpdateHistory",
        content=lambda: {"items": [_build_document(past) for past in shown]},
        lines=lambda: format_history(shown, paint),
    )
    return 0


def format_history(
    history: tuple[ledger_record.PastUpdate, ...], paint: terminal.Painter
) -> Iterator[str]:
    """Format updates for users."""
    if not history:
        yield "the ledger contains no update of this node"
    for past in history:
        outcome = paint(past.outcome, _OUTCOME_COLOURS.get(past.outcome, "-"))
        duration = terminal.format_duration(past.ended - past.began)
        yield f"{terminal.format_time(past.began)}  {outcome} after {duration}"
        yield f"    from {_format_target(past.origin)}"
        yield f"    to   {_format_target(past.target)}"
        if past.phase_seconds:
            phases = ", ".join(
                f"{phase} {terminal.format_duration(seconds)}"
                for phase, seconds in past.phase_seconds.items()
            )
            yield f"    {phases}"
        if past.reboot_count > 1:
            yield f"    {past.reboot_count} reboots were requested"
        if past.is_soft_reboot:
            yield "    the reboot was a soft reboot: it kept the kernel"
        yield from (f"    {reason}" for reason in list_causes(past.reasons))
        for failed in past.failed_tries:
            yield f"    failed at {terminal.format_time(failed.at)}: {failed.error}"
        if past.failure:
            yield f"    {past.outcome}: {past.failure}"
        yield f"    journalctl TREENAIL_UPDATE={past.id}"


def _build_document(past: ledger_record.PastUpdate) -> Json:
    return {
        "id": past.id,
        "from": {"config": past.origin.config, "image": past.origin.image},
        "to": {"config": past.target.config, "image": past.target.image},
        "began": format_rfc3339(past.began),
        "ended": format_rfc3339(past.ended),
        "outcome": past.outcome,
        "phases": {str(phase): round(seconds, 1) for phase, seconds in past.phase_seconds.items()},
        "reboots": past.reboot_count,
        "soft": past.is_soft_reboot,
        "reasons": list(past.reasons),
        "failedTries": [
            {"at": format_rfc3339(failed_try.at), "error": failed_try.error}
            for failed_try in past.failed_tries
        ],
        "failure": past.failure,
    }


def _format_target(target: ledger_record.Target) -> str:
    config = target.config or "nothing"
    return f"{config}, {target.image}" if target.image else config


def print_why(arguments: argparse.Namespace) -> int:
    """Print the last and the pending drain or reboot, with the reasons."""
    machine = open_machine(arguments.root)
    record = records.from_json(machine.ledger.read_document())
    booted_at = machine.kernel.read_boot_time()
    history = summarize_history(record, booted_at=booted_at)
    output_format.print_output(
        arguments.output,
        kind="DisruptionReasons",
        content=lambda: _build_why_document(history, booted_at),
        lines=lambda: format_explanation(history, booted_at),
    )
    return 0


def format_explanation(history: DisruptionHistory, booted_at: float | None) -> Iterator[str]:
    """Format drains and reboots for users."""
    if history.pending is not None:
        yield from _format_disruption(f"in progress: {history.pending.disruption}", history.pending)
    if history.last is not None:
        yield from _format_disruption(f"last {history.last.disruption}", history.last)
    if history.pending is None and history.last is None:
        yield "the ledger contains no drain or reboot by treenail"
    if booted_at is None:
        return
    at = terminal.format_time(booted_at)
    if history.boot is None:
        yield f"the machine was booted at {at}, for no recorded update"
    elif history.boot != history.last:
        yield f"the machine was booted at {at}, for {history.boot.target}"


def _format_disruption(title: str, update: UpdateSummary) -> Iterator[str]:
    yield f"{title}, started {terminal.format_time(update.began)}"
    yield f"    from {update.origin}"
    yield f"    to   {update.target}"
    yield from (f"    {reason}" for reason in list_causes(update.reasons))
    if not update.reasons:
        yield "    the ledger contains no reason"
    yield f"    journalctl TREENAIL_UPDATE={update.id}"


def _build_why_document(history: DisruptionHistory, booted_at: float | None) -> Json:
    return {
        "pending": _build_disruption_document(history.pending),
        "last": _build_disruption_document(history.last),
        "boot": {
            "at": None if booted_at is None else format_rfc3339(booted_at),
            "update": None if history.boot is None else history.boot.id,
        },
    }


def _build_disruption_document(update: UpdateSummary | None) -> Json | None:
    if update is None:
        return None
    return {
        "id": update.id,
        "from": {"config": update.origin.config, "image": update.origin.image},
        "to": {"config": update.target.config, "image": update.target.image},
        "began": format_rfc3339(update.began),
        "drains": update.needs_drain,
        "reboots": update.needs_reboot,
        "soft": update.is_soft_reboot,
        "reasons": list(update.reasons),
    }
