"""Kernel arguments as libostree edits them."""

import pytest

from treenail_lab.machine.ostree.steps import OperationError
from treenail_lab.machine.rpmostree.operations import KernelCommandLine


def test_argument_that_names_deployment_is_omitted() -> None:
    arguments = KernelCommandLine("root=LABEL=root rw ostree=/ostree/deploy/x")
    assert arguments.list_arguments() == ("root=LABEL=root", "rw")


def test_quotes_keep_blanks_together() -> None:
    assert KernelCommandLine('a="b c" d').list_arguments() == ('a="b c"', "d")


def test_append_repeats_and_append_if_missing_does_not() -> None:
    arguments = KernelCommandLine("quiet")
    arguments.append("quiet")
    assert not arguments.append_if_missing("quiet")
    assert arguments.append_if_missing("splash")
    assert arguments.list_arguments() == ("quiet", "quiet", "splash")


def test_delete_removes_one_of_several_values() -> None:
    arguments = KernelCommandLine("console=tty0 console=ttyS0")
    arguments.delete("console=tty0")
    assert arguments.list_arguments() == ("console=ttyS0",)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("nosmt", "No key 'nosmt' found"),
        ("console=hvc0", "No karg 'console=hvc0' found"),
        ("console", "Multiple values for key 'console' found"),
    ],
)
def test_delete_of_missing_argument_fails(argument: str, text: str) -> None:
    with pytest.raises(OperationError, match=text):
        KernelCommandLine("console=tty0 console=ttyS0").delete(argument)


def test_delete_if_present_never_fails() -> None:
    arguments = KernelCommandLine("a=1 b")
    assert not arguments.delete_if_present("a=2")
    assert not arguments.delete_if_present("c")
    assert arguments.delete_if_present("a=1")
    assert arguments.list_arguments() == ("b",)


def test_replace_changes_the_only_value_or_the_named_one() -> None:
    arguments = KernelCommandLine("a=1 console=tty0 console=ttyS0")
    arguments.replace("a=2")
    arguments.replace("console=tty0=hvc0")
    assert arguments.list_arguments() == ("a=2", "console=hvc0", "console=ttyS0")


def test_replacing_a_key_with_several_values_fails() -> None:
    with pytest.raises(OperationError, match="Multiple values"):
        KernelCommandLine("console=tty0 console=ttyS0").replace("console=hvc0")
