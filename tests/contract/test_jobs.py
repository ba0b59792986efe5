"""Jobs and their controller. The tests report the pods' status as a kubelet does."""

from typing import Any

import pytest

from tests.contract.client import Answer, Json
from tests.contract.space import POLL_LIMIT_S, Space, names
from tests.waiting import wait_until

BATCH = "batch/v1"
FINALIZER = "batch.kubernetes.io/job-tracking"
RULES: Json = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "main", "operator": "In", "values": [64]},
        },
        {"action": "Count", "onExitCodes": {"operator": "In", "values": [75]}},
    ]
}

pytestmark = pytest.mark.controllers


def job(name: str, **spec: Any) -> Json:
    """A Job whose pods no scheduler wants."""
    return {
        "apiVersion": BATCH,
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "template": {
                "metadata": {"labels": {"app": "build"}},
                "spec": {
                    "schedulerName": "none",
                    "automountServiceAccountToken": False,
                    "restartPolicy": "Never",
                    "containers": [{"name": "main", "image": "example.invalid/image"}],
                },
            }
        }
        | spec,
    }


def create(space: Space, name: str, **spec: Any) -> Json:
    """Create a Job; return its only pod."""
    space.cluster.post(space.at("jobs", group=BATCH), job(name, **spec)).ok()
    return wait_pod(space, name)


def pods(space: Space, name: str) -> list[Json]:
    selector = f"batch.kubernetes.io/job-name={name}"
    return space.cluster.get(space.at("pods"), labelSelector=selector).ok()["items"]


def wait_pod(space: Space, name: str, *, but: Json | None = None) -> Json:
    """The pod of a Job that runs; ``but`` is one that does not count."""
    known = but["metadata"]["uid"] if but else ""

    def active() -> list[Json]:
        return [each for each in pods(space, name) if each["metadata"]["uid"] != known]

    wait_until(lambda: len(active()) == 1, limit_s=POLL_LIMIT_S)
    return active()[0]


def read(space: Space, name: str) -> Json:
    return space.cluster.get(space.at("jobs", name, group=BATCH)).ok()


def conditions(space: Space, name: str) -> dict[str, tuple[str, str]]:
    """Reason and message of each true condition."""
    return {
        each["type"]: (each.get("reason", ""), each.get("message", ""))
        for each in read(space, name)["status"].get("conditions", [])
        if each["status"] == "True"
    }


def wait_condition(space: Space, name: str, kind: str) -> tuple[str, str]:
    wait_until(lambda: kind in conditions(space, name), limit_s=POLL_LIMIT_S)
    return conditions(space, name)[kind]


def end(space: Space, pod: Json, code: int, phase: str = "", **status: Any) -> None:
    """Report that the container of a pod ended."""
    state = {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}}
    container = {
        "name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": 0,
        "state": state,
    }  # fmt: skip
    body = {
        "status": {
            "phase": phase or ("Succeeded" if code == 0 else "Failed"),
            "containerStatuses": [container],
        }
        | status
    }
    space.cluster.patch(space.at("pods", pod["metadata"]["name"], "status"), body).ok()


