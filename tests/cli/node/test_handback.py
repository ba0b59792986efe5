"""A node goes to the Machine Config Daemon and comes back, and nothing is found to differ."""

import json
import os
import stat
from pathlib import Path

import pytest

from tests.cli.node.test_once import entry
from tests.cli.reaching import reachable
from tests.kube.server import serving
from treenail.api.machineconfig import MachineConfig
from treenail.cli.node.main import main
from treenail.config.wanted_state import WantedState, read_wanted_state
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.state_file import Ledger
from treenail.update.state.ledger_record import (
    LedgerRecord,
    Phase,
    Target,
    UpdateRecord,
    from_json,
    to_json,
)

NAME = "rendered-worker-a"
STATE = "etc/machine-config-daemon"
IMAGE = "quay.example/os@sha256:" + "0" * 64


def given(folder: Path, *files: dict[str, object], name: str = NAME) -> Path:
    """The file of a MachineConfig, with a unit beside its files."""
    unit = {
        "name": "a.service",
        "enabled": True,
        "contents": "[Install]\nWantedBy=multi-user.target\n",
        "dropins": [{"name": "10-b.conf", "contents": "[Service]\n"}],
    }
    config = MachineConfig.from_json(
        {
            "kind": "MachineConfig",
            "metadata": {"name": name},
            "spec": {
                "config": {
                    "ignition": {"version": "3.4.0"},
                    "storage": {"files": list(files)},
                    "systemd": {"units": [unit]},
                }
            },
        }
    )
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config.to_json()))
    return path


