"""The table of a rollout: one line for each node, as text for a terminal."""

from dataclasses import dataclass

from treenail.update.state.phases import Phase

Json = dict[str, object]
_BAR_WIDTH = 20
# Percent of an update at which each phase begins; staging fills the gap by its own percentage.
_PHASE_PERCENT = {
    Phase.STAGING: 0,
    Phase.DRAINING: 60,
    Phase.APPLYING: 70,
    Phase.REBOOTING: 75,
    Phase.VERIFYING: 85,
    Phase.UNCORDONING: 90,
}


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as the table shows it."""

    name: str
    state: str
    phase: str
    """Empty when no update is in progress."""
    percent: int | None
    """Of the transaction that runs."""
    version: str
    """Of the booted image; empty while the machine is down."""
    is_updated: bool
    evicted_pods: int
    out_of_service_s: float
    reason: str = ""

    @property
    def is_settled(self) -> bool:
        """Return whether a table that does not fit may leave the node out."""
        return not (self.phase or self.reason or not self.version)

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "state": self.state,
            "phase": self.phase,
            "percent": self.percent,
            "version": self.version,
            "updated": self.is_updated,
            "evictedPods": self.evicted_pods,
            "outOfServiceSeconds": round(self.out_of_service_s, 3),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool as the table shows it."""

    name: str
    summary: str = ""
    is_stalled: bool = False
    """The rollout continues only after a user has acted."""


def format_table(
    nodes: list[NodeView], pool: PoolView, *, title: str, seconds: float, max_lines: int = 0
) -> list[str]:
    """Return the table without colours; at most ``max_lines`` lines unless that is 0.

    When the nodes do not fit, those in progress and those with a reason come first, and a last
    line counts the others.
    """
    minutes, rest = divmod(int(seconds), 60)
    columns = (
        f"  {'NODE':<10} {'STATE':<9} {'BOOTED':<12} {'UPDATE':<37} {'EVICTED':>7}  OUT OF SERVICE"
    )
    head = [f"{title:<94} {minutes:02d}:{rest:02d}", f"  pool {pool.name}: {pool.summary}", columns]
    blocks = [_format_node(node) for node in nodes]
    if not max_lines or len(head) + sum(map(len, blocks)) <= max_lines:
        return _escape_lines([*head, *(line for block in blocks for line in block)])
    return _escape_lines([*head, *_select_lines(nodes, max_lines - len(head))])[:max_lines]


def _select_lines(nodes: list[NodeView], max_lines: int) -> list[str]:
    """Return the lines of the nodes that fit, in their order, and a line for the others."""
    shown: set[str] = set()
    free = max_lines - 1
    for node in sorted(nodes, key=lambda node: node.is_settled):
        needed = len(_format_node(node))
        if needed <= free:
            shown.add(node.name)
            free -= needed
    lines = [line for node in nodes if node.name in shown for line in _format_node(node)]
    hidden = [node for node in nodes if node.name not in shown]
    updated = sum(node.is_updated for node in hidden)
    return [*lines, f"  and {len(hidden)} more nodes, {updated} of them updated"]


def _format_node(node: NodeView) -> list[str]:
    outage = f"{node.out_of_service_s:.1f} s" if node.out_of_service_s else "-"
    update = f"{_format_bar(_compute_percent(node))} {_describe_phase(node):<16}"
    line = (
        f"  {node.name:<10} {node.state:<9} {node.version or '(down)':<12} "
        f"{update} {node.evicted_pods:>7}  {outage:>14}"
    )
    return [line, f"    {node.reason}"] if node.reason else [line]


def _compute_percent(node: NodeView) -> int:
    if node.is_updated and not node.phase:
        return 100
    if node.phase == Phase.STAGING:
        return (node.percent or 0) * _PHASE_PERCENT[Phase.DRAINING] // 100
    return {str(phase): percent for phase, percent in _PHASE_PERCENT.items()}.get(node.phase, 0)


def _describe_phase(node: NodeView) -> str:
    if not node.phase:
        return "done" if node.is_updated else "waiting"
    if node.phase == Phase.STAGING and node.percent is not None:
        return f"{node.phase} {node.percent} %"
    return node.phase


def _format_bar(percent: int) -> str:
    full = percent * _BAR_WIDTH // 100
    return "█" * full + "░" * (_BAR_WIDTH - full)


def _escape_lines(lines: list[str]) -> list[str]:
    """Replace what is not printable: a reason comes from an annotation that others may write."""
    return ["".join(c if c.isprintable() else "?" for c in line) for line in lines]
