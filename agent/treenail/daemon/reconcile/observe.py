"""Adapters to facts: the only place that turns what machines say into what decisions read."""

from dataclasses import replace

from treenail.api import annotations as key
from treenail.api.node import Node
from treenail.daemon.configuration.drift import Booted
from treenail.daemon.reconcile.interfaces import Ports
from treenail.host.ostree.deployments import Deployments
from treenail.update.decision import desired
from treenail.update.decision.decide import looks_at_deployments
from treenail.update.decision.facts import Deployed, Facts, Handshake, NodeSeen
from treenail.update.state.record import Phase, Record, Target

SINGLE_REPLICA = "SingleReplica"


class Observer:
    """Looks at everything a decision may depend on, and asks for nothing it does not need."""

    def __init__(
        self,
        ports: Ports,
        *,
        drains: bool,
        drain_limit_s: float,
        images_bake: bool = True,
        softly: bool = False,
        keep_s: float = 86_400.0,
    ) -> None:
        self._ports = ports
        self._keep_s = keep_s
        self._softly = softly
        self._images_bake = images_bake
        self._drains = drains
        self._drain_limit_s = drain_limit_s
        self._looked = False
        self._packages: frozenset[str] | None = None

    def glance(self, record: Record) -> Facts:
        """The facts that cost no question to the machine's services."""
        node = self._ports.cluster.node()
        now_seen = None if node is None else seen(node)
        unasked = now_seen is not None and isinstance(now_seen.wish, desired.Nothing)
        return Facts(
            record=record,
            boot_id=self._ports.kernel.boot_id(),
            now=self._ports.clock.now(),
            node=now_seen,
            deployed=None,
            introduction=self._ports.predecessor.introduction() if unasked else {},
            request=self._ports.requests.read(),
            images_bake=self._images_bake,
            drains=self._drains and not _single(node),
            drain_limit_s=self._drain_limit_s,
            keep_s=self._keep_s,
            softly=self._softly and self._ports.kernel.soft_reboots() is not None,
        )

    def look(self, record: Record) -> Facts:
        """The facts as of now; raises `HostError` when the machine can't be asked."""
        update = record.update
        unfinished = self._ports.configuration.unfinished(update.id if update else "")
        facts = replace(
            self.glance(record),
            cut_short=unfinished.cut_short,
            held=unfinished.held,
            forced=update is None and self._ports.upkeep.forced(),
        )
        looks = looks_at_deployments(facts, first=not self._looked)
        if looks or update is not None:
            facts = replace(facts, shutting_down=self._ports.power.shutting_down())
        # rpm-ostreed may be stopped before the agent is, and nothing will be decided any more.
        if looks and not facts.shutting_down:
            found = deployed(self._ports.os.look(), self._ports.kernel.command_line())
            facts = replace(facts, deployed=found)
            self._packages = frozenset(found.packages)
        if update is None and not facts.cut_short:
            facts = self._between_updates(facts)
        if update is not None and update.phase is Phase.PROVING and update.boot_id == facts.boot_id:
            facts = replace(facts, trial=self._ports.health.look(update.probation, facts.boot_id))
        # What an update leaves behind is looked at once more.
        self._looked = update is None and (self._looked or looks)
        return facts

    def _between_updates(self, facts: Facts) -> Facts:
        if not facts.record.current.config or facts.forced:
            return facts
        booted = Booted(self._ports.kernel.command_line(), self._packages)
        return replace(facts, drift=self._ports.upkeep.look(facts.record.current, booted))


def seen(node: Node) -> NodeSeen:
    """The Node, reduced to what decisions read."""
    notes = node.annotations
    asked = desired.read(notes)
    spellings = asked.spellings if isinstance(asked, desired.Wish) else tuple(key.IMAGE_SPELLINGS)
    claims = (notes.get(key.IMAGE_SPELLINGS[each], "") for each in spellings)
    return NodeSeen(
        wish=asked,
        handshake=Handshake(
            asked=notes.get(key.DESIRED_DRAIN, ""),
            applied=notes.get(key.LAST_APPLIED_DRAIN, ""),
            unschedulable=node.unschedulable,
        ),
        claimed=Target(notes.get(key.CURRENT_CONFIG, ""), next(filter(None, claims), "")),
        ahead=desired.ahead(notes),
    )


def deployed(deployments: Deployments, arguments: tuple[str, ...]) -> Deployed:
    """The deployments, and the booted kernel arguments, reduced to what decisions read."""
    booted, staged, pending = deployments.booted, deployments.staged, deployments.pending
    return Deployed(
        booted=booted.digest if booted else "",
        booted_id=booted.id if booted else "",
        booted_pinned=booted.pinned if booted else False,
        staged=staged.digest if staged else "",
        staged_id=staged.id if staged else "",
        locked=staged.locked if staged else False,
        arguments=arguments,
        packages=booted.packages if booted else (),
        removed=booted.removed if booted else (),
        booted_config=booted.labels.get(key.BAKED_CONFIG_LABEL, "") if booted else "",
        staged_config=staged.labels.get(key.BAKED_CONFIG_LABEL, "") if staged else "",
        others=tuple(each.id for each in deployments.all if not (each.booted or each.staged)),
        pending_id=pending.id if pending else "",
    )


def _single(node: Node | None) -> bool:
    """A cluster of one node has nowhere to drain to; the reference skips the drain there too."""
    return node is not None and node.annotations.get(key.CONTROL_PLANE_TOPOLOGY) == SINGLE_REPLICA
