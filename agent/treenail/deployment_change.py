"""The change of the operating system that one deployment brings.

A kernel argument that the image or the installation set belongs to the machine, and no config
removes or moves it. Those of a config are appended: of most keys the kernel and systemd use the
last value. The order of arguments and their repetitions are significant.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Annotated

from treenail.encoding import codec

Arguments = tuple[str, ...]

# Quotes protect spaces, as in the kernel: next_arg() in lib/cmdline.c.
_ARGUMENT = re.compile(r'(?:[^\s"]|"[^"]*"?)+')
# An installation sets these in its first boot at the latest, CoreOS boot= as the last one, and
# libostree keeps the place of ostree=. rpm-ostree appends at the end.
_FIRST_DEPLOYMENT = frozenset({"ostree", "boot"})
_INSTALLED = _FIRST_DEPLOYMENT | {"root"}


@dataclass(frozen=True, slots=True)
class DeploymentChange:
    """A change of image, kernel arguments and packages, to deploy together.

    Empty fields change nothing. The ledger has it, so its keys never change.
    """

    image: str = ""
    """The pull spec of the image to boot, by digest."""
    append_kargs: Annotated[tuple[str, ...], codec.Key("append")] = ()
    """Kernel arguments to append, in order, after removing ``delete_kargs``.

    Applied twice, the change of arguments is the same as applied once.
    """
    delete_kargs: Annotated[tuple[str, ...], codec.Key("delete")] = ()
    keep_kargs: Annotated[tuple[str, ...], codec.Key("keep")] = ()
    """Arguments of the machine that stay where they are, as often as listed."""
    install_packages: Annotated[tuple[str, ...], codec.Key("install")] = ()
    """Packages to layer on the image."""
    uninstall_packages: Annotated[tuple[str, ...], codec.Key("uninstall")] = ()
    override_remove: Annotated[tuple[str, ...], codec.Key("remove")] = ()
    """Packages of the image to leave out."""
    override_reset: Annotated[tuple[str, ...], codec.Key("reset")] = ()
    """Packages of the image to include again."""
    extensions_image: Annotated[str, codec.Key("packagesFrom")] = ""
    """The pull spec, by digest, of an image with further packages; never set alone."""

    @property
    def digest(self) -> str:
        """The manifest digest of the image; empty without one."""
        return self.image.partition("@")[2]

    @property
    def packages(self) -> frozenset[str]:
        """All packages that change."""
        return frozenset(
            (
                *self.install_packages,
                *self.uninstall_packages,
                *self.override_remove,
                *self.override_reset,
            )
        )

    @property
    def is_empty(self) -> bool:
        """Nothing changes."""
        return self == NO_CHANGE

    def __str__(self) -> str:
        named = (
            (self.image, self.image),
            (self.packages, "packages"),
            (self.append_kargs or self.delete_kargs, "kernel arguments"),
        )
        return " and ".join(name for value, name in named if value) or "nothing"


NO_CHANGE = DeploymentChange()


def split_arguments(text: str) -> Arguments:
    """Split a command line; text in double quotes stays together, with its quotes."""
    return tuple(_ARGUMENT.findall(text))


def are_effective(wanted: Sequence[str], booted: Sequence[str]) -> bool:
    """Return whether the wanted arguments are the last ones of their keys, in their order."""
    present = _select_keys(booted, wanted)
    return present[max(len(present) - len(wanted), 0) :] == _normalize_all(wanted)


def apply_edit(existing: Sequence[str], edit: DeploymentChange) -> Arguments:
    """Return the command line with the edit; of equal arguments the first ones are kept."""
    changed = {*_normalize_all((*edit.append_kargs, *edit.delete_kargs))}
    kept = Counter(_normalize_all(edit.keep_kargs))
    rest: list[str] = []
    for argument in existing:
        name = _normalize(argument)
        if name in changed:
            kept[name] -= 1
            if kept[name] < 0:
                continue
        rest.append(argument)
    return (*rest, *edit.append_kargs)


def is_applied(existing: Sequence[str], edit: DeploymentChange) -> bool:
    """Return whether the edit changes nothing in the order of the keys that it is about."""
    changed = (*edit.append_kargs, *edit.delete_kargs, *edit.keep_kargs)
    return _select_keys(apply_edit(existing, edit), changed) == _select_keys(existing, changed)


def count_machine_arguments(
    old: Sequence[str], new: Sequence[str], booted: Sequence[str], known: Mapping[str, int]
) -> dict[str, int]:
    """Return how often the machine itself has each argument of the old and the new config.

    ``known`` are the counts from before a config added the argument. Without one, only what stands
    behind the arguments of the installation was added by the old config for certain.
    """
    names, former = _normalize_all(booted), Counter(_normalize_all(old))
    keys = [*map(_parse_key, booted)]
    end = max((place for place, key in enumerate(keys, 1) if key in _INSTALLED), default=0)
    if not _FIRST_DEPLOYMENT & {*keys}:
        end = len(names)
    counts: dict[str, int] = {}
    for name in dict.fromkeys((*former, *_normalize_all(new))):
        total = names.count(name)
        before = min(known.get(name, names[:end].count(name)), total)
        counts[name] = total - min(total - before, former[name])
    return counts


def compute_edit(
    machine: Mapping[str, int], new: Sequence[str], booted: Sequence[str]
) -> DeploymentChange:
    """Return the edit to the new config, by the counts of `count_machine_arguments`.

    Further arguments in ``booted`` belong to the machine too. An argument of the config that the
    machine has in the right place already is not repeated.
    """
    base, added = _split_owners(machine, booted)
    present, wanted = _select_keys(base, new), _normalize_all(new)
    if are_effective(new, booted) and not Counter(_normalize_all(added)) - Counter(wanted):
        return NO_CHANGE
    overlap = next(
        count
        for count in range(min(len(present), len(wanted)), -1, -1)
        if present[len(present) - count :] == wanted[:count]
    )
    missing = new[overlap:]
    pairs = zip(_normalize_all(added), wanted[overlap:], strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    edit = _replace_arguments(booted, added[same:], missing[same:])
    if same and not are_effective(new, apply_edit(booted, edit)):
        # Another program appended an argument of the same key later.
        edit = _replace_arguments(booted, added, missing)
    # Their order counts too: see `is_applied`.
    changed = {*_normalize_all((*edit.append_kargs, *edit.delete_kargs))}
    others = [name for name in wanted[:overlap] if name not in changed]
    return replace(edit, keep_kargs=(*edit.keep_kargs, *others))


def list_differences(wanted: Sequence[str], booted: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the arguments that are not effective, each with the one in its place.

    One that is missing has none; the last one that is overridden stands for all of these.
    """
    present, names = _select_keys(booted, wanted), _normalize_all(wanted)
    if missing := Counter(names) - Counter(present):
        return tuple((name, "") for name in missing.elements())
    pairs = zip(names, present[len(present) - len(names) :], strict=True)
    return tuple((name, f"a later {actual}") for name, actual in pairs if name != actual)[-1:]


