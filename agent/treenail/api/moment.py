"""RFC 3339 times, as they are read from annotations."""

from datetime import datetime


def parse_rfc3339(text: str) -> float | None:
    """The time in seconds since the epoch, None when the text is none."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo else None
