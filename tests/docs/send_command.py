"""Sends a command to the lab of the guides; it imports no package, because guides run it often.

python send_command.py SOCKET COMMAND [WORD …]
"""

import json
import socket
import sys


def main(path: str, *command: str) -> int:
    """Print the output of the command, and return its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(command).encode() + b"\n")
        answer = json.loads(connection.makefile("rb").readline())
    if "error" in answer:
        sys.stderr.write(f"{answer['error']}\n")
        return 1
    result = json.loads(answer["result"])
    if result["output"]:
        sys.stdout.write(f"{result['output']}\n")
    code: int = result["code"]
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
