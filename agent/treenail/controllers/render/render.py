"""Render the MachineConfig of a pool from the MachineConfigs that it selects.

Pure: the render controller and the command ``treenail-controller render`` share it. The command
reads manifests from files and needs no cluster.

The render controller writes the hash of the objects that it has observed to the pool. A client that
computes another hash knows that the controller has not observed a change yet.
"""

import collections
import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from treenail import __version__
from treenail.api import annotations as key
from treenail.api import (
    decode,
    documents,
    kinds,
    machineconfig,
    machineconfigpool,
    machineosconfig,
    object_meta,
)
from treenail.api.ignition.parser import parse_ignition
from treenail.config import merge, reconcilable, validation, wanted_state
from treenail.config.generated import generate, sources
from treenail.config.provenance import PROVENANCE, Provenance, list_named_entries
from treenail.config.rendered_name import rendered_name
from treenail.controllers.pools import os_image, rollout_policy
from treenail.errors import ConfigError, UnreconcilableError, UsageError

RENDER_INPUTS = "renderInputs"
"""Field of a pool's status with the hash. Only the render controller writes it."""
CONTROLLER_CONFIG_KIND = "ControllerConfig"
OS_IMAGE_OVERRIDDEN = "machineconfiguration.openshift.io/os-image-url-overridden"
_NAME_LIMIT = 253
_MAX_OTHERS = 8
_LOCATION = re.compile(r"spec\.(?:config\.(?:\w+\.)?)?(\w+)(?:\[(\d+)\])?")
_MACHINECONFIG_PREFIX = re.compile(r"MachineConfig (\S+): ")


def hash_render_inputs(
    pool: machineconfigpool.MachineConfigPool,
    configs: Iterable[object_meta.ObjectMeta],
    controller_configs: Iterable[object_meta.ObjectMeta],
    stream_choice: str = "",
) -> str:
    """Hash the MachineConfigs that the pool selects, and all ControllerConfigs.

    ``configs`` are all MachineConfigs of the cluster. The API server changes the generation of an
    object with each change of its spec. ``stream_choice`` is that of
    `os_image.describe_stream`: a status has no generation.
    """
    observed = [*select_sources(pool, configs), *controller_configs]
    lines = sorted(
        f"{metadata.name} {metadata.uid} {metadata.generation}\n" for metadata in observed
    )
    return hashlib.sha256("".join([*lines, stream_choice]).encode()).hexdigest()[:32]


def select_sources(
    pool: machineconfigpool.MachineConfigPool, configs: Iterable[object_meta.ObjectMeta]
) -> list[object_meta.ObjectMeta]:
    """Return the MachineConfigs that the pool selects, without rendered ones."""
    selector = pool.machine_config_selector
    if selector is None or selector.is_empty:
        return []
    return [
        config
        for config in configs
        if selector.matches(config.labels) and not is_owned_by_pool(config)
    ]


def is_owned_by_pool(config: object_meta.ObjectMeta) -> bool:
    """Return True for a rendered config: a pool is its controller."""
    owners = config.owner_references
    return any(owner.kind == machineconfigpool.KIND and owner.controller for owner in owners)


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """The parts of the ControllerConfig that rendering needs; they apply to all pools."""

    base_images: merge.DefaultImages = field(default_factory=merge.DefaultImages)
    release_version: str = ""
    release_image: str = ""
    metadata: object_meta.ObjectMeta = field(default_factory=object_meta.ObjectMeta, compare=False)

    @classmethod
    def from_json(cls, document: object) -> "ControllerConfig":
        """Read an API object or a file; raise `ConfigError`."""
        fields = decode.Fields.from_json(document, "")
        spec = fields.get_object("spec")
        annotations = fields.get_object("metadata").get_text_map("annotations")
        return cls(
            merge.DefaultImages(
                spec.get_text("baseOSContainerImage"),
                spec.get_text("baseOSExtensionsContainerImage"),
            ),
            annotations.get(key.RELEASE_VERSION, ""),
            spec.get_text("releaseImage"),
            fields.get_object("metadata").read(object_meta.ObjectMeta),
        )


