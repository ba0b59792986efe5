"""The generated config of a NodePool: its parts, its own files, bad input, the payload."""

import base64
import gzip
import json
import random
from typing import Any

import pytest
import yaml

from tests.controllers.hosted.config import inputs
from tests.controllers.hosted.config.inputs import machine_config, make_inputs
from tests.controllers.hosted.plan.test_hosted_plan import KUBELET, MIRRORS, config_map
from tests.fixtures import hosted
from treenail.api import machineconfig
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import node_mode
from treenail.api.ignition.parser import parse_ignition
from treenail.config import node_paths
from treenail.controllers.hosted.config import generator, pool_config
from treenail.controllers.hosted.config.pool_config import PoolConfig, PoolConfigError
from treenail.controllers.hosted.config.release import PULL_SECRET_PATH

Json = dict[str, Any]
IDMS_CLUSTER = {"imageContentSources": [{"source": "quay.io/a", "mirrors": ["example.com/a"]}]}


def read_files(config: PoolConfig) -> dict[str, bytes]:
    parsed = parse_ignition(config.config.config)
    return {file.path: file.contents.decode_bytes() for file in parsed.files}


def read_modes(config: PoolConfig) -> dict[str, int | None]:
    return {file.path: file.mode for file in parse_ignition(config.config.config).files}


def fail(facts: generator.ConfigInputs) -> PoolConfigError:
    with pytest.raises(PoolConfigError) as caught:
        generator.generate_config(facts)
    return caught.value


def test_config_has_base_documents_and_own_files() -> None:
    runtime = {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "ContainerRuntimeConfig",
        "metadata": {"name": "pids"},
        "spec": {"containerRuntimeConfig": {"pidsLimit": 2048}},
    }
    own = machine_config("50-a", {"/etc/a": "x"}, kernelArguments=["quiet"])
    cluster = {"additionalTrustBundle": {"name": "ca"}, "fips": True}
    facts = make_inputs(own, KUBELET, runtime, MIRRORS, cluster=cluster, trust_bundle=inputs.BUNDLE)
    made = generator.generate_config(facts)
    files = read_files(made)
    assert files["/etc/base"] == b"base"
    assert files["/etc/a"] == b"x"
    assert b"maxPods" in files["/etc/kubernetes/kubelet.conf"]
    assert b"example.com/a" in files["/etc/containers/registries.conf"]
    assert b"2048" in files["/etc/crio/crio.conf.d/01-ctrcfg-pidsLimit"]
    assert files[PULL_SECRET_PATH] == inputs.PULL_SECRET
    assert files[node_paths.USER_CA_BUNDLE] == inputs.BUNDLE
    mode = node_mode.HostedMode.from_json(json.loads(files[node_mode.PATH]))
    assert mode == node_mode.HostedMode("np", "treenail-upgrade-np")
    assert read_modes(made)[PULL_SECRET_PATH] == 0o600
    assert made.config.kernel_arguments == ("quiet",)
    assert made.config.os_image_url == inputs.IMAGES["baseOSContainerImage"]
    assert made.config.fips
    (user,) = parse_ignition(made.config.config).users
    assert user.ssh_keys == (inputs.SSH_KEY.decode().strip(),)
    assert (made.version, made.release_image) == (inputs.VERSION, hosted.RELEASE)


def test_secrets_are_not_in_the_representation() -> None:
    facts = make_inputs(cluster={"additionalTrustBundle": {"name": "ca"}}, trust_bundle=b"x")
    assert "dXNlcjpwYXNzd29yZA" not in f"{facts!r} {generator.generate_config(make_inputs())!r}"
    assert "CERTIFICATE" not in repr(fail(facts))


def test_user_config_names_another_os_image() -> None:
    image = f"quay.io/example/layered@sha256:{'4' * 64}"
    made = generator.generate_config(make_inputs(machine_config("99-os", osImageURL=image)))
    assert made.config.os_image_url == image


