"""Bootstrap tokens of access tokens, and when they end."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.csr import REQUESTS, make_pkcs10, make_request
from tests.provisioning.token_cluster import TokenCluster, run_token_cluster
from treenail.clocks import format_rfc3339
from treenail.errors import ConfigError
from treenail.provisioning.approval.request import KubeletRequest
from treenail.provisioning.machines.joined_machines import ArrivedNode
from treenail.provisioning.machines.token_settlement import TokenUseSettler, settle_record
from treenail.provisioning.tokens.bootstrap_tokens import (
    GROUP,
    BootstrapCredentials,
    JoinTarget,
    derive_secret,
    list_groups,
    list_identities,
)
from treenail.provisioning.tokens.tokens import (
    TokenRecord,
    TokenUse,
    UseState,
    compute_digest,
    make_token,
)

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


def read_secret(
    cluster: TokenCluster, record: TokenRecord, identity: str = ""
) -> dict[str, str] | None:
    answer = cluster.admin.get(f"{SECRETS}/bootstrap-token-{identity or record.name}")
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
        f"system:bootstrappers:treenail-token:{record.name}",
        "system:bootstrappers:treenail-machine:w1:example",
    )
    with pytest.raises(ConfigError, match="too long"):
        list_groups(make_token("a" * 253, expires=0)[1])


def test_each_access_token_has_one_bootstrap_token(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    first, other = make_credentials(cluster), make_credentials(cluster)
    kubeconfig = first.issue(token, record, "10.0.0.1")
    assert first.issue(token, record, "10.0.0.1") == kubeconfig
    assert other.issue(token, record, "10.0.0.1") == kubeconfig
    assert len(first.make_placeholder()) == len(kubeconfig)
    fields = read_secret(cluster, record)
    (user,) = json.loads(kubeconfig)["users"]
    assert user["user"]["token"] == f"{record.name}.{fields['token-secret']}"
    assert fields["expiration"] == format_rfc3339(cluster.clock.now() + 3600)
    assert fields["auth-extra-groups"].split(",")[1] == "system:bootstrappers:treenail:worker"
    assert token not in str(fields)


def test_each_machine_of_an_access_token_has_its_own_bootstrap_token(
    cluster: TokenCluster,
) -> None:
    token, record = cluster.create_token(uses=3)
    first, other = make_credentials(cluster), make_credentials(cluster)
    one, two = first.issue(token, record, A), first.issue(token, record, "10.0.0.6")
    assert one != two
    assert other.issue(token, record, A) == one
    found = {read_identity(one): one, read_identity(two): two}
    assert sorted(found) == sorted(list_identities(with_uses(record, A, "10.0.0.6")))
    for identity, kubeconfig in found.items():
        fields = read_secret(cluster, record, identity)
        assert f"{identity}.{fields['token-secret']}".encode() in kubeconfig
        assert f"system:bootstrappers:treenail-token:{record.name}" in fields["auth-extra-groups"]
        assert len(first.make_placeholder()) == len(kubeconfig)


def read_identity(kubeconfig: bytes) -> str:
    (user,) = json.loads(kubeconfig)["users"]
    return str(user["user"]["token"]).partition(".")[0]


def with_uses(record: TokenRecord, *addresses: str) -> TokenRecord:
    return replace(record, used=tuple(TokenUse(each, 0.0) for each in addresses))


def test_later_use_extends_the_lifetime(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    credentials = make_credentials(cluster)
    credentials.issue(token, record, "10.0.0.1")
    cluster.clock.move(1800)
    credentials.issue(token, record, "10.0.0.1")
    fields = read_secret(cluster, record)
    assert fields["expiration"] == format_rfc3339(cluster.clock.now() + 3600)


def test_token_waits_for_the_api_server(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    credentials = make_credentials(cluster)
    cluster.server.stop()
    kubeconfig = credentials.issue(token, record, "10.0.0.1")
    cluster.server.start()
    assert read_secret(cluster, record) is None
    credentials.create_pending({record.name})
    fields = read_secret(cluster, record)
    assert fields["token-secret"].encode() in kubeconfig


def test_token_of_a_revoked_access_token_is_not_created_later(cluster: TokenCluster) -> None:
    made = [cluster.create_token() for _ in range(2)]
    credentials = make_credentials(cluster)
    cluster.server.stop()
    for token, record in made:
        credentials.issue(token, record, "10.0.0.1")
    cluster.server.start()
    revoked, dropped = (record for _, record in made)
    credentials.revoke(revoked.name)
    credentials.create_pending({revoked.name})
    assert read_secret(cluster, revoked) is None
    assert read_secret(cluster, dropped) is None
    credentials.create_pending({dropped.name})
    assert read_secret(cluster, dropped) is None


def make_node(cluster: TokenCluster, name: str, address: str, *, ready: bool = True) -> Any:
    now = format_rfc3339(cluster.clock.now())
    cluster.admin.post("/api/v1/nodes", {"metadata": {"name": name}}).ok()
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
    addresses = [{"type": "InternalIP", "address": address}]
    status = {"status": {"conditions": [condition], "addresses": addresses}}
    return cluster.admin.patch(f"/api/v1/nodes/{name}/status", status).ok()


def provision(
    cluster: TokenCluster, *addresses: str, machine: str = "", uses: int = 1
) -> tuple[TokenRecord, TokenUseSettler]:
    """Serve one machine or more; return their token and what settles it."""
    token, record = cluster.create_token(machine=machine, uses=uses, ttl_s=86400)
    credentials = make_credentials(cluster)
    replica = cluster.start_replica(credentials=credentials)
    for address in addresses or (A,):
        verdict = replica.access.claim(replica.access.check(token, "worker", address))
        assert verdict.kubeconfig
        replica.access.confirm_sent(verdict)
    settler = TokenUseSettler(
        replica.store, cluster.client, cluster.clock, credentials, retry_window_s=600
    )
    return record, settler


def settle(cluster: TokenCluster, settler: TokenUseSettler) -> None:
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


def test_bootstrap_token_of_a_joined_machine_is_deleted_although_others_may_join(
    cluster: TokenCluster,
) -> None:
    record, settler = provision(cluster, A, "10.0.0.6", uses=3)
    joined, waiting = list_identities(cluster.read_record(record.name))
    make_node(cluster, "new", A)
    settle(cluster, settler)
    assert read_states(cluster, record) == [UseState.JOINED, UseState.SENT]
    assert read_secret(cluster, record, joined) is None
    assert read_secret(cluster, record, waiting) is not None


def test_bootstrap_token_of_machines_behind_one_address_stays_until_all_are_ready(
    cluster: TokenCluster,
) -> None:
    record, settler = provision(cluster, A, A, A, uses=2)
    (identity,) = list_identities(cluster.read_record(record.name))
    kubelet = cluster.admin.as_user(f"system:bootstrap:{identity}", GROUP, "system:masters")
    for name in ("w1", "w2"):
        kubelet.post(REQUESTS, make_request(name, make_pkcs10(f"system:node:{name}"))).ok()
        approve(cluster, name)
    make_node(cluster, "w1", "192.168.1.1")
    settle(cluster, settler)
    assert read_secret(cluster, record, identity) is not None
    assert read_states(cluster, record) == [UseState.SENT]
    make_node(cluster, "w2", "192.168.1.2")
    settle(cluster, settler)
    # The third request was a repeated one: the token is for two machines.
    assert read_secret(cluster, record, identity) is None
    assert read_states(cluster, record) == [UseState.JOINED]


def test_bootstrap_token_of_machines_behind_one_address_ends_with_its_lifetime(
    cluster: TokenCluster,
) -> None:
    record, settler = provision(cluster, A, A, uses=2)
    (identity,) = list_identities(cluster.read_record(record.name))
    make_node(cluster, "w1", A)
    settle(cluster, settler)
    assert read_secret(cluster, record, identity) is not None
    cluster.clock.move(4200)
    settle(cluster, settler)
    assert read_secret(cluster, record, identity) is None
    assert read_states(cluster, record) == [UseState.JOINED]


def test_machines_behind_one_address_are_told_apart_by_their_certificates(
    cluster: TokenCluster,
) -> None:
    (first, _), (second, _) = provision(cluster, A), provision(cluster, A)
    requests = [make_kubelet_request(first, "w1"), make_kubelet_request(second, "w2")]
    node = ArrivedNode("w2", frozenset({A}), cluster.clock.now(), cluster.clock.now())

    def settle_states(record: TokenRecord) -> list[UseState]:
        stored = cluster.read_record(record.name)
        found = settle_record(stored, [node], requests, cluster.clock.now(), 4200.0)
        return [use.state for use in found.used]

    assert settle_states(first) == [UseState.SENT]
    assert settle_states(second) == [UseState.JOINED]


def make_kubelet_request(record: TokenRecord, node: str) -> KubeletRequest:
    return KubeletRequest(f"csr-{node}", "uid", record.name, record.name, node, is_approved=True)


def approve(cluster: TokenCluster, request: str) -> None:
    found = cluster.admin.get(f"{REQUESTS}/{request}").ok()
    approved = {"conditions": [{"type": "Approved", "status": "True"}]}
    cluster.admin.put(f"{REQUESTS}/{request}/approval", found | {"status": approved}).ok()


def test_node_with_another_address_is_found_by_its_certificate(cluster: TokenCluster) -> None:
    record, settler = provision(cluster, A)
    make_node(cluster, "new", "192.168.1.2")
    settle(cluster, settler)
    assert read_secret(cluster, record) is not None
    kubelet = cluster.admin.as_user(f"system:bootstrap:{record.name}", GROUP, "system:masters")
    kubelet.post(REQUESTS, make_request("joins", make_pkcs10("system:node:new"))).ok()
    settle(cluster, settler)
    # It is not approved: another Node could have that name.
    assert read_secret(cluster, record) is not None
    approve(cluster, "joins")
    settle(cluster, settler)
    assert read_secret(cluster, record) is None


@pytest.mark.parametrize(
    ("offset_s", "expected"),
    [
        (0.0, ""),
        (-3600.0, "s behind that of the API server: bootstrap tokens end too early"),
        (3600.0, "s ahead of that of the API server: bootstrap tokens end too late"),
    ],
)
def test_clock_that_differs_from_the_api_server_is_logged_once(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture, offset_s: float, expected: str
) -> None:
    cluster.clock.move(cluster.real_clock.now() - cluster.clock.now() + offset_s)
    credentials = make_credentials(cluster)
    for _ in range(2):
        credentials.issue(*cluster.create_token(), "10.0.0.1")
    assert caplog.text.count("the clock of this server") == bool(expected)
    assert expected in caplog.text
