"""Names, suffixes, owners and conflicts of generated MachineConfigs."""

import base64
import json
from dataclasses import replace
from urllib.parse import quote

import pytest
import yaml

from tests.config.generated.random_policies import make_key
from treenail.api import kinds, machineconfig, machineconfigpool
from treenail.config.generated import generate, sources

ROLE = "machineconfiguration.openshift.io/role"
SUFFIX = "machineconfiguration.openshift.io/mc-name-suffix"
VERSION = "machineconfiguration.openshift.io/generated-by-controller-version"
FROM = "treenail.io/generated-from"
BUILT_IN = "machineconfiguration.openshift.io/mco-built-in"
LIVE = ()
FACTS = sources.ClusterFacts(
    kubeadm_kubelet="{apiVersion: kubelet.config.k8s.io/v1beta1, kind: KubeletConfiguration}"
)
BAD = {"logLevel": 99}
BAD_MIRRORS = {
    "imageDigestMirrors": [{"source": "a.example.com/x:tag", "mirrors": ["b.example.com"]}]
}


def make_source(name, kind="KubeletConfig", select="worker", suffix=None, at=0, **fields):
    section = "kubeletConfig" if kind == "KubeletConfig" else "containerRuntimeConfig"
    spec = {section: fields.pop("fields", {}), **fields.pop("spec", {})}
    if select:
        spec["machineConfigPoolSelector"] = {"matchLabels": {"pool": select}}
    metadata = {
        "name": name,
        "uid": f"uid-{name}",
        "creationTimestamp": f"2026-01-01T00:00:{at:02}Z",
        "annotations": {} if suffix is None else {SUFFIX: suffix},
        **fields.pop("metadata", {}),
    }
    return sources.SourceObject.from_json({"kind": kind, "metadata": metadata, "spec": spec})


def make_mirrors(name, kind="ImageDigestMirrorSet", **spec):
    metadata = {"name": name, "uid": f"uid-{name}"}
    return sources.SourceObject.from_json({"kind": kind, "metadata": metadata, "spec": spec})


def make_pool(name="worker", labels=None, roles=None, node_selector=None):
    expressions = [{"key": ROLE, "operator": "In", "values": roles or [name]}]
    return machineconfigpool.MachineConfigPool.from_json(
        {
            "metadata": {"name": name, "labels": {"pool": name, "all": "", **(labels or {})}},
            "spec": {
                "machineConfigSelector": {"matchExpressions": expressions},
                "nodeSelector": node_selector,
            },
        }
    )


def make_config(name, owner=None, role="worker", files=(), annotations=None):
    owners = [owner] if owner else []
    entries = [
        {"path": path, "contents": {"source": f"data:,{quote(text)}"}}
        for path, text in dict(files).items()
    ]
    return machineconfig.MachineConfig.from_json(
        {
            "metadata": {
                "name": name,
                "labels": {ROLE: role},
                "annotations": annotations or {},
                "ownerReferences": owners,
            },
            "spec": {"config": {"ignition": {"version": "3.5.0"}, "storage": {"files": entries}}},
        }
    )


def make_owner(name, kind="KubeletConfig", uid=None):
    version = kinds.GENERATOR_KINDS[kind]
    return {"apiVersion": version, "kind": kind, "name": name, "uid": uid or f"uid-{name}"}


def generate_all(objects, pools=None, configs=(), incomplete=LIVE):
    by_key = {source.key: source for source in objects}
    return generate.generate_configs(by_key, pools or [make_pool()], configs, FACTS, incomplete)


def read_files(config):
    files = config.config.get("storage", {}).get("files", [])
    return {
        file["path"]: base64.b64decode(file["contents"]["source"].partition(",")[2]).decode()
        for file in files
    }


def describe_problems(generation):
    return {
        result.source.metadata.name: "; ".join(result.messages)
        for result in generation.results.values()
    }


def get_suffixes(generation):
    return {
        result.source.metadata.name: (result.suffix, result.config_names)
        for result in generation.results.values()
    }


