"""``treenail status``: show the state of a node, also without the API server and the agent.

The text is formatted from the document that ``--output json`` prints.
"""

import argparse
import os
import sys
from collections.abc import Iterator

from treenail import clocks, errors
from treenail.cli import output, output_format, terminal
from treenail.cli.node import local_machine
from treenail.host.machine import Machine
from treenail.host.ostree.deployments import DeploymentStatus, OstreeDeployment
from treenail.host.system.resources import find_process
from treenail.update.state import history, ledger_record

Json = dict[str, object]


_KEYS_OF_LEDGER = ("update", "lastUpdate", "retained")
_KEYS_OF_AGENT = (
    "node", "backend", "activity", "progress", "credentials", "drift", "apiServer",
    "bootstrapRegistry",
)  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Print the status of the node; return its exit code, see `compute_exit_code`."""
    document = collect_status(local_machine.open_machine(arguments.root), arguments.config)
    # The lines are wrapped beside their labels.
    width = terminal.find_width(sys.stdout)
    output_format.print_output(
        arguments.output,
        kind="NodeStatus",
        content=lambda: document,
        lines=lambda: map(terminal.VerbatimLine, format_status(document, width).split("\n")),
    )
    return compute_exit_code(document)


def compute_exit_code(document: Json) -> int:
    """Return the exit code for the status document."""
    match document["state"]:
        case "Done":
            # The desired target is not known while no agent reads it.
            is_running = as_object(document["agent"])["running"]
            return output.EXIT_AT_TARGET if is_running else output.EXIT_ATTENTION
        case "Working":
            return output.EXIT_PENDING
        case "Degraded" | "Unreconcilable":
            return output.EXIT_ATTENTION
        case _:
            return output.EXIT_FAILED


def collect_status(machine: Machine, config: str | None = None) -> Json:
    """Collect the status document; ``problems`` names what cannot be read, with the cause.

    ``unknown`` lists the keys whose values cannot be read and are null or empty for that reason
    only. ``config`` is the path of the settings, None for the default.
    Section STATUS of treenail(8) documents the keys. Add keys, and never remove one.
    """
    problems: list[str] = []
    unknown: list[str] = []
    status = _read_status_file(machine, problems, unknown)
    record, damage = _read_record(machine, problems)
    if record is None:
        unknown += [key for key in _KEYS_OF_LEDGER if not status.get(key)]
        # Only root can read the ledger; the agent's last status repeats the targets.
        current, desired = as_object(status.get("current")), as_object(status.get("desired"))
        unknown += [key for key in ("current", "desired") if not status.get(key)]
        record = ledger_record.LedgerRecord()
    else:
        update = record.update
        current = record.current.to_json()
        desired = as_object(status.get("desired"))
        if not desired and update is not None:
            desired = update.target.to_json()
        elif not desired:
            # Only the Node says it, and no agent of this boot has read the Node.
            unknown.append("desired")
    deployments = _read_deployments(machine, problems)
    if deployments is None:
        unknown.append("deployments")
        deployments = DeploymentStatus(())
    update = record.update
    failure = damage or status.get("failure")
    if failure is None and record.quarantined is not None:
        failure = {
            "message": record.quarantined.reason,
            "remedy": record.quarantined.remedy,
            "state": "Degraded",
        }
    if "drift" in status and status["drift"] is None:
        unknown.append("drift")
    agent = _inspect_agent(machine, status, unknown)
    state = _compute_state(status, failure, record)
    if state == "Done" and agent["running"] and "desired" in unknown:
        # An agent that just started has not compared anything yet.
        state = "Working"
    return {
        "node": status.get("node"),
        "nodeNote": status.get("nodeNote") or "",
        "agent": agent,
        "backend": status.get("backend"),
        "firstBoot": bool(status.get("firstBoot")),
        "state": state,
        "activity": status.get("activity"),
        "current": current or ledger_record.Target().to_json(),
        "desired": desired or ledger_record.Target().to_json(),
        "update": status.get("update")
        if update is None
        else _build_update_document(record, update),
        "progress": status.get("progress"),
        "failure": failure,
        "lastUpdate": _build_past_document(record.history[0]) if record.history else None,
        "credentials": status.get("credentials") or [],
        "bootstrapRegistry": status.get("bootstrapRegistry"),
        "drift": status.get("drift") or [],
        "apiServer": status.get("apiServer"),
        "deployments": {
            "booted": _build_deployment_document(deployments.booted),
            "staged": _build_deployment_document(deployments.staged),
            "rollback": _build_deployment_document(deployments.rollback),
        },
        "retained": _build_retained_document(machine, config, record, problems),
        "problems": problems,
        "unknown": unknown,
    }


def _read_status_file(machine: Machine, problems: list[str], unknown: list[str]) -> Json:
    try:
        return as_object(local_machine.load_agent_status(machine))
    except (errors.FileError, ValueError) as error:
        problems.append(f"the activity of the agent: {error}")
        unknown += _KEYS_OF_AGENT
        return {}


def _read_record(
    machine: Machine, problems: list[str]
) -> tuple[ledger_record.LedgerRecord | None, Json | None]:
    """Read the ledger; None if it cannot be read.

    Also return a failure if it is damaged, because no agent starts with it.
    """
    try:
        return ledger_record.from_json(machine.ledger.read_document()), None
    except errors.TreenailError as error:
        if isinstance(error.__cause__, errors.FileError):
            # No damage: only root can read the ledger.
            problems.append(f"{error}; run the command as root" if os.geteuid() else str(error))
            return None, None
        problems.append(str(error))
        return None, {
            "message": str(error),
            "remedy": error.remedy,
            "state": error.node_state,
        }


def _read_deployments(machine: Machine, problems: list[str]) -> DeploymentStatus | None:
    # Imported late: ledger and status file can be read without a bus.
    from treenail.cli.node.backend import read_deployments

    try:
        return read_deployments(machine)
    except errors.HostError as error:
        problems.append(f"the deployments: {error}")
        return None


def _inspect_agent(machine: Machine, status: Json, unknown: list[str]) -> Json:
    """Return whether the agent runs; ``lastSeen`` is the time of its last status in this boot."""
    try:
        pid = machine.ledger.find_lock_holder()
        process = find_process(pid) if pid else None
    except errors.LedgerError:
        # Only root can read the holder of the lock.
        if "activity" in unknown:
            unknown.append("agent")
        seen = status.get("pid")
        pid = seen if isinstance(seen, int) else None
        process = find_process(pid) if pid else None
        written = clocks.parse_rfc3339(status.get("written")) or 0.0
        # A process that started after the last status has the PID of an agent that ended. The time
        # in the file has no fraction of a second.
        if process is None or process.started_at >= written + 1:
            pid = process = None
    return {
        "running": pid is not None,
        "pid": pid,
        "startedAt": clocks.format_rfc3339(process.started_at) if process else None,
        "memoryBytes": process.memory_bytes if process else None,
        "lastSeen": status.get("written"),
    }


def _compute_state(status: Json, failure: object, record: ledger_record.LedgerRecord) -> str:
    if isinstance(failure, dict) and failure.get("state"):
        return str(failure["state"])
    if record.update is not None:
        return "Working"
    if status.get("firstBoot") or status.get("update"):
        return "Working"
    if not (record.current.config or as_object(status.get("current")).get("config")):
        return "Unknown"
    return "Done" if str(status.get("activity", "at ")).startswith("at ") else "Working"


def _build_update_document(
    record: ledger_record.LedgerRecord, update: ledger_record.UpdateRecord
) -> Json:
    pending = history.summarize_history(record, booted_at=None).pending
    return {
        "id": update.id,
        "phase": str(update.phase),
        "target": update.target.to_json(),
        "origin": update.origin.to_json(),
        "began": clocks.format_rfc3339(update.began),
        "entered": clocks.format_rfc3339(update.entered),
        "reasons": list(pending.reasons) if pending else [],
    }


def _build_past_document(past: ledger_record.PastUpdate) -> Json:
    return {
        "id": past.id,
        "target": past.target.to_json(),
        "began": clocks.format_rfc3339(past.began),
        "ended": clocks.format_rfc3339(past.ended),
        "outcome": str(past.outcome),
    }


def _build_retained_document(
    machine: Machine, config: str | None, record: ledger_record.LedgerRecord, problems: list[str]
) -> Json | None:
    """Build the document of the pinned deployment, with the end of its retention if known."""
    retained, until = record.retained, None
    # After a failed update the retention has ended; the agent unpins within a moment.
    if retained is None or retained.healthy_since == 0.0:
        return None
    if retained.healthy_since is not None:
        from treenail.cli.node.local_machine import load_node_settings

        try:
            until = clocks.format_rfc3339(
                retained.healthy_since + load_node_settings(machine.root, config).health.retention_s
            )
        except errors.UsageError as error:
            problems.append(f"the settings: {error}")
    return {"id": retained.id, "until": until}


def _build_deployment_document(deployment: OstreeDeployment | None) -> Json | None:
    if deployment is None:
        return None
    return {
        "version": deployment.version,
        "image": deployment.image,
        "digest": deployment.digest,
        "listDigest": deployment.list_digest,
        "checksum": deployment.checksum,
        "locked": deployment.is_locked,
        "pinned": deployment.is_pinned,
    }


LabelledLine = tuple[str, str]

_MAX_REASONS = 3
_UNKNOWN = "unknown"


def format_status(document: Json, width: int | None = None) -> str:
    """Format the status document, wrapped to the width of a terminal; None wraps nothing."""
    unknown = frozenset(map(str, as_list(document.get("unknown"))))
    rows = [
        ("Node", _format_node(document)),
        *_format_activity(document, is_unknown="agent" in unknown),
        *_format_target("Current", document["current"], is_unknown="current" in unknown),
        *_format_target("Desired", document["desired"], is_unknown="desired" in unknown),
        *_format_backend(as_object(document.get("backend"))),
        *_format_deployments(document["deployments"], is_unknown="deployments" in unknown),
        *_format_retained(document.get("retained"), is_unknown="retained" in unknown),
        (
            "API server",
            _UNKNOWN
            if "apiServer" in unknown
            else _format_api_server(as_object(document["apiServer"])),
        ),
        *_format_outcome(document, is_unknown="lastUpdate" in unknown),
        *_format_bootstrap_registry(document.get("bootstrapRegistry")),
        *_format_list("Credentials", document["credentials"], is_unknown="credentials" in unknown),
        *_format_list("Drift", document["drift"], is_unknown="drift" in unknown),
        *_format_list("Problem", document["problems"], is_unknown=False),
    ]
    return "\n".join(
        line for label, text in rows for line in terminal.format_labelled(label, text, width)
    )


def as_object(value: object) -> Json:
    """Return the object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[object]:
    """Return the list, or an empty one for anything else."""
    return value if isinstance(value, list) else []


