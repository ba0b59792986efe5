"""The pool ``worker`` of the real machine-config-controller, and its nodes."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.contract.client import JSON_PATCH
from tests.mco import operator
from tests.mco.nodes import LabNodes
from tests.mco.operator import MCO
from tests.waiting import wait_until
from treenail_lab.images import Image
from treenail_lab.machine.node.machine import LabMachine

Json = dict[str, Any]

POOL = "worker"
LIMIT_S = 180.0
_PATH = f"{MCO}/machineconfigpools/{POOL}"


class Pool:
    """Actions of a user on the pool, and what its status says."""

    def __init__(self, nodes: LabNodes, image: Image) -> None:
        self.nodes, self.cluster = nodes, nodes.cluster
        self.image = image
        self._configs: list[str] = []

    @property
    def machine(self) -> LabMachine:
        """The machine of the first node."""
        return next(iter(self.nodes.machines.values()))

    def create(self) -> None:
        """Create the pool and a config that names the image its nodes were installed from."""
        self.cluster.post(f"{MCO}/machineconfigpools", operator.build_pool(POOL)).ok()
        document = operator.build_config(POOL, "01-os", osImageURL=self.image.pull_spec)
        self.cluster.post(f"{MCO}/machineconfigs", document).ok()

    def delete(self) -> None:
        for path in (_PATH, f"{MCO}/machineconfigs/01-os"):
            self.cluster.delete(path)

    def clean(self) -> None:
        """Remove the configs of a test, and wait until the nodes are back."""
        self.patch({"paused": False, "maxUnavailable": None})
        for name in list(self._configs):
            self.remove(name)
        self.wait_updated()

    # Actions

    def add(self, name: str, **spec: Any) -> None:
        """Create a MachineConfig of the pool, or replace its spec."""
        path = f"{MCO}/machineconfigs/{name}"
        document = operator.build_config(POOL, name, **spec)
        if name in self._configs:
            change = [{"op": "replace", "path": "/spec", "value": document["spec"]}]
            self.cluster.patch(path, change, JSON_PATCH).ok()
            return
        self.cluster.post(f"{MCO}/machineconfigs", document).ok()
        self._configs.append(name)

    def add_file(self, name: str, path: str, text: str, mode: int = 0o644) -> None:
        file = operator.build_file(path, text, mode)
        self.add(name, config=operator.build_ignition(storage={"files": [file]}))

    def remove(self, name: str) -> None:
        self.cluster.delete(f"{MCO}/machineconfigs/{name}")
        with suppress(ValueError):
            self._configs.remove(name)

    def patch(self, spec: Json) -> None:
        self.cluster.patch(_PATH, {"spec": spec}).ok()

    # Observations

    def read(self) -> Json:
        return self.cluster.get(_PATH).ok()

    def read_target(self) -> str:
        """Return the name of the rendered config that the pool asks for."""
        return str(self.read()["spec"].get("configuration", {}).get("name", ""))

    def read_condition(self, kind: str) -> Json:
        conditions = self.read().get("status", {}).get("conditions") or []
        return next((each for each in conditions if each["type"] == kind), {"status": ""})

    def read_sources(self) -> set[str]:
        """Return the names of the configs in the pool's target."""
        source = self.read()["spec"].get("configuration", {}).get("source") or []
        return {str(each["name"]) for each in source}

    def wait_rendered(self) -> str:
        """Wait until the target has exactly the present configs; return its name."""
        wanted = {"00-worker", "01-os", *self._configs}
        wait_until(lambda: self.read_sources() == wanted, limit_s=LIMIT_S)
        return self.read_target()

    def wait_updated(self) -> str:
        """Wait until the pool and every node are at the target; return the target's name."""
        self.wait_rendered()
        wait_until(self._is_complete, limit_s=LIMIT_S)
        return self.read_target()

    def _is_complete(self) -> bool:
        # A replaced config has the same name, so the target of before may still be read.
        target, nodes = self.read_target(), self.nodes.machines
        return all(self.nodes.is_at(name, target) for name in nodes) and self._is_updated(
            target, len(nodes)
        )

    def _is_updated(self, target: str, count: int) -> bool:
        status = self.read().get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
        return (
            status.get("configuration", {}).get("name") == target
            and status.get("updatedMachineCount") == count == status.get("readyMachineCount")
            and conditions.get("Updated") == "True"
            and conditions.get("Degraded") == "False"
        )


@contextmanager
def run_pool(nodes: LabNodes, image: Image, controller: operator.Controller) -> Iterator[Pool]:
    """Yield the pool with its nodes, at rest at its first config; print all logs of a failure."""
    pool = Pool(nodes, image)
    try:
        pool.create()
        nodes.start(POOL, pool.wait_rendered())
        pool.wait_updated()
        yield pool
    except BaseException:
        sys.stdout.write(nodes.read_story())
        if os.environ.get("TREENAIL_TEST_MCC_LOG"):
            sys.stdout.write(controller.log.read_text("utf-8"))
        raise
    finally:
        nodes.stop()
        pool.delete()
