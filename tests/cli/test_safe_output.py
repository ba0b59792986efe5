"""Control characters from outside never reach the terminal, by no command."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from tests.fixtures.clusters import open_lab
from tests.fixtures.terminal import Terminal
from treenail.api import annotations as key
from treenail.cli.controller.main import create_parser as create_controller_parser
from treenail.cli.controller.main import main as controller_main
from treenail.cli.node.main import create_parser, main
from treenail.cli.output import GREEN, RESET, GuardedStream, guard_output
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.state_file import Ledger
from treenail.kube.resources import MACHINECONFIGPOOLS, NODES
from treenail.sanitize import escape_line, escape_text
from treenail.update.state.ledger_record import (
    LedgerRecord,
    PastUpdate,
    Phase,
    QuarantinedTarget,
    Target,
    UpdateOutcome,
    UpdateRecord,
    to_json,
)

# Clear the screen, set the title, overwrite the line, reorder it, and the one-byte CSI.
CANARY = "can\x1b[2Jary\x1b]0;t\x07\rx\u202ey\u2066z\x9b1m\x7f"
TRACE = r"can\u001b[2Jary"
NODE_COMMANDS = {
    "cancel": [],
    "collect": ["-o", "/none/" + CANARY],
    "drift": [],
    "firstboot": ["--config", CANARY],
    "handback": [CANARY],
    "history": [],
    "hosted": ["--node-name", CANARY, "--root-mount", f"/none/{CANARY}"],
    "once": [CANARY],
    "plan": ["OLD", "NEW"],
    "retry": [],
    "run": ["--config", CANARY],
    "status": [],
    "why": [],
}
CONTROLLER_COMMANDS = {
    "build": ["-f", "POOL", "--pool", CANARY],
    "hosted": ["release", "--configs", CANARY, "--images", CANARY],
    "ignition": ["--from", CANARY, "--pool", "worker"],
    "install": ["prepare", "--dir", CANARY],
    "machines": ["--kubeconfig", CANARY],
    "manifests": ["--image", CANARY],
    "plan": ["-f", "POOL"],
    "render": ["-f", "POOL"],
    "rollout": ["status", CANARY],
    "run": ["--enable", "render", "--kubeconfig", CANARY, "--no-leader-election"],
    "serve": ["--certificate", CANARY, "--key", CANARY],
    "status": ["--kubeconfig", CANARY],
    "token": ["user-data", "--pool", "worker", "--server", "https://x", "--token-file", CANARY],
    "trust": ["--signing-key", CANARY, "registry.example.com/os/node"],
    "uninstall": ["--kubeconfig", CANARY],
}
DIRECTORY = f"directory-{CANARY}"
SUBCOMMANDS = {
    "hosted release": ["--configs", DIRECTORY, "--images", f"/none/{CANARY}"],
    "install bootstrap": ["--dir", f"/none/{CANARY}"],
    "install gather": ["--dir", f"/none/{CANARY}"],
    "install image": ["--dir", f"/none/{CANARY}", "--pool", CANARY, "--output", CANARY],
    "install plan": ["--dir", DIRECTORY],
    "install prepare": ["--dir", DIRECTORY, "--offline"],
    "install reset": ["--dir", f"/none/{CANARY}"],
    "install wait-for": ["bootstrap-complete", "--dir", DIRECTORY, "--timeout", "1s"],
    "rollout status": [CANARY],
    "token create": ["--pool", "worker"],
    "token list": [],
    "token revoke": [CANARY],
    "token user-data": ["--pool", "worker", "--server", "https://x", "--token-file", CANARY],
}
"""KUBECONFIG names the canary too."""


def commands_of(parser: argparse.ArgumentParser) -> set[str]:
    return set(subparsers_of(parser))


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [each for each in parser._actions if isinstance(each.choices, dict)]
    return dict(found[0].choices or {}) if found else {}  # type: ignore[arg-type]


def assert_escaped(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    text = captured.out + captured.err
    bad = {char for char in text if not char.isprintable() and char not in "\n\t"}
    assert not bad
    return text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine whose ledger, status and config contain the canary wherever text can be."""
    root = tmp_path / "root"
    old, new = Target(f"old-{CANARY}"), Target(f"new-{CANARY}", f"q.example/os:{CANARY}")
    record = LedgerRecord(
        old,
        UpdateRecord("1" * 32, new, old, Phase.DRAINING, "boot", 1.7e9, 1.7e9),
        history=(
            PastUpdate(
                "0" * 32, old, new, 1.6e9, 1.6e9, UpdateOutcome.FAILED,
                reasons=(CANARY,), failure=CANARY,
            ),
        ),
        quarantined=QuarantinedTarget(new, CANARY, CANARY),
    )  # fmt: skip
    root.mkdir()
    Ledger(Root(root)).write_document(to_json(record))
    live = {"node": CANARY, "activity": CANARY, "drift": [CANARY], "credentials": [CANARY]}
    (root / "run/treenail").mkdir(parents=True)
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("boot\n")
    (root / "run/treenail/status.json").write_text(json.dumps(live))
    for name in ("OLD", "NEW"):
        unit = {"name": f"{name}{CANARY}.service", "contents": f"# {name} {CANARY}\n"}
        config = {"ignition": {"version": "3.5.0"}, "systemd": {"units": [unit]}}
        document = {
            "kind": "MachineConfig",
            "metadata": {"name": f"{name}-{CANARY}"},
            "spec": {"config": config, "kernelArguments": [f"{name}={CANARY}"]},
        }
        (tmp_path / name).write_text(json.dumps(document))
    pool = {
        "apiVersion": MACHINECONFIGPOOLS.api_version,
        "kind": "MachineConfigPool",
        "metadata": {"name": CANARY},
        "spec": {"paused": CANARY},
    }
    (tmp_path / "POOL").write_text(json.dumps(pool))
    return root


