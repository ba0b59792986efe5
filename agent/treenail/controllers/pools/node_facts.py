"""Facts about a node and the predicates of a rollout.

A node writes its own Node, so nothing there is believed. `read_annotations` and `NodeFacts` bound
the size and the form of every value. Destinations and times of the rollout come from the pool, its
policy and the controller's record (`rollout_record`), so that a false Node affects that node only.

The predicates are those of the Machine Config Operator, with two deliberate differences. A node
that is Degraded by an image under an unchanged config is failing here. The MCO counts it as
unavailable, so it holds capacity and never gets the image that would repair it. A node without any
target is available here. The MCO gives every node a config at its first boot, but a pool can also
be created for nodes that have none yet, and these would wait forever.

`NodeProgress` says how far the update of a node is, for tables and pages. No decision depends on
it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from treenail import clocks, errors, sanitize
from treenail.api import annotations as key
from treenail.api import decode, object_meta
from treenail.api.annotations import NodeState
from treenail.image import build_inputs

_PERCENT = re.compile(r"(100|[1-9]?[0-9])%")


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """Progress of a node's update, and its last time out of service."""

    phase: str = ""
    """Phase of the update in progress, as the annotations imply it; empty without an update."""
    percent: int | None = None
    """Of the transaction of the operating system; None while no agent reports one."""
    os_image: str = ""
    """Name of the booted operating system, as the kubelet reports it."""
    drain_began_at: float | None = None
    """Begin of the drain in progress; None without one."""
    last_outage_s: float | None = None
    """How long the last drain kept the node out of service; None before the first one."""


ZONE_LABEL = "topology.kubernetes.io/zone"
STARTED_AT = "treenail.io/rollout-started-at"
"""Time of the assignment, RFC 3339; written with the target, and read only for tables."""
LOCKED_BY = "treenail.io/fleet-lock"
"""The server that granted the node's lock; written with the target, removed at the release."""

_TEXT_CHARS = 1536
"""Of an annotation or another text: more than a pull spec, or a lock server with its group."""
_LONG_TEXTS = {key.REASON: key.REASON_LIMIT, key.DRAIN: 4096, key.DRAIN_BLOCKED: 32_768}
_BLOCKER_CHARS = 120
GRACE_S = 60.0
"""Time for a degraded agent to react to a new target before its state counts as a failure."""
_DONE = NodeState.DONE.value
_DEGRADED_STATES = (NodeState.DEGRADED, NodeState.UNRECONCILABLE)


