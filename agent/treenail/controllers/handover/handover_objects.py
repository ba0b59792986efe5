"""Objects by which the bootstrap host and the controller ``install`` hand images over. Pure.

The bootstrap host publishes a Secret with its registry, the images in it and the objects that the
cluster adopts. The controller answers with a ConfigMap when the final registries have the images.

The progress is computed here too: the condition of the hand-over, the nodes that must drop the
bootstrap registry, and the pools that wait for their first image.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from treenail import errors, memory, sanitize
from treenail.api import annotations as key
from treenail.api import decode, machineconfigpool, machineosbuild, machineosconfig, object_meta
from treenail.api.component_names import NAMESPACE, PART_OF_LABELS
from treenail.api.pullspec import PushSpec, parse_push_spec
from treenail.config import bootstrap_registry
from treenail.controllers.pools import node_facts, node_selection, os_image, pool_status
from treenail.encoding import codec, json_text
from treenail.kube import resources
from treenail.registry.names import check_digest

HANDOVER_SECRET = "treenail-install-handover"  # noqa: S105  # the name of a Secret
RESULT_CONFIGMAP = "treenail-install-result"
ADOPTED_KINDS = (
    resources.SECRETS.kind,
    resources.MACHINEOSCONFIGS.kind,
    resources.MACHINEOSBUILDS.kind,
)
"""Kinds of the objects that the cluster adopts."""

_REGISTRY_KEY, _OBJECTS_KEY = "registry.json", "objects.json"
_LIMIT = memory.MIB  # the maximum size of a Kubernetes Secret
_IMAGES_LIMIT, _OBJECTS_LIMIT = 50, 200


def _parse_push_spec(text: str) -> PushSpec:
    return parse_push_spec(text, where="pushSpec")


@dataclass(frozen=True, slots=True)
class HandoverImage(codec.JsonObject, is_strict=True):
    """The image of a pool, built or named at the installation."""

    pool: codec.NonEmptyText
    digest: Annotated[str, codec.Via(check_digest)]
    push_spec: Annotated[PushSpec, codec.Via(_parse_push_spec, str, wire=str)]
    """Final name. The registry on the bootstrap host has the image under the same repository."""

    @property
    def final_image(self) -> str:
        """Pull spec in the final registry."""
        return self.push_spec.make_pull_spec(self.digest)


@dataclass(frozen=True, slots=True)
class Handover(codec.JsonObject, is_strict=True):
    """Content of the Secret."""

    images: tuple[HandoverImage, ...]
    registry: str = ""
    """``HOST:PORT`` on the bootstrap host; empty if the images are in their final registries."""
    ca_pem: Annotated[str, codec.Key("ca", omit=True)] = field(default="", repr=False)
    username: Annotated[str, codec.Key(omit=True)] = ""
    password: Annotated[str, codec.Key(omit=True)] = field(default="", repr=False)
    objects: Annotated[tuple[decode.Json, ...], codec.EXCLUDED] = field(default=(), repr=False)
    """Secrets, MachineOSConfigs and MachineOSBuilds with status, as for an API server."""


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """Content of the ConfigMap."""

    digests: Mapping[str, str]
    """Digest of each pool's image, which its final registry has."""
    registry: str
    """The registry that may stop; empty for none."""
    completed: str
    """Time in RFC 3339."""


def build_handover_secret(handover: Handover) -> decode.Json:
    """Build the Secret; equal contents give equal objects. Raises `ConfigError`."""
    contents = {_REGISTRY_KEY: handover.to_json(), _OBJECTS_KEY: list(handover.objects)}
    secret: decode.Json = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": HANDOVER_SECRET, "namespace": NAMESPACE, "labels": PART_OF_LABELS},
        "type": "Opaque",
        "data": {
            name: base64.b64encode(json.dumps(value, sort_keys=True).encode()).decode()
            for name, value in contents.items()
        },
    }
    read_handover_secret(secret)
    return secret


def read_handover_secret(document: decode.Json) -> Handover:
    """Read the Secret; raise `ConfigError`, which contains no part of a secret."""
    where = f"Secret {NAMESPACE}/{HANDOVER_SECRET}"
    data = decode.Fields.from_json(document, where).get_object("data")
    registry = _read_json(data, _REGISTRY_KEY, where)
    handover = Handover.from_json(registry, f"{where}, {_REGISTRY_KEY}")
    pools = [image.pool for image in handover.images]
    if len(pools) > _IMAGES_LIMIT or len(set(pools)) != len(pools):
        raise errors.ConfigError(
            f"{where}, {_REGISTRY_KEY}.images: expected at most {_IMAGES_LIMIT} images and one for "
            "each pool"
        )
    objects = _read_json(data, _OBJECTS_KEY, where)
    handover = replace(handover, objects=_read_objects(objects, f"{where}, {_OBJECTS_KEY}"))
    if handover.registry and handover.images:
        make_node_record(handover)
    return handover


