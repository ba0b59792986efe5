"""The two hashes: which input changes which, and which changes of a config roll nodes."""

import copy
from typing import Any

import pytest
import yaml

from tests.controllers.hosted.config import inputs
from tests.controllers.hosted.config.inputs import machine_config, make_inputs
from tests.controllers.hosted.plan.test_hosted_plan import KUBELET, MIRRORS, config_map
from treenail.api import machineconfig
from treenail.api.hosted import node_mode
from treenail.config import node_paths
from treenail.controllers.hosted.config import generator, hashes, release
from treenail.controllers.hosted.config.pool_config import PoolConfig

Json = dict[str, Any]
FILE = machine_config("50-a", {"/etc/a": "x"})
OTHER = machine_config("51-b", kernelArguments=["quiet"])
DOCUMENTS = (FILE, OTHER, KUBELET, MIRRORS)
BUNDLE = {"additionalTrustBundle": {"name": "ca"}}
OTHER_BUNDLE = b"-----BEGIN CERTIFICATE-----\nYg==\n-----END CERTIFICATE-----\n"


def make(*found: Json | str, **changes: Any) -> PoolConfig:
    values = {"cluster": BUNDLE, "trust_bundle": inputs.BUNDLE, **changes}
    return generator.generate_config(make_inputs(*(found or DOCUMENTS), **values))


def with_spec(document: Json, **spec: Any) -> Json:
    return {**document, "spec": {**document["spec"], **spec}}


def with_metadata(document: Json, **metadata: Any) -> Json:
    return {**document, "metadata": {**document["metadata"], **metadata}}


def proxy_maps(image: str) -> list[Json]:
    config = machine_config("20-apiserver-haproxy", {"/etc/kubernetes/manifests/proxy": image})
    return [config_map(config, name="proxy")]


def core_maps(**spec: Any) -> list[Json]:
    """HyperShift's core ConfigMaps; ``spec`` has computed defaults of the first one."""
    core = copy.deepcopy(inputs.CORE)
    value = yaml.safe_load(core[0]["data"]["config"])
    core[0]["data"]["config"] = yaml.safe_dump(with_spec(value, **spec))
    return core


