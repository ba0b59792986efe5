"""``treenail why``: what asked for the last, or the pending, drain or reboot."""

import argparse
import json
from collections.abc import Iterator

from treenail.cli.terminal import format_time
from treenail.clock import format_rfc3339
from treenail.host.filesystem.root import Root
from treenail.host.system.kernel import HostKernel
from treenail.host.system.state_file import Ledger
from treenail.update.state import record as records
from treenail.update.state.history import DisruptionHistory, UpdateSummary, summarize_history

Json = dict[str, object]


def main(arguments: argparse.Namespace) -> int:
    """Print who disturbed, or is about to disturb, the node, and why."""
    root = Root(arguments.root or "/")
    record = records.from_json(Ledger(root).read_document())
    booted_at = HostKernel(root).read_boot_time()
    found = summarize_history(record, booted_at=booted_at)
    if arguments.json:
        print(json.dumps(_build_document(found, booted_at), indent=1))
        return 0
    for line in format_explanation(found, booted_at):
        print(line)
    return 0


def format_explanation(found: DisruptionHistory, booted_at: float | None) -> Iterator[str]:
    """The account for a person."""
    if found.pending is not None:
        yield from _format_disruption(f"under way: {found.pending.disruption}", found.pending)
    if found.last is not None:
        yield from _format_disruption(f"last {found.last.disruption}", found.last)
    if found.pending is None and found.last is None:
        yield "no drain or reboot by treenail is recorded"
    if booted_at is None:
        return
    at = format_time(booted_at)
    if found.boot is None:
        yield f"the machine was booted at {at}: not for an update that is recorded"
    elif found.boot != found.last:
        yield f"the machine was booted at {at}, for {found.boot.target}"


def _format_disruption(title: str, asked: UpdateSummary) -> Iterator[str]:
    yield f"{title}, from {asked.origin} to {asked.target}, begun {format_time(asked.began)}"
    yield from (f"    because {reason}" for reason in asked.reasons)
    if not asked.reasons:
        yield "    why was not written down"
    yield f"    journalctl TREENAIL_UPDATE={asked.id}"


def _build_document(found: DisruptionHistory, booted_at: float | None) -> Json:
    return {
        "pending": _build_disruption_document(found.pending),
        "last": _build_disruption_document(found.last),
        "boot": {
            "at": None if booted_at is None else format_rfc3339(booted_at),
            "update": None if found.boot is None else found.boot.id,
        },
    }


def _build_disruption_document(asked: UpdateSummary | None) -> Json | None:
    if asked is None:
        return None
    return {
        "id": asked.id,
        "from": {"config": asked.origin.config, "image": asked.origin.image},
        "to": {"config": asked.target.config, "image": asked.target.image},
        "began": format_rfc3339(asked.began),
        "drains": asked.needs_drain,
        "reboots": asked.needs_reboot,
        "soft": asked.is_soft_reboot,
        "reasons": list(asked.reasons),
    }
