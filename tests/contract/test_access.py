"""Authentication and authorization (RBAC)."""

from collections.abc import Iterator

import pytest

from tests.contract.client import Cluster
from tests.contract.space import Space, config_map
from tests.waiting import wait_until

RBAC = "rbac.authorization.k8s.io/v1"


@pytest.fixture
def guest(space: Space) -> Cluster:
    """A client with a service account without permissions."""
    space.cluster.post(space.at("serviceaccounts"), {"metadata": {"name": "guest"}}).ok()
    answer = space.cluster.post(space.at("serviceaccounts", "guest", "token"), {"spec": {}})
    assert answer.code == 201
    return space.cluster.as_bearer(answer.body["status"]["token"])


def grant(space: Space, *rules: dict[str, list[str]]) -> None:
    """Grant the guest verbs in the namespace."""
    role = {"metadata": {"name": "guest"}, "rules": list(rules)}
    space.cluster.post(space.at("roles", group=RBAC), role).ok()
    binding = {
        "metadata": {"name": "guest"},
        "roleRef": {"apiGroup": RBAC.partition("/")[0], "kind": "Role", "name": "guest"},
        "subjects": [{"kind": "ServiceAccount", "name": "guest", "namespace": space.name}],
    }
    space.cluster.post(space.at("rolebindings", group=RBAC), binding).ok()


def rule(*verbs: str, resources: list[str], names: list[str] | None = None) -> dict[str, list[str]]:
    found = {"apiGroups": [""], "resources": resources, "verbs": list(verbs)}
    return found | ({"resourceNames": names} if names else {})


def test_wrong_token_is_unauthorized(space: Space) -> None:
    answer = space.cluster.as_bearer("wrong").get(space.at("configmaps"))
    assert answer.verdict == (401, "Unauthorized")
    assert answer.body["message"] == "Unauthorized"


def test_request_without_a_rule_is_forbidden(space: Space, guest: Cluster) -> None:
    user = f"system:serviceaccount:{space.name}:guest"
    listing = guest.get(space.at("configmaps"))
    assert listing.verdict == (403, "Forbidden")
    assert listing.body["message"] == (
        f'configmaps is forbidden: User "{user}" cannot list resource "configmaps" in API group '
        f'"" in the namespace "{space.name}"'
    )
    reading = guest.get("/api/v1/nodes/some")
    assert reading.body["message"] == (
        f'nodes "some" is forbidden: User "{user}" cannot get resource "nodes" in API group "" at '
        "the cluster scope"
    )
    assert reading.body["details"] == {"name": "some", "kind": "nodes"}


def test_request_for_missing_object_without_a_rule_is_forbidden(
    space: Space, guest: Cluster
) -> None:
    assert guest.get(space.at("configmaps", "absent")).verdict == (403, "Forbidden")
    assert guest.delete(space.at("configmaps", "absent")).verdict == (403, "Forbidden")


def test_role_allows_its_verbs_in_its_namespace(space: Space, guest: Cluster) -> None:
    grant(space, rule("get", "list", "create", resources=["configmaps"]))
    at = space.at("configmaps")
    wait_until(lambda: guest.get(at).code == 200)
    assert guest.post(at, config_map("a")).code == 201
    assert guest.get(space.at("configmaps", "a")).code == 200
    assert guest.patch(space.at("configmaps", "a"), {}).code == 403
    assert guest.get(space.at("secrets")).code == 403
    assert guest.get("/api/v1/namespaces/default/configmaps").code == 403
    assert guest.get("/api/v1/configmaps").code == 403


def test_role_for_names_allows_these_names_only(space: Space, guest: Cluster) -> None:
    for name in ("mine", "theirs"):
        space.config_map(name)
    grant(space, rule("get", "patch", "list", resources=["configmaps"], names=["mine"]))
    wait_until(lambda: guest.get(space.at("configmaps", "mine")).code == 200)
    assert guest.patch(space.at("configmaps", "mine"), {"data": {"x": "1"}}).code == 200
    assert guest.get(space.at("configmaps", "theirs")).code == 403
    assert guest.get(space.at("configmaps")).code == 403
    chosen = guest.get(space.at("configmaps"), fieldSelector="metadata.name=mine")
    assert chosen.code == 200


def test_subresource_needs_its_own_rule(space: Space, guest: Cluster) -> None:
    grant(space, rule("get", "patch", resources=["pods"]))
    wait_until(lambda: guest.get(space.at("pods", "p")).code == 404)
    assert guest.patch(space.at("pods", "p", "status"), {}).code == 403


@pytest.fixture
def reader(space: Space) -> Iterator[str]:
    """Create a ClusterRole that reads ConfigMaps."""
    name = space.name
    role = {"metadata": {"name": name}, "rules": [rule("get", "list", resources=["configmaps"])]}
    space.cluster.post(f"/apis/{RBAC}/clusterroles", role).ok()
    yield name
    space.cluster.delete(f"/apis/{RBAC}/clusterroles/{name}")


def test_cluster_role_can_be_bound_in_one_namespace(
    space: Space, guest: Cluster, reader: str
) -> None:
    binding = {
        "metadata": {"name": "guest"},
        "roleRef": {"apiGroup": RBAC.partition("/")[0], "kind": "ClusterRole", "name": reader},
        "subjects": [
            {
                "kind": "Group",
                "apiGroup": RBAC.partition("/")[0],
                "name": f"system:serviceaccounts:{space.name}",
            }
        ],
    }
    space.cluster.post(space.at("rolebindings", group=RBAC), binding).ok()
    wait_until(lambda: guest.get(space.at("configmaps")).code == 200)
    assert guest.get("/api/v1/namespaces/default/configmaps").code == 403


def test_role_of_a_binding_cannot_be_changed(space: Space) -> None:
    grant(space, rule("get", resources=["configmaps"]))
    answer = space.cluster.patch(
        space.at("rolebindings", "guest", group=RBAC), {"roleRef": {"name": "other"}}
    )
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueInvalid", "roleRef")}


def test_any_authenticated_user_may_discover(guest: Cluster) -> None:
    for path in ("/version", "/api", "/apis", "/api/v1"):
        assert guest.get(path).code == 200
    assert guest.get("/metrics").verdict == (403, "Forbidden")


def test_token_is_revoked_with_its_service_account(space: Space, guest: Cluster) -> None:
    assert guest.get(space.at("configmaps")).code == 403
    space.cluster.delete(space.at("serviceaccounts", "guest")).ok()
    wait_until(lambda: guest.get(space.at("configmaps")).code == 401, limit_s=30)


def test_server_reports_readiness(cluster: Cluster) -> None:
    assert cluster.get("/readyz").body == {"text": "ok"}