CORE: Json = {"core_config_maps": inputs.CORE, "has_hypershift": True}
TARGET, BOTH, NONE = (True, False), (True, True), (False, False)
SPLIT = {"config_maps": {"b": config_map(MIRRORS, OTHER), "a": config_map(KUBELET, FILE, name="b")}}
DEFAULTS = {"fips": False, "kernelType": "", "osImageURL": "", "extensions": None}
OTHER_NAME = {"releaseImage": "quay.io/r:2"}
LAYERED = f"quay.io/example/layered@sha256:{'4' * 64}"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # The order of ConfigMaps and documents, and fields that are at their defaults.
        ({}, {"found": DOCUMENTS[::-1]}, NONE),
        ({}, SPLIT, NONE),
        ({}, {"found": DOCUMENTS[1:], "pool_config_maps": [config_map(FILE, name="z")]}, NONE),
        ({}, {"found": (with_spec(FILE, **DEFAULTS), *DOCUMENTS[1:])}, NONE),
        ({}, {"pool": {"replicas": 5}}, NONE),
        ({}, {"cluster": {**BUNDLE, "configuration": {"proxy": {}, "image": None}}}, NONE),
        ({}, {"found": (f"# why\n{yaml.safe_dump(FILE)}", *DOCUMENTS[1:])}, NONE),
        # Comments in the text that HyperShift hashes, and notes of other programs.
        ({}, {"found": (*DOCUMENTS[:3], f"# why\n{yaml.safe_dump(MIRRORS)}")}, TARGET),
        ({}, {"found": (with_metadata(FILE, annotations={"a": "b"}), *DOCUMENTS[1:])}, TARGET),
        # Contents of Secrets.
        ({}, {"pull_secret": inputs.OTHER_PULL_SECRET}, TARGET),
        ({}, {"trust_bundle": OTHER_BUNDLE}, TARGET),
        # HAProxy, what the control plane computes, and treenail's own file.
        ({"pool_config_maps": proxy_maps("1")}, {"pool_config_maps": proxy_maps("2")}, TARGET),
        ({"pool_config_maps": proxy_maps("1")}, {"pool_config_maps": []}, TARGET),
        (CORE, {**CORE, "core_config_maps": core_maps(kernelArguments=[])}, TARGET),
        (CORE, {**CORE, "core_config_maps": core_maps(baseOSExtensionsContainerImage="")}, NONE),
        # What HyperShift rolls nodes for.
        ({}, {"found": (*DOCUMENTS, machine_config("52-c"))}, BOTH),
        ({}, {"found": DOCUMENTS[1:]}, BOTH),
        ({}, {"found": (with_metadata(FILE, name="49-a"), *DOCUMENTS[1:])}, BOTH),
        ({}, {"found": (*DOCUMENTS, machine_config("99-os", osImageURL=LAYERED))}, BOTH),
        ({}, {"pull_secret_name": "other"}, BOTH),
        ({}, {"trust_bundle_name": "other"}, BOTH),
        ({}, {"cluster": {**BUNDLE, "fips": True}}, BOTH),
        ({}, {"ssh_key": b"ssh-ed25519 BBBB user@example.com"}, BOTH),
        ({}, {"pool": {"osImageStream": {"name": "rhel-10"}}, "release": inputs.STREAM}, BOTH),
        ({}, {"release": {"releaseVersion": "4.22.2"}}, BOTH),
        ({}, {"release": OTHER_NAME, "pool": {"release": {"image": "quay.io/r:2"}}}, NONE),
        ({}, {"base": inputs.BASE[::-1]}, NONE),
        ({}, {"release": {"baseOSContainerImage": LAYERED}}, BOTH),
        ({}, {"base": [*inputs.BASE, machine_config("02-more")]}, BOTH),
        ({}, {"image": {"registrySources": {"insecureRegistries": ["a.example.com"]}}}, BOTH),
    ],
)  # fmt: skip
def test_input_changes_the_hashes(before: Json, after: Json, expected: tuple[bool, bool]) -> None:
    old, new = make_state(**before), make_state(**after)
    actual = old.target_hash != new.target_hash, old.rollout_hash != new.rollout_hash
    assert actual == expected
    if old.rollout_hash == new.rollout_hash and before != CORE and "pool_config_maps" not in before:
        # What rolls no node by its hash rolls none by its config.
        assert not hashes.needs_rollout(old.config, new.config)


def make_state(**changes: Any) -> PoolConfig:
    """Make a config from changes of `make_inputs`, and of parts of its objects."""
    found = changes.pop("found", DOCUMENTS)
    cluster = changes.pop("cluster", BUNDLE)
    if name := changes.pop("pull_secret_name", ""):
        cluster = {**cluster, "pullSecret": {"name": name}}
    if name := changes.pop("trust_bundle_name", ""):
        cluster = {**cluster, "additionalTrustBundle": {"name": name}}
    if image := changes.pop("image", None):
        cluster = {**cluster, "configuration": {"image": image}}
    images, base = changes.pop("release", {}), changes.pop("base", inputs.BASE)
    changes["release_config_maps"] = inputs.make_release(*base, **images)
    return make(*found, cluster=cluster, **changes)


def test_hashes_stay_the_same_in_later_versions() -> None:
    made = make()
    # Another value here rolls the nodes of all users.
    assert (made.target_hash, made.rollout_hash) == ("67984add60eeaa44", "3fb95652d578ff27")


def test_hypershift_as_control_plane_changes_no_rollout_hash_by_the_agents_file() -> None:
    made = make(**CORE)
    alone = make(
        pool_config_maps=[
            {**one, "metadata": {"name": f"m{n}"}} for n, one in enumerate(inputs.CORE)
        ],
        cluster={**BUNDLE, "sshKey": None},
    )
    assert made.rollout_hash == alone.rollout_hash
    assert made.target_hash != alone.target_hash
    assert not hashes.needs_rollout(alone.config, made.config)


