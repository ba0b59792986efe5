"""systemd's stand-in: jobs, units, unit files and transient services."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gi.repository import Gio, GLib

from tests.lab.machine.client import LIMIT_S, Client, Heard, error_name, refused, wait_until
from tests.lab.machine.conftest import Services
from treenail_lab.machine.bus.objects import INVALID_ARGS, READ_ONLY
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.machine.systemd.units import NAME, PATH
from treenail_lab.machine.unit_files import NO_SUCH_UNIT, UNIT_EXISTS, UNIT_MASKED

pytestmark = pytest.mark.integration

MANAGER = f"{NAME}.Manager"


class Systemd(Client):
    """A client of systemd."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.heard: Heard = self.listen(PATH, MANAGER)

    def do(self, method: str, signature: str = "()", *values: object) -> tuple[Any, ...]:
        return self.call((NAME, PATH, MANAGER, method), signature, *values)

    def job(self, verb: str, name: str) -> str:
        """Do it, and say what the job came to."""
        (path,) = self.do(f"{verb}Unit", "(ss)", name, "replace")
        return self.result(path)

    def result(self, job: str) -> str:
        wait_until(lambda: self._removed(job))
        return str(self._removed(job)[0])

    def _removed(self, job: str) -> list[Any]:
        return [v[3] for name, v in self.heard if name == "JobRemoved" and v[1] == job]

    def unit(self, name: str) -> dict[str, Any]:
        (path,) = self.do("LoadUnit", "(s)", name)
        return {
            **self.properties(NAME, path, f"{NAME}.Unit"),
            **self.properties(NAME, path, f"{NAME}.Service"),
        }

    def states(self, *names: str) -> list[tuple[str, str, str]]:
        (units,) = self.do("ListUnitsByNames", "(as)", list(names))
        return [(unit[2], unit[3], unit[4]) for unit in units]

    def transient(self, name: str, fds: list[int] | None = None, **properties: Any) -> str:
        """The job of a transient unit."""
        described = [(key, GLib.Variant(*value)) for key, value in properties.items()]
        parameters = GLib.Variant("(ssa(sv)a(sa(sv)))", (name, "fail", described, []))
        listed = Gio.UnixFDList.new()
        for descriptor in fds or []:
            listed.append(descriptor)
        reply, _ = self.connection.call_with_unix_fd_list_sync(
            NAME,
            PATH,
            MANAGER,
            "StartTransientUnit",
            parameters,
            None,
            Gio.DBusCallFlags.NONE,
            round(LIMIT_S * 1000),
            listed,
            None,
        )
        return str(reply.unpack()[0])


def shell(script: str, kind: str = "oneshot") -> dict[str, Any]:
    argv = ["/bin/sh", "-c", script]
    return {"Type": ("s", kind), "ExecStart": ("a(sasb)", [("/bin/sh", argv, False)])}


@pytest.fixture
def systemd(services: Services) -> Iterator[Systemd]:
    with Systemd(services.address) as client:
        client.do("Subscribe")
        yield client


def test_enabled_units_run_after_the_boot(systemd: Systemd) -> None:
    running = ("loaded", "active", "running")
    assert systemd.states("crio.service", "kubelet.service") == [running, running]
    assert systemd.states("rpm-ostreed.service", "no.service") == [
        ("loaded", "inactive", "dead"),
        ("not-found", "inactive", "dead"),
    ]


def test_jobs_change_the_unit_and_end_in_a_signal(systemd: Systemd) -> None:
    assert systemd.job("Stop", "crio.service") == "done"
    assert systemd.states("crio.service") == [("loaded", "inactive", "dead")]
    assert systemd.job("Start", "crio.service") == "done"
    assert systemd.states("crio.service") == [("loaded", "active", "running")]


def test_default_target_starts_wanted_units_and_keeps_running_ones(systemd: Systemd) -> None:
    systemd.job("Stop", "kubelet.service")
    before = systemd.unit("crio.service")["InvocationID"]
    assert systemd.job("Start", "default.target") == "done"
    running = ("loaded", "active", "running")
    assert systemd.states("crio.service", "kubelet.service") == [running, running]
    assert systemd.unit("crio.service")["InvocationID"] == before


def test_restart_is_another_invocation(systemd: Systemd) -> None:
    before = systemd.unit("crio.service")["InvocationID"]
    assert systemd.job("Restart", "crio.service") == "done"
    after = systemd.unit("crio.service")["InvocationID"]
    assert len(before) == len(after) == 16
    assert before != after


