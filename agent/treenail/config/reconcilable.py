"""Configs, and changes between two configs, that a running node cannot apply.

The agent, `render`, `plan`, `build`, the installer and the config server decide here. Reasons of
changes are those of the Machine Config Operator, so that both accept the same changes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from treenail.api import decode, machineconfig, pullspec
from treenail.api.ignition import model, schema
from treenail.config import node_paths, wanted_state
from treenail.errors import ConfigError, IgnitionError, UnreconcilableError

_REINSTALL = "revert the change, or reinstall the node with it"


class ValidationOverride(StrEnum):
    """Difference that a cluster may allow in ``irreconcilableValidationOverrides.storage``.

    It then takes effect only on nodes that are installed afterwards.
    """

    DISKS = "Disks"
    FILESYSTEMS = "FileSystems"
    RAID = "Raid"


@dataclass(frozen=True, slots=True)
class IrreconcilableChange:
    """One difference that cannot be applied; ``place`` is in the new config."""

    place: str
    reason: str
    remedy: str = _REINSTALL


def read_appliable_state(
    config: wanted_state.ParsedConfig, *, image: str = ""
) -> wanted_state.WantedState:
    """Return the state that a config requires; raise `ConfigError` when no node can apply it.

    ``image`` is requested beside the config, and replaces those of the config.
    """
    state = config.wanted
    try:
        _reject_included_configs(config.ignition)
        images = [] if image else [("osImageURL", state.os.image)]
        if not image and wanted_state.list_packages(state.os):
            images.append(("baseOSExtensionsContainerImage", state.os.extensions_image))
        for field, name in images:
            # The MCO's pre-built images have a tag beside the digest.
            if name and "@" not in name:
                pullspec.parse_pull_spec(name, where=f"spec.{field}")
    except ConfigError as error:
        title = f"MachineConfig {config.config.name}: " if config.config.name else ""
        raise type(error)(f"{title}{error}", remedy=error.remedy) from error
    return state


def _reject_included_configs(config: model.IgnitionConfig) -> None:
    """Raise for a config that includes others: it is incomplete without them."""
    section = decode.Fields(config.ignition_section, "spec.config.ignition").get_object("config")
    for name, value in section.values.items():
        if schema.has_values(value):
            raise IgnitionError(
                f"{section.path_of(name)}: a node fetches no other configs",
                remedy="put their contents into this config",
            )


def check_reconcilable(
    old: wanted_state.ParsedConfig,
    new: wanted_state.ParsedConfig,
    *,
    allowed: frozenset[ValidationOverride] = frozenset(),
) -> None:
    """Raise `UnreconcilableError` with all irreconcilable changes; also raises `IgnitionError`."""
    changes = find_irreconcilable_changes(old, new, allowed=allowed)
    if changes:
        listed = "; ".join(f"{change.reason} ({change.place})" for change in changes)
        raise UnreconcilableError(
            f'new machineconfig "{new.config.name}" is not reconcilable against '
            f'"{old.config.name}": {listed}',
            remedy="; ".join(dict.fromkeys(change.remedy for change in changes)),
        )


def find_irreconcilable_changes(
    old: wanted_state.ParsedConfig,
    new: wanted_state.ParsedConfig,
    *,
    allowed: frozenset[ValidationOverride] = frozenset(),
) -> tuple[IrreconcilableChange, ...]:
    """Return the changes that cannot be applied to a running node; raises `IgnitionError`."""
    before, after = old.ignition, new.ignition
    return (
        *_check_users(before, after),
        *_check_first_boot(before, after, allowed),
        *_check_nodes(before, after),
        *_check_files(before, after),
        *_check_forbidden_paths(after),
        *_check_fips(old.config, new.config),
    )


def find_read_only_paths(new: wanted_state.ParsedConfig) -> tuple[IrreconcilableChange, ...]:
    """Return the paths that only an image can provide; raises `IgnitionError`."""
    return tuple(
        IrreconcilableChange(
            f"{entry.location}.path",
            f"cannot write {entry.path}: /usr is read-only on a node",
            "build it into the image, and request the image beside the config; or write it below "
            "/etc or /var",
        )
        for entry in _list_entries(new.ignition)
        if node_paths.is_read_only(entry.path)
    )


def _check_users(
    old: model.IgnitionConfig, new: model.IgnitionConfig
) -> Iterator[IrreconcilableChange]:
    if _sort_entries(old.groups) != _sort_entries(new.groups):
        yield IrreconcilableChange(
            "spec.config.passwd.groups",
            "invalid passwd change(s): ignition Passwd Groups section contains changes",
        )
    if _summarize_users(old) == _summarize_users(new):
        return
    section = "invalid passwd change(s): ignition passwd user section contains unsupported changes"
    for index, user in enumerate(new.users):
        place = f"spec.config.passwd.users[{index}]"
        if user.name != node_paths.CORE_USER:
            remedy = f"set keys and passwords of {node_paths.CORE_USER} only"
            yield IrreconcilableChange(f"{place}.name", f"{section}: non-core user", remedy)
        elif user.others:
            others = ", ".join(sorted(user.others))
            yield IrreconcilableChange(
                place,
                "invalid passwd change(s): SSH keys and password hash are not reconcilable "
                f"with {others} beside them",
                f"remove {others}",
            )
        elif not user.ssh_keys and user.password_hash is None:
            yield IrreconcilableChange(
                place,
                f"{section}: user must be core and have 1 or more sshKeys",
                "to remove all keys, remove the user from the config",
            )


def _check_first_boot(
    old: model.IgnitionConfig, new: model.IgnitionConfig, allowed: frozenset[ValidationOverride]
) -> Iterator[IrreconcilableChange]:
    """Check the sections that Ignition applies only once, before a node's first boot."""
    if _summarize_kernel_arguments(old) != _summarize_kernel_arguments(new):
        yield IrreconcilableChange(
            "spec.config.kernelArguments",
            "ignition kargs section contains changes",
            "use spec.kernelArguments of the MachineConfig",
        )
    for name in schema.FETCH_SECTIONS:
        part = new.ignition_section.get(name)
        if schema.has_values(part) and part != old.ignition_section.get(name):
            yield IrreconcilableChange(
                f"spec.config.ignition.{name}",
                f"ignition {name} section contains changes",
                schema.FETCH_REMEDY,
            )
    for name, before, after, override in (
        ("disks", old.disks, new.disks, ValidationOverride.DISKS),
        ("filesystems", old.filesystems, new.filesystems, ValidationOverride.FILESYSTEMS),
        ("raid", old.raid, new.raid, ValidationOverride.RAID),
    ):
        if override not in allowed and _sort_entries(before) != _sort_entries(after):
            yield IrreconcilableChange(
                f"spec.config.storage.{name}",
                f"ignition {name} section contains changes",
                f"{_REINSTALL}, or allow {override} in irreconcilableValidationOverrides",
            )


