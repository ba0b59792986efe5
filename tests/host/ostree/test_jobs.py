"""Failures of commands that ran in transient units."""

import pytest

from treenail.host.ostree.jobs import describe_failure
from treenail.host.systemd.transient import TransientRun


@pytest.mark.parametrize(
    ("result", "status", "text", "described"),
    [
        ("exit-code", 1, "no space left on device", "no space left on device"),
        ("exit-code", 1, "", "systemd reports exit-code 1"),
        ("signal", 9, "Deploying...", "SIGKILL ended it; its last line: Deploying..."),
        ("core-dump", 6, "", "SIGABRT ended it"),
        ("signal", 99, "", "signal 99 ended it"),
        ("oom-kill", 9, "", "the kernel, which ran out of memory, killed it"),
    ],
)
def test_failure_of_a_killed_program_names_the_signal(
    result: str, status: int, text: str, described: str
) -> None:
    run = TransientRun("treenail: pull", False, result, status, "f00d")
    assert describe_failure(run, text) == described