@dataclass(frozen=True, slots=True)
class RolloutTarget:
    """The config and image that the nodes of a pool should have.

    ``image`` None means the image that the config names. An empty image is requested but not built
    yet, so no node can have it.
    """

    config: str
    image: str | None = None

    def __str__(self) -> str:
        return f"{self.config} with image {self.image}" if self.image else self.config


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Annotations that the controller copies from the pool and its policy; empty when absent."""

    image_files: str = ""
    health_mode: str = ""
    pool_retry: str = ""
    is_single: bool = False
    """The node is the only one of the cluster."""
    pinned_sets: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts observed about a node. An empty config or state was never written."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: str = ""
    """RFC 3339, as the API server writes it, so that it sorts as text."""
    is_healthy: bool = True
    """Ready, without DiskPressure and NetworkUnavailable."""
    pressure: str = ""
    """Condition that makes a ready node unhealthy, such as ``DiskPressure is True``."""
    pressure_changed_at: float | None = None
    """Last transition of that condition, in seconds since the epoch."""
    ready_changed_at: float | None = None
    """Last transition of the Ready condition, in seconds since the epoch."""
    unschedulable: bool = False
    current_config: str = ""
    desired_config: str = ""
    current_image: str | None = None
    desired_image: str | None = None
    """None without the annotation: the node runs the image that its config names."""
    state: str = ""
    reason: str = ""
    started_at: float | None = None
    """When the controller assigned the desired target (`compute_start`); None if it did not."""
    prestage_target: RolloutTarget | None = None
    """The target that the node is requested to prestage."""
    prestaged_image: str = ""
    """The image that the node has prestaged."""
    prestage_error: str = ""
    """Why the node could not prestage the requested target."""
    prestage_requested_at: float | None = None
    """When the controller requested the prestaging, by its record; None if it did not."""
    architecture: str = ""
    """As the kubelet reports it. Images are built for the known ones only."""
    locked_by: str = ""
    settings: NodeSettings = NodeSettings()
    drain_blocker: str = ""
    """What has blocked the drain of the node for some time."""
    progress: NodeProgress = field(default=NodeProgress(), compare=False)
    """For tables; no decision depends on it."""
    uid: str = field(default="", compare=False)
    resource_version: str = field(default="", compare=False)
    """Condition of every write; excluded from comparisons."""
    is_in_service: bool = field(init=False, compare=False)
    is_done: bool = field(init=False, compare=False)
    """The node has its desired config and image and reports Done."""
    is_failing: bool = field(init=False, compare=False)
    """The node is degraded on the way to its desired config or image."""
    is_unavailable: bool = field(init=False, compare=False)
    """The node counts against ``maxUnavailable``."""

    def __post_init__(self) -> None:
        """Evaluate predicates once: a sync asks each of them several times of each node."""
        is_in_service = self.is_healthy and not self.unschedulable
        is_current = self.current_config == self.desired_config and self.has_desired_image
        is_done = is_current and self.current_config != "" and self.state == _DONE
        is_failing = not is_current and self.is_degraded
        is_at_rest = is_done or is_failing or self.is_unassigned
        object.__setattr__(self, "is_in_service", is_in_service)
        object.__setattr__(self, "is_done", is_done)
        object.__setattr__(self, "is_failing", is_failing)
        object.__setattr__(self, "is_unavailable", not (is_in_service and is_at_rest))

    @classmethod
    def from_json(cls, document: object, *, image_key: str = key.DESIRED_OS_IMAGE) -> "NodeFacts":
        """Parse a Node; ``image_key`` is the annotation that requests an image.

        Raises `ConfigError`.
        """
        fields = decode.Fields.from_json(document, "Node")
        meta = fields.get_object("metadata").read(object_meta.ObjectMeta)
        annotations = read_annotations(meta)
        status = fields.get_object("status")
        conditions = status.read_list("conditions", object_meta.Condition)
        changed = [at.last_transition_time for at in conditions if at.type == "Ready"]
        ready_changed_at = clocks.parse_rfc3339(changed[0]) if changed else None
        is_healthy = all(map(_is_healthy, conditions))
        pressure = _find_pressure(conditions)
        return cls(
            name=meta.name,
            labels=meta.labels,
            created_at=meta.created,
            is_healthy=is_healthy,
            pressure=f"{pressure.type} is {_bound_text(pressure.status, 20)}" if pressure else "",
            pressure_changed_at=clocks.parse_rfc3339(pressure.last_transition_time)
            if pressure
            else None,
            ready_changed_at=ready_changed_at,
            unschedulable=fields.get_object("spec").get_bool("unschedulable"),
            current_config=annotations.get(key.CURRENT_CONFIG, ""),
            desired_config=annotations.get(key.DESIRED_CONFIG, ""),
            current_image=annotations.get(key.IMAGE_SPELLINGS[image_key]),
            desired_image=annotations.get(image_key),
            state=annotations.get(key.STATE, ""),
            reason=annotations.get(key.REASON, ""),
            prestage_target=_parse_prestage_target(annotations),
            prestaged_image=annotations.get(key.PRESTAGED, ""),
            prestage_error=_parse_prestage_error(annotations),
            architecture=_parse_node_info(status, "architecture", 20),
            locked_by=annotations.get(LOCKED_BY, ""),
            settings=NodeSettings(
                annotations.get(key.IMAGE_FILES, ""),
                annotations.get(key.HEALTH_MODE, ""),
                annotations.get(key.POOL_RETRY, ""),
                annotations.get(key.CONTROL_PLANE_TOPOLOGY) == key.SINGLE_REPLICA,
                annotations.get(key.PINNED_IMAGE_SETS, ""),
            ),
            drain_blocker=_parse_drain_blocker(annotations),
            progress=parse_progress(
                annotations,
                status,
                ready_again_at=ready_changed_at if is_healthy else None,
                started_at=clocks.parse_rfc3339(annotations.get(STARTED_AT)),
                has_target=_has_target(annotations, image_key),
            ),
            uid=meta.uid,
            resource_version=meta.resource_version,
        )

    @property
    def zone(self) -> str:
        """Zone label; empty without one."""
        return self.labels.get(ZONE_LABEL, "")

    @property
    def is_managed(self) -> bool:
        """An agent has reported its config."""
        return self.current_config != ""

    @property
    def has_desired_image(self) -> bool:
        return self.current_image == self.desired_image != ""

    @property
    def has_not_responded(self) -> bool:
        """The state is not about the desired target: the agent has not seen it yet."""
        is_outdated = self.current_config != self.desired_config or not self.has_desired_image
        return is_outdated and self.state in ("", NodeState.DONE)

    @property
    def is_degraded(self) -> bool:
        return self.state in _DEGRADED_STATES

    @property
    def is_unassigned(self) -> bool:
        """The node never had a target. It serves and waits for its first one."""
        return self.current_config == "" and self.desired_config == ""

    def is_assigned(self, target: RolloutTarget) -> bool:
        """The node already has this target as its desired config and image."""
        if target.image is None:
            return self.desired_config == target.config and self.desired_image is None
        return (
            target.image != ""
            and self.desired_image == target.image
            and self.desired_config == target.config
        )

    def is_updated_to(self, target: RolloutTarget) -> bool:
        return self.is_assigned(target) and self.is_done

    def compute_start(self, now: float) -> float:
        """Compute from when on the state is about a target that is assigned ``now``."""
        return now + GRACE_S if self.is_degraded else now

    def with_target(self, target: RolloutTarget, now: float) -> "NodeFacts":
        """Return the node as it is after the target is written."""
        return replace(
            self,
            desired_config=target.config,
            desired_image=target.image,
            started_at=self.compute_start(now),
            prestage_target=None,
        )


def read_annotations(meta: object_meta.ObjectMeta) -> dict[str, str]:
    """Return the Node's annotations of the API, each bounded and without control characters."""
    return {
        name: _bound_text(text, _LONG_TEXTS.get(name, _TEXT_CHARS))
        for name, text in meta.annotations.items()
        if name.startswith((key.PREFIX, key.OWN_PREFIX))
    }


