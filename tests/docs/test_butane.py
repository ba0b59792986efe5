"""The Butane config of the guide to kubeadm: Ignition that the product's own parser accepts.

Where TREENAIL_TEST_BUTANE names a program, its translation equals the one made here.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.docs.guide import FILE, read_guide
from tests.docs.lab_actions import GUIDES
from treenail.api.documents import load_document
from treenail.api.ignition.parser import parse_ignition

BUTANE = os.environ.get("TREENAIL_TEST_BUTANE", "")
IGNITION_VERSION = {"1.5.0": "3.4.0"}
"""The version that Butane translates a version of its own into (Butane's docs/specs.md)."""


def read_butane() -> str:
    guide = read_guide(GUIDES / "kubeadm-fedora-coreos.md")
    (text,) = (step.text for step in guide if step.kind == FILE and step.argument == "node.bu")
    return text


def translate_butane(text: str) -> dict[str, Any]:
    """Translate the few fields that the guide uses."""
    found: Any = load_document(text.encode(), where="node.bu")
    return {
        "ignition": {"version": IGNITION_VERSION[found["version"]]},
        "passwd": {
            "users": [
                {"name": user["name"], "sshAuthorizedKeys": user["ssh_authorized_keys"]}
                for user in found["passwd"]["users"]
            ]
        },
        "storage": {
            "files": [
                {
                    "path": file["path"],
                    "mode": file["mode"],
                    "contents": {"source": f"data:,{quote(file['contents']['inline'])}"},
                }
                for file in found["storage"]["files"]
            ]
        },
        "systemd": {"units": found["systemd"]["units"]},
    }


def test_butane_config_of_guide_is_read_by_own_parser() -> None:
    parsed = parse_ignition(translate_butane(read_butane()))
    assert [file.path for file in parsed.files] == ["/etc/treenail/agent.toml", "/etc/node-image"]


@pytest.mark.skipif(not BUTANE, reason="TREENAIL_TEST_BUTANE is not set")
def test_butane_translates_config_of_guide_as_expected(tmp_path: Path) -> None:
    config = tmp_path / "node.bu"
    config.write_text(read_butane(), encoding="utf-8")
    done = subprocess.run(
        [BUTANE, "--strict", str(config)], capture_output=True, text=True, check=True, timeout=30.0
    )
    document = json.loads(done.stdout)
    assert list_contents(document) == list_contents(translate_butane(read_butane()))
    assert document["systemd"] == translate_butane(read_butane())["systemd"]


def list_contents(config: dict[str, Any]) -> list[tuple[str, int | None, bytes]]:
    """Return path, mode and contents of each file; Butane may compress the contents."""
    files = parse_ignition(config).files
    return [(each.path, each.mode, each.contents.decode_bytes()) for each in files]
