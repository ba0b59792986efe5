"""Drift on a real directory, with the kernel's own inotify."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.host_machine import make_machine
from tests.waiting import wait_until
from treenail.api.machineconfig import MachineConfig
from treenail.clocks import SystemClock
from treenail.config.drift_comparison import Drift, DriftAttribute
from treenail.config.image_content import ImageSplit
from treenail.config.wanted_state import WantedState, read_wanted_state
from treenail.daemon.configuration.drift import BootedState, DriftCheck, ExpectedState
from treenail.daemon.configuration.drift_repair import DriftMonitor
from treenail.daemon.configuration.node_configuration import (
    MachineInspector,
    NodeConfiguration,
    apply_steps,
)
from treenail.daemon.configuration.path_watcher import PathWatcher
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.errors import BusError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root
from treenail.observations import EntryKind
from treenail.units.unit_files import UnitFileReader, UnitStateSource
from treenail.update.drift.drift_policy import DriftAssessment, DriftPolicy, DriftReaction
from treenail.update.drift.drift_repair import plan_repair
from treenail.update.state.ledger_record import Target
from treenail.update.steps.plan import plan_steps
from treenail.update.steps.step_types import RelabelEntry

CURRENT = Target("rendered-worker-1")
NO_DRIFT = DriftAssessment()
LABEL = "security.selinux"
MOTD_DIGEST = "sha256:5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
UNIT = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
CONFIG = {
    "ignition": {"version": "3.4.0"},
    "storage": {
        "files": [
            {"path": "/etc/motd", "mode": 0o644, "contents": {"source": "data:,hello%0A"}},
            {"path": "/etc/deep/er/file", "mode": 0o600, "contents": {"source": "data:,1"}},
        ],
    },
    "systemd": {
        "units": [
            {
                "name": "a.service",
                "enabled": True,
                "contents": UNIT,
                "dropins": [{"name": "10-a.conf", "contents": "[Unit]\n"}],
            }
        ]
    },
}


class FixedConfigs:
    """The wanted state of every target; None for an unavailable config."""

    def __init__(self, wanted: WantedState | None) -> None:
        self._wanted = wanted

    def load_split(self, _current: Target) -> ImageSplit | None:
        return None if self._wanted is None else ImageSplit(self._wanted)

    def load_expected(self, _current: Target) -> ExpectedState | None:
        return None if self._wanted is None else ExpectedState.from_wanted(self._wanted)


class Site:
    """A root that has a config, and a watch over it."""

    def __init__(self, top: Path, policy: DriftPolicy, disk: Disk | None = None) -> None:
        self.top = top
        (top / "etc").mkdir()
        (top / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
        (top / "etc/group").write_text("root:x:0:\n")
        self.root = Root(top)
        self.machine = make_machine(self.root, disk, clock=SystemClock())
        self.survey, self.runner = MachineInspector(self.machine), StepRunner(self.machine)
        self.wish = read_wanted_state(
            MachineConfig.from_json(
                {
                    "metadata": {"name": CURRENT.config},
                    "spec": {"config": CONFIG, "kernelArguments": ["quiet"]},
                }
            )
        )
        apply_steps(self.plan(), self.runner)
        self.booted = BootedState(("quiet",))
        self.unit_states: UnitStateSource = UnitFileReader(HostFiles(self.root))
        self.rings = 0
        self.paths = PathWatcher(self.root, self.ring)
        self.paths.start()
        self.disk, self.policy = disk, policy
        self.start()
        assert self.look() == DriftAssessment()
        # The kernel watches from the second look on.
        self.settle()

    def start(self) -> None:
        """Start an agent without any state."""
        self.watch = DriftMonitor(
            self.machine,
            FixedConfigs(self.wish),
            DriftCheck(self.machine, self.unit_states),
            self.paths,
            NodeConfiguration(self.survey, self.runner),
            policy=self.policy,
            full_check_s=3600.0,
        )

    def ring(self) -> None:
        self.rings += 1

    def rung(self) -> None:
        wait_until(lambda: self.rings)
        self.rings = 0

    def settle(self, expected: DriftAssessment = NO_DRIFT) -> None:
        """Wait for the look that finds this: a change of several system calls rings repeatedly."""
        self.rung()
        wait_until(lambda: self.look() == expected)

    def plan(self) -> tuple:
        old = self.survey.read_ownership()
        found = plan_steps(
            old, self.wish, self.survey.inspect_machine(old, self.wish), config=CURRENT.config
        )
        return found.steps

    def look(self) -> DriftAssessment:
        return self.watch.find_drift(CURRENT, self.booted)

    def heal(self) -> None:
        self.watch.repair_drift(CURRENT, self.look().to_repair)


@pytest.fixture
def policy() -> DriftPolicy:
    return DriftPolicy()


@pytest.fixture
def site(tmp_path: Path, policy: DriftPolicy) -> Iterator[Site]:
    site = Site(tmp_path, policy)
    yield site
    site.paths.stop()


def drift(path: str, attribute: DriftAttribute, wanted_: str, found: str) -> Drift:
    return Drift(path, attribute, wanted_, found)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda top: (top / "etc/motd").write_text("bye\n"),
            ("/etc/motd", DriftAttribute.CONTENTS, MOTD_DIGEST),
        ),
        (
            lambda top: (top / "etc/motd").chmod(0o666),
            ("/etc/motd", DriftAttribute.MODE, "0644"),
        ),
        (
            lambda top: (top / "etc/motd").unlink(),
            ("/etc/motd", DriftAttribute.KIND, EntryKind.FILE),
        ),
        (
            lambda top: (top / "etc/deep").rename(top / "etc/gone"),
            ("/etc/deep/er/file", DriftAttribute.KIND, EntryKind.FILE),
        ),
        (
            lambda top: (top / "etc/systemd/system/a.service").write_text("[Unit]\n"),
            ("/etc/systemd/system/a.service", DriftAttribute.CONTENTS, None),
        ),
        (
            lambda top: (top / "etc/systemd/system/a.service.d/10-a.conf").unlink(),
            ("/etc/systemd/system/a.service.d/10-a.conf", DriftAttribute.KIND, EntryKind.FILE),
        ),
        (
            lambda top: (top / "etc/systemd/system/multi-user.target.wants/a.service").unlink(),
            ("a.service", DriftAttribute.ENABLEMENT, "enabled"),
        ),
    ],
    ids=["contents", "mode", "removed", "directory moved", "unit", "drop-in", "disabled"],
)
def test_touched_path_is_drift_until_restored(site, change, expected):
    before = tree(site.top)
    change(site.top)
    site.rung()

    found = site.look().blocking
    subject, attribute, wanted_ = expected
    assert [(each.subject, each.attribute) for each in found] == [(subject, attribute)]
    assert wanted_ in (None, found[0].expected)

    apply_steps(plan_repair(site.plan(), found), site.runner)
    site.settle()
    assert tree(site.top).items() >= before.items()


def test_touch_without_change_is_no_drift(site):
    (site.top / "etc/motd").touch()
    site.rung()

    assert site.look() == DriftAssessment()


def test_unknown_dropin_is_reported_until_removed(site):
    path = "/etc/systemd/system/a.service.d/99-else.conf"
    (site.top / path[1:]).write_text("[Unit]\n")
    site.settle(
        DriftAssessment(
            reported=(drift(path, DriftAttribute.KIND, EntryKind.NOTHING, EntryKind.FILE),)
        )
    )

    apply_steps(plan_repair(site.plan(), site.look().reported), site.runner)
    site.settle()


def test_file_outside_the_config_causes_no_wakeup(site):
    (site.top / "etc/other").write_text("1")
    (site.top / "etc/motd").chmod(0o666)
    site.rung()

    assert [each.subject for each in site.look().all] == ["/etc/motd"]


def test_missing_kernel_argument_is_found_by_a_full_check(site):
    site.booted = BootedState()
    # Another config, and then this one again.
    site.watch.find_drift(Target("rendered-worker-2"), site.booted)

    assert site.look().blocking == (
        drift("kernel command line", DriftAttribute.KERNEL_ARGUMENTS, "quiet", "nothing"),
    )


def test_restarted_agent_finds_earlier_drift(site):
    (site.top / "etc/motd").write_text("bye\n")

    site.start()

    (found,) = site.look().blocking
    assert (found.subject, found.attribute) == ("/etc/motd", DriftAttribute.CONTENTS)


@pytest.mark.parametrize(
    "policy", [DriftPolicy(paths=(("/etc/motd", DriftReaction.REPAIR),), repairs_per_hour=2)]
)
def test_contested_drift_is_reported_and_no_longer_repaired(site):
    motd = site.top / "etc/motd"
    for _ in range(2):
        motd.write_text("bye\n")
        site.rung()
        wait_until(lambda: site.look().to_repair)
        site.heal()
        assert motd.read_text() == "hello\n"
        site.settle()
    motd.write_text("bye\n")
    site.rung()

    found = wait_until(lambda: site.look().blocking)
    assert [each.subject for each in found] == ["/etc/motd"]
    assert site.look().contested == {"/etc/motd"}


class FailingUnitStates:
    """Unit states by the files; each call fails while ``is_failing``."""

    def __init__(self, root: Root) -> None:
        self._reader = UnitFileReader(HostFiles(root))
        self.is_failing = False

    def read_states(self, *units: str) -> dict[str, str]:
        if self.is_failing:
            raise BusError("cannot call GetUnitFileState: no answer within 120 s")
        return dict(self._reader.read_states(*units))


@pytest.fixture
def failing_states(site: Site) -> FailingUnitStates:
    states = FailingUnitStates(site.root)
    site.unit_states = states
    site.start()
    return states


def test_failed_first_check_is_repeated(site, failing_states):
    (site.top / "etc/motd").write_text("other")
    failing_states.is_failing = True
    with pytest.raises(BusError):
        site.look()
    failing_states.is_failing = False
    assert [each.subject for each in site.look().blocking] == ["/etc/motd"]


def test_failed_check_of_touched_paths_is_repeated(site, failing_states):
    assert site.look() == NO_DRIFT
    site.settle()
    failing_states.is_failing = True
    (site.top / "etc/systemd/system/a.service").write_text("[Service]\n")
    wait_until(lambda: does_fail(site))
    failing_states.is_failing = False
    found = {each.subject for each in site.look().all}
    assert "/etc/systemd/system/a.service" in found


def does_fail(site: Site) -> bool:
    try:
        site.look()
    except BusError:
        return True
    return False


def test_unavailable_config_has_no_drift(tmp_path):
    class Silent:
        def watch_paths(self, paths, *, directories) -> None:
            assert tuple(paths) == tuple(directories) == ()

    machine = make_machine(Root(tmp_path))
    check = DriftCheck(machine, machine.unit_files)
    watch = DriftMonitor(
        machine,
        FixedConfigs(None),
        check,
        Silent(),
        NodeConfiguration(MachineInspector(machine), StepRunner(machine)),
        policy=DriftPolicy(),
        full_check_s=60.0,
    )

    assert watch.find_drift(CURRENT, BootedState()) == DriftAssessment(is_checked=False)


def test_expected_state_holds_no_contents():
    secret = "canary-5d1f"
    config = json.loads(json.dumps(CONFIG).replace("hello", secret).replace("/bin/true", secret))
    expected = ExpectedState.from_wanted(
        read_wanted_state(MachineConfig.from_json({"spec": {"config": config}}))
    )

    assert secret not in repr(expected) + str([each.contents for each in expected.entries.values()])
    assert all(unit.contents in ("", "x") for unit in expected.units.units.values())


class Labels:
    """A policy that has one label for all of /etc."""

    label = "system_u:object_r:etc_t:s0"

    def decide_label(self, place: str, status: os.stat_result, present: bytes) -> bytes:
        return f"{self.label}\0".encode() if "/etc/" in place else present

    def release_memory(self) -> None:
        pass


@pytest.fixture
def labelled(tmp_path: Path, policy: DriftPolicy) -> Iterator[Site]:
    try:
        os.setxattr(tmp_path, LABEL, b"etc_t")
    except OSError as error:
        pytest.skip(f"no labels here: {error}")
    site = Site(tmp_path, policy, Disk(Labels()))
    yield site
    site.paths.stop()


@pytest.mark.parametrize(
    ("policy", "reaction"),
    [
        (DriftPolicy(), "reported"),
        (DriftPolicy(default=DriftReaction.REPAIR), "to_repair"),
        (DriftPolicy(paths=(("/etc/*", DriftReaction.BLOCK),)), "blocking"),
    ],
)
@pytest.mark.parametrize(
    "path",
    ["/etc/motd", "/etc/systemd/system/a.service", "/etc/systemd/system/a.service.d/10-a.conf"],
)
def test_wrong_selinux_label_is_drift_until_fixed(labelled, path, reaction):
    place = labelled.top / path[1:]
    before = tree(labelled.top), place.stat().st_mode
    os.setxattr(place, LABEL, b"system_u:object_r:wrong_t:s0\0")
    labelled.rung()

    found = labelled.look()
    expected = drift(path, DriftAttribute.LABEL, Labels.label, "system_u:object_r:wrong_t:s0")
    assert (found.all, getattr(found, reaction)) == ((expected,), (expected,))

    steps = plan_repair(labelled.plan(), found.all)
    assert [type(step) for step in steps] == [RelabelEntry]
    apply_steps(steps, labelled.runner)
    labelled.settle()
    assert os.getxattr(place, LABEL) == f"{Labels.label}\0".encode()
    assert (tree(labelled.top), place.stat().st_mode) == before


def tree(top: Path) -> dict[str, bytes | str]:
    """The tree below, without the agent's own state."""
    return {
        str(path.relative_to(top)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in top.rglob("*")
        if (path.is_symlink() or path.is_file()) and "var/lib/treenail" not in str(path)
    }


def test_missing_links_and_settings_without_effect_are_drift(tmp_path):
    vendor, wants = (
        tmp_path / "usr/lib/systemd/system",
        tmp_path / "etc/systemd/system/x.target.wants",
    )
    for directory in (vendor, wants):
        directory.mkdir(parents=True)
    (vendor / "a.service").write_text("[Install]\nWantedBy=x.target y.target\n")
    (vendor / "static.service").write_text("[Service]\n")
    (vendor / "off.service").write_text("[Install]\nAlso=also.service\n")
    (vendor / "also.service").write_text("[Install]\nWantedBy=x.target\n")
    for name in ("a.service", "also.service"):
        (wants / name).symlink_to(f"/usr/lib/systemd/system/{name}")
    names = {"a.service": True, "static.service": True, "off.service": False, "none.service": True}
    units = [{"name": name, "enabled": enabled} for name, enabled in names.items()]
    users = [{"name": "core", "sshAuthorizedKeys": ["ssh-ed25519 AAAA"]}]
    config = {
        "ignition": {"version": "3.4.0"},
        "systemd": {"units": units},
        "passwd": {"users": users},
    }
    document = {"metadata": {"name": "a"}, "spec": {"config": config}}
    expected = ExpectedState.from_wanted(read_wanted_state(MachineConfig.from_json(document)))
    machine = make_machine(Root(tmp_path))
    found = DriftCheck(machine, machine.unit_files).check_everything(expected, BootedState())
    reactions = {
        str(drift): DriftPolicy().choose_reaction(drift).value
        for drifts in found.values()
        for drift in drifts
    }
    etc = "/etc/systemd/system"
    assert reactions == {
        "a.service: expected enablement enabled, found enabled without "
        f"{etc}/y.target.wants/a.service": "block",
        "off.service: expected enablement disabled, found indirect with "
        f"{etc}/x.target.wants/also.service": "block",
        "static.service: expected effect of enabled: true, found no unit in its [Install] "
        "sections": "report",
        "none.service: expected effect of enabled: true, found no such unit on this machine": (
            "report"
        ),
        "user core: expected effect of its keys and password, found no such user on this "
        "machine": "report",
    }


def test_links_of_every_dependency_are_watched(tmp_path: Path) -> None:
    machine = make_machine(Root(tmp_path))
    directories = [
        f"/etc/systemd/system/x.target.{kind}" for kind in ("requires", "upholds", "wants")
    ]
    for directory in (*directories, "/etc/systemd/system/a.service.d"):
        (tmp_path / directory[1:]).mkdir(parents=True)
    check = DriftCheck(machine, machine.unit_files)
    assert sorted(check.find_link_directories()) == directories
