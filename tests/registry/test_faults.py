"""Faults of a real registry: the right error, bounded retries, and recovery."""

import socket

import pytest

from tests.fakes.clock import FakeClock
from tests.registry.images import OCI_LAYER, make_client, make_layer, push_image
from tests.registry.real_registry import FaultKind, RegistryFault, RegistryService
from tests.registry.test_client import SMALL_CHUNKS, make_content, read_blob
from treenail.registry.client import RegistryClient
from treenail.registry.errors import (
    Busy,
    Denied,
    DigestMismatch,
    LoginRefused,
    NotFound,
    RegistryError,
    ServerFailure,
    TooLarge,
    Unreachable,
    Unsupported,
)
from treenail.registry.transport import RegistryLimits
from treenail.registry.uploads import upload_bytes

ERRORS: dict[int, type[RegistryError]] = {
    401: LoginRefused,
    403: Denied,
    404: NotFound,
    405: Unsupported,
    413: TooLarge,
    429: Busy,
    500: ServerFailure,
    503: ServerFailure,
    507: ServerFailure,
}


@pytest.mark.parametrize("status", ERRORS)
def test_lasting_status_is_its_error_after_bounded_tries(
    lab_registry: RegistryService, status: int
) -> None:
    fault = RegistryFault(
        FaultKind.STATUS, path="/manifests/", status=status, times=0, retry_after="3"
    )
    lab_registry.faults.add(fault)
    client = make_client(lab_registry)
    with pytest.raises(ERRORS[status]) as raised:
        client.get_manifest("os/node", "base")
    assert raised.value.status == status
    is_retried = status in {429, 500, 503}
    assert len(lab_registry.front.requests) == {True: 5, False: 1}[is_retried] + (status == 401)
    if isinstance(raised.value, Busy):
        assert raised.value.retry_after_s == 3.0


@pytest.mark.parametrize("kind", [FaultKind.STATUS, FaultKind.DROP, FaultKind.TRUNCATE])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT"])
def test_short_outage_is_bridged(
    lab_registry: RegistryService, kind: FaultKind, method: str
) -> None:
    lab_registry.faults.add(RegistryFault(kind, method=method, status=503, times=2, after_bytes=1))
    client = make_client(lab_registry)
    pushed = push_image(client, layers=[make_layer({"etc/a": b"a"})])
    found = client.head_manifest("os/node", "base")
    assert found.digest == pushed.digest
    assert client.get_manifest("os/node", "base").digest == pushed.digest


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.CUT, FaultKind.LOSE, FaultKind.STATUS])
@pytest.mark.parametrize("method", ["PATCH", "PUT"])
def test_interrupted_upload_arrives_complete(
    any_registry: RegistryService, kind: FaultKind, method: str
) -> None:
    fault = RegistryFault(
        kind, method=method, path="/uploads/", status=500, times=1, after_bytes=20_000
    )
    any_registry.faults.add(fault)
    content = make_content(200_000)
    client = make_client(any_registry, limits=SMALL_CHUNKS)
    blob = upload_bytes(client, "os/node", OCI_LAYER, content)
    assert read_blob(any_registry, "os/node", blob) == content


@pytest.mark.process
def test_upload_continues_at_the_confirmed_position() -> None:
    with RegistryService(is_real=False) as service:
        fault = RegistryFault(FaultKind.CUT, method="PATCH", after_bytes=20_000)
        service.faults.add(fault)
        client = make_client(service, limits=SMALL_CHUNKS)
        upload_bytes(client, "os/node", OCI_LAYER, make_content(100_000))
        posts = [method for method, *_ in service.front.requests if method == "POST"]
        assert len(posts) == 1


def test_changed_content_is_a_digest_mismatch(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    pushed = push_image(client)
    lab_registry.faults.add(RegistryFault(FaultKind.CORRUPT, method="GET", times=0))
    with pytest.raises(DigestMismatch):
        client.get_manifest("os/node", pushed.digest)
    lab_registry.faults.clear()
    lab_registry.faults.add(RegistryFault(FaultKind.WRONG_DIGEST, method="HEAD"))
    with pytest.raises(DigestMismatch):
        client.head_manifest("os/node", pushed.digest)
    lab_registry.faults.add(RegistryFault(FaultKind.WRONG_DIGEST, method="PUT"))
    content = client.get_manifest("os/node", "base")
    with pytest.raises(DigestMismatch):
        client.put_manifest("os/node", "base", content.media_type, content.content)


def test_hung_registry_is_unreachable_within_the_limit(lab_registry: RegistryService) -> None:
    lab_registry.faults.add(RegistryFault(FaultKind.HANG, times=0))
    client = make_client(lab_registry, limits=RegistryLimits(idle_s=0.1))
    with pytest.raises(Unreachable, match="does not answer in time"):
        client.get_manifest("os/node", "base")


def test_stopped_registry_is_unreachable_until_it_answers(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    push_image(client)
    lab_registry.stop_backend()
    with pytest.raises(Unreachable):
        client.get_manifest("os/node", "base")
    lab_registry.start_backend()
    assert client.get_manifest("os/node", "base")


def test_closed_port_and_unknown_host_are_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for host in (f"127.0.0.1:{port}", "registry.invalid:5000"):
        with pytest.raises(Unreachable) as raised:
            RegistryClient(host, FakeClock()).get_manifest("os/node", "base")
        assert host in str(raised.value)
