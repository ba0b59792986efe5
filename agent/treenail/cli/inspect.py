"""``treenail status``: one screen that works with the API server down."""

import argparse
import json
import os

from treenail.cli.main import DEGRADED
from treenail.clock import SystemClock, rfc3339
from treenail.errors import BusError, FileError, TreenailError
from treenail.host.bus import SystemBus
from treenail.host.deployments import Deployment, Deployments
from treenail.host.files import Files
from treenail.host.ledger import Ledger
from treenail.host.root import Root
from treenail.host.rpmostree import RpmOstree
from treenail.update import record as records
from treenail.update.record import Record, Target

Json = dict[str, object]
LIVE = "/run/treenail/status.json"
_LIVE_LIMIT = 1024 * 1024


def main(arguments: argparse.Namespace) -> int:
    """Print the node's status; 4 when the node is degraded."""
    document = gather(Root(arguments.root or "/"))
    print(json.dumps(document, indent=1) if arguments.json else screen(document))
    return DEGRADED if document["state"] == "Degraded" else 0


def gather(root: Root) -> Json:
    """Everything there is to say; what can't be found out is in ``problems``, in a sentence."""
    problems: list[str] = []
    live = _live(root, problems)
    record = _record(root, problems)
    found = _deployments(problems)
    update = record.update
    failure = live.get("failure")
    if failure is None and record.refused is not None:
        failure = {
            "message": record.refused.reason,
            "remedy": record.refused.remedy,
            "state": "Degraded",
        }
    return {
        "node": live.get("node"),
        "agent": _agent(live),
        "state": _state(live, failure, record),
        "sentence": live.get("sentence"),
        "current": _target(record.current),
        "desired": live.get("desired") or _target(update.target if update else record.current),
        "update": live.get("update")
        if update is None
        else {
            "id": update.id,
            "phase": str(update.phase),
            "target": _target(update.target),
            "origin": _target(update.origin),
            "began": rfc3339(update.began),
            "entered": rfc3339(update.entered),
        },
        "progress": live.get("progress"),
        "failure": failure,
        "credentials": live.get("credentials") or [],
        "apiServer": live.get("apiServer"),
        "deployments": {
            "booted": _deployment(found.booted),
            "staged": _deployment(found.staged),
            "rollback": _deployment(found.rollback),
        },
        "problems": problems,
    }


def screen(document: Json) -> str:
    """The status for a person."""
    update, progress = _object(document["update"]), _object(document["progress"])
    failure, api = _object(document["failure"]), _object(document["apiServer"])
    deployments = _object(document["deployments"])
    lines = [
        ("Node", str(document["node"] or "unknown")),
        ("Agent", str(document["agent"])),
        ("State", _state_line(document, update)),
        ("Doing", _doing(document, progress)),
        ("Current", _target_line(_object(document["current"]))),
        ("Desired", _target_line(_object(document["desired"]))),
        *(
            (name.capitalize(), _deployment_line(_object(deployments[name])))
            for name in ("booted", "staged", "rollback")
        ),
        ("API server", _api_line(api)),
    ]
    if failure:
        lines.append(("Last error", str(failure["message"])))
        lines.append(("What to do", str(failure["remedy"] or "nothing: it is tried again")))
    credentials = document["credentials"]
    lines += [("Pull secret", str(each)) for each in _list(credentials)]
    lines += [("Not known", str(each)) for each in _list(document["problems"])]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _live(root: Root, problems: list[str]) -> Json:
    try:
        content = Files(root).read(LIVE, limit=_LIVE_LIMIT)
        return _object(json.loads(content)) if content else {}
    except (FileError, ValueError) as error:
        problems.append(f"what the agent does now: {error}")
        return {}


def _record(root: Root, problems: list[str]) -> Record:
    try:
        return records.from_json(Ledger(root).read())
    except TreenailError as error:
        problems.append(f"what is recorded: {error}")
        return Record()


def _deployments(problems: list[str]) -> Deployments:
    bus = SystemBus()
    os_ = RpmOstree(bus, SystemClock())
    try:
        found = os_.look()
        os_.release()
    except BusError as error:
        problems.append(f"the deployments: {error}")
        return Deployments(())
    finally:
        bus.close()
    return found


def _agent(live: Json) -> str:
    pid = live.get("pid")
    if not isinstance(pid, int):
        return "has not run since the boot"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "is not running; see: systemctl status treenail"
    except PermissionError:
        pass
    return f"running, process {pid}"


def _state(live: Json, failure: object, record: Record) -> str:
    if isinstance(failure, dict) and failure.get("state"):
        return str(failure["state"])
    if record.update is not None:
        return "Working"
    if not record.current.config:
        return "Unknown"
    return "Done" if str(live.get("sentence", "at ")).startswith("at ") else "Working"


def _state_line(document: Json, update: Json) -> str:
    if not update:
        return str(document["state"])
    return f"{document['state']}, {update['phase']} since {update['entered']}"


def _doing(document: Json, progress: Json) -> str:
    text = str(document["sentence"] or "nothing is known")
    if not progress:
        return text
    percent = progress.get("percent")
    shown = "" if percent is None else f"{percent} %, "
    return f"{text} ({shown}{progress.get('text')})"


def _target(target: Target) -> Json:
    return {"config": target.config, "image": target.image}


def _target_line(target: Json) -> str:
    config = str(target.get("config") or "nothing yet")
    return f"{config}\n{'':<13}{target['image']}" if target.get("image") else config


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


def _deployment_line(deployment: Json) -> str:
    if not deployment:
        return "none"
    notes = [note for note in ("locked", "pinned") if deployment[note]]
    marks = f" ({', '.join(notes)})" if notes else ""
    named = deployment["digest"] or deployment["checksum"]
    return f"{deployment['version'] or 'no version'}{marks}  {named}"


def _api_line(api: Json) -> str:
    if not api:
        return "not asked yet"
    text = f"{'reachable' if api['reachable'] else 'away'} since {api['since']}"
    return f"{text}: {api['problem']}" if api.get("problem") else text


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
