"""The MachineConfigs that only the MCO or only treenail renders, each with the MCO's answer.

``go`` in ``tests/data/render_differences.jsonl`` is the hash in the name that the MCO's render
controller computed, or null where it rejected the pool. ``before`` makes the current config.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_random_configs import render
from tests.oracle import DATA
from treenail.errors import ConfigError

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "machine-configs.md"
RECORDED: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "render_differences.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: record["name"])
def test_difference_is_as_documented(record: dict[str, Any]) -> None:
    current = render(record["before"]) if "before" in record else None
    if record["go"]:
        with pytest.raises(ConfigError, match=r"MachineConfig 1: |ignition proxy section"):
            render(record["configs"], current)
        return
    assert render(record["configs"], current).name.startswith("rendered-infra-")


def test_document_lists_every_difference() -> None:
    section = DOCUMENT.read_text("utf-8").partition("## Equal names")[2]
    rejected, _, rest = section.partition("### Rendered by treenail")
    rendered = rest.partition("\n## ")[0]
    for part, is_rejected in ((rejected, True), (rendered, False)):
        rows = set(re.findall(r"^\| ([a-z ]+) \|", part, re.MULTILINE))
        names = {record["name"] for record in RECORDED if bool(record["go"]) is is_rejected}
        assert rows == {"difference", *names}
