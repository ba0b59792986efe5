"""Results of benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """One measured value. ``at_most`` is its target; None for a value without one."""

    name: str
    unit: str
    value: float
    at_most: float | None = None

    @property
    def verdict(self) -> str:
        if self.at_most is None:
            return ""
        return "met" if self.value <= self.at_most else "MISSED"
