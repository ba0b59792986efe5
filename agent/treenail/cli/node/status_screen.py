"""The status of a node on one screen."""

from collections.abc import Iterator

Json = dict[str, object]
LabelledLine = tuple[str, str]
_MAX_REASONS = 3


def format_status(document: Json) -> str:
    """The status for a person."""
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
        *(("Not known", str(each)) for each in _as_list(document["problems"])),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _format_activity(document: Json) -> Iterator[LabelledLine]:
    """Who is at work, on what, and why."""
    agent, update = _as_object(document["agent"]), _as_object(document["update"])
    yield "Agent", _format_agent(agent)
    state = str(document["state"])
    yield "State", f"{state}, {update['phase']} since {update['entered']}" if update else state
    sentence = str(document["sentence"] or "nothing is known")
    if agent["running"]:
        yield "Doing", f"{sentence}{_format_progress(_as_object(document['progress']))}"
    else:
        yield "Doing", f"nothing; the agent last said: {sentence}"
    reasons = _as_list(update.get("reasons"))
    for reason in reasons[:_MAX_REASONS]:
        yield "Why", str(reason)
    if len(reasons) > _MAX_REASONS:
        yield "", f"and {len(reasons) - _MAX_REASONS} more, see: treenail why"


def _format_outcome(document: Json) -> Iterator[LabelledLine]:
    """What became of it, and what there is to do about that."""
    last, failure = _as_object(document["lastUpdate"]), _as_object(document["failure"])
    if last:
        to = _as_object(last["target"])["config"]
        yield "Last update", f"{last['outcome']} {last['ended']}, to {to}"
    if failure:
        yield "Last error", str(failure["message"])
        yield "What to do", str(failure["remedy"] or "nothing: it is tried again")
    if not _as_object(document["agent"])["running"]:
        yield (
            "What to do",
            "systemctl start treenail; if it does not stay up: journalctl -u treenail",
        )


def _format_agent(agent: Json) -> str:
    if agent["running"]:
        return f"running, process {agent['pid']}"
    if agent["lastSeen"]:
        return f"is not running; it last wrote its status {agent['lastSeen']}"
    return "has not run since the boot"


def _format_progress(progress: Json) -> str:
    if not progress:
        return ""
    percent = progress.get("percent")
    shown = "" if percent is None else f"{percent} %, "
    return f" ({shown}{progress.get('text')})"


def _format_backend(backend: Json) -> Iterator[LabelledLine]:
    if backend:
        yield "Managed by", f"{backend['name']}: {backend['why']}"


def _format_deployments(deployments: Json) -> Iterator[LabelledLine]:
    for name in ("booted", "staged", "rollback"):
        yield name.capitalize(), _format_deployment(_as_object(deployments[name]))


def _format_retained(retained: Json) -> Iterator[LabelledLine]:
    if retained:
        yield "Kept", f"{retained['id']}, {_format_retention_end(retained)}, or the next update"


def _format_retention_end(retained: Json) -> str:
    if retained["until"]:
        return f"until {retained['until']}"
    return "until the new one is found healthy"


def _format_target(target: Json) -> str:
    config = str(target.get("config") or "nothing yet")
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
        return "not asked yet"
    text = f"{'reachable' if api['reachable'] else 'away'} since {api['since']}"
    return f"{text}: {api['problem']}" if api.get("problem") else text


def _as_object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
