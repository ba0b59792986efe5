"""The table of pools and nodes for users who watch a rollout, for a terminal of any width."""

import re
from collections.abc import Iterator, Sequence

from treenail.cli.terminal import wrap_text
from treenail.controllers.plan.status_table import NodeRow, PoolRow
from treenail.escape import escape_line

MAX_IDLE_NODES = 5
"""Maximum number of idle nodes listed for a pool; the others are only counted."""

_BAR_WIDTH = 10
# Percent of an update at which each phase begins.
_PHASE_PERCENT = {
    "staging": 10,
    "draining": 40,
    "applying": 60,
    "rebooting": 75,
    "uncordoning": 90,
    "updated": 100,
}
_PHASE_WIDTH = max(map(len, _PHASE_PERCENT))
_POSITION_WIDTH = 17
_MIN_NAME = 16
_RENDERED = re.compile(r"rendered-.*-([0-9a-f]{8})[0-9a-f]{24}")


def format_table(found: Sequence[PoolRow], width: int | None = None) -> Iterator[str]:
    """Yield the lines of the table, of at most ``width`` columns; None wraps nothing."""
    if not found:
        yield "no MachineConfigPools found"
    for index, row in enumerate(found):
        if index:
            yield ""
        yield from _format_pool(row, width)


def _format_pool(row: PoolRow, width: int | None) -> Iterator[str]:
    counts = row.counts
    heading = (
        f"{escape_line(row.name)}: {_format_state(row)}, {counts['updated']} of {counts['total']} "
        f"nodes updated, {counts['unavailable']} unavailable, {counts['degraded']} degraded"
    )
    yield from wrap_text(heading, width, hanging="  ")
    yield from wrap_text(row.config or "no rendered config yet", width, indent="  ")
    if row.message:
        yield from wrap_text(row.message, width, indent="  ")
    yield from _format_nodes(row.nodes, width)


def _format_nodes(nodes: Sequence[NodeRow], width: int | None) -> Iterator[str]:
    if not nodes:
        yield "  no nodes"
        return
    states = max(len(text) for text in [*(escape_line(node.state) for node in nodes), "STATE"])
    update_width = _BAR_WIDTH + 1 + _PHASE_WIDTH
    names = [escape_line(node.name) for node in nodes]
    if width is not None:
        others = states + len("OUT") + update_width + _POSITION_WIDTH + 10
        names = _shorten_names(names, max(_MIN_NAME, width - others))
    columns = max(map(len, [*names, "NODE"]))
    yield _fit(
        f"  {'NODE':<{columns}}  {'STATE':<{states}}  {'OUT':<3}  {'UPDATE':<{update_width}}  AT",
        width,
    )
    idle_count = 0
    for name, node in zip(names, nodes, strict=True):
        idle_count += node.is_idle
        if node.is_idle and idle_count > MAX_IDLE_NODES:
            continue
        update = f"{_format_bar(node)} {node.phase}"
        line = (
            f"  {name:<{columns}}  {escape_line(node.state) or '-':<{states}}  "
            f"{'' if node.is_in_service else 'yes':<3}  {update:<{update_width}}  "
            f"{_format_position(node, is_short=width is not None)}"
        )
        yield _fit(line, width)
        if node.reason:
            yield from wrap_text(node.reason, width, indent="    ")
    if idle_count > MAX_IDLE_NODES:
        yield f"  and {idle_count - MAX_IDLE_NODES} more idle nodes"


def _format_state(row: PoolRow) -> str:
    if row.degraded_status == "True":
        return "Degraded"
    if row.stalled_status == "True":
        return "Stalled"
    if row.updating_status == "True":
        return "Updating"
    return "Updated" if row.updated_status == "True" else "no status yet"


def _format_bar(node: NodeRow) -> str:
    full = _PHASE_PERCENT.get(node.phase, 0) * _BAR_WIDTH // 100
    return "█" * full + "░" * (_BAR_WIDTH - full)


def _format_position(node: NodeRow, *, is_short: bool) -> str:
    """Format the current target, the desired one if it differs, and a pre-staged image.

    The heading of the pool names the desired config, so that a short text omits it.
    """
    current = node.current or "-"
    arrow = "" if node.desired == node.current else f" -> {node.desired or '-'}"
    if is_short:
        current, arrow = _shorten_target(current), ""
    prestage = f" (pre-{node.prestage})" if node.prestage else ""
    return escape_line(f"{current}{arrow}{prestage}")


def _shorten_target(target: str) -> str:
    """Shorten a rendered config to 8 digits of its hash, and an image to 8 of its digest."""
    config, _, image = target.partition(" ")
    found = _RENDERED.fullmatch(config)
    config = found[1] if found else config
    return f"{config}/{image[:8]}" if image else config


def _shorten_names(names: Sequence[str], limit: int) -> list[str]:
    """Shorten names that do not fit: first without their domain, if all have the same one."""
    if max(map(len, names)) <= limit:
        return [*names]
    domains = {name.partition(".")[2] for name in names}
    if len(domains) == 1:
        names = [name.partition(".")[0] for name in names]
    half = (limit - 1) // 2
    return [name if len(name) <= limit else f"{name[:half]}…{name[-half:]}" for name in names]


def _fit(line: str, width: int | None) -> str:
    line = line.rstrip()
    return line if width is None or len(line) <= width else f"{line[: width - 1]}…"
