"""The demo's table on terminals of all kinds."""

import io

import pytest

from treenail_lab.demo.table import NodeView, PoolView, format_table
from treenail_lab.demo.terminal import RolloutScreen

POOL = PoolView("worker", "1 of 3 updated")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def make_node(name: str, *, phase: str = "", reason: str = "", version: str = "41") -> NodeView:
    return NodeView(
        name=name,
        state="Working" if phase else "Done",
        phase=phase,
        percent=None,
        version=version,
        is_updated=False,
        evicted_pods=0,
        out_of_service_s=0.0,
        reason=reason,
    )


NODES = [make_node(f"worker-{number}") for number in range(18)]
NODES += [make_node("worker-18", phase="draining"), make_node("worker-19", reason="no space left")]


def show(nodes: list[NodeView], times: int = 1, **environment: str) -> Terminal:
    terminal = Terminal()
    screen = RolloutScreen(terminal, title="demo", environment=environment)
    for _ in range(times):
        screen.show_rollout(nodes, POOL, 1.0)
    return terminal


@pytest.fixture(autouse=True)
def size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 120 columns and 12 lines."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "12")


def test_terminal_shows_colours_and_redraws() -> None:
    text = show(NODES[:2], times=2, TERM="xterm").getvalue()
    assert "\x1b[32mDone\x1b[0m" in text
    assert text.count("\x1b[5A") == 1


def test_no_color_set_omits_colours() -> None:
    text = show(NODES[:2], times=2, TERM="xterm", NO_COLOR="1").getvalue()
    assert "\x1b[32m" not in text
    assert "\x1b[5A" in text


def test_no_color_empty_keeps_colours() -> None:
    assert "\x1b[32m" in show(NODES[:2], TERM="xterm", NO_COLOR="").getvalue()


def test_dumb_terminal_gets_lines_without_escapes() -> None:
    text = show(NODES[:2], times=2, TERM="dumb").getvalue()
    assert "\x1b" not in text
    assert text.count("worker-0") == 1


def test_table_taller_than_terminal_never_scrolls() -> None:
    text = show(NODES, times=3, TERM="xterm").getvalue()
    draws = text.split("\x1b[11A")
    assert len(draws) == 3
    assert all(draw.count("\n") == 11 for draw in draws)


def test_table_taller_than_terminal_shows_active_nodes_and_counts_others() -> None:
    lines = format_table(NODES, POOL, title="demo", seconds=1.0, max_lines=11)
    assert len(lines) == 11
    assert any("worker-18" in line for line in lines)
    assert any("no space left" in line for line in lines)
    assert lines[-1] == "  and 14 more nodes, 0 of them updated"


def test_finish_prints_the_whole_table() -> None:
    terminal = Terminal()
    screen = RolloutScreen(terminal, title="demo", environment={"TERM": "xterm"})
    screen.show_rollout(NODES, POOL, 1.0)
    screen.finish()
    assert all(node.name in terminal.getvalue() for node in NODES)


def test_reason_with_control_characters_is_escaped() -> None:
    lines = format_table([make_node("n", reason="\x1b[2Jgone\r")], POOL, title="", seconds=0.0)
    assert lines[-1] == "    ?[2Jgone?"
