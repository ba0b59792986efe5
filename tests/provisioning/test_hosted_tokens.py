"""The server for hosted clusters, on an API server of the lab: who gets which config."""

import base64
import gzip
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.contract.client import Cluster
from tests.controllers.hosted.owning.secret_site import (
    HASHES,
    HOUR,
    SecretSite,
    make_config,
    make_pool,
)
from tests.provisioning.serving import LIMIT_S, Response, Serving, serve
from tests.waiting import wait_until
from treenail import clocks
from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import token_secret
from treenail.config import node_paths
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube.api_client import Client
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.provisioning.server.server import HOSTED_ROUTE, ServerLimits
from treenail.provisioning.tokens.hosted_tokens import HostedTokens
from treenail_lab.apiserver.serving.server import LabServer

ONE, TWO = "clusters-one", "clusters-two"
NEWEST = "Accept: application/vnd.coreos.ignition+json;version=3.4.0"


def bearer(token: str) -> str:
    return f"Authorization: Bearer {base64.b64encode(token.encode()).decode()}"


@dataclass(frozen=True, slots=True)
class HostedPlace:
    """Two control planes with a NodePool of the same name each, and a server for both."""

    cluster: Cluster
    serving: Serving
    tokens: HostedTokens
    sites: dict[str, SecretSite]

    def put(self, namespace: str, secret: Json) -> None:
        metadata = secret["metadata"]
        assert isinstance(metadata, dict)
        others = {name: metadata[name] for name in ("labels", "annotations") if name in metadata}
        body = {
            **secret,
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": metadata["name"], "namespace": namespace, **others},
        }
        path = f"/api/v1/namespaces/{namespace}/secrets"
        self.cluster.delete(f"{path}/{metadata['name']}")
        self.cluster.post(path, body).ok()

    def sync(self, namespace: str, **changes: object) -> str:
        """Apply a plan; return the token, once the server knows it."""
        site = self.sites[namespace]
        for secret in site.run(**changes).writes:
            self.put(namespace, secret)
        assert site.facts.config is not None
        token = site.read_tokens(site.facts.config.target_hash)[0]
        self.wait_for(token, HTTPStatus.OK)
        return token

    def wait_for(self, token: str, status: HTTPStatus) -> None:
        text = base64.b64encode(token.encode()).decode()
        wait_until(lambda: self.tokens.check(text, "", "").status == status, limit_s=LIMIT_S)

    def fetch(self, token: str, *headers: str) -> Response:
        return self.serving.get("/ignition", bearer(token), NEWEST, *headers)

    def read_reached(self, namespace: str) -> object:
        path = f"/api/v1/namespaces/{namespace}/configmaps/{token_secret.REACHED_CONFIGMAP}"
        return self.cluster.get(path).ok().get("data")

    def wait_for_record(self, namespace: str) -> object:
        """Return what the server recorded, which it does after the last byte of a config."""
        return wait_until(lambda: self.read_reached(namespace), limit_s=LIMIT_S)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[HostedPlace]:
    with ExitStack() as stack:
        server = stack.enter_context(LabServer(tmp_path / "api"))
        cluster = Cluster.of_kubeconfig(server.admin_kubeconfig)
        for namespace in (ONE, TWO):
            cluster.post("/api/v1/namespaces", {"metadata": {"name": namespace}}).ok()
            record = {"metadata": {"name": token_secret.REACHED_CONFIGMAP}}
            cluster.post(f"/api/v1/namespaces/{namespace}/configmaps", record).ok()
        transport = HttpTransport(
            read_kubeconfig(str(server.admin_kubeconfig)), clocks.SystemClock()
        )
        stack.callback(transport.close)
        client, clock = Client(transport, limit_s=LIMIT_S), clocks.SystemClock()
        informers = InformerSet(client, clock)
        tokens = HostedTokens(informers, client, clock, [ONE, TWO])
        informers.start()
        stack.callback(informers.stop)
        assert informers.wait_until_synced(LIMIT_S)
        (tmp_path / "serve").mkdir()
        serving = stack.enter_context(
            serve(
                tmp_path / "serve",
                source=tokens,
                access=tokens,
                route=HOSTED_ROUTE,
                limits=ServerLimits(connections=128, per_address=64, per_block=64),
            )
        )
        sites = {
            ONE: SecretSite(now=clock.now()),
            TWO: SecretSite(now=clock.now(), tokens="other"),
        }
        yield HostedPlace(cluster, serving, tokens, sites)


