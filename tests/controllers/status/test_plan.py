"""Plans of a change, and the table of pools and nodes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controllers.rollout.agents import add_nodes
from tests.controllers.rollout.world import World
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import install_kinds
from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import PoolConfiguration
from treenail.cli.controller import main as command
from treenail.cli.controller.status.text import format_table
from treenail.controllers.pools.disruption_budgets import BlockingBudget, find_blocking_budget
from treenail.controllers.pools.pool_membership import ObservedPool
from treenail.controllers.pools.rollout_policy import ObservedPolicy, parse_policy
from treenail.controllers.render import render
from treenail.controllers.status import rollout_plan, status_table
from treenail.controllers.status.rollout_plan import RolloutPlanInput, format_plans
from treenail.errors import ConfigError
from treenail.kube.api_client import Client
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    NAMESPACES,
    NODES,
    PODDISRUPTIONBUDGETS,
    PODS,
)
from treenail_lab.apiserver.serving.server import LabServer

ROLE = {"machineconfiguration.openshift.io/role": "worker"}
IMAGE = f"registry.example.com/os@sha256:{'1' * 64}"
CHRONY = "data:,pool%20ntp.example.com"


def config(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {"name": name, "labels": ROLE},
        "spec": {"config": {"ignition": {"version": "3.5.0"}}, **spec},
    }


def files(*found: tuple[str, str]) -> dict[str, Any]:
    listed = [{"path": path, "contents": {"source": source}} for path, source in found]
    return {"config": {"ignition": {"version": "3.5.0"}, "storage": {"files": listed}}}


def pool(policy: str = "", **spec: Any) -> dict[str, Any]:
    # The name of the policy is its spec, so that one value carries both.
    named = {"rolloutPolicy": policy} if policy else {}
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfigPool",
        "metadata": {"name": "worker", "annotations": {}},
        "spec": {
            "machineConfigSelector": {"matchLabels": ROLE},
            "nodeSelector": {"matchLabels": {"node-role.kubernetes.io/worker": ""}},
            **named,
            **spec,
        },
    }


def parse_policies(found: RolloutPlanInput) -> dict[str, ObservedPolicy]:
    names = {each.pool.rollout_policy for each in found.pools.values()}
    return {
        name: ObservedPolicy(name, parse_policy({"spec": yaml.safe_load(name)}, "careful"))
        for name in names
        if name.startswith("{")
    }


def snapshot(nodes: int, document: dict[str, Any], *configs: dict[str, Any]) -> RolloutPlanInput:
    """Build a cluster whose nodes have the rendered config of their pool."""
    seen = ObservedPool.from_json(document)
    base = {each["metadata"]["name"]: MachineConfig.from_json(each) for each in configs}
    world = World()
    rendered, errors = render.render_pools(
        render.InputManifests({"worker": seen.pool}, base, {}), "worker"
    )
    assert not errors
    for number in range(nodes):
        world.add_node(f"n{number}", rendered[0].name)
    world.deliver()
    known = {**base, rendered[0].name: rendered[0].config}
    now = replace(seen.pool, configuration=PoolConfiguration(rendered[0].name))
    return RolloutPlanInput({"worker": ObservedPool(now)}, world.list_nodes(), known)


def planned(found: RolloutPlanInput, *documents: dict[str, Any]) -> str:
    texts = [(f"file{index}", json.dumps(each)) for index, each in enumerate(documents)]
    after = rollout_plan.apply_manifests(found, render.read_manifests(texts))
    after = replace(after, policies={**parse_policies(after), **after.policies})
    return "\n".join(format_plans(rollout_plan.plan_pools(after, now=0.0)))


def test_plan_reports_action_cause_source_order_and_duration() -> None:
    found = snapshot(3, pool(maxUnavailable=2), config("00-base"))
    change = config("50-chrony", **files(("/etc/chrony.conf", CHRONY)))
    text = planned(found, change)
    name = text.split(" to ")[1].split("\n")[0]
    old = next(each.name for each in found.configs.values() if each.name.startswith("rendered"))
    assert text == (
        f"pool worker: 3 of 3 nodes to {name}\n"
        "  rendered from 00-base, 50-chrony\n"
        f"  3 nodes from {old}:\n"
        "    drain and reboot\n"
        "      because file /etc/chrony.conf added (no policy for this path), from MachineConfig "
        "50-chrony\n"
        "  order, 2 at a time:\n"
        "      1. n0, n1\n"
        "      2. n2\n"
        "  takes about 20 min in total"
    )


@pytest.mark.parametrize(
    ("nodes", "members", "expected"),
    [
        (1, 1, "the only node updates without a drain: all pods and the API server stop meanwhile"),
        (2, 1, "etcd has one member: the API server does not answer while one reboots"),
        (2, 2, "etcd has 2 members: the API server does not answer while one reboots"),
        (3, 3, ""),
        (2, 0, ""),
    ],
)
def test_plan_names_the_outage_of_a_small_cluster(nodes: int, members: int, expected: str) -> None:
    found = snapshot(nodes, pool(), config("00-base"))
    labels = {"node-role.kubernetes.io/worker": "", "node-role.kubernetes.io/master": ""}
    facts = {
        name: replace(node, labels=labels if number < members else node.labels)
        for number, (name, node) in enumerate(found.nodes.items())
    }
    found = replace(found, nodes=facts)
    text = planned(found, config("50-chrony", **files(("/etc/chrony.conf", CHRONY))))
    outages = [line.strip() for line in text.splitlines() if "API server" in line]
    assert outages == ([expected] if expected else [])


def test_plan_without_disruption_says_so() -> None:
    found = snapshot(1, pool(), config("00-base"))
    change = config("50-secret", **files(("/var/lib/kubelet/config.json", "data:,x")))
    text = planned(found, change)
    assert "no disruption: files are written in place" in text
    assert "about 1 min in total" in text


def test_waves_are_planned_one_after_the_other() -> None:
    policy = "{canary: {nodes: 1}, waves: [50%], soak: 10m}"
    found = snapshot(6, pool(policy, maxUnavailable=2), config("00-base"))
    text = planned(found, config("50-kernel", kernelArguments=["quiet"]))
    assert "because kernelArguments changed (part of the operating system)" in text
    assert "      1. n0  (wave 1)\n      2. n1, n2  (wave 2)\n" in text
    assert "      3. n3, n4  (wave 3)\n      4. n5  (wave 3)\n" in text
    assert "about 60 min in total" in text


def test_image_of_the_pool_is_part_of_the_plan() -> None:
    found = snapshot(1, pool(), config("00-base"))
    change = pool()
    change["spec"]["osImage"] = IMAGE
    text = planned(found, change)
    assert f"with image {IMAGE}" in text
    assert (
        "osImageURL changed (part of the operating system), from spec.osImage of the pool" in text
    )


def test_tag_of_the_pool_is_planned_with_the_digest_that_the_cluster_recorded() -> None:
    tag = "registry.example.com/os:stable"
    wanted = pool(osImageTag={"name": tag, "follow": True})
    found = snapshot(1, pool(), config("00-base"))
    assert f"{tag} is being resolved" in planned(found, wanted)
    record = {"tag": tag, "image": IMAGE, "resolvedAt": "2026-01-01T00:00:00Z"}
    live = {**wanted, "status": {"osImageTag": record}}
    found = snapshot(1, live, config("00-base"))
    text = planned(found, wanted)
    assert f"with image {IMAGE}" in text
    assert "from spec.osImageTag of the pool" in text


def test_plan_names_what_the_image_must_contain() -> None:
    found = snapshot(1, pool(), config("00-base"))
    change = pool(osImage=IMAGE)
    added = config("50-app", **files(("/etc/app.conf", "data:,x"), ("/var/app", "data:,y")))
    text = planned(found, change, added)
    assert "the image must contain /etc/app.conf; each node checks that before its drain" in text
    assert "file /etc/app.conf added" not in text
    assert "file /var/app added" in planned(found, added, pool(osImage=IMAGE))
    written = planned(found, pool(osImage=IMAGE, imageFiles="Write"), added)
    assert "the image must contain" not in written
    assert "file /etc/app.conf added" in written


def test_plan_refuses_file_below_usr_without_an_image() -> None:
    found = snapshot(1, pool(), config("00-base"))
    added = config("50-app", **files(("/usr/bin/tool", "data:,x")))
    assert "problem: cannot write /usr/bin/tool: /usr is read-only" in planned(found, added)
    assert "problem:" not in planned(found, pool(osImage=IMAGE), added)


def test_policy_in_the_same_files_is_planned() -> None:
    found = snapshot(4, pool(maxUnavailable=4), config("00-base"))
    careful = {
        "apiVersion": "treenail.io/v1alpha1",
        "kind": "RolloutPolicy",
        "metadata": {"name": "careful"},
        "spec": {"canary": {}},
    }
    change = config("50-kernel", kernelArguments=["quiet"])
    text = planned(found, careful, pool(rolloutPolicy="careful"), change)
    assert "      1. n0  (wave 1)\n" in text


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"apiVersion": "treenail.io/v1alpha1", "kind": "RolloutPolicy",
             "metadata": {"name": "careful"}, "spec": {"windows": [{"day": ["Sat"]}]}},
            "file0, document 1, RolloutPolicy careful: spec.windows[0].day: unknown field",
        ),
        (
            pool(rolloutPolcy="careful"),
            "file0, document 1, MachineConfigPool worker: spec.rolloutPolcy: unknown field",
        ),
        (
            pool(paussed=True),
            "file0, document 1, MachineConfigPool worker: spec.paussed: unknown field",
        ),
    ],
)  # fmt: skip
def test_unknown_field_in_a_file_is_rejected(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        planned(snapshot(1, pool(), config("00-base")), document)
    assert str(raised.value) == message
    assert (raised.value.remedy or "").startswith("did you mean ")


def test_missing_policy_cannot_be_planned() -> None:
    found = snapshot(1, pool(), config("00-base"))
    after = rollout_plan.apply_manifests(
        found, render.read_manifests([("f", json.dumps(pool(rolloutPolicy="gone")))])
    )
    (planned_pool,) = rollout_plan.plan_pools(after, now=0.0)
    assert "RolloutPolicy gone does not exist" in planned_pool.problems[0]


def test_unrenderable_change_changes_no_node() -> None:
    found = snapshot(2, pool(), config("00-base"))
    text = planned(found, config("50-fips", fips=True))
    assert text.startswith("pool worker: cannot be planned; no node changes\n  problem: ")
    assert "50-fips" in text


def test_plan_with_bad_percentage_or_empty_selector_reports_a_problem() -> None:
    found = snapshot(2, pool(), config("00-base"))
    text = planned(found, pool(maxUnavailable="many"))
    assert "cannot be planned; no node changes" in text
    assert "which is neither a count nor a percentage" in text
    text = planned(found, pool(maxUnavailable=0), config("50-b", kernelArguments=["b"]))
    assert "order, maxUnavailable (0) acts as 1, pause the pool to stop its rollout; 1 at a" in text


def test_plan_reports_pause_and_closed_window() -> None:
    found = snapshot(1, pool(), config("00-base"))
    change = config("50-kernel", kernelArguments=["quiet"])
    assert "does not start yet: the pool is paused" in planned(found, change, pool(paused=True))
    policy = '{windows: [{days: [Sat], start: "01:00", duration: 4h, timeZone: UTC}]}'
    assert "the maintenance window opens at 1970-01-03 01:00 UTC" in planned(
        found, change, pool(policy)
    )


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"maxUnavailable": 0}, "maxUnavailable is 0"),
        ({"maxUnavailable": "0%"}, "maxUnavailable is 0%"),
        ({"minAvailable": 2}, "minAvailable is 2 with 2 pods"),
        ({"minAvailable": "100%"}, "minAvailable is 100% with 2 pods"),
        ({"minAvailable": "51%"}, "minAvailable is 51% with 2 pods"),
        ({"minAvailable": 1}, None),
        ({"maxUnavailable": 1}, None),
    ],
)
def test_budget_that_never_allows_an_eviction_is_found(
    spec: dict[str, Any], why: str | None
) -> None:
    budget = {
        "metadata": {"name": "db", "namespace": "shop"},
        "spec": {"selector": {"matchLabels": {"app": "db"}}, **spec},
        "status": {"expectedPods": 2, "disruptionsAllowed": 0},
    }
    pods = [
        {"metadata": {"labels": {"app": "db"}}, "spec": {"nodeName": "n1"}},
        {"metadata": {"labels": {"app": "web"}}, "spec": {"nodeName": "n2"}},
    ]
    expected = None if why is None else BlockingBudget("shop/db", why, ("n1",))
    assert find_blocking_budget(budget, pods) == expected


def show_table(world: World) -> list[str]:
    rows = status_table.build_rows(
        world.list_pools(), world.list_nodes(), world.list_policies(), now=world.now()
    )
    return [str(line) for line in format_table(rows)]


def test_table_lists_idle_nodes_last() -> None:
    world = World()
    for number in range(14):
        world.add_node(f"n{number}", "old")
    world.set_pool("worker", "new")
    world.cordon("n7", on=True)
    world.deliver()
    text = show_table(world)
    assert text[0] == "worker: Unknown, number of updated nodes unknown"
    assert text[1].split() == ["to", "new"]
    assert text[2].split() == ["NODE", "STATE", "BOOTED", "PROGRESS", "OUT", "AT"]
    assert text[3].split() == ["n7", "Done", "-", "░" * 12, "0%", "waiting", "out", "old"]
    assert text[4].split() == ["cordoned", "by", "a", "user"]
    assert text[-1] == "  and 3 more idle nodes, 0 of them updated"


def test_table_shows_prestaged_images() -> None:
    world = World()
    stage = {key.PRESTAGE_CONFIG: "new", key.PRESTAGE_IMAGE: IMAGE}
    for name, said in {
        "a": {},
        "b": {key.PRESTAGED: IMAGE},
        "c": {key.PRESTAGE_ERROR: f"{IMAGE}: no space left"},
    }.items():
        world.add_node(name, "old")
        world.change("nodes", name, {"metadata": {"annotations": {**stage, **said}}})
    world.set_pool("worker", "new")
    world.deliver()
    text = show_table(world)
    waiting = ["Done", "-", "░" * 12, "0%", "waiting", "old"]
    assert [line.split() for line in text[3:]] == [
        ["a", *waiting, "(pre-staging)"],
        ["b", *waiting, "(pre-staged)"],
        ["c", *waiting, "(pre-staging)"],
        ["no", "space", "left"],
    ]


def test_plan_with_prestaging_reports_it_before_the_order() -> None:
    found = snapshot(1, pool(), config("00-base"))
    change = pool("{prestage: {maxParallel: 3}}")
    assert "stage" not in planned(found, change, config("50-kernel", kernelArguments=["quiet"]))
    change["spec"]["osImage"] = IMAGE
    assert "  pre-stage the image first, 3 nodes at a time\n  order, " in planned(found, change)


def test_plan_and_status_read_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LabServer(tmp_path / "api") as server, open_client(server.admin_kubeconfig) as client:
        kubeconfig = str(server.admin_kubeconfig)
        install_kinds(client)
        add_nodes(client, ["n0", "n1"], "old")
        client.create(MACHINECONFIGS, {**config("old"), "metadata": {"name": "old"}})
        client.create(MACHINECONFIGS, config("00-base"))
        client.create(MACHINECONFIGPOOLS, pool())
        add_budget(client)
        change = tmp_path / "change.json"
        change.write_text(json.dumps(config("50-kernel", kernelArguments=["quiet"])))

        assert command.main(["plan", "-f", str(change), "--kubeconfig", kubeconfig]) == 0
        text = capsys.readouterr().out
        assert "drain and reboot\n      because kernelArguments changed" in text
        assert (
            "PodDisruptionBudget shop/db never allows an eviction (maxUnavailable is 0), pods on n1"
            in text
        )

        bad = tmp_path / "bad.json"
        bad.write_text(json.dumps(config("51-bad", osImageURL="registry.example.com/os:1")))
        assert command.main(["plan", "-f", str(bad), "--kubeconfig", kubeconfig]) == 1
        assert "MachineConfig 51-bad: spec.osImageURL is" in capsys.readouterr().out
        typo = tmp_path / "typo.json"
        typo.write_text(json.dumps({**config("51-typo"), "kind": "MachineConfg"}))
        both = ["-f", str(change), "-f", str(typo)]
        assert command.main(["plan", *both, "--kubeconfig", kubeconfig]) == 1
        assert "did you mean MachineConfig?" in capsys.readouterr().err
        assert command.main(["plan", "--live", "--json", "--kubeconfig", kubeconfig]) == 0
        found = json.loads(capsys.readouterr().out)["pools"][0]
        assert found["batches"] == [
            {"wave": 1, "nodes": ["n0"]},
            {"wave": 1, "nodes": ["n1"]},
        ]
        assert (found["needsDrain"], found["maxUnavailable"]) == (False, 1)

        assert command.main(["status", "--kubeconfig", kubeconfig]) == 0
        assert "n0" in capsys.readouterr().out
        metadata = {"name": "lost", "annotations": {key.CURRENT_CONFIG: "old"}}
        client.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        for words in (["status"], ["rollout", "status"]):
            command.main([*words, "--kubeconfig", kubeconfig])
            notes = capsys.readouterr().err
            assert "warning: node lost has an agent and the config old, and belongs to" in notes
        assert command.main(["status", "--json", "--kubeconfig", kubeconfig]) == 0
        rows = json.loads(capsys.readouterr().out)["pools"][0]["nodes"]
        assert [row["name"] for row in rows] == ["n0", "n1"]

        assert command.main(["plan", "--kubeconfig", kubeconfig]) == 64
        assert "name the change with -f" in capsys.readouterr().err


def add_budget(client: Client) -> None:
    client.create(NAMESPACES, {"metadata": {"name": "shop"}})
    labels = {"app": "db"}
    client.create(
        PODDISRUPTIONBUDGETS,
        {
            "metadata": {"name": "db"},
            "spec": {"maxUnavailable": 0, "selector": {"matchLabels": labels}},
        },
        namespace="shop",
    )
    containers = [{"name": "db", "image": "registry.example.com/db:1"}]
    client.create(
        PODS,
        {
            "metadata": {"name": "db-0", "labels": labels},
            "spec": {"nodeName": "n1", "containers": containers},
        },
        namespace="shop",
    )