def _format_list(label: str, values: object, *, is_unknown: bool) -> Iterator[LabelledLine]:
    if is_unknown:
        yield label, _UNKNOWN
    yield from ((label, str(value)) for value in as_list(values))


def _format_activity(document: Json, *, is_unknown: bool) -> Iterator[LabelledLine]:
    """Format agent, state, activity and reasons."""
    agent, update = as_object(document["agent"]), as_object(document["update"])
    yield "Agent", _UNKNOWN if is_unknown else _format_agent(agent)
    state = str(document["state"])
    if document.get("firstBoot"):
        state = f"{state}, first boot: the kubelet does not start before it is complete"
    yield (
        "State",
        f"{state}, {update.get('phase')} since {update.get('entered')}" if update else state,
    )
    activity = str(document["activity"] or _UNKNOWN)
    if is_unknown:
        yield "Activity", activity
    elif agent["running"]:
        yield "Activity", f"{activity}{_format_progress(as_object(document['progress']))}"
    else:
        yield "Activity", f"none; last activity: {activity}"
    reasons = as_list(update.get("reasons"))
    for reason in reasons[:_MAX_REASONS]:
        yield "Why", str(reason)
    if len(reasons) > _MAX_REASONS:
        yield "", f"and {len(reasons) - _MAX_REASONS} more, see: treenail why"


