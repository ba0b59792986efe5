"""The render controller with real watches on the lab's API server."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.config import unappliable
from tests.controllers.rollout.agents import add_nodes
from tests.fixtures.controllers import CLOCK, open_client, run_controllers
from tests.fixtures.objects import (
    ROLE,
    find_condition,
    make_config,
    make_file,
    make_pool,
)
from tests.waiting import wait_until
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.cli.controller.rollout import read_rollouts
from treenail.controllers.render.controller import KEPT_CONFIGS, RenderController
from treenail.controllers.render.render import hash_render_inputs
from treenail.controllers.status.rollout_result import RolloutOutcome
from treenail.controllers.status.snapshot import read_metadata
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import (
    EVENTS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    Resource,
)
from treenail_lab.apiserver.serving.faults import FaultMatch, LoseAnswerFault, RejectFault
from treenail_lab.apiserver.serving.server import LabServer

USER = "render"
Json = dict[str, Any]


@contextmanager
def running(server: LabServer, refused: list[str] | None = None) -> Iterator[None]:
    """Run the controller; writes to a resource in ``refused`` are forbidden."""
    with open_client(server.write_kubeconfig(USER, ["system:masters"])) as client:
        send = client._transport.send

        def refuse(request: ApiRequest) -> ApiResponse:
            if request.method != "GET" and request.path.split("/")[4] in (refused or []):
                status = {"kind": "Status", "code": 403, "message": "denied by policy small"}
                return ApiResponse(403, json.dumps(status).encode())
            return send(request)

        client._transport.send = refuse
        recorder = EventRecorder(client, "render", "here", CLOCK)
        with run_controllers(client, RenderController(client, CLOCK, recorder, settle_s=0.0)):
            yield


def add_config(client: Client, name: str, *files: Json, role: str = "worker", **spec: Any) -> None:
    client.create(MACHINECONFIGS, make_config(name, *files, role=role, **spec))


def add_pool(client: Client, name: str = "worker", selector: Json | None = None) -> None:
    chosen = {"matchLabels": {ROLE: name}} if selector is None else selector
    client.create(MACHINECONFIGPOOLS, make_pool(name, machineConfigSelector=chosen))


def target(client: Client, pool: str = "worker") -> str:
    found: Any = client.get(MACHINECONFIGPOOLS, pool)
    return found["spec"].get("configuration", {}).get("name", "")


def degraded(client: Client, pool: str = "worker") -> tuple[str, str, str]:
    return find_condition(client.get(MACHINECONFIGPOOLS, pool), "RenderDegraded")


def names(client: Client, resource: Resource = MACHINECONFIGS) -> set[str]:
    items: Any = client.list(resource).items
    return {item["metadata"]["name"] for item in items}


def rendered(client: Client) -> set[str]:
    return {name for name in names(client) if name.startswith("rendered-")}


def moved(client: Client, since: str, pool: str = "worker") -> Callable[[], str]:
    return lambda: found if (found := target(client, pool)) != since else ""


def change(client: Client, name: str, text: str) -> None:
    body = {"spec": make_config(name, make_file("/etc/a", text))["spec"]}
    client.patch(MACHINECONFIGS, name, body)


def writes(server: LabServer, name: str) -> int:
    """Count the controller's writes to objects with this in their name."""
    verbs = ("create", "update", "patch", "delete")
    latest = server.call_api(lambda api: api.requests.list_latest())
    return sum(each.user == USER and each.verb in verbs and name in each.name for each in latest)


def test_changed_pool_gets_a_new_rendered_config(server: LabServer, client: Client) -> None:
    add_config(client, "00-base", make_file("/etc/a", "1"))
    add_config(client, "10-more", kernelArguments=["quiet"])
    add_config(client, "20-other", role="infra")
    add_pool(client)
    with running(server):
        first = wait_until(moved(client, ""))
        made: Any = client.get(MACHINECONFIGS, first)
        pool: Any = client.get(MACHINECONFIGPOOLS, "worker")
        assert made["spec"]["kernelArguments"] == ["quiet"]
        assert made["metadata"]["ownerReferences"][0]["name"] == "worker"
        sources = [each["name"] for each in pool["spec"]["configuration"]["source"]]
        assert sources == ["00-base", "10-more"]
        wait_until(lambda: degraded(client)[0] == "False")
        change(client, "00-base", "2")
        second = wait_until(moved(client, first))
        assert rendered(client) == {first, second}
        change(client, "00-base", "1")
        wait_until(lambda: target(client) == first)


def test_unchanged_pool_is_not_written_after_a_restart(server: LabServer, client: Client) -> None:
    add_config(client, "00-base")
    add_pool(client)
    with running(server):
        wait_until(lambda: degraded(client)[0] == "False")
    before = writes(server, "worker")
    assert before > 0
    with running(server):
        client.patch(MACHINECONFIGPOOLS, "worker", {"metadata": {"labels": {"x": "y"}}})
        add_config(client, "00-sign", role="sign")
        add_pool(client, "sign")
        wait_until(lambda: degraded(client, "sign")[0] == "False")
    assert writes(server, "sign") > 0
    assert writes(server, "worker") == before
    assert sum(name.startswith("rendered-worker") for name in rendered(client)) == 1


