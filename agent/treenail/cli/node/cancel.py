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
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.system.kernel import HostKernel
from treenail.host.system.state_file import Ledger
from treenail.update.decision.request import (
    RequestKind,
    UserRequest,
    cancel_update,
    explain_too_late,
)
from treenail.update.state import record as records
from treenail.update.state.record import LedgerRecord, Phase, Target, UpdateRecord

_ANSWER_TIMEOUT_S = 30.0
_POLL_S = 0.1


def cancel(arguments: argparse.Namespace) -> int:
    """Have the update under way called off; refuses when there is none or it is too late."""
    root, clock = Root(arguments.root or "/"), SystemClock()
    ledger = Ledger(root)
    update = _read_record(ledger).update
    if update is None:
        raise HostError("no update of this node is under way")
    _refuse_late_cancel(update)
    boot_id = HostKernel(root).read_boot_id()
    if not request_from_agent(root, UserRequest(RequestKind.CANCEL, update.id), clock):
        _change_record(
            ledger, lambda record: cancel_update(record, boot_id=boot_id, now=clock.now())
        )
    after = _read_record(ledger).update
    if after is not None and after.id == update.id and after.phase is not Phase.CANCELLING:
        _refuse_late_cancel(after)
    if arguments.json:
        print(json.dumps({"cancelled": update.id, "target": _build_target_document(update.target)}))
        return 0
    print(f"the update to {update.target} is called off; the node is put back as it was")
    print("it is not tried again until another target is asked for, or: treenail forgive")
    return 0


def forgive(arguments: argparse.Namespace) -> int:
    """Have a refused target tried again."""
    root = Root(arguments.root or "/")
    ledger = Ledger(root)
    refused = _read_record(ledger).quarantined
    if refused is None:
        raise HostError("this node refuses no target")
    if not request_from_agent(root, UserRequest(RequestKind.RETRY), SystemClock()):
        _change_record(ledger, lambda record: replace(record, quarantined=None))
    if arguments.json:
        print(json.dumps({"forgiven": _build_target_document(refused.target)}))
        return 0
    print(f"{refused.target} is tried again, if it is still asked for")
    return 0


def request_from_agent(root: Root, request: UserRequest, clock: Clock) -> bool:
    """Whether an agent runs, which then has answered; raises `HostError` when it does not."""
    pid = Ledger(root).find_lock_holder()
    if pid is None:
        return False
    requests = RequestFile(HostFiles(root))
    requests.write_request(request)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    deadline = clock.monotonic() + _ANSWER_TIMEOUT_S
    while requests.read_request() == request:
        if clock.monotonic() > deadline:
            requests.remove_request()
            raise HostError(
                f"the agent, process {pid}, did not answer within {_ANSWER_TIMEOUT_S:g} s",
                remedy="it is busy with a step that it finishes first; see: treenail status",
            )
        clock.sleep(_POLL_S)
    return True


def _change_record(ledger: Ledger, change: Callable[[LedgerRecord], LedgerRecord]) -> None:
    """Do to the record what an agent would, while none runs."""
    with ledger.hold_lock():
        ledger.write_document(records.to_json(change(_read_record(ledger))))


def _read_record(ledger: Ledger) -> LedgerRecord:
    return records.from_json(ledger.read_document())


def _refuse_late_cancel(update: UpdateRecord) -> None:
    """Raise when the update has got beyond being called off."""
    sentence = explain_too_late(update)
    if sentence:
        raise HostError(
            f"it is too late to call the update off: {sentence}",
            remedy="to go back, ask for the former target: set desiredConfig back",
        )


def _build_target_document(target: Target) -> dict[str, str]:
    return {"config": target.config, "image": target.image}
