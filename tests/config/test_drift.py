"""Tests that drift detection compares each attribute of found and expected entries."""

import hashlib

import pytest
from hypothesis import given

from tests.api.configs import configs, ignition
from tests.api.fuzzing import fuzz
from treenail.api.machineconfig import MachineConfig
from treenail.config.drift_comparison import (
    Drift,
    DriftAttribute,
    ExpectedEntry,
    compare_entry,
    compute_expected_entries,
    find_argument_drift,
    find_package_drift,
    find_unit_drift,
    find_unknown_dropins,
)
from treenail.config.wanted_state import WantedState, read_wanted_state
from treenail.observations import EntryKind, PathEntry

A = hashlib.sha256(b"a").hexdigest()
B = hashlib.sha256(b"b").hexdigest()


def of(document: object) -> WantedState:
    return read_wanted_state(MachineConfig(config=document))


DOCUMENT = ignition(
    storage={
        "files": [
            {"path": "/etc/a", "contents": {"source": "data:,a"}, "user": {"name": "core"}},
            {"path": "/etc/kubernetes/kubelet-ca.crt", "contents": {"source": "data:,a"}},
            {"path": "/etc/systemd/system/b.service.d/by-file.conf"},
        ],
        "directories": [{"path": "/etc/d"}],
        "links": [
            {"path": "/etc/l", "target": "a"},
            {"path": "/etc/h", "target": "/etc/a", "hard": True},
        ],
    },
    systemd={
        "units": [
            {"name": "a.service", "contents": "a", "enabled": True},
            {"name": "b.service", "mask": True, "dropins": [{"name": "x.conf", "contents": "b"}]},
            {"name": "c.service", "enabled": False, "dropins": [{"name": "y.conf"}]},
            {"name": "d.service", "enabled": True},
        ]
    },
)
UNITS = "/etc/systemd/system"


def test_every_path_of_the_config_is_expected() -> None:
    found = compute_expected_entries(of(DOCUMENT))
    assert {path: (entry.kind, entry.mode, entry.target) for path, entry in found.items()} == {
        "/etc/a": (EntryKind.FILE, 0o644, None),
        f"{UNITS}/b.service.d/by-file.conf": (EntryKind.FILE, 0o644, None),
        "/etc/d": (EntryKind.DIRECTORY, 0o755, None),
        "/etc/l": (EntryKind.LINK, None, "a"),
        f"{UNITS}/a.service": (EntryKind.FILE, 0o644, None),
        f"{UNITS}/b.service": (EntryKind.LINK, None, "/dev/null"),
        f"{UNITS}/b.service.d/x.conf": (EntryKind.FILE, 0o644, None),
        f"{UNITS}/c.service.d/y.conf": (EntryKind.NOTHING, None, None),
    }
    assert found["/etc/a"].compute_sha256() == found[f"{UNITS}/a.service"].compute_sha256() == A
    assert found[f"{UNITS}/b.service.d/x.conf"].compute_sha256() == B


FILE = ExpectedEntry("/etc/a", EntryKind.FILE, "a", 0o644, 7, "wheel")


@pytest.mark.parametrize(
    ("found", "drifts"),
    [
        (PathEntry(EntryKind.FILE, A, 0o644, 7, 10, "core", "wheel"), []),
        (PathEntry(EntryKind.NOTHING), [Drift("/etc/a", DriftAttribute.KIND, "file", "nothing")]),
        (
            PathEntry(EntryKind.LINK, target="b"),
            [Drift("/etc/a", DriftAttribute.KIND, "file", "link")],
        ),
        (
            PathEntry(EntryKind.FILE, B, 0o1600, 0, 10, "root", ""),
            [
                Drift("/etc/a", DriftAttribute.CONTENTS, "<withheld>", "<withheld>"),
                Drift("/etc/a", DriftAttribute.MODE, "0644", "1600"),
                Drift("/etc/a", DriftAttribute.USER, "7", "root"),
                Drift("/etc/a", DriftAttribute.GROUP, "wheel", "10"),
            ],
        ),
        (
            PathEntry(
                EntryKind.FILE,
                A,
                0o644,
                7,
                10,
                "core",
                "wheel",
                label="tmp_t",
                expected_label="etc_t",
            ),
            [Drift("/etc/a", DriftAttribute.LABEL, "etc_t", "tmp_t")],
        ),
    ],
)
def test_file_drifts_by_kind_contents_mode_owner_and_label(
    found: PathEntry, drifts: list[Drift]
) -> None:
    assert list(compare_entry(FILE, found)) == drifts


def test_link_drifts_by_its_target() -> None:
    link = ExpectedEntry("/etc/l", EntryKind.LINK, target="a")
    assert compare_entry(link, PathEntry(EntryKind.LINK, mode=0o777, target="a")) == ()
    assert compare_entry(link, PathEntry(EntryKind.LINK, target="b")) == (
        Drift("/etc/l", DriftAttribute.TARGET, "a", "b"),
    )