def test_stream_of_the_pool_chooses_the_os_image() -> None:
    releases = [*inputs.make_release(), *inputs.make_release(**inputs.STREAM)]
    pool = {"osImageStream": {"name": "rhel-10"}}
    made = generator.generate_config(make_inputs(pool=pool, release_config_maps=releases))
    assert made.config.os_image_url == inputs.STREAM["baseOSContainerImage"]
    assert fail(make_inputs(pool=pool)).reason == "ReleaseBaseMissing"


def test_other_role_becomes_worker() -> None:
    config = machine_config("50-a", {"/etc/a": "x"})
    config["metadata"]["labels"] = {"machineconfiguration.openshift.io/role": "master"}
    assert "/etc/a" in read_files(generator.generate_config(make_inputs(config)))


def test_config_maps_of_the_pool_and_of_hypershift_count() -> None:
    tuned = config_map(machine_config("50-nto", {"/etc/tuned": "x"}), name="tuned")
    made = generator.generate_config(
        make_inputs(pool_config_maps=[tuned], core_config_maps=inputs.CORE, has_hypershift=True)
    )
    files = read_files(made)
    assert "/etc/tuned" in files
    assert json.loads(files[node_mode.PATH])["drainAnnotation"] == hosted_key.HOSTED_DRAIN
    # HyperShift's core ConfigMap has the key already.
    assert not parse_ignition(made.config.config).users
    other = inputs.make_core("40-core")
    other[0]["data"]["config"] = json.dumps(write("/etc/core"))
    alone = generator.generate_config(make_inputs(core_config_maps=other))
    assert "/etc/core" not in read_files(alone)


def test_image_config_of_the_cluster_is_generated() -> None:
    registries = {"registrySources": {"insecureRegistries": ["registry.example.com"]}}
    cluster = {"configuration": {"image": registries}, **IDMS_CLUSTER}
    made = generator.generate_config(make_inputs(cluster=cluster))
    text = read_files(made)["/etc/containers/registries.conf"]
    assert b"registry.example.com" in text
    assert b"example.com/a" in text


def write(path: str, name: str = "99-zz") -> Json:
    return machine_config(name, {path: "x"})


def link(path: str) -> Json:
    links = [{"path": path, "target": "/etc/passwd"}]
    config = {"ignition": {"version": "3.2.0"}, "storage": {"links": links}}
    return machine_config("99-zz", config=config)


MASTERS = machine_config("50-a")
MASTERS["kind"], MASTERS["metadata"] = "MachineConfigPool", {"name": "master"}
PLACE = "ConfigMap a, document 1"
ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("found", "reason", "text"),
    [
        (["kind: ["], "InvalidConfig", f"{PLACE}, line "),
        (["x" * 2 * 1024 * 1024], "InvalidConfig", "ConfigMap a: expected at most 1048576 bytes"),
        (["\x00\x01"], "InvalidConfig", PLACE),
        ([ALIASES], "InvalidConfig", PLACE),
        ([write("/etc/a"), write("/etc/b")], "InvalidConfig", "ConfigMap a, document 2, "),
        ([machine_config("00-worker")], "InvalidConfig", f"{PLACE}, MachineConfig 00-worker: "),
        ([machine_config("99-treenail-hosted")], "InvalidConfig", f"{PLACE}, MachineConfig 99-"),
        ([write(node_mode.PATH)], "InvalidConfig", f"{PLACE}, MachineConfig 99-zz: "),
        ([write(node_mode.PATH, "00-a")], "InvalidConfig", f"{PLACE}, MachineConfig 00-a: "),
        ([write(PULL_SECRET_PATH)], "InvalidConfig", f"{PLACE}, MachineConfig 99-zz: "),
        ([link(node_mode.PATH)], "InvalidConfig", f"{PLACE}, MachineConfig 99-zz: "),
        ([link("/etc/treenail")], "InvalidConfig", f"{PLACE}, MachineConfig 99-zz: "),
        ([write("/var/lib/treenail/x")], "InvalidConfig", f"{PLACE}, MachineConfig 99-zz: "),
        ([machine_config("a", kernelArguments=["\x7f"])], "InvalidConfig", f"{PLACE}, MachineCo"),
        ([write("/proc/x")], "InvalidConfig", f"{PLACE}, MachineConfig 99-zz: "),
        ([machine_config("a", kernelArgs=["a"])], "InvalidConfig", "spec.kernelArgs: ignored"),
        ([machine_config("a", osImageURL="os:tag")], "InvalidConfig", f"{PLACE}, MachineConfig a"),
        ([{**KUBELET, "Spec": {}}], "InvalidConfig", f"{PLACE}.Spec: "),
        ([MASTERS], "UnsupportedConfigKind", f"{PLACE}: expected one of MachineConfig, "),
        ([{**MASTERS, "kind": "MachineOSConfig"}], "UnsupportedConfigKind", PLACE),
        ([{**KUBELET, "apiVersion": "v1"}], "UnsupportedConfigKind", "set apiVersion: machine"),
    ],
)  # fmt: skip
def test_bad_document_is_a_condition_with_its_place(
    found: list[Json | str], reason: str, text: str
) -> None:
    error = fail(make_inputs(*found))
    assert (error.condition, error.reason) == ("ValidMachineConfig", reason)
    assert text in f"{error}; {error.remedy}"
    assert len(str(error)) < 4000
    assert "; " in str(error) or error.remedy