def test_job_writes_journal_entry(services: Services, systemd: Systemd) -> None:
    systemd.job("Reload", "crio.service")
    systemd.job("ReloadOrRestart", "kubelet.service")

    def jobs() -> list[tuple[object, object, object]]:
        entries = services.journal.read_entries({"SYSLOG_IDENTIFIER": "systemd"})
        return [(e["UNIT"], e["JOB_TYPE"], e["JOB_RESULT"]) for e in entries]

    wait_until(lambda: len(jobs()) == 2)
    assert jobs() == [
        ("crio.service", "reload", "done"),
        ("kubelet.service", "reload-or-restart", "done"),
    ]


def test_try_restart_leaves_a_stopped_unit_stopped(systemd: Systemd) -> None:
    systemd.job("Stop", "crio.service")
    assert systemd.job("TryRestart", "crio.service") == "done"
    assert systemd.job("ReloadOrTryRestart", "crio.service") == "done"
    assert systemd.states("crio.service") == [("loaded", "inactive", "dead")]
    assert systemd.job("ReloadOrRestart", "crio.service") == "done"
    assert systemd.states("crio.service") == [("loaded", "active", "running")]


def test_reload_needs_a_command_and_a_running_unit(systemd: Systemd) -> None:
    name = refused(systemd, "ReloadUnit", "(ss)", "kubelet.service", "replace")
    assert name == "org.freedesktop.systemd1.JobTypeNotApplicable"
    systemd.job("Stop", "crio.service")
    assert systemd.job("Reload", "crio.service") == "failed"


def test_job_for_missing_or_masked_unit_is_refused(systemd: Systemd) -> None:
    assert refused(systemd, "StartUnit", "(ss)", "no.service", "replace") == NO_SUCH_UNIT
    assert refused(systemd, "StopUnit", "(ss)", "no.service", "replace") == NO_SUCH_UNIT
    assert refused(systemd, "StartUnit", "(ss)", "crio.service", "often") == INVALID_ARGS
    systemd.do("MaskUnitFiles", "(asbb)", ["chronyd.service"], False, False)
    systemd.do("Reload")
    assert refused(systemd, "StartUnit", "(ss)", "chronyd.service", "replace") == UNIT_MASKED


def test_failing_unit_stays_failed_until_reset(services: Services, systemd: Systemd) -> None:
    services.change(MachineSettings(failing_units=("crio.service",)))
    assert systemd.job("Restart", "crio.service") == "failed"
    shown = systemd.unit("crio.service")
    assert (shown["ActiveState"], shown["Result"], shown["ExecMainStatus"]) == (
        "failed",
        "exit-code",
        1,
    )
    systemd.do("ResetFailedUnit", "(s)", "crio.service")
    assert systemd.states("crio.service") == [("loaded", "inactive", "dead")]


def test_killed_unit_fails_with_result_signal(systemd: Systemd) -> None:
    systemd.do("KillUnit", "(ssi)", "crio.service", "all", signal.SIGKILL)
    shown = systemd.unit("crio.service")
    assert (shown["ActiveState"], shown["Result"]) == ("failed", "signal")


def test_new_unit_file_is_loaded_by_reload(services: Services, systemd: Systemd) -> None:
    assert systemd.states("new.service") == [("not-found", "inactive", "dead")]
    services.write_unit("new.service", "[Unit]\nDescription=New\n[Service]\nType=oneshot\n")
    assert systemd.states("new.service") == [("not-found", "inactive", "dead")]
    systemd.do("Reload")
    shown = systemd.unit("new.service")
    assert (shown["LoadState"], shown["Description"], shown["FragmentPath"]) == (
        "loaded",
        "New",
        "/etc/systemd/system/new.service",
    )
    reloading = [("Reloading", (True,)), ("Reloading", (False,))]
    wait_until(lambda: [event for event in systemd.heard if event[0] == "Reloading"] == reloading)
    assert systemd.job("Start", "new.service") == "done"
    assert systemd.states("new.service") == [("loaded", "inactive", "dead")]


