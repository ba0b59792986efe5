"""``install bootstrap``, ``wait-for`` and ``reset`` as processes, without an image to build."""

import json
import random
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.controllers import open_client
from tests.fixtures.files import read_files
from tests.installer.directories import OUTPUTS, make_config, write_manifest
from tests.installer.joined_nodes import join_node
from tests.installer.processes import Bootstrapping, bootstrap, make_directory, run_install
from tests.installer.test_render_step import prepare_recorded_directory
from tests.oracle import needs_oracle
from tests.waiting import wait_until
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = pytest.mark.process
LIMIT_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_directory(tmp_path / "cluster")


def wait_until_serving(process: Bootstrapping) -> None:
    # The status may be that of an earlier process.
    wait_until(lambda: "beginning step first-boot" in process.log.read_text(), limit_s=LIMIT_S)
    process.wait_for_status(step="first-boot", is_serving=True)


def test_control_plane_is_served_and_workers_learn_by_whom(root: Path) -> None:
    with bootstrap(root) as process:
        wait_until_serving(process)
        status, config = process.fetch()
        assert status == 200
        assert config["ignition"]
        status, answer = process.fetch("/config/worker")
        assert status == 503
        assert "the config server of the cluster serves pool worker" in answer["error"]
        status, answer = process.fetch("/config/missing")
        assert (status, answer["error"]) == (404, "no MachineConfigPool has the name missing")
        status, answer = process.fetch("/status")
        assert status == 200
        assert (answer["step"], answer["limit_seconds"]) == ("first-boot", 1800)
        assert answer["pools"]["master"]["rendered"].startswith("rendered-master-")
        assert answer["waited_seconds"] >= 0
        found = json.loads((root / ".treenail/install.json").read_text())
    requests = (root / ".treenail/logs/config-server.log").read_text()
    assert "served config of pool master to 127.0.0.1" in requests
    lines = process.log.read_text().splitlines()
    assert len(lines) > 5
    assert [line for line in lines if not line.startswith(f"{found['id']} ")] == []


def test_bootstrap_serves_without_the_library_for_certificates(root: Path) -> None:
    # The fork server has loaded that library.
    with bootstrap(root, TREENAIL_LAB_FORK_SERVER="no") as process:
        wait_until_serving(process)
        # It takes 12 MiB; a forked process makes the certificates.
        maps = Path(f"/proc/{process.process.pid}/maps").read_text()
        assert "cryptography" not in maps


def test_sigterm_stops_and_the_next_start_continues(root: Path) -> None:
    with bootstrap(root) as process:
        wait_until_serving(process)
        assert process.end(signal.SIGTERM) == 0
        assert process.read_status()["phase"] == "stopped"
    with bootstrap(root) as process:
        wait_until_serving(process)
        log = process.log.read_text()
        assert "kept step render of an earlier start" in log
        assert "beginning step render" not in log


def test_changed_manifest_is_named_at_the_next_start(root: Path) -> None:
    with bootstrap(root) as process:
        wait_until_serving(process)
        before = process.read_status()["pools"]["master"]["rendered"]
        # A running installation does not follow manifests: machines must get one config.
        write_manifest(root, "manifests/more.yaml", make_config("99-master", "master", fips=True))
        assert process.fetch()[0] == 200
        assert process.read_status()["pools"]["master"]["rendered"] == before
    with bootstrap(root) as process:
        wait_until_serving(process)
        assert process.read_status()["pools"]["master"]["rendered"] != before
        assert (
            "restarting at step render: MachineConfig 99-master in manifests/more.yaml added"
            in process.log.read_text()
        )


@pytest.mark.parametrize("has_field", [False, True])
def test_directory_without_prepare_is_refused_and_kept_as_it_is(
    root: Path, tmp_path: Path, *, has_field: bool
) -> None:
    if has_field:
        text = "imageMode: {pools: [{name: master, renderedImagePushSpec: a.example/os:1}]}\n"
        (root / "treenail-install.yaml").write_text(text)
    else:
        root = tmp_path / "empty"
        root.mkdir()
    before = sorted(root.rglob("*"))
    found = run_install("bootstrap", "--dir", root, "--listen", "127.0.0.1:0")
    assert found.returncode == 64
    cause = (
        "treenail-install.yaml has the field imageMode, and there is no "
        "manifests/treenail-install-secrets.yaml"
        if has_field
        else "its manifests have no MachineConfigPool"
    )
    assert f"cannot install from {root}: {cause}" in " ".join(found.stderr.split())
    assert f"treenail-controller install prepare --dir {root}" in " ".join(found.stderr.split())
    assert sorted(root.rglob("*")) == before