# HyperShift's TestHash: the base case, and one other input each.
TABLE: dict[str, tuple[list[str], Json]] = {
    "base case": (["test config"], {}),
    "version": (["test config"], {"version": "4.8.0"}),
    "config": (["different"], {}),
    "pull secret": (["test config"], {"pullSecret": "different"}),
    "trust bundle": (["test config"], {"trustBundle": "different"}),
    "global config": (["test config"], {"configuration": {"proxy": "different"}}),
    "stream": (["test config"], {"base": "rhel-10"}),
}


def test_each_input_of_hypershifts_table_changes_the_hashes() -> None:
    from treenail.controllers.hosted.config.config_documents import ConfigDocument

    base = {"version": "4.7.0", "pullSecret": "pull-secret", "trustBundle": "trust-bundle"}
    found = set()
    for texts, names in TABLE.values():
        documents = [
            ConfigDocument("", {"kind": "KubeletConfig", "metadata": {"name": text}}, text)
            for text in texts
        ]
        values = {**base, "configuration": "global config", "base": "", **names}
        found.add(hashes.compute_target_hash(documents, values, {}))
        found.add(hashes.compute_rollout_hash(documents, values))
    assert len(found) == 2 * len(TABLE)
    assert all(len(text) == 16 for text in found)


def mirror(*places: str) -> Json:
    return with_spec(MIRRORS, imageDigestMirrors=[{"source": "quay.io/a", "mirrors": [*places]}])


def user(*keys: str) -> Json:
    config = {"ignition": {"version": "3.2.0"}, "passwd": {"users": [{"name": "core"}]}}
    config["passwd"]["users"][0]["sshAuthorizedKeys"] = [*keys]  # type: ignore[index]
    return machine_config("99-keys", config=config)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([], [], False),
        ([user("a")], [user("b")], False),
        ([user("a")], [user("a", "b")], False),
        ([mirror("example.com/a")], [mirror("example.com/a", "example.com/b")], False),
        ([mirror("example.com/a", "example.com/b")], [mirror("example.com/a")], True),
        ([], [machine_config("50-a", {"/etc/a": "x"})], True),
        ([], [machine_config("50-a", kernelArguments=["debug"])], True),
        ([], [KUBELET], True),
        ([], [machine_config("50-a", osImageURL=LAYERED)], True),
        ([], [machine_config("50-a", {"/etc/mco/proxy.env": "x"})], True),
    ],
)  # fmt: skip
def test_config_rolls_nodes_that_must_drain_or_reboot(
    before: list[Json], after: list[Json], *, expected: bool
) -> None:
    old, new = (make(*found or [OTHER]) for found in (before, after))
    assert hashes.needs_rollout(old.config, new.config) is expected


def test_config_that_cannot_be_read_or_reached_rolls_nodes() -> None:
    good = make().config
    disk = {"device": "/dev/sda", "wipeTable": True}
    config = {"ignition": {"version": "3.2.0"}, "storage": {"disks": [disk]}}
    for other in (
        machineconfig.MachineConfig(config={"ignition": {"version": "9"}}),
        make(*DOCUMENTS, machine_config("98-disk", config=config)).config,
    ):
        assert hashes.needs_rollout(good, other)
        assert hashes.needs_rollout(other, good)


def test_own_files_of_the_pool_roll_no_node() -> None:
    old = make().config
    new = make(pull_secret=inputs.OTHER_PULL_SECRET, trust_bundle=OTHER_BUNDLE).config
    assert not hashes.needs_rollout(old, new)
    paths = [node_mode.PATH, release.PULL_SECRET_PATH, node_paths.USER_CA_BUNDLE]
    files = old.config["storage"]["files"]  # type: ignore[index]
    assert [file["path"] for file in files if file["path"] in paths] == paths