@dataclass(frozen=True, slots=True)
class ObservedConfig:
    """A watched MachineConfig; of a rendered one only the metadata."""

    config: machineconfig.MachineConfig
    is_rendered: bool = False
    has_matching_hash: bool = True
    """False for a rendered config whose contents differ from the hash in its name."""

    @classmethod
    def from_json(cls, document: decode.Json) -> "ObservedConfig":
        """Read an API object; raise `ConfigError`."""
        config = machineconfig.MachineConfig.from_json(document)
        if not is_rendered(config):
            return cls(config)
        owner = next(
            reference.name for reference in config.metadata.owner_references if reference.controller
        )
        return cls(
            machineconfig.MachineConfig(metadata=config.metadata),
            is_rendered=True,
            has_matching_hash=_compute_name(owner, document.get("spec")) == config.name,
        )

    @property
    def pool_uid(self) -> str:
        """UID of the pool that owns a rendered config."""
        owners = self.config.metadata.owner_references
        return next((owner.uid for owner in owners if owner.controller), "")

    @property
    def sort_key(self) -> tuple[str, int, str]:
        """Sort key: oldest first, and within a second by resourceVersion."""
        meta = self.config.metadata
        text = meta.resource_version
        is_number = text.isascii() and text.isdigit() and len(text) <= 20
        return meta.created, int(text) if is_number else 0, meta.name


@dataclass(frozen=True, slots=True)
class RenderedConfig:
    """A rendered MachineConfig and its sources."""

    config: machineconfig.MachineConfig = field(repr=False)
    sources: tuple[str, ...]
    """Names of the merged MachineConfigs, in merge order."""
    provenance: Provenance = field(repr=False)
    warnings: tuple[str, ...] = ()
    """Fields of the sources that have no effect."""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def has_os_image_override(self) -> bool:
        """True when a MachineConfig names the OS image."""
        return OS_IMAGE_OVERRIDDEN in self.config.metadata.annotations

    def to_pool_configuration(self) -> decode.Json:
        """Convert to ``spec.configuration`` of the pool."""
        source = [
            {"apiVersion": machineconfig.API_VERSION, "kind": machineconfig.KIND, "name": name}
            for name in self.sources
        ]
        return {
            "apiVersion": machineconfig.API_VERSION,
            "kind": machineconfig.KIND,
            "name": self.name,
            "source": source,
        }


def render_pool(
    pool: machineconfigpool.MachineConfigPool,
    configs: Iterable[machineconfig.MachineConfig],
    controller_config: ControllerConfig,
    *,
    current: machineconfig.MachineConfig | None = None,
    allowed: frozenset[reconcilable.ValidationOverride] = frozenset(),
    validate: Callable[
        [machineconfig.MachineConfig], validation.ValidConfig
    ] = validation.validate_config,
    read_current: Callable[[], machineconfig.MachineConfig | None] = lambda: None,
) -> RenderedConfig:
    """Render and validate the config of a pool; ``configs`` are all of the cluster, in any order.

    ``current`` and ``allowed`` are those of `check_update`. ``validate`` may remember results, as
    `ValidatedConfigs` does. ``read_current`` reads ``current`` when a file needs it. Raises
    `ConfigError`, which names the MachineConfig that caused it.
    """
    chosen = select_configs(pool, configs)
    valid = {config.name: validate(config) for config in chosen}
    warnings = tuple(
        f"MachineConfig {name}: {ignored}"
        for name, valid_config in valid.items()
        for ignored in valid_config.ignored
    )
    merged = merge.merge_machine_configs(
        chosen, controller_config.base_images, read=lambda config: valid[config.name].ignition
    )
    if merged.has_os_image_override and pool.os_image_stream:
        by = merged.provenance.find_sources("osImageURL")[-1]
        raise ConfigError(
            f"pool {pool.name} follows the OS image stream {pool.os_image_stream}, but "
            f"MachineConfig {by} sets spec.osImageURL",
            remedy="remove one of the two",
        )
    _check_characters(merged, chosen)
    name = rendered_name(pool.name, merged.spec)
    if len(name) > _NAME_LIMIT:
        raise ConfigError(
            f"cannot render pool {pool.name}: the name {name} exceeds {_NAME_LIMIT} characters"
        )
    validation.check_rendered_size(merged.spec, f"the rendered config of pool {pool.name}")
    annotations = {
        merge.GENERATED_BY: f"treenail-{__version__}",
        key.RELEASE_VERSION: controller_config.release_version,
        PROVENANCE: merged.provenance.to_text(),
    }
    if merged.has_os_image_override:
        annotations[OS_IMAGE_OVERRIDDEN] = "true"
    meta = object_meta.ObjectMeta(
        name=name, annotations=annotations, owner_references=_build_owner_references(pool)
    )
    rendered = machineconfig.MachineConfig.from_json(
        {"metadata": meta.to_json(), "spec": merged.spec}
    )
    warnings += _check_ignition(
        rendered, chosen, merged.provenance, lambda: current or read_current()
    )
    result = RenderedConfig(rendered, merged.sources, merged.provenance, warnings)
    if current is not None:
        check_update(current, result, allowed=allowed)
    return result


