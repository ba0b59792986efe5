"""``python -m treenail``."""

import sys

from treenail.cli.main import main

sys.exit(main())
