"""The rendered config of a pool: selection, validation, name, and errors with their source."""

from typing import Any

import pytest
import yaml

from tests.oracle import ROOT, needs_oracle, records, render_cases
from treenail import __version__
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.config.merge import ROLE, DefaultImages
from treenail.config.provenance import PROVENANCE, Provenance
from treenail.config.reconcilable import ValidationOverride
from treenail.config.wanted_state import read_wanted_state
from treenail.controllers.render.render import ControllerConfig, check_appliable, render_pool
from treenail.errors import ConfigError, UnreconcilableError

PREFIX = "machineconfiguration.openshift.io/"
CLUSTER = ControllerConfig(DefaultImages("base", "extensions"), "4.99")
EMPTY: dict[str, Any] = {"ignition": {"version": "3.5.0"}}


def pool(name: str = "infra", selector: Any = ..., **more: Any) -> MachineConfigPool:
    if selector is ...:
        roles = {"key": ROLE, "operator": "In", "values": ["worker", name]}
        selector = {"matchExpressions": [roles]}
    return MachineConfigPool.from_json(
        {
            "metadata": {"name": name, "uid": f"u-{name}"},
            "spec": {"machineConfigSelector": selector, **more},
        }
    )


def machine_config(name: str, role: str = "worker", **spec: Any) -> MachineConfig:
    return MachineConfig.from_json(
        {"metadata": {"name": name, "labels": {ROLE: role}}, "spec": spec}
    )


def storage(**sections: Any) -> dict[str, Any]:
    return {**EMPTY, "storage": sections}


@pytest.mark.parametrize("case", render_cases(), ids=lambda case: case["case"])
def test_rendering_agrees_with_go(case: dict[str, Any]) -> None:
    found = MachineConfigPool.from_json(case["pool"])
    configs = [MachineConfig.from_json(each) for each in case["machineconfigs"]]
    cluster = ControllerConfig.from_json(case["controllerconfig"])
    if "error" in case:
        with pytest.raises(ConfigError, match="MachineConfig 10: "):
            render_pool(found, configs, cluster)
        return
    rendered = render_pool(found, configs, cluster)
    assert rendered.name == case["name"]
    assert rendered.config.to_json()["spec"] == case["spec"]
    ours = dict(rendered.config.metadata.annotations)
    assert ours.pop(PREFIX + "generated-by-controller-version") == f"treenail-{__version__}"
    del ours[PROVENANCE], case["annotations"][PREFIX + "generated-by-controller-version"]
    assert ours == case["annotations"]


@needs_oracle
def test_bootstrap_renders_the_config_written_by_go() -> None:
    # The inputs of the bootstrap lack the MachineConfigs that templates generate from the
    # ControllerConfig; they come from the recorded merges of the same run.
    expected = {}
    for path in (ROOT / "bootstrap" / "output" / "machine-configs").glob("*.yaml"):
        document = yaml.safe_load(path.read_text("utf-8"))
        expected[document["metadata"]["name"]] = document["spec"]
    pools = [
        MachineConfigPool.from_json(yaml.safe_load(path.read_text("utf-8")))
        for path in (ROOT / "bootstrap" / "input").glob("*.machineconfigpool.yaml")
    ]
    mine = [each["configs"] for each in records("merge")[:6]]
    configs = {
        each["metadata"]["name"]: MachineConfig.from_json(each) for some in mine for each in some
    }
    found = {}
    for each in pools:
        rendered = render_pool(each, configs.values(), ControllerConfig())
        found[rendered.name] = rendered.config.to_json()["spec"]
    assert found == expected


def test_rendered_config_names_its_pool_and_sources() -> None:
    rendered = render_pool(
        pool(),
        [
            machine_config("50", "infra", osImageURL="mine"),
            machine_config("99", kernelType="realtime"),
            machine_config("00-other", "master"),
        ],
        CLUSTER,
    )
    meta = rendered.config.metadata
    assert meta.annotations == {
        PREFIX + "generated-by-controller-version": f"treenail-{__version__}",
        PREFIX + "release-image-version": "4.99",
        PREFIX + "os-image-url-overridden": "true",
        PROVENANCE: (
            '{"sources":["99","50"],"entries":{"kernelType":{"":[0]},"osImageURL":{"":[1]}}}'
        ),
    }
    (owner,) = meta.owner_references
    assert (owner.kind, owner.name, owner.uid) == ("MachineConfigPool", "infra", "u-infra")
    assert owner.controller
    api = "machineconfiguration.openshift.io/v1"
    assert rendered.to_pool_configuration() == {
        "apiVersion": api,
        "kind": "MachineConfig",
        "name": rendered.name,
        "source": [
            {"apiVersion": api, "kind": "MachineConfig", "name": "99"},
            {"apiVersion": api, "kind": "MachineConfig", "name": "50"},
        ],
    }