def check_appliable(new: RenderedConfig, configs: Iterable[machineconfig.MachineConfig]) -> None:
    """Raise `ConfigError` when no node can apply the config; it names the MachineConfig.

    ``configs`` include the sources. Default images, from the ControllerConfig, are not checked.
    """
    is_default = not new.provenance.find_sources("osImageURL")
    image = new.config.os_image_url if is_default else ""
    try:
        reconcilable.read_appliable_state(wanted_state.ParsedConfig(new.config), image=image)
    except ConfigError as error:
        message = str(error).removeprefix(f"MachineConfig {new.name}: ")
        names = _find_sources(message, new.config, new.provenance) or new.sources
        for config in configs:
            if config.name in names:
                reconcilable.read_appliable_state(wanted_state.ParsedConfig(config))
        raise ConfigError(
            f"MachineConfig {names[-1]}: together with the others, {message}", remedy=error.remedy
        ) from error


def check_update(
    current: machineconfig.MachineConfig,
    new: RenderedConfig,
    *,
    allowed: frozenset[reconcilable.ValidationOverride] = frozenset(),
) -> None:
    """Raise `UnreconcilableError` for a change that a running node cannot apply.

    ``current`` is the config of the pool's nodes. Changes in ``allowed`` pass.
    """
    if current.name != new.name:
        _check_reconcilable(current, new.config, new.provenance, allowed)


def select_configs(
    pool: machineconfigpool.MachineConfigPool, configs: Iterable[machineconfig.MachineConfig]
) -> tuple[machineconfig.MachineConfig, ...]:
    """Select the MachineConfigs of the pool, without rendered ones.

    Raises `ConfigError` when the pool selects none, or all of them with an empty selector.
    """
    selector = pool.machine_config_selector
    if selector is not None and selector.is_empty:
        raise ConfigError(
            f"pool {pool.name} selects all MachineConfigs, also those of other pools",
            remedy="write a machineConfigSelector with at least one requirement",
        )
    selected = tuple(
        config
        for config in configs
        if pool.selects(config.metadata.labels) and not is_rendered(config)
    )
    if not selected:
        raise ConfigError(
            f"couldn't find any MachineConfigs for pool: {pool.name}",
            remedy="give a MachineConfig the labels that the pool's machineConfigSelector names",
        )
    return selected


def is_rendered(config: machineconfig.MachineConfig) -> bool:
    """Return True for a rendered config: a pool is its controller."""
    return is_owned_by_pool(config.metadata)


def _compute_name(pool: str, spec: object) -> str:
    """Compute the name of a rendered config; empty for a spec that no rendered config can have."""
    try:
        return rendered_name(pool, spec) if isinstance(spec, dict) else ""
    except (ValueError, RecursionError):
        # A user added, for example, a number with a fraction, which the hash does not cover.
        return ""


def _build_owner_references(
    pool: machineconfigpool.MachineConfigPool,
) -> tuple[object_meta.OwnerReference, ...]:
    if not pool.metadata.uid:
        return ()  # A pool from a file has no UID, and an owner reference needs one.
    return (
        object_meta.OwnerReference(
            api_version=machineconfigpool.API_VERSION,
            kind=machineconfigpool.KIND,
            name=pool.name,
            uid=pool.metadata.uid,
            controller=True,
            block_owner_deletion=True,
        ),
    )


def _check_characters(
    merged: merge.MergedConfig, chosen: Iterable[machineconfig.MachineConfig]
) -> None:
    """Raise for a character that YAML rejects, so that the MCO cannot compute the name."""
    if not validation.find_control_character(merged.spec):
        return
    for config in chosen:
        spec = decode.Fields(config.to_json(), "").get_object("spec").values
        if place := validation.find_control_character(spec):
            raise ConfigError(
                f"MachineConfig {config.name}: {place}: expected no control character, found one "
                "that YAML rejects",
                remedy="remove it, or write the contents of a file in base64",
            )


