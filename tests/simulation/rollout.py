"""A rollout of a config over a small cluster, and what must hold in each moment of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fakes.world import World
from tests.simulation.cluster import ClusterState, SimCluster
from tests.simulation.controllers import SimControllers
from tests.simulation.machines import SimMachine, copy_world, set_ready
from tests.simulation.run import PODS, ClusterRun
from treenail.api import annotations as key
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail.manifests import installation
from treenail_lab.apiserver.store import StoreEvent

Json = dict[str, Any]
GROUP = MACHINECONFIGPOOLS.group
CONFIGS = f"/apis/{GROUP}/v1/machineconfigs"
POOLS = f"/apis/{GROUP}/v1/machineconfigpools"
ROLE = "node-role.kubernetes.io/worker"
NODES = ("n0", "n1", "n2")
CONTROLLERS = ("render", "rollout", "drain")
LIMIT = 1
DIGEST = "sha256:" + "1" * 64
PATH = "/etc/rolled-out"
IN_FLIGHT_S = 0.5
"""Time in which the controllers cannot know yet that a machine has failed."""
NODE_GRACE_S = 50.0
"""Time until kube-controller-manager marks a node without a kubelet."""


class SimulatedCluster:
    """The parts that all runs share: an API server, and an updated cluster to begin with."""

    def __init__(self, directory: Path, controllers: tuple[str, ...] = CONTROLLERS) -> None:
        self.cluster = SimCluster(directory)
        self.controllers = controllers
        self.worlds = {name: World(booted=DIGEST) for name in NODES}
        self._create_objects()
        self.state = self.cluster.save()
        run = Rollout(self)
        with run:
            assert run.settle(), run.describe()
        self.state = self.cluster.save()
        self.worlds = {name: machine.world for name, machine in run.machines.items()}

    def _create_objects(self) -> None:
        create = self.cluster.execute
        self.cluster.install_kinds()
        for each in installation.build_node_access():
            group = str(each["apiVersion"])
            if group.startswith("rbac"):
                namespace = each["metadata"].get("namespace")  # type: ignore[attr-defined]  # a dict
                within = f"/namespaces/{namespace}" if namespace else ""
                create("POST", f"/apis/{group}{within}/{str(each['kind']).lower()}s", each)
        create("POST", CONFIGS, build_config(0))
        create(
            "POST",
            POOLS,
            {
                "apiVersion": f"{GROUP}/v1",
                "kind": "MachineConfigPool",
                "metadata": {"name": "worker"},
                "spec": {
                    "machineConfigSelector": {"matchLabels": {"role": "worker"}},
                    "nodeSelector": {"matchLabels": {ROLE: ""}},
                    "maxUnavailable": LIMIT,
                },
            },
        )
        for name in NODES:
            create("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": {ROLE: ""}}})
            set_ready(self.cluster, name, "True")
        create("POST", "/api/v1/namespaces", {"metadata": {"name": "shop"}})


def build_config(number: int) -> Json:
    source = f"data:,{number}"
    file = {"path": PATH, "mode": 0o644, "overwrite": True, "contents": {"source": source}}
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "MachineConfig",
        "metadata": {"name": "50-worker", "labels": {"role": "worker"}},
        "spec": {"config": {"ignition": {"version": "3.5.0"}, "storage": {"files": [file]}}},
    }


class Rollout(ClusterRun):
    """One rollout from the shared state."""

    def __init__(self, shared: SimulatedCluster, *, seed: int = 1) -> None:
        super().__init__(shared.cluster, shared.state, seed=seed)
        self.machines = {
            name: SimMachine(self.cluster, name, copy_world(world))
            for name, world in shared.worlds.items()
        }
        self.pods = [SimControllers(self.cluster, name, shared.controllers) for name in PODS]
        self.wanted = 0
        self.excused = LIMIT
        """Nodes that an event of the story itself took out of service, and the limit."""
        self._failed, self._failed_at = "", float("-inf")

    def begin_story(self) -> None:
        self.change_config()

    def change_config(self) -> None:
        """Let a user write another config, while a pod runs on each node."""
        self._create_pods()
        self.wanted += 1
        self.cluster.execute("PATCH", f"{CONFIGS}/50-worker", build_config(self.wanted))

    def _create_pods(self) -> None:
        for name in NODES:
            if self.cluster.api.store.find_object(("", "pods"), ("shop", f"web-{name}")) is None:
                spec = {"nodeName": name, "containers": [{"name": "main", "image": "i"}]}
                body = {"metadata": {"name": f"web-{name}"}, "spec": spec}
                self.cluster.execute("POST", "/api/v1/namespaces/shop/pods", body)

    def restore(self, state: ClusterState, *, skipped_versions: int = 0) -> None:
        """Restore etcd; machines that are down seem to be in service for a while."""
        super().restore(state, skipped_versions=skipped_versions)
        self.excused = max(self.excused, len(self.list_unavailable()))
        self.story.start("kubelets", self._report_machines)

    def _report_machines(self) -> None:
        for machine in self.machines.values():
            if not machine.is_down:
                machine.report_ready()
        self.simulation.park(NODE_GRACE_S)
        for machine in self.machines.values():
            machine.report_ready()

    def excuse_node(self, name: str) -> None:
        self._failed, self._failed_at = name, self.simulation.time
        self.excused = len({*self.list_busy(), name})

    def find_unsettled(self) -> Iterator[str]:
        pool = self._get_pool()
        status, target = pool.get("status", {}), self._find_target()
        yield from (f"pool: {text}" for text in find_status_problems(pool))
        if not target or self._read_source(target) != f"data:,{self.wanted}":
            yield f"pool: {target or 'nothing'} is rendered"
        if status.get("machineCount") != len(NODES):
            yield "pool: not all nodes are counted"
        for name, machine in self.machines.items():
            node = self._get_node(name)
            notes = node["metadata"].get("annotations", {})
            if [notes.get(each) for each in (key.CURRENT_CONFIG, key.DESIRED_CONFIG)] != [
                target
            ] * 2:
                yield f"{name}: not at {target}: {notes}"
            if notes.get(key.STATE) != "Done" or notes.get(key.REASON):
                yield f"{name}: {notes.get(key.STATE)} {notes.get(key.REASON)}"
            if notes.get(key.DESIRED_DRAIN) != notes.get(key.LAST_APPLIED_DRAIN):
                yield f"{name}: {notes.get(key.DESIRED_DRAIN)} is not applied"
            if is_unavailable(node) or machine.is_down:
                yield f"{name}: out of service"
            if machine.world.file(PATH) != str(self.wanted).encode():
                yield f"{name}: the file has {machine.world.file(PATH)!r}"
            if machine.world.violations:
                yield f"{name}: {machine.world.violations}"
            yield from self._find_mcn_problems(name, target)

    def _find_mcn_problems(self, name: str, target: str) -> list[str]:
        found = self.cluster.api.store.find_object((GROUP, "machineconfignodes"), ("", name))
        if found is None:
            return [f"MachineConfigNode {name} does not exist"]
        status, problems = found.get("status") or {}, []
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
        if self.wanted and conditions.get("Updated") != "True":
            problems.append(f"MachineConfigNode {name}: {conditions}")
        untrue = ("NodeDegraded", "Cordoned", "Drained", "UpdatePrepared", "UpdateExecuted")
        problems += [
            f"MachineConfigNode {name}: {other} is True"
            for other in untrue
            if conditions.get(other) == "True"
        ]
        if found["spec"]["configVersion"]["desired"] != target:
            problems.append(f"MachineConfigNode {name}: desired is not {target}")
        version = (status.get("configVersion") or {}).get("current")
        if self.wanted and version != target:
            problems.append(f"MachineConfigNode {name}: current is {version}")
        return problems

    def check_event(self, storage: tuple[str, str], event: StoreEvent) -> None:
        """Check the cluster after each event; the listener of the store."""
        if storage == ("", "nodes"):
            self._check_node(event.object)
        elif storage == (GROUP, "machineconfigpools"):
            self._check_pool(event.object)

    def _check_node(self, node: Json) -> None:
        name, notes = node["metadata"]["name"], node["metadata"].get("annotations", {})
        machine = self.machines[name]
        machine.world.annotations = dict(notes)
        machine.world.unschedulable = bool(node.get("spec", {}).get("unschedulable"))
        if self.simulation.time < self._failed_at + IN_FLIGHT_S:
            self.excused = max(self.excused, len({*self.list_busy(), self._failed}))
        out = self.list_unavailable()
        if len(out) > self.excused:
            self.note_problem(f"limit: {out} are out of service, not {self.excused}")
        self.excused = max(LIMIT, min(self.excused, len(self.list_busy())))
        current = notes.get(key.CURRENT_CONFIG)
        if notes.get(key.STATE) == "Done" and current and not self.is_restored:
            source, content = self._read_source(current), machine.world.file(PATH)
            if source and content != source.removeprefix("data:,").encode():
                self.note_problem(f"status: {name} says {current}, and its file has {content!r}")

    def _check_pool(self, pool: Json) -> None:
        conditions = read_conditions(pool)
        name = pool.get("status", {}).get("configuration", {}).get("name")
        if conditions.get("Updated") != "True" or not name or self.is_restored:
            return
        source = self._read_source(name)
        for machine in self.machines.values():
            content = machine.world.file(PATH)
            if source and content != source.removeprefix("data:,").encode():
                self.note_problem(f"status: the pool is updated to {name}, but not {machine.name}")

    def list_unavailable(self) -> list[str]:
        return [
            name
            for name, machine in self.machines.items()
            if machine.is_down or is_unavailable(self._get_node(name))
        ]

    def list_assigned(self) -> list[str]:
        """Return the nodes that the present target of the pool is assigned to."""
        target = self._find_target()
        nodes = {name: self._get_node(name)["metadata"]["annotations"] for name in self.machines}
        return [name for name, notes in nodes.items() if notes[key.DESIRED_CONFIG] == target]

    def list_busy(self) -> list[str]:
        """Return the nodes that are out of service, or on their way to another target."""
        unavailable = self.list_unavailable()
        return [
            name
            for name in self.machines
            if name in unavailable or not is_done(self._get_node(name))
        ]

    def _get_pool(self) -> Json:
        return (
            self.cluster.api.store.find_object((GROUP, "machineconfigpools"), ("", "worker")) or {}
        )

    def _get_node(self, name: str) -> Json:
        return self.cluster.api.store.find_object(("", "nodes"), ("", name)) or {}

    def _find_target(self) -> str:
        return self._get_pool().get("spec", {}).get("configuration", {}).get("name", "")

    def _read_source(self, config: str) -> str:
        found = self.cluster.api.store.find_object((GROUP, "machineconfigs"), ("", config))
        if found is None:
            return ""
        files = found["spec"]["config"]["storage"]["files"]
        return str(files[0]["contents"]["source"])


def is_unavailable(node: Json) -> bool:
    """Cordoned or not Ready, as the Machine Config Operator counts."""
    conditions = node.get("status", {}).get("conditions", [])
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return bool(node.get("spec", {}).get("unschedulable")) or not is_ready


def is_done(node: Json) -> bool:
    notes = node["metadata"].get("annotations", {})
    is_current = notes.get(key.CURRENT_CONFIG) == notes.get(key.DESIRED_CONFIG)
    return is_current and notes.get(key.STATE) == "Done"


def read_conditions(pool: Json) -> dict[str, str]:
    return {each["type"]: each["status"] for each in pool.get("status", {}).get("conditions", [])}


def find_status_problems(pool: Json) -> list[str]:
    """Say what of a pool's status is not that of an updated pool."""
    status, conditions, count = pool.get("status", {}), read_conditions(pool), len(NODES)
    counts = ("updatedMachineCount", "readyMachineCount", "machineCount")
    found = [f"{each} is {status.get(each)}" for each in counts if status.get(each) != count]
    zero = ("unavailableMachineCount", "degradedMachineCount")
    found += [f"{each} is {status.get(each)}" for each in zero if status.get(each)]
    wanted = {"Updated": "True", "Updating": "False", "Degraded": "False"}
    found += [f"{each} is not {now}" for each, now in wanted.items() if conditions.get(each) != now]
    if status.get("observedGeneration") != pool.get("metadata", {}).get("generation"):
        found.append("the generation is not observed")
    named = pool.get("spec", {}).get("configuration", {}).get("name")
    if status.get("configuration", {}).get("name") != named:
        found.append("status.configuration is another one")
    return found


__all__ = ["ClusterState", "Rollout", "SimulatedCluster"]
