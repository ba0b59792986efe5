"""What was found is compared with what the config put there, attribute by attribute."""

import hashlib

import pytest
from hypothesis import given

from tests.api.configs import configs, ignition
from tests.api.fuzzing import fuzz
from treenail.api.machineconfig import MachineConfig
from treenail.config.drift import (
    Attribute,
    Drift,
    Expected,
    Found,
    Kind,
    argument_drifts,
    drifted,
    expected,
    extra_dropins,
    package_drifts,
    unit_drifts,
)
from treenail.config.wanted import Wanted, wanted

A = hashlib.sha256(b"a").hexdigest()
B = hashlib.sha256(b"b").hexdigest()


def of(document: object) -> Wanted:
    return wanted(MachineConfig(config=document))


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
            {"path": "/etc/h", "target": "a", "hard": True},
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


def test_every_path_the_config_puts_something_at_is_expected() -> None:
    found = expected(of(DOCUMENT))
    assert {path: (entry.kind, entry.mode, entry.target) for path, entry in found.items()} == {
        "/etc/a": (Kind.FILE, 0o644, None),
        f"{UNITS}/b.service.d/by-file.conf": (Kind.FILE, 0o644, None),
        "/etc/d": (Kind.DIRECTORY, 0o755, None),
        "/etc/l": (Kind.LINK, None, "a"),
        f"{UNITS}/a.service": (Kind.FILE, 0o644, None),
        f"{UNITS}/b.service": (Kind.LINK, None, "/dev/null"),
        f"{UNITS}/b.service.d/x.conf": (Kind.FILE, 0o644, None),
        f"{UNITS}/c.service.d/y.conf": (Kind.NOTHING, None, None),
    }
    assert found["/etc/a"].sha256() == found[f"{UNITS}/a.service"].sha256() == A
    assert found[f"{UNITS}/b.service.d/x.conf"].sha256() == B


FILE = Expected("/etc/a", Kind.FILE, "a", 0o644, 7, "wheel")


@pytest.mark.parametrize(
    ("found", "drifts"),
    [
        (Found(Kind.FILE, A, 0o644, 7, 10, "core", "wheel"), []),
        (Found(Kind.NOTHING), [Drift("/etc/a", Attribute.KIND, "file", "nothing")]),
        (Found(Kind.LINK, target="b"), [Drift("/etc/a", Attribute.KIND, "file", "link")]),
        (
            Found(Kind.FILE, B, 0o1600, 0, 10, "root", ""),
            [
                Drift("/etc/a", Attribute.CONTENTS, f"sha256:{A}", f"sha256:{B}"),
                Drift("/etc/a", Attribute.MODE, "0644", "1600"),
                Drift("/etc/a", Attribute.USER, "7", "root"),
                Drift("/etc/a", Attribute.GROUP, "wheel", "10"),
            ],
        ),
        (
            Found(
                Kind.FILE, A, 0o644, 7, 10, "core", "wheel", label="tmp_t", default_label="etc_t"
            ),
            [Drift("/etc/a", Attribute.LABEL, "etc_t", "tmp_t")],
        ),
    ],
)
def test_a_file_drifts_by_kind_contents_mode_owner_and_label(
    found: Found, drifts: list[Drift]
) -> None:
    assert list(drifted(FILE, found)) == drifts


def test_a_link_drifts_by_its_target() -> None:
    link = Expected("/etc/l", Kind.LINK, target="a")
    assert drifted(link, Found(Kind.LINK, mode=0o777, target="a")) == ()
    assert drifted(link, Found(Kind.LINK, target="b")) == (
        Drift("/etc/l", Attribute.TARGET, "a", "b"),
    )


def test_what_should_not_be_there_drifts_by_being_there() -> None:
    nothing = Expected("/etc/x", Kind.NOTHING)
    assert drifted(nothing, Found(Kind.NOTHING)) == ()
    assert [str(drift) for drift in drifted(nothing, Found(Kind.FILE))] == [
        "/etc/x: expected kind nothing, found file"
    ]


def test_a_drop_in_that_nobody_asked_for_is_extra() -> None:
    present = [
        f"{UNITS}/b.service.d/x.conf",
        f"{UNITS}/b.service.d/by-file.conf",
        f"{UNITS}/b.service.d/extra.conf",
        f"{UNITS}/b.service.d/.x.conf.tmp",
        f"{UNITS}/c.service.d/y.conf",
        f"{UNITS}/other.service.d/z.conf",
    ]
    assert [drift.subject for drift in extra_dropins(of(DOCUMENT), present)] == [
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
def test_a_unit_drifts_by_its_enablement(states: dict[str, str], subjects: list[str]) -> None:
    assert [drift.subject for drift in unit_drifts(of(DOCUMENT), states)] == subjects


def test_kernel_arguments_drift_by_each_one_that_is_missing() -> None:
    booted = ["root=/dev/sda", "a=1", "b"]
    assert argument_drifts(["b", "a=1"], booted) == ()
    assert argument_drifts(["a=1", "a=1", "c"], booted) == (
        Drift("kernel command line", Attribute.ARGUMENTS, "a=1", "nothing"),
        Drift("kernel command line", Attribute.ARGUMENTS, "c", "nothing"),
    )


def test_packages_drift_by_each_one_that_is_missing() -> None:
    assert package_drifts(["vim", "a"], ["vim", "b"]) == (
        Drift("a", Attribute.PACKAGES, "installed", "nothing"),
    )


def test_contents_show_in_no_drift_and_no_representation() -> None:
    entry = Expected("/etc/a", Kind.FILE, "canary", 0o644, 0, 0)
    drifts = drifted(entry, Found(Kind.FILE, A))
    assert "canary" not in repr(entry) + repr(drifts) + "".join(map(str, drifts))


def as_written(entry: Expected) -> Found:
    """What a faithful writer leaves behind."""
    user, group = entry.user or 0, entry.group or 0
    return Found(
        kind=entry.kind,
        sha256=entry.sha256() if entry.kind is Kind.FILE else "",
        mode=entry.mode or 0,
        uid=user if isinstance(user, int) else 1000,
        gid=group if isinstance(group, int) else 1000,
        user=user if isinstance(user, str) else "",
        group=group if isinstance(group, str) else "",
        target=entry.target or "",
    )


@fuzz
@given(configs())
def test_what_was_written_faithfully_has_not_drifted(document: object) -> None:
    for entry in expected(of(document)).values():
        assert drifted(entry, as_written(entry)) == ()