def _check_ignition(
    new: machineconfig.MachineConfig,
    chosen: Iterable[machineconfig.MachineConfig],
    provenance: Provenance,
    read_current: Callable[[], machineconfig.MachineConfig | None],
) -> tuple[str, ...]:
    """Return warnings about files that Ignition appended to.

    Raise when a node must append, or configs that are valid alone contradict each other.
    """
    try:
        parsed = parse_ignition(new.config)
    except ConfigError as error:
        names = _find_sources(str(error), new, provenance)
        prefix = f"MachineConfig {names[-1]}: together with the others, " if names else ""
        raise ConfigError(f"{prefix}{error}", remedy=error.remedy) from error
    appended = {file.path: file for file in parsed.files if file.append}
    current = read_current() if appended else None
    known = () if current is None else parse_ignition(current.config).files
    warnings = []
    for config in chosen if appended else ():
        for file in parse_ignition(config.config).files:
            if not file.append or file.path not in appended:
                continue
            place = f"MachineConfig {config.name}: {file.location}.append"
            if appended[file.path] not in known:
                raise ConfigError(
                    f"{place}: cannot append to a file of a running node",
                    remedy="write the whole file as contents",
                )
            warnings.append(f"{place}: the agent does not append, Ignition did at the first boot")
    return tuple(warnings)


def _check_reconcilable(
    current: machineconfig.MachineConfig,
    new: machineconfig.MachineConfig,
    provenance: Provenance,
    allowed: frozenset[reconcilable.ValidationOverride],
) -> None:
    obstacles = reconcilable.find_irreconcilable_changes(
        wanted_state.ParsedConfig(current), wanted_state.ParsedConfig(new), allowed=allowed
    )
    if not obstacles:
        return
    reasons = []
    for obstacle in obstacles:
        names = _find_sources(obstacle.place, new, provenance)
        prefix = f"MachineConfig {names[-1]}: " if names else ""
        reasons.append(f"{prefix}{obstacle.reason}")
    raise UnreconcilableError(
        f"cannot change a running node from {current.name} to {new.name}: {'; '.join(reasons)}",
        remedy="; ".join(dict.fromkeys(obstacle.remedy for obstacle in obstacles)),
    )


def _find_sources(
    location: str, new: machineconfig.MachineConfig, provenance: Provenance
) -> tuple[str, ...]:
    """Return the MachineConfigs that set ``location``; empty when its value was removed."""
    match = _LOCATION.match(location)
    if match is None:
        return ()
    section, index = match[1], match[2]
    if section == "kernelArguments":
        arguments = ("kernelArguments.shouldExist", "kernelArguments.shouldNotExist")
        return tuple(
            name for argument in arguments for name in provenance.find_section_sources(argument)
        )
    if index is None:
        return provenance.find_section_sources(section)
    entries = [name for where, name in list_named_entries(new.config or {}) if where == section]
    return provenance.find_sources(section, entries[int(index)])


