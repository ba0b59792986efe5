import base64
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from treenail.config import node_paths
from treenail.daemon.cluster.controller_config import CHECK_INTERVAL_S, ControllerConfigSync
from treenail.daemon.configuration.path_watcher import TouchedPaths
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail_lab.apiserver.access.certificates import CertificateAuthority

INTERNAL = "/etc/mco/internal-registry-pull-secret.json"
CANARY = "canary-91ab"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return CertificateAuthority(tmp_path_factory.mktemp("pki")).file.read_bytes()


class Watched:
    """Tells of a path that was touched when the test says so."""

    def __init__(self) -> None:
        self.paths: frozenset[str] = frozenset()
        self.touched = TouchedPaths()

    def watch_paths(self, paths: Iterable[str], *, directories: Iterable[str]) -> None:
        self.paths = frozenset(paths)
        assert not list(directories)

    def take_touched(self) -> TouchedPaths:
        touched, self.touched = self.touched, TouchedPaths()
        return touched


class Machine:
    def __init__(self, top: Path) -> None:
        self.top = top
        self.clock = FakeClock()
        self.start()

    def start(self) -> None:
        self.watched = Watched()
        self.trust = ControllerConfigSync(
            HostFiles(Root(self.top)),
            self.watched,
            self.clock,
            pull_secret=INTERNAL,
            restores_per_hour=3,
        )

    def touched(self, path: str, content: bytes | None) -> tuple[str, ...]:
        """Write or remove the file, report it as inotify would, and return the problems."""
        if content is None:
            (self.top / path[1:]).unlink()
        else:
            self.write(path, content)
        self.watched.touched = TouchedPaths(frozenset({path}))
        return self.trust.sync_files()

    def sync(self, **spec: object) -> tuple[str, ...]:
        self.trust.accept_document({"spec": spec})
        return self.trust.sync_files()

    def read(self, path: str) -> bytes | None:
        found = self.top / path[1:]
        return found.read_bytes() if found.is_file() else None

    def write(self, path: str, content: bytes) -> None:
        found = self.top / path[1:]
        found.parent.mkdir(parents=True, exist_ok=True)
        found.write_bytes(content)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def bundle(**registries: bytes) -> list[dict[str, str]]:
    return [{"file": name, "data": b64(content)} for name, content in registries.items()]


def test_certificates_and_pull_secret_are_written(machine, pem):
    assert (
        machine.sync(
            kubeAPIServerServingCAData=b64(pem),
            imageRegistryBundleData=[{"file": "r.example..5000", "data": b64(pem)}],
            internalRegistryPullSecret=b64(b'{"auths":{}}'),
        )
        == ()
    )

    assert machine.read(node_paths.KUBELET_CA) == pem
    assert machine.read("/etc/docker/certs.d/r.example:5000/ca.crt") == pem
    assert machine.read(INTERNAL) == b'{"auths":{}}\n'
    assert (machine.top / INTERNAL[1:]).stat().st_mode & 0o777 == 0o600
    assert machine.read(node_paths.CLOUD_CA) is None


def test_invalid_certificate_is_rejected_and_previous_stays(machine, pem):
    machine.sync(kubeAPIServerServingCAData=b64(pem))
    bad = pem.replace(b"M", b"N", 5)

    problems = machine.sync(kubeAPIServerServingCAData=b64(bad))

    assert machine.read(node_paths.KUBELET_CA) == pem
    (problem,) = problems
    assert problem == (
        f"cannot write {node_paths.KUBELET_CA}: the ControllerConfig's content for it is no PEM "
        "certificate; the file on disk stays"
    )


def test_invalid_secret_is_not_printed(machine):
    (problem,) = machine.sync(internalRegistryPullSecret=CANARY)

    assert CANARY not in problem
    assert problem.endswith("; the files of its last version stay")


def test_registry_no_longer_listed_is_removed_also_after_restart(machine, pem):
    machine.sync(imageRegistryBundleData=bundle(a=pem, b=pem))
    machine.start()
    machine.sync(imageRegistryBundleData=bundle(b=pem))

    assert machine.read("/etc/docker/certs.d/a/ca.crt") is None
    assert machine.read("/etc/docker/certs.d/b/ca.crt") == pem


def test_users_registry_certificates_stay(machine, pem):
    machine.write("/etc/docker/certs.d/mine/ca.crt", pem)
    machine.sync(imageRegistryBundleData=bundle(a=pem))
    machine.sync()

    assert machine.read("/etc/docker/certs.d/mine/ca.crt") == pem
    assert machine.read("/etc/docker/certs.d/a/ca.crt") is None