def test_wait_for_an_installation_that_never_began_says_so(root: Path) -> None:
    waited = run_install("wait-for", "bootstrap-complete", "--dir", root, "--timeout", "1s")
    assert waited.returncode == 1
    start = f"waiting for a start of: treenail-controller install bootstrap --dir {root}"
    assert waited.stdout.startswith(start)
    assert f"not complete within 1 s: {start}" in waited.stdout


def test_port_in_use_is_named(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = run_install("bootstrap", "--dir", root, "--listen", f"127.0.0.1:{port}")
    assert found.returncode == 5
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in found.stderr
    assert "--listen HOST:PORT" in found.stderr
    waited = run_install("wait-for", "bootstrap-complete", "--dir", root)
    assert waited.returncode == 5
    assert "the installation failed in step start: cannot listen" in waited.stdout


def test_invalid_manifest_is_named_with_file_and_line(root: Path) -> None:
    write_manifest(root, "manifests/bad.yaml", make_config("bad", "master", kernelType="fast"))
    found = run_install("bootstrap", "--dir", root, "--listen", "127.0.0.1:0")
    assert found.returncode == 5
    assert "manifests/bad.yaml, line" in found.stderr
    assert "kernelType" in found.stderr
    assert "Traceback" not in found.stderr


def test_damaged_state_is_refused_until_the_reset(root: Path) -> None:
    with bootstrap(root) as process:
        wait_until_serving(process)
        again = run_install("reset", "--dir", root)
        assert again.returncode == 1
        assert "another process" in again.stderr
    state = root / ".treenail/install.json"
    state.write_text(state.read_text()[:-30])
    waited = run_install("wait-for", "bootstrap-complete", "--dir", root)
    assert waited.returncode == 5
    assert f"the installation cannot continue: cannot read {state}: it is damaged" in waited.stdout
    assert f"treenail-controller install reset --dir {root}" in waited.stdout
    assert "wait for the API server" not in waited.stdout
    found = run_install("bootstrap", "--dir", root, "--listen", "127.0.0.1:0")
    assert found.returncode == 5
    assert "it is damaged" in found.stderr
    assert process.read_status()["phase"] == "failed"
    assert f"treenail-controller install reset --dir {root}" in found.stderr
    reset = run_install("reset", "--dir", root)
    assert reset.returncode == 0
    assert f"removed {state}" in reset.stdout
    assert not (root / "machine-pools").exists()
    assert (root / "manifests").is_dir()
    with bootstrap(root) as process:
        wait_until_serving(process)


def test_damaged_status_is_named_and_the_next_start_writes_it(root: Path) -> None:
    with bootstrap(root) as process:
        wait_until_serving(process)
    status = root / ".treenail/status.json"
    status.write_text("{}")
    waited = run_install("wait-for", "bootstrap-complete", "--dir", root)
    assert waited.returncode == 1
    text = " ".join(waited.stderr.split())
    assert f"cannot read {status}: it is damaged: " in text
    assert f"writes it again: treenail-controller install bootstrap --dir {root}" in text
    with bootstrap(root) as process:
        wait_until_serving(process)


def test_installation_is_complete_when_a_machine_has_joined(root: Path, tmp_path: Path) -> None:
    with bootstrap(root) as process:
        wait_until_serving(process)
        with LabServer(tmp_path / "lab") as server:
            (root / "auth").mkdir()
            shutil.copy(server.admin_kubeconfig, root / "auth/kubeconfig")
            # The API server of an OpenShift installation runs before any machine has booted.
            process.wait_for_status(
                step="nodes", activity="0 of the machines of the control plane have joined"
            )
            with open_client(server.admin_kubeconfig) as client:
                join_node(client)
            found = run_install("wait-for", "bootstrap-complete", "--dir", root, "--timeout=50s")
            assert found.returncode == 0, found.stdout
            # Late machines of the control plane still get their config.
            assert process.read_status()["is_serving"]
            assert process.fetch()[0] == 200
            assert process.end(signal.SIGTERM) == 0
            assert process.read_status()["phase"] == "complete"
            with bootstrap(root, "--stop-when-complete") as again:
                assert again.process.wait(LIMIT_S) == 0


def test_first_boot_above_its_limit_fails_and_continues_later(root: Path, tmp_path: Path) -> None:
    with bootstrap(root, "--first-boot-timeout=1s") as process:
        assert process.process.wait(LIMIT_S) == 5
    failure = process.read_status()["failure"]
    assert failure["step"] == "first-boot"
    assert "the time limit of 1s has passed" in failure["reason"]
    assert "--first-boot-timeout TIME" in failure["remedy"]
    waited = run_install("wait-for", "bootstrap-complete", "--dir", root)
    assert waited.returncode == 5
    assert failure["reason"] in waited.stdout
    with LabServer(tmp_path / "lab") as server, open_client(server.admin_kubeconfig) as client:
        join_node(client)
        again = run_install(
            "bootstrap", "--dir", root, "--listen=127.0.0.1:0", "--stop-when-complete",
            "--kubeconfig", server.admin_kubeconfig,
        )  # fmt: skip
        assert again.returncode == 0, again.stderr
        assert "repeating step first-boot: its state was failed" in again.stderr


def test_wait_without_a_process_ends(root: Path) -> None:
    with bootstrap(root) as process:
        wait_until_serving(process)
        short = run_install("wait-for", "bootstrap-complete", "--dir", root, "--timeout=0s")
        assert short.returncode == 1
        assert "not complete within 0 s" in short.stdout
    found = run_install("wait-for", "bootstrap-complete", "--dir", root)
    assert found.returncode == 1
    assert f"start it: treenail-controller install bootstrap --dir {root}" in found.stdout


def test_service_manager_is_notified_when_requests_are_accepted(root: Path) -> None:
    directory = root.parent
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        address = directory / "notify"
        systemd.bind(str(address))
        systemd.settimeout(LIMIT_S)
        with bootstrap(root, NOTIFY_SOCKET=str(address)) as process:
            received: list[str] = []
            while "READY=1" not in received:
                received.append(systemd.recv(4096).decode())
            assert process.fetch("/status")[0] == 200
            while not any("wait for the API server" in each for each in received):
                received.append(systemd.recv(4096).decode())
            process.process.send_signal(signal.SIGTERM)
            while "STOPPING=1" not in received:
                received.append(systemd.recv(4096).decode())


@pytest.mark.parametrize("seed", range(5))
def test_kills_at_any_time_end_in_the_same_files(root: Path, seed: int) -> None:
    source = random.Random(seed)
    reference = make_directory(root.parent / "reference")
    with bootstrap(reference) as process:
        wait_until_serving(process)
    for _ in range(3):
        # A process of this kind serves after about half a second.
        with bootstrap(root) as process, pytest.raises(subprocess.TimeoutExpired):
            process.process.wait(source.random())
    with bootstrap(root) as process:
        wait_until_serving(process)
        assert read_files(root, *OUTPUTS) == read_files(reference, *OUTPUTS)
        assert process.fetch()[0] == 200


@needs_oracle
def test_recorded_directory_of_the_operator_works_unchanged(tmp_path: Path) -> None:
    root = tmp_path / "cluster"
    expected = prepare_recorded_directory(root)
    with bootstrap(root) as process:
        wait_until_serving(process)
        pools = process.read_status()["pools"]
        assert {each["rendered"] for each in pools.values()} == set(expected)
        status, config = process.fetch()
        assert status == 200
        paths = {each["path"] for each in config["storage"]["files"]}
        assert "/etc/ignition-machine-config-encapsulated.json" in paths
        # A pre-built image of workers is the business of the cluster.
        status, answer = process.fetch("/config/layered-worker")
        assert status == 503
        assert "the config server of the cluster" in answer["error"]
        assert not (root / ".treenail/registry").exists()
