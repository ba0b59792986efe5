"""Any content of a cluster or file is accepted or rejected with a TreenailError."""

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.api.fuzzing import damaged, fuzz
from tests.controllers.rollout.builders import NEW, pool, proceed
from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.controllers.pools.os_image import (
    compute_build_target,
    decide_built_image,
    read_pool_image,
)
from treenail.controllers.pools.pool_membership import find_membership
from treenail.controllers.pools.pool_status import PoolStatusInput, compute_status
from treenail.controllers.pools.rollout_policy import ObservedPolicy
from treenail.controllers.pools.rollout_record import RolloutRecord
from treenail.controllers.render import render
from treenail.controllers.rollout.decide import RolloutContext, decide_rollout
from treenail.errors import ConfigError

ROLE = "machineconfiguration.openshift.io/role"
LABELS = {ROLE: "worker"}
POOL: Json = {
    "kind": "MachineConfigPool",
    "metadata": {"name": "worker", "annotations": {}},
    "spec": {
        "machineConfigSelector": {
            "matchLabels": dict(LABELS),
            "matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["y"]}],
        },
        "nodeSelector": {"matchLabels": dict(LABELS)},
        "maxUnavailable": "10%",
        "configuration": {"name": "new", "source": [{"name": "00"}]},
        "osImage": f"registry.example.com/os@sha256:{'1' * 64}",
        "imageFiles": "Write",
        "rolloutPolicy": "careful",
    },
    "status": {"conditions": [{"type": "Updated", "status": "True"}]},
}
MACHINE_CONFIG: Json = {
    "kind": "MachineConfig",
    "metadata": {"name": "00", "labels": dict(LABELS)},
    "spec": {
        "config": {
            "ignition": {"version": "3.5.0", "proxy": {"noProxy": ["x"]}},
            "storage": {
                "files": [{"path": "/a", "contents": {"source": "data:,x"}, "mode": 420}],
                "disks": [{"device": "/dev/sda", "partitions": [{"number": 1, "label": "x"}]}],
                "luks": [{"name": "r", "clevis": {"tang": [{"url": "u"}]}}],
                "raid": [{"name": "md", "devices": ["/dev/sdb"], "options": ["--x"]}],
            },
            "passwd": {"users": [{"name": "core", "groups": ["wheel"]}]},
            "systemd": {"units": [{"name": "a.service", "dropins": [{"name": "b.conf"}]}]},
        },
        "kernelArguments": ["quiet"],
        "osImageURL": "x",
    },
}
NODE: Json = {
    "metadata": {
        "name": "n",
        "labels": dict(LABELS),
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": {
            "machineconfiguration.openshift.io/currentConfig": "old",
            "treenail.io/rollout-started-at": "2026-01-01T00:00:00Z",
        },
    },
    "spec": {"unschedulable": True},
    "status": {
        "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        ]
    },
}
POLICY: Json = {
    "canary": {"nodes": 1, "soak": "5m", "nodeSelector": {"matchLabels": {"a": "b"}}},
    "waves": [2, "50%"],
    "soak": "1h",
    "maxFailures": 1,
    "rebootTimeout": "20m",
    "order": "spread",
    "windows": [{"days": ["Sat"], "start": "01:00", "duration": "4h", "timeZone": "UTC"}],
}
RECORD: Json = {"config": "new", "image": "i", "wave": 1, "settledAt": 5, "forgiven": ["a"]}


@fuzz
@given(damaged(POOL), damaged(MACHINE_CONFIG))
def test_any_files_are_rendered_or_rejected(found: object, config: object) -> None:
    second = {**MACHINE_CONFIG, "metadata": {"name": "01", "labels": LABELS}}
    text = json.dumps({"kind": "List", "items": [found, config, second]})
    with contextlib.suppress(ConfigError):
        rendered, errors = render.render_pools(render.read_manifests([("f", text)]))
        for each in rendered:
            assert each.name.startswith("rendered-")
        for error in errors:
            assert "\n" not in str(error)


@fuzz
@given(damaged(POOL), st.lists(damaged(NODE), max_size=3), damaged(RECORD))
def test_any_rollout_is_decided_or_rejected(found: object, nodes: list[Any], kept: object) -> None:
    with contextlib.suppress(ConfigError):
        seen = MachineConfigPool.from_json(found)
        facts = [NodeFacts.from_json(each) for each in nodes]
        record = RolloutRecord.from_json(kept)
        for each in facts:
            find_membership(each.name, each.labels, [seen])
        image = read_pool_image(seen)
        turn = decide_rollout(seen, facts, image, record, now=1e9)
        view = PoolStatusInput(
            seen, image.target, facts, waiting_reason=turn.waiting_reason, problem=turn.problem
        )
        json.dumps(compute_status(view, now="2026-01-01T00:00:00Z").to_json())


@fuzz
@given(damaged(POLICY))
def test_any_policy_is_obeyed_or_reported(policy: object) -> None:
    facts = [NodeFacts("a", current_config="old", desired_config="old", state="Done")]
    observed = ObservedPolicy.from_json({"metadata": {"name": "careful"}, "spec": policy})
    turn = decide_rollout(
        pool(), facts, proceed(NEW), None, now=1e9, context=RolloutContext(policy=observed.policy)
    )
    assert (observed.error is None) or str(observed.error)
    assert turn.problem is None or turn.problem.message


@fuzz
@given(
    damaged({"metadata": {"name": "c"}, "status": {"currentImagePullSpec": "x"}}),
    damaged(
        {
            "metadata": {"name": "b"},
            "spec": {"machineConfig": {"name": "new"}},
            "status": {"conditions": [{"type": "Failed", "status": "True"}]},
        }
    ),
)
def test_any_build_opens_the_gate_or_is_rejected(config: object, build: object) -> None:
    with contextlib.suppress(ConfigError):
        found = MachineOSConfig.from_json(config), MachineOSBuild.from_json(build)
        assert decide_built_image(pool(), *found)
        assert compute_build_target(pool(), *found)
