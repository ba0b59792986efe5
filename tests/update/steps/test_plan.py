"""Plans of steps, as their sentences."""

import hashlib
from dataclasses import replace

import pytest

from treenail.api.disruptionpolicy import (
    DaemonReloadPolicyAction,
    ReloadPolicyAction,
    RestartPolicyAction,
)
from treenail.api.ignition.model import Contents
from treenail.config.wanted_state import (
    WantedDirectory,
    WantedFile,
    WantedLink,
    WantedState,
    WantedUnit,
    WantedUser,
)
from treenail.errors import LedgerError
from treenail.observations import EntryKind, PathEntry
from treenail.units.unit_files import ChangedFiles, SymbolicLink, UnitFileReader
from treenail.update.impact.impact import convert_steps_to_diff, plan_service_steps
from treenail.update.steps.inventory import (
    Inventory,
    Ownership,
    compute_ownership,
    from_json,
    list_inspected_paths,
    to_json,
)
from treenail.update.steps.plan import plan_steps
from treenail.update.steps.step_types import RecordOwnership, RelabelEntry

UNITS, VENDOR = "/etc/systemd/system", "/usr/lib/systemd/system"


def wanted(*entries: object) -> WantedState:
    def of(kind: type, key: str = "path") -> dict[str, object]:
        return {getattr(entry, key): entry for entry in entries if isinstance(entry, kind)}

    return WantedState(
        of(WantedFile), of(WantedDirectory), of(WantedLink), of(WantedUnit, "name"),
        of(WantedUser, "name"),
    )  # type: ignore[arg-type]  # fmt: skip


def file(path: str, text: str = "new", mode: int = 0o644) -> WantedFile:
    return WantedFile(path, Contents(f"data:,{text}"), mode)


def actual(
    text: str = "new", mode: int = 0o644, kind: EntryKind = EntryKind.FILE, target: str = ""
) -> PathEntry:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return PathEntry(kind, digest, mode, user="root", group="root", target=target)


def sentences(old: WantedState | None, new: WantedState, inventory: Inventory) -> list[str]:
    before = Ownership() if old is None else compute_ownership("old", old)
    return [
        str(step)
        for step in plan_steps(before, new, inventory).steps
        if not isinstance(step, RecordOwnership)
    ]


