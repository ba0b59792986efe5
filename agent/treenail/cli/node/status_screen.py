"""The status of a node on one screen."""

from collections.abc import Iterator

Json = dict[str, object]
Line = tuple[str, str]
_REASONS_SHOWN = 3


def screen(document: Json) -> str:
    """The status for a person."""
    lines = [
        ("Node", str(document["node"] or "unknown")),
        *_activity(document),
        ("Current", _target_line(_object(document["current"]))),
        ("Desired", _target_line(_object(document["desired"]))),
        *_backend(_object(document.get("backend"))),
        *_deployments(_object(document["deployments"])),
        *_retained(_object(document.get("retained"))),
        ("API server", _api_line(_object(document["apiServer"]))),
        *_outcome(document),
        *(("Pull secret", str(each)) for each in _list(document["credentials"])),
        *(("Drift", str(each)) for each in _list(document["drift"])),
        *(("Not known", str(each)) for each in _list(document["problems"])),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _activity(document: Json) -> Iterator[Line]:
    """Who is at work, on what, and why."""
    agent, update = _object(document["agent"]), _object(document["update"])
    yield "Agent", _agent_line(agent)
    state = str(document["state"])
    yield "State", f"{state}, {update['phase']} since {update['entered']}" if update else state
    sentence = str(document["sentence"] or "nothing is known")
    if agent["running"]:
        yield "Doing", f"{sentence}{_progress(_object(document['progress']))}"
    else:
        yield "Doing", f"nothing; the agent last said: {sentence}"
    reasons = _list(update.get("reasons"))
    for reason in reasons[:_REASONS_SHOWN]:
        yield "Why", str(reason)
    if len(reasons) > _REASONS_SHOWN:
        yield "", f"and {len(reasons) - _REASONS_SHOWN} more, see: treenail why"


def _outcome(document: Json) -> Iterator[Line]:
    """What became of it, and what there is to do about that."""
    last, failure = _object(document["lastUpdate"]), _object(document["failure"])
    if last:
        to = _object(last["target"])["config"]
        yield "Last update", f"{last['outcome']} {last['ended']}, to {to}"
    if failure:
        yield "Last error", str(failure["message"])
        yield "What to do", str(failure["remedy"] or "nothing: it is tried again")
    if not _object(document["agent"])["running"]:
        yield (
            "What to do",
            "systemctl start treenail; if it does not stay up: journalctl -u treenail",
        )


def _agent_line(agent: Json) -> str:
    if agent["running"]:
        return f"running, process {agent['pid']}"
    if agent["lastSeen"]:
        return f"is not running; it last wrote its status {agent['lastSeen']}"
    return "has not run since the boot"


def _progress(progress: Json) -> str:
    if not progress:
        return ""
    percent = progress.get("percent")
    shown = "" if percent is None else f"{percent} %, "
    return f" ({shown}{progress.get('text')})"


def _backend(backend: Json) -> Iterator[Line]:
    if backend:
        yield "Managed by", f"{backend['name']}: {backend['why']}"


def _deployments(deployments: Json) -> Iterator[Line]:
    for name in ("booted", "staged", "rollback"):
        yield name.capitalize(), _deployment_line(_object(deployments[name]))


def _retained(retained: Json) -> Iterator[Line]:
    if retained:
        yield "Kept", f"{retained['id']}, {_until(retained)}, or the next update"


def _until(retained: Json) -> str:
    if retained["until"]:
        return f"until {retained['until']}"
    return "until the new one is found healthy"


def _target_line(target: Json) -> str:
    config = str(target.get("config") or "nothing yet")
    return f"{config}\n{'':<13}{target['image']}" if target.get("image") else config


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
