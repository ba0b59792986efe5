"""What a benchmark found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """One number. ``at_most`` is the aim; None when the number is there to compare with."""

    name: str
    unit: str
    value: float
    at_most: float | None = None

    @property
    def verdict(self) -> str:
        if self.at_most is None:
            return ""
        return "met" if self.value <= self.at_most else "MISSED"
