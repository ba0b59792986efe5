"""Decisions about image builds: single situations, and random walks that check every write."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.controllers.image_build.world import Killed, World
from treenail.api.machineosbuild import BuildState
from treenail.controllers.image_build.build_facts import (
    AppendConfig,
    BuildFacts,
    CallRegistry,
    CreateJob,
    JobState,
    ReportPool,
    make_job_name,
)
from treenail.controllers.image_build.decide import IMAGE_CHECK_S
from treenail.controllers.pools.image_tags import ImageProblem
from treenail.image.build_result import BuildReason

RETRIED = [BuildReason.REGISTRY_BUSY, BuildReason.EVICTED, BuildReason.PUSH_LOGIN_REFUSED]
FINAL = [BuildReason.INSTRUCTION_FAILED, BuildReason.PUSH_DENIED, BuildReason.CONTAINERFILE_INVALID]


def world(content: str = "c0", *names: str) -> World:
    found = World()
    for name in names or ("worker",):
        found.add_config(name, content=content)
    return found


def built(content: str = "c0", *names: str) -> World:
    found = world(content, *names)
    found.converge()
    return found


def conditions(found: World, name: str = "worker") -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in found.configs[name].conditions}


def only_build(found: World) -> BuildState:
    (build,) = found.builds.values()
    return build.state


def served(found: World, name: str = "worker") -> tuple[str, str]:
    return found.images[found.configs[name].pull_spec]


def test_config_without_containerfile_needs_no_job() -> None:
    found = world("")
    found.settle("worker")
    assert [type(question) for _, question in found.asked] == [AppendConfig]
    found.answer()
    found.settle("worker")
    assert only_build(found) is BuildState.SUCCEEDED
    assert served(found) == ("", "rendered-worker-0")
    assert found.jobs == {}
    assert conditions(found) == {
        "Accepted": ("True", "Accepted"),
        "ImageReady": ("True", "Ready"),
        "BuildProgressing": ("False", "Succeeded"),
    }


def test_containerfile_is_built_by_one_job() -> None:
    found = world()
    found.settle("worker")
    (job,) = found.jobs
    assert job == "build-worker-c00"
    assert only_build(found) is BuildState.PREPARED
    found.run_job(job)
    found.settle("worker")
    assert only_build(found) is BuildState.BUILDING
    found.converge()
    assert only_build(found) is BuildState.SUCCEEDED
    assert served(found) == ("c0", "rendered-worker-0")
    assert found.jobs == {}


def test_finished_build_at_rest_asks_and_writes_nothing() -> None:
    found = built()
    found.log.clear()
    assert found.sync("worker").actions == ()
    assert found.sync("worker").requeue_after_s is None


def test_change_of_files_alone_needs_no_job() -> None:
    found = built()
    found.change("worker", config="rendered-worker-1")
    found.log.clear()
    found.converge()
    assert served(found) == ("c0", "rendered-worker-1")
    assert not [line for line in found.log if "CreateJob" in line]


def test_pools_with_the_same_key_share_one_job() -> None:
    found = built("c0", "worker", "infra", "gpu")
    assert len([line for line in found.log if "CreateJob" in line]) == 1
    assert {served(found, name) for name in found.configs} == {("c0", "rendered-worker-0")}
    assert len(found.builds) == 3


@pytest.mark.parametrize("reason", FINAL)
def test_user_error_ends_the_build_with_its_remedy(reason: BuildReason) -> None:
    found = world()
    found.settle("worker")
    found.fail_job("build-worker-c00", reason)
    decision = found.settle("worker")
    (build,) = found.builds.values()
    assert (build.state, build.reason) == (BuildState.FAILED, reason)
    assert build.message.startswith("line 3: it failed; ")
    assert decision.requeue_after_s is None
    assert "build-worker-c00" in found.jobs
    assert found.pool_reports["worker"].reason == "BuildFailed"
    assert conditions(found)["ImageReady"] == ("False", reason)


@pytest.mark.parametrize("reason", RETRIED)
def test_external_failure_is_retried_in_new_jobs(reason: BuildReason) -> None:
    found = world()
    found.settle("worker")
    delays = []
    for attempt in range(1, 6):
        found.fail_job(make_job_name("worker-c00", attempt), reason)
        decision = found.settle("worker")
        (build,) = found.builds.values()
        assert (build.state, build.reason) == (BuildState.BUILDING, reason)
        assert f"attempt {attempt} failed; next attempt at " in build.message
        assert decision.requeue_after_s is not None
        delays.append(decision.requeue_after_s)
        found.now += decision.requeue_after_s
        found.settle("worker")
    assert delays == [60.0, 300.0, 900.0, 3600.0, 3600.0]
    assert list(found.jobs) == ["build-worker-c00-5", "build-worker-c00-6"]
    found.converge()
    assert only_build(found) is BuildState.SUCCEEDED


def test_refused_push_is_found_without_a_job() -> None:
    found = world()
    found.push_failure = BuildReason.PUSH_LOGIN_REFUSED
    decision = found.settle("worker")
    (build,) = found.builds.values()
    assert (build.state, build.reason) == (BuildState.BUILDING, BuildReason.PUSH_LOGIN_REFUSED)
    assert found.jobs == {}
    assert decision.requeue_after_s == 60.0
    found.push_failure = None
    found.now += 60.0
    found.settle("worker")
    assert list(found.jobs) == ["build-worker-c00-2"]
    found.converge()
    assert only_build(found) is BuildState.SUCCEEDED


def test_denied_push_ends_the_build_without_a_job() -> None:
    found = world()
    found.push_failure = BuildReason.PUSH_DENIED
    found.settle("worker")
    assert only_build(found) is BuildState.FAILED
    assert found.jobs == {}


def test_external_failure_ends_the_build_after_a_day() -> None:
    found = world()
    began = found.now
    for attempt in range(1, 40):
        found.settle("worker")
        found.fail_job(make_job_name("worker-c00", attempt), BuildReason.REGISTRY_FULL)
        decision = found.settle("worker")
        if decision.requeue_after_s is None:
            break
        found.now += decision.requeue_after_s
    assert only_build(found) is BuildState.FAILED
    assert 23 * 3600 <= found.now - began <= 25 * 3600


def test_out_of_memory_is_retried_once_and_ends_the_running_job() -> None:
    found = world()
    found.settle("worker")
    found.run_job("build-worker-c00")
    job = found.jobs["build-worker-c00"]
    found.fail_job(job.name, BuildReason.OUT_OF_MEMORY)
    found.jobs[job.name] = replace(found.jobs[job.name], state=JobState.BUILDING)
    decision = found.settle("worker")
    assert decision.requeue_after_s == 60.0
    assert found.jobs == {}
    found.now += 60.0
    found.settle("worker")
    found.fail_job("build-worker-c00-2", BuildReason.OUT_OF_MEMORY)
    found.settle("worker")
    assert only_build(found) is BuildState.FAILED


def test_new_key_ends_the_running_build_as_superseded() -> None:
    found = world()
    found.settle("worker")
    found.run_job("build-worker-c00")
    found.settle("worker")
    found.change("worker", content="c1")
    found.settle("worker")
    assert found.builds["worker-c00"].reason == BuildReason.SUPERSEDED
    assert found.builds["worker-c00"].state is BuildState.INTERRUPTED
    assert list(found.jobs) == ["build-worker-c10"]


def test_late_success_of_superseded_job_is_never_served() -> None:
    found = world()
    found.settle("worker")
    found.run_job("build-worker-c00")
    found.change("worker", content="c1")
    decision = found.observe("worker")
    found.finish_job("build-worker-c00")
    assert decision.jobs[0].state is JobState.BUILDING
    found.converge()
    assert served(found) == ("c1", "rendered-worker-0")
    assert found.builds["worker-c00"].state is BuildState.INTERRUPTED


def test_job_that_ended_before_its_build_was_superseded_is_deleted() -> None:
    found = world()
    found.settle("worker")
    found.finish_job("build-worker-c00")
    found.change("worker", content="c1")
    found.settle("worker")
    assert found.builds["worker-c00"].reason == BuildReason.SUPERSEDED
    assert list(found.jobs) == ["build-worker-c10"]


def test_new_config_of_the_same_key_takes_over_the_running_job() -> None:
    found = world()
    found.settle("worker")
    found.run_job("build-worker-c00")
    found.change("worker", config="rendered-worker-1")
    found.settle("worker")
    assert found.builds["worker-c00"].reason == BuildReason.SUPERSEDED
    assert list(found.jobs) == ["build-worker-c00"]
    assert found.builds["worker-c01"].job == "build-worker-c00"
    found.converge()
    assert served(found) == ("c0", "rendered-worker-1")
    assert len([line for line in found.log if "CreateJob" in line]) == 1


def test_deleted_job_cancels_the_build_until_a_rebuild() -> None:
    found = world()
    found.settle("worker")
    found.delete_job("build-worker-c00")
    found.settle("worker")
    (build,) = found.builds.values()
    assert (build.state, build.reason) == (BuildState.INTERRUPTED, BuildReason.CANCELLED)
    assert "kubectl annotate machineosconfig worker " in build.message
    assert found.sync("worker").actions == ()
    found.rebuild("worker")
    found.converge()
    assert only_build(found) is BuildState.SUCCEEDED


def test_second_config_of_a_pool_reports_nothing_on_the_pool() -> None:
    found = world("c0", "worker", "other")
    found.problems["other"] = ImageProblem("PoolTaken", "worker builds for the pool")
    decision = found.sync("other")
    assert conditions(found, "other")["Accepted"] == ("False", "PoolTaken")
    assert not any(isinstance(each, ReportPool) for each in decision.actions)


def test_wrong_digest_is_not_accepted() -> None:
    found = world()
    found.settle("worker")
    found.finish_job("build-worker-c00")
    (image,) = [each for each in found.images if each.startswith("registry.example.com/os")]
    del found.images[image]
    found.settle("worker")
    found.answer()
    decision = found.settle("worker")
    (build,) = found.builds.values()
    assert (build.state, build.reason) == (BuildState.BUILDING, BuildReason.DIGEST_MISMATCH)
    assert decision.requeue_after_s == 60.0


def test_registry_outage_during_the_verification_costs_no_job() -> None:
    found = world()
    found.settle("worker")
    found.finish_job("build-worker-c00")
    found.settle("worker")
    found.answer(BuildReason.REGISTRY_UNREACHABLE)
    decision = found.settle("worker")
    assert decision.requeue_after_s == 60.0
    found.converge()
    assert only_build(found) is BuildState.SUCCEEDED
    assert len([line for line in found.log if "CreateJob" in line]) == 1


def test_rebuild_builds_again_and_keeps_the_old_image_meanwhile() -> None:
    found = built()
    before = found.configs["worker"].pull_spec
    found.rebuild("worker")
    found.settle("worker")
    assert not found.configs["worker"].rebuild_requested
    assert found.configs["worker"].pull_spec == before
    assert before in found.images
    assert list(found.jobs) == ["build-worker-c00"]
    found.converge()
    assert found.configs["worker"].pull_spec != before
    assert found.configs["worker"].rebuild_of == ""


def test_failed_builds_stay_up_to_three() -> None:
    found = world()
    for number in range(6):
        found.change("worker", content=f"c{number}")
        found.settle("worker")
        found.fail_job(f"build-worker-c{number}0", BuildReason.INSTRUCTION_FAILED)
        found.settle("worker")
    assert list(found.builds) == ["worker-c20", "worker-c30", "worker-c40", "worker-c50"]


def test_problem_starts_no_build_and_is_looked_at_again() -> None:
    found = world()
    found.problems["worker"] = ImageProblem("SecretMissing", "Secret push does not exist")
    decision = found.settle("worker")
    assert found.builds == {}
    assert conditions(found)["Accepted"] == ("False", "SecretMissing")
    assert found.pool_reports["worker"].message == "Secret push does not exist"
    assert decision.requeue_after_s == 30.0
    del found.problems["worker"]
    found.converge()
    assert conditions(found)["Accepted"] == ("True", "Accepted")


def test_problem_does_not_end_a_running_build() -> None:
    found = world()
    found.settle("worker")
    found.problems["worker"] = ImageProblem("SecretMissing", "Secret push does not exist")
    found.finish_job("build-worker-c00")
    found.settle("worker")
    found.answer()
    found.settle("worker")
    found.answer()
    found.settle("worker")
    assert only_build(found) is BuildState.SUCCEEDED


def test_image_that_the_registry_lost_is_built_again() -> None:
    found = built()
    first = found.configs["worker"].pull_spec
    found.change("worker", content="c1")
    found.converge()
    for image in list(found.images):
        if found.images[image][0] == "c0":
            del found.images[image]
    found.change("worker", content="c0")
    found.converge()
    assert served(found) == ("c0", "rendered-worker-0")
    assert found.configs["worker"].pull_spec != first


def test_deleted_image_of_a_pool_is_reported_with_the_command_that_rebuilds() -> None:
    found = built()
    image = found.configs["worker"].pull_spec
    kept = found.images.pop(image)
    found.settle("worker")
    assert not found.asked
    found.now += IMAGE_CHECK_S
    assert [type(each) for each in found.settle("worker").actions] == [CallRegistry]
    found.answer(BuildReason.REGISTRY_UNREACHABLE)
    found.now += found.settle("worker").requeue_after_s or 0.0
    assert conditions(found)["ImageReady"] == ("True", "Ready")
    found.settle("worker")
    found.answer()
    found.settle("worker")
    assert conditions(found)["ImageReady"] == ("False", "ImageMissing")
    assert found.configs["worker"].pull_spec == image
    shown = next(each for each in found.configs["worker"].conditions if each.type == "ImageReady")
    command = "kubectl annotate machineosconfig worker machineconfiguration.openshift.io/rebuild="
    assert image in shown.message
    assert shown.message.endswith(command)
    # Neither an outage nor a new process takes that back.
    found.now += IMAGE_CHECK_S
    found.settle("worker")
    found.answer(BuildReason.REGISTRY_UNREACHABLE)
    found.settle("worker")
    found.answers.clear()
    found.settle("worker")
    assert conditions(found)["ImageReady"] == ("False", "ImageMissing")
    # It may come back, and a rebuild makes another one.
    found.images[image] = kept
    found.now += IMAGE_CHECK_S
    found.converge()
    assert conditions(found)["ImageReady"] == ("True", "Ready")
    del found.images[image]
    found.now += IMAGE_CHECK_S
    found.converge()
    found.rebuild("worker")
    found.converge()
    assert conditions(found)["ImageReady"] == ("True", "Ready")
    assert found.configs["worker"].pull_spec != image


def test_image_that_the_registry_still_has_is_served_again() -> None:
    found = built()
    first = found.configs["worker"].pull_spec
    found.change("worker", content="c1")
    found.converge()
    found.log.clear()
    found.change("worker", content="c0")
    found.converge()
    assert found.configs["worker"].pull_spec == first
    assert not [line for line in found.log if "Create" in line]


def test_pre_built_image_is_served_without_a_job_and_without_a_question() -> None:
    found = world()
    image = seed(found)
    found.settle("worker")
    (build,) = found.builds.values()
    assert (build.state, build.reason, build.digest) == (
        BuildState.SUCCEEDED,
        "PreBuiltImageSeeded",
        image,
    )
    assert found.configs["worker"].pull_spec == image
    assert (found.jobs, found.asked) == ({}, [])
    assert conditions(found)["ImageReady"] == ("True", "Ready")
    assert found.settle("worker").actions == ()


@pytest.mark.parametrize("change", [{"content": "c1"}, {"config": "rendered-worker-1"}])
def test_pool_with_a_pre_built_image_is_built_at_the_first_change(change: dict[str, str]) -> None:
    found = world()
    image = seed(found)
    found.settle("worker")
    found.change("worker", **change)
    found.converge()
    assert found.configs["worker"].pull_spec != image
    inputs = found.inputs["worker"]
    assert served(found) == (inputs.content, inputs.config)


def test_running_build_ends_with_the_pre_built_image() -> None:
    found = world()
    found.settle("worker")
    found.run_job(next(iter(found.jobs)))
    found.settle("worker")
    image = seed(found)
    found.settle("worker")
    assert only_build(found) is BuildState.SUCCEEDED
    assert found.configs["worker"].pull_spec == image
    assert found.jobs == {}


def test_rebuild_replaces_the_pre_built_image() -> None:
    found = world()
    image = seed(found)
    found.settle("worker")
    found.rebuild("worker")
    found.converge()
    assert found.configs["worker"].pull_spec != image


def test_hold_of_the_installation_delays_the_first_build() -> None:
    found = world()
    found.holds["worker"] = "waiting for the bootstrap host"
    decision = found.settle("worker")
    assert found.builds == {}
    assert decision.requeue_after_s is not None
    assert found.pool_reports == {}
    ready = next(each for each in found.configs["worker"].conditions if each.type == "ImageReady")
    assert (ready.status, ready.reason, ready.message) == (
        "False",
        "WaitingForInstallation",
        "waiting for the bootstrap host",
    )
    del found.holds["worker"]
    found.converge()
    assert only_build(found) is BuildState.SUCCEEDED


def test_pool_is_not_degraded_while_inputs_of_the_installation_are_missing() -> None:
    found = world()
    found.holds["worker"] = "waiting for the bootstrap host"
    found.problems["worker"] = ImageProblem("SecretMissing", "Secret push does not exist")
    found.settle("worker")
    assert found.pool_reports == {}
    conditions = {each.type: each for each in found.configs["worker"].conditions}
    assert conditions["ImageReady"].reason == "WaitingForInstallation"
    accepted = conditions["Accepted"]
    assert (accepted.status, accepted.reason) == ("Unknown", "SecretMissing")
    del found.holds["worker"]
    found.settle("worker")
    assert found.pool_reports


def test_image_of_the_installation_is_served_without_a_question() -> None:
    found = world()
    found.holds["worker"] = "waiting for the bootstrap host"
    image = seed(found)
    found.configs["worker"] = replace(found.configs["worker"], pre_built="")
    wanted = found.inputs["worker"].make_wanted("worker")
    adopted = BuildFacts(
        wanted.name, "uid", "worker", wanted.config, share_key=wanted.share_key,
        architectures=wanted.architectures,
    )  # fmt: skip
    found.builds[wanted.name] = adopted
    assert not [each for each in found.settle("worker").actions if isinstance(each, CreateJob)]
    found.builds[wanted.name] = replace(
        adopted, state=BuildState.SUCCEEDED, reason="BuiltAtInstall", digest=image
    )
    found.settle("worker")
    assert found.configs["worker"].pull_spec == image
    assert (found.jobs, found.asked) == ({}, [])


def seed(found: World) -> str:
    """Name an image that a user built; return it."""
    image = f"registry.example.com/user/os@sha256:{'e' * 64}"
    inputs = found.inputs["worker"]
    found.images[image] = (inputs.content, inputs.config)
    found.platforms[image] = inputs.architectures
    found.configs["worker"] = replace(found.configs["worker"], pre_built=image)
    return image


@pytest.mark.parametrize(
    ("build", "attempt", "name"),
    [
        ("worker-0123", 1, "build-worker-0123"),
        ("worker-0123", 12, "build-worker-0123-12"),
        (f"{'w' * 40}-{'a' * 32}", 1, f"build-{'w' * 24}-{'a' * 32}"),
        (f"{'w' * 40}-{'a' * 32}", 2, f"build-{'w' * 22}-{'a' * 32}-2"),
    ],
)
def test_job_name_fits_into_a_label(build: str, attempt: int, name: str) -> None:
    assert make_job_name(build, attempt) == name
    assert len(name) <= 63


def disturb(found: World) -> None:
    """One random event."""
    names = list(found.configs)
    name = found.random.choice(names)
    running = [each for each, job in found.jobs.items() if job.is_running]
    events: list[Callable[[], object]] = [
        lambda: found.change(name, content=found.random.choice(["", "c0", "c1", "c2"])),
        lambda: found.change(name, config=f"rendered-worker-{found.random.randrange(3)}"),
        lambda: found.change(
            name, architectures=found.random.choice([("amd64",), ("arm64",), ("amd64", "arm64")])
        ),
        lambda: found.rebuild(name),
        found.collect_garbage,
        lambda: found.problems.update({name: ImageProblem("SecretMissing", "missing")}),
        found.problems.clear,
        lambda: setattr(found, "now", found.now + found.random.choice([1.0, 61.0, 4000.0])),
    ]
    if found.asked:
        reason = found.random.choice([None, None, BuildReason.REGISTRY_BUSY])
        events += [lambda: found.answer(reason)] * 4
    if running:
        job = found.random.choice(running)
        events += [
            lambda: found.run_job(job),
            lambda: found.finish_job(job),
            lambda: found.finish_job(job),
            lambda: found.fail_job(job, found.random.choice([*RETRIED, *FINAL])),
            lambda: found.delete_job(job),
        ]
    if found.random.random() < 0.02:
        found.remove_config(name)
        found.add_config(name, content="c0")
        return
    found.random.choice(events)()


def walk(seed: int, *, steps: int = 60) -> World:
    found = World(seed)
    for name in ("worker", "infra", "gpu"):
        found.add_config(name, content="c0")
    for _ in range(steps):
        disturb(found)
        if found.random.random() < 0.3:
            found.kill_at = found.random.randrange(4)
            found.kills_before = found.random.random() < 0.5
        for name in list(found.configs):
            try:
                found.sync(name)
            except Killed:
                found.collect_garbage()
        found.kill_at = None
    return found


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_random_walks_violate_no_invariant_and_converge(first: int) -> None:
    for seed in range(first, first + 30):
        found = walk(seed)
        found.problems.clear()
        found.converge()
        for name, config in found.configs.items():
            build = found.builds[found.inputs[name].make_wanted(name).name]
            assert build.has_ended, (seed, name)
            if build.state is BuildState.SUCCEEDED:
                inputs = found.inputs[name]
                assert found.images[config.pull_spec] == (inputs.content, inputs.config), seed


def test_job_with_the_name_of_one_that_failed_is_not_run_twice() -> None:
    # In this walk another config makes a Job again that failed for the adopting build before.
    found = walk(1058, steps=90)
    found.problems.clear()
    found.converge()


def find_writes(content: str) -> int:
    found = world(content)
    found.converge()
    return len([line for line in found.log if "CallRegistry" not in line])


@pytest.mark.parametrize("content", ["", "c0"])
@pytest.mark.parametrize("is_before", [True, False])
def test_kill_at_each_write_leads_to_the_same_end(content: str, is_before: bool) -> None:
    whole = world(content)
    whole.converge()
    for number in range(find_writes(content)):
        found = world(content)
        found.kill_at, found.kills_before = number, is_before
        with pytest.raises(Killed):
            found.converge()
        found.converge()
        assert served(found) == (content, "rendered-worker-0"), number
        assert list(found.builds) == list(whole.builds)
        assert found.jobs == {}
        assert len([line for line in found.log if "CreateJob" in line]) == bool(content)