def test_missing_controllerconfig_changes_nothing(machine, pem):
    machine.sync(kubeAPIServerServingCAData=b64(pem))
    machine.trust.accept_document(None)

    assert machine.trust.sync_files() == ()
    assert machine.read(node_paths.KUBELET_CA) == pem


def test_unchanged_metrics_are_not_written_again(machine, pem):
    machine.sync(kubeAPIServerServingCAData=b64(pem))
    before = (machine.top / node_paths.KUBELET_CA[1:]).stat()
    machine.start()
    machine.sync(kubeAPIServerServingCAData=b64(pem))

    assert (machine.top / node_paths.KUBELET_CA[1:]).stat().st_ino == before.st_ino


@pytest.mark.parametrize("content", [None, b"", b"theirs"])
def test_changed_or_removed_certificate_is_restored_at_once(machine, pem, content):
    machine.sync(kubeAPIServerServingCAData=b64(pem), internalRegistryPullSecret=b64(b"{}"))

    assert machine.touched(node_paths.KUBELET_CA, content) == ()
    assert machine.read(node_paths.KUBELET_CA) == pem
    assert machine.touched(INTERNAL, content) == ()
    assert machine.read(INTERNAL) == b"{}\n"
    assert machine.watched.paths == {node_paths.KUBELET_CA, INTERNAL}


def test_certificate_is_restored_without_inotify_within_a_minute(machine, pem):
    machine.sync(imageRegistryBundleData=bundle(a=pem))
    place = "/etc/docker/certs.d/a/ca.crt"
    (machine.top / place[1:]).unlink()

    machine.trust.sync_files()
    assert machine.read(place) is None

    machine.clock.move(CHECK_INTERVAL_S)
    machine.trust.sync_files()
    assert machine.read(place) == pem


def test_removed_directory_is_restored(machine, pem):
    machine.sync(imageRegistryBundleData=bundle(a=pem))
    shutil.rmtree(machine.top / "etc/docker")
    machine.watched.touched = TouchedPaths(is_incomplete=True)

    assert machine.trust.sync_files() == ()
    assert machine.read("/etc/docker/certs.d/a/ca.crt") == pem


def test_contested_certificate_is_reported_and_no_longer_restored(machine, pem):
    machine.sync(kubeAPIServerServingCAData=b64(pem), imageRegistryBundleData=bundle(a=pem))
    for _ in range(3):
        assert machine.touched(node_paths.KUBELET_CA, b"theirs") == ()
    path = node_paths.KUBELET_CA
    problems = (f"another program keeps changing {path}; treenail leaves it alone for an hour",)

    assert machine.touched(node_paths.KUBELET_CA, b"theirs") == problems
    assert machine.read(node_paths.KUBELET_CA) == b"theirs"
    # The others are kept as ever.
    place = "/etc/docker/certs.d/a/ca.crt"
    assert machine.touched(place, None) == problems
    assert machine.read(place) == pem

    machine.clock.move(3600.0)
    assert machine.trust.sync_files() == ()
    assert machine.read(node_paths.KUBELET_CA) == pem


def test_new_certificate_is_written_to_a_contested_file(machine, pem, tmp_path_factory):
    machine.sync(kubeAPIServerServingCAData=b64(pem))
    for _ in range(4):
        machine.touched(node_paths.KUBELET_CA, b"theirs")
    other = CertificateAuthority(tmp_path_factory.mktemp("other")).file.read_bytes()

    assert machine.sync(kubeAPIServerServingCAData=b64(other)) == ()
    assert machine.read(node_paths.KUBELET_CA) == other


def test_previous_certificate_stays_after_an_invalid_one(machine, pem):
    machine.sync(kubeAPIServerServingCAData=b64(pem))
    machine.sync(kubeAPIServerServingCAData=b64(b"no certificate"))

    (problem,) = machine.touched(node_paths.KUBELET_CA, None)
    assert problem.endswith("is no PEM certificate; the file on disk stays")
    assert machine.read(node_paths.KUBELET_CA) == pem


def test_failing_disk_is_reported_and_retried(machine, pem):
    machine.write("/etc/kubernetes", b"blocking")
    (problem,) = machine.sync(kubeAPIServerServingCAData=b64(pem))
    assert "/etc/kubernetes" in problem
    (machine.top / "etc/kubernetes").unlink()

    machine.clock.move(CHECK_INTERVAL_S)
    assert machine.trust.sync_files() == ()
    assert machine.read(node_paths.KUBELET_CA) == pem
