"""Requests of users on the machine to the agent: cancel, retry and repair."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from treenail import errors
from treenail.encoding import codec
from treenail.update.state import ledger_record

Json = dict[str, object]

_VERSION = 1


class RequestKind(StrEnum):
    """The kind of a user's request."""

    CANCEL = "cancel"
    """Cancel the update if that disrupts nothing, and do not begin it again."""
    RETRY = "retry"
    """End the quarantine of a target, and try it again."""
    REPAIR = "repair"
    """Restore some paths that drifted from the current config."""


@dataclass(frozen=True, slots=True)
class UserRequest:
    """A request of a user."""

    kind: RequestKind
    update_id: Annotated[str, codec.Key("update")] = ""
    """The update to cancel."""
    paths: tuple[str, ...] = ()
    """The paths to repair."""


def is_cancel_request(request: UserRequest | None, update: ledger_record.UpdateRecord) -> bool:
    """Return whether the request cancels this update."""
    return request == UserRequest(RequestKind.CANCEL, update.id)


def explain_too_late(update: ledger_record.UpdateRecord) -> str:
    """Return why the update can no longer be cancelled, as a sentence; empty while it can."""
    match update.phase:
        case (
            ledger_record.Phase.STAGING
            | ledger_record.Phase.DRAINING
            | ledger_record.Phase.APPLYING
        ):
            return ""
        case ledger_record.Phase.REBOOTING:
            return "the agent has already requested the reboot"
        case ledger_record.Phase.VERIFYING:
            return "the node has rebooted into the target and is verifying it"
        case ledger_record.Phase.ROLLING_BACK:
            return "the node is already rolling back"
        case ledger_record.Phase.UNCORDONING:
            return f"the node is already at {update.target}"
        case ledger_record.Phase.CANCELLING:
            return "the update is already being cancelled"


def is_answered(request: UserRequest, record: ledger_record.LedgerRecord) -> bool:
    """Return whether nothing is left to do about the request."""
    match request.kind:
        case RequestKind.CANCEL:
            update = record.update
            if update is None or update.id != request.update_id:
                return True
            return bool(explain_too_late(update))
        case RequestKind.RETRY:
            return record.quarantined is None
        case RequestKind.REPAIR:
            # Between updates the agent repairs within one pass of its loop, and then answers.
            return record.update is not None


def make_cancelled_target(update: ledger_record.UpdateRecord) -> ledger_record.QuarantinedTarget:
    """Return the quarantine of an update's target after a user cancelled the update."""
    return ledger_record.QuarantinedTarget(
        update.target,
        f"the update to {update.target} was cancelled on this node",
        "request another target, or run on this node: treenail retry",
        is_cancelled_by_user=True,
    )


def cancel_update(
    record: ledger_record.LedgerRecord, now: ledger_record.Moment
) -> ledger_record.LedgerRecord:
    """Return the record with its update cancelled, for a machine on which no agent runs."""
    update = record.update
    if update is None or explain_too_late(update):
        return record
    cancelling = update.enter_phase(ledger_record.Phase.CANCELLING, now)
    return replace(record, update=cancelling, quarantined=make_cancelled_target(update))


def to_json(request: UserRequest) -> Json:
    """Return the JSON document of the request."""
    return codec.encode(request, version=_VERSION)


def from_json(document: object) -> UserRequest:
    """Return the request that `to_json` made ``document`` from; raises `ConfigError`."""
    try:
        return codec.decode(UserRequest, document, version=_VERSION)
    except codec.CodecError as error:
        raise errors.ConfigError(f"cannot read the request: {error}") from error