def _check_nodes(
    old: model.IgnitionConfig, new: model.IgnitionConfig
) -> Iterator[IrreconcilableChange]:
    if wanted_state.read_directories(old) != wanted_state.read_directories(new):
        yield IrreconcilableChange(
            "spec.config.storage.directories",
            "ignition directories section contains changes",
            "omit parents of files, which are created anyway; create others by a tmpfiles.d file",
        )
    if new.links and wanted_state.read_links(old) != wanted_state.read_links(new):
        yield IrreconcilableChange(
            "spec.config.storage.links",
            "ignition links section contains changes",
            "create the link by a tmpfiles.d file",
        )


def _check_files(
    old: model.IgnitionConfig, new: model.IgnitionConfig
) -> Iterator[IrreconcilableChange]:
    for file in new.files:
        if file.append and file not in old.files:
            reason = f"ignition file {file.path} includes append"
            yield IrreconcilableChange(
                f"{file.location}.append", reason, "write the whole file as contents"
            )
        if file.path == node_paths.FORCE_FILE:
            reason = f"cannot create {file.path} via Ignition"
            yield IrreconcilableChange(
                f"{file.location}.path", reason, "create it on the node manually"
            )


def _check_forbidden_paths(new: model.IgnitionConfig) -> Iterator[IrreconcilableChange]:
    for entry in _list_entries(new):
        if node_paths.belongs_to_agent(entry.path):
            yield IrreconcilableChange(
                f"{entry.location}.path",
                f"cannot write {entry.path}: it belongs to the node agent",
                "remove it from the MachineConfig; build settings of the agent into the image, or "
                "write them at the installation",
            )
        elif node_paths.belongs_to_system(entry.path):
            yield IrreconcilableChange(
                f"{entry.location}.path",
                f"cannot write {entry.path}: the kernel or OSTree provides this directory",
                "remove it from the MachineConfig; set kernel parameters by a file in "
                "/etc/sysctl.d or /etc/tmpfiles.d",
            )


def _list_entries(
    config: model.IgnitionConfig,
) -> Iterator[model.IgnitionFile | model.IgnitionDirectory | model.IgnitionLink]:
    yield from config.files
    yield from config.directories
    yield from config.links


def _check_fips(
    old: machineconfig.MachineConfig, new: machineconfig.MachineConfig
) -> Iterator[IrreconcilableChange]:
    if old.fips != new.fips:
        yield IrreconcilableChange(
            "spec.fips",
            "detected change to FIPS flag; refusing to modify FIPS on a running cluster",
        )


def _summarize_users(config: model.IgnitionConfig) -> dict[str, tuple[object, ...]]:
    def login(user: model.IgnitionUser) -> tuple[object, ...]:
        return frozenset(user.ssh_keys), user.password_hash, json.dumps(user.others, sort_keys=True)

    return {user.name: login(user) for user in config.users}


def _summarize_kernel_arguments(
    config: model.IgnitionConfig,
) -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(config.kernel_arguments), frozenset(config.absent_kernel_arguments)


def _sort_entries(entries: tuple[decode.Json, ...]) -> list[str]:
    return sorted(json.dumps(entry, sort_keys=True) for entry in entries)
