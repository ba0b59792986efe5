"""``treenail drift`` of a machine on which no agent runs."""

import json
import stat
from pathlib import Path

import pytest

from tests.cli.node.test_once import entry, written
from tests.cli.node.test_plan_node import config, kept
from treenail.cli.main import main
from treenail.host.filesystem.root import Root
from treenail.host.system.state_file import Ledger
from treenail.update.state.record import LedgerRecord, Target, to_json

CURRENT = LedgerRecord(Target("rendered-a"))
CANARY = "Canary7Zq"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine that is as its config says."""
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "proc/cmdline").write_text("quiet\n")
    files = (
        entry("/etc/a", "one\ntwo\n"),
        entry("/etc/b", "b"),
        entry("/etc/secret", CANARY, mode=0o600),
    )
    path = kept(root, config("rendered-a", *files))
    assert main(["once", "--root", str(root), str(path)]) == 0
    Ledger(Root(root)).write_document(to_json(CURRENT))
    return root


def drift(root: Path, *options: str) -> int:
    return main(["drift", "--root", str(root), *options])


def test_machine_that_is_as_its_config_says_has_not_drifted(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert drift(root) == 0
    assert capsys.readouterr().out == "the machine is as rendered-a says\n"


def test_what_drifted_is_shown_with_its_difference_and_no_secret(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "etc/a").write_text("one\n2\n")
    (root / "etc/b").chmod(0o600)
    (root / "etc/secret").write_text(f"{CANARY}{CANARY}")
    capsys.readouterr()
    assert drift(root) == 4
    assert capsys.readouterr().out == (
        "/etc/a: other contents (holds updates up)\n"
        "    @@ -1,2 +1,2 @@\n"
        "     one\n"
        "    -two\n"
        "    +2\n"
        "/etc/b: expected mode 0644, found 0600 (holds updates up)\n"
        "/etc/secret: other contents (holds updates up)\n"
        "    (contents withheld: 9 bytes -> 18 bytes)\n"
    )


def test_what_drifted_is_told_to_programs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "etc/treenail").mkdir()
    (root / "etc/treenail/agent.toml").write_text('[drift]\n[drift.paths]\n"/etc/*" = "report"\n')
    (root / "etc/b").unlink()
    capsys.readouterr()
    assert drift(root, "--json") == 4
    assert json.loads(capsys.readouterr().out) == {
        "config": "rendered-a",
        "drifts": [
            {
                "subject": "/etc/b",
                "attribute": "kind",
                "expected": "file",
                "actual": "nothing",
                "reaction": "report",
                "diff": {"lines": [], "note": ""},
            }
        ],
    }


def test_only_what_is_named_is_put_right(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "etc/a").write_text("another")
    (root / "etc/b").write_text("another")
    assert drift(root, "--heal", "/etc/a") == 4
    assert (root / "etc/a").read_text() == "one\ntwo\n"
    assert (root / "etc/b").read_text() == "another"
    assert drift(root, "--heal", "/etc/b") == 0
    assert (root / "etc/b").read_text() == "b"
    assert drift(root, "--heal", "/etc/b") == 2
    assert "/etc/b has not drifted" in capsys.readouterr().err


def test_node_that_nothing_is_known_of_is_compared_with_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "var/lib/treenail/configs/rendered-a.json").unlink()
    assert drift(root) == 1
    Ledger(Root(root)).write_document(to_json(LedgerRecord()))
    (root / "var/lib/treenail/once.json").unlink()
    assert drift(root) == 1
    told = capsys.readouterr().err
    assert "no copy of rendered-a on this machine" in told
    assert "no config of this machine is recorded" in told


def test_directory_is_compared_with_what_once_brought_it_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "tree"
    (root / "etc").mkdir(parents=True)
    file = written(tmp_path / "file", {"files": [entry("/etc/a", "a"), entry("/etc/b", "b")]})
    assert drift(root) == 1
    assert "no config of this machine is recorded" in capsys.readouterr().err
    assert main(["once", "--root", str(root), file]) == 0
    capsys.readouterr()
    assert drift(root) == 0
    assert capsys.readouterr().out == "the machine is as the config of treenail once says\n"
    (root / "etc/a").unlink()
    (root / "etc/b").write_text("c")
    assert drift(root) == 4
    assert capsys.readouterr().out == (
        "/etc/a: expected kind file, found nothing (holds updates up)\n"
        "/etc/b: other contents (holds updates up)\n"
        "    @@ -1,1 +1,1 @@\n"
        "    -b\n"
        "    +c\n"
    )
    assert drift(root, "--heal", "/etc/a", "/etc/b") == 0
    assert ((root / "etc/a").read_text(), (root / "etc/b").read_text()) == ("a", "b")


def test_what_once_left_out_has_not_drifted(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "etc").mkdir(parents=True)
    file = tmp_path / "file"
    spec = {"kernelArguments": ["quiet"], "extensions": ["usbguard"]}
    file.write_text(json.dumps({"kind": "MachineConfig", "metadata": {"name": "a"}, "spec": spec}))
    assert main(["once", "--root", str(root), str(file)]) == 0
    assert drift(root) == 0


def test_copy_of_the_config_is_for_its_owner_and_a_damaged_one_is_told(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(Root(root)).write_document(to_json(LedgerRecord()))
    copy = root / "var/lib/treenail/once.json"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert drift(root) == 0
    copy.write_text("{")
    assert drift(root) == 1
    assert "once.json is damaged" in capsys.readouterr().err


def test_arguments_of_a_tree_that_was_not_booted_are_not_known(root: Path) -> None:
    (root / "proc/cmdline").unlink()
    assert drift(root) == 0


def test_what_was_booted_is_not_put_right_by_the_command(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(root, config("rendered-a", kernelArguments=["nosmt"]))
    assert drift(root) == 4
    assert drift(root, "--heal", "kernel command line") == 2
    told = capsys.readouterr().err
    assert "what was booted can't be put right while it runs" in told
    assert "touch /run/machine-config-daemon-force" in told