def test_enable_reports_links_and_its_state(services: Services, systemd: Systemd) -> None:
    services.write_unit("new.service", "[Service]\n[Install]\nWantedBy=multi-user.target\n")
    link = "/etc/systemd/system/multi-user.target.wants/new.service"
    changes = [("symlink", link, "/etc/systemd/system/new.service")]
    assert systemd.do("GetUnitFileState", "(s)", "new.service") == ("disabled",)
    enabled = systemd.do("EnableUnitFiles", "(asbb)", ["new.service"], False, False)
    assert enabled == (True, changes)
    assert systemd.do("GetUnitFileState", "(s)", "new.service") == ("enabled",)
    assert (services.root / link[1:]).is_symlink()
    disabled = systemd.do("DisableUnitFiles", "(asb)", ["new.service"], False)
    assert disabled == ([("unlink", link, "")],)
    wait_until(lambda: ("UnitFilesChanged", ()) in systemd.heard)


def test_preset_mask_unmask_and_list_work_on_files(systemd: Systemd) -> None:
    carries, _ = systemd.do("PresetUnitFiles", "(asbb)", ["crio.service"], False, False)
    assert carries
    (masked,) = systemd.do("MaskUnitFiles", "(asbb)", ["chronyd.service"], False, False)
    assert masked == [("symlink", "/etc/systemd/system/chronyd.service", "/dev/null")]
    (files,) = systemd.do("ListUnitFiles")
    assert ("/etc/systemd/system/chronyd.service", "masked") in files
    (unmasked,) = systemd.do("UnmaskUnitFiles", "(asb)", ["chronyd.service"], False)
    assert unmasked == [("unlink", "/etc/systemd/system/chronyd.service", "")]


def test_units_are_found_by_pattern_and_state(systemd: Systemd) -> None:
    (units,) = systemd.do("ListUnitsByPatterns", "(asas)", ["active"], ["c*.service"])
    assert [unit[0] for unit in units] == ["chronyd.service", "crio.service"]


def test_unit_path_is_escaped(systemd: Systemd) -> None:
    (path,) = systemd.do("GetUnit", "(s)", "rpm-ostreed.service")
    assert path == "/org/freedesktop/systemd1/unit/rpm_2dostreed_2eservice"
    assert refused(systemd, "GetUnit", "(s)", "no.service") == NO_SUCH_UNIT


def test_reboot_target_and_reboot_call_request_reboot(services: Services, systemd: Systemd) -> None:
    systemd.do("StartUnit", "(ss)", "reboot.target", "replace")
    wait_until(lambda: services.requests == ["reboot"])
    systemd.do("Reboot")
    wait_until(lambda: services.requests == ["reboot", "reboot"])


def test_oneshot_job_ends_with_the_process(systemd: Systemd, tmp_path: Path) -> None:
    done = tmp_path / "done"
    assert systemd.result(systemd.transient("x.service", **shell(f"touch {done}"))) == "done"
    assert done.exists()


