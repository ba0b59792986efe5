"""Random changes: the plan names a cause exactly when HyperShift's hash changes.

The directory in the variable has the program ``hash``, a main function around HyperShift's
``nodepool.NewConfigGenerator``. It reads a JSON request a line, with HostedCluster, NodePool,
ConfigMaps and the version of the release, and answers each with ``hash``, ``config`` or ``error``.
"""

import copy
import json
import random
import subprocess
from collections import Counter
from typing import Any

import pytest
import yaml

from tests.config.generated.test_policies import KEY_ROOT
from tests.controllers.hosted.plan.test_hosted_plan import (
    KUBELET,
    MIRRORS,
    NOW,
    config_map,
    list_objects,
    machine_config,
    make_pool,
)
from tests.fixtures import hosted
from tests.mco.programs import Variable, read_count
from treenail.api.hosted import annotations as hosted_key
from treenail.controllers.hosted.config import config_documents
from treenail.controllers.hosted.plan import hosted_plan

HYPERSHIFT = Variable("TREENAIL_TEST_HYPERSHIFT", "a directory with programs around HyperShift")
COUNT = read_count("TREENAIL_TEST_FUZZ_COUNT", 300)
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
VERSIONS = ["4.21.3", "4.22.0", "4.23.1", "5.0.0"]
Json = dict[str, Any]

RUNTIME = {
    "apiVersion": "machineconfiguration.openshift.io/v1",
    "kind": "ContainerRuntimeConfig",
    "metadata": {"name": "pids"},
    "spec": {"containerRuntimeConfig": {"pidsLimit": 2048}},
}
POLICY = {
    "apiVersion": "config.openshift.io/v1alpha1",
    "kind": "ClusterImagePolicy",
    "metadata": {"name": "policy"},
    "spec": {"scopes": ["example.com"], "policy": {"rootOfTrust": KEY_ROOT}},
}
CONFIGURATIONS: list[Json] = [
    {},
    {"proxy": {}},
    {"proxy": {"httpProxy": "http://a"}},
    {"proxy": {"httpProxy": "http://a", "noProxy": "b"}},
    {"image": {"externalRegistryHostnames": ["a"]}},
    {"image": {"registrySources": {"insecureRegistries": ["a"]}}},
    {"apiServer": {"tlsSecurityProfile": {"type": "Modern", "modern": {}}}},
    {"apiServer": {"audit": {"profile": "Default"}}},
    {"oauth": {}},
]


def make_documents(choose: random.Random) -> list[str]:
    """Some documents, in random order, with comments, separators and another indentation."""
    found = [machine_config("50-a"), machine_config("50-b", text=choose.choice("xy"))]
    found += [machine_config("51-c", kernelArguments=choose.choice([None, [], ["quiet"]]))]
    found += [KUBELET, RUNTIME, MIRRORS, POLICY]
    texts = []
    for document in choose.sample(found, choose.randint(0, 4)):
        text = yaml.safe_dump(document, indent=choose.choice([2, 4]))
        if choose.random() < 0.2:
            text = f"# {choose.randint(0, 1)}\n{text}"
        if choose.random() < 0.1:
            text = text.replace("spec:", "spec:\n  unknown: 1", 1)
        texts.append(text)
    return texts


def change_state(choose: random.Random, state: list[Json]) -> list[Json]:
    """Return the pool, the cluster and two ConfigMaps after up to two random changes."""
    pool, cluster, first, second = copy.deepcopy(state)
    for _ in range(choose.randint(0, 2)):
        match choose.randint(0, 12):
            case 0:
                first = config_map(*make_documents(choose), name="a")
            case 1:
                second = config_map(*make_documents(choose), name="b")
            case 2:
                documents = first["data"]["config"].split("---\n")
                first["data"]["config"] = "---\n".join(choose.sample(documents, len(documents)))
            case 3:
                first["data"]["config"] = choose.choice(["", "---\n"]) + first["data"]["config"]
            case 4:
                names = choose.choices("ab", k=choose.randint(0, 3))
                pool["spec"]["config"] = [{"name": name} for name in names]
            case 5:
                pool["spec"]["release"] = {"image": f"quay.io/r:{choose.choice(VERSIONS)}"}
            case 6:
                stream = choose.choice([None, "rhel-9"])
                pool["spec"]["osImageStream"] = {"name": stream} if stream else None
            case 7:
                pool["spec"]["replicas"] = choose.randint(0, 5)
            case 8:
                pool["spec"]["nodeLabels"] = {"a": choose.choice("bc")}
            case 9:
                cluster["spec"]["pullSecret"] = {"name": choose.choice(["pull-secret", "other"])}
            case 10:
                cluster["spec"]["configuration"] = choose.choice(CONFIGURATIONS)
            case 11:
                bundle = choose.choice([None, {"name": "ca"}])
                cluster["spec"]["additionalTrustBundle"] = bundle
            case _:
                cluster["spec"]["release"] = {"image": choose.choice("xy")}
    return [pool, cluster, first, second]