def other_map(**changes: Any) -> Json:
    found = config_map(machine_config("50-a"))
    return {**{key: value for key, value in found.items() if key != "data"}, **changes}


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"config_maps": {"gone": None}}, "InvalidConfig", "ConfigMap gone does not exist; create"),
        (
            {"config_maps": {"a": other_map(binaryData={"config": "AAEC"})}},
            "InvalidConfig",
            "ConfigMap a: expected data.config, found none; ",
        ),
        (
            {"config_maps": {f"m{n}": config_map(machine_config(f"m{n}")) for n in range(11)}},
            "InvalidConfig",
            "spec.config: expected at most 10 ConfigMaps, found 11; ",
        ),
        (
            {"pool": {"config": [{"name": "a"}, {"name": "a"}]}},
            "InvalidConfig",
            "expected each ConfigMap once in spec.config, and at most 64 with labels, found a, a",
        ),
        (
            {"pool_config_maps": [config_map(name=f"m{n}") for n in range(65)]},
            "InvalidConfig",
            "at most 64 with labels, found a and 65",
        ),
        ({"pull_secret": None}, "InvalidConfig", "Secret pull-secret: expected .dockerconfigjson"),
        ({"pull_secret": b"{topsecret"}, "InvalidConfig", "Secret pull-secret"),
        ({"ssh_key": None}, "InvalidConfig", "Secret ssh-key: expected id_rsa.pub, found none"),
        (
            {"cluster": {"additionalTrustBundle": {"name": "ca"}}},
            "InvalidConfig",
            "ConfigMap ca: expected certificates in PEM in ca-bundle.crt, found none",
        ),
        (
            {"cluster": {"configuration": {"proxy": {"httpProxy": "http://a"}}}},
            "UnsupportedConfigKind",
            "spec.configuration: treenail generates nothing from proxy",
        ),
        (
            {"cluster": {"configuration": {"apiServer": {"tlsSecurityProfile": {"type": "Old"}}}}},
            "UnsupportedConfigKind",
            "generates nothing from tlsSecurityProfile",
        ),
        ({"release_config_maps": []}, "ReleaseBaseMissing", "expected all parts of release"),
        ({"has_hypershift": True}, "MissingCoreConfig", "expected 3 ConfigMaps with label"),
    ],
)  # fmt: skip
def test_bad_input_is_a_condition_with_a_remedy(changes: Json, reason: str, text: str) -> None:
    error = fail(make_inputs(**changes))
    assert (error.condition, error.reason) == ("ValidMachineConfig", reason)
    assert text in str(error)
    assert "topsecret" not in str(error)
    assert "; " in str(error) or error.remedy


def test_settings_of_the_cluster_that_a_document_writes_are_accepted() -> None:
    profile = {"type": "Modern"}
    kubelet = {**KUBELET, "spec": {**KUBELET["spec"], "tlsSecurityProfile": profile}}  # type: ignore[dict-item]
    configuration = {
        "proxy": {"httpProxy": "http://a"},
        "apiServer": {"tlsSecurityProfile": profile},
    }
    facts = make_inputs(
        kubelet, write("/etc/mco/proxy.env"), cluster={"configuration": configuration}
    )
    assert generator.generate_config(facts).config.config is not None
    # An empty proxy is none.
    generator.generate_config(make_inputs(cluster={"configuration": {"proxy": {}}}))


