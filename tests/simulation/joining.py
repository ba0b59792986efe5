"""New machines join a cluster with access tokens, and others misuse these tokens.

The controller `approve` approves the requests of kubelets and labels their Nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.csr import REQUESTS, make_pkcs10, make_request
from tests.simulation.cluster import ClusterState, SimCluster
from tests.simulation.controllers import SimControllers
from tests.simulation.machines import set_ready
from tests.simulation.run import PODS, ClusterRun
from tests.simulation.threads import STARTED_AT
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail.provisioning.tokens.bootstrap_tokens import (
    USER_PREFIX,
    compute_identity,
    list_groups,
)
from treenail.provisioning.tokens.certificates import CertificateTable, store_certificates
from treenail.provisioning.tokens.token_store import TOKEN_SECRET
from treenail.provisioning.tokens.tokens import (
    TokenRecord,
    TokenTable,
    TokenTableParser,
    TokenUse,
    compute_digest,
    format_token_table,
)
from treenail_lab.apiserver.access.authentication import AUTHENTICATED, ApiUser
from treenail_lab.apiserver.store import StoreEvent

Json = dict[str, Any]
NAMESPACE = "treenail-ignition"
ROLE = "node-role.kubernetes.io/worker"
STORAGE = ("certificates.k8s.io", "certificatesigningrequests")
DAY_S = 86_400.0


def make_record(name: str, *, uses: int = 1, machine: str = "") -> TokenRecord:
    """A token with which a server has sent its configs."""
    expires = STARTED_AT + 10 * DAY_S
    used = tuple(TokenUse(f"10.0.0.{number}", STARTED_AT) for number in range(uses))
    return TokenRecord(name, compute_digest(name), "worker", expires, uses, machine, used)


ONE, TWO, BOUND = make_record("one", uses=1), make_record("two", uses=2), make_record(
    "bound", machine="w3"
)  # fmt: skip


@dataclass(frozen=True)
class Joiner:
    """A machine with an access token."""

    name: str
    record: TokenRecord
    after: tuple[str, ...] = ()
    """It requests its certificate when these have theirs."""
    address: str = "10.0.0.0"

    @property
    def user(self) -> ApiUser:
        groups = (AUTHENTICATED, *list_groups(self.record))
        identity = compute_identity(self.record.name, self.record.uses, self.address)
        return ApiUser(f"{USER_PREFIX}{identity}", groups)


MACHINES = (
    Joiner("w0", ONE),
    Joiner("w1", TWO),
    Joiner("w2", TWO, address="10.0.0.1"),
    Joiner("w3", BOUND),
)
INTRUDERS = (
    Joiner("x0", ONE, ("w0",)),
    Joiner("x1", TWO, ("w1", "w2")),
    # The name of a machine that has joined.
    Joiner("x2", BOUND),
)
"""Machines that no token permits, because the permitted ones have joined."""


class JoiningCluster:
    """A cluster with a pool and access tokens, and no machine."""

    def __init__(self, directory: Path) -> None:
        self.cluster = SimCluster(directory)
        create = self.cluster.execute
        self.cluster.install_kinds()
        create("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        pool = {
            "apiVersion": MACHINECONFIGPOOLS.api_version,
            "kind": MACHINECONFIGPOOLS.kind,
            "metadata": {"name": "worker"},
            "spec": {"nodeSelector": {"matchLabels": {ROLE: ""}}},
        }
        create("POST", f"/apis/{MACHINECONFIGPOOLS.api_version}/machineconfigpools", pool)
        table = store_certificates(
            TokenTable({each.name: each for each in (ONE, TWO, BOUND)}),
            CertificateTable(STARTED_AT),
        )
        create(
            "POST",
            f"/api/v1/namespaces/{NAMESPACE}/secrets",
            {"metadata": {"name": TOKEN_SECRET}, "data": format_token_table(table)},
        )
        self.requests = {
            each.name: make_pkcs10(f"system:node:{each.name}") for each in (*MACHINES, *INTRUDERS)
        }
        self.state = self.cluster.save()


class Joining(ClusterRun):
    """One run in which all machines request their certificates."""

    def __init__(self, shared: JoiningCluster) -> None:
        super().__init__(shared.cluster, shared.state)
        self.pods = [SimControllers(self.cluster, name, ("approve",)) for name in PODS]
        self._requests = shared.requests
        self._count = 0

    def begin_story(self) -> None:
        for each in (*MACHINES, *INTRUDERS):
            self.story.start(each.name, lambda each=each: self._join(each))

    def restore(self, state: ClusterState, *, skipped_versions: int = 0) -> None:
        """Restore etcd; what the tokens' machines did since is lost.

        A user approves nothing in between: requests of intruders are deleted.
        """
        super().restore(state, skipped_versions=skipped_versions)
        for each in INTRUDERS:
            for name in self._list_requests(each.name):
                self.cluster.execute("DELETE", f"{REQUESTS}/{name}")

    def _join(self, joiner: Joiner) -> None:
        """Do what a kubelet does, until the end of the run."""
        while True:
            if all(self.is_approved(each) for each in joiner.after):
                self._take_step(joiner)
            self.simulation.park(2.0)

    def _take_step(self, joiner: Joiner) -> None:
        node = self._find_node(joiner.name)
        if node is None:
            if self.is_approved(joiner.name):
                self.cluster.execute("POST", "/api/v1/nodes", {"metadata": {"name": joiner.name}})
            elif not self._list_requests(joiner.name):
                self._request_certificate(joiner)
        elif not node.get("status", {}).get("conditions"):
            set_ready(self.cluster, joiner.name, "True")

    def _request_certificate(self, joiner: Joiner) -> None:
        self._count += 1
        request = make_request(f"{joiner.name}-{self._count}", self._requests[joiner.name])
        self.cluster.execute("POST", REQUESTS, request, user=joiner.user)

    def check_event(self, storage: tuple[str, str], event: StoreEvent) -> None:
        if storage != STORAGE or not has_certificate(event.object) or self.is_restored:
            return
        name = event.object["metadata"]["name"].partition("-")[0]
        if name in {each.name for each in INTRUDERS}:
            self.note_problem(f"{name} got a certificate")

    def find_unsettled(self) -> Iterator[str]:
        nodes = self._read_recorded_nodes()
        for each in MACHINES:
            node = self._find_node(each.name)
            if node is None:
                yield f"{each.name}: not joined; {self._list_requests(each.name)}"
            elif ROLE not in node["metadata"].get("labels", {}):
                yield f"{each.name}: without the label of its pool"
            if each.name not in nodes:
                yield f"{each.name}: not recorded in its token"
        for each in INTRUDERS:
            if not self._list_requests(each.name):
                yield f"{each.name}: made no request"

    def is_approved(self, name: str) -> bool:
        return any(
            has_certificate(each)
            for each in self.cluster.api.store.list_objects(STORAGE)
            if each["metadata"]["name"].startswith(f"{name}-")
        )

    def _list_requests(self, name: str) -> list[str]:
        found = [each["metadata"]["name"] for each in self.cluster.objects(*STORAGE)]
        return [each for each in found if each.startswith(f"{name}-")]

    def _find_node(self, name: str) -> Json | None:
        return self.cluster.api.store.find_object(("", "nodes"), ("", name))

    def _read_recorded_nodes(self) -> set[str]:
        where = (NAMESPACE, TOKEN_SECRET)
        secret = self.cluster.api.store.find_object(("", "secrets"), where)
        assert secret is not None
        table = TokenTableParser(TOKEN_SECRET).parse(secret)
        return {node for record in table.tokens.values() for node in record.nodes}


def has_certificate(request: Json) -> bool:
    return bool((request.get("status") or {}).get("certificate"))