def test_variables_in_arguments_are_replaced(systemd: Systemd, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    argv = ["/bin/sh", "-c", f'printf "%s\n" "$$@" >{seen}', "$UNSET", "x", "a${UNSET%/}b", "$$"]
    properties = {
        "Type": ("s", "oneshot"),
        "ExecStart": ("a(sasb)", [("/bin/sh", argv, False)]),
    }
    assert systemd.result(systemd.transient("x.service", **properties)) == "done"
    assert seen.read_text().splitlines() == ["ab", "$"]


def test_successful_transient_unit_is_unloaded(systemd: Systemd) -> None:
    systemd.result(systemd.transient("x.service", **shell("true")))
    shown = systemd.unit("x.service")
    assert (shown["LoadState"], shown["Result"]) == ("not-found", "success")


def test_failed_unit_stays_and_blocks_its_name(systemd: Systemd) -> None:
    assert systemd.result(systemd.transient("x.service", **shell("exit 7"))) == "failed"
    shown = systemd.unit("x.service")
    assert (shown["ActiveState"], shown["Result"], shown["ExecMainStatus"]) == (
        "failed",
        "exit-code",
        7,
    )
    with pytest.raises(GLib.Error) as refusal:
        systemd.transient("x.service", **shell("true"))
    assert error_name(refusal.value) == UNIT_EXISTS
    systemd.do("ResetFailedUnit", "(s)", "x.service")
    assert systemd.result(systemd.transient("x.service", **shell("true"))) == "done"


def test_failed_unit_with_collect_mode_is_unloaded(systemd: Systemd) -> None:
    collect = ("s", "inactive-or-failed")
    job = systemd.transient("x.service", CollectMode=collect, **shell("exit 7"))
    assert systemd.result(job) == "failed"
    assert systemd.states("x.service") == [("not-found", "inactive", "dead")]


def test_remaining_unit_keeps_its_result_until_stopped(systemd: Systemd) -> None:
    job = systemd.transient("x.service", RemainAfterExit=("b", True), **shell("true"))
    assert systemd.result(job) == "done"
    assert systemd.states("x.service") == [("loaded", "active", "exited")]
    assert systemd.job("Stop", "x.service") == "done"
    assert systemd.states("x.service") == [("not-found", "inactive", "dead")]


def test_referenced_unit_stays_until_client_disconnects(
    services: Services, systemd: Systemd
) -> None:
    with Systemd(services.address) as holder:
        holder.do("Subscribe")
        job = holder.transient("x.service", AddRef=("b", True), **shell("true"))
        assert holder.result(job) == "done"
        assert systemd.states("x.service") == [("loaded", "inactive", "dead")]
    wait_until(lambda: systemd.states("x.service") == [("not-found", "inactive", "dead")])


def test_unit_runs_on_after_client_dies(services: Services, systemd: Systemd) -> None:
    with Systemd(services.address) as dying:
        dying.transient("x.service", **shell("sleep 30"))
    (units,) = systemd.do("ListUnitsByPatterns", "(asas)", [], ["x.*"])
    assert [(unit[0], unit[3]) for unit in units] == [("x.service", "activating")]
    assert systemd.job("Stop", "x.service") == "done"


def test_output_goes_to_the_descriptor(systemd: Systemd) -> None:
    ours, theirs = os.pipe()
    job = systemd.transient(
        "x.service",
        [theirs],
        StandardOutputFileDescriptor=("h", 0),
        Environment=("as", ["GREETING=hello world"]),
        **shell('echo "$GREETING"'),
    )
    os.close(theirs)
    assert systemd.result(job) == "done"
    with os.fdopen(ours, "rb") as pipe:
        assert pipe.read() == b"hello world\n"


def test_output_file_is_below_the_root(services: Services, systemd: Systemd) -> None:
    place = ("s", "/run/x.log")
    job = systemd.transient("x.service", StandardOutputFileToAppend=place, **shell("echo out"))
    assert systemd.result(job) == "done"
    assert (services.root / "run/x.log").read_text() == "out\n"


def test_program_below_root_precedes_program_of_host(services: Services, systemd: Systemd) -> None:
    program = services.root / "usr/bin/bootc"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    command = [("/usr/bin/bootc", ["bootc", "switch"], False)]
    job = systemd.transient("x.service", Type=("s", "oneshot"), ExecStart=("a(sasb)", command))
    assert systemd.result(job) == "failed"
    assert systemd.unit("x.service")["ExecMainStatus"] == 3


def test_missing_program_is_status_203(systemd: Systemd) -> None:
    command = [("/no/such/program", ["program"], False)]
    job = systemd.transient("x.service", Type=("s", "oneshot"), ExecStart=("a(sasb)", command))
    assert systemd.result(job) == "failed"
    assert systemd.unit("x.service")["ExecMainStatus"] == 203


def test_slow_unit_is_stopped_with_result_timeout(systemd: Systemd) -> None:
    limit = ("t", 200_000)
    job = systemd.transient("x.service", TimeoutStartUSec=limit, **shell("sleep 30"))
    assert systemd.result(job) == "timeout"
    assert systemd.unit("x.service")["Result"] == "timeout"


def test_simple_unit_is_active_while_its_process_runs(systemd: Systemd) -> None:
    job = systemd.transient("x.service", **shell("sleep 30", "simple"))
    assert systemd.result(job) == "done"
    shown = systemd.unit("x.service")
    assert (shown["ActiveState"], shown["SubState"]) == ("active", "running")
    assert shown["MainPID"] > 0
    systemd.do("KillUnit", "(ssi)", "x.service", "all", signal.SIGKILL)
    wait_until(lambda: systemd.unit("x.service")["Result"] == "signal")


def test_property_of_a_newer_systemd_is_refused(systemd: Systemd) -> None:
    with pytest.raises(GLib.Error, match="OpenFile, or unknown property") as refusal:
        systemd.transient("x.service", OpenFile=("a(sst)", []), **shell("true"))
    assert error_name(refusal.value) == READ_ONLY


def test_signals_are_for_subscribers(services: Services) -> None:
    with Systemd(services.address) as client:
        client.do("RestartUnit", "(ss)", "crio.service", "replace")
        before = client.unit("crio.service")["InvocationID"]
        assert len(before) == 16
        assert client.heard == []
        assert refused(client, "Unsubscribe") == "org.freedesktop.systemd1.NotSubscribed"
