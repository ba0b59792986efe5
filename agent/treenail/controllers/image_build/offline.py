"""Plans builds from files, without a cluster, with the planner of the build controller."""

import base64
import binascii
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api import documents
from treenail.api.decode import Fields, Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clock import Clock
from treenail.controllers.image_build.base_image import is_tag, pin_base_image
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.controllers.image_build.planner import Planner
from treenail.controllers.image_build.planning import BuildPlan, BuildRefused
from treenail.controllers.pools.os_image import find_pool_owner
from treenail.controllers.render import offline
from treenail.controllers.render.render import RenderedConfig
from treenail.errors import ConfigError, NotFoundError, UsageError
from treenail.image.config_layer import ConfigLayer, make_config_layer
from treenail.image.inputs.check_config import find_pool_findings
from treenail.image.inputs.findings import InputReason
from treenail.kube.resources import (
    CONFIGMAPS,
    CONTROLLERCONFIGS,
    MACHINECONFIGS,
    MACHINEOSCONFIGS,
    SECRETS,
    Resource,
)

_RESOURCES = (CONFIGMAPS, CONTROLLERCONFIGS, MACHINEOSCONFIGS, SECRETS)


class FileObjects:
    """Objects of the input files, read as from an API server with one namespace."""

    def __init__(self, texts: Iterable[tuple[str, str | bytes]]) -> None:
        self._objects: dict[tuple[str, str], Json] = {}
        for where, text in texts:
            for document in documents.load_documents(text, where=where):
                self._add_document(document)

    # The files of one build are of one namespace.
    def get(self, resource: Resource, name: str, *, namespace: str = "") -> Json:  # noqa: ARG002
        """Return an object of any namespace; raise `NotFoundError`."""
        try:
            return self._objects[resource.kind, name]
        except KeyError:
            raise NotFoundError(f"the input has no {resource.kind} {name}") from None

    def add_rendered(self, rendered: RenderedConfig) -> None:
        """Add a rendered config."""
        self._objects[MACHINECONFIGS.kind, rendered.name] = rendered.config.to_json()

    def list_image_configs(self) -> list[MachineOSConfig]:
        """Return the MachineOSConfigs by name; raise `ConfigError` that names the object."""
        found = []
        for (kind, name), document in sorted(self._objects.items()):
            if kind == MACHINEOSCONFIGS.kind:
                try:
                    found.append(MachineOSConfig.from_json(document))
                except ConfigError as error:
                    raise ConfigError(f"{kind} {name}: {error}", remedy=error.remedy) from error
        return found

    def _add_document(self, document: Json) -> None:
        fields = Fields.from_json(document, "")
        kind = fields.get_text("kind")
        if kind.endswith("List") and "items" in document:
            for item in fields.iter_objects("items"):
                self._add_document(item.values)
        elif kind in {resource.kind for resource in _RESOURCES}:
            document = encode_strings(document)
            name = fields.get_object("metadata").get_text("name")
            self._objects[kind, name] = document


ResolveTag = Callable[[MachineOSConfig, ClusterReader], str]
"""Returns what the tag of a base image stands for, by digest; raises `TreenailError`."""


@dataclass(frozen=True, slots=True)
class OfflineBuild:
    """The build of one MachineOSConfig, and the files that its Job would mount."""

    config: str
    """Name of the MachineOSConfig."""
    pool: str
    plan: BuildPlan
    layer: ConfigLayer
    context: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    entitlements: Mapping[str, tuple[str, Mapping[str, bytes]]] = field(
        default_factory=dict, repr=False
    )
    """By name: where instructions see them, and their files."""
    base_tag: str = ""
    """The tag that was resolved to the base image; empty for a base by digest."""


def plan_builds(
    texts: Iterable[tuple[str, str | bytes]],
    clock: Clock,
    *,
    architectures: frozenset[str],
    only: str | None,
    resolve_tag: ResolveTag,
    options: tuple[str, ...] = (),
) -> list[OfflineBuild]:
    """Render the pools that have a MachineOSConfig, and plan their builds.

    ``architectures`` are those of the nodes. A base by tag is resolved, unless the input says what
    a cluster has resolved it to.
    ``options`` are those of the builder that change images. Raises `UsageError` when no pool has
    one, and `ConfigError` for invalid input.
    """
    inputs = list(texts)
    found, objects = offline.read_manifests(inputs), FileObjects(inputs)
    configs = [each for each in objects.list_image_configs() if only in (None, each.pool)]
    if not configs:
        place = f"pool {only}" if only else "any pool"
        raise UsageError(
            f"cannot plan a build: the input has no MachineOSConfig for {place}",
            remedy="add a MachineOSConfig whose spec.machineConfigPool.name is a pool of the input",
        )
    reader = ClusterReader(objects, clock, namespace="")
    planner = Planner(reader, options=options)
    builds = []
    for each in configs:
        config = _pin_tag(each, reader, resolve_tag)
        build = _plan_build(config, found, objects, reader, planner, architectures)
        tag = each.base_image if each.base_image != config.base_image else ""
        builds.append(dataclasses.replace(build, base_tag=tag))
    return builds


