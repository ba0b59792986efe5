"""Random image policies become the files that the machine-config-controller's bootstrap writes.

TREENAIL_TEST_MCO_POLICIES is the number of policies of each kind (default: 500), three of each in a
cluster; TREENAIL_TEST_MCO_FIRST_POLICY the first seed. The program renders one cluster in a run, so
that few seeds are in one test.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.config.generated import random_policies
from tests.mco import bootstrap, operator, programs
from treenail.api.machineconfig import MachineConfig
from treenail.config import node_paths
from treenail.config.generated import policies, registries, sources
from treenail.errors import ConfigError

pytestmark = [pytest.mark.process, pytest.mark.limit(850)]

PER_CLUSTER = 3
CLUSTERS = programs.split_seeds(
    programs.read_count("TREENAIL_TEST_MCO_FIRST_POLICY", 0),
    -(-programs.read_count("TREENAIL_TEST_MCO_POLICIES", 500) // PER_CLUSTER),
    20,
)
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

TEMPLATES = {policies.POLICY_PATH: POLICY, node_paths.REGISTRIES_CONF: REGISTRIES_CONF}
FEATURES = ("SigstoreImageVerification", "SigstoreImageVerificationPKI")
PATHS = (policies.POLICY_PATH, policies.ATTACHMENTS_PATH, f"{policies.NAMESPACES_PATH}/")

Files = dict[str, str]


@pytest.mark.parametrize("seeds", CLUSTERS, ids=programs.name_seeds)
def test_random_policies_become_the_files_of_the_mco(seeds: range, tmp_path: Path) -> None:
    differences = {}
    tally: Counter[str] = Counter()
    for seed in seeds:
        documents = random_policies.make_case(seed)
        ours, theirs = generate(documents), ask(tmp_path / f"{seed}", documents)
        if ours == theirs:
            tally["equal"] += 1
        elif isinstance(theirs, str) and (isinstance(ours, str) or ONLY_THE_MCO_REFUSES in theirs):
            tally["both refuse" if isinstance(ours, str) else "only the MCO refuses"] += 1
        else:
            differences[seed] = (ours, theirs)
    sys.stdout.write(f"{dict(tally)}\n")
    assert differences == {}


def ask(directory: Path, documents: list[Any]) -> Files | str:
    """Return the files about policies as the MCO renders them, or its error."""
    objects = [operator.build_pool("worker"), *documents]
    try:
        pools = bootstrap.run_bootstrap(
            directory, TEMPLATES, objects, features=FEATURES, releaseImage=RELEASE
        )
    except bootstrap.BootstrapError as error:
        return str(error)
    files = pools["worker"].files
    return {path: text for path, text in files.items() if path.startswith(PATHS)}


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
    # The rendered config has the file of the template too.
    return {policies.POLICY_PATH: POLICY} | {file.path: file.contents for file in generated}
