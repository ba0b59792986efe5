"""Values of ``desiredDrain``, with which the agent requests a drain and an uncordon."""

_DRAIN, _UNCORDON, _AGAIN = "drain-", "uncordon-", ".again-"
_MAX_DIGITS = 9


def make_drain_token(config: str, previous: str) -> str:
    """Return a token that requests a drain and differs from ``previous``."""
    return _make_token(_DRAIN + config, previous)


def make_uncordon_token(config: str, applied: str) -> str:
    """Return a token that requests the uncordon and differs from ``applied``.

    A drain that was cancelled before it was complete leaves the uncordon before it as the last
    applied request. The drain controller would take the same token for that one.
    """
    return _make_token(_UNCORDON + config, applied)


def is_drain_token(token: str) -> bool:
    """Return whether the token requests a drain."""
    return token.startswith(_DRAIN)


def read_drain_config(token: str) -> str:
    """Return the config of a token that requests a drain."""
    config = token.removeprefix(_DRAIN)
    before, found, count = config.rpartition(_AGAIN)
    return before if found and count.isdecimal() else config


def _make_token(plain: str, previous: str) -> str:
    # The MCO's drain controller reads the verb before the first hyphen and compares the whole
    # value with lastAppliedDrain, so the suffix makes it act again.
    again = plain + _AGAIN
    if previous == plain:
        return f"{again}1"
    if not previous.startswith(again):
        return plain
    count = previous.removeprefix(again)
    # Other clients can write the annotation, too.
    is_number = count.isascii() and count.isdecimal() and len(count) <= _MAX_DIGITS
    return f"{again}{int(count) + 1 if is_number else 1}"
