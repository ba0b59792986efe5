"""Everything a decision may depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.update.checks.health import BootTrialStatus
from treenail.update.decision.desired import DesiredTarget, InvalidTarget, NoTarget
from treenail.update.decision.request import UserRequest
from treenail.update.drift.drift_policy import DriftAssessment
from treenail.update.impact.os_change import RunningOS
from treenail.update.state.record import LedgerRecord, Target


@dataclass(frozen=True, slots=True)
class DrainHandshake:
    """The drain handshake as the Node shows it.

    The agent writes ``desiredDrain`` (``drain-…`` or ``uncordon-…``); the drain controller copies
    it to ``lastAppliedDrain`` when it is so.
    """

    requested: str = ""
    applied: str = ""
    is_unschedulable: bool = False

    @property
    def is_settled(self) -> bool:
        """Nothing is asked that has not been applied."""
        return self.requested == self.applied

    @property
    def is_drain_requested(self) -> bool:
        return self.requested.startswith("drain-")

    def is_drained_for(self, token: str) -> bool:
        """The drain that ``token`` asks for is complete, and the node is still out of service."""
        return bool(token) and self.requested == self.applied == token and self.is_unschedulable


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """What the agent needs of its Node."""

    desired: DesiredTarget | InvalidTarget | NoTarget
    handshake: DrainHandshake
    claimed: Target
    """What the Node's annotations say is current; believed only where there is no ledger."""
    prestage: Target | None = None
    """What is to be at hand before the node is asked to move to it."""


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """The deployments, reduced to what decides; digests are empty where there are none."""

    booted_digest: str
    staged_digest: str = ""
    staged_id: str = ""
    """Names the staged deployment for people; not empty whenever something is staged."""
    is_locked: bool = False
    kernel_arguments: tuple[str, ...] = ()
    """The kernel arguments that are booted."""
    packages: tuple[str, ...] = ()
    """Those asked for beside the image of the booted deployment."""
    removed_packages: tuple[str, ...] = ()
    """Those of its image that are left out."""
    booted_config: str = ""
    """The config that the booted image says it was built from; empty if it says nothing."""
    staged_config: str = ""
    """The same of the staged one."""

    booted_id: str = ""
    is_booted_pinned: bool = False
    """Nobody can drop the booted one, as long as that is so."""
    other_ids: tuple[str, ...] = ()
    """The deployments that are neither booted nor staged, by id."""
    pending_id: str = ""
    """The deployment that boots next in place of the booted one, staged or not."""

    @property
    def running(self) -> RunningOS:
        """What is booted."""
        return RunningOS(
            self.booted_digest, self.kernel_arguments, self.packages, self.removed_packages
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """One look at the node, its machine and its ledger."""

    record: LedgerRecord
    boot_id: str
    now: float
    """Seconds since the epoch."""
    node: ObservedNode | None
    """None until the Node was seen since the process started."""
    deployments: DeploymentState | None
    """None when nothing asks for a look at the deployments."""
    is_shutting_down: bool = False
    initial_annotations: Mapping[str, str] = field(default_factory=dict)
    """The annotations that a Node without a config is to begin with; empty when none are known."""
    request: UserRequest | None = None
    """What a person on this machine asks for."""
    has_interrupted_change: bool = False
    """A change of files was cut short, and is neither put back nor cleaned up after."""
    has_undo: bool = False
    """The update has changed files, which it can still put back."""
    has_files_in_image: bool = True
    """In image mode files and units are the image's."""
    trial_status: BootTrialStatus | None = None
    """What the checks of a boot on trial found; None when nothing is on trial."""
    is_api_reachable: bool = False
    """The API server answered a moment ago; only looked at before a reboot."""
    should_drain: bool = True
    """The node is drained before it reboots."""
    can_soft_reboot: bool = False
    """A reboot may keep the kernel: the owner allows it, and systemd counts such reboots."""
    drain_limit_s: float = 3600.0
    retention_s: float = 86_400.0
    """How long the previous deployment is kept once what took its place is healthy."""
    drift: DriftAssessment = field(default_factory=lambda: DriftAssessment(is_checked=False))
    """What is not as the current config says; looked for between updates only."""
    is_forced: bool = False
    """Somebody asks for the config to be applied whatever the machine is like."""
