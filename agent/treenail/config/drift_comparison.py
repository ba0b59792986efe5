"""Comparison of the files and settings of a config with those found on the node."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain

from treenail import deployment_change, observations, sanitize
from treenail.api.ignition.model import Contents
from treenail.config import node_paths, wanted_state
from treenail.units import unit_files, unit_install

MASK_TARGET = "/dev/null"
UNIT_MODE = 0o644
NO_ARGUMENT = "nothing"
"""The actual value where a kernel argument is missing, and no other one overrides it."""


class DriftAttribute(StrEnum):
    """Attribute of a path, a unit or the node that differs from the config."""

    KIND = "kind"
    CONTENTS = "contents"
    MODE = "mode"
    USER = "user"
    GROUP = "group"
    TARGET = "target"
    LABEL = "label"
    ENABLEMENT = "enablement"
    EFFECT = "effect"
    """A setting cannot have an effect on this machine."""
    KERNEL_ARGUMENTS = "kernel arguments"
    PACKAGES = "packages"
    IMAGE = "image"


@dataclass(frozen=True, slots=True)
class ExpectedEntry:
    """Entry that a config requires at a path; attributes that are None are not compared."""

    path: str
    kind: observations.EntryKind
    contents: Contents | str | None = field(default=None, repr=False)
    mode: int | None = None
    user: wanted_state.UserOrGroup | None = None
    group: wanted_state.UserOrGroup | None = None
    target: str | None = None
    digest: str = field(default="", compare=False)
    """SHA-256 of the contents; empty until it is computed."""

    def drop_contents(self) -> "ExpectedEntry":
        """Return a copy without the contents, which are large and may be secret."""
        if self.kind is not observations.EntryKind.FILE:
            return self
        return replace(self, contents=None, digest=self.compute_sha256())

    def compute_sha256(self) -> str:
        """Return the SHA-256 of the expected contents; raises `IgnitionError`."""
        if self.digest:
            return self.digest
        if isinstance(self.contents, Contents):
            return self.contents.compute_sha256()
        return hashlib.sha256((self.contents or "").encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference from the config.

    Contents are represented by their digest, those of secret files not at all: a digest without a
    salt confirms a guessed password.
    """

    subject: str
    attribute: DriftAttribute
    expected: str
    actual: str

    def __str__(self) -> str:
        if self.attribute is DriftAttribute.CONTENTS:
            return sanitize.escape_line(f"{self.subject}: contents differ")
        return sanitize.escape_line(
            f"{self.subject}: expected {self.attribute} {self.expected}, found {self.actual}"
        )


def compute_expected_entries(wanted: wanted_state.WantedState) -> dict[str, ExpectedEntry]:
    """Return the expected entry of each path, without credentials, which rotate separately."""
    entries = [
        *(expect_file(file) for file in wanted.files.values()),
        *(
            ExpectedEntry(
                entry.path,
                observations.EntryKind.DIRECTORY,
                None,
                entry.mode,
                entry.user,
                entry.group,
            )
            for entry in wanted.directories.values()
        ),
        *(
            ExpectedEntry(link.path, observations.EntryKind.LINK, target=link.target)
            for link in wanted.links.values()
            if not link.is_hard
        ),
        *(entry for unit in wanted.units.values() for entry in _expect_unit_files(unit)),
    ]
    return {entry.path: entry for entry in entries if entry.path not in node_paths.CREDENTIALS}


def list_expected_paths(wanted: wanted_state.WantedState) -> Iterator[str]:
    """Yield the paths of `compute_expected_entries` at a much lower cost."""
    soft = (link.path for link in wanted.links.values() if not link.is_hard)
    units = (path for unit in wanted.units.values() for path in _list_unit_paths(unit))
    for path in chain(wanted.files, wanted.directories, soft, units):
        if path not in node_paths.CREDENTIALS:
            yield path


def compare_entry(entry: ExpectedEntry, actual: observations.PathEntry) -> tuple[Drift, ...]:
    """Compare one path with its expected entry; entries of another kind differ only in that."""
    if entry.kind is not actual.kind:
        return (Drift(entry.path, DriftAttribute.KIND, entry.kind, actual.kind),)
    return tuple(_find_differences(entry, actual))


def find_unknown_dropins(
    wanted: wanted_state.WantedState, present: Iterable[str]
) -> tuple[Drift, ...]:
    """Return the drop-ins in ``present`` that belong to wanted units but not to the config.

    The distribution and other programs also write drop-ins. The caller's policy decides about
    them.
    """
    known = {*wanted.list_unit_files(), *wanted.files}
    directories = tuple(f"{node_paths.unit_path(name)}.d/" for name in wanted.units)
    return tuple(
        Drift(
            path, DriftAttribute.KIND, observations.EntryKind.NOTHING, observations.EntryKind.FILE
        )
        for path in sorted(present)
        if path not in known and path.startswith(directories) and path.endswith(".conf")
    )


