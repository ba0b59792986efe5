"""What a person on the machine asks of the agent: call off, try again, put right what drifted."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from treenail import codec
from treenail.codec import CodecError, key
from treenail.errors import ConfigError
from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord, QuarantinedTarget, UpdateRecord

Json = dict[str, object]

_VERSION = 1


class RequestKind(StrEnum):
    """What is asked."""

    CANCEL = "cancel"
    """Call the update off while that costs nothing, and do not begin it again."""
    RETRY = "retry"
    """Forget that a target was refused or called off, and try it again."""
    REPAIR = "repair"
    """Have what drifted at some paths as the config says."""


@dataclass(frozen=True, slots=True)
class UserRequest:
    """One request; ``update_id`` is the id of the one to be called off, ``paths`` are to be healed."""

    kind: RequestKind
    update_id: str = field(default="", metadata=key("update"))
    """The update to cancel."""
    paths: tuple[str, ...] = ()
    """The paths to repair."""


def is_cancel_request(request: UserRequest | None, update: UpdateRecord) -> bool:
    """Whether the request is to call this update off."""
    return request == UserRequest(RequestKind.CANCEL, update.id)


def explain_too_late(update: UpdateRecord) -> str:
    """Why the update can't be called off any more, in a sentence; empty while it can."""
    match update.phase:
        case Phase.STAGING | Phase.DRAINING | Phase.APPLYING:
            return ""
        case Phase.REBOOTING:
            return "the reboot was asked for already"
        case Phase.VERIFYING:
            return "the node was rebooted, and is being proved"
        case Phase.ROLLING_BACK:
            return "the node is going back already"
        case Phase.UNCORDONING:
            return f"the node is at {update.target} already"
        case Phase.CANCELLING:
            return "it is being called off already"


def is_answered(request: UserRequest, record: LedgerRecord) -> bool:
    """Whether nothing is left to do about the request."""
    match request.kind:
        case RequestKind.CANCEL:
            update = record.update
            return (
                update is None or update.id != request.update_id or bool(explain_too_late(update))
            )
        case RequestKind.RETRY:
            return record.quarantined is None
        case RequestKind.REPAIR:
            # Between updates, one turn of the agent is its answer.
            return record.update is not None


def make_cancelled_target(update: UpdateRecord) -> QuarantinedTarget:
    """What is remembered of an update that a person called off."""
    return QuarantinedTarget(
        update.target,
        f"the update to {update.target} was called off on this machine",
        "ask for another target, or run 'treenail forgive' on this machine to try it again",
        is_cancelled_by_user=True,
    )


def cancel_update(record: LedgerRecord, *, boot_id: str, now: float) -> LedgerRecord:
    """The record once its update is called off, for when no agent runs who could do that."""
    update = record.update
    if update is None or explain_too_late(update):
        return record
    releasing = update.enter_phase(Phase.CANCELLING, boot_id=boot_id, now=now)
    return replace(record, update=releasing, quarantined=make_cancelled_target(update))


def to_json(request: UserRequest) -> Json:
    """Return the JSON document of the request."""
    return codec.encode(request, version=_VERSION)


def from_json(document: object) -> UserRequest:
    """Return the request that `to_json` made ``document`` from; raises `ConfigError`."""
    try:
        return codec.decode(UserRequest, document, version=_VERSION)
    except CodecError as error:
        raise ConfigError(f"cannot read the request: {error}") from error
