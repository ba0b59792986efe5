"""Objects of the API server: Nodes, pools, policies, budgets and pods."""

import base64
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from tests import oracle
from tests.controllers import test_fuzz
from tests.fuzz.target import FuzzTarget, Grammar
from treenail.api.controllerconfig import ControllerConfigContents
from treenail.api.decode import load_json
from treenail.api.disruptionpolicy import ClusterDisruptionPolicy
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.node import Node
from treenail.api.pullspec import parse_pull_spec
from treenail.controllers.image_build.build_objects import ObservedJob, ObservedPod
from treenail.controllers.pools.disruption_budgets import find_blocking_reason
from treenail.controllers.pools.maintenance_windows import find_window_state
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.controllers.pools.pool_membership import ObservedPool
from treenail.controllers.pools.rollout_policy import parse_policy
from treenail.errors import TreenailError
from treenail.kube.pods import parse_pod
from treenail.label_selector import LabelSelector
from treenail.update.decision.node_state import (
    DesiredTarget,
    InvalidTarget,
    read_desired_target,
    read_prestage_target,
)

Json = dict[str, Any]
_DIGEST = "sha256:" + "1" * 64
_BUNDLE = {"file": "r.example.com..5000", "data": base64.b64encode(b"ca").decode()}
_NOW = datetime.fromtimestamp(1_800_000_000, UTC)


def _encode(document: object) -> bytes:
    return json.dumps(document).encode()


def _parse(content: bytes) -> object:
    return load_json(content, where="input")


IMAGE_CONFIG: Json = {
    "kind": "MachineOSConfig",
    "metadata": {"name": "worker", "annotations": {}, "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {
        "machineConfigPool": {"name": "worker"},
        "imageBuilder": {"imageBuilderType": "Job"},
        "renderedImagePushSpec": "r.example.com/os:latest",
        "renderedImagePushSecret": {"name": "push"},
        "containerFile": [{"containerfileArch": "NoArch", "content": "FROM configs\n"}],
    },
    "status": {"currentImagePullSpec": f"r.example.com/os@{_DIGEST}", "conditions": []},
}
CONTROLLER_CONFIG: Json = {
    "kind": "ControllerConfig",
    "metadata": {"name": "machine-config-controller"},
    "spec": {
        "kubeAPIServerServingCAData": base64.b64encode(b"ca").decode(),
        "imageRegistryBundleData": [_BUNDLE],
        "internalRegistryPullSecret": base64.b64encode(b'{"auths":{}}').decode(),
        "osImageURL": "a",
        "baseOSContainerImage": f"r.example.com/os@{_DIGEST}",
    },
}


def read_annotations(content: bytes) -> Iterable[str]:
    """Read a Node as the agent and the rollout controller do."""
    document = _parse(content)
    node = Node.from_json(document)
    read_prestage_target(node.annotations)
    match read_desired_target(node.annotations):
        case InvalidTarget(error=error, target=target):
            shown = [str(error), error.remedy, str(target)]
        case DesiredTarget(target=target):
            if target.image:
                parse_pull_spec(target.image, where="image")
            shown = [str(target)]
        case _:
            shown = []
    facts = NodeFacts.from_json(document)
    return [*shown, str(facts.zone), facts.name, str(facts.is_degraded)]


def read_objects(content: bytes) -> Iterable[str]:
    """Read the object as each kind that has a reader of its own."""
    document = _parse(content)
    for read in (
        ObservedPool.from_json, MachineOSConfig.from_json, MachineOSBuild.from_json,
        ControllerConfigContents.from_json, ClusterDisruptionPolicy.from_json,
        ObservedJob.from_json, ObservedPod.from_json,
    ):  # fmt: skip
        try:
            read(document)  # type: ignore[operator]
        except TreenailError as error:
            yield str(error)
    if isinstance(document, dict):
        parse_pod(document)
        yield find_blocking_reason(document)
        yield LabelSelector.from_json(document.get("spec"), "spec").query


