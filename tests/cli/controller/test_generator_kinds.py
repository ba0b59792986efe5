"""Commands that read files generate MachineConfigs from the kinds beside MachineConfig."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.controller.test_build import BuildInput
from tests.controllers.status.test_plan import snapshot
from tests.fixtures.objects import ROLE, make_config
from tests.installer.directories import write_manifest
from tests.oracle import ROOT, needs_oracle
from treenail.api import documents
from treenail.api.kinds import GENERATOR_KINDS
from treenail.cli.controller.main import main
from treenail.controllers.render import render
from treenail.controllers.status import rollout_plan
from treenail.installer.directory import install_manifests

Json = dict[str, Any]
REGISTRIES, KUBELET = "/etc/containers/registries.conf", "/etc/kubernetes/kubelet.conf"
SOURCE, MIRROR = "registry.example.com/apps", "mirror.example.com/apps"
SELECTOR = {"matchLabels": {"pool": "worker"}}


def make_source(kind: str, name: str, spec: Json, **metadata: Any) -> Json:
    metadata = {"name": name, **metadata}
    return {"apiVersion": GENERATOR_KINDS[kind], "kind": kind, "metadata": metadata, "spec": spec}


def make_mirrors(source: str = SOURCE, name: str = "apps") -> Json:
    mirrors = [{"source": source, "mirrors": [MIRROR]}]
    return make_source("ImageDigestMirrorSet", name, {"imageDigestMirrors": mirrors})


def make_kubelet(**fields: Any) -> Json:
    spec = {"machineConfigPoolSelector": SELECTOR, "kubeletConfig": fields}
    return make_source("KubeletConfig", "slow-pods", spec)


def make_text_file(path: str, text: str) -> Json:
    encoded = base64.b64encode(text.encode()).decode()
    return {"path": path, "contents": {"source": f"data:;base64,{encoded}"}, "overwrite": True}


BASE_KUBELET = """\
kind: KubeletConfiguration
apiVersion: kubelet.config.k8s.io/v1beta1
maxPods: 110
"""
POOL = {
    "apiVersion": "machineconfiguration.openshift.io/v1",
    "kind": "MachineConfigPool",
    "metadata": {"name": "worker", "labels": {"pool": "worker"}, "annotations": {}},
    "spec": {
        "machineConfigSelector": {"matchLabels": {ROLE: "worker"}},
        "nodeSelector": {"matchLabels": {"node-role.kubernetes.io/worker": ""}},
    },
}
CONFIG = make_config("00-worker", make_text_file(KUBELET, BASE_KUBELET), role="worker")


def read_files(config: Json) -> dict[str, str]:
    """Return the files of a rendered config by path."""
    found = render.machineconfig.MachineConfig.from_json(config)
    return {
        file.path: file.contents.decode_bytes().decode()
        for file in render.parse_ignition(found.config).files
    }


class Inputs:
    """Files of a user, and the command ``render``."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path / "all.yaml"
        self._capsys = capsys

    def render(self, *objects: Json, strict: bool = False) -> tuple[int, dict[str, str], str]:
        """Return exit code, files of the rendered config, and errors."""
        self.path.write_text(yaml.safe_dump_all([POOL, CONFIG, *objects]))
        code = main(["render", "-f", str(self.path), "-o", "json", *["--strict"] * strict])
        shown = self._capsys.readouterr()
        items = json.loads(shown.out)["items"] if shown.out else [{"metadata": {"name": "x"}}]
        return code, read_files(items[0]), shown.err


@pytest.fixture
def inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Inputs:
    return Inputs(tmp_path, capsys)


def test_render_contains_what_the_objects_generate(inputs: Inputs) -> None:
    runtime = {"machineConfigPoolSelector": SELECTOR, "containerRuntimeConfig": {"pidsLimit": 2048}}
    code, files, errors = inputs.render(
        make_kubelet(maxPods=50),
        make_source("ContainerRuntimeConfig", "limits", runtime),
        make_mirrors(),
    )
    assert (code, errors) == (0, "")
    assert yaml.safe_load(files.pop(KUBELET))["maxPods"] == 50
    assert MIRROR in files.pop(REGISTRIES)
    assert [path for path, text in files.items() if "pids_limit = 2048" in text]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (make_mirrors("quay.io/a:latest"), "ImageDigestMirrorSet apps: spec.imageDigestMirrors[0]"),
        (make_kubelet(cgroupDriver="cgroupfs"), "KubeletConfig slow-pods: spec.kubeletConfig.cgro"),
        (
            make_source("KubeletConfig", "slow-pods", {"kubeletConfig": {"maxPods": 5}}),
            "KubeletConfig slow-pods: spec.machineConfigPoolSelector: expected at least one label",
        ),
        (
            make_source("ImagePolicy", "a", {"scopes": ["x"]}, namespace="b"),
            "ImagePolicy b/a: spec.",
        ),
    ],
)
def test_object_without_effect_is_named_and_an_error_with_strict(
    inputs: Inputs, document: Json, message: str
) -> None:
    code, files, errors = inputs.render(document)
    assert (code, set(files)) == (0, {KUBELET})
    assert errors.startswith(f"treenail-controller: warning: {inputs.path}, document 3, {message}")
    assert "; " in errors.removesuffix("\n")
    assert inputs.render(document, strict=True)[::2] == (1, errors)