@pytest.mark.parametrize("resource", ["machineconfigs", "machineconfigpools"])
@pytest.mark.parametrize("fault", [RejectFault(503), RejectFault(500), LoseAnswerFault()], ids=repr)
def test_failed_write_or_lost_response_is_retried(
    server: LabServer, client: Client, resource: str, fault: RejectFault | LoseAnswerFault
) -> None:
    add_config(client, "00-base")
    add_pool(client)
    verb = "create" if resource == "machineconfigs" else "patch"
    server.inject_fault(fault, FaultMatch(verb=verb, resource=resource, user=USER), times=2)
    with running(server):
        wait_until(lambda: degraded(client)[0] == "False")
        assert rendered(client) == {target(client)}


def test_refused_write_degrades_the_pool_until_it_succeeds(
    server: LabServer, client: Client
) -> None:
    add_config(client, "00-base")
    add_pool(client)
    refused = ["machineconfigs"]
    with running(server, refused):
        wait_until(lambda: degraded(client)[0] == "True")
        assert degraded(client)[1:] == (
            "WriteRefused",
            (
                "Failed to write configuration for pool worker: POST machineconfigs: denied by "
                "policy small"
            ),
        )
        before = writes(server, "worker")
        assert before == 1
        refused.clear()
        wait_until(lambda: degraded(client)[0] == "False")


