"""``install bootstrap`` until the hand-over: node files, pre-built images, and the cluster."""

import base64
import json
import shutil
import signal
import socket
import subprocess
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.builder.base_image import needs_busybox
from tests.builder.builds import push_base
from tests.builder.sandboxing import needs_buildah
from tests.installer.directories import make_config, write_manifest
from tests.installer.joined_nodes import drop_registry, join_node
from tests.installer.pool_builds import FINAL, InstallSite
from tests.installer.processes import Bootstrapping, bootstrap, run_install
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.component_names import NAMESPACE
from treenail.clocks import SystemClock
from treenail.config import node_paths
from treenail.config.bootstrap_registry import MIRROR_FILE, RECORD_FILE, decode_record
from treenail.controllers.handover.handover_objects import (
    HANDOVER_SECRET,
    RESULT_CONFIGMAP,
    Handover,
    HandoverResult,
    build_result_configmap,
    read_handover_secret,
)
from treenail.errors import NotFoundError
from treenail.installer.directory.install_manifests import read_install_manifests
from treenail.kube.api_client import Client
from treenail.kube.resources import CONFIGMAPS, SECRETS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.registry.authorization import Login
from treenail.registry.client import RegistryClient
from treenail.registry.transport import TlsSettings
from treenail_lab.apiserver.serving.server import LabServer

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]
LIMIT_S = 90.0
ARGUMENTS = ("--registry-listen=127.0.0.1:0", "--registry-storage-limit=64Mi")
DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def site(tmp_path: Path, lab_registry: RegistryService) -> InstallSite:
    root = tmp_path / "cluster"
    root.mkdir()
    found = InstallSite(root, lab_registry, namespace=NAMESPACE)
    found.push_base()
    found.write()
    return found


def wait_for_first_boot(process: Bootstrapping) -> None:
    wait_until(lambda: "beginning step first-boot" in process.log.read_text(), limit_s=LIMIT_S)
    process.wait_for_status(step="first-boot", is_serving=True)


