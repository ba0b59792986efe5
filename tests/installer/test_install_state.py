"""install.json: read by the version that wrote it, and refused otherwise."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.clock import FakeClock
from treenail.errors import ConfigError
from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.installer.directory.install_state import (
    InstallState,
    InstallStateError,
    StepState,
    compute_checksum,
    find_changed_inputs,
    find_lock_holder,
    hold_install_lock,
)


def load(root: Path) -> InstallState:
    return InstallState(InstallDirectory(root), InstallFiles(), FakeClock())


def test_state_of_a_new_process_is_that_of_the_old_one(tmp_path: Path) -> None:
    first = load(tmp_path)
    first.begin_step("render", {"a": "1"})
    first.finish_step("render", {"master": "rendered-master-1"})
    first.begin_step("build:master", {"b": "1"})
    first.fail_step("build:master", ConfigError("cannot build", remedy="fix it"))
    second = load(tmp_path)
    assert second.record == first.record
    assert second.id == first.id
    found = second.find_step("build:master")
    assert (found.state, found.reason, found.remedy) == (
        StepState.FAILED,
        "cannot build",
        "fix it",
    )
    assert (tmp_path / ".treenail" / "install.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / ".treenail").stat().st_mode & 0o777 == 0o700


def test_begin_of_a_step_forgets_the_later_ones(tmp_path: Path) -> None:
    state = load(tmp_path)
    for name in ("render", "build", "publish"):
        state.begin_step(name, {})
        state.finish_step(name, {})
    state.begin_step("build", {})
    assert [each.name for each in state.record.steps] == ["render", "build"]
    assert [each.attempts for each in state.record.steps] == [1, 2]


def test_changed_inputs_are_named(tmp_path: Path) -> None:
    before = {"a": "1", "b": "1", "c": "1"}
    now = {"a": "1", "b": "2", "d": "1"}
    assert find_changed_inputs(before, now) == ("b changed", "c removed", "d added")


def change_document(change: Callable[[dict[str, Any]], None], content: bytes) -> bytes:
    """Return a document with a change and the right checksum, as another version writes it."""
    document: dict[str, Any] = json.loads(content)
    document.pop("checksum")
    change(document)
    return json.dumps({**document, "checksum": compute_checksum(document)}).encode()


def _set_version(document: dict[str, Any]) -> None:
    document["version"] = 2


def _add_field(document: dict[str, Any]) -> None:
    document["colour"] = "red"


def _add_step_field(document: dict[str, Any]) -> None:
    document["steps"][0]["colour"] = "red"


def _set_state(document: dict[str, Any]) -> None:
    document["steps"][0]["state"] = "paused"


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda content: content[:-20], "it is damaged: "),
        (lambda _: b"", "it is damaged: "),
        (lambda _: b"[]", "it is not a JSON object"),
        (lambda _: b"[" * 100_000, "it is nested too deep"),
        (lambda content: content.replace(b"render", b"rander"), "differs from its checksum"),
        (lambda content: change_document(_set_version, content), "its version is 2, and this"),
        (lambda content: change_document(_add_field, content), "know the field colour"),
        (lambda content: change_document(_add_step_field, content), r"field steps\[0\].colour"),
        (
            lambda content: change_document(_set_state, content),
            "state: expected one of running, done, failed, found 'paused'",
        ),
    ],
)
def test_a_state_that_cannot_be_read_is_refused_with_the_remedy(
    tmp_path: Path, damage: Callable[[bytes], bytes], cause: str
) -> None:
    load(tmp_path).begin_step("render", {})
    path = tmp_path / ".treenail" / "install.json"
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(InstallStateError, match=cause) as caught:
        load(tmp_path)
    assert f"treenail-controller install reset --dir {tmp_path}" in caught.value.remedy
    assert path.read_bytes() == damaged


def test_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    directory = InstallDirectory(tmp_path)
    assert find_lock_holder(directory) is None
    with hold_install_lock(directory, InstallFiles()):
        holder = find_lock_holder(directory)
        assert holder
        with (
            pytest.raises(InstallStateError, match=f"another process, PID {holder},") as caught,
            hold_install_lock(directory, InstallFiles()),
        ):
            pass
        assert "install wait-for bootstrap-complete" in caught.value.remedy
    assert find_lock_holder(directory) is None
    with hold_install_lock(directory, InstallFiles()):
        pass


def test_lock_waits_for_a_command_that_looks_at_it(tmp_path: Path) -> None:
    class ReleasingClock(FakeClock):
        """A clock during whose first sleep the other command ends."""

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            os.close(looking)

    directory = InstallDirectory(tmp_path)
    with hold_install_lock(directory, InstallFiles()):
        pass
    looking = os.open(directory.private / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    with hold_install_lock(directory, InstallFiles(), ReleasingClock()):
        assert find_lock_holder(directory) == os.getpid()
