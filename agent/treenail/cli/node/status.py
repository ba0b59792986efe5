"""``treenail status``: show the state of a node, also without the API server and the agent."""

import argparse
import os
import sys

from treenail.cli.node.local_machine import open_machine
from treenail.cli.node.status_text import as_object, format_status
from treenail.cli.output import EXIT_AT_TARGET, EXIT_ATTENTION, EXIT_FAILED, EXIT_PENDING
from treenail.cli.output_format import print_output
from treenail.cli.terminal import VerbatimLine, find_width
from treenail.clock import format_rfc3339, parse_rfc3339
from treenail.codec import parse_json
from treenail.errors import FileError, HostError, LedgerError, TreenailError, UsageError
from treenail.host.machine import Machine
from treenail.host.ostree.deployments import DeploymentStatus, OstreeDeployment
from treenail.host.system.resources import find_process
from treenail.update.state import record as records
from treenail.update.state.history import summarize_history
from treenail.update.state.record import LedgerRecord, PastUpdate, Target, UpdateRecord

Json = dict[str, object]

STATUS_PATH = "/run/treenail/status.json"
_MAX_STATUS_BYTES = 1024 * 1024
_KEYS_OF_LEDGER = ("update", "lastUpdate", "retained")
_KEYS_OF_AGENT = (
    "node", "backend", "activity", "progress", "credentials", "drift", "apiServer",
    "bootstrapRegistry",
)  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Print the status of the node; return its exit code, see `compute_exit_code`."""
    document = collect_status(open_machine(arguments.root), arguments.config)
    # The lines are wrapped beside their labels.
    width = find_width(sys.stdout)
    print_output(
        arguments.output,
        kind="NodeStatus",
        content=lambda: document,
        lines=lambda: map(VerbatimLine, format_status(document, width).split("\n")),
    )
    return compute_exit_code(document)


def compute_exit_code(document: Json) -> int:
    """Return the exit code for the status document."""
    match document["state"]:
        case "Done":
            # The desired target is not known while no agent reads it.
            is_running = as_object(document["agent"])["running"]
            return EXIT_AT_TARGET if is_running else EXIT_ATTENTION
        case "Working":
            return EXIT_PENDING
        case "Degraded" | "Unreconcilable":
            return EXIT_ATTENTION
        case _:
            return EXIT_FAILED


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
        record = LedgerRecord()
    else:
        update = record.update
        current = _build_target_document(record.current)
        desired = as_object(status.get("desired"))
        if not desired and update is not None:
            desired = _build_target_document(update.target)
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
        "agent": agent,
        "backend": status.get("backend"),
        "firstBoot": bool(status.get("firstBoot")),
        "state": state,
        "activity": status.get("activity"),
        "current": current or _build_target_document(Target()),
        "desired": desired or _build_target_document(Target()),
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
        content = machine.files.read_file(STATUS_PATH, limit=_MAX_STATUS_BYTES)
        return as_object(parse_json(content)) if content else {}
    except (FileError, ValueError) as error:
        problems.append(f"the activity of the agent: {error}")
        unknown += _KEYS_OF_AGENT
        return {}


def _read_record(machine: Machine, problems: list[str]) -> tuple[LedgerRecord | None, Json | None]:
    """Read the ledger; None if it cannot be read.

    Also return a failure if it is damaged, because no agent starts with it.
    """
    try:
        return records.from_json(machine.ledger.read_document()), None
    except TreenailError as error:
        if isinstance(error.__cause__, FileError):
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
    from treenail.cli.node.choose_backend import read_deployments

    try:
        return read_deployments(machine)
    except HostError as error:
        problems.append(f"the deployments: {error}")
        return None


def _inspect_agent(machine: Machine, status: Json, unknown: list[str]) -> Json:
    """Return whether the agent runs; ``lastSeen`` is the time of its last status in this boot."""
    try:
        pid = machine.ledger.find_lock_holder()
        process = find_process(pid) if pid else None
    except LedgerError:
        # Only root can read the holder of the lock.
        if "activity" in unknown:
            unknown.append("agent")
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
    if status.get("firstBoot") or status.get("update"):
        return "Working"
    if not (record.current.config or as_object(status.get("current")).get("config")):
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
    # After a failed update the retention has ended; the agent unpins within a moment.
    if retained is None or retained.healthy_since == 0.0:
        return None
    if retained.healthy_since is not None:
        from treenail.cli.node.node_settings import load_node_settings

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
        "listDigest": deployment.list_digest,
        "checksum": deployment.checksum,
        "locked": deployment.is_locked,
        "pinned": deployment.is_pinned,
    }
