"""Rows of NodePools: the state of a pool and of its machines, and the stable JSON document."""

import base64
import dataclasses
import json
from typing import Any

import pytest

from tests.controllers.hosted.status.pool_samples import (
    NOW,
    YOUNG,
    make_facts,
    read_machine,
    read_node,
)
from tests.fixtures import hosted
from treenail.controllers.hosted.status import facts, rows, snapshot

NEW, OLD = hosted.NEW_HASH, hosted.OLD_HASH
UNREADY = {
    "phase": "Running", "nodeRef": {"name": "np-0"},
    "conditions": [{**hosted.make_condition("NodeHealthy", "False"), "lastTransitionTime": YOUNG}],
}  # fmt: skip
BROKEN = (dataclasses.replace(read_machine("a"), failure="no quota"),)
STARTING = {"phase": "Provisioning"}
DELETED = (read_machine("a", deleting=YOUNG),)
NOT_READY = (read_machine("a", status=UNREADY),)


def build_row(upgrade_type: str = "Replace", **changes: Any) -> rows.NodePoolRow:
    return rows.build_rows([make_facts(upgrade_type, **changes)], now=NOW)[0]


@pytest.mark.parametrize(
    ("upgrade_type", "changes", "state", "counts"),
    [
        ("Replace", {}, "Updated", {"updated": 2}),
        ("Replace", {"unread": ("Secrets: forbidden",)}, "Unknown", {"updated": 2}),
        ("Replace", {"pool": {"pausedUntil": "true"}, "target": NEW}, "Paused", {"old": 2}),
        ("Replace", {"core_configs": 0}, "Blocked", {"updated": 2}),
        ("Replace", {"target": NEW}, "Updating", {"old": 2}),
        (
            "Replace",
            {"target": NEW, "machines": (read_machine("a", NEW), read_machine("b"))},
            "Updating",
            {"updated": 1, "old": 1},
        ),
        (
            "Replace",
            {"machines": (read_machine("a", node="", status=STARTING, created=YOUNG),)},
            "Updating",
            {"starting": 1},
        ),
        ("Replace", {"machines": DELETED}, "Updating", {"deleting": 1}),
        ("Replace", {"machines": NOT_READY}, "Updating", {"not ready": 1}),
        (
            "Replace",
            {"machines": (read_machine("a", status={"phase": "Failed"}),)},
            "Blocked",
            {"failed": 1},
        ),
        ("Replace", {"machines": BROKEN}, "Blocked", {"failed": 1}),
        ("InPlace", {"target": OLD}, "Updated", {"updated": 2}),
        ("InPlace", {"target": OLD, "machines": NOT_READY}, "Updating", {"not ready": 1}),
        ("InPlace", {"target": NEW}, "Updating", {"joined": 2}),
        (
            "InPlace",
            {
                "target": NEW,
                "nodes": {
                    "np-0": read_node("np-0", currentConfig=NEW, desiredConfig=NEW, state="Done"),
                    "np-1": read_node("np-1", desiredConfig=NEW),
                },
            },
            "Updating",
            {"updated": 1, "updating": 1},
        ),
        (
            "InPlace",
            {
                "target": NEW,
                "machines": NOT_READY,
                "nodes": {"np-0": read_node("np-0", currentConfig=OLD, desiredConfig=NEW)},
            },
            "Updating",
            {"updating": 1},
        ),
        ("InPlace", {"target": OLD, "nodes": {}}, "Updated", {"joined": 2}),
        ("InPlace", {"target": OLD, "nodes": {"np-0": read_node("np-0")}}, "Updated",
         {"updated": 1, "joined": 1}),
        ("InPlace", {"target": NEW, "nodes": {"np-0": read_node("np-0")}}, "Updating",
         {"old": 1, "joined": 1}),
        ("InPlace", {"target": NEW, "nodes": {"np-0": read_node("np-0", state="Degraded")}},
         "Blocked", {"joined": 1, "degraded": 1}),
    ],
)  # fmt: skip
def test_state_of_a_pool(
    upgrade_type: str, changes: dict[str, Any], state: str, counts: dict[str, int]
) -> None:
    found = build_row(upgrade_type, **changes)
    assert (found.state, found.counts) == (state, counts)