@dataclass(frozen=True, slots=True)
class InputManifests:
    """Objects of the input files, by name."""

    pools: dict[str, machineconfigpool.MachineConfigPool] = field(default_factory=dict)
    configs: dict[str, machineconfig.MachineConfig] = field(default_factory=dict)
    controller_configs: dict[str, ControllerConfig] = field(default_factory=dict)
    policies: dict[str, rollout_policy.ObservedPolicy] = field(default_factory=dict)
    image_configs: dict[str, machineosconfig.MachineOSConfig] = field(default_factory=dict)
    image_streams: dict[str, os_image.OSImageStream] = field(default_factory=dict)
    pinned_sets: dict[str, machineconfigpool.PinnedImageSet] = field(default_factory=dict)
    source_objects: dict[tuple[str, str, str], sources.SourceObject] = field(default_factory=dict)
    """Objects that become MachineConfigs, by kind, namespace and name."""
    kubeadm: decode.Json = field(default_factory=dict)
    """The ConfigMap ``kubelet-config`` of kubeadm; empty without one."""
    locations: dict[tuple[str, str], str] = field(default_factory=dict)
    """File and document of each object, by kind and name."""
    warnings: list[str] = field(default_factory=list)
    """Fields and objects that have no effect, such as misspelt ones, with file and document."""
    mistakes: list[str] = field(default_factory=list)
    """The objects among them that an API server refuses."""
    others: collections.Counter[str] = field(default_factory=collections.Counter)
    """Number of the objects that are not read, by kind."""

    def add_object(self, kind: str, name: str, document: decode.Json, location: str) -> None:
        """Parse an object of one of `kinds.READ_KINDS`; raise `ConfigError` that names it."""
        try:
            if kind == machineconfigpool.KIND:
                machineconfigpool.reject_unknown_pool_fields(document)
                self.pools[name] = machineconfigpool.MachineConfigPool.from_json(document)
            elif kind == machineconfig.KIND:
                self.configs[name] = config = machineconfig.MachineConfig.from_json(document)
                if not is_rendered(config):
                    self.warnings.extend(
                        f"{location}, {kind} {name}: {ignored}"
                        for ignored in validation.validate_config(config).ignored
                    )
            elif kind == machineosconfig.KIND:
                machineosconfig.reject_unknown_image_config_fields(document)
                self.image_configs[name] = machineosconfig.MachineOSConfig.from_json(document)
            elif kind == rollout_policy.KIND:
                rollout_policy.parse_policy(document, name)
                self.policies[name] = rollout_policy.ObservedPolicy.from_json(document)
            elif kind == os_image.STREAM_KIND:
                self.image_streams[name] = os_image.OSImageStream.from_json(document)
                self.image_streams[name].check_images()
            elif kind in kinds.GENERATOR_KINDS:
                source = sources.SourceObject.from_json(document)
                self.source_objects[source.key] = source
            elif kind == "PinnedImageSet":
                self.pinned_sets[name] = machineconfigpool.PinnedImageSet.from_json(document)
            else:
                self.controller_configs[name] = ControllerConfig.from_json(document)
        except ConfigError as error:
            message = str(error).removeprefix(f"{kind} {name}: ")
            raise ConfigError(
                f"{location}, {kind} {name}: {message}", remedy=error.remedy
            ) from error

    def add_unread(self, fields: decode.Fields, location: str) -> None:
        """Count an object that is not read, and say why unless it is that of another program."""
        kind = fields.get_text("kind")
        name = fields.get_object("metadata").get_text("name")
        if (kind, name) == ("ConfigMap", sources.KUBEADM_CONFIG):
            self.kubeadm.update(fields.values)
        self.others[f"{kind or 'object without a kind':.80}"] += 1
        if unread := kinds.find_unread_object(kind, fields.get_text("apiVersion")):
            title = f"{kind} {name}".strip()
            self.warnings.append(f"{location}, {title:.300}: {unread}")
            if unread.is_mistake:
                self.mistakes.append(self.warnings[-1])

    def add_generated_configs(self) -> None:
        """Generate MachineConfigs from `source_objects`, and name the objects without effect."""
        self.report_results(self.generate_configs())

    def generate_configs(self) -> Iterable[sources.ObjectResult]:
        """Add the MachineConfigs that `source_objects` generate, and return the results."""
        generation = generate.generate_configs(
            self.source_objects, self.pools.values(), self.configs.values(), self.collect_facts()
        )
        self.configs.update(generation.configs)
        return generation.results.values()

    def report_results(self, results: Iterable[sources.ObjectResult]) -> None:
        """Add what is wrong with the objects of the files."""
        for result in results:
            title = result.source.title
            location = self.locations.get((result.source.kind, title.partition(" ")[2]))
            where = ", ".join(filter(None, (location, title)))
            problems = [
                f"{where}: {message.removeprefix(f'{title}: ')}" for message in result.messages
            ]
            self.mistakes.extend(problems)
            self.warnings.extend(problems)
            self.warnings.extend(f"{where}: {warning}" for warning in result.warnings)

    def collect_facts(self) -> sources.ClusterFacts:
        """Return what the generators need to know of the cluster beside their objects."""
        cluster = next(iter(self.controller_configs.values()), ControllerConfig())
        images = [cluster.base_images.os]
        images += [image.os_image for each in self.image_streams.values() for image in each.streams]
        images += [config.os_image_url for config in self.configs.values()]
        images += [config.pull_spec for config in self.image_configs.values()]
        for pool in self.pools.values():
            images += [pool.os_image or "", pool.os_image_tag.name if pool.os_image_tag else ""]
        return sources.ClusterFacts(
            cluster.release_image,
            tuple(dict.fromkeys(filter(None, images))),
            decode.Fields(self.kubeadm, sources.KUBEADM_CONFIG)
            .get_object("data")
            .get_text("kubelet"),
        )

    def require_objects(self, action: str) -> None:
        """Raise `ConfigError` when nothing was read; it names what the input has."""
        if self.locations:
            return
        counts = [f"{count} {name}" for name, count in self.others.most_common(_MAX_OTHERS)]
        if len(self.others) > _MAX_OTHERS:
            counts.append("others")
        raise ConfigError(
            f"cannot {action}: expected one of {', '.join(kinds.READ_KINDS)}, found "
            + (", ".join(counts) or "no object"),
            remedy="; ".join(self.mistakes) or "name the files of the change with -f",
        )


