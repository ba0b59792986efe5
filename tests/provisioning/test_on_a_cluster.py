"""The server with its manifests and its account, on a real API server."""

import base64
import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.contract.client import Cluster
from tests.fixtures.clusters import REAL
from tests.fixtures.objects import collection_of
from tests.provisioning.process import run_server
from tests.provisioning.samples import IMAGE, NEW, OLD, Json, make_config, make_file, make_pool
from tests.provisioning.serving import LIMIT_S
from tests.waiting import wait_until
from treenail.cli.controller.main import main
from treenail.manifests.ignition_server import (
    CERTIFICATE_SECRET,
    NAME,
    build_server_documents,
)
from treenail.manifests.installation import InstallOptions
from treenail.provisioning.machines.request_log import REQUEST_CONFIGMAP
from treenail.provisioning.tokens.token_store import TOKEN_SECRET
from treenail.provisioning.tokens.tokens import read_name
from treenail_lab.apiserver.access.certificates import render_kubeconfig

pytestmark = [pytest.mark.integration]
MCO = "/apis/machineconfiguration.openshift.io/v1"


@dataclass(frozen=True, slots=True)
class Installed:
    """The real cluster with the server installed in a namespace of the test's own."""

    cluster: Cluster
    namespace: str

    def path(self, plural: str, name: str = "") -> str:
        return "/".join(filter(None, [f"/api/v1/namespaces/{self.namespace}/{plural}", name]))


@pytest.fixture(params=[REAL])
def installed(real_kubeconfig: Path) -> Iterator[Installed]:
    """The real cluster with the manifests of the server, a pool, and two rendered configs."""
    found = Cluster.of_kubeconfig(real_kubeconfig)
    # A namespace is never gone without its controller.
    namespace = f"treenail-test-{secrets.token_hex(3)}"
    made = [
        *build_server_documents(InstallOptions(), namespace),
        make_config(OLD, make_file("/etc/old")),
        make_config(NEW, make_file("/etc/new")),
        make_pool(osImage=IMAGE),
    ]
    try:
        # Twice, as an upgrade does.
        for document in [*made, *made]:
            path = f"{collection_of(document)}/{document['metadata']['name']}"
            body = {name: value for name, value in document.items() if name != "status"}
            body["metadata"] = {**document["metadata"]}
            for field in ("managedFields", "generation"):
                body["metadata"].pop(field, None)
            found.apply(path, body, "tests").ok()
        yield Installed(found, namespace)
    finally:
        for document in reversed(made):
            found.delete(f"{collection_of(document)}/{document['metadata']['name']}")


def write_account_kubeconfig(installed: Installed, admin: Path, path: Path) -> Cluster:
    """Write a kubeconfig with a token of the server's account; return a client of the account."""
    cluster, account = installed.cluster, installed.path("serviceaccounts", NAME)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = cluster.post(f"{account}/token", request).ok()["status"]["token"]
    server = yaml.safe_load(admin.read_text())["clusters"][0]["cluster"]
    authority = base64.b64decode(server["certificate-authority-data"])
    path.write_text(
        render_kubeconfig(server=server["server"], authority=authority, user="server", token=token)
    )
    return cluster.as_bearer(token)


def write_counts(cluster: Cluster, updated: int) -> None:
    """Write the pool's status as the rollout controller does."""
    pools = f"{MCO}/machineconfigpools/worker"
    generation = cluster.get(pools).ok()["metadata"]["generation"]
    status = {**make_pool(updated=updated)["status"], "observedGeneration": generation}
    cluster.patch(f"{pools}/status", {"status": status}).ok()


@contextmanager
def node_with_image(cluster: Cluster, image: str) -> Iterator[None]:
    """Create a Node that reports the image, and delete it afterwards."""
    name = f"treenail-test-{secrets.token_hex(3)}"
    annotations = {"machineconfiguration.openshift.io/currentOSImage": image}
    cluster.post("/api/v1/nodes", {"metadata": {"name": name, "annotations": annotations}}).ok()
    try:
        yield
    finally:
        cluster.delete(f"/api/v1/nodes/{name}")


