"""The last committed figures, docs/records/bench.json: compare with them, replace them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

COMMITTED = Path(__file__).parent.parent / "docs" / "records" / "bench.json"

Record = Mapping[str, object]
"""What bench/run.py writes for one figure; ``key`` identifies it."""


def read_committed(path: Path = COMMITTED) -> dict[str, Record]:
    """Return the committed figures by key; none without the file."""
    if not path.exists():
        return {}
    return {str(each["key"]): each for each in json.loads(path.read_text())}


def write_committed(records: Sequence[Record], path: Path = COMMITTED) -> None:
    """Replace the figures of the measured modules, and keep those of the others."""
    measured = {each["module"] for each in records}
    kept = [each for each in read_committed(path).values() if each["module"] not in measured]
    path.write_text(json.dumps(_sort([*kept, *records]), indent=1) + "\n")


def compare(record: Record, committed: Mapping[str, Record]) -> float | None:
    """Return how many times the committed figure this one is.

    Ratios to the baseline are compared where both have one, otherwise the values. None without a
    committed figure, or if one of the two is 0.
    """
    before = committed.get(str(record["key"]))
    if before is None:
        return None
    for field in ("ratio", "value"):
        now, then = record.get(field), before.get(field)
        if isinstance(now, int | float) and isinstance(then, int | float):
            return now / then if then and now else None
    return None


def _sort(records: Iterable[Record]) -> list[Record]:
    # Stable: the figures of a module stay in their order.
    return sorted(records, key=lambda each: str(each["module"]))
