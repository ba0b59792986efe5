"""Other update agents are found by their active units."""

from pathlib import Path

from treenail.daemon.checks.preflight import find_active_agents
from treenail.errors import BusError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail.host.systemd.systemd import SystemdUnit


class FakeUnits:
    """A systemd with these units active."""

    def __init__(self, *active: str) -> None:
        self._active = active

    def list_units(self, *names: str) -> tuple[SystemdUnit, ...]:
        return tuple(
            SystemdUnit(name, "loaded", "active" if name in self._active else "inactive", "", "/")
            for name in names
        )


class NoUnits:
    def list_units(self, *names: str) -> tuple[SystemdUnit, ...]:
        raise BusError("systemd does not answer")


def find_agents(root: Path, *active: str) -> tuple[str, ...]:
    return find_active_agents(HostFiles(Root(root)), FakeUnits(*active))


def test_machine_without_other_agents_has_none(tmp_path: Path) -> None:
    assert find_agents(tmp_path, "sshd.service") == ()


def test_known_agents_count_while_active(tmp_path: Path) -> None:
    known = ("zincati.service", "bootc-fetch-apply-updates.timer")
    assert find_agents(tmp_path, *known) == known


def test_registered_driver_is_found_by_its_unit(tmp_path: Path) -> None:
    (tmp_path / "run/rpm-ostree").mkdir(parents=True)
    (tmp_path / "run/rpm-ostree/update-driver.gv").write_bytes(
        b"driver-sd-unit\0\0fleet-updater.service\0\0sdriver-name\0\0Fleet\0\0s"
    )
    assert find_agents(tmp_path, "fleet-updater.service") == ("fleet-updater.service",)
    assert find_agents(tmp_path) == ()


def test_timer_that_only_checks_is_no_agent(tmp_path: Path) -> None:
    timer = "rpm-ostreed-automatic.timer"
    assert find_agents(tmp_path, timer) == ()
    (tmp_path / "etc").mkdir()
    for policy, found in (("check", ()), ("stage", (timer,)), ("apply", (timer,))):
        text = f"[Daemon]\n#AutomaticUpdatePolicy=apply\nAutomaticUpdatePolicy={policy}\n"
        (tmp_path / "etc/rpm-ostreed.conf").write_text(text)
        assert find_agents(tmp_path, timer) == found


def test_systemd_without_answer_gives_no_agents(tmp_path: Path) -> None:
    assert find_active_agents(HostFiles(Root(tmp_path)), NoUnits()) == ()
