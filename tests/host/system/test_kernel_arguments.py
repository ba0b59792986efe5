"""Edits of kernel arguments, with their order and repetitions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.host.system.kernel import compute_edit, is_satisfied, split_arguments

WORDS = st.lists(st.sampled_from(["a", "b=1", "b=2", "c", "quiet"]), max_size=6)


def edited(existing: list[str], append: list[str], delete: list[str]) -> list[str]:
    removed, added = compute_edit(existing, append, delete)
    rest = list(existing)
    for argument in removed:
        rest.remove(argument)
    return [*rest, *added]


def test_split_arguments_keeps_quoted_blanks_and_quotes() -> None:
    text = ' root=UUID=1  a="b c" "d e"=f\tnosmt bar="open end'
    assert split_arguments(text) == (
        "root=UUID=1", 'a="b c"', '"d e"=f', "nosmt", 'bar="open end',
    )  # fmt: skip


@pytest.mark.parametrize(
    ("existing", "append", "delete", "after"),
    [
        ("rw quiet", "nosmt", "", "rw quiet nosmt"),
        ("rw nosmt", "nosmt", "", "rw nosmt"),
        ("rw quiet", "", "quiet gone", "rw"),
        ("rw a a", "", "a", "rw"),
        ("rw", "hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=4", "",
         "rw hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=4"),
        ("rw y=0 z=4", "y=1 z=4", "", "rw y=0 z=4 y=1 z=4"),
        ("rw a b", "b a", "a b", "rw b a"),
        ("console=ttyS0 rw", "console=tty0 console=ttyS0", "",
         "console=ttyS0 rw console=tty0 console=ttyS0"),
        ("rw old", "old new", "old", "rw old new"),
    ],
)  # fmt: skip
def test_edit_appends_missing_and_deletes_present_arguments(
    existing: str, append: str, delete: str, after: str
) -> None:
    assert edited(existing.split(), append.split(), delete.split()) == after.split()


@given(existing=WORDS, append=WORDS, delete=WORDS)
def test_edit_satisfies_change_and_is_idempotent(
    existing: list[str], append: list[str], delete: list[str]
) -> None:
    after = edited(existing, append, delete)
    assert is_satisfied(after, append, delete)
    assert compute_edit(after, append, delete) == ((), ())
