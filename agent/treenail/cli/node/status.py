"""``treenail status``: what there is to say of a node, even with API server and agent away."""

import argparse
import json
from pathlib import Path

from treenail.cli.main import EXIT_DEGRADED
from treenail.cli.node.status_screen import format_status
from treenail.clock import Clock, SystemClock, format_rfc3339
from treenail.errors import FileError, HostError, LedgerError, TreenailError, UsageError
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.ostree.deployments import DeploymentStatus, OstreeDeployment
from treenail.host.system.state_file import Ledger
from treenail.update.state import record as records
from treenail.update.state.history import summarize_history
from treenail.update.state.record import LedgerRecord, PastUpdate, Target, UpdateRecord

Json = dict[str, object]
STATUS_PATH = "/run/treenail/status.json"
_MAX_STATUS_BYTES = 1024 * 1024


def main(arguments: argparse.Namespace) -> int:
    """Print the node's status; 4 when the node is degraded."""
    clock = SystemClock()
    document = collect_status(Root(arguments.root or "/"), clock)
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print(format_status(document))
    return EXIT_DEGRADED if document["state"] == "Degraded" else 0


def collect_status(root: Root, clock: Clock) -> Json:
    """Everything there is to say; what can't be found out is in ``problems``, in a sentence.

    The form is that of treenail(8), section STATUS: keys are added to it, and none is taken away.
    """
    problems: list[str] = []
    live = _read_status_file(root, problems)
    record, damage = _read_record(root, problems)
    found = _read_deployments(root, clock, problems)
    update = record.update
    failure = damage or live.get("failure")
    if failure is None and record.quarantined is not None:
        failure = {
            "message": record.quarantined.reason,
            "remedy": record.quarantined.remedy,
            "state": "Degraded",
        }
    return {
        "node": live.get("node"),
        "agent": _inspect_agent(root, live),
        "backend": live.get("backend"),
        "state": _compute_state(live, failure, record),
        "sentence": live.get("sentence"),
        "current": _build_target_document(record.current),
        "desired": live.get("desired")
        or _build_target_document(update.target if update else record.current),
        "update": live.get("update") if update is None else _build_update_document(record, update),
        "progress": live.get("progress"),
        "failure": failure,
        "lastUpdate": _build_past_document(record.history[0]) if record.history else None,
        "credentials": live.get("credentials") or [],
        "drift": live.get("drift") or [],
        "apiServer": live.get("apiServer"),
        "deployments": {
            "booted": _build_deployment_document(found.booted),
            "staged": _build_deployment_document(found.staged),
            "rollback": _build_deployment_document(found.rollback),
        },
        "retained": _build_retained_document(root, record, problems),
        "problems": problems,
    }


def _read_status_file(root: Root, problems: list[str]) -> Json:
    try:
        content = HostFiles(root).read_file(STATUS_PATH, limit=_MAX_STATUS_BYTES)
        return _as_object(json.loads(content)) if content else {}
    except (FileError, ValueError) as error:
        problems.append(f"what the agent does now: {error}")
        return {}


def _read_record(root: Root, problems: list[str]) -> tuple[LedgerRecord, Json | None]:
    """The record, and the failure that it is damaged, for no agent can begin with that."""
    try:
        return records.from_json(Ledger(root).read_document()), None
    except TreenailError as error:
        problems.append(f"what is recorded: {error}")
        if isinstance(error.__cause__, FileError):
            return LedgerRecord(), None  # it may be read by root alone
        return LedgerRecord(), {
            "message": str(error),
            "remedy": error.remedy,
            "state": error.node_state,
        }


def _read_deployments(root: Root, clock: Clock, problems: list[str]) -> DeploymentStatus:
    # The record and what the agent says are there without a bus, too.
    from treenail.cli.node.choose_backend import read_deployments

    try:
        return read_deployments(root, clock)
    except HostError as error:
        problems.append(f"the deployments: {error}")
        return DeploymentStatus(())


def _inspect_agent(root: Root, live: Json) -> Json:
    """Whether it runs; ``lastSeen`` is when it last had something to say, in this boot."""
    seen = live.get("pid")
    try:
        pid = Ledger(root).find_lock_holder()
        running = pid is not None
    except LedgerError:
        # Only root is told who has the lock.
        pid = seen if isinstance(seen, int) else None
        running = pid is not None and Path(f"/proc/{pid}").is_dir()
    return {"running": running, "pid": pid if running else None, "lastSeen": live.get("written")}


def _compute_state(live: Json, failure: object, record: LedgerRecord) -> str:
    if isinstance(failure, dict) and failure.get("state"):
        return str(failure["state"])
    if record.update is not None:
        return "Working"
    if not record.current.config:
        return "Unknown"
    return "Done" if str(live.get("sentence", "at ")).startswith("at ") else "Working"


def _build_update_document(record: LedgerRecord, update: UpdateRecord) -> Json:
    pending = summarize_history(record, booted_at=None).pending
    return {
        "id": update.id,
        "phase": str(update.phase),
        "target": _build_target_document(update.target),
        "origin": _build_target_document(update.origin),
        "began": format_rfc3339(update.began),
        "entered": format_rfc3339(update.entered),
        "reasons": list(pending.reasons) if pending else [],
    }


def _build_past_document(past: PastUpdate) -> Json:
    return {
        "id": past.id,
        "target": _build_target_document(past.target),
        "began": format_rfc3339(past.began),
        "ended": format_rfc3339(past.ended),
        "outcome": str(past.outcome),
    }


def _build_retained_document(root: Root, record: LedgerRecord, problems: list[str]) -> Json | None:
    """The deployment that the agent keeps from being dropped, and until when, if that is known."""
    kept, until = record.retained, None
    if kept is None:
        return None
    if kept.healthy_since is not None:
        from treenail.cli.node.own_node import load_node_settings

        try:
            until = format_rfc3339(
                kept.healthy_since + load_node_settings(root, None).health.retention_s
            )
        except UsageError as error:
            problems.append(f"the settings: {error}")
    return {"id": kept.id, "until": until}


def _build_target_document(target: Target) -> Json:
    return {"config": target.config, "image": target.image}


def _build_deployment_document(deployment: OstreeDeployment | None) -> Json | None:
    if deployment is None:
        return None
    return {
        "version": deployment.version,
        "image": deployment.image,
        "digest": deployment.digest,
        "checksum": deployment.checksum,
        "locked": deployment.is_locked,
        "pinned": deployment.is_pinned,
    }


def _as_object(value: object) -> Json:
    return value if isinstance(value, dict) else {}
