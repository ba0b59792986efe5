"""``treenail plan`` of a node whose API server is away: from what the agent has kept."""

import json
from pathlib import Path

import pytest

from tests.cli.node.test_once import entry
from tests.cli.reaching import reachable
from tests.kube.server import Exchange, serving
from treenail.api.machineconfig import MachineConfig
from treenail.cli.node.main import main
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.state_file import Ledger
from treenail.update.state.ledger_record import (
    LedgerRecord,
    Phase,
    QuarantinedTarget,
    Target,
    UpdateRecord,
    to_json,
)

OLD, NEW = Target("rendered-a"), Target("rendered-b")
UPDATE = UpdateRecord("1" * 32, NEW, OLD, Phase.DRAINING, "boot", 1.0, 1.0)
IMAGE = "quay.example/os@sha256:" + "0" * 64


def config(name: str, *files: dict[str, object], **spec: object) -> dict[str, object]:
    document = {
        "kind": "MachineConfig",
        "metadata": {"name": name},
        "spec": {
            "config": {"ignition": {"version": "3.4.0"}, "storage": {"files": list(files)}},
            **spec,
        },
    }
    return MachineConfig.from_json(document).to_json()


def kept(root: Path, document: dict[str, object]) -> Path:
    folder = root / "var/lib/treenail/configs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['metadata']['name']}.json"  # type: ignore[index]  # an object
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node at ``rendered-a``, which is asked to be ``rendered-b``."""
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    same = entry("/etc/same", "same")
    path = kept(root, config("rendered-a", entry("/etc/a", "one\n"), same))
    kept(root, config("rendered-b", entry("/etc/a", "two\n"), same))
    assert main(["once", "--root", str(root), str(path)]) == 0
    Ledger(Root(root)).write_document(to_json(LedgerRecord(OLD, UPDATE)))
    return root


def plan(
    root: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, object]]:
    capsys.readouterr()
    code = main(["plan", "--json", "--root", str(root), *options])
    return code, json.loads(capsys.readouterr().out)


def test_plan_node_during_update_uses_stored_configs(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = plan(root, capsys)
    assert code == 3
    assert (document["old"], document["new"]) == ("rendered-a", "rendered-b")
    assert document["changes"] == [
        {
            "kind": "file",
            "name": "/etc/a",
            "change": "changed",
            "details": [],
            "diffs": [{"path": "/etc/a", "lines": ["@@ -1,1 +1,1 @@", "-one", "+two"], "note": ""}],
        }
    ]
    assert document["steps"][0].startswith("write /etc/a (0644")  # type: ignore[index]  # a list
    assert any("assumes the default node disruption policy" in note for note in document["notes"])  # type: ignore[attr-defined]  # a list


def test_plan_node_with_drift_includes_repair(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "etc/same").write_text("another")
    _code, document = plan(root, capsys)
    assert [(each["name"], each["details"]) for each in document["changes"]] == [  # type: ignore[attr-defined]  # a list
        ("/etc/a", []),
        ("/etc/same", ["the machine differs from the config"]),
    ]


def test_plan_node_at_target_is_empty(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(Root(root)).write_document(to_json(LedgerRecord(OLD)))
    code, document = plan(root, capsys)
    assert (code, document["changes"]) == (0, [])


def test_plan_node_without_update_uses_last_desired_target(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(Root(root)).write_document(
        to_json(LedgerRecord(OLD, quarantined=QuarantinedTarget(NEW, "it broke", "fix it")))
    )
    document = plan(root, capsys)[1]
    assert document["new"] == "rendered-b"
    assert document["notes"][0] == "the target is quarantined: it broke; fix it"  # type: ignore[index]  # a list
    live = root / "run/treenail/status.json"
    live.parent.mkdir(parents=True)
    live.write_text(json.dumps({"desired": {"config": "rendered-a", "image": ""}}))
    assert plan(root, capsys)[1]["new"] == "rendered-a"


def stage_image(root: Path) -> None:
    update = UpdateRecord(
        "1" * 32, Target("rendered-b", IMAGE), OLD, Phase.STAGING, "boot", 1.0, 1.0
    )
    Ledger(Root(root)).write_document(to_json(LedgerRecord(OLD, update)))


def test_plan_node_entering_image_mode_names_what_the_image_must_contain(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage_image(root)
    code, document = plan(root, capsys)
    assert code == 3
    changes = {each["name"]: each["change"] for each in document["changes"]}  # type: ignore[attr-defined]  # a list
    assert changes == {"": "changed"}
    assert document["inImage"] == ["/etc/a", "/etc/same"]


def test_plan_node_with_image_files_write_keeps_files(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage_image(root)
    settings = root / "etc/treenail/agent.toml"
    settings.parent.mkdir()
    settings.write_text('image_files = "write"')
    code, document = plan(root, capsys)
    assert code == 3
    changes = {each["name"]: each["change"] for each in document["changes"]}  # type: ignore[attr-defined]  # a list
    assert changes == {"": "changed", "/etc/a": "changed"}


def test_plan_node_without_drain_requests_notes_manual_drain(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = root / "etc/treenail/agent.toml"
    settings.parent.mkdir()
    settings.write_text('drain = "never"')
    document = plan(root, capsys)[1]
    assert (
        document["notes"][-1]
        == 'the setting drain is "never": drain the node yourself before the update'
    )  # type: ignore[index]  # a list


def test_plan_node_without_stored_config_and_api_server_fails(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "var/lib/treenail/configs/rendered-b.json").unlink()
    assert main(["plan", "--root", str(root)]) == 1
    assert "this machine stores no copy of rendered-b" in capsys.readouterr().err
    Ledger(Root(root)).write_document(to_json(LedgerRecord()))
    assert main(["plan", "--root", str(root)]) == 64
    assert "the desired target of this node is not known" in capsys.readouterr().err


def test_plan_node_fetches_missing_config_and_policy(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "var/lib/treenail/configs/rendered-b.json"
    asked_for = json.loads(path.read_text())
    path.unlink()
    policy = {
        "kind": "MachineConfiguration",
        "spec": {
            "nodeDisruptionPolicy": {
                "files": [
                    {
                        "path": "/etc/a",
                        "actions": [{"type": "Restart", "restart": {"serviceName": "a.service"}}],
                    }
                ]
            }
        },
    }

    def answer(exchange: Exchange) -> None:
        exchange.reply(asked_for if "/machineconfigs/" in exchange.seen.path else policy)

    with serving(tmp_path, answer) as server:
        reachable(root, server)
        code, document = plan(root, capsys)
        assert [seen.path.rpartition("/")[2] for seen in server.seen] == ["rendered-b", "cluster"]
    assert code == 2
    assert [each["action"] for each in document["actions"]] == ["restart a.service"]  # type: ignore[attr-defined]  # a list
    assert not path.exists(), "a plan changes nothing"


def test_plan_node_possible_soft_reboot_is_noted(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage_image(root)
    soft = "the reboot is a soft reboot, of user space only, if kernel and initramfs stay the same"
    settings = root / "etc/treenail/agent.toml"
    settings.parent.mkdir()
    for text, announced in (("", False), ('reboot = "auto"', True)):
        settings.write_text(text)
        notes = plan(root, capsys)[1]["notes"]
        assert (soft in notes) is announced  # type: ignore[attr-defined]  # a list
