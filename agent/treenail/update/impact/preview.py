"""The preview of an update from one config to another, for users.

The differences and the disruption are those that the agent computes. The preview adds contents and
sources, with secrets withheld.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from treenail import deployment_change
from treenail.api import disruptionpolicy, machineconfig
from treenail.config import (
    drift_comparison,
    image_content,
    node_paths,
    reconcilable,
    redact,
    wanted_state,
)
from treenail.config.diff import ConfigDiff, EntryChange, OSAspect, compare_configs
from treenail.update.impact import impact, os_change
from treenail.update.steps.step_types import ConfigStep

_KEY = re.compile(r"((?:ssh|ecdsa|sk)-[\w.@-]{1,60})[ \t]+([^ \t=]+={0,2})(?![^ \t])", re.ASCII)
_ENABLEMENT = {None: "enabled or disabled by the presets", True: "enabled", False: "disabled"}


class ChangeMark(StrEnum):
    """The kind of a change."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class ContentDiff:
    """The difference of the contents of a path."""

    path: str
    diff: redact.FileDiff


@dataclass(frozen=True, slots=True)
class PreviewEntry:
    """One difference, without secrets."""

    kind: str
    """``file``, ``directory``, ``link``, ``unit``, ``user``, or a field such as ``kernelType``."""
    name: str
    mark: ChangeMark
    details: tuple[str, ...] = ()
    contents: tuple[ContentDiff, ...] = ()


@dataclass(frozen=True, slots=True)
class PreviewAction:
    """One disruptive action and its causes."""

    description: str
    reasons: tuple[impact.DisruptionReason, ...]


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """The plan of the agent for one machine."""

    steps: tuple[ConfigStep, ...]
    change: deployment_change.DeploymentChange | None
    """None if the deployments cannot be read; the OS is then assumed to match the old config."""
    split: image_content.ImageSplit | None = None
    """The comparison of the config with the booted image; None unless that stays."""


@dataclass(frozen=True, slots=True)
class Preview:
    """The preview of an update; ``irreconcilable_changes`` prevent it on a running node."""

    old: str
    new: str
    entries: tuple[PreviewEntry, ...] = ()
    actions: tuple[PreviewAction, ...] = ()
    """The disruptive actions, the least disruptive first."""
    harmless: tuple[impact.DisruptionReason, ...] = ()
    """The differences that disrupt nothing."""
    needs_drain: bool = False
    needs_reboot: bool = False
    irreconcilable_changes: tuple[reconcilable.IrreconcilableChange, ...] = ()
    steps: tuple[str, ...] = ()
    """The steps that change files, units and users, in order; empty without a `MachinePlan`."""
    in_image: tuple[str, ...] = ()
    """The paths and units that the image must contain, which the agent checks before the drain."""

    @property
    def can_keep_kernel(self) -> bool:
        """The OS changes, and the change may keep the running kernel."""
        aspects = {entry.kind for entry in self.entries} & set(OSAspect)
        return bool(aspects) and aspects <= os_change.KERNEL_KEEPING_ASPECTS

    @property
    def is_empty(self) -> bool:
        """The update changes nothing."""
        return not self.entries and not self.irreconcilable_changes


def preview_update(
    old: wanted_state.ParsedConfig,
    new: wanted_state.ParsedConfig,
    policy: disruptionpolicy.DisruptionPolicy,
    *,
    images: tuple[str, str] = ("", ""),
    has_files_in_image: bool = True,
    machine: MachinePlan | None = None,
) -> Preview:
    """Return the preview of an update from ``old`` to ``new``; raises `ConfigError`.

    ``images`` are the images that annotations request beside the two configs, empty for none. A
    node with such an image is in image mode: the image must contain files and units unless
    ``has_files_in_image`` is False. With a ``machine`` the preview is that of this machine: it
    includes drift and excludes what is booted already.
    """
    if old.config != new.config:
        reconcilable.read_appliable_state(new, image=images[1])
    before, after = (
        _apply_image(config.wanted, image) for config, image in zip((old, new), images, strict=True)
    )
    provided = frozenset[str]()
    in_image: tuple[str, ...] = ()
    if images[1] and machine is not None and machine.split is not None:
        after, provided = machine.split.wanted, machine.split.provided
    elif images[1] and has_files_in_image:
        provided = image_content.assume_provided(after).provided
        in_image = image_content.list_provided(after, provided)
    former = (
        image_content.assume_provided(before).provided
        if images[0] and has_files_in_image
        else frozenset()
    )
    before, after = (
        image_content.drop_provided(before, provided | former),
        image_content.drop_provided(after, provided),
    )
    config_diff = compare_configs(before, after)
    steps, change = (machine.steps, machine.change) if machine else ((), None)
    diff = config_diff
    if machine:
        diff = impact.compute_differences(
            before, after, steps, change or deployment_change.NO_CHANGE
        )
    if change is None:
        diff = replace(diff, os=config_diff.os)
    disruption = impact.compute_disruption(diff, policy)
    source = impact.IMAGE_SOURCE if images[1] else ""
    sources = impact.ConfigSources(diff, old.config, new.config, image_source=source)
    find_cause = sources.find_cause
    return Preview(
        old=old.config.name,
        new=new.config.name,
        entries=(
            *_list_os_entries(diff, before.os, after.os, change),
            *_list_config_entries(config_diff),
            *_list_machine_entries(config_diff, diff),
        ),
        actions=tuple(
            PreviewAction(impact.describe_action(cost.action), tuple(map(find_cause, cost.reasons)))
            for cost in disruption.costs
        ),
        harmless=tuple(map(find_cause, disruption.harmless)),
        needs_drain=disruption.needs_drain,
        needs_reboot=disruption.needs_reboot,
        irreconcilable_changes=(
            *reconcilable.find_irreconcilable_changes(old, new),
            *(() if images[1] and has_files_in_image else reconcilable.find_read_only_paths(new)),
        ),
        steps=tuple(map(str, steps)),
        in_image=in_image,
    )


