"""Two servers on one cluster, of which one is killed, and an outage of the API server."""

import base64
import http.client
import json
import logging
import socket
import ssl
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Cluster
from tests.controllers.installed import apply
from tests.fakes.clock import FakeClock
from tests.fixtures.objects import collection_of
from tests.provisioning.process import Running, run_server
from tests.provisioning.samples import NEW, make_config, make_file, make_pool
from tests.provisioning.serving import LIMIT_S, serve
from tests.provisioning.token_cluster import TokenCluster, run_token_cluster
from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube.api_client import Client
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail.manifests.ignition_server import NAME, build_server_documents
from treenail.manifests.installation import InstallOptions
from treenail.provisioning.content.cluster_source import ClusterSource
from treenail.provisioning.content.source import SourceSettings
from treenail.provisioning.tokens.token_store import TokenStore
from treenail.provisioning.tokens.tokens import TokenRecord, make_token
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = [pytest.mark.integration]

MACHINES = 50
PULL_SECRET = "pull-secret-of-the-cluster"
POOLS = "/apis/machineconfiguration.openshift.io/v1/machineconfigpools"
Json = dict[str, Any]


@dataclass
class Installed:
    """A cluster of the lab with a pool, and access to its tokens."""

    server: LabServer
    cluster: Cluster
    store: TokenStore

    def create_tokens(self, count: int) -> dict[str, str]:
        """Create tokens for one machine each; return them by name."""
        made = [make_token("worker", expires=SystemClock().now() + 3600) for _ in range(count)]

        def put(table: Any) -> tuple[Any, None]:
            for _, record in made:
                table = table.put(record)
            return table, None

        self.store.change(put)
        return {record.name: token for token, record in made}

    def read_tokens(self) -> dict[str, TokenRecord]:
        return dict(self.store.load().tokens)


def add_pool(cluster: Cluster) -> None:
    files = (make_file("/etc/pull", PULL_SECRET), make_file("/etc/big", "x" * 300_000))
    for document in (make_pool(), make_config(NEW, *files)):
        cluster.post(collection_of(document), document).ok()
    status = {**make_pool()["status"], "observedGeneration": 1}
    cluster.patch(f"{POOLS}/worker/status", {"status": status}).ok()


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installed]:
    with LabServer(tmp_path / "api") as server, ExitStack() as stack:
        documents = [*installation.load_crds(), *build_server_documents(InstallOptions())]
        # The lab has no Services, and runs no pods.
        apply(server, [each for each in documents if each["kind"] not in ("Service", "DaemonSet")])
        cluster = Cluster.of_kubeconfig(server.admin_kubeconfig)
        add_pool(cluster)
        transport = HttpTransport(read_kubeconfig(str(server.admin_kubeconfig)), SystemClock())
        stack.callback(transport.close)
        yield Installed(server, cluster, TokenStore(Client(transport), NAME, SystemClock()))