def test_config_has_the_owner_label_and_files_of_the_mco():
    generation = generate_all([make_source("slow-pods", fields={"maxPods": 9})])
    document = generation.configs[K].to_json()
    assert document["metadata"] == {
        "name": K,
        "labels": {ROLE: "worker"},
        "annotations": {
            VERSION: document["metadata"]["annotations"][VERSION],
            FROM: "KubeletConfig/slow-pods",
        },
        "ownerReferences": [
            {**make_owner("slow-pods"), "controller": True, "blockOwnerDeletion": True}
        ],
    }
    ignition = document["spec"]["config"]
    assert ignition["ignition"] == {"version": "3.5.0"}
    file = ignition["storage"]["files"][-1]
    begin = "data:text/plain;charset=utf-8;base64,"
    assert file.pop("contents")["source"].startswith(begin)
    assert file == {
        "path": "/etc/kubernetes/kubelet.conf.d/90-treenail.conf", "overwrite": True, "mode": 420,
    }  # fmt: skip
    assert get_suffixes(generation) == {"slow-pods": ("", [K])}


K = "99-worker-generated-kubelet"


@pytest.mark.parametrize(
    ("objects", "configs", "expected"),
    [
        pytest.param([("a", None, 0)], [], {"a": ""}, id="single"),
        pytest.param([("a", "", 0), ("b", None, 1)], [], {"a": "", "b": "1"}, id="second"),
        pytest.param([("a", None, 1), ("b", None, 0)], [], {"b": "1", "a": "2"}, id="two-new"),
        pytest.param([("a", "2", 0), ("b", None, 1)], [], {"a": "2", "b": "3"}, id="after-gap"),
        pytest.param([("a", "4", 0)], [], {"a": "4"}, id="annotation-of-a-single-one"),
        pytest.param(
            [("a", None, 0), ("b", "1", 1)], [(K, "a")], {"a": "", "b": "1"}, id="named-before"
        ),
        pytest.param(
            [("a", None, 0), ("b", "", 1)], [(f"{K}-3", "a")], {"a": "3", "b": ""}, id="numbered"
        ),
        pytest.param([("a", "x", 0), ("b", None, 1)], [], {"a": "x", "b": "1"}, id="no-number"),
    ],
)
def test_suffix_follows_annotation_present_name_and_rivals(objects, configs, expected):
    sources_ = [make_source(name, suffix=suffix, at=at) for name, suffix, at in objects]
    present = [make_config(name, make_owner(owner)) for name, owner in configs]
    generation = generate_all(sources_, configs=present)
    names = {name: [f"{K}-{text}" if text else K] for name, text in expected.items()}
    assert get_suffixes(generation) == {
        name: (text, names[name]) for name, text in expected.items()
    }


def test_suffix_is_the_same_in_each_pool():
    both = make_source(
        "both", select="", spec={"machineConfigPoolSelector": {"matchLabels": {"all": ""}}}
    )
    generation = generate_all(
        [make_source("first", suffix="3"), both], [make_pool("worker"), make_pool("infra")]
    )
    assert get_suffixes(generation)["both"] == (
        "4", ["99-infra-generated-kubelet-4", "99-worker-generated-kubelet-4"],
    )  # fmt: skip


def test_eleventh_object_of_a_pool_is_refused():
    objects = [make_source(f"k{n}", suffix=str(n or ""), at=n) for n in range(10)]
    generation = generate_all([*objects, make_source("last", at=11)])
    assert len(generation.configs) == 10
    assert "expected a number up to 9 for another object" in describe_problems(generation)["last"]
    assert get_suffixes(generation)["last"] == (None, [])
    # A number of any length is the problem of the new object alone.
    generation = generate_all([make_source("k", suffix="9" * 5000), make_source("last", at=1)])
    assert all(describe_problems(generation).values())


