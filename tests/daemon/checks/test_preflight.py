"""The probes together, on a directory that stands for the machine."""

import json
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.update.build import B
from treenail.daemon.checks.preflight import Preflight, Probes
from treenail.daemon.checks.signature_policy import verifies
from treenail.errors import BusError, PreflightError
from treenail.host.container import registry
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.ostree.deployments import Deployment, Deployments
from treenail.host.systemd.logind import Inhibitor
from treenail.host.systemd.systemd import Unit
from treenail.update.checks.preflight import Layer, Manifest, Reason, Trouble, findings
from treenail.update.checks.signature_policy import Rule, Trust
from treenail.update.state.record import Record, to_json
from treenail.update.state.retention import Retained

LABELS = {"containers.bootc": "1"}


class Machine:
    """Everybody who is asked, on a machine in order."""

    def __init__(self) -> None:
        self.answer: registry.Inspected | registry.Trouble | None = registry.Inspected(
            "amd64", 100.0, (registry.Blob("sha256:1", 10),), LABELS
        )
        self.asked: list[tuple[str, str]] = []
        self.held: list[Inhibitor] = []
        self.active: tuple[str, ...] = ()
        self.deployments: tuple[Deployment, ...] = ()
        self.ledger: dict[str, object] | None = None

    def inspect(
        self, image: str, *, auth_file: str = ""
    ) -> registry.Inspected | registry.Trouble | None:
        self.asked.append((image, auth_file))
        return self.answer

    def units(self, *names: str) -> tuple[Unit, ...]:
        return tuple(Unit(name, "loaded", "active", "", "/") for name in self.active)

    def inhibitors(self) -> tuple[Inhibitor, ...]:
        return tuple(self.held)

    def synchronized(self) -> bool | None:
        return True

    def architecture(self) -> str:
        return "amd64"

    def look(self) -> Deployments:
        return Deployments(self.deployments)

    def read(self) -> dict[str, object] | None:
        return self.ledger

    def probes(self) -> Probes:
        return Probes(self, self, self, self, self, self, self)


class NoLogind(Machine):
    def inhibitors(self) -> tuple[Inhibitor, ...]:
        raise BusError("logind does not answer")


class NoDeployments(Machine):
    def look(self) -> Deployments:
        raise BusError("rpm-ostreed does not answer")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    for path in ("var/lib/treenail", "sysroot", "etc/containers"):
        (tmp_path / path).mkdir(parents=True)
    return Root(tmp_path)


def preflight(root: Root, machine: Machine) -> Preflight:
    return Preflight(root, Files(root), machine.probes(), FakeClock())


def test_a_machine_in_order_has_no_findings(root: Root) -> None:
    machine = Machine()
    found = preflight(root, machine).look(B.image)
    assert findings(found) == ()
    assert found.manifest == Manifest("amd64", 100.0, (Layer("sha256:1", 10),))
    assert [each.path for each in found.spaces] == ["/sysroot", "/var"]
    assert machine.asked == [(B.image, "")]
    assert list(root.path("/var/lib/treenail").iterdir()) == []


def test_the_registry_is_shown_the_merged_logins(root: Root) -> None:
    machine = Machine()
    logins = root.path("/var/lib/treenail/auth.json")
    logins.write_text("{}")
    preflight(root, machine).look(B.image)
    assert machine.asked == [(B.image, str(logins))]


def test_a_registry_in_trouble_is_a_finding(root: Root) -> None:
    machine = Machine()
    machine.answer = registry.Trouble("ImageNotFound", "manifest unknown")
    found = preflight(root, machine).look(B.image)
    assert found.manifest == Trouble(Reason.IMAGE_NOT_FOUND, "manifest unknown")


@pytest.mark.parametrize(
    ("labels", "reasons"),
    [
        ({"ostree.bootable": "true"}, []),
        ({"containers.bootc": "1"}, []),
        ({"version": "1"}, [Reason.IMAGE_NOT_BOOTABLE]),
        ({}, [Reason.IMAGE_NOT_BOOTABLE]),
    ],
)
def test_an_image_has_to_say_that_it_is_an_operating_system(
    root: Root, labels: dict[str, str], reasons: list[Reason]
) -> None:
    machine = Machine()
    machine.answer = registry.Inspected("amd64", 100.0, (), labels)
    found = findings(preflight(root, machine).look(B.image))
    assert [each.reason for each in found] == reasons
    assert all("ostree.bootable" in each.sentence for each in found)


