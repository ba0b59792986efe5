"""State that a MachineConfig requires on a node: files, units, users, kernel arguments and an OS.

Configs that give the same result on disk are equal here: an owner without a name is root, a
missing mode is the default, a masked unit has no contents.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from treenail import deployment_change, errors
from treenail.api import machineconfig
from treenail.api.ignition import model, parser
from treenail.config import node_paths, validation

UserOrGroup = int | str
"""A user or group: a number, or a name that exists on the node."""

ROOT: UserOrGroup = 0
FILE_MODE = 0o644
DIRECTORY_MODE = 0o755

_MAX_FILE_MODE = 0o777
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class WantedFile:
    path: str
    contents: model.Contents = field(default_factory=model.Contents)
    mode: int = FILE_MODE
    user: UserOrGroup = ROOT
    group: UserOrGroup = ROOT
    sha256: str = field(default="", compare=False)
    """SHA-256 of the contents; empty when they have not been decoded."""


@dataclass(frozen=True, slots=True)
class WantedDirectory:
    path: str
    mode: int = DIRECTORY_MODE
    user: UserOrGroup = ROOT
    group: UserOrGroup = ROOT


@dataclass(frozen=True, slots=True)
class WantedLink:
    path: str
    target: str
    is_hard: bool = False
    user: UserOrGroup = ROOT
    group: UserOrGroup = ROOT


@dataclass(frozen=True, slots=True)
class WantedUnit:
    """A unit; without contents it is the node's existing unit of this name.

    ``enabled`` None leaves it to the presets. ``mask`` False removes a mask from the node's
    unit, None leaves the mask unchanged. A drop-in with empty contents must not exist.
    """

    name: str
    contents: str = field(default="", repr=False)
    enabled: bool | None = None
    mask: bool | None = None
    dropins: Mapping[str, str] = field(default_factory=dict, repr=False)

    def list_files(self) -> Iterator[tuple[str, str]]:
        """Yield the path and the text of each file of the unit."""
        if self.contents:
            yield node_paths.unit_path(self.name), self.contents
        for name, text in self.dropins.items():
            if text:
                yield node_paths.dropin_path(self.name, name), text


@dataclass(frozen=True, slots=True)
class WantedUser:
    name: str
    ssh_keys: tuple[str, ...] = field(default=(), repr=False)
    password_hash: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class WantedOS:
    """Operating system: its image, its kernel and its layered extensions."""

    image: str = ""
    extensions_image: str = ""
    kernel_type: str = machineconfig.DEFAULT_KERNEL
    kernel_arguments: tuple[str, ...] = ()
    """In order and with repetitions: both are significant to the kernel."""
    extensions: frozenset[str] = frozenset()
    fips: bool = False


@dataclass(frozen=True, slots=True)
class WantedState:
    """Complete state that a config requires, by path or name, in the order of the document."""

    files: Mapping[str, WantedFile] = field(default_factory=dict)
    directories: Mapping[str, WantedDirectory] = field(default_factory=dict)
    links: Mapping[str, WantedLink] = field(default_factory=dict)
    units: Mapping[str, WantedUnit] = field(default_factory=dict)
    users: Mapping[str, WantedUser] = field(default_factory=dict)
    os: WantedOS = field(default_factory=WantedOS)

    def list_unit_files(self) -> dict[str, str]:
        """Return the text of each written path below the unit directory."""
        return dict(entry for unit in self.units.values() for entry in unit.list_files())

    def list_masks(self) -> set[str]:
        """Return each path below the unit directory that is a mask."""
        return {node_paths.unit_path(unit.name) for unit in self.units.values() if unit.mask}


class ParsedConfig:
    """A MachineConfig that is parsed when that is first needed, and once only.

    A config that cannot be parsed raises the error again at each use.
    """

    def __init__(self, config: machineconfig.MachineConfig) -> None:
        self.config = config

    @cached_property
    def ignition(self) -> model.IgnitionConfig:
        """The Ignition config; raises `IgnitionError`."""
        return parser.parse_ignition(self.config.config)

    @cached_property
    def wanted(self) -> WantedState:
        """The state that the config requires; raises `ConfigError` when no node can have it.

        Decodes the contents of every file once, so that invalid contents fail here and not at the
        write.
        """
        try:
            return _read_wanted_state(self.config, self.ignition)
        except errors.ConfigError as error:
            if not self.config.name:
                raise
            raise type(error)(
                f"MachineConfig {self.config.name}: {error}", remedy=error.remedy
            ) from error


def read_wanted_state(config: machineconfig.MachineConfig) -> WantedState:
    """Return the state that a config requires, for a single use of it; see `ParsedConfig`."""
    return ParsedConfig(config).wanted


def _read_wanted_state(
    config: machineconfig.MachineConfig, ignition: model.IgnitionConfig
) -> WantedState:
    for link in ignition.links:
        _check_link(link)
    return WantedState(
        # Ignition appends at the first boot. The render controller accepts no later append.
        files={file.path: _read_file(file) for file in ignition.files if not file.append},
        directories=read_directories(ignition),
        links=read_links(ignition),
        units={unit.name: _read_unit(unit) for unit in ignition.units},
        users=_read_users(ignition),
        os=_read_os(config),
    )


def read_directories(ignition: model.IgnitionConfig) -> dict[str, WantedDirectory]:
    """Return the directories of an Ignition config, by path."""
    return {entry.path: _read_directory(entry) for entry in ignition.directories}


def read_links(ignition: model.IgnitionConfig) -> dict[str, WantedLink]:
    """Return the links of an Ignition config, by path."""
    return {link.path: _read_link(link) for link in ignition.links}


def _read_file(file: model.IgnitionFile) -> WantedFile:
    if file.path == node_paths.FORCE_FILE:
        raise errors.IgnitionError(
            f"{file.location}.path: cannot write {file.path}: only a user may create it"
        )
    mode = FILE_MODE if file.mode is None else file.mode
    if mode > _MAX_FILE_MODE:
        raise errors.IgnitionError(
            f"{file.location}.mode: expected at most {_MAX_FILE_MODE} (0777), "
            f"found {mode} ({mode:#o})"
        )
    digest = file.contents.compute_sha256()
    return WantedFile(
        file.path, file.contents, mode, _read_owner(file.user), _read_owner(file.group), digest
    )


def _read_directory(entry: model.IgnitionDirectory) -> WantedDirectory:
    mode = DIRECTORY_MODE if entry.mode is None else entry.mode
    return WantedDirectory(entry.path, mode, _read_owner(entry.user), _read_owner(entry.group))


def _check_link(link: model.IgnitionLink) -> None:
    target = link.target
    if link.hard and (not target.startswith("/") or ".." in target.split("/") or "\0" in target):
        raise errors.IgnitionError(
            f"{link.location}.target: expected an absolute path without '..' for the hard link "
            f"{link.path}, found {target!r:.200}",
            remedy="write the full path of the target, or set hard to false",
        )


def _read_link(link: model.IgnitionLink) -> WantedLink:
    return WantedLink(
        link.path, link.target, bool(link.hard), _read_owner(link.user), _read_owner(link.group)
    )


def _read_unit(unit: model.IgnitionUnit) -> WantedUnit:
    dropins = {dropin.name: dropin.contents or "" for dropin in unit.dropins}
    if unit.mask:
        return WantedUnit(unit.name, mask=True, dropins=dropins)
    # Contents replace a mask, so that mask False adds nothing.
    mask = None if unit.contents else unit.mask
    return WantedUnit(unit.name, unit.contents or "", unit.enabled, mask, dropins)


def _read_owner(owner: model.IgnitionOwner) -> UserOrGroup:
    if owner.id is not None:
        return owner.id
    return ROOT if owner.name in (None, "", "root") else owner.name


def _read_users(ignition: model.IgnitionConfig) -> dict[str, WantedUser]:
    return {
        user.name: WantedUser(user.name, user.ssh_keys, user.password_hash)
        for user in ignition.users
    }


def _read_os(config: machineconfig.MachineConfig) -> WantedOS:
    kernel_type = config.kernel_type or machineconfig.DEFAULT_KERNEL
    validation.check_kernel(config)
    if kernel_type != machineconfig.DEFAULT_KERNEL and "kernel-devel" in config.extensions:
        raise errors.ConfigError(
            f"spec.extensions: kernel-devel needs the default kernel, not {kernel_type}"
        )
    for index, entry in enumerate(config.kernel_arguments):
        if _CONTROL.search(entry):
            raise errors.ConfigError(
                f"spec.kernelArguments[{index}]: expected no control character"
            )
    return WantedOS(
        image=config.os_image_url,
        extensions_image=config.extensions_image,
        kernel_type=kernel_type,
        kernel_arguments=tuple(
            argument
            for entry in config.kernel_arguments
            for argument in deployment_change.split_arguments(entry)
        ),
        extensions=frozenset(config.extensions),
        fips=config.fips,
    )


LATER_PACKAGES = frozenset({"openvswitch3.5-ipsec"})
"""Packages that earlier releases of an extension did not have."""


def list_packages(os: WantedOS) -> frozenset[str]:
    """Return the packages that a config layers on the image."""
    extensions = (package for name in os.extensions for package in machineconfig.EXTENSIONS[name])
    return frozenset(extensions) | machineconfig.KERNEL_PACKAGES.get(os.kernel_type, frozenset())


def list_unsupported_packages(layered: Collection[str]) -> tuple[str, ...]:
    """Return the layered packages that belong to no extension and no kernel type."""
    known = frozenset(
        package for packages in machineconfig.EXTENSIONS.values() for package in packages
    )
    return tuple(sorted(frozenset(layered) - known.union(*machineconfig.KERNEL_PACKAGES.values())))


def list_required_packages(os: WantedOS) -> frozenset[str]:
    """Return the packages that the extensions of a config need in every release."""
    return list_packages(os) - LATER_PACKAGES
