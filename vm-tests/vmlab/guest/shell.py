"""Runs what the host asks for by a virtio port: one JSON document a line, one answer a line."""

import json
import subprocess
import sys
from pathlib import Path

PORT = Path("/dev/virtio-ports/treenail.shell")
_TIMED_OUT = 124
"""As of timeout(1)."""


def main() -> int:
    """Answer for ever."""
    with PORT.open("r+b", buffering=0) as port:
        pending = b""
        while True:
            pending += port.read(65536) or b""
            *lines, pending = pending.split(b"\n")
            for line in filter(None, lines):
                answer = memoryview(json.dumps(_answer(line)).encode() + b"\n")
                while answer:
                    answer = answer[port.write(answer) :]


def _answer(line: bytes) -> dict[str, object]:
    try:
        order = json.loads(line)
    except ValueError:
        return {"id": -1, "code": -1, "output": "not JSON"}  # left over from a host that went
    try:
        done = subprocess.run(
            ["sh", "-c", order["command"]],
            input=order.get("stdin", ""),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=order["limit_s"],
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return {"id": order["id"], "code": _TIMED_OUT, "output": str(error)}
    return {"id": order["id"], "code": done.returncode, "output": done.stdout}


if __name__ == "__main__":
    sys.exit(main())
