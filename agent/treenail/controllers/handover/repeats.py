"""Pauses between equal writes whose effect no watch shows yet."""

from dataclasses import dataclass

_FIRST_S, _MAX_S = 0.1, 30.0


@dataclass(frozen=True, slots=True)
class Repeats:
    """The last writes, and the pause before equal ones: it doubles each time."""

    names: tuple[str, ...] = ()
    written_at: float = 0.0
    """Monotonic."""
    pause_s: float = _FIRST_S

    def compute_wait_s(self, names: tuple[str, ...], now: float) -> float:
        """Return the seconds before these writes may be sent; 0 for other ones than the last."""
        return max(self.written_at + self.pause_s - now, 0.0) if names == self.names else 0.0

    def follow(self, names: tuple[str, ...], now: float) -> "Repeats":
        """Return the record after these writes."""
        is_equal = names == self.names
        return Repeats(names, now, min(2 * self.pause_s, _MAX_S) if is_equal else _FIRST_S)
