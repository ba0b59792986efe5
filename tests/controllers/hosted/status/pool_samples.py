"""Facts of a NodePool for tables of tests, from documents of its objects."""

from typing import Any

from tests.fixtures import hosted
from tests.fixtures.objects import Json
from treenail.api import node
from treenail.api.hosted import clusterapi, nodepool
from treenail.clocks import parse_rfc3339
from treenail.controllers.hosted.status import facts

NOW = parse_rfc3339("2026-11-28T12:00:00Z") or 0.0
"""Three hours after `hosted.SINCE`."""
YOUNG, AGED = "2026-11-28T11:55:00Z", "2026-11-28T10:00:00Z"
CONTROL_PLANE = nodepool.HostedCluster.from_json(hosted.make_hosted_cluster())
TOKEN = facts.TokenFacts(
    has_token=True, has_payload=True, reason="AsExpected",
    message="Payload generated successfully", rotated_at="2026-11-28T10:00:00.123456789Z",
)  # fmt: skip


def read_machine(name: str, value: str = hosted.OLD_HASH, **more: Any) -> clusterapi.ClusterMachine:
    """A Machine; ``created`` and ``deleting`` are times, ``status`` replaces its status."""
    status, created = more.pop("status", None), more.pop("created", AGED)
    deleting, meta = more.pop("deleting", None), {"creationTimestamp": created}
    meta |= {"deletionTimestamp": deleting} if deleting else {}
    document = hosted.make_machine(name, value=value, **meta, **more)
    return clusterapi.ClusterMachine.from_json(
        {**document, **({"status": status} if status else {})}
    )


def read_node(name: str, **annotations: str) -> node.Node:
    notes = {
        f"machineconfiguration.openshift.io/{key}": value for key, value in annotations.items()
    }
    return node.Node.from_json({"metadata": {"name": name, "annotations": notes}})


def make_facts(upgrade_type: str = "Replace", **changes: Any) -> facts.PoolFacts:
    """A pool at rest at the old hash, with two machines, and changes of these facts.

    ``pool``, ``conditions``, ``cluster`` and ``template`` are changes of documents.
    """
    document = hosted.make_node_pool("np", upgrade_type, **changes.pop("pool", {}))
    pool = hosted.with_status(document, *changes.pop("conditions", ()))
    target = changes.pop("target", hosted.OLD_HASH)
    template: Any
    if upgrade_type == "InPlace":
        machine_set = hosted.make_machine_set(target=target, **changes.pop("template", {}))
        template = clusterapi.MachineSet.from_json(machine_set)
    else:
        deployment = hosted.make_machine_deployment(target=target, **changes.pop("template", {}))
        template = clusterapi.MachineDeployment.from_json(deployment)
    values: Json = {
        "cluster": CONTROL_PLANE,
        "template": template,
        "machines": (read_machine("np-0"), read_machine("np-1")),
        "core_configs": 3,
        "token_name": f"token-np-{target}",
        "token": TOKEN,
        **changes,
    }
    return facts.PoolFacts(nodepool.NodePool.from_json(pool), **values)
