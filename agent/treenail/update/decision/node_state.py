"""The facts that a decision depends on, and what the Node's annotations request of this machine.

The annotations name the desired target and the target to pre-stage. The value of ``desiredDrain``
is a token with which the agent requests a drain or an uncordon.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail import deployment_change
from treenail.api import annotations as key
from treenail.api import object_meta, pullspec
from treenail.api.node import Node
from treenail.errors import ConfigError
from treenail.update.checks import health
from treenail.update.decision.node_identity import NodeIdentity
from treenail.update.decision.user_requests import UserRequest
from treenail.update.drift.drift_policy import DriftAssessment
from treenail.update.impact import os_change
from treenail.update.state import boot_trial, ledger_record

_SHOWN_CHARS = 500


@dataclass(frozen=True, slots=True)
class DesiredTarget:
    """The desired target, and the annotations that named its image."""

    target: ledger_record.Target
    image_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InvalidTarget:
    """Annotations that cannot be obeyed."""

    error: ConfigError
    target: ledger_record.Target = field(default_factory=ledger_record.Target)
    """What they request, as far as it can be read; only to be shown."""
    candidates: tuple[ledger_record.Target, ...] = ()
    """The targets that the valid ones among them request."""


@dataclass(frozen=True, slots=True)
class NoTarget:
    """Annotations that request no config."""


def read_prestage_target(annotations: Mapping[str, str]) -> ledger_record.Target | None:
    """Return the target to pre-stage; None without a config and an image by digest."""
    config = annotations.get(key.PRESTAGE_CONFIG, "")
    image = annotations.get(key.PRESTAGE_IMAGE, "")
    try:
        pullspec.parse_pull_spec(image, where=key.PRESTAGE_IMAGE)
    except ConfigError:
        return None
    return ledger_record.Target(config, image) if object_meta.is_object_name(config) else None


def read_desired_target(annotations: Mapping[str, str]) -> DesiredTarget | InvalidTarget | NoTarget:
    """Return the desired target in a Node's annotations.

    Three annotations may name the image; an empty one names none. Two that name different images
    are invalid, because obeying either would be a guess.
    """
    images = {name: annotations[name] for name in key.IMAGE_SPELLINGS if annotations.get(name)}
    config = annotations.get(key.DESIRED_CONFIG, "")
    shown = ledger_record.Target(
        config[:_SHOWN_CHARS], next(iter(images.values()), "")[:_SHOWN_CHARS]
    )
    if not config:
        if not images:
            return NoTarget()
        name = next(iter(images))
        return InvalidTarget(
            ConfigError(
                f"cannot use {name}: {key.DESIRED_CONFIG} is not set",
                remedy=f"set {key.DESIRED_CONFIG} to the name of the rendered MachineConfig that "
                "the image was built from",
            ),
            shown,
        )
    if not object_meta.is_object_name(config):
        return InvalidTarget(
            ConfigError(
                f"cannot use {key.DESIRED_CONFIG}: {config!r:.300} is not the name of a "
                "MachineConfig",
                remedy="set it to the name of a rendered MachineConfig",
            ),
            shown,
        )
    errors = [error for name, image in images.items() if (error := _check_image(name, image))]
    if errors:
        valid = [image for name, image in images.items() if _check_image(name, image) is None]
        return InvalidTarget(
            errors[0], shown, tuple(ledger_record.Target(config, image) for image in valid)
        )
    if len(set(images.values())) > 1:
        listed = " and ".join(f"{name} ({image})" for name, image in sorted(images.items()))
        return InvalidTarget(
            ConfigError(
                f"cannot choose an image: the annotations name different ones: {listed}",
                remedy="remove one of the annotations, or set both to the same image",
            ),
            shown,
            tuple(ledger_record.Target(config, image) for image in images.values()),
        )
    return DesiredTarget(
        ledger_record.Target(config, next(iter(images.values()), "")), tuple(images)
    )


def _check_image(name: str, image: str) -> ConfigError | None:
    try:
        pullspec.parse_pull_spec(image, where=name)
    except ConfigError as error:
        return error
    return None


_DRAIN, _UNCORDON, _AGAIN = "drain-", "uncordon-", ".again-"
_MAX_DIGITS = 9


def make_drain_token(config: str, previous: str) -> str:
    """Return a token that requests a drain and differs from ``previous``."""
    return _make_token(_DRAIN + config, previous)


def make_uncordon_token(config: str, applied: str) -> str:
    """Return a token that requests the uncordon and differs from ``applied``.

    A drain that was cancelled before it was complete leaves the uncordon before it as the last
    applied request. The drain controller would take the same token for that one.
    """
    return _make_token(_UNCORDON + config, applied)


def is_drain_token(token: str) -> bool:
    """Return whether the token requests a drain."""
    return token.startswith(_DRAIN)


def read_drain_config(token: str) -> str:
    """Return the config of a token that requests a drain."""
    config = token.removeprefix(_DRAIN)
    before, separator, count = config.rpartition(_AGAIN)
    return before if separator and count.isdecimal() else config


def _make_token(plain: str, previous: str) -> str:
    # The MCO's drain controller reads the verb before the first hyphen and compares the whole
    # value with lastAppliedDrain, so the suffix makes it act again.
    again = plain + _AGAIN
    if previous == plain:
        return f"{again}1"
    if not previous.startswith(again):
        return plain
    count = previous.removeprefix(again)
    # Other clients can write the annotation, too.
    is_number = count.isascii() and count.isdecimal() and len(count) <= _MAX_DIGITS
    return f"{again}{int(count) + 1 if is_number else 1}"


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
    claimed: ledger_record.Target
    """The current target by the Node's annotations; believed only without a ledger."""
    prestage: ledger_record.Target | None = None
    """The target to pre-stage."""
    health_mode: boot_trial.HealthCheckMode | None = None
    """The health mode that the Node requests; None without a valid one."""
    invalid_health_mode: str = ""
    """The annotation's value if it is not valid."""
    retry: str = ""
    """The value of the annotation that requests a retry."""
    image_files: str = ""
    """``baked`` or ``write``, in place of the agent's setting; empty without a choice."""
    removed_registry: str = ""
    """The registry on the bootstrap host that the node must no longer use; empty for none."""
    pinned_sets: str = ""
    """The pinned image sets of the node, as the annotation names them."""
    shown_config: str = ""
    """The current config that the Node shows; empty if it shows none."""
    shown_images: frozenset[str] = frozenset()
    """The current images that the Node shows, in any spelling."""

    def shows_current(self, target: ledger_record.Target) -> bool:
        """Return whether the Node shows the target as the current one."""
        images = {target.image} if target.image else set()
        return self.shown_config == target.config != "" and self.shown_images == images


