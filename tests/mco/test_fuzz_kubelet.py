"""KubeletConfigs become the files and names that the machine-config-controller's bootstrap writes.

TREENAIL_TEST_MCO_KUBELETS is the number of random objects (default: 500), in runs of 50 pools with
one object each; TREENAIL_TEST_MCO_FIRST_KUBELET is the first seed. The program refuses all files
for the sake of one object, so that the objects that both refuse are cases of their own.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.config.generated.kubelet_objects import (
    BASE,
    build_object,
    build_source,
    make_base,
    make_spec,
)
from tests.mco import bootstrap, operator, programs
from treenail.api.documents import dump_document
from treenail.config.generated import kubelet, sources
from treenail.errors import ConfigError

pytestmark = [pytest.mark.process, pytest.mark.limit(850)]

Json = dict[str, Any]

COUNT, FIRST = (f"TREENAIL_TEST_MCO_{name}" for name in ("KUBELETS", "FIRST_KUBELET"))
PARTS = programs.split_seeds(programs.read_count(FIRST, 0), programs.read_count(COUNT, 500), 50)
PATHS = (kubelet.SIZING_PATH, kubelet.LOG_LEVEL_PATH, kubelet.KUBELET_CONF)


def build_objects(specs: dict[str, Json]) -> list[Json]:
    """Build one pool for each spec, and a KubeletConfig for it."""
    objects = []
    for name, spec in specs.items():
        selector = {"matchLabels": {"test": name}}
        objects.append(operator.build_pool(name))
        objects.append(build_object(name, {**spec, "machineConfigPoolSelector": selector}))
    return objects


def generate(spec: Json, base: str) -> dict[str, str] | None:
    """Generate the files; None when the object is refused."""
    source = build_source(**spec)
    try:
        kubelet.check_kubelet_config(source, is_control_plane=False)
        files = kubelet.generate_kubelet_files(source, base, sources.EMPTY_FACTS)
    except ConfigError:
        return None
    return {file.path: file.contents for file in files}


@pytest.mark.parametrize("seeds", PARTS, ids=programs.name_seeds)
def test_random_objects_become_the_files_of_the_mco(seeds: range, tmp_path: Path) -> None:
    text = BASE if seeds.start % 100 == 0 else dump_document(make_base(seeds.start))
    templates = {kubelet.KUBELET_CONF: text}
    specs: dict[str, Json] = {}
    for seed in seeds:
        spec = make_spec(seed)
        if generate(spec, text) is not None:
            specs[f"pool-{seed}"] = spec
    pools = bootstrap.run_bootstrap(tmp_path / "base", templates, map(operator.build_pool, ["any"]))
    # The MCO merges over what it writes into 98-POOL-generated-kubelet.
    base = pools["any"].files[kubelet.KUBELET_CONF]
    assert "98-any-generated-kubelet" in pools["any"].sources
    rendered = bootstrap.run_bootstrap(tmp_path / "all", templates, build_objects(specs))
    # The program stops at the first object that it refuses.
    for seed in seeds:
        if (name := f"pool-{seed}") not in specs:
            objects = build_objects({name: make_spec(seed)})
            with pytest.raises(bootstrap.BootstrapError, match=r"error running MCC"):
                bootstrap.run_bootstrap(tmp_path / name, templates, objects)
    different = {}
    for name, spec in specs.items():
        assert f"99-{name}-generated-kubelet" in rendered[name].sources
        expected = {path: rendered[name].files[path]
                    for path in PATHS if path in rendered[name].files}  # fmt: skip
        if (found := generate(spec, base)) != expected:
            different[name] = (spec, found, expected)
    assert not different


REFUSED: list[Json] = [
    {"kubeletConfig": {"cgroupDriver": "systemd"}},
    {"kubeletConfig": {"clusterDNS": ["10.0.0.1"]}},
    {"kubeletConfig": {"clusterDomain": "a"}},
    {"kubeletConfig": {"featureGates": {"A": True}}},
    {"kubeletConfig": {"failSwapOn": False}},
    {"kubeletConfig": {"memorySwap": {"swapBehavior": "NoSwap"}}},
    {"kubeletConfig": {"systemReserved": {"pid": "1"}}, "autoSizingReserved": True},
    {"kubeletConfig": {"systemReservedCgroup": "/a", "systemCgroups": "/b"}},
    {"kubeletConfig": {"systemCgroups": "/b"}},
    {"kubeletConfig": {"staticPodPath": "/a"}},
    {"kubeletConfig": {"maxPods": "1"}},
    {"kubeletConfig": {"syncFrequency": "1d"}},
    {"logLevel": 11},
]


@pytest.mark.parametrize("spec", REFUSED, ids=str)
def test_object_that_the_mco_refuses_is_refused(spec: Json, tmp_path: Path) -> None:
    assert generate(spec, BASE) is None
    with pytest.raises(bootstrap.BootstrapError, match=r"(?i)error running MCC.*(kubelet|cgroup)"):
        bootstrap.run_bootstrap(
            tmp_path / "run", {kubelet.KUBELET_CONF: BASE}, build_objects({"pool": spec})
        )


ACCEPTED: list[Json] = [
    {"kubeletConfig": {"unknownField": 1}},
    {"kubeletConfig": {"maxpods": 1}},
    {"kubeletConfig": {"kubeReserved": {"memory": "1gb"}}},
    {"tlsSecurityProfile": {"type": "Custom", "custom": {"ciphers": ["A"]}}},
]
"""Objects without the effect that the user means: treenail refuses them, the MCO does not."""


def test_mistakes_that_the_mco_accepts_are_refused(tmp_path: Path) -> None:
    specs = {f"pool-{index}": spec for index, spec in enumerate(ACCEPTED)}
    assert [generate(spec, BASE) for spec in ACCEPTED] == [None] * len(ACCEPTED)
    bootstrap.run_bootstrap(tmp_path / "run", {kubelet.KUBELET_CONF: BASE}, build_objects(specs))