def make_node_record(handover: Handover) -> bootstrap_registry.BootstrapRegistryRecord:
    """Return the record of the registry; raise `ConfigError` for invalid fields."""
    repositories = (f"{image.push_spec.registry}/{image.push_spec.repository}"
                    for image in handover.images)  # fmt: skip
    record = bootstrap_registry.BootstrapRegistryRecord(
        handover.registry, handover.username, handover.password, tuple(sorted(set(repositories)))
    )
    return bootstrap_registry.decode_record(
        bootstrap_registry.encode_record(record), where="the bootstrap registry"
    )


def build_result_configmap(result: HandoverResult, *, namespace: str = NAMESPACE) -> decode.Json:
    """Build the ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": RESULT_CONFIGMAP, "namespace": namespace, "labels": PART_OF_LABELS},
        "data": {
            "handedOver": json.dumps(dict(result.digests), sort_keys=True),
            "registry": result.registry,
            "completed": result.completed,
        },
    }


def read_result_configmap(document: decode.Json) -> HandoverResult:
    """Read the ConfigMap; raise `ConfigError`."""
    where = f"ConfigMap {NAMESPACE}/{RESULT_CONFIGMAP}"
    data = decode.Fields.from_json(document, where).get_object("data")
    text = data.get_required_text("handedOver")
    digests = decode.Fields.from_json(decode.load_json(text, where=where), where)
    return HandoverResult(
        {name: digests.get_required_text(name) for name in digests.values},
        data.get_text("registry"),
        data.get_text("completed"),
    )


def _read_objects(values: object, where: str) -> tuple[decode.Json, ...]:
    if not isinstance(values, list) or len(values) > _OBJECTS_LIMIT:
        raise errors.ConfigError(f"{where}: expected a list of at most {_OBJECTS_LIMIT} objects")
    objects = []
    for index, value in enumerate(values):
        fields = decode.Fields.from_json(value, f"{where}[{index}]")
        kind = fields.get_required_text("kind")
        if kind not in ADOPTED_KINDS:
            raise errors.ConfigError(
                f"{fields.path_of('kind')}: expected one of {', '.join(ADOPTED_KINDS)}, found "
                f"{kind!r:.60}"
            )
        fields.get_object("metadata").get_required_text("name")
        objects.append(fields.values)
    return tuple(objects)


def _read_json(data: decode.Fields, name: str, where: str) -> object:
    text = data.get_required_text(name)
    if len(text) > 2 * _LIMIT:
        raise errors.ConfigError(f"{data.path_of(name)}: longer than a Secret can be")
    try:
        content = json_text.decode_base64(text)
    except ValueError:
        # Without its cause, which contains the content.
        raise errors.ConfigError(f"{data.path_of(name)}: not base64") from None
    return decode.load_json(content, where=f"{where}, {name}")


HANDED_OVER = "ImageHandedOver"
"""Condition of a MachineOSConfig."""
DEADLINE_EXCEEDED, COPYING, DONE = "DeadlineExceeded", "Copying", "HandedOver"
_MESSAGE_LIMIT = 2000
_FIRST_RETRY_S, _MAX_RETRY_S = 5.0, 300.0
_NAMES_LIMIT = 5
_TEXTS_LIMIT, _REASON_LIMIT = 6, 500


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
    def from_json(cls, document: decode.Json) -> "RegistryNode":
        """Parse a Node; raise `ConfigError`."""
        meta = object_meta.read_metadata(document, "Node")
        notes = node_facts.read_annotations(meta)
        return cls(
            meta.name,
            notes.get(key.BOOTSTRAP_REGISTRY, ""),
            notes.get(key.REMOVE_BOOTSTRAP_REGISTRY, ""),
            node_selection.is_etcd_member(meta.labels),
            bool(notes.get(key.STATE)),
            _read_problem(notes),
        )


def compute_condition(
    handover: Handover, image: HandoverImage, state: MoveState | None, overdue: str
) -> object_meta.Condition:
    """Compute the condition of an image, without time.

    ``overdue`` describes the deadline that has passed; empty before it.
    """
    if state is not None and state.is_done:
        text = f"{image.final_image} is in its final registry, and nodes can pull it"
        shown = "; ".join(filter(None, (text, sanitize.escape_text(state.message))))
        return object_meta.Condition(HANDED_OVER, "True", DONE, shown[:_MESSAGE_LIMIT])
    reason, cause = COPYING, f"copying {image.digest} from {handover.registry} to {image.push_spec}"
    if not handover.registry:
        cause = f"looking for {image.final_image}"
    if state is not None and state.failures:
        reason, cause = state.reason, state.message
    if overdue:
        reason, cause = DEADLINE_EXCEEDED, f"{overdue}; retrying; {cause}"
    return object_meta.Condition(
        HANDED_OVER, "False", reason, sanitize.escape_text(cause)[:_MESSAGE_LIMIT]
    )


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
    return all(result.digests.get(image.pool) == image.digest for image in handover.images)


def find_nodes_to_mark(nodes: Iterable[RegistryNode], registry: str) -> tuple[str, ...]:
    """Return the nodes that use the registry and are not asked to drop it."""
    if not registry:
        return ()
    return tuple(
        sorted(
            node.name for node in nodes if node.registry == registry and node.requested != registry
        )
    )


def describe_missing_nodes(
    nodes: Iterable[RegistryNode], registry: str, machines: int | None
) -> str:
    """Return which nodes still need the bootstrap host; empty when none does.

    Without a registry a node needs nothing after it joined. ``machines`` is the number of machines
    that the bootstrap host serves; None if it is unknown.
    """
    ordered = sorted(nodes, key=lambda node: node.name)
    joined = [node for node in ordered if node.is_control_plane]
    expected = max(machines or 1, 1)
    texts = []
    if len(joined) < expected:
        many = f"{expected} machines" if machines else "the machines"
        texts.append(f"{len(joined)} of {many} of the control plane have joined")
    if registry:
        # An agent reports its first state together with the registry that it uses.
        silent = [node.name for node in joined if not node.has_reported]
        users = [node.name for node in ordered if node.registry == registry]
        if silent:
            texts.append(f"the agent has not reported yet on {_join_names(silent)}")
        if users:
            texts.append(f"{registry} is still the mirror of {_join_names(users)}")
    if texts:
        # An agent that cannot switch to its image neither joins the others nor drops the registry.
        texts += [
            f"node {node.name} is Degraded: {node.problem}" for node in ordered if node.problem
        ]
    return "; ".join(texts[:_TEXTS_LIMIT])


def _read_problem(notes: Mapping[str, str]) -> str:
    if notes.get(key.STATE) != key.NodeState.DEGRADED:
        return ""
    return sanitize.escape_text(notes.get(key.REASON, ""))[:_REASON_LIMIT] or "it gives no reason"


def _join_names(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_LIMIT
    text = ", ".join(names[:_NAMES_LIMIT]) + (f" and {more} more" if more > 0 else "")
    return f"node {text}" if len(names) == 1 else f"nodes {text}"


def merge_results(
    before: HandoverResult | None, handover: Handover, completed: str
) -> HandoverResult:
    """Return the result with the images of this hand-over."""
    digests = {**(before.digests if before else {})}
    digests |= {image.pool: image.digest for image in handover.images}
    return HandoverResult(digests, handover.registry, completed)


@dataclass(frozen=True, slots=True)
class PoolProgress:
    """Pools without their image, and failed builds, each in a sentence."""

    missing: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def describe_pool_progress(
    pools: Sequence[machineconfigpool.MachineConfigPool],
    configs: Mapping[str, machineosconfig.MachineOSConfig],
    builds: Mapping[str, machineosbuild.MachineOSBuild],
) -> PoolProgress:
    """Describe the pools with a MachineOSConfig; without one there is nothing to wait for."""
    missing, failed = [], []
    for pool in sorted(pools, key=lambda pool: pool.name):
        config = os_image.find_pool_owner(pool.name, configs.values())
        if config is None:
            continue
        build = builds.get(config.current_build)
        failure = (
            build.message
            if build and build.state is machineosbuild.BuildState.FAILED
            else config.problem
        )
        if failure:
            failed.append(f"the image of pool {pool.name} cannot be built: {failure}")
        elif build is None or build.state is not machineosbuild.BuildState.SUCCEEDED:
            missing.append(_describe_build(pool.name, build))
        elif text := _describe_nodes(pool):
            missing.append(text)
    return PoolProgress(tuple(missing), tuple(failed))


def parse_objects(
    pools: Iterable[decode.Json], configs: Iterable[decode.Json], builds: Iterable[decode.Json]
) -> PoolProgress:
    """Describe the pools of these documents; raise `ConfigError`."""
    image_configs = [machineosconfig.MachineOSConfig.from_json(document) for document in configs]
    image_builds = [machineosbuild.MachineOSBuild.from_json(document) for document in builds]
    return describe_pool_progress(
        [machineconfigpool.MachineConfigPool.from_json(document) for document in pools],
        {config.name: config for config in image_configs if not config.is_deleting},
        {build.name: build for build in image_builds if not build.is_deleting},
    )


def _describe_build(pool: str, build: machineosbuild.MachineOSBuild | None) -> str:
    if build is None:
        return f"pool {pool} waits for its image: its build has not begun"
    message = f": {build.message}" if build.message else ""
    return f"pool {pool} waits for its image: {build.name} is {build.state or 'new'}{message}"


def _describe_nodes(pool: machineconfigpool.MachineConfigPool) -> str:
    """Return which nodes lack the image; empty when all have it, also when there is none."""
    counts = pool_status.read_reported_counts(pool)
    if counts is None:
        return f"pool {pool.name} has no status yet"
    if counts.updated >= counts.total:
        return ""
    degraded = next(
        (condition for condition in pool.conditions if condition.type == pool_status.DEGRADED), None
    )
    why = f"; {degraded.message}" if degraded and degraded.status == "True" else ""
    return f"pool {pool.name}: {counts.updated} of {counts.total} nodes have the image{why}"