@dataclass(frozen=True, slots=True)
class UnitLinkComparison:
    """The effect that ``systemctl enable`` or ``disable`` of a unit of the config would have."""

    links: tuple[str, ...] = ()
    """The links that it would make or remove: the unit is not as the config says."""
    obstacle: str = ""
    """Why it has no effect."""
    error: unit_files.UnitFileError | None = None
    """Why systemctl refuses it."""


def compare_unit_links(
    wanted: wanted_state.WantedState, reader: unit_files.UnitFileReader
) -> dict[str, UnitLinkComparison]:
    """Compare the links of units with those that systemctl makes for the config.

    This is the rule for enablement: a unit is as the config says when the command of systemctl
    would change no link. A link of an enabled unit outlives the removal of another one, which
    disabling its template or a unit with ``Also=`` causes.
    """
    units = [unit for unit in wanted.units.values() if not unit.mask and unit.enabled is not None]
    disabled = {unit.name for unit in units if not unit.enabled}
    kept: set[str] = set(list_expected_paths(wanted))
    compared: dict[str, UnitLinkComparison] = {}
    for unit in units:
        if unit.enabled:
            compared[unit.name] = _compare_enabled(unit.name, reader, disabled, kept)
    for name in sorted(disabled):
        if reader.find_unit_file(name):
            removed = reader.plan_disable(name).removed
            compared[name] = UnitLinkComparison(tuple(p for p in removed if p not in kept))
    return compared


def _compare_enabled(
    name: str, reader: unit_files.UnitFileReader, disabled: set[str], kept: set[str]
) -> UnitLinkComparison:
    try:
        reader.plan_enable(name)  # systemctl refuses also for a unit in Also=
        links = reader.plan_enable(name, excluded=disabled)
        kept.update(reader.plan_enable(name, follows_also=False).made)
    except unit_install.SpecifierError:
        # A running systemd knows the links: its state counts.
        is_enabled = reader.read_states(name)[name] in unit_files.ENABLED
        return UnitLinkComparison(() if is_enabled else ("the links of a running systemd",))
    except unit_files.UnitFileError as error:
        if error.problem is unit_files.UnitProblem.NOT_FOUND:
            return UnitLinkComparison(obstacle="no such unit on this machine")
        if error.problem is unit_files.UnitProblem.ALIAS:
            return UnitLinkComparison(
                obstacle=str(error).removeprefix(f"cannot enable {name}: it is ")
            )
        return UnitLinkComparison(error=error)
    if not links.made:
        return UnitLinkComparison(obstacle="no unit in its [Install] sections")
    return UnitLinkComparison(reader.find_missing_links(links))


def find_unit_drift(
    wanted: wanted_state.WantedState,
    states: Mapping[str, str],
    compared: Mapping[str, UnitLinkComparison],
) -> tuple[Drift, ...]:
    """Return the units whose state in systemd, or whose links, contradict the config.

    A missing unit is no drift when the config enables it but has no contents for it.
    """
    drifts: list[Drift] = []
    for unit in wanted.units.values():
        if unit.enabled is None or unit.mask:
            continue
        expectation = "enabled" if unit.enabled else "disabled"
        state = states.get(unit.name, "not-found")
        result = compared.get(unit.name, UnitLinkComparison())
        if state in _list_wrong_states(unit):
            drifts.append(Drift(unit.name, DriftAttribute.ENABLEMENT, expectation, state))
        elif result.links:
            problem = f"{state} {'without' if unit.enabled else 'with'} {', '.join(result.links)}"
            drifts.append(Drift(unit.name, DriftAttribute.ENABLEMENT, expectation, problem))
        elif result.obstacle:
            expectation = "of enabled: true"
            drifts.append(Drift(unit.name, DriftAttribute.EFFECT, expectation, result.obstacle))
    return tuple(drifts)


def find_user_drift(users: Iterable[str], *, has_core_user: bool) -> tuple[Drift, ...]:
    """Return the users whose keys and password cannot be set."""
    return tuple(
        Drift(
            f"user {name}",
            DriftAttribute.EFFECT,
            "of its keys and password",
            "no such user on this machine"
            if name == node_paths.CORE_USER
            else f"another user than {node_paths.CORE_USER}",
        )
        for name in users
        if name != node_paths.CORE_USER or not has_core_user
    )


