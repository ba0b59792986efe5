"""The connection to a hosted cluster: which kubeconfig, and what is written without the lead."""

from base64 import b64encode
from pathlib import Path
from typing import Any, cast

import pytest

from tests.controllers.hosted.conduct.world import Api
from tests.fixtures import hosted
from tests.fixtures.controllers import CLOCK
from tests.waiting import wait_until
from treenail.api.hosted.nodepool import HostedControlPlane
from treenail.controllers.hosted.conduct.guests import GuestCluster
from treenail.controllers.hosted.guest_kubeconfig import load_guest_config
from treenail.errors import NotFoundError, NotLeaderError, TreenailError, UsageError
from treenail.kube.resources import NODES, SECRETS
from treenail.kube.transport.kubeconfig import ApiServerConfig, read_kubeconfig
from treenail_lab.apiserver.serving.server import LabServer

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: admin
contexts: [{name: admin, context: {cluster: guest, user: admin}}]
clusters: [{name: guest, cluster: {server: "https://SERVER:6443"}}]
users: [{name: admin, user: {token: secret-token}}]
"""


def load(
    name: str, key: str, text: bytes, *, names_secret: bool = True, has_plane: bool = True
) -> ApiServerConfig:
    api = Api(lambda: 0.0)
    api.put(SECRETS, {"metadata": {"name": name}, "data": {key: b64encode(text).decode()}})
    document = hosted.make_control_plane()
    if not names_secret:
        del document["status"]["kubeConfig"]
    plane = HostedControlPlane.from_json(document) if has_plane else None
    return load_guest_config(cast("Any", api), "", plane, "made-by-others")


@pytest.mark.parametrize(
    ("name", "key", "settings"),
    [
        ("admin-kubeconfig", "kubeconfig", {}),
        ("one-kubeconfig", "value", {"names_secret": False}),
        ("made-by-others-kubeconfig", "value", {"has_plane": False}),
    ],
)
def test_kubeconfig_is_that_of_the_control_plane_else_of_cluster_api(
    name: str, key: str, settings: dict[str, bool]
) -> None:
    config = load(name, key, KUBECONFIG.encode(), **settings)
    assert (config.server, config.token) == ("https://SERVER:6443", "secret-token")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("other", KUBECONFIG.encode(), "not found"),
        ("admin-kubeconfig", b"", "current-context is not set"),
        ("admin-kubeconfig", b"\xff\xfe", "key kubeconfig is not base64 of a text"),
        ("admin-kubeconfig", b"[", "is neither JSON nor YAML"),
        ("admin-kubeconfig", b"{}", "current-context is not set"),
        ("admin-kubeconfig", KUBECONFIG.replace("token:", "tokenFile:").encode(), "names a file"),
        ("admin-kubeconfig", KUBECONFIG.replace("token: secret-token", "exec: {a: b}").encode(),
         "exec is not supported"),
    ],
)  # fmt: skip
def test_kubeconfig_that_cannot_be_used_is_refused(name: str, text: bytes, problem: str) -> None:
    with pytest.raises(TreenailError, match=problem) as failed:
        load(name, "kubeconfig", text)
    assert isinstance(failed.value, NotFoundError | UsageError)
    assert "secret-token" not in f"{failed.value}{failed.value.remedy}"


@pytest.mark.integration
def test_process_without_the_lead_writes_nothing_to_a_hosted_cluster(tmp_path: Path) -> None:
    with LabServer(tmp_path) as server:
        config = read_kubeconfig(str(server.admin_kubeconfig))
        leads = [True]
        synced: list[str] = []

        def sync(pool: str, guest: GuestCluster) -> None:
            synced.append(f"{pool} {guest.stale_reason}")

        guest = GuestCluster(lambda: config, sync, lambda: leads[0], CLOCK)
        guest.add("clusters/np")
        wait_until(lambda: "clusters/np " in synced)
        leads[0] = False
        with pytest.raises(NotLeaderError):
            guest.client.patch(NODES, "m0", {"metadata": {}})
        assert server.count_requests(verb="patch") == 0
        guest.close()
        assert guest.get_nodes() == {}