def test_facts_of_the_cluster_are_read_from_files() -> None:
    kubeadm = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kubelet-config"}}
    controller = {"baseOSContainerImage": "os", "releaseImage": "release"}
    objects = [
        {**kubeadm, "data": {"kubelet": "a: b"}},
        {
            "apiVersion": "machineconfiguration.openshift.io/v1",
            "kind": "ControllerConfig",
            "metadata": {"name": "c"},
            "spec": controller,
        },
        make_config("10", role="worker", osImageURL="other"),
        {
            "apiVersion": "machineconfiguration.openshift.io/v1",
            "kind": "MachineOSConfig",
            "metadata": {"name": "worker"},
            "status": {"currentImagePullSpec": "built"},
        },
        {**POOL, "spec": {**POOL["spec"], "osImageTag": {"name": "tagged"}}},
    ]
    facts = render.read_manifests([("a", yaml.safe_dump_all(objects))]).collect_facts()
    assert facts.kubeadm_kubelet == "a: b"
    assert (facts.release_image, facts.node_images) == (
        "release",
        ("os", "other", "built", "tagged"),
    )


def plan(
    before: list[Json], *change: Json, present: list[Json] | None = None
) -> tuple[str, list[str]]:
    """Plan a change of a cluster whose objects generated their MachineConfigs."""
    known = render.read_manifests([("before", yaml.safe_dump_all([POOL, CONFIG, *before]))])
    known.add_generated_configs()
    found = snapshot(1, POOL, *(config.to_json() for config in known.configs.values()))
    found = rollout_plan.replace(found, source_objects=known.source_objects)
    manifests = render.read_manifests([("file", yaml.safe_dump_all(change))])
    after = rollout_plan.apply_manifests(found, manifests)
    lines = rollout_plan.format_plans(rollout_plan.plan_pools(after, now=0.0))
    return "\n".join(lines), manifests.warnings


def test_plan_names_the_object_and_the_field_behind_each_cost() -> None:
    text, warnings = plan([make_kubelet(maxPods=50)], make_kubelet(maxPods=60))
    assert f"because file {KUBELET} changed (no policy for this path), from KubeletConfig " in text
    assert "from KubeletConfig slow-pods: maxPods\n" in text
    assert warnings == []


def test_plan_names_the_changed_mirror_set_and_its_registry() -> None:
    before = [make_mirrors(), make_mirrors("other.example.com", "other")]
    changed = make_mirrors(name="other", source="new.example.com")
    text, _ = plan(before, changed)
    assert "from ImageDigestMirrorSet other: new.example.com, other.example.com" in text
    text, _ = plan([], make_mirrors())
    assert "from ImageDigestMirrorSet apps: " in text


def test_plan_of_an_unchanged_object_has_nothing_to_do() -> None:
    before = [make_kubelet(maxPods=50), make_mirrors()]
    text, _ = plan(before, make_mirrors())
    assert "nothing to do" in text


def test_plan_names_an_object_without_effect() -> None:
    text, warnings = plan([make_kubelet(maxPods=50)], make_kubelet(cgroupDriver="cgroupfs"))
    assert "nothing to do" in text
    (warning,) = warnings
    assert warning.startswith("file, document 1, KubeletConfig slow-pods: spec.kubeletConfig.cgr")


def test_build_puts_generated_files_into_the_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = BuildInput(tmp_path, capsys)
    given.write()
    before = given.read_build("--architecture", "amd64")
    given.edit(lambda found: found.update(ImageDigestMirrorSet=make_mirrors()))
    after = given.read_build("--architecture", "amd64")
    assert after["configLayer"]["digest"] != before["configLayer"]["digest"]
    assert after["machineConfig"] != before["machineConfig"]


def test_first_image_of_an_installation_contains_generated_files(tmp_path: Path) -> None:
    write_manifest(tmp_path, "manifests/a.yaml", POOL, CONFIG, make_kubelet(maxPods=50))
    write_manifest(tmp_path, "manifests/b.yaml", make_mirrors(), make_kubelet(cgroupDriver="x") | {
        "metadata": {"name": "wrong"}
    })  # fmt: skip
    manifests = install_manifests.read_install_manifests(tmp_path)
    (pool,) = install_manifests.render_install_pools(manifests)
    files = read_files(pool.rendered.config.to_json())
    assert yaml.safe_load(files[KUBELET])["maxPods"] == 50
    assert MIRROR in files[REGISTRIES]
    assert [note for note in manifests.notes if "KubeletConfig wrong: spec.kubeletConfig" in note]


@needs_oracle
def test_mirrors_are_those_of_the_recorded_bootstrap() -> None:
    folder = ROOT / "bootstrap"
    recorded = next(iter(folder.glob("output/machine-configs/rendered-worker-*.yaml")))
    expected = read_files(documents.load_document(recorded.read_bytes(), where="recorded"))
    # The first line comes from a template of the MCO.
    base = expected[REGISTRIES].partition("\n")[0] + "\n"
    template = make_config("00-worker", make_text_file(REGISTRIES, base), role="worker")
    texts = [(path.name, path.read_bytes()) for path in sorted(folder.glob("input/*.yaml"))]
    manifests = render.read_manifests([*texts, ("template", json.dumps(template))])
    manifests.add_generated_configs()
    (rendered,), _ = render.render_pools(manifests, "worker")
    assert read_files(rendered.config.to_json())[REGISTRIES] == expected[REGISTRIES]
