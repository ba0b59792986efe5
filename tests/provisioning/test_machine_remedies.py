"""Each message about a machine that did not join says what to do."""

from itertools import product
from typing import Any

import pytest

from tests.provisioning.logged import NOW, make_refusal, make_row
from tests.provisioning.test_joined_machines import (
    LATE,
    POOLS,
    join,
    log_rows,
    make_certificate,
    make_node,
)
from treenail.provisioning.machines.joined_machines import JoinedMachine, join_machines
from treenail.provisioning.machines.logged_requests import RequestOutcome
from treenail.provisioning.machines.machine_report import build_report, build_report_document
from treenail.provisioning.tokens.tokens import Refusal

CERTIFICATES: tuple[dict[str, Any], ...] = (
    {},
    {"is_approved": True},
    {"is_approved": True, "has_certificate": True},
    {"failure": "denied"},
)


def report(machines: list[JoinedMachine]) -> tuple[str, str]:
    (found,) = build_report(machines)
    return found.problem, found.remedy


def test_each_problem_of_a_request_has_a_remedy() -> None:
    statuses = (400, 401, 403, 404, 406, 500, 503)
    reasons = ("a reason", *Refusal)
    failures = [each for each in RequestOutcome if each not in ("served", "checked")]
    for outcome, status, reason in product(failures, statuses, reasons):
        row = make_refusal(token="abc", outcome=outcome, status=status, reason=reason)
        for now in (NOW + 1, LATE):
            problem, remedy = report(join(row, now=now))
            assert reason in problem
            assert remedy or "treenail-controller token create" in problem, (outcome, status)


@pytest.mark.parametrize("fields", CERTIFICATES)
def test_each_step_of_a_certificate_has_a_remedy(fields: dict[str, Any]) -> None:
    certificate = make_certificate(**fields)
    for now in (NOW + 201, LATE):
        problem, remedy = report(
            join_machines(log_rows(make_row()), [], POOLS, now, certificates=[certificate])
        )
        assert "csr-w1" in problem
        assert remedy


def test_machine_without_a_request_for_a_certificate_has_a_remedy() -> None:
    problem, remedy = report(join(make_row()))
    assert problem.startswith("no Node appeared; it received rendered-worker-1")
    assert remedy == (
        "read its console; on the machine run: journalctl -u treenail-firstboot -u kubelet"
    )


def test_ambiguous_machine_has_a_remedy() -> None:
    problem, remedy = report(join(make_row(), nodes=[make_node("a"), make_node("b")]))
    assert problem == "2 Nodes have the address: a, b"
    assert "treenail-controller token create --machine NODE" in remedy


def test_machine_that_joined_has_neither_problem_nor_remedy() -> None:
    assert report(join(make_row(), nodes=[make_node()])) == ("", "")


def test_pending_request_is_in_the_document() -> None:
    machines = join_machines(
        log_rows(make_row()), [], POOLS, NOW + 201, certificates=[make_certificate()]
    )
    (found,) = build_report_document(build_report(machines), expect_s=1200)["requests"]  # type: ignore[attr-defined]
    assert found["certificateRequest"] == "csr-w1"
    assert "is not approved" in found["problem"]
    assert "kubectl describe csr csr-w1" in found["remedy"]
    assert "certificate approve" not in found["remedy"]
