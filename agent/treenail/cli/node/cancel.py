"""``treenail cancel`` and ``treenail forgive``: requests to the agent, or done in its place."""

import argparse
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from treenail.clock import Clock, SystemClock
from treenail.daemon.local.requests import RequestFile
from treenail.errors import HostError
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.system.kernel import Kernel
from treenail.host.system.state_file import Ledger
from treenail.update.decision.request import Kind, Request, called_off, too_late
from treenail.update.state import record as records
from treenail.update.state.record import Phase, Record, Target, Update

_ANSWER_S = 30.0
_LOOK_S = 0.1


def cancel(arguments: argparse.Namespace) -> int:
    """Have the update under way called off; refuses when there is none or it is too late."""
    root, clock = Root(arguments.root or "/"), SystemClock()
    ledger = Ledger(root)
    update = _read(ledger).update
    if update is None:
        raise HostError("no update of this node is under way")
    _refuse_late(update)
    boot_id = Kernel(root).boot_id()
    if not asked(root, Request(Kind.CANCEL, update.id), clock):
        _change(ledger, lambda record: called_off(record, boot_id=boot_id, now=clock.now()))
    after = _read(ledger).update
    if after is not None and after.id == update.id and after.phase is not Phase.RELEASING:
        _refuse_late(after)
    if arguments.json:
        print(json.dumps({"cancelled": update.id, "target": _target(update.target)}))
        return 0
    print(f"the update to {update.target} is called off; the node is put back as it was")
    print("it is not tried again until another target is asked for, or: treenail forgive")
    return 0


def forgive(arguments: argparse.Namespace) -> int:
    """Have a refused target tried again."""
    root = Root(arguments.root or "/")
    ledger = Ledger(root)
    refused = _read(ledger).refused
    if refused is None:
        raise HostError("this node refuses no target")
    if not asked(root, Request(Kind.FORGIVE), SystemClock()):
        _change(ledger, lambda record: replace(record, refused=None))
    if arguments.json:
        print(json.dumps({"forgiven": _target(refused.target)}))
        return 0
    print(f"{refused.target} is tried again, if it is still asked for")
    return 0


def asked(root: Root, request: Request, clock: Clock) -> bool:
    """Whether an agent runs, which then has answered; raises `HostError` when it does not."""
    pid = Ledger(root).holder()
    if pid is None:
        return False
    requests = RequestFile(Files(root))
    requests.leave(request)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    deadline = clock.monotonic() + _ANSWER_S
    while requests.read() == request:
        if clock.monotonic() > deadline:
            requests.drop()
            raise HostError(
                f"the agent, process {pid}, did not answer within {_ANSWER_S:g} s",
                remedy="it is busy with a step that it finishes first; see: treenail status",
            )
        clock.sleep(_LOOK_S)
    return True


def _change(ledger: Ledger, change: Callable[[Record], Record]) -> None:
    """Do to the record what an agent would, while none runs."""
    with ledger.lock():
        ledger.write(records.to_json(change(_read(ledger))))


def _read(ledger: Ledger) -> Record:
    return records.from_json(ledger.read())


def _refuse_late(update: Update) -> None:
    """Raise when the update has got beyond being called off."""
    sentence = too_late(update)
    if sentence:
        raise HostError(
            f"it is too late to call the update off: {sentence}",
            remedy="to go back, ask for the former target: set desiredConfig back",
        )


def _target(target: Target) -> dict[str, str]:
    return {"config": target.config, "image": target.image}
