"""Kernel arguments of the machine and of its configs, with their order and repetitions."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail import deployment_change

HOST = "root=UUID=1 rw console=tty0 console=ttyS0 ostree=/ostree/boot.0/x boot=UUID=2"
"""What an installation leaves; rpm-ostree appends behind it."""
WORDS = st.lists(
    st.sampled_from(["a", "b=1", "b=2", "c", 'd="x y"', "console=tty0", "e-f=1", "e_f=2"]),
    max_size=6,
)


@dataclass
class Node:
    """A machine that follows configs, and remembers what treenail's ledger remembers."""

    booted: tuple[str, ...]
    config: tuple[str, ...] = ()
    recorded: dict[str, int] = field(default_factory=dict)
    first: tuple[str, ...] = ()

    def plan(self, config: list[str]) -> tuple[deployment_change.DeploymentChange, dict[str, int]]:
        known = deployment_change.merge_counts(self.first, self.booted, self.recorded)
        counts = deployment_change.count_machine_arguments(self.config, config, self.booted, known)
        return deployment_change.compute_edit(counts, config, self.booted), counts

    def reach(self, config: list[str]) -> deployment_change.DeploymentChange:
        edit, counts = self.plan(config)
        self.booted = deployment_change.apply_edit(self.booted, edit)
        self.config, self.recorded = tuple(config), counts
        return edit


def split(text: str) -> list[str]:
    return list(deployment_change.split_arguments(text))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("  ", []),
        (' baz=test bar="hello world"', ["baz=test", 'bar="hello world"']),
        ('a="x y"z b "d e"=f', ['a="x y"z', "b", '"d e"=f']),
        ('a="open end', ['a="open end']),
        ("hugepagesz=1G\thugepages=4", ["hugepagesz=1G", "hugepages=4"]),
    ],
)
def test_quotes_protect_spaces_in_kernel_arguments(text: str, arguments: list[str]) -> None:
    assert split(text) == arguments


@given(st.text(st.sampled_from('ab= \t"')))
def test_split_drops_only_spaces(text: str) -> None:
    arguments = split(text)
    assert all(argument.strip() for argument in arguments)
    assert "".join("".join(arguments).split()) == "".join(text.split())


CASES = {
    "new": ("rw", ["a b=1"], "rw a b=1"),
    "more": ("rw", ["a", "a b"], "rw a b"),
    "fewer": ("rw", ["a b c", "b"], "rw b"),
    "none left": ("rw", ["a b", ""], "rw"),
    "another order": ("rw", ["a b", "b a"], "rw b a"),
    "booted already": ("rw a b", ["a b"], "rw a b"),
    "of the installation": (HOST, ["root=UUID=1 rw", ""], HOST),
    "of the installation, then another": (HOST, ["root=UUID=1 a", "a"], f"{HOST} a"),
    "key without value": ("rw nosmt", ["nosmt quiet", "quiet"], "rw nosmt quiet"),
    "key with and without value": ("rw nosmt", ["nosmt=force", ""], "rw nosmt"),
    "last of its key": (HOST, ["console=tty0"], f"{HOST} console=tty0"),
    "last of its key, then gone": (HOST, ["console=tty0", ""], HOST),
    "last of its key already": (HOST, ["console=ttyS0"], HOST),
    "end of the host's": (HOST, ["console=tty0 console=ttyS0 a"], f"{HOST} a"),
    "overlap": (HOST, ["console=ttyS0 console=tty0", ""], HOST),
    "dashes": ("a-b=1 a_b=2", ["a-b=1"], "a-b=1 a_b=2 a-b=1"),
    "repeated": ("rw", ["a=1 a=1", "a=1"], "rw a=1"),
    "repeated, once by the host": ("rw a=1", ["a=1 a=1", ""], "rw a=1"),
    "repeated by the host": ("a=1 rw a=1", ["a=1 b", "b"], "a=1 rw a=1 b"),
    "pairs": (
        "hugepagesz=1G hugepages=4",
        ["hugepagesz=2M hugepages=4", "hugepagesz=2M hugepages=6"],
        "hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=6",
    ),
    "quotes": ("rw", ['a="b c" d', 'a="b c"'], 'rw a="b c"'),
    "quotes of the boot loader": ('rw "a=b c"', ['a="b c"'], 'rw "a=b c"'),
}  # fmt: skip


