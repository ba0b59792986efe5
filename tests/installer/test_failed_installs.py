"""Failing installations: exit code, sentence, log bundle, and completion after the fix."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.builder.base_image import BUSYBOX
from tests.builder.builds import push_base
from tests.builder.sandboxing import has_namespaces
from tests.fixtures.controllers import open_client, run_controllers
from tests.fixtures.files import read_parts
from tests.fixtures.objects import install_kinds
from tests.installer.adoption import create_rendered_pool
from tests.installer.asking_machine import AskingMachine
from tests.installer.failures import FAILURES, NEEDS_BUILDAH, BrokenSite
from tests.installer.joined_nodes import join_node
from tests.installer.pool_builds import InstallSite, make_secret
from tests.installer.processes import run_install
from tests.registry.real_registry import (
    PULLER,
    RegistryService,
    lab_registry,
    needs_docker_registry,
)
from treenail.api.component_names import NAMESPACE
from treenail.clocks import SystemClock
from treenail.controllers.handover.controller import InstallController
from treenail.controllers.handover.handover_objects import (
    HANDOVER_SECRET,
    HandoverResult,
    build_result_configmap,
    read_handover_secret,
)
from treenail.controllers.handover.image_mover import ImageMover
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.errors import NotFoundError
from treenail.installer.directory.install_manifests import read_install_manifests
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import CONFIGMAPS, CONTROLLERCONFIGS, NAMESPACES, SECRETS
from treenail_lab.apiserver.serving.server import LabServer

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]


class HandoverStandIn:
    """Answers in place of the controller ``install``, which has tests of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            with suppress(NotFoundError):
                secret = self._client.get(SECRETS, HANDOVER_SECRET, namespace=NAMESPACE)
                handover = read_handover_secret(secret)
                digests = {each.pool: each.digest for each in handover.images}
                result = HandoverResult(digests, handover.registry, "2026-01-01T00:00:00Z")
                document = build_result_configmap(result)
                self._client.create(CONFIGMAPS, document, namespace=NAMESPACE)
                return


@contextmanager
def start_cluster(site: BrokenSite, place: Path) -> Iterator[None]:
    """The cluster, as far as the installation needs it now."""
    kubeconfig = site.install.directory.kubeconfig
    if site.asks_at:
        with AskingMachine(site.install, site.asks_at).run():
            yield
        return
    if not site.needs_cluster:
        yield
        return
    with LabServer(place) as server, open_client(server.admin_kubeconfig) as client:
        kubeconfig.parent.mkdir(exist_ok=True)
        shutil.copy(server.admin_kubeconfig, kubeconfig)
        stand_in = HandoverStandIn(client)
        client.create(NAMESPACES, {"metadata": {"name": NAMESPACE}})
        for secret in site.published:
            client.create(SECRETS, secret, namespace=NAMESPACE)
        if site.can_join:
            join_node(client)
        try:
            if site.has_controller:
                with run_late_controller(site, client):
                    yield
                return
            if site.can_hand_over:
                stand_in.start()
            yield
        finally:
            if site.can_hand_over and not site.has_controller:
                stand_in.stop()
            site.published = [
                {"metadata": {"name": HANDOVER_SECRET}, "type": each["type"], "data": each["data"]}
                for each in client.list(SECRETS, namespace=NAMESPACE).items
                if each["metadata"]["name"] == HANDOVER_SECRET
            ]


@contextmanager
def run_late_controller(site: BrokenSite, client: Client) -> Iterator[None]:
    """Run the controller ``install`` as soon as the bootstrap registry has lost its content."""
    if not site.loses_registry:
        with run_controller(site, client):
            yield
        return
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.1):
            with suppress(NotFoundError):
                client.get(SECRETS, HANDOVER_SECRET, namespace=NAMESPACE)
                shutil.rmtree(site.install.directory.registry / "storage/docker")
                with run_controller(site, client):
                    ended.wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)


@contextmanager
def run_controller(site: BrokenSite, client: Client) -> Iterator[None]:
    """Run the controller ``install`` in the cluster, which has the objects of the installer."""
    install_kinds(client)
    manifests = read_install_manifests(site.install.root)
    for each in manifests.list_kind(CONTROLLERCONFIGS.kind):
        client.create(CONTROLLERCONFIGS, each.document)
    create_rendered_pool(client, site.install)
    pull = make_secret(
        "global-pull-secret-copy", site.install.registry.make_auth_json(PULLER), NAMESPACE
    )
    client.create(SECRETS, pull, namespace=NAMESPACE)
    clock = SystemClock()
    controller = InstallController(
        client,
        clock,
        EventRecorder(client, "treenail-controller", "test", clock),
        ImageMover(ClusterReader(client, clock, namespace=NAMESPACE), clock),
    )
    with run_controllers(client, controller, workers=1):
        yield


def run_bootstrap(site: BrokenSite, *arguments: str) -> tuple[int, str]:
    defaults = ("--host=127.0.0.1", "--listen=127.0.0.1:0", "--registry-listen=127.0.0.1:0",
                "--registry-storage-limit=200Mi", "--stop-when-complete")  # fmt: skip
    done = run_install("bootstrap", "--dir", site.install.root, *defaults, *arguments)
    return done.returncode, done.stderr


# The other cases guard the way from the cause to the sentence; these differ in the cause alone.
@pytest.mark.long("containerfile")
@pytest.mark.long("architecture")
@pytest.mark.long("deadline")
@pytest.mark.long("port")
@pytest.mark.long("registry_port")
@pytest.mark.long("first_boot")
@pytest.mark.long("join")
@pytest.mark.long("clock")
@pytest.mark.long("final_login")
@pytest.mark.long("registry")
@pytest.mark.long("machine_registry")
@pytest.mark.parametrize("name", FAILURES)
def test_failed_installation_names_its_reason_and_completes_after_the_fix(
    name: str, tmp_path: Path, lab_registry: RegistryService
) -> None:
    can_build = has_namespaces() and BUSYBOX is not None and shutil.which("buildah") is not None
    if name in NEEDS_BUILDAH and not can_build:
        pytest.skip("this host cannot build a Containerfile")
    root = tmp_path / "cluster"
    root.mkdir()
    site = BrokenSite(InstallSite(root, lab_registry, namespace=NAMESPACE))
    if name in NEEDS_BUILDAH:
        site.install.base = push_base(lab_registry, tmp_path)
    else:
        site.install.push_base()
    breakage = FAILURES[name](site)
    expected = next(breakage)
    with start_cluster(site, tmp_path / "api"):
        code, errors = run_bootstrap(site, *expected.arguments)
    assert code == 5, errors
    assert "Traceback" not in errors
    waited = run_install("wait-for", "bootstrap-complete", "--dir", root)
    assert waited.returncode == 5
    assert f"the installation failed in step {expected.step}: " in waited.stdout, waited.stdout
    for part in (*expected.reason, expected.remedy):
        assert part in waited.stdout
        assert part in errors
    bundle = tmp_path / "bundle.tar.gz"
    assert run_install("gather", "--dir", root, "-o", bundle).returncode == 0
    parts = read_parts(bundle.read_bytes())
    summary = parts["bootstrap/treenail/summary.txt"].decode()
    for part in expected.reason:
        assert part in summary
    for file in expected.files:
        assert any(file in each for each in parts), sorted(parts)
    assert b"Canary" not in b"".join(parts.values())
    # The fix.
    assert next(breakage, None) is None
    with start_cluster(site, tmp_path / "api"):
        code, errors = run_bootstrap(site)
    assert code == 0, errors
    assert run_install("wait-for", "bootstrap-complete", "--dir", root).returncode == 0
