"""What is wanted and what is seen, to sentences."""

import hashlib
from dataclasses import replace

import pytest

from treenail.api.contents import Contents
from treenail.api.disruptionpolicy import (
    DaemonReloadPolicyAction,
    ReloadPolicyAction,
    RestartPolicyAction,
)
from treenail.config.drift import ActualEntry, EntryKind
from treenail.config.wanted import (
    WantedDirectory,
    WantedFile,
    WantedLink,
    WantedState,
    WantedUnit,
    WantedUser,
)
from treenail.errors import LedgerError
from treenail.update.impact.step_impact import convert_steps_to_diff, plan_service_steps
from treenail.update.steps.inventory import Inventory, list_inspected_paths
from treenail.update.steps.ownership import Ownership, compute_ownership, from_json, to_json
from treenail.update.steps.plan import plan_steps
from treenail.update.steps.steps import RecordOwnership, RelabelEntry

UNITS = "/etc/systemd/system"


def wanted(*entries: object) -> WantedState:
    def of(kind: type, key: str = "path") -> dict[str, object]:
        return {getattr(entry, key): entry for entry in entries if isinstance(entry, kind)}

    return WantedState(
        of(WantedFile), of(WantedDirectory), of(WantedLink), of(WantedUnit, "name"),
        of(WantedUser, "name"),
    )  # type: ignore[arg-type]  # fmt: skip


def file(path: str, text: str = "new", mode: int = 0o644) -> WantedFile:
    return WantedFile(path, Contents(f"data:,{text}"), mode)


def found(
    text: str = "new", mode: int = 0o644, kind: EntryKind = EntryKind.FILE, target: str = ""
) -> ActualEntry:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return ActualEntry(kind, digest, mode, user="root", group="root", target=target)


def sentences(old: WantedState | None, new: WantedState, seen: Inventory) -> list[str]:
    before = Ownership() if old is None else compute_ownership("old", old)
    return [
        str(step)
        for step in plan_steps(before, new, seen).steps
        if not isinstance(step, RecordOwnership)
    ]