def _format_outcome(document: Json, *, is_unknown: bool) -> Iterator[LabelledLine]:
    """Format last update, last error and remedy."""
    last, failure = as_object(document["lastUpdate"]), as_object(document["failure"])
    if is_unknown:
        yield "Last update", _UNKNOWN
    if last:
        to = as_object(last["target"])["config"]
        yield "Last update", f"{last['outcome']} {last['ended']}, to {to}"
    if failure:
        yield "Last error", str(failure.get("message"))
        yield "Remedy", str(failure.get("remedy") or "wait: the agent retries automatically")
    is_running = as_object(document["agent"])["running"]
    if not is_running and "agent" not in as_list(document.get("unknown")):
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
        yield "Managed by", f"{backend.get('name')}: {backend.get('reason')}"


def _format_bootstrap_registry(registry: object) -> Iterator[LabelledLine]:
    if registry:
        yield (
            "Registry",
            f"{registry} on the bootstrap host serves pulls until the hand-over",
        )


def _format_deployments(value: object, *, is_unknown: bool) -> Iterator[LabelledLine]:
    deployments = as_object(value)
    for name in ("booted", "staged", "rollback"):
        if is_unknown:
            yield name.capitalize(), _UNKNOWN
        else:
            yield from _format_deployment(name.capitalize(), as_object(deployments[name]))


def _format_deployment(label: str, deployment: Json) -> Iterator[LabelledLine]:
    if not deployment:
        yield label, "none"
        return
    notes = [note for note in ("locked", "pinned") if deployment[note]]
    marks = f" ({', '.join(notes)})" if notes else ""
    named = deployment["digest"] or deployment["checksum"]
    yield label, f"{deployment['version'] or 'no version'}{marks}  {named}"
    if deployment.get("listDigest"):
        yield "", f"of manifest list {deployment['listDigest']}"


def _format_retained(value: object, *, is_unknown: bool) -> Iterator[LabelledLine]:
    retained = as_object(value)
    if is_unknown:
        yield "Pinned", _UNKNOWN
    elif retained:
        yield "Pinned", f"{retained['id']}, {_format_retention_end(retained)}, or the next update"


def _format_retention_end(retained: Json) -> str:
    if retained["until"]:
        return f"until {retained['until']}"
    return "until the new deployment is healthy"


def _format_target(label: str, value: object, *, is_unknown: bool) -> Iterator[LabelledLine]:
    target = as_object(value)
    yield label, _UNKNOWN if is_unknown else str(target.get("config") or "none yet")
    if target.get("image"):
        yield "", str(target["image"])


def _format_node(document: Json) -> str:
    note = f" ({document['nodeNote']})" if document.get("nodeNote") else ""
    return f"{document['node'] or _UNKNOWN}{note}"


def _format_api_server(api: Json) -> str:
    if not api:
        return "no request yet"
    # Another version of the agent may have written other keys.
    text = f"{'reachable' if api.get('reachable') else 'unreachable'} since {api.get('since')}"
    return f"{text}: {api['problem']}" if api.get("problem") else text
