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
from treenail.config.diff import ConfigDiff, EntryChange, OSAspect, compare_configs
from treenail.config.drift import UNIT_MODE
from treenail.config.reconcilable import IrreconcilableChange, find_irreconcilable_changes
from treenail.config.redact import FileDiff, compute_redacted_diff, redact_line
from treenail.config.wanted import (
    WantedDirectory,
    WantedFile,
    WantedLink,
    WantedOS,
    WantedState,
    WantedUnit,
    WantedUser,
    read_wanted_state,
)
from treenail.update.impact.disruption import compute_disruption
from treenail.update.impact.explain import ConfigSources, DisruptionCause, describe_action
from treenail.update.impact.impact import apply_image_mode, compute_differences
from treenail.update.impact.os_change import KERNEL_KEEPING_ASPECTS, NO_OS_CHANGE, OSChange
from treenail.update.steps.steps import ConfigStep

_KEY = re.compile(r"(?P<kind>(?:ssh|ecdsa|sk)-[\w.@-]{1,60})\s+(?P<blob>(?:[\w+/]{4})+[\w+/]{0,3})")
IMAGE_SOURCE = "the image beside the config"
_ENABLEMENT = {None: "as the presets say", True: "enabled", False: "disabled"}


class ChangeMark(StrEnum):
    """What happens to an entry."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class ContentDiff:
    """One path whose contents differ."""

    path: str
    diff: FileDiff


@dataclass(frozen=True, slots=True)
class PreviewEntry:
    """One thing that differs, in the words of the config; secrets are in none of it."""

    kind: str
    """``file``, ``directory``, ``link``, ``unit``, ``user``, or a field such as ``kernelType``."""
    name: str
    mark: ChangeMark
    details: tuple[str, ...] = ()
    contents: tuple[ContentDiff, ...] = ()


@dataclass(frozen=True, slots=True)
class PreviewAction:
    """One thing that is done to the node, and everything that asks for it."""

    description: str
    reasons: tuple[DisruptionCause, ...]


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """What a machine needs until it has the new config, as the agent itself works it out."""

    steps: tuple[ConfigStep, ...]
    change: OSChange | None
    """None when what is booted can't be told; then it is taken to be as the old config says."""


@dataclass(frozen=True, slots=True)
class Preview:
    """From one config to another; ``irreconcilable_changes`` say why a running node can't go there at all."""

    old: str
    new: str
    entries: tuple[PreviewEntry, ...] = ()
    actions: tuple[PreviewAction, ...] = ()
    """The least disruptive first; empty when nothing has to notice."""
    harmless: tuple[DisruptionCause, ...] = ()
    """What differs and costs nothing."""
    needs_drain: bool = False
    needs_reboot: bool = False
    irreconcilable_changes: tuple[IrreconcilableChange, ...] = ()
    steps: tuple[str, ...] = ()
    """What is done to the files, units and users of the machine, in order; empty without one."""

    @property
    def can_keep_kernel(self) -> bool:
        """Whether what differs of the operating system can change while the kernel stays."""
        aspects = {each.kind for each in self.entries} & set(OSAspect)
        return bool(aspects) and aspects <= KERNEL_KEEPING_ASPECTS

    @property
    def is_empty(self) -> bool:
        """Nothing differs that a node would notice."""
        return not self.entries and not self.irreconcilable_changes


def preview_update(
    old: MachineConfig,
    new: MachineConfig,
    policy: DisruptionPolicy,
    *,
    images: tuple[str, str] = ("", ""),
    has_files_in_image: bool = True,
    machine: MachinePlan | None = None,
) -> Preview:
    """What the one costs a node that has the other; raises `ConfigError`.

    ``images`` are what annotations ask for beside the two configs, empty where they ask for none:
    a node that has one beside its config is in image mode, and files and units are the image's
    unless ``has_files_in_image`` is false.
    With a ``machine`` it is what that machine needs: more where it has drifted, less where
    something is booted already.
    """
    before, after = (
        _apply_image(read_wanted_state(config), image, has_files_in_image=has_files_in_image)
        for config, image in zip((old, new), images, strict=True)
    )
    between = compare_configs(before, after)
    steps, change = (machine.steps, machine.change) if machine else ((), None)
    found = (
        compute_differences(before, after, steps, change or NO_OS_CHANGE) if machine else between
    )
    if change is None:
        found = replace(found, os=between.os)
    cost = compute_disruption(found, policy)
    source = IMAGE_SOURCE if images[1] else ""
    because = ConfigSources(found, old, new, image_source=source).find_cause
    return Preview(
        old=old.name,
        new=new.name,
        entries=(
            *_list_os_entries(found, before.os, after.os, change),
            *_list_config_entries(between),
            *_list_machine_entries(between, found),
        ),
        actions=tuple(
            PreviewAction(describe_action(each.action), tuple(map(because, each.reasons)))
            for each in cost.costs
        ),
        harmless=tuple(map(because, cost.harmless)),
        needs_drain=cost.needs_drain,
        needs_reboot=cost.needs_reboot,
        irreconcilable_changes=find_irreconcilable_changes(old, new),
        steps=tuple(map(str, steps)),
    )


