"""The approval controller on the lab's API server, and kubelets that request certificates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from tests.contract.client import Cluster
from tests.contract.csr import (
    REQUESTS,
    Json,
    encode_key,
    make_key,
    make_pkcs10,
    make_request,
)
from tests.provisioning.serving import LIMIT_S
from tests.provisioning.token_cluster import NAMESPACE, TokenCluster, run_token_cluster
from tests.waiting import wait_until
from treenail.clocks import Clock, SystemClock
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail.manifests.ignition_server import build_join_access
from treenail.manifests.installation import load_crds
from treenail.provisioning.approval.controller import ApprovalController
from treenail.provisioning.tokens.bootstrap_tokens import BootstrapCredentials, JoinTarget
from treenail.provisioning.tokens.certificates import read_certificates
from treenail.provisioning.tokens.tokens import TokenTable, claim_use, confirm_use, read_name

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
ADDRESS = "10.0.0.1"


class EarlyClock(SystemClock):
    """A clock behind that of the API server: what is requested now is later than what it saw."""

    def __init__(self) -> None:
        self.behind_s = 30.0

    def now(self) -> float:
        return super().now() - self.behind_s


@contextmanager
def run_approval_cluster(directory: Path) -> Iterator[TokenCluster]:
    with run_token_cluster(directory) as found:
        install_join_access(found)
        for document in load_crds():
            found.admin.post(DEFINITIONS, document).ok()
        yield found


def install_join_access(cluster: TokenCluster) -> None:
    """Let machines with a bootstrap token request certificates."""
    for document in build_join_access("treenail-ignition"):
        if document["kind"] == "ClusterRoleBinding":
            cluster.admin.post(BINDINGS, document).ok()


def create_pool(cluster: TokenCluster, selector: Json, name: str = "worker") -> None:
    pools = f"/apis/{MACHINECONFIGPOOLS.api_version}/machineconfigpools"
    body = {
        "apiVersion": MACHINECONFIGPOOLS.api_version,
        "kind": MACHINECONFIGPOOLS.kind,
        "metadata": {"name": name},
        "spec": {"nodeSelector": selector},
    }
    cluster.admin.post(pools, body).ok()


class Approvals:
    """The controller with its watches; each key is synced when it changes."""

    def __init__(self, cluster: TokenCluster, clock: Clock | None = None) -> None:
        client = cluster.connect()
        recorder = EventRecorder(client, "tests", "tests", cluster.clock)
        self.controller = ApprovalController(client, clock or EarlyClock(), recorder, NAMESPACE)
        self.informers = informers = InformerSet(client, cluster.clock)
        self.keys: list[str] = []
        self.controller.register_watches(informers, self.keys.append)
        cluster.stack.callback(informers.stop)
        informers.start()
        assert informers.wait_until_synced(LIMIT_S)
        self._cluster = cluster

    def sync(self, *names: str) -> None:
        """Wait until the watches show these requests, and sync all keys."""
        wait_until(lambda: {*names} <= {*self.keys}, limit_s=LIMIT_S)
        while self.keys:
            self.controller.sync_key(self.keys.pop(0))

    def change_nodes(self, change: Callable[[], object]) -> None:
        """Create or delete a Node, and sync all keys when the watch shows it."""
        self.sync()
        change()
        self.sync("/")

    def sync_until(self, condition: Callable[[], object]) -> None:
        """Sync what changes until the condition is true."""

        def is_met() -> object:
            while self.keys:
                self.controller.sync_key(self.keys.pop(0))
            return condition()

        wait_until(is_met, limit_s=LIMIT_S)

    def decide(self, name: str) -> list[str]:
        """Sync until the request is decided; return its conditions."""
        self.sync_until(lambda: read_conditions(self._cluster, name))
        return read_conditions(self._cluster, name)


def join(
    cluster: TokenCluster,
    token: str,
    name: str,
    node: str,
    address: str = ADDRESS,
    *,
    key: ec.EllipticCurvePrivateKey | None = None,
    is_served: bool = True,
) -> bytes:
    """Create a request with the bootstrap token, as a kubelet does; return its key.

    With ``is_served`` the machine received the config with the token from its address.
    """
    if is_served:
        cluster.make_store().change(lambda table: (serve_config(table, token, address), None))
    record = cluster.make_store().load().tokens[read_name(token)]
    target = JoinTarget(cluster.server.url, cluster.server.ca_file.read_bytes)
    credentials = BootstrapCredentials(cluster.client, cluster.real_clock, target)
    path = cluster.directory / f"{name}.kubeconfig"
    path.write_bytes(credentials.issue(token, record, address))
    key = key or make_key()
    kubelet = Cluster.of_kubeconfig(path)
    kubelet.post(REQUESTS, make_request(name, make_pkcs10(f"system:node:{node}", key))).ok()
    # Nothing else is allowed.
    assert kubelet.get("/api/v1/nodes").code == 403
    assert kubelet.get("/api/v1/namespaces/kube-system/secrets").code == 403
    return encode_key(key)


def serve_config(table: TokenTable, token: str, address: str) -> TokenTable:
    """Return the table after a server sent the config, once for each machine of an address."""
    record = table.tokens[read_name(token)]
    known = [use for use in record.used if use.address == address]
    if known:
        return table
    claimed = claim_use(record, address, 0.0, retry_window_s=600.0)
    return table.put(confirm_use(claimed, address, 0.0))


def read_conditions(cluster: TokenCluster, name: str) -> list[str]:
    status = cluster.admin.get(f"{REQUESTS}/{name}").ok().get("status") or {}
    return [each["type"] for each in status.get("conditions", [])]


def read_message(cluster: TokenCluster, name: str) -> str:
    (condition,) = cluster.admin.get(f"{REQUESTS}/{name}").ok()["status"]["conditions"]
    message: str = condition["message"]
    return message


def delete_node(cluster: TokenCluster, name: str) -> None:
    cluster.admin.delete(f"/api/v1/nodes/{name}").ok()


def list_recorded_names(cluster: TokenCluster) -> set[str]:
    """Return the names of Nodes that the table of certificates has."""
    found = read_certificates(cluster.make_store().load(), 0.0)
    return {each.node for each in found.rows}


def read_labels(cluster: TokenCluster, node: str) -> Json:
    found: Json = cluster.admin.get(f"/api/v1/nodes/{node}").ok()["metadata"].get("labels") or {}
    return found
