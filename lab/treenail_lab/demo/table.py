"""The picture of a rollout: one line a node, as text for a terminal."""

from dataclasses import asdict, dataclass

Json = dict[str, object]
_BAR = 20
# How far along an update is when each phase begins; staging fills the gap by its own percentage.
_STEPS = {"staging": 0, "draining": 60, "rebooting": 75, "resuming": 90, "releasing": 0}


@dataclass(frozen=True, slots=True)
class NodeView:
    """What there is to see of one node."""

    name: str
    state: str
    phase: str
    """Empty when no update is under way."""
    percent: int | None
    """Of the transaction that runs."""
    version: str
    """Of the booted image; empty while the machine is down."""
    is_updated: bool
    evicted_pods: int
    out_of_service_s: float
    reason: str = ""

    def to_json(self) -> Json:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PoolView:
    """What there is to see of the pool."""

    name: str
    summary: str = ""
    is_stalled: bool = False
    """It does not go on before a person has done something."""


def format_table(nodes: list[NodeView], pool: PoolView, *, title: str, seconds: float) -> list[str]:
    """The picture, without colours."""
    head = f"{title:<94} {int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
    columns = (
        f"  {'NODE':<10} {'STATE':<9} {'BOOTED':<12} {'UPDATE':<37} {'EVICTED':>7}  OUT OF SERVICE"
    )
    found = [head, f"  pool {pool.name}: {pool.summary}", columns]
    for node in nodes:
        found.append(_format_node(node))
        if node.reason:
            found.append(f"    {node.reason}")
    return found


def _format_node(node: NodeView) -> str:
    out = f"{node.out_of_service_s:.1f} s" if node.out_of_service_s else "-"
    return (
        f"  {node.name:<10} {node.state:<9} {node.version or '(down)':<12} "
        f"{_format_bar(_compute_percent(node))} {_describe_phase(node):<16} {node.evicted_pods:>7}  {out:>14}"
    )


def _compute_percent(node: NodeView) -> int:
    if node.is_updated and not node.phase:
        return 100
    if node.phase == "staging":
        return (node.percent or 0) * _STEPS["draining"] // 100
    return _STEPS.get(node.phase, 0)


def _describe_phase(node: NodeView) -> str:
    if not node.phase:
        return "done" if node.is_updated else "waiting"
    if node.phase == "staging" and node.percent is not None:
        return f"staging {node.percent} %"
    return node.phase


def _format_bar(percent: int) -> str:
    full = percent * _BAR // 100
    return "█" * full + "░" * (_BAR - full)