@pytest.mark.parametrize(
    ("source", "pools", "configs", "expected"),
    [
        pytest.param(
            make_source("a", select=None), None, [], "expected at least one label", id="no-selector"
        ),
        pytest.param(
            make_source("a", select="x"), None, [], "selects none of worker", id="no-pool"
        ),
        pytest.param(
            make_source("a", select="", spec={"machineConfigPoolSelector": 3}),
            None, [], "spec.machineConfigPoolSelector", id="unreadable-selector",
        ),
        pytest.param(
            make_source("a"), None, [make_config(K)], f"{K}: expected KubeletConfig a as its owner",
            id="foreign",
        ),
        pytest.param(
            make_source("a"), None, [make_config(K, make_owner("x", "ContainerRuntimeConfig"))],
            "found no KubeletConfig", id="of-another-kind",
        ),
        pytest.param(
            make_source("a"), [make_pool(roles=["other"])], [], "to select its label", id="no-role"
        ),
        pytest.param(
            make_source("a", suffix="A/.."), None, [], "at most 253 characters", id="bad-name"
        ),
        pytest.param(make_source("a", spec=BAD), None, [], "spec.logLevel", id="generator"),
    ],
)  # fmt: skip
def test_object_with_a_problem_generates_nothing(source, pools, configs, expected):
    generation = generate_all([source], pools, configs, ["ContainerRuntimeConfig"])
    assert generation.configs == {}
    assert expected in describe_problems(generation)["a"]
    assert all("; " in text for result in generation.results.values() for text in result.messages)
    assert generation.obsolete == []


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ({"maxPods": "x"}, "correct the field, or remove it"),
        ({"maxpods": 1}, "did you mean maxPods?"),
    ],
)
def test_each_problem_has_a_remedy(value, remedy):
    generation = generate_all([make_source("a", fields=value)])
    (problem,) = describe_problems(generation).values()
    assert problem.endswith(f"; {remedy}")


def test_unknown_field_with_a_long_name_leaves_room_for_the_remedy():
    generation = generate_all([make_source("a", fields={"x" * 900_000: 1})])
    assert len(describe_problems(generation)["a"]) < 10_000


def test_changed_role_of_a_generated_config_is_restored():
    config = generate_all([make_source("a")]).configs[K]
    labels = {ROLE: "other", "mine": "x"}
    edited = replace(config, metadata=replace(config.metadata, labels=labels))
    restored = generate_all([make_source("a")], configs=[edited]).configs[K]
    assert restored.metadata.labels == {ROLE: "worker", "mine": "x"}


def test_object_with_a_problem_keeps_its_present_configs():
    present = make_config(K, make_owner("a"), files={"/etc/kubernetes/kubelet.conf": "old"})
    generation = generate_all([make_source("a", spec=BAD)], configs=[present])
    assert generation.configs == {K: present}
    assert (generation.obsolete, get_suffixes(generation)) == ([], {"a": (None, [K])})


def test_copied_annotation_is_refused_for_the_copy():
    present = make_config(K, make_owner("z"))
    generation = generate_all(
        [make_source("z", suffix="", at=5), make_source("a", suffix="", at=1)], configs=[present]
    )
    assert generation.configs[K].metadata.owner_references[0].name == "z"
    problems = describe_problems(generation)
    assert problems["z"] == ""
    assert "expected one KubeletConfig with this suffix" in problems["a"]
    assert "remove the annotation" in problems["a"]


def test_copied_annotation_of_a_new_object_is_refused_for_the_newer_one():
    generation = generate_all([make_source("a", suffix="", at=2), make_source("b", suffix="")])
    assert generation.configs[K].metadata.owner_references[0].name == "b"
    assert "with this suffix" in describe_problems(generation)["a"]


def test_config_of_a_deleted_owner_is_taken_over():
    present = make_config(K, make_owner("a", uid="earlier"))
    generation = generate_all([make_source("b", suffix="")], configs=[present])
    assert generation.configs[K].metadata.owner_references[0].uid == "uid-b"
    assert generation.obsolete == []


