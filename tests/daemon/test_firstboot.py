"""The first boot until the machine may join, with power cuts at any effect."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.nodes import BACK_ENDS, FakeImages, directories
from tests.fakes.bootc_host import bootc_of
from tests.fakes.clock import FakeClock
from tests.fakes.host_machine import make_machine
from tests.fakes.world import (
    PLATFORM,
    FakeMachine,
    FakePreflight,
    FakePullSecrets,
    Killed,
    PowerCut,
    WentDown,
    World,
)
from tests.update.build import A, B
from treenail.daemon.configuration.drift import DriftCheck
from treenail.daemon.configuration.node_configuration import MachineInspector, NodeConfiguration
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.daemon.firstboot import (
    DONE_FILE,
    ENCAPSULATED_BACKUP,
    ENCAPSULATED_CONFIG,
    STATE_FILE,
    FirstBootInterfaces,
    FirstBootRunner,
    record_start,
)
from treenail.daemon.firstboot_verifier import FirstBootVerifier
from treenail.daemon.local.status_file import StatusFile
from treenail.errors import ConfigError, HostError, UnreconcilableError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.kernel import FIRST_COMMAND_LINE
from treenail.sd_notify import SystemdNotifier
from treenail.units.unit_files import UnitFileReader
from treenail.update.drift.drift_policy import DriftPolicy

SECRET = "/var/lib/kubelet/config.json"


class Waits:
    """A stop event that is set after a number of waits, each of which ends at once."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self.timeouts: list[float] = []

    def wait(self, timeout: float) -> bool:
        self._turns -= 1
        self.timeouts.append(timeout)
        return self.is_set()

    def is_set(self) -> bool:
        return self._turns <= 0


class Host:
    """A machine installed from A, with a directory as its disk."""

    def __init__(self, root: Path, *, bootc: str = "") -> None:
        self.bootc = bootc
        self.world = World(booted=A.digest)
        # No node is in service yet.
        self.world.unschedulable = True
        self.world.annotations["machineconfiguration.openshift.io/lastAppliedDrain"] = "drain-x"
        self.root = root
        self.disk = Disk()
        self.image = ""
        self.has_files_in_image = True
        self.again = False
        self.started_after: list[bool] = []
        """Of each time that all was started: whether the machine had been marked as done."""
        self.statuses: list[bytes] = []
        (root / "etc").mkdir(exist_ok=True)

    def encapsulate(self, **spec: object) -> None:
        document = {"kind": "MachineConfig", "metadata": {"name": "first"}, "spec": spec}
        (self.root / ENCAPSULATED_CONFIG[1:]).write_text(json.dumps(document))

    def first_boot(self, *, turns: int = 3) -> FirstBootRunner:
        fake = FakeMachine(self.world)
        clock = FakeClock()
        os = bootc_of(self.world, clock, self.bootc) if self.bootc else fake
        files = HostFiles(Root(self.root), self.disk)
        machine = FirstBootInterfaces(
            os,
            fake,
            fake,
            FakePullSecrets(),
            FakePreflight(),
            self,
            self.verifier(clock),
            clock,
            self.status_file(clock),
        )
        return FirstBootRunner(
            files,
            machine,
            image=self.image,
            pull_secret=SECRET,
            stop=Waits(turns),
            is_restart=self.again,
        )

    def verifier(self, clock: FakeClock) -> FirstBootVerifier:
        host = make_machine(Root(self.root), self.disk, clock=clock)
        return FirstBootVerifier(
            host.files,
            FakeImages(self.world),
            NodeConfiguration(MachineInspector(host), StepRunner(host)),
            DriftCheck(host, UnitFileReader(host.files)),
            policy=DriftPolicy(),
            has_files_in_image=self.has_files_in_image,
        )

    def status_file(self, clock: FakeClock) -> StatusFile:
        return StatusFile(
            write=self.statuses.append, notifier=SystemdNotifier({}), clock=clock, node=""
        )

    def statuses_shown(self) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.statuses]

    def start_default_target(self) -> None:
        self.started_after.append((self.root / DONE_FILE[1:]).exists())

    def boot(self) -> bool:
        """One boot: whether the machine joined in it."""
        try:
            return self.first_boot().run()
        except WentDown:
            self.world.reboot()
        except PowerCut:
            self.world.power_cut()
        except Killed:
            if self.world.is_going_down:
                self.world.reboot()
        return False

    def join(self, *, boots: int = 8) -> None:
        assert any(self.boot() for _ in range(boots))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def assert_joined(host: Host) -> None:
    assert (host.root / DONE_FILE[1:]).exists()
    assert not (host.root / ENCAPSULATED_CONFIG[1:]).exists()
    assert not host.world.staged