@pytest.mark.parametrize(
    ("old", "new", "seen", "steps"),
    [
        pytest.param(None, wanted(), Inventory(), [], id="nothing"),
        pytest.param(
            None,
            wanted(file("/etc/a"), file("/etc/b", mode=0o600)),
            Inventory({"/etc/b": found("other", 0o644)}),
            [
                "keep a copy of /etc/b: the config takes its place",
                "write /etc/a (0644): nothing is there",
                "write /etc/b (0600): other contents, mode 0600 instead of 0644",
            ],
            id="files, there and not",
        ),
        pytest.param(
            wanted(file("/etc/a")),
            wanted(file("/etc/a")),
            Inventory({"/etc/a": found()}),
            [],
            id="as it is wanted",
        ),
        pytest.param(
            wanted(file("/etc/a")),
            wanted(WantedFile("/etc/a", Contents("data:;base64,bmV3"))),
            Inventory({"/etc/a": found()}),
            [],
            id="another encoding of the same",
        ),
        pytest.param(
            wanted(file("/etc/a"), file("/etc/a/b"), file("/etc/c")),
            wanted(),
            Inventory(
                {"/etc/a": found(), "/etc/a/b": found(), "/etc/c": found()},
                restorable=frozenset({"/etc/c"}),
            ),
            [
                "restore /etc/c: the config no longer has it",
                "remove /etc/a/b: the config no longer has it",
                "remove /etc/a: the config no longer has it",
            ],
            id="what is let go of, the innermost first",
        ),
        pytest.param(
            wanted(file("/etc/docker/certs.d/r/ca.crt"), file("/etc/kubernetes/kubelet-ca.crt")),
            wanted(),
            Inventory(
                {
                    "/etc/docker/certs.d/r/ca.crt": found(),
                    "/etc/kubernetes/kubelet-ca.crt": found(),
                }
            ),
            [],
            id="what is trusted is not forgotten",
        ),
        pytest.param(
            None,
            wanted(file("/etc/kubernetes/kubelet-ca.crt"), file("/var/lib/kubelet/config.json")),
            Inventory(
                {
                    "/etc/kubernetes/kubelet-ca.crt": found("newer"),
                    "/var/lib/kubelet/config.json": found("secret"),
                }
            ),
            ["write /var/lib/kubelet/config.json (0644): other contents"],
            id="credentials are renewed elsewhere, and no copy of a pull secret is kept",
        ),
        pytest.param(
            wanted(file(f"{UNITS}/a.service.d/b.conf")),
            wanted(WantedUnit("a.service", dropins={"b.conf": "new"})),
            Inventory(
                {f"{UNITS}/a.service.d/b.conf": found()}, unit_states={"a.service": "static"}
            ),
            ["preset a.service"],
            id="a file that becomes a drop-in stays",
        ),
        pytest.param(
            None,
            wanted(WantedUnit("a.service", dropins={"b.conf": "", "c.conf": ""})),
            Inventory({f"{UNITS}/a.service.d/b.conf": found()}),
            [
                f"keep a copy of {UNITS}/a.service.d/b.conf: the config takes its place",
                f"remove {UNITS}/a.service.d/b.conf: the config has it empty",
            ],
            id="an empty drop-in does not exist",
        ),
        pytest.param(
            None,
            wanted(WantedUnit("a.service", mask=True), WantedUnit("b.service", mask=False)),
            Inventory(
                {f"{UNITS}/b.service": found("", kind=EntryKind.LINK, target="/dev/null")},
                unit_states={"a.service": "enabled", "b.service": "masked"},
                vendor_units=frozenset({"b.service"}),
            ),
            [
                f"remove {UNITS}/b.service: the unit is not to be masked",
                f"link {UNITS}/a.service to /dev/null: nothing is there",
                "preset b.service",
            ],
            id="masks",
        ),
        pytest.param(
            wanted(WantedUnit("a.service", "[Install]", enabled=True)),
            wanted(WantedUnit("a.service", "[Install]\nWantedBy=x", enabled=True)),
            Inventory(
                {f"{UNITS}/a.service": found("[Install]")}, unit_states={"a.service": "enabled"}
            ),
            [
                "disable a.service",
                f"write {UNITS}/a.service (0644): other contents",
                "enable a.service",
            ],
            id="a unit that is to be wanted by others",
        ),
        pytest.param(
            wanted(WantedUnit("a.service", "x", enabled=True), WantedUnit("b.service")),
            wanted(),
            Inventory(
                {f"{UNITS}/a.service": found("x")},
                unit_states={"a.service": "enabled", "b.service": "disabled"},
                vendor_units=frozenset({"b.service"}),
            ),
            [
                "disable a.service",
                f"remove {UNITS}/a.service: the config no longer has it",
                "preset b.service",
            ],
            id="units that are let go of",
        ),
        pytest.param(
            None,
            wanted(
                WantedUnit("kdump.service", enabled=True),
                WantedUnit("on.service", enabled=True),
                WantedUnit("off.service", enabled=False),
                WantedUnit("is-off.service", enabled=False),
            ),
            Inventory(
                unit_states={
                    "kdump.service": "disabled",
                    "on.service": "enabled",
                    "off.service": "enabled",
                    "is-off.service": "disabled",
                }
            ),
            ["enable kdump.service", "disable off.service"],
            id="units of the machine",
        ),
        pytest.param(
            None,
            wanted(WantedDirectory("/a/b", 0o700), WantedDirectory("/a"), WantedLink("/l", "a")),
            Inventory({"/a": found(kind=EntryKind.DIRECTORY, mode=0o755)}),
            [
                "keep a copy of /a: the config takes its place",
                "make directory /a/b (0700): nothing is there",
                "link /l to a: nothing is there",
            ],
            id="directories and links",
        ),
        pytest.param(
            wanted(file("/etc/a"), file("/etc/b"), WantedUnit("a.service", "x", enabled=True)),
            wanted(file("/etc/a"), file("/etc/b"), WantedUnit("a.service", "x", enabled=True)),
            Inventory(
                {
                    "/etc/a": replace(found(), label="wrong_t", default_label="etc_t"),
                    "/etc/b": replace(found("other"), label="", default_label="etc_t"),
                    f"{UNITS}/a.service": replace(found("x"), label="x_t", default_label="unit_t"),
                },
                unit_states={"a.service": "enabled"},
            ),
            [
                "relabel /etc/a: label etc_t instead of wrong_t",
                "write /etc/b (0644): other contents, label etc_t instead of nothing",
                f"relabel {UNITS}/a.service: label unit_t instead of x_t",
            ],
            id="labels",
        ),
        pytest.param(
            wanted(WantedUser("core", ("a",))),
            wanted(WantedUser("core", ("a", "b"), "$6$x")),
            Inventory(has_core_user=True, password_hash="$6$x"),
            ["write 2 SSH keys of core: others are there"],
            id="keys without the password",
        ),
        pytest.param(
            wanted(WantedUser("core", ("a",), "$6$x")),
            wanted(),
            Inventory(
                {"/home/core/.ssh/authorized_keys.d/ignition": found("a\n", 0o600)},
                has_core_user=True,
                password_hash="$6$x",
            ),
            [
                "write 0 SSH keys of core: the config no longer has them",
                "set the password of core: the config has none",
            ],
            id="a user who is let go of is locked",
        ),
    ],
)
def test_a_plan_reads_as_sentences(old, new, seen, steps):
    assert sentences(old, new, seen) == steps