class Machine:
    """Fetches its config as Ignition does, from one server and then from the other."""

    def __init__(self, number: int, token: str, servers: list[Running]) -> None:
        self._source = f"127.0.{1 + number // 200}.{1 + number % 200}"
        self._token = token
        self._servers = servers
        # Both machines of every second pair begin with the same server.
        self._turn = number // 2 if number % 4 < 2 else number
        self.errors: list[bytes] = []

    def fetch(self) -> tuple[int, bytes]:
        """Return the first response that Ignition does not repeat."""
        return wait_until(self._try, limit_s=3 * LIMIT_S)

    def _try(self) -> tuple[int, bytes] | None:
        server = self._servers[self._turn % 2]
        try:
            status, body = self._request(server)
        except (OSError, http.client.HTTPException):
            self._turn += 1
            return None
        if status != 200:
            self.errors.append(body)
        return None if status >= 500 else (status, body)

    def _request(self, server: Running) -> tuple[int, bytes]:
        address = ("127.0.0.1", server.port)
        context = ssl.create_default_context(cadata=server.ca.decode())
        head = f"GET /config/worker HTTP/1.1\r\nAuthorization: Bearer {self._token}\r\n\r\n"
        with (
            socket.create_connection(address, LIMIT_S, (self._source, 0)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(head.encode())
            found = http.client.HTTPResponse(client)
            found.begin()
            return found.status, found.read()


def _drop_kubeconfig(body: bytes) -> str:
    """Return a served config without the kubeconfig of its machine."""
    config = json.loads(body)
    files = config["storage"]["files"]
    kept = [each for each in files if each["path"] != "/etc/kubernetes/kubeconfig"]
    assert len(kept) == len(files) - 1
    return json.dumps({**config, "storage": {**config["storage"], "files": kept}})


def test_server_killed_while_machines_fetch_and_started_again_loses_no_token(
    installed: Installed, tmp_path: Path
) -> None:
    tokens = installed.create_tokens(MACHINES)
    kubeconfig = installed.server.write_account_kubeconfig(NAME, NAME)
    arguments = (f"--kubeconfig={kubeconfig}", "--tokens=require")
    with ExitStack() as stack:
        servers = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            servers.append(stack.enter_context(run_server(tmp_path / name, *arguments)))
        killed, left = servers
        for each in servers:
            wait_until(lambda: each.fetch(token="x")[0] == 401, limit_s=LIMIT_S)  # noqa: B023  # called at once
        # Two machines have each token: the second one stole it.
        machines = [
            (name, Machine(2 * number + thief, token, servers))
            for number, (name, token) in enumerate(tokens.items())
            for thief in (0, 1)
        ]
        with ThreadPoolExecutor(len(machines)) as pool:
            fetched = [(name, pool.submit(machine.fetch)) for name, machine in machines]
            wait_until(lambda: killed.log.read_text().count("served config") >= 5, limit_s=LIMIT_S)
            killed.process.kill()
            results = [(name, each.result()) for name, each in fetched]
        (tmp_path / "again").mkdir()
        started = stack.enter_context(run_server(tmp_path / "again", *arguments))
        (new,) = installed.create_tokens(1).values()
        wait_until(lambda: started.fetch(token=new)[0] == 200, limit_s=LIMIT_S)
        # No third machine has a token, whichever server it was claimed at.
        assert {started.fetch(token=each)[0] for each in tokens.values()} == {403}
        logs = "".join(each.log.read_text() for each in (killed, left, started))
        metrics = fetch_metrics(find_ports(left.process.pid) - {left.port})
    served = [(name, body) for name, (status, body) in results if status == 200]
    assert sorted(name for name, _ in served) == sorted(tokens)
    assert [status for _, (status, _) in results].count(403) == MACHINES
    # Each machine has a bootstrap token of its own; all else is equal.
    assert len({body for _, body in served}) == MACHINES
    assert len({_drop_kubeconfig(body) for _, body in served}) == 1
    assert [len(each.used) for each in installed.read_tokens().values()] == [1] * (MACHINES + 1)
    # Nothing outside of the config has a secret.
    errors = b"".join(error for _, machine in machines for error in machine.errors)
    assert b"as many machines as it permits" in errors
    published = read_published(installed.cluster)
    assert "rendered-worker" in published
    encoded = base64.b64encode(PULL_SECRET.encode()).decode()
    for secret in (*(each.split("_", 2)[2] for each in tokens.values()), PULL_SECRET, encoded):
        for text in (logs, metrics, errors.decode(), published):
            assert secret not in text


def find_ports(pid: int) -> set[int]:
    """Return the ports on which a process listens (proc_pid_net(5))."""
    links = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    # State 0A is LISTEN; field 9 is the inode of the socket.
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return {int(row[1].partition(":")[2], 16) for row in listening}


def fetch_metrics(ports: set[int]) -> str:
    (port,) = ports
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    client.request("GET", "/metrics")
    text = client.getresponse().read().decode()
    client.close()
    assert "ignition" in text
    return text


def read_published(cluster: Cluster) -> str:
    """Read what the server writes and others may read, and the stored tokens."""
    namespace = f"/api/v1/namespaces/{NAME}"
    paths = (
        *(f"{namespace}/configmaps", f"{namespace}/events", "/api/v1/events", POOLS),
        f"{namespace}/secrets/treenail-ignition-tokens",
    )
    found = [cluster.get(path).ok() for path in paths]
    stored = base64.b64decode(found[-1]["data"]["tokens"])
    return f"{found} {zlib.decompress(stored) if stored[:1] == b'x' else stored!r}"


@pytest.fixture
def token_cluster(tmp_path: Path) -> Iterator[TokenCluster]:
    with run_token_cluster(tmp_path / "api") as found:
        for document in installation.load_crds():
            found.admin.post(collection_of(document), document).ok()
        add_pool(found.admin)
        yield found


def test_outage_of_five_minutes_serves_the_cache_and_logs_its_age(
    token_cluster: TokenCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    token, _ = token_cluster.create_token()
    late, _ = token_cluster.create_token()
    replica = token_cluster.start_replica()
    clock = FakeClock()
    client = token_cluster.connect()
    informers = InformerSet(client, clock)
    source = ClusterSource(informers, SourceSettings(), client)
    informers.start()
    (tmp_path / "server").mkdir()
    with serve(tmp_path / "server", source=source, access=replica.access) as serving:
        bearer = "Authorization: Bearer {}"
        wait_until(lambda: not source.describe_unready(), limit_s=LIMIT_S)
        before = serving.get("/config/worker", bearer.format(token))
        assert before.status == 200
        # The server writes the line after the client has the last byte.
        wait_until(lambda: "served config of pool worker" in caplog.text, limit_s=LIMIT_S)
        token_cluster.server.stop()
        wait_until(source.describe_staleness, limit_s=LIMIT_S)
        clock.move(300)
        token_cluster.clock.move(300)
        for each in (token, late):
            found = serving.get("/config/worker", bearer.format(each))
            assert (found.status, found.body) == (200, before.body)
        wait_until(lambda: caplog.text.count("pools are 300 s old") == 2, limit_s=LIMIT_S)
        assert "the API server has been unreachable for 300 s" in caplog.text
    informers.stop()