def _pin_tag(
    config: MachineOSConfig, reader: ClusterReader, resolve_tag: ResolveTag
) -> MachineOSConfig:
    """Return the MachineOSConfig with its base by digest."""
    config = pin_base_image(config)
    if not is_tag(config.base_image):
        return config
    meta = config.metadata
    notes = {**meta.annotations, key.BASE_IMAGE: resolve_tag(config, reader)}
    # A schedule needs a tag, and is of no use here.
    notes.pop(key.REBUILD_SCHEDULE, None)
    return dataclasses.replace(config, metadata=dataclasses.replace(meta, annotations=notes))


def _plan_build(
    config: MachineOSConfig,
    found: offline.InputManifests,
    objects: FileObjects,
    reader: ClusterReader,
    planner: Planner,
    architectures: frozenset[str],
) -> OfflineBuild:
    if config.pool not in found.pools:
        known = ", ".join(sorted(found.pools)) or "none"
        raise UsageError(
            f"cannot plan the build of MachineOSConfig {config.name}: the input has no "
            f"MachineConfigPool {config.pool}, found: {known}",
            remedy=f"add it with: kubectl get machineconfigpool {config.pool} -o yaml | "
            "treenail-controller build -f DIR -f -",
        )
    owner = find_pool_owner(config.pool, objects.list_image_configs())
    for finding in find_pool_findings(config, found.pools[config.pool], owner):
        if finding.reason is InputReason.POOL_TAKEN:
            raise ConfigError(f"MachineOSConfig {config.name}: {finding}")
    configs, errors = offline.render_pools(found, config.pool)
    if errors:
        raise errors[0]
    rendered = configs[0]
    objects.add_rendered(rendered)
    pool = _set_configuration(found.pools[config.pool], rendered)
    try:
        plan = planner.plan_build(config, pool, architectures)
    except BuildRefused as error:
        raise ConfigError(f"MachineOSConfig {config.name}: {error.problem.message}") from error
    layer = make_config_layer(rendered.config, trust_bundle=planner.read_trust_bundle())
    # Equal for all architectures that need such files.
    own = {name: file for each in plan.systems for name, file in each.own_files.items()}
    context, entitlements = read_build_files(reader, plan)
    context = own | context
    return OfflineBuild(config.name, config.pool, plan, layer, context, entitlements)


def _set_configuration(pool: MachineConfigPool, rendered: RenderedConfig) -> MachineConfigPool:
    """Return the pool as the render controller writes it."""
    reference = MachineConfigPool.from_json(
        {
            "metadata": {"name": pool.name},
            "spec": {"configuration": rendered.to_pool_configuration()},
        }
    )
    return dataclasses.replace(pool, configuration=reference.configuration)


def encode_strings(document: Json) -> Json:
    """Return a Secret as the API server stores it: ``stringData`` becomes a part of ``data``."""
    fields = Fields.from_json(document, "")
    texts = fields.get_text_map("stringData") if fields.get_text("kind") == SECRETS.kind else {}
    if not texts:
        return document
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
    rest = {name: value for name, value in document.items() if name != "stringData"}
    return {**rest, "data": {**fields.get_object("data").values, **encoded}}


def read_build_files(
    reader: ClusterReader, plan: BuildPlan
) -> tuple[dict[str, bytes], dict[str, tuple[str, Mapping[str, bytes]]]]:
    """Return the user's files for COPY, and the entitlements of `OfflineBuild`."""
    context = _read_files(reader, CONFIGMAPS, plan.context) if plan.context else {}
    entitlements: dict[str, tuple[str, Mapping[str, bytes]]] = {
        each.name: (
            each.path,
            _read_files(reader, SECRETS if each.is_secret else CONFIGMAPS, each.name),
        )
        for each in plan.entitlements
    }
    return context, entitlements


def _read_files(reader: ClusterReader, resource: Resource, name: str) -> dict[str, bytes]:
    """Return the files that the kubelet shows of a ConfigMap or Secret."""
    document = reader.find_object(resource, name) or {}
    fields = Fields.from_json(document, f"{resource.kind} {name}")
    encoded = "data" if resource is SECRETS else "binaryData"
    plain = "stringData" if resource is SECRETS else "data"
    found = {each: text.encode() for each, text in fields.get_text_map(plain).items()}
    for each, text in fields.get_text_map(encoded).items():
        try:
            found[each] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            # Without its cause, which contains the content.
            raise ConfigError(f"{resource.kind} {name}: {each} is not base64") from None
    return found
