"""Inputs of the generator: a release of two base MachineConfigs, and the pool ``clusters/np``."""

import functools
import json
from typing import Any
from urllib.parse import quote

from tests.controllers.hosted.plan.test_hosted_plan import config_map, make_pool
from tests.fixtures import hosted
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import nodepool
from treenail.config import merge
from treenail.controllers.hosted.config import generator, release
from treenail.controllers.hosted.config.generator import ConfigInputs

Json = dict[str, Any]
VERSION = "4.22.1"
PULL_SECRET = b'{"auths": {"quay.io": {"auth": "dXNlcjpwYXNzd29yZA=="}}}'
OTHER_PULL_SECRET = b'{"auths": {"quay.io": {"auth": "dXNlcjpvdGhlcg=="}}}'
BUNDLE = b"-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n"
SSH_KEY = b"ssh-ed25519 AAAA user@example.com\n"
IMAGES = {
    "releaseVersion": VERSION,
    "releaseImage": hosted.RELEASE,
    "baseOSContainerImage": f"quay.io/example/os@sha256:{'1' * 64}",
    "baseOSExtensionsContainerImage": f"quay.io/example/extensions@sha256:{'2' * 64}",
}
STREAM = {
    "osImageStream": "rhel-10", "baseOSContainerImage": f"quay.io/example/os@sha256:{'3' * 64}",
}  # fmt: skip
KUBELET_CONF = {"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1"}


def machine_config(name: str, files: dict[str, str] | None = None, **spec: Any) -> Json:
    """A MachineConfig of workers with text files by path."""
    entries = [
        {"path": path, "mode": 0o644, "contents": {"source": f"data:,{quote(text)}"}}
        for path, text in (files or {}).items()
    ]
    config = {"ignition": {"version": "3.2.0"}, "storage": {"files": entries}}
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {"name": name, "labels": {merge.ROLE: merge.WORKER}},
        "spec": {"config": config, **spec},
    }


BASE = [
    machine_config(
        "00-worker",
        {"/etc/base": "base", "/etc/containers/registries.conf": "", "/etc/crio/crio.conf": ""},
    ),
    machine_config("01-worker-kubelet", {"/etc/kubernetes/kubelet.conf": json.dumps(KUBELET_CONF)}),
]


def make_release(*configs: Json, **images: Any) -> list[Json]:
    """The ConfigMaps of a release, as the command makes them."""
    values = json.dumps({**IMAGES, **images}).encode()
    found, _ = release.read_release(
        ("images", values), [("base.json", "\n".join(map(json.dumps, configs or BASE)))]
    )
    return [*release.build_config_maps(found)]


@functools.cache
def _default_release() -> list[Json]:
    return make_release()


def make_core(*names: str) -> list[Json]:
    """Core ConfigMaps with one MachineConfig each."""
    core = [config_map(machine_config(name), name=f"ignition-{name}") for name in names]
    for one in core:
        one["metadata"] |= {
            "namespace": hosted.CONTROL_PLANE, "labels": {hosted_key.CORE_CONFIG: "true"},
        }  # fmt: skip
    return core


CORE = make_core("30-fips", "99-worker-ssh", "20-apiserver-haproxy")


def make_inputs(
    *found: Json | str, pool: Json | None = None, cluster: Json | None = None, **changes: Any
) -> ConfigInputs:
    """Inputs with a ConfigMap of these documents; ``pool`` and ``cluster`` are fields of spec."""
    values: Json = {
        "config_maps": {"a": config_map(*found)},
        "release_config_maps": _default_release(),
        "pull_secret": PULL_SECRET,
        "ssh_key": SSH_KEY,
        **changes,
    }
    names = [{"name": name} for name in values["config_maps"]]
    return generator.ConfigInputs(
        nodepool.NodePool.from_json(make_pool(**{"config": names, **(pool or {})})),
        nodepool.HostedCluster.from_json(hosted.make_hosted_cluster(**(cluster or {}))),
        **values,
    )
