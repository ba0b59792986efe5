"""A machine with nothing but user data joins the lab's cluster by the real Ignition."""

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.integration.commands import treenail_lab
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.config import node_paths
from treenail.errors import HostError, NotFoundError
from treenail.kube.api_client import Json
from treenail.kube.resources import (
    CERTIFICATESIGNINGREQUESTS,
    MACHINECONFIGPOOLS,
    NODES,
    SECRETS,
)
from treenail_lab.cluster import POOL, Lab, LabPlan
from treenail_lab.controllers import ALL_CONTROLLERS, ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.images import Credential, make_image
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.ignition import ignition
from treenail_lab.machine.node.machine import KUBELET_CONFIG, LabMachine
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.provision import (
    STOCK,
    ConfigServer,
    build_login_config,
    install_new_machine,
    is_pool_updated,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(ignition.find_refusal()), reason=ignition.find_refusal() or "none"),
]
IMAGE = make_image("os/node", "2", 5_000_000, credential=Credential("puller", "canary-56"))
LIMIT_S = 60.0
NEW = "worker-1"


@dataclass(frozen=True, slots=True)
class Site:
    lab: Lab
    server: ConfigServer
    controllers: ControllerReplicas

    def list_requests(self) -> list[Json]:
        return [*self.lab.client.list(CERTIFICATESIGNINGREQUESTS).items]

    def install(self, user_data: bytes) -> LabMachine:
        return install_new_machine(self.lab, NEW, STOCK, self.server, user_data)

    def read_notes(self) -> dict[str, str]:
        """The Node's annotations; empty before it exists."""
        try:
            return self.lab.read_annotations(NEW)
        except NotFoundError:
            return {}

    def find_rendered(self) -> str:
        """The name of the pool's rendered config."""
        found = self.lab.client.get(MACHINECONFIGPOOLS, POOL)
        return MachineConfigPool.from_json(found).status_configuration.name

    def has_secret(self, name: str) -> bool:
        try:
            self.lab.client.get(SECRETS, name, namespace="kube-system")
        except NotFoundError:
            return False
        return True

    def is_ready(self) -> bool:
        try:
            node = self.lab.client.get(NODES, NEW)
        except NotFoundError:
            return False
        # The kubelet registers the Node before it reports its status.
        status = node.get("status") or {}
        assert isinstance(status, dict)
        conditions = status.get("conditions") or []
        return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)


@pytest.fixture
def site() -> Iterator[Site]:
    """A cluster whose node has the pool's image, and a server of its config."""
    plan = LabPlan(
        ("worker-0",),
        (IMAGE,),
        machine_settings=MachineSettings(pull_bytes_per_s=1e9, staging_s=0.02),
    )
    with ExitStack() as stack:
        directory = stack.enter_context(owner.temporary_directory())
        lab = stack.enter_context(Lab(directory, plan))
        controllers = ControllerReplicas(lab, enable=(*ALL_CONTROLLERS, "approve"))
        controllers.create_manifests()
        pool.create_pool(lab, IMAGE.pull_spec)
        lab.add_config(build_login_config(lab))
        lab.add_image(STOCK)
        stack.callback(controllers.stop)
        controllers.start_replica()
        server = ConfigServer(lab)
        stack.callback(server.stop)
        server.start()
        wait_until(lambda: is_pool_updated(lab), limit_s=LIMIT_S)
        yield Site(lab, server, controllers)


def find_token(user_data: bytes) -> str:
    (reference,) = json.loads(user_data)["ignition"]["config"]["merge"]
    (header,) = reference["httpHeaders"]
    return str(header["value"]).removeprefix("Bearer ")


def find_files(root: Path, text: str) -> list[Path]:
    found = [each for each in root.rglob("*") if each.is_file() and not each.is_symlink()]
    return [each for each in found if text.encode() in each.read_bytes()]


