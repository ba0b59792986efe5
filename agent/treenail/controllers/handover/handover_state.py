"""Progress of the hand-over: conditions, and which nodes must drop the bootstrap registry. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json
from treenail.api.meta import Condition, ObjectMeta
from treenail.controllers.handover.handover_objects import Handover, HandoverImage, HandoverResult
from treenail.controllers.pools.select import CONTROL_PLANE_LABELS
from treenail.escape import escape_text

HANDED_OVER = "ImageHandedOver"
"""Condition of a MachineOSConfig."""
DEADLINE_EXCEEDED, COPYING, DONE = "DeadlineExceeded", "Copying", "HandedOver"
_MESSAGE_LIMIT = 2000
_FIRST_RETRY_S, _MAX_RETRY_S = 5.0, 300.0
_NAMES_LIMIT = 5
_TEXTS_LIMIT, _REASON_LIMIT = 6, 500
_BOOTSTRAP_LABELS = (*CONTROL_PLANE_LABELS, "node-role.kubernetes.io/arbiter")
"""Labels of nodes whose machines the bootstrap host serves."""


@dataclass(frozen=True, slots=True)
class MoveState:
    """Attempts to move one image; without a failure the first one runs."""

    is_done: bool = False
    failures: int = 0
    reason: str = ""
    message: str = ""
    """Of the last failure; of a success, what could not be verified."""
    ended: float = 0.0
    """End of the last attempt on the monotonic clock."""

    @property
    def retry_at(self) -> float:
        """When the next attempt begins, on the monotonic clock."""
        if not self.failures:
            return self.ended
        return self.ended + min(_FIRST_RETRY_S * 2.0 ** min(self.failures - 1, 20), _MAX_RETRY_S)


@dataclass(frozen=True, slots=True)
class RegistryNode:
    """A Node, and what it says about the registry on the bootstrap host."""

    name: str
    registry: str
    """The registry that the node still uses; empty for none."""
    requested: str
    """The registry that the node must no longer use."""
    is_control_plane: bool = False
    has_reported: bool = False
    """Whether the agent has reported since the machine joined."""
    problem: str = ""
    """Why the agent is Degraded; empty when it is not."""

    @classmethod
    def from_json(cls, document: Json) -> "RegistryNode":
        """Parse a Node; raise `ConfigError`."""
        meta = ObjectMeta.from_fields(Fields.from_json(document, "Node").get_object("metadata"))
        notes = meta.annotations
        return cls(
            meta.name,
            notes.get(key.BOOTSTRAP_REGISTRY, ""),
            notes.get(key.REMOVE_BOOTSTRAP_REGISTRY, ""),
            any(each in meta.labels for each in _BOOTSTRAP_LABELS),
            bool(notes.get(key.STATE)),
            _read_problem(notes),
        )


def compute_condition(
    handover: Handover, image: HandoverImage, state: MoveState | None, overdue: str
) -> Condition:
    """Compute the condition of an image, without time.

    ``overdue`` describes the deadline that has passed; empty before it.
    """
    if state is not None and state.is_done:
        text = f"{image.final_image} is in its final registry, and nodes can pull it"
        shown = "; ".join(filter(None, (text, escape_text(state.message))))
        return Condition(HANDED_OVER, "True", DONE, shown[:_MESSAGE_LIMIT])
    reason, cause = COPYING, f"copying {image.digest} from {handover.registry} to {image.push_spec}"
    if not handover.registry:
        cause = f"looking for {image.final_image}"
    if state is not None and state.failures:
        reason, cause = state.reason, state.message
    if overdue:
        reason, cause = DEADLINE_EXCEEDED, f"{overdue}; retrying; {cause}"
    return Condition(HANDED_OVER, "False", reason, escape_text(cause)[:_MESSAGE_LIMIT])


def describe_deadline(waited_s: float, deadline_s: float) -> str:
    """Say that the deadline has passed; empty before it."""
    if waited_s <= deadline_s:
        return ""
    return (
        f"the image is not in its final registry after {deadline_s / 60:g} min "
        "(--handover-deadline); the bootstrap host keeps it, nothing is lost"
    )


def has_result(result: HandoverResult | None, handover: Handover) -> bool:
    """Return whether an earlier hand-over covers these images."""
    if result is None or result.registry != handover.registry:
        return False
    return all(result.digests.get(each.pool) == each.digest for each in handover.images)


def find_nodes_to_mark(nodes: Iterable[RegistryNode], registry: str) -> tuple[str, ...]:
    """Return the nodes that use the registry and are not asked to drop it."""
    if not registry:
        return ()
    return tuple(
        sorted(
            each.name for each in nodes if each.registry == registry and each.requested != registry
        )
    )


def describe_missing_nodes(
    nodes: Iterable[RegistryNode], registry: str, machines: int | None
) -> str:
    """Return which nodes still need the bootstrap host; empty when none does.

    Without a registry a node needs nothing after it joined. ``machines`` is the number of machines
    that the bootstrap host serves; None if it is unknown.
    """
    found = sorted(nodes, key=lambda each: each.name)
    joined = [each for each in found if each.is_control_plane]
    expected = max(machines or 1, 1)
    texts = []
    if len(joined) < expected:
        many = f"{expected} machines" if machines else "the machines"
        texts.append(f"{len(joined)} of {many} of the control plane have joined")
    if registry:
        # An agent reports its first state together with the registry that it uses.
        silent = [each.name for each in joined if not each.has_reported]
        users = [each.name for each in found if each.registry == registry]
        if silent:
            texts.append(f"the agent has not reported yet on {_join_names(silent)}")
        if users:
            texts.append(f"{registry} is still the mirror of {_join_names(users)}")
    if texts:
        # An agent that cannot switch to its image neither joins the others nor drops the registry.
        texts += [f"node {each.name} is Degraded: {each.problem}" for each in found if each.problem]
    return "; ".join(texts[:_TEXTS_LIMIT])


def _read_problem(notes: Mapping[str, str]) -> str:
    if notes.get(key.STATE) != key.NodeState.DEGRADED:
        return ""
    return escape_text(notes.get(key.REASON, ""))[:_REASON_LIMIT] or "it gives no reason"


def _join_names(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_LIMIT
    text = ", ".join(names[:_NAMES_LIMIT]) + (f" and {more} more" if more > 0 else "")
    return f"node {text}" if len(names) == 1 else f"nodes {text}"


def merge_results(
    before: HandoverResult | None, handover: Handover, completed: str
) -> HandoverResult:
    """Return the result with the images of this hand-over."""
    digests = {**(before.digests if before else {})}
    digests |= {each.pool: each.digest for each in handover.images}
    return HandoverResult(digests, handover.registry, completed)
