"""Recorded answers of the Go implementation; tests that read them skip when they are absent."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

_REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = Path(os.environ.get("TREENAIL_ORACLE") or _REPOSITORY.parent / "shared" / "oracle")
DATA = Path(__file__).resolve().parent / "data"

needs_oracle = pytest.mark.skipif(
    not ROOT.is_dir(), reason="TREENAIL_ORACLE names no directory of recorded decisions"
)


def records(kind: str) -> list[dict[str, Any]]:
    """The inputs and outputs of one function of the reference; none when there are no records."""
    path = ROOT / f"{kind}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["data"] for line in path.read_text(encoding="utf-8").splitlines()]


def render_cases() -> list[dict[str, Any]]:
    """Inputs of ours and the bytes that Go hashed for them."""
    cases: list[dict[str, Any]] = json.loads((DATA / "render_cases.json").read_text("utf-8"))
    return cases


def rendered() -> list[Path]:
    """The rendered MachineConfigs that a bootstrap of the reference wrote."""
    return sorted((ROOT / "bootstrap" / "output" / "machine-configs").glob("*.yaml"))