def test_first_boot_without_target_joins_at_once(host: Host) -> None:
    assert host.boot()
    assert host.world.boots == 1
    assert_joined(host)
    assert host.started_after == []


def test_units_failed_with_earlier_process_start_before_done_file(host: Host) -> None:
    host.again = True
    assert host.boot()
    assert_joined(host)
    assert host.started_after == [False]


def test_record_start_finds_earlier_process_of_this_boot(host: Host) -> None:
    files = HostFiles(Root(host.root))
    assert [record_start(files) for _ in range(3)] == [False, True, True]


def test_first_boot_moves_to_config_image_with_one_reboot(host: Host) -> None:
    host.encapsulate(osImageURL=B.image, kernelArguments=["quiet", "nosmt"])
    host.join()
    assert (host.world.booted, host.world.boots) == (B.digest, 2)
    assert host.world.system.arguments[-2:] == ("quiet", "nosmt")
    assert_joined(host)
    assert json.loads((host.root / ENCAPSULATED_BACKUP[1:]).read_text())["metadata"] == {
        "name": "first"
    }


def test_first_boot_shows_each_activity_and_its_end(host: Host) -> None:
    host.encapsulate(osImageURL=B.image)
    host.join()
    shown = host.statuses_shown()
    activities = list(dict.fromkeys(each["activity"] for each in shown))
    assert activities == [
        f"staging {B.image}",
        f"rebooting into {B.image}",
        "finished the first boot, the machine may join: the target is booted",
    ]
    assert any((each["progress"] or {}).get("text") for each in shown)
    assert [each["firstBoot"] for each in shown] == [True] * (len(shown) - 1) + [False]


def test_first_boot_shows_failure_and_remedy(host: Host) -> None:
    host.encapsulate(osImageURL=B.image, fips=True)
    assert not host.boot()
    last = host.statuses_shown()[-1]
    assert (last["activity"], last["firstBoot"]) == ("retrying after a failure", True)
    assert "FIPS mode on" in last["failure"]["message"]
    assert "install the machine again" in last["failure"]["remedy"]


def test_first_boot_moves_to_settings_image(host: Host) -> None:
    host.image = B.image
    host.join()
    assert (host.world.booted, host.world.boots) == (B.digest, 2)


def test_settings_image_wins_over_config_image(host: Host) -> None:
    host.encapsulate(osImageURL=A.image)
    host.image = B.image
    host.join()
    assert host.world.booted == B.digest


def test_first_boot_at_target_does_not_reboot(host: Host) -> None:
    host.encapsulate(osImageURL=A.image)
    assert host.boot()
    assert host.world.boots == 1
    assert_joined(host)


def test_finished_first_boot_reads_nothing_again(host: Host) -> None:
    assert host.boot()
    host.encapsulate(osImageURL=B.image)
    assert host.boot()
    assert host.world.booted == A.digest


def effects(host: Host, **spec: object) -> list[str]:
    steps: list[str] = []
    host.world.fault_point = steps.append
    host.encapsulate(**(spec or {"osImageURL": B.image}))
    host.join()
    return steps


@pytest.mark.parametrize("fault", [Killed, PowerCut])
def test_first_boot_kernel_arguments_survive_power_cut_at_any_effect(
    tmp_path: Path, fault: type[BaseException]
) -> None:
    (tmp_path / "dry").mkdir()
    count = len(effects(Host(tmp_path / "dry"), kernelArguments=["nosmt"]))
    assert count > 5
    for index in range(count):
        place = tmp_path / str(index)
        place.mkdir()
        host = Host(place)
        assert_joins_in_spite(host, fault, index, kernelArguments=["nosmt"])
        assert host.world.system.arguments == (*PLATFORM, "nosmt")
        # What the machine had before is known for every later config.
        assert (place / FIRST_COMMAND_LINE[1:]).read_text().split() == [*PLATFORM]


def test_arguments_of_the_machine_are_unknown_when_an_older_agent_began(host: Host) -> None:
    (host.root / STATE_FILE[1:]).parent.mkdir(parents=True)
    (host.root / STATE_FILE[1:]).write_text('{"version": 1, "rebootCount": 1, "bootID": "x"}')
    host.encapsulate(kernelArguments=["nosmt"])
    host.join()
    assert not (host.root / FIRST_COMMAND_LINE[1:]).exists()


