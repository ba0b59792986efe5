"""Which pools a node belongs to, by the rules of the Machine Config Operator."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from treenail.api.machineconfigpool import MASTER, WORKER, MachineConfigPool
from treenail.errors import ConfigError

OS_LABEL = "kubernetes.io/os"


@dataclass(frozen=True, slots=True)
class Membership:
    """The pools of one node, by name."""

    primary: str
    """The pool whose configuration the node gets."""
    secondary: str | None = None
    """The worker pool beside a custom one: it is looked at again when the node changes."""
    ignored: str | None = None
    """A custom pool that matched, but lost against the master pool: worth an alert."""

    @property
    def pools(self) -> tuple[str, ...]:
        return (self.primary,) if self.secondary is None else (self.primary, self.secondary)


def find_membership(
    node: str, labels: Mapping[str, str], pools: Iterable[MachineConfigPool]
) -> Membership | None:
    """The pools of the node, None when no pool selects it.

    A master is never a member of another pool, a custom pool (any but master and worker) is
    preferred to worker, Windows nodes belong nowhere. Raises `ConfigError` for a node that two
    custom pools select: no order among them would be right.
    """
    if labels.get(OS_LABEL) == "windows":
        return None
    names = sorted(pool.name for pool in pools if _is_selected_by(pool, labels))
    custom = [name for name in names if name not in (MASTER, WORKER)]
    if len(custom) > 1:
        raise ConfigError(
            f"node {node} is selected by {len(custom)} custom pools: {', '.join(custom)}",
            remedy="change the labels of the node or the nodeSelector of a pool, so that only one "
            "custom pool selects it; until then the node keeps the configuration it has",
        )
    worker = WORKER if WORKER in names else None
    if custom:
        if MASTER in names:
            return Membership(MASTER, worker, ignored=custom[0])
        return Membership(custom[0], worker)
    if MASTER in names:
        return Membership(MASTER)
    return Membership(WORKER) if worker else None


def _is_selected_by(pool: MachineConfigPool, labels: Mapping[str, str]) -> bool:
    # A selector without requirements would select every node; for nodes it selects none.
    selector = pool.node_selector
    return selector is not None and not selector.is_empty and selector.matches(labels)
