"""The facts that a decision depends on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.update.checks.health import BootTrialStatus, OriginCheck
from treenail.update.decision.desired import DesiredTarget, InvalidTarget, NoTarget
from treenail.update.decision.drain_tokens import is_drain_token
from treenail.update.decision.request import UserRequest
from treenail.update.drift.drift_policy import DriftAssessment
from treenail.update.impact.os_change import NO_OS_CHANGE, OSChange, RunningOS
from treenail.update.state.boot_trial import HealthCheckMode
from treenail.update.state.moment import Moment
from treenail.update.state.record import LedgerRecord, Target


@dataclass(frozen=True, slots=True)
class DrainHandshake:
    """The drain handshake as the Node shows it.

    The agent writes ``desiredDrain`` (``drain-…`` or ``uncordon-…``). The drain controller copies
    the value to ``lastAppliedDrain`` once it has drained or uncordoned the node.
    """

    requested: str = ""
    applied: str = ""
    is_unschedulable: bool = False

    @property
    def is_settled(self) -> bool:
        """The drain controller has applied the last request."""
        return self.requested == self.applied

    @property
    def is_drain_requested(self) -> bool:
        """The last request is a drain."""
        return is_drain_token(self.requested)

    def is_drained_for(self, token: str) -> bool:
        """Return whether the drain with this token is complete and the node still cordoned."""
        return bool(token) and self.requested == self.applied == token and self.is_unschedulable


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """The part of the Node that decisions depend on."""

    desired: DesiredTarget | InvalidTarget | NoTarget
    handshake: DrainHandshake
    claimed: Target
    """The current target by the Node's annotations; believed only without a ledger."""
    prestage: Target | None = None
    """The target to pre-stage."""
    health_mode: HealthCheckMode | None = None
    """The health mode that the Node requests; None without a valid one."""
    invalid_health_mode: str = ""
    """The annotation's value if it is not valid."""
    retry: str = ""
    """The value of the annotation that requests a retry."""
    image_files: str = ""
    """``baked`` or ``write``, in place of the agent's setting; empty without a choice."""
    removed_registry: str = ""
    """The registry on the bootstrap host that the node must no longer use; empty for none."""
    shown_config: str = ""
    """The current config that the Node shows; empty if it shows none."""
    shown_images: frozenset[str] = frozenset()
    """The current images that the Node shows, in any spelling."""

    def shows_current(self, target: Target) -> bool:
        """Return whether the Node shows the target as the current one."""
        images = {target.image} if target.image else set()
        return self.shown_config == target.config != "" and self.shown_images == images


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """The part of the deployments that decisions depend on; unknown digests are empty."""

    booted_digest: str
    booted_id: str
    """The booted deployment; empty when the back end names none."""
    staged_digest: str = ""
    staged_id: str = ""
    """The staged deployment; not empty whenever something is staged."""
    is_locked: bool = False
    kernel_arguments: tuple[str, ...] = ()
    """The kernel arguments that are booted."""
    packages: tuple[str, ...] = ()
    """The packages that are layered on the booted image."""
    removed_packages: tuple[str, ...] = ()
    """The packages of the booted image that are removed by an override."""
    is_booted_pinned: bool = False
    """The booted deployment is pinned, so that no program can drop it."""
    other_ids: tuple[str, ...] = ()
    """The deployments that are neither booted nor staged."""
    pending_id: str = ""
    """The deployment, staged or not, that the next boot selects instead of the booted one."""
    booted_list_digest: str = ""
    """The digest of the manifest list that named the booted image; empty without one."""
    staged_list_digest: str = ""
    """The same of the staged image."""

    @property
    def running(self) -> RunningOS:
        """The booted operating system."""
        return RunningOS(
            self.booted_digest,
            self.kernel_arguments,
            self.packages,
            self.removed_packages,
            self.booted_list_digest,
        )

    def has_booted(self, digest: str) -> bool:
        """Return whether the image with this digest of a manifest or manifest list is booted."""
        return digest != "" and digest in {self.booted_digest, self.booted_list_digest}

    def has_staged(self, digest: str) -> bool:
        """Return whether the image with this digest of a manifest or manifest list is staged."""
        return digest != "" and digest in {self.staged_digest, self.staged_list_digest}


@dataclass(frozen=True, slots=True)
class Facts:
    """One observation of the node, its machine and its ledger."""

    record: LedgerRecord
    boot_id: str
    now: float
    """Seconds since the epoch."""
    node: ObservedNode | None
    """None until the agent has received its Node."""
    deployments: DeploymentState | None
    """None when no decision needs the deployments (see `needs_deployments`)."""
    monotonic: float = 0.0
    """Seconds of this boot's monotonic clock."""
    is_shutting_down: bool = False
    initial_annotations: Mapping[str, str] = field(default_factory=dict)
    """The first annotations for a Node without a config; empty when none are known."""
    request: UserRequest | None = None
    """The request of a user on this machine."""
    has_interrupted_change: bool = False
    """A change of files was interrupted, and is neither undone nor cleaned up."""
    has_undo: bool = False
    """The update changed files and can undo that."""
    has_files_in_image: bool = True
    """In image mode the image must contain files and units; the agent writes none of them."""
    adoption_change: OSChange = NO_OS_CHANGE
    """What the booted OS lacks of a target that the node may have; observed at first contact."""
    finalization_error: str = ""
    """Why the staged deployment was not finalized at the last shutdown, if that is known."""
    trial_status: BootTrialStatus | None = None
    """The result of the health checks; None outside a boot trial."""
    health_mode: HealthCheckMode = HealthCheckMode.ENFORCE
    """The effect of a failed health check."""
    origin_check: OriginCheck = OriginCheck.UNKNOWN
    """The check that failed the quarantined target, now that the node has its previous target."""
    is_api_reachable: bool = False
    """The API server answered a moment ago; observed only before a reboot."""
    should_drain: bool = True
    """The settings require a drain before a disruption."""
    can_soft_reboot: bool = False
    """The settings allow soft reboots, and systemd counts them."""
    drain_limit_s: float = 3600.0
    """Seconds after which a drain is overdue; the Machine Config Daemon waits as long."""
    retention_s: float = 86_400.0
    """Seconds for which the previous deployment is retained after its successor is healthy."""
    drift: DriftAssessment = field(default_factory=lambda: DriftAssessment(is_checked=False))
    """The drift from the current config; checked only between updates."""
    bootstrap_registry: str = ""
    """The registry on the bootstrap host that the node still uses; empty without one."""
    is_forced: bool = False
    """The force file exists: apply the config whatever the state of the machine."""

    @property
    def moment(self) -> Moment:
        """The time of the observation, for waits: they must not depend on the wall clock alone."""
        return Moment(self.now, self.boot_id, self.monotonic)
