"""What the Go implementation answered; the tests that compare with it skip where it is absent."""

import json
import os
from pathlib import Path

import pytest

ORACLE = Path(
    os.environ.get("TREENAIL_ORACLE", Path(__file__).parents[2].parent / "shared" / "oracle")
)


def records(kind: str) -> list[dict[str, object]]:
    """The recorded calls of one function: inputs and outputs."""
    path = ORACLE / f"{kind}.jsonl"
    if not path.is_file():
        pytest.skip("no recorded data of the Go implementation")
    return [json.loads(line)["data"] for line in path.read_text().splitlines()]


def render_cases() -> list[dict[str, object]]:
    """The render inputs of this project with the Go implementation's answers."""
    path = ORACLE / "render_cases.json"
    if not path.is_file():
        pytest.skip("no recorded data of the Go implementation")
    return list(json.loads(path.read_text()))


def rendered() -> list[Path]:
    """The rendered MachineConfigs that a Go bootstrap wrote."""
    found = sorted((ORACLE / "bootstrap" / "output" / "machine-configs").glob("*.yaml"))
    if not found:
        pytest.skip("no recorded data of the Go implementation")
    return found