@dataclass(frozen=True, slots=True)
class Facts:
    """One observation of the node, its machine and its ledger."""

    record: ledger_record.LedgerRecord
    boot_id: str
    now: float
    """Seconds since the epoch."""
    node: ObservedNode | None
    """None until the agent has received its Node."""
    deployments: os_change.DeploymentState | None
    """None when no decision needs the deployments (see `needs_deployments`)."""
    monotonic: float = 0.0
    """Seconds of this boot's monotonic clock."""
    identity: NodeIdentity | None = None
    """Which Node this machine is."""
    is_shutting_down: bool = False
    initial_annotations: Mapping[str, str] = field(default_factory=dict)
    """The first annotations for a Node without a config; empty when none are known."""
    request: UserRequest | None = None
    """The request of a user on this machine."""
    has_interrupted_change: bool = False
    """A change of files was interrupted, and is neither undone nor cleaned up."""
    has_undo: bool = False
    """The update changed files and can undo that."""
    is_hosted: bool = False
    """HyperShift, or treenail in its place, updates the node."""
    has_files_in_image: bool = True
    """In image mode the image must contain files and units; the agent writes none of them."""
    adoption_change: deployment_change.DeploymentChange = deployment_change.NO_CHANGE
    """What the booted OS lacks of a target that the node may have; observed at first contact."""
    finalization_error: str = ""
    """Why the staged deployment was not finalized at the last shutdown, if that is known."""
    trial_status: health.BootTrialStatus | None = None
    """The result of the health checks; None outside a boot trial."""
    health_mode: boot_trial.HealthCheckMode = boot_trial.HealthCheckMode.ENFORCE
    """The effect of a failed health check."""
    origin_check: health.OriginCheck = health.OriginCheck.UNKNOWN
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
    def moment(self) -> ledger_record.Moment:
        """The time of the observation, for waits: they must not depend on the wall clock alone."""
        return ledger_record.Moment(self.now, self.boot_id, self.monotonic)


def summarize_node(node: Node) -> ObservedNode:
    """Return what decisions read of the Node."""
    annotations = node.annotations
    requested = read_desired_target(annotations)
    spellings = (
        requested.image_keys if isinstance(requested, DesiredTarget) else tuple(key.IMAGE_SPELLINGS)
    )
    health_mode = _read_health_mode(annotations.get(key.HEALTH_MODE))
    claimed_images = (annotations.get(key.IMAGE_SPELLINGS[spelling], "") for spelling in spellings)
    return ObservedNode(
        desired=requested,
        handshake=DrainHandshake(
            requested=annotations.get(key.DESIRED_DRAIN, ""),
            applied=annotations.get(key.LAST_APPLIED_DRAIN, ""),
            is_unschedulable=node.is_unschedulable,
        ),
        claimed=ledger_record.Target(
            annotations.get(key.CURRENT_CONFIG, ""), next(filter(None, claimed_images), "")
        ),
        prestage=read_prestage_target(annotations),
        health_mode=health_mode,
        invalid_health_mode="" if health_mode else annotations.get(key.HEALTH_MODE, "")[:100],
        retry=annotations.get(key.RETRY, "")[: key.REASON_LIMIT],
        image_files=annotations.get(key.IMAGE_FILES, ""),
        shown_config=annotations.get(key.CURRENT_CONFIG, ""),
        shown_images=frozenset(
            image
            for current_key in key.IMAGE_SPELLINGS.values()
            if (image := annotations.get(current_key))
        ),
        removed_registry=annotations.get(key.REMOVE_BOOTSTRAP_REGISTRY, ""),
        pinned_sets=annotations.get(key.PINNED_IMAGE_SETS, ""),
    )


def _read_health_mode(value: str | None) -> boot_trial.HealthCheckMode | None:
    try:
        return None if value is None else boot_trial.HealthCheckMode(value)
    except ValueError:
        return None
