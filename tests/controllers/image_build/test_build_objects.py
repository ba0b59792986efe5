"""Facts about Jobs and pods, from their API objects."""

import json
from typing import Any

from treenail.controllers.image_build.build_facts import JobFacts, JobState
from treenail.controllers.image_build.build_objects import ObservedJob, ObservedPod, make_job_facts
from treenail.image.build_result import BuildPhase, BuildReason, BuildResult

JOB = ObservedJob(JobFacts("build-a", uid="second", state=JobState.BUILDING, owners=("build",)))


def make_pod(*results: BuildResult | None, job_uid: str = "second") -> ObservedPod:
    """A pod whose containers ended with these results; None has not begun."""
    statuses: list[dict[str, Any]] = []
    for phase, result in zip(BuildPhase, (*results, None, None, None), strict=False):
        ended = {} if result is None else {
            "terminated": {"exitCode": result.exit_code, "message": result.to_text()}
        }  # fmt: skip
        statuses.append({"name": phase.value, "state": ended or {"waiting": {}}})
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "build-a", "uid": job_uid}
    document: Any = {
        "metadata": {
            "name": "build-a-x",
            "labels": {"batch.kubernetes.io/job-name": "build-a"},
            "ownerReferences": [owner],
        },
        "status": {"initContainerStatuses": statuses[:2], "containerStatuses": statuses[2:]},
    }
    return ObservedPod.from_json(json.loads(json.dumps(document)))


def observe(*pods: ObservedPod) -> JobFacts:
    return make_job_facts(JOB, pods, frozenset({"build"}))


def test_pod_of_an_earlier_job_of_the_same_name_does_not_count() -> None:
    failed = BuildResult(BuildPhase.FETCH, reason=BuildReason.BASE_NOT_FOUND, message="no")
    assert observe(make_pod(failed, job_uid="first")).failure is None
    found = observe(make_pod(failed)).failure
    assert found.reason is BuildReason.BASE_NOT_FOUND


def test_phase_between_two_containers_is_the_next_one() -> None:
    assert observe(make_pod()).phase == ""
    assert observe(make_pod(BuildResult(BuildPhase.FETCH))).phase == "build"


def test_pushed_image_without_its_packages_has_a_warning() -> None:
    digest, warning = f"sha256:{'a' * 64}", "cannot attach the packages of the image: no"
    done = [BuildResult(phase) for phase in (BuildPhase.FETCH, BuildPhase.BUILD)]
    found = observe(make_pod(*done, BuildResult(BuildPhase.PUSH, digest, message=warning)))
    assert (found.digest, found.warning) == (digest, warning)
    assert observe(make_pod(*done, BuildResult(BuildPhase.PUSH, digest))).warning == ""
