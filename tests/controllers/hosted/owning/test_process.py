"""The controllers ``hosted`` and ``nodepools`` as a process, with real configs and Secrets."""

import base64
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.hosted.config import inputs
from tests.controllers.hosted.owning import site as owned_site
from tests.controllers.hosted.owning.site import URL, CapiActor, OwnedSite
from tests.controllers.installed import account_kubeconfig, apply, denied
from tests.controllers.test_run import running
from tests.fixtures import hosted
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import make_object
from tests.waiting import wait_until
from treenail.kube.api_client import Client
from treenail.kube.resources import CONFIGMAPS, MACHINEDEPLOYMENTS, MACHINES, SECRETS
from treenail.manifests.installation import InstallOptions, build_documents
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = pytest.mark.integration
Json = dict[str, Any]
ENABLE = ("--enable", "hosted,nodepools", "--ignition-url", URL)
LIMIT_S = 15.0


@pytest.fixture
def management(tmp_path: Path) -> Iterator[tuple[LabServer, Client]]:
    with LabServer(tmp_path / "server") as server, open_client(server.admin_kubeconfig) as client:
        owned_site.install_kinds(client)
        yield server, client


def open_site(client: Client, kind: str, number: int = 0) -> OwnedSite:
    """A pool with a release, a pull secret and a config that the generator accepts."""
    site = OwnedSite(client, kind, number=number)
    site.set_secret(inputs.PULL_SECRET.decode())
    site.set_config(json.dumps(inputs.machine_config("50-a", {"/etc/a": "1"})))
    data: Json = {"id_rsa.pub": base64.b64encode(inputs.SSH_KEY).decode()}
    key = make_object(SECRETS, "ssh-key", top={"data": data})
    client.create(SECRETS, key, namespace=site.namespace)
    for document in inputs.make_release():
        client.create(CONFIGMAPS, document, namespace=site.namespace)
    site.create_pool()
    return site


def install(server: LabServer, site: OwnedSite) -> Path:
    """Apply the manifests; return the kubeconfig of the controller's account."""
    options = InstallOptions(
        ("hosted", "nodepools"),
        control_planes={site.plane: ""},
        node_pool_namespaces=(site.namespace,),
    )
    apply(server, build_documents(options))
    return account_kubeconfig(server)


def read_bearer(content: str) -> str:
    document = json.loads(content)
    [source] = document["ignition"]["config"]["merge"]
    assert source["source"] == f"{URL}/ignition"
    headers = {header["name"]: header["value"] for header in source["httpHeaders"]}
    return str(headers["Authorization"]).removeprefix("Bearer ")


def has_machines(site: OwnedSite, actor: CapiActor, *, without: set[str]) -> bool:
    """Let Cluster API act once; return whether the pool is updated to other machines."""
    actor.step()
    conditions = site.conditions()
    names = {machine["metadata"]["name"] for machine in site.list(MACHINES)}
    states = {kind: conditions.get(kind, {}).get("status") for kind in ("Ready", "UpdatingConfig")}
    return (
        states == {"Ready": "True", "UpdatingConfig": "False"}
        and len(names) == 2
        and not names & without
    )


@pytest.mark.parametrize("kind", ["Replace", "InPlace"])
def test_process_owns_a_pool_with_the_printed_permissions(
    management: tuple[LabServer, Client], kind: str, tmp_path: Path
) -> None:
    server, client = management
    site = open_site(client, kind)
    kubeconfig, actor = install(server, site), CapiActor(site)
    with running(kubeconfig, tmp_path / "one.log", *ENABLE) as process:
        wait_until(lambda: has_machines(site, actor, without=set()), limit_s=LIMIT_S)
        process.end(signal.SIGKILL)
    tokens: Any = [each for each in site.list(SECRETS) if each["metadata"]["name"][:5] == "token"]
    [token] = tokens
    bearers = {read_bearer(content) for content in actor.boots.values()}
    assert bearers == {token["data"]["token"]}
    assert base64.b64decode(token["data"]["release-version"]) == inputs.VERSION.encode()
    if kind == "Replace":
        old = {machine["metadata"]["name"] for machine in site.list(MACHINES)}
        site.set_config(json.dumps(inputs.machine_config("50-a", {"/etc/a": "2"})))
        options = (*ENABLE, "--no-leader-election")
        with running(kubeconfig, tmp_path / "two.log", *options) as process:
            wait_until(lambda: has_machines(site, actor, without=old), limit_s=LIMIT_S)
            assert process.end() == 0
        assert sorted(actor.replaced) == sorted(old)
        assert "Traceback" not in process.log.read_text()
    assert denied(server) == frozenset()


def test_taken_over_machines_boot_from_the_same_secret(
    management: tuple[LabServer, Client], tmp_path: Path
) -> None:
    server, client = management
    site = open_site(client, "Replace")
    name = f"user-data-np-{hosted.OLD_HASH}"
    documents = (
        (MACHINEDEPLOYMENTS, hosted.make_machine_deployment(target=hosted.OLD_HASH)),
        (SECRETS, hosted.make_secret(name, data={"value": hosted.encode("old")})),
    )
    for kind, document in documents:
        text = json.dumps(document).replace(hosted.NAMESPACE, site.namespace)
        hosted.add_object(client, kind, json.loads(text))
    before: Any = client.get(SECRETS, name, namespace=site.plane)
    with running(install(server, site), tmp_path / "one.log", *ENABLE):
        wait_until(lambda: "UpdatingConfig" in site.conditions(), limit_s=LIMIT_S)
    after: Any = client.get(SECRETS, name, namespace=site.plane)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert read_bearer(base64.b64decode(after["data"]["value"]).decode())
    owner = site.read_owner()
    assert owner is not None
    assert owner["spec"]["template"]["spec"]["bootstrap"]["dataSecretName"] == name
    assert site.conditions()["UpdatingConfig"]["status"] == "False"
    assert denied(server) == frozenset()
