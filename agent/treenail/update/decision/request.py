"""What a person on the machine asks of the agent: call off, try again, put right what drifted."""

from dataclasses import dataclass, replace
from enum import StrEnum

from treenail.errors import ConfigError
from treenail.update.state.record import Phase, Record, Refused, Update

Json = dict[str, object]


class Kind(StrEnum):
    """What is asked."""

    CANCEL = "cancel"
    """Call the update off while that costs nothing, and do not begin it again."""
    FORGIVE = "forgive"
    """Forget that a target was refused or called off, and try it again."""
    HEAL = "heal"
    """Have what drifted at some paths as the config says."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request; ``update`` is the id of the one to be called off, ``paths`` are to be healed."""

    kind: Kind
    update: str = ""
    paths: tuple[str, ...] = ()


def cancels(request: Request | None, update: Update) -> bool:
    """Whether the request is to call this update off."""
    return request == Request(Kind.CANCEL, update.id)


def too_late(update: Update) -> str:
    """Why the update can't be called off any more, in a sentence; empty while it can."""
    match update.phase:
        case Phase.STAGING | Phase.DRAINING | Phase.APPLYING:
            return ""
        case Phase.REBOOTING:
            return "the reboot was asked for already"
        case Phase.PROVING:
            return "the node was rebooted, and is being proved"
        case Phase.RETURNING:
            return "the node is going back already"
        case Phase.RESUMING:
            return f"the node is at {update.target} already"
        case Phase.RELEASING:
            return "it is being called off already"


def answered(request: Request, record: Record) -> bool:
    """Whether nothing is left to do about the request."""
    match request.kind:
        case Kind.CANCEL:
            update = record.update
            return update is None or update.id != request.update or bool(too_late(update))
        case Kind.FORGIVE:
            return record.refused is None
        case Kind.HEAL:
            # Between updates, one turn of the agent is its answer.
            return record.update is not None


def refused(update: Update) -> Refused:
    """What is remembered of an update that a person called off."""
    return Refused(
        update.target,
        f"the update to {update.target} was called off on this machine",
        "ask for another target, or run 'treenail forgive' on this machine to try it again",
        called_off=True,
    )


def called_off(record: Record, *, boot_id: str, now: float) -> Record:
    """The record once its update is called off, for when no agent runs who could do that."""
    update = record.update
    if update is None or too_late(update):
        return record
    releasing = update.enter(Phase.RELEASING, boot_id=boot_id, now=now)
    return replace(record, update=releasing, refused=refused(update))


def to_json(request: Request) -> Json:
    return {
        "version": 1,
        "kind": str(request.kind),
        "update": request.update,
        "paths": list(request.paths),
    }


def from_json(document: object) -> Request:
    """What `to_json` wrote; raises `ConfigError` for anything else."""
    match document:
        case {
            "version": 1,
            "kind": "cancel" | "forgive" | "heal" as kind,
            "update": str(update),
            "paths": list(paths),
        }:
            return Request(Kind(kind), update, tuple(map(str, paths)))
        case _:
            raise ConfigError("a request that this version of treenail does not understand")
