"""Random pools are decided as the MCO's node controller decides them.

TREENAIL_TEST_MCO_NODES names a program around its functions. It reads one state of `RandomState`
a line, and answers one JSON object a line: ``maxUnavailable`` or ``error``; ``candidates`` and
``capacity`` of getAllCandidateMachines, ``chosen`` of them after sortNodeList; the lists
``updated``, ``ready``, ``unavailable`` and ``degraded`` of GetMachinesByState; and ``status`` of
calculateStatus. TREENAIL_TEST_MCO_STATES is the number of states (default: 1000).
"""

import json
import subprocess
from collections import Counter
from typing import Any

import pytest

from tests.controllers.rollout.builders import recorded_image, recorded_nodes
from tests.mco import programs
from tests.mco.random_states import RandomState
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools.node_facts import NodeFacts, RolloutTarget
from treenail.controllers.pools.node_selection import (
    compute_max_unavailable,
    find_candidates,
    sort_by_zone,
)
from treenail.controllers.pools.os_image import compute_build_target
from treenail.controllers.pools.pool_status import PoolStatusInput, compute_status
from treenail.errors import ConfigError

pytestmark = [pytest.mark.process, pytest.mark.limit(900)]

Json = dict[str, Any]

PROGRAM = programs.Variable("TREENAIL_TEST_MCO_NODES", "a program around the node controller")
COUNT = "TREENAIL_TEST_MCO_STATES"
# Written by other controllers of the MCO, and by ours alone.
OTHER_FIELDS = {"certExpirys", "poolSynchronizersStatus", "osImageStream", "conditions"}
OUR_CONDITIONS = {"Reconciling", "Stalled"}
# Their messages name each node once, and say why in a whole sentence.
REWORDED = {"NodeDegraded", "Degraded", "ImageBuildDegraded"}


def test_random_states_are_decided_as_by_the_mco() -> None:
    states = [RandomState(seed).make() for seed in range(programs.read_count(COUNT, 1000))]
    text = "".join(json.dumps(state) + "\n" for state in states)
    done = subprocess.run(
        [PROGRAM.read()], input=text, capture_output=True, text=True, check=True, timeout=600
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(states)
    tally: Counter[str] = Counter()
    differences = {}
    for seed, (state, answer) in enumerate(zip(states, answers, strict=True)):
        found = find_differences(state, answer, tally)
        if found:
            differences[seed] = found
    assert differences == {}
    # Documented differences must not hide the comparison.
    assert tally["candidates compared"] > 0.6 * len(states), tally
    assert tally["status compared"] > 0.6 * len(states), tally


def find_differences(state: Json, answer: Json, tally: Counter[str]) -> dict[str, Any]:
    """Return ours and theirs of each decision that differs without a documented reason."""
    pool = MachineConfigPool.from_json(state["pool"])
    config, build = recorded_image(state)
    target = compute_build_target(pool, config, build)
    nodes = recorded_nodes(state)
    ours, theirs = decide(pool, nodes, target), read_answer(answer)
    kinds = {name: has_documented_difference(name, nodes, target) for name in ours}
    # Counts come from the Nodes alone.
    kinds["status"] |= state["imageModeStatusReporting"]
    found = {
        name: (ours[name], theirs[name])
        for name in ours
        if not kinds[name] and ours[name] != theirs[name]
    }
    tally["candidates compared"] += not kinds["candidates"]
    if not kinds["status"]:
        tally["status compared"] += 1
        mine, other = compute_both_statuses(state, answer, target, nodes)
        found |= {
            f"status.{name}": (mine[name], other[name])
            for name in mine
            if mine[name] != other.get(name)
        }
    return found


def decide(pool: MachineConfigPool, nodes: list[NodeFacts], target: RolloutTarget) -> Json:
    try:
        limit = compute_max_unavailable(pool.name, pool.max_unavailable, len(nodes))
    except ConfigError:
        limit = -1
    candidates = find_candidates(nodes, target, limit)
    chosen: tuple[NodeFacts, ...] = candidates.nodes
    if candidates.capacity < len(chosen):
        chosen = sort_by_zone(chosen)[: candidates.capacity]
    return {
        "maxUnavailable": limit,
        "candidates": [each.name for each in candidates.nodes],
        "capacity": candidates.capacity,
        "chosen": [each.name for each in chosen],
        "updated": [each.name for each in nodes if each.is_updated_to(target)],
        "ready": [each.name for each in nodes if each.is_updated_to(target) and each.is_in_service],
        "unavailable": [each.name for each in nodes if each.is_unavailable],
        "degraded": [each.name for each in nodes if each.is_degraded],
        "status": {},
    }


def read_answer(answer: Json) -> Json:
    theirs = {**answer, "status": {}}
    if answer.get("error"):
        theirs |= {"maxUnavailable": -1, "candidates": [], "capacity": 0, "chosen": []}
    elif not answer["capacity"]:
        # Without capacity the MCO's list is empty, and so is ours.
        theirs |= {"candidates": [], "chosen": []}
    return theirs


def has_documented_difference(name: str, nodes: list[NodeFacts], target: RolloutTarget) -> bool:
    """Return whether the docstrings of `nodes`, `select` and `status` name a difference."""
    fails_by_image = any(
        each.is_failing and each.current_config == each.desired_config for each in nodes
    )
    untouched = any(each.is_unassigned for each in nodes)
    twice = any(
        each.is_failing and each.is_assigned(target) and not each.is_in_service for each in nodes
    )
    match name:
        case "candidates" | "capacity" | "chosen":
            return fails_by_image or untouched or twice
        case "unavailable" | "status":
            return fails_by_image or untouched
        case _:
            return False


def compute_both_statuses(
    state: Json, answer: Json, target: RolloutTarget, nodes: list[NodeFacts]
) -> tuple[Json, Json]:
    pool = MachineConfigPool.from_json(state["pool"])
    config, build = recorded_image(state)
    view = PoolStatusInput(pool, target, nodes, config, build)
    ours = compute_status(view, now="2026-06-01T00:00:00Z").to_json()
    found = flatten(ours), flatten(answer["status"])
    if not nodes:
        # A pool without nodes is updated: the MCO names the image that none of them has.
        for each in found:
            each["Updated"] = each["Updated"][0]
    return found


def flatten(status: Json) -> Json:
    found = {name: value for name, value in status.items() if name not in OTHER_FIELDS}
    found["configuration"] = found.get("configuration", {}).get("name")
    for each in status["conditions"]:
        if each["type"] not in OUR_CONDITIONS:
            is_named = each["type"] not in REWORDED
            found[each["type"]] = (each["status"], each.get("message", "") if is_named else "")
    return found
