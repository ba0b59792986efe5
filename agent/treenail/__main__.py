"""``python -m treenail``."""

import sys

from treenail.cli.entry import run_treenail

sys.exit(run_treenail())