@pytest.mark.parametrize(
    ("old", "new", "inventory", "steps"),
    [
        pytest.param(None, wanted(), Inventory(), [], id="nothing"),
        pytest.param(
            None,
            wanted(file("/etc/a"), file("/etc/b", mode=0o600)),
            Inventory({"/etc/b": actual("other", 0o644)}),
            [
                "back up /etc/b: the config replaces it",
                "write /etc/a (0644): missing",
                "write /etc/b (0600): contents differ, mode 0600 instead of 0644",
            ],
            id="files, missing and present",
        ),
        pytest.param(
            wanted(file("/etc/a")),
            wanted(file("/etc/a")),
            Inventory({"/etc/a": actual()}),
            [],
            id="as wanted",
        ),
        pytest.param(
            wanted(file("/etc/a")),
            wanted(WantedFile("/etc/a", Contents("data:;base64,bmV3"))),
            Inventory({"/etc/a": actual()}),
            [],
            id="other encoding of the same contents",
        ),
        pytest.param(
            wanted(file("/etc/a"), file("/etc/a/b"), file("/etc/c")),
            wanted(),
            Inventory(
                {"/etc/a": actual(), "/etc/a/b": actual(), "/etc/c": actual()},
                restorable=frozenset({"/etc/c"}),
            ),
            [
                "restore /etc/c: the config no longer has it",
                "remove /etc/a/b: the config no longer has it",
                "remove /etc/a: the config no longer has it",
            ],
            id="released entries, children first",
        ),
        pytest.param(
            wanted(file("/etc/docker/certs.d/r/ca.crt"), file("/etc/kubernetes/kubelet-ca.crt")),
            wanted(),
            Inventory(
                {
                    "/etc/docker/certs.d/r/ca.crt": actual(),
                    "/etc/kubernetes/kubelet-ca.crt": actual(),
                }
            ),
            [],
            id="trusted certificates stay",
        ),
        pytest.param(
            None,
            wanted(file("/etc/kubernetes/kubelet-ca.crt"), file("/var/lib/kubelet/config.json")),
            Inventory(
                {
                    "/etc/kubernetes/kubelet-ca.crt": actual("newer"),
                    "/var/lib/kubelet/config.json": actual("secret"),
                }
            ),
            ["write /var/lib/kubelet/config.json (0644): contents differ"],
            id="credentials without a backup of the pull secret",
        ),
        pytest.param(
            wanted(file(f"{UNITS}/a.service.d/b.conf")),
            wanted(WantedUnit("a.service", dropins={"b.conf": "new"})),
            Inventory(
                {f"{UNITS}/a.service.d/b.conf": actual()},
                units=UnitFileReader(ChangedFiles(None, {f"{VENDOR}/a.service": b"[Unit]"})),
            ),
            ["preset a.service"],
            id="file that becomes a drop-in",
        ),
        pytest.param(
            None,
            wanted(WantedUnit("a.service", dropins={"b.conf": "", "c.conf": ""})),
            Inventory({f"{UNITS}/a.service.d/b.conf": actual()}),
            [
                f"back up {UNITS}/a.service.d/b.conf: the config replaces it",
                f"remove {UNITS}/a.service.d/b.conf: the config has an empty drop-in",
            ],
            id="empty drop-in",
        ),
        pytest.param(
            None,
            wanted(WantedUnit("a.service", mask=True), WantedUnit("b.service", mask=False)),
            Inventory(
                {f"{UNITS}/b.service": actual("", kind=EntryKind.LINK, target="/dev/null")},
                units=UnitFileReader(
                    ChangedFiles(
                        None,
                        {
                            f"{UNITS}/b.service": SymbolicLink("/dev/null"),
                            f"{VENDOR}/b.service": b"[Unit]",
                        },
                    )
                ),
            ),
            [
                f"remove {UNITS}/b.service: the config unmasks the unit",
                f"link {UNITS}/a.service to /dev/null: missing",
                "preset b.service",
            ],
            id="masks",
        ),
        pytest.param(
            wanted(WantedUnit("a.service", "[Install]\nWantedBy=y.target", enabled=True)),
            wanted(WantedUnit("a.service", "[Install]\nWantedBy=x.target", enabled=True)),
            Inventory(
                {f"{UNITS}/a.service": actual("[Install]\nWantedBy=y.target")},
                units=UnitFileReader(
                    ChangedFiles(
                        None,
                        {
                            f"{UNITS}/a.service": b"[Install]\nWantedBy=y.target",
                            f"{UNITS}/y.target.wants/a.service": SymbolicLink("../a.service"),
                        },
                    )
                ),
            ),
            [
                "disable a.service",
                f"write {UNITS}/a.service (0644): contents differ",
                "enable a.service",
            ],
            id="unit with another install section",
        ),
        pytest.param(
            None,
            wanted(WantedDirectory("/a/b", 0o700), WantedDirectory("/a"), WantedLink("/l", "a")),
            Inventory({"/a": actual(kind=EntryKind.DIRECTORY, mode=0o755)}),
            [
                "back up /a: the config replaces it",
                "make directory /a/b (0700): missing",
                "link /l to a: missing",
            ],
            id="directories and links",
        ),
        pytest.param(
            wanted(file("/etc/a"), file("/etc/b"), WantedUnit("a.service", "x", enabled=True)),
            wanted(file("/etc/a"), file("/etc/b"), WantedUnit("a.service", "x", enabled=True)),
            Inventory(
                {
                    "/etc/a": replace(actual(), label="wrong_t", expected_label="etc_t"),
                    "/etc/b": replace(actual("other"), label="", expected_label="etc_t"),
                    f"{UNITS}/a.service": replace(
                        actual("x"), label="x_t", expected_label="unit_t"
                    ),
                },
            ),
            [
                "relabel /etc/a: label etc_t instead of wrong_t",
                "write /etc/b (0644): contents differ, label etc_t instead of nothing",
                f"relabel {UNITS}/a.service: label unit_t instead of x_t",
            ],
            id="labels",
        ),
        pytest.param(
            wanted(WantedUser("core", ("a",))),
            wanted(WantedUser("core", ("a", "b"), "$6$x")),
            Inventory(has_core_user=True, password_hash="$6$x"),
            ["write 2 SSH keys of core: keys differ"],
            id="keys without the password",
        ),
        pytest.param(
            wanted(WantedUser("core", ("a",), "$6$x")),
            wanted(),
            Inventory(
                {"/home/core/.ssh/authorized_keys.d/ignition": actual("a\n", 0o600)},
                has_core_user=True,
                password_hash="$6$x",
            ),
            [
                "write 0 SSH keys of core: the config no longer has them",
                "set the password of core: the config has none",
            ],
            id="released user",
        ),
    ],
)
def test_plan_has_these_steps(old, new, inventory, steps):
    assert sentences(old, new, inventory) == steps