@pytest.fixture(autouse=True)
def _no_bus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/none")
    monkeypatch.setenv("KUBECONFIG", f"/none/{CANARY}")
    monkeypatch.chdir(tmp_path)


def test_every_command_is_tested() -> None:
    assert commands_of(create_parser()) == set(NODE_COMMANDS)
    assert commands_of(create_controller_parser()) == set(CONTROLLER_COMMANDS)


@pytest.mark.parametrize("command", NODE_COMMANDS)
@pytest.mark.process
def test_node_command_escapes_text_from_outside(
    command: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([command, "--root", str(root), *NODE_COMMANDS[command]])
    assert TRACE in assert_escaped(capsys)


@pytest.mark.parametrize("command", CONTROLLER_COMMANDS)
def test_controller_command_escapes_text_from_outside(
    command: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    controller_main([command, *CONTROLLER_COMMANDS[command]])
    text = assert_escaped(capsys)
    # The YAML has escapes of its own.
    assert command == "manifests" or TRACE in text


def test_every_subcommand_is_tested() -> None:
    commands = subparsers_of(create_controller_parser())
    assert set(SUBCOMMANDS) == {
        f"{name} {each}" for name, parser in commands.items() for each in subparsers_of(parser)
    }


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_subcommand_escapes_text_from_outside(
    command: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / DIRECTORY
    (directory / "manifests").mkdir(parents=True)
    (directory / ".treenail").mkdir()
    (directory / ".treenail" / "install.json").write_text(json.dumps({CANARY: CANARY}))
    mode = {"enabled": True, "pools": [{"name": CANARY, "containerFile": CANARY}], CANARY: CANARY}
    for name in ("install-config.yaml", "treenail-install.yaml"):
        (directory / name).write_text(json.dumps({"imageMode": mode, CANARY: CANARY}))
    (directory / "manifests" / "pool.yaml").write_text((tmp_path / "POOL").read_text())
    controller_main([*command.split(), *SUBCOMMANDS[command]])
    assert "ary" in assert_escaped(capsys)


def test_invalid_argument_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    for run in (main, controller_main):
        with pytest.raises(SystemExit):
            run([CANARY])
        assert "ary" in assert_escaped(capsys)


def test_annotations_of_nodes_and_pools_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_lab(tmp_path / "api") as (server, client):
        named = {"apiVersion": MACHINECONFIGPOOLS.api_version, "kind": "MachineConfigPool"}
        selector = {"matchLabels": {"pool": "worker"}}
        client.create(
            MACHINECONFIGPOOLS,
            {**named, "metadata": {"name": "worker"}, "spec": {"nodeSelector": selector}},
        )
        degraded = {"type": "Degraded", "status": "True", "reason": "x", "message": CANARY}
        client.patch(
            MACHINECONFIGPOOLS, "worker", {"status": {"conditions": [degraded]}},
            subresource="status",
        )  # fmt: skip
        notes = dict.fromkeys((key.STATE, key.REASON, key.CURRENT_CONFIG), CANARY)
        metadata = {"name": "n0", "labels": {"pool": "worker"}, "annotations": notes}
        client.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        for more in ([], ["--json"]):
            arguments = ["status", "--kubeconfig", str(server.admin_kubeconfig), *more]
            assert controller_main(arguments) == 0
            # Annotations of nodes are escaped when they are read, and again in JSON.
            assert assert_escaped(capsys).replace("\\\\", "\\").count(TRACE) >= 4


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_only_marks_become_colours(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{GREEN}a\x1b[31mb{RESET}\n"
    GuardedStream(terminal).write(text)
    assert terminal.getvalue() == "\x1b[32ma\\u001b[31mb\x1b[0m\n"
    with guard_output():
        sys.stdout.write(text)
    assert assert_escaped(capsys) == "\\ufdd0a\\u001b[31mb\\ufdd5\n"
    monkeypatch.setenv("NO_COLOR", "1")
    dull = Terminal()
    GuardedStream(dull).write(text)
    assert "\x1b" not in dull.getvalue()


def test_escapes_keep_lines_and_json() -> None:
    assert escape_text("a\tb\nc é …") == "a\tb\nc é …"
    assert escape_text("\udc80 \U000e0001 \x00") == r"\udc80 \U000e0001 \u0000"
    assert escape_line("a\nb\tc\x1b") == r"a\nb\tc\u001b"
    assert json.loads(escape_text(json.dumps({"a": CANARY}))) == {"a": CANARY}