def find_architectures(reported: Iterable[str]) -> frozenset[str]:
    """Return the architectures that images are built for; another one is that node's problem."""
    return frozenset(reported) & build_inputs.ARCHITECTURES.keys()


def _bound_text(text: str, limit: int) -> str:
    return sanitize.escape_text(text[:limit])[:limit]


def overlay_written(
    nodes: Iterable[NodeFacts], written: Mapping[str, tuple[RolloutTarget, float]]
) -> tuple[NodeFacts, ...]:
    """Return the nodes with the targets that were ``written``, and when, applied.

    The cache lags behind own writes. A decision on the cache alone would use the same capacity
    twice.
    """
    return tuple(
        node.with_target(*written[node.name])
        if node.name in written and not node.is_assigned(written[node.name][0])
        else node
        for node in nodes
    )


def _has_target(annotations: Mapping[str, str], image_key: str) -> bool:
    config = annotations.get(key.CURRENT_CONFIG, "")
    images = [annotations.get(spelling) for spelling in (key.IMAGE_SPELLINGS[image_key], image_key)]
    return config == annotations.get(key.DESIRED_CONFIG) != "" and images[0] == images[1]


def _parse_prestage_target(annotations: Mapping[str, str]) -> RolloutTarget | None:
    image = annotations.get(key.PRESTAGE_IMAGE, "")
    return RolloutTarget(annotations.get(key.PRESTAGE_CONFIG, ""), image) if image else None


def _parse_prestage_error(annotations: Mapping[str, str]) -> str:
    """Parse the error; empty when it is about another image than the requested one."""
    image, colon, reason = annotations.get(key.PRESTAGE_ERROR, "").partition(": ")
    return reason if colon and image == annotations.get(key.PRESTAGE_IMAGE) else ""


