"""Kernel arguments: their order and their repetitions mean something."""

import re
from collections.abc import Sequence

_ARGUMENT = re.compile(r'(?:[^\s"]|"[^"]*"?)+')


def split_arguments(text: str) -> tuple[str, ...]:
    """The arguments of a kernel command line; what is in double quotes stays in one, quotes too."""
    return tuple(_ARGUMENT.findall(text))


def is_satisfied(existing: Sequence[str], append: Sequence[str], delete: Sequence[str]) -> bool:
    """Whether nothing of ``delete`` is there, and ``append`` is what comes last of its kind."""
    if any(argument in existing for argument in delete if argument not in append):
        return False
    concerned = [argument for argument in existing if argument in append]
    return not append or concerned[-len(append) :] == list(append)


def compute_edit(
    existing: Sequence[str], append: Sequence[str], delete: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to remove from ``existing``, and then to add at its end, so that they stand.

    Both are empty when they stand already. An argument of ``delete`` goes as often as it is there;
    one that is not there is none to remove.
    """
    if is_satisfied(existing, append, delete):
        return (), ()
    removed = tuple(argument for argument in existing if argument in delete)
    rest = [argument for argument in existing if argument not in delete]
    return removed, () if is_satisfied(rest, append, ()) else tuple(append)
