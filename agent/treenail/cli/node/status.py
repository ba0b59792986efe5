"""``treenail status``: what there is to say of a node, even with API server and agent away."""

import argparse
import json
from pathlib import Path

from treenail.cli.main import DEGRADED
from treenail.cli.node.status_screen import screen
from treenail.clock import Clock, SystemClock, rfc3339
from treenail.errors import FileError, HostError, LedgerError, TreenailError, UsageError
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.ostree.deployments import Deployment, Deployments
from treenail.host.system.state_file import Ledger
from treenail.update.state import record as records
from treenail.update.state.history import account
from treenail.update.state.record import Past, Record, Target, Update

Json = dict[str, object]
LIVE = "/run/treenail/status.json"
_LIVE_LIMIT = 1024 * 1024


def main(arguments: argparse.Namespace) -> int:
    """Print the node's status; 4 when the node is degraded."""
    clock = SystemClock()
    document = gather(Root(arguments.root or "/"), clock)
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print(screen(document))
    return DEGRADED if document["state"] == "Degraded" else 0


def gather(root: Root, clock: Clock) -> Json:
    """Everything there is to say; what can't be found out is in ``problems``, in a sentence.

    The form is that of treenail(8), section STATUS: keys are added to it, and none is taken away.
    """
    problems: list[str] = []
    live = _live(root, problems)
    record, damage = _record(root, problems)
    found = _deployments(root, clock, problems)
    update = record.update
    failure = damage or live.get("failure")
    if failure is None and record.refused is not None:
        failure = {
            "message": record.refused.reason,
            "remedy": record.refused.remedy,
            "state": "Degraded",
        }
    return {
        "node": live.get("node"),
        "agent": _agent(root, live),
        "backend": live.get("backend"),
        "state": _state(live, failure, record),
        "sentence": live.get("sentence"),
        "current": _target(record.current),
        "desired": live.get("desired") or _target(update.target if update else record.current),
        "update": live.get("update") if update is None else _update(record, update),
        "progress": live.get("progress"),
        "failure": failure,
        "lastUpdate": _past(record.history[0]) if record.history else None,
        "credentials": live.get("credentials") or [],
        "drift": live.get("drift") or [],
        "apiServer": live.get("apiServer"),
        "deployments": {
            "booted": _deployment(found.booted),
            "staged": _deployment(found.staged),
            "rollback": _deployment(found.rollback),
        },
        "retained": _retained(root, record, problems),
        "problems": problems,
    }


def _live(root: Root, problems: list[str]) -> Json:
    try:
        content = Files(root).read(LIVE, limit=_LIVE_LIMIT)
        return _object(json.loads(content)) if content else {}
    except (FileError, ValueError) as error:
        problems.append(f"what the agent does now: {error}")
        return {}


def _record(root: Root, problems: list[str]) -> tuple[Record, Json | None]:
    """The record, and the failure that it is damaged, for no agent can begin with that."""
    try:
        return records.from_json(Ledger(root).read()), None
    except TreenailError as error:
        problems.append(f"what is recorded: {error}")
        if isinstance(error.__cause__, FileError):
            return Record(), None  # it may be read by root alone
        return Record(), {"message": str(error), "remedy": error.remedy, "state": error.state}


def _deployments(root: Root, clock: Clock, problems: list[str]) -> Deployments:
    # The record and what the agent says are there without a bus, too.
    from treenail.cli.node.choose_backend import deployments

    try:
        return deployments(root, clock)
    except HostError as error:
        problems.append(f"the deployments: {error}")
        return Deployments(())


def _agent(root: Root, live: Json) -> Json:
    """Whether it runs; ``lastSeen`` is when it last had something to say, in this boot."""
    seen = live.get("pid")
    try:
        pid = Ledger(root).holder()
        running = pid is not None
    except LedgerError:
        # Only root is told who has the lock.
        pid = seen if isinstance(seen, int) else None
        running = pid is not None and Path(f"/proc/{pid}").is_dir()
    return {"running": running, "pid": pid if running else None, "lastSeen": live.get("written")}


def _state(live: Json, failure: object, record: Record) -> str:
    if isinstance(failure, dict) and failure.get("state"):
        return str(failure["state"])
    if record.update is not None:
        return "Working"
    if not record.current.config:
        return "Unknown"
    return "Done" if str(live.get("sentence", "at ")).startswith("at ") else "Working"


def _update(record: Record, update: Update) -> Json:
    pending = account(record, booted_at=None).pending
    return {
        "id": update.id,
        "phase": str(update.phase),
        "target": _target(update.target),
        "origin": _target(update.origin),
        "began": rfc3339(update.began),
        "entered": rfc3339(update.entered),
        "reasons": list(pending.reasons) if pending else [],
    }


def _past(past: Past) -> Json:
    return {
        "id": past.id,
        "target": _target(past.target),
        "began": rfc3339(past.began),
        "ended": rfc3339(past.ended),
        "outcome": str(past.outcome),
    }


def _retained(root: Root, record: Record, problems: list[str]) -> Json | None:
    """The deployment that the agent keeps from being dropped, and until when, if that is known."""
    kept, until = record.retained, None
    if kept is None:
        return None
    if kept.since is not None:
        from treenail.cli.node.own_node import settings_of

        try:
            until = rfc3339(kept.since + settings_of(root, None).health.keep_s)
        except UsageError as error:
            problems.append(f"the settings: {error}")
    return {"id": kept.id, "until": until}


def _target(target: Target) -> Json:
    return {"config": target.config, "image": target.image}


def _deployment(deployment: Deployment | None) -> Json | None:
    if deployment is None:
        return None
    return {
        "version": deployment.version,
        "image": deployment.image,
        "digest": deployment.digest,
        "checksum": deployment.checksum,
        "locked": deployment.locked,
        "pinned": deployment.pinned,
    }


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}
