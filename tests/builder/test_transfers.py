"""`transfer_blobs`: several connections, and the end after a failure."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Barrier, Event

import pytest

from treenail.clocks import SystemClock
from treenail.errors import HostError
from treenail.oci_content import compute_digest
from treenail.registry.client import RegistryClient
from treenail.registry.images import transfer_blobs
from treenail.registry.names import Descriptor

LIMIT_S = 30.0


def make_blobs(count: int) -> list[Descriptor]:
    return [Descriptor("x", compute_digest(b"%d" % size), size) for size in range(1, count + 1)]


@contextmanager
def open_client() -> Iterator[RegistryClient]:
    yield RegistryClient("registry.example.com", SystemClock())


def test_blobs_are_transferred_at_the_same_time_over_three_clients() -> None:
    meeting = Barrier(3)
    clients = set()
    seen = []

    def transfer(client: RegistryClient, blob: Descriptor, _failed: Event) -> None:
        clients.add(id(client))
        seen.append(blob.size)
        meeting.wait(LIMIT_S)

    transfer_blobs(make_blobs(3), open_client, transfer)
    assert len(clients) == 3
    assert sorted(seen) == [1, 2, 3]


def test_failed_transfer_ends_the_others_with_its_error() -> None:
    seen = []

    def transfer(_client: RegistryClient, blob: Descriptor, has_failed: Event) -> None:
        seen.append(blob.size)
        if blob.size == 19:
            raise HostError("cannot push")
        assert has_failed.wait(LIMIT_S)

    with pytest.raises(HostError, match="cannot push"):
        transfer_blobs(make_blobs(20), open_client, transfer, connections=3)
    assert set(seen) <= {18, 19, 20}


def test_no_blobs_need_no_client() -> None:
    transfer_blobs([], open_client, lambda *_: pytest.fail("transferred"))
