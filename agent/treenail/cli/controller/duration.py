"""Durations in options, such as ``45s``, ``30m`` or ``1h30m``."""

import argparse
import re

_DURATION = re.compile(r"(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")


def parse_duration(text: str) -> float:
    """Return the seconds of a duration; raise `argparse.ArgumentTypeError`."""
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        raise argparse.ArgumentTypeError(
            f"expected a time such as 30m or 1h30m, found {text!r:.80}"
        )
    hours, minutes, seconds = (int(each or 0) for each in found.groups())
    return float(hours * 3600 + minutes * 60 + seconds)
