"""``treenail why``: show what required the last, or the pending, drain or reboot."""

import argparse
from collections.abc import Iterator

from treenail.cli.node.local_machine import open_machine
from treenail.cli.output_format import print_output
from treenail.cli.terminal import format_time
from treenail.clock import format_rfc3339
from treenail.update.state import record as records
from treenail.update.state.history import (
    DisruptionHistory,
    UpdateSummary,
    list_causes,
    summarize_history,
)

Json = dict[str, object]


def main(arguments: argparse.Namespace) -> int:
    """Print the last and the pending drain or reboot, with the reasons."""
    machine = open_machine(arguments.root)
    record = records.from_json(machine.ledger.read_document())
    booted_at = machine.kernel.read_boot_time()
    found = summarize_history(record, booted_at=booted_at)
    print_output(
        arguments.output,
        kind="DisruptionReasons",
        content=lambda: _build_document(found, booted_at),
        lines=lambda: format_explanation(found, booted_at),
    )
    return 0


def format_explanation(found: DisruptionHistory, booted_at: float | None) -> Iterator[str]:
    """Format drains and reboots for users."""
    if found.pending is not None:
        yield from _format_disruption(f"in progress: {found.pending.disruption}", found.pending)
    if found.last is not None:
        yield from _format_disruption(f"last {found.last.disruption}", found.last)
    if found.pending is None and found.last is None:
        yield "the ledger contains no drain or reboot by treenail"
    if booted_at is None:
        return
    at = format_time(booted_at)
    if found.boot is None:
        yield f"the machine was booted at {at}, for no recorded update"
    elif found.boot != found.last:
        yield f"the machine was booted at {at}, for {found.boot.target}"


def _format_disruption(title: str, update: UpdateSummary) -> Iterator[str]:
    yield f"{title}, started {format_time(update.began)}"
    yield f"    from {update.origin}"
    yield f"    to   {update.target}"
    yield from (f"    {reason}" for reason in list_causes(update.reasons))
    if not update.reasons:
        yield "    the ledger contains no reason"
    yield f"    journalctl TREENAIL_UPDATE={update.id}"


def _build_document(found: DisruptionHistory, booted_at: float | None) -> Json:
    return {
        "pending": _build_disruption_document(found.pending),
        "last": _build_disruption_document(found.last),
        "boot": {
            "at": None if booted_at is None else format_rfc3339(booted_at),
            "update": None if found.boot is None else found.boot.id,
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
