"""``treenail plan`` of a node whose API server is away: from what the agent has kept."""

import json
from pathlib import Path

import pytest

from tests.cli.node.test_once import entry
from tests.cli.reaching import reachable
from tests.kube.server import Exchange, serving
from treenail.api.machineconfig import MachineConfig
from treenail.cli.main import main
from treenail.host.filesystem.root import Root
from treenail.host.system.state_file import Ledger
from treenail.update.state.phases import Phase
from treenail.update.state.record import (
    LedgerRecord,
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


def test_update_under_way_is_planned_from_what_is_kept(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = plan(root, capsys)
    assert code == 3
    assert (told["old"], told["new"]) == ("rendered-a", "rendered-b")
    assert told["changes"] == [
        {
            "kind": "file",
            "name": "/etc/a",
            "change": "changed",
            "details": [],
            "diffs": [{"path": "/etc/a", "lines": ["@@ -1,1 +1,1 @@", "-one", "+two"], "note": ""}],
        }
    ]
    assert told["steps"][0].startswith("write /etc/a (0644")  # type: ignore[index]  # a list
    assert any("policy is taken to be the default" in note for note in told["notes"])  # type: ignore[attr-defined]  # a list


def test_what_has_drifted_is_brought_back_with_it(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "etc/same").write_text("another")
    _code, told = plan(root, capsys)
    assert [(each["name"], each["details"]) for each in told["changes"]] == [  # type: ignore[attr-defined]  # a list
        ("/etc/a", []),
        ("/etc/same", ["not as the config says"]),
    ]


def test_node_at_rest_has_nothing_to_do(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(Root(root)).write_document(to_json(LedgerRecord(OLD)))
    code, told = plan(root, capsys)
    assert (code, told["changes"]) == (0, [])


def test_what_the_agent_was_asked_for_last_is_planned(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(Root(root)).write_document(
        to_json(LedgerRecord(OLD, quarantined=QuarantinedTarget(NEW, "it broke", "mend it")))
    )
    told = plan(root, capsys)[1]
    assert told["new"] == "rendered-b"
    assert told["notes"][0] == "it is not tried again: it broke; mend it"  # type: ignore[index]  # a list
    live = root / "run/treenail/status.json"
    live.parent.mkdir(parents=True)
    live.write_text(json.dumps({"desired": {"config": "rendered-a", "image": ""}}))
    assert plan(root, capsys)[1]["new"] == "rendered-a"


def test_entering_image_mode_lets_go_of_what_was_written(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    update = UpdateRecord(
        "1" * 32, Target("rendered-b", IMAGE), OLD, Phase.STAGING, "boot", 1.0, 1.0
    )
    Ledger(Root(root)).write_document(to_json(LedgerRecord(OLD, update)))
    code, told = plan(root, capsys)
    assert code == 3
    changes = {each["name"]: each["change"] for each in told["changes"]}  # type: ignore[attr-defined]  # a list
    assert changes == {"": "changed", "/etc/a": "removed", "/etc/same": "removed"}


def test_an_image_that_bakes_nothing_leaves_files_to_the_agent(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    update = UpdateRecord(
        "1" * 32, Target("rendered-b", IMAGE), OLD, Phase.STAGING, "boot", 1.0, 1.0
    )
    Ledger(Root(root)).write_document(to_json(LedgerRecord(OLD, update)))
    settings = root / "etc/treenail/agent.toml"
    settings.parent.mkdir()
    settings.write_text('image_files = "write"')
    code, told = plan(root, capsys)
    assert code == 3
    changes = {each["name"]: each["change"] for each in told["changes"]}  # type: ignore[attr-defined]  # a list
    assert changes == {"": "changed", "/etc/a": "changed"}


def test_where_nobody_asks_for_drains_the_plan_says_that_the_node_has_to_be_drained_before(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = root / "etc/treenail/agent.toml"
    settings.parent.mkdir()
    settings.write_text('drain = "never"')
    told = plan(root, capsys)[1]
    assert told["notes"][-1] == "nobody is asked for the drain, as drain is never: drain it before"  # type: ignore[index]  # a list


def test_config_that_nobody_kept_is_asked_for_in_vain(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "var/lib/treenail/configs/rendered-b.json").unlink()
    assert main(["plan", "--root", str(root)]) == 1
    assert "no copy of rendered-b on this machine" in capsys.readouterr().err
    Ledger(Root(root)).write_document(to_json(LedgerRecord()))
    assert main(["plan", "--root", str(root)]) == 1
    assert "nothing is known" in capsys.readouterr().err


def test_api_server_is_asked_for_what_is_not_kept_and_for_the_policy(
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
        code, told = plan(root, capsys)
        assert [seen.path.rpartition("/")[2] for seen in server.seen] == ["rendered-b", "cluster"]
    assert code == 2
    assert [each["action"] for each in told["actions"]] == ["restart a.service"]  # type: ignore[attr-defined]  # a list
    assert not path.exists(), "a plan changes nothing"


def test_a_reboot_that_may_be_soft_is_announced(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    update = UpdateRecord(
        "1" * 32, Target("rendered-b", IMAGE), OLD, Phase.STAGING, "boot", 1.0, 1.0
    )
    Ledger(Root(root)).write_document(to_json(LedgerRecord(OLD, update)))
    soft = "it is a soft reboot if the kernel"
    settings = root / "etc/treenail/agent.toml"
    settings.parent.mkdir()
    for text, announced in (("", False), ('reboot = "auto"', True)):
        settings.write_text(text)
        notes = plan(root, capsys)[1]["notes"]
        assert any(note.startswith(soft) for note in notes) is announced  # type: ignore[attr-defined]  # a list
