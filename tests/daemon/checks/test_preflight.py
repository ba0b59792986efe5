"""Pre-flight checks of a machine in a directory."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.host_machine import make_machine
from tests.update.build import B
from treenail.daemon.checks.preflight import AGENT_UNIT, PreflightChecker
from treenail.daemon.checks.signature_policy import needs_signature
from treenail.errors import BusError, HostError, PreflightError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail.host.ostree.deployments import DeploymentStatus, OstreeDeployment
from treenail.host.systemd.logind import InhibitorLock
from treenail.host.systemd.systemd import SystemdUnit
from treenail.observations import ImageInspection, ImageLayer, InspectionProblem
from treenail.update.checks.preflight import find_preflight_problems
from treenail.update.checks.preflight_reason import PreflightReason
from treenail.update.checks.signature_policy import SignatureRule, SignatureTrust
from treenail.update.state.ledger_record import LedgerRecord, RetainedDeployment, to_json

LABELS = {"containers.bootc": "1"}


class Machine:
    """The programs and files that the checks read, on a machine without findings."""

    def __init__(self) -> None:
        self.answer: ImageInspection | InspectionProblem | None = ImageInspection(
            "amd64", 100.0, (ImageLayer("sha256:1", 10),), LABELS
        )
        self.inspected: list[tuple[str, str]] = []
        self.held: list[InhibitorLock] = []
        self.active: tuple[str, ...] = ()
        self.deployments: tuple[OstreeDeployment, ...] = ()
        self.ledger: dict[str, object] | None = None
        self.staged_tree: Root | None = None

    def inspect_image(
        self, image: str, *, auth_file: str = ""
    ) -> ImageInspection | InspectionProblem | None:
        self.inspected.append((image, auth_file))
        return self.answer

    def list_units(self, *names: str) -> tuple[SystemdUnit, ...]:
        return tuple(SystemdUnit(name, "loaded", "active", "", "/") for name in self.active)

    def list_inhibitors(self) -> tuple[InhibitorLock, ...]:
        return tuple(self.held)

    def is_synchronized(self) -> bool | None:
        return True

    def find_architecture(self) -> str:
        return "amd64"

    @contextmanager
    def open_staged_tree(self, staged_id: str, paths: Sequence[str]) -> Iterator[Root]:
        if self.staged_tree is None:
            raise HostError(f"{staged_id} is not staged")
        yield self.staged_tree

    def read_deployments(self) -> DeploymentStatus:
        return DeploymentStatus(self.deployments)

    def read_document(self) -> dict[str, object] | None:
        return self.ledger

    def checker(self, root: Root, **options: object) -> PreflightChecker:
        """The checker with this machine in the place of every adapter that needs the bus."""
        host = make_machine(root)
        host.systemd = host.logind = host.timedate = host.kernel = host.ledger = self
        return PreflightChecker(host, self, self, **options)


class NoLogind(Machine):
    def list_inhibitors(self) -> tuple[InhibitorLock, ...]:
        raise BusError("logind does not answer")


class NoDeployments(Machine):
    def read_deployments(self) -> DeploymentStatus:
        raise BusError("rpm-ostreed does not answer")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    for path in ("var/lib/treenail", "sysroot", "etc/containers"):
        (tmp_path / path).mkdir(parents=True)
    return Root(tmp_path)


def preflight(root: Root, machine: Machine) -> PreflightChecker:
    return machine.checker(root)


def test_healthy_machine_has_no_findings(root: Root) -> None:
    machine = Machine()
    found = preflight(root, machine).collect_conditions(B.image)
    assert find_preflight_problems(found) == ()
    assert found.inspection == machine.answer
    assert [each.path for each in found.spaces] == ["/sysroot", "/var"]
    assert machine.inspected == [(B.image, "")]
    assert list(root.resolve_path("/var/lib/treenail").iterdir()) == []


def test_registry_receives_the_merged_logins(root: Root) -> None:
    machine = Machine()
    logins = root.resolve_path("/var/lib/treenail/auth.json")
    logins.write_text("{}")
    preflight(root, machine).collect_conditions(B.image)
    assert machine.inspected == [(B.image, str(logins))]


def test_registry_problem_is_a_finding(root: Root) -> None:
    machine = Machine()
    machine.answer = InspectionProblem("ImageNotFound", "manifest unknown")
    found = preflight(root, machine).collect_conditions(B.image)
    assert found.inspection == machine.answer
    (problem,) = find_preflight_problems(found)
    assert problem.reason is PreflightReason.IMAGE_NOT_FOUND
    assert problem.message.endswith("manifest unknown")


def test_manifest_list_without_this_platform_names_its_platforms(root: Root) -> None:
    machine = Machine()
    text = "no image found in list"
    platforms = ("linux/arm64", "linux/s390x")
    machine.answer = InspectionProblem("WrongArchitecture", text, platforms)
    (problem,) = find_preflight_problems(preflight(root, machine).collect_conditions(B.image))
    assert problem.is_blocking
    assert str(problem) == (
        f"WrongArchitecture: {B.image} is a manifest list without linux/amd64, the platform of "
        "this machine; it has linux/arm64, linux/s390x"
    )
    assert problem.remedy == "request an image of this architecture, or a multi-arch image"
    machine.answer = InspectionProblem("WrongArchitecture", text)
    (problem,) = find_preflight_problems(preflight(root, machine).collect_conditions(B.image))
    assert problem.message == (
        f"{B.image} has no manifest for linux/amd64, the platform of this machine"
    )


def test_foreign_texts_of_a_registry_problem_are_escaped_and_bounded(root: Root) -> None:
    machine = Machine()
    platforms = tuple(f"linux/\x1b{n}" for n in range(500))
    machine.answer = InspectionProblem("WrongArchitecture", "no image\x1b[2J", platforms)
    (problem,) = find_preflight_problems(preflight(root, machine).collect_conditions(B.image))
    assert problem.message.endswith(r"linux/\u001b6, linux/\u001b7 and 492 more")
    assert problem.message.isprintable()
    machine.answer = InspectionProblem("RegistryFailed", "a \x1b[2J b")
    (problem,) = find_preflight_problems(preflight(root, machine).collect_conditions(B.image))
    assert problem.message.endswith(r"a \u001b[2J b")


@pytest.mark.parametrize(
    ("labels", "reasons"),
    [
        ({"ostree.bootable": "true"}, []),
        ({"containers.bootc": "1"}, []),
        ({"version": "1"}, [PreflightReason.IMAGE_NOT_BOOTABLE]),
        ({}, [PreflightReason.IMAGE_NOT_BOOTABLE]),
    ],
)
def test_image_without_bootable_label_is_a_finding(
    root: Root, labels: dict[str, str], reasons: list[PreflightReason]
) -> None:
    machine = Machine()
    machine.answer = ImageInspection("amd64", 100.0, (), labels)
    found = find_preflight_problems(preflight(root, machine).collect_conditions(B.image))
    assert [each.reason for each in found] == reasons
    assert all("ostree.bootable" in each.message for each in found)


def test_missing_skopeo_leaves_registry_unchecked(root: Root) -> None:
    machine = Machine()
    machine.answer = None
    assert find_preflight_problems(preflight(root, machine).collect_conditions(B.image)) == ()


def test_empty_image_reads_no_registry(root: Root) -> None:
    machine = Machine()
    assert preflight(root, machine).collect_conditions("").inspection is None
    assert machine.inspected == []


def test_only_blocking_shutdown_locks_are_findings(root: Root) -> None:
    machine = Machine()
    machine.held = [
        InhibitorLock("shutdown:sleep", "backup", "copying", "block", 0, 7),
        InhibitorLock("shutdown", "NetworkManager", "waits", "delay", 0, 8),
        InhibitorLock("sleep", "player", "plays", "block", 0, 9),
    ]
    assert preflight(root, machine).collect_conditions("").inhibitors == (
        "backup (process 7): copying",
    )


def test_unreachable_logind_does_not_block(root: Root) -> None:
    assert find_preflight_problems(preflight(root, NoLogind()).collect_conditions(B.image)) == ()


def test_active_update_agent_is_a_finding(root: Root) -> None:
    machine = Machine()
    machine.active = ("zincati.service",)
    (found,) = find_preflight_problems(preflight(root, machine).collect_conditions(""))
    assert found.reason is PreflightReason.OTHER_UPDATE_DRIVER


def deployment(commit: str, *, booted: bool = False, pinned: bool = False) -> OstreeDeployment:
    return OstreeDeployment(
        f"fedora-{commit}.0", commit, "", "", "", booted, False, is_locked=False, is_pinned=pinned
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
        root.resolve_path(path).parent.mkdir(parents=True)
        root.resolve_path(path).write_text(content)
    link = root.resolve_path(f"/ostree/boot.1/fedora/{kernel}/0")
    link.parent.mkdir(parents=True)
    link.symlink_to(f"../../../deploy/fedora/deploy/{commit}.0")
    return commit


def test_users_pin_frees_no_boot_space_and_own_pin_does(root: Root, older: str) -> None:
    machine = Machine()
    flight = preflight(root, machine)
    booted = deployment("1" * 64, booted=True, pinned=True)
    machine.deployments = (booted, deployment(older))
    assert flight.collect_conditions("").freeable_boot_bytes == 70
    machine.deployments = (booted, deployment(older, pinned=True))
    assert flight.collect_conditions("").freeable_boot_bytes == 0
    machine.ledger = to_json(LedgerRecord(retained=RetainedDeployment(booted.id)))
    assert flight.collect_conditions("").freeable_boot_bytes == 0
    machine.ledger = to_json(LedgerRecord(retained=RetainedDeployment(f"fedora-{older}.0")))
    assert flight.collect_conditions("").freeable_boot_bytes == 70


def test_unreadable_deployments_do_not_block(root: Root, older: str) -> None:
    assert preflight(root, NoDeployments()).collect_conditions("").freeable_boot_bytes == 70


def test_unwritable_ledger_is_a_finding(root: Root) -> None:
    directory = root.resolve_path("/var/lib/treenail")
    directory.rmdir()
    directory.write_text("blocking")
    (found,) = find_preflight_problems(preflight(root, Machine()).collect_conditions(""))
    assert found.reason is PreflightReason.LEDGER_NOT_WRITABLE


def test_policy_key_that_is_missing_is_a_finding(root: Root) -> None:
    signed = [{"type": "sigstoreSigned", "keyPath": "/etc/node.pub"}]
    root.resolve_path("/etc/containers/policy.json").write_text(json.dumps({"default": signed}))
    flight = preflight(root, Machine())
    found = flight.collect_conditions(B.image)
    assert found.signature_rule == SignatureRule(
        SignatureTrust.SIGNED, "default", ("/etc/node.pub",), is_strict=True
    )
    assert [each.reason for each in find_preflight_problems(found)] == [
        PreflightReason.SIGNATURE_KEY_MISSING
    ]
    root.resolve_path("/etc/node.pub").write_text("a key")
    assert find_preflight_problems(flight.collect_conditions(B.image)) == ()
    assert needs_signature(HostFiles(root), B.image)


def test_policy_rejecting_containers_storage_is_a_finding_for_bootc(
    root: Root,
) -> None:
    signed = [{"type": "sigstoreSigned", "keyPath": "/etc/node.pub"}]
    root.resolve_path("/etc/node.pub").write_text("a key")
    policy = {"default": [{"type": "reject"}], "transports": {"docker": {"": signed}}}
    path = root.resolve_path("/etc/containers/policy.json")
    path.write_text(json.dumps(policy))
    assert find_preflight_problems(preflight(root, Machine()).collect_conditions(B.image)) == ()
    flight = Machine().checker(root, has_image_store=True)
    (found,) = find_preflight_problems(flight.collect_conditions(B.image))
    assert found.reason is PreflightReason.SIGNATURE_REJECTED
    assert found.message.endswith("by default, which also applies to transports.containers-storage")
    policy["transports"]["containers-storage"] = {"": [{"type": "insecureAcceptAnything"}]}
    path.write_text(json.dumps(policy))
    assert find_preflight_problems(flight.collect_conditions(B.image)) == ()


def test_invalid_signature_policy_is_a_finding(root: Root) -> None:
    root.resolve_path("/etc/containers/policy.json").write_text("{")
    flight = preflight(root, Machine())
    assert [
        each.reason for each in find_preflight_problems(flight.collect_conditions(B.image))
    ] == [PreflightReason.SIGNATURE_POLICY_UNUSABLE]
    assert not needs_signature(HostFiles(root), B.image)


def test_missing_signature_policy_needs_no_signature(root: Root) -> None:
    assert not needs_signature(HostFiles(root), B.image)


def test_check_before_drain_reads_only_the_machine(root: Root) -> None:
    machine = Machine()
    flight = preflight(root, machine)
    flight.check_image(B.image)
    machine.inspected.clear()
    root.resolve_path("/etc/containers/policy.json").write_text("{")
    flight.check_machine(B.image)
    assert machine.inspected == []
    machine.held = [InhibitorLock("shutdown", "backup", "copying", "block", 0, 7)]
    with pytest.raises(PreflightError, match=r"ShutdownInhibited: backup .* blocks a reboot"):
        flight.check_machine(B.image)


def test_check_before_drain_needs_space_for_missing_layers(root: Root) -> None:
    machine = Machine()
    flight = preflight(root, machine)
    machine.answer = ImageInspection("amd64", 100.0, (ImageLayer("sha256:1", 10**17),), LABELS)
    with pytest.raises(PreflightError):
        flight.check_image(B.image)
    with pytest.raises(PreflightError, match="NoSpaceOnSysroot"):
        flight.check_machine(B.image)
    held = root.resolve_path("/ostree/repo/refs/heads/ostree/container/blob/sha256_3A_1")
    held.parent.mkdir(parents=True)
    held.touch()
    flight.check_machine(B.image)


def test_blocking_finding_is_raised_and_warning_is_logged_once(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    machine.active = ("zincati.service",)
    strict = machine.checker(root)
    with pytest.raises(PreflightError, match=r"OtherUpdateDriver: zincati\.service is active"):
        strict.check_image(B.image)
    lenient = machine.checker(root, only_warn=frozenset({PreflightReason.OTHER_UPDATE_DRIVER}))
    lenient.check_image(B.image)
    lenient.check_image(B.image)
    assert len([each for each in caplog.messages if "OtherUpdateDriver" in each]) == 1


def write_agent_unit(top: Path) -> None:
    unit = top / AGENT_UNIT[1:]
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\n")


def test_staged_image_without_agent_is_refused_unless_permitted(tmp_path: Path) -> None:
    booted, staged = tmp_path / "booted", tmp_path / "staged"
    write_agent_unit(booted)
    staged.mkdir()
    machine = Machine()
    machine.staged_tree = Root(staged)
    with pytest.raises(PreflightError, match="AgentMissing") as caught:
        machine.checker(Root(booted)).check_staged_image("os-1", B.image)
    assert "treenail retry" in caught.value.remedy
    permitted = frozenset({PreflightReason.AGENT_MISSING})
    machine.checker(Root(booted), only_warn=permitted).check_staged_image("os-1", B.image)
    write_agent_unit(staged)
    machine.checker(Root(booted)).check_staged_image("os-1", B.image)


def test_agent_outside_image_and_unreadable_tree_refuse_nothing(tmp_path: Path) -> None:
    booted = tmp_path / "booted"
    booted.mkdir()
    machine = Machine()
    machine.checker(Root(booted)).check_staged_image("os-1", B.image)
    write_agent_unit(booted)
    machine.checker(Root(booted)).check_staged_image("os-1", B.image)