def test_unexpected_entry_drifts_by_existing() -> None:
    nothing = ExpectedEntry("/etc/x", EntryKind.NOTHING)
    assert compare_entry(nothing, PathEntry(EntryKind.NOTHING)) == ()
    assert [str(drift) for drift in compare_entry(nothing, PathEntry(EntryKind.FILE))] == [
        "/etc/x: expected kind nothing, found file"
    ]


def test_drop_in_outside_the_config_is_found() -> None:
    present = [
        f"{UNITS}/b.service.d/x.conf",
        f"{UNITS}/b.service.d/by-file.conf",
        f"{UNITS}/b.service.d/extra.conf",
        f"{UNITS}/b.service.d/.x.conf.tmp",
        f"{UNITS}/c.service.d/y.conf",
        f"{UNITS}/other.service.d/z.conf",
    ]
    assert [drift.subject for drift in find_unknown_dropins(of(DOCUMENT), present)] == [
        f"{UNITS}/b.service.d/extra.conf",
        f"{UNITS}/c.service.d/y.conf",
    ]


@pytest.mark.parametrize(
    ("states", "subjects"),
    [
        ({"a.service": "enabled", "c.service": "static", "d.service": "enabled"}, []),
        ({"a.service": "disabled", "c.service": "enabled-runtime"}, ["a.service", "c.service"]),
        ({"d.service": "masked"}, ["a.service", "d.service"]),
        ({"a.service": "alias", "c.service": "disabled"}, []),
    ],
)
def test_unit_drifts_by_its_enablement(states: dict[str, str], subjects: list[str]) -> None:
    assert [drift.subject for drift in find_unit_drift(of(DOCUMENT), states, {})] == subjects


def test_kernel_arguments_drift_by_each_missing_one() -> None:
    booted = ["root=/dev/sda", "a=1", "b"]
    assert find_argument_drift(["a=1", "b"], booted) == ()
    (later,) = find_argument_drift(["a=1"], [*booted, "a=2"])
    assert str(later).endswith("expected kernel arguments a=1, found a later a=2")
    assert find_argument_drift(["a=1", "a=1", "c"], booted) == (
        Drift("kernel command line", DriftAttribute.KERNEL_ARGUMENTS, "a=1", "nothing"),
        Drift("kernel command line", DriftAttribute.KERNEL_ARGUMENTS, "c", "nothing"),
    )


def test_packages_drift_by_each_missing_one() -> None:
    assert find_package_drift(["vim", "a"], ["vim", "b"]) == (
        Drift("a", DriftAttribute.PACKAGES, "installed", "nothing"),
    )


def test_contents_are_absent_from_drift_and_repr() -> None:
    entry = ExpectedEntry("/etc/a", EntryKind.FILE, "canary", 0o644, 0, 0)
    drifts = compare_entry(entry, PathEntry(EntryKind.FILE, A))
    assert "canary" not in repr(entry) + repr(drifts) + "".join(map(str, drifts))


def as_written(entry: ExpectedEntry) -> PathEntry:
    """Return the entry on disk after a correct write."""
    user, group = entry.user or 0, entry.group or 0
    return PathEntry(
        kind=entry.kind,
        sha256=entry.compute_sha256() if entry.kind is EntryKind.FILE else "",
        mode=entry.mode or 0,
        uid=user if isinstance(user, int) else 1000,
        gid=group if isinstance(group, int) else 1000,
        user=user if isinstance(user, str) else "",
        group=group if isinstance(group, str) else "",
        target=entry.target or "",
    )


@fuzz
@given(configs())
def test_correctly_written_entry_has_no_drift(document: object) -> None:
    for entry in compute_expected_entries(of(document)).values():
        assert compare_entry(entry, as_written(entry)) == ()


@pytest.mark.parametrize(
    ("path", "mode", "found_mode", "is_shown"),
    [
        ("/etc/a", 0o644, 0o644, True),
        ("/etc/a", 0o600, 0o600, False),
        ("/etc/a", 0o644, 0o600, False),
        ("/etc/a", 0o600, 0o644, False),
        ("/etc/shadow", 0o644, 0o644, False),
    ],
)
def test_drift_of_contents_has_no_digest_of_a_secret_file(
    path: str, mode: int, found_mode: int, *, is_shown: bool
) -> None:
    entry = ExpectedEntry(path, EntryKind.FILE, "a", mode)
    (drift, *_) = compare_entry(entry, PathEntry(EntryKind.FILE, B, found_mode))
    assert str(drift) == f"{path}: contents differ"
    assert (B in drift.actual, A in drift.expected) == (is_shown, is_shown)
