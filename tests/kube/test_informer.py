"""The cache of a controller stays current and typed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.nodes import Nodes
from tests.kube.server import Json, serving
from tests.kube.test_transport import kubeconfig
from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.kube.api_client import Client
from treenail.kube.informer import Informer
from treenail.kube.resources import NODES
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.kube.watch import WatchScope


def pool(found: Json) -> str | None:
    """Return the pool label of a Node; None without one."""
    return found["metadata"]["labels"].get("pool")  # type: ignore[index,call-overload]  # a dict


@pytest.fixture
def nodes() -> Nodes:
    found = Nodes()
    found.put("a", pool="worker")
    found.put("b", pool="infra")
    found.put("c")
    return found


@pytest.fixture
def informer(tmp_path: Path, nodes: Nodes) -> Iterator[Informer[str]]:
    with serving(tmp_path, nodes.answer) as server:
        transport = HttpTransport(read_kubeconfig(kubeconfig(server)), SystemClock())
        found = Informer(
            Client(transport),
            WatchScope(NODES),
            SystemClock(),
            pool,
        )
        yield found
        found.stop()
        transport.close()
        nodes.end_watches()


def test_objects_are_found_by_key(informer: Informer[str], nodes: Nodes) -> None:
    assert not informer.has_synced
    informer.start()
    assert informer.wait_until_synced(10)

    assert informer.get_all() == {"a": "worker", "b": "infra"}
    assert (informer.find("a"), informer.find("c")) == ("worker", None)


def test_handlers_receive_object_before_and_after(informer: Informer[str], nodes: Nodes) -> None:
    changes: list[tuple[str, str | None, str | None]] = []
    informer.add_handler(lambda key, before, after: changes.append((key, before, after)))
    informer.start()
    wait_until(lambda: nodes.watching)
    nodes.put("a", pool="infra")
    nodes.put("b")
    nodes.put("c", pool="worker")
    nodes.remove("a")
    nodes.put("d")
    nodes.remove("d")
    nodes.put("c", pool="last")

    wait_until(lambda: changes and changes[-1][2] == "last")
    assert changes == [
        ("a", None, "worker"),
        ("b", None, "infra"),
        ("a", "worker", "infra"),
        ("b", "infra", None),
        ("c", None, "worker"),
        ("a", "infra", None),
        ("c", "worker", "last"),
    ]
    assert informer.get_all() == {"c": "last"}
