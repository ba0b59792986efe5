"""Documents of the page: a cluster of three pools, and pools of any size."""

import json
import zlib

from tests.controllers.rollout.world import World
from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.controllers.status.status_table import BuildRow, build_rows, build_status_document
from treenail.controllers.status.statuspage.server import EncodedDocument

IMAGE = "quay.io/example/os@sha256:" + "ab12" * 16
BUDGET = '[{"pod": "shop/web-1", "message": "no", "budgets": [{"name": "web"}]}]'
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\u202egnp.\x1b"
_PAST = {"config": "older", "image": IMAGE, "beganAt": 999_990_000, "endedAt": 999_993_600}
PAST = [
    {**_PAST, "outcome": "Complete"},
    {**_PAST, "outcome": "Halted", "reason": "worker-0001: disk"},
]


BUILDS = {
    "worker": BuildRow("worker-1", "Building", "Job build-worker-1 runs build", 200.0),
    "gpu": BuildRow("gpu-1", "Failed", f"line 2: {HOSTILE}\nlast output", 4.0),
}


def make_document(worker_nodes: int = 8) -> Json:
    """A pool in progress, a halted one with a hostile reason, and one that waits for a window."""
    world = World()
    names = [f"worker-{number:04}" for number in range(worker_nodes)]
    for name in names:
        world.add_node(name, "old")
        version = {"nodeInfo": {"osImage": "Fedora CoreOS 42.20260601.3.0"}}
        world.change("nodes", name, {"status": version})
    world.set_pool("worker", "new", "{canary: {nodes: 1, soak: 10m}, waves: [50%], maxFailures: 2}")
    _annotate(world, names[0], CURRENT_CONFIG="new", DESIRED_CONFIG="new",
              LAST_OUTAGE="2026-01-01T00:00:00Z/2026-01-01T00:03:20Z")  # fmt: skip
    _annotate(world, names[1], DESIRED_CONFIG="new", STATE="Working", PROGRESS="40%")
    _annotate(world, names[2], DESIRED_CONFIG="new", STATE="Working", DESIRED_DRAIN="drain-a",
              DRAIN_BLOCKED=BUDGET)  # fmt: skip
    world.cordon(names[2], on=True)
    _annotate(
        world, names[3], DESIRED_CONFIG="new", STATE="Degraded", REASON="no space left on /boot"
    )
    _set_status(world, "worker", "Updating", "True", "Waiting",
                "All nodes are updating to MachineConfig new; wave 2 of 3 is in progress; "
                "1 of 8 nodes are updated, about 1 h left",
                counts=(worker_nodes, 1, 1, 1),
                rollout={"config": "new", "wave": 1, "beganAt": 999_996_400,
                         "history": PAST})  # fmt: skip
    for pool, reason in (("gpu", HOSTILE), ("infra", "")):
        world.add_node(f"{pool}-0", "old", labels={f"node-role.kubernetes.io/{pool}": ""})
        policy = "{windows: [{days: [Sat], start: '02:00', duration: 2h, timeZone: UTC}]}"
        world.set_pool(pool, "new", policy, osImage=IMAGE)
        halted = {"halted": {"node": f"{pool}-0", "reason": reason}} if reason else {}
        _set_status(world, pool, "Updating", "True", "Waiting",
                    "All nodes are updating to X; waiting: the maintenance window opens at 02:00",
                    counts=(1, 0, 0, 0),
                    rollout={"config": "new", "image": IMAGE, **halted})  # fmt: skip
    world.deliver()
    rows = build_rows(
        world.list_pools(),
        world.list_nodes(),
        world.list_policies(),
        now=world.now() + 90.0,
        builds=BUILDS,
    )
    return {"problem": "", "omittedNodes": 0, **build_status_document(rows, now=world.now() + 90.0)}


def encode(document: Json) -> EncodedDocument:
    plain = json.dumps(document).encode()
    encoder = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return EncodedDocument(plain, encoder.compress(plain) + encoder.flush())


def _annotate(world: World, node: str, **annotations: str) -> None:
    found = {getattr(key, name): value for name, value in annotations.items()}
    world.change("nodes", node, {"metadata": {"annotations": found}})


def _set_status(
    world: World,
    pool: str,
    *condition: str,
    counts: tuple[int, int, int, int],
    rollout: dict[str, object],
) -> None:
    names = ("machineCount", "updatedMachineCount", "unavailableMachineCount")
    found = dict(zip(("type", "status", "reason", "message"), condition, strict=True))
    status = {**dict(zip(names, counts, strict=False)), "degradedMachineCount": counts[3]}
    changed = {**status, "conditions": [found], "rollout": rollout}
    world.change("machineconfigpools", pool, {"status": changed})