def find_argument_drift(wanted: Sequence[str], booted: Sequence[str]) -> tuple[Drift, ...]:
    """Return the kernel arguments that are missing or without effect.

    Additional ones are no drift unless they have the same key and come later.
    """
    if deployment_change.are_effective(wanted, booted):
        return ()
    from treenail.config.redact import redact_line  # noqa: PLC0415 - slow import, rarely needed

    differences = deployment_change.list_differences(wanted, booted)
    return tuple(
        Drift(
            "kernel command line",
            DriftAttribute.KERNEL_ARGUMENTS,
            redact_line(argument),
            redact_line(actual) or NO_ARGUMENT,
        )
        for argument, actual in differences
    )


def find_image_drift(wanted: str, booted: frozenset[str]) -> tuple[Drift, ...]:
    """Return the booted image as drift unless it has the wanted digest; empty if one is unknown."""
    if not wanted or not any(booted) or wanted in booted:
        return ()
    named = " and ".join(sorted(filter(None, booted)))
    return (Drift("operating system", DriftAttribute.IMAGE, wanted, named),)


def find_package_drift(wanted: Iterable[str], installed: Iterable[str]) -> tuple[Drift, ...]:
    """Return the packages that are missing; additional ones are no drift."""
    missing = sorted(set(wanted) - set(installed))
    return tuple(Drift(name, DriftAttribute.PACKAGES, "installed", "nothing") for name in missing)


def expect_file(file: wanted_state.WantedFile) -> ExpectedEntry:
    """Return the expected entry of a file, of a credential too."""
    return ExpectedEntry(
        file.path,
        observations.EntryKind.FILE,
        file.contents,
        file.mode,
        file.user,
        file.group,
        digest=file.sha256,
    )


def _list_unit_paths(unit: wanted_state.WantedUnit) -> Iterator[str]:
    if unit.mask or unit.contents:
        yield node_paths.unit_path(unit.name)
    for name in unit.dropins:
        yield node_paths.dropin_path(unit.name, name)


def _expect_unit_files(unit: wanted_state.WantedUnit) -> Iterator[ExpectedEntry]:
    root = wanted_state.ROOT
    if unit.mask:
        path = node_paths.unit_path(unit.name)
        yield ExpectedEntry(path, observations.EntryKind.LINK, target=MASK_TARGET)
    for path, text in unit.list_files():
        yield ExpectedEntry(path, observations.EntryKind.FILE, text, UNIT_MODE, root, root)
    for name, text in unit.dropins.items():
        if not text:
            path = node_paths.dropin_path(unit.name, name)
            yield ExpectedEntry(path, observations.EntryKind.NOTHING)


def _find_differences(entry: ExpectedEntry, present: observations.PathEntry) -> Iterator[Drift]:
    if (
        entry.kind is observations.EntryKind.FILE
        and (digest := entry.compute_sha256()) != present.sha256
    ):
        expected, actual = f"sha256:{digest}", f"sha256:{present.sha256}"
        mode = present.mode if entry.mode is None else entry.mode & present.mode
        if node_paths.is_secret_file(entry.path, mode):
            expected = actual = node_paths.WITHHELD
        yield Drift(entry.path, DriftAttribute.CONTENTS, expected, actual)
    if entry.mode is not None and entry.mode != present.mode:
        yield Drift(entry.path, DriftAttribute.MODE, f"{entry.mode:04o}", f"{present.mode:04o}")
    if entry.user is not None and entry.user not in (present.uid, present.user):
        yield Drift(
            entry.path, DriftAttribute.USER, str(entry.user), present.user or str(present.uid)
        )
    if entry.group is not None and entry.group not in (present.gid, present.group):
        yield Drift(
            entry.path, DriftAttribute.GROUP, str(entry.group), present.group or str(present.gid)
        )
    if entry.target is not None and entry.target != present.target:
        from treenail.config.redact import redact_line  # noqa: PLC0415 - as above

        target, actual_target = redact_line(entry.target), redact_line(present.target)
        yield Drift(entry.path, DriftAttribute.TARGET, target, actual_target)
    if present.expected_label and present.label != present.expected_label:
        yield Drift(
            entry.path, DriftAttribute.LABEL, present.expected_label, present.label or "nothing"
        )


def _list_wrong_states(unit: wanted_state.WantedUnit) -> frozenset[str]:
    """Return the states that contradict the config; others, such as static, do not."""
    if not unit.enabled:
        return frozenset({"enabled", "enabled-runtime"})
    wrong = frozenset({"disabled", "masked", "masked-runtime"})
    return wrong | {"not-found"} if unit.contents else wrong