def test_plan_notes_what_it_skips():
    new = wanted(
        WantedUnit("none.service", enabled=True), WantedUser("core", ("a",)), WantedUser("joe")
    )
    assert plan_steps(Ownership(), new, Inventory()).notes == (
        "enabling none.service has no effect: no such unit on this machine",
        "skipped user joe: a config can set keys and password of core only",
        "skipped keys and password of core: this machine has no such user",
    )


def test_daemon_reload_comes_before_reloads_and_restarts():
    steps = plan_steps(Ownership(), wanted(WantedUnit("a.service", "x")), Inventory()).steps
    actions = (ReloadPolicyAction("b.service"), RestartPolicyAction("c.service"))
    assert [str(step) for step in plan_service_steps(steps, actions)] == [
        "daemon-reload",
        "reload b.service",
        "restart c.service",
    ]
    assert [str(step) for step in plan_service_steps((), (DaemonReloadPolicyAction(),))] == [
        "daemon-reload"
    ]
    assert (
        plan_service_steps(plan_steps(Ownership(), wanted(file("/etc/a")), Inventory()).steps, ())
        == ()
    )


def test_relabel_is_no_difference_and_needs_no_service_step():
    new = wanted(file("/etc/a"), WantedUnit("a.service", "x"))
    labelled = {"label": "wrong_t", "expected_label": "right_t"}
    inventory = Inventory(
        {
            "/etc/a": replace(actual(), **labelled),
            f"{UNITS}/a.service": replace(actual("x"), **labelled),
        },
        units=UnitFileReader(ChangedFiles(None, {f"{UNITS}/a.service": b"x"})),
    )
    steps = plan_steps(compute_ownership("new", new), new, inventory).steps
    assert [type(step) for step in steps[:2]] == [RelabelEntry, RelabelEntry]
    assert convert_steps_to_diff(new, steps).is_empty
    assert plan_service_steps(steps, ()) == ()


def test_steps_convert_to_differences():
    old = compute_ownership("old", wanted(file("/etc/gone"), WantedUnit("gone.service", "x")))
    new = wanted(
        file("/etc/a"), WantedUnit("a.service", "x", enabled=True), WantedUser("core", ("k",))
    )
    inventory = Inventory(
        {"/etc/gone": actual(), f"{UNITS}/gone.service": actual("x")}, has_core_user=True
    )
    diff = convert_steps_to_diff(new, plan_steps(old, new, inventory).steps)
    assert [str(change) for change in diff.files] == ["/etc/a added", "/etc/gone removed"]
    assert [change.key for change in diff.units] == ["a.service", "gone.service"]
    assert [change.key for change in diff.users] == ["core"]


def test_inspected_paths_cover_all_that_a_plan_needs():
    old = compute_ownership("", wanted(file("/etc/old")))
    new = wanted(
        file("/etc/a"),
        WantedUnit("m.service", mask=False),
        WantedLink("/h", "/etc/a", is_hard=True),
    )
    assert list_inspected_paths(old, new) == (
        "/etc/a",
        "/h",
        f"{UNITS}/m.service",
        "/home/core/.ssh/authorized_keys.d/ignition",
        "/home/core/.ssh",
        "/home/core/.ssh/authorized_keys.d",
        "/etc/old",
    )


def test_ownership_survives_writing_and_reading():
    ownership = compute_ownership(
        "a", wanted(file("/etc/a"), WantedUnit("u.service", "x", enabled=True), WantedUser("core"))
    )
    assert from_json(to_json(ownership)) == ownership


@pytest.mark.parametrize("document", [{}, [], {"version": 2}, {**to_json(Ownership()), "units": 1}])
def test_invalid_ownership_is_refused(document):
    with pytest.raises(
        LedgerError, match="cannot read the paths and units that belong to the config"
    ):
        from_json(document)
