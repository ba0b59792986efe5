"""Random states of a pool: its nodes, their reports and an image build, the same for each seed."""

import random
from typing import Any

from treenail.api import annotations as key

Json = dict[str, Any]

CONFIGS = ("rendered-v1", "rendered-v2", "rendered-v3")
IMAGES = tuple(f"registry.example.com/os@sha256:{digit * 64}" for digit in "ab")
_STATES = ("Done", "Done", "Done", "Working", "Degraded", "Unreconcilable", "")
_LIMITS = (None, None, 1, 2, 3, 0, "50%", "34%", "100%", "1%", "5", "x%", "+40%")
_INVALID = ("5", "x%")
_BUILD_STATES = ("Prepared", "Building", "Succeeded", "Succeeded", "Failed", "Interrupted")
_OLD = {"lastTransitionTime": "2026-01-01T00:00:00Z", "reason": "", "message": ""}


class RandomState:
    """Generator of one state; the pool's target is the second config."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self) -> Json:
        """Return pool, nodes, reports, and the image build if the pool has one."""
        is_layered = self._flip(0.3)
        nodes = [
            self._make_node(number, is_layered=is_layered) for number in range(self._pick(range(7)))
        ]
        return {
            "pool": self._make_pool(),
            "nodes": nodes,
            "mosc": self._make_image_config() if is_layered else None,
            "mosb": self._make_build() if is_layered and self._flip(0.9) else None,
            "mcns": [self._make_report(each) for each in nodes],
            "imageModeStatusReporting": self._flip(0.5),
        }

    def _make_pool(self) -> Json:
        spec: Json = {
            "configuration": {"name": CONFIGS[1], "source": [{"name": "00-worker"}]},
            "paused": self._flip(0.1),
        }
        name = self._pick(("worker", "worker", "infra", "arbiter"))
        limit = self._pick(_LIMITS)
        # treenail refuses an invalid limit of the arbiter pool, too; the MCO does not read it.
        if limit is not None and (name != "arbiter" or limit not in _INVALID):
            spec["maxUnavailable"] = limit
        kinds = ("RenderDegraded", "NodeDegraded", "ImageBuildDegraded", "Degraded", "Updated")
        conditions = [
            {**_OLD, "type": kind, "status": self._pick(("True", "False", "False"))}
            for kind in kinds
            if self._flip(0.3)
        ]
        return {
            "metadata": {"name": name, "generation": self._pick((1, 2))},
            "spec": spec,
            "status": {"configuration": {"name": CONFIGS[0]}, "conditions": conditions},
        }  # fmt: skip

    def _make_node(self, number: int, *, is_layered: bool) -> Json:
        notes: dict[str, str] = {}
        desired = self._pick(CONFIGS[:2] if self._flip(0.9) else (*CONFIGS, ""))
        current = desired if self._flip(0.6) else self._pick((*CONFIGS, ""))
        self._note(notes, key.DESIRED_CONFIG, desired)
        self._note(notes, key.CURRENT_CONFIG, current)
        if is_layered or self._flip(0.1):
            image = self._pick((*IMAGES, IMAGES[0], ""))
            self._note(notes, key.DESIRED_IMAGE, image)
            same = image if self._flip(0.6) else self._pick((*IMAGES, ""))
            self._note(notes, key.CURRENT_IMAGE, same)
        self._note(notes, key.STATE, self._pick(_STATES))
        if notes.get(key.STATE) in {"Degraded", "Unreconcilable"} and self._flip(0.8):
            notes[key.REASON] = self._pick(("no space left", 'a "quoted" reason', "é <x> & y"))
        labels = {"node-role.kubernetes.io/worker": ""}
        if self._flip(0.5):
            labels["topology.kubernetes.io/zone"] = self._pick("ab")
        return {
            "metadata": {
                "name": f"node-{number}",
                "labels": labels,
                "annotations": notes,
                # No two nodes of one age: Go's sort leaves their order open.
                "creationTimestamp": f"2026-01-{self._random.randint(0, 3) * 7 + number + 1:02}"
                "T00:00:00Z",
            },
            "spec": {"unschedulable": True} if self._flip(0.15) else {},
            "status": {"conditions": self._make_conditions()},
        }

    def _make_conditions(self) -> list[Json]:
        found = []
        if self._flip(0.9):
            status = self._pick(("False", "Unknown")) if self._flip(0.1) else "True"
            found.append({"type": "Ready", "status": status})
        for kind in ("DiskPressure", "NetworkUnavailable", "MemoryPressure"):
            if self._flip(0.3):
                status = self._pick(("True", "Unknown")) if self._flip(0.1) else "False"
                found.append({"type": kind, "status": status})
        return found

    def _make_report(self, node: Json) -> Json:
        """Return the node's MachineConfigNode, which agrees with its annotations mostly."""
        notes = node["metadata"]["annotations"]
        state = notes.get(key.STATE)
        is_updated = state == "Done" if self._flip(0.9) else self._flip(0.5)
        is_degraded = state in {"Degraded", "Unreconcilable"}
        if self._flip(0.05):
            is_degraded = not is_degraded
        conditions = [
            {**_OLD, "type": "Updated", "status": str(is_updated)},
            {
                **_OLD,
                "type": "NodeDegraded",
                "status": str(is_degraded),
                "message": notes.get(key.REASON, "") if is_degraded else "",
            },
        ]
        if self._flip(0.5):
            conditions.reverse()
        status: Json = {
            "conditions": conditions,
            "configVersion": {"desired": notes.get(key.DESIRED_CONFIG, ""), "current": ""},
        }
        if notes.get(key.DESIRED_IMAGE):
            status["configImage"] = {"desiredImage": notes[key.DESIRED_IMAGE]}
        return {
            "metadata": {"name": node["metadata"]["name"]},
            "spec": {"node": {"name": node["metadata"]["name"]}, "pool": {"name": "worker"},
                     "configVersion": {"desired": ""}},
            "status": status,
        }  # fmt: skip

    def _make_image_config(self) -> Json:
        image = self._pick((*IMAGES, IMAGES[0], IMAGES[0], ""))
        return {
            "metadata": {"name": "mosc"},
            "spec": {"machineConfigPool": {"name": "worker"}},
            "status": {"currentImagePullSpec": image} if image else {},
        }

    def _make_build(self) -> Json:
        config = CONFIGS[1] if self._flip(0.85) else self._pick(CONFIGS)
        conditions = []
        if self._flip(0.9):
            conditions.append({**_OLD, "type": self._pick(_BUILD_STATES), "status": "True"})
        return {
            "metadata": {"name": "mosb"},
            "spec": {"machineConfig": {"name": config}, "machineOSConfig": {"name": "mosc"}},
            "status": {"conditions": conditions},
        }

    def _note(self, notes: dict[str, str], name: str, value: str) -> None:
        """Add the annotation; an empty value is absent more often than empty."""
        if value or self._flip(0.2):
            notes[name] = value

    def _flip(self, chance: float) -> bool:
        return self._random.random() < chance

    def _pick(self, values: Any) -> Any:
        return self._random.choice(values)
