"""Random pools are rendered, named and rejected as the MCO's render controller recorded it.

``tests/data/random_pools.json`` has the hash in each name by seed, and null where Go rejected the
pool. The MCO was at commit 7ff337a4f. The differences are those of docs/machine-configs.md.
"""

import contextlib
import json
import re
from collections import Counter
from typing import Any

import pytest

from tests.api.fuzzing import EXAMPLES
from tests.config.random_configs import ROLE, make_case
from tests.oracle import DATA
from treenail.api.decode import Fields
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.config.merge import DefaultImages
from treenail.config.validation import validate_config
from treenail.controllers.render.render import ControllerConfig, render_pool
from treenail.errors import ConfigError

ANSWERS: dict[str, list[str | None]] = json.loads((DATA / "random_pools.json").read_text("utf-8"))
CLUSTER = ControllerConfig(
    DefaultImages("registry.example.com/os@sha256:1111", "registry.example.com/ext@sha256:2222")
)
EVERY = {"key": ROLE, "operator": "Exists"}
POOL = MachineConfigPool.from_json(
    {
        "metadata": {"name": "infra", "uid": "u"},
        "spec": {"machineConfigSelector": {"matchExpressions": [EVERY]}},
    }
)
STRICTER = re.compile(
    "cannot append to a file of a running node|is a link of this config|"
    r"users\[\d+\](\.name)?: expected|groups\[\d+\]: expected (an object|a string), found null|"
    r"\.filesystem: expected root|\.path: expected a path without|without colons, line ends"
    r"|ignition (proxy|security|timeouts) section"
)
"""Errors for pools that Go renders, although no node can apply the result."""
ORDERED = (
    *(("storage", name) for name in ("directories", "disks", "filesystems", "raid")),
    ("passwd", "groups"),
)
"""Lists that Go refuses to reorder."""


def render(configs: list[Any], current: MachineConfig | None = None) -> MachineConfig:
    found = [MachineConfig.from_json(each) for each in configs]
    return render_pool(POOL, found, CLUSTER, current=current).config


def find_difference(kind: str, seed: int, answer: str | None) -> str:
    """Return how our answer differs from Go's; empty when it does not, or as documented."""
    configs, before = make_case(kind, seed)
    try:
        current = None if before is None else render(before)
    except ConfigError:
        current = None  # Go rejected it as well, or rejects all that follow.
    try:
        found = render(configs, current)
    except ConfigError as error:
        is_documented = answer is None or STRICTER.search(str(error))
        return "" if is_documented else f"Go renders {answer}: {error}"
    if answer is None:
        is_documented = before is not None and is_rejected_later(found, current)
        return "" if is_documented else f"Go rejects {found.name}"
    return "" if found.name.endswith(answer) else f"Go renders {answer}, we render {found.name}"


def is_rejected_later(config: MachineConfig, current: MachineConfig | None) -> bool:
    """Return whether the MCO renders either config once and never again, or finds a new order."""
    if current is None:
        return True
    try:
        validate_config(config)
        validate_config(current)
    except ConfigError:
        return True
    before, after = (Fields(each.config or {}, "") for each in (current, config))
    return any(
        before.get_object(section).get_list(name) != after.get_object(section).get_list(name)
        for section, name in ORDERED
    )


@pytest.mark.parametrize("kind", ["random", "damaged", "changed"])
def test_random_pools_are_rendered_as_recorded(kind: str) -> None:
    answers = ANSWERS[kind]
    found = {seed: find_difference(kind, seed, answer) for seed, answer in enumerate(answers)}
    assert {seed: what for seed, what in found.items() if what} == {}


@pytest.mark.limit(EXAMPLES or 600.0)
@pytest.mark.parametrize("kind", ["random", "damaged", "changed"])
def test_unrecorded_random_pools_are_rendered_or_rejected(kind: str) -> None:
    first = len(ANSWERS[kind])
    rendered = 0
    for seed in range(first, first + (EXAMPLES or 50)):
        with contextlib.suppress(ConfigError):
            rendered += bool(render(make_case(kind, seed)[0]).name)
    assert rendered > 0


def test_recorded_pools_cover_every_version_and_both_answers() -> None:
    versions: Counter[str] = Counter()
    for seed in range(200):
        for each in make_case("random", seed)[0]:
            config = each["spec"].get("config") or {}
            versions[str(config.get("ignition", {}).get("version"))] += 1
    assert {"2.2.0", *(f"3.{minor}.0" for minor in range(6))} <= versions.keys()
    assert all(None in answers and len({*answers}) > 100 for answers in ANSWERS.values())
