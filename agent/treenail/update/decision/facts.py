"""Everything a decision may depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.update.checks.health import Trial
from treenail.update.decision.desired import Nothing, Unusable, Wish
from treenail.update.decision.request import Request
from treenail.update.drift.drift_policy import Drifted
from treenail.update.impact.os_change import Running
from treenail.update.state.record import Record, Target


@dataclass(frozen=True, slots=True)
class Handshake:
    """The drain handshake as the Node shows it.

    The agent writes ``desiredDrain`` (``drain-…`` or ``uncordon-…``); the drain controller copies
    it to ``lastAppliedDrain`` when it is so.
    """

    asked: str = ""
    applied: str = ""
    unschedulable: bool = False

    @property
    def settled(self) -> bool:
        """Nothing is asked that has not been applied."""
        return self.asked == self.applied

    @property
    def drain_asked(self) -> bool:
        return self.asked.startswith("drain-")

    def drained_for(self, token: str) -> bool:
        """The drain that ``token`` asks for is complete, and the node is still out of service."""
        return bool(token) and self.asked == self.applied == token and self.unschedulable


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """What the agent needs of its Node."""

    wish: Wish | Unusable | Nothing
    handshake: Handshake
    claimed: Target
    """What the Node's annotations say is current; believed only where there is no ledger."""
    ahead: Target | None = None
    """What is to be at hand before the node is asked to move to it."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """The deployments, reduced to what decides; digests are empty where there are none."""

    booted: str
    staged: str = ""
    staged_id: str = ""
    """Names the staged deployment for people; not empty whenever something is staged."""
    locked: bool = False
    arguments: tuple[str, ...] = ()
    """The kernel arguments that are booted."""
    packages: tuple[str, ...] = ()
    """Those asked for beside the image of the booted deployment."""
    removed: tuple[str, ...] = ()
    """Those of its image that are left out."""
    booted_config: str = ""
    """The config that the booted image says it was built from; empty if it says nothing."""
    staged_config: str = ""
    """The same of the staged one."""

    booted_id: str = ""
    booted_pinned: bool = False
    """Nobody can drop the booted one, as long as that is so."""
    others: tuple[str, ...] = ()
    """The deployments that are neither booted nor staged, by id."""
    pending_id: str = ""
    """The deployment that boots next in place of the booted one, staged or not."""

    @property
    def running(self) -> Running:
        """What is booted."""
        return Running(self.booted, self.arguments, self.packages, self.removed)


@dataclass(frozen=True, slots=True)
class Facts:
    """One look at the node, its machine and its ledger."""

    record: Record
    boot_id: str
    now: float
    """Seconds since the epoch."""
    node: NodeSeen | None
    """None until the Node was seen since the process started."""
    deployed: Deployed | None
    """None when nothing asks for a look at the deployments."""
    shutting_down: bool = False
    introduction: Mapping[str, str] = field(default_factory=dict)
    """The annotations that a Node without a config is to begin with; empty when none are known."""
    request: Request | None = None
    """What a person on this machine asks for."""
    cut_short: bool = False
    """A change of files was cut short, and is neither put back nor cleaned up after."""
    held: bool = False
    """The update has changed files, which it can still put back."""
    images_bake: bool = True
    """In image mode files and units are the image's."""
    trial: Trial | None = None
    """What the checks of a boot on trial found; None when nothing is on trial."""
    api_answers: bool = False
    """The API server answered a moment ago; only looked at before a reboot."""
    drains: bool = True
    """The node is drained before it reboots."""
    softly: bool = False
    """A reboot may keep the kernel: the owner allows it, and systemd counts such reboots."""
    drain_limit_s: float = 3600.0
    keep_s: float = 86_400.0
    """How long the previous deployment is kept once what took its place is healthy."""
    drift: Drifted = field(default_factory=lambda: Drifted(looked=False))
    """What is not as the current config says; looked for between updates only."""
    forced: bool = False
    """Somebody asks for the config to be applied whatever the machine is like."""