def make_request(state: list[Json]) -> Json:
    pool, cluster, *maps = state
    core = [
        {
            "metadata": {
                "name": f"core-{number}",
                "namespace": hosted.CONTROL_PLANE,
                "labels": {hosted_key.CORE_CONFIG: "true"},
            }
        }
        for number in range(3)
    ]
    return {
        "hostedCluster": cluster,
        "nodePool": pool,
        "configMaps": [*maps, *core],
        "releaseVersion": pool["spec"]["release"]["image"].rpartition(":")[2],
        "haproxy": "",
        "controlPlaneNamespace": hosted.CONTROL_PLANE,
    }


def ask_hashes(states: list[list[Json]]) -> list[Json]:
    text = "".join(json.dumps(make_request(state)) + "\n" for state in states)
    program = HYPERSHIFT.read() / "hash"
    done = subprocess.run(
        [program], input=text, capture_output=True, check=True, text=True, timeout=300
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _drop_unknown(text: str) -> str:
    return text.replace("  unknown: 1\n", "")


def test_plan_names_a_cause_exactly_when_the_hash_changes() -> None:
    if not (HYPERSHIFT.read() / "hash").exists():
        pytest.skip(f"{HYPERSHIFT.name}: the directory has no hash")
    choose, states = random.Random(35), []
    for _ in range(COUNT):
        version = choose.choice(VERSIONS)
        pool = make_pool(release={"image": f"quay.io/r:{version}"})
        maps = [config_map(*make_documents(choose), name=name) for name in "ab"]
        cluster = hosted.make_hosted_cluster(configuration=choose.choice(CONFIGURATIONS))
        before = [hosted.with_status(pool, version=version), cluster, *maps]
        after = change_state(choose, before)
        for document in before:
            # Of a field that the file lacks, kubectl apply removes what it applied before.
            notes = document["metadata"].setdefault("annotations", {})
            notes[LAST_APPLIED] = json.dumps(document)
        states += [before, after]
    answers = ask_hashes(states)
    outcomes: Counter[str] = Counter()
    for before, after, was, now in zip(
        states[::2], states[1::2], answers[::2], answers[1::2], strict=True
    ):
        (planned, *_) = hosted_plan.plan_pools(
            list_objects(*before), list_objects(*after), {}, now=NOW
        )
        place = json.dumps([before, after])
        if "EOF" in (was.get("error"), now.get("error")):
            # Without any document; those of a real control plane always have some.
            outcomes["empty"] += 1
            continue
        if "error" in now:
            # A change of nothing stays one.
            assert planned.effect == "Blocked" or was == now, f"{now} {place}"
            outcomes["refused"] += 1
            continue
        if "error" in was:
            outcomes["corrected"] += 1
            continue
        names = [entry["name"] for entry in after[0]["spec"].get("config") or ()]
        by_name = {each["metadata"]["name"]: each for each in after[2:]}
        named = {name: by_name[name] for name in names}
        found = config_documents.read_config_maps(named, len(names))
        if len(names) == len({*names}):
            # HyperShift drops an unknown field of most kinds, which is a problem of the plan.
            texts = "\n---\n".join(one.text for one in found.documents)
            assert _drop_unknown(texts) == _drop_unknown(now["config"]), place
            outcomes["equal texts"] += 1
        has_cause = bool(planned.causes)
        if was["hash"] != now["hash"]:
            assert has_cause, place
            outcomes["rolls"] += 1
        elif has_cause:
            outcomes[f"cautious: {planned.causes[0]}"] += 1
        else:
            outcomes["nothing"] += 1
    cautious = sum(count for name, count in outcomes.items() if name.startswith("cautious"))
    # An empty proxy, the default stream, and a TLS profile before 4.23 change no hash.
    assert cautious * 10 < COUNT, outcomes