def list_kept(machine: Mapping[str, int], new: Sequence[str]) -> Arguments:
    """Return the arguments of the machine that leave the config, but not the command line."""
    wanted = {*_normalize_all(new)}
    return tuple(name for name, count in machine.items() if count and name not in wanted)


def merge_counts(
    first: Sequence[str], booted: Sequence[str], recorded: Mapping[str, int]
) -> dict[str, int]:
    """Return the known counts: the recorded ones, and those of the machine's first boot.

    ``first`` is the command line of the first boot, empty if unknown.
    """
    if not first:
        return dict(recorded)
    names = _normalize_all(first)
    return {**{name: names.count(name) for name in _normalize_all(booted)}, **recorded}


def _replace_arguments(
    booted: Sequence[str], delete: Sequence[str], append: Sequence[str]
) -> DeploymentChange:
    """Return the edit that deletes these, and the last ones of equal arguments."""
    changed, left = {*_normalize_all((*append, *delete))}, Counter(_normalize_all(booted))
    left.subtract(_normalize_all(delete))
    keep = tuple(name for name in left.elements() if name in changed)
    return DeploymentChange(append_kargs=tuple(append), delete_kargs=tuple(delete), keep_kargs=keep)


def _split_owners(machine: Mapping[str, int], booted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of the machine, and those that a config added."""
    base: list[str] = []
    added: list[str] = []
    seen = Counter[str]()
    for argument in booted:
        name = _normalize(argument)
        seen[name] += 1
        (base if seen[name] <= machine.get(name, seen[name]) else added).append(argument)
    return base, added


def _select_keys(arguments: Sequence[str], like: Sequence[str]) -> list[str]:
    """Return the arguments that have a key of those in ``like``."""
    keys = {*map(_parse_key, like)}
    return [_normalize(argument) for argument in arguments if _parse_key(argument) in keys]


def _normalize_all(arguments: Sequence[str]) -> list[str]:
    return [*map(_normalize, arguments)]


def _normalize(argument: str) -> str:
    """Return the argument as the kernel reads it: GRUB moves quotes to both of its ends."""
    return argument.replace('"', "")


def _parse_key(argument: str) -> str:
    # The kernel and systemd read - and _ in a key as the same character.
    return _normalize(argument).partition("=")[0].replace("-", "_")
