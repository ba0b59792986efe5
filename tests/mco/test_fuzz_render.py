"""Random pools are rendered as the MCO's render controller renders them, names and content.

TREENAIL_TEST_MCO_RENDER names a program around its functions. It reads one JSON object a line:
``id``, ``pool`` (a name), ``configs`` and perhaps ``current`` (the rendered config before). It
answers one a line: ``name`` and ``spec`` of the rendered config, or ``error``.
TREENAIL_TEST_MCO_POOLS is the number of pools (default: 1000), TREENAIL_TEST_MCO_LIVE_POOLS that
of the pools for the running controller (default: 100), TREENAIL_TEST_MCO_FIRST_POOL the first seed.
"""

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.config.random_configs import ROLE, make_case
from tests.config.test_random_configs import STRICTER, is_rejected_later, render
from tests.contract.client import Cluster
from tests.mco import operator, programs
from tests.mco.operator import MCO
from tests.realcluster import RealCluster
from tests.waiting import wait_until
from treenail.api.machineconfig import MachineConfig
from treenail.errors import ConfigError

pytestmark = [pytest.mark.process, pytest.mark.limit(850)]

Json = dict[str, Any]

PROGRAM = programs.Variable("TREENAIL_TEST_MCO_RENDER", "a program around the render controller")
COUNT, LIVE, FIRST = (f"TREENAIL_TEST_MCO_{name}" for name in ("POOLS", "LIVE_POOLS", "FIRST_POOL"))
KINDS = ("random", "damaged", "changed")
# The seeds before are those of the recorded pools in tests/data.
UNRECORDED = 100_000
LIVE_SEEDS = programs.split_seeds(
    programs.read_count(FIRST, UNRECORDED), programs.read_count(LIVE, 100), 50
)


@pytest.mark.parametrize("kind", KINDS)
def test_random_pools_are_rendered_as_by_the_mco(kind: str) -> None:
    program = str(PROGRAM.read())
    first = programs.read_count(FIRST, UNRECORDED)
    seeds = range(first, first + programs.read_count(COUNT, 1000) // len(KINDS) + 1)
    cases = {seed: make_case(kind, seed) for seed in seeds}
    requests = [{"id": str(seed), "pool": "infra", "configs": case[0]}
                for seed, case in cases.items()]  # fmt: skip
    if kind == "changed":
        before = ask(program, [{**request, "configs": cases[seed][1]}
                               for seed, request in zip(seeds, requests, strict=True)])  # fmt: skip
        for request, answer in zip(requests, before, strict=True):
            if "error" not in answer:
                request["current"] = to_config(answer)
    differences = {}
    for seed, request, answer in zip(seeds, requests, ask(program, requests), strict=True):
        # A program of Go decodes the line into its types; a real one refuses it earlier.
        if "decode:" in answer.get("error", ""):
            continue
        current = request.get("current")
        found = find_difference(cases[seed][0], current, answer)
        if found:
            differences[seed] = found
    assert differences == {}


def ask(program: str, requests: list[Json]) -> list[Json]:
    text = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True,
                          timeout=1800)  # fmt: skip
    answers: list[Json] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(requests)
    return answers


def to_config(answer: Json) -> Json:
    return {"metadata": {"name": answer["name"]}, "spec": answer["spec"]}


def find_difference(configs: list[Any], current: object, answer: Json) -> str:
    """Return how our rendered config differs; empty if it does not, or as documented."""
    before = None if current is None else MachineConfig.from_json(current)
    error = answer.get("error", "")
    try:
        ours = render(configs, before)
    except ConfigError as refusal:
        is_documented = bool(error) or STRICTER.search(str(refusal))
        return "" if is_documented else f"the MCO renders {answer['name']}: {refusal}"
    if error:
        is_documented = before is not None and is_rejected_later(ours, before)
        return "" if is_documented else f"we render {ours.name}: {error}"
    if ours.name != answer["name"]:
        return f"the MCO renders {answer['name']}, we render {ours.name}"
    spec = ours.to_json()["spec"]
    return "" if drop_empty(spec) == drop_empty(answer["spec"]) else "another spec, the same name"


