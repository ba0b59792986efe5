"""``treenail plan`` of two files, as a person and as a program reads it."""

import io
import json
from pathlib import Path

import pytest

from tests.fixtures.terminal import Terminal
from treenail.cli.node.main import main
from treenail.cli.output import GREEN, RESET
from treenail.cli.output_format import API_VERSION
from treenail.cli.terminal import create_painter

OLD = """\
kind: MachineConfig
metadata: {name: rendered-worker-a}
spec:
  kernelArguments: [quiet]
  config:
    ignition: {version: 3.4.0}
    storage:
      files:
      - {path: /etc/chrony.conf, contents: {source: "data:,pool%20a%0Amakestep%201%203%0A"}}
"""
NEW = """\
kind: MachineConfig
metadata:
  name: rendered-worker-b
  annotations:
    treenail.io/provenance:
      '{"sources":["99-chrony"],"entries":{"files":{"/etc/chrony.conf":[0]}}}'
spec:
  config:
    ignition: {version: 3.4.0}
    storage:
      files:
      - {path: /etc/chrony.conf, contents: {source: "data:,pool%20b%0Amakestep%201%203%0A"}}
"""
PLAN = """\
rendered-worker-a -> rendered-worker-b

~ kernelArguments
    - quiet
~ file /etc/chrony.conf
    @@ -1,2 +1,2 @@
    -pool a
    +pool b
     makestep 1 3

The node must drain and reboot:
  drain and reboot, because
    file /etc/chrony.conf changed (no policy for this path), from MachineConfig 99-chrony
    kernelArguments changed (part of the operating system)
"""
POLICY = """\
kind: MachineConfiguration
spec:
  nodeDisruptionPolicy:
    files:
    - path: /etc/chrony.conf
      actions: [{type: Restart, restart: {serviceName: chronyd.service}}]
"""


def given(folder: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [str(folder / name) for name in texts]


def test_plan_prints_differences_and_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *given(tmp_path, old=OLD, new=NEW)]) == 3
    assert capsys.readouterr().out == PLAN


def test_plan_json_lists_changes_and_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--json", *given(tmp_path, old=OLD, new=NEW)]) == 3
    assert json.loads(capsys.readouterr().out) == {
        "apiVersion": API_VERSION,
        "kind": "UpdatePlan",
        "old": "rendered-worker-a",
        "new": "rendered-worker-b",
        "changes": [
            {
                "kind": "kernelArguments",
                "name": "",
                "change": "changed",
                "details": ["- quiet"],
                "diffs": [],
            },
            {
                "kind": "file",
                "name": "/etc/chrony.conf",
                "change": "changed",
                "details": [],
                "diffs": [
                    {
                        "path": "/etc/chrony.conf",
                        "lines": ["@@ -1,2 +1,2 @@", "-pool a", "+pool b", " makestep 1 3"],
                        "note": "",
                    }
                ],
            },
        ],
        "actions": [
            {
                "action": "drain and reboot",
                "reasons": [
                    {
                        "subject": "file /etc/chrony.conf changed",
                        "rule": "no policy for this path",
                        "source": "MachineConfig 99-chrony",
                    },
                    {
                        "subject": "kernelArguments changed",
                        "rule": "part of the operating system",
                        "source": "",
                    },
                ],
            }
        ],
        "harmless": [],
        "drains": True,
        "reboots": True,
        "obstacles": [],
        "steps": [],
        "inImage": [],
        "notes": [],
    }


def test_plan_with_policy_file_applies_its_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = given(tmp_path, old=OLD.replace("[quiet]", "[]"), new=NEW, policy=POLICY)
    assert main(["plan", "--policy", files[2], *files[:2]]) == 2
    printed = capsys.readouterr().out
    assert "The node stays in service:\n  restart chronyd.service, because\n" in printed


def test_plan_refuses_objects_of_another_kind_or_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = given(
        tmp_path,
        old=OLD,
        new=NEW,
        other="kind: MachineConfigPool\n",
        version="apiVersion: machineconfiguration.openshift.io/v2\nkind: MachineConfig\n",
    )
    old, new, other, version = names
    for arguments, text in (
        ([old, other], "expected a MachineConfig or an Ignition config, found neither"),
        ([old, version], "expected apiVersion machineconfiguration.openshift.io/v1, found machine"),
        (
            ["--policy", other, old, new],
            "expected kind MachineConfiguration, found MachineConfigPo",
        ),
    ):
        assert main(["plan", *arguments]) == 1
        assert text in capsys.readouterr().err


def test_plan_exit_code_reports_disruption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, bad, fips = given(
        tmp_path,
        old=OLD,
        new=NEW,
        bad="kind: ConfigMap\n",
        fips=NEW.replace("spec:", "spec:\n  fips: true"),
    )
    assert main(["plan", old, old]) == 0
    assert main(["plan", old, fips]) == 1
    assert main(["plan", old, bad]) == 1
    assert main(["plan", old, f"{new}x"]) == 64
    assert main(["plan", "-", "-"]) == 64
    with pytest.raises(SystemExit, match="64"):
        main(["plan", old, new, "--colour"])
    assert "Traceback" not in capsys.readouterr().err


def test_colours_depend_on_terminal_and_environment() -> None:
    assert create_painter(Terminal(), {"TERM": "xterm"})("a", "+") == f"{GREEN}a{RESET}"
    assert create_painter(Terminal(), {"TERM": "xterm"})("a", " ") == "a"
    assert create_painter(Terminal(), {"TERM": "dumb"})("a", "+") == "a"
    assert create_painter(Terminal(), {"NO_COLOR": "1"})("a", "+") == "a"
    assert create_painter(io.StringIO(), {"TERM": "xterm"})("a", "+") == "a"
