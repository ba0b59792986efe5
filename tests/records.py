"""Records of what a suite of tests proved; `make reports` writes docs/what-it-survives.md of them.

A record is written only where ``TREENAIL_RECORDS`` names a directory:

    make test-long ARGS=tests/crash TREENAIL_RECORDS=docs/records
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from tools.revision import find_revision

VARIABLE = "TREENAIL_RECORDS"


def write_record(
    suite: str,
    *,
    what: str,
    result: str,
    command: str,
    count: int | None = None,
    details: Mapping[str, object] | None = None,
) -> None:
    """Record what was tried, how often, and what came out; replace the record of the same `what`.

    ``count`` is the number of cases that really ran, ``command`` repeats them, ``details`` are more
    fields. Does nothing unless the environment names a directory for records.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    record = {
        "what": what,
        "count": count,
        "result": result,
        "command": command,
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "revision": find_revision(),
        **(details or {}),
    }
    path = Path(folder) / f"{suite}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        # Tests run in parallel.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        others = [each for each in json.loads(text or "[]") if each["what"] != what]
        records = sorted([*others, record], key=lambda each: str(each["what"]))
        file.truncate(0)
        file.write(json.dumps(records, indent=1) + "\n")
