"""Plans applied to a directory, with a systemd that may refuse."""

import itertools
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.host_machine import make_machine
from treenail.api.disruptionpolicy import (
    DaemonReloadPolicyAction,
    ReloadPolicyAction,
    RestartPolicyAction,
)
from treenail.api.ignition.model import Contents
from treenail.config.wanted_state import WantedFile, WantedState, WantedUnit, WantedUser
from treenail.daemon.configuration.node_configuration import (
    MachineInspector,
    NodeConfiguration,
    RecoveryOutcome,
    apply_steps,
    recover_interrupted,
    restore_pending,
)
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.daemon.configuration.trust_store import ANCHORS, BUNDLE, PROGRAM, UPDATE_UNIT
from treenail.errors import LedgerError, RollbackError, StepError, UnitError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root
from treenail.host.rollback.undo_log import LOG_PATH
from treenail.units.unit_files import UnitFileReader, UnitLinks
from treenail.update.impact.impact import plan_service_steps
from treenail.update.steps.plan import plan_steps
from treenail.update.steps.step_types import RestartUnit

UNITS = "etc/systemd/system"
WANTED_BY = "[Install]\nWantedBy=multi-user.target\n"


class FakeSystemd:
    """Makes the links that systemd makes, records calls, and refuses the given ones."""

    def __init__(self, root: Root, *refused: str) -> None:
        self._files = HostFiles(root)
        self._units = UnitFileReader(self._files)
        self.refused = set(refused)
        self.calls: list[str] = []

    def read_states(self, *units: str) -> dict[str, str]:
        return self._units.read_states(*units)

    def enable_units(self, *units: str) -> None:
        self._link(self._units.plan_enable(*units))
        self._call("enable", *units)

    def disable_units(self, *units: str) -> None:
        self._link(self._units.plan_disable(*units))
        self._call("disable", *units)

    def preset_units(self, *units: str) -> None:
        self._link(self._units.plan_preset(*units))
        self._call("preset", *units)

    def reload_daemon(self) -> None:
        self._call("daemon-reload")

    def reload_unit(self, unit: str) -> None:
        self._call("reload", unit)

    def restart_unit(self, unit: str) -> None:
        self._call("restart", unit)

    def start_default_target(self) -> None:
        self._call("start default.target")

    def _link(self, links: UnitLinks) -> None:
        for path in links.removed:
            self._files.remove_file(path)
        for path, text in links.made.items():
            self._files.make_symlink(path, text)

    def _call(self, *words: str) -> None:
        call = " ".join(words)
        self.calls.append(call)
        if call in self.refused:
            raise UnitError(f"systemd refuses to {call}", remedy="see: journalctl")


class Machine:
    def __init__(self, top: Path, *refused: str) -> None:
        self.top = top
        self.root = Root(top)
        self.systemd = FakeSystemd(self.root, *refused)
        self.host = make_machine(self.root)
        self.survey = MachineInspector(self.host, self.systemd)
        self.runner = StepRunner(self.host, self.systemd)

    def bring(
        self,
        new: WantedState,
        *actions: DaemonReloadPolicyAction | ReloadPolicyAction | RestartPolicyAction,
    ) -> list[str]:
        old = self.survey.read_ownership()
        steps = plan_steps(old, new, self.survey.inspect_machine(old, new)).steps
        steps += plan_service_steps(steps, actions)
        apply_steps(steps, self.runner)
        return [str(step) for step in steps]

    def hold(self, new: WantedState) -> None:
        old = self.survey.read_ownership()
        apply_steps(
            plan_steps(old, new, self.survey.inspect_machine(old, new)).steps,
            self.runner,
            owner="update",
        )

    def tree(self) -> dict[str, tuple[str, str]]:
        found = {}
        for path in sorted(self.top.rglob("*")):
            name = str(path.relative_to(self.top))
            text = str(path.readlink()) if path.is_symlink() else ""
            if path.is_file() and not path.is_symlink():
                text = path.read_text()
            found[name] = stat.filemode(path.lstat().st_mode), text
        return {name: seen for name, seen in found.items() if not name.startswith("var")}


@pytest.fixture
def top(tmp_path: Path) -> Path:
    (tmp_path / UNITS).mkdir(parents=True)
    (tmp_path / "home/core").mkdir(parents=True)
    ids = f"{tmp_path.stat().st_uid}:{tmp_path.stat().st_gid}"
    (tmp_path / "etc/passwd").write_text(f"core:x:{ids}::/home/core:/bin/sh\n")
    (tmp_path / "etc/group").write_text(f"core:x:{ids.split(':')[1]}:\n")
    (tmp_path / "etc/shadow").write_text("core:$6$before:1::::::\n")
    (tmp_path / "etc/motd").write_text("welcome")
    return tmp_path