def test_order_of_machineconfigs_makes_no_difference() -> None:
    configs = [machine_config(name, kernelArguments=[name]) for name in ("3", "1", "2")]
    assert render_pool(pool(), configs, CLUSTER) == render_pool(pool(), configs[::-1], CLUSTER)


def test_two_pools_with_equal_configs_share_the_hash() -> None:
    configs = [machine_config("1")]
    infra, other = (
        render_pool(pool(), configs, CLUSTER),
        render_pool(pool("other"), configs, CLUSTER),
    )
    assert infra.name.removeprefix("rendered-infra-") == other.name.removeprefix("rendered-other-")


def test_rendered_config_is_never_rendered_again() -> None:
    everything = {"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}
    rendered = render_pool(pool(), [machine_config("1")], CLUSTER).config
    again = render_pool(pool(selector=everything), [machine_config("1"), rendered], CLUSTER)
    assert again.sources == ("1",)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (pool(selector={}), "pool infra selects all MachineConfigs, also those of other pools"),
        (pool(selector=None), "couldn't find any MachineConfigs for pool: infra"),
        (
            pool(selector={"matchLabels": {"no": "such"}}),
            "couldn't find any MachineConfigs for pool: infra",
        ),
        (
            pool(osImageStream={"name": "rhel-10"}),
            (
                "pool infra follows the OS image stream rhel-10, but MachineConfig 1 sets "
                "spec.osImageURL"
            ),
        ),
    ],
)
def test_unrenderable_pool_is_rejected_with_the_reason(
    found: MachineConfigPool, sentence: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        render_pool(found, [machine_config("1", osImageURL="mine")], CLUSTER)
    assert str(raised.value) == sentence
    assert raised.value.remedy


def test_rendered_config_too_large_to_store_is_rejected() -> None:
    configs = [
        machine_config(
            str(number),
            config=storage(
                files=[{"path": f"/etc/{number}", "contents": {"source": "data:," + "x" * 600_000}}]
            ),
        )
        for number in range(3)
    ]
    with pytest.raises(
        ConfigError, match="cannot store the rendered config of pool infra: it has 18"
    ):
        render_pool(pool(), configs, CLUSTER)


def test_contradicting_configs_are_rejected() -> None:
    # The MCO writes such a config, and every node with it becomes Degraded.
    file = {"path": "/etc/a/b", "contents": {"source": "data:,"}}
    configs = [
        machine_config("1", config=storage(files=[file])),
        machine_config("2", config=storage(links=[{"path": "/etc/a", "target": "/usr"}])),
    ]
    with pytest.raises(ConfigError) as raised:
        render_pool(pool(), configs, CLUSTER)
    assert str(raised.value) == (
        "MachineConfig 1: together with the others, spec.config.storage.files[0].path: "
        "/etc/a is a link of this config"
    )


def test_file_without_contents_is_rendered_as_go_renders_it() -> None:
    config = machine_config("1", config=storage(files=[{"path": "/etc/a", "mode": 0o600}]))
    rendered = render_pool(pool(), [config], CLUSTER).config
    assert rendered.config == storage(files=[{"path": "/etc/a", "mode": 0o600, "overwrite": True}])
    (file,) = read_wanted_state(rendered).files.values()
    assert (file.contents.decode_bytes(), file.mode) == (b"", 0o600)


def test_owner_by_id_in_one_config_and_by_name_in_another_is_the_id() -> None:
    file = {"path": "/etc/a", "contents": {"source": "data:,"}}
    configs = [
        machine_config("1", config=storage(files=[{**file, "user": {"id": 7}}])),
        machine_config("2", config=storage(files=[{**file, "user": {"name": "core"}}])),
    ]
    rendered = render_pool(pool(), configs, CLUSTER).config
    (file,) = read_wanted_state(rendered).files.values()
    assert file.user == 7


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"config": storage(files=[{"path": "/a", "append": [{"source": "data:,"}]}])},
            (
                "MachineConfig 1: spec.config.storage.files[0].append: cannot append to a file of "
                "a running node"
            ),
        ),
        (
            {"config": storage(files=[{"path": "/a\x7f", "contents": {"source": "data:,"}}])},
            (
                "MachineConfig 1: spec.config.storage.files[0].path: expected no control "
                "character, found one that YAML rejects"
            ),
        ),
        (
            {"kernelArguments": ["a", "b\x80"]},
            (
                "MachineConfig 1: spec.kernelArguments[1]: expected no control character, found "
                "one that YAML rejects"
            ),
        ),
    ],
)
def test_config_that_go_cannot_render_is_rejected(spec: dict[str, Any], sentence: str) -> None:
    configs = [machine_config("0", kernelArguments=["x"]), machine_config("1", **spec)]
    with pytest.raises(ConfigError) as raised:
        render_pool(pool(), configs, CLUSTER)
    assert str(raised.value) == sentence
    assert raised.value.remedy


