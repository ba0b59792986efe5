"""Installations in the lab that fail while machines join, and complete after the fix."""

from collections.abc import Iterator
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import pytest

from tests.fixtures.files import read_parts
from tests.waiting import wait_until
from treenail.errors import HostError
from treenail.kube.resources import MACHINEOSCONFIGS
from treenail_lab.image_builds import find_build_refusal
from treenail_lab.install.install_lab import (
    CONTAINERFILES,
    InstallInputs,
    InstallLab,
    make_install_plan,
)
from treenail_lab.install.install_run import InstallRun
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.ignition import ignition
from treenail_lab.machine.settings import MachineSettings

_REFUSAL = find_build_refusal()[0] or ignition.find_refusal()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.skipif(bool(_REFUSAL), reason=_REFUSAL or "none"),
]
LIMIT_S = 300.0
LAYER_ONLY = {"master": "", "worker": "FROM configs AS final\nRUN echo the cause >&2; exit 3\n"}
UNREACHABLE = "dial tcp 192.0.2.1:22625: i/o timeout"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def make_run(
    stack: ExitStack, containerfiles: dict[str, str], workers: int = 1, **settings: object
) -> InstallRun:
    """An installation with one machine of the control plane, prepared."""
    machine = MachineSettings(boot_s=0.5, pull_bytes_per_s=1e9, **settings)  # type: ignore[arg-type]
    place = stack.enter_context(owner.temporary_directory())
    plan = make_install_plan(1, workers, machine)
    lab = stack.enter_context(InstallLab(place, plan))
    inputs = InstallInputs(containerfiles)
    run = InstallRun(lab, place / "cluster", inputs, StringIO(), LIMIT_S)
    stack.callback(run.stop)
    run.write_inputs()
    prepared = run.prepare()
    assert prepared.code == 0, prepared.text
    return run


def read_summary(run: InstallRun, path: Path) -> str:
    gathered = run.host.run_command("gather", "--output", str(path))
    assert gathered.code == 0, gathered.text
    return read_parts(path.read_bytes())["bootstrap/treenail/summary.txt"].decode()


def test_node_that_cannot_reach_the_registry_joins_after_the_network_is_repaired(
    stack: ExitStack, tmp_path: Path
) -> None:
    run = make_run(stack, {**CONTAINERFILES, "master": ""}, workers=0, pull_error=UNREACHABLE)
    run.start_bootstrap("--first-boot-timeout=10s")
    with pytest.raises(HostError, match="the time limit of 10s has passed"):
        run.start_cluster()
    assert run.host.find_exit_code() == 5
    assert "wait for the API server of the first machine" in read_summary(run, tmp_path / "b.tgz")
    machine = run.lab.machines["master-0"]
    assert any(UNREACHABLE in str(each.get("MESSAGE")) for each in machine.read_journal())
    machine.change_settings(pull_error="")
    run.host.start()
    run.start_cluster()
    run.lab.open_final_registry()
    run.wait_for_control_plane()
    run.wait_for_handover()
    assert [each.boots for each in run.list_nodes()] == [2]


def test_worker_image_that_fails_keeps_workers_waiting_until_it_is_corrected(
    stack: ExitStack,
) -> None:
    run = make_run(stack, {**LAYER_ONLY})
    run.start_bootstrap()
    run.start_cluster()
    run.lab.open_final_registry()
    run.wait_for_control_plane()
    run.join_workers()

    def find_problem() -> str:
        status = run.lab.client.get(MACHINEOSCONFIGS, "worker").get("status")
        conditions = status.get("conditions") if isinstance(status, dict) else None
        ready = [each for each in conditions or [] if each["type"] == "ImageReady"]
        return str(ready[0]["message"]) if ready and ready[0]["status"] == "False" else ""

    wait_until(lambda: "the cause" in find_problem(), limit_s=120.0)
    wait_until(lambda: "wait for its first image" in run.server.log.read_text(), limit_s=60.0)
    assert [each.name for each in run.list_nodes() if each.is_ready] == ["master-0"]
    entry = {"containerfileArch": "NoArch", "content": CONTAINERFILES["worker"]}
    run.lab.client.patch(MACHINEOSCONFIGS, "worker", {"spec": {"containerFile": [entry]}})
    run.wait_for_workers()
    run.wait_for_handover()
    assert {each.name: (each.boots, each.updates) for each in run.list_nodes()} == {
        "master-0": (2, 0),
        "worker-0": (2, 0),
    }


def test_bootstrap_host_that_loses_power_continues_and_builds_nothing_again(
    stack: ExitStack,
) -> None:
    run = make_run(stack, {**CONTAINERFILES}, workers=0)
    run.start_bootstrap()
    wait_until(lambda: bool(run.find_installed_digest()), limit_s=120.0)
    installed = run.find_installed_digest()
    run.host.kill()
    run.host.start()
    run.start_cluster()
    run.host.kill()
    run.host.start()
    run.lab.open_final_registry()
    run.wait_for_control_plane()
    run.wait_for_handover()
    assert [(each.boots, each.image) for each in run.list_nodes()] == [(2, installed)]
    attempts = [*(run.host.directory.logs / "builds/master").iterdir()]
    assert [each.name for each in attempts] == ["attempt-1"]
