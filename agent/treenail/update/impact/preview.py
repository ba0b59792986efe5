"""What a node would go through from one config to another, told before anything is touched.

The differences, the obstacles and the costs are those that the agent itself works out; here they
get their contents and their sources beside them, with the secrets left out.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from treenail.api.disruptionpolicy import DisruptionPolicy
from treenail.api.machineconfig import EXTENSIONS, MachineConfig
from treenail.config import names
from treenail.config.diff import Aspect, Change, Diff, diff
from treenail.config.drift import UNIT_MODE
from treenail.config.reconcilable import Obstacle, obstacles
from treenail.config.redact import FileDiff, redacted_diff, redacted_line
from treenail.config.wanted import (
    Wanted,
    WantedDirectory,
    WantedFile,
    WantedLink,
    WantedOS,
    WantedUnit,
    WantedUser,
    wanted,
)
from treenail.update.impact.disruption import disruption
from treenail.update.impact.explain import Because, Sources, words
from treenail.update.impact.impact import differences, in_image_mode
from treenail.update.impact.os_change import BESIDE_KERNEL, NO_CHANGE, OSChange
from treenail.update.steps.steps import Step

_KEY = re.compile(r"(?P<kind>(?:ssh|ecdsa|sk)-[\w.@-]{1,60})\s+(?P<blob>(?:[\w+/]{4})+[\w+/]{0,3})")
IMAGE_SOURCE = "the image beside the config"
_ENABLEMENT = {None: "as the presets say", True: "enabled", False: "disabled"}


class Mark(StrEnum):
    """What happens to an entry."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Written:
    """One path whose contents differ."""

    path: str
    diff: FileDiff


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that differs, in the words of the config; secrets are in none of it."""

    kind: str
    """``file``, ``directory``, ``link``, ``unit``, ``user``, or a field such as ``kernelType``."""
    name: str
    mark: Mark
    details: tuple[str, ...] = ()
    written: tuple[Written, ...] = ()


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that is done to the node, and everything that asks for it."""

    words: str
    reasons: tuple[Because, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine needs until it has the new config, as the agent itself works it out."""

    steps: tuple[Step, ...]
    change: OSChange | None
    """None when what is booted can't be told; then it is taken to be as the old config says."""


@dataclass(frozen=True, slots=True)
class Preview:
    """From one config to another; ``obstacles`` say why a running node can't go there at all."""

    old: str
    new: str
    entries: tuple[Entry, ...] = ()
    actions: tuple[Action, ...] = ()
    """The least disruptive first; empty when nothing has to notice."""
    free: tuple[Because, ...] = ()
    """What differs and costs nothing."""
    drains: bool = False
    reboots: bool = False
    obstacles: tuple[Obstacle, ...] = ()
    steps: tuple[str, ...] = ()
    """What is done to the files, units and users of the machine, in order; empty without one."""

    @property
    def keeps_kernel(self) -> bool:
        """Whether what differs of the operating system can change while the kernel stays."""
        aspects = {each.kind for each in self.entries} & set(Aspect)
        return bool(aspects) and aspects <= BESIDE_KERNEL

    @property
    def empty(self) -> bool:
        """Nothing differs that a node would notice."""
        return not self.entries and not self.obstacles


def preview(
    old: MachineConfig,
    new: MachineConfig,
    policy: DisruptionPolicy,
    *,
    images: tuple[str, str] = ("", ""),
    images_bake: bool = True,
    machine: Machine | None = None,
) -> Preview:
    """What the one costs a node that has the other; raises `ConfigError`.

    ``images`` are what annotations ask for beside the two configs, empty where they ask for none:
    a node that has one beside its config is in image mode, and files and units are the image's
    unless ``images_bake`` is false.
    With a ``machine`` it is what that machine needs: more where it has drifted, less where
    something is booted already.
    """
    before, after = (
        _in_mode(wanted(config), image, images_bake=images_bake)
        for config, image in zip((old, new), images, strict=True)
    )
    between = diff(before, after)
    steps, change = (machine.steps, machine.change) if machine else ((), None)
    found = differences(before, after, steps, change or NO_CHANGE) if machine else between
    if change is None:
        found = replace(found, os=between.os)
    cost = disruption(found, policy)
    source = IMAGE_SOURCE if images[1] else ""
    because = Sources(found, old, new, image_source=source).because
    return Preview(
        old=old.name,
        new=new.name,
        entries=(
            *_of_system(found, before.os, after.os, change),
            *_of_configs(between),
            *_of_machine(between, found),
        ),
        actions=tuple(
            Action(words(each.action), tuple(map(because, each.reasons))) for each in cost.costs
        ),
        free=tuple(map(because, cost.free)),
        drains=cost.drains,
        reboots=cost.reboots,
        obstacles=obstacles(old, new),
        steps=tuple(map(str, steps)),
    )


def _in_mode(found: Wanted, image: str, *, images_bake: bool) -> Wanted:
    if not image:
        return found
    imaged = replace(found, os=replace(found.os, image=image))
    return in_image_mode(imaged) if images_bake else imaged


def _of_system(
    found: Diff, before: WantedOS, after: WantedOS, change: OSChange | None
) -> Iterator[Entry]:
    for aspect in found.os:
        details = _asked(aspect, change) if change else _aspect(aspect, before, after)
        yield Entry(aspect, "", Mark.CHANGED, tuple(details))


def _of_machine(between: Diff, found: Diff) -> Iterator[Entry]:
    """What is not as the new config says, though the configs do not differ in it."""
    drifted: tuple[tuple[str, Sequence[Change[object]], Sequence[Change[object]]], ...] = (
        ("file", between.files, found.files),
        ("directory", between.directories, found.directories),
        ("link", between.links, found.links),
        ("unit", between.units, found.units),
        ("user", between.users, found.users),
    )
    for kind, known, seen in drifted:
        keys = {change.key for change in known}
        for change in seen:
            if change.key not in keys:
                yield Entry(kind, change.key, Mark.CHANGED, ("not as the config says",))


def _of_configs(found: Diff) -> Iterator[Entry]:
    for file in found.files:
        yield _entry("file", file, _file_details(file), _file_diff(file))
    for directory in found.directories:
        yield _entry("directory", directory, _directory_details(directory))
    for link in found.links:
        yield _entry("link", link, _link_details(link))
    for unit in found.units:
        yield _entry("unit", unit, _unit_details(unit), *_unit_diffs(unit))
    for user in found.users:
        yield _entry("user", user, _user_details(user))


def _entry(
    kind: str, change: Change[object], details: Iterator[str], *diffs: Written | None
) -> Entry:
    mark = (
        Mark.ADDED if change.old is None else Mark.REMOVED if change.new is None else Mark.CHANGED
    )
    written = tuple(each for each in diffs if each is not None and each.diff != FileDiff())
    return Entry(kind, change.key, mark, tuple(details), written)


def _aspect(aspect: Aspect, old: WantedOS, new: WantedOS) -> Iterator[str]:
    match aspect:
        case Aspect.IMAGE:
            yield _image(old.image, new.image)
        case Aspect.KERNEL_ARGUMENTS:
            yield from _arguments(old.kernel_arguments, new.kernel_arguments)
        case Aspect.KERNEL_TYPE:
            yield _turned(old.kernel_type, new.kernel_type)
        case Aspect.EXTENSIONS:
            for name in sorted(old.extensions - new.extensions):
                yield f"- {name} ({', '.join(EXTENSIONS[name])})"
            for name in sorted(new.extensions - old.extensions):
                yield f"+ {name} ({', '.join(EXTENSIONS[name])})"
        case Aspect.EXTENSIONS_IMAGE:
            yield _image(old.extensions_image, new.extensions_image)
        case Aspect.FIPS:
            yield _turned(str(old.fips).lower(), str(new.fips).lower())


def _asked(aspect: Aspect, change: OSChange) -> Iterator[str]:
    """What is asked of the machine's operating system."""
    match aspect:
        case Aspect.IMAGE:
            yield f"+ {redacted_line(change.image)}"
        case Aspect.KERNEL_ARGUMENTS:
            yield from (f"- {redacted_line(argument)}" for argument in change.delete)
            yield from (f"+ {redacted_line(argument)}" for argument in change.append)
        case Aspect.KERNEL_TYPE | Aspect.EXTENSIONS:
            yield from (f"- {name}" for name in (*change.remove, *change.uninstall))
            yield from (f"+ {name}" for name in (*change.reset, *change.install))
        case Aspect.EXTENSIONS_IMAGE | Aspect.FIPS:
            return


def _arguments(old: tuple[str, ...], new: tuple[str, ...]) -> Iterator[str]:
    gone, added = _without(old, new), _without(new, old)
    yield from (f"- {redacted_line(argument)}" for argument in gone)
    yield from (f"+ {redacted_line(argument)}" for argument in added)
    if not gone and not added:
        yield "the same ones in another order"


def _without(arguments: tuple[str, ...], others: tuple[str, ...]) -> list[str]:
    """The arguments that others have not, each as often as it is more."""
    left, found = list(others), []
    for argument in arguments:
        if argument in left:
            left.remove(argument)
        else:
            found.append(argument)
    return found


def _file_details(change: Change[WantedFile]) -> Iterator[str]:
    yield from _owned(change.old, change.new)
    if change.key in names.CREDENTIALS:
        yield "kept up to date on a way of its own"
    elif change.new is None and names.outlives_config(change.key):
        yield "stays on the node: what is trusted is not forgotten"


def _directory_details(change: Change[WantedDirectory]) -> Iterator[str]:
    yield from _owned(change.old, change.new)


def _owned(
    old: WantedFile | WantedDirectory | None, new: WantedFile | WantedDirectory | None
) -> Iterator[str]:
    if new is None:
        return
    if old is None:
        yield f"mode {new.mode:04o}"
        if (new.user, new.group) != (0, 0):
            yield f"owner {new.user}:{new.group}"
        return
    if old.mode != new.mode:
        yield f"mode {old.mode:04o} -> {new.mode:04o}"
    if (old.user, old.group) != (new.user, new.group):
        yield f"owner {old.user}:{old.group} -> {new.user}:{new.group}"


def _file_diff(change: Change[WantedFile]) -> Written:
    old, new = change.old, change.new
    mode = (0o777 if old is None else old.mode) & (0o777 if new is None else new.mode)
    found = redacted_diff(
        None if old is None else old.contents.decode(),
        None if new is None else new.contents.decode(),
        path=change.key,
        mode=mode,
    )
    return Written(change.key, found)


def _link_details(change: Change[WantedLink]) -> Iterator[str]:
    old, new = change.old, change.new
    if new is not None:
        kind = "hard link" if new.hard else "link"
        target = redacted_line(new.target)
        if old is not None:
            target = _turned(redacted_line(old.target), target)
        yield f"{kind} to {target}"


def _unit_details(change: Change[WantedUnit]) -> Iterator[str]:
    old = change.old or WantedUnit(change.key)
    new = change.new or WantedUnit(change.key)
    if old.mask != new.mask:
        yield "masked" if new.mask else "not masked"
    if old.enabled != new.enabled and not new.mask:
        yield _ENABLEMENT[new.enabled]


def _unit_diffs(change: Change[WantedUnit]) -> Iterator[Written]:
    old, new = ({} if unit is None else dict(unit.written()) for unit in (change.old, change.new))
    for path in dict.fromkeys((*old, *new)):
        before, after = (
            text if text is None else text.encode() for text in (old.get(path), new.get(path))
        )
        yield Written(path, redacted_diff(before, after, path=path, mode=UNIT_MODE))


def _user_details(change: Change[WantedUser]) -> Iterator[str]:
    old = change.old or WantedUser(change.key)
    new = change.new or WantedUser(change.key)
    yield from (f"- key {_fingerprint(key)}" for key in old.ssh_keys if key not in new.ssh_keys)
    yield from (f"+ key {_fingerprint(key)}" for key in new.ssh_keys if key not in old.ssh_keys)
    if old.password_hash != new.password_hash:
        yield "the password is changed" if new.password_hash else "the password is taken away"


def _fingerprint(key: str) -> str:
    """As ssh-keygen shows it: the comment may be anything."""
    found = _KEY.match(key)
    if found is None:
        return "of an unknown form"
    digest = hashlib.sha256(base64.b64decode(found["blob"] + "==")).digest()
    return f"{found['kind']} SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _image(old: str, new: str) -> str:
    return _turned(redacted_line(old), redacted_line(new))


def _turned(old: str, new: str) -> str:
    return f"{old or 'none'} -> {new or 'none'}"