def _apply_image(wanted: wanted_state.WantedState, image: str) -> wanted_state.WantedState:
    return replace(wanted, os=replace(wanted.os, image=image)) if image else wanted


def _list_os_entries(
    diff: ConfigDiff,
    before: wanted_state.WantedOS,
    after: wanted_state.WantedOS,
    change: deployment_change.DeploymentChange | None,
) -> Iterator[PreviewEntry]:
    for aspect in diff.os:
        details = (
            _describe_os_change(aspect, change)
            if change
            else _describe_aspect(aspect, before, after)
        )
        yield PreviewEntry(aspect, "", ChangeMark.CHANGED, tuple(details))


def _list_machine_entries(config_diff: ConfigDiff, diff: ConfigDiff) -> Iterator[PreviewEntry]:
    """Return the entries in which the machine differs but the configs do not."""
    kinds: tuple[tuple[str, Sequence[EntryChange[object]], Sequence[EntryChange[object]]], ...] = (
        ("file", config_diff.files, diff.files),
        ("directory", config_diff.directories, diff.directories),
        ("link", config_diff.links, diff.links),
        ("unit", config_diff.units, diff.units),
        ("user", config_diff.users, diff.users),
    )
    for kind, of_configs, of_machine in kinds:
        known = {change.key for change in of_configs}
        for change in of_machine:
            if change.key not in known:
                details = ("the machine differs from the config",)
                yield PreviewEntry(kind, change.key, ChangeMark.CHANGED, details)


def _list_config_entries(diff: ConfigDiff) -> Iterator[PreviewEntry]:
    for file in diff.files:
        yield _make_entry("file", file, _describe_file(file), _compare_file(file))
    for directory in diff.directories:
        yield _make_entry("directory", directory, _describe_owner(directory.old, directory.new))
    for link in diff.links:
        yield _make_entry("link", link, _describe_link(link))
    for unit in diff.units:
        yield _make_entry("unit", unit, _describe_unit(unit), *_compare_unit_files(unit))
    for user in diff.users:
        yield _make_entry("user", user, _describe_user(user))


def _make_entry(
    kind: str, change: EntryChange[object], details: Iterator[str], *diffs: ContentDiff | None
) -> PreviewEntry:
    mark = ChangeMark.CHANGED
    if change.old is None:
        mark = ChangeMark.ADDED
    elif change.new is None:
        mark = ChangeMark.REMOVED
    contents = tuple(diff for diff in diffs if diff is not None and diff.diff != redact.FileDiff())
    return PreviewEntry(kind, change.key, mark, tuple(details), contents)


def _describe_aspect(
    aspect: OSAspect, old: wanted_state.WantedOS, new: wanted_state.WantedOS
) -> Iterator[str]:
    match aspect:
        case OSAspect.IMAGE:
            yield _format_image_change(old.image, new.image)
        case OSAspect.KERNEL_ARGUMENTS:
            yield from _describe_arguments(old.kernel_arguments, new.kernel_arguments)
        case OSAspect.KERNEL_TYPE:
            yield _format_change(old.kernel_type, new.kernel_type)
        case OSAspect.EXTENSIONS:
            for name in sorted(old.extensions - new.extensions):
                yield f"- {name} ({', '.join(machineconfig.EXTENSIONS[name])})"
            for name in sorted(new.extensions - old.extensions):
                yield f"+ {name} ({', '.join(machineconfig.EXTENSIONS[name])})"
        case OSAspect.EXTENSIONS_IMAGE:
            yield _format_image_change(old.extensions_image, new.extensions_image)
        case OSAspect.FIPS:
            yield _format_change(str(old.fips).lower(), str(new.fips).lower())


