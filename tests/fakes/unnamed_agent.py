"""The agent without ``--node-name``; a command to be run in place of ``treenail run``."""

import sys

from treenail.cli.node.main import main

if __name__ == "__main__":
    place = sys.argv.index("--node-name")
    sys.exit(main(["run", *sys.argv[1:place], *sys.argv[place + 2 :]]))
