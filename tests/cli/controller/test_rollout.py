"""``treenail-controller rollout status`` and the choice of the cluster."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.controllers.status.test_leader import allow_reading
from tests.fakes.clock import FakeClock
from tests.fixtures.clusters import open_lab
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.object_meta import ObjectMeta
from treenail.cli.controller.connect import find_kubeconfigs
from treenail.cli.controller.main import main
from treenail.cli.controller.rollout import await_rollouts, compute_exit_code
from treenail.controllers.render.render import hash_render_inputs
from treenail.controllers.status.rollout_result import (
    RolloutOutcome,
    RolloutResult,
    check_render_inputs,
    compute_rollout_result,
)
from treenail.errors import UnreachableError
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.apiserver.serving.server import LabServer

COMPLETE, BLOCKED, IN_PROGRESS = (
    RolloutOutcome.COMPLETE,
    RolloutOutcome.BLOCKED,
    RolloutOutcome.IN_PROGRESS,
)


def pool(*, observed: int = 2, paused: bool = False, **conditions: str) -> MachineConfigPool:
    listed = [
        {"type": kind, "status": status, "reason": "x", "message": f"because of {kind}"}
        for kind, status in conditions.items()
    ]
    status = {"observedGeneration": observed, "machineCount": 3, "updatedMachineCount": 1}
    return MachineConfigPool.from_json(
        {
            "metadata": {"name": "worker", "generation": 2},
            "spec": {"paused": paused},
            "status": {**status, "conditions": listed},
        }
    )


@pytest.mark.parametrize(
    ("found", "outcome", "message"),
    [
        (pool(Updated="True"), COMPLETE, "because of Updated"),
        (pool(Updated="False", Updating="True"), IN_PROGRESS, "because of Updating"),
        (pool(Updated="False", Updating="True", Degraded="True"), BLOCKED, "because of Degraded"),
        (pool(Updated="False", Stalled="True"), BLOCKED, "because of Stalled"),
        (pool(Updated="True", observed=1), IN_PROGRESS, "has not seen the change"),
        (pool(Updated="True", Degraded="True", observed=1), IN_PROGRESS, "has not seen the change"),
        (pool(Updated="False", paused=True), BLOCKED, "the pool is paused"),
        (pool(), IN_PROGRESS, "no status yet"),
    ],
)
def test_outcome_follows_the_conditions(
    found: MachineConfigPool, outcome: RolloutOutcome, message: str
) -> None:
    result = compute_rollout_result(found)
    assert result.outcome is outcome
    assert message in result.message
    assert (result.updated, result.total) == (1, 3)


@pytest.mark.parametrize("counts", [{}, {"machineCount": "many"}])
def test_unknown_counts_are_not_zero(counts: dict[str, str]) -> None:
    result = compute_rollout_result(
        MachineConfigPool.from_json({"metadata": {"name": "worker"}, "status": counts})
    )
    assert str(result) == "worker: in progress, number of updated nodes unknown: no status yet"


def meta(name: str, generation: int = 1, role: str = "worker") -> ObjectMeta:
    return ObjectMeta(name, uid=f"uid-{name}", generation=generation, labels={"role": role})


def rendered_pool(*sources: str, inputs: str | None) -> MachineConfigPool:
    return MachineConfigPool.from_json(
        {
            "metadata": {"name": "worker"},
            "spec": {
                "machineConfigSelector": {"matchLabels": {"role": "worker"}},
                "configuration": {"source": [{"name": name} for name in sources]},
            },
            "status": {} if inputs is None else {"renderInputs": inputs},
        }
    )


def test_hash_of_the_inputs_follows_every_change_of_a_selected_config() -> None:
    found = rendered_pool(inputs=None)
    base = [meta("a"), meta("b")]
    known = hash_render_inputs(found, base, [meta("cluster")])
    assert hash_render_inputs(found, [*reversed(base), meta("c", role="x")], [meta("cluster")]) == (
        known
    )
    others = (
        hash_render_inputs(found, [meta("a"), meta("b", 2)], [meta("cluster")]),
        hash_render_inputs(found, [meta("a")], [meta("cluster")]),
        hash_render_inputs(found, base, [meta("cluster", 2)]),
    )
    assert known not in others


@pytest.mark.parametrize(
    ("inputs", "configs", "before", "after"),
    [
        ("current", ["a"], COMPLETE, COMPLETE),
        ("old", ["a"], COMPLETE, IN_PROGRESS),
        ("old", ["a"], BLOCKED, IN_PROGRESS),
        ("current", ["a"], BLOCKED, BLOCKED),
        # Under the Machine Config Operator.
        (None, ["a"], COMPLETE, COMPLETE),
        (None, ["a", "b"], COMPLETE, IN_PROGRESS),
        (None, ["a", "b"], BLOCKED, BLOCKED),
    ],
)
def test_outcome_waits_for_the_render_controller(
    inputs: str | None, configs: list[str], before: RolloutOutcome, after: RolloutOutcome
) -> None:
    metas = [meta(name) for name in configs]
    if inputs == "current":
        inputs = hash_render_inputs(rendered_pool(inputs=None), metas, ())
    found = check_render_inputs(result(before), rendered_pool("a", inputs=inputs), metas, ())
    assert found.outcome is after
    assert ("render controller" in found.message) is (before is not after)


@pytest.mark.parametrize(
    ("conditions", "outcome"),
    [
        ({"RenderDegraded": "True", "Updated": "True"}, BLOCKED),
        ({"RenderDegraded": "False", "Degraded": "True", "Updated": "True"}, COMPLETE),
    ],
)
def test_condition_of_the_render_controller_is_newer_than_the_one_that_repeats_it(
    conditions: dict[str, str], outcome: RolloutOutcome
) -> None:
    listed = [
        {"type": kind, "status": status, "reason": "RenderDegraded", "message": "m"}
        for kind, status in conditions.items()
    ]
    found = compute_rollout_result(
        MachineConfigPool.from_json(
            {"metadata": {"name": "worker"}, "status": {"conditions": listed}}
        )
    )
    assert found.outcome is outcome


def result(outcome: RolloutOutcome, message: str = "m") -> RolloutResult:
    return RolloutResult("worker", outcome, message, 1, 3)


class Reads:
    """Returns one result after the other, the last one for ever; None is no answer."""

    def __init__(self, *results: RolloutResult | None) -> None:
        self._results = [*results]

    def __call__(self) -> Sequence[RolloutResult]:
        found = self._results.pop(0) if len(self._results) > 1 else self._results[0]
        if found is None:
            raise UnreachableError("no answer")
        return (found,)


def test_wait_ends_when_the_rollout_is_complete_and_shows_each_change_once() -> None:
    shown: list[RolloutResult] = []
    progress, done = result(IN_PROGRESS), result(COMPLETE)
    found = await_rollouts(
        Reads(progress, progress, None, done), FakeClock(), timeout_s=60, show=shown.append
    )
    assert (compute_exit_code(found), shown) == (0, [progress, done])


def test_wait_ends_at_once_when_a_user_must_act() -> None:
    clock = FakeClock()
    found = await_rollouts(Reads(result(BLOCKED)), clock, timeout_s=60, show=None)
    assert compute_exit_code(found) == 3


def test_wait_ends_at_the_time_limit() -> None:
    clock = FakeClock()
    began = clock.monotonic()
    found = await_rollouts(Reads(result(IN_PROGRESS)), clock, timeout_s=62, show=None)
    assert (compute_exit_code(found), clock.monotonic() - began) == (2, 62)


def test_wait_names_each_outage_once() -> None:
    progress, done, warnings = result(IN_PROGRESS), result(COMPLETE), list[str]()
    reads = Reads(None, None, progress, None, None, progress, done)
    await_rollouts(reads, FakeClock(), timeout_s=60, show=None, warn=warnings.append)
    text = "cannot read the cluster, trying again until the time limit: no answer"
    assert warnings == [text, text]


def test_server_that_does_not_answer_has_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LabServer(tmp_path) as server:
        kubeconfig = str(server.admin_kubeconfig)
    for words in (["status"], ["rollout", "status"]):
        assert main([*words, "--kubeconfig", kubeconfig]) == 1
        shown = capsys.readouterr().err
        assert shown.startswith("treenail-controller: cannot read the cluster: GET ")
        assert "kubectl config view --minify" in shown


def test_wait_without_any_answer_is_an_error() -> None:
    with pytest.raises(UnreachableError):
        await_rollouts(Reads(None), FakeClock(), timeout_s=12, show=None)


def test_outcome_is_unknown_without_permission_to_read_machineconfigs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_lab(tmp_path / "api") as (server, client):
        allow_reading(client)
        user = str(server.write_kubeconfig("viewer", ["viewers"]))
        named = {"apiVersion": MACHINECONFIGPOOLS.api_version, "kind": "MachineConfigPool"}
        client.create(MACHINECONFIGPOOLS, {**named, "metadata": {"name": "worker"}, "spec": {}})
        for kind, code, outcome in (("Updated", 1, "unknown"), ("Degraded", 3, "blocked")):
            condition = {"type": kind, "status": "True", "reason": "", "message": f"is {kind}"}
            status = {"status": {"observedGeneration": 9, "conditions": [condition]}}
            client.patch(MACHINECONFIGPOOLS, "worker", status, subresource="status")
            assert main(["rollout", "status", "--wait", "--kubeconfig", user]) == code
            shown = " ".join(capsys.readouterr().out.split())
            assert shown.startswith(f"worker: {outcome}, ")
            assert shown.endswith(f"is {kind}")
            assert ("permit this user to list machineconfigs" in shown) is (kind == "Updated")


def test_rollout_status_reads_a_context_of_a_list_of_kubeconfigs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_lab(tmp_path / "api") as (server, client):
        named = {"apiVersion": MACHINECONFIGPOOLS.api_version, "kind": "MachineConfigPool"}
        client.create(MACHINECONFIGPOOLS, {**named, "metadata": {"name": "worker"}, "spec": {}})
        other = tmp_path / "other"
        other.write_text("apiVersion: v1\nkind: Config\ncurrent-context: none\n")
        files = [str(tmp_path / "missing"), str(other), str(server.admin_kubeconfig)]
        monkeypatch.setenv("KUBECONFIG", os.pathsep.join(files))
        (context,) = [
            line.split()[-1]
            for line in server.admin_kubeconfig.read_text().splitlines()
            if "current-context" in line
        ]
        context = context.strip('",')
        assert main(["rollout", "status", "worker", "--context", context]) == 2
        assert capsys.readouterr().out.startswith(
            "worker: in progress, number of updated nodes unknown: "
        )
        assert main(["rollout", "status", "web", "--context", context]) == 64
        assert "cannot find MachineConfigPool web: the cluster has worker" in (
            capsys.readouterr().err
        )


@pytest.mark.parametrize("text", ["", "5", "1w", "-1h", "9" * 400 + "h", "٣m"])
def test_invalid_time_limit_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["rollout", "status", f"--timeout={text}"])
    assert caught.value.code == 64
    assert "expected a time such as 30m" in capsys.readouterr().err


def test_kubeconfigs_of_a_list_that_do_not_exist_are_skipped(tmp_path: Path) -> None:
    present = tmp_path / "a"
    present.touch()
    listed = {"KUBECONFIG": os.pathsep.join(["/none/b", str(present), ""])}
    assert find_kubeconfigs(None, listed) == [str(present)]
    assert find_kubeconfigs("c", listed) == ["c"]
    assert find_kubeconfigs(None, {"KUBECONFIG": "/none/b:/none/c"}) == ["/none/b"]
    assert find_kubeconfigs(None, {}) == [str(Path.home() / ".kube/config")]
