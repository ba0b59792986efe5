"""treenail's config server beside the machine-config-server of the MCO, on one cluster of the lab.

TREENAIL_TEST_MCS names the program. It reads a bootstrap token from /etc/mcs, so that it runs in a
mount namespace of its own. docs/fidelity.md lists the differences.
"""

import http.client
import json
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.contract.client import Cluster
from tests.fixtures.objects import collection_of
from tests.mco import programs
from tests.oracle import rendered
from tests.provisioning.process import run_server
from tests.provisioning.samples import (
    NEW,
    OLD,
    make_config,
    make_controller_config,
    make_file,
    make_pool,
)
from tests.provisioning.serving import IGNITION, LIMIT_S
from tests.waiting import wait_until
from treenail.api.decode import Fields
from treenail.api.ignition.model import Contents
from treenail.config import node_paths
from treenail.config.ignition.emit import VERSIONS_SERVED
from treenail.manifests import installation
from treenail_lab.apiserver.serving.server import LabServer
from treenail_lab.install.install_run import find_free_port
from treenail_lab.kubelet import runtime

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(runtime.find_refusal()), reason=runtime.find_refusal() or "none"),
]
SERVER = programs.Variable("TREENAIL_TEST_MCS", "the program machine-config-server")
POOLS = "/apis/machineconfiguration.openshift.io/v1/machineconfigpools"
OWN_ETC = """\
mount -t tmpfs none /etc && mkdir -p /etc/mcs/bootstrap-token && cd /etc/mcs/bootstrap-token &&
echo token >token && echo authority >ca.crt && exec "$@"
"""
REGISTRY_CA = f"{node_paths.REGISTRY_CAS}/registry.example:5000/ca.crt"
PARSED = (
    node_paths.FIRST_BOOT_ANNOTATIONS,
    node_paths.SERVED_CONFIG,
    node_paths.ENCAPSULATED_CONFIG,
)
UNIT = "[Unit]\nDescription=a\n[Install]\nWantedBy=multi-user.target\n"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the two servers."""

    port: int
    authority: bytes

    def send(self, path: str, version: str = "3.5.0", method: str = "GET") -> tuple[int, bytes]:
        context = ssl.create_default_context(cadata=self.authority.decode())
        client = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=LIMIT_S, context=context
        )
        try:
            client.request(method, path, headers={"Accept": IGNITION.format(version)})
            found = client.getresponse()
            return found.status, found.read()
        finally:
            client.close()

    def fetch(self, pool: str, version: str) -> Json:
        status, body = self.send(f"/config/{pool}", version)
        assert status == 200, body
        found: Json = json.loads(body)
        return found


@dataclass(frozen=True, slots=True)
class Servers:
    own: Endpoint
    mco: Endpoint
    pools: tuple[str, ...]


def list_configs() -> dict[str, Json]:
    """The rendered config of each pool: one of every kind of entry, and the recorded ones."""
    drop_in = {"name": "10-a.conf", "contents": "[Service]\nEnvironment=A=b\n"}
    found = {
        "worker": make_config(
            NEW,
            make_file("/etc/a", "a\nb c", mode=0o600),
            make_file("/etc/b", "", user={"name": "core"}),
            kernelArguments={"shouldExist": ["a=1"]},
            passwd={"users": [{"name": "core", "sshAuthorizedKeys": ["ssh-ed25519 a"]}]},
            systemd={
                "units": [
                    {"name": "a.service", "enabled": True, "contents": UNIT},
                    {"name": "b.service", "dropins": [drop_in]},
                    {"name": "c.service", "mask": True},
                ]
            },
        )
    }
    for path in rendered():
        document = yaml.safe_load(path.read_text())
        document["metadata"] = {"name": document["metadata"]["name"]}
        found[path.stem.split("-", 1)[1].rpartition("-")[0] + "-recorded"] = document
    return found


def create_pool(cluster: Cluster, name: str, new: str, *, observed_generation: int = 1) -> None:
    """Create a pool with a node that has its config."""
    pool = make_pool(name=name, new=new)
    cluster.post(POOLS, {key: pool[key] for key in pool if key != "status"}).ok()
    status = {**pool["status"], "observedGeneration": observed_generation}
    cluster.patch(f"{POOLS}/{name}/status", {"status": status}).ok()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    program, directory = SERVER.read(), tmp_path_factory.mktemp("servers")
    with LabServer(directory / "api") as lab, ExitStack() as stack:
        cluster = Cluster.of_kubeconfig(lab.admin_kubeconfig)
        configs = list_configs()
        for document in (*installation.load_crds(), make_controller_config(), *configs.values()):
            cluster.post(collection_of(document), document).ok()
        for name, config in configs.items():
            create_pool(cluster, name, config["metadata"]["name"])
        cluster.post(collection_of(make_config()), make_config(OLD)).ok()
        create_pool(cluster, "stale", NEW, observed_generation=0)
        (directory / "own").mkdir()
        running = stack.enter_context(
            run_server(directory / "own", f"--kubeconfig={lab.admin_kubeconfig}")
        )
        certificate = directory / "own/serving.pem"
        port = find_free_port()
        command = [
            *("unshare", "--mount", "sh", "-c", OWN_ETC, "sh", str(program), "start"),
            *(f"--kubeconfig={lab.admin_kubeconfig}", "--apiserver-url=https://api.example:6443"),
            *(f"--cert={certificate}", f"--key={certificate}"),
            *(f"--secure-port={port}", f"--insecure-port={find_free_port()}"),
        ]
        with (directory / "mcs.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(process.wait, LIMIT_S)
        stack.callback(process.kill)
        found = Servers(
            Endpoint(running.port, running.ca), Endpoint(port, running.ca), tuple(configs)
        )

        def is_serving() -> bool:
            try:
                return all(each.send("/config/worker")[0] == 200 for each in (found.own, found.mco))
            except OSError:
                return False

        wait_until(is_serving, limit_s=LIMIT_S)
        yield found


def decode_files(config: Json) -> dict[str, Json]:
    """Return the files by path with their decoded or parsed contents."""
    found: dict[str, Json] = {}
    for file in config["storage"]["files"]:
        assert file["path"] not in found
        contents = Contents.from_fields(Fields(file.get("contents") or {}, "", ValueError))
        text: Any = contents.decode_bytes()
        if file["path"] in PARSED:
            text = json.loads(text)
        found[file["path"]] = {**file, "contents": text}
    return found


def drop_empty(value: Any) -> Any:
    """Drop empty fields, which Go writes."""
    if isinstance(value, dict):
        found = {name: drop_empty(each) for name, each in value.items()}
        return {name: each for name, each in found.items() if each not in (None, False, "", [], {})}
    return [drop_empty(each) for each in value] if isinstance(value, list) else value


def simplify_config(document: Json) -> Json:
    """Return the name and the spec of a MachineConfig, without its kernel arguments.

    The MCO repeats them in both files (`test_mco_repeats_kernel_arguments_of_old_clients`).
    """
    spec = drop_empty(document["spec"])
    spec.pop("kernelArguments", None)
    return {"name": document["metadata"]["name"], **spec}


@pytest.mark.parametrize("version", [each for each in VERSIONS_SERVED if each != "3.0.0"])
def test_both_serve_the_same_config(servers: Servers, version: str) -> None:
    for pool in servers.pools:
        own, mco = (each.fetch(pool, version) for each in (servers.own, servers.mco))
        files, others = decode_files(own), decode_files(mco)
        # Without --bootstrap-token the server has none to give away.
        kubeconfig = others.pop(node_paths.KUBECONFIG)
        assert kubeconfig["mode"] == 0o644
        # The daemon of the MCO writes it after the machine has joined.
        assert files.pop(REGISTRY_CA)["contents"] == b"registry ca"
        for found in (files, others):
            for path in (node_paths.SERVED_CONFIG, node_paths.ENCAPSULATED_CONFIG):
                found[path]["contents"] = simplify_config(found[path]["contents"])
        served = files[node_paths.SERVED_CONFIG], others[node_paths.SERVED_CONFIG]
        assert [each.pop("mode") for each in served] == [0o600, 0o644]
        assert files == others
        for config in (own, mco):
            del config["storage"]["files"]
        assert drop_empty(own) == drop_empty(mco)


def test_mco_serves_a_new_config_by_the_counts_of_an_older_one(servers: Servers) -> None:
    def find_name(server: Endpoint) -> str:
        file = decode_files(server.fetch("stale", "3.5.0"))[node_paths.ENCAPSULATED_CONFIG]
        return str(file["contents"]["metadata"]["name"])

    assert (find_name(servers.own), find_name(servers.mco)) == (OLD, NEW)


def test_mco_serves_no_3_0(servers: Servers) -> None:
    assert servers.mco.send("/config/worker", "3.0.0") == (500, b"")
    assert servers.own.fetch("worker", "3.0.0")["ignition"]["version"] == "3.0.0"


def test_mco_repeats_kernel_arguments_of_old_clients(servers: Servers) -> None:
    def list_arguments(server: Endpoint) -> list[str]:
        file = decode_files(server.fetch("worker", "3.2.0"))[node_paths.ENCAPSULATED_CONFIG]
        found: list[str] = file["contents"]["spec"]["kernelArguments"]
        return found

    first, second = list_arguments(servers.mco), list_arguments(servers.mco)
    assert second == [*first, "a=1"]
    assert list_arguments(servers.own) == list_arguments(servers.own) == ["quiet", "a=1"]


@pytest.mark.parametrize(
    ("path", "method", "version", "own", "mco"),
    [
        ("/healthz", "GET", "3.5.0", 200, 200),
        ("/config/worker", "HEAD", "3.5.0", 200, 200),
        ("/config/worker?a=b", "GET", "3.5.0", 200, 200),
        ("/config/worker", "POST", "3.5.0", 405, 405),
        ("/config/worker", "GET", "4.0.0", 400, 400),
        ("/", "GET", "3.5.0", 404, 404),
        ("/config/infra", "GET", "3.5.0", 404, 500),
        ("/config/", "GET", "3.5.0", 404, 500),
        ("/config/x/worker", "GET", "3.5.0", 404, 200),
        ("/config/worker/", "GET", "3.5.0", 404, 200),
        ("/config/%77orker", "GET", "3.5.0", 404, 200),
        ("/config/..", "GET", "3.5.0", 404, 307),
    ],
)
def test_status_of_each_request(
    servers: Servers, path: str, method: str, version: str, own: int, mco: int
) -> None:
    (found, body), (other, other_body) = (
        each.send(path, version, method) for each in (servers.own, servers.mco)
    )
    assert (found, other) == (own, mco)
    if own >= 400 and mco != 307:
        assert list(json.loads(body)) == ["error"]
        assert mco == 200 or other_body == b""
