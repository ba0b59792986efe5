"""``treenail status``: show the state of a node, also without the API server and the agent."""

import argparse
import json
from collections.abc import Iterator

from treenail.cli.node.local_machine import open_machine
from treenail.cli.output import EXIT_DEGRADED
from treenail.clock import format_rfc3339, parse_rfc3339
from treenail.errors import FileError, HostError, LedgerError, TreenailError, UsageError
from treenail.host.machine import Machine
from treenail.host.ostree.deployments import DeploymentStatus, OstreeDeployment
from treenail.host.system.resources import find_process
from treenail.update.state import record as records
from treenail.update.state.history import summarize_history
from treenail.update.state.record import LedgerRecord, PastUpdate, Target, UpdateRecord

Json = dict[str, object]
LabelledLine = tuple[str, str]

STATUS_PATH = "/run/treenail/status.json"
_MAX_STATUS_BYTES = 1024 * 1024
_MAX_REASONS = 3


def main(arguments: argparse.Namespace) -> int:
    """Print the status of the node; return 4 if it is degraded."""
    document = collect_status(open_machine(arguments.root), arguments.config)
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print(format_status(document))
    return EXIT_DEGRADED if document["state"] == "Degraded" else 0


def collect_status(machine: Machine, config: str | None = None) -> Json:
    """Collect the status document; ``problems`` names what cannot be read, with the cause.

    ``config`` is the path of the settings, None for the default.
    Section STATUS of treenail(8) documents the keys. Add keys, and never remove one.
    """
    problems: list[str] = []
    status = _read_status_file(machine, problems)
    record, damage = _read_record(machine, problems)
    deployments = _read_deployments(machine, problems)
    update = record.update
    failure = damage or status.get("failure")
    if failure is None and record.quarantined is not None:
        failure = {
            "message": record.quarantined.reason,
            "remedy": record.quarantined.remedy,
            "state": "Degraded",
        }
    return {
        "node": status.get("node"),
        "agent": _inspect_agent(machine, status),
        "backend": status.get("backend"),
        "state": _compute_state(status, failure, record),
        "activity": status.get("activity"),
        "current": _build_target_document(record.current),
        "desired": status.get("desired")
        or _build_target_document(update.target if update else record.current),
        "update": status.get("update")
        if update is None
        else _build_update_document(record, update),
        "progress": status.get("progress"),
        "failure": failure,
        "lastUpdate": _build_past_document(record.history[0]) if record.history else None,
        "credentials": status.get("credentials") or [],
        "drift": status.get("drift") or [],
        "apiServer": status.get("apiServer"),
        "deployments": {
            "booted": _build_deployment_document(deployments.booted),
            "staged": _build_deployment_document(deployments.staged),
            "rollback": _build_deployment_document(deployments.rollback),
        },
        "retained": _build_retained_document(machine, config, record, problems),
        "problems": problems,
    }


def _read_status_file(machine: Machine, problems: list[str]) -> Json:
    try:
        content = machine.files.read_file(STATUS_PATH, limit=_MAX_STATUS_BYTES)
        return _as_object(json.loads(content)) if content else {}
    except (FileError, ValueError) as error:
        problems.append(f"the activity of the agent: {error}")
        return {}


def _read_record(machine: Machine, problems: list[str]) -> tuple[LedgerRecord, Json | None]:
    """Read the ledger; also return a failure if it is damaged, because no agent starts with it."""
    try:
        return records.from_json(machine.ledger.read_document()), None
    except TreenailError as error:
        problems.append(str(error))
        if isinstance(error.__cause__, FileError):
            return LedgerRecord(), None  # readable by root only: no damage
        return LedgerRecord(), {
            "message": str(error),
            "remedy": error.remedy,
            "state": error.node_state,
        }


def _read_deployments(machine: Machine, problems: list[str]) -> DeploymentStatus:
    # Imported late: ledger and status file can be read without a bus.
    from treenail.cli.node.choose_backend import read_deployments

    try:
        return read_deployments(machine)
    except HostError as error:
        problems.append(f"the deployments: {error}")
        return DeploymentStatus(())


def _inspect_agent(machine: Machine, status: Json) -> Json:
    """Return whether the agent runs; ``lastSeen`` is the time of its last status in this boot."""
    try:
        pid = machine.ledger.find_lock_holder()
        process = find_process(pid) if pid else None
    except LedgerError:
        # Only root can read the holder of the lock.
        seen = status.get("pid")
        pid = seen if isinstance(seen, int) else None
        process = find_process(pid) if pid else None
        written = parse_rfc3339(status.get("written")) or 0.0
        # A process that started after the last status has the PID of an agent that ended. The time
        # in the file has no fraction of a second.
        if process is None or process.started_at >= written + 1:
            pid = process = None
    return {
        "running": pid is not None,
        "pid": pid,
        "startedAt": format_rfc3339(process.started_at) if process else None,
        "memoryBytes": process.memory_bytes if process else None,
        "lastSeen": status.get("written"),
    }


def _compute_state(status: Json, failure: object, record: LedgerRecord) -> str:
    if isinstance(failure, dict) and failure.get("state"):
        return str(failure["state"])
    if record.update is not None:
        return "Working"
    if not record.current.config:
        return "Unknown"
    return "Done" if str(status.get("activity", "at ")).startswith("at ") else "Working"


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


