"""Durations in options, such as ``45s``, ``1h30m`` or ``7d``."""

import argparse
import re

_DURATION = re.compile(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")


def parse_duration(text: str) -> float:
    """Return the seconds of a duration; raise `argparse.ArgumentTypeError`."""
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        raise argparse.ArgumentTypeError(
            f"expected a time such as 30m or 1h30m, found {text!r:.80}"
        )
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups())
    return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)
