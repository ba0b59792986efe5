"""The status document of the page, from the watches of the controllers."""

import json
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clocks import Clock
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.controllers.pools.pool_membership import ObservedPool
from treenail.controllers.pools.rollout_policy import ObservedPolicy
from treenail.controllers.runtime.informer_set import Informers
from treenail.controllers.status.leader_status import LeaderReport
from treenail.controllers.status.status_document import build_status_document
from treenail.controllers.status.status_table import build_rows, find_pool_builds
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
    ROLLOUTPOLICIES,
)
from treenail.kube.watch import WatchScope

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
        informers: Informers,
        clock: Clock,
        *,
        image_key: str = key.DESIRED_OS_IMAGE,
        read_leader: Callable[[], LeaderReport] | None = None,
    ) -> None:
        self._read_leader = read_leader
        self._informers = informers
        self._clock = clock
        self._pools = informers.add_view(WatchScope(MACHINECONFIGPOOLS), ObservedPool.from_json)
        self._nodes = informers.add_view(
            WatchScope(NODES), lambda found: NodeFacts.from_json(found, image_key=image_key)
        )
        self._policies = informers.add_view(
            WatchScope(ROLLOUTPOLICIES), ObservedPolicy.from_json, optional=True
        )
        self._image_configs = informers.add_view(
            WatchScope(MACHINEOSCONFIGS), MachineOSConfig.from_json, optional=True
        )
        self._image_builds = informers.add_view(
            WatchScope(MACHINEOSBUILDS), MachineOSBuild.from_json, optional=True
        )
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

    def build_document(self) -> Json:
        """Build the document; ``problem`` says why it may be outdated."""
        now = self._clock.now()
        leader = None if self._read_leader is None else self._read_leader()
        rows = build_rows(
            self._pools.get_all(),
            self._nodes.get_all(),
            self._policies.get_all(),
            now=now,
            leader=leader,
            builds=find_pool_builds(
                self._image_configs.get_all(), self._image_builds.get_all(), now
            ),
        )
        found = build_status_document(rows, now=now, leader=leader)
        problem = self._informers.summarize_problem()
        omitted = limit_nodes(found, MAX_NODES)
        return {
            "apiVersion": DOCUMENT_VERSION,
            "problem": problem,
            "omittedNodes": omitted,
            **found,
        }


def limit_nodes(document: Json, limit: int) -> int:
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