def read_files(config: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of an Ignition config by path."""
    return {
        each["path"]: base64.b64decode(each["contents"]["source"].partition(",")[2])
        for each in config["storage"]["files"]
        if each["contents"]["source"].startswith("data:;base64,")
    }


def read_image(process: Bootstrapping) -> str:
    return process.read_status()["pools"]["master"]["image"]


def has_image(files: dict[str, bytes], reference: str) -> bool:
    """Return whether a node with these files can pull from the bootstrap registry."""
    record = decode_record(files[RECORD_FILE], where=RECORD_FILE)
    client = RegistryClient(
        record.registry,
        SystemClock(),
        login=Login(record.username, record.password),
        tls=TlsSettings(ca_pem=files[record.ca_path].decode()),
    )
    try:
        return client.head_manifest("os/node", reference) is not None
    finally:
        client.close()


def test_image_is_built_and_served_under_its_final_name(site: InstallSite) -> None:
    with bootstrap(site.root, *ARGUMENTS) as process:
        wait_for_first_boot(process)
        image = read_image(process)
        assert image.startswith(f"{FINAL}/os/node@sha256:")
        status, config = process.fetch()
        assert status == 200
        files = read_files(config)
        notes = json.loads(files[node_paths.FIRST_BOOT_ANNOTATIONS])
        assert notes[key.DESIRED_OS_IMAGE] == notes[key.CURRENT_OS_IMAGE] == image
        encapsulated = json.loads(files[node_paths.ENCAPSULATED_CONFIG])
        assert encapsulated["spec"]["osImageURL"] == image
        # The rendered config names neither the image nor the bootstrap host.
        served = files[node_paths.SERVED_CONFIG].decode()
        assert image not in served
        assert "localhost" not in served
        assert f'prefix = "{FINAL}/os/node"' in files[MIRROR_FILE].decode()
        assert 'pull-from-mirror = "digest-only"' in files[MIRROR_FILE].decode()
        assert has_image(files, image.partition("@")[2])
        assert process.fetch("/config/worker")[0] == 503
        text = process.log.read_text() + json.dumps(process.fetch("/status")[1])
        record = decode_record(files[RECORD_FILE], where=RECORD_FILE)
        assert record.password not in text
        assert record.password not in (site.root / ".treenail/install.json").read_text()


def test_changed_manifest_builds_another_image(site: InstallSite) -> None:
    with bootstrap(site.root, *ARGUMENTS) as process:
        wait_for_first_boot(process)
        image = read_image(process)
    more = make_config("50-master", "master", kernelArguments=["quiet"])
    write_manifest(site.root, "manifests/more.yaml", more)
    with bootstrap(site.root, *ARGUMENTS) as process:
        wait_for_first_boot(process)
        assert read_image(process) != image
        log = process.log.read_text()
        assert "restarting at step render: MachineConfig 50-master" in log
        assert "beginning step build:master" in log


@needs_buildah
@needs_busybox
def test_sigterm_during_a_build_ends_its_processes(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path / "cluster", lab_registry, namespace=NAMESPACE)
    site.base = push_base(lab_registry, tmp_path)
    site.text = "FROM configs AS final\nRUN echo begun && sleep 613\n"
    site.write()
    output = site.directory.get_build_logs("master", 1) / "output.log"
    with bootstrap(site.root, *ARGUMENTS) as process:
        wait_until(lambda: output.exists() and "\nbegun" in output.read_text(), limit_s=LIMIT_S)
        # Early machines are asked to try again, and get the reason.
        status, answer = process.fetch()
        assert status == 503
        assert "the bootstrap host has tried to provide the image of pool master" in answer["error"]
        assert process.end(signal.SIGTERM) == 0
        assert process.read_status()["phase"] == "stopped"
    assert not find_processes(str(site.root))


def find_processes(text: str) -> list[str]:
    """Return the command lines with this text."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
    return [line for line in lines if text in line]


def test_prebuilt_image_is_served_and_the_rendered_config_is_not_frozen(site: InstallSite) -> None:
    manifests = read_install_manifests(site.root)
    (rendered,) = (each for each in manifests.list_kind("MachineOSConfig"))
    document: Any = rendered.document
    document["metadata"]["annotations"] = {
        key.PRE_BUILT_IMAGE: f"quay.io/example/os:latest@{DIGEST}"
    }
    (site.root / "manifests/99-image-mode.yaml").write_text(
        "".join(
            f"---\n{json.dumps(each.document)}\n"
            for each in manifests.objects.values()
            if each.kind != "MachineOSConfig"
        )
        + f"---\n{json.dumps(document)}\n"
    )
    with bootstrap(site.root, *ARGUMENTS) as process:
        wait_for_first_boot(process)
        status, config = process.fetch()
        assert status == 200
        files = read_files(config)
    image = f"quay.io/example/os@{DIGEST}"
    # The MCO's bootstrap gives nodes no image annotations (gap d).
    notes = json.loads(files[node_paths.FIRST_BOOT_ANNOTATIONS])
    assert notes[key.DESIRED_OS_IMAGE] == notes[key.CURRENT_OS_IMAGE] == image
    assert json.loads(files[node_paths.ENCAPSULATED_CONFIG])["spec"]["osImageURL"] == image
    # It writes the image into the rendered config, where it stays for all later releases (gap c).
    served = json.loads(files[node_paths.SERVED_CONFIG])
    assert served["spec"]["osImageURL"] == site.base
    names = [path.name for path in (site.root / "machine-configs").iterdir()]
    assert not any("prebuilt" in name for name in names)
    assert not (site.root / ".treenail/registry").exists()


def read_handover(client: Client) -> Handover | None:
    try:
        return read_handover_secret(client.get(SECRETS, HANDOVER_SECRET, namespace=NAMESPACE))
    except NotFoundError:
        return None


def test_handover_ends_the_registry_and_late_machines_need_no_mirror(
    site: InstallSite, tmp_path: Path
) -> None:
    install_config = "controlPlane: {replicas: 2}\n"
    (site.root / "install-config.yaml").write_text(install_config)
    with (
        LabServer(tmp_path / "lab") as server,
        bootstrap(site.root, *ARGUMENTS) as process,
        ExitStack() as stack,
    ):
        wait_for_first_boot(process)
        before = read_files(process.fetch()[1])
        image = read_image(process)
        (site.root / "auth").mkdir()
        shutil.copy(server.admin_kubeconfig, site.root / "auth/kubeconfig")
        transport = stack.enter_context(
            closing(HttpTransport(read_kubeconfig(str(server.admin_kubeconfig)), SystemClock()))
        )
        client = Client(transport)
        published = wait_until(lambda: read_handover(client), limit_s=LIMIT_S)
        (found,) = published.images
        assert found.final_image == image
        kinds = [str(each["kind"]) for each in published.objects]
        assert kinds == ["MachineOSConfig", "Secret", "Secret", "MachineOSBuild"]
        build: Any = published.objects[-1]
        assert build["metadata"]["annotations"][key.CONTENT_KEY]
        assert build["status"]["digestedImagePushSpec"] == image
        waiting = run_install("wait-for", "bootstrap-complete", "--dir", site.root, "--timeout=0s")
        assert waiting.returncode == 1
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "install-config.yaml").write_text(install_config)
        remote = ("wait-for", "bootstrap-complete", f"--dir={elsewhere}", "--timeout=1s",
                  f"--kubeconfig={server.admin_kubeconfig}")  # fmt: skip
        waiting = run_install(*remote)
        assert waiting.returncode == 1
        assert "waiting for controller install" in waiting.stdout
        join_node(client, "master-0", registry=published.registry)
        result = HandoverResult({"master": found.digest}, published.registry, "")
        client.create(CONFIGMAPS, build_result_configmap(result), namespace=NAMESPACE)
        # The registry runs as long as a node pulls from it, and as a machine has not joined.
        process.wait_for_status(
            step="nodes",
            activity="1 of 2 machines of the control plane have joined; "
            f"{published.registry} is still the mirror of node master-0",
        )
        drop_registry(client, "master-0")
        waiting = run_install(*remote)
        assert waiting.returncode == 1, waiting.stdout
        assert "1 of 2 machines of the control plane have joined" in waiting.stdout
        assert has_image(before, image.partition("@")[2])
        join_node(client, "master-1")
        waited = run_install("wait-for", "bootstrap-complete", "--dir", site.root, "--timeout=60s")
        assert waited.returncode == 0, waited.stdout
        assert run_install(*remote).returncode == 0
        files = read_files(process.fetch()[1])
        assert RECORD_FILE not in files
        assert json.loads(files[node_paths.FIRST_BOOT_ANNOTATIONS])[key.DESIRED_OS_IMAGE] == image
        host, _, port = decode_record(before[RECORD_FILE], where=RECORD_FILE).registry.partition(
            ":"
        )
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 1)
        assert process.end(signal.SIGTERM) == 0


def test_handover_above_its_deadline_keeps_the_images(site: InstallSite, tmp_path: Path) -> None:
    with (
        LabServer(tmp_path / "lab") as server,
        bootstrap(
            site.root,
            *ARGUMENTS,
            "--handover-deadline=1s",
            f"--kubeconfig={server.admin_kubeconfig}",
        ) as process,
    ):
        assert process.process.wait(LIMIT_S) == 5
    failure = process.read_status()["failure"]
    assert failure["step"] == "hand-over"
    assert "the time limit of 1s has passed" in failure["reason"]
    place = failure["reason"].partition("the images are kept in ")[2]
    assert place.startswith(f"oci:{site.root}/.treenail/images/master:")
    if shutil.which("skopeo"):
        # The directory has attachments, too: skopeo needs the name.
        inspect = ["skopeo", "inspect", "--format={{.Digest}}", place]
        done = subprocess.run(inspect, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == read_image(process).partition("@")[2], done.stderr
    assert RESULT_CONFIGMAP not in failure["reason"]
    assert "--handover-deadline TIME" in failure["remedy"]