def bake(root: Path) -> None:
    """Give the machine the unit of `given`, as its image has it."""
    units = root / "etc/systemd/system"
    for directory in ("a.service.d", "multi-user.target.wants"):
        (units / directory).mkdir(parents=True, exist_ok=True)
    (units / "a.service").write_text("[Install]\nWantedBy=multi-user.target\n")
    (units / "a.service.d/10-b.conf").write_text("[Service]\n")
    link = units / "multi-user.target.wants/a.service"
    link.symlink_to("/etc/systemd/system/a.service")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine whose own /etc/motd the config has replaced."""
    root = tmp_path / "root"
    (root / STATE).mkdir(parents=True)
    (root / STATE / "node-annotations.json").write_text("{}")
    (root / "etc/motd").write_text("the vendor's")
    (root / "etc/motd").chmod(0o640)
    return root


@pytest.fixture
def config(tmp_path: Path, root: Path) -> Path:
    """The config that the machine has."""
    path = given(tmp_path, entry("/etc/motd", "ours"), entry("/etc/b", "b", mode=0o600))
    assert main(["once", "--root", str(root), str(path)]) == 0
    recorded(root, LedgerRecord(Target(NAME)))
    return path


def recorded(root: Path, record: LedgerRecord) -> None:
    Ledger(Root(root)).write_document(to_json(record))


def hand_back(root: Path, *arguments: object) -> int:
    return main(["handback", "--root", str(root), *map(str, arguments)])


def first_look(root: Path) -> list[str]:
    """Return the differences that the MCD finds when it starts."""
    wish: WantedState = read_wanted_state(
        MachineConfig.from_json(json.loads((root / STATE / "currentconfig").read_bytes()))
    )
    problems = []
    for path, file in wish.files.items():
        there = root / path[1:]
        if there.read_bytes() != file.contents.decode_bytes():
            problems.append(f"content mismatch for file {path}")
        if stat.S_IMODE(there.stat().st_mode) != file.mode:
            problems.append(f"mode mismatch for file {path}")
    for path, text in wish.list_unit_files().items():
        if (root / path[1:]).read_text() != text:
            problems.append(f"content mismatch for unit {path}")
    return problems


def test_handback_leaves_mcd_state_without_differences(root: Path, config: Path) -> None:
    assert hand_back(root, config) == 0
    assert first_look(root) == []
    assert sorted(path.name for path in (root / STATE).iterdir()) == ["currentconfig", "orig"]
    assert stat.S_IMODE((root / STATE / "currentconfig").stat().st_mode) == 0o600
    assert json.loads((root / STATE / "currentconfig").read_bytes()) == json.loads(
        config.read_bytes()
    )


def test_handback_moves_backups_to_mcd_directory(root: Path, config: Path) -> None:
    assert hand_back(root, config) == 0
    kept = root / STATE / "orig/etc/motd.mcdorig"
    assert (kept.read_text(), stat.S_IMODE(kept.stat().st_mode)) == ("the vendor's", 0o640)
    assert kept.stat().st_uid == os.geteuid()


def test_takeover_after_handback_changes_nothing(
    root: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hand_back(root, config) == 0
    assert Ledger(Root(root)).read_document() is None
    capsys.readouterr()
    assert main(["once", "--root", str(root), str(config)]) == 0
    assert capsys.readouterr().out == "nothing to do\n"
    assert main(["once", "--root", str(root), str(given(tmp_path, name="b"))]) == 0
    assert (root / "etc/motd").read_text() == "the vendor's"
    assert not (root / "etc/b").exists()


def test_handback_renames_ledger(root: Path, config: Path) -> None:
    assert hand_back(root, config) == 0
    kept = root / "var/lib/treenail/ledger.json.handed-back"
    assert from_json(json.loads(kept.read_bytes())) == LedgerRecord(Target(NAME))
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_handback_in_image_mode_writes_current_image(root: Path, tmp_path: Path) -> None:
    recorded(root, LedgerRecord(Target(NAME, IMAGE)))
    config = given(tmp_path, entry("/usr/share/in-the-image", "x"))
    assert hand_back(root, config) == 1, "the Machine Config Daemon compares the whole config"
    bake(root)
    (root / "usr/share").mkdir(parents=True)
    (root / "usr/share/in-the-image").write_text("x")
    assert hand_back(root, config) == 0
    assert (root / STATE / "currentimage").read_text() == IMAGE


def test_handback_without_api_server_prints_annotations(
    root: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hand_back(root, "--json", config) == 0
    document = json.loads(capsys.readouterr().out)
    assert "kubeconfig" in document["problem"]
    assert document["annotations"]["machineconfiguration.openshift.io/state"] == "Done"
    assert f"/{STATE}/currentconfig" in document["files"]


def test_handback_of_drifted_machine_is_refused(
    root: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "etc/b").write_text("another")
    assert hand_back(root, config) == 1
    assert "write /etc/b" in capsys.readouterr().err
    assert not (root / STATE / "currentconfig").exists()
    assert Ledger(Root(root)).read_document() is not None


def test_handback_during_update_or_with_agent_is_refused(
    root: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Ledger(Root(root)).hold_lock():
        assert hand_back(root, config) == 1
    assert "systemctl stop treenail" in capsys.readouterr().err
    update = UpdateRecord("1", Target("b"), Target(NAME), Phase.STAGING, "x", 1.0, 1.0)
    recorded(root, LedgerRecord(Target(NAME), update))
    assert hand_back(root, config) == 64
    assert "an update to b is in progress" in capsys.readouterr().err


def test_handback_with_other_config_is_rejected(
    root: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hand_back(root) == 64
    assert f"kubectl get machineconfig {NAME}" in capsys.readouterr().err
    assert hand_back(root, given(tmp_path, name="another")) == 64
    assert f"expected {NAME}" in capsys.readouterr().err


def test_handback_with_api_server_annotates_node(root: Path, tmp_path: Path) -> None:
    """Image mode, requested in a spelling that the MCD does not know."""
    prefix = "machineconfiguration.openshift.io"
    node = {
        "metadata": {
            "name": "a",
            "annotations": {
                f"{prefix}/currentConfig": NAME,
                f"{prefix}/desiredOSImage": IMAGE,
                f"{prefix}/state": "Done",
                f"{prefix}/reason": "",
            },
        }
    }
    recorded(root, LedgerRecord(Target(NAME, IMAGE)))
    bake(root)
    with serving(tmp_path, lambda exchange: exchange.reply(node)) as server:
        reachable(root, server)
        assert hand_back(root, given(tmp_path)) == 0
        get, patch = server.seen
    assert (get.method, get.path) == ("GET", "/api/v1/nodes/a")
    assert (patch.method, patch.json) == (
        "PATCH",
        {
            "metadata": {
                "annotations": {
                    f"{prefix}/currentImage": IMAGE,
                    f"{prefix}/desiredImage": IMAGE,
                    f"{prefix}/desiredOSImage": None,
                }
            }
        },
    )
