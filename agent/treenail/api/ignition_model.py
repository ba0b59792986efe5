"""Model of an Ignition config in terms of version 3.5.

Sections for the first boot only (disks, filesystems, raid, luks, groups, ``ignition``) keep their
original JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from treenail.api.contents import Contents
from treenail.api.decode import Json
from treenail.api.meta import omit_none

VERSION = "3.5.0"
"""The version that `IgnitionConfig.to_json` writes."""


@dataclass(frozen=True, slots=True)
class IgnitionOwner:
    """A user or group by ID or by name; root when neither is set, and the ID wins over a name."""

    id: int | None = None
    name: str | None = None

    def to_json(self) -> Json | None:
        return omit_none(id=self.id, name=self.name) or None


UNSET_OWNER = IgnitionOwner()


@dataclass(frozen=True, slots=True)
class IgnitionFile:
    """A file; ``location`` is its path in the document."""

    path: str
    contents: Contents = field(default_factory=Contents)
    append: tuple[Contents, ...] = ()
    mode: int | None = None
    user: IgnitionOwner = UNSET_OWNER
    group: IgnitionOwner = UNSET_OWNER
    overwrite: bool | None = None
    location: str = field(default="", compare=False)

    def to_json(self) -> Json:
        return omit_none(
            path=self.path,
            contents=self.contents.to_json() or None,
            append=[part.to_json() for part in self.append] or None,
            mode=self.mode,
            user=self.user.to_json(),
            group=self.group.to_json(),
            overwrite=self.overwrite,
        )


@dataclass(frozen=True, slots=True)
class IgnitionDirectory:
    """A directory."""

    path: str
    mode: int | None = None
    user: IgnitionOwner = UNSET_OWNER
    group: IgnitionOwner = UNSET_OWNER
    overwrite: bool | None = None
    location: str = field(default="", compare=False)

    def to_json(self) -> Json:
        return omit_none(
            path=self.path,
            mode=self.mode,
            user=self.user.to_json(),
            group=self.group.to_json(),
            overwrite=self.overwrite,
        )


@dataclass(frozen=True, slots=True)
class IgnitionLink:
    """A symbolic or hard link."""

    path: str
    target: str
    hard: bool | None = None
    user: IgnitionOwner = UNSET_OWNER
    group: IgnitionOwner = UNSET_OWNER
    overwrite: bool | None = None
    location: str = field(default="", compare=False)

    def to_json(self) -> Json:
        return omit_none(
            path=self.path,
            target=self.target,
            hard=self.hard,
            user=self.user.to_json(),
            group=self.group.to_json(),
            overwrite=self.overwrite,
        )


@dataclass(frozen=True, slots=True)
class IgnitionDropin:
    """A drop-in of a unit."""

    name: str
    contents: str | None = field(default=None, repr=False)

    def to_json(self) -> Json:
        return omit_none(name=self.name, contents=self.contents)


@dataclass(frozen=True, slots=True)
class IgnitionUnit:
    """A systemd unit, or settings and drop-ins of an existing one."""

    name: str
    contents: str | None = field(default=None, repr=False)
    enabled: bool | None = None
    mask: bool | None = None
    dropins: tuple[IgnitionDropin, ...] = ()
    location: str = field(default="", compare=False)

    def to_json(self) -> Json:
        return omit_none(
            name=self.name,
            contents=self.contents,
            enabled=self.enabled,
            mask=self.mask,
            dropins=[dropin.to_json() for dropin in self.dropins] or None,
        )


@dataclass(frozen=True, slots=True)
class IgnitionUser:
    """A user; ``others`` keeps all fields except SSH keys and the password hash."""

    name: str
    ssh_keys: tuple[str, ...] = field(default=(), repr=False)
    password_hash: str | None = field(default=None, repr=False)
    others: Json = field(default_factory=dict, repr=False)

    def to_json(self) -> Json:
        return {
            **self.others,
            **omit_none(
                name=self.name,
                passwordHash=self.password_hash,
                sshAuthorizedKeys=list(self.ssh_keys) or None,
            ),
        }


@dataclass(frozen=True, slots=True)
class IgnitionConfig:
    """An Ignition config; ``version`` is that of the original document."""

    version: str = VERSION
    files: tuple[IgnitionFile, ...] = ()
    directories: tuple[IgnitionDirectory, ...] = ()
    links: tuple[IgnitionLink, ...] = ()
    units: tuple[IgnitionUnit, ...] = ()
    users: tuple[IgnitionUser, ...] = ()
    groups: tuple[Json, ...] = field(default=(), repr=False)
    disks: tuple[Json, ...] = ()
    filesystems: tuple[Json, ...] = ()
    raid: tuple[Json, ...] = ()
    luks: tuple[Json, ...] = field(default=(), repr=False)
    kernel_arguments: tuple[str, ...] = ()
    absent_kernel_arguments: tuple[str, ...] = ()
    ignition_section: Json = field(default_factory=dict, repr=False)
    """Fields of ``ignition`` except the version."""

    def to_json(self) -> Json:
        """Convert to Ignition 3.5 without empty fields, as Go's conversion does."""
        return {
            "ignition": {**self.ignition_section, "version": VERSION},
            **_build_section(
                "kernelArguments",
                shouldExist=self.kernel_arguments,
                shouldNotExist=self.absent_kernel_arguments,
            ),
            **_build_section(
                "passwd", users=[user.to_json() for user in self.users], groups=self.groups
            ),
            **_build_section(
                "storage",
                directories=[directory.to_json() for directory in self.directories],
                disks=self.disks,
                files=[file.to_json() for file in self.files],
                filesystems=self.filesystems,
                links=[link.to_json() for link in self.links],
                luks=self.luks,
                raid=self.raid,
            ),
            **_build_section("systemd", units=[unit.to_json() for unit in self.units]),
        }


def _build_section(name: str, **parts: Sequence[object]) -> Json:
    filled = {key: list(part) for key, part in parts.items() if part}
    return {name: filled} if filled else {}