def file(path: str, text: str) -> WantedFile:
    return WantedFile(path, Contents(f"data:,{text}"), user="core", group="core")


def wanted(*files: WantedFile, unit: WantedUnit | None = None, password: str = "") -> WantedState:
    return WantedState(
        files={each.path: each for each in files},
        units={unit.name: unit} if unit else {},
        users={"core": WantedUser("core", ("ssh-rsa A",), password)} if password else {},
    )


UNIT = WantedUnit("a.service", WANTED_BY, enabled=True)


def test_services_are_notified_in_order_and_once(top):
    machine = Machine(top)
    machine.bring(
        wanted(file("/etc/motd", "new"), unit=UNIT),
        ReloadPolicyAction("x.service"),
        RestartPolicyAction("y.service"),
    )
    assert machine.systemd.calls == [
        "enable a.service",
        "daemon-reload",
        "reload x.service",
        "restart y.service",
    ]
    assert machine.tree()[f"{UNITS}/multi-user.target.wants/a.service"][1] == f"/{UNITS}/a.service"
    assert machine.bring(wanted(file("/etc/motd", "new"), unit=UNIT)) == []


class ExtractPrograms:
    """Copies the anchors into the bundle, as update-ca-trust does."""

    def __init__(self, top: Path) -> None:
        self._top = top

    def run_command(self, argv: Sequence[str], *, timeout_s: float) -> bytes:
        assert argv == (str(self._top / PROGRAM.lstrip("/")), "extract")
        bundle = self._top / BUNDLE.lstrip("/")
        bundle.parent.mkdir(parents=True, exist_ok=True)
        found = sorted((self._top / ANCHORS.lstrip("/")).iterdir())
        bundle.write_bytes(b"".join(each.read_bytes() for each in found))
        return b""


@pytest.mark.parametrize("refused", [(), (f"restart {UPDATE_UNIT}",)])
def test_trust_store_follows_anchors_before_crio_restarts(top, refused):
    machine = Machine(top, *refused)
    machine.host.__dict__["unsandboxed"] = ExtractPrograms(top)
    (top / PROGRAM.lstrip("/")).parent.mkdir(parents=True)
    (top / PROGRAM.lstrip("/")).touch()
    body = "-----BEGIN%20CERTIFICATE-----%0AAAAA%0A-----END%20CERTIFICATE-----"
    anchor = file(f"{ANCHORS}/openshift-config-user-ca-bundle.crt", body)
    machine.bring(
        wanted(anchor), RestartPolicyAction(UPDATE_UNIT), RestartPolicyAction("crio.service")
    )
    assert machine.systemd.calls == [f"restart {UPDATE_UNIT}", "restart crio.service"]
    assert (top / BUNDLE.lstrip("/")).read_text().startswith("-----BEGIN")


def test_user_created_after_start_is_found(top):
    machine = Machine(top)
    passwd = (top / "etc/passwd").read_text()
    (top / "etc/passwd").write_text(passwd + passwd.replace("core:", "app:"))
    machine.bring(wanted(WantedFile("/etc/app", Contents("data:,x"), user="app")))
    assert (top / "etc/app").read_text() == "x"


def test_template_without_instance_is_refused_before_the_steps(top):
    machine = Machine(top)
    new = wanted(unit=WantedUnit("a@.service", WANTED_BY, enabled=True))
    old = machine.survey.read_ownership()
    planned = plan_steps(old, new, machine.survey.inspect_machine(old, new))
    with pytest.raises(UnitError, match="is a template without DefaultInstance=") as refusal:
        NodeConfiguration(machine.survey, machine.runner).check_steps(planned)
    assert refusal.value.remedy == "enable an instance, such as a@NAME.service"


def test_backup_of_a_unit_file_is_enabled_when_it_is_restored(top):
    machine = Machine(top)
    place = top / UNITS / "a.service"
    place.write_text("[Install]\nWantedBy=own.target\n")
    machine.bring(wanted(unit=UNIT))
    machine.bring(wanted(unit=WantedUnit("a.service", enabled=True)))
    assert [path for path in machine.tree() if path.endswith("wants/a.service")] == [
        f"{UNITS}/own.target.wants/a.service"
    ]


def test_changed_unit_is_disabled_first_and_unchanged_one_is_not(top):
    Machine(top).bring(wanted(unit=UNIT))
    machine = Machine(top)
    other = WantedUnit("a.service", WANTED_BY.replace("multi-user", "other"), enabled=True)
    machine.bring(wanted(unit=other))
    assert machine.systemd.calls == ["disable a.service", "enable a.service", "daemon-reload"]
    assert f"{UNITS}/multi-user.target.wants/a.service" not in machine.tree()


