"""Benchmark of the MachineConfigs that other kinds become, beside rendering the same pools."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import quote

from bench.render import ROLE, build_configs
from bench.result import Result
from treenail.api.decode import Json
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.config.generated import sources
from treenail.config.generated.generate import POOL_KINDS
from treenail.controllers.render import render

POOLS, REPEATS = 20, 5
MIRROR = {"mirrors": ["mirror.example.com"]}
SPECS: dict[str, Json] = {
    "KubeletConfig": {"kubeletConfig": {"maxPods": 50}},
    "ContainerRuntimeConfig": {"containerRuntimeConfig": {"pidsLimit": 2048}},
    "ImageDigestMirrorSet": {"imageDigestMirrors": [{"source": "a.example.com", **MIRROR}]},
    "ImageTagMirrorSet": {"imageTagMirrors": [{"source": "b.example.com", **MIRROR}]},
}
OBJECTS = {
    "KubeletConfig": 4,
    "ContainerRuntimeConfig": 2,
    "ImageDigestMirrorSet": 2,
    "ImageTagMirrorSet": 2,
}
BASE_FILES = {
    "/etc/kubernetes/kubelet.conf": "apiVersion: kubelet.config.k8s.io/v1beta1\n"
    "kind: KubeletConfiguration\n",
    "/etc/containers/registries.conf": 'unqualified-search-registries = ["a.example.com"]\n',
}


def measure(_seconds: float) -> Iterator[Result]:
    manifests = build_manifests()
    base = dict(manifests.configs)

    def generate() -> None:
        manifests.configs.clear()
        manifests.configs.update(base)
        results = manifests.generate_configs()
        assert not any(result.problems for result in results)

    generate_s, render_s = measure_best_s(generate), measure_best_s(lambda: render_all(manifests))
    assert len(manifests.configs) == len(base) + 3 * POOLS
    name = f"generating for {POOLS} pools of {sum(OBJECTS.values())} objects"
    yield Result(name, "ms", generate_s * 1000)
    yield Result("  of the time of rendering the same pools", "share", generate_s / render_s, 0.5)


def measure_best_s(work: Callable[[], object]) -> float:
    """Return the CPU time of the fastest of several runs."""
    times = []
    for _ in range(REPEATS):
        started_s = time.process_time()
        work()
        times.append(time.process_time() - started_s)
    return min(times)


def render_all(manifests: render.InputManifests) -> None:
    _, problems = render.render_pools(manifests)
    assert not problems


def build_manifests() -> render.InputManifests:
    """Build pools of ten MachineConfigs each, and objects that share them."""
    manifests = render.InputManifests()
    for number in range(POOLS):
        role = f"p{number}"
        labels = {"number": str(number)}
        spec = {"machineConfigSelector": {"matchLabels": {ROLE: role}}}
        document = {"metadata": {"name": role, "labels": labels}, "spec": spec}
        manifests.pools[role] = MachineConfigPool.from_json(document)
        for config in (build_base(), *build_configs(9, total_bytes=16_000)):
            metadata = replace(config.metadata, name=f"{config.name}-{role}", labels={ROLE: role})
            manifests.configs[metadata.name] = replace(config, metadata=metadata)
    for kind, count in OBJECTS.items():
        for number in range(count):
            spec = SPECS[kind]
            if kind in POOL_KINDS:
                members = [str(pool) for pool in range(number, POOLS, count)]
                match = {"key": "number", "operator": "In", "values": members}
                spec = {**spec, "machineConfigPoolSelector": {"matchExpressions": [match]}}
            metadata = {"name": f"{kind.lower()}-{number}", "uid": f"{kind}{number}"}
            document = {"kind": kind, "metadata": metadata, "spec": spec}
            source = sources.SourceObject.from_json(document)
            manifests.source_objects[source.key] = source
    return manifests


def build_base() -> MachineConfig:
    files = [
        {"path": path, "contents": {"source": f"data:,{quote(text)}"}}
        for path, text in BASE_FILES.items()
    ]
    config = {"ignition": {"version": "3.5.0"}, "storage": {"files": files}}
    return MachineConfig.from_json({"metadata": {"name": "00-base"}, "spec": {"config": config}})