def _build_retained_document(
    machine: Machine, config: str | None, record: LedgerRecord, problems: list[str]
) -> Json | None:
    """Build the document of the pinned deployment, with the end of its retention if known."""
    retained, until = record.retained, None
    if retained is None:
        return None
    if retained.healthy_since is not None:
        from treenail.cli.node.own_node import load_node_settings

        try:
            until = format_rfc3339(
                retained.healthy_since + load_node_settings(machine.root, config).health.retention_s
            )
        except UsageError as error:
            problems.append(f"the settings: {error}")
    return {"id": retained.id, "until": until}


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


def format_status(document: Json) -> str:
    """Format the status document for users."""
    lines = [
        ("Node", str(document["node"] or "unknown")),
        *_format_activity(document),
        ("Current", _format_target(_as_object(document["current"]))),
        ("Desired", _format_target(_as_object(document["desired"]))),
        *_format_backend(_as_object(document.get("backend"))),
        *_format_deployments(_as_object(document["deployments"])),
        *_format_retained(_as_object(document.get("retained"))),
        ("API server", _format_api_server(_as_object(document["apiServer"]))),
        *_format_outcome(document),
        *(("Pull secret", str(each)) for each in _as_list(document["credentials"])),
        *(("Drift", str(each)) for each in _as_list(document["drift"])),
        *(("Problem", str(each)) for each in _as_list(document["problems"])),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _format_activity(document: Json) -> Iterator[LabelledLine]:
    """Format agent, state, activity and reasons."""
    agent, update = _as_object(document["agent"]), _as_object(document["update"])
    yield "Agent", _format_agent(agent)
    state = str(document["state"])
    yield "State", f"{state}, {update['phase']} since {update['entered']}" if update else state
    activity = str(document["activity"] or "unknown")
    if agent["running"]:
        yield "Activity", f"{activity}{_format_progress(_as_object(document['progress']))}"
    else:
        yield "Activity", f"none; last activity: {activity}"
    reasons = _as_list(update.get("reasons"))
    for reason in reasons[:_MAX_REASONS]:
        yield "Why", str(reason)
    if len(reasons) > _MAX_REASONS:
        yield "", f"and {len(reasons) - _MAX_REASONS} more, see: treenail why"


def _format_outcome(document: Json) -> Iterator[LabelledLine]:
    """Format last update, last error and remedy."""
    last, failure = _as_object(document["lastUpdate"]), _as_object(document["failure"])
    if last:
        to = _as_object(last["target"])["config"]
        yield "Last update", f"{last['outcome']} {last['ended']}, to {to}"
    if failure:
        yield "Last error", str(failure["message"])
        yield "Remedy", str(failure["remedy"] or "wait: the agent retries automatically")
    if not _as_object(document["agent"])["running"]:
        yield (
            "Remedy",
            "start the agent: systemctl start treenail; if it stops again: journalctl -u treenail",
        )


def _format_agent(agent: Json) -> str:
    if agent["running"]:
        since = f" since {agent['startedAt']}" if agent["startedAt"] else ""
        memory = agent["memoryBytes"]
        used = f", {memory / 2**20:.0f} MiB" if isinstance(memory, int) else ""
        return f"running{since}, process {agent['pid']}{used}"
    if agent["lastSeen"]:
        return f"not running; last status written {agent['lastSeen']}"
    return "not started since the boot"


def _format_progress(progress: Json) -> str:
    if not progress:
        return ""
    percent = progress.get("percent")
    shown = "" if percent is None else f"{percent} %, "
    return f" ({shown}{progress.get('text')})"


def _format_backend(backend: Json) -> Iterator[LabelledLine]:
    if backend:
        yield "Managed by", f"{backend['name']}: {backend['reason']}"


def _format_deployments(deployments: Json) -> Iterator[LabelledLine]:
    for name in ("booted", "staged", "rollback"):
        yield name.capitalize(), _format_deployment(_as_object(deployments[name]))


def _format_retained(retained: Json) -> Iterator[LabelledLine]:
    if retained:
        yield "Pinned", f"{retained['id']}, {_format_retention_end(retained)}, or the next update"


def _format_retention_end(retained: Json) -> str:
    if retained["until"]:
        return f"until {retained['until']}"
    return "until the new deployment is healthy"


def _format_target(target: Json) -> str:
    config = str(target.get("config") or "none yet")
    return f"{config}\n{'':<13}{target['image']}" if target.get("image") else config


def _format_deployment(deployment: Json) -> str:
    if not deployment:
        return "none"
    notes = [note for note in ("locked", "pinned") if deployment[note]]
    marks = f" ({', '.join(notes)})" if notes else ""
    named = deployment["digest"] or deployment["checksum"]
    return f"{deployment['version'] or 'no version'}{marks}  {named}"


def _format_api_server(api: Json) -> str:
    if not api:
        return "no request yet"
    text = f"{'reachable' if api['reachable'] else 'unreachable'} since {api['since']}"
    return f"{text}: {api['problem']}" if api.get("problem") else text


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
