"""The texts that the demo prints beside the table fit into 24 lines of 80 columns."""

import io

import pytest

from treenail_lab.demo.rollout import DemoResult, print_plan, print_result

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


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


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