def test_append_that_the_current_config_has_is_a_warning() -> None:
    appended = {"path": "/a", "append": [{"source": "data:,a"}]}
    one = machine_config("1", config=storage(files=[appended]))
    # The merge adds the field, as that of the MCO does.
    files = [{**appended, "overwrite": True}]
    current = machine_config("rendered-worker-0", config=storage(files=files))
    rendered = render_pool(pool(), [one, machine_config("2")], CLUSTER, current=current)
    check_appliable(rendered, [one])
    assert rendered.warnings == (
        (
            "MachineConfig 1: spec.config.storage.files[0].append: the agent does not append, "
            "Ignition did at the first boot"
        ),
    )
    assert read_wanted_state(rendered.config).files == {}
    two = machine_config("2", config=storage(files=[appended]))
    with pytest.raises(ConfigError, match="cannot append to a file of a running node"):
        render_pool(pool(), [one, two], CLUSTER, current=current)


def test_field_without_effect_is_a_warning() -> None:
    config = storage(files=[{"path": "/a", "contens": {"source": "data:,"}}])
    document = machine_config("1", config=config, kernelArgument=["a"])
    assert render_pool(pool(), [document], CLUSTER).warnings == (
        (
            "MachineConfig 1: spec.kernelArgument: ignored: unknown field; did you mean "
            "kernelArguments?"
        ),
        (
            "MachineConfig 1: spec.config.storage.files[0].contens: ignored: unknown field; did "
            "you mean contents?"
        ),
    )


def unreconcilable(*configs: MachineConfig, **more: Any) -> str:
    current = render_pool(
        pool(),
        [machine_config("0", config=storage(disks=[{"device": "/dev/sda"}]))],
        CLUSTER,
    ).config
    with pytest.raises(UnreconcilableError) as raised:
        render_pool(pool(), configs, CLUSTER, current=current, **more)
    return str(raised.value)


def test_irreconcilable_change_names_its_machineconfig() -> None:
    disk = storage(disks=[{"device": "/dev/sda", "wipeTable": True}])
    said = unreconcilable(machine_config("0"), machine_config("60-disk", "infra", config=disk))
    assert "MachineConfig 60-disk: ignition disks section contains changes" in said
    fips = unreconcilable(
        machine_config("0", config=storage(disks=[{"device": "/dev/sda"}])),
        machine_config("50-fips", fips=True),
    )
    assert "MachineConfig 50-fips: detected change to FIPS flag" in fips
    user = {"passwd": {"users": [{"name": "core"}, {"name": "eve"}]}}
    people = unreconcilable(
        machine_config("0", config=storage(disks=[{"device": "/dev/sda"}])),
        machine_config("70-eve", config={**EMPTY, **user}),
    )
    assert "MachineConfig 70-eve: invalid passwd change(s)" in people


def test_irreconcilable_removal_names_no_machineconfig() -> None:
    said = unreconcilable(machine_config("0"))
    assert ": ignition disks section contains changes" in said
    assert "MachineConfig 0" not in said


def test_irreconcilable_change_with_override_is_rendered() -> None:
    old = render_pool(
        pool(), [machine_config("0", config=storage(disks=[{"device": "/dev/sda"}]))], CLUSTER
    )
    new = render_pool(
        pool(),
        [machine_config("0")],
        CLUSTER,
        current=old.config,
        allowed=frozenset({ValidationOverride.DISKS}),
    )
    assert new.name != old.name


def test_long_provenance_is_packed_and_read_back() -> None:
    entries = {("files", f"/etc/a/rather/long/path/{n}"): ("00-worker",) for n in range(2000)}
    provenance = Provenance(entries)
    text = provenance.to_text()
    assert len(text) < 32 * 1024
    assert Provenance.from_text(text) == provenance
    assert Provenance.from_text(Provenance({}).to_text()) == Provenance({})


@pytest.mark.parametrize("text", ["", "zlib,%%%", "zlib,AAAA", "zlib,", "[]"])
def test_damaged_provenance_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError):
        Provenance.from_text(text)
