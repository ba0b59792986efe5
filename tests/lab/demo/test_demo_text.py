"""The texts that the demo prints beside the table fit into 24 lines of 80 columns."""

import io

import pytest

from tests.fixtures.terminal import Terminal
from treenail_lab.command import build_scenario, create_parser
from treenail_lab.demo.pool import split_halt_message
from treenail_lab.demo.rollout import (
    DemoResult,
    DemoScenario,
    has_shown_scenario,
    print_plan,
    print_result,
)

PLAN = """\
pool worker: 3 of 3 nodes to rendered-worker-290a57063a22e597eed16ca1adb0d91f with image quay.io/x
  rendered from 00-worker, 50-worker-change
  3 nodes from rendered-worker-6da92b29d98fcd722bbf117520c22ee4 with image quay.io/example/os:
    drain and reboot
      because osImageURL changed (part of the operating system), from spec.osImage of the pool
      because kernelArguments changed (part of the operating system), from MachineConfig 50-change
  order, 1 at a time:
      1. worker-0  (wave 1)
  takes about 30 min in total
"""
TABLE_LINES = 8
"""Heading, target, two lines about a wait, column heads and three nodes."""
OTHER_LINES = 4
"""The first line, an empty one, the command of the table, and the prompt."""


@pytest.fixture(autouse=True)
def terminal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def test_demo_fits_into_24_lines_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    print_plan(PLAN, terminal)
    print_result(DemoResult(updated_nodes=["a"], seconds=30.0), [])
    lines = [*terminal.getvalue().splitlines(), *capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert len(lines) + TABLE_LINES + OTHER_LINES <= 24


def test_plan_shows_only_what_it_costs() -> None:
    stream = io.StringIO()
    print_plan(PLAN, stream)
    assert stream.getvalue().splitlines()[1:] == [
        line
        for line in PLAN.splitlines()
        if "drain" in line or "because" in line or "takes" in line
    ]


def test_refused_plan_is_shown_whole() -> None:
    stream = io.StringIO()
    print_plan("spec.osImage: Invalid value\n", stream)
    assert stream.getvalue().splitlines()[1:] == ["spec.osImage: Invalid value"]


def test_journal_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(DemoResult(), ["worker-0 staging    planned"])
    assert "  worker-0 staging    planned\n" in capsys.readouterr().out


RESUME = """kubectl patch rolloutpolicy careful --type merge -p '{"spec": {}}'"""
HALT = (
    "Halted: The rollout of MachineConfig rendered-worker-1 is halted: node worker-0 failed first: "
    f"cannot stage quay.io/x@sha256:{64 * 'a'}; set another target, or resume: {RESUME}"
)


def make_scenario(*arguments: str) -> DemoScenario:
    return build_scenario(create_parser().parse_args(["demo", *arguments]))[1]


def test_halt_ends_with_its_cause_and_the_command_that_resumes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cause, command = split_halt_message(HALT)
    assert cause == "node worker-0 failed first: cannot stage quay.io/x@sha256:aaaaaaaaaaaa"
    assert command == RESUME
    print_result(DemoResult(halt_message=HALT, resume_command=command), [])
    printed = capsys.readouterr().out
    assert (
        f"\npool worker is halted: {cause}\nresume with: {RESUME}\nTry next: make demo " in printed
    )


def test_blocked_drain_ends_with_node_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = DemoResult(
        failures={"worker-0": "not done"},
        drain_blockers={"worker-0": "pod default/web-1: refused"},
        resume_command="kubectl patch pdb web",
    )
    print_result(result, [])
    printed = capsys.readouterr().out
    assert "\nworker-0 is not drained: pod default/web-1: refused\nresume with: kubectl " in printed


def test_stop_without_resume_command_shows_the_whole_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = "RolloutPolicyInvalid: spec.waves: expected a list"
    assert split_halt_message(message) == (message, "")
    print_result(DemoResult(halt_message=message), [])
    assert f"pool worker is halted: {message}\nTry next: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "result", "is_shown"),
    [
        ((), DemoResult(updated_nodes=["worker-0"]), True),
        ((), DemoResult(failures={"worker-0": "x"}, halt_message=HALT), False),
        (("--fail", "stage"), DemoResult(failures={"worker-0": "x"}, halt_message=HALT), True),
        (("--fail", "stage"), DemoResult(failures={"worker-0": "not done after 300 s"}), False),
        (("--fail", "reboot"), DemoResult(updated_nodes=["worker-0"]), False),
        (("--fail", "drain"), DemoResult(failures={"worker-0": "x"}, halt_message=HALT), False),
        (
            ("--fail", "drain"),
            DemoResult(failures={"worker-0": "x"}, drain_blockers={"worker-0": "y"}),
            True,
        ),
    ],
)
def test_demo_succeeds_when_it_showed_what_was_requested(
    arguments: tuple[str, ...], result: DemoResult, is_shown: bool
) -> None:
    assert has_shown_scenario(make_scenario(*arguments), result) is is_shown
