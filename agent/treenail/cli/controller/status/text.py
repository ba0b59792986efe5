"""The table of pools and nodes for users who watch a rollout, for a terminal of any width.

Its lines have styles, which a terminal or a picture shows.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from treenail.cli import terminal
from treenail.controllers.pools import holders, image_tags, node_facts
from treenail.controllers.status import leader_status, status_table
from treenail.sanitize import escape_line

StyledSpan = tuple[str, str]
"""A text and its style: ``good``, ``busy``, ``bad``, ``strong``, ``faint`` or empty."""

RICH_STYLES = {
    "good": "green",
    "busy": "yellow",
    "bad": "bold red",
    "strong": "bold",
    "faint": "dim",
}
"""Styles as the package rich names them."""


@dataclass(frozen=True, slots=True)
class StyledLine:
    """One line; its text has no control characters."""

    spans: tuple[StyledSpan, ...] = ()

    @classmethod
    def plain_text(cls, text: str) -> "StyledLine":
        """Return a line without styles."""
        return cls(((text, ""),))

    def __str__(self) -> str:
        return "".join(text for text, _ in self.spans).rstrip()

    def cut(self, width: int | None) -> "StyledLine":
        """Return the line with at most ``width`` columns; an ellipsis shows that it is longer."""
        if width is None or terminal.measure_text(str(self)) <= width:
            return self
        spans, left = [], width - 1
        for text, style in self.spans:
            part = terminal.cut_text(text, left)
            spans.append((part, style))
            # Nothing follows a part: a character of two columns may leave one column free.
            left = left - terminal.measure_text(part) if part == text else 0
        return StyledLine((*spans, ("…", "")))


def style_text(text: str, style: str) -> StyledSpan:
    """Return a span."""
    return text, style


MAX_IDLE_NODES = 10
"""Maximum number of idle nodes listed for a pool; the others are only counted."""

_BAR_WIDTH, _NARROW_BAR_WIDTH = 12, 6
_NARROW = 100
"""Fewer columns than this leave less room for the bars, and none for the config of a node."""
_MIN_NAME = 16
_MAX_BOOTED = 18
_OUTAGE_WIDTH = 9
_RENDERED = re.compile(r"rendered-.*-([0-9a-f]{8})[0-9a-f]{24}")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.~+-]*")
_STATE_STYLES = {
    "Done": "good",
    "Updated": "good",
    "Working": "busy",
    "Updating": "busy",
    "Paused": "busy",
    "Degraded": "bad",
    "Unreconcilable": "bad",
    "Halted": "bad",
    "Stalled": "bad",
}
_BUILD_STYLES = {
    "Succeeded": "faint",
    "Failed": "bad",
    "Interrupted": "bad",
    status_table.REJECTED: "bad",
}
_PHASE_STYLES = {"updated": "good", "failed": "bad", "waiting": "", status_table.CONFLICT: "bad"}
_REASON_STYLES = {"failed": "bad", status_table.CONFLICT: "bad"}


def format_table(
    rows: Sequence[status_table.PoolRow],
    width: int | None = None,
    *,
    is_wide: bool = False,
    max_lines: int | None = None,
) -> Iterator[StyledLine]:
    """Yield the lines of the table, of at most ``width`` columns; None wraps nothing.

    ``max_lines`` leaves out idle nodes first, so that as many lines as possible fit.
    """
    lines: list[StyledLine] = []
    for limit in (MAX_IDLE_NODES, 5, 2, 0):
        lines = [*_format_pools(rows, width, is_wide=is_wide, max_idle=limit)]
        if max_lines is None or len(lines) <= max_lines:
            break
    yield from lines


def format_leader(leader: leader_status.LeaderReport, width: int | None) -> Iterator[StyledLine]:
    """Yield why what pools report may be outdated, and what helps; nothing while one leads."""
    style = "bad" if leader.state is leader_status.LeaderState.NONE else "busy"
    if leader.message:
        yield from _wrap_lines(leader.message, width, "", style)
        yield from _wrap_lines(leader.remedy, width, "  ", "")


def format_summary(row: status_table.PoolRow) -> str:
    """Format state, counts and estimate of a pool in one sentence, without its name."""
    counts = row.counts
    state = f"{row.state}, last reported {row.reported_state}" if row.reported_state else row.state
    if counts is None:
        return f"{state}, number of updated nodes unknown"
    parts = [f"{state}, {counts.updated} of {counts.total} nodes updated"]
    if counts.unavailable:
        parts.append(f"{counts.unavailable} unavailable")
    if counts.degraded:
        parts.append(f"{counts.degraded} degraded")
    if row.remaining_s is not None and counts.updated < counts.total:
        parts.append(f"about {format_rough_duration(row.remaining_s)} left")
    return ", ".join(parts)


def format_build(build: status_table.BuildRow) -> str:
    """Format state, duration and message of an image build in one sentence."""
    text = f"image build: {build.state}"
    if build.seconds is not None:
        text += f", {terminal.format_duration(build.seconds)}"
    return escape_line(f"{text}: {build.message}" if build.message else text)


def format_blocker(blocker: status_table.RolloutBlocker) -> str:
    """Format who or what blocks, in one sentence."""
    lead = "waiting" if blocker.kind in holders.WAIT_REASONS else f"blocked ({blocker.kind})"
    return f"{lead}: {blocker.message}"


def format_version(os_image: str) -> str:
    """Return the version in the name of an operating system, or the name if it has none."""
    match = _VERSION.search(os_image)
    return match[0] if match else os_image


def format_rough_duration(seconds: float) -> str:
    """Format an estimate, in steps that do not change at every look."""
    if seconds < 60:
        return f"{max(5, round(seconds / 5) * 5)} s"
    return terminal.format_duration(round(seconds / 60) * 60)


def shorten_target(target: node_facts.RolloutTarget) -> str:
    """Shorten a rendered config to 8 digits of its hash, and an image to 8 of its digest."""
    match = _RENDERED.fullmatch(target.config)
    config = match[1] if match else target.config or "-"
    _, _, digest = (target.image or "").partition("@sha256:")
    image = digest[:8] or target.image
    return escape_line(f"{config}/{image}" if image else config)


def _format_pools(
    rows: Sequence[status_table.PoolRow], width: int | None, *, is_wide: bool, max_idle: int
) -> Iterator[StyledLine]:
    if not rows:
        yield StyledLine.plain_text("no MachineConfigPools found")
    for index, row in enumerate(rows):
        if index:
            yield StyledLine()
        yield from _format_pool(row, width)
        yield from _format_nodes(row, width, is_wide=is_wide, max_idle=max_idle)


def _format_pool(row: status_table.PoolRow, width: int | None) -> Iterator[StyledLine]:
    name = escape_line(row.name)
    heading = [*terminal.wrap_text(f"{name}: {format_summary(row)}", width, hanging="  ")]
    style = _STATE_STYLES.get(row.state, "")
    lead = f"{name}: "
    if heading[0].startswith(f"{lead}{row.state}"):
        rest = heading.pop(0)[len(lead) + len(row.state) :]
        yield StyledLine((style_text(lead, "strong"), style_text(row.state, style), (rest, "")))
    yield from map(StyledLine.plain_text, heading)
    target = shorten_target(row.target) if width is not None else _format_target(row.target)
    wave = f", wave {min(row.wave, row.waves)} of {row.waves}" if row.wave and row.waves > 1 else ""
    stream = f", OS image stream {row.image_stream}" if row.image_stream else ""
    text = f"to {target}{wave}{stream}" if row.target.config else "no rendered config yet"
    yield from _wrap_lines(escape_line(text), width, "  ", "faint")
    own = [blocker for blocker in row.blockers if not blocker.node or blocker.kind == "halted"]
    if (build := row.build) is not None:
        # A failed build blocks the pool with the same message.
        if any(build.message in blocker.message for blocker in own):
            build = replace(build, message="")
        yield from _wrap_lines(
            format_build(build), width, "  ", _BUILD_STYLES.get(build.state, "busy")
        )
    tag = row.conditions.get(image_tags.TAG_RESOLVED)
    is_known = tag is not None and any(tag.message in blocker.message for blocker in own)
    # A pool without any image is blocked with the same message.
    if tag is not None and tag.status == "False" and not is_known:
        text = f"image tag not followed ({tag.reason}): {tag.message}"
        yield from _wrap_lines(escape_line(text), width, "  ", "bad")
    for blocker in own:
        is_wait = blocker.kind in holders.WAIT_REASONS
        yield from _wrap_lines(format_blocker(blocker), width, "  ", "busy" if is_wait else "bad")
    if not own and row.state == "Unknown" and row.message and not row.reported_state:
        yield from _wrap_lines(row.message, width, "  ", "")


def _format_nodes(
    row: status_table.PoolRow, width: int | None, *, is_wide: bool, max_idle: int
) -> Iterator[StyledLine]:
    nodes: Sequence[status_table.NodeRow] = row.nodes
    if not nodes:
        yield StyledLine.plain_text("  no nodes")
        return
    if len(nodes) > max_idle:
        # The rows of a small pool keep their places.
        nodes = sorted(nodes, key=lambda node: node.is_idle)
    columns = _Columns(row, width, is_wide=is_wide)
    yield columns.format_heading()
    idle = [node for node in nodes if node.is_idle]
    hidden = {node.name for node in idle[max_idle:]} if len(nodes) > max_idle else set()
    for node in nodes:
        if node.name in hidden:
            continue
        yield columns.format_node(node)
        if node.reason and not _is_reason_in_heading(row, node):
            yield from _wrap_lines(
                node.reason, width, "    ", _REASON_STYLES.get(node.phase, "busy")
            )
    if hidden:
        updated = sum(node.phase == "updated" for node in idle[max_idle:])
        yield StyledLine(
            (
                style_text(
                    f"  and {len(hidden)} more idle nodes, {updated} of them updated", "faint"
                ),
            )
        )


def _is_reason_in_heading(row: status_table.PoolRow, node: status_table.NodeRow) -> bool:
    """Return whether the lines above the table have the reason of this node."""
    return any(
        node.reason in blocker.message
        and (
            node.phase == status_table.CONFLICT
            or (blocker.kind == "halted" and blocker.node == node.name)
        )
        for blocker in row.blockers
    )


class _Columns:
    """The columns of one pool: their widths depend on its nodes and on the terminal."""

    def __init__(self, row: status_table.PoolRow, width: int | None, *, is_wide: bool) -> None:
        self._width = width
        self._is_wide = is_wide
        is_narrow = width is not None and width < _NARROW
        self._has_target = not is_narrow
        self._bar = _NARROW_BAR_WIDTH if is_narrow else _BAR_WIDTH
        states = [escape_line(node.state) for node in row.nodes]
        self._states = max(map(terminal.measure_text, [*states, "STATE"]))
        booted = [terminal.measure_text(_format_booted(node)) for node in row.nodes]
        self._booted = min(max([*booted, len("BOOTED")]), _MAX_BOOTED)
        self._progress = self._bar + len(" 100% ") + status_table.PHASE_WIDTH
        others = self._states + self._booted + self._progress + _OUTAGE_WIDTH + 10
        others += 20 if self._has_target else 0
        names = [escape_line(node.name) for node in row.nodes]
        if width is not None:
            names = _shorten_names(names, max(_MIN_NAME, width - others))
        self._names = dict(zip((node.name for node in row.nodes), names, strict=True))
        self._name = max(map(terminal.measure_text, [*names, "NODE"]))

    def format_heading(self) -> StyledLine:
        text = (
            f"  {'NODE':<{self._name}}  {'STATE':<{self._states}}  {'BOOTED':<{self._booted}}  "
            f"{'PROGRESS':<{self._progress}}  {'OUT':>{_OUTAGE_WIDTH}}"
        )
        text += "  AT" if self._has_target else ""
        return StyledLine((style_text(text, "faint"),)).cut(self._width)

    def format_node(self, node: status_table.NodeRow) -> StyledLine:
        state = escape_line(node.state) or "-"
        style = _PHASE_STYLES.get(node.phase, "busy")
        full = node.percent * self._bar // 100
        percent = f" {node.percent:>3}% "
        booted = _format_booted(node)
        parts = [
            (f"  {terminal.pad_text(self._names[node.name], self._name)}  ", ""),
            style_text(state, _STATE_STYLES.get(node.state, "")),
            (" " * (self._states - terminal.measure_text(state) + 2), ""),
            (
                f"{terminal.pad_text(terminal.shorten_text(booted, self._booted), self._booted)}  ",
                "",
            ),
            style_text("█" * full, style),
            style_text("░" * (self._bar - full), "faint"),
            (f"{percent}{node.phase:<{status_table.PHASE_WIDTH}}  ", ""),
            style_text(
                f"{_format_outage(node):>{_OUTAGE_WIDTH}}", "" if node.is_in_service else "busy"
            ),
        ]
        if self._has_target:
            parts.append((f"  {self._format_position(node)}", ""))
        return StyledLine(tuple(parts)).cut(self._width)

    def _format_position(self, node: status_table.NodeRow) -> str:
        prestage = f" (pre-{node.prestage})" if node.prestage else ""
        if self._width is not None and not self._is_wide:
            return f"{shorten_target(node.current)}{prestage}"
        arrow = "" if node.desired == node.current else f" -> {_format_target(node.desired)}"
        return escape_line(f"{_format_target(node.current)}{arrow}{prestage}")


def _format_target(target: node_facts.RolloutTarget) -> str:
    """Format the config and the first 12 digits of the image digest."""
    if not target.image:
        return target.config or "-"
    _, _, digest = target.image.partition("@sha256:")
    return f"{target.config} {digest[:12] or target.image}"


def _format_booted(node: status_table.NodeRow) -> str:
    return escape_line(format_version(node.os_image)) or "-"


def _format_outage(node: status_table.NodeRow) -> str:
    if node.out_of_service_s is None:
        return "" if node.is_in_service else "out"
    return terminal.format_duration(node.out_of_service_s).replace(" min", "m").replace(" s", "s")


def _shorten_names(names: Sequence[str], limit: int) -> list[str]:
    """Shorten names that do not fit: first without their domain, if all have the same one."""
    if max(map(terminal.measure_text, names)) <= limit:
        return [*names]
    domains = {name.partition(".")[2] for name in names}
    if len(domains) == 1:
        names = [name.partition(".")[0] for name in names]
    return [terminal.shorten_middle(name, limit) for name in names]


def _wrap_lines(text: str, width: int | None, indent: str, style: str) -> Iterator[StyledLine]:
    for line in terminal.wrap_text(escape_line(text.replace("\n", " ")), width, indent=indent):
        yield StyledLine((style_text(line, style),))
