"""Random ContainerRuntimeConfigs, mirror sets and image configs become the files of the MCO.

TREENAIL_TEST_MCC names the machine-config-controller. TREENAIL_TEST_MCO_RUNTIMES is the number of
ContainerRuntimeConfigs (default: 500), TREENAIL_TEST_MCO_MIRRORS that of mirror sets, three in a
cluster and mostly beside an image config (default: 500), TREENAIL_TEST_MCO_FIRST_CLUSTER the first
seed of both. The program renders one cluster in a run, and stops at the first object that it
refuses, so that few seeds are in one test.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.config.generated import runtime_objects
from tests.mco import bootstrap, operator, programs
from treenail.config.generated import container_runtime, registries, sources
from treenail.errors import ConfigError

pytestmark = [pytest.mark.process, pytest.mark.limit(850)]

FIRST = programs.read_count("TREENAIL_TEST_MCO_FIRST_CLUSTER", 0)
POOLS = programs.split_seeds(FIRST, programs.read_count("TREENAIL_TEST_MCO_RUNTIMES", 500), 50)
PER_CLUSTER = 3
CLUSTER_COUNT = -(-programs.read_count("TREENAIL_TEST_MCO_MIRRORS", 500) // PER_CLUSTER)
CLUSTERS = programs.split_seeds(FIRST, CLUSTER_COUNT, 20)
STRICTER = re.compile(
    "beside the source|never update again|not blocked, found|expected mirrors for|at most 92233|"
    "mirrors.*with a dot or port"
)
"""What the MCO accepts although no pull, or no container, can succeed."""
RELEASES = ("registry.lab.example/release@sha256:", "a.example/ns/img@sha256:", "c.a.example/ns:")

Files = dict[str, str]


def ask(
    directory: Path, documents: Iterable[Any], **settings: Any
) -> dict[str, bootstrap.RenderedPool] | str:
    """Return the pools as the MCO renders them, or its error."""
    try:
        return bootstrap.run_bootstrap(
            directory,
            runtime_objects.BASE,
            documents,
            features=["AdditionalStorageConfig"],
            **settings,
        )
    except bootstrap.BootstrapError as error:
        return str(error)


def generate_runtime(document: Any) -> Files | str:
    (source,) = runtime_objects.read(document)
    try:
        container_runtime.check_runtime_config(source)
        base = runtime_objects.build_base()
        files = container_runtime.generate_runtime_files(source, base)
    except ConfigError as error:
        return str(error)
    return {file.path: file.contents for file in files}


def generate_registries(documents: list[Any], facts: sources.ClusterFacts) -> Files | str:
    found = runtime_objects.read(*documents)
    try:
        for source in found:
            registries.check_registries(source, found, facts)
        base = runtime_objects.build_base()
        files = registries.generate_registry_files(found, base, facts)
    except ConfigError as error:
        return str(error)
    return {file.path: file.contents for file in files}


def select(pool: bootstrap.RenderedPool) -> Files:
    """Return the files that only ours are compared with; policies are other tests'."""
    return {
        path: text
        for path, text in pool.files.items()
        if path.startswith(("/etc/crio/", "/etc/containers/")) and "polic" not in path
    }


@pytest.mark.parametrize("seeds", POOLS, ids=programs.name_seeds)
def test_random_runtime_configs_become_the_files_of_the_mco(seeds: range, tmp_path: Path) -> None:
    documents = {
        seed: runtime_objects.make_runtime(Random(seed), f"c{seed}", f"p{seed}", stores=True)
        for seed in seeds
    }
    ours = {seed: generate_runtime(document) for seed, document in documents.items()}
    tally: Counter[str] = Counter()
    for seed, found in ours.items():
        if isinstance(found, str) and not STRICTER.search(found):
            # The program stops at the first object that it refuses.
            answer = ask(tmp_path / f"{seed}", [operator.build_pool(f"p{seed}"), documents[seed]])
            assert isinstance(answer, str), found
            tally["both refuse"] += 1
        elif isinstance(found, str):
            tally["refused by us alone"] += 1
    good = {seed: found for seed, found in ours.items() if not isinstance(found, str)}
    answers = ask(
        tmp_path / "all",
        [
            operator.build_pool("worker"),
            *(operator.build_pool(f"p{seed}") for seed in good),
            *(documents[seed] for seed in good),
        ],
    )
    assert not isinstance(answers, str), answers
    differences = {}
    for seed, found in good.items():
        pool = answers[f"p{seed}"]
        is_named = f"99-p{seed}-generated-containerruntime" in pool.sources
        # The pool selects its own configs alone, and not the files of the templates.
        is_equal = is_named and select(pool) == found
        if not is_equal:
            differences[seed] = (found, select(pool))
        tally["equal" if is_equal else "differ"] += 1
    sys.stdout.write(f"{dict(tally)}\n")
    assert differences == {}


@pytest.mark.parametrize("seeds", CLUSTERS, ids=programs.name_seeds)
def test_random_mirrors_become_the_files_of_the_mco(seeds: range, tmp_path: Path) -> None:
    differences = {}
    tally: Counter[str] = Counter()
    for seed in seeds:
        documents = runtime_objects.make_cluster(seed)
        release = RELEASES[seed % len(RELEASES)]
        image = f"{release}{'0' * 64 if '@' in release else 'v1'}"
        found = generate_registries(documents, sources.ClusterFacts(release_image=image))
        answers = ask(
            tmp_path / f"{seed}", [operator.build_pool("worker"), *documents], releaseImage=image
        )
        if isinstance(found, str):
            is_documented = isinstance(answers, str) or STRICTER.search(found)
            if not is_documented:
                differences[seed] = (found, answers)
            tally["both refuse" if isinstance(answers, str) else "refused by us alone"] += 1
        elif isinstance(answers, str):
            differences[seed] = (found, answers)
        else:
            pool = answers["worker"]
            is_named = "99-worker-generated-registries" in pool.sources
            is_equal = is_named and select(pool) == runtime_objects.BASE | found
            if not is_equal:
                differences[seed] = (found, select(pool))
            tally["equal" if is_equal else "differ"] += 1
    sys.stdout.write(f"{dict(tally)}\n")
    assert differences == {}
