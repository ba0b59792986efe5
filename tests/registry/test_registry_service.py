"""The registry of tests itself: logins, faults, a full disk and a new password."""

import hashlib
import http.client
import json
import ssl
from collections.abc import Mapping

import pytest

from tests.registry.real_registry import (
    PULLER,
    PUSHER,
    FaultKind,
    RegistryFault,
    RegistryService,
    needs_docker_registry,
)

CONTENT = b"a layer of an image" * 100
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


def ask(
    service: RegistryService,
    user: str,
    method: str,
    path: str,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Mapping[str, str], bytes]:
    login = json.loads(service.make_auth_json(user))["auths"][service.host]["auth"] if user else ""
    context = ssl.create_default_context(cafile=str(service.ca_file))
    connection = http.client.HTTPSConnection(service.host, context=context, timeout=20)
    try:
        fields = dict(headers or {}) | ({"Authorization": f"Basic {login}"} if login else {})
        connection.request(method, path, content, fields)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, answer.read()
    finally:
        connection.close()


def push_blob(service: RegistryService, user: str, content: bytes = CONTENT) -> int:
    status, headers, _ = ask(service, user, "POST", "/v2/os/node/blobs/uploads/")
    if status != 202:
        return status
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    place = f"{headers['location']}&digest={digest}"
    return ask(service, user, "PUT", place, content)[0]


def test_registry_refuses_requests_without_a_login(any_registry: RegistryService) -> None:
    status, headers, content = ask(any_registry, "", "GET", "/v2/")
    assert status == 401
    assert headers["www-authenticate"].startswith("Basic ")
    assert json.loads(content)["errors"][0]["code"] == "UNAUTHORIZED"


def test_login_for_pulls_reads_what_the_other_login_pushed(any_registry: RegistryService) -> None:
    assert push_blob(any_registry, PUSHER) == 201
    assert push_blob(any_registry, PULLER) == 403
    status, _, content = ask(any_registry, PULLER, "GET", f"/v2/os/node/blobs/{DIGEST}")
    assert (status, content) == (200, CONTENT)


def test_old_password_is_refused_after_its_rotation(any_registry: RegistryService) -> None:
    assert ask(any_registry, PUSHER, "GET", "/v2/")[0] == 200
    old = any_registry.passwords[PUSHER]
    any_registry.rotate_password(PUSHER, "push-password-2")
    assert ask(any_registry, PUSHER, "GET", "/v2/")[0] == 200
    any_registry.passwords[PUSHER] = old
    assert ask(any_registry, PUSHER, "GET", "/v2/")[0] == 401


def test_faults_apply_as_often_as_planned(lab_registry: RegistryService) -> None:
    fault = RegistryFault(FaultKind.STATUS, path="/v2/$", status=429, retry_after="7", times=2)
    lab_registry.faults.add(fault)
    answers = [ask(lab_registry, PUSHER, "GET", "/v2/") for _ in range(3)]
    assert [status for status, *_ in answers] == [429, 429, 200]
    assert answers[0][1]["retry-after"] == "7"


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.TRUNCATE])
def test_broken_connections_are_errors_of_the_client(
    lab_registry: RegistryService, kind: FaultKind
) -> None:
    lab_registry.faults.add(RegistryFault(kind, path="/v2/$", after_bytes=1))
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(lab_registry, PUSHER, "GET", "/v2/")


@pytest.mark.process
@pytest.mark.parametrize(
    "is_real", [pytest.param(True, marks=needs_docker_registry, id="docker-registry"), False]
)
def test_full_registry_answers_500_and_names_the_space(is_real: bool) -> None:
    with RegistryService(is_real=is_real, storage_bytes=256 * 1024) as service:
        assert push_blob(service, PUSHER) == 201
        status, headers, _ = ask(service, PUSHER, "POST", "/v2/os/node/blobs/uploads/")
        assert status == 202
        large = bytes(1024 * 1024)
        status, _, content = ask(service, PUSHER, "PATCH", headers["location"], large)
        assert status == 500
        assert b"no space left" in content