def test_server_serves_the_new_config_after_one_node_has_it(
    installed: Installed, real_kubeconfig: Path, tmp_path: Path
) -> None:
    cluster = installed.cluster
    kubeconfig = tmp_path / "kubeconfig"
    write_account_kubeconfig(installed, real_kubeconfig, kubeconfig)
    write_counts(cluster, updated=0)
    with run_server(tmp_path, f"--kubeconfig={kubeconfig}") as running:
        wait_until(lambda: running.fetch()[0] == 200, limit_s=LIMIT_S)
        text = str(running.fetch()[1])
        assert "/etc/old" in text
        assert "/etc/new" not in text
        write_counts(cluster, updated=1)
        wait_until(lambda: "/etc/new" in str(running.fetch()[1]), limit_s=LIMIT_S)
        assert "/etc/old" not in str(running.fetch()[1])
        assert f"no node of pool worker runs {IMAGE} yet" in running.log.read_text()
        with node_with_image(cluster, IMAGE):
            named = f"from {NEW}; image: the pool names the image {IMAGE}"
            wait_until(
                lambda: running.fetch()[0] == 200 and named in running.log.read_text(),
                limit_s=LIMIT_S,
            )
        log = running.log.read_text()
        assert "disconnected" not in log


def test_machine_without_a_node_has_an_event_and_needs_a_user(
    installed: Installed,
    real_kubeconfig: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster, namespace = installed.cluster, installed.namespace
    kubeconfig = tmp_path / "kubeconfig"
    write_account_kubeconfig(installed, real_kubeconfig, kubeconfig)
    write_counts(cluster, updated=1)
    admin = ("--kubeconfig", str(real_kubeconfig), "-n", namespace)
    assert main(["token", "create", "--pool=worker", *admin]) == 0
    (token,) = re.findall(r"tn_[a-z0-9]+_[A-Za-z0-9_-]+", capsys.readouterr().out)
    arguments = (f"--kubeconfig={kubeconfig}", f"--namespace={namespace}", "--tokens=require")
    with run_server(tmp_path, *arguments, "--expect=0s") as running:
        wait_until(lambda: running.fetch(token=token)[0] == 200, limit_s=LIMIT_S)
        (event,) = wait_until(lambda: list_events(cluster), limit_s=LIMIT_S)
        log = running.log.read_text()
    uid = cluster.get(f"{MCO}/machineconfigpools/worker").ok()["metadata"]["uid"]
    assert event["involvedObject"]["uid"] == uid
    assert f"for 127.0.0.1 (token {read_name(token)}); last known step" in event["message"]
    assert main(["machines", "--expect=0s", "-o", "json", *admin]) == 3
    shown = capsys.readouterr().out
    (request, *_) = json.loads(shown)["requests"]
    assert (request["outcome"], request["node"]["arrival"]) == ("served", "missing")
    stored = cluster.get(installed.path("configmaps", REQUEST_CONFIGMAP)).ok()["data"]
    for text in (log, shown, str(stored), str(event)):
        assert token not in text
        assert token.rpartition("_")[2] not in text
    cluster.delete(f"/api/v1/namespaces/default/events/{event['metadata']['name']}")


def list_events(cluster: Cluster) -> list[Json]:
    """Return the Events about machines without a Node."""
    found: list[Json] = cluster.get("/api/v1/namespaces/default/events").ok()["items"]
    return [each for each in found if each["reason"] == "NodeNotAppeared"]


def test_account_of_the_server_reaches_only_its_objects(
    installed: Installed, real_kubeconfig: Path, tmp_path: Path
) -> None:
    account = write_account_kubeconfig(installed, real_kubeconfig, tmp_path / "kubeconfig")
    tokens = installed.path("secrets", TOKEN_SECRET)
    requests = installed.path("configmaps", REQUEST_CONFIGMAP)
    account.put(requests, {**account.get(requests).ok(), "data": {"kept": "eA=="}}).ok()
    version = account.get(tokens).ok()["metadata"]["resourceVersion"]
    change = {"metadata": {"resourceVersion": version}, "data": {"kept": "eA=="}}
    account.patch(tokens, change).ok()
    assert account.patch(tokens, change).code == 409
    for path in (
        installed.path("secrets"),
        installed.path("secrets", CERTIFICATE_SECRET),
        installed.path("configmaps"),
        "/api/v1/secrets",
        # For Events about missing Nodes it lists them.
        "/api/v1/nodes/x",
        "/api/v1/namespaces/default/events",
        "/api/v1/pods",
    ):
        assert account.get(path).code == 403, path
    assert account.delete(tokens).code == 403
    assert account.post(installed.path("secrets"), {"metadata": {"name": "x"}}).code == 403
    assert account.patch(f"{MCO}/machineconfigpools/worker", {"spec": {}}).code == 403
    (secret,) = [
        each
        for each in build_server_documents(InstallOptions(), installed.namespace)
        if each["kind"] == "Secret"
    ]
    assert installed.cluster.apply(tokens, secret, "tests").ok()["data"] == {"kept": "eA=="}