def test_without_skopeo_the_registry_is_left_to_the_pull(root: Root) -> None:
    machine = Machine()
    machine.answer = None
    assert findings(preflight(root, machine).look(B.image)) == ()


def test_without_an_image_no_registry_is_asked(root: Root) -> None:
    machine = Machine()
    assert preflight(root, machine).look("").manifest is None
    assert machine.asked == []


def test_only_locks_that_block_a_shutdown_are_in_the_way(root: Root) -> None:
    machine = Machine()
    machine.held = [
        Inhibitor("shutdown:sleep", "backup", "copying", "block", 0, 7),
        Inhibitor("shutdown", "NetworkManager", "waits", "delay", 0, 8),
        Inhibitor("sleep", "player", "plays", "block", 0, 9),
    ]
    assert preflight(root, machine).look("").inhibitors == ("backup (process 7): copying",)


def test_a_logind_that_does_not_answer_holds_nothing_up(root: Root) -> None:
    assert findings(preflight(root, NoLogind()).look(B.image)) == ()


def test_an_active_driver_is_a_finding(root: Root) -> None:
    machine = Machine()
    machine.active = ("zincati.service",)
    (found,) = findings(preflight(root, machine).look(""))
    assert found.reason is Reason.OTHER_UPDATE_DRIVER


def deployment(commit: str, *, booted: bool = False, pinned: bool = False) -> Deployment:
    return Deployment(
        f"fedora-{commit}.0", commit, "", "", "", booted, False, locked=False, pinned=pinned
    )


@pytest.fixture
def older(root: Root) -> str:
    """The commit of the other deployment than the booted one, which has a kernel of 70 bytes."""
    booted, kernel, commit = "b" * 64, "c" * 64, "2" * 64
    for path, content in (
        (f"/boot/ostree/fedora-{booted}/vmlinuz", "x" * 100),
        (f"/boot/ostree/fedora-{kernel}/vmlinuz", "x" * 70),
        ("/proc/cmdline", f"ostree=/ostree/boot.1/fedora/{booted}/0"),
    ):
        root.path(path).parent.mkdir(parents=True)
        root.path(path).write_text(content)
    link = root.path(f"/ostree/boot.1/fedora/{kernel}/0")
    link.parent.mkdir(parents=True)
    link.symlink_to(f"../../../deploy/fedora/deploy/{commit}.0")
    return commit


def test_what_others_have_pinned_makes_no_room_on_boot_and_what_we_have_does(
    root: Root, older: str
) -> None:
    machine = Machine()
    flight = preflight(root, machine)
    booted = deployment("1" * 64, booted=True, pinned=True)
    machine.deployments = (booted, deployment(older))
    assert flight.look("").freeable_boot_bytes == 70
    machine.deployments = (booted, deployment(older, pinned=True))
    assert flight.look("").freeable_boot_bytes == 0
    machine.ledger = to_json(Record(retained=Retained(booted.id)))
    assert flight.look("").freeable_boot_bytes == 0
    machine.ledger = to_json(Record(retained=Retained(f"fedora-{older}.0")))
    assert flight.look("").freeable_boot_bytes == 70


def test_deployments_that_cannot_be_asked_for_hold_nothing_up(root: Root, older: str) -> None:
    assert preflight(root, NoDeployments()).look("").freeable_boot_bytes == 70


def test_a_ledger_that_cannot_be_written_is_a_finding(root: Root) -> None:
    directory = root.path("/var/lib/treenail")
    directory.rmdir()
    directory.write_text("in the way")
    (found,) = findings(preflight(root, Machine()).look(""))
    assert found.reason is Reason.LEDGER_NOT_WRITABLE