def _describe_os_change(
    aspect: OSAspect, change: deployment_change.DeploymentChange
) -> Iterator[str]:
    """Return the details of what the machine's operating system changes."""
    match aspect:
        case OSAspect.IMAGE:
            yield f"+ {redact.redact_line(change.image)}"
        case OSAspect.KERNEL_ARGUMENTS:
            yield from (f"- {redact.redact_line(argument)}" for argument in change.delete_kargs)
            yield from (f"+ {redact.redact_line(argument)}" for argument in change.append_kargs)
        case OSAspect.KERNEL_TYPE | OSAspect.EXTENSIONS:
            yield from (
                f"- {name}" for name in (*change.override_remove, *change.uninstall_packages)
            )
            yield from (f"+ {name}" for name in (*change.override_reset, *change.install_packages))
        case OSAspect.EXTENSIONS_IMAGE | OSAspect.FIPS:
            return


def _describe_arguments(old: tuple[str, ...], new: tuple[str, ...]) -> Iterator[str]:
    removed, added = _subtract_arguments(old, new), _subtract_arguments(new, old)
    yield from (f"- {redact.redact_line(argument)}" for argument in removed)
    yield from (f"+ {redact.redact_line(argument)}" for argument in added)
    if not removed and not added:
        yield "the same arguments in another order"


def _subtract_arguments(arguments: tuple[str, ...], others: tuple[str, ...]) -> list[str]:
    """Return the arguments without the others; each other one removes one of its kind."""
    unmatched, remaining = list(others), []
    for argument in arguments:
        if argument in unmatched:
            unmatched.remove(argument)
        else:
            remaining.append(argument)
    return remaining


def _describe_file(change: EntryChange[wanted_state.WantedFile]) -> Iterator[str]:
    yield from _describe_owner(change.old, change.new)
    if change.key in node_paths.CREDENTIALS:
        yield "the agent renews this file separately"
    elif change.new is None and node_paths.should_outlive_config(change.key):
        yield "stays on the node: certificates remain trusted"


def _describe_owner(
    old: wanted_state.WantedFile | wanted_state.WantedDirectory | None,
    new: wanted_state.WantedFile | wanted_state.WantedDirectory | None,
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


def _compare_file(change: EntryChange[wanted_state.WantedFile]) -> ContentDiff:
    old, new = change.old, change.new
    mode = (0o777 if old is None else old.mode) & (0o777 if new is None else new.mode)
    diff = redact.compute_redacted_diff(
        None if old is None else old.contents.decode_bytes(),
        None if new is None else new.contents.decode_bytes(),
        path=change.key,
        mode=mode,
    )
    return ContentDiff(change.key, diff)


def _describe_link(change: EntryChange[wanted_state.WantedLink]) -> Iterator[str]:
    old, new = change.old, change.new
    if new is not None:
        kind = "hard link" if new.is_hard else "link"
        target = redact.redact_line(new.target)
        if old is not None:
            target = _format_change(redact.redact_line(old.target), target)
        yield f"{kind} to {target}"


def _describe_unit(change: EntryChange[wanted_state.WantedUnit]) -> Iterator[str]:
    old = change.old or wanted_state.WantedUnit(change.key)
    new = change.new or wanted_state.WantedUnit(change.key)
    if old.mask != new.mask:
        yield "masked" if new.mask else "not masked"
    if old.enabled != new.enabled and not new.mask:
        yield _ENABLEMENT[new.enabled]


def _compare_unit_files(change: EntryChange[wanted_state.WantedUnit]) -> Iterator[ContentDiff]:
    old, new = (
        {} if unit is None else dict(unit.list_files()) for unit in (change.old, change.new)
    )
    for path in dict.fromkeys((*old, *new)):
        before, after = (
            text if text is None else text.encode() for text in (old.get(path), new.get(path))
        )
        yield ContentDiff(
            path,
            redact.compute_redacted_diff(before, after, path=path, mode=drift_comparison.UNIT_MODE),
        )


def _describe_user(change: EntryChange[wanted_state.WantedUser]) -> Iterator[str]:
    old = change.old or wanted_state.WantedUser(change.key)
    new = change.new or wanted_state.WantedUser(change.key)
    yield from (
        f"- key {_format_fingerprint(key)}" for key in old.ssh_keys if key not in new.ssh_keys
    )
    yield from (
        f"+ key {_format_fingerprint(key)}" for key in new.ssh_keys if key not in old.ssh_keys
    )
    if old.password_hash != new.password_hash:
        yield "password changed" if new.password_hash else "password removed"


def _format_fingerprint(key: str) -> str:
    """Return the fingerprint as ssh-keygen shows it, without the comment, which may be secret."""
    match = _KEY.match(key)
    try:
        if match is not None:
            kind, blob = match.groups()
            # ssh-keygen accepts a key without its padding.
            content = binascii.a2b_base64(f"{blob}{'=' * (-len(blob) % 4)}", strict_mode=True)
            digest = base64.b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            return f"{kind} SHA256:{digest}"
    except ValueError:  # an incomplete key, or one that is not ASCII
        pass
    return "of unknown type"


def _format_image_change(old: str, new: str) -> str:
    return _format_change(redact.redact_line(old), redact.redact_line(new))


def _format_change(old: str, new: str) -> str:
    return f"{old or 'none'} -> {new or 'none'}"