def read_file(document: Json, path: str) -> str:
    storage = document["storage"]
    assert isinstance(storage, dict)
    sources = [file["contents"]["source"] for file in storage["files"] if file["path"] == path]
    return base64.b64decode(sources[-1].partition(",")[2]).decode() if sources else ""


def test_machine_gets_the_config_of_its_token(place: HostedPlace) -> None:
    one = place.sync(ONE)
    two = place.sync(TWO, config=make_config(HASHES[1]), rolled_hash=HASHES[1])
    found = place.fetch(one)
    assert (found.status, found.json["ignition"]["version"]) == (200, "3.4.0")
    # The first boot refuses files that name different configs.
    for path in (node_paths.SERVED_CONFIG, node_paths.ENCAPSULATED_CONFIG):
        assert json.loads(read_file(found.json, path))["metadata"]["name"] == HASHES[0]
    notes = json.loads(read_file(found.json, node_paths.FIRST_BOOT_ANNOTATIONS))
    # The agent then knows its hash, and every controller that it has what the pool wants.
    assert notes == {
        key.CURRENT_CONFIG: HASHES[0],
        key.DESIRED_CONFIG: HASHES[0],
        key.FIRST_PIVOT_CONFIG: HASHES[0],
        key.STATE: "Done",
    }
    # The headers of another NodePool change nothing.
    other = place.fetch(two, "NodePool: clusters/np", f"TargetConfigVersionHash: {HASHES[0]}")
    assert read_file(other.json, node_paths.FIRST_BOOT_ANNOTATIONS).count(HASHES[1]) == 3
    assert place.wait_for_record(ONE) == {"np": HASHES[0]}
    assert place.wait_for_record(TWO) == {"np": HASHES[1]}


@pytest.mark.parametrize(
    ("path", "headers", "status", "error"),
    [
        ("/ignition", [], 401, "expected one header Authorization"),
        ("/ignition", ["Authorization: Basic dXVpZC0x"], 401, "expected one header"),
        ("/ignition", ["Authorization: Bearer"], 401, "expected one header"),
        ("/ignition", ["Authorization: Bearer "], 401, "expected one header"),
        ("/ignition", ["Authorization: Bearer uuid-1"], 401, "a token in base64"),
        ("/ignition", [bearer("uuid-1"), bearer("uuid-1")], 401, "expected one header"),
        ("/ignition?token=dXVpZC0x", [], 401, "expected one header"),
        ("/ignition", [bearer("uuid-0")], 511, "try again later"),
        ("/ignition", [bearer("uuid-1") + "AAAA"], 511, "try again later"),
        ("/ignition/", [bearer("uuid-1")], 404, "expected /ignition or /healthz"),
        ("/ignition/np", [bearer("uuid-1")], 404, "expected /ignition or /healthz"),
        ("/config/np", [bearer("uuid-1")], 404, "expected /ignition or /healthz"),
        ("/ignition2", [bearer("uuid-1")], 200, ""),
        ("/ignition?x=1", [bearer("uuid-1")], 200, ""),
        ("/healthz", [], 200, ""),
    ],
)
def test_requests_are_answered_as_hypershift_does(
    place: HostedPlace,
    caplog: pytest.LogCaptureFixture,
    path: str,
    headers: list[str],
    status: int,
    error: str,
) -> None:
    with caplog.at_level(logging.DEBUG):
        place.sync(ONE)
        found = place.serving.get(path, *headers)
    assert found.status == status
    assert error in (found.json["error"] if error else "")
    if status == 200 and path != "/healthz":
        assert place.wait_for_record(ONE) == {"np": HASHES[0]}
    else:
        assert place.read_reached(ONE) is None
    for text in ("uuid-", base64.b64encode(b"uuid-1").decode()):
        assert text not in caplog.text
        assert text not in found.json["error"] if error else True


def test_head_is_no_fetch(place: HostedPlace) -> None:
    token = place.sync(ONE)
    found = place.serving.get("/ignition", bearer(token), method="HEAD")
    assert (found.status, place.read_reached(ONE)) == (200, None)
    assert place.serving.get("/ignition", bearer(token), method="POST").status == 405


