"""``treenail history``: the last updates, how long they took and what became of them."""

import argparse
import json
import os
import sys
from collections.abc import Iterator

from treenail.cli.terminal import Paint, duration, moment, paint
from treenail.clock import rfc3339
from treenail.host.filesystem.root import Root
from treenail.host.system.state_file import Ledger
from treenail.update.state import record as records
from treenail.update.state.record import Outcome, Past, Target

Json = dict[str, object]

_COLOURS = {Outcome.DONE: "+", Outcome.CALLED_OFF: "~", Outcome.FAILED: "-"}


def main(arguments: argparse.Namespace) -> int:
    """Print the last updates, the newest first."""
    record = records.from_json(Ledger(Root(arguments.root or "/")).read())
    shown = record.history[: arguments.number]
    if arguments.json:
        print(json.dumps([_document(past) for past in shown], indent=1))
        return 0
    for line in lines(shown, paint(sys.stdout, os.environ)):
        print(line)
    return 0


def lines(history: tuple[Past, ...], paint: Paint) -> Iterator[str]:
    """The updates for a person."""
    if not history:
        yield "no update of this node is recorded"
    for past in history:
        outcome = paint(past.outcome, _COLOURS.get(past.outcome, "-"))
        took = duration(past.ended - past.began)
        yield f"{moment(past.began)}  {outcome} after {took}"
        yield f"    from {_target(past.origin)}"
        yield f"    to   {_target(past.target)}"
        if past.spent:
            phases = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in past.spent)
            yield f"    {phases}"
        if past.reboots > 1:
            yield f"    {past.reboots} reboots were asked for"
        if past.soft:
            yield "    the reboot was a soft one: the kernel went on"
        yield from (f"    because {reason}" for reason in past.reasons)
        if past.failure:
            yield f"    {past.failure}"
        yield f"    journalctl TREENAIL_UPDATE={past.id}"


def _document(past: Past) -> Json:
    return {
        "id": past.id,
        "from": {"config": past.origin.config, "image": past.origin.image},
        "to": {"config": past.target.config, "image": past.target.image},
        "began": rfc3339(past.began),
        "ended": rfc3339(past.ended),
        "outcome": past.outcome,
        "phases": {str(phase): round(seconds, 1) for phase, seconds in past.spent},
        "reboots": past.reboots,
        "soft": past.soft,
        "reasons": list(past.reasons),
        "failure": past.failure,
    }


def _target(target: Target) -> str:
    config = target.config or "nothing"
    return f"{config}, {target.image}" if target.image else config