def _apply_image(found: WantedState, image: str, *, has_files_in_image: bool) -> WantedState:
    if not image:
        return found
    imaged = replace(found, os=replace(found.os, image=image))
    return apply_image_mode(imaged) if has_files_in_image else imaged


def _list_os_entries(
    found: ConfigDiff, before: WantedOS, after: WantedOS, change: OSChange | None
) -> Iterator[PreviewEntry]:
    for aspect in found.os:
        details = (
            _describe_os_change(aspect, change)
            if change
            else _describe_aspect(aspect, before, after)
        )
        yield PreviewEntry(aspect, "", ChangeMark.CHANGED, tuple(details))


def _list_machine_entries(between: ConfigDiff, found: ConfigDiff) -> Iterator[PreviewEntry]:
    """What is not as the new config says, though the configs do not differ in it."""
    drifted: tuple[
        tuple[str, Sequence[EntryChange[object]], Sequence[EntryChange[object]]], ...
    ] = (
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
                yield PreviewEntry(
                    kind, change.key, ChangeMark.CHANGED, ("not as the config says",)
                )


def _list_config_entries(found: ConfigDiff) -> Iterator[PreviewEntry]:
    for file in found.files:
        yield _make_entry("file", file, _describe_file(file), _compare_file(file))
    for directory in found.directories:
        yield _make_entry("directory", directory, _describe_directory(directory))
    for link in found.links:
        yield _make_entry("link", link, _describe_link(link))
    for unit in found.units:
        yield _make_entry("unit", unit, _describe_unit(unit), *_compare_unit_files(unit))
    for user in found.users:
        yield _make_entry("user", user, _describe_user(user))


def _make_entry(
    kind: str, change: EntryChange[object], details: Iterator[str], *diffs: ContentDiff | None
) -> PreviewEntry:
    mark = (
        ChangeMark.ADDED
        if change.old is None
        else ChangeMark.REMOVED
        if change.new is None
        else ChangeMark.CHANGED
    )
    written = tuple(each for each in diffs if each is not None and each.diff != FileDiff())
    return PreviewEntry(kind, change.key, mark, tuple(details), written)


def _describe_aspect(aspect: OSAspect, old: WantedOS, new: WantedOS) -> Iterator[str]:
    match aspect:
        case OSAspect.IMAGE:
            yield _format_image_change(old.image, new.image)
        case OSAspect.KERNEL_ARGUMENTS:
            yield from _describe_arguments(old.kernel_arguments, new.kernel_arguments)
        case OSAspect.KERNEL_TYPE:
            yield _format_change(old.kernel_type, new.kernel_type)
        case OSAspect.EXTENSIONS:
            for name in sorted(old.extensions - new.extensions):
                yield f"- {name} ({', '.join(EXTENSIONS[name])})"
            for name in sorted(new.extensions - old.extensions):
                yield f"+ {name} ({', '.join(EXTENSIONS[name])})"
        case OSAspect.EXTENSIONS_IMAGE:
            yield _format_image_change(old.extensions_image, new.extensions_image)
        case OSAspect.FIPS:
            yield _format_change(str(old.fips).lower(), str(new.fips).lower())


def _describe_os_change(aspect: OSAspect, change: OSChange) -> Iterator[str]:
    """What is asked of the machine's operating system."""
    match aspect:
        case OSAspect.IMAGE:
            yield f"+ {redact_line(change.image)}"
        case OSAspect.KERNEL_ARGUMENTS:
            yield from (f"- {redact_line(argument)}" for argument in change.delete)
            yield from (f"+ {redact_line(argument)}" for argument in change.append)
        case OSAspect.KERNEL_TYPE | OSAspect.EXTENSIONS:
            yield from (f"- {name}" for name in (*change.remove, *change.uninstall))
            yield from (f"+ {name}" for name in (*change.reset, *change.install))
        case OSAspect.EXTENSIONS_IMAGE | OSAspect.FIPS:
            return


def _describe_arguments(old: tuple[str, ...], new: tuple[str, ...]) -> Iterator[str]:
    gone, added = _subtract_arguments(old, new), _subtract_arguments(new, old)
    yield from (f"- {redact_line(argument)}" for argument in gone)
    yield from (f"+ {redact_line(argument)}" for argument in added)
    if not gone and not added:
        yield "the same ones in another order"


def _subtract_arguments(arguments: tuple[str, ...], others: tuple[str, ...]) -> list[str]:
    """The arguments that others have not, each as often as it is more."""
    left, found = list(others), []
    for argument in arguments:
        if argument in left:
            left.remove(argument)
        else:
            found.append(argument)
    return found


def _describe_file(change: EntryChange[WantedFile]) -> Iterator[str]:
    yield from _describe_owner(change.old, change.new)
    if change.key in names.CREDENTIALS:
        yield "kept up to date on a way of its own"
    elif change.new is None and names.should_outlive_config(change.key):
        yield "stays on the node: what is trusted is not forgotten"


def _describe_directory(change: EntryChange[WantedDirectory]) -> Iterator[str]:
    yield from _describe_owner(change.old, change.new)


def _describe_owner(
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


def _compare_file(change: EntryChange[WantedFile]) -> ContentDiff:
    old, new = change.old, change.new
    mode = (0o777 if old is None else old.mode) & (0o777 if new is None else new.mode)
    found = compute_redacted_diff(
        None if old is None else old.contents.decode_bytes(),
        None if new is None else new.contents.decode_bytes(),
        path=change.key,
        mode=mode,
    )
    return ContentDiff(change.key, found)


def _describe_link(change: EntryChange[WantedLink]) -> Iterator[str]:
    old, new = change.old, change.new
    if new is not None:
        kind = "hard link" if new.is_hard else "link"
        target = redact_line(new.target)
        if old is not None:
            target = _format_change(redact_line(old.target), target)
        yield f"{kind} to {target}"


def _describe_unit(change: EntryChange[WantedUnit]) -> Iterator[str]:
    old = change.old or WantedUnit(change.key)
    new = change.new or WantedUnit(change.key)
    if old.mask != new.mask:
        yield "masked" if new.mask else "not masked"
    if old.enabled != new.enabled and not new.mask:
        yield _ENABLEMENT[new.enabled]


def _compare_unit_files(change: EntryChange[WantedUnit]) -> Iterator[ContentDiff]:
    old, new = (
        {} if unit is None else dict(unit.list_files()) for unit in (change.old, change.new)
    )
    for path in dict.fromkeys((*old, *new)):
        before, after = (
            text if text is None else text.encode() for text in (old.get(path), new.get(path))
        )
        yield ContentDiff(path, compute_redacted_diff(before, after, path=path, mode=UNIT_MODE))


def _describe_user(change: EntryChange[WantedUser]) -> Iterator[str]:
    old = change.old or WantedUser(change.key)
    new = change.new or WantedUser(change.key)
    yield from (
        f"- key {_format_fingerprint(key)}" for key in old.ssh_keys if key not in new.ssh_keys
    )
    yield from (
        f"+ key {_format_fingerprint(key)}" for key in new.ssh_keys if key not in old.ssh_keys
    )
    if old.password_hash != new.password_hash:
        yield "the password is changed" if new.password_hash else "the password is taken away"


def _format_fingerprint(key: str) -> str:
    """As ssh-keygen shows it: the comment may be anything."""
    found = _KEY.match(key)
    if found is None:
        return "of an unknown form"
    digest = hashlib.sha256(base64.b64decode(found["blob"] + "==")).digest()
    return f"{found['kind']} SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _format_image_change(old: str, new: str) -> str:
    return _format_change(redact_line(old), redact_line(new))


def _format_change(old: str, new: str) -> str:
    return f"{old or 'none'} -> {new or 'none'}"