def test_pool_without_a_template_is_not_updated() -> None:
    found = [make_facts(), make_facts(unread=("Machines: forbidden",))]
    without = [dataclasses.replace(pool_facts, template=None) for pool_facts in found]
    built = rows.build_rows(without, now=NOW)
    assert [row.state for row in built] == ["Updating", "Unknown"]
    assert [[cause.message for cause in row.causes] for row in built] == [
        ["HyperShift has made no machines yet"],
        [],
    ]


def test_pool_waits_since_its_first_cause() -> None:
    assert build_row().since == ""
    failed = hosted.make_condition("ValidReleaseImage", "False", "ValidationFailed")
    assert build_row(conditions=[failed]).since == hosted.SINCE


def test_pool_that_cannot_be_read_is_a_row() -> None:
    unread = facts.UnreadPool("clusters", "np", "spec.replicas: expected an integer")
    row = rows.build_rows([unread, make_facts()], now=NOW)[0]
    assert (row.name, row.state, row.causes[0].kind) == ("np", "Unknown", "Unreadable")
    assert "spec.replicas: expected an integer" in row.causes[0].message
    assert row.causes[0].next_step


def test_document_has_stable_fields() -> None:
    document = rows.build_document([build_row(target=NEW, core_configs=1)])
    assert json.loads(json.dumps(document)) == {
        "pools": [
            {
                "namespace": "clusters",
                "name": "np",
                "state": "Blocked",
                "cluster": "one",
                "platform": "Agent",
                "upgradeType": "Replace",
                "hash": {"current": OLD, "wanted": NEW},
                "version": {"current": "4.22.0", "wanted": "4.22.0"},
                "replicas": 2,
                "machines": {"np-0": "old", "np-1": "old"},
                "counts": {"old": 2},
                "causes": [
                    {
                        "kind": "MissingCoreConfig",
                        "message": "ConfigMaps with the core of the config: HyperShift "
                        "expects at least 2, and 1 exist",
                        "since": "",
                        "nextStep": "run: kubectl -n clusters-one get configmaps -l "
                        "hypershift.openshift.io/core-ignition-config=true; kubectl -n "
                        "clusters-one logs deployment/control-plane-operator",
                        "isBlocking": True,
                    },
                    {
                        "kind": "Updating",
                        "message": "machines np-0, np-1 are old",
                        "since": "",
                        "nextStep": "",
                        "isBlocking": False,
                    },
                ],
                "notRead": [],
            }
        ]
    }


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def make_copy(value: object) -> dict[str, Any]:
    headers = [{"name": "authorization", "value": value}]
    merge = [{"source": "https://ignition/ignition", "httpHeaders": headers}]
    document = {"ignition": {"version": "3.2.0", "config": {"merge": merge}}}
    return {"data": {"userdata": encode(json.dumps(document))}}


TOKENS = {"data": {"token": encode("new-token"), "old_token": encode("old-token")}}


@pytest.mark.parametrize(
    ("copy", "token", "expected"),
    [
        (make_copy(f"Bearer {encode('new-token')}"), TOKENS, True),
        (make_copy(f"Bearer {encode('old-token')}"), TOKENS, True),
        (make_copy(f"Bearer {encode('first-token')}"), TOKENS, False),
        (make_copy(f"Bearer {encode('new-token')}"), None, False),
        (make_copy("Bearer "), {"data": {"token": ""}}, False),
        (make_copy("Bearer é"), TOKENS, False),
        (make_copy(7), TOKENS, False),
        ({"data": {"userdata": encode("#cloud-config")}}, TOKENS, False),
        ({"data": {"userdata": "not base64"}}, TOKENS, False),
        ({"data": {"userdata": encode("[" * 100_000)}}, TOKENS, False),
        ({"data": {"userdata": encode("[]")}}, TOKENS, False),
        ({"data": []}, TOKENS, False),
        ({}, TOKENS, False),
    ],
)
def test_copy_of_user_data(
    copy: dict[str, Any], token: dict[str, Any] | None, *, expected: bool
) -> None:
    assert snapshot.has_valid_token(copy, token) is expected
