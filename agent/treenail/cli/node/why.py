"""``treenail why``: what asked for the last, or the pending, drain or reboot."""

import argparse
import json
from collections.abc import Iterator

from treenail.cli.terminal import moment
from treenail.clock import rfc3339
from treenail.host.filesystem.root import Root
from treenail.host.system.kernel import Kernel
from treenail.host.system.state_file import Ledger
from treenail.update.state import record as records
from treenail.update.state.history import Account, Asked, account

Json = dict[str, object]


def main(arguments: argparse.Namespace) -> int:
    """Print who disturbed, or is about to disturb, the node, and why."""
    root = Root(arguments.root or "/")
    record = records.from_json(Ledger(root).read())
    booted_at = Kernel(root).booted_at()
    found = account(record, booted_at=booted_at)
    if arguments.json:
        print(json.dumps(_document(found, booted_at), indent=1))
        return 0
    for line in lines(found, booted_at):
        print(line)
    return 0


def lines(found: Account, booted_at: float | None) -> Iterator[str]:
    """The account for a person."""
    if found.pending is not None:
        yield from _asked(f"under way: {found.pending.deed}", found.pending)
    if found.last is not None:
        yield from _asked(f"last {found.last.deed}", found.last)
    if found.pending is None and found.last is None:
        yield "no drain or reboot by treenail is recorded"
    if booted_at is None:
        return
    at = moment(booted_at)
    if found.boot is None:
        yield f"the machine was booted at {at}: not for an update that is recorded"
    elif found.boot != found.last:
        yield f"the machine was booted at {at}, for {found.boot.target}"


def _asked(title: str, asked: Asked) -> Iterator[str]:
    yield f"{title}, from {asked.origin} to {asked.target}, begun {moment(asked.began)}"
    yield from (f"    because {reason}" for reason in asked.reasons)
    if not asked.reasons:
        yield "    why was not written down"
    yield f"    journalctl TREENAIL_UPDATE={asked.id}"


def _document(found: Account, booted_at: float | None) -> Json:
    return {
        "pending": _asked_document(found.pending),
        "last": _asked_document(found.last),
        "boot": {
            "at": None if booted_at is None else rfc3339(booted_at),
            "update": None if found.boot is None else found.boot.id,
        },
    }


def _asked_document(asked: Asked | None) -> Json | None:
    if asked is None:
        return None
    return {
        "id": asked.id,
        "from": {"config": asked.origin.config, "image": asked.origin.image},
        "to": {"config": asked.target.config, "image": asked.target.image},
        "began": rfc3339(asked.began),
        "drains": asked.drains,
        "reboots": asked.reboots,
        "soft": asked.soft,
        "reasons": list(asked.reasons),
    }