def drop_empty(value: Any) -> Any:
    """Leave out null, and at the top empty fields, which Go writes or not by type."""
    return {name: each for name, each in value.items() if each not in (None, "", [], {}, False)}


@pytest.mark.parametrize("seeds", LIVE_SEEDS, ids=programs.name_seeds)
def test_random_pools_are_rendered_as_by_the_running_controller(
    kube_server: RealCluster, controller: operator.Controller, seeds: range
) -> None:
    cluster = Cluster.of_kubeconfig(kube_server.kubeconfig)
    answers = {seed: create_pool(cluster, seed) for seed in seeds}
    differences = {}
    tally: Counter[str] = Counter()
    for seed, answer in answers.items():
        if answer is None:
            tally["refused by the API server, or only by us as documented"] += 1
            continue
        found = wait_until(lambda seed=seed: read_result(cluster, seed), limit_s=600)
        difference = find_live_difference(cluster, answer, found)
        if difference:
            differences[seed] = difference
        tally["differ" if difference else "equal" if found["name"] else "both refuse"] += 1
    # The controller reads all configs for each pool.
    for seed in seeds:
        cluster.delete(f"{MCO}/machineconfigpools/fuzz-{seed}")
    pools = ",".join(f"fuzz-{seed}" for seed in seeds)
    cluster.delete(f"{MCO}/machineconfigs", labelSelector=f"{ROLE} in ({pools})").ok()
    sys.stdout.write(f"{dict(tally)}\n")
    assert differences == {}
    assert tally["equal"] + tally["both refuse"] > 0.7 * len(seeds), tally


def find_live_difference(cluster: Cluster, answer: tuple[str | None, Json], found: Json) -> str:
    """Return how our result differs from that of the controller; empty if it does not."""
    name, spec = answer
    if name is None:
        return f"the MCO renders {found['name']}" if found["name"] else ""
    if found["name"] != name:
        return f"the MCO renders {found}, we render {name}"
    theirs = cluster.get(f"{MCO}/machineconfigs/{name}").ok()["spec"]
    return "" if drop_empty(theirs) == drop_empty(spec) else f"{spec} and {theirs}"


def create_pool(cluster: Cluster, seed: int) -> tuple[str | None, Json] | None:
    """Create a pool with its configs; return our result, or None if the API server refuses one."""
    pool = f"fuzz-{seed}"
    stored = []
    for number, config in enumerate(make_case("random", seed)[0]):
        config["metadata"] |= {"name": f"{pool}-{config['metadata']['name']}-{number}"}
        config["metadata"]["labels"] = {ROLE: pool}
        document = {"apiVersion": f"{operator.GROUP}/v1", "kind": "MachineConfig", **config}
        answer = cluster.post(f"{MCO}/machineconfigs", document)
        if answer.code != 201:
            return None
        # With what the server pruned and added.
        stored.append(answer.body)
    cluster.post(f"{MCO}/machineconfigpools", operator.build_pool(pool)).ok()
    try:
        ours = render_for(cluster, pool, stored)
    except ConfigError as error:
        return None if STRICTER.search(str(error)) else (None, {})
    return ours.name, ours.to_json()["spec"]


def render_for(cluster: Cluster, pool: str, configs: list[Json]) -> MachineConfig:
    """Render as treenail's render controller does."""
    from treenail.api.machineconfigpool import MachineConfigPool
    from treenail.controllers.render.render import ControllerConfig, render_pool

    found = [MachineConfig.from_json(each) for each in configs]
    document = cluster.get(operator.CONTROLLER_CONFIG).ok()
    return render_pool(
        MachineConfigPool.from_json(operator.build_pool(pool)),
        found,
        ControllerConfig.from_json(document),
    ).config


def read_result(cluster: Cluster, seed: int) -> Json | None:
    """Return the name of the rendered config, or the error; None while there is neither."""
    pool = cluster.get(f"{MCO}/machineconfigpools/fuzz-{seed}").ok()
    if name := pool["spec"].get("configuration", {}).get("name"):
        return {"name": name}
    conditions = pool.get("status", {}).get("conditions") or []
    for each in conditions:
        if each["type"] == "RenderDegraded" and each["status"] == "True":
            return {"name": "", "error": each["message"]}
    return None
