"""The step ``render``: names as in the cluster, the layout of the MCO, and nothing half-written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures.files import read_files
from tests.installer.directories import OUTPUTS, make_config, make_pool, write_manifest
from tests.installer.dying import DeathError, DyingFiles, Fuse
from tests.oracle import ROOT, needs_oracle, records
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.render.render import ControllerConfig, render_pool
from treenail.errors import ConfigError
from treenail.installer.bootstrap.image_steps import RenderStep
from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.installer.directory.install_manifests import RenderedPool, read_install_manifests
from treenail.provisioning.content.directory_source import DirectorySource
from treenail.provisioning.content.source import SourceSettings

BOOTSTRAP = ROOT / "bootstrap"
IMAGE_CONFIG = "layered-worker.machineosconfig.yaml"


class Reports:
    """A context that keeps the reports."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def report(self, text: str) -> None:
        self.texts.append(text)

    def wait(self, seconds: float) -> None:
        raise AssertionError

    def remaining_s(self) -> float:
        return float("inf")


class Rendering:
    """The step of one process."""

    def __init__(self, root: Path, files: InstallFiles | None = None) -> None:
        self.pools: tuple[RenderedPool, ...] = ()
        self.step = RenderStep(
            InstallDirectory(root), read_install_manifests(root), files or InstallFiles(), self.use
        )

    def use(self, pools: tuple[RenderedPool, ...]) -> None:
        self.pools = pools

    def run(self) -> dict[str, str]:
        return dict(self.step.run(Reports()))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_manifest(tmp_path, "manifests/pools.yaml", make_pool("master"), make_pool("worker"))
    write_manifest(
        tmp_path,
        "manifests/configs.yaml",
        make_config("00-master", "master"),
        make_config("00-worker", "worker", kernelArguments=["quiet"]),
        make_config("99-master", "master", fips=True),
    )
    return tmp_path


def test_pools_name_their_own_sources_in_spec_and_status(root: Path) -> None:
    names = Rendering(root).run()
    pool = load(root / "machine-pools" / "master.yaml")
    expected = {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "name": names["master"],
        "source": [
            {
                "apiVersion": "machineconfiguration.openshift.io/v1",
                "kind": "MachineConfig",
                "name": name,
            }
            for name in ("00-master", "99-master")
        ],
    }
    # The MCO's bootstrap lists the MachineConfigs of all pools, which the cluster then rewrites.
    assert pool["spec"]["configuration"] == expected
    assert pool["status"]["configuration"] == expected
    config = load(root / "machine-configs" / f"{names['master']}.yaml")
    assert config["spec"]["fips"] is True


def test_render_controller_of_the_cluster_changes_nothing(root: Path) -> None:
    Rendering(root).run()
    manifests = read_install_manifests(root)
    for name in ("master", "worker"):
        document = load(root / "machine-pools" / f"{name}.yaml")
        pool = MachineConfigPool.from_json(document)
        rendered = render_pool(pool, manifests.configs.values(), ControllerConfig())
        assert rendered.to_pool_configuration() == document["spec"]["configuration"]
        assert pool.configuration.document == document["spec"]["configuration"]


def test_output_is_a_directory_that_the_config_server_reads(root: Path, tmp_path: Path) -> None:
    names = Rendering(root).run()
    flat = tmp_path / "flat"
    flat.mkdir()
    for folder in ("machine-pools", "machine-configs"):
        for path in (root / folder).iterdir():
            shutil.copy(path, flat)
    found = DirectorySource(flat, SourceSettings()).read_inputs("master")
    assert found.config.name == names["master"]


def test_next_process_resumes_without_a_write(root: Path) -> None:
    first = Rendering(root)
    result = first.run()
    second = Rendering(root, DyingFiles(Fuse(1)))
    assert second.step.compute_inputs() == first.step.compute_inputs()
    assert second.step.resume(result)
    assert second.pools == first.pools


@pytest.mark.parametrize("damage", ["machine-pools/master.yaml", "machine-configs/{master}.yaml"])
def test_changed_output_is_written_again(root: Path, damage: str) -> None:
    result = Rendering(root).run()
    before = read_files(root, *OUTPUTS)
    (root / damage.format(**result)).write_text("kind: Nothing\n")
    again = Rendering(root)
    assert not again.step.resume(result)
    assert again.run() == result
    assert read_files(root, *OUTPUTS) == before


