"""Kernel arguments as libostree edits them."""

import pytest

from treenail_lab.machine.ostree.kernel_arguments import KernelArguments
from treenail_lab.machine.ostree.steps import OperationFailed


def test_argument_that_names_the_deployment_is_left_out() -> None:
    arguments = KernelArguments("root=LABEL=root rw ostree=/ostree/deploy/x")
    assert arguments.values() == ("root=LABEL=root", "rw")


def test_quotes_keep_blanks_together() -> None:
    assert KernelArguments('a="b c" d').values() == ('a="b c"', "d")


def test_append_repeats_and_append_if_missing_does_not() -> None:
    arguments = KernelArguments("quiet")
    arguments.append("quiet")
    assert not arguments.append_if_missing("quiet")
    assert arguments.append_if_missing("splash")
    assert arguments.values() == ("quiet", "quiet", "splash")


def test_delete_takes_one_value_of_several() -> None:
    arguments = KernelArguments("console=tty0 console=ttyS0")
    arguments.delete("console=tty0")
    assert arguments.values() == ("console=ttyS0",)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("nosmt", "No key 'nosmt' found"),
        ("console=hvc0", "No karg 'console=hvc0' found"),
        ("console", "Multiple values for key 'console' found"),
    ],
)
def test_delete_of_what_is_not_there_fails(argument: str, text: str) -> None:
    with pytest.raises(OperationFailed, match=text):
        KernelArguments("console=tty0 console=ttyS0").delete(argument)


def test_delete_if_present_never_fails() -> None:
    arguments = KernelArguments("a=1 b")
    assert not arguments.delete_if_present("a=2")
    assert not arguments.delete_if_present("c")
    assert arguments.delete_if_present("a=1")
    assert arguments.values() == ("b",)


def test_replace_changes_the_only_value_or_the_named_one() -> None:
    arguments = KernelArguments("a=1 console=tty0 console=ttyS0")
    arguments.replace("a=2")
    arguments.replace("console=tty0=hvc0")
    assert arguments.values() == ("a=2", "console=hvc0", "console=ttyS0")


def test_replacing_a_key_with_several_values_fails() -> None:
    with pytest.raises(OperationFailed, match="Multiple values"):
        KernelArguments("console=tty0 console=ttyS0").replace("console=hvc0")