def report_updated(client: Client) -> None:
    """Report the pool as updated, as the rollout controller does when it has seen the spec."""
    found: Any = client.get(MACHINECONFIGPOOLS, "worker")
    updated = {
        "type": "Updated",
        "status": "True",
        "message": "All nodes are updated",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    conditions = [each for each in found["status"]["conditions"] if each["type"] != "Updated"]
    status = {
        "observedGeneration": found["metadata"]["generation"],
        "machineCount": 0,
        "conditions": [*conditions, updated],
    }
    client.patch(MACHINECONFIGPOOLS, "worker", {"status": status}, subresource="status")


def test_rollout_is_complete_only_when_the_newest_machineconfigs_were_observed(
    server: LabServer, client: Client
) -> None:
    def read_outcome() -> RolloutOutcome:
        ((found,),) = [read_rollouts(client, ["worker"])]
        return found.outcome

    def await_render() -> None:
        wait_until(lambda: read_outcome() is not RolloutOutcome.IN_PROGRESS)

    add_config(client, "00-base", make_file("/etc/a", "1"))
    add_pool(client)
    with running(server):
        wait_until(lambda: degraded(client)[0] == "False")
    report_updated(client)
    assert read_outcome() is RolloutOutcome.COMPLETE
    changes: list[Callable[[], object]] = [
        lambda: change(client, "00-base", "2"),
        # A change back, and one without effect, give no other rendered config.
        lambda: change(client, "00-base", "1"),
        lambda: add_config(client, "99-empty"),
        lambda: client.delete(MACHINECONFIGS, "99-empty"),
    ]
    for make_change in changes:
        make_change()
        assert read_outcome() is RolloutOutcome.IN_PROGRESS
        with running(server):
            wait_until(lambda: is_observed(client))
        report_updated(client)
        assert read_outcome() is RolloutOutcome.COMPLETE
    add_config(client, "99-wrong", {"path": "relative"})
    assert read_outcome() is RolloutOutcome.IN_PROGRESS
    with running(server):
        await_render()
        assert read_outcome() is RolloutOutcome.BLOCKED
        client.delete(MACHINECONFIGS, "99-wrong")
        wait_until(lambda: read_outcome() is RolloutOutcome.COMPLETE)


def is_observed(client: Client) -> bool:
    pool = MachineConfigPool.from_json(client.get(MACHINECONFIGPOOLS, "worker"))
    configs = read_metadata(client, MACHINECONFIGS)
    return pool.status["renderInputs"] == hash_render_inputs(pool, configs, ())


def test_invalid_config_degrades_only_its_pool(server: LabServer, client: Client) -> None:
    add_config(client, "00-base")
    add_config(client, "99-wrong", {"path": "relative"})
    add_config(client, "00-infra", role="infra")
    add_pool(client)
    add_pool(client, "infra")
    with running(server):
        wait_until(lambda: degraded(client)[0] == "True")
        status, reason, message = degraded(client)
        assert (status, reason) == ("True", "RenderFailed")
        assert "99-wrong" in message
        assert "spec.config.storage.files[0].path" in message
        wait_until(moved(client, "", "infra"))
        assert target(client) == ""
        wait_until(lambda: "RenderFailed" in events(client))
        client.delete(MACHINECONFIGS, "99-wrong")
        wait_until(lambda: degraded(client)[0] == "False")
        assert target(client)


def test_field_without_effect_is_an_event_of_the_pool(server: LabServer, client: Client) -> None:
    add_config(client, "00-base", make_file("/etc/a", "1"))
    add_pool(client)
    with running(server):
        wait_until(moved(client, ""))
        before = target(client)
        client.patch(MACHINECONFIGS, "00-base", {"spec": {"config": {"stroage": {}}}})
        wait_until(lambda: "FieldIgnored" in events(client))
        assert target(client) == before
    assert events(client)["FieldIgnored"] == (
        "MachineConfig 00-base: spec.config.stroage: ignored: unknown field; did you mean storage?"
    )


def test_append_of_the_first_boot_does_not_stop_a_taken_over_pool(
    server: LabServer, client: Client
) -> None:
    appended = {"path": "/etc/a", "append": [{"source": "data:,a"}]}
    add_config(client, "00-base", appended)
    old = "rendered-worker-of-the-mco"
    client.create(MACHINECONFIGS, make_config(old, {**appended, "overwrite": True}))
    chosen = {"matchLabels": {ROLE: "worker"}, "matchExpressions": []}
    body = make_pool("worker", machineConfigSelector=chosen, configuration={"name": old})
    client.create(MACHINECONFIGPOOLS, body)
    with running(server):
        first = wait_until(moved(client, old))
        wait_until(lambda: "FieldIgnored" in events(client))
        assert "the agent does not append" in events(client)["FieldIgnored"]
        add_config(client, "50-more", {**appended, "path": "/etc/b"})
        wait_until(lambda: degraded(client)[0] == "True")
        assert "MachineConfig 50-more: " in degraded(client)[2]
        assert target(client) == first


def events(client: Client) -> dict[str, str]:
    """Return the messages of all Events by reason."""
    items: Any = client.list(EVENTS, namespace="default").items
    return {item["reason"]: item.get("note", item.get("message", "")) for item in items}


@pytest.mark.parametrize(
    ("selector", "said"),
    [({}, "selects all MachineConfigs"), ({"matchLabels": {ROLE: "unused"}}, "couldn't find any")],
)
def test_pool_without_usable_selector_is_degraded(
    server: LabServer, client: Client, selector: Json, said: str
) -> None:
    add_config(client, "00-base")
    add_pool(client, selector=selector)
    with running(server):
        wait_until(lambda: degraded(client)[0] == "True")
        assert said in degraded(client)[2]
        assert rendered(client) == set()


def test_irreconcilable_config_is_rejected_before_the_pool_changes(
    server: LabServer, client: Client
) -> None:
    add_config(client, "00-base")
    add_pool(client)
    with running(server):
        first = wait_until(moved(client, ""))
        add_config(client, "50-fips", fips=True)
        wait_until(lambda: degraded(client)[0] == "True")
        assert degraded(client)[1] == "Unreconcilable"
        assert "50-fips" in degraded(client)[2]
        assert target(client) == first


def test_config_that_no_node_can_apply_is_not_assigned(server: LabServer, client: Client) -> None:
    add_config(client, "00-base")
    add_pool(client)
    with running(server):
        first = wait_until(moved(client, ""))
        spec, message = unappliable.CASES["remote"]
        add_config(client, "50-bad", **spec)
        wait_until(lambda: degraded(client)[0] == "True")
        assert degraded(client)[1] == "RenderFailed"
        assert f"MachineConfig 50-bad: {message}" in degraded(client)[2]
        assert target(client) == first


@pytest.mark.parametrize(
    "edit", [{"kernelArguments": ["evil"]}, {"config": {"share": 0.5}}, {"config": {"": "x"}}]
)
def test_edited_rendered_config_is_not_assigned(
    server: LabServer, client: Client, edit: Json
) -> None:
    add_config(client, "00-base")
    add_pool(client)
    with running(server):
        first = wait_until(moved(client, ""))
        client.patch(MACHINECONFIGS, first, {"spec": edit})
        wait_until(lambda: degraded(client)[0] == "True")
        assert "a user edited it" in degraded(client)[2]
        client.delete(MACHINECONFIGS, first)
        wait_until(lambda: degraded(client)[0] == "False")
        again: Any = client.get(MACHINECONFIGS, first)
        assert again["spec"]["kernelArguments"] == []


def test_old_rendered_configs_are_deleted_but_never_one_in_use(
    server: LabServer, client: Client
) -> None:
    add_config(client, "00-base", make_file("/etc/a", "0"))
    add_pool(client)
    made: list[str] = []
    with running(server):
        made.append(wait_until(moved(client, "")))
        add_nodes(client, ["node-1"], made[0])
        for number in range(1, KEPT_CONFIGS + 4):
            change(client, "00-base", str(number))
            made.append(wait_until(moved(client, made[-1])))
        kept = {made[0], *made[-KEPT_CONFIGS - 1 :]}
        wait_until(lambda: rendered(client) == kept)


def test_hundred_machineconfigs_are_rendered_into_one(server: LabServer, client: Client) -> None:
    for number in range(100):
        add_config(client, f"{number:03d}-part", make_file(f"/etc/part-{number}", "x"))
    add_pool(client)
    with running(server):
        found: Any = client.get(MACHINECONFIGS, wait_until(moved(client, "")))
        assert len(found["spec"]["config"]["storage"]["files"]) == 100
        assert len(rendered(client)) == 1