def test_machine_with_user_data_joins_with_the_image_of_its_pool(site: Site) -> None:
    user_data = site.server.create_pointer_config()
    machine = site.install(user_data)
    machine.start()
    wait_until(lambda: site.read_notes().get(key.STATE) == "Done", limit_s=LIMIT_S)
    wait_until(site.is_ready, limit_s=LIMIT_S)
    booted = machine.booted_deployment
    assert booted is not None
    assert (booted.digest, machine.boot_count) == (IMAGE.digest, 2)
    served = json.loads((machine.root / node_paths.SERVED_CONFIG[1:]).read_text())
    notes = site.read_notes()
    assert notes[key.CURRENT_CONFIG] == served["metadata"]["name"]
    assert notes[key.CURRENT_OS_IMAGE] == IMAGE.pull_spec
    secret = machine.root / KUBELET_CONFIG
    assert (secret.stat().st_mode & 0o777, "auths" in secret.read_text()) == (0o600, True)
    assert not (machine.root / node_paths.ENCAPSULATED_CONFIG[1:]).exists()
    check_kubelet_joined(site, machine)
    token = find_token(user_data)
    assert find_files(machine.root.parent, token) == []
    log = site.server.log.read_text()
    assert "served config of pool worker" in log
    assert token not in log


def check_kubelet_joined(site: Site, machine: LabMachine) -> None:
    """Its kubelet has a certificate for the bootstrap token that the served config had."""
    bootstrap = machine.root / node_paths.KUBECONFIG[1:]
    (user,) = yaml.safe_load(bootstrap.read_text())["users"]
    identity = user["user"]["token"].partition(".")[0]
    (request,) = site.list_requests()
    spec, status = request["spec"], request["status"]
    assert isinstance(spec, dict)
    assert isinstance(status, dict)
    assert spec["username"] == f"system:bootstrap:{identity}"
    (condition,) = status["conditions"]
    assert (condition["type"], condition["reason"]) == ("Approved", "TreenailAccessToken")
    kubeconfig = machine.root / "var/lib/kubelet/kubeconfig"
    assert kubeconfig.stat().st_mode & 0o777 == 0o600
    (credential,) = yaml.safe_load(kubeconfig.read_text())["users"]
    assert base64.b64decode(credential["user"]["client-certificate-data"]) == base64.b64decode(
        status["certificate"]
    )
    # The bootstrap token has done its work: the Node has the name in the certificate.
    name = f"bootstrap-token-{identity}"
    wait_until(lambda: not site.has_secret(name), limit_s=LIMIT_S)


def test_machine_joins_when_its_certificate_is_approved_later(site: Site) -> None:
    site.controllers.stop_replica()
    machine = site.install(site.server.create_pointer_config())
    machine.start()
    wait_until(site.list_requests, limit_s=LIMIT_S)
    assert site.read_notes() == {}
    # The kubelet uses its key again after a restart of the machine.
    machine.reboot()
    site.controllers.start_replica()
    wait_until(site.is_ready, limit_s=LIMIT_S)
    assert len(site.list_requests()) == 1


@pytest.mark.parametrize("token", ["", "tn_abcdef_wrong"])
def test_machine_without_a_valid_token_receives_no_byte(site: Site, token: str) -> None:
    pointer = json.loads(site.server.create_pointer_config())
    (reference,) = pointer["ignition"]["config"]["merge"]
    if token:
        reference["httpHeaders"] = [{"name": "Authorization", "value": f"Bearer {token}"}]
    else:
        del reference["httpHeaders"]
    machine = site.install(json.dumps(pointer).encode())
    with pytest.raises(HostError, match="failed to fetch resource"):
        machine.start()
    assert not machine.is_on
    assert find_files(machine.root.parent, site.find_rendered()) == []
    assert site.read_notes() == {}


def test_lab_provisions_no_machine_beside_a_registry() -> None:
    done = treenail_lab("up", "--provision", "--registry")
    assert done.returncode == 2
    assert "cannot use --provision with --registry" in done.stderr


def test_node_of_a_new_machine_appears_after_its_first_boot(site: Site) -> None:
    """The machine loses its power while it pulls, and begins again."""
    machine = site.install(site.server.create_pointer_config())
    machine.change_settings(pull_bytes_per_s=1e6)
    machine.start()
    wait_until(
        lambda: any("staging" in str(each["MESSAGE"]) for each in machine.read_journal()),
        limit_s=LIMIT_S,
    )
    assert site.read_notes() == {}
    machine.cut_power()
    machine.change_settings(pull_bytes_per_s=1e9)
    wait_until(lambda: site.read_notes().get(key.STATE) == "Done", limit_s=LIMIT_S)
    assert machine.boot_count == 3
