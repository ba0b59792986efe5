"""Decisions of the lab's Job controller that no contract test reaches."""

import pytest

from treenail_lab.apiserver.controllers.job_decision import PodBackoff, decide_step, match_rules
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.registry.builtin_kinds import prepare_new_job

NOW = 1_800_000_000.0


def make_job(**spec: object) -> Json:
    body = {"metadata": {"name": "j", "namespace": "n", "uid": "u"}, "spec": spec}
    return prepare_new_job(body)


@pytest.mark.parametrize(("failures", "expected"), [(0, 0), (1, 10), (2, 20), (6, 320), (9, 600)])
def test_backoff_doubles_with_each_failure_up_to_ten_minutes(failures: int, expected: int) -> None:
    assert PodBackoff(failures, NOW).compute_wait_s(NOW, 10.0) == expected


def test_backoff_of_many_failures_is_a_number() -> None:
    assert PodBackoff(100_000, NOW).compute_wait_s(NOW + 1, 10.0) == 599


def test_step_without_pods_creates_one_and_waits_for_the_deadline() -> None:
    step = decide_step(
        make_job(activeDeadlineSeconds=60), [], PodBackoff(), NOW, first_backoff_s=10.0
    )
    assert (step.created_pods, step.wait_s, step.status["active"]) == (1, 60, 1)


def test_step_after_a_failure_creates_no_pod_before_the_backoff_ends() -> None:
    step = decide_step(make_job(), [], PodBackoff(1, NOW - 4), NOW, first_backoff_s=10.0)
    assert (step.created_pods, step.wait_s) == (0, 6)


def test_pod_that_matches_no_rule_counts() -> None:
    rules = {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [64]}}]}
    state = {"terminated": {"exitCode": 1}}
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": [{"state": state}]}}
    assert match_rules(rules, pod) == ("Count", "")


def test_init_container_matches_a_rule_for_other_codes() -> None:
    rules = {"rules": [{"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [1]}}]}
    state = {"terminated": {"exitCode": 2}}
    pod = {"metadata": {"name": "p"}, "status": {"initContainerStatuses": [{"state": state}]}}
    assert match_rules(rules, pod)[0] == "Ignore"
