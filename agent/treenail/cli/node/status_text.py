"""The status of a node for users, from the document that ``treenail status`` collects."""

from collections.abc import Iterator

from treenail.cli.terminal import format_labelled

Json = dict[str, object]
LabelledLine = tuple[str, str]

_MAX_REASONS = 3
_UNKNOWN = "unknown"


def format_status(document: Json, width: int | None = None) -> str:
    """Format the status document, wrapped to the width of a terminal; None wraps nothing."""
    unknown = frozenset(map(str, as_list(document.get("unknown"))))
    rows = [
        ("Node", str(document["node"] or _UNKNOWN)),
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
    return "\n".join(line for label, text in rows for line in format_labelled(label, text, width))


def as_object(value: object) -> Json:
    """Return the object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[object]:
    """Return the list, or an empty one for anything else."""
    return value if isinstance(value, list) else []


def _format_list(label: str, values: object, *, is_unknown: bool) -> Iterator[LabelledLine]:
    if is_unknown:
        yield label, _UNKNOWN
    yield from ((label, str(each)) for each in as_list(values))


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


def _format_api_server(api: Json) -> str:
    if not api:
        return "no request yet"
    # Another version of the agent may have written other keys.
    text = f"{'reachable' if api.get('reachable') else 'unreachable'} since {api.get('since')}"
    return f"{text}: {api['problem']}" if api.get("problem") else text
