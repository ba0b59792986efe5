"""Quantities of Kubernetes, such as 500m and 1Gi, and how Go writes them."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

_QUANTITY = re.compile(
    r"([+-]?)0*([0-9]{1,19}|(?=\.[0-9]))(?:\.([0-9]{0,19}))?"
    r"(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?[0-9]{1,2}))?"
)
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True, repr=False)
class Quantity:
    """A number, and its text as Go writes it."""

    number: Fraction
    text: str

    def __repr__(self) -> str:
        return self.text

    @property
    def whole(self) -> int:
        """The number rounded away from zero."""
        return math.floor(self.number) if self.number < 0 else math.ceil(self.number)


def parse_quantity(text: str) -> Quantity | None:
    """Parse a quantity; None for another text."""
    match = _QUANTITY.fullmatch(text)
    if not match:
        return None
    sign, whole, decimals, binary, decimal, exponent = match.groups(default="")
    digits, power = (whole or "0") + decimals, _BINARY.index(binary)
    scale = (int(exponent) if exponent else 3 * _DECIMAL.index(decimal) - 9) - len(decimals)
    size = int(digits) * Fraction(10) ** scale * 1024**power
    # Go keeps a text that it believes to be the shortest.
    if binary:
        is_kept = not decimals and int(digits) % 8 > 0 and len(digits) + 3 * power <= 14
    else:
        is_kept = digits[0] != "0" and not digits.endswith("000") and len(digits) <= 18
        is_kept &= scale % 3 == 0 and scale >= -9
    if not size:
        text = "0"
    elif not is_kept:
        names: tuple[str, ...] = _DECIMAL
        step, number, index = 1000, math.ceil(size * 10**9), 0
        if binary and size >= 1024 and size.denominator == 1:
            names, step, number = _BINARY, 1024, int(size)
        while number % step == 0:
            number, index = number // step, index + 1
        suffix = f"e{3 * index - 9}" if exponent and names[index] else names[index]
        text = f"{sign.strip('+')}{number}{suffix}"
    return Quantity(-size if sign == "-" else size, text)
