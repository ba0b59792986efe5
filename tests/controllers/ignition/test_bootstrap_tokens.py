"""Bootstrap tokens of access tokens, and when they end."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.ignition.token_cluster import TokenCluster, run_token_cluster
from treenail.clock import format_rfc3339
from treenail.controllers.ignition.bootstrap_tokens import (
    BootstrapCredentials,
    JoinTarget,
    derive_secret,
    list_groups,
)
from treenail.controllers.ignition.token_settlement import UseSettler
from treenail.controllers.ignition.tokens import TokenRecord, UseState, compute_digest, make_token
from treenail.errors import ConfigError

pytestmark = pytest.mark.integration
SECRETS = "/api/v1/namespaces/kube-system/secrets"
A = "10.0.0.1"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TokenCluster]:
    with run_token_cluster(tmp_path) as found:
        yield found


def make_credentials(cluster: TokenCluster) -> BootstrapCredentials:
    target = JoinTarget("https://api.example:6443", lambda: b"authority")
    return BootstrapCredentials(cluster.client, cluster.clock, target)


def read_secret(cluster: TokenCluster, record: TokenRecord) -> dict[str, str] | None:
    answer = cluster.admin.get(f"{SECRETS}/bootstrap-token-{record.name}")
    if answer.code == 404:
        return None
    fields: dict[str, str] = answer.ok()["data"]
    return {name: base64.b64decode(text).decode() for name, text in fields.items()}


def test_secret_is_derived_from_the_token_and_not_from_its_digest() -> None:
    token, record = make_token("worker", expires=0)
    secret = derive_secret(token)
    assert len(secret) == 16
    assert secret == derive_secret(token)
    assert secret != derive_secret(token + "x")
    assert secret not in {derive_secret(record.digest.hex()), compute_digest(token).hex()[:16]}


def test_groups_name_pool_machine_and_uses() -> None:
    _, record = make_token("gpu.large", expires=0, uses=1, machine="w1.example")
    assert list_groups(record) == (
        "system:bootstrappers:treenail",
        "system:bootstrappers:treenail:gpu:large",
        "system:bootstrappers:treenail-uses:1",
        "system:bootstrappers:treenail-machine:w1:example",
    )
    with pytest.raises(ConfigError, match="too long"):
        list_groups(make_token("a" * 253, expires=0)[1])


def test_each_access_token_has_one_bootstrap_token(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    first, other = make_credentials(cluster), make_credentials(cluster)
    kubeconfig = first.issue(token, record)
    assert first.issue(token, record) == other.issue(token, record) == kubeconfig
    assert len(first.make_placeholder()) == len(kubeconfig)
    fields = read_secret(cluster, record)
    assert fields is not None
    (user,) = json.loads(kubeconfig)["users"]
    assert user["user"]["token"] == f"{record.name}.{fields['token-secret']}"
    assert fields["expiration"] == format_rfc3339(cluster.clock.now() + 3600)
    assert fields["auth-extra-groups"].split(",")[1] == "system:bootstrappers:treenail:worker"
    assert token not in str(fields)


def test_later_use_extends_the_lifetime(cluster: TokenCluster) -> None:
    token, record = cluster.create_token(uses=2)
    credentials = make_credentials(cluster)
    credentials.issue(token, record)
    cluster.clock.move(1800)
    credentials.issue(token, record)
    fields = read_secret(cluster, record)
    assert fields is not None
    assert fields["expiration"] == format_rfc3339(cluster.clock.now() + 3600)


def test_token_waits_for_the_api_server(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    credentials = make_credentials(cluster)
    cluster.server.stop()
    kubeconfig = credentials.issue(token, record)
    cluster.server.start()
    assert read_secret(cluster, record) is None
    credentials.create_pending()
    fields = read_secret(cluster, record)
    assert fields is not None
    assert fields["token-secret"].encode() in kubeconfig


def make_node(cluster: TokenCluster, name: str, address: str, *, ready: bool = True) -> Any:
    now = format_rfc3339(cluster.clock.now())
    cluster.admin.post("/api/v1/nodes", {"metadata": {"name": name}}).ok()
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
    addresses = [{"type": "InternalIP", "address": address}]
    status = {"status": {"conditions": [condition], "addresses": addresses}}
    return cluster.admin.patch(f"/api/v1/nodes/{name}/status", status).ok()


def provision(
    cluster: TokenCluster, *, machine: str = "", uses: int = 1
) -> tuple[TokenRecord, UseSettler]:
    """Serve one machine; return its token and what settles it."""
    token, record = cluster.create_token(machine=machine, uses=uses, ttl_s=86400)
    credentials = make_credentials(cluster)
    replica = cluster.start_replica(credentials=credentials)
    verdict = replica.access.claim(replica.access.check(token, "worker", A))
    assert verdict.kubeconfig
    replica.access.confirm_sent(verdict)
    settler = UseSettler(
        replica.store, cluster.client, cluster.clock, credentials, retry_window_s=600
    )
    return record, settler


def settle(cluster: TokenCluster, settler: UseSettler) -> None:
    cluster.clock.move(31)
    settler.settle_uses()


def read_states(cluster: TokenCluster, record: TokenRecord) -> list[UseState]:
    return [use.state for use in cluster.read_record(record.name).used]


def test_bootstrap_token_is_deleted_when_the_node_is_ready(cluster: TokenCluster) -> None:
    record, settler = provision(cluster)
    make_node(cluster, "other", "10.0.0.9")
    make_node(cluster, "new", A, ready=False)
    settle(cluster, settler)
    assert read_secret(cluster, record) is not None
    cluster.admin.delete("/api/v1/nodes/new").ok()
    make_node(cluster, "new", A)
    settle(cluster, settler)
    assert read_secret(cluster, record) is None
    assert read_states(cluster, record) == [UseState.JOINED]


def test_node_of_a_named_machine_is_found_by_its_name(cluster: TokenCluster) -> None:
    record, settler = provision(cluster, machine="w1")
    make_node(cluster, "another", A)
    settle(cluster, settler)
    assert read_secret(cluster, record) is not None
    make_node(cluster, "w1", "10.9.9.9")
    settle(cluster, settler)
    assert read_secret(cluster, record) is None


def test_bootstrap_token_is_deleted_at_the_end_of_its_lifetime(cluster: TokenCluster) -> None:
    record, settler = provision(cluster)
    cluster.clock.move(3600)
    settle(cluster, settler)
    assert read_secret(cluster, record) is not None
    cluster.clock.move(600)
    settle(cluster, settler)
    assert read_secret(cluster, record) is None
    assert read_states(cluster, record) == [UseState.ENDED]


def test_bootstrap_token_of_further_uses_stays(cluster: TokenCluster) -> None:
    record, settler = provision(cluster, uses=2)
    make_node(cluster, "new", A)
    settle(cluster, settler)
    assert read_states(cluster, record) == [UseState.JOINED]
    assert read_secret(cluster, record) is not None
