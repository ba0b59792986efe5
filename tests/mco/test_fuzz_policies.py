"""Random image policies become the files that the MCO makes of them.

TREENAIL_TEST_MCO_POLICY names a program around the functions of its container runtime config
controller. It reads one JSON object a line: ``objects``, ``release`` (the image of the release),
and the templates ``policy`` and ``registries``. It answers one a line: ``files`` (path and contents
of policy.json and what follows it) or ``error``. TREENAIL_TEST_MCO_POLICIES is the number of
policies of each kind (default: 500), TREENAIL_TEST_MCO_FIRST_POLICY the first seed.
"""

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.config.generated import random_policies
from tests.mco import operator, programs
from treenail.api.machineconfig import MachineConfig
from treenail.config.generated import policies, registries, sources
from treenail.errors import ConfigError

pytestmark = [pytest.mark.process, pytest.mark.limit(850)]

PROGRAM = programs.Variable(
    "TREENAIL_TEST_MCO_POLICY", "a program around the functions for image policies"
)
COUNT = programs.read_count("TREENAIL_TEST_MCO_POLICIES", 500)
FIRST = programs.read_count("TREENAIL_TEST_MCO_FIRST_POLICY", 0)
PER_CASE = 3
RELEASE = f"registry.lab.example/release@sha256:{'0' * 64}"
FACTS = sources.ClusterFacts(release_image=RELEASE)
REGISTRIES_CONF = (
    'unqualified-search-registries = ["a.example", "docker.io"]\nshort-name-mode = ""\n'
)
POLICY = """\
{
    "default": [{"type": "insecureAcceptAnything"}],
    "transports": {"docker-daemon": {"": [{"type":"insecureAcceptAnything"}]}}
}"""
# Here the MCO writes nothing, for no policy: a mirror makes no name of an image. We write the rest.
ONLY_THE_MCO_REFUSES = "rewriting reference: "

Files = list[tuple[str, str]]


def test_random_policies_become_the_files_of_the_mco() -> None:
    seeds = range(FIRST, FIRST + -(-COUNT // PER_CASE))
    cases = {seed: random_policies.make_case(seed) for seed in seeds}
    differences = {}
    tally: Counter[str] = Counter()
    for (seed, documents), theirs in zip(cases.items(), ask(cases.values()), strict=True):
        ours = generate(documents)
        if ours == theirs:
            tally["equal"] += 1
        elif isinstance(theirs, str) and (isinstance(ours, str) or ONLY_THE_MCO_REFUSES in theirs):
            tally["both refuse" if isinstance(ours, str) else "only the MCO refuses"] += 1
        else:
            differences[seed] = (ours, theirs)
    sys.stdout.write(f"{dict(tally)}\n")
    assert differences == {}


def ask(cases: Any) -> list[Files | str]:
    common = {"release": RELEASE, "policy": POLICY, "registries": REGISTRIES_CONF}
    text = "".join(json.dumps({**common, "objects": documents}) + "\n" for documents in cases)
    done = subprocess.run([PROGRAM.read()], input=text, capture_output=True, text=True,
                          check=True, timeout=600)  # fmt: skip
    answers = map(json.loads, done.stdout.splitlines())
    return [each.get("error") or [(path, text) for path, text in each["files"]] for each in answers]


def generate(documents: list[Any]) -> Files | str:
    found = [sources.SourceObject.from_json(document) for document in documents]
    files = [operator.build_file(policies.POLICY_PATH, POLICY)]
    ignition = operator.build_ignition(storage={"files": files})
    config = operator.build_config("worker", "01-worker", config=ignition)
    base = sources.BaseFiles([MachineConfig.from_json(config)])
    try:
        for source in found:
            if source.kind in (policies.CLUSTER_KIND, policies.NAMESPACE_KIND):
                policies.check_policy(source, found, FACTS)
        known = registries.list_registries(found, REGISTRIES_CONF, FACTS)
        generated = policies.generate_policy_files(found, base, FACTS, known)
    except ConfigError as error:
        return str(error)
    return [(file.path, file.contents) for file in generated]