def test_renewed_token_and_the_one_before_are_accepted(place: HostedPlace) -> None:
    first = place.sync(ONE)
    place.sites[ONE].now += 6 * HOUR
    second = place.sync(ONE)
    assert [place.fetch(token).status for token in (first, second)] == [200, 200]
    place.sites[ONE].now += 6 * HOUR
    third = place.sync(ONE)
    assert [place.fetch(token).status for token in (first, second, third)] == [511, 200, 200]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (clocks.format_rfc3339(clocks.SystemClock().now() - 60), 511),
        ("soon", 511),
        (clocks.format_rfc3339(clocks.SystemClock().now() + HOUR), 200),
    ],
    ids=["past", "no time", "future"],
)
def test_token_is_refused_after_its_end(place: HostedPlace, text: str, status: int) -> None:
    token = place.sync(ONE)
    name = f"token-np-{HASHES[0]}"
    notes = {
        hosted_key.NODE_POOL: "clusters/np",
        hosted_key.TARGET_CONFIG: HASHES[0],
        hosted_key.TOKEN_EXPIRATION: text,
    }
    place.sites[ONE].annotate(name, notes)
    place.put(ONE, place.sites[ONE].secrets[name])
    place.wait_for(token, HTTPStatus(status))
    assert place.fetch(token).status == status


def pack(text: bytes) -> bytes:
    return base64.b64encode(gzip.compress(text))


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"config": b"H4sI"}, "expected gzip in base64 of at most 8388608 bytes"),
        ({"config": pack(b"[]")}, "expected an object"),
        ({"config": pack(b"{")}, "config"),
        ({"config": b"", "payload": pack(b"{}")}, "expected a file"),
        ({"config": b""}, "expected gzip"),
        ({"os-image": b"quay.example/other"}, "os-image: expected osImageURL of the config"),
    ],
)
def test_broken_config_is_named(place: HostedPlace, values: dict[str, bytes], error: str) -> None:
    token = place.sync(ONE)
    secret = place.sites[ONE].secrets[f"token-np-{HASHES[0]}"]
    data = secret["data"]
    assert isinstance(data, dict)
    texts = {name: base64.b64encode(value).decode() for name, value in values.items()}
    place.put(ONE, {**secret, "data": {**data, **texts}})
    wait_until(lambda: place.fetch(token).status == 500, limit_s=LIMIT_S)
    found = place.fetch(token).json["error"]
    assert found.startswith(f"cannot serve a config: Secret {ONE}/token-np-{HASHES[0]}: ")
    assert error in found
    assert place.read_reached(ONE) is None


def test_in_place_pool_is_served_from_its_payload(place: HostedPlace) -> None:
    config = make_config(HASHES[0])
    token = place.sync(ONE, pool=make_pool("InPlace"), config=config)
    found = place.fetch(token)
    served = json.loads(read_file(found.json, node_paths.SERVED_CONFIG))
    assert (found.status, served["metadata"]["name"]) == (200, HASHES[0])


def test_token_of_two_secrets_serves_neither(place: HostedPlace) -> None:
    """A user who may write Secrets beside one control plane must not serve machines of another."""
    token = place.sync(ONE)
    place.put(TWO, place.sites[ONE].secrets[f"token-np-{HASHES[0]}"])
    place.wait_for(token, HTTPStatus.NETWORK_AUTHENTICATION_REQUIRED)


def test_machine_gets_the_kubeconfig_of_its_control_plane(place: HostedPlace) -> None:
    token = place.sync(ONE)
    for namespace in (ONE, TWO):
        text = base64.b64encode(f"kubeconfig of {namespace}".encode()).decode()
        secret = {"metadata": {"name": "bootstrap-kubeconfig"}, "data": {"kubeconfig": text}}
        place.put(namespace, secret)
    found = wait_until(
        lambda: read_file(place.fetch(token).json, node_paths.KUBECONFIG), limit_s=LIMIT_S
    )
    assert found == f"kubeconfig of {ONE}"


def test_fifty_machines_behind_one_address_are_served_by_one_rendering(
    place: HostedPlace, caplog: pytest.LogCaptureFixture
) -> None:
    token = place.sync(ONE)
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(50) as machines:
        found = [*machines.map(lambda _: place.fetch(token).status, range(50))]
    assert found == [200] * 50
    assert sum("built the config" in record.message for record in caplog.records) == 1
    place.sites[ONE].now += 6 * HOUR
    assert place.fetch(place.sync(ONE)).status == 200
    # Another token of the same config.
    assert sum("built the config" in record.message for record in caplog.records) == 1


def test_labels_select_what_the_server_reads(place: HostedPlace) -> None:
    token = place.sync(ONE)
    secret = place.sites[ONE].secrets[f"token-np-{HASHES[0]}"]
    metadata = secret["metadata"]
    assert isinstance(metadata, dict)
    place.put(ONE, {**secret, "metadata": {**metadata, "labels": {}}})
    place.wait_for(token, HTTPStatus.NETWORK_AUTHENTICATION_REQUIRED)
