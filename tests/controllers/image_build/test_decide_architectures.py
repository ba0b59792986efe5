"""Decisions about images for nodes of several architectures: one Job for each."""

from dataclasses import replace

import pytest

from tests.controllers.image_build.world import Killed, World
from treenail.api.machineosbuild import BuildState
from treenail.controllers.image_build.build_facts import AppendConfig, BuildFacts, make_job_name
from treenail.image.build_result import BuildReason

BOTH = ("amd64", "arm64")
AMD, ARM = (f"build-worker-c00-{name}" for name in BOTH)


def world(content: str = "c0", architectures: tuple[str, ...] = BOTH) -> World:
    found = World()
    found.add_config("worker", content=content, architectures=architectures)
    return found


def started() -> World:
    found = world()
    found.settle("worker")
    return found


def only_build(found: World) -> BuildFacts:
    (build,) = found.builds.values()
    return build


def created_jobs(found: World) -> int:
    return len([line for line in found.log if "CreateJob" in line])


def accept(found: World, job: str) -> None:
    """Let a Job succeed, and the registry confirm its image."""
    found.finish_job(job)
    found.settle("worker")
    found.answer()
    found.settle("worker")


def test_each_architecture_gets_its_job_at_once() -> None:
    found = started()
    assert list(found.jobs) == [AMD, ARM]
    build = only_build(found)
    assert build.state is BuildState.PREPARED
    assert build.message == (
        f"Job {AMD} waits for a node of architecture amd64; "
        f"Job {ARM} waits for a node of architecture arm64"
    )
    assert {name: each.job for name, each in build.systems.items()} == {"amd64": AMD, "arm64": ARM}


def test_image_waits_for_every_architecture() -> None:
    found = started()
    found.run_job(ARM)
    accept(found, AMD)
    build = only_build(found)
    assert (build.state, build.message) == (BuildState.BUILDING, f"Job {ARM} runs build")
    assert build.job == ARM
    assert found.asked == []
    accept(found, ARM)
    ((_, question),) = found.asked
    assert isinstance(question, AppendConfig)
    assert [name for name, _ in question.sources] == ["amd64", "arm64"]
    found.answer()
    found.settle("worker")
    assert only_build(found).state is BuildState.SUCCEEDED
    assert found.platforms[found.configs["worker"].pull_spec] == BOTH
    assert found.jobs == {}
    assert created_jobs(found) == 2


def test_image_without_containerfile_needs_no_job() -> None:
    found = world("")
    found.converge()
    assert created_jobs(found) == 0
    assert found.platforms[found.configs["worker"].pull_spec] == BOTH


def test_user_error_of_one_architecture_fails_the_build_and_names_it() -> None:
    found = started()
    found.fail_job(ARM, BuildReason.INSTRUCTION_FAILED)
    decision = found.settle("worker")
    build = only_build(found)
    assert (build.state, build.reason) == (BuildState.FAILED, BuildReason.INSTRUCTION_FAILED)
    assert build.message.startswith("line 3: for arm64: it failed; ")
    assert decision.requeue_after_s is None
    assert list(found.jobs) == [ARM], "the other Job runs for nothing"


def test_retry_concerns_only_the_architecture_that_failed() -> None:
    found = started()
    found.run_job(AMD)
    found.fail_job(ARM, BuildReason.REGISTRY_BUSY)
    decision = found.settle("worker")
    assert decision.requeue_after_s == 60.0
    assert "for arm64: it failed; attempt 1 failed; next attempt at" in only_build(found).message
    accept(found, AMD)
    assert only_build(found).systems["amd64"].image
    assert only_build(found).reason == BuildReason.REGISTRY_BUSY
    found.now += 60.0
    found.settle("worker")
    assert make_job_name("worker-c00", 2, "arm64") in found.jobs
    assert make_job_name("worker-c00", 2, "amd64") not in found.jobs
    found.converge()
    assert only_build(found).state is BuildState.SUCCEEDED
    assert created_jobs(found) == 3


