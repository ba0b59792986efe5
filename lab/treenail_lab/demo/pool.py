"""The lab's only pool: its manifest, and why its rollout halted."""

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.kube.client import Json, PatchType
from treenail.kube.resources import MACHINECONFIGPOOLS, MACHINECONFIGS, ROLLOUTPOLICIES
from treenail_lab.cluster import POOL, Lab, build_rendered_config

ROLE_LABEL = "machineconfiguration.openshift.io/role"
POLICY = "careful"
CANARY_POLICY: Json = {"canary": {"nodes": 1, "soak": "2s"}, "maxFailures": 0}
"""One node first; the rollout halts at the first failure."""


def build_pool(image: str, *, paused: bool = False) -> Json:
    """Return the pool that requests the image for its nodes."""
    return {
        "apiVersion": MACHINECONFIGPOOLS.api_version,
        "kind": MACHINECONFIGPOOLS.kind,
        "metadata": {"name": POOL},
        "spec": {
            "osImage": image,
            "rolloutPolicy": POLICY,
            "paused": paused,
            "machineConfigSelector": {"matchLabels": {ROLE_LABEL: POOL}},
            "nodeSelector": {"matchLabels": {f"node-role.kubernetes.io/{POOL}": ""}},
        },
    }


def apply_policy(lab: Lab, spec: Json) -> None:
    """Apply the rollout policy of the pool."""
    wanted: Json = {
        "apiVersion": ROLLOUTPOLICIES.api_version,
        "kind": ROLLOUTPOLICIES.kind,
        "metadata": {"name": POLICY},
        "spec": spec,
    }
    lab.client.patch(ROLLOUTPOLICIES, POLICY, wanted, PatchType.APPLY)


def build_config(name: str, spec: Json | None = None) -> Json:
    """Return a MachineConfig of the pool."""
    found = build_rendered_config(name, spec)
    found["metadata"] = {"name": name, "labels": {ROLE_LABEL: POOL}}
    return found


def apply_pool(lab: Lab, wanted: Json) -> None:
    """Apply the pool as ``kubectl apply --server-side`` does."""
    lab.client.patch(MACHINECONFIGPOOLS, POOL, wanted, PatchType.APPLY)


def create_pool(lab: Lab, image: str) -> None:
    """Create the pool, its rollout policy and its first MachineConfig."""
    apply_policy(lab, CANARY_POLICY)
    lab.add_config(build_config(f"00-{POOL}"))
    apply_pool(lab, build_pool(image))


def create_pool_without_image(lab: Lab, base: str) -> None:
    """Create the pool with its policy and a MachineConfig that names the base of a build."""
    apply_policy(lab, CANARY_POLICY)
    lab.add_config(build_config(f"00-{POOL}", {"osImageURL": base}))
    wanted = build_pool("")
    spec = wanted["spec"]
    if isinstance(spec, dict):
        del spec["osImage"]
    apply_pool(lab, wanted)


def pause_pool(lab: Lab) -> None:
    """Pause the pool: no node is assigned a target until the pool is applied again."""
    lab.client.patch(MACHINECONFIGPOOLS, POOL, {"spec": {"paused": True}})


def add_config(lab: Lab, wanted: Json) -> None:
    """Add the spec of a MachineConfig to the pool."""
    spec = wanted.get("spec")
    found = build_config(f"50-{POOL}-change", spec if isinstance(spec, dict) else None)
    lab.client.create(MACHINECONFIGS, found)


def find_halt_message(found: MachineConfigPool) -> str:
    """Return why the rollout continues only after a user has acted; empty while it does."""
    degraded = next((each for each in found.conditions if each.type == "Degraded"), None)
    if degraded is None or degraded.status != "True" or degraded.reason == "NodeDegraded":
        return ""
    return f"{degraded.reason}: {degraded.message}"