def test_what_is_left_out_is_noted():
    new = wanted(
        WantedUnit("none.service", enabled=True), WantedUser("core", ("a",)), WantedUser("joe")
    )
    assert plan_steps(Ownership(), new, Inventory()).notes == (
        "there is no unit none.service on this machine: it is not enabled",
        "user joe is left out: a config sets keys and password of core only",
        "there is no user core on this machine: keys and password left out",
    )


def test_systemd_reads_its_units_again_before_any_is_reloaded_or_restarted():
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


def test_label_is_no_difference_and_nothing_takes_notice_of_it():
    new = wanted(file("/etc/a"), WantedUnit("a.service", "x"))
    labelled = {"label": "wrong_t", "default_label": "right_t"}
    seen = Inventory(
        {
            "/etc/a": replace(found(), **labelled),
            f"{UNITS}/a.service": replace(found("x"), **labelled),
        },
        unit_states={"a.service": "disabled"},
    )
    steps = plan_steps(compute_ownership("new", new), new, seen).steps
    assert [type(step) for step in steps[:2]] == [RelabelEntry, RelabelEntry]
    assert convert_steps_to_diff(new, steps).is_empty
    assert plan_service_steps(steps, ()) == ()


def test_steps_are_told_as_what_differs():
    old = compute_ownership("old", wanted(file("/etc/gone"), WantedUnit("gone.service", "x")))
    new = wanted(
        file("/etc/a"), WantedUnit("a.service", "x", enabled=True), WantedUser("core", ("k",))
    )
    seen = Inventory(
        {"/etc/gone": found(), f"{UNITS}/gone.service": found("x")}, has_core_user=True
    )
    diff = convert_steps_to_diff(new, plan_steps(old, new, seen).steps)
    assert [str(change) for change in diff.files] == ["/etc/a added", "/etc/gone removed"]
    assert [change.key for change in diff.units] == ["a.service", "gone.service"]
    assert [change.key for change in diff.users] == ["core"]


def test_all_that_a_plan_depends_on_is_looked_at():
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


def test_the_record_of_what_is_managed_is_read_as_it_was_written():
    record = compute_ownership(
        "a", wanted(file("/etc/a"), WantedUnit("u.service", "x", enabled=True), WantedUser("core"))
    )
    assert from_json(to_json(record)) == record


@pytest.mark.parametrize("document", [{}, [], {"version": 2}, {**to_json(Ownership()), "units": 1}])
def test_another_record_is_refused(document):
    with pytest.raises(
        LedgerError, match="cannot read the paths and units that belong to the config"
    ):
        from_json(document)
