"""``treenail drift`` of a machine on which no agent runs."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.node.test_once import entry, written
from tests.cli.node.test_plan_node import config, kept
from treenail.cli.node.main import main
from treenail.cli.output_format import API_VERSION
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.state_file import Ledger
from treenail.update.state.ledger_record import LedgerRecord, Target, to_json

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


def test_drift_unchanged_machine_reports_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert drift(root) == 0
    assert capsys.readouterr().out == "no drift: the machine matches rendered-a\n"


def test_drift_changed_files_shows_diff_without_secrets(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "etc/a").write_text("one\n2\n")
    (root / "etc/b").chmod(0o600)
    (root / "etc/secret").write_text(f"{CANARY}{CANARY}")
    capsys.readouterr()
    assert drift(root) == 3
    assert capsys.readouterr().out == (
        "/etc/a: contents differ (blocks updates)\n"
        "    @@ -1,2 +1,2 @@\n"
        "     one\n"
        "    -two\n"
        "    +2\n"
        "/etc/b: expected mode 0644, found 0600 (blocks updates)\n"
        "/etc/secret: contents differ (blocks updates)\n"
        "    (contents withheld: 9 bytes -> 18 bytes)\n"
    )


def test_drift_json_lists_drifts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "etc/treenail").mkdir()
    (root / "etc/treenail/agent.toml").write_text('[drift]\n[drift.paths]\n"/etc/*" = "report"\n')
    (root / "etc/b").unlink()
    capsys.readouterr()
    assert drift(root, "--json") == 3
    assert json.loads(capsys.readouterr().out) == {
        "apiVersion": API_VERSION,
        "kind": "Drift",
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


def test_drift_repair_restores_named_paths_only(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "etc/a").write_text("another")
    (root / "etc/b").write_text("another")
    assert drift(root, "--repair", "/etc/a") == 3
    assert (root / "etc/a").read_text() == "one\ntwo\n"
    assert (root / "etc/b").read_text() == "another"
    assert drift(root, "--repair", "/etc/b") == 0
    assert (root / "etc/b").read_text() == "b"
    assert drift(root, "--repair", "/etc/b") == 64
    assert "cannot repair /etc/b: it has not drifted" in capsys.readouterr().err


@pytest.mark.process
def test_drift_of_directory_that_was_never_booted_asks_no_bus(root: Path) -> None:
    (root / "proc/cmdline").unlink()
    program = (
        "import sys; from treenail.cli.node.main import main; "
        "print(main(['drift', '--root', sys.argv[1]]), 'gi' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.splitlines() == [
        "no drift: the machine matches rendered-a",
        "0 False",
    ]


def test_drift_without_recorded_config_fails_with_remedy(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "var/lib/treenail/configs/rendered-a.json").unlink()
    assert drift(root) == 1
    Ledger(Root(root)).write_document(to_json(LedgerRecord()))
    (root / "var/lib/treenail/once.json").unlink()
    assert drift(root) == 1
    printed = capsys.readouterr().err
    assert "this machine stores no copy of rendered-a" in printed
    assert "no config of this machine is recorded" in printed


def test_drift_of_directory_compares_with_config_of_once(
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
    assert capsys.readouterr().out == "no drift: the machine matches the config of treenail once\n"
    (root / "etc/a").unlink()
    (root / "etc/b").write_text("c")
    assert drift(root) == 3
    assert capsys.readouterr().out == (
        "/etc/a: expected kind file, found nothing (blocks updates)\n"
        "/etc/b: contents differ (blocks updates)\n"
        "    @@ -1,1 +1,1 @@\n"
        "    -b\n"
        "    +c\n"
    )
    assert drift(root, "--repair", "/etc/a", "/etc/b") == 0
    assert ((root / "etc/a").read_text(), (root / "etc/b").read_text()) == ("a", "b")


def test_drift_ignores_what_once_skipped(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "etc").mkdir(parents=True)
    file = tmp_path / "file"
    spec = {"kernelArguments": ["quiet"], "extensions": ["usbguard"]}
    file.write_text(json.dumps({"kind": "MachineConfig", "metadata": {"name": "a"}, "spec": spec}))
    assert main(["once", "--root", str(root), str(file)]) == 0
    assert drift(root) == 0


def test_once_config_is_private_and_damage_is_reported(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(Root(root)).write_document(to_json(LedgerRecord()))
    copy = root / "var/lib/treenail/once.json"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert drift(root) == 0
    copy.write_text("{")
    assert drift(root) == 1
    assert capsys.readouterr().err == (
        "treenail: cannot read /var/lib/treenail/once.json: "
        "expected the config of the last treenail once\n"
        "  write it again: treenail once FILE\n"
    )


def test_drift_of_unbooted_tree_ignores_kernel_arguments(root: Path) -> None:
    (root / "proc/cmdline").unlink()
    assert drift(root) == 0


def test_drift_repair_of_booted_state_is_rejected(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(root, config("rendered-a", kernelArguments=["nosmt"]))
    assert drift(root) == 3
    assert drift(root, "--repair", "kernel command line") == 64
    printed = capsys.readouterr().err
    assert "cannot repair kernel command line: only a reboot changes it" in printed
    assert "touch /run/machine-config-daemon-force" in printed
