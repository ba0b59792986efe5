"""Bearer logins: tokens are fetched for the actions that are needed, and leak nowhere."""

from collections.abc import Iterator

import pytest

from tests.fakes.clock import FakeClock
from tests.registry.images import make_client
from tests.registry.real_registry import FaultKind, RegistryFault, RegistryService
from tests.registry.scripted_server import ScriptedServer, make_answer
from tests.registry.test_hostile_registry import MANIFEST
from tests.registry.token_server import PASSWORD, TokenRegistry, TokenServer
from treenail.oci_content import OCI_MANIFEST
from treenail.registry.authorization import Login
from treenail.registry.client import RegistryClient
from treenail.registry.errors import AnswerInvalid, LoginRefused, RegistryError, ServerFailure
from treenail.registry.transport import TlsSettings


class Site:
    def __init__(self, tokens: TokenServer, registry: TokenRegistry, clock: FakeClock) -> None:
        self.tokens = tokens
        self.registry = registry
        self.clock = clock

    def make_client(self, login: Login | None = None) -> RegistryClient:
        host = self.registry.server.host
        return RegistryClient(host, self.clock, login=login, tls=TlsSettings(is_plain=True))

    @property
    def token_requests(self) -> int:
        return len(self.tokens.server.requests)


@pytest.fixture
def site() -> Iterator[Site]:
    clock = FakeClock()
    tokens = TokenServer(clock)
    registry = TokenRegistry(tokens, MANIFEST, OCI_MANIFEST)
    with tokens.server, registry.server:
        yield Site(tokens, registry, clock)


ROBOT = Login("robot", PASSWORD)


def push(client: RegistryClient) -> str:
    return client.put_manifest("os/node", "tag", OCI_MANIFEST, MANIFEST)


def test_token_is_fetched_once_for_each_scope(site: Site) -> None:
    client = site.make_client(ROBOT)
    for _again in range(3):
        client.get_manifest("os/node", "tag")
    assert site.token_requests == 1
    push(client)
    push(client)
    assert site.token_requests == 2
    assert "scope=repository%3Aos%2Fnode%3Apull%2Cpush" in site.tokens.server.requests[1].target
    assert "service=the+registry" in site.tokens.server.requests[1].target


def test_ended_token_is_fetched_again(site: Site) -> None:
    client = site.make_client(ROBOT)
    client.get_manifest("os/node", "tag")
    site.clock.move(61)
    client.get_manifest("os/node", "tag")
    assert site.token_requests == 2


def test_token_that_ended_early_is_fetched_again(site: Site) -> None:
    client = site.make_client(ROBOT)
    client.get_manifest("os/node", "tag")
    site.tokens.issued.clear()
    client.get_manifest("os/node", "tag")
    assert site.token_requests == 2


def test_anonymous_client_gets_a_token_for_pulls_only(site: Site) -> None:
    client = site.make_client()
    client.get_manifest("os/node", "tag")
    with pytest.raises(LoginRefused):
        push(client)
    assert all("authorization" not in each.headers for each in site.tokens.server.requests)


def test_identity_token_is_exchanged_in_the_body(site: Site) -> None:
    client = site.make_client(Login(identity_token=site.tokens.identity_token))
    client.get_manifest("os/node", "tag")
    assert [each.method for each in site.tokens.server.requests] == ["POST"]
    assert site.tokens.identity_token not in site.tokens.server.requests[0].target


def test_missing_permission_is_a_refused_login_after_few_requests(site: Site) -> None:
    site.tokens.granted = {"os/node": "pull"}
    client = site.make_client(ROBOT)
    with pytest.raises(LoginRefused) as raised:
        push(client)
    assert len(site.registry.server.requests) <= 3
    assert "token-canary" not in str(raised.value)


def test_wrong_password_at_the_token_server_is_a_refused_login(site: Site) -> None:
    with pytest.raises(LoginRefused, match="the token server"):
        site.make_client(Login("robot", "wrong-canary")).get_manifest("os/node", "tag")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (make_answer(200, b"{}"), AnswerInvalid),
        (make_answer(200, b'{"token": "a\\r\\nb"}'), AnswerInvalid),
        (make_answer(200, b'{"token": 5}'), AnswerInvalid),
        (make_answer(200, b"x" * 300_000), AnswerInvalid),
        (make_answer(503, b""), ServerFailure),
        (make_answer(302, b"", Location="http://127.0.0.2/"), AnswerInvalid),
    ],
)
def test_bad_answer_of_the_token_server_is_an_error(
    site: Site, answer: bytes, expected: type[RegistryError]
) -> None:
    site.tokens.answer = answer
    with pytest.raises(expected) as raised:
        site.make_client(ROBOT).get_manifest("os/node", "tag")
    assert PASSWORD not in str(raised.value)


@pytest.mark.process
def test_token_server_without_tls_gets_no_login_of_a_registry_with_tls() -> None:
    with ScriptedServer(lambda _: make_answer(200)) as tokens:
        with RegistryService(is_real=False) as service:
            challenge = f'Bearer realm="http://{tokens.host}/"'
            service.faults.add(
                RegistryFault(FaultKind.STATUS, status=401, times=0, challenge=challenge)
            )
            with pytest.raises(AnswerInvalid, match="https"):
                make_client(service).get_manifest("os/node", "tag")
        assert tokens.requests == []
