"""PodSecurity levels of a namespace."""

import pytest

from tests.contract.client import Json
from tests.contract.space import Space, pod
from tests.waiting import wait_until

RESTRICTED: Json = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def enforce(space: Space, level: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level}
    path = f"/api/v1/namespaces/{space.name}"
    space.cluster.patch(path, {"metadata": {"labels": labels}}).ok()


def forbid(space: Space, body: Json) -> str:
    """Return why the pod is forbidden; admission may see the labels of the namespace later."""
    post = space.cluster.post
    at = space.at("pods")
    wait_until(lambda: post(f"{at}?dryRun=All", body).verdict == (403, "Forbidden"))
    answer = post(at, body)
    assert answer.verdict == (403, "Forbidden")
    message: str = answer.body["message"]
    return message


def make_pod(context: Json | None, **spec: object) -> Json:
    found = pod("p")
    found["spec"] |= spec
    if context is not None:
        found["spec"]["containers"][0]["securityContext"] = context
    return found


@pytest.mark.parametrize(
    ("level", "context", "reason"),
    [
        ("baseline", {"capabilities": {"add": ["SYS_ADMIN"]}}, "non-default capabilities"),
        ("baseline", {"privileged": True}, "privileged"),
        ("baseline", {"seccompProfile": {"type": "Unconfined"}}, "seccompProfile"),
        ("restricted", None, "allowPrivilegeEscalation != false"),
        ("restricted", RESTRICTED | {"runAsNonRoot": False}, "runAsNonRoot != true"),
        ("restricted", RESTRICTED | {"capabilities": {"drop": []}}, "unrestricted capabilities"),
    ],
)
def test_pod_beyond_the_level_is_forbidden(
    space: Space, level: str, context: Json | None, reason: str
) -> None:
    enforce(space, level)
    message = forbid(space, make_pod(context))
    begin = f'pods "p" is forbidden: violates PodSecurity "{level}:latest": '
    assert message.startswith(begin)
    assert reason in message.removeprefix(begin)


def test_host_path_is_beyond_the_baseline(space: Space) -> None:
    enforce(space, "baseline")
    volumes = [{"name": "v", "hostPath": {"path": "/etc"}}]
    assert "hostPath volumes" in forbid(space, make_pod(None, volumes=volumes))


@pytest.mark.parametrize(
    ("level", "context"),
    [
        ("baseline", {"capabilities": {"add": ["SETUID"]}, "runAsUser": 0}),
        ("restricted", RESTRICTED),
        ("privileged", {"privileged": True}),
    ],
)
def test_pod_within_the_level_is_created(space: Space, level: str, context: Json) -> None:
    enforce(space, level)
    assert space.cluster.post(space.at("pods"), make_pod(context)).code == 201