def test_equal_config_keeps_the_version_of_the_mco():
    first = generate_all([make_source("a")]).configs[K]
    present = machineconfig.MachineConfig.from_json(
        {**first.to_json(), "metadata": {**first.metadata.to_json(), "annotations": {VERSION: "v"}}}
    )
    (config,) = generate_all([make_source("a")], configs=[present]).configs.values()
    assert config.metadata.annotations == {VERSION: "v", FROM: "KubeletConfig/a"}
    changed = make_source("a", fields={"maxPods": 1})
    (config,) = generate_all([changed], configs=[present]).configs.values()
    assert config.metadata.annotations[VERSION].startswith("treenail-")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["01-worker-kubelet", "50-mine"], "01-worker-kubelet"),
        (["01-worker-kubelet", "97-worker-generated-kubelet"], "97-worker-generated-kubelet"),
        (
            ["97-worker-generated-kubelet", "98-worker-generated-kubelet"],
            "98-worker-generated-kubelet",
        ),
        (["01-worker-kubelet", "98-infra-generated-kubelet"], "01-worker-kubelet"),
    ],
)
def test_kubelet_base_is_what_the_mco_makes_of_its_template(names, expected):
    path = "/etc/kubernetes/kubelet.conf"

    def make_base(name, role="worker", owner=None):
        document = {**yaml.safe_load(FACTS.kubeadm_kubelet), "clusterDomain": name}
        return make_config(name, owner, role, {path: json.dumps(document)})

    others = [make_base("00-master", "master"), make_base("00-old", owner=make_owner("z"))]
    configs = [*others, *map(make_base, names)]
    config = generate_all([make_source("a")], configs=configs).configs[K]
    assert yaml.safe_load(read_files(config)[path])["clusterDomain"] == expected


def test_fields_of_the_earlier_of_two_objects_are_named():
    first = make_source(
        "a", suffix="", fields={"maxPods": 1, "podsPerCore": 2}, spec={"logLevel": 3}
    )
    second = make_source("b", suffix="1", fields={"maxPods": 1}, spec={"logLevel": 4})
    runtime = [
        make_source(
            "r", "ContainerRuntimeConfig", suffix="", fields={"logLevel": "debug", "pidsLimit": 100}
        ),
        make_source("s", "ContainerRuntimeConfig", suffix="1", fields={"logLevel": "info"}),
    ]
    generation = generate_all([first, second, *runtime])
    warnings = {
        result.source.metadata.name: result.warnings for result in generation.results.values()
    }
    assert [len(lines) for lines in warnings.values()] == [1, 0, 1, 0]
    assert warnings["a"][0].startswith(
        f"spec.kubeletConfig.podsPerCore, spec.logLevel: no effect in MachineConfig {K}, because "
        f"KubeletConfig b writes the file in {K}-1"
    )
    assert warnings["r"][0].startswith("spec.containerRuntimeConfig.logLevel: no effect")
    assert not any(describe_problems(generation).values())


R = "99-worker-generated-registries"


def test_registries_come_from_all_sets_and_belong_to_the_image_config():
    lists = {
        "blockedRegistries": ["bad.example.com"],
        "containerRuntimeSearchRegistries": ["s.example.com"],
    }
    mirror = {"source": "a.example.com", "mirrors": ["b.example.com"]}
    objects = [
        make_mirrors("cluster", "Image", registrySources=lists),
        make_mirrors("m", imageDigestMirrors=[mirror]),
    ]
    text = 'unqualified-search-registries = ["base.example.com"]'
    base = make_config("00-worker", files={"/etc/containers/registries.conf": text})
    config = generate_all(objects, configs=[base]).configs[R]
    files = read_files(config)
    assert [path.rpartition("/")[2] for path in files] == [
        "registries.conf", "policy.json", "01-image-searchRegistries.conf",
    ]  # fmt: skip
    for name in ("base", "bad", "a", "b"):
        assert f'"{name}.example.com"' in files["/etc/containers/registries.conf"]
    assert "bad.example.com" in files["/etc/containers/policy.json"]
    assert [owner.to_json() for owner in config.metadata.owner_references] == [
        make_owner("cluster", "Image")
    ]
    assert config.metadata.annotations[FROM] == "Image/cluster,ImageDigestMirrorSet/m"


