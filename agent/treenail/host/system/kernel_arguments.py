"""Kernel arguments, whose order and repetitions are significant."""

import re
from collections.abc import Sequence

_ARGUMENT = re.compile(r'(?:[^\s"]|"[^"]*"?)+')


def split_arguments(text: str) -> tuple[str, ...]:
    """Split a kernel command line; text in double quotes stays together, with its quotes."""
    return tuple(_ARGUMENT.findall(text))


def is_satisfied(existing: Sequence[str], append: Sequence[str], delete: Sequence[str]) -> bool:
    """Whether ``delete`` is absent, and ``append`` comes last among the same arguments."""
    if any(argument in existing for argument in delete if argument not in append):
        return False
    concerned = [argument for argument in existing if argument in append]
    return not append or concerned[-len(append) :] == list(append)


def compute_edit(
    existing: Sequence[str], append: Sequence[str], delete: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compute the arguments to remove from ``existing``, and then to append to it.

    Both are empty when ``existing`` satisfies the change already. An argument of ``delete`` is
    removed as often as it occurs.
    """
    if is_satisfied(existing, append, delete):
        return (), ()
    removed = tuple(argument for argument in existing if argument in delete)
    rest = [argument for argument in existing if argument not in delete]
    return removed, () if is_satisfied(rest, append, ()) else tuple(append)