def test_new_job_has_defaults_and_one_pod(space: Space) -> None:
    pod = create(space, "a")
    found = read(space, "a")
    spec, uid = found["spec"], found["metadata"]["uid"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (1, 1, 6)
    assert (spec["completionMode"], spec["suspend"]) == ("NonIndexed", False)
    assert spec["selector"] == {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    labels = pod["metadata"]["labels"]
    assert labels["app"] == "build"
    assert labels["batch.kubernetes.io/controller-uid"] == uid
    assert labels["batch.kubernetes.io/job-name"] == "a"
    assert pod["metadata"]["name"].startswith("a-")
    assert pod["metadata"]["finalizers"] == [FINALIZER]
    assert pod["metadata"]["ownerReferences"] == [
        {
            "apiVersion": BATCH, "kind": "Job", "name": "a", "uid": uid, "controller": True,
            "blockOwnerDeletion": True,
        }
    ]  # fmt: skip
    wait_until(lambda: read(space, "a")["status"].get("active") == 1)
    assert "startTime" in read(space, "a")["status"]


WITHOUT_INTERIM = range(1, 31)
"""Minor versions that set neither a condition before the last one nor the reason of a success."""


def test_job_with_a_succeeded_pod_is_complete(space: Space, minor: int) -> None:
    pod = create(space, "a")
    end(space, pod, 0)
    reason, _ = wait_condition(space, "a", "Complete")
    assert reason == ("" if minor in WITHOUT_INTERIM else "CompletionsReached")
    status = read(space, "a")["status"]
    interim = set() if minor in WITHOUT_INTERIM else {"SuccessCriteriaMet"}
    assert conditions(space, "a").keys() == {"Complete", *interim}
    assert (status["succeeded"], status.get("active", 0), status.get("failed", 0)) == (1, 0, 0)
    assert "completionTime" in status
    assert status.get("uncountedTerminatedPods", {}) == {}
    assert [each["metadata"].get("finalizers") for each in pods(space, "a")] == [None]


def test_failed_pod_is_replaced_until_the_limit(space: Space, minor: int) -> None:
    first = create(space, "a", backoffLimit=1)
    end(space, first, 1)
    second = wait_pod(space, "a", but=first)
    assert read(space, "a")["status"]["failed"] == 1
    end(space, second, 1)
    reason, message = wait_condition(space, "a", "Failed")
    assert (reason, message) == (
        "BackoffLimitExceeded",
        "Job has reached the specified backoff limit",
    )
    interim = set() if minor in WITHOUT_INTERIM else {"FailureTarget"}
    assert conditions(space, "a").keys() == {"Failed", *interim}
    assert read(space, "a")["status"]["failed"] == 2


def test_exit_code_of_a_fail_rule_ends_the_job_at_once(space: Space) -> None:
    pod = create(space, "a", podFailurePolicy=RULES)
    assert read(space, "a")["spec"]["podReplacementPolicy"] == "Failed"
    end(space, pod, 64)
    name = pod["metadata"]["name"]
    reason, message = wait_condition(space, "a", "Failed")
    assert reason == "PodFailurePolicy"
    assert message == (
        f"Container main for pod {space.name}/{name} failed with exit code 64 matching FailJob "
        "rule at index 1"
    )
    assert read(space, "a")["status"]["failed"] == 1
    assert len(pods(space, "a")) == 1


def test_exit_code_of_a_count_rule_counts(space: Space) -> None:
    pod = create(space, "a", podFailurePolicy=RULES, backoffLimit=0)
    end(space, pod, 75)
    assert wait_condition(space, "a", "Failed")[0] == "BackoffLimitExceeded"


def test_disrupted_pod_is_replaced_and_not_counted(space: Space) -> None:
    pod = create(space, "a", podFailurePolicy=RULES, backoffLimit=0)
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    end(space, pod, 137, conditions=[disrupted])
    wait_pod(space, "a", but=pod)
    status = read(space, "a")["status"]
    assert (status.get("failed", 0), "Failed" in conditions(space, "a")) == (0, False)


def test_evicted_pod_has_the_condition_of_a_disruption(space: Space) -> None:
    pod = create(space, "a", podFailurePolicy=RULES, backoffLimit=0)
    name = pod["metadata"]["name"]
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": space.name},
    }
    assert space.cluster.post(space.at("pods", name, "eviction"), body).code == 201
    held = space.cluster.get(space.at("pods", name)).ok()
    found = {each["type"]: each["reason"] for each in held["status"]["conditions"]}
    assert found["DisruptionTarget"] == "EvictionByEvictionAPI"
    # The policy replaces failed pods only: this one is deleted, and has not failed yet.
    assert "deletionTimestamp" in held["metadata"]
    end(space, pod, 143)
    wait_pod(space, "a", but=pod)
    assert read(space, "a")["status"].get("failed", 0) == 0


def test_job_past_its_deadline_fails_and_its_pod_is_deleted(space: Space) -> None:
    create(space, "a", activeDeadlineSeconds=1)
    assert wait_condition(space, "a", "Failed") == (
        "DeadlineExceeded",
        "Job was active longer than specified deadline",
    )
    assert pods(space, "a") == []
    assert read(space, "a")["status"]["failed"] == 1


def test_deleted_pod_is_counted_and_replaced(space: Space) -> None:
    pod = create(space, "a")
    space.cluster.delete(space.at("pods", pod["metadata"]["name"])).ok()
    wait_pod(space, "a", but=pod)
    assert read(space, "a")["status"]["failed"] == 1


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
def test_deleted_job_takes_its_pods(space: Space, policy: str) -> None:
    create(space, "a")
    options = {"propagationPolicy": policy}
    space.cluster.delete(space.at("jobs", "a", group=BATCH), options).ok()
    wait_until(lambda: not pods(space, "a"), limit_s=POLL_LIMIT_S)
    path = space.at("jobs", "a", group=BATCH)
    wait_until(lambda: space.cluster.get(path).code == 404, limit_s=POLL_LIMIT_S)


def test_deletion_without_a_policy_leaves_the_pods(space: Space) -> None:
    create(space, "a")
    path = space.at("jobs", "a", group=BATCH)
    space.cluster.delete(path).ok()
    wait_until(lambda: space.cluster.get(path).code == 404, limit_s=POLL_LIMIT_S)
    wait_until(
        lambda: (
            [
                (each["metadata"].get("finalizers"), each["metadata"].get("ownerReferences"))
                for each in pods(space, "a")
            ]
            == [(None, None)]
        ),
        limit_s=POLL_LIMIT_S,
    )


def test_suspended_job_has_no_pods_until_it_is_resumed(space: Space) -> None:
    space.cluster.post(space.at("jobs", group=BATCH), job("a", suspend=True)).ok()
    assert wait_condition(space, "a", "Suspended") == ("JobSuspended", "Job suspended")
    assert pods(space, "a") == []
    path = space.at("jobs", "a", group=BATCH)
    space.cluster.patch(path, {"spec": {"suspend": False}}).ok()
    wait_pod(space, "a")
    wait_until(lambda: "Suspended" not in conditions(space, "a"))


def test_finished_job_is_deleted_after_its_time_to_live(space: Space) -> None:
    pod = create(space, "a", ttlSecondsAfterFinished=0)
    end(space, pod, 0)
    path = space.at("jobs", "a", group=BATCH)
    wait_until(lambda: space.cluster.get(path).code == 404, limit_s=POLL_LIMIT_S)
    wait_until(lambda: names(space.cluster.get(space.at("pods")).ok()) == [])


def refuse(space: Space, **spec: Any) -> Answer:
    return space.cluster.post(space.at("jobs", group=BATCH), job("a", **spec))


def test_job_that_would_restart_its_pods_forever_is_rejected(space: Space) -> None:
    body = job("a")
    body["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    answer = space.cluster.post(space.at("jobs", group=BATCH), body)
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueRequired", "spec.template.spec.restartPolicy")}


@pytest.mark.parametrize(
    ("codes", "field"),
    [
        ({"operator": "In", "values": [0]}, "onExitCodes.values[0]"),
        ({"operator": "In", "values": []}, "onExitCodes.values"),
        ({"operator": "In", "values": [1], "containerName": "other"}, "onExitCodes.containerName"),
    ],
)
def test_rule_that_cannot_match_is_rejected(space: Space, codes: Json, field: str) -> None:
    rules = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
    answer = refuse(space, podFailurePolicy=rules)
    assert answer.verdict == (422, "Invalid")
    assert ("FieldValueInvalid", f"spec.podFailurePolicy.rules[0].{field}") in {
        (reason.replace("Required", "Invalid"), where) for reason, where in answer.causes
    }


def test_template_of_a_job_cannot_change(space: Space) -> None:
    create(space, "a")
    change = {"spec": {"template": {"spec": {"containers": [{"name": "x", "image": "y"}]}}}}
    answer = space.cluster.patch(space.at("jobs", "a", group=BATCH), change)
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueInvalid", "spec.template")}
