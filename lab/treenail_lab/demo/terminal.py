"""Where the picture of a rollout is shown: redrawn on a terminal, line by line elsewhere."""

import shutil
from typing import TextIO

from treenail_lab.demo.table import NodeView, PoolView, lines

_UP = "\x1b[{}A"
_CLEAR = "\x1b[K"
_COLOURS = {"Done": "32", "Working": "33", "Degraded": "31", "Unreconcilable": "31"}


class Screen:
    """One place on a stream that always shows the latest picture."""

    def __init__(self, stream: TextIO, *, title: str) -> None:
        self._stream = stream
        self._title = title
        self._live = stream.isatty()
        self._drawn = 0
        self._said = ""
        self._told: dict[str, tuple[str, str, str, str]] = {}

    def tell(self, text: str) -> None:
        """Print something before the picture."""
        self._stream.write(f"{text.rstrip()}\n\n")
        self._stream.flush()

    def show(self, nodes: list[NodeView], pool: PoolView, seconds: float) -> None:
        """Show how it is; elsewhere than on a terminal, what changed."""
        if self._live:
            self._draw(lines(nodes, pool, title=self._title, seconds=seconds))
            return
        if self._said != pool.sentence:
            self._said = pool.sentence
            self._stream.write(f"{seconds:6.1f} s  pool {pool.name}: {pool.sentence}\n")
        for node in nodes:
            now = (node.state, node.phase, node.version, node.reason)
            if self._told.get(node.name) != now:
                self._told[node.name] = now
                phase = node.phase or ("done" if node.updated else "waiting")
                reason = f": {node.reason}" if node.reason else ""
                booted = node.version or "down"
                self._stream.write(
                    f"{seconds:6.1f} s  {node.name:<10} {node.state:<9} {booted:<12} "
                    f"{phase}{reason}\n"
                )
        self._stream.flush()

    def end(self) -> None:
        """Leave the last picture where it is."""
        if not self._live:
            self._stream.write("\n")
        self._drawn = 0

    def _draw(self, picture: list[str]) -> None:
        # A line that wraps would be two, and the next picture would miss its place.
        width = shutil.get_terminal_size().columns
        up = _UP.format(self._drawn) if self._drawn else ""
        drawn = "".join(f"{_coloured(line[:width])}{_CLEAR}\n" for line in picture)
        # Lines that the last picture had and this one has not.
        below = f"{_CLEAR}\n" * max(self._drawn - len(picture), 0)
        self._stream.write(up + drawn + below)
        self._drawn = max(self._drawn, len(picture))
        self._stream.flush()


def _coloured(line: str) -> str:
    for state, colour in _COLOURS.items():
        line = line.replace(f" {state} ", f" \x1b[{colour}m{state}\x1b[0m ", 1)
    return line
