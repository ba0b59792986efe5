"""Objects that the build controller watches, and which MachineOSConfigs a change concerns."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.meta import ObjectMeta
from treenail.controllers.image_build.observed import ObservedJob, ObservedPod
from treenail.controllers.image_build.systems import read_systems
from treenail.controllers.pools.pool_index import SelectedPools
from treenail.controllers.pools.pools import ObservedPool
from treenail.controllers.pools.select import CONTROL_PLANE_LABELS
from treenail.controllers.runtime.informers import Informers, InformerView
from treenail.kube.resources import (
    CONFIGMAPS,
    JOBS,
    MACHINECONFIGPOOLS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
    PODS,
)
from treenail.kube.watch import WatchScope

REPOSITORIES = "etc-yum-repos-d"
"""ConfigMap with the package repositories that the instructions of every build see."""

Enqueue = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class NodeArchitecture:
    """Labels and architecture of a Node."""

    name: str
    labels: Mapping[str, str]
    architecture: str

    @classmethod
    def from_json(cls, document: Json) -> "NodeArchitecture":
        """Parse a Node; raises `ConfigError`."""
        fields = Fields.from_json(document, "Node")
        meta = ObjectMeta.from_fields(fields.get_object("metadata"))
        info = fields.get_object("status").get_object("nodeInfo")
        return cls(meta.name, meta.labels, info.get_text("architecture"))


@dataclass(frozen=True, slots=True)
class InputVersion:
    """Name and version of a ConfigMap that builds may read."""

    name: str
    version: str

    @classmethod
    def from_json(cls, document: Json) -> "InputVersion":
        """Parse the metadata of a ConfigMap; raises `ConfigError`."""
        fields = Fields.from_json(document, "ConfigMap")
        meta = ObjectMeta.from_fields(fields.get_object("metadata"))
        return cls(meta.name, meta.resource_version)


class BuildViews:
    """The caches of the build controller.

    Rendered MachineConfigs and Secrets are read on demand: they are large, or secret.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._pool_index = SelectedPools()
        self._lock = threading.Lock()
        self._architectures: dict[str, frozenset[str]] | None = None
        """By pool; None until they are needed. Grouping reads every Node."""
        self._enqueue: Enqueue
        self.configs: InformerView[MachineOSConfig]
        self.builds: InformerView[MachineOSBuild]
        self.pools: InformerView[MachineConfigPool]
        self.nodes: InformerView[NodeArchitecture]
        self.inputs: InformerView[InputVersion]
        self.jobs: InformerView[ObservedJob]
        self.pods: InformerView[ObservedPod]

    def register_watches(self, informers: Informers, enqueue: Enqueue) -> None:
        """Add the views, and enqueue MachineOSConfigs when something changes for them."""
        self._enqueue = enqueue
        self.configs = informers.add_view(
            WatchScope(MACHINEOSCONFIGS), MachineOSConfig.from_json, optional=True
        )
        self.builds = informers.add_view(
            WatchScope(MACHINEOSBUILDS), MachineOSBuild.from_json, optional=True
        )
        self.pools = informers.add_view(WatchScope(MACHINECONFIGPOOLS), MachineConfigPool.from_json)
        selection = informers.add_view(WatchScope(MACHINECONFIGPOOLS), ObservedPool.from_json)
        self.nodes = informers.add_view(WatchScope(NODES), NodeArchitecture.from_json)
        self.nodes.add_handler(self._handle_node)
        # The controller writes those of Jobs itself. An older Role permits no watch.
        inputs = WatchScope(
            CONFIGMAPS,
            self._namespace,
            label_selector=f"!{key.EPHEMERAL_BUILD_OBJECT}",
            is_optional=True,
            has_metadata_only=True,
        )
        self.inputs = informers.add_view(inputs, InputVersion.from_json, optional=True)
        self.inputs.add_handler(self._handle_input)
        jobs = WatchScope(JOBS, self._namespace, label_selector=key.BUILD_KEY)
        pods = WatchScope(PODS, self._namespace, label_selector=key.BUILD_KEY)
        self.jobs = informers.add_view(jobs, ObservedJob.from_json)
        self.pods = informers.add_view(pods, ObservedPod.from_json)
        selection.add_handler(self._handle_selection)
        self.pools.add_handler(self._handle_pool)
        self.configs.add_handler(self._handle_config)
        self.builds.add_handler(self._handle_build)
        self.jobs.add_handler(self._handle_job)
        self.pods.add_handler(self._handle_pod)

    def find_architectures(self, pool: str) -> frozenset[str]:
        """Return the architectures of the pool's nodes."""
        with self._lock:
            if self._architectures is None:
                self._architectures = self._group_architectures()
            return self._architectures.get(pool, frozenset())

    def has_only_control_plane(self) -> bool:
        """Return whether no Node is a worker, as before the first worker joins."""
        nodes = self.nodes.get_all().values()
        return not any(each.labels.keys().isdisjoint(CONTROL_PLANE_LABELS) for each in nodes)

    def _group_architectures(self) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = {}
        for node in self.nodes.get_all().values():
            pool = self._pool_index.find_primary(node.name, node.labels)
            if pool is not None and node.architecture:
                found.setdefault(pool, set()).add(node.architecture)
        return {pool: frozenset(architectures) for pool, architectures in found.items()}

    def _forget_architectures(self) -> None:
        """Group the nodes again: a node or the selection of a pool changed."""
        with self._lock:
            self._architectures = None

    def _handle_selection(
        self, name: str, _before: ObservedPool | None, after: ObservedPool | None
    ) -> None:
        self._pool_index.set_pool(name, after)
        self._forget_architectures()

    def _handle_pool(
        self, name: str, before: MachineConfigPool | None, after: MachineConfigPool | None
    ) -> None:
        if _extract_inputs(before) != _extract_inputs(after):
            self._enqueue_configs_of({name})

    def _handle_node(
        self, _name: str, before: NodeArchitecture | None, after: NodeArchitecture | None
    ) -> None:
        if before == after:
            return
        self._forget_architectures()
        found = (each for each in (before, after) if each is not None)
        pools = (self._pool_index.find_primary(each.name, each.labels) for each in found)
        self._enqueue_configs_of(set(filter(None, pools)))

    def _handle_config(
        self, name: str, before: MachineOSConfig | None, after: MachineOSConfig | None
    ) -> None:
        self._enqueue(name)
        if before is None or after is None:
            # Another MachineOSConfig of the pool may be the one that counts now.
            self._enqueue_configs_of({each.pool for each in (before, after) if each is not None})

    def _handle_input(
        self, _name: str, before: InputVersion | None, after: InputVersion | None
    ) -> None:
        """Plan builds that read a ConfigMap again."""
        changed = after or before
        if changed is None or before == after:
            return
        for config in self.configs.get_all().values():
            if changed.name in (config.context_name, REPOSITORIES):
                self._enqueue(config.name)

    def _handle_build(
        self, _name: str, before: MachineOSBuild | None, after: MachineOSBuild | None
    ) -> None:
        for build in (before, after):
            if build is not None:
                self._enqueue(build.image_config)

    def _handle_job(
        self, _name: str, before: ObservedJob | None, after: ObservedJob | None
    ) -> None:
        for job in (before, after):
            if job is not None:
                self._enqueue_sharers(job)

    def _handle_pod(
        self, _name: str, before: ObservedPod | None, after: ObservedPod | None
    ) -> None:
        pod = after or before
        job = None if pod is None else self.jobs.find(f"{self._namespace}/{pod.job}")
        if job is not None:
            self._enqueue_sharers(job)

    def _enqueue_configs_of(self, pools: set[str]) -> None:
        for config in self.configs.get_all().values():
            if config.pool in pools:
                self._enqueue(config.name)

    def _enqueue_sharers(self, job: ObservedJob) -> None:
        """Enqueue every MachineOSConfig whose running build has the key of the Job."""
        self._enqueue(job.facts.image_config)
        for build in self.builds.get_all().values():
            if not build.state.has_ended and job.facts.share_key in {
                each.share_key for each in read_systems(build).values()
            }:
                self._enqueue(build.image_config)


def _extract_inputs(pool: MachineConfigPool | None) -> object:
    """Return the parts of a pool that a build reads or reports."""
    return None if pool is None else (pool.configuration, pool.conditions, pool.metadata.uid)
