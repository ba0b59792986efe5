"""Display of the table: drawn again in place on a terminal, else its changes line by line."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TextIO

from treenail import clocks, sanitize
from treenail.cli import output, terminal
from treenail.cli.controller.status.text import (
    RICH_STYLES,
    StyledLine,
    format_blocker,
    format_build,
    format_leader,
    format_summary,
    format_table,
    format_version,
)
from treenail.controllers.status import leader_status, status_table

if TYPE_CHECKING:
    from rich.console import Console

_CURSOR_UP = "\x1b[{}A"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"
# Terminals disagree about the width of a few characters. A line that is wider than expected is
# clipped, and the next drawing still begins in the right row.
_WRAP_OFF, _WRAP_ON = "\x1b[?7l", "\x1b[?7h"


class StatusView(Protocol):
    """Shows rows as they change."""

    def show_rows(
        self,
        rows: Sequence[status_table.PoolRow],
        *,
        now: float,
        problem: str = "",
        leader: leader_status.LeaderReport | None = None,
    ) -> None:
        """Show the rows; ``problem`` and ``leader`` say why they may be outdated."""


def create_view(stream: TextIO, environment: Mapping[str, str]) -> StatusView:
    """Create the live table, or the log of changes where a cursor cannot move."""
    can_redraw = stream.isatty() and environment.get("TERM", "dumb") != "dumb"
    return LiveTable(stream) if can_redraw else ChangeLog(stream)


def print_table(lines: Iterable[StyledLine], stream: TextIO) -> None:
    """Print lines, on a terminal in colours."""
    plain = _find_unguarded(stream)
    plain.write("".join(f"{line}\n" for line in StyleRenderer(plain).render_lines(lines)))
    plain.flush()


class StyleRenderer:
    """Renders styles as the terminal understands them.

    The package rich knows NO_COLOR, TERM and the number of colours. Without it, and for a file or
    a pipe, there are no styles.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = _create_console() if stream.isatty() else None

    def render_lines(self, lines: Iterable[StyledLine]) -> list[str]:
        """Return each line with the sequences of its styles."""
        return [self._render_line(line) for line in lines]

    def _render_line(self, line: StyledLine) -> str:
        text = sanitize.escape_text(str(line))
        if self._console is None or text != str(line):
            return text
        from rich.text import Text

        with self._console.capture() as captured:
            spans = [(span, RICH_STYLES.get(style, "")) for span, style in line.spans]
            self._console.print(Text.assemble(*spans), end="", no_wrap=True, crop=False)
        return captured.get().rstrip()


class LiveTable:
    """A table on a terminal that is drawn again in the same place."""

    def __init__(self, stream: TextIO) -> None:
        # The guard escapes the cursor movements too; the lines are escaped here.
        self._stream = _find_unguarded(stream)
        self._renderer = StyleRenderer(self._stream)
        self._drawn_count = 0
        self._shown: list[str] = []

    def show_rows(
        self,
        rows: Sequence[status_table.PoolRow],
        *,
        now: float,
        problem: str = "",
        leader: leader_status.LeaderReport | None = None,
    ) -> None:
        """Draw the table; with a problem, above the last one that was up to date."""
        del now
        size = shutil.get_terminal_size()
        lines: list[StyledLine] = []
        if problem:
            text = f"cannot update the table: {problem}"
            lines = [
                StyledLine(((line, "bad"),))
                for line in terminal.wrap_text(sanitize.escape_line(text), size.columns)
            ]
        elif leader is not None:
            lines = [*format_leader(leader, size.columns)]
        most = max(size.lines - 1 - len(lines), 1)
        self.draw_lines([*lines, *format_table(rows, size.columns, max_lines=most)])

    def draw_lines(self, lines: Sequence[StyledLine]) -> None:
        """Draw the lines over the previous ones, cut to the size of the terminal."""
        size = shutil.get_terminal_size()
        # One line stays free for the cursor: a table as tall as the terminal would scroll.
        most = max(size.lines - 1, 1)
        if len(lines) > most > 1:
            hidden = len(lines) - most + 1
            rest = f"and {hidden} more lines; treenail-controller status prints all"
            lines = [*lines[: most - 1], StyledLine(((rest, "faint"),))]
        # A wrapped line would take two rows, and the next drawing would start in the wrong row.
        shown = self._renderer.render_lines(line.cut(size.columns) for line in lines[:most])
        if shown == self._shown:
            return
        # A terminal that has become smaller cannot move the cursor above its first line.
        count = min(self._drawn_count, size.lines - 1)
        up = _CURSOR_UP.format(count) if count else ""
        text = "".join(f"{line}{_CLEAR_LINE}\n" for line in shown)
        self._stream.write(f"{_WRAP_OFF}{up}{text}{_CLEAR_BELOW}{_WRAP_ON}")
        self._stream.flush()
        self._drawn_count, self._shown = len(shown), shown


class ChangeLog:
    """A line for each change of a pool or a node, for a pipe, a file or a dumb terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: dict[tuple[str, str], str] = {}

    def show_rows(
        self,
        rows: Sequence[status_table.PoolRow],
        *,
        now: float,
        problem: str = "",
        leader: leader_status.LeaderReport | None = None,
    ) -> None:
        """Print the pools and nodes that changed."""
        self._print_change(now, ("", ""), problem and f"cannot update the table: {problem}")
        shown = () if leader is None or problem else format_leader(leader, None)
        notice = "; ".join(str(line).strip() for line in shown)
        self._print_change(now, ("", "leader"), notice)
        for row in rows:
            own = [format_blocker(blocker) for blocker in row.blockers if not blocker.node]
            text = "; ".join([f"{row.name}: {format_summary(row)}", *own])
            self._print_change(now, (row.name, ""), text)
            if row.build is not None:
                # Without the duration, which changes all the time.
                text = format_build(replace(row.build, seconds=None))
                self._print_change(now, (row.name, "image build"), f"{row.name}: {text}")
            for node in row.nodes:
                booted = format_version(node.os_image) or "-"
                reason = f": {node.reason}" if node.reason else ""
                text = f"{node.name}: {node.state or '-'}, {booted}, {node.phase}{reason}"
                self._print_change(now, (row.name, node.name), text)
        self._stream.flush()

    def _print_change(self, now: float, subject: tuple[str, str], text: str) -> None:
        if self._shown.get(subject, "") != text:
            self._shown[subject] = text
            if text:
                self._stream.write(f"{clocks.format_rfc3339(now)} {sanitize.escape_line(text)}\n")


def _create_console() -> "Console | None":
    try:
        from rich.console import Console
    except ImportError:
        return None
    # The size does not matter: the lines are cut before.
    width = max(shutil.get_terminal_size().columns, 1000)
    console = Console(width=width, highlight=False, emoji=False, markup=False, force_terminal=True)
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    return None if is_dumb or os.environ.get("NO_COLOR") else console


def _find_unguarded(stream: TextIO) -> TextIO:
    return stream.unguarded if isinstance(stream, output.GuardedStream) else stream
