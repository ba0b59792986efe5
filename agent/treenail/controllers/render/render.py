"""Renders the MachineConfig of a pool from the MachineConfigs that it selects.

Pure: the render controller and the command ``treenail-controller render`` share it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from treenail import __version__
from treenail.api import annotations as key
from treenail.api import ignition, machineconfigpool
from treenail.api.decode import Fields, Json
from treenail.api.machineconfig import API_VERSION, KIND, MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.meta import ObjectMeta, OwnerReference
from treenail.config import reconcilable
from treenail.config.merge import (
    GENERATED_BY,
    BaseImages,
    MergedConfig,
    merge_machine_configs,
)
from treenail.config.provenance import PROVENANCE, Provenance, list_named_entries
from treenail.config.reconcilable import ValidationOverride
from treenail.config.rendered_name import rendered_name
from treenail.config.validation import (
    ValidConfig,
    check_rendered_size,
    find_control_character,
    validate_config,
)
from treenail.controllers.render.inputs import is_owned_by_pool
from treenail.errors import ConfigError, UnreconcilableError

CONTROLLER_CONFIG_KIND = "ControllerConfig"
OS_IMAGE_OVERRIDDEN = "machineconfiguration.openshift.io/os-image-url-overridden"

_NAME_LIMIT = 253
_LOCATION = re.compile(r"spec\.(?:config\.(?:\w+\.)?)?(\w+)(?:\[(\d+)\])?")


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """The parts of the ControllerConfig that rendering needs; they apply to all pools."""

    base_images: BaseImages = field(default_factory=BaseImages)
    release_version: str = ""
    metadata: ObjectMeta = field(default_factory=ObjectMeta, compare=False)

    @classmethod
    def from_json(cls, document: object) -> "ControllerConfig":
        """Read an API object or a file; raise `ConfigError`."""
        fields = Fields.from_json(document, "")
        spec = fields.get_object("spec")
        annotations = fields.get_object("metadata").get_text_map("annotations")
        return cls(
            BaseImages(
                spec.get_text("baseOSContainerImage"),
                spec.get_text("baseOSExtensionsContainerImage"),
            ),
            annotations.get(key.RELEASE_VERSION, ""),
            ObjectMeta.from_fields(fields.get_object("metadata")),
        )


@dataclass(frozen=True, slots=True)
class RenderedConfig:
    """A rendered MachineConfig and its sources."""

    config: MachineConfig = field(repr=False)
    sources: tuple[str, ...]
    """Names of the merged MachineConfigs, in merge order."""
    provenance: Provenance = field(repr=False)
    warnings: tuple[str, ...] = ()
    """Fields of the sources that have no effect."""

    @property
    def name(self) -> str:
        return self.config.name

    def to_pool_configuration(self) -> Json:
        """Convert to ``spec.configuration`` of the pool."""
        source = [{"apiVersion": API_VERSION, "kind": KIND, "name": name} for name in self.sources]
        return {"apiVersion": API_VERSION, "kind": KIND, "name": self.name, "source": source}


def render_pool(
    pool: MachineConfigPool,
    configs: Iterable[MachineConfig],
    controller_config: ControllerConfig,
    *,
    current: MachineConfig | None = None,
    allowed: frozenset[ValidationOverride] = frozenset(),
    validate: Callable[[MachineConfig], ValidConfig] = validate_config,
) -> RenderedConfig:
    """Render and validate the config of a pool; ``configs`` are all of the cluster, in any order.

    ``current`` and ``allowed`` are those of `check_update`. ``validate`` may remember results, as
    `ValidatedConfigs` does. Raises `ConfigError`, which names the MachineConfig that caused it.
    """
    chosen = select_configs(pool, configs)
    valid = {config.name: validate(config) for config in chosen}
    warnings = tuple(
        f"MachineConfig {name}: {ignored}"
        for name, each in valid.items()
        for ignored in each.ignored
    )
    merged = merge_machine_configs(
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
    check_rendered_size(merged.spec, f"the rendered config of pool {pool.name}")
    annotations = {
        GENERATED_BY: f"treenail-{__version__}",
        key.RELEASE_VERSION: controller_config.release_version,
        PROVENANCE: merged.provenance.to_text(),
    }
    if merged.has_os_image_override:
        annotations[OS_IMAGE_OVERRIDDEN] = "true"
    meta = ObjectMeta(
        name=name, annotations=annotations, owner_references=_build_owner_references(pool)
    )
    rendered = MachineConfig.from_json({"metadata": meta.to_json(), "spec": merged.spec})
    _check_ignition(rendered, chosen, merged.provenance)
    found = RenderedConfig(rendered, merged.sources, merged.provenance, warnings)
    if current is not None:
        check_update(current, found, allowed=allowed)
    return found


def check_update(
    current: MachineConfig,
    new: RenderedConfig,
    *,
    allowed: frozenset[ValidationOverride] = frozenset(),
) -> None:
    """Raise `UnreconcilableError` for a change that a running node cannot apply.

    ``current`` is the config of the pool's nodes. Changes in ``allowed`` pass.
    """
    if current.name != new.name:
        _check_reconcilable(current, new.config, new.provenance, allowed)


def select_configs(
    pool: MachineConfigPool, configs: Iterable[MachineConfig]
) -> tuple[MachineConfig, ...]:
    """Select the MachineConfigs of the pool, without rendered ones.

    Raises `ConfigError` when the pool selects none, or all of them with an empty selector.
    """
    selector = pool.machine_config_selector
    if selector is not None and selector.is_empty:
        raise ConfigError(
            f"pool {pool.name} selects all MachineConfigs, also those of other pools",
            remedy="write a machineConfigSelector with at least one requirement",
        )
    found = (
        ()
        if selector is None
        else tuple(
            config
            for config in configs
            if selector.matches(config.metadata.labels) and not is_rendered(config)
        )
    )
    if not found:
        raise ConfigError(
            f"couldn't find any MachineConfigs for pool: {pool.name}",
            remedy="give a MachineConfig the labels that the pool's machineConfigSelector names",
        )
    return found


def is_rendered(config: MachineConfig) -> bool:
    """Return True for a rendered config: a pool is its controller."""
    return is_owned_by_pool(config.metadata)


def _build_owner_references(pool: MachineConfigPool) -> tuple[OwnerReference, ...]:
    if not pool.metadata.uid:
        return ()  # A pool from a file has no UID, and an owner reference needs one.
    return (
        OwnerReference(
            api_version=machineconfigpool.API_VERSION,
            kind=machineconfigpool.KIND,
            name=pool.name,
            uid=pool.metadata.uid,
            controller=True,
            block_owner_deletion=True,
        ),
    )


def _check_characters(merged: MergedConfig, chosen: Iterable[MachineConfig]) -> None:
    """Raise for a character that YAML rejects, so that the MCO cannot compute the name."""
    if not find_control_character(merged.spec):
        return
    for config in chosen:
        spec = Fields(config.to_json(), "").get_object("spec").values
        if place := find_control_character(spec):
            raise ConfigError(
                f"MachineConfig {config.name}: {place}: expected no control character, found one "
                "that YAML rejects",
                remedy="remove it, or write the contents of a file in base64",
            )


def _check_ignition(
    new: MachineConfig, chosen: Iterable[MachineConfig], provenance: Provenance
) -> None:
    """Raise when a node cannot append, or configs that are valid alone contradict each other."""
    try:
        parsed = ignition.parse_ignition(new.config)
    except ConfigError as error:
        names = _find_sources(str(error), new, provenance)
        prefix = f"MachineConfig {names[-1]}: together with the others, " if names else ""
        raise ConfigError(f"{prefix}{error}", remedy=error.remedy) from error
    appended = {file.path for file in parsed.files if file.append}
    for config in chosen if appended else ():
        for file in ignition.parse_ignition(config.config).files:
            if file.append and file.path in appended:
                raise ConfigError(
                    f"MachineConfig {config.name}: {file.location}.append: cannot append to a "
                    "file of a running node",
                    remedy="write the whole file as contents",
                )


def _check_reconcilable(
    current: MachineConfig,
    new: MachineConfig,
    provenance: Provenance,
    allowed: frozenset[ValidationOverride],
) -> None:
    found = reconcilable.find_irreconcilable_changes(current, new, allowed=allowed)
    if not found:
        return
    reasons = []
    for obstacle in found:
        names = _find_sources(obstacle.place, new, provenance)
        prefix = f"MachineConfig {names[-1]}: " if names else ""
        reasons.append(f"{prefix}{obstacle.reason}")
    raise UnreconcilableError(
        f"cannot change a running node from {current.name} to {new.name}: {'; '.join(reasons)}",
        remedy="; ".join(dict.fromkeys(obstacle.remedy for obstacle in found)),
    )


def _find_sources(location: str, new: MachineConfig, provenance: Provenance) -> tuple[str, ...]:
    """Return the MachineConfigs that set ``location``; empty when its value was removed."""
    found = _LOCATION.match(location)
    if found is None:
        return ()
    section, index = found[1], found[2]
    if section == "kernelArguments":
        arguments = ("kernelArguments.shouldExist", "kernelArguments.shouldNotExist")
        return tuple(name for each in arguments for name in provenance.find_section_sources(each))
    if index is None:
        return provenance.find_section_sources(section)
    entries = [name for where, name in list_named_entries(new.config or {}) if where == section]
    return provenance.find_sources(section, entries[int(index)])