def test_registries_without_an_image_config_have_no_owner():
    config = generate_all([make_mirrors("m")]).configs[R]
    assert config.metadata.owner_references == ()
    assert generate.find_generator(config) == "Image"
    assert generate_all([make_mirrors("m")], configs=[config]).configs == {R: config}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([{}, {}], ["infra", "worker"]),
        ([{BUILT_IN: ""}, {}], ["worker"]),
    ],
)
def test_registries_are_for_built_in_pools_if_the_cluster_has_any(labels, expected):
    pools = [make_pool("worker", labels[0]), make_pool("infra", labels[1])]
    generation = generate_all([make_mirrors("m")], pools)
    assert sorted(generation.configs) == [f"99-{name}-generated-registries" for name in expected]


def test_bad_set_that_had_no_effect_is_left_out():
    present = generate_all([make_mirrors("m")]).configs[R]
    objects = [make_mirrors("m"), make_mirrors("n"), make_mirrors("b", **BAD_MIRRORS)]
    generation = generate_all(objects, configs=[present])
    assert generation.configs[R].metadata.annotations[FROM] == (
        "ImageDigestMirrorSet/m,ImageDigestMirrorSet/n"
    )
    problems = describe_problems(generation)
    assert (problems["m"], problems["n"]) == ("", "")
    assert "spec.imageDigestMirrors[0].source" in problems["b"]


@pytest.mark.parametrize("origin", ["ImageDigestMirrorSet/b,ImageDigestMirrorSet/m", "", "...,x/y"])
def test_bad_set_in_effect_keeps_the_present_config(origin):
    annotations = {FROM: origin} if origin else {}
    present = make_config(R, make_owner("cluster", "Image"), annotations=annotations)
    generation = generate_all(
        [make_mirrors("m"), make_mirrors("b", **BAD_MIRRORS)], configs=[present]
    )
    assert generation.configs == {R: present}
    assert (
        f"{R} stays as it is: it was generated also from ImageDigestMirrorSet/b"
        in (describe_problems(generation)["m"])
    )
    assert generation.obsolete == []


def test_registries_of_a_foreign_owner_are_not_overwritten():
    generation = generate_all([make_mirrors("m")], configs=[make_config(R)])
    assert (generation.configs, generation.obsolete) == ({}, [])
    assert "found no Image" in describe_problems(generation)["m"]


def test_missing_object_of_an_incomplete_kind_keeps_the_config():
    present = generate_all([make_mirrors("m"), make_mirrors("n")]).configs[R]
    generation = generate_all(
        [make_mirrors("m")], configs=[present], incomplete=["ImageDigestMirrorSet"]
    )
    assert generation.configs == {R: present}
    assert "also from ImageDigestMirrorSet/n" in describe_problems(generation)["m"]
    generation = generate_all([make_mirrors("m")], configs=[present])
    assert generation.configs[R].metadata.annotations[FROM] == "ImageDigestMirrorSet/m"


@pytest.mark.parametrize(
    ("config", "incomplete", "expected"),
    [
        (make_config(K, make_owner("gone")), [], [K]),
        (make_config(K, make_owner("gone")), ["KubeletConfig"], []),
        (make_config(R, annotations={FROM: "ImagePolicy/n/p"}), [], [R]),
        (make_config(R, annotations={FROM: "ImagePolicy/n/p"}), ["ImagePolicy"], []),
        (make_config(R, make_owner("cluster", "Image")), [], [R]),
        (make_config("50-mine"), [], []),
        # A user's copy of a generated one.
        (make_config("99-worker-my-kubelet", annotations={FROM: "KubeletConfig/a"}), [], []),
        (make_config("50-mine", make_owner("a"), annotations={FROM: "KubeletConfig/a"}), [], []),
        (make_config("rendered", {**make_owner("a"), "kind": "MachineConfigPool"}), [], []),
        # The MCO keeps what it generated for a pool that the object no longer selects.
        (make_config("99-infra-generated-kubelet", make_owner("a")), [], []),
        (
            make_config(
                "99-infra-generated-kubelet", make_owner("a"), annotations={FROM: "KubeletConfig/a"}
            ),
            [],
            ["99-infra-generated-kubelet"],
        ),
        # The deprecated name, beside the one that replaces it.
        (make_config("99-worker-5d0a-kubelet", make_owner("a")), [], ["99-worker-5d0a-kubelet"]),
    ],
)
def test_what_nothing_requires_is_obsolete(config, incomplete, expected):
    generation = generate_all(
        [make_source("a", suffix="1")], configs=[config], incomplete=incomplete
    )
    assert generation.obsolete == expected
    assert sorted(generation.configs) == [f"{K}-1"]


