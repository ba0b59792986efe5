"""The status document of the page, from the watches of the controllers."""

import json
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api import decode
from treenail.clocks import Clock
from treenail.controllers.pools import node_facts, pool_membership, pool_views
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.controllers.status import leader_status, status_document, status_table
from treenail.kube import resources, watch

MAX_NODES = 10_000
"""Nodes in the document, of all pools together: about 5 MB. It counts the others."""
DOCUMENT_VERSION = "statuspage.treenail.io/v1"
_MIN_AGE_S = 1.0
_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """The document, encoded once for all readers."""

    plain: bytes
    compressed: bytes
    """With gzip."""


class StatusSource:
    """Builds the document, at most once a second for any number of readers. Thread-safe."""

    def __init__(
        self,
        informers: InformerSet,
        clock: Clock,
        *,
        image_key: str = key.DESIRED_OS_IMAGE,
        read_leader: Callable[[], leader_status.LeaderReport] | None = None,
    ) -> None:
        self._read_leader = read_leader
        self._informers = informers
        self._clock = clock
        self._pools = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGPOOLS), pool_membership.ObservedPool.from_json
        )
        self._nodes = informers.add_view(
            watch.WatchScope(resources.NODES),
            lambda node: node_facts.NodeFacts.from_json(node, image_key=image_key),
        )
        self._policies = pool_views.add_policy_view(informers)
        self._image_configs, self._image_builds = pool_views.add_build_views(informers)
        self._lock = threading.Lock()
        self._built_at = float("-inf")
        self._latest = EncodedDocument(b"", b"")

    def read_document(self) -> EncodedDocument:
        """Return the document with the present state of all pools and nodes."""
        with self._lock:
            now = self._clock.monotonic()
            if now - self._built_at >= _MIN_AGE_S:
                plain = json.dumps(self.build_document(), separators=(",", ":")).encode()
                encoder = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
                self._latest = EncodedDocument(plain, encoder.compress(plain) + encoder.flush())
                self._built_at = now
            return self._latest

    def build_document(self) -> decode.Json:
        """Build the document; ``problem`` says why it may be outdated."""
        now = self._clock.now()
        leader = None if self._read_leader is None else self._read_leader()
        rows = status_table.build_rows(
            self._pools.get_all(),
            self._nodes.get_all(),
            self._policies.get_all(),
            now=now,
            leader=leader,
            builds=status_table.find_pool_builds(
                self._image_configs.get_all(), self._image_builds.get_all(), now
            ),
        )
        document = status_document.build_status_document(rows, now=now, leader=leader)
        problem = self._informers.summarize_problem()
        omitted = limit_nodes(document, MAX_NODES)
        return {
            "apiVersion": DOCUMENT_VERSION,
            "problem": problem,
            "omittedNodes": omitted,
            **document,
        }


def limit_nodes(document: decode.Json, limit: int) -> int:
    """Leave out the nodes beyond the limit, idle ones first; return their number."""
    omitted = 0
    pools = document["pools"]
    for pool in pools if isinstance(pools, list) else ():
        nodes = pool["nodes"]
        if len(nodes) > limit:
            ranked = sorted(nodes, key=lambda node: node["phase"] in ("updated", "waiting"))
            kept = {node["name"] for node in ranked[:limit]}
            pool["nodes"] = [node for node in nodes if node["name"] in kept]
            omitted += len(nodes) - limit
        limit -= len(pool["nodes"])
    return omitted
