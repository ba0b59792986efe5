"""The stage ``bootstrap`` dies at each of its points, and ends in the same cluster."""

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.daemon import walk_budget
from tests.fixtures.files import read_files
from tests.installer.directories import OUTPUTS, make_config, make_pool, write_manifest
from tests.installer.dying import DeathError, FillingDisk, FullDisk, Fuse
from tests.installer.stages import Outside, run_stage
from treenail.errors import ConfigError, FileError

POOLS = ("arbiter", "master", "worker")


def make_root(path: Path) -> Path:
    write_manifest(path, "manifests/pools.yaml", *map(make_pool, POOLS))
    configs = (make_config(f"00-{name}", name) for name in POOLS)
    write_manifest(path, "manifests/configs.yaml", *configs)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "cluster")


def read_status(root: Path) -> dict[str, object]:
    return json.loads((root / ".treenail/status.json").read_text())


def test_death_at_each_point_ends_in_the_same_cluster(root: Path) -> None:
    reference, fuse = Outside(), Fuse()
    run_stage(root, reference, fuse)
    expected, rendered = reference.read_result(), read_files(root, *OUTPUTS[:2])
    assert len(reference.builds) == 2
    # More than the 100 runs of each of its steps: files, images, cluster.
    assert fuse.passed > 100
    clean = root.parent / "clean"
    for point in range(1, fuse.passed + 1):
        shutil.rmtree(clean, ignore_errors=True)
        make_root(clean)
        outside = Outside()
        with pytest.raises(DeathError):
            run_stage(clean, outside, Fuse(point))
        run_stage(clean, outside)
        assert outside.read_result() == expected, f"after a death at point {point}"
        assert len(outside.builds) == 2, f"after a death at point {point}"
        assert read_files(clean, *OUTPUTS[:2]) == rendered
        assert read_status(clean)["phase"] == "complete"


@pytest.mark.parametrize("seed", range(10))
def test_several_deaths_in_a_row_end_in_the_same_cluster(root: Path, seed: int) -> None:
    reference = Outside()
    run_stage(make_root(root.parent / "reference"), reference)
    source, outside, deaths = random.Random(seed), Outside(), 0
    for _ in range(10):
        try:
            run_stage(root, outside, Fuse(source.randint(1, 60)))
        except DeathError:
            deaths += 1
    run_stage(root, outside)
    assert deaths > 3
    assert outside.read_result() == reference.read_result()
    assert len(outside.builds) == 2


def test_start_after_the_end_changes_nothing(root: Path) -> None:
    outside = Outside()
    run_stage(root, outside)
    before = outside.read_result()
    run_stage(root, outside)
    assert outside.read_result() == before
    assert len(outside.builds) == 2


def test_changed_manifest_after_a_death_builds_once_more(root: Path) -> None:
    outside = Outside()
    with pytest.raises(DeathError):
        run_stage(root, outside, Fuse(60))
    write_manifest(root, "manifests/more.yaml", make_config("50-master", "master", fips=True))
    run_stage(root, outside)
    assert len([key for key in outside.builds if key.startswith("arbiter")]) == 1
    assert len({key for key in outside.builds if key.startswith("master")}) <= 2
    assert read_status(root)["phase"] == "complete"


def test_failed_build_is_published_and_serves_nothing(root: Path) -> None:
    outside = Outside()
    failure = ConfigError("line 3 of the Containerfile: unknown instruction", remedy="correct it")
    with pytest.raises(ConfigError):
        run_stage(root, outside, failure=failure)
    status = read_status(root)
    assert (status["phase"], status["is_serving"]) == ("failed", False)
    found = status["failure"]
    assert isinstance(found, dict)
    assert (found["step"], found["reason"], found["remedy"]) == (
        "build:arbiter", str(failure), "correct it",
    )  # fmt: skip
    assert outside.served == []
    # After the fix the installation continues.
    run_stage(root, outside)
    assert read_status(root)["phase"] == "complete"


def test_full_disk_fails_with_the_remedy_and_continues_later(root: Path) -> None:
    outside, files = Outside(), FullDisk()
    files.is_full = True
    with pytest.raises(FileError, match="No space left on device") as caught:
        run_stage(root, outside, files=files)
    assert "df -h" in caught.value.remedy
    files.is_full = False
    run_stage(root, outside, files=files)
    assert len(outside.builds) == 2


@walk_budget.exhaustive
def test_disk_that_fills_up_at_any_write_ends_in_the_same_cluster(root: Path) -> None:
    reference, counting = Outside(), FillingDisk()
    run_stage(make_root(root.parent / "reference"), reference, files=counting)
    expected = reference.read_result()
    clean, remedies = root.parent / "clean", []
    for number in walk_budget.sample(range(1, counting.writes + 1)):
        shutil.rmtree(clean, ignore_errors=True)
        make_root(clean)
        outside = Outside()
        try:
            run_stage(clean, outside, files=FillingDisk(number))
        except FileError as error:
            remedies.append(error.remedy)
        run_stage(clean, outside)
        assert outside.read_result() == expected, f"full at write {number}"
        assert len(outside.builds) == 2, f"full at write {number}"
        assert read_files(clean, *OUTPUTS[:2]) == read_files(
            root.parent / "reference", *OUTPUTS[:2]
        )
        assert read_status(clean)["phase"] == "complete"
    assert all("df -h" in each for each in remedies)