def read_policy(content: bytes) -> Iterable[str]:
    """Read a RolloutPolicy, and find its windows."""
    document = _parse(content)
    if not isinstance(document, dict):
        return ()
    policy = parse_policy({"metadata": {"name": "p"}, "spec": document}, "p")
    for window in policy.windows:
        for _, opening in zip(range(5), window.find_openings(_NOW), strict=False):
            assert opening[0] <= opening[1]
    return [str(find_window_state(policy.windows, _NOW.timestamp()))]


def _list_nodes() -> Iterator[bytes]:
    prefix = "machineconfiguration.openshift.io"
    image = f"r.example.com/os@{_DIGEST}"
    node: Json = json.loads(_encode(test_fuzz.NODE))
    yield _encode(node)
    node["metadata"]["annotations"] |= {
        f"{prefix}/desiredConfig": "rendered-worker-1",
        f"{prefix}/desiredImage": image,
        f"{prefix}/state": "Working",
        f"{prefix}/desiredDrain": "drain-rendered-worker-1",
        f"{prefix}/lastAppliedDrain": "uncordon-rendered-worker-1",
        "treenail.io/prestage-config": "rendered-worker-1",
        "treenail.io/prestage-image": image,
    }
    yield _encode(node)
    for record in oracle.records("candidates")[:20]:
        for each in record["nodes"]:
            yield _encode(each)


def _list_objects() -> Iterator[bytes]:
    yield from map(_encode, (test_fuzz.POOL, IMAGE_CONFIG, CONTROLLER_CONFIG, test_fuzz.NODE))
    actions = [{"type": "Restart", "restart": {"serviceName": "a.service"}}]
    policy = {"files": [{"path": "/etc/a", "actions": actions}], "sshkey": {"actions": actions}}
    yield _encode(
        {
            "kind": "MachineConfiguration",
            "metadata": {"generation": 1},
            "spec": {"nodeDisruptionPolicy": policy},
            "status": {
                "observedGeneration": 1,
                "nodeDisruptionPolicyStatus": {"clusterPolicies": policy},
            },
        }
    )
    yield _encode(
        {
            "kind": "PodDisruptionBudget",
            "spec": {"minAvailable": "50%", "maxUnavailable": 1},
            "status": {"expectedPods": 2},
        }
    )
    pod: Json = {
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "n", "deletionGracePeriodSeconds": 30,
                     "deletionTimestamp": "2026-01-01T00:00:00Z",
                     "ownerReferences": [{"kind": "DaemonSet", "name": "d", "controller": True}]},
        "spec": {"nodeName": "a", "volumes": [{"emptyDir": {}}]},
        "status": {
            "phase": "Failed", "reason": "Evicted", "message": "x",
            "conditions": [{"type": "Ready", "status": "False"}],
            "initContainerStatuses": [
                {"name": "build", "state": {"terminated": {"exitCode": 1, "message": "{}"}}},
                {"name": "push", "state": {"waiting": {"reason": "ImagePullBackOff"}}},
            ],
        },
    }  # fmt: skip
    yield _encode(pod)
    yield _encode({"kind": "Job", "metadata": {"name": "j"}, "status": {"failed": 1}})
    for kind in ("mosb", "mcn_updated", "pool_status"):
        for record in oracle.records(kind)[:30]:
            for value in record.values():
                if isinstance(value, dict):
                    yield _encode(value)


def _list_policies() -> Iterator[bytes]:
    yield _encode(test_fuzz.POLICY)
    yield _encode(
        {
            **test_fuzz.POLICY,
            "prestage": {"maxParallel": 10},
            "fleetLock": {"url": "http://l.example.com", "group": "w"},
            "alerts": {"url": "https://p.example.com", "names": ["A"], "secret": "p"},
            "healthMode": "Enforce",
            "progressDeadline": "1h30m",
            "resume": {"worker": "1"},
        }
    )


TARGETS = (
    FuzzTarget("annotations", read_annotations, _list_nodes, Grammar.JSON),
    FuzzTarget("api-objects", read_objects, _list_objects, Grammar.JSON),
    FuzzTarget("rolloutpolicy", read_policy, _list_policies, Grammar.JSON),
)
