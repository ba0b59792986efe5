"""Numbers in options."""

import argparse


def parse_count(text: str) -> int:
    """Return a number from 1; raise `argparse.ArgumentTypeError`."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a number from 1, found {text!r}")
    return int(text)
