"""The document of the page, from the watches of a controller process."""

import json
from pathlib import Path
from typing import Any

from tests.controllers.rollout.agents import add_nodes
from tests.fixtures.clusters import open_lab
from tests.fixtures.objects import add_pool
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.clocks import SystemClock
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.controllers.status.leader_status import LeaderReport, LeaderState
from treenail.controllers.status.statuspage.server import StatusSource
from treenail.kube.api_client import Json
from treenail.kube.resources import MACHINEOSBUILDS, MACHINEOSCONFIGS, NODES


class StillClock(SystemClock):
    """A clock whose monotonic time a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


def test_document_has_the_build_of_each_pool(tmp_path: Path) -> None:
    with open_lab(tmp_path) as (_, client):
        add_pool(client, "worker", "old")
        config = make_image_config("worker", pool="worker")
        client.create(MACHINEOSCONFIGS, config)
        informers = InformerSet(client, SystemClock())
        source = StatusSource(informers, SystemClock())
        informers.start()

        def read_build() -> tuple[str, str]:
            pools: Any = source.build_document()["pools"]
            build = pools[0]["build"] if pools else None
            return (build["state"], build["message"]) if build else ("", "")

        try:
            wait_until(lambda: read_build() == ("Pending", ""))
            notes = {"metadata": {"annotations": {key.CURRENT_BUILD: "worker-1"}}}
            client.patch(MACHINEOSCONFIGS, "worker", notes)
            client.create(MACHINEOSBUILDS, make_image_build("worker-1"))
            failed = make_condition("Failed", "line 2: no such file")
            body: Json = {"status": {"conditions": [failed]}}
            client.patch(MACHINEOSBUILDS, "worker-1", body, subresource="status")
            wait_until(lambda: read_build() == ("Failed", "line 2: no such file"))
        finally:
            informers.stop()


def make_image_config(name: str, *, pool: str) -> Json:
    spec: Json = {
        "machineConfigPool": {"name": pool},
        "imageBuilder": {"imageBuilderType": "Job"},
        "renderedImagePushSecret": {"name": "push"},
        "renderedImagePushSpec": "registry.example.com/os:latest",
    }
    return {
        "apiVersion": MACHINEOSCONFIGS.api_version,
        "kind": MACHINEOSCONFIGS.kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def make_image_build(name: str) -> Json:
    spec: Json = {
        "machineConfig": {"name": "rendered-worker-1"},
        "machineOSConfig": {"name": "worker"},
        "renderedImagePushSpec": "registry.example.com/os:latest",
    }
    return {
        "apiVersion": MACHINEOSBUILDS.api_version,
        "kind": MACHINEOSBUILDS.kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def make_condition(kind: str, message: str) -> Json:
    return {
        "type": kind,
        "status": "True",
        "reason": "InstructionFailed",
        "message": message,
        "lastTransitionTime": "2026-01-31T12:00:00Z",
    }


def test_document_follows_the_watches_and_is_built_once_a_second(tmp_path: Path) -> None:
    with open_lab(tmp_path) as (_, client):
        add_nodes(client, ["n0"], "old")
        add_pool(client, "worker", "old")
        informers = InformerSet(client, SystemClock())
        clock = StillClock()
        report = LeaderReport(LeaderState.LEADING)
        source = StatusSource(informers, clock, read_leader=lambda: report)
        early = source.build_document()
        assert "not listed yet" in str(early["problem"])
        informers.start()
        try:
            wait_until(lambda: source.build_document()["problem"] == "")
            clock.seconds += 10.0
            first = source.read_document()
            client.patch(NODES, "n0", {"metadata": {"annotations": {key.STATE: "Working"}}})
            wait_until(lambda: '"Working"' in json.dumps(source.build_document()))
            assert source.read_document() is first
            clock.seconds += 1.0
            found = json.loads(source.read_document().plain)
            assert found["controller"]["message"] == ""
            report = LeaderReport(LeaderState.NONE, renewed_at=0.0)
            clock.seconds += 1.0
            late = json.loads(source.read_document().plain)
            assert "since 1970-01-01 00:00:00 UTC" in late["controller"]["message"]
            assert late["pools"][0]["state"] == "Unknown"
            assert found["pools"][0]["nodes"][0]["state"] == "Working"
        finally:
            informers.stop()
