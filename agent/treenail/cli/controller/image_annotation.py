"""The argument ``--image-annotation``, which several commands have."""

import argparse


def add_image_annotation_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument."""
    parser.add_argument(
        "--image-annotation", choices=("desiredOSImage", "desiredImage"), default="desiredOSImage",
        help="assign images to nodes with this annotation (default: %(default)s)",
    )  # fmt: skip
