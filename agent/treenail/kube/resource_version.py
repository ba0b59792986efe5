"""Comparison of resource versions of the same object, or of the same kind."""

_MAX_DIGITS = 20


def is_older_version(version: str, other: str) -> bool:
    """Return whether ``version`` is older; False when one is no number.

    Opaque to clients, but integers that can be compared in kube-apiserver (KEP-5504).
    """
    is_number = all(
        each.isascii() and each.isdigit() and len(each) <= _MAX_DIGITS for each in (version, other)
    )
    return is_number and int(version) < int(other)
