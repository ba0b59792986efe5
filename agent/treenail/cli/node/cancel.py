"""``treenail cancel`` and ``treenail retry``: requests to the agent, or changes of the ledger.

The commands change the ledger themselves if no agent runs.
"""

import argparse
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from treenail.cli import output_format, terminal
from treenail.cli.node import local_machine
from treenail.daemon.local.requests import RequestFile
from treenail.errors import HostError
from treenail.host.machine import Machine
from treenail.host.system import kernel, resources, state_file
from treenail.update.decision import user_requests
from treenail.update.state import ledger_record
from treenail.update.state import ledger_record as records

# An idle agent answers within milliseconds; one that runs a step finishes the step first.
_ANSWER_TIMEOUT_S = 30.0
# Without a signal the agent reads the request at its next resync (resync_s, 60 s by default).
_RESYNC_TIMEOUT_S = 90.0
_POLL_S = 0.1


def print_cancel(arguments: argparse.Namespace) -> int:
    """Cancel the update in progress; raise `HostError` if there is none or it is too late."""
    machine = local_machine.open_machine(arguments.root)
    ledger = machine.ledger
    update = _read_record(ledger).update
    if update is None:
        raise HostError(
            "cannot cancel: no update of this node is in progress", remedy="see: treenail status"
        )
    _refuse_late_cancel(update)
    boot_id = kernel.HostKernel(machine.root).read_boot_id()
    if not request_from_agent(
        machine, user_requests.UserRequest(user_requests.RequestKind.CANCEL, update.id)
    ):
        now = ledger_record.Moment(machine.clock.now(), boot_id, machine.clock.monotonic())
        _change_record(ledger, lambda record: user_requests.cancel_update(record, now))
    # The agent may have requested the reboot before it read the request.
    after = _read_record(ledger).update
    if (
        after is not None
        and after.id == update.id
        and after.phase is not ledger_record.Phase.CANCELLING
    ):
        _refuse_late_cancel(after)
    if arguments.json:
        content = {"cancelled": update.id, "target": update.target.to_json()}
        output_format.print_document(output_format.OutputFormat.JSON, "Cancellation", content)
        return 0
    terminal.print_lines(
        [
            f"cancelled the update to {update.target}; the node is being restored",
            "the target is quarantined; to try it again, run: treenail retry",
        ]
    )
    return 0


def print_retry(arguments: argparse.Namespace) -> int:
    """Lift the quarantine; raise `HostError` if no target is quarantined."""
    machine = local_machine.open_machine(arguments.root)
    quarantined = _read_record(machine.ledger).quarantined
    if quarantined is None:
        raise HostError("nothing to retry: no target is quarantined", remedy="see: treenail status")
    if not request_from_agent(machine, user_requests.UserRequest(user_requests.RequestKind.RETRY)):
        _change_record(machine.ledger, _lift_quarantine)
    if arguments.json:
        retried = {"retried": quarantined.target.to_json()}
        output_format.print_document(output_format.OutputFormat.JSON, "Retry", retried)
        return 0
    terminal.print_lines(
        [f"lifted the quarantine of {quarantined.target}; it is tried again if still requested"]
    )
    return 0


def request_from_agent(machine: Machine, request: user_requests.UserRequest) -> bool:
    """Send the request to the agent and wait for its answer; return False if no agent runs.

    Raises `HostError` if the agent does not answer.
    """
    pid = machine.ledger.find_lock_holder()
    if pid is None:
        return False
    requests, clock = RequestFile(machine.files), machine.clock
    requests.write_request(request)
    # SIGUSR1 ends an agent that just starts, and other commands that hold the lock. On a full disk
    # the PID is unknown, and a signal to process 0 would end this command and its callers.
    can_signal = resources.handles_signal(pid, signal.SIGUSR1)
    if can_signal:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    timeout_s = _ANSWER_TIMEOUT_S if can_signal else _RESYNC_TIMEOUT_S
    deadline = clock.monotonic() + timeout_s
    # The agent removes the file once it has acted on the request.
    while requests.read_request() == request:
        if clock.monotonic() > deadline:
            requests.remove_request()
            agent = f"process {pid}" if pid else "the holder of the lock"
            activity = _read_activity(machine)
            raise HostError(
                f"cannot {request.kind}: the agent ({agent}) did not act on the request within "
                f"{timeout_s:g} s{f'; it shows: {activity}' if activity else ''}",
                remedy="wait until that has ended, see: treenail status; then repeat the command",
            )
        clock.sleep(_POLL_S)
    return True


def _read_activity(machine: Machine) -> str:
    """Return the activity that the agent shows; empty if it shows none."""
    match local_machine.find_agent_status(machine):
        case {"activity": str(activity)}:
            return activity
        case _:
            return ""


def _change_record(
    ledger: state_file.Ledger,
    change: Callable[[ledger_record.LedgerRecord], ledger_record.LedgerRecord],
) -> None:
    """Change the record as the agent would; the lock keeps an agent from starting."""
    with ledger.hold_lock():
        ledger.write_document(records.to_json(change(_read_record(ledger))))


def _lift_quarantine(record: ledger_record.LedgerRecord) -> ledger_record.LedgerRecord:
    """Return the record without its quarantine; a rollback in progress needs it."""
    update, quarantined = record.update, record.quarantined
    if (
        update is not None
        and update.phase is ledger_record.Phase.ROLLING_BACK
        and quarantined is not None
    ):
        raise HostError(
            f"cannot retry {quarantined.target}: the node is still leaving it ({update.phase}), "
            "and no agent runs",
            remedy="run: systemctl start treenail; when the update has ended, run: treenail retry",
        )
    return replace(record, quarantined=None)


def _read_record(ledger: state_file.Ledger) -> ledger_record.LedgerRecord:
    return records.from_json(ledger.read_document())


def _refuse_late_cancel(update: ledger_record.UpdateRecord) -> None:
    """Raise `HostError` if the update can no longer be cancelled."""
    sentence = user_requests.explain_too_late(update)
    if sentence:
        raise HostError(
            f"cannot cancel the update: {sentence}",
            remedy="to roll back, request the previous target: set desiredConfig back",
        )
