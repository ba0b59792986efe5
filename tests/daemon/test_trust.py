import base64
from pathlib import Path

import pytest

from treenail.config import names
from treenail.daemon.trust import Trust
from treenail.host.files import Files
from treenail.host.root import Root
from treenail.lab.apiserver.pki import Authority

INTERNAL = "/etc/mco/internal-registry-pull-secret.json"
CANARY = "canary-91ab"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return Authority(tmp_path_factory.mktemp("pki")).file.read_bytes()


class Machine:
    def __init__(self, top: Path) -> None:
        self.top = top
        self.start()

    def start(self) -> None:
        self.trust = Trust(Files(Root(self.top)), pull_secret=INTERNAL)

    def told(self, **spec: object) -> tuple[str, ...]:
        self.trust.offer({"spec": spec})
        return self.trust.refresh()

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
    machine.trust.offer(None)

    assert machine.trust.refresh() == ()
    assert machine.read(names.KUBELET_CA) == pem


def test_nothing_is_written_twice(machine, pem):
    machine.told(kubeAPIServerServingCAData=b64(pem))
    before = (machine.top / names.KUBELET_CA[1:]).stat()
    machine.start()
    machine.told(kubeAPIServerServingCAData=b64(pem))

    assert (machine.top / names.KUBELET_CA[1:]).stat().st_ino == before.st_ino
