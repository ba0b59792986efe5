"""Arguments that the commands of an installation share."""

import argparse
from pathlib import Path


def add_directory_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the install directory."""
    parser.add_argument(
        "--dir",
        dest="directory",
        metavar="DIR",
        type=Path,
        default=Path(),
        help="the install directory (default: the current directory)",
    )
