import base64
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from treenail.config import names
from treenail.daemon.cluster.controller_config import CHECK_INTERVAL_S, ControllerConfigSync
from treenail.daemon.configuration.path_watcher import TouchedPaths
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
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
        """What is told right after somebody wrote or removed it, and inotify said so."""
        if content is None:
            (self.top / path[1:]).unlink()
        else:
            self.write(path, content)
        self.watched.touched = TouchedPaths(frozenset({path}))
        return self.trust.sync_files()

    def told(self, **spec: object) -> tuple[str, ...]:
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


def test_authorities_and_pull_secret_are_put_in_place(machine, pem):
    assert (
        machine.told(
            kubeAPIServerServingCAData=b64(pem),
            imageRegistryBundleData=[{"file": "r.example..5000", "data": b64(pem)}],
            internalRegistryPullSecret=b64(b'{"auths":{}}'),
        )
        == ()
    )

    assert machine.read(names.KUBELET_CA) == pem
    assert machine.read("/etc/docker/certs.d/r.example:5000/ca.crt") == pem
    assert machine.read(INTERNAL) == b'{"auths":{}}\n'
    assert (machine.top / INTERNAL[1:]).stat().st_mode & 0o777 == 0o600
    assert machine.read(names.CLOUD_CA) is None


def test_what_is_no_certificate_is_refused_and_the_former_stays(machine, pem):
    machine.told(kubeAPIServerServingCAData=b64(pem))
    bad = pem.replace(b"M", b"N", 5)

    problems = machine.told(kubeAPIServerServingCAData=b64(bad))

    assert machine.read(names.KUBELET_CA) == pem
    (problem,) = problems
    assert problem == (
        f"what the ControllerConfig has for {names.KUBELET_CA} holds no certificate that can be "
        "read; what is there stays"
    )


def test_half_a_secret_is_not_repeated(machine):
    (problem,) = machine.told(internalRegistryPullSecret=CANARY)

    assert CANARY not in problem
    assert problem.endswith("; what it handed out before stays")


def test_registry_that_is_named_no_more_is_removed_also_after_a_restart(machine, pem):
    machine.told(imageRegistryBundleData=bundle(a=pem, b=pem))
    machine.start()
    machine.told(imageRegistryBundleData=bundle(b=pem))

    assert machine.read("/etc/docker/certs.d/a/ca.crt") is None
    assert machine.read("/etc/docker/certs.d/b/ca.crt") == pem


def test_what_an_administrator_put_there_stays(machine, pem):
    machine.write("/etc/docker/certs.d/mine/ca.crt", pem)
    machine.told(imageRegistryBundleData=bundle(a=pem))
    machine.told()

    assert machine.read("/etc/docker/certs.d/mine/ca.crt") == pem
    assert machine.read("/etc/docker/certs.d/a/ca.crt") is None


def test_controllerconfig_that_is_gone_changes_nothing(machine, pem):
    machine.told(kubeAPIServerServingCAData=b64(pem))
    machine.trust.accept_document(None)

    assert machine.trust.sync_files() == ()
    assert machine.read(names.KUBELET_CA) == pem


def test_nothing_is_written_twice(machine, pem):
    machine.told(kubeAPIServerServingCAData=b64(pem))
    before = (machine.top / names.KUBELET_CA[1:]).stat()
    machine.start()
    machine.told(kubeAPIServerServingCAData=b64(pem))

    assert (machine.top / names.KUBELET_CA[1:]).stat().st_ino == before.st_ino


@pytest.mark.parametrize("content", [None, b"", b"theirs"])
def test_what_somebody_changes_or_removes_is_put_back_at_once(machine, pem, content):
    machine.told(kubeAPIServerServingCAData=b64(pem), internalRegistryPullSecret=b64(b"{}"))

    assert machine.touched(names.KUBELET_CA, content) == ()
    assert machine.read(names.KUBELET_CA) == pem
    assert machine.touched(INTERNAL, content) == ()
    assert machine.read(INTERNAL) == b"{}\n"
    assert machine.watched.paths == {names.KUBELET_CA, INTERNAL}


def test_without_inotify_it_is_put_back_within_a_minute(machine, pem):
    machine.told(imageRegistryBundleData=bundle(a=pem))
    place = "/etc/docker/certs.d/a/ca.crt"
    (machine.top / place[1:]).unlink()

    machine.trust.sync_files()
    assert machine.read(place) is None

    machine.clock.move(CHECK_INTERVAL_S)
    machine.trust.sync_files()
    assert machine.read(place) == pem


def test_directory_that_is_removed_comes_back(machine, pem):
    machine.told(imageRegistryBundleData=bundle(a=pem))
    shutil.rmtree(machine.top / "etc/docker")
    machine.watched.touched = TouchedPaths(is_incomplete=True)

    assert machine.trust.sync_files() == ()
    assert machine.read("/etc/docker/certs.d/a/ca.crt") == pem


def test_who_fights_over_a_file_is_reported_and_not_fed(machine, pem):
    machine.told(kubeAPIServerServingCAData=b64(pem), imageRegistryBundleData=bundle(a=pem))
    for _ in range(3):
        assert machine.touched(names.KUBELET_CA, b"theirs") == ()
    told = (f"something else keeps changing {names.KUBELET_CA}; it is left as it is for an hour",)

    assert machine.touched(names.KUBELET_CA, b"theirs") == told
    assert machine.read(names.KUBELET_CA) == b"theirs"
    # The others are kept as ever.
    place = "/etc/docker/certs.d/a/ca.crt"
    assert machine.touched(place, None) == told
    assert machine.read(place) == pem

    machine.clock.move(3600.0)
    assert machine.trust.sync_files() == ()
    assert machine.read(names.KUBELET_CA) == pem


def test_new_authority_is_written_also_where_two_have_fought(machine, pem, tmp_path_factory):
    machine.told(kubeAPIServerServingCAData=b64(pem))
    for _ in range(4):
        machine.touched(names.KUBELET_CA, b"theirs")
    other = CertificateAuthority(tmp_path_factory.mktemp("other")).file.read_bytes()

    assert machine.told(kubeAPIServerServingCAData=b64(other)) == ()
    assert machine.read(names.KUBELET_CA) == other


def test_authority_before_one_that_is_refused_is_kept_in_place(machine, pem):
    machine.told(kubeAPIServerServingCAData=b64(pem))
    machine.told(kubeAPIServerServingCAData=b64(b"no certificate"))

    (problem,) = machine.touched(names.KUBELET_CA, None)
    assert problem.endswith("holds no certificate that can be read; what is there stays")
    assert machine.read(names.KUBELET_CA) == pem


def test_disk_that_fails_is_told_and_tried_again(machine, pem):
    machine.write("/etc/kubernetes", b"in the way")
    (problem,) = machine.told(kubeAPIServerServingCAData=b64(pem))
    assert "/etc/kubernetes" in problem
    (machine.top / "etc/kubernetes").unlink()

    machine.clock.move(CHECK_INTERVAL_S)
    assert machine.trust.sync_files() == ()
    assert machine.read(names.KUBELET_CA) == pem