def read_manifests(texts: Iterable[tuple[str, str | bytes]]) -> InputManifests:
    """Read the objects in the texts; each text comes with its file name.

    Skips objects of other programs and reads the items of lists. Checks every MachineConfig. Raises
    `ConfigError` with the file and the document.
    """
    manifests = InputManifests()
    for where, text in texts:
        for number, document in enumerate(documents.load_documents(text, where=where), start=1):
            _read_document(document, f"{where}, document {number}", manifests)
    return manifests


def render_pools(
    manifests: InputManifests, only: str | None = None
) -> tuple[list[RenderedConfig], list[ConfigError]]:
    """Render the pools in the order of names; return the configs and the errors of other pools.

    A pool whose current rendered config is in the input cannot change what nodes cannot apply.
    Raises `UsageError` when ``only`` is unknown. Raises `ConfigError` without a pool, and with more
    than one ControllerConfig.
    """
    if only is not None and only not in manifests.pools:
        known = ", ".join(sorted(manifests.pools))
        raise UsageError(
            f"cannot render MachineConfigPool {only}: the input contains "
            + (f"only: {known}" if known else "no MachineConfigPool")
        )
    if not manifests.pools:
        raise ConfigError("cannot render: the input contains no MachineConfigPool")
    if len(manifests.controller_configs) > 1:
        names = ", ".join(sorted(manifests.controller_configs))
        raise ConfigError(f"expected one ControllerConfig, found {names}")
    controller_config = next(iter(manifests.controller_configs.values()), ControllerConfig())
    rendered, errors = [], []
    for name in sorted(manifests.pools) if only is None else [only]:
        pool = manifests.pools[name]
        current = manifests.configs.get(pool.configuration.name)
        try:
            configs = manifests.configs.values()
            images = os_image.select_base_images(
                pool,
                manifests.pools,
                manifests.image_streams.get(os_image.STREAM_NAME),
                controller_config.base_images,
            )
            cluster = replace(controller_config, base_images=images)
            result = render_pool(pool, configs, cluster, current=current)
            check_appliable(result, configs)
            rendered.append(result)
        except ConfigError as error:
            errors.append(_locate_error(error, name, manifests))
    return rendered, errors


def _read_document(document: decode.Json, location: str, manifests: InputManifests) -> None:
    fields = decode.Fields.from_json(document, location)
    kind = fields.get_text("kind")
    if (items := kinds.list_items(fields)) is not None:
        for item in items:
            _read_document(item.values, item.path, manifests)
        return
    if kinds.READ_KINDS.get(kind) != fields.get_text("apiVersion"):
        manifests.add_unread(fields, location)
        return
    name = _get_name(fields, kind, location)
    if kind in kinds.GENERATOR_KINDS and (
        namespace := fields.get_object("metadata").get_text("namespace")
    ):
        name = f"{namespace}/{name}"
    if (earlier := manifests.locations.get((kind, name))) is not None:
        raise ConfigError(f"{location}: {kind} {name} is a duplicate of the one in {earlier}")
    manifests.locations[kind, name] = location
    manifests.add_object(kind, name, document, location)


def _get_name(fields: decode.Fields, kind: str, location: str) -> str:
    name = fields.get_object("metadata").get_text("name")
    if not name:
        raise ConfigError(f"{location}: the {kind} has no metadata.name")
    return name


def _locate_error(error: ConfigError, pool: str, manifests: InputManifests) -> ConfigError:
    """Prefix the error with the location of the object that caused it."""
    message = str(error)
    cause = _MACHINECONFIG_PREFIX.match(message)
    culprit = (machineconfig.KIND, cause[1]) if cause else (machineconfigpool.KIND, pool)
    location = manifests.locations.get(culprit, "")
    return ConfigError(f"{location}: {message}" if location else message, remedy=error.remedy)