HAPROXY = config_map(machine_config("20-apiserver-haproxy"), name="proxy")


@pytest.mark.parametrize(
    ("core", "cluster", "pool_maps", "expected"),
    [
        (["30-fips", "99-ssh", "20-apiserver-haproxy"], {}, [], None),
        (["30-fips", "99-ssh"], {}, [], 3),
        (["30-fips", "99-ssh"], {}, [HAPROXY], None),
        (["30-fips"], {}, [HAPROXY], 2),
        (["30-fips", "99-ssh", "40-ics"], {}, [HAPROXY], 2),
        (["30-fips", "99-ssh", "40-ics"], IDMS_CLUSTER, [HAPROXY], None),
        (["30-fips", "99-ssh", "20-apiserver-haproxy"], IDMS_CLUSTER, [], 4),
        (["30-fips", "99-ssh", "40-ics", "20-apiserver-haproxy"], IDMS_CLUSTER, [], None),
        ([], {}, [], 3),
    ],
)  # fmt: skip
def test_core_configs_are_awaited_until_their_count_is_exact(
    core: list[str], cluster: Json, pool_maps: list[Json], expected: int | None
) -> None:
    facts = make_inputs(
        cluster=cluster,
        core_config_maps=inputs.make_core(*core),
        pool_config_maps=pool_maps,
        has_hypershift=True,
    )
    if expected is None:
        generator.generate_config(facts)
        return
    error = fail(facts)
    assert error.reason == "MissingCoreConfig"
    assert f"expected {expected} ConfigMaps" in str(error)
    assert f"found {len(core)}" in str(error)
    assert "copy it from the key config of a token Secret" in error.remedy


def test_base_without_login_is_written_by_nobody_else() -> None:
    # The command drops it; an edited ConfigMap must not replace the pull secret either.
    base = [*inputs.BASE, machine_config("02-own", {node_mode.PATH: "x"})]
    error = fail(make_inputs(release_config_maps=inputs.make_release(*base)))
    assert "the base, MachineConfig 02-own: " in str(error)


def read_payload(payload: str) -> machineconfig.MachineConfig:
    document = json.loads(gzip.decompress(base64.b64decode(payload)))
    (file,) = parse_ignition(document).files
    assert file.path == "/etc/mcs-machine-config-content.json"
    return machineconfig.MachineConfig.from_json(json.loads(file.contents.decode_bytes()))


def test_payload_has_the_config_once() -> None:
    made = generator.generate_config(make_inputs(write("/etc/ü")))
    payload = pool_config.pack_config(made, is_payload=True)
    assert read_payload(payload) == made.config
    # No time in the header: the same config has the same payload.
    assert base64.b64decode(payload)[4:8] == bytes(4)


@pytest.mark.parametrize("is_payload", [False, True])
def test_config_above_the_limit_names_the_three_largest_files(*, is_payload: bool) -> None:
    choose = random.Random(4)
    files = {
        f"/etc/{name}": base64.b64encode(choose.randbytes(size * 1024)).decode().rstrip("=")
        for name, size in (("a", 100), ("b", 400), ("c", 200), ("d", 300))
    }
    made = generator.generate_config(
        make_inputs(
            yaml.safe_dump(machine_config("50-a", {})),
            config_maps={
                name.strip("/").replace("/", "-"): config_map(
                    machine_config(f"50{name.replace('/', '-')}", {name: text})
                )
                for name, text in files.items()
            },
        )
    )
    with pytest.raises(PoolConfigError) as caught:
        pool_config.pack_config(made, is_payload=is_payload)
    error = caught.value
    assert (error.condition, error.reason) == ("ValidGeneratedPayload", "PayloadTooLarge")
    text = str(error)
    assert text.index("/etc/b (") < text.index("/etc/d (") < text.index("/etc/c (")
    assert "/etc/a (" not in text
    assert error.remedy
