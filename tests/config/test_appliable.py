"""One table of what no node can apply: agent, controllers, installer and config server read it."""

import json
from pathlib import Path

import pytest

from tests.config import unappliable
from tests.provisioning.samples import make_pool
from treenail.api.machineconfig import MachineConfig
from treenail.cli.controller.main import main
from treenail.cli.node.main import main as main_of_node
from treenail.config.reconcilable import read_appliable_state
from treenail.config.wanted_state import ParsedConfig
from treenail.errors import ConfigError
from treenail.installer.directory.install_manifests import (
    read_install_manifests,
    render_install_pools,
)
from treenail.provisioning.content.directory_source import DirectorySource
from treenail.provisioning.content.document import build_document
from treenail.provisioning.content.source import SourceSettings

POOL = {
    "apiVersion": "machineconfiguration.openshift.io/v1",
    "kind": "MachineConfigPool",
    "metadata": {"name": "worker"},
    "spec": {
        "machineConfigSelector": {
            "matchLabels": {"machineconfiguration.openshift.io/role": "worker"}
        }
    },
}
BASE = unappliable.make_machine_config("00-base", {"config": {"ignition": {"version": "3.2.0"}}})
REFUSED = [
    pytest.param(spec, message, id=name) for name, (spec, message) in unappliable.CASES.items()
]


def write(path: Path, *documents: unappliable.Json) -> str:
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    return str(path)


@pytest.mark.parametrize(("spec", "message"), REFUSED)
def test_config_that_no_node_can_apply_is_refused_everywhere_with_the_same_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: unappliable.Json, message: str
) -> None:
    document = unappliable.make_machine_config("50-bad", spec)
    parsed = ParsedConfig(MachineConfig.from_json(document))
    with pytest.raises(ConfigError) as refusal:
        read_appliable_state(parsed)
    assert str(refusal.value).startswith(f"MachineConfig 50-bad: {message}")

    path = write(tmp_path / "all.json", POOL, BASE, document)
    assert main(["render", "-f", path]) == 1
    assert f"{path}, document 3: MachineConfig 50-bad: {message}" in capsys.readouterr().err

    base = write(tmp_path / "base.json", BASE)
    assert main_of_node(["plan", base, write(tmp_path / "bad.json", document)]) == 1
    assert f"MachineConfig 50-bad: {message}" in capsys.readouterr().err

    (tmp_path / "install/manifests").mkdir(parents=True)
    write(tmp_path / "install/manifests/all.json", POOL, BASE, document)
    with pytest.raises(ConfigError) as refusal:
        render_install_pools(read_install_manifests(tmp_path / "install"))
    assert f"MachineConfig 50-bad: {message}" in str(refusal.value)


@pytest.mark.parametrize("name", ["merge", "remote", "hash"])
def test_machine_is_served_no_config_that_its_agent_refuses(tmp_path: Path, name: str) -> None:
    spec, message = unappliable.CASES[name]
    rendered = f"rendered-worker-{32 * '1'}"
    document = unappliable.make_machine_config(rendered, spec)
    write(tmp_path / "all.json", make_pool(new=rendered), document)
    inputs = DirectorySource(tmp_path, SourceSettings()).read_inputs("worker")
    with pytest.raises(ConfigError) as refusal:
        build_document(inputs, "3.5.0")
    assert str(refusal.value).startswith(f"MachineConfig {rendered}: {message}")


@pytest.mark.parametrize("spec", unappliable.APPLIED.values(), ids=unappliable.APPLIED)
def test_config_that_a_node_can_apply_is_not_refused(
    tmp_path: Path, spec: unappliable.Json
) -> None:
    document = unappliable.make_machine_config("50-good", spec)
    read_appliable_state(ParsedConfig(MachineConfig.from_json(document)))
    path = write(tmp_path / "all.json", POOL, BASE, document)
    assert main(["render", "--strict", "-f", path]) == 0


def test_contents_that_a_later_config_replaces_are_not_refused(tmp_path: Path) -> None:
    spec, _ = unappliable.CASES["remote"]
    bad = unappliable.make_machine_config("50-bad", spec)
    good = unappliable.make_machine_config("60", unappliable.with_contents(source="data:,text"))
    assert main(["render", "-f", write(tmp_path / "all.json", POOL, BASE, bad, good)]) == 0


def test_configs_that_contradict_each_other_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = unappliable.make_machine_config("40", unappliable.with_contents(source="data:,text"))
    gzip = unappliable.with_contents(compression="gzip")
    other = unappliable.make_machine_config("50", gzip)
    assert main(["render", "-f", write(tmp_path / "all.json", POOL, BASE, one, other)]) == 1
    message = "MachineConfig 50: together with the others, spec.config.storage.files[0].contents"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("section", ["proxy", "security", "timeouts"])
def test_settings_for_what_nodes_never_fetch_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    values = {
        "proxy": {"httpsProxy": "https://proxy.example.com"},
        "security": {"tls": {"certificateAuthorities": [{"source": "data:,a"}]}},
        "timeouts": {"httpTotal": 1},
    }
    spec = unappliable.with_ignition(ignition={section: values[section]})
    document = unappliable.make_machine_config("50-fetch", spec)
    path = write(tmp_path / "all.json", POOL, BASE, document)
    text = f"document 3, MachineConfig 50-fetch: spec.config.ignition.{section}: ignored: nodes f"
    for options, code in (((), 0), (("--strict",), 1)):
        assert main(["render", *options, "-f", path]) == code
        assert text in capsys.readouterr().err
