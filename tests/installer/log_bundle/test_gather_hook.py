"""The hook adds the log bundle to the files that the OpenShift installer packs."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.installer.log_bundle.bundles import make_archive
from treenail.cli.controller.main import main
from treenail.installer.log_bundle.gather import build_gather_hook


def read_units(hook: object) -> dict[str, str]:
    assert isinstance(hook, dict)
    return {unit["name"]: unit["contents"] for unit in hook["systemd"]["units"]}


def read_command(unit: str) -> str:
    """The shell text of ExecStart, as systemd passes it."""
    found = re.search(r"^ExecStart=/bin/sh -c '(.*)'$", unit.replace("\\\n", ""), re.MULTILINE)
    assert found
    return found[1].replace("$$", "$")


def test_gather_hook_option_prints_ignition_config_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install", "prepare", "--gather-hook", "--dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == build_gather_hook()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_hook_adds_bundle_to_directory_of_installer_once(tmp_path: Path) -> None:
    bundle = make_archive(
        {"bootstrap/treenail/summary.txt": b"why", "bootstrap/treenail/logs/a": b"x"}
    )
    (tmp_path / "bundle").write_bytes(bundle)
    program = tmp_path / "bin/treenail-controller"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\nexec cat {tmp_path}/bundle\n')
    program.chmod(0o755)
    artifacts = tmp_path / "artifacts-20260101000000"
    (artifacts / "bootstrap/journals").mkdir(parents=True)
    (tmp_path / "artifacts-link").symlink_to("/")
    command = read_command(read_units(build_gather_hook())["treenail-gather.service"])
    command = command.replace("/tmp/artifacts", f"{tmp_path}/artifacts")
    environ = {"PATH": f"{program.parent}:/usr/bin:/bin"}
    for _ in range(2):
        done = subprocess.run(
            ["/bin/sh", "-c", command], env=environ, capture_output=True, check=False, timeout=30
        )
        assert (done.returncode, done.stderr) == (0, b"")
    assert (artifacts / "bootstrap/treenail/summary.txt").read_text() == "why"
    assert (artifacts / "bootstrap/treenail/logs/a").read_text() == "x"
    assert {path.name for path in artifacts.iterdir()} == {"bootstrap"}
    calls = (tmp_path / "calls").read_text()
    assert calls == "install gather --dir /opt/openshift --output -\n"


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_units_of_hook_are_valid(tmp_path: Path) -> None:
    for name, text in read_units(build_gather_hook()).items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())],
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.process
@pytest.mark.skipif(shutil.which("ignition-validate") is None, reason="no ignition-validate here")
def test_ignition_accepts_hook(tmp_path: Path) -> None:
    path = tmp_path / "hook.ign"
    path.write_text(json.dumps(build_gather_hook()))
    done = subprocess.run(
        ["ignition-validate", str(path)], capture_output=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