@pytest.mark.parametrize(("before", "configs", "after"), CASES.values(), ids=CASES)
def test_configs_leave_arguments_of_the_machine(
    before: str, configs: list[str], after: str
) -> None:
    node = Node(tuple(split(before)))
    for config in configs:
        node.reach(split(config))
    assert node.booted == tuple(split(after))


@pytest.mark.parametrize(
    ("first", "booted", "config", "after"),
    [
        # What a config appended is behind the installation's arguments.
        ("", f"{HOST} a b", "a b", HOST),
        # The installation had it: CoreOS appends boot= in the first boot.
        ("", HOST.replace("rw", "rw rd.multipath=default"), "rd.multipath=default", ""),
        ("", "ostree=x a root=UUID=1 rw", "a", ""),
        # Nothing tells which arguments are those of the installation.
        ("", "root=/dev/mapper/m rd.multipath=default", "rd.multipath=default", ""),
        # More often than the config says.
        ("", f"a {HOST} a", "a", f"a {HOST}"),
        # A user appended it once more.
        ("", f"{HOST} a a", "a", f"{HOST} a"),
        # The first boot is known, of a machine whose installer appends behind ostree=.
        ("ostree=x a", "ostree=x a", "a", ""),
        ("ostree=x", "ostree=x a", "a", "ostree=x"),
    ],
)
def test_config_of_another_agent_is_removed_where_it_added_for_certain(
    first: str, booted: str, config: str, after: str
) -> None:
    node = Node(tuple(split(booted)), tuple(split(config)), first=tuple(split(first)))
    node.reach([])
    assert node.booted == tuple(split(after or booted))


def test_later_argument_of_the_same_key_makes_the_config_come_last_again() -> None:
    node = Node(tuple(split(HOST)))
    node.reach(["a", "console=tty0"])
    # By hand, or by kargs.d of a newer image.
    node.booted = (*node.booted, "console=ttyS1", "quiet")
    assert not deployment_change.are_effective(node.config, node.booted)
    assert deployment_change.list_differences(node.config, node.booted) == (
        ("console=tty0", "a later console=ttyS1"),
    )
    assert not deployment_change.is_applied(node.booted, node.plan(["a", "console=tty0"])[0])
    node.reach(["a", "console=tty0"])
    assert node.booted == tuple(split(f"{HOST} console=ttyS1 quiet a console=tty0"))
    assert node.reach(["a", "console=tty0"]) == deployment_change.DeploymentChange()
    node.reach([])
    assert node.booted == tuple(split(f"{HOST} console=ttyS1 quiet"))


def test_record_of_the_last_update_replaces_that_of_the_first_boot() -> None:
    # A user removed the machine's own.
    node = Node(("ostree=x",), first=("ostree=x", "a"))
    node.reach(["a"])
    node.reach([])
    assert node.booted == ("ostree=x",)


def test_command_line_of_another_deployment_loses_nothing_of_the_machine() -> None:
    node = Node(tuple(split(HOST)))
    before = node.booted
    node.reach(["console=tty0"])
    # The previous deployment is booted, and the ledger still has the config.
    node.booted = before
    node.reach([])
    assert node.booted == before


@given(host=WORDS, configs=st.lists(WORDS, min_size=1, max_size=4))
def test_machine_has_its_arguments_back_after_any_configs(
    host: list[str], configs: list[list[str]]
) -> None:
    node = Node(tuple(host))
    for config in configs:
        before = node.booted
        edit = node.reach(config)
        assert deployment_change.are_effective(config, node.booted)
        # A step that is repeated after a crash, before or after the reboot, changes nothing more.
        assert deployment_change.apply_edit(node.booted, edit) == node.booted
        assert deployment_change.is_applied(node.booted, edit)
        assert (edit == deployment_change.DeploymentChange()) is deployment_change.is_applied(
            before, edit
        )
        assert node.plan(config)[0] == deployment_change.DeploymentChange()
    node.reach([])
    assert node.booted == tuple(host)


@given(host=WORDS, old=WORDS, new=WORDS)
def test_drift_names_a_difference_exactly_if_the_config_is_not_effective(
    host: list[str], old: list[str], new: list[str]
) -> None:
    node = Node(tuple(host))
    node.reach(old)
    differences = deployment_change.list_differences(new, node.booted)
    assert bool(differences) is not deployment_change.are_effective(new, node.booted)