FLAGS = list(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize("are_named", FLAGS)
def test_units_that_name_each_other_are_as_the_config_says(tmp_path, are_named):
    for number, (before, after) in enumerate(itertools.product(FLAGS, FLAGS)):
        if all(are_named) and after[0] is not after[1]:
            # Each change of one changes the other one too.
            continue
        top = tmp_path / str(number)
        (top / UNITS).mkdir(parents=True)
        machine = Machine(top)
        machine.bring(build_units(before, (False, False)))
        new = build_units(after, are_named)
        machine.bring(new)
        states = list(machine.systemd.read_states(*new.units).values())
        assert states == ["enabled" if flag else "disabled" for flag in after], (before, after)
        assert machine.bring(new) == []


@pytest.mark.parametrize("unit", [
    WantedUnit("a.service", WANTED_BY, enabled=False),
    WantedUnit("a.service", enabled=False, mask=False),
])  # fmt: skip
def test_unmasked_unit_is_disabled_although_it_was_enabled_before_the_mask(top, unit):
    vendor = top / "usr/lib/systemd/system/a.service"
    vendor.parent.mkdir(parents=True)
    vendor.write_text(WANTED_BY)
    wants = top / UNITS / "multi-user.target.wants"
    wants.mkdir()
    (wants / "a.service").symlink_to("/usr/lib/systemd/system/a.service")
    (top / UNITS / "a.service").symlink_to("/dev/null")
    machine = Machine(top)
    assert machine.bring(wanted(unit=unit))
    assert machine.systemd.read_states("a.service") == {"a.service": "disabled"}
    assert machine.bring(wanted(unit=unit)) == []


def build_units(are_enabled: Sequence[bool], are_named: Sequence[bool]) -> WantedState:
    """Build two units; each names the other one in Also= where its flag of ``are_named`` is set."""
    names = ("a.service", "b.socket")
    found = {}
    for number, name in enumerate(names):
        also = f"Also={names[1 - number]}\n" if are_named[number] else ""
        found[name] = WantedUnit(name, WANTED_BY + also, enabled=are_enabled[number])
    return WantedState(units=found)


@pytest.mark.parametrize(
    "refused", ["enable a.service", "daemon-reload", "reload x.service", "restart y.service"]
)
def test_failed_step_is_undone_and_services_are_notified(top, refused):
    machine = Machine(top, refused)
    before = machine.tree()
    new = wanted(file("/etc/motd", "new"), file("/etc/d/x", "x"), unit=UNIT, password="$6$after")
    with pytest.raises((StepError, RollbackError)) as caught:
        machine.bring(new, ReloadPolicyAction("x.service"), RestartPolicyAction("y.service"))
    assert f"cannot {refused}: systemd refuses to {refused}" in str(caught.value)
    assert machine.tree() == {**before, "etc/.pwd.lock": ("-rw-------", "")} or (
        refused == "enable a.service" and machine.tree() == before
    )
    begun = machine.systemd.calls[: machine.systemd.calls.index(refused) + 1]
    serve = [call for call in begun if not call.startswith("enable")]
    assert machine.systemd.calls == begun + serve


def test_restored_units_are_reloaded_after_a_boot(top):
    machine = Machine(top)
    before = machine.tree()
    machine.hold(wanted(unit=UNIT))
    machine.systemd.calls.clear()
    machine.systemd.refused = {"daemon-reload"}
    with pytest.raises(UnitError):
        restore_pending(machine.runner, is_booted=True)
    assert machine.tree() == before
    machine.systemd.refused = set()
    restore_pending(machine.runner, is_booted=True)
    restore_pending(machine.runner, is_booted=True)
    assert machine.tree() == before
    assert machine.systemd.calls == ["daemon-reload", "daemon-reload", "start default.target"]


@pytest.mark.parametrize("is_booted", [True, False], ids=["without units", "before a boot"])
def test_restored_config_without_units_or_before_a_boot_starts_nothing(top, is_booted):
    machine = Machine(top)
    before = machine.tree()
    machine.hold(wanted(file("/etc/motd", "new")) if is_booted else wanted(unit=UNIT))
    machine.systemd.calls.clear()
    restore_pending(machine.runner, **({"is_booted": True} if is_booted else {}))
    assert machine.tree() == before
    assert machine.systemd.calls == []


def test_failed_undo_is_listed_and_retried_at_next_start(top):
    machine = Machine(top, "restart y.service")
    before = machine.tree()
    with pytest.raises(RollbackError) as caught:
        machine.bring(wanted(file("/etc/motd", "new")), RestartPolicyAction("y.service"))
    assert str(caught.value).endswith(
        "undoing the earlier steps failed, too: cannot restart y.service: systemd refuses to "
        "restart y.service"
    )
    assert machine.tree() == before
    with pytest.raises(LedgerError, match="was interrupted and is not undone yet"):
        Machine(top).bring(wanted(file("/etc/motd", "new")))
    healthy = Machine(top)
    assert recover_interrupted(healthy.runner) is RecoveryOutcome.UNDONE
    assert healthy.systemd.calls == ["restart y.service"]
    assert recover_interrupted(healthy.runner) is None


class FullDisk(Disk):
    """Has no room for the last of the new files."""

    def write(self, descriptor: int, content: bytes) -> int:
        if content == b"too much":
            raise OSError(28, "No space left on device")
        return super().write(descriptor, content)


def test_full_disk_is_reported_with_step_and_remedy(top):
    machine = Machine(top)
    before = machine.tree()
    runner = StepRunner(make_machine(machine.root, FullDisk()))
    new = wanted(*(file(f"/etc/{n}", "x") for n in range(9)), file("/etc/last", "too much"))
    new = WantedState(
        {**new.files, "/etc/last": WantedFile("/etc/last", Contents("data:,too%20much"))}
    )
    old = machine.survey.read_ownership()
    with pytest.raises(StepError) as caught:
        apply_steps(plan_steps(old, new, machine.survey.inspect_machine(old, new)).steps, runner)
    assert str(caught.value) == (
        f"cannot write /etc/last (0644): missing: cannot write {top}/etc/last: No space "
        "left on device; all steps were undone"
    )
    assert caught.value.remedy == "free some space on that file system"
    assert machine.tree() == before


class SharedDisk(Disk):
    """As NFS: names cannot be exchanged."""

    def exchange(self, path: str, other: str) -> None:
        raise OSError(22, "Invalid argument")


def test_file_system_without_exchange_is_named_and_unchanged(top):
    machine = Machine(top)
    before = machine.tree()
    runner = StepRunner(make_machine(machine.root, SharedDisk()))
    new = wanted(file("/etc/motd", "new"))
    old = machine.survey.read_ownership()
    with pytest.raises(StepError, match="its file system cannot exchange two names") as caught:
        apply_steps(plan_steps(old, new, machine.survey.inspect_machine(old, new)).steps, runner)
    assert caught.value.remedy == "move it to ext4, xfs, btrfs or tmpfs"
    assert machine.tree() == before


def test_damaged_undo_log_raises_ledger_error(top):
    machine = Machine(top)
    machine.runner.undo.record_note({"a": 1})
    log = machine.root.resolve_path(LOG_PATH)
    log.write_bytes(b"x" + log.read_bytes()[1:] + b"more\n")
    with pytest.raises(LedgerError, match="the checksum of line 1 is wrong"):
        recover_interrupted(machine.runner)


def test_undo_log_and_record_have_mode_0600(top):
    machine = Machine(top)
    machine.bring(wanted(file("/etc/motd", "new")))
    state = top / "var/lib/treenail"
    modes = {str(p.relative_to(state)): stat.S_IMODE(p.stat().st_mode) for p in state.rglob("*")}
    assert modes == {
        "managed.json": 0o600,
        "original": 0o700,
        "original/etc": 0o755,
        "original/etc/motd.original": 0o600,
        "undo": 0o700,
    }


def test_keys_and_password_are_set_and_removed_again(top):
    machine = Machine(top)
    machine.bring(wanted(password="$6$after"))
    keys = top / "home/core/.ssh/authorized_keys.d/ignition"
    assert (keys.read_text(), stat.S_IMODE(keys.stat().st_mode)) == ("ssh-rsa A\n", 0o600)
    assert "core:$6$after:" in (top / "etc/shadow").read_text()
    assert machine.bring(wanted()) == [
        "write 0 SSH keys of core: the config no longer has them",
        "record what belongs to the config",
        "set the password of core: the config has none",
    ]
    assert keys.read_text() == ""
    assert "core:*:" in (top / "etc/shadow").read_text()


def test_service_note_decodes_to_its_step(top):
    machine = Machine(top)
    machine.runner.notify_service(RestartUnit("y.service"))
    again = Machine(top)
    assert recover_interrupted(again.runner) is RecoveryOutcome.UNDONE
    assert again.systemd.calls == ["restart y.service"]