def test_outage_that_ends_both_jobs_counts_as_one_attempt() -> None:
    found = started()
    found.fail_job(AMD, BuildReason.REGISTRY_UNREACHABLE)
    found.settle("worker")
    found.fail_job(ARM, BuildReason.REGISTRY_UNREACHABLE)
    decision = found.settle("worker")
    assert only_build(found).report.attempts == 1
    assert decision.requeue_after_s == 60.0
    found.now += 60.0
    found.settle("worker")
    running = sorted(name for name, job in found.jobs.items() if job.is_running)
    assert running == [f"{AMD}-2", f"{ARM}-2"]


def test_user_error_during_the_wait_for_a_retry_ends_the_build() -> None:
    found = started()
    found.fail_job(AMD, BuildReason.REGISTRY_UNREACHABLE)
    found.settle("worker")
    found.fail_job(ARM, BuildReason.INSTRUCTION_FAILED)
    found.settle("worker")
    assert only_build(found).state is BuildState.FAILED


def test_architecture_without_a_node_for_builds_is_reported() -> None:
    found = started()
    found.run_job(AMD)
    found.jobs[ARM] = replace(found.jobs[ARM], unschedulable="0/2 nodes are available")
    found.settle("worker")
    build = only_build(found)
    assert (build.state, build.reason) == (BuildState.BUILDING, "Unschedulable")
    assert f"Job {ARM} waits for a node of architecture arm64: 0/2 nodes" in build.message
    conditions = {each.type: each for each in found.configs["worker"].conditions}
    assert conditions["BuildProgressing"].reason == "Unschedulable"
    found.converge()
    assert only_build(found).state is BuildState.SUCCEEDED


def test_deleted_job_of_one_architecture_cancels_the_build() -> None:
    found = started()
    found.delete_job(ARM)
    found.settle("worker")
    build = only_build(found)
    assert (build.state, build.reason) == (BuildState.INTERRUPTED, BuildReason.CANCELLED)
    assert ARM in build.message
    assert found.jobs == {}


def test_pools_share_the_jobs_of_their_common_architectures() -> None:
    found = world(architectures=("amd64",))
    found.converge()
    found.add_config("infra", content="c0", architectures=BOTH)
    found.converge()
    assert created_jobs(found) == 2
    assert found.platforms[found.configs["infra"].pull_spec] == BOTH


def test_node_of_a_new_architecture_gets_an_image_that_has_it() -> None:
    found = world(architectures=("amd64",))
    found.converge()
    before = found.configs["worker"].pull_spec
    found.change("worker", architectures=BOTH)
    found.settle("worker")
    assert found.configs["worker"].pull_spec == before
    found.converge()
    assert found.platforms[found.configs["worker"].pull_spec] == BOTH
    assert created_jobs(found) == 2, "the image of the first architecture is used again"


def test_last_node_of_an_architecture_that_leaves_changes_nothing() -> None:
    found = world()
    found.converge()
    found.log.clear()
    found.change("worker", architectures=("arm64",))
    found.converge()
    assert not [line for line in found.log if "SetConfigStatus" not in line]


def test_failed_build_is_made_again_without_the_architecture_that_left() -> None:
    found = started()
    found.fail_job(ARM, BuildReason.INSTRUCTION_FAILED)
    found.settle("worker")
    found.change("worker", architectures=("amd64",))
    found.converge()
    assert only_build(found).state is BuildState.SUCCEEDED


@pytest.mark.parametrize("is_before", [True, False])
def test_kill_at_each_write_leads_to_the_same_end(is_before: bool) -> None:
    whole = world()
    whole.converge()
    writes = len([line for line in whole.log if "CallRegistry" not in line])
    for number in range(writes):
        found = world()
        found.kill_at, found.kills_before = number, is_before
        with pytest.raises(Killed):
            found.converge()
        found.converge()
        assert found.platforms[found.configs["worker"].pull_spec] == BOTH, number
        assert list(found.builds) == list(whole.builds)
        assert found.jobs == {}
        assert created_jobs(found) == 2, number