def test_changed_manifest_is_named_and_its_old_files_go(root: Path) -> None:
    first = Rendering(root)
    before, inputs = first.run(), first.step.compute_inputs()
    write_manifest(root, "manifests/more.yaml", make_config("50-master", "master", fips=False))
    write_manifest(
        root,
        "manifests/pools.yaml",
        make_pool("master"),
    )
    second = Rendering(root)
    changed = second.step.compute_inputs()
    assert {name for name in {*inputs, *changed} if inputs.get(name) != changed.get(name)} == {
        "MachineConfig 50-master in manifests/more.yaml",
        "MachineConfigPool worker in manifests/pools.yaml",
    }
    assert not second.step.resume(before)
    after = second.run()
    assert sorted(read_files(root, *OUTPUTS)) == [
        f"machine-configs/{after['master']}.yaml",
        "machine-pools/master.yaml",
    ]


def test_death_at_each_write_leaves_whole_files(root: Path) -> None:
    fuse = Fuse()
    reference = Rendering(root, DyingFiles(fuse))
    reference.run()
    complete = read_files(root, *OUTPUTS)
    for point in range(1, fuse.passed + 1):
        for folder in ("machine-pools", "machine-configs"):
            shutil.rmtree(root / folder)
        with pytest.raises(DeathError):
            Rendering(root, DyingFiles(Fuse(point))).run()
        found = read_files(root, *OUTPUTS)
        whole = {name: content for name, content in found.items() if "/.treenail-" not in name}
        assert whole.items() <= complete.items()
        Rendering(root).run()
        assert read_files(root, *OUTPUTS) == complete


def test_errors_of_all_pools_are_in_one_message(root: Path) -> None:
    write_manifest(root, "manifests/more.yaml", make_pool("infra"), make_pool("edge"))
    with pytest.raises(ConfigError) as caught:
        Rendering(root).run()
    assert "couldn't find any MachineConfigs for pool: edge" in str(caught.value)
    assert "couldn't find any MachineConfigs for pool: infra" in str(caught.value)
    assert not (root / "machine-pools").exists()


def prepare_recorded_directory(root: Path) -> dict[str, Any]:
    """Make an install directory of the recorded one; return the specs of the rendered configs.

    The recorded inputs lack the MachineConfigs that templates and other controllers of the MCO
    generate. They come from the recorded merges of the same run.
    """
    manifests = root / "manifests"
    shutil.copytree(BOOTSTRAP / "input", manifests)
    # The recorded FeatureGate disables SigstoreImageVerification; treenail reads every policy.
    (manifests / "cluster-image-policy.yaml").unlink()
    known = set(read_install_manifests(root).configs)
    found = {
        each["metadata"]["name"]: each
        for record in records("merge")[:6]
        for each in record["configs"]
        if each["metadata"]["name"] not in known
    }
    generated = [{**each, "kind": "MachineConfig"} for each in found.values()]
    for each in generated:
        each["apiVersion"] = "machineconfiguration.openshift.io/v1"
        MachineConfig.from_json(each)
    (manifests / "generated.json").write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": generated})
    )
    documents = map(load, (BOOTSTRAP / "output" / "machine-configs").glob("*.yaml"))
    return {each["metadata"]["name"]: each["spec"] for each in documents}


@needs_oracle
def test_recorded_directory_gives_the_recorded_names(tmp_path: Path) -> None:
    expected = prepare_recorded_directory(tmp_path)
    rendering = Rendering(tmp_path)
    names = rendering.run()
    assert set(names.values()) == set(expected)
    for name, spec in expected.items():
        assert load(tmp_path / "machine-configs" / f"{name}.yaml")["spec"] == spec
    for path in (BOOTSTRAP / "output" / "machine-pools").glob("*.yaml"):
        recorded, mine = load(path), load(tmp_path / "machine-pools" / path.name)
        own = {each["name"] for each in mine["spec"]["configuration"].pop("source")}
        everyone = {each["name"] for each in recorded["spec"]["configuration"].pop("source")}
        assert own < everyone
        assert recorded["spec"]["configuration"]["name"] == mine["spec"]["configuration"]["name"]
        assert mine["status"]["configuration"]["name"] == names[path.stem]
    recorded = load(BOOTSTRAP / "output" / "controller-config" / "machine-config-controller.yaml")
    mine = load(tmp_path / "controller-config" / "machine-config-controller.yaml")
    assert mine["spec"]["rootCAData"] == recorded["spec"]["rootCAData"]
