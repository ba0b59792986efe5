"""Which differences between two configs can't be made on a running node.

The decisions are those of the reference, with its words for the reason, so that a change which its
controllers would let through is let through, and no other.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from treenail.api import ignition
from treenail.api.decode import Json
from treenail.api.ignition_model import Ignition, User
from treenail.api.machineconfig import MachineConfig
from treenail.config import names, wanted
from treenail.errors import UnreconcilableError

_REINSTALL = "take the change back, or install the node anew with it"


class Override(StrEnum):
    """What a cluster may let pass, in ``irreconcilableValidationOverrides.storage``.

    The difference then holds for nodes that are installed from now on.
    """

    DISKS = "Disks"
    FILESYSTEMS = "FileSystems"
    RAID = "Raid"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One difference that can't be made; ``place`` is in the new config."""

    place: str
    reason: str
    remedy: str = _REINSTALL


def check(
    old: MachineConfig, new: MachineConfig, *, allowed: frozenset[Override] = frozenset()
) -> None:
    """Raise `UnreconcilableError` with all that stands between the two; `IgnitionError` too."""
    found = obstacles(old, new, allowed=allowed)
    if found:
        listed = "; ".join(f"{obstacle.reason} ({obstacle.place})" for obstacle in found)
        raise UnreconcilableError(
            f'new machineconfig "{new.name}" is not reconcilable against "{old.name}": {listed}',
            remedy="; ".join(dict.fromkeys(obstacle.remedy for obstacle in found)),
        )


def obstacles(
    old: MachineConfig, new: MachineConfig, *, allowed: frozenset[Override] = frozenset()
) -> tuple[Obstacle, ...]:
    """All differences that can't be made on a running node; raises `IgnitionError`."""
    before, after = ignition.read(old.config), ignition.read(new.config)
    return (
        *_users(before, after),
        *_first_boot(before, after, allowed),
        *_nodes(before, after),
        *_files(after),
        *_fips(old, new),
    )


def _users(old: Ignition, new: Ignition) -> Iterator[Obstacle]:
    if _unordered(old.groups) != _unordered(new.groups):
        yield Obstacle(
            "spec.config.passwd.groups",
            "invalid passwd change(s): ignition Passwd Groups section contains changes",
        )
    if _logins(old) == _logins(new):
        return
    section = "invalid passwd change(s): ignition passwd user section contains unsupported changes"
    for index, user in enumerate(new.users):
        place = f"spec.config.passwd.users[{index}]"
        if user.name != names.LOGIN:
            remedy = f"set keys and passwords of {names.LOGIN} only"
            yield Obstacle(f"{place}.name", f"{section}: non-core user", remedy)
        elif user.others:
            others = ", ".join(sorted(user.others))
            yield Obstacle(
                place,
                "invalid passwd change(s): SSH keys and password hash are not reconcilable "
                f"with {others} beside them",
                f"leave out {others}",
            )
        elif not user.ssh_keys and user.password_hash is None:
            yield Obstacle(
                place,
                f"{section}: user must be core and have 1 or more sshKeys",
                "to take away all keys, remove the user from the config",
            )


def _first_boot(old: Ignition, new: Ignition, allowed: frozenset[Override]) -> Iterator[Obstacle]:
    """What Ignition does once, before a node's first boot."""
    if _kernel_arguments(old) != _kernel_arguments(new):
        yield Obstacle(
            "spec.config.kernelArguments",
            "ignition kargs section contains changes",
            "use spec.kernelArguments of the MachineConfig",
        )
    for name, before, after, override in (
        ("disks", old.disks, new.disks, Override.DISKS),
        ("filesystems", old.filesystems, new.filesystems, Override.FILESYSTEMS),
        ("raid", old.raid, new.raid, Override.RAID),
    ):
        if override not in allowed and _unordered(before) != _unordered(after):
            yield Obstacle(
                f"spec.config.storage.{name}",
                f"ignition {name} section contains changes",
                f"{_REINSTALL}, or allow {override} in irreconcilableValidationOverrides",
            )


def _nodes(old: Ignition, new: Ignition) -> Iterator[Obstacle]:
    if wanted.directories(old) != wanted.directories(new):
        yield Obstacle(
            "spec.config.storage.directories",
            "ignition directories section contains changes",
            "directories of files are made without being listed; others, a tmpfiles.d file makes",
        )
    if new.links and wanted.links(old) != wanted.links(new):
        yield Obstacle(
            "spec.config.storage.links",
            "ignition links section contains changes",
            "let a file in tmpfiles.d make the link",
        )


def _files(new: Ignition) -> Iterator[Obstacle]:
    for file in new.files:
        if file.append:
            reason = f"ignition file {file.path} includes append"
            yield Obstacle(f"{file.place}.append", reason, "write the whole file as contents")
        if file.path == names.FORCE_FILE:
            reason = f"cannot create {file.path} via Ignition"
            yield Obstacle(f"{file.place}.path", reason, "create it on the node, by hand")


def _fips(old: MachineConfig, new: MachineConfig) -> Iterator[Obstacle]:
    if old.fips != new.fips:
        yield Obstacle(
            "spec.fips",
            "detected change to FIPS flag; refusing to modify FIPS on a running cluster",
        )


def _logins(config: Ignition) -> dict[str, tuple[object, ...]]:
    def login(user: User) -> tuple[object, ...]:
        return frozenset(user.ssh_keys), user.password_hash, json.dumps(user.others, sort_keys=True)

    return {user.name: login(user) for user in config.users}


def _kernel_arguments(config: Ignition) -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(config.kernel_arguments), frozenset(config.absent_kernel_arguments)


def _unordered(entries: tuple[Json, ...]) -> list[str]:
    return sorted(json.dumps(entry, sort_keys=True) for entry in entries)