def _parse_drain_blocker(annotations: Mapping[str, str]) -> str:
    """Parse the first blocker of the running drain, as a phrase; empty without any."""
    text = annotations.get(key.DRAIN_BLOCKED, "")
    if not text or annotations.get(key.DESIRED_DRAIN) == annotations.get(key.LAST_APPLIED_DRAIN):
        return ""
    try:
        document = {"blocked": decode.load_json(text, where=f"annotation {key.DRAIN_BLOCKED}")}
        blocked = [*decode.Fields.from_json(document, "").iter_objects("blocked")]
        if not blocked:
            return ""
        pod = _bound_text(blocked[0].get_text("pod"), _BLOCKER_CHARS)
        budgets = [
            _bound_text(budget.get_text("name"), _BLOCKER_CHARS)
            for budget in blocked[0].iter_objects("budgets")
        ]
        more = f" and {len(blocked) - 1} more" if len(blocked) > 1 else ""
        message = _bound_text(blocked[0].get_text("message"), _BLOCKER_CHARS)
    except errors.ConfigError:
        return "pods"
    if budgets:
        budget = f"{pod.partition('/')[0]}/{budgets[0]}"
        return f"PodDisruptionBudget {budget} of pod {pod}{more}"
    return f"pod {pod}{more}: {message}"


def _find_pressure(conditions: Iterable[object_meta.Condition]) -> object_meta.Condition | None:
    unhealthy = {
        condition.type: condition for condition in conditions if not _is_healthy(condition)
    }
    return None if "Ready" in unhealthy else unhealthy.get(min(unhealthy, default=""))


def _is_healthy(condition: object_meta.Condition) -> bool:
    match condition.type:
        case "Ready":
            return condition.status == "True"
        case "DiskPressure" | "NetworkUnavailable":
            return condition.status == "False"
        case _:
            return True


def parse_progress(
    annotations: Mapping[str, str],
    status: decode.Fields,
    *,
    ready_again_at: float | None,
    started_at: float | None,
    has_target: bool,
) -> NodeProgress:
    """Parse the progress from a Node's annotations and status.

    ``ready_again_at`` is since when the node is ready, None while it is not; ``started_at`` is when
    it got its target; ``has_target`` says that the agent reports its desired target as the current
    one.
    """
    drain_began_at = _parse_drain_begin(annotations.get(key.DRAIN))
    phase = _parse_phase(annotations)
    if phase == "staging" and has_target:
        # The uncordon is done, and the agent is about to report Done.
        phase = "uncordoning"
    began_at = drain_began_at or started_at
    if phase == "rebooting" and began_at and ready_again_at and ready_again_at > began_at:
        # The kubelet stopped after the drain began, and is ready again: the node has booted.
        phase = "verifying"
    percent = _PERCENT.fullmatch(annotations.get(key.PROGRESS, ""))
    return NodeProgress(
        phase=phase,
        percent=int(percent[1]) if percent and phase == "staging" else None,
        os_image=_parse_node_info(status, "osImage", 200),
        drain_began_at=drain_began_at,
        last_outage_s=_parse_outage_s(annotations.get(key.LAST_OUTAGE, "")),
    )


def _parse_phase(annotations: Mapping[str, str]) -> str:
    if annotations.get(key.STATE) != NodeState.WORKING:
        return ""
    if annotations.get(key.POST_CONFIG_ACTION):
        return "rebooting"
    requested = annotations.get(key.DESIRED_DRAIN, "")
    is_drain = requested.startswith("drain-")
    if requested != annotations.get(key.LAST_APPLIED_DRAIN, ""):
        return "draining" if is_drain else "uncordoning"
    return "applying" if is_drain else "staging"


def _parse_node_info(status: decode.Fields, name: str, limit: int) -> str:
    try:
        return status.get_object("nodeInfo").get_text(name)[:limit]
    except errors.ConfigError:
        return ""


def _parse_drain_begin(text: str | None) -> float | None:
    if not text:
        return None
    try:
        record = decode.Fields.from_json(
            decode.load_json(text, where=f"annotation {key.DRAIN}"), ""
        )
        return clocks.parse_rfc3339(record.get_text("began"))
    except errors.ConfigError:
        return None


def _parse_outage_s(text: str) -> float | None:
    before, _, after = text.partition("/")
    began, ended = clocks.parse_rfc3339(before), clocks.parse_rfc3339(after)
    if began is None or ended is None or ended < began:
        return None
    return ended - began