def test_deleted_object_generates_nothing_but_keeps_its_suffix_from_others():
    deleting = make_source(
        "a",
        suffix="1",
        metadata={"deletionTimestamp": "2026-01-02T00:00:00Z", "annotations": {SUFFIX: "1"}},
    )
    present = make_config(f"{K}-1", make_owner("a"))
    generation = generate_all([deleting, make_source("b", at=1)], configs=[present])
    assert get_suffixes(generation) == {"b": ("2", [f"{K}-2"])}
    assert generation.obsolete == [f"{K}-1"]


def test_files_replace_nothing_of_unknown_objects():
    present = make_config(K, make_owner("gone"))
    assert generate.generate_configs({}, [make_pool()], [present]).obsolete == []


@pytest.mark.parametrize(
    ("observed", "is_generating", "metadata", "expected"),
    [
        (2, True, {}, False),
        (1, False, {}, True),
        (1, True, {"deletionTimestamp": "2026-01-02T00:00:00Z"}, False),
        (None, False, {}, False),
        (None, True, {}, True),
    ],
)
def test_object_is_unobserved_until_its_status_is_of_its_generation(
    observed, is_generating, metadata, expected
):
    status = {} if observed is None else {"observedGeneration": observed}
    source = replace(make_source("a", metadata={"generation": 2, **metadata}), status=status)
    found = generate.find_unobserved(make_pool(), [source], is_generating=is_generating)
    assert (found is source) is expected
    assert generate.find_unobserved(make_pool("infra"), [source], is_generating=True) is None


def test_object_of_a_file_is_no_owner():
    source = make_source("a", metadata={"uid": ""})
    assert generate_all([source]).configs[K].metadata.owner_references == ()


@pytest.mark.parametrize(
    ("name", "key", "is_refused"),
    [
        ("master", "x", True),
        ("infra", "node-role.kubernetes.io/master", True),
        ("infra", "x", False),
    ],
)
def test_static_pods_of_the_control_plane_are_refused(name, key, is_refused):
    pool = make_pool(name, node_selector={"matchLabels": {key: ""}})
    source = make_source("a", select=name, fields={"staticPodPath": ""})
    assert bool(describe_problems(generate_all([source], [pool]))["a"]) is is_refused


def test_annotation_with_the_sources_is_bounded():
    generation = generate_all([make_mirrors(f"m{number}") for number in range(501)])
    titles = generation.configs[R].metadata.annotations[FROM].split(",")
    assert (len(titles), titles[-1]) == (501, "...")


def test_scope_without_effect_is_a_warning():
    root = {"policyType": "PublicKey", "publicKey": {"keyData": make_key()}}
    spec = {"policy": {"rootOfTrust": root}}
    wide = make_mirrors("wide", "ClusterImagePolicy", scopes=["example.com"], **spec)
    inner = make_mirrors("inner", "ImagePolicy", scopes=["example.com/a", "b.example.com"], **spec)
    inner = replace(inner, metadata=replace(inner.metadata, namespace="n"))
    results = generate_all([wide, inner]).results
    assert results[inner.key].problems == []
    (warning,) = results[inner.key].warnings
    assert "example.com/a" in warning
