"""The lab's one pool, as a person writes it, and what it says of itself."""

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.gates.os_image import OS_IMAGE
from treenail.controllers.rollout.policy import ROLLOUT_POLICY
from treenail.kube.client import Json, PatchType
from treenail.kube.resources import MACHINECONFIGPOOLS, MACHINECONFIGS
from treenail_lab.cluster import POOL, Lab, build_rendered_config
from treenail_lab.demo.table import PoolView

ROLE_LABEL = "machineconfiguration.openshift.io/role"
CANARY_POLICY = "{canary: {nodes: 1, soak: 2s}, maxFailures: 0}"
"""One node first, and a halt at the first failure."""


def build_pool(image: str, *, paused: bool = False) -> Json:
    """The pool whose nodes are to have the image."""
    return {
        "apiVersion": MACHINECONFIGPOOLS.api_version,
        "kind": MACHINECONFIGPOOLS.kind,
        "metadata": {"name": POOL, "annotations": {OS_IMAGE: image, ROLLOUT_POLICY: CANARY_POLICY}},
        "spec": {
            "paused": paused,
            "machineConfigSelector": {"matchLabels": {ROLE_LABEL: POOL}},
            "nodeSelector": {"matchLabels": {f"node-role.kubernetes.io/{POOL}": ""}},
        },
    }


def build_config(name: str, spec: Json | None = None) -> Json:
    """A MachineConfig of the pool."""
    found = build_rendered_config(name, spec)
    found["metadata"] = {"name": name, "labels": {ROLE_LABEL: POOL}}
    return found


def apply_pool(lab: Lab, wanted: Json) -> None:
    """As ``kubectl apply --server-side`` does."""
    lab.client.patch(MACHINECONFIGPOOLS, POOL, wanted, PatchType.APPLY)


def create_pool(lab: Lab, image: str) -> None:
    """The pool with its first MachineConfig."""
    lab.add_config(build_config(f"00-{POOL}"))
    apply_pool(lab, build_pool(image))


def pause_pool(lab: Lab) -> None:
    """Nobody is given anything until the pool is applied again."""
    lab.client.patch(MACHINECONFIGPOOLS, POOL, {"spec": {"paused": True}})


def add_config(lab: Lab, wanted: Json) -> None:
    """Add what a MachineConfig says to the pool's."""
    spec = wanted.get("spec")
    found = build_config(f"50-{POOL}-change", spec if isinstance(spec, dict) else None)
    lab.client.create(MACHINECONFIGS, found)


def summarize_pool(found: MachineConfigPool) -> PoolView:
    """What the pool says of its rollout."""
    said = {each.type: each for each in found.conditions}
    degraded, updating = said.get("Degraded"), said.get("Updating")
    if degraded is not None and degraded.status == "True":
        stalled = degraded.reason != "NodeDegraded"
        return PoolView(found.name, f"{degraded.reason}: {degraded.message}", is_stalled=stalled)
    if updating is None or updating.status != "True":
        paused = ", paused" if found.paused else ""
        return PoolView(
            found.name, f"{found.status_configuration.name or 'not updated yet'}{paused}"
        )
    # What is first is the target, which the nodes show.
    _, _, progress = updating.message.partition("; ")
    return PoolView(found.name, progress or updating.message)
