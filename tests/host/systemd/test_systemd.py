"""The client of systemd with the fake systemd of the lab."""

from collections.abc import Callable, Iterator

import pytest
from gi.repository import GLib

from tests.fakes.bus_service import BusService, Exports
from tests.fakes.clock import FakeClock
from tests.fakes.private_bus import PrivateBus
from tests.fakes.services import Services
from treenail.errors import BusError, UnitError
from treenail.host.systemd.system_bus import SystemBus
from treenail.host.systemd.systemd import Systemd, SystemdUnit
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.process

INSTALL = "[Install]\nWantedBy=multi-user.target\n"
UNITS = {
    "web.service": f"[Service]\nExecStart=/bin/true\nExecReload=/bin/true\n{INSTALL}",
    "job.service": "[Service]\nExecStart=/bin/true\n",
    "web.socket": "[Socket]\nListenStream=80\n",
}


@pytest.fixture
def services() -> Iterator[Services]:
    with Services(units=UNITS) as services:
        yield services
    assert not GLib.MainContext.default().pending()


@pytest.fixture
def systemd(bus: SystemBus) -> Systemd:
    return Systemd(bus, FakeClock())


def states(systemd: Systemd, *names: str) -> list[tuple[str, str]]:
    return [(unit.load_state, unit.active_state) for unit in systemd.list_units(*names)]


def test_list_units_returns_missing_units_too(systemd: Systemd) -> None:
    path = "/org/freedesktop/systemd1/unit"
    assert systemd.list_units("web.service", "none.service") == (
        SystemdUnit("web.service", "loaded", "inactive", "dead", f"{path}/web_2eservice"),
        SystemdUnit("none.service", "not-found", "inactive", "dead", f"{path}/none_2eservice"),
    )


def test_unit_files_are_enabled_and_disabled(systemd: Systemd) -> None:
    seen = [systemd.read_unit_file_state("web.service")]
    steps: tuple[Callable[..., None], ...] = (
        systemd.enable_units,
        systemd.enable_units,
        systemd.disable_units,
    )
    for step in steps:
        step("web.service", "web.socket")
        systemd.reload_daemon()
        seen.append(systemd.read_unit_file_state("web.service"))
    assert seen == [
        "disabled",
        "enabled",
        "enabled",
        "disabled",
    ]


def test_preset_enables_units_of_the_vendor(services: Services, systemd: Systemd) -> None:
    presets = services.root / "usr/lib/systemd/system-preset"
    presets.mkdir()
    (presets / "10-web.preset").write_text("enable web.service\ndisable *\n", encoding="utf-8")
    systemd.preset_units("web.service")
    assert systemd.read_unit_file_state("web.service") == "enabled"


def test_unit_without_a_file_has_no_state_and_cannot_be_enabled(systemd: Systemd) -> None:
    assert systemd.read_unit_file_state("none.service") == ""
    with pytest.raises(UnitError, match=r"cannot enable none\.service: "):
        systemd.enable_units("none.service")


def test_new_unit_is_known_after_reload(services: Services, systemd: Systemd) -> None:
    before = states(systemd, "new.service")
    folder = services.root / "etc/systemd/system"
    folder.mkdir(parents=True)
    (folder / "new.service").write_text(UNITS["job.service"], encoding="utf-8")
    systemd.reload_daemon()
    assert (before, states(systemd, "new.service")) == (
        [("not-found", "inactive")],
        [("loaded", "inactive")],
    )


def test_jobs_end_before_the_method_returns(services: Services, systemd: Systemd) -> None:
    seen = []
    steps: tuple[Callable[[str], None], ...] = (
        systemd.restart_unit,
        systemd.restart_unit,
        systemd.reload_unit,
    )
    for step in steps:
        step("web.service")
        seen += [(services.read_line(), *states(systemd, "web.service"))]
    assert seen == [
        ("unit restart web.service", ("loaded", "active")),
        ("unit restart web.service", ("loaded", "active")),
        ("unit reload web.service", ("loaded", "active")),
    ]


def test_failed_job_names_the_result_of_the_unit(services: Services, systemd: Systemd) -> None:
    services.change(MachineSettings(failing_units=("web.service",)))
    with pytest.raises(UnitError) as caught:
        systemd.restart_unit("web.service")
    assert (str(caught.value), caught.value.remedy) == (
        "cannot restart web.service: job failed, result exit-code, status 1",
        "see: systemctl status web.service; journalctl -u web.service",
    )


def test_failed_job_of_a_unit_without_result_names_none(
    services: Services, systemd: Systemd
) -> None:
    services.change(MachineSettings(failing_units=("web.socket",)))
    with pytest.raises(UnitError, match=r"cannot restart web\.socket: job failed$"):
        systemd.restart_unit("web.socket")


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        ("none.service", "cannot restart none.service: .*Unit none.service not found"),
        ("job.service", "cannot restart job.service: .*Unit job.service is masked"),
    ],
)
def test_refused_job_is_a_unit_error(
    services: Services, systemd: Systemd, unit: str, text: str
) -> None:
    folder = services.root / "etc/systemd/system"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.service").symlink_to("/dev/null")
    systemd.reload_daemon()
    with pytest.raises(UnitError, match=text):
        systemd.restart_unit(unit)


def test_lost_bus_is_no_unit_error(services: Services, systemd: Systemd) -> None:
    services.vanish()
    with pytest.raises(BusError):
        systemd.enable_units("web.service")


ENDLESS_XML = """<node><interface name="org.freedesktop.systemd1.Manager">
  <method name="Subscribe"/>
  <method name="Unsubscribe"/>
  <method name="RestartUnit">
    <arg type="s" direction="in"/><arg type="s" direction="in"/><arg type="o" direction="out"/>
  </method>
</interface></node>"""


def test_job_without_end_fails_at_its_time_limit(private_bus: PrivateBus) -> None:
    clock = FakeClock()
    calls: list[str] = []

    def begin(unit: str, mode: str) -> GLib.Variant:
        calls.append(f"restart {unit} {mode}")
        clock.move(31)
        return GLib.Variant("(o)", ("/org/freedesktop/systemd1/job/1",))

    manager = Exports(ENDLESS_XML, {
        "Subscribe": lambda: calls.append("subscribe"),
        "Unsubscribe": lambda: calls.append("unsubscribe"),
        "RestartUnit": begin,
    })  # fmt: skip
    bus = SystemBus(private_bus.address)
    with (
        BusService(
            private_bus.address, "org.freedesktop.systemd1", {"/org/freedesktop/systemd1": manager}
        ),
        pytest.raises(
            UnitError, match=r"cannot restart web\.service: the job did not end within 30 s"
        ),
    ):
        Systemd(bus, clock, job_s=30).restart_unit("web.service")
    bus.close_connection()
    assert calls == ["subscribe", "restart web.service replace", "unsubscribe"]


@pytest.mark.parametrize(("version", "count"), [(255, None), (256, 0)])
def test_soft_reboots_are_counted_from_systemd_256_on(version: int, count: int | None) -> None:
    with Services(MachineSettings(systemd_version=version)) as services:
        bus = SystemBus(services.address)
        systemd = Systemd(bus, FakeClock())
        assert systemd.count_soft_reboots() == count
        assert systemd.read_userspace_start() > 0
        bus.close_connection()