def test_a_key_that_the_policy_names_has_to_be_there(root: Root) -> None:
    signed = [{"type": "sigstoreSigned", "keyPath": "/etc/node.pub"}]
    root.path("/etc/containers/policy.json").write_text(json.dumps({"default": signed}))
    flight = preflight(root, Machine())
    found = flight.look(B.image)
    assert found.rule == Rule(Trust.SIGNED, "default", ("/etc/node.pub",), strict=True)
    assert [each.reason for each in findings(found)] == [Reason.SIGNATURE_KEY_MISSING]
    root.path("/etc/node.pub").write_text("a key")
    assert findings(flight.look(B.image)) == ()
    assert verifies(Files(root), B.image)


def test_a_policy_that_rejects_podmans_storage_is_a_finding_where_images_wait_there(
    root: Root,
) -> None:
    signed = [{"type": "sigstoreSigned", "keyPath": "/etc/node.pub"}]
    root.path("/etc/node.pub").write_text("a key")
    policy = {"default": [{"type": "reject"}], "transports": {"docker": {"": signed}}}
    path = root.path("/etc/containers/policy.json")
    path.write_text(json.dumps(policy))
    assert findings(preflight(root, Machine()).look(B.image)) == ()
    probes = Machine().probes()
    flight = Preflight(root, Files(root), probes, FakeClock(), stores=True)
    (found,) = findings(flight.look(B.image))
    assert found.reason is Reason.SIGNATURE_REJECTED
    assert found.sentence.endswith("by default, which holds for transports.containers-storage too")
    policy["transports"]["containers-storage"] = {"": [{"type": "insecureAcceptAnything"}]}
    path.write_text(json.dumps(policy))
    assert findings(flight.look(B.image)) == ()


def test_a_policy_that_is_broken_is_a_finding(root: Root) -> None:
    root.path("/etc/containers/policy.json").write_text("{")
    flight = preflight(root, Machine())
    assert [each.reason for each in findings(flight.look(B.image))] == [
        Reason.SIGNATURE_POLICY_UNUSABLE
    ]
    assert not verifies(Files(root), B.image)


def test_without_a_policy_images_are_taken_as_they_are(root: Root) -> None:
    assert not verifies(Files(root), B.image)


def test_right_before_the_drain_the_machine_alone_is_asked(root: Root) -> None:
    machine = Machine()
    flight = preflight(root, machine)
    flight.clear(B.image)
    machine.asked.clear()
    root.path("/etc/containers/policy.json").write_text("{")
    flight.still_clear(B.image)
    assert machine.asked == []
    machine.held = [Inhibitor("shutdown", "backup", "copying", "block", 0, 7)]
    with pytest.raises(PreflightError, match="ShutdownInhibited: a reboot is blocked by backup"):
        flight.still_clear(B.image)


def test_right_before_the_drain_there_has_to_be_room_for_what_is_not_deployed(root: Root) -> None:
    machine = Machine()
    flight = preflight(root, machine)
    machine.answer = registry.Inspected(
        "amd64", 100.0, (registry.Blob("sha256:1", 10**17),), LABELS
    )
    with pytest.raises(PreflightError):
        flight.clear(B.image)
    with pytest.raises(PreflightError, match="NoSpaceOnSysroot"):
        flight.still_clear(B.image)
    held = root.path("/ostree/repo/refs/heads/ostree/container/blob/sha256_3A_1")
    held.parent.mkdir(parents=True)
    held.touch()
    flight.still_clear(B.image)


def test_what_blocks_is_raised_and_what_only_warns_is_said_once(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    machine.active = ("zincati.service",)
    probes = machine.probes()
    strict = Preflight(root, Files(root), probes, FakeClock())
    with pytest.raises(PreflightError, match=r"OtherUpdateDriver: zincati\.service is active"):
        strict.clear(B.image)
    lenient = Preflight(
        root,
        Files(root),
        probes,
        FakeClock(),
        only_warn=frozenset({Reason.OTHER_UPDATE_DRIVER}),
    )
    lenient.clear(B.image)
    lenient.clear(B.image)
    assert len([each for each in caplog.messages if "OtherUpdateDriver" in each]) == 1