def test_arguments_of_the_machine_are_recorded_once(host: Host) -> None:
    record = host.root / FIRST_COMMAND_LINE[1:]
    record.parent.mkdir(parents=True)
    record.write_text("rw")
    # A user removed the record of the reboots, as the error after several of them says.
    host.encapsulate(kernelArguments=["nosmt"])
    host.join()
    assert record.read_text() == "rw"


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("fault", [Killed, PowerCut])
def test_first_boot_survives_power_cut_at_any_effect(
    tmp_path: Path, fault: type[BaseException], back_end: str
) -> None:
    (tmp_path / "dry").mkdir()
    with directories() as directory_of:
        count = len(effects(Host(tmp_path / "dry", bootc=directory_of(back_end))))
        assert count > 5
        for index in range(count):
            place = tmp_path / str(index)
            place.mkdir()
            assert_joins_in_spite(Host(place, bootc=directory_of(back_end)), fault, index)


def assert_joins_in_spite(
    host: Host, fault: type[BaseException], index: int, **spec: object
) -> None:
    """The fault strikes once, at the effect of this number."""
    boots = host.world.boots
    host.encapsulate(**(spec or {"osImageURL": B.image}))
    countdown = iter(range(index + 1))

    def fault_point(_step: str) -> None:
        if next(countdown, None) == index:
            raise fault

    host.world.fault_point = fault_point
    host.join()
    assert host.world.booted == (A.digest if spec else B.digest)
    assert host.world.boots <= boots + (1 if fault is Killed else 2)
    assert_joined(host)


def test_reboots_without_effect_end_without_joining(host: Host) -> None:
    host.encapsulate(osImageURL=B.image)
    host.world.finalizes = False
    for _ in range(8):
        assert not host.boot()
    assert host.world.boots == 4
    error = "3 reboots booted another deployment; ostree-finalize-staged failed: No space left"
    with pytest.raises(HostError, match=error):
        host.first_boot().reconcile_once()


def test_config_with_other_fips_mode_is_rejected(host: Host) -> None:
    host.encapsulate(osImageURL=B.image, fips=True)
    with pytest.raises(UnreconcilableError, match="FIPS mode on"):
        host.first_boot().reconcile_once()
    assert not host.boot()
    assert host.world.boots == 1


def test_first_boot_with_fips_and_image_joins_without_reboot(
    host: Host,
) -> None:
    host.world.fips = True
    host.encapsulate(osImageURL=A.image, fips=True)
    host.join()
    assert host.world.boots == 1


def test_config_that_is_invalid_is_rejected(host: Host) -> None:
    (host.root / ENCAPSULATED_CONFIG[1:]).write_text("{")
    with pytest.raises(ConfigError, match="cannot read the config that Ignition wrote") as caught:
        host.first_boot().reconcile_once()
    assert "install the machine again" in caught.value.remedy


def test_login_of_the_config_is_installed_with_mode_0600(host: Host) -> None:
    secret = {"path": SECRET, "mode": 0o644, "contents": {"source": "data:,%7B%7D"}}
    host.encapsulate(
        osImageURL=B.image,
        config={"ignition": {"version": "3.5.0"}, "storage": {"files": [secret]}},
    )
    host.join()
    placed = host.root / SECRET[1:]
    assert (placed.read_text(), oct(placed.stat().st_mode & 0o777)) == ("{}", "0o600")


def test_stop_event_ends_the_wait(host: Host) -> None:
    host.encapsulate(osImageURL=B.image)
    stop = threading.Event()
    stop.set()
    fake = FakeMachine(host.world)
    clock = FakeClock()
    machine = FirstBootInterfaces(
        fake,
        fake,
        fake,
        FakePullSecrets(),
        FakePreflight(),
        host,
        host.verifier(clock),
        clock,
        host.status_file(clock),
    )
    waiting = FirstBootRunner(
        HostFiles(Root(host.root)), machine, image="", pull_secret=SECRET, stop=stop
    )
    assert not waiting.run()
    assert [each.name for each in (host.root / "etc").iterdir()] == [Path(ENCAPSULATED_CONFIG).name]


def test_first_boot_failure_is_retried_with_backoff_up_to_a_minute(host: Host) -> None:
    (host.root / ENCAPSULATED_CONFIG[1:]).write_text("{")
    fake, stop = FakeMachine(host.world), Waits(10)
    clock = FakeClock()
    machine = FirstBootInterfaces(
        fake,
        fake,
        fake,
        FakePullSecrets(),
        FakePreflight(),
        host,
        host.verifier(clock),
        clock,
        host.status_file(clock),
    )
    files = HostFiles(Root(host.root))
    assert not FirstBootRunner(files, machine, image="", pull_secret=SECRET, stop=stop).run()
    assert 2.5 <= stop.timeouts[0] <= 5.0
    assert 30.0 <= stop.timeouts[-1] <= 60.0
