"""First page of a log bundle: what the installation did, where it failed and why. Pure."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from treenail.api.decode import Fields
from treenail.errors import ConfigError

SUMMARY_NAME = "summary.txt"
_LATEST_LOGS = 5


def format_summary(
    state: object,
    status: object,
    pools: tuple[str, ...],
    part_names: tuple[str, ...],
    missing: dict[str, str],
) -> str:
    """Format the summary.

    ``state`` and ``status`` are the documents of `install.json` and `status.json`, None without.
    ``pools`` has a sentence for each pool of the cluster without its image.
    """
    lines = [*_format_steps(state), *_format_status(status)]
    if pools:
        lines += ["", "Pools of the cluster:", *(f"  {each}" for each in pools)]
    lines += ["", *_format_places(part_names)]
    if missing:
        lines += ["", "Missing parts:", *(f"  {name}: {why}" for name, why in missing.items())]
    return "\n".join(lines) + "\n"


def _format_steps(state: object) -> Iterator[str]:
    if state is None:
        yield "No installation has begun in this directory, or its state cannot be read."
        return
    try:
        fields = Fields.from_json(state, "install.json")
        yield f"Installation {fields.get_text('id')}, begun {fields.get_text('began')}"
        steps = list(fields.iter_objects("steps"))
    except ConfigError as error:
        yield f"The state of the installation is damaged: {error}"
        return
    for step in steps:
        try:
            yield f"  {_format_step(step)}"
        except ConfigError as error:
            yield f"  damaged: {error}"


def _format_status(status: object) -> Iterator[str]:
    """Yield the failure, or what the installation does; a step that never began has no record."""
    if status is None:
        return
    yield ""
    try:
        fields = Fields.from_json(status, "status.json")
        failure = fields.get_object("failure")
        reason, remedy = failure.get_text("reason"), failure.get_text("remedy")
        if reason:
            yield f"Step {failure.get_text('step')} failed: {reason}"
            if remedy:
                yield f"  remedy: {remedy}"
            return
        texts = (fields.get_text(name) for name in ("phase", "title", "activity"))
        yield f"State: {', '.join(filter(None, texts))}"
    except ConfigError as error:
        yield f"The status of the installation is damaged: {error}"


def _format_step(step: Fields) -> str:
    name, state = step.get_text("name"), step.get_text("state")
    attempts = step.get_optional_integer("attempts") or 1
    times = " to ".join(filter(None, (step.get_text("began"), step.get_text("ended"))))
    reason = step.get_text("reason")
    because = f": {reason}" if reason else ""
    return f"{state:<8} {name} ({times}; attempt {attempts}){because}"


def _format_places(part_names: tuple[str, ...]) -> Iterator[str]:
    """Name the parts to read first, the last attempts of builds before others."""
    logs = [name for name in part_names if "/logs/" in name]
    if logs:
        yield "Newest logs:"
        yield from (f"  {PurePosixPath(name)}" for name in logs[:_LATEST_LOGS])
    nodes = sorted({name.split("/")[1] for name in part_names if name.startswith("control-plane/")})
    if nodes:
        yield f"Nodes: {', '.join(nodes)}"
