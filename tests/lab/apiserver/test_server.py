"""The server as a thing one starts, stops and gets credentials from."""

import asyncio
import json
import socket
import ssl
import stat
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.contract.client import Cluster
from treenail_lab.apiserver.access.authentication import ApiUser
from treenail_lab.apiserver.registry.registry import WriteContext
from treenail_lab.apiserver.serving.server import ApiServer, LabServer

NODES = "/api/v1/nodes"


def add_node(cluster: Cluster, name: str) -> None:
    cluster.post(NODES, {"metadata": {"name": name}}).ok()


def test_server_after_outage_has_its_state(lab: LabServer, admin: Cluster) -> None:
    add_node(admin, "a")
    url, before = lab.url, admin.get(f"{NODES}/a").ok()
    lab.stop()
    with pytest.raises(ConnectionRefusedError):
        admin.get(f"{NODES}/a")
    lab.start()
    assert lab.url == url
    assert admin.get(f"{NODES}/a").body == before


def test_server_stop_ends_watches(lab: LabServer, admin: Cluster) -> None:
    with admin.watch(NODES) as events:
        lab.stop()
        assert list(events) == []


def test_server_stop_ends_connections_without_a_handshake_or_an_answer(lab: LabServer) -> None:
    address = ("127.0.0.1", urlsplit(lab.url).port)
    token = lab.issue_token("admin", ["system:masters"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(address, 5) as silent,
        context.wrap_socket(socket.create_connection(address, 5)) as watching,
    ):
        lines = (
            f"GET {NODES}?watch=true HTTP/1.1",
            "Host: lab",
            f"Authorization: Bearer {token}",
        )
        watching.sendall("\r\n".join((*lines, "", "")).encode())
        assert watching.recv(8) == b"HTTP/1.1"
        lab.api.watches.cut_watches()
        lab.stop()
        # The peer's socket, below TLS: it answers nothing, and sees the end.
        below = socket.socket(fileno=watching.detach())
        for connection in (silent, below):
            with connection, suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass


def test_server_that_stops_ends_a_connection_that_it_just_accepted(tmp_path: Path) -> None:
    async def stop_after_turns(turns: int) -> None:
        server = ApiServer(tmp_path)
        await server.start()
        with socket.create_connection(("127.0.0.1", urlsplit(server.url).port), 5) as peer:
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop()
            with suppress(ConnectionResetError):
                assert peer.recv(1) == b""

    for turns in range(6):
        asyncio.run(stop_after_turns(turns))


def test_watches_whose_clients_left_log_no_error(
    lab: LabServer, admin: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    def leave_and_create(clients: ExitStack, attempt: int, api: ApiServer) -> None:
        # Between two requests: the server writes the events before it sees the clients leave.
        clients.close()
        kind = api.kinds.find_kind("", "v1", "nodes")
        write = WriteContext(ApiUser("kubernetes-admin", ()), "test")
        for number in range(20):
            node = {"metadata": {"name": f"{attempt}-{number}"}}
            api.registry.create_object(kind, "", node, write)

    for attempt in range(5):
        clients = ExitStack()
        for _ in range(5):
            clients.enter_context(admin.watch(NODES))
        lab.call_api(partial(leave_and_create, clients, attempt))
    lab.stop()
    assert [each.getMessage() for each in caplog.records if each.name.startswith("aiohttp")] == []


def test_stop_of_stopped_server_does_nothing(tmp_path: Path) -> None:
    LabServer(tmp_path).stop()


def test_credentials_survive_server_restart(tmp_path: Path) -> None:
    with LabServer(tmp_path) as first:
        kubeconfig = first.admin_kubeconfig
        token = first.issue_token("robot", ["system:masters"])
        port = int(first.url.rpartition(":")[2])
    with LabServer(tmp_path, port):
        admin = Cluster.of_kubeconfig(kubeconfig)
        assert admin.get(NODES).code == 200
        assert admin.as_bearer(token).get(NODES).code == 200


def test_secrets_on_disk_are_for_their_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / "lab"
    with LabServer(directory) as lab:
        made = [
            lab.admin_kubeconfig,
            lab.write_node_kubeconfig("a"),
            lab.write_kubeconfig("system:serviceaccount:x:y", ["z"]),
            directory / "ca.key",
            directory / "token.key",
            directory / "server.pem",
        ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(set(made)) == len(made)


def test_kubeconfig_needs_no_other_file(lab: LabServer) -> None:
    document = json.loads(lab.write_node_kubeconfig("a").read_text())
    assert document["clusters"][0]["cluster"].keys() == {"server", "certificate-authority-data"}
    assert document["users"][0]["user"].keys() == {"client-certificate-data", "client-key-data"}
    assert document["users"][0]["name"] == "system:node:a"


def test_certificates_name_user_and_groups(lab: LabServer) -> None:
    lone = Cluster.of_kubeconfig(lab.write_kubeconfig("lone"))
    assert 'User "lone" cannot list' in lone.get(NODES).body["message"]
    master = Cluster.of_kubeconfig(lab.write_kubeconfig("boss", ["staff", "system:masters"]))
    assert master.get(NODES).code == 200


def test_request_without_credential_is_unauthorized(lab: LabServer) -> None:
    context = ssl.create_default_context(cafile=str(lab.ca_file))
    anonymous = Cluster(lab.url, context)
    assert anonymous.get(NODES).verdict == (401, "Unauthorized")
    assert anonymous.get("/version").verdict == (401, "Unauthorized")
    assert anonymous.get("/healthz").code == 200


@pytest.mark.parametrize("tail", ["", "x", ".x"])
def test_token_with_another_signature_is_unauthorized(
    lab: LabServer, admin: Cluster, tail: str
) -> None:
    token = lab.issue_token("robot", ["system:masters"])
    forged = token.rpartition(".")[0] + tail
    assert admin.as_bearer(forged).get(NODES).code == 401


def test_certificate_of_another_authority_is_refused(lab: LabServer, tmp_path: Path) -> None:
    with LabServer(tmp_path / "other") as other:
        document = json.loads(other.admin_kubeconfig.read_text())
    mine = json.loads(lab.admin_kubeconfig.read_text())
    document["clusters"] = mine["clusters"]
    mixed = tmp_path / "mixed"
    mixed.write_text(json.dumps(document))
    with pytest.raises((ssl.SSLError, OSError)):
        Cluster.of_kubeconfig(mixed).get(NODES)


def test_only_masters_may_impersonate(lab: LabServer) -> None:
    lone = Cluster.of_kubeconfig(lab.write_kubeconfig("lone"))
    answer = lone.as_user("boss", "system:masters").get(NODES)
    assert answer.verdict == (403, "Forbidden")
    assert 'cannot impersonate resource "users"' in answer.body["message"]


def test_server_runs_in_given_event_loop(tmp_path: Path) -> None:
    async def serve() -> int:
        server = ApiServer(tmp_path)
        await server.start()
        try:
            cluster = Cluster.of_kubeconfig(server.admin_kubeconfig)
            answer = await asyncio.to_thread(cluster.get, NODES)
            return answer.code
        finally:
            await server.stop()

    assert asyncio.run(serve()) == 200


def test_port_in_use_is_an_error(lab: LabServer, tmp_path: Path) -> None:
    port = int(lab.url.rpartition(":")[2])
    with pytest.raises(OSError, match="Address already in use"):
        LabServer(tmp_path / "second", port).start()


def test_body_that_is_too_large_is_refused(admin: Cluster) -> None:
    node = {"metadata": {"name": "a", "labels": {"x": "y" * 4_000_000}}}
    assert admin.post(NODES, node).verdict == (413, "RequestEntityTooLarge")


def test_config_as_large_as_etcd_takes_is_accepted(admin: Cluster) -> None:
    secret = {"metadata": {"name": "a"}, "data": {"x": "eHh4" * 350_000}}
    at = "/api/v1/namespaces/default/secrets"
    assert admin.post(at, secret).ok()["data"] == secret["data"]


def test_discovery_requests_of_kubectl_are_answered(admin: Cluster) -> None:
    index = admin.get("/openapi/v3").ok()["paths"]
    assert {"api/v1", "apis/apps/v1"} <= index.keys()
    described = admin.get(index["api/v1"]["serverRelativeURL"]).ok()
    patch = described["paths"]["/api/v1/nodes/{name}"]["patch"]
    assert "fieldValidation" in {one["name"] for one in patch["parameters"]}
    assert admin.get("/openapi/v3/apis/unknown/v1").code == 404
    assert admin.get("/openapi/v2").code == 404
